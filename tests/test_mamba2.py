"""Mamba 2's scan in chunks, place after place; and what it rejects."""

import jax
import numpy as np
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.models.state_space.mamba2 import Mamba2
from jaxtrain.nn.recurrent.state_space import state_space_dual

RNG = np.random.default_rng(0)
B, T, N, P, S = 2, 11, 3, 4, 5


def drawn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def inputs() -> tuple:
    goes_on = RNG.random((B, T, 1)) > 0.2
    step, rate = np.exp(drawn(B, T, N) - 1), -np.exp(drawn(N))
    return drawn(B, T, N, P), step, rate, drawn(B, T, S), drawn(B, T, S), goes_on, drawn(B, N, P, S)


def one_after_another(x, step, rate, into, out, goes_on, state):
    found = []
    for t in range(T):
        state = np.where(goes_on[:, t, :, None, None], state, 0)
        state = state * np.exp(step[:, t] * rate)[..., None, None]
        given = step[:, t, :, None] * x[:, t]
        state = state + given[..., None] * into[:, t, None, None]
        found.append((state * out[:, t, None, None]).sum(-1))
    return np.stack(found, 1), state


@pytest.mark.parametrize("chunk", [1, 4, T, 64])
def test_chunks_are_one_place_after_another(chunk):
    given = inputs()
    y, state = jax.jit(lambda *a: state_space_dual(*a, chunk=chunk))(*given)
    expected, last = one_after_another(*given)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-5)


def test_gradients_are_finite_where_a_later_place_would_be_infinite():
    """Rates so far from 0 that what is hidden overflows."""
    x, step, _, into, out, goes_on, state = inputs()
    rate = np.full(N, -300.0, np.float32)

    def total(x, step):
        return (state_space_dual(x, step, rate, into, out, goes_on, state)[0] ** 2).sum()

    for gradient in jax.jit(jax.grad(total, argnums=(0, 1)))(x, step):
        assert np.isfinite(gradient).all()


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(UserError, match=r"does not divide by Mamba2.head_dim=5; the nearest"):
        Mamba2(embed_dim=12, head_dim=5)
