"""Batch norm equals PyTorch's, forward and backward, and JAX's own derivative of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.batch_norm import batch_norm, normalised

EPSILON = 1e-5


def inputs(mean: float = 0.0):
    """x [B, H, W, C], scale, bias, and the gradient that comes back, all float32."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(8, 6, 5, 4)) * [0.5, 1, 2, 4] + mean).astype(np.float32)
    scale, bias = rng.uniform(0.5, 1.5, 4), rng.normal(size=4)
    gradient = rng.normal(size=x.shape) + 0.3
    return x, *(a.astype(np.float32) for a in (scale, bias, gradient))


@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_output_and_gradients_equal_torch(mean):
    torch = pytest.importorskip("torch")
    x, scale, bias, gradient = inputs(mean)
    theirs = torch.nn.BatchNorm2d(4, eps=EPSILON, dtype=torch.float64)
    x_torch = torch.tensor(x.transpose(0, 3, 1, 2), dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(scale))
        theirs.bias.copy_(torch.tensor(bias))
    y_torch = theirs(x_torch)
    y_torch.backward(torch.tensor(gradient.transpose(0, 3, 1, 2), dtype=torch.float64))

    y, pull = jax.vjp(lambda *args: batch_norm(*args, EPSILON)[0], x, scale, bias)
    of_x, of_scale, of_bias = pull(gradient)
    # Rounding of x - mean grows with the mean, in every float32 implementation.
    limit = 2e-6 * max(1, mean)
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
        return normalised(x, mean, variance, scale, bias, EPSILON), mean, variance

    back = gradient, np.arange(4, dtype=np.float32), np.arange(3, -1, -1, dtype=np.float32)
    ours = jax.vjp(lambda *args: batch_norm(*args, EPSILON), x, scale, bias)[1](back)
    expected = jax.vjp(plain, x, scale, bias)[1](back)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max())


def test_what_is_kept_for_the_gradient_is_in_the_activations_dtype():
    """Float32 inside; of the activations nothing but x itself is kept, and bfloat16 as it came."""
    x, scale, bias, gradient = inputs()
    x16, of_y = x.astype(jnp.bfloat16), gradient.astype(jnp.bfloat16)

    def run(x):
        return batch_norm(x, scale, bias, EPSILON)[0]

    y, pull = jax.vjp(run, x16)
    assert y.dtype == jnp.bfloat16
    assert pull(of_y)[0].dtype == jnp.bfloat16
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size == x.size]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16]
    exact = run(x16.astype(np.float32))
    np.testing.assert_allclose(y.astype(np.float32), exact, rtol=2**-8, atol=1e-6)


def test_the_backward_pass_sums_over_the_activations_twice():
    x, scale, bias, gradient = inputs()
    pull = jax.vjp(lambda x: batch_norm(x, scale, bias, EPSILON)[0], x)[1]
    text = str(jax.make_jaxpr(pull)(gradient))
    assert text.count("reduce_sum") == 2, text
