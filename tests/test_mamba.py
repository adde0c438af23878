"""Mamba's scan and convolution in chunks, place after place; and what it rejects."""

import jax
import numpy as np
import pytest

from jaxtrain import load_config
from jaxtrain.config.errors import UserError
from jaxtrain.models.state_space.mamba import Mamba
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.recurrent.state_space import causal_convolution, selective_scan
from jaxtrain.training.preflight.preflight import check

RNG = np.random.default_rng(0)
B, T, F, S = 2, 11, 4, 3


def drawn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def inputs() -> tuple:
    goes_on = RNG.random((B, T, 1)) > 0.3
    step, decay = np.exp(drawn(B, T, F) - 1), -np.exp(drawn(F, S))
    return drawn(B, T, F), step, decay, drawn(B, T, S), drawn(B, T, S), goes_on, drawn(B, F, S)


def one_after_another(x, step, decay, into, out, goes_on, state):
    found = []
    for t in range(T):
        state = np.where(goes_on[:, t, :, None], state, 0) * np.exp(step[:, t, :, None] * decay)
        state = state + (step[:, t] * x[:, t])[..., None] * into[:, t, None]
        found.append((state * out[:, t, None]).sum(-1))
    return np.stack(found, 1), state


@pytest.mark.parametrize("chunk", [1, 4, T, 64])
def test_a_scan_in_chunks_is_one_place_after_another(chunk):
    given = inputs()
    y, state = jax.jit(lambda *a: selective_scan(*a, chunk=chunk))(*given)
    expected, last = one_after_another(*given)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-5)


def test_its_gradients_in_chunks_are_those_of_one_associative_scan():
    given = inputs()

    def total(chunk, *floats):
        y, state = selective_scan(*floats[:5], given[5], floats[5], chunk=chunk)
        return (y**2).sum() + (state**2).sum()

    floats = (*given[:5], given[6])
    found, expected = (
        jax.jit(jax.grad(total, argnums=range(1, 7)), static_argnums=0)(chunk, *floats)
        for chunk in (3, T)
    )
    for ours, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-4)


def test_a_convolution_goes_on_where_it_was_left():
    x, kernel = drawn(B, T, F), drawn(4, F)
    whole, last = causal_convolution(x, kernel, Mask(), None)
    np.testing.assert_allclose(
        whole, [[sum(kernel[3 - j] * row[t - j] for j in range(min(t, 3) + 1)) for t in range(T)]
                for row in x], rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    first, before = causal_convolution(x[:, :2], kernel, Mask(), None)
    second, after = causal_convolution(x[:, 2:], kernel, Mask(), before)
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(after, last)


@pytest.mark.parametrize(
    ("bindings", "sentence"),
    [
        (
            ["Mesh.context=2", "Mesh.data=1"],
            "Mesh.context=2: Mamba has no dimension that this axis could",
        ),
        (
            ["Mesh.tensor=2", "Sharding.tensor_layout='2d'"],
            "Sharding.tensor_layout='2d' has no eff",
        ),
        (["Attention.kernel='blocked'"], "Attention.kernel='blocked' has no effect for Mamba"),
    ],
)
def test_what_it_has_nothing_for_is_refused(tiny_config, tmp_path, bindings, sentence):
    file = tmp_path / "mamba.gin"
    text = tiny_config.read_text().replace("@GPT()", "@Mamba()").replace("GPT.", "Mamba.")
    file.write_text("\n".join(line for line in text.splitlines() if "num_heads" not in line))
    with pytest.raises(UserError, match=sentence):
        check(load_config(file, bindings), device_count=8, platform="cpu")
    with pytest.raises(UserError, match=r"Mamba.conv_width=1"):
        Mamba(conv_width=1)
