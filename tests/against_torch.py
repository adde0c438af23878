"""Models of one answer to an example against PyTorch's: the same values, outputs and gradients."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conftest import make_layout, make_step
from flax import nnx

from jaxtrain.data.batch import Batch
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.parameters import Statistic
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.rules.elementwise import SGD, AdamW
from jaxtrain.training.optimizers.schedule import Schedule, make_schedule
from jaxtrain.training.state import TrainState

# Of PyTorch's names of a batch norm, ours.
NORM = {
    "weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "variance",
}  # fmt: skip
# Sums of float32 in another order.
OUTPUTS, GRADIENTS = 1e-4, 1e-3
# Of training side by side.
STEPS, LEARNED = 30, 1e-3


def numpy(tensor: Any) -> np.ndarray:
    """A copy: the network goes on changing its own."""
    return np.array(tensor.detach())


def in_our_layout(value: np.ndarray) -> np.ndarray:
    """[O, I] -> [I, O] of matrices, [O, I, H, W] -> [H, W, I, O] of kernels."""
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    return value.T if value.ndim == 2 else value


def name_of(path: Any) -> str:
    return "/".join(map(str, path))


def filled(state: Any, values: dict[str, np.ndarray]) -> Any:
    """A tree of shapes with these values, each of which is taken."""
    flat = []
    for path, variable in nnx.to_flat_state(state):
        value = values.pop(name_of(path))
        assert value.shape == variable.get_value().shape, path
        flat.append((path, variable.replace(jnp.asarray(value))))
    return nnx.from_flat_state(flat)


@dataclasses.dataclass
class Twin:
    """A model of ours with the values of a PyTorch network.

    Attributes:
      sizes: of ours.
      network: theirs.
      ours: its name of a parameter or buffer -> our path; None: it is none of a model's.
      layout: of a value of theirs under this path of ours, in ours.
    """

    sizes: Any
    network: Any
    ours: Callable[[str], str | None]
    layout: Callable[[str, np.ndarray], np.ndarray] = lambda _, value: in_our_layout(value)

    def taken(self, named: Any) -> dict[str, np.ndarray]:
        found = {}
        for name, value in named:
            path = self.ours(name)
            if path is not None and value is not None:
                found[path] = self.layout(path, numpy(value))
        return found

    def state(self) -> tuple[Any, TrainState]:
        """The program on one device, and its state with their values."""
        program = make_step(self.sizes, make_layout(fsdp=1))
        shapes = nnx.eval_shape(lambda: self.sizes.build(jax.random.key(0)))
        _, params, statistics = nnx.split(shapes, nnx.Param, Statistic)
        params = filled(params, self.taken(self.network.named_parameters()))
        statistics = filled(statistics, self.taken(self.network.named_buffers()))
        scale = jnp.array([1.0, 0.0])
        return program, TrainState(jnp.int32(0), params, (), statistics, scale)

    def compare(
        self, batch: Batch, theirs: Any, loss: Callable[[Any], Any], *, same: tuple[str, ...] = ()
    ) -> None:
        """Outputs in evaluation, and in training the mean loss and every parameter's gradient.

        Args:
          batch: for ours.
          theirs: its inputs, for the network.
          loss: the mean loss of what the network gives in training.
          same: paths whose gradient is zero but for rounding: those are only looked at for that.
        """
        import torch  # noqa: PLC0415

        program, state = self.state()
        self.network.eval()
        with torch.no_grad():
            expected = numpy(self.network(theirs))
        with program.setup.layout.active():
            model = nnx.merge(program.setup._graphdef, state.params, state.statistics)
            run = jax.jit(lambda m, x, s: m(x, s, Execution(kernel="reference"), train=False)[0])
            found = run(model, batch.inputs, state.statistics)
            found = found[0] if isinstance(found, tuple) else found
            gradients, metrics, statistics = jax.jit(program.setup.gradients)(state, batch)
        np.testing.assert_allclose(found, expected, atol=OUTPUTS, rtol=OUTPUTS)
        self.network.train()
        mean = loss(self.network(theirs))
        mean.backward()
        total = sum(
            float(metrics[name]) for name in program.setup.objective.minimized if name in metrics
        )
        np.testing.assert_allclose(total, float(mean.detach()), atol=OUTPUTS, rtol=OUTPUTS)
        moved = {name_of(p): v.get_value() for p, v in nnx.to_flat_state(statistics)}
        for path, value in self.taken(self.network.named_buffers()).items():
            np.testing.assert_allclose(moved[path], value, atol=OUTPUTS, rtol=OUTPUTS, err_msg=path)
        named = [(name, p.grad) for name, p in self.network.named_parameters()]
        wanted = self.taken(named)
        assert wanted
        largest = max(float(np.linalg.norm(value)) for value in wanted.values())
        for path, variable in nnx.to_flat_state(gradients):
            value = wanted.pop(name_of(path))
            off = float(np.linalg.norm(np.asarray(variable.get_value()) - value))
            of = largest if name_of(path) in same else float(np.linalg.norm(value))
            assert off <= GRADIENTS * of, (path, off / of)
        assert not wanted, f"no gradient of ours: {list(wanted)}"

    def train(
        self, batch: Batch, theirs: Any, loss: Callable[[Any], Any], *, rate: float, falls: float
    ) -> None:
        """As many steps of SGD with Nesterov momentum on both sides, from equal weights, on one
        batch: the same losses, and running statistics at the end.

        Adam would make steps of full size of gradients that are zero but for rounding.

        Args:
          batch, theirs, loss: as of `compare`.
          rate: of learning.
          falls: by how much the loss falls at least: otherwise an error would not show.
        """
        import torch  # noqa: PLC0415

        settings = Optimizer(rule=SGD(), learning_rate=rate, weight_decay=0.0, clip_norm=None)
        schedule = make_schedule(Schedule(name="constant"), rate, STEPS)
        optimizer = make_optimizer(settings, schedule)
        program, state = self.state()
        program = program.rebuild(optimizer=optimizer, schedule=schedule)
        state = dataclasses.replace(state, opt_state=optimizer.init(state.params))
        peer = torch.optim.SGD(self.network.parameters(), rate, SGD().momentum, nesterov=True)
        self.network.train()
        found, expected = [], []
        with program.setup.layout.active():
            step = CompiledStep(program)
            for _ in range(STEPS):
                state, metrics = step(state, batch)
                parts = program.setup.objective.minimized
                found.append(sum(float(metrics[name]) for name in parts if name in metrics))
                peer.zero_grad()
                mean = loss(self.network(theirs))
                mean.backward()
                peer.step()
                expected.append(float(mean.detach()))
        assert expected[-1] < expected[0] - falls, expected
        np.testing.assert_allclose(found, expected, atol=LEARNED, rtol=LEARNED)
        moved = {name_of(p): v.get_value() for p, v in nnx.to_flat_state(state.statistics)}
        for path, value in self.taken(self.network.named_buffers()).items():
            np.testing.assert_allclose(moved[path], value, atol=LEARNED, err_msg=path)


def draw_norms(network: Any) -> None:
    """Batch norms away from 0 and 1, where errors would not show."""
    from torch import nn  # noqa: PLC0415

    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.normal_(module.bias, std=0.1)
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)


def step_on(
    sizes: Any,
    batch: Batch,
    accumulation: int = 1,
    step: int = 0,
    changes: Mapping[str, Any] = MappingProxyType({}),
    **layout: int,
) -> Any:
    """Gradients, metrics and statistics of a step from fresh parameters, on a mesh; `changes` are
    of the program."""
    layout_on = make_layout(**{"fsdp": 1, **layout})
    program = make_step(sizes, layout_on, accumulation=accumulation, **changes)
    state = dataclasses.replace(program.create(0), step=jnp.int32(step))
    placed = jax.device_put(batch, program.setup.batch_shardings(batch))
    with layout_on.active():
        grads, *rest = jax.device_get(jax.jit(program.setup.gradients)(state, placed))
    if program.setup.stages is not None:
        grads = program.setup.stages.to_layers(grads)
    return jax.tree.map(np.asarray, (grads, *rest))


def assert_same_step(found: Any, expected: Any) -> None:
    """The same but for the order of sums; a gradient's error is one of the whole network's."""
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(expected[0]))
    for ours, theirs in ((found[0], expected[0]), (found[2], expected[2])):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest, rtol=1e-4),
            ours,
            theirs,
        )


def trained(
    network: Any, means: Callable[[Any], Any], train: Any, heldout: Any, *, steps: int, rate: float
) -> tuple[np.ndarray, tuple[float, ...]]:
    """PyTorch's steps of AdamW without decay, its other settings ours, each on the same examples.

    Args:
      network: what is trained.
      means: examples -> the loss and floats that tell more of them.
      train, heldout: examples.
      steps: how many.
      rate: of learning.

    Returns:
      The loss and the floats of each step, before it, and those of what is held out at the end.
    """
    import torch  # noqa: PLC0415

    rule = AdamW()
    optimizer = torch.optim.AdamW(
        network.parameters(), rate, (rule.b1, rule.b2), rule.epsilon, weight_decay=0.0
    )
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, *more = means(train)
        loss.backward()
        optimizer.step()
        found.append((loss.item(), *more))
    with torch.no_grad():
        loss, *more = means(heldout)
    return np.array(found), (loss.item(), *more)
