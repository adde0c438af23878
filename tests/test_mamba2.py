"""Mamba 2 equals transformers', place after place too, and one device on every mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import text_batch
from tiny_models import count_parameters

from jaxtrain.config.errors import UserError
from jaxtrain.models.state_space.mamba2 import Mamba2
from jaxtrain.nn.state_space_dual import state_space_dual

SHAPES = {
    "small": Mamba2(vocab_size=64, num_layers=2, embed_dim=32, head_dim=8, state_dim=8,
                    context_length=16),
    "odd": Mamba2(vocab_size=61, num_layers=3, embed_dim=18, head_dim=4, state_dim=5, conv_width=3,
                  context_length=17),
    "one_head": Mamba2(vocab_size=23, num_layers=1, embed_dim=8, expand=3, head_dim=24, state_dim=1,
                       conv_width=2, context_length=16, norm_eps=1e-3),
}  # fmt: skip


def pair_of(sizes: Mamba2):
    pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    transformers = pytest.importorskip("transformers", reason="transformers is the peer")
    from against_transformers import Pair, draw  # noqa: PLC0415

    config = transformers.Mamba2Config(
        vocab_size=sizes.vocab_size, hidden_size=sizes.embed_dim, state_size=sizes.state_dim,
        num_hidden_layers=sizes.num_layers, expand=sizes.expand, conv_kernel=sizes.conv_width,
        num_heads=sizes.layer.num_heads, head_dim=sizes.head_dim, n_groups=1, chunk_size=4,
        layer_norm_epsilon=sizes.norm_eps, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    return Pair(sizes, draw(transformers.Mamba2ForCausalLM(config)), "mamba2")


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_gradient_equal_transformers(name):
    sizes = SHAPES[name]
    pair_of(sizes).compare(text_batch(rows=3, length=13, vocab_size=sizes.vocab_size))


def test_thirty_steps_have_the_losses_of_transformers():
    sizes = dataclasses.replace(SHAPES["small"], num_layers=1)
    pair_of(sizes).train([text_batch(rows=4, length=8, vocab_size=sizes.vocab_size, documents=1)])


def test_parameters_are_the_published_ones():
    """state-spaces/mamba2-130m: 128,989,632, its vocabulary padded to 50,288 rows."""
    sizes = Mamba2()
    D, F, N, S, K = 768, 1536, 24, 128, 4
    layer = D * (2 * F + 2 * S + N) + (F + 2 * S) * (K + 1) + 3 * N + F + F * D + D
    assert count_parameters(sizes) == 24 * layer + 50288 * D + D
    assert 24 * layer + 50288 * D + D == 128_989_632


# -- the scan --------------------------------------------------------------------------------------

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
