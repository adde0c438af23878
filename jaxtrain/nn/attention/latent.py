"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are computed from one short vector per token, its latent, and
generation caches that alone. Rotary positions apply to a separate key, which all heads share, and
to a part of each query.

Letters: B batch, T length, S key length, D embed, C latent, N heads, H head_dim.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.nn.attention.context import QUERIES
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.attention.rotary import Rotations
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.facts import AttentionFacts
from jaxtrain.nn.kv_cache import Cached, LayerCache, extend_cache
from jaxtrain.nn.layers import rotate
from jaxtrain.nn.matmul.contract import copies_of_kv_heads
from jaxtrain.nn.normalization import RMSNorm
from jaxtrain.nn.parameters import Weights, add_prefix, normal, param, under
from jaxtrain.nn.remat import name_activation
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import activation_spec, shard

# Epsilon of the latents' norms, fixed in the authors' code.
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention whose keys and values are computed from a latent of each token.

    Attributes:
      embed_dim: width of the residual stream.
      num_heads: heads.
      query_rank: width of the queries' latent; None: they are computed from the stream.
      key_value_rank: width of the latent of keys and values.
      plain_dim: width of the part of a head's query and key without rotary positions.
      rotary_dim: width of the rotated part; all heads share that of the keys.
      value_dim: width of a head's values.
      rotary: its rotary embedding; the embedding's scale is not used.
      query_scale: factor of the queries, in addition to the usual 1 / sqrt(head_dim).
      residual_stddev: standard deviation of the output projection at initialization.
    """

    embed_dim: int
    num_heads: int
    query_rank: int | None
    key_value_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    rotary: Rotations
    query_scale: float
    residual_stddev: float

    num_keys: ClassVar[int] = 5

    @property
    def key_dim(self) -> int:
        """Width of a head's query and key."""
        return self.plain_dim + self.rotary_dim

    @property
    def width(self) -> int:
        """Head width for kernels: the wider of keys and values, padded with zeros."""
        return max(self.key_dim, self.value_dim)

    @property
    def facts(self) -> AttentionFacts:
        """Facts for kernels: keys and values of one width, padded with zeros."""
        N, H = self.num_heads, self.width
        return AttentionFacts(num_heads=N, num_kv_heads=N, key_dim=H, value_dim=H)

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Cached arrays: the latent of keys and values, and the shared rotary key."""
        latent, shared = (
            Cached(shape=(dim,), axes=("latent",), every_token=True)
            for dim in (self.key_value_rank, self.rotary_dim)
        )
        return latent, shared

    def weights(self, keys: jax.Array) -> Weights:
        """Down projections [D, C], up projections [C, N, H], and the output [N, H, D]."""
        D, N, C, H = self.embed_dim, self.num_heads, self.key_value_rank, self.key_dim
        heads, compressed = ("heads", "head_dim"), ("embed", "latent")
        made = H - self.rotary_dim + self.value_dim
        own = {
            "key_value_down": param(keys[0], (D, C + self.rotary_dim), compressed, normal(0.02)),
            "key_value_up": param(keys[1], (C, N, made), ("latent_in", *heads), normal(0.02)),
            "out": param(
                keys[2], (N, self.value_dim, D), (*heads, "embed"), normal(self.residual_stddev)
            ),
            **add_prefix("key_value_norm", self._norm(C).weights(keys[0])),
        }
        if self.query_rank is None:
            return own | {"query": param(keys[3], (D, N, H), ("embed", *heads), normal(0.02))}
        up = (self.query_rank, N, H)
        return own | {
            "query_down": param(keys[3], (D, self.query_rank), compressed, normal(0.02)),
            "query_up": param(keys[4], up, ("latent_in", *heads), normal(0.02)),
            **add_prefix("query_norm", self._norm(self.query_rank).weights(keys[3])),
        }

    def matmul_parameters(self) -> int:
        """Matmul parameters: all but norms."""
        D, N, C, R = self.embed_dim, self.num_heads, self.key_value_rank, self.query_rank
        queries = D * N * self.key_dim if R is None else R * (D + N * self.key_dim)
        values = C * N * (self.plain_dim + self.value_dim) + N * self.value_dim * D
        return queries + D * (C + self.rotary_dim) + values

    def score_flops_per_token(self, sequence_length: int) -> float:
        """3 T N times the widths of a key and of a value: of causal attention, forward and backward
        (arXiv 2204.02311, appendix B, halved), without a kernel's padding."""
        return 3 * sequence_length * self.num_heads * (self.key_dim + self.value_dim)

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
        *,
        out: tuple[str, ...],
        cache: LayerCache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Self-attention over the normalized stream; arguments and results as in `block.Attends`.

        The cache holds latents [B, S, C] and turned keys [B, S, rotary_dim]; keys and values of the
        heads are recomputed from them, or queries are projected to the latent, whichever has fewer
        FLOPs.
        """
        h_BTD = shard(h_BTD, HIDDEN)
        radians = self.rotary.frequencies(self.rotary_dim)
        plain, C = self.plain_dim, self.key_value_rank
        q_BTNH = name_activation(self._queries(own, h_BTD, execution), "query")
        turned_BTNH = rotate(_in_halves(q_BTNH[..., plain:]), positions_BT, radians)
        q_BTNH = jnp.concatenate([q_BTNH[..., :plain], turned_BTNH], axis=-1)
        both_BTC = execution.contract("BTD,DC->BTC", h_BTD, own["key_value_down"])
        latent_BSC = self._norm(C)(under("key_value_norm", own), both_BTC[..., :C])
        shared_BT1H = _in_halves(both_BTC[:, :, None, C:])
        shared_BSH = rotate(shared_BT1H, positions_BT, radians)[:, :, 0]
        if cache is not None:
            latent_BSC, shared_BSH = cache = extend_cache(latent_BSC, shared_BSH, cache, start)
        absorbs = cache is not None and self._absorbs(q_BTNH.shape[1], latent_BSC.shape[1])
        attend = self._among_latents if absorbs else self._among_heads
        a_BTNH = attend(own, q_BTNH, latent_BSC, shared_BSH, mask, execution)
        return execution.contract("BTNH,NHD->BTD", a_BTNH, own["out"], out), cache

    def _absorbs(self, T: int, S: int) -> bool:
        """Whether projecting T queries to S latents has fewer multiply-adds per head than
        computing keys and values: true for few queries."""
        made = self.key_value_rank * (self.plain_dim + self.value_dim)
        to_heads = S * made + 2 * T * S * self.width
        return T * made + 2 * T * S * (self.key_value_rank + self.rotary_dim) < to_heads

    def _among_latents(
        self,
        own: Weights,
        q_BTNH: jax.Array,
        latent_BSC: jax.Array,
        shared_BSH: jax.Array,
        mask: Mask,
        execution: Execution,
    ) -> jax.Array:
        """q (W_k c) = (q W_k) c, and the sum of W_v c is W_v times the sum of c: every head attends
        to the latents themselves (arXiv 2405.04434, section 2.1.2), as keys and as values."""
        up_CNH = gather(own["key_value_up"]).astype(q_BTNH.dtype)
        plain, C = self.plain_dim, self.key_value_rank
        of_latents_BTNC = jnp.einsum("BTNH,CNH->BTNC", q_BTNH[..., :plain], up_CNH[..., :plain])
        q_BTNC = jnp.concatenate([of_latents_BTNC, q_BTNH[..., plain:]], axis=-1)
        q_BTNC *= self.query_scale * math.sqrt(q_BTNC.shape[-1] / self.key_dim)
        # The values contain the rotary keys too, whose sum is dropped: one array serves as both.
        both_BSC = jnp.concatenate([latent_BSC, shared_BSH], axis=-1)
        both_BSKC = _of_every_head(both_BSC, copies_of_kv_heads(1))
        a_BTNC = execution.attention(q_BTNC, both_BSKC, both_BSKC, mask)[..., :C]
        return jnp.einsum("BTNC,CNH->BTNH", a_BTNC, up_CNH[..., plain:])

    def _among_heads(
        self,
        own: Weights,
        q_BTNH: jax.Array,
        latent_BSC: jax.Array,
        shared_BSH: jax.Array,
        mask: Mask,
        execution: Execution,
    ) -> jax.Array:
        """Return every head attends to its own keys and values, computed from the latents."""
        plain = self.plain_dim
        made_BSNH = execution.contract("BTC,CNH->BTNH", latent_BSC, own["key_value_up"])
        made_k_BSNH = name_activation(made_BSNH[..., :plain], "key")
        v_BSNH = name_activation(made_BSNH[..., plain:], "value")
        k_BSNH = jnp.concatenate([made_k_BSNH, _of_every_head(shared_BSH, self.num_heads)], axis=-1)
        # Kernels divide by the root of their head width.
        scale = self.query_scale * math.sqrt(self.width / self.key_dim)
        q_BTNH = q_BTNH if scale == 1 else q_BTNH * scale
        q_BTNH, k_BSNH, v_BSNH = map(self._pad, (q_BTNH, k_BSNH, v_BSNH))
        return execution.attention(q_BTNH, k_BSNH, v_BSNH, mask)[..., : self.value_dim]

    def _queries(self, own: Weights, h_BTD: jax.Array, execution: Execution) -> jax.Array:
        if self.query_rank is None:
            return execution.contract("BTD,DNH->BTNH", h_BTD, own["query"])
        latent_BTC = execution.contract("BTD,DC->BTC", h_BTD, own["query_down"])
        latent_BTC = self._norm(self.query_rank)(under("query_norm", own), latent_BTC)
        return execution.contract("BTC,CNH->BTNH", latent_BTC, own["query_up"])

    def _norm(self, rank: int) -> RMSNorm:
        return RMSNorm(dim=rank, epsilon=_EPSILON)

    def _pad(self, x_BTNH: jax.Array) -> jax.Array:
        missing = self.width - x_BTNH.shape[-1]
        return jnp.pad(x_BTNH, ((0, 0),) * 3 + ((0, missing),)) if missing else x_BTNH


def _in_halves(x_BTNH: jax.Array) -> jax.Array:
    """Reorder interleaved rotary pairs, as in published weights, to halves, as `rotate` needs.

    Of queries and keys alike, so that scores do not change.
    """
    return jnp.concatenate([x_BTNH[..., 0::2], x_BTNH[..., 1::2]], axis=-1)


def _of_every_head(x_BSH: jax.Array, num_heads: int) -> jax.Array:
    """Broadcast to [B, S, N, H], sharded like heads."""
    B, S, H = x_BSH.shape
    spec = activation_spec(QUERIES)
    if spec is None:
        return jnp.broadcast_to(x_BSH[:, :, None], (B, S, num_heads, H))
    # Broadcast at its use: the gradient is summed over the heads before it is reduced over the
    # mesh.
    return jax.lax.broadcast_in_dim(x_BSH, (B, S, num_heads, H), (0, 1, 3), out_sharding=spec)
