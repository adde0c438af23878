"""AWQ (arXiv 2306.00978): search for per-channel scales that reduce rounding error.

A weight W [I, O] becomes Q(s W), and what it reads x / s: the products are the same but for
rounding, which harms channels less that are scaled up. s = m^alpha, m being the mean magnitude of
each channel on calibration text, and alpha the one of 20 between 0 and 1 whose products on that
text are nearest to those of W (section 3.2 there). 1 / s goes into what makes x, a norm's scale or
another weight, so that the model keeps its form. The second search is `clipping`'s.

Letters: L layers, N tokens of the calibration, I what is summed over, O what comes of it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models.model import Model
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.matmul.quantized import dequantize, quantize

STEPS = 20  # values of alpha: 0, 1/20, .., 19/20
_LEAST = 1e-4  # of a scale


@dataclasses.dataclass(frozen=True)
class Readers:
    """Weights that read the same, and what makes it.

    Attributes:
      readers: their names, below `layers/`.
      makers: names of the parameters whose last dimensions are the channels that the readers sum
        over: a norm's scale, or a weight with its bias.
    """

    readers: tuple[str, ...]
    makers: tuple[str, ...]


def scaling_groups(model: Model) -> tuple[Readers, ...]:
    """The weights of a model's layers that can be scaled; none of a model that is no Llama.

    What `out` reads are values, each of which serves several heads where queries are grouped: there
    it stays as it is.
    """
    if not isinstance(model, Llama):
        return ()
    found = [
        Readers(("query", "key", "value"), ("attention_norm_scale",)),
        Readers(("gate", "up"), ("mlp_norm_scale",)),
        Readers(("down",), ("up",)),
    ]
    if model.num_kv_heads == model.num_heads:
        bias = ("value_bias",) if model.qkv_bias else ()
        found.append(Readers(("out",), ("value", *bias)))
    return tuple(found)


@functools.partial(jax.jit, static_argnames="group")
def best_scales(
    x_NI: jax.Array, weight_IO: jax.Array, *, group: int
) -> tuple[jax.Array, jax.Array]:
    """The scales s [I] of one weight, or of several side by side, and the alpha that made them.

    Args:
      x_NI: what it reads on calibration text.
      weight_IO: the weight, float32.
      group: numbers that share a scale of int4.
    """
    made_NO = x_NI @ weight_IO
    size_I = jnp.abs(x_NI).mean(0)

    def scales(alpha: jax.Array) -> jax.Array:
        s_I = jnp.maximum(size_I**alpha, _LEAST)
        return s_I / jnp.sqrt(s_I.max() * s_I.min())

    def error(alpha: jax.Array) -> jax.Array:
        s_I = scales(alpha)
        axes = ("embed", "mlp")
        few = quantize(weight_IO * s_I[:, None], axes, (0,), "int4", group=group)
        return jnp.square((x_NI / s_I) @ dequantize(few) - made_NO).mean()

    alphas = jnp.arange(STEPS, dtype=jnp.float32) / STEPS
    alpha = alphas[jnp.argmin(jax.lax.map(error, alphas))]
    return scales(alpha), alpha


def scale(
    weights: dict[str, np.ndarray],
    seen: dict[str, np.ndarray],
    of: tuple[Readers, ...],
    *,
    group: int,
    say: Callable[[str], None],
) -> None:
    """Scales a model's weights in place; what it computes is the same but for rounding.

    Args:
      weights: its parameters by name, float32, the layers in their order.
      seen: what weights read, the first of each `Readers` among them, [L, N, I]; in place what they
        read of the scaled model.
      of: from `scaling_groups`.
      group: numbers that share a scale of int4.
      say: takes a line for people.
    """
    # All are found before any is scaled: what one reads, another makes.
    found = {one: _of_layers(weights, seen[one.readers[0]], one, group) for one in of}
    for one, (scales_LI, alphas_L) in found.items():
        seen[one.readers[0]] = seen[one.readers[0]] / scales_LI[:, None]
        for name in one.readers:
            whole = weights[f"layers/{name}"]
            inside = whole.shape[1:-1] if name == "out" else whole.shape[1:2]
            factor = scales_LI.reshape(-1, *inside)
            whole *= factor.reshape(*factor.shape, *[1] * (whole.ndim - factor.ndim))
        for name in one.makers:
            whole = weights[f"layers/{name}"]
            # Its last dimensions are the channels: [.., K, H] of values, [.., F] of others.
            channels = whole.shape[-2:] if name.startswith("value") else whole.shape[-1:]
            between = whole.ndim - 1 - len(channels)
            whole /= scales_LI.reshape(-1, *[1] * between, *channels)
        middle = f"{np.median(alphas_L):.2f}"
        say(f"{', '.join(one.readers)}: scaled by their inputs' size to the {middle} (the median)")


def _of_layers(
    weights: Mapping[str, np.ndarray], seen_LNI: np.ndarray, one: Readers, group: int
) -> tuple[np.ndarray, np.ndarray]:
    """The scales [L, I] and the alphas [L] of all layers."""
    scales, alphas = [], []
    for layer, x_NI in enumerate(seen_LNI):
        side_by_side = [
            weights[f"layers/{name}"][layer].reshape(x_NI.shape[1], -1) for name in one.readers
        ]
        s_I, alpha = best_scales(x_NI, np.concatenate(side_by_side, 1), group=group)
        scales.append(np.asarray(s_I))
        alphas.append(float(alpha))
    return np.stack(scales), np.array(alphas)
