"""AWQ (arXiv 2306.00978): calibration, scales per channel, and clipping that reduce rounding error.

A weight W [I, O] becomes Q(s W), and its input x / s: the results are the same except for
rounding, which affects upscaled channels less. s = m^alpha, m being the mean magnitude of
each channel on calibration text, and alpha the one of 20 between 0 and 1 whose outputs on that
text are nearest to those of W (section 3.2 there). 1 / s is folded into the producer of x, a norm's
scale or another weight, so that the model's structure is unchanged.

The second search is for the range of each weight group. A group of int4 values spans its minimum
and its maximum in even steps. If the largest are clipped the steps are smaller: all others are
more exact, and those clipped less. Each group of each output takes the best of 10 ranges,
from the full range down to 11/20 of its largest magnitude, by how close its part of the output on
calibration text is to the unclipped weight's. That is `auto_clip` of the code of arXiv 2306.00978,
which does not change queries and keys: their scores matter, which this error does
not show.

Letters: B rows, T length, L layers, N tokens of the calibration, I contracted, O output,
G groups, S and U the values of a group.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.models.model import Model
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.dropout import Draws
from jaxtrain.nn.matmul.contract import Einsum, StructuredWeight, contract
from jaxtrain.nn.matmul.quantized import dequantize, quantize
from jaxtrain.nn.remat import POLICIES
from jaxtrain.nn.transformer.language_model import hidden_states
from jaxtrain.parallel.sharding import by_name, logical_axes, shard
from jaxtrain.run.generation.decoding import ROWS, for_one_text
from jaxtrain.training.finetune.quantized_base import sides_of
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState

ROWS_MOST, LENGTH_MOST = 8, 512  # of the text that is read
EVERY = 4  # sampling interval of its tokens


def rows_of(tokens: list[int], context_length: int) -> np.ndarray:
    """Return rows int32 [B, T] evenly spaced over a text; at least one, of all of a short one."""
    length = min(len(tokens), LENGTH_MOST, context_length)
    rows = min(ROWS_MOST, len(tokens) // length)
    starts = np.linspace(0, len(tokens) - length, rows).astype(int)
    return np.stack([tokens[start : start + length] for start in starts]).astype(np.int32)


def read_by(
    setup: Setup, state: TrainState, tokens_BT: np.ndarray, names: list[str]
) -> dict[str, np.ndarray]:
    """Return the inputs of weights, float32 [L, N, I], by their names below `layers/`.

    Args:
      setup: the synchronous program, of a model that reads tokens.
      state: its state.
      tokens_BT: the text, each row separate.
      names: of weights, such as `query`.
    """
    execution = dataclasses.replace(setup.execution, kernel="reference", remat=POLICIES["full"])
    precision = dataclasses.replace(setup.precision, compute="float32")
    setup = dataclasses.replace(
        setup, layout=for_one_text(setup.layout), execution=execution, precision=precision
    )
    with setup.layout.active(), setup.precision.products():
        found = _read_by(setup, state, tokens_BT, tuple(names))
        return {name: np.asarray(x) for name, x in found.items()}


@functools.partial(jax.jit, static_argnames=("setup", "names"))
def _read_by(
    setup: Setup, state: TrainState, tokens_BT: jax.Array, names: tuple[str, ...]
) -> dict[str, jax.Array]:
    graphdef, params, rest = nnx.split(setup.model(state), nnx.Param, ...)
    variables = by_name(params)
    kept = tokens_BT.shape[0] * -(-tokens_BT.shape[1] // EVERY)

    def probe(name: str) -> jax.Array:
        weight = variables[f"layers/{name}"]
        shape = weight.get_value().shape
        summed = math.prod(shape[i] for i in sides_of(logical_axes(weight))[0])
        return jnp.zeros((shape[0], kept, summed))

    def total(probes: dict[str, jax.Array]) -> jax.Array:
        watched: dict[Any, Any] = dict(nnx.to_flat_state(params))
        for name, one in probes.items():
            weight = watched["layers", name]
            watched["layers", name] = weight.replace(Watched(weight.get_value(), one, EVERY))
        model = nnx.merge(graphdef, nnx.from_flat_state(watched), rest)
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        rows = shard(tokens_BT, ROWS), shard(positions_BT, ROWS)
        return hidden_states(model, *rows, Mask(), setup.execution)[0].sum()

    return jax.grad(total)({name: probe(name) for name in names})


RANGES = 10  # shares of the largest magnitude: 1, 19/20, .., 11/20
_READ_BY = {"value": "query", "out": "out", "gate": "gate", "up": "gate", "down": "down"}
READ = tuple(dict.fromkeys(_READ_BY.values()))  # the weights whose inputs are captured


@functools.partial(jax.jit, static_argnames="group")
def clip_weight(
    x_NI: jax.Array, weight_IO: jax.Array, *, group: int
) -> tuple[jax.Array, jax.Array]:
    """Return a weight with each group of each output clipped, and the shares [G, O] of its range
    that are left.

    Args:
      x_NI: its inputs on calibration text.
      weight_IO: the weight, float32.
      group: elements that share a scale in int4.
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
    report: Callable[[str], None],
) -> None:
    """Clip the weights of a Llama's layers in place, except queries and keys.

    Args:
      weights: its parameters by name, float32, the layers in their order.
      seen: inputs of the weights of READ, [L, N, I].
      group: elements that share a scale in int4.
      report: called with each line to print.
    """
    ratios = []
    for name, reader in _READ_BY.items():
        whole = weights[f"layers/{name}"]
        for layer, x_NI in enumerate(seen[reader]):
            weight_IO = whole[layer].reshape(x_NI.shape[1], -1)
            found, best_GO = clip_weight(x_NI, weight_IO, group=group)
            whole[layer] = np.asarray(found).reshape(whole[layer].shape)
            ratios.append(float(best_GO.mean()))
    report(
        f"{', '.join(_READ_BY)}: clipped to {np.mean(ratios):.0%} of their groups' range on average"
    )


