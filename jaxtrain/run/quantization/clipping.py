"""AWQ's clipping search: the range of each weight group before rounding.

A group of numbers of int4 spans its least and its largest number in even steps. Where the largest
are cut off the steps are smaller: all others are held more exactly, and those cut off less. Each
group of each output takes the one of 10 ranges, from the whole down to 11/20 of its largest
magnitude, whose part of the product on calibration text is nearest to the unclipped weight's. That
is `auto_clip` of the code of arXiv 2306.00978, which leaves queries and keys as they are: what
matters of them is their product, which this error does not tell.

Letters: L layers, N tokens of the calibration, I what is summed over, O what comes of it, G groups,
S and U the numbers of a group.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.nn.matmul.quantized import dequantize, quantize

RANGES = 10  # shares of the largest magnitude: 1, 19/20, .., 11/20
_READ_BY = {"value": "query", "out": "out", "gate": "gate", "up": "gate", "down": "down"}
READ = tuple(dict.fromkeys(_READ_BY.values()))  # the weights whose inputs are asked for


@functools.partial(jax.jit, static_argnames="group")
def clip_weight(
    x_NI: jax.Array, weight_IO: jax.Array, *, group: int
) -> tuple[jax.Array, jax.Array]:
    """A weight with each group of each output clipped, and the shares [G, O] of its range that are
    left.

    Args:
      x_NI: what it reads on calibration text.
      weight_IO: the weight, float32.
      group: numbers that share a scale of int4.
    """
    x_NGS = x_NI.reshape(len(x_NI), -1, group)
    weight_GSO = weight_IO.reshape(-1, group, weight_IO.shape[-1])
    # The squared error over all tokens is d^T (x^T x) d: the tokens are summed over once.
    squares_GSU = jnp.einsum("NGS,NGU->GSU", x_NGS, x_NGS)
    largest_GO = jnp.abs(weight_GSO).max(1)

    def cut(share_GO: jax.Array) -> jax.Array:
        most_GSO = (share_GO * largest_GO)[:, None]
        return jnp.clip(weight_GSO, -most_GSO, most_GSO)

    def error(share: jax.Array) -> jax.Array:
        whole_IO = cut(share).reshape(weight_IO.shape)
        few = quantize(whole_IO, ("embed", "mlp"), (0,), "int4", group=group)
        d_GSO = dequantize(few).reshape(weight_GSO.shape) - weight_GSO
        return jnp.einsum("GSO,GSU,GUO->GO", d_GSO, squares_GSU, d_GSO)

    shares = 1 - jnp.arange(RANGES, dtype=jnp.float32) / (2 * RANGES)
    best_GO = shares[jnp.argmin(jax.lax.map(error, shares), 0)]
    return cut(best_GO).reshape(weight_IO.shape), best_GO


def clip(
    weights: dict[str, np.ndarray],
    seen: Mapping[str, np.ndarray],
    *,
    group: int,
    say: Callable[[str], None],
) -> None:
    """Clips the weights of a Llama's layers in place, but for queries and keys.

    Args:
      weights: its parameters by name, float32, the layers in their order.
      seen: what the weights of READ read, [L, N, I].
      group: numbers that share a scale of int4.
      say: takes a line for people.
    """
    left = []
    for name, reader in _READ_BY.items():
        whole = weights[f"layers/{name}"]
        for layer, x_NI in enumerate(seen[reader]):
            weight_IO = whole[layer].reshape(x_NI.shape[1], -1)
            found, best_GO = clip_weight(x_NI, weight_IO, group=group)
            whole[layer] = np.asarray(found).reshape(whole[layer].shape)
            left.append(float(best_GO.mean()))
    say(f"{', '.join(_READ_BY)}: clipped to {np.mean(left):.0%} of their groups' ranges (the mean)")
