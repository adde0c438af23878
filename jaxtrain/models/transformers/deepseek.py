"""DeepSeek: multi-head latent attention, shared and routed experts after a few dense layers.

Sources: DeepSeek-V2 (arXiv 2405.04434) with router='softmax', DeepSeek-V3 (arXiv 2412.19437) with
'sigmoid'.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Literal

import jax

from jaxtrain.config.errors import (
    UserError,
    nearest_divisor,
    nearest_multiple,
    require_at_least,
    require_positive,
)
from jaxtrain.config.reader import configurable
from jaxtrain.models.language_model import LanguageModel
from jaxtrain.models.model import ExpertsFacts
from jaxtrain.nn.attention.latent import Latent
from jaxtrain.nn.attention.rotary import Linear, Rotations, Yarn
from jaxtrain.nn.moe.experts import Experts, SharedExperts, validate_settings
from jaxtrain.nn.moe.routing import Groups, Sigmoid, Softmax
from jaxtrain.nn.normalization import RMSNorm
from jaxtrain.nn.parameters import residual_stddev
from jaxtrain.nn.transformer.block import Block
from jaxtrain.nn.transformer.decoder import Decoder, PredictionModule, decoder
from jaxtrain.nn.transformer.mlp import gated_mlp


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeek(LanguageModel):
    """Sizes of a DeepSeek; the defaults are DeepSeek-V3, without multi-token prediction.

    Attributes:
      vocab_size: rows of the embedding table.
      num_layers: blocks, including dense ones.
      dense_layers: number of leading blocks with one SwiGLU and no experts.
      embed_dim: width of the residual stream.
      num_heads: attention heads.
      query_rank: width of the queries' latent; None: they are computed from the stream.
      key_value_rank: width of the latent of keys and values.
      plain_dim: width of the part of a head's query and key without rotary positions.
      rotary_dim: width of the rotated part; all heads share that of the keys.
      value_dim: width of a head's values.
      mlp_dim: width inside the SwiGLU of a dense layer.
      expert_mlp_dim: width inside each expert.
      shared_experts: experts that every token goes through.
      num_experts: routed experts of a layer.
      experts_per_token: routed experts per token.
      expert_groups: groups of the experts.
      groups_per_token: best groups from which a token's experts are chosen.
      router: 'softmax' chooses the highest probabilities (V2); 'sigmoid' the highest sigmoids plus
        a bias that is updated by their load (V3).
      normalize_gates: whether the gates of a token's experts sum to 1, before routed_scale.
      routed_scale: factor of the gates.
      bias_speed: update of the router's biases per step (arXiv 2408.15664);
        0 disables it. For 'sigmoid' alone.
      capacity_factor: as `Mixtral.capacity_factor`; None is dropless.
      balance_weight: weight of the balance loss of each row, averaged over layers.
      context_length: the longest sequence, in tokens.
      rope_theta: base of the rotary frequencies.
      rope_scaling: scaling factor of low frequencies (YaRN, arXiv 2309.00071); 1 leaves all
        unchanged.
      rope_low_frequency_factor, rope_high_frequency_factor: frequencies with fewer turns than low
        in rope_original_context_length are scaled in full, those with more than high not at all.
      rope_original_context_length: the context that rope_scaling extends, in tokens.
      rope_score_factor: m in the factor of the scores, (0.1 m ln(rope_scaling) + 1)^2.
      norm_eps: epsilon of the RMS norms; that of the latents' is 1e-6.
      tie_embeddings: whether the token embedding is the output matrix too.
      predicted_tokens: tokens predicted at each position in training: the next one, and each
        further one by a module of one layer after the last (multi-token prediction, arXiv
        2412.19437, section 2.2); V3 has 2.
      prediction_weight: weight of the mean of the further tokens' losses.
    """

    vocab_size: int = 129280
    num_layers: int = 61
    dense_layers: int = 3
    embed_dim: int = 7168
    num_heads: int = 128
    query_rank: int | None = 1536
    key_value_rank: int = 512
    plain_dim: int = 128
    rotary_dim: int = 64
    value_dim: int = 128
    mlp_dim: int = 18432
    expert_mlp_dim: int = 2048
    shared_experts: int = 1
    num_experts: int = 256
    experts_per_token: int = 8
    expert_groups: int = 8
    groups_per_token: int = 4
    router: Literal["softmax", "sigmoid"] = "sigmoid"
    normalize_gates: bool = True
    routed_scale: float = 2.5
    bias_speed: float = 0.001
    capacity_factor: float | None = None
    balance_weight: float = 0.0001
    context_length: int = 163840
    rope_theta: float = 10000.0
    rope_scaling: float = 40.0
    rope_low_frequency_factor: float = 1.0
    rope_high_frequency_factor: float = 32.0
    rope_original_context_length: int = 4096
    rope_score_factor: float = 1.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    predicted_tokens: int = 1
    prediction_weight: float = 0.3

    def __post_init__(self) -> None:
        require_at_least(
            1, self, "vocab_size", "num_layers", "embed_dim", "num_heads", "query_rank",
            "key_value_rank", "plain_dim", "value_dim", "mlp_dim", "expert_mlp_dim",
            "shared_experts", "num_experts", "expert_groups", "context_length",
            "rope_original_context_length", "predicted_tokens",
        )  # fmt: skip
        require_positive(self, "rope_theta", "norm_eps", "routed_scale", "prediction_weight")
        found = [*self._validate_layers(), *self._validate_routes(), *self._validate_rope()]
        if found:
            raise UserError("\n".join(found))

    def _validate_layers(self) -> Iterator[str]:
        if not 0 <= self.dense_layers < self.num_layers:
            yield (
                f"DeepSeek.dense_layers={self.dense_layers} with DeepSeek.num_layers="
                f"{self.num_layers}; use 0 to {self.num_layers - 1}, or Llama where all are dense"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            yield (
                f"DeepSeek.rotary_dim={self.rotary_dim} is not an even number above 0; the "
                f"nearest is {nearest_multiple(self.rotary_dim, 2)}"
            )

    def _validate_routes(self) -> Iterator[str]:
        E, groups = self.num_experts, self.expert_groups
        if E % groups:
            yield (
                f"DeepSeek.expert_groups={groups} does not divide DeepSeek.num_experts={E}; the "
                f"nearest is {nearest_divisor(E, groups)}"
            )
        if not 1 <= self.groups_per_token <= groups:
            yield (
                f"DeepSeek.groups_per_token={self.groups_per_token} with DeepSeek.expert_groups="
                f"{groups}; use 1 to {groups}"
            )
        most = self.groups_per_token * E // groups
        if not 1 <= self.experts_per_token <= most:
            yield (
                f"DeepSeek.experts_per_token={self.experts_per_token}, but a token's groups "
                f"(DeepSeek.groups_per_token={self.groups_per_token} of {groups}) have {most} "
                f"experts; use 1 to {most}"
            )
        if self.router == "sigmoid" and 1 < groups > E // 2:
            yield (
                f"DeepSeek.expert_groups={groups} of DeepSeek.num_experts={E}: a group's score "
                "is the sum of its two best experts (DeepSeek.router='sigmoid'); use at most "
                f"{E // 2}, or 1"
            )
        if self.router == "softmax" and self.bias_speed:
            yield (
                f"DeepSeek.bias_speed={self.bias_speed} has no effect with "
                "DeepSeek.router='softmax', which has no biases; use 0.0, or "
                "DeepSeek.router='sigmoid'"
            )
        yield from validate_settings(self, "balance_weight", "bias_speed")

    def _validate_rope(self) -> Iterator[str]:
        if self.rope_scaling < 1:
            yield f"DeepSeek.rope_scaling={self.rope_scaling}; use 1.0 (none) or more"
        if not 0 < self.rope_low_frequency_factor < self.rope_high_frequency_factor:
            yield (
                f"DeepSeek.rope_low_frequency_factor={self.rope_low_frequency_factor} is not below "
                f"DeepSeek.rope_high_frequency_factor={self.rope_high_frequency_factor} and above "
                "0; YaRN has 1.0 and 32.0"
            )

    @property
    def objective(self) -> str:
        """Next-token or multi-token prediction."""
        return "next_token" if self.predicted_tokens == 1 else "multi_token"

    @functools.cached_property
    def experts(self) -> ExpertsFacts:
        """Facts of the experts of every layer but the dense ones."""
        speed = self.bias_speed if self.router == "sigmoid" else None
        return dataclasses.replace(self._routed.facts, bias_speed=speed)

    @property
    def rotary(self) -> Rotations:
        """The rotary embedding of a part of queries and keys."""
        if self.rope_scaling == 1:
            return Linear(theta=self.rope_theta, scaling=1.0)
        return Yarn(
            theta=self.rope_theta,
            scaling=self.rope_scaling,
            low_frequency_factor=self.rope_low_frequency_factor,
            high_frequency_factor=self.rope_high_frequency_factor,
            original_context_length=self.rope_original_context_length,
        )

    @functools.cached_property
    def latent(self) -> Latent:
        """The attention of all layers."""
        return Latent(
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            query_rank=self.query_rank,
            key_value_rank=self.key_value_rank,
            plain_dim=self.plain_dim,
            rotary_dim=self.rotary_dim,
            value_dim=self.value_dim,
            rotary=self.rotary,
            query_scale=(0.1 * self.rope_score_factor * math.log(self.rope_scaling) + 1) ** 2,
            residual_stddev=residual_stddev(self.num_layers),
        )

    @functools.cached_property
    def leading(self) -> tuple[Block, ...]:
        """The dense layers."""
        return (Block(attention=self.latent, mlp=gated_mlp(self), norm=self.norm),) * (
            self.dense_layers
        )

    @property
    def predicting(self) -> tuple[PredictionModule, ...]:
        """A module for each token after the next one."""
        return tuple(
            PredictionModule(
                embed_dim=self.embed_dim, block=self.block, norm=self.norm, number=number
            )
            for number in range(self.layers, self.layers + self.predicted_tokens - 1)
        )

    @functools.cached_property
    def block(self) -> Block:
        """The definition of the other layers."""
        return Block(
            attention=self.latent,
            mlp=SharedExperts(
                shared=gated_mlp(self, self.shared_experts * self.expert_mlp_dim),
                routed=self._routed,
            ),
            norm=self.norm,
        )

    def build(self, key: jax.Array) -> Decoder:
        """Return the newly initialized module."""
        return decoder(self, key, leading=self.leading, predicting=self.predicting)

    @property
    def norm(self) -> RMSNorm:
        """The norm before each part of a block, and after the last."""
        return RMSNorm(dim=self.embed_dim, epsilon=self.norm_eps)

    @functools.cached_property
    def _routed(self) -> Experts:
        groups = Groups(count=self.expert_groups, chosen=self.groups_per_token)
        router = (Sigmoid if self.router == "sigmoid" else Softmax)(
            normalized=self.normalize_gates,
            scale=self.routed_scale,
            groups=None if self.groups_per_token == self.expert_groups else groups,
        )
        return Experts(
            embed_dim=self.embed_dim,
            mlp_dim=self.expert_mlp_dim,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            capacity_factor=self.capacity_factor,
            residual_stddev=residual_stddev(self.num_layers),
            balance_weight=self.balance_weight,
            router_z_weight=0.0,
            num_layers=self.layers + self.predicted_tokens - 1,
            router=router,
        )
