"""Verification of packing: no document affects the loss or gradients of another.

Letters: B batch, T length, D embed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.analysis.verify import sample
from jaxtrain.analysis.verify.measures import EQUAL, Finding, NotChecked
from jaxtrain.analysis.verify.runs import Bench, MeshRun
from jaxtrain.config.errors import count_of
from jaxtrain.data.batch import Batch
from jaxtrain.models.model import token_model
from jaxtrain.nn.attention.context import along_context
from jaxtrain.nn.transformer.language_model import Transformer
from jaxtrain.parallel.sharding import shard
from jaxtrain.training.finetune.tuning import TEACHER
from jaxtrain.training.state import TrainState

# Losses [B, T] of every target, and the gradients [B, T, D] of their sum with respect to the input
# embeddings; both are numpy arrays in token order.
PerToken = tuple[np.ndarray, np.ndarray]

_ONE_TEXT = NotChecked("TextData.separate_documents=False: a row is one text, as configured")


@dataclasses.dataclass(frozen=True)
class Shifted:
    """Transformer with an offset added to its embeddings.

    Attributes:
      model: the model.
      shift_BTD: the offset.
    """

    model: Transformer
    shift_BTD: jax.Array

    @property
    def layers(self) -> Any:
        """Layers of the model."""
        return self.model.layers

    @property
    def teacher(self) -> Any:
        """Teacher of the model, if it has one; its embeddings are not shifted."""
        return getattr(self.model, TEACHER)

    @property
    def leading(self) -> Any:
        """Leading layers of the model."""
        return self.model.leading

    @property
    def predicting(self) -> Any:
        """Multi-token prediction modules of the model."""
        model: Any = self.model
        return model.predicting

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Return the shifted embeddings, the input of the first layer."""
        shift_BTD = shard(self.shift_BTD, ("batch", "residual_length", "embed"))
        return self.model.embed(tokens_BT, positions_BT) + shift_BTD

    def run_layer(self, *arguments: Any) -> Any:
        """Run a layer of the model."""
        return self.model.run_layer(*arguments)

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """Apply the model's final norm."""
        return self.model.finish(x_BTD)

    def output_matrix(self) -> nnx.Param:
        """Output matrix of the model."""
        return self.model.output_matrix()

    def output_bias(self) -> nnx.Param | None:
        """Output bias of the model."""
        return self.model.output_bias()

    def logit_softcap(self) -> float | None:
        """Logit soft cap of the model."""
        return self.model.logit_softcap()


class Documents:
    """Proofs of packing on the first batch, which share one compiled program."""

    def __init__(self, bench: Bench) -> None:
        self.batch = bench.batch
        self._bench = bench
        self._vocab_size = token_model(bench.small.config.train.model).vocab_size

    @functools.cached_property
    def _run(self) -> Callable[[Batch], PerToken]:
        return _per_token(self._bench)

    @functools.cached_property
    def _packed(self) -> PerToken:
        return self._run(self.batch)

    def as_alone(self) -> Finding | NotChecked:
        """Compare each document in its row with the same document alone at the start of a row."""
        if self.batch.segment_ids is None:
            return _ONE_TEXT
        found = [self._run(row) for row in sample.documents_alone(self.batch)]
        alone = [sample.repack(self.batch, [one[i] for one in found]) for i in (0, 1)]
        real_BT = self.batch.segment_ids > 0
        loss, gradient = (self._difference(i, alone[i], real_BT) for i in (0, 1))
        detail = f"{self._number()}: losses {loss:.1e}, gradients {gradient:.1e}"
        return Finding(max(loss, gradient), EQUAL, detail)

    def check_isolation(self) -> Finding | NotChecked:
        """Compare the other documents of a row before and after a change of one document."""
        if self.batch.segment_ids is None:
            return _ONE_TEXT
        other, chosen_BT = sample.with_one_document_changed(self.batch, self._vocab_size)
        after = self._run(other)
        moved = self._difference(0, after[0], chosen_BT)
        assert moved > EQUAL, "the changed documents have the same losses: the change had no effect"
        others_BT = (self.batch.segment_ids > 0) & ~chosen_BT
        loss, gradient = (self._difference(i, after[i], others_BT) for i in (0, 1))
        detail = (
            f"{len(chosen_BT)} of {self._number()} changed (their losses by {moved:.1e})"
            f"; the others: losses {loss:.1e}, gradients {gradient:.1e}"
        )
        return Finding(max(loss, gradient), EQUAL, detail)

    def _number(self) -> str:
        segment_ids: Any = self.batch.segment_ids
        return count_of(int(segment_ids.max(1).sum()), "document")

    def _difference(self, which: int, other: np.ndarray, where_BT: np.ndarray) -> float:
        """Return the largest difference within a mask, relative to the largest value."""
        expected = self._packed[which].astype(np.float64)
        where = where_BT.reshape(*where_BT.shape, *(1,) * (expected.ndim - 2))
        difference = np.abs(np.where(where, other - expected, 0.0)).max()
        return float(np.nan_to_num(difference / np.abs(expected).max(), nan=np.inf))


