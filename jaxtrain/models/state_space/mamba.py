"""Mamba: selective state space model without attention.

Source: Gu and Dao 2023 (arXiv 2312.00752).
Letters: B batch, T length, D embed, F inner width, S states of a channel, R rank of the steps,
K kernel size of the convolution, V vocab.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.config.errors import require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.models.language_model import LanguageModel
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.kv_cache import Cached, LayerCache
from jaxtrain.nn.layers import add_bias
from jaxtrain.nn.normalization import RMSNorm
from jaxtrain.nn.parameters import Weights, add_prefix, constant, normal, param
from jaxtrain.nn.recurrent.state_space import (
    StateSpaceLayer,
    causal_convolution,
    goes_on,
    selective_scan,
    state_space_decoder,
    steps,
    validate_state_space,
)
from jaxtrain.nn.remat import name_activation
from jaxtrain.nn.transformer.block import RESIDUAL
from jaxtrain.parallel.gathering import gather


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba(LanguageModel):
    """Sizes of a Mamba; the defaults are the 130M model.

    Attributes:
      vocab_size: rows of the embedding table.
      num_layers: layers.
      embed_dim: width of the residual stream.
      expand: channels of a layer over embed_dim.
      state_dim: states of each channel.
      step_rank: rank of the steps' projection; None is embed_dim / 16, rounded up.
      conv_width: kernel size of the convolution before the states.
      context_length: the longest training sequence, in tokens; the model has no limit.
      norm_eps: epsilon of the RMS norms.
    """

    vocab_size: int = 50280
    num_layers: int = 24
    embed_dim: int = 768
    expand: int = 2
    state_dim: int = 16
    step_rank: int | None = None
    conv_width: int = 4
    context_length: int = 2048
    norm_eps: float = 1e-5

    # The setting of each logical axis's size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "mlp": "embed_dim", "layers": "num_layers",
        "vocab_embed": "embed_dim",
    }  # fmt: skip

    build = state_space_decoder

    def __post_init__(self) -> None:
        validate_state_space(self)
        if self.step_rank is not None:
            require_at_least(1, self, "step_rank")

    @property
    def block(self) -> "MambaLayer":
        """The layers' definition."""
        rank = math.ceil(self.embed_dim / 16) if self.step_rank is None else self.step_rank
        return MambaLayer(
            embed_dim=self.embed_dim,
            inner_dim=self.expand * self.embed_dim,
            state_dim=self.state_dim,
            step_rank=rank,
            conv_width=self.conv_width,
            norm=RMSNorm(dim=self.embed_dim, epsilon=self.norm_eps),
            num_layers=self.num_layers,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaLayer(StateSpaceLayer):
    """x + out(scan(convolution(in(norm(x)))) gated): section 3.4 of the paper.

    Attributes (and those of StateSpaceLayer):
      inner_dim: channels.
      step_rank: rank of the steps' projection.
    """

    inner_dim: int
    step_rank: int

    scope: ClassVar[str] = "mamba"

    def weights(self, key: jax.Array) -> Weights:
        """Initialize the parameters of one layer.

        `in` projects to channels and gates [2, D, F], `select` from channels to steps, inputs and
        outputs of the states [F, R + 2 S], `step` from ranks to steps [R, F]; `decay` is log(-A).
        """
        D, F, S, R, K = (
            self.embed_dim, self.inner_dim, self.state_dim, self.step_rank, self.conv_width,
        )  # fmt: skip
        keys = jax.random.split(key, 6)

        def uniform(fan_in: int, layers: int = 1) -> Any:
            return normal(
                1 / math.sqrt(3 * fan_in * layers)
            )  # the standard deviation of torch.nn.Linear

        return {
            **add_prefix("norm", self.norm.weights(key)),
            "in": param(keys[0], (2, D, F), ("qkv", "embed", "mlp"), uniform(D)),
            "conv": param(keys[1], (K, F), ("narrow", "mlp"), uniform(K)),
            "conv_bias": param(keys[1], (F,), ("mlp",), constant(0.0)),
            "select": param(keys[2], (F, R + 2 * S), ("mlp", "narrow"), uniform(F)),
            "step": param(keys[3], (R, F), ("narrow", "mlp"), uniform(R)),
            "step_bias": param(keys[4], (F,), ("mlp",), steps),
            "decay": param(key, (F, S), ("mlp", "state"), _rates),
            "skip": param(key, (F,), ("mlp",), constant(1.0)),
            "out": param(keys[5], (F, D), ("mlp", "embed"), uniform(F, self.num_layers)),
        }

    @property
    def cached(self) -> tuple[Cached, ...]:
        """The last inputs of the convolution, and the states."""
        window, states = (self.conv_width - 1, self.inner_dim), (self.inner_dim, self.state_dim)
        return (
            Cached(shape=window, axes=("narrow", "mlp"), every_token=False),
            Cached(shape=states, axes=("mlp", "state"), every_token=False, dtype="float32"),
        )

    def matmul_parameters(self) -> int:
        """Matmul parameters: all but the convolution, the rates, biases and norms."""
        return self.inner_dim * (3 * self.embed_dim + 2 * self.step_rank + 2 * self.state_dim)

    def other_flops(self) -> int:
        """As in StateSpaceLayer."""
        return self.inner_dim * (2 * self.conv_width + 6 * self.state_dim)

    def mix(
        self,
        own: Weights,
        h_BTD: jax.Array,
        mask: Mask,
        execution: Execution,
        cache: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Return the update of the residual stream, and the states after the last token."""
        R, S = self.step_rank, self.state_dim
        before_BKF, state_BFS = (None, None) if cache is None else cache
        both = execution.contract("BTD,PDF->PBTF", h_BTD, own["in"])
        x_BTF, gate_BTF = (part[0] for part in jnp.split(name_activation(both, "mixer_in"), 2))
        kernel_KF = gather(own["conv"]).astype(x_BTF.dtype)
        x_BTF, last_BKF = causal_convolution(x_BTF, kernel_KF, mask, before_BKF)
        x_BTF = jax.nn.silu(add_bias(x_BTF, own["conv_bias"]))
        out = ("batch", "length", "narrow")
        selected = execution.contract("BTF,FR->BTR", x_BTF, own["select"], out)
        rank_BTR, into_BTS, out_BTS = jnp.split(selected, [R, R + S], axis=-1)
        step_BTF = execution.contract("BTR,RF->BTF", rank_BTR, own["step"]).astype(jnp.float32)
        step_BTF = jax.nn.softplus(add_bias(step_BTF, own["step_bias"]))
        x32_BTF = x_BTF.astype(jnp.float32)
        y_BTF, state_BFS = selective_scan(
            x32_BTF,
            step_BTF,
            -jnp.exp(gather(own["decay"])),
            into_BTS.astype(jnp.float32),
            out_BTS.astype(jnp.float32),
            goes_on(mask),
            state_BFS,
        )
        y_BTF = (y_BTF + x32_BTF * gather(own["skip"])).astype(h_BTD.dtype)
        y_BTF = name_activation(y_BTF, "mixer")
        y_BTF *= jax.nn.silu(gate_BTF)
        y_BTD = execution.contract("BTF,FD->BTD", y_BTF, own["out"], RESIDUAL)
        return y_BTD, None if cache is None else (last_BKF.astype(cache[0].dtype), state_BFS)


def _rates(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return the logarithms of 1 to S in every channel (S4D-Real, arXiv 2206.11893)."""
    del key
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[-1] + 1, dtype=dtype)), shape)
