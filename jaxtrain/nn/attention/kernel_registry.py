"""Registry of attention kernels: which one 'auto' chooses and why, and what each supports.

The reference and XLA kernels, which run everywhere, are here; the others in modules of their own.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.attention.mask import Mask, apply_softcap
from jaxtrain.nn.attention.patterns import Pattern
from jaxtrain.parallel.devices import OLD_GPU
from jaxtrain.parallel.sharding import reshape

# The Pallas kernels of TPUs and of GPUs work on whole tiles of this many queries and keys.
TILE = 128

# (q_BTNH, k_BSKH, v_BSKH, mask) -> attention output [B, T, N, H]; mask is a Mask.
Run = Callable[..., jax.Array]

# Order in which 'auto' tries kernels, the fastest first: on CPUs as measured
# (benchmarks/history/cpu.md), elsewhere as published, not by us. 'reference' supports everything.
_ON_GPUS = ("cudnn", "triton", "xla", "reference")
_FASTEST_FIRST = {
    "cpu": ("blocked", "xla", "reference"),
    "gpu": _ON_GPUS,
    OLD_GPU: _ON_GPUS,
    "tpu": ("tpu", "xla", "reference"),
}
_OTHERWISE = ("xla", "reference")
# No GPU flash kernel supports sinks. From this length on, scores of all pairs cost more than blocks
# in plain JAX: 64 heads of 2,048 tokens are 3 GB per row in float32, with gradients.
_LONG_WITH_SINKS = 2048
_OF_SINKS = ("cudnn", "triton", "blocked", "xla", "reference")
# The others compute all pairs of tokens, of which a pattern masks most.
_OF_PATTERNS = ("sparse", "xla", "reference")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is required of a kernel.

    Attributes:
      platform: 'cpu', 'gpu', OLD_GPU or 'tpu'.
      dtype: of queries, keys and values.
      causal: as in Mask.
      window: as in Mask.
      segment_ids: whether documents are masked from each other.
      cached: whether keys and values come from a key-value cache.
      head_dim: width of one head.
      T: queries.
      S: keys.
      in_ring: whether a ring over Mesh.context merges the results of several blocks of keys.
      biased: whether scores have a bias: `Mask.bias_CNTS`.
      capped: whether they are soft-capped: `Mask.softcap`.
      sinks: whether there are attention sinks: `Mask.sinks_N`.
      pattern: as in Mask.
    """

    platform: str
    dtype: str
    causal: bool
    window: int | None
    segment_ids: bool
    cached: bool
    head_dim: int
    T: int
    S: int
    in_ring: bool = False
    biased: bool = False
    capped: bool = False
    sinks: bool = False
    pattern: Pattern | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to compute attention.

    Attributes:
      run: the computation, on one device.
      cannot: yields the reasons why it does not support a request.
      plain: whether it consists of matmuls over all pairs of tokens: XLA then splits it over
        devices, a ring over Mesh.context computes it block by block, and the scores are saved for
        the backward pass. Any other runs on each device's rows and heads, and saves no scores.
      skips_hidden: whether it skips blocks that a causal mask hides.
      by_pattern: whether it computes a pattern's scores alone, which plans count as traced.
      only_on: "gpu" or "tpu", if it runs nowhere else.
      interpreted: `run` without that chip, slowly, for proofs; None if not available.
    """

    run: Run
    cannot: Callable[[Request], list[str]]
    plain: bool = False
    skips_hidden: bool = False
    by_pattern: bool = False
    only_on: str | None = None
    interpreted: Run | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """Choice of a kernel.

    Attributes:
      kernel: its name; never 'auto'.
      why: a clause for messages: what was requested, or why the faster kernels cannot be used.
    """

    kernel: str
    why: str


def validate(kernel: str, request: Request) -> Iterator[str]:
    """Yield each reason why `kernel` does not support a request; `context` checks rings."""
    for reason in KERNELS[kernel].cannot(request):
        able = choose(request).kernel
        yield f"Attention.kernel={kernel!r} {reason}; the nearest kernel that can is {able!r}"


def choose(request: Request) -> Choice:
    """Return the fastest kernel for a request on its platform, and the reason."""
    passed_over = []
    kernels = _FASTEST_FIRST.get(request.platform, _OTHERWISE)
    if kernels is _ON_GPUS and request.sinks and request.T >= _LONG_WITH_SINKS:
        kernels = _OF_SINKS
    for kernel in kernels if request.pattern is None else _OF_PATTERNS:
        reasons = KERNELS[kernel].cannot(request)
        if request.in_ring and not KERNELS[kernel].plain:
            reasons.append(
                "returns no log-sum-exp, which a ring over Mesh.context needs to merge its blocks"
            )
        if not reasons:
            first = f"the first choice on a {request.platform}"
            if request.pattern is not None:
                first = f"the one that computes only what a {type(request.pattern).__name__} shows"
            why = "; ".join(passed_over) or first
            return Choice(kernel, why)
        passed_over += [f"{kernel!r} {reason}" for reason in reasons]
    raise AssertionError("'reference' can do everything")


# -- kernels and their limits ----------------------------------------------------------------------


def _anything(_: Request) -> list[str]:
    return []


def _not_in_a_cache(request: Request) -> list[str]:
    no = "does not support queries that start in the middle of a key-value cache"
    return [no] if request.cached else []


def _not_biased(request: Request) -> list[str]:
    return ["does not add relative positions to the scores"] if request.biased else []


def _not_capped(request: Request) -> list[str]:
    return ["does not support a soft cap on the scores"] if request.capped else []


def _not_with_sinks(request: Request) -> list[str]:
    return ["has no attention sinks"] if request.sinks else []


def _not_by_pattern(request: Request) -> list[str]:
    if request.pattern is None:
        return []
    return [f"does not support patterns (here {type(request.pattern).__name__})"]


def _not_by_tiles(request: Request) -> list[str]:
    return [*_not_by_splash(request), *_not_capped(request), *_not_with_sinks(request)]


def _not_by_splash(request: Request) -> list[str]:
    return _not_in_a_cache(request) + _not_biased(request) + _not_by_pattern(request)


def _not_sparse(request: Request) -> list[str]:
    reasons = _not_in_a_cache(request) + _not_biased(request) + _not_with_sinks(request)
    if request.window is not None:
        reasons.append(f"does not support a window with a pattern (here {request.window})")
    if request.pattern is None:
        reasons.append("computes the matmuls of a pattern, and this model has no attention_pattern")
    elif not request.causal and not request.pattern.both_ways:
        name = type(request.pattern).__name__
        reasons.append(f"has {name} for causal attention only, as it is defined")
    return reasons + _not_by_xla(request)


def _not_by_xla(request: Request) -> list[str]:
    # jax.nn.dot_product_attention needs float16 matmuls that accumulate in float32.
    if request.platform == "cpu" and request.dtype == "float16":
        return ["cannot multiply float16 on the CPU"]
    return []


def _not_by_cudnn(request: Request) -> list[str]:
    reasons = _not_by_gpus(request)
    if request.segment_ids:
        reasons.append("has no segment ids, so it cannot mask across packed documents")
    if request.window is not None and not request.causal:
        reasons.append(f"has a window (here {request.window}) for causal attention only")
    if request.head_dim % 8 or request.head_dim > 128:
        reasons.append(
            f"takes a head_dim that is a multiple of 8 up to 128, not {request.head_dim}"
        )
    return reasons


def _not_by_triton(request: Request) -> list[str]:
    reasons = _not_by_gpus(request)
    if request.window is not None:
        reasons.append(f"has no window (here {request.window})")
    if request.head_dim not in (16, 32, 64, 128):
        reasons.append(f"takes a head_dim of 16, 32, 64 or 128, not {request.head_dim}")
    return reasons + _not_whole_tiles(request, TILE)


def _not_by_gpus(request: Request) -> list[str]:
    reasons = []
    if request.platform == OLD_GPU:
        reasons.append("runs on NVIDIA GPUs from Ampere on (compute capability 8.0)")
    elif request.platform != "gpu":
        reasons.append(f"runs on NVIDIA GPUs, not on {request.platform!r}")
    return reasons + _not_of_form(request, "bfloat16", "float16") + _not_by_tiles(request)


def _not_by_tpu(request: Request) -> list[str]:
    reasons = []
    if request.platform != "tpu":
        reasons.append(f"runs on TPUs, not on {request.platform!r}")
    reasons += _not_of_form(request, "bfloat16", "float32") + _not_by_splash(request)
    return reasons + _not_whole_tiles(request, TILE)


def _not_of_form(request: Request, *dtypes: str) -> list[str]:
    if request.dtype in dtypes:
        return []
    return [f"computes in {' or '.join(dtypes)}, not in {request.dtype}"]


def _not_whole_tiles(request: Request, tile: int) -> list[str]:
    return [
        f"takes a multiple of {tile} {name}, not {length}"
        for name, length in {"queries": request.T, "keys": request.S}.items()
        if length % tile
    ]


def _in_module(module: str, name: str, **settings: Any) -> Run:
    """Return a function of a module of this package, imported when it runs: a run has one
    kernel."""

    def run(*arrays: Any) -> jax.Array:
        found = importlib.import_module(f"jaxtrain.nn.attention.{module}")
        return getattr(found, name)(*arrays, **settings)

    return run


# -- the kernels of every platform: every mask, all scores materialized -------------------------
# Letters: B batch, T query length, S key length, N query heads, K kv heads, G = N / K, H head_dim,
# C copies.

_HIDDEN = jnp.finfo(jnp.float32).min


def reference(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    """Einsums in float32, whatever the arrays' dtype."""
    # Upcast, not preferred_element_type: the CPU has no float16 matmuls.
    q, k, v = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
    return _by_einsums(q, k, v, mask).astype(q_BTNH.dtype)