STEPS = 20  # values of alpha: 0, 1/20, .., 19/20
_LEAST = 1e-4  # of a scale


@dataclasses.dataclass(frozen=True)
class Readers:
    """Weights with a common input, and its producers.

    Attributes:
      readers: their names, below `layers/`.
      makers: names of the parameters whose last dimensions are the channels that the readers
        contract: a norm's scale, or a weight with its bias.
    """

    readers: tuple[str, ...]
    makers: tuple[str, ...]


def scaling_groups(model: Model) -> tuple[Readers, ...]:
    """Return the weights of a model's layers that can be scaled; none for models other than Llama.

    The input of `out` are values, each of which serves several heads with grouped queries: there
    it are unchanged.
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
    """Return the scales s [I] of one weight, or of several side by side, and the alpha that made
    them.

    Args:
      x_NI: its inputs on calibration text.
      weight_IO: the weight, float32.
      group: elements that share a scale in int4.
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
    report: Callable[[str], None],
) -> None:
    """Scale a model's weights in place; its function is the same except for rounding.

    Args:
      weights: its parameters by name, float32, the layers in their order.
      seen: inputs of the first weight of each `Readers`, [L, N, I]; updated in place to the inputs
        of the scaled model.
      of: from `scaling_groups`.
      group: elements that share a scale in int4.
      report: called with each line to print.
    """
    # All are searched before any is scaled: one's input is another's output.
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
            # Its last dimensions are the channels: [.., K, H] for values, [.., F] for others.
            channels = whole.shape[-2:] if name.startswith("value") else whole.shape[-1:]
            between = whole.ndim - 1 - len(channels)
            whole /= scales_LI.reshape(-1, *[1] * between, *channels)
        middle = f"{np.median(alphas_L):.2f}"
        report(
            f"{', '.join(one.readers)}: scaled by their inputs' size to the {middle} (the median)"
        )


def _of_layers(
    weights: Mapping[str, np.ndarray], seen_LNI: np.ndarray, one: Readers, group: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales [L, I] and the alphas [L] of all layers."""
    scales, alphas = [], []
    for layer, x_NI in enumerate(seen_LNI):
        side_by_side = [
            weights[f"layers/{name}"][layer].reshape(x_NI.shape[1], -1) for name in one.readers
        ]
        s_I, alpha = best_scales(x_NI, np.concatenate(side_by_side, 1), group=group)
        scales.append(np.asarray(s_I))
        alphas.append(float(alpha))
    return np.stack(scales), np.array(alphas)


# -- matmuls that expose their input activations, for calibration ----------------------------------
# Layers in a scan return theirs stacked, and models need no change. Letters: B batch, T length, I
# contracted.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched(StructuredWeight):
    """Value of a parameter whose inputs are captured.

    Attributes:
      weight: the weight.
      probe: zeros [B * ceil(T / every), I], float32.
      every: one of this many tokens of a row is returned.
    """

    weight: jax.Array
    probe: jax.Array
    every: int = dataclasses.field(metadata={"static": True})

    def contract(
        self,
        equation: str,
        x: jax.Array,
        weight: nnx.Param,
        out: tuple[str, ...] | None,
        *,
        by: Einsum,
        draws: Draws | None,
        layer: jax.Array | int | None,
    ) -> jax.Array:
        """As in StructuredWeight, of x [B, T, ...].

        The probe's gradient is x, whatever is differentiated; x itself has none.
        """
        del draws, layer
        base: Any = weight.replace(self.weight)
        return contract(equation, _show(self.every, x, self.probe), base, out, by=by)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _show(every: int, x: jax.Array, probe: jax.Array) -> jax.Array:
    del every, probe
    return x


def _forward(every: int, x: jax.Array, probe: jax.Array) -> tuple[jax.Array, jax.Array]:
    del every, probe
    return x, x


def _backward(every: int, x: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    seen = x if jax.sharding.get_abstract_mesh().empty else jax.sharding.reshard(x, P())
    seen = seen[:, ::every].astype(jnp.float32)
    return jnp.zeros_like(gradient), seen.reshape(-1, math.prod(seen.shape[2:]))


_show.defvjp(_forward, _backward)
