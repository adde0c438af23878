"""State in the memory of hosts: where it lies, that nothing else changes, and its bytes."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import compile_step, make_layout, needs_libtpu, text_batch, transformed
from conftest import make_step as make_plain
from flax import nnx
from test_optimizer_rules import KINDS

from jaxtrain.analysis.planning.compiled.compiled import lower, target_layout
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.analysis.planning.plan import plan
from jaxtrain.analysis.planning.textbook.memory import memory
from jaxtrain.analysis.planning.textbook.state_bytes import argument_bytes
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.nn.precision import Precision
from jaxtrain.parallel import gathering
from jaxtrain.parallel.gathering import is_pinned
from jaxtrain.parallel.sharding import is_variable
from jaxtrain.run.trainer import Trainer
from jaxtrain.run.weights import weights, with_weights
from jaxtrain.training.guard import Guard
from jaxtrain.training.layouts import abstract_layout
from jaxtrain.training.offload import Offload, on_host
from jaxtrain.training.offload.on_host import fetch_params, offload_to_host
from jaxtrain.training.offload.streaming import DEVICE, stream_update
from jaxtrain.training.optimizers.optimizer import Optimizer, chain, make_optimizer
from jaxtrain.training.optimizers.rule import rules
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config
from jaxtrain.training.step import Step

MODEL = GPT(vocab_size=64, num_layers=3, embed_dim=32, num_heads=4, context_length=16)
BATCH = text_batch(rows=8, length=16, vocab_size=64)
STATE, PARAMETERS = Offload(optimizer_state="host"), Offload(parameters="host")
BOTH = Offload(optimizer_state="host", parameters="host")
GRADIENTS = Offload(gradients="host")
ADAMW = Optimizer(learning_rate=1e-2)


# -- the update, one layer at a time ---------------------------------------------------------------

SHAPES = {
    "table": ((8, 4), ("vocab", "vocab_embed"), "embedding"),
    "up": ((3, 4, 8), ("layers", "embed", "mlp"), None),
    "qkv": ((3, 3, 4, 2, 2), ("layers", "qkv", "embed", "heads", "head_dim"), None),
    "scale": ((3, 4), ("layers", "vector"), "norm"),
    "last": ((4,), ("vector",), "norm"),
}
FAST = ("adamw", "adafactor")


def tree(seed: int) -> nnx.State:
    rng = np.random.default_rng(seed)
    return nnx.State(
        {
            name: nnx.Param(jnp.asarray(rng.normal(size=shape), jnp.float32), axes=axes, role=role)
            for name, (shape, axes, role) in SHAPES.items()
        }
    )


def after_three(rule: str, join: Any, **shared: Any) -> Any:
    """Updates and the state after three steps of a rule."""
    settings = Optimizer(rule=rules()[rule](), learning_rate=1e-2, clip_norm=0.5, **shared)
    optimizer: Any = make_optimizer(settings, optax.constant_schedule(1e-2), join)
    params = tree(0)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, gradients: Any, curvature: Any) -> Any:
        more = {"curvature": (jnp.array(True), curvature)} if "sophia" in rule else {}
        updates, state = optimizer.update(gradients, state, params, **more)
        return optax.apply_updates(params, updates), state

    for seed in range(1, 4):
        params, state = step(params, state, tree(seed), tree(seed + 10))
    return params, state


# A rule of each kind of state, and one whose steps have the size of a whole layer's parameters.
@pytest.mark.parametrize(
    "rule",
    [
        *FAST,
        *(pytest.param(r, marks=pytest.mark.slow) for r in (*KINDS, "lamb") if r not in FAST),
    ],
)
def test_a_layer_at_a_time_is_the_update_of_all(rule):
    shared = {"average_decay": 0.9, "moments": "bfloat16"} if rule == "adamw" else {}
    whole, layers = (after_three(rule, join, **shared) for join in (chain, stream_update))
    assert jax.tree.structure(whole) == jax.tree.structure(layers)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(whole), jax.tree.leaves(layers), strict=True
    ):
        name = jax.tree_util.keystr(path)
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6, err_msg=name)


# -- the whole step --------------------------------------------------------------------------------


def make_step(offload: Offload | None, zero: int = 3, **changes: Any) -> Step:
    join = stream_update if offload is not None and offload.optimizer_state == "host" else chain
    optimizer = make_optimizer(ADAMW, optax.constant_schedule(1e-2), join)
    layout = make_layout(zero, fsdp=2, tensor=2)
    program = make_plain(MODEL, layout, optimizer=optimizer, **changes)
    if offload is None:
        return program
    return transformed(program, offload_to_host(offload))


@functools.cache
def with_both() -> tuple[Any, list[float]]:
    return trained(make_step(BOTH))


def trained(program: Step, steps: int = 3) -> tuple[Any, list[float]]:
    step, state = compile_step(program, BATCH), program.create(0)
    batch = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
    losses = []
    with program.setup.layout.active():
        for _ in range(steps):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    return state, losses


@functools.cache
def never_offloaded(zero: int) -> tuple[Any, list[float]]:
    return trained(make_step(None, zero))


# tests/test_feature_compatibility.py has parameters on the host with other features.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("offload", "zero"), [(BOTH, 3), (BOTH, 1), (PARAMETERS, 2)],
    ids=["both, zero 3", "both, zero 1", "parameters, zero 2"],
)  # fmt: skip
def test_a_step_is_that_of_a_state_on_the_devices(offload, zero):
    of_both = (offload, zero) == (BOTH, 3)
    state, losses = with_both() if of_both else trained(make_step(offload, zero))
    plain, expected = never_offloaded(zero)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    for part, where in (("opt_state", offload.optimizer_state), ("params", offload.parameters)):
        for variable in jax.tree.leaves(getattr(state, part), is_leaf=is_variable):
            if is_variable(variable):
                assert is_pinned(variable.get_value().sharding) == (where == "host")
    found, wanted = (jax.device_get(x.params) for x in (state, plain))
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if "bias" not in name:  # a key's bias has a gradient of rounding errors alone
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_the_same_program_with_all_of_it_on_the_devices_gives_the_same_bits(monkeypatch):
    state, losses = with_both()
    monkeypatch.setattr(on_host, "pin_to_host", lambda sharding: sharding)
    on_devices, expected = trained(make_step(BOTH))
    assert not any(is_pinned(x.sharding) for x in jax.tree.leaves(on_devices))
    assert losses == expected
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(on_devices), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_that_go_there_as_they_are_made_are_the_same_bits(accumulation, monkeypatch):
    state, losses = trained(make_step(GRADIENTS, accumulation=accumulation))
    plain = trained(make_step(None, accumulation=accumulation))
    np.testing.assert_allclose(losses, plain[1], rtol=2e-6)
    for module in (on_host, gathering):
        monkeypatch.setattr(module, "HOST", DEVICE)
    on_devices, expected = trained(make_step(GRADIENTS, accumulation=accumulation))
    assert losses == expected
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(on_devices), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_a_bad_step_leaves_every_bit_of_it():
    program = make_step(BOTH, guard=Guard(policy="skip"))
    step, state = compile_step(program, BATCH), program.create(0)
    before = jax.device_get(state)
    bad = dataclasses.replace(BATCH, loss_mask=np.full_like(BATCH.loss_mask, np.nan))
    with program.setup.layout.active():
        state, metrics = step(state, jax.device_put(bad, program.setup.batch_shardings(bad)))
        assert metrics["bad"] == 1
        for a, b in zip(jax.tree.leaves(before.params), jax.tree.leaves(state.params), strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))
        kept = jax.tree.leaves(before.opt_state), jax.tree.leaves(state.opt_state)
        for a, b in zip(*kept, strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))
        good = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
        state, metrics = step(state, good)
    assert metrics["bad"] == 0
    assert np.any(np.asarray(jax.tree.leaves(state.params)[0]) != jax.tree.leaves(before.params)[0])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"average_decay": 0.9}, {"rule": rules()["schedule_free"]()}])
def test_what_is_evaluated_is_on_the_devices(settings):
    """Averages come from the hosts; new weights go there, and keep what is not theirs."""
    optimizer = make_optimizer(Optimizer(**settings), optax.constant_schedule(1e-2), stream_update)
    program = make_step(BOTH).rebuild(optimizer=optimizer)
    state = program.create(0)
    evaluated = program.eval_state(state)
    assert not any(is_pinned(x.sharding) for x in jax.tree.leaves(evaluated.params))
    same = zip(jax.tree.leaves(evaluated.params), jax.tree.leaves(state.params), strict=True)
    for a, b in same:  # no update was averaged yet
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)
    again = with_weights(program, state, weights(program, program.current_state(state)))
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# -- a run -----------------------------------------------------------------------------------------


def config_of(tiny_config: Path, steps: int, offload: Offload, **bindings: Any) -> Any:
    said = [f"Offload.{name} = {where!r}" for name, where in vars(offload).items()]
    said += [f"{name} = {value!r}" for name, value in bindings.items()]
    return load_config(
        str(tiny_config), [f"Train.steps = {steps}", "Schedule.name = 'constant'", *said]
    )


# Three runs; tests/test_resume.py goes on from other layouts in the fast part.
@pytest.mark.slow
def test_a_run_goes_on_with_and_without(tiny_config, tmp_path):
    """Two steps with, two more without: bits as they were saved, and the losses of one run."""
    alone = Trainer(config_of(tiny_config, 4, Offload()))
    alone.train()
    with_it = Trainer(config_of(tiny_config, 2, BOTH), tmp_path / "run")
    with_it.train()
    with_it.set_weights(with_it.weights())
    state = with_it.state
    assert all(is_pinned(x.sharding) for x in jax.tree.leaves(state.params))
    saved = jax.device_get((state.params, state.opt_state))
    with_it.close()

    without = Trainer(config_of(tiny_config, 4, Offload()), tmp_path / "run")
    assert without.steps_done == 2
    assert not any(is_pinned(x.sharding) for x in jax.tree.leaves(without.state))
    restored = without.state.params, without.state.opt_state
    for a, b in zip(jax.tree.leaves(saved), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))
    without.train()
    without.close()

    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "eval_loss"):
        found = [line[name] for line in lines if name in line and line["step"] in (1, 2, 3, 4)]
        expected = [line[name] for line in alone.history if name in line]
        np.testing.assert_allclose(found[-len(expected) :], expected, rtol=1e-5)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("bindings", "says"),
    [
        ({"Mesh.pipe": 2, "Mesh.tensor": 1}, "with Mesh.pipe=2"),
        ({"Exchange.method": "gossip"}, "with Exchange.method='gossip'"),
    ],
)
def test_what_it_does_not_go_together_with(tiny_config, bindings, says):
    config = config_of(tiny_config, 2, STATE, **bindings)
    with pytest.raises(UserError, match=re.escape(f"Offload.optimizer_state='host' {says}")):
        preflight.check(config, device_count=8, platform="cpu")


def test_bits_in_host_memory_are_not_compared(tiny_config):
    config = config_of(tiny_config, 2, STATE, **{"Corruption.replay_every": 2})
    with pytest.raises(UserError, match="Corruption.replay_every=2 with Offload.optimizer_state="):
        preflight.check(config, device_count=8, platform="cpu")


@pytest.mark.parametrize(
    ("bindings", "says"),
    [
        ({"Mesh.data": 2}, "with Mesh.data=2: gradients are reduced over that axis"),
        ({"Sharding.zero": 2}, "with Sharding.zero=2: gradients are sharded like the parameters"),
        ({"Sharding.accumulate": "local"}, "with Sharding.accumulate='local': whole gradients"),
        (
            {"Scan.layers_per_iteration": 0},
            "with Scan.layers_per_iteration=0: they are transferred one layer",
        ),
    ],
)
def test_what_gradients_there_do_not_go_together_with(tiny_config, bindings, says):
    config = config_of(tiny_config, 2, GRADIENTS, **bindings)
    with pytest.raises(UserError, match=re.escape(f"Offload.gradients='host' {says}")):
        preflight.check(config, device_count=8, platform="cpu")


# -- bytes -----------------------------------------------------------------------------------------

# Sizes of whole tiles: a TPU pads nothing.
LARGE = """
Train.model = @GPT()
Train.data = @TextData()
Train.steps = 2
Train.global_batch_size = 8
GPT.vocab_size = 2048
GPT.num_layers = 4
GPT.embed_dim = 1024
GPT.num_heads = 8
GPT.context_length = 128
TextData.source = 'synthetic'
TextData.synthetic_vocab_size = 2048
TextData.sequence_length = 128
Mesh.fsdp = 8
"""


def large(offload: Offload, *bindings: str) -> Any:
    said = [f"Offload.{name} = {where!r}" for name, where in vars(offload).items()]
    return load_config(LARGE, [*said, *bindings])


# 12 E^2 numbers a layer and 3 E of the biases of queries, keys and values, over 8 devices.
OF_LAYERS = 4 * (12 * 1024**2 // 8 + 3 * 1024)


@pytest.mark.parametrize("offload", [STATE, PARAMETERS, BOTH])
def test_a_plan_has_its_bytes_on_the_host(offload):
    layout = abstract_layout(large(offload), 8)
    plain, found = (argument_bytes(large(one), layout) for one in (Offload(), offload))
    counts = 8  # two numbers of 4 bytes that count updates
    moments = plain.optimizer - counts
    assert moments == 2 * plain.params
    expected = moments * (offload.optimizer_state == "host")
    expected += plain.params * (offload.parameters == "host")
    assert found.host == expected
    assert found.total == plain.total - expected
    assert found.params == plain.params * (offload.parameters == "none")


@pytest.mark.slow
@needs_libtpu
@pytest.mark.rotated("schedules")
def test_a_tpus_compiler_has_them_there_too():
    """Arguments on both sides to the byte; nothing twice on the host; one layer's state at a time
    on the device, and written while the next array is read."""
    config, target = large(STATE), parse_target("v5e:2x4")
    layout = target_layout(config, target)
    compiled = lower(config, layout).compile()
    stats: Any = compiled.memory_analysis()
    found = argument_bytes(config, layout)
    assert stats.host_argument_size_in_bytes == stats.host_alias_size_in_bytes == found.host
    assert stats.host_temp_size_in_bytes == 0
    assert abs(stats.argument_size_in_bytes - found.total) < 1 << 16  # vectors fill no tile
    moved = re.findall(r"dynamic-(slice|update-slice)-(start|done)\(", compiled.as_text() or "")
    order = "".join(f"{which[0]}{when[0]}" for which, when in moved)
    assert re.search("ss.*us.*sd", order), "a layer's last array is read while the first is written"
    assert stats.temp_size_in_bytes < found.host, (stats, found)


@functools.cache
def gradients_there(accumulation: int) -> Any:
    return large(
        GRADIENTS, f"Train.accumulation = {accumulation}", "Train.global_batch_size = 16",
        "Precision.compute = 'bfloat16'",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("accumulation", "of_each"), [(1, 2), (2, 4 + 2 * 2)], ids=["one microbatch", "two"]
)
def test_a_plan_has_the_bytes_of_gradients_there(accumulation, of_each):
    """One microbatch's in bfloat16; of several the sum in float32, and two of a microbatch's."""
    config = gradients_there(accumulation)
    plain = dataclasses.replace(config, offload=Offload())
    found, without = (memory(c, abstract_layout(c, 8), "tpu") for c in (config, plain))
    biases = 4 * 3 * 1024 * (4 - 2)  # which are float32 in a microbatch too
    assert abs(found.host - of_each * OF_LAYERS) <= 2 * biases
    assert without.host == 0
    assert found.temporaries < without.temporaries - OF_LAYERS


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_tpus_compiler_has_gradients_there(accumulation):
    config, target = gradients_there(accumulation), parse_target("v5e:2x4")
    layout = target_layout(config, target)
    plain = dataclasses.replace(config, offload=Offload())
    stats, without = (
        lower(c, layout).compile({"exec_time_optimization_effort": -1.0}).memory_analysis()
        for c in (config, plain)
    )
    planned = memory(config, layout, "tpu").host
    assert abs(stats.host_temp_size_in_bytes - planned) < 1 << 18  # vectors fill no tile
    assert without.host_temp_size_in_bytes == 0
    assert stats.temp_size_in_bytes < without.temp_size_in_bytes - OF_LAYERS


def test_a_plan_shows_them():
    found = plan(large(BOTH), "v5e:2x4", compile=False)
    assert found.to_json()["memory"]["host"] == found.estimate.arguments.host > 0
    assert "plus host memory" in found.table()
    assert any("host memory" in one for one in found.time.assumptions)


def test_precision_of_the_copy_is_that_of_the_products():
    program = make_step(PARAMETERS, precision=Precision(compute="bfloat16"))
    with program.setup.layout.active():
        held = jax.eval_shape(
            functools.partial(fetch_params, program.setup), program.abstract_state()
        )
    assert held.params["layers"]["up"].get_value().dtype == jnp.bfloat16
    assert held.params["layers"]["mlp_norm_scale"].get_value().dtype == jnp.float32
