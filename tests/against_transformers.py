"""Language models against transformers': the same values through the map of weights, both ways.

Documents of a row go through theirs one by one, each from its beginning: so ours must keep the
documents of packed rows apart.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_torch import GRADIENTS, OUTPUTS, filled, name_of
from conftest import make_layout, make_step
from flax import nnx

from jaxtrain.data.batch import Batch
from jaxtrain.models.weights.family import Name, families
from jaxtrain.parallel.sharding import flatten
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.schedule import Schedule, make_schedule
from jaxtrain.training.state import TrainState

# Who imports this is skipped where there are none.
torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
transformers = pytest.importorskip("transformers", reason="transformers is the peer")
cross_entropy = torch.nn.functional.cross_entropy

# Of small products more threads only wait for each other.
torch.set_num_threads(1)

STEPS, LEARNED = 30, 1e-3
RATE = 3e-3


@dataclasses.dataclass
class Pair:
    """A model of ours and one of transformers with the same values.

    Attributes:
      sizes: of ours.
      theirs: theirs.
      model_type: the family whose map of names is between them.
    """

    sizes: Any
    theirs: torch.nn.Module
    model_type: str

    def names(self) -> tuple[Name, ...]:
        """The map between the names of both."""
        family = next(one for one in families() if one.model_type == self.model_type)
        return family.names(self.sizes)

    def logits(self, batch: Batch) -> torch.Tensor:
        """Theirs of every place, each row a text of its own."""
        return self.theirs(torch.tensor(batch.inputs).long()).logits

    def reading(self, objective: Any, batch: Batch) -> Batch:
        """The same for ours."""
        return objective.reading(batch.inputs)

    def ours(self, tensors: dict[str, Any]) -> dict[str, np.ndarray]:
        """Their tensors as our parameters, by path; all of them are taken."""
        shapes = nnx.eval_shape(lambda: self.sizes.build(jax.random.key(0)))
        names, leaves, _ = flatten(nnx.state(shapes, nnx.Param))
        of = {name: tuple(leaf.shape) for name, leaf in zip(names, leaves, strict=True)}
        taken, found = set(), {}
        for name in self.names():
            value = np.full(of[name.ours], np.nan, np.float32)
            for place, tensor in name.tensors(value.shape):
                taken.add(tensor)  # several parameters may be one tensor there
                there = np.array(tensors[tensor].detach())
                value[place] = name.to_ours(there, value.shape)
            found[name.ours] = value
        left = tensors.keys() - taken
        assert not left, f"tensors of theirs without a place: {left}"
        assert found.keys() == of.keys()
        return found

    def state(self, program: Any) -> TrainState:
        """Fresh, with their values."""
        shapes = nnx.eval_shape(lambda: self.sizes.build(jax.random.key(0)))
        values = self.ours(dict(self.theirs.named_parameters()))
        params = filled(nnx.state(shapes, nnx.Param), values)
        opt_state = program.setup.optimizer.init(params)
        return TrainState(jnp.int32(0), params, opt_state, nnx.State({}), jnp.array([1.0, 0.0]))

    def loss(self, batch: Batch) -> torch.Tensor:
        """Their mean cross entropy over the targets that count."""
        tokens, total = torch.tensor(batch.inputs).long(), torch.zeros(())
        if (batch.segment_ids == 1).all():
            logits = self.theirs(tokens).logits.flatten(0, 1)
            targets = torch.tensor(batch.targets).long().flatten()
            losses = cross_entropy(logits, targets, reduction="none")
            mask = torch.tensor(batch.loss_mask).flatten()
            return (losses * mask).sum() / mask.sum()
        for row, ids in enumerate(batch.segment_ids):
            for document in np.unique(ids[ids > 0]):
                here = np.flatnonzero(ids == document)
                logits = self.theirs(tokens[row : row + 1, here]).logits[0]
                targets = torch.tensor(batch.targets[row, here]).long()
                losses = cross_entropy(logits, targets, reduction="none")
                total = total + (losses * torch.tensor(batch.loss_mask[row, here])).sum()
        return total / float(batch.loss_mask.sum())

    def compare(
        self, batch: Batch, *, same: tuple[str, ...] = (), **changes: Any
    ) -> dict[str, jax.Array]:
        """Logits of a whole row, the mean loss, and every parameter's gradient; gives our metrics.

        Args:
          batch: of packed rows.
          same: paths whose gradient is zero but for rounding: those are only looked at for that.
          changes: of the program.
        """
        program = make_step(self.sizes, make_layout(fsdp=1), **changes)
        state = self.state(program)
        objective = program.setup.objective
        with torch.no_grad():
            expected = self.logits(batch).numpy()
        assert np.abs(expected).max() > 0.5, "logits in which an error would not show"
        with program.setup.layout.active():
            reading = self.reading(objective, batch)
            run = jax.jit(
                lambda s: objective.logits(
                    program.setup.model(s), {}, reading, program.setup.execution
                )
            )
            found = run(state)
            gradients, metrics, _ = jax.jit(program.setup.gradients)(state, batch)
        np.testing.assert_allclose(found, expected, atol=OUTPUTS, rtol=OUTPUTS)
        self.theirs.zero_grad()
        mean = self.loss(batch)
        mean.backward()
        assert math.isclose(minimized(program, metrics), float(mean.detach()), rel_tol=OUTPUTS)
        wanted = {name: p.grad for name, p in self.theirs.named_parameters()}
        zero = {n: torch.zeros_like(p) for n, p in self.theirs.named_parameters()}
        wanted = self.ours({n: zero[n] if g is None else g for n, g in wanted.items()})
        largest = max(float(np.linalg.norm(value)) for value in wanted.values())
        for path, variable in nnx.to_flat_state(gradients):
            value = wanted[name_of(path)]
            off = float(np.linalg.norm(np.asarray(variable.get_value()) - value))
            of = largest if name_of(path) in same else float(np.linalg.norm(value))
            assert off <= GRADIENTS * of, (path, off / of)
        return metrics

    def train(self, batches: list[Batch]) -> None:
        """As many steps of Adam on both sides, from equal weights, on these batches in turn."""
        schedule = make_schedule(Schedule(name="constant"), RATE, STEPS)
        settings = Optimizer(learning_rate=RATE, weight_decay=0.0, clip_norm=None)
        optimizer = make_optimizer(settings, schedule)
        program = make_step(self.sizes, make_layout(fsdp=1), optimizer=optimizer, schedule=schedule)
        rule = settings.rule
        peer = torch.optim.Adam(
            self.theirs.parameters(), lr=RATE, betas=(rule.b1, rule.b2), eps=rule.epsilon
        )
        state, ours, theirs = self.state(program), [], []
        with program.setup.layout.active():
            step = CompiledStep(program)
            for number in range(STEPS):
                batch = batches[number % len(batches)]
                state, metrics = step(state, batch)
                ours.append(minimized(program, metrics))
                peer.zero_grad()
                mean = self.loss(batch)
                mean.backward()
                peer.step()
                theirs.append(float(mean.detach()))
        assert theirs[-1] < theirs[0] - 0.3, "losses that hardly fall would show no error"
        np.testing.assert_allclose(ours, theirs, atol=LEARNED, rtol=LEARNED)


def minimized(program: Any, metrics: dict[str, jax.Array]) -> float:
    """What the gradient is of, by a step's metrics."""
    return sum(float(metrics.get(name, 0.0)) for name in program.setup.objective.minimized)


class Apart(Pair):
    """Their files have a tensor for each matrix of each expert, their module one for all."""

    def ours(self, tensors: dict[str, Any]) -> dict[str, np.ndarray]:
        """As in `Pair`, of the module's tensors."""
        apart = {}
        for name, value in tensors.items():
            start, _, last = name.rpartition(".experts.")
            if last == "gate_up_proj":
                gate, up = value.chunk(2, dim=1)
                parts = {"gate_proj": gate, "up_proj": up}
            elif last == "down_proj":
                parts = {"down_proj": value}
            else:
                apart[name] = value
                continue
            for part, experts in parts.items():
                for number, one in enumerate(experts):
                    apart[f"{start}.experts.{number}.{part}.weight"] = one
        return super().ours(apart)


def draw(
    model: torch.nn.Module, *, scales: tuple[str, ...] = ("norm",), spread: float = 0.2
) -> Any:
    """Every parameter drawn, norms and biases too, wide enough that none is lost."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            is_scale = any(part in name.lower() for part in scales) and name.endswith("weight")
            value.normal_(1.0 if is_scale else 0.0, spread)
    return model.eval()
