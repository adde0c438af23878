"""attention(q, k, v, mask): the reference and every kernel behind one signature.

Letters: B batch, T query length, S key length, N query heads, K kv heads, G = N / K, H head_dim.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention as pallas_gpu
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float, Int

from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable
from jaxtrain.nn.attention import context
from jaxtrain.nn.attention.blocked import blocked_attention
from jaxtrain.nn.attention.context import KEYS, QUERIES, SEGMENTS, ContextParallel
from jaxtrain.nn.attention.kernels import TILE, Kernel, Request, refuse
from jaxtrain.nn.attention.ring import ring_attention
from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.sharding import activation_spec, current_layout, on_each_device, shard


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Which attention kernel runs, and how where a sequence is split over the mesh.

    Attributes:
      kernel: 'auto' (the fastest one on the platform that can do what this run needs; a run and a
        plan say which, and why); 'reference' (plain einsums in float32, every mask, every dtype);
        'xla' (jax.nn.dot_product_attention as XLA compiles it, every mask); 'blocked' (tiles that
        fit a CPU's cache, every mask and dtype); 'cudnn' (cuDNN's flash attention, NVIDIA GPUs, no
        segment ids); 'triton' (a Pallas kernel for NVIDIA GPUs that ships with JAX, with segment
        ids); 'tpu' (splash attention, a Pallas kernel that ships with JAX).
        What a named kernel cannot do is refused, never handed to another one.
      context_parallel: what Mesh.context above 1 does: 'ring' sends keys and values around
        (kernels 'reference' and 'xla', whose products the ring does block by block); 'ulysses'
        exchanges heads for whole sequences, with any kernel.
    """

    kernel: Kernel = "auto"
    context_parallel: ContextParallel = "ring"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query sees; all conditions hold together.

    Attributes:
      causal: a query at place t sees keys at places <= t.
      window: a query at place t sees keys at places > t - window; None is no limit.
      segment_ids_BT, segment_ids_BS: documents of queries and keys: a query sees its own document.
      query_start: the place of the first query among the keys, where these come from a key-value
        cache; None where there is no cache and queries and keys start together.
    """

    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    segment_ids_BT: Int[Array, "B T"] | None = None
    segment_ids_BS: Int[Array, "B S"] | None = None
    query_start: Int[Array, ""] | int | None = None

    def visible(self, T: int, S: int) -> jax.Array | None:
        """Booleans [1 or B, 1, T, S]; None where every query sees every key."""
        query = jnp.arange(T)[:, None] + (0 if self.query_start is None else self.query_start)
        key = jnp.arange(S)[None, :]
        seen = None
        if self.causal:
            seen = (key <= query)[None, None]
        if self.window is not None:
            near = (key > query - self.window)[None, None]
            seen = near if seen is None else seen & near
        if self.segment_ids_BT is not None:
            assert self.segment_ids_BS is not None, "segment ids of the queries but not of the keys"
            same = self.segment_ids_BT[:, :, None] == self.segment_ids_BS[:, None, :]
            seen = same[:, None] if seen is None else seen & same[:, None]
        return seen


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask: Mask,
    *,
    kernel: str = "reference",
    context_parallel: str = "ring",
) -> Float[Array, "B T N H"]:
    """softmax(q k / sqrt(H)) v over the visible keys, softmax in float32, N a multiple of K.

    Where the layout splits sequences, `context_parallel` says how they are put together, and the
    tokens must lie as `jaxtrain.nn.attention.context.along_context` lays them for it. The
    kernel has a name of its own: what 'auto' means, `training.program.resolve_kernel` settles.

    Raises:
      UserError: while tracing, if the kernel cannot do this; all reasons in one message.
    """
    request = Request(
        platform=platform_of(jax.sharding.get_abstract_mesh()),
        dtype=q_BTNH.dtype.name,
        causal=mask.causal,
        window=mask.window,
        segment_ids=mask.segment_ids_BT is not None,
        cached=mask.query_start is not None,
        head_dim=q_BTNH.shape[-1],
        T=q_BTNH.shape[1],
        S=k_BSKH.shape[1],
    )
    refusals = list(refuse(kernel, request))
    parts, layout = context.split(), current_layout()
    if parts > 1:
        assert layout is not None, "only a layout splits"
        refusals += context.refuse(
            context_parallel,
            context=parts,
            length=q_BTNH.shape[1],
            tensor=layout.size(layout.activation(("heads",))[0]),
            num_heads=q_BTNH.shape[2],
            kernel=kernel,
        )
    if refusals:
        raise UserError("\n".join(refusals))
    if parts > 1:
        assert mask.query_start is None, "a key-value cache is not split"
        if context_parallel == "ulysses":
            return context.ulysses(_ON_ONE_DEVICE[kernel], q_BTNH, k_BSKH, v_BSKH, mask)
        return ring_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            causal=mask.causal,
            window=mask.window,
            segment_ids_BT=mask.segment_ids_BT,
            segment_ids_BS=mask.segment_ids_BS,
            exact=kernel == "reference",
        )
    return _KERNELS[kernel](q_BTNH, k_BSKH, v_BSKH, mask)


# -- the kernels ----------------------------------------------------------------------------------


def _reference(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    # Upcast, not preferred_element_type: the CPU has no float16 products.
    q, k, v = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", q.reshape(B, T, K, N // K, H), k) * H**-0.5
    visible = mask.visible(T, S)
    if visible is not None:
        logits = jnp.where(visible[:, :, None], logits, jnp.finfo(jnp.float32).min)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(logits, axis=-1), v)
    return out.reshape(B, T, N, H).astype(q_BTNH.dtype)


def _xla(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    visible = mask.visible(q_BTNH.shape[1], k_BSKH.shape[1])
    return jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, mask=visible, implementation="xla")


def _cudnn(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    return _on_each_device(_cudnn_on_one_device, q_BTNH, k_BSKH, v_BSKH, mask)


def _cudnn_on_one_device(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask
) -> jax.Array:
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        is_causal=mask.causal,
        # Keys on either side besides the query's own place.
        local_window_size=None if mask.window is None else (mask.window - 1, 0),
        implementation="cudnn",
    )


def _triton(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: Mask,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Pallas's flash attention for GPUs; `interpret` runs its code without one, for tests."""
    run = functools.partial(_triton_on_one_device, interpret=interpret)
    return _on_each_device(run, q_BTNH, k_BSKH, v_BSKH, mask, of_one_too=interpret)


