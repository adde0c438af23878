"""Recurrent layers: the Elman network (RNN), the gated recurrent unit (GRU), bidirectional ones.

Sources: Elman 1990, "Finding Structure in Time"; Cho et al. 2014 (arXiv 1406.1078). The cells are
those of `torch.nn.RNN` and `torch.nn.GRU`, whose reset gate multiplies the projected state and not
the state.
Letters: B batch, T length, D embed, H state, G pre-activations of the cell (a multiple of H; of a
GRU 3 H: reset and update gate and candidate, in this order).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.facts import LayerFacts
from jaxtrain.nn.kv_cache import Cached, LayerCache
from jaxtrain.nn.layers import add_bias
from jaxtrain.nn.parameters import (
    Weights,
    add_prefix,
    constant,
    merge_weights,
    normal,
    param,
    under,
)
from jaxtrain.nn.remat import name_activation
from jaxtrain.nn.transformer.decoder import Layer
from jaxtrain.nn.transformer.language_model import Auxiliary
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import shard

# -- a cell along a sequence, with its backward pass -----------------------------------------------
# A cell is one time step. Its recurrent matmul is computed here, once per time step forward and
# backward, and the gradient of the recurrent weight is one matmul over all positions after the
# loop: JAX's own would read and write it, as large as the weight, at each of them. Letters: B
# batch, T length, D embed and state, G pre-activations of a cell (a multiple of D).

# (of the inputs [B, G], of the state [B, G], the state [B, D]) -> the new state, all float32.
Cell = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def goes_on(mask: Mask) -> jax.Array | None:
    """Whether each position [T, B, 1] is in the document of the previous one; None: all of them
    are."""
    ids_BT = mask.segment_ids_BT
    if ids_BT is None:
        return None
    same_BT = jnp.pad(ids_BT[:, 1:] == ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return same_BT.T[:, :, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recurrence(
    cell: Cell,
    x_TBG: jax.Array,
    weight_DG: jax.Array,
    bias_G: jax.Array,
    goes_on_TB1: jax.Array | None,
    state_BD: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the states at every position [T, B, D], in x's dtype, and the last one.

    Args:
      cell: one time step.
      x_TBG: the inputs' projection, including its bias.
      weight_DG: the recurrent weight, in the dtype of x.
      bias_G: the bias of the recurrent projection.
      goes_on_TB1: False where the state is reset to zero; None: nowhere.
      state_BD: before the first position, float32.
    """
    return _forward(cell, x_TBG, weight_DG, bias_G, goes_on_TB1, state_BD)[0]


def _reset_at_documents(goes_on_B1: jax.Array | None, state_BD: jax.Array) -> jax.Array:
    """Return the state, zero where a document begins."""
    return state_BD if goes_on_B1 is None else jnp.where(goes_on_B1, state_BD, 0)


def _product(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32)


