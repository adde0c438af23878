"""Flash attention kernels: cuDNN, Pallas on GPUs, splash attention on TPUs.

Pallas is imported when a kernel runs: it takes as long as the rest of JAX.

Letters: B batch, T query length, S key length, N query heads, K kv heads, H head_dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.nn.attention.kernel_registry import TILE
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.remat import KEPT


def cudnn(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    """cuDNN's flash attention, on NVIDIA GPUs."""
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        is_causal=mask.causal,
        # Keys on either side besides the query's own position.
        local_window_size=None if mask.window is None else (mask.window - 1, 0),
        implementation="cudnn",
    )


def triton(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, *, interpret: bool = False
) -> jax.Array:
    """Pallas's flash attention, on NVIDIA GPUs; `interpret` runs it without one, for tests."""
    from jax.experimental.pallas.ops.gpu import attention as pallas_gpu

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


def tpu(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, *, interpret: bool = False
) -> jax.Array:
    """Splash attention, on TPUs; `interpret` runs it without one, for tests."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    T, N, H = q_BTNH.shape[1:]
    S = k_BSKH.shape[1]
    causal, local = _band_masks()
    if mask.window is not None:
        sides = (mask.window - 1, 0 if mask.causal else None)
        one_head = local((T, S), sides, offset=0)
    else:
        one_head = causal((T, S)) if mask.causal else splash.FullMask((T, S))
    queries, keys = _block(T), _block(S)
    kernel = splash.make_splash_mha(
        splash.splash_attention_mask.MultiHeadMask([one_head] * N),
        block_sizes=splash.BlockSizes(
            block_q=queries,
            block_kv=keys,
            block_q_dkv=queries,
            block_kv_dkv=keys,
            block_q_dq=queries,
            block_kv_dq=keys,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=KEPT,
        attn_logits_soft_cap=mask.softcap,
        interpret=interpret,
    )
    # The kernel does not scale the scores.
    scaled_BTNH = (q_BTNH.astype(jnp.float32) * H**-0.5).astype(q_BTNH.dtype)
    by_head = [jnp.swapaxes(x, 1, 2) for x in (scaled_BTNH, k_BSKH, v_BSKH)]
    segments = None
    if mask.segment_ids_BT is not None:
        assert mask.segment_ids_BS is not None, "segment ids of the queries but not of the keys"
        segments = splash.SegmentIds(q=mask.segment_ids_BT, kv=mask.segment_ids_BS)
    # Its type includes residuals.
    batched: Any = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))
    out_BNTH = batched(*by_head, segments, mask.sinks_N)
    return jnp.swapaxes(out_BNTH, 1, 2)


class _Banded:
    """Caches the blocks of a mask that depends only on the distance of query and key.

    Splash attention requests every block: (T / 512) (S / 512) of them, twice per kernel.
    """

    shape: tuple[int, int]

    def __getitem__(self, slices: tuple[slice, slice]) -> np.ndarray:
        mask: Any = super()
        (q, q_end, _), (k, k_end, _) = (
            side.indices(size) for side, size in zip(slices, self.shape, strict=True)
        )
        blocks, key = self.__dict__.setdefault("blocks", {}), (q - k, q_end - q, k_end - k)
        if key not in blocks:
            block = mask.__getitem__(slices)
            value = bool(block[0, 0])
            # Most blocks are fully visible or fully masked: share one array each.
            if (block == value).all():
                block = blocks.setdefault(("seen" if value else "hidden", *key[1:]), block)
            blocks[key] = block
        return blocks[key]


@functools.cache
def _band_masks() -> tuple[Any, Any]:
    """Splash attention's causal and local masks, with blocks computed once."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    class Causal(_Banded, splash.CausalMask):
        pass

    class Local(_Banded, splash.LocalMask):
        pass

    return Causal, Local


def _block(length: int) -> int:
    """Block size of splash attention along a sequence."""
    return next(size for size in (512, 256, TILE) if length % size == 0)