def xla(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    """`jax.nn.dot_product_attention`, in the arrays' dtype; einsums for unsupported masks."""
    if mask.softcap is not None or mask.sinks_N is not None or mask.pattern is not None:
        return _by_einsums(q_BTNH, k_BSKH, v_BSKH, mask)
    visible = mask.visible(q_BTNH.shape[1], k_BSKH.shape[1])
    bias = None if mask.bias_CNTS is None else _of_rows(mask.bias_CNTS, q_BTNH).astype(q_BTNH.dtype)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, bias=bias, mask=visible, implementation="xla"
    )


def _by_einsums(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    """Matmuls in the arrays' dtype, scores and softmax in float32."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    logits = apply_softcap(logits * H**-0.5, mask.softcap)
    if mask.bias_CNTS is not None:
        bias = _of_rows(mask.bias_CNTS, q_BTNH).astype(jnp.float32)
        logits += bias.reshape(bias.shape[0], K, N // K, T, S)
    visible = mask.visible(T, S)
    if visible is not None:
        logits = jnp.where(visible[:, :, None], logits, _HIDDEN)
    times = mask.times(T, S, N)
    if times is not None:
        times = times.reshape(times.shape[0], -1, N // K if times.shape[1] > 1 else 1, T, S)
        logits += jnp.log(jnp.maximum(times, 1).astype(jnp.float32))
        logits = jnp.where(times > 0, logits, _HIDDEN)
    weights = _softmax(logits, mask.sinks_N).astype(v_BSKH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH).reshape(B, T, N, H)


def _of_rows(bias_CNTS: jax.Array, q_BTNH: jax.Array) -> jax.Array:
    """Bias of the scores of each row, [1 or B, N, T, S]."""
    C, *rest = bias_CNTS.shape
    if C == 1:
        return bias_CNTS
    rows, *parts = jax.typeof(bias_CNTS).sharding.spec
    chunked = (C, q_BTNH.shape[0] // C, *rest)
    spread = jax.lax.broadcast_in_dim(
        bias_CNTS, chunked, (0, 2, 3, 4), out_sharding=P(rows, None, *parts)
    )
    return reshape(spread, (q_BTNH.shape[0], *rest), (rows, *parts))


def _softmax(logits_BKGTS: jax.Array, sinks_N: jax.Array | None) -> jax.Array:
    """Softmax over the keys and an optional sink."""
    if sinks_N is None:
        return jax.nn.softmax(logits_BKGTS, axis=-1)
    sinks = sinks_N.reshape(*logits_BKGTS.shape[1:3], 1, 1)
    top = jax.lax.stop_gradient(jnp.maximum(logits_BKGTS.max(-1, keepdims=True), sinks))
    weights = jnp.exp(logits_BKGTS - top)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks - top))


# Kernels by their names in Attention.kernel.
KERNELS = {
    "reference": Kernel(run=reference, cannot=_anything, plain=True),
    "xla": Kernel(run=xla, cannot=_not_by_xla, plain=True),
    "sparse": Kernel(
        run=_in_module("sparse", "sparse_attention"), cannot=_not_sparse, by_pattern=True
    ),
    "blocked": Kernel(
        run=_in_module("blocked", "blocked_attention"), cannot=_not_by_splash, skips_hidden=True
    ),
    "cudnn": Kernel(
        run=_in_module("flash", "cudnn"), cannot=_not_by_cudnn, skips_hidden=True, only_on="gpu"
    ),
    "triton": Kernel(
        run=_in_module("flash", "triton"),
        cannot=_not_by_triton,
        skips_hidden=True,
        only_on="gpu",
        interpreted=_in_module("flash", "triton", interpret=True),
    ),
    "tpu": Kernel(
        run=_in_module("flash", "tpu"),
        cannot=_not_by_tpu,
        skips_hidden=True,
        only_on="tpu",
        interpreted=_in_module("flash", "tpu", interpret=True),
    ),
}
