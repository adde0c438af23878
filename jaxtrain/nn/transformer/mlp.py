"""MLPs of transformer blocks: GELU, SwiGLU, GeGLU.

Letters: B batch, T length, D embed, F mlp.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.dropout import Dropout
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.layers import add_bias
from jaxtrain.nn.parameters import Weights, constant, normal, param, residual_stddev
from jaxtrain.nn.remat import elementwise, name_activation
from jaxtrain.nn.transformer.language_model import Auxiliary
from jaxtrain.parallel.devices import platform_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwiGLU:
    """down(silu(gate x) * up x), without biases (arXiv 2002.05202).

    Attributes:
      embed_dim: width of the residual stream.
      mlp_dim: width inside.
      residual_stddev: standard deviation of the output projection at initialization.
      function: of the gate: with `gelu` this is GeGLU of the same paper.
      stddev: standard deviation of the other weights.
      dropout: of the hidden activations, in training.
    """

    embed_dim: int
    mlp_dim: int
    residual_stddev: float
    function: Callable[[jax.Array], jax.Array] = jax.nn.silu
    stddev: float = 0.02
    dropout: Dropout = Dropout()

    num_keys: ClassVar[int] = 3
    scope: ClassVar[str] = "mlp"

    def weights(self, keys: jax.Array) -> Weights:
        """Gate and up [D, F], down [F, D]."""
        D, F = self.embed_dim, self.mlp_dim
        key_gate, key_up, key_down = keys
        return {
            "gate": param(key_gate, (D, F), ("embed", "mlp"), normal(self.stddev)),
            "up": param(key_up, (D, F), ("embed", "mlp"), normal(self.stddev)),
            "down": param(key_down, (F, D), ("mlp", "embed"), normal(self.residual_stddev)),
        }

    def matmul_parameters(self) -> int:
        """Return all parameters."""
        return 3 * self.embed_dim * self.mlp_dim

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        mask: Mask,
        execution: Execution,
        *,
        out: tuple[str, ...],
    ) -> tuple[jax.Array, Auxiliary]:
        """Return the network's outputs; arguments and results as in `block.Feeds`."""
        del mask
        gate_BTF, up_BTF = execution.project(
            h_BTD, ("BTD,DF->BTF", own["gate"]), ("BTD,DF->BTF", own["up"])
        )
        gate_BTF, up_BTF = name_activation(gate_BTF, "mlp_gate"), name_activation(up_BTF, "mlp_up")
        h_BTF = elementwise(lambda gate, up: self.function(gate) * up, gate_BTF, up_BTF)
        h_BTF = self.dropout(h_BTF, execution.draws, execution.layer)
        return execution.contract("BTF,FD->BTD", h_BTF, own["down"], out), {}


class MLPSizes(Protocol):
    """Sizes of a `gated_mlp`."""

    @property
    def num_layers(self) -> int: ...
    @property
    def embed_dim(self) -> int: ...
    @property
    def mlp_dim(self) -> int: ...


def gated_mlp(sizes: MLPSizes, mlp_dim: int | None = None, **more: Any) -> SwiGLU:
    """Return the SwiGLU of a model; `mlp_dim`: another width inside, `more`: further attributes."""
    return SwiGLU(
        embed_dim=sizes.embed_dim,
        mlp_dim=sizes.mlp_dim if mlp_dim is None else mlp_dim,
        residual_stddev=residual_stddev(sizes.num_layers),
        **more,
    )


def gelu(x: jax.Array) -> jax.Array:
    """Return the Gaussian error linear unit by tanh (arXiv 1606.08415, section 2), in float32.

    Off CPUs (1 + tanh u) / 2 is sigmoid(2u). XLA's compiler for GPUs does not compute a tanh twice:
    the backward pass, which recomputes this, would write it out and read it back.
    """
    x32 = x.astype(jnp.float32)
    if platform_of(jax.sharding.get_abstract_mesh()) == "cpu":
        return jax.nn.gelu(x32, approximate=True).astype(x.dtype)
    u = math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32**3)
    return (x32 * jax.nn.sigmoid(2 * u)).astype(x.dtype)


def exact_gelu(x: jax.Array) -> jax.Array:
    """Return the Gaussian error linear unit by the error function (arXiv 1606.08415), in
    float32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoLayers:
    """down(function(up x)).

    Attributes:
      embed_dim: width of the residual stream.
      mlp_dim: width inside.
      residual_stddev: standard deviation of the output projection at initialization.
      function: between the two.
      stddev: standard deviation of the other weight.
      biases: whether each projection has one.
      dropout: of the hidden activations, in training.
    """

    embed_dim: int
    mlp_dim: int
    residual_stddev: float
    function: Callable[[jax.Array], jax.Array] = gelu
    stddev: float = 0.02
    biases: bool = True
    dropout: Dropout = Dropout()

    num_keys: ClassVar[int] = 2
    scope: ClassVar[str] = "mlp"

    def weights(self, keys: jax.Array) -> Weights:
        """Up [D, F] and down [F, D], and their biases."""
        D, F = self.embed_dim, self.mlp_dim
        key_up, key_down = keys
        found = {
            "up": param(key_up, (D, F), ("embed", "mlp"), normal(self.stddev)),
            "down": param(key_down, (F, D), ("mlp", "embed"), normal(self.residual_stddev)),
        }
        if self.biases:
            found["up_bias"] = param(key_up, (F,), ("mlp",), constant(0.0))
            found["down_bias"] = param(key_down, (D,), ("vector",), constant(0.0))
        return found

    def matmul_parameters(self) -> int:
        """Matmul parameters: all but the biases."""
        return 2 * self.embed_dim * self.mlp_dim

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        mask: Mask,
        execution: Execution,
        *,
        out: tuple[str, ...],
    ) -> tuple[jax.Array, Auxiliary]:
        """Return the network's outputs; arguments and results as in `block.Feeds`."""
        del mask
        (up_BTF,) = execution.project(h_BTD, ("BTD,DF->BTF", own["up"]))
        up_BTF = name_activation(
            add_bias(up_BTF, own["up_bias"]) if self.biases else up_BTF, "mlp_up"
        )
        h_BTF = self.dropout(elementwise(self.function, up_BTF), execution.draws, execution.layer)
        y_BTD = execution.contract("BTF,FD->BTD", h_BTF, own["down"], out)
        return (add_bias(y_BTD, own["down_bias"]) if self.biases else y_BTD), {}


# Combination of the gate and up projections.
Gated = Callable[[jax.Array, jax.Array], jax.Array]


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) up (arXiv 2002.05202)."""
    return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """gate sigmoid(1.702 gate) (up + 1), both clamped: GPT-OSS's (arXiv 2508.10925, section 2.2).

    Attributes:
      limit: upper bound of gates, and bound of the magnitude of ups.
    """

    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Combine gate and up projections."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
