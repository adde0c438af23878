"""Batch norm equals PyTorch's, forward and backward, and JAX's own derivative of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.nn.normalization import batch_norm, normalize

EPSILON = 1e-5
NO_SHIFT = np.zeros(4, np.float32)


def inputs(mean: float = 0.0):
    """x [B, H, W, C], scale, bias, and the gradient that comes back, all float32."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(8, 6, 5, 4)) * [0.5, 1, 2, 4] + mean).astype(np.float32)
    scale, bias = rng.uniform(0.5, 1.5, 4), rng.normal(size=4)
    gradient = rng.normal(size=x.shape) + 0.3
    return x, *(a.astype(np.float32) for a in (scale, bias, gradient))


@pytest.mark.parametrize(("mean", "shift"), [(0, 0), (100, 100), (100, 99), (100, 0), (0, 3)])
def test_output_and_gradients_equal_torch(mean, shift):
    torch = pytest.importorskip("torch")
    x, scale, bias, gradient = inputs(mean)
    theirs = torch.nn.BatchNorm2d(4, eps=EPSILON, dtype=torch.float64)
    x_torch = torch.tensor(x.transpose(0, 3, 1, 2), dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(scale))
        theirs.bias.copy_(torch.tensor(bias))
    y_torch = theirs(x_torch)
    y_torch.backward(torch.tensor(gradient.transpose(0, 3, 1, 2), dtype=torch.float64))

    shift_C = NO_SHIFT + shift
    y, pull = jax.vjp(lambda *args: batch_norm(*args, shift_C, EPSILON)[0], x, scale, bias)
    of_x, of_scale, of_bias = pull(gradient)
    # Rounding of x - mean grows with the mean, in every float32 implementation; what the variance
    # loses, half of which the output feels, as the docstring says, for the narrowest channel.
    limit = 2e-6 * max(1, mean) + ((mean - shift) / 0.5) ** 2 * 2**-20
    for ours, expected in (
        (y, y_torch.detach().numpy().transpose(0, 2, 3, 1)),
        (of_x, x_torch.grad.numpy().transpose(0, 2, 3, 1)),
        (of_scale, theirs.weight.grad.numpy()),
        (of_bias, theirs.bias.grad.numpy()),
    ):
        np.testing.assert_allclose(ours, expected, atol=limit * np.abs(expected).max())


def test_gradients_through_mean_and_variance_are_jaxs_own():
    x, scale, bias, gradient = inputs()

    def plain(x, scale, bias):
        mean = x.mean((0, 1, 2))
        variance = jnp.square(x - mean).mean((0, 1, 2))
        return normalize(x, mean, variance, scale, bias, EPSILON), mean, variance

    back = gradient, np.arange(4, dtype=np.float32), np.arange(3, -1, -1, dtype=np.float32)
    shift_C = np.arange(4, dtype=np.float32)

    def shifted(x, scale, bias):
        return batch_norm(x, scale, bias, shift_C, EPSILON)

    ours = jax.vjp(shifted, x, scale, bias)[1](back)
    expected = jax.vjp(plain, x, scale, bias)[1](back)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max())


def test_what_is_kept_for_the_gradient_is_in_the_activations_dtype():
    """Float32 inside; of the activations nothing but x itself is kept, and bfloat16 as it came."""
    x, scale, bias, gradient = inputs()
    x16, of_y = x.astype(jnp.bfloat16), gradient.astype(jnp.bfloat16)

    def run(x):
        return batch_norm(x, scale, bias, NO_SHIFT, EPSILON)[0]

    y, pull = jax.vjp(run, x16)
    assert y.dtype == jnp.bfloat16
    assert pull(of_y)[0].dtype == jnp.bfloat16
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size == x.size]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16]
    exact = run(x16.astype(np.float32))
    np.testing.assert_allclose(y.astype(np.float32), exact, rtol=2**-8, atol=1e-6)


def test_the_backward_pass_sums_over_the_activations_twice():
    x, scale, bias, gradient = inputs()
    pull = jax.vjp(lambda x: batch_norm(x, scale, bias, NO_SHIFT, EPSILON)[0], x)[1]
    text = str(jax.make_jaxpr(pull)(gradient))
    assert text.count("reduce_sum") == 2, text


def test_the_variance_of_a_constant_far_from_the_shift_is_not_negative():
    x = np.full((8, 6, 5, 4), [1000.1, -3.3, 7e4, 0.1], np.float32)
    x[0, 0, 0] *= 1 + 2**-22  # so that sums are rounded
    y, mean, variance = batch_norm(x, np.ones(4, np.float32), NO_SHIFT, NO_SHIFT, EPSILON)
    assert (np.asarray(variance) >= 0).all()
    assert np.isfinite(y).all()
    bound = x[..., 0].size * 2**-24  # of a float32 sum, one after the other
    np.testing.assert_allclose(mean, x.mean((0, 1, 2), dtype=np.float64), rtol=bound)


def test_the_running_mean_is_the_shift_and_has_no_gradient():
    """Statistics of a mean of 100, with and without a shift: one is right to rounding."""
    x, scale, bias, _ = inputs(100.0)
    true = x.var((0, 1, 2), dtype=np.float64)

    def wrong_by(shift):
        variance = batch_norm(x, scale, bias, NO_SHIFT + shift, EPSILON)[2]
        return np.abs(np.asarray(variance) / true - 1).max()

    assert wrong_by(99.0) < 2e-6 < 1e-5 < wrong_by(0.0)
    of_shift = jax.grad(lambda s: batch_norm(x, scale, bias, s, EPSILON)[0].sum())(NO_SHIFT)
    assert not of_shift.any()