def _triton_on_one_device(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, *, interpret: bool = False
) -> jax.Array:
    # The kernel has one key head for each query head, and one array of segment ids for both sides.
    N, H = q_BTNH.shape[2:]
    k_BSNH, v_BSNH = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k_BSKH, v_BSKH))
    return pallas_gpu.mha(
        q_BTNH,
        k_BSNH,
        v_BSNH,
        mask.segment_ids_BT,
        sm_scale=H**-0.5,
        causal=mask.causal,
        interpret=interpret,
    )


def _tpu(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: Mask,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Splash attention; `interpret` runs the kernel's code without a TPU, for tests."""
    run = functools.partial(_tpu_on_one_device, interpret=interpret)
    return _on_each_device(run, q_BTNH, k_BSKH, v_BSKH, mask, of_one_too=interpret)


def _tpu_on_one_device(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, *, interpret: bool = False
) -> jax.Array:
    T, N, H = q_BTNH.shape[1:]
    S = k_BSKH.shape[1]
    if mask.window is not None:
        sides = (mask.window - 1, 0 if mask.causal else None)
        one_head = splash.LocalMask((T, S), sides, offset=0)
    else:
        one_head = splash.CausalMask((T, S)) if mask.causal else splash.FullMask((T, S))
    kernel = splash.make_splash_mha(
        splash.splash_attention_mask.MultiHeadMask([one_head] * N),
        block_sizes=_tpu_blocks(T, S),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    # The kernel leaves the scale to its caller.
    scaled_BTNH = (q_BTNH.astype(jnp.float32) * H**-0.5).astype(q_BTNH.dtype)
    by_head = [jnp.swapaxes(x, 1, 2) for x in (scaled_BTNH, k_BSKH, v_BSKH)]
    batched: Any = jax.vmap(kernel)  # its type says that residuals may come out too
    if mask.segment_ids_BT is None:
        out_BNTH = batched(*by_head)
    else:
        assert mask.segment_ids_BS is not None, "segment ids of the queries but not of the keys"
        segments = splash.SegmentIds(q=mask.segment_ids_BT, kv=mask.segment_ids_BS)
        out_BNTH = batched(*by_head, segments)
    return jnp.swapaxes(out_BNTH, 1, 2)


def _tpu_blocks(T: int, S: int) -> splash.BlockSizes:
    queries, keys = (
        next(size for size in (512, 256, TILE) if length % size == 0) for length in (T, S)
    )
    return splash.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_q_dq=queries,
        block_kv_dq=keys,
    )


def _on_each_device(
    kernel: Callable[..., jax.Array],
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: Mask,
    *,
    of_one_too: bool = False,
) -> jax.Array:
    """Runs a kernel that knows no sharding on each device's rows and heads.

    No communication: a device holds the keys of all its rows, and the kv heads of its query heads.
    `of_one_too`: by `shard_map` on a mesh of one device too, which Pallas's interpreter needs.
    """
    queries, keys, layout = activation_spec(QUERIES), activation_spec(KEYS), current_layout()
    alone = layout is None or (layout.mesh.size == 1 and not of_one_too)
    if queries is None or alone:
        return kernel(q_BTNH, k_BSKH, v_BSKH, mask)
    segments = jax.tree.map(lambda _: activation_spec(SEGMENTS), mask)
    run = on_each_device(kernel, (queries, keys, keys, segments), queries)
    mask = jax.tree.map(lambda ids: shard(ids, SEGMENTS), mask)
    return run(shard(q_BTNH, QUERIES), shard(k_BSKH, KEYS), shard(v_BSKH, KEYS), mask)


_KERNELS: dict[str, Callable[..., jax.Array]] = {
    "reference": _reference,
    "xla": _xla,
    "blocked": functools.partial(_on_each_device, blocked_attention),
    "cudnn": _cudnn,
    "triton": _triton,
    "tpu": _tpu,
}
_ON_ONE_DEVICE = _KERNELS | {
    "blocked": blocked_attention, "cudnn": _cudnn_on_one_device, "triton": _triton_on_one_device,
    "tpu": _tpu_on_one_device,
}  # fmt: skip
