"""Recurrence of a cell along a sequence, with its backward pass.

A cell is one time step. Its recurrent matmul is computed here, once per time step forward and
backward, and the gradient of the recurrent weight is one matmul over all positions after the loop:
JAX's own would read and write it, as large as the weight, at each of them.
Letters: B batch, T length, D embed and state, G pre-activations of a cell (a multiple of D).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.remat import name_activation

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
