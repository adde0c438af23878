"""Verification of the attention kernel: outputs and gradients against the reference.

Letters: B batch, T length, N query heads, K kv heads, H head_dim.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.analysis.verify.measures import EQUAL, Arrays, Finding, NotChecked, worst
from jaxtrain.analysis.verify.runs import Bench
from jaxtrain.analysis.verify.sample import SEED
from jaxtrain.models.model import AttentionFacts
from jaxtrain.nn.attention.attention import attention, by_device
from jaxtrain.nn.attention.context import HEADS, KEYS, QUERIES, SEGMENTS, along_context
from jaxtrain.nn.attention.kernel_registry import KERNELS, TILE
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.training.layouts import resolve_config

RESULTS = ("output", "query gradient", "key gradient", "value gradient", "sink gradient")


def kernel_of(bench: Bench) -> str:
    """Return the name of the user's kernel, with 'auto' resolved for the simulated devices."""
    if bench.small.own.attention.kernel != "auto":
        return bench.small.own.attention.kernel
    return resolve_config(bench.within_stages.config, "cpu").attention.kernel


def kernel_name(bench: Bench) -> str:
    """Return the kernel's display name."""
    own, kernel = bench.small.own.attention.kernel, kernel_of(bench)
    return repr(own) if own == kernel else f"{own!r} (here {kernel!r})"


def compare(bench: Bench) -> Finding | NotChecked:
    """Compare the user's kernel on the mesh of one stage with the reference on one device."""
    own = kernel_of(bench)
    kernel = KERNELS[own]
    chip, interpreted = (kernel.only_on or "").upper(), kernel.interpreted
    if kernel.only_on is not None and interpreted is None:
        return NotChecked(f"{own!r} needs a {chip}; the other lines are proved with 'xla'")
    mesh, model = bench.within_stages, bench.small.config.train.model
    length = bench.batch.inputs.shape[1] if interpreted is None else TILE
    facts = model.attention
    assert facts is not None, "a kernel of a model without attention"
    inputs = _inputs(bench, facts, length)
    plain = Mask(
        causal=facts.causal, window=facts.window, softcap=facts.softcap, pattern=facts.pattern
    )
    where = ""
    if interpreted is not None:
        where = f" (interpreted: no {chip} is here; the other lines are proved with 'xla')"
        run = functools.partial(by_device, interpreted, of_one_too=True)
        found = _run(bench.one_device.layout, run, inputs, plain, "ring")
    else:
        method = mesh.config.attention.context_parallel

        def run_kernel(q: Any, k: Any, v: Any, mask: Mask) -> jax.Array:
            return attention(q, k, v, mask, kernel=own, context_parallel=method)

        found = _run(mesh.layout, run_kernel, inputs, plain, method)
    expected = _run(bench.one_device.layout, attention, inputs, plain, "ring")
    error, name = worst(found, expected)
    return Finding(error, EQUAL, f"largest in {name}{where}")


@dataclasses.dataclass(frozen=True)
class _Inputs:
    q_BTNH: np.ndarray
    k_BTKH: np.ndarray
    v_BTKH: np.ndarray
    weights_BTNH: np.ndarray
    segment_ids_BT: np.ndarray | None
    sinks_N: np.ndarray | None


def _inputs(bench: Bench, facts: AttentionFacts, length: int) -> _Inputs:
    rng = np.random.default_rng(SEED)
    rows = len(bench.batch.inputs)

    def draw(heads: int, width: int) -> np.ndarray:
        return rng.normal(size=(rows, length, heads, width)).astype(np.float32)

    segments = None
    if bench.batch.segment_ids is not None:
        segments = 1 + np.cumsum(rng.random((rows, length)) < 0.1, axis=1, dtype=np.int32)
    few, many = facts.num_kv_heads, facts.num_heads
    keys, values = facts.key_dim, facts.value_dim
    arrays = draw(many, keys), draw(few, keys), draw(few, values), draw(many, values)
    sinks = rng.normal(size=many).astype(np.float32) if facts.sinks else None
    return _Inputs(*arrays, segments, sinks)


def _run(
    layout: Any,
    attend: Callable[..., jax.Array],
    inputs: _Inputs,
    plain: Mask,
    method: str,
) -> Arrays:
    """Return the output and the gradients of its weighted sum, in token order."""

    def both(arrays: _Inputs) -> Any:
        segments: Any = arrays.segment_ids_BT
        mask = dataclasses.replace(plain, segment_ids_BT=segments, segment_ids_BS=segments)

        def weighted_sum(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            out_BTNH = attend(q, k, v, dataclasses.replace(mask, sinks_N=sinks))
            return (out_BTNH * arrays.weights_BTNH).sum(), out_BTNH

        gradient = jax.grad(weighted_sum, argnums=(0, 1, 2, 3), has_aux=True)
        gradients, out_BTNH = gradient(arrays.q_BTNH, arrays.k_BTKH, arrays.v_BTKH, arrays.sinks_N)
        return out_BTNH, *gradients

    def arrange(x_BT: jax.Array) -> jax.Array:
        return along_context(x_BT, method)

    with layout.active():
        rows, length = inputs.q_BTNH.shape[:2]
        order_BT = np.asarray(jax.jit(arrange)(jnp.tile(jnp.arange(length), (rows, 1))))
        order = order_BT[0]
        axes = {
            "q_BTNH": QUERIES, "k_BTKH": KEYS, "v_BTKH": KEYS, "weights_BTNH": QUERIES,
            "segment_ids_BT": SEGMENTS, "sinks_N": HEADS,
        }  # fmt: skip
        placed: dict[str, Any] = {"segment_ids_BT": None, "sinks_N": None}
        for field in dataclasses.fields(inputs):
            array = getattr(inputs, field.name)
            if array is not None:
                sharding = layout.sharding_of(layout.activation(axes[field.name]))
                placed[field.name] = jax.device_put(_in_order(array, order), sharding)
        compiled = jax.jit(lambda values: both(_Inputs(**values))).lower(placed).compile()
        found = [np.asarray(x) for x in jax.tree.leaves(compiled(placed))]
    back = np.argsort(order)
    return {name: _in_order(x, back) for name, x in zip(RESULTS, found, strict=False)}


def _in_order(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Permute the positions of an array; return attention sinks, which have none, unchanged."""
    return x if x.ndim == 1 else x[:, order]
