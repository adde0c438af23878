"""LSTM layer with a custom backward pass.

Sources: Hochreiter and Schmidhuber 1997, "Long Short-Term Memory", with the forget gate of Gers et
al. 2000. The cell is `torch.nn.LSTM`'s, its two biases as one.
Letters: B batch, T length, D embed, H state, G = 4 H (input, forget, candidate and output gate, in
this order).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.facts import LayerFacts
from jaxtrain.nn.kv_cache import LayerCache
from jaxtrain.nn.layers import add_bias
from jaxtrain.nn.parameters import Weights, normal, param
from jaxtrain.nn.recurrent.recurrent import STATE, goes_on, state_facts
from jaxtrain.nn.remat import name_activation
from jaxtrain.nn.transformer.language_model import Auxiliary
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import shard

# State of a layer: its output h and its cell c, float32 [B, D].
State = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class LSTMLayer:
    """The outputs of an LSTM along a sequence.

    Attributes:
      embed_dim: D, of the input.
      state_dim: H, of its state and output.
    """

    embed_dim: int
    state_dim: int

    @property
    def facts(self) -> LayerFacts:
        """Its output and its cell are cached."""
        return state_facts(self.state_dim, states=2)

    def weights(self, key: jax.Array) -> Weights:
        """Projections of inputs [D, G] and states [H, G], and the gates' biases."""
        D, H, G = self.embed_dim, self.state_dim, 4 * self.state_dim
        key_input, key_recurrent = jax.random.split(key)
        # The standard deviation of torch.nn.LSTM, which draws uniformly from +-1 / sqrt(H).
        spread = normal(1 / math.sqrt(3 * H))
        return {
            "input": param(key_input, (D, G), ("embed", "gates"), spread),
            "recurrent": param(key_recurrent, (H, G), ("embed", "gates"), spread),
            "gates_bias": param(key, (G,), ("vector",), _remembering),
        }

    def matmul_parameters(self) -> int:
        """Matmul parameters: all but the biases."""
        return 4 * self.state_dim * (self.embed_dim + self.state_dim)

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
        """One layer; its cache is its state."""
        del positions_BT, start  # positions are implicit in the recurrence
        with jax.named_scope("lstm"):
            x_TBD = jnp.swapaxes(x_BTD, 0, 1)
            x_TBG = execution.contract("TBD,DG->TBG", x_TBD, own["input"])
            x_TBG = name_activation(add_bias(x_TBG, own["gates_bias"]), "mixer_in")
            weight_DG = gather(own["recurrent"]).astype(x_BTD.dtype)
            if cache is not None:
                before_h_BD, before_c_BD = cache
                before = before_h_BD, before_c_BD
            else:
                zeros = shard(jnp.zeros((x_BTD.shape[0], self.state_dim), jnp.float32), STATE)
                before = zeros, zeros
            h_TBD, after = _recurrence(x_TBG, weight_DG, goes_on(mask), before)
            x_BTD = shard(jnp.swapaxes(h_TBD, 0, 1), HIDDEN)
            return x_BTD, None if cache is None else after, {}


def _remembering(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros, and 1 for the forget gate, so that a new layer remembers (Jozefowicz et al. 2015)."""
    del key
    return jnp.repeat(jnp.array([0, 1, 0, 0], dtype), shape[0] // 4)


# -- the recurrence -------------------------------------------------------------------------------


@jax.custom_vjp
def _recurrence(
    x_TBG: jax.Array, weight_DG: jax.Array, goes_on_TB1: jax.Array | None, state: State
) -> tuple[jax.Array, State]:
    """Return the outputs of an LSTM's cell at every position [T, B, D], and its state after the
    last.

    The gradient of the recurrent weight is one matmul over all positions after the loop: JAX's own
    would read and write it, as large as the weight, at each of them.

    Args:
      x_TBG: the inputs' and bias's part of the gates' pre-activations.
      weight_DG: the recurrent weight, in the dtype of x.
      goes_on_TB1: False where the state is reset to zero; None: nowhere.
      state: h and c before the first position.
    """
    return _forward(x_TBG, weight_DG, goes_on_TB1, state)[0]


def _forward(
    x_TBG: jax.Array, weight_DG: jax.Array, goes_on_TB1: jax.Array | None, state: State
) -> tuple[tuple[jax.Array, State], Any]:
    dtype = x_TBG.dtype

    def step(state: State, inputs: Any) -> tuple[State, Any]:
        x_BG, goes_on_B1 = inputs
        h_BD, c_BD = _where(goes_on_B1, state)
        x_BG = x_BG + _product("BD,DG->BG", h_BD.astype(dtype), weight_DG)
        i, f, g, o = jnp.split(x_BG, 4, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        new_c_BD = f * c_BD + i * g
        new_h_BD = o * jnp.tanh(new_c_BD)
        kept = (x.astype(dtype) for x in (i, f, g, o, c_BD))
        return (new_h_BD, new_c_BD), (new_h_BD.astype(dtype), tuple(kept))

    after, outs = jax.lax.scan(step, state, (x_TBG, goes_on_TB1))
    h_TBD, kept = jax.tree.map(lambda x: name_activation(x, "mixer"), outs)
    return (h_TBD, after), (weight_DG, goes_on_TB1, state[0], h_TBD, kept)


def _backward(kept: Any, gradients: tuple[jax.Array, State]) -> tuple[Any, ...]:
    weight_DG, goes_on_TB1, first_h_BD, h_TBD, activations = kept
    d_h_TBD, d_after = gradients
    dtype = weight_DG.dtype

    def step(carry: State, inputs: Any) -> tuple[State, jax.Array]:
        d_h_BD, activations, goes_on_B1 = inputs
        i, f, g, o, c_BD = (x.astype(jnp.float32) for x in activations)
        t_BD = jnp.tanh(f * c_BD + i * g)
        d_h_BD = carry[0] + d_h_BD
        d_c_BD = carry[1] + d_h_BD * o * (1 - t_BD * t_BD)
        parts = (
            d_c_BD * g * i * (1 - i),
            d_c_BD * c_BD * f * (1 - f),
            d_c_BD * i * (1 - g * g),
            d_h_BD * t_BD * o * (1 - o),
        )
        d_x_BG = jnp.concatenate(parts, axis=-1).astype(dtype)
        before = _product("BG,DG->BD", d_x_BG, weight_DG), d_c_BD * f
        return _where(goes_on_B1, before), d_x_BG

    d_state, d_x_TBG = jax.lax.scan(
        step, d_after, (d_h_TBD, activations, goes_on_TB1), reverse=True
    )
    before_TBD = jnp.concatenate([first_h_BD[None].astype(dtype), h_TBD[:-1]])
    if goes_on_TB1 is not None:
        before_TBD = jnp.where(goes_on_TB1, before_TBD, 0)
    sharding = jax.typeof(weight_DG).sharding
    d_weight_DG = jnp.einsum(
        "TBD,TBG->DG", before_TBD, d_x_TBG,
        out_sharding=None if sharding.mesh.empty else sharding.spec,
    )  # fmt: skip
    nothing = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), goes_on_TB1)
    return d_x_TBG, d_weight_DG, nothing, d_state


_recurrence.defvjp(_forward, _backward)


def _where(goes_on_B1: jax.Array | None, state: State) -> State:
    """Return the state, zero where a document begins."""
    if goes_on_B1 is None:
        return state
    h_BD, c_BD = (jnp.where(goes_on_B1, x, 0) for x in state)
    return h_BD, c_BD


def _product(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32)
