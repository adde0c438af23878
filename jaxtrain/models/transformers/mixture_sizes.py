"""What mixtures of experts with grouped queries share: the router's settings, and their experts.

Source: Jiang et al. 2024 (arXiv 2401.04088).
"""

from typing import ClassVar, Protocol

from jaxtrain.config.errors import UserError, refuse_below
from jaxtrain.models.model import ExpertsFacts, Inputs
from jaxtrain.models.transformers.grouped_query_sizes import GroupedQuerySizes
from jaxtrain.nn.block import Block
from jaxtrain.nn.experts import Experts
from jaxtrain.nn.routing import Softmax


class MixtureSizes(GroupedQuerySizes, Protocol):
    """Beside `GroupedQuerySizes`; the settings are documented at `Mixtral`."""

    inputs: ClassVar[Inputs] = "tokens"
    # Which setting gives a logical axis its size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "heads": "num_heads",
        "kv_heads": "num_kv_heads", "mlp": "mlp_dim", "experts": "num_experts",
        "layers": "num_layers", "vocab_embed": "embed_dim",
    }  # fmt: skip

    @property
    def objective(self) -> str:
        """They learn to tell the next token."""
        return "next_token"

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
        refuse_below(1, self, "num_experts")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise UserError(
                f"{name}.experts_per_token={self.experts_per_token} with {name}.num_experts="
                f"{self.num_experts}; use 1 to {self.num_experts}"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise UserError(
                f"{name}.capacity_factor={self.capacity_factor}; use None (dropless) or a number "
                "above 0, such as 1.25"
            )
        for setting in ("balance_weight", "router_z_weight"):
            if not getattr(self, setting) >= 0:
                raise UserError(f"{name}.{setting}={getattr(self, setting)}; use 0 (none) or more")

    @property
    def experts(self) -> ExpertsFacts:
        """Of every layer."""
        return ExpertsFacts(
            count=self.num_experts,
            per_token=self.experts_per_token,
            capacity_factor=self.capacity_factor,
        )

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