def _forward(
    cell: Cell,
    x_TBG: jax.Array,
    weight_DG: jax.Array,
    bias_G: jax.Array,
    goes_on_TB1: jax.Array | None,
    state_BD: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    dtype = x_TBG.dtype

    def step(h_BD: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        x_BG, goes_on_B1 = inputs
        h_BD = _reset_at_documents(goes_on_B1, h_BD)
        u_BG = _product("BD,DG->BG", h_BD.astype(dtype), weight_DG) + bias_G
        new_BD = cell(x_BG.astype(jnp.float32), u_BG, h_BD)
        return new_BD, (new_BD.astype(dtype), u_BG.astype(dtype), h_BD.astype(dtype))

    after, outs = jax.lax.scan(step, state_BD, (x_TBG, goes_on_TB1))
    h_TBD, u_TBG, before_TBD = (name_activation(x, "mixer") for x in outs)
    return (h_TBD, after), (x_TBG, weight_DG, bias_G, goes_on_TB1, u_TBG, before_TBD)


def _backward(cell: Cell, kept: Any, gradients: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    x_TBG, weight_DG, bias_G, goes_on_TB1, u_TBG, before_TBD = kept
    d_h_TBD, d_after = gradients
    dtype = weight_DG.dtype

    def step(carry_BD: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        d_h_BD, x_BG, u_BG, before_BD, goes_on_B1 = inputs
        wide = (x.astype(jnp.float32) for x in (x_BG, u_BG, before_BD))
        d_x_BG, d_u_BG, d_BD = jax.vjp(cell, *wide)[1](carry_BD + d_h_BD)
        d_u_BG = d_u_BG.astype(dtype)
        d_BD = d_BD + _product("BG,DG->BD", d_u_BG, weight_DG)
        return _reset_at_documents(goes_on_B1, d_BD), (d_x_BG.astype(dtype), d_u_BG)

    along = (d_h_TBD.astype(jnp.float32), x_TBG, u_TBG, before_TBD, goes_on_TB1)
    d_state, (d_x_TBG, d_u_TBG) = jax.lax.scan(step, d_after, along, reverse=True)
    sharding = jax.typeof(weight_DG).sharding
    d_weight_DG = jnp.einsum(
        "TBD,TBG->DG", before_TBD, d_u_TBG,
        out_sharding=None if sharding.mesh.empty else sharding.spec,
    )  # fmt: skip
    d_bias_G = d_u_TBG.astype(jnp.float32).sum((0, 1)).astype(bias_G.dtype)
    nothing = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), goes_on_TB1)
    return d_x_TBG, d_weight_DG, d_bias_G, nothing, d_state


recurrence.defvjp(_forward, _backward)


# -- layers ----------------------------------------------------------------------------------------

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


# -- both directions -------------------------------------------------------------------------------
# Source: Schuster and Paliwal 1997, "Bidirectional recurrent neural networks". Letters: B batch, T
# length, D embed (of inputs and outputs; each direction computes half).


class RecurrentLayer(Layer, Protocol):
    """A layer with a recurrence."""

    @property
    def facts(self) -> LayerFacts:
        """Facts of the layer: what it caches."""
        ...

    def matmul_parameters(self) -> int:
        """Number of parameters used in a matmul for every token."""
        ...

    def other_flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs per token besides those of these parameters."""
        ...


@dataclasses.dataclass(frozen=True)
class BothWays:
    """A forward layer along each document, and a backward one.

    Attributes:
      one_way: the layer of one direction, from D features to D / 2.
    """

    one_way: RecurrentLayer

    @property
    def facts(self) -> LayerFacts:
        """Nothing is cached."""
        return LayerFacts()

    def weights(self, key: jax.Array) -> Weights:
        """Parameters of both, each prefixed with its direction."""
        forward, backward = jax.random.split(key)
        return merge_weights(
            add_prefix("forward", self.one_way.weights(forward)),
            add_prefix("backward", self.one_way.weights(backward)),
        )

    def matmul_parameters(self) -> int:
        """Of both."""
        return 2 * self.one_way.matmul_parameters()

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
        """Run the layer, without a cache since later tokens are read too. Arguments and results as
        in `decoder.Layer`."""
        del start
        assert cache is None, "nothing is generated with what comes later"
        first, _, _ = self.one_way(under("forward", own), x_BTD, positions_BT, mask, execution)
        # Padding, at the end, is a separate document: from the right each text restarts.
        turned = jax.tree.map(lambda ids_BT: jnp.flip(ids_BT, 1), mask)
        last, _, _ = self.one_way(
            under("backward", own), jnp.flip(x_BTD, 1), positions_BT, turned, execution
        )
        return jnp.concatenate([first, jnp.flip(last, 1)], -1), None, {}


class Directed(Protocol):
    """Sizes of a model whose layers may be bidirectional."""

    @property
    def embed_dim(self) -> int: ...
    @property
    def bidirectional(self) -> bool: ...


def in_directions(sizes: Directed, layer: Callable[[int, int], RecurrentLayer]) -> RecurrentLayer:
    """Return a model's layer: unidirectional, or bidirectional with half of the width each.

    Args:
      sizes: the model's.
      layer: returns a layer of one direction, from a width of inputs to one of its state.
    """
    if not sizes.bidirectional:
        return layer(sizes.embed_dim, sizes.embed_dim)
    return BothWays(layer(sizes.embed_dim, sizes.embed_dim // 2))


def validate_directions(sizes: Directed) -> None:
    """Raise UserError if the width cannot be split over two directions."""
    if sizes.bidirectional and sizes.embed_dim % 2:
        name = type(sizes).__name__
        raise UserError(
            f"{name}.embed_dim={sizes.embed_dim} with {name}.bidirectional=True: each direction "
            f"has half of it; use {sizes.embed_dim + 1}"
        )
