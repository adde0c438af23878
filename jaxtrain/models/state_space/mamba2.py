"""Mamba 2: state space duality (SSD), computed as attention in chunks.

Source: Dao and Gu 2024 (arXiv 2405.21060), section 7; one group of inputs and outputs.
Letters: B batch, T length, D embed, F inner width, N heads, P channels of a head (F / N), S states
of a channel, K kernel size of the convolution, V vocab.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.config.errors import (
    UserError,
    nearest_multiple,
    require_at_least,
)
from jaxtrain.config.reader import configurable
from jaxtrain.models.language_model import LanguageModel
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.kv_cache import Cached, LayerCache
from jaxtrain.nn.layers import add_bias
from jaxtrain.nn.normalization import RMSNorm, rms_norm
from jaxtrain.nn.parameters import Weights, add_prefix, constant, normal, param
from jaxtrain.nn.recurrent.state_space import (
    StateSpaceLayer,
    causal_convolution,
    goes_on,
    state_space_decoder,
    state_space_dual,
    steps,
    validate_state_space,
)
from jaxtrain.nn.remat import name_activation
from jaxtrain.nn.transformer.block import RESIDUAL
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import reshape

MOST_RATE = 16.0  # upper bound of new layers' rates, uniform from 1


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2(LanguageModel):
    """Sizes of a Mamba 2; the defaults are the 130M model.

    Attributes:
      vocab_size: rows of the embedding table.
      num_layers: layers.
      embed_dim: width of the residual stream.
      expand: channels of a layer over embed_dim.
      head_dim: channels of a head, which have one step and one rate.
      state_dim: states of each channel.
      conv_width: kernel size of the convolution before the states.
      context_length: the longest training sequence, in tokens; the model has no limit.
      norm_eps: epsilon of the RMS norms.
    """

    vocab_size: int = 50288
    num_layers: int = 24
    embed_dim: int = 768
    expand: int = 2
    head_dim: int = 64
    state_dim: int = 128
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
        require_at_least(1, self, "head_dim")
        if self.expand * self.embed_dim % self.head_dim:
            nearest = nearest_multiple(self.embed_dim, self.head_dim)
            raise UserError(
                f"Mamba2.embed_dim={self.embed_dim} x Mamba2.expand={self.expand} does not divide "
                f"by Mamba2.head_dim={self.head_dim}; the nearest embed_dim is {nearest}"
            )

    @property
    def block(self) -> "Mamba2Layer":
        """The layers' definition."""
        return Mamba2Layer(
            embed_dim=self.embed_dim,
            num_heads=self.expand * self.embed_dim // self.head_dim,
            head_dim=self.head_dim,
            state_dim=self.state_dim,
            conv_width=self.conv_width,
            norm=RMSNorm(dim=self.embed_dim, epsilon=self.norm_eps),
            num_layers=self.num_layers,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Layer(StateSpaceLayer):
    """x + out(norm(states(convolution(in(norm(x)))) gated)): figure 6 of the paper.

    Attributes (and those of StateSpaceLayer):
      num_heads: heads.
      head_dim: channels of each.
    """

    num_heads: int
    head_dim: int

    scope: ClassVar[str] = "mamba2"

    @property
    def inner_dim(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    def weights(self, key: jax.Array) -> Weights:
        """Initialize the parameters of one layer.

        `in` projects to gates and channels [2, D, F], `select` to inputs and outputs of the
        states [D, 2 S], `step` to the heads' steps [D, N]; `decay` is log(-A).
        """
        D, F, N, S, K = (
            self.embed_dim, self.inner_dim, self.num_heads, self.state_dim, self.conv_width,
        )  # fmt: skip
        keys = jax.random.split(key, 8)

        def uniform(fan_in: int, layers: int = 1) -> Any:
            return normal(
                1 / math.sqrt(3 * fan_in * layers)
            )  # the standard deviation of torch.nn.Linear

        return {
            **add_prefix("norm", self.norm.weights(key)),
            "in": param(keys[0], (2, D, F), ("qkv", "embed", "mlp"), uniform(D)),
            "conv": param(keys[1], (K, F), ("narrow", "mlp"), uniform(K)),
            "conv_bias": param(keys[1], (F,), ("mlp",), constant(0.0)),
            "select": param(keys[2], (D, 2 * S), ("embed", "narrow"), uniform(D)),
            "select_conv": param(keys[3], (K, 2 * S), ("narrow", "narrow"), uniform(K)),
            "select_conv_bias": param(keys[3], (2 * S,), ("vector",), constant(0.0)),
            "step": param(keys[4], (D, N), ("embed", "mlp"), uniform(D)),
            "step_bias": param(keys[5], (N,), ("mlp",), steps),
            "decay": param(keys[6], (N,), ("mlp",), _rates),
            "skip": param(key, (N,), ("mlp",), constant(1.0)),
            "gated_norm_scale": param(key, (F,), ("mlp",), constant(1.0), role="norm"),
            "out": param(keys[7], (F, D), ("mlp", "embed"), uniform(F, self.num_layers)),
        }

    @property
    def cached(self) -> tuple[Cached, ...]:
        """The last inputs of both convolutions, and the states."""
        before, states = self.conv_width - 1, (self.num_heads, self.head_dim, self.state_dim)
        return (
            Cached(shape=(before, self.inner_dim), axes=("narrow", "mlp"), every_token=False),
            Cached(shape=(before, 2 * self.state_dim), axes=("narrow", "narrow"),
                   every_token=False),
            Cached(shape=states, axes=("mlp", "head_dim", "state"), every_token=False,
                   dtype="float32"),
        )  # fmt: skip

    def matmul_parameters(self) -> int:
        """Matmul parameters: all but the convolutions, the rates, biases and norms."""
        return self.embed_dim * (3 * self.inner_dim + 2 * self.state_dim + self.num_heads)

    def other_flops(self) -> int:
        """As in StateSpaceLayer."""
        S, K = self.state_dim, self.conv_width
        return self.inner_dim * (2 * K + 6 * S) + 2 * S * 2 * K

    def mix(
        self,
        own: Weights,
        h_BTD: jax.Array,
        mask: Mask,
        execution: Execution,
        cache: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Return the update of the residual stream, and the states after the last token."""
        S, P = self.state_dim, self.head_dim
        before_BKF, before_BKS, state_BNPS = (None, None, None) if cache is None else cache
        both = execution.contract("BTD,PDF->PBTF", h_BTD, own["in"])
        gate_BTF, x_BTF = (part[0] for part in jnp.split(name_activation(both, "mixer_in"), 2))
        selected = execution.contract("BTD,DR->BTR", h_BTD, own["select"])
        step_BTN = execution.contract("BTD,DN->BTN", h_BTD, own["step"]).astype(jnp.float32)
        step_BTN = jax.nn.softplus(add_bias(step_BTN, own["step_bias"]))
        x_BTF, last_BKF = _convolve(x_BTF, own, "conv", mask, before_BKF)
        selected, last_BKS = _convolve(selected, own, "select_conv", mask, before_BKS)
        into_BTS, out_BTS = jnp.split(selected.astype(jnp.float32), [S], axis=-1)
        # Each head's channels are contiguous, so that devices keep theirs.
        rows, positions, split = jax.typeof(x_BTF).sharding.spec
        shape = (*x_BTF.shape[:2], self.num_heads, P)
        x_BTNP = reshape(x_BTF.astype(jnp.float32), shape, (rows, positions, split, None))
        y_BTNP, state_BNPS = state_space_dual(
            x_BTNP, step_BTN, -jnp.exp(gather(own["decay"])), into_BTS, out_BTS,
            goes_on(mask), state_BNPS,
        )  # fmt: skip
        y_BTNP += x_BTNP * gather(own["skip"])[:, None]
        y_BTF = name_activation(reshape(y_BTNP, x_BTF.shape, (rows, positions, split)), "mixer")
        y_BTF *= jax.nn.silu(gate_BTF.astype(jnp.float32))
        y_BTF = rms_norm(y_BTF, own["gated_norm_scale"], epsilon=self.norm.epsilon)
        y_BTD = execution.contract("BTF,FD->BTD", y_BTF.astype(h_BTD.dtype), own["out"], RESIDUAL)
        if cache is None:
            return y_BTD, None
        return y_BTD, (last_BKF.astype(cache[0].dtype), last_BKS.astype(cache[1].dtype), state_BNPS)


def _convolve(
    x_BTF: jax.Array, own: Weights, name: str, mask: Mask, before_BKF: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """silu of a causal convolution, and its state for the next positions."""
    kernel_KF = gather(own[name]).astype(x_BTF.dtype)
    y_BTF, last_BKF = causal_convolution(x_BTF, kernel_KF, mask, before_BKF)
    return jax.nn.silu(add_bias(y_BTF, own[f"{name}_bias"])), last_BKF


def _rates(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Logarithms of uniform random numbers from 1 to 16, as in the authors' code."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, MOST_RATE))
