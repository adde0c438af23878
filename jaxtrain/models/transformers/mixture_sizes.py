"""Shared settings of mixture-of-experts models: router and experts.

Source: Jiang et al. 2024 (arXiv 2401.04088).
"""

from typing import ClassVar, Protocol

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.models.model import ExpertsFacts
from jaxtrain.models.transformers.grouped_query_sizes import GroupedQuerySizes
from jaxtrain.nn.moe.experts import Experts, validate_settings
from jaxtrain.nn.moe.routing import Softmax
from jaxtrain.nn.transformer.block import Block


class MixtureSizes(GroupedQuerySizes, Protocol):
    """Beside `GroupedQuerySizes`; the settings are documented at `Mixtral`."""

    settings: ClassVar[dict[str, str]] = {
        **GroupedQuerySizes.settings, "experts": "num_experts",
    }  # fmt: skip

    @property
    def num_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def capacity_factor(self) -> float | None: ...
    @property
    def balance_weight(self) -> float: ...
    @property
    def router_z_weight(self) -> float: ...

    @property
    def normalize_gates(self) -> bool:
        return True

    def check(self) -> None:
        """As in `GroupedQuerySizes`, and UserError for experts that cannot be chosen."""
        super().check()
        name = type(self).__name__
        require_at_least(1, self, "num_experts")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise UserError(
                f"{name}.experts_per_token={self.experts_per_token} with {name}.num_experts="
                f"{self.num_experts}; use 1 to {self.num_experts}"
            )
        for sentence in validate_settings(self, "balance_weight", "router_z_weight"):
            raise UserError(sentence)

    @property
    def experts(self) -> ExpertsFacts:
        """Of every layer."""
        return self.mixture.facts

    @property
    def mixture(self) -> Experts:
        """What each token goes through after attention."""
        return Experts(
            embed_dim=self.embed_dim,
            mlp_dim=self.mlp_dim,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            capacity_factor=self.capacity_factor,
            residual_stddev=self.residual_stddev,
            balance_weight=self.balance_weight,
            router_z_weight=self.router_z_weight,
            num_layers=self.num_layers,
            router=Softmax(normalized=self.normalize_gates),
        )

    @property
    def block(self) -> Block:
        """What every layer computes."""
        return Block(attention=self.grouped_query, mlp=self.mixture, norm=self.norm)