def _per_token(bench: Bench) -> Callable[[Batch], PerToken]:
    """Return the per-token losses and gradients of a batch, through the training objective."""
    config = bench.within_stages.config
    model = token_model(config.train.model)
    if model.experts is not None and model.experts.capacity_factor is not None:
        # Documents of a row share the slots of an expert: with a capacity they affect each other.
        model = dataclasses.replace(model, capacity_factor=None)
        train = dataclasses.replace(config.train, model=model)
        config = dataclasses.replace(config, train=train)
    mesh = MeshRun(config)
    program, setup, method = mesh.program, mesh.setup, config.attention.context_parallel

    def losses(mask_BT: Any, shift_BTD: Any, state: TrainState, batch: Batch) -> Any:
        batch = dataclasses.replace(batch, loss_mask=mask_BT)
        shifted = Shifted(setup.model(state), shift_BTD)
        sums, _ = setup.objective.sums(
            shifted, state.statistics, batch, setup.execution, setup.loss, train=True
        )
        own = set(setup.objective.minimized) - {"auxiliary_loss"}
        return sum(sums[name] for name in sorted(own))

    def run(state: TrainState, batch: Batch, shift_BTD: jax.Array) -> Any:
        # The loss is the sum of mask x loss over the targets: with a mask of ones, its gradient
        # with respect to the mask is the loss of each target.
        find, all_count = jax.grad(losses, argnums=(0, 1)), jnp.ones_like(batch.loss_mask)
        in_order_BT = jnp.zeros_like(batch.targets) + jnp.arange(batch.targets.shape[1])
        positions_BT = along_context(in_order_BT, method)
        return *find(all_count, shift_BTD, state, batch), positions_BT

    created = bench.one_device.created
    state = program.current_state(jax.device_put(created, program.shardings(created)))
    shape = (*bench.batch.targets.shape, model.embed_dim)
    rows = mesh.layout.sharding_of(mesh.layout.activation(("batch",)))
    shift_BTD = jax.device_put(np.zeros(shape, np.float32), rows)
    compiled = mesh.compile(jax.jit(run), state, mesh.shard_batch(bench.batch), shift_BTD)

    def per_token(batch: Batch) -> PerToken:
        found = jax.block_until_ready(compiled(state, mesh.shard_batch(batch), shift_BTD))
        losses_BT, moved_BTD, positions_BT = (np.asarray(x) for x in found)
        # Ring attention permutes the tokens.
        gradients_BTD = np.empty_like(moved_BTD)
        np.put_along_axis(gradients_BTD, positions_BT[..., None], moved_BTD, axis=1)
        return losses_BT, gradients_BTD

    return per_token
