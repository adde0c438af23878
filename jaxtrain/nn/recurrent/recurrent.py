"""Recurrent layers with one state: the Elman network (RNN) and the gated recurrent unit (GRU).

Sources: Elman 1990, "Finding Structure in Time"; Cho et al. 2014 (arXiv 1406.1078). The cells are
those of `torch.nn.RNN` and `torch.nn.GRU`, whose reset gate multiplies the projected state and not
the state.
Letters: B batch, T length, D embed, H state, G pre-activations of the cell (a multiple of H; of a
GRU 3 H: reset and update gate and candidate, in this order).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.facts import LayerFacts
from jaxtrain.nn.kv_cache import Cached, LayerCache
from jaxtrain.nn.layers import add_bias
from jaxtrain.nn.parameters import Weights, constant, normal, param
from jaxtrain.nn.recurrent.recurrence import Cell, goes_on, recurrence
from jaxtrain.nn.remat import name_activation
from jaxtrain.nn.transformer.language_model import Auxiliary
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import shard

STATE = ("batch", "embed")


def state_facts(state_dim: int, *, states: int = 1) -> LayerFacts:
    """Return the facts of a layer that caches one or more states of this width."""
    one = Cached(shape=(state_dim,), axes=("embed",), every_token=False, dtype="float32")
    return LayerFacts(cached=(one,) * states)


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """The states of a cell along a sequence.

    Attributes:
      embed_dim: D, of the input.
      state_dim: H, of its states, which are the outputs.
      gates: G over H.
      cell: one time step.
      name: in profiles and plans.
    """

    embed_dim: int
    state_dim: int
    gates: int
    cell: Cell
    name: str

    @property
    def facts(self) -> LayerFacts:
        """Its state is cached."""
        return state_facts(self.state_dim)

    def weights(self, key: jax.Array) -> Weights:
        """Projections of inputs [D, G] and states [H, G], and two biases."""
        D, H, G = self.embed_dim, self.state_dim, self.gates * self.state_dim
        key_input, key_recurrent = jax.random.split(key)
        # The standard deviation of PyTorch's recurrent layers, which draw uniformly from +-1 /
        # sqrt(H).
        spread, axes = normal(1 / math.sqrt(3 * H)), ("embed", "gates")
        return {
            "input": param(key_input, (D, G), axes, spread),
            "input_bias": param(key, (G,), ("vector",), constant(0.0)),
            "recurrent": param(key_recurrent, (H, G), axes, spread),
            "recurrent_bias": param(key, (G,), ("vector",), constant(0.0)),
        }

    def matmul_parameters(self) -> int:
        """Matmul parameters: all but the biases."""
        return self.gates * self.state_dim * (self.embed_dim + self.state_dim)

    def other_flops_per_token(self, sequence_length: int) -> float:
        """Nothing else is counted."""
        del sequence_length
        return 0

    def __call__(
        self,
        own: Weights,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
        cache: LayerCache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, LayerCache | None, Auxiliary]:
        """Run one layer, whose cache is its state; arguments and results as in `decoder.Layer`."""
        del positions_BT, start  # positions are implicit in the recurrence
        with jax.named_scope(self.name):
            x_TBD = jnp.swapaxes(x_BTD, 0, 1)
            x_TBG = execution.contract("TBD,DG->TBG", x_TBD, own["input"])
            x_TBG = name_activation(add_bias(x_TBG, own["input_bias"]), "mixer_in")
            weight_DG = gather(own["recurrent"]).astype(x_BTD.dtype)
            bias_G = gather(own["recurrent_bias"]).astype(jnp.float32)
            if cache is None:
                zeros = jnp.zeros((x_BTD.shape[0], self.state_dim), jnp.float32)
                before = shard(zeros, STATE)
            else:
                before = cache[0]
            h_TBD, after = recurrence(self.cell, x_TBG, weight_DG, bias_G, goes_on(mask), before)
            h_BTH = shard(jnp.swapaxes(h_TBD, 0, 1), HIDDEN)
            return h_BTH, None if cache is None else (after,), {}


def rnn_layer(embed_dim: int, state_dim: int) -> Recurrent:
    """Return an Elman layer from `embed_dim` inputs to a state of `state_dim`."""
    return Recurrent(embed_dim, state_dim, 1, _elman, "rnn")


def gru_layer(embed_dim: int, state_dim: int) -> Recurrent:
    """Return a GRU layer from `embed_dim` inputs to a state of `state_dim`."""
    return Recurrent(embed_dim, state_dim, 3, _gru, "gru")


def _elman(x_BG: jax.Array, u_BG: jax.Array, h_BD: jax.Array) -> jax.Array:
    """tanh of both."""
    del h_BD
    return jnp.tanh(x_BG + u_BG)


def _gru(x_BG: jax.Array, u_BG: jax.Array, h_BD: jax.Array) -> jax.Array:
    """Between the state and a candidate, as the update gate says."""
    (x_r, x_z, x_n), (u_r, u_z, u_n) = jnp.split(x_BG, 3, axis=-1), jnp.split(u_BG, 3, axis=-1)
    r, z = jax.nn.sigmoid(x_r + u_r), jax.nn.sigmoid(x_z + u_z)
    return (1 - z) * jnp.tanh(x_n + r * u_n) + z * h_BD
