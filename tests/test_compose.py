"""A configuration's step: the order of its transforms, and that each of them survives a rebuild."""

import jax
import numpy as np
import optax
import pytest

from jaxtrain import load_config
from jaxtrain.training import compose as composition
from jaxtrain.training import layouts
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.compose import compose

MESH = ["Mesh.data = 2", "Mesh.fsdp = 2", "Mesh.tensor = 1", "Train.global_batch_size = 8"]
TINY = ["Train.accumulation = 2", "Train.steps = 4", "Precision.compute = 'float32'"]
# One setting of each transform, from the innermost on.
SETTINGS = {
    "estimate_curvature": ["Optimizer.name = 'sophia_h'"],
    "offload_to_host": ["Offload.parameters = 'host'"],
    "offload_to_disk": ["Offload.optimizer_state = 'disk'"],
    "balance_experts": [],
    "minimize_sharpness": ["Optimizer.sharpness_radius = 0.05"],
    "measure_noise": ["Train.noise_scale_every = 1"],
    "guard_update": ["Guard.policy = 'skip'", "Guard.spike_sigma = 6.0"],
    "agree": ["Exchange.method = 'local_sgd'"],
    "stream_fragments": ["Exchange.method = 'diloco'", "Exchange.period = 2", "Exchange.delay = 1"],
    "compress_gradients": ["Exchange.method = 'int8'"],
    "delay_gradients": ["Exchange.method = 'asynchronous'"],
}


def configured(tiny_config, *bindings: str):
    return load_config(tiny_config, bindings=[*TINY, *MESH, *bindings])


def composed(config):
    return compose(config, layouts.layout(config, jax.devices()[:4]))


def lowered(step, config) -> str:
    batch = config.train.data.abstract_batch(config.train.global_batch_size)
    with step.setup.layout.active():
        return CompiledStep(step).lower(batch).as_text()


def test_each_transform_is_inside_of_those_that_see_its_step(tiny_config):
    config = configured(tiny_config, *SETTINGS["estimate_curvature"], *SETTINGS["agree"])
    parts = [optax.identity()], [optax.identity()]
    order = [make().__name__ for _, make in composition._transforms(config, parts, None)]
    # A wrong order does not fail: sharpness inside of the offload moves rounded copies of the
    # parameters, and a guard inside of sharpness judges the gradient that is not taken.
    assert order == [name for name in SETTINGS if name not in _EXCHANGES]


def _of_zeros_and_ones(x: jax.ShapeDtypeStruct) -> np.ndarray:
    return (np.arange(x.size).reshape(x.shape) % 3 % 2).astype(x.dtype)


_EXCHANGES = ("stream_fragments", "compress_gradients", "delay_gradients")


@pytest.fixture(scope="module")
def plain(tiny_config) -> str:
    """The step without any of them."""
    config = configured(tiny_config)
    return lowered(composed(config), config)


# The cases that are left run the same code.
# Either transform runs the same code.
@pytest.mark.slow_cases("estimate_curvature")
@pytest.mark.slow_cases(
    "offload_to_host",
    "minimize_sharpness",
    "measure_noise",
    "stream_fragments",
    "compress_gradients",
    "delay_gradients",
    "agree",
    "offload_to_disk",
)
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "balance_experts"])
def test_a_rebuilt_step_has_its_transform(name, tiny_config, plain):
    config = configured(tiny_config, *SETTINGS[name])
    step = composed(config)
    text = lowered(step, config)
    assert lowered(step.rebuild(), config) == text
    assert plain != text


# Two compiled steps; the order of transforms is checked above without compiling.
@pytest.mark.slow
def test_sharpness_moves_the_master_parameters_that_are_offloaded(tiny_config):
    """In bfloat16 the copies on the devices would be moved to other numbers."""
    radius = [*SETTINGS["minimize_sharpness"], "Precision.compute = 'bfloat16'"]
    found = []
    for offload in ([], SETTINGS["offload_to_host"]):
        config = configured(tiny_config, *radius, *offload)
        step = composed(config)
        batch = config.train.data.abstract_batch(config.train.global_batch_size)
        batch = jax.tree.map(_of_zeros_and_ones, batch)
        with step.setup.layout.active():
            placed = jax.device_put(batch, step.setup.batch_shardings(batch))
            state, metrics = CompiledStep(step)(step.create(0), placed)
        found.append((jax.device_get(state.params), float(metrics["sharpness"])))
    (on_devices, rise), (on_host, same) = found
    assert rise == same
    jax.tree.map(np.testing.assert_array_equal, on_devices, on_host)
