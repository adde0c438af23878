"""Shared settings of Gemma models: unit-offset norms, GeGLU, tied scaled embedding.

Source: Gemma Team 2024 (arXiv 2403.08295, section 2).
"""

import math
from typing import Protocol

from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.grouped_query_sizes import GroupedQuerySizes
from jaxtrain.nn.layers import RMSNorm
from jaxtrain.nn.transformer.block import Block
from jaxtrain.nn.transformer.mlp import SwiGLU, gelu


class GemmaSizes(GroupedQuerySizes, Protocol):
    """Beside `GroupedQuerySizes`; a model of it adds its fields, and what it has besides."""

    @property
    def query_width(self) -> int | None:
        """Scores are divided by its root; None is head_dim."""
        return None

    @property
    def norms_after(self) -> bool:
        """Whether what a part of a block gives is normed too."""
        return False

    @property
    def tie_embeddings(self) -> bool:
        return True

    @property
    def embedding_scale(self) -> float:
        """The table's rows are small, since it makes logits too."""
        return math.sqrt(self.embed_dim)

    @property
    def query_scale(self) -> float:
        """Attention divides by the root of head_dim."""
        return math.sqrt(self.key_dim / (self.query_width or self.key_dim))

    def check(self) -> None:
        """As in `GroupedQuerySizes`, and UserError for a query_width under 1."""
        super().check()
        if self.query_width is not None and self.query_width < 1:
            name = type(self).__name__
            raise UserError(
                f"{name}.query_width={self.query_width}; use None (head_dim) or at least 1"
            )

    @property
    def norm(self) -> RMSNorm:
        """Of each part of a block, of heads, and after the last block."""
        return RMSNorm(dim=self.embed_dim, epsilon=self.norm_eps, offset=1.0)

    @property
    def block(self) -> Block:
        """What every layer computes."""
        return Block(
            attention=self.grouped_query,
            mlp=SwiGLU(
                embed_dim=self.embed_dim,
                mlp_dim=self.mlp_dim,
                residual_stddev=self.residual_stddev,
                function=gelu,
            ),
            norm=self.norm,
            after=self.norm if self.norms_after else None,
        )
