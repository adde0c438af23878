"""Mamba 2: a state space of heads whose states decay alike, computed as attention in chunks.

Source: Dao and Gu 2024 (arXiv 2405.21060), section 7; one group of inputs and outputs.
Letters: B batch, T length, D embed, F inner width, N heads, P channels of a head (F / N), S states
of a channel, K places of the convolution, V vocab.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.config.errors import (
    UserError,
    nearest_multiple,
    refuse_below,
    refuse_not_positive,
)
from jaxtrain.config.reader import configurable
from jaxtrain.models.model import Inputs
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.block import RESIDUAL, pre_norm
from jaxtrain.nn.cache import Cached
from jaxtrain.nn.decoder import Decoder
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.layers import add_bias, rms_norm
from jaxtrain.nn.norms import RMSNorm
from jaxtrain.nn.parameters import Weights, constant, normal, param, prefixed, under
from jaxtrain.nn.selective_scan import causal_convolution, goes_on, steps
from jaxtrain.nn.state_space_dual import state_space_dual
from jaxtrain.nn.transformer import Auxiliary, LayerCache
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import reshape

MOST_RATE = 16.0  # of a fresh layer's heads, which are drawn evenly from 1 on


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Sizes of a Mamba 2; the defaults are the 130M model.

    Attributes:
      vocab_size: rows of the embedding table.
      num_layers: layers.
      embed_dim: width of the residual stream.
      expand: channels of a layer over embed_dim.
      head_dim: channels of a head, which have one step and one rate.
      state_dim: states of each channel.
      conv_width: places that the convolution before the states reaches over.
      context_length: the longest sequence, in tokens: of training, the model has no limit.
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

    inputs: ClassVar[Inputs] = "tokens"
    objective = "next_token"
    attention = None
    experts = None
    # Which setting gives a logical axis its size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "mlp": "embed_dim",
        "layers": "num_layers", "vocab_embed": "embed_dim",
    }  # fmt: skip

    def __post_init__(self) -> None:
        refuse_below(
            1, self, "vocab_size", "num_layers", "embed_dim", "expand", "head_dim", "state_dim",
            "context_length",
        )  # fmt: skip
        refuse_below(2, self, "conv_width")
        refuse_not_positive(self, "norm_eps")
        if self.expand * self.embed_dim % self.head_dim:
            nearest = nearest_multiple(self.embed_dim, self.head_dim)
            raise UserError(
                f"Mamba2.embed_dim={self.embed_dim} x Mamba2.expand={self.expand} does not divide "
                f"by Mamba2.head_dim={self.head_dim}; the nearest embed_dim is {nearest}"
            )

    @property
    def layers(self) -> int:
        """All layers are one stack."""
        return self.num_layers

    @property
    def layer(self) -> "Mamba2Layer":
        """What every layer computes."""
        return Mamba2Layer(
            embed_dim=self.embed_dim,
            num_heads=self.expand * self.embed_dim // self.head_dim,
            head_dim=self.head_dim,
            state_dim=self.state_dim,
            conv_width=self.conv_width,
            norm=self.norm,
            num_layers=self.num_layers,
        )

    @property
    def norm(self) -> RMSNorm:
        """The norm before each layer, and after the last."""
        return RMSNorm(dim=self.embed_dim, epsilon=self.norm_eps)

    @property
    def cached(self) -> tuple[Cached, ...]:
        """The last inputs of both convolutions, and the states: as many for any length."""
        layer, before = self.layer, self.conv_width - 1
        states = (layer.num_heads, layer.head_dim, layer.state_dim)
        return (
            Cached(shape=(before, layer.inner_dim), axes=("narrow", "mlp"), every_token=False),
            Cached(shape=(before, 2 * self.state_dim), axes=("narrow", "narrow"),
                   every_token=False),
            Cached(shape=states, axes=("mlp", "head_dim", "state"), every_token=False,
                   dtype="float32"),
        )  # fmt: skip

    def build(self, key: jax.Array) -> Decoder:
        """The module with freshly drawn parameters."""
        key_tokens, key_layers = jax.random.split(key)
        shape, axes = (self.vocab_size, self.embed_dim), ("vocab", "vocab_embed")
        return Decoder(
            self.layer,
            key_layers,
            num_layers=self.num_layers,
            token_embedding=param(key_tokens, shape, axes, normal(0.02), role="embedding"),
            norm=self.norm,
        )

    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token (the N of 6N)."""
        return self.num_layers * self.layer.matmul_parameters() + self.vocab_size * self.embed_dim

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs a token, whatever the length, as the recurrence is written.

        6 N, and three times what goes forward: 2 K of each channel's convolution, 6 of each state
        (its rate, its input, two for the recurrence, two for the sum that is read).
        """
        del sequence_length
        layer, S, K = self.layer, self.state_dim, self.conv_width
        own = layer.inner_dim * (2 * K + 6 * S) + 2 * S * 2 * K
        return 6.0 * self.matmul_parameters() + 3 * self.num_layers * own

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one sequence of shape (T,)."""
        return shape[0] * self.flops_per_token(shape[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Layer:
    """x + out(norm(states(convolution(in(norm(x)))) gated)): figure 6 of the paper.

    Attributes:
      embed_dim: width of the residual stream.
      num_heads: heads.
      head_dim: channels of each.
      state_dim: states of each channel.
      conv_width: places of the convolution.
      norm: of what goes in.
      num_layers: of the model: the more, the less each adds at first.
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    state_dim: int
    conv_width: int
    norm: RMSNorm
    num_layers: int

    @property
    def inner_dim(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    def weights(self, key: jax.Array) -> Weights:
        """Freshly drawn parameters of one layer.

        `in` makes gates and channels [2, D, F], `select` how inputs enter the states and how these
        are read [D, 2 S], `step` the heads' steps [D, N]; `decay` is log(-A).
        """
        D, F, N, S, K = (
            self.embed_dim, self.inner_dim, self.num_heads, self.state_dim, self.conv_width,
        )  # fmt: skip
        keys = jax.random.split(key, 8)

        def uniform(fan_in: int, layers: int = 1) -> Any:
            return normal(1 / math.sqrt(3 * fan_in * layers))  # the spread of torch.nn.Linear

        return {
            **prefixed("norm", self.norm.weights(key)),
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

    def matmul_parameters(self) -> int:
        """All but the convolutions, the rates, biases and norms."""
        return self.embed_dim * (3 * self.inner_dim + 2 * self.state_dim + self.num_heads)

    def __call__(
        self,
        own: Weights,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
        cache: LayerCache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, LayerCache | None, Auxiliary]:
        """One layer, whose cache is its states; arguments and results as in `decoder.Layer`."""
        del positions_BT, start  # the order is in the recurrence

        def mix(h_BTD: jax.Array) -> tuple[jax.Array, LayerCache | None]:
            return self.mix(own, h_BTD, mask, execution, cache)

        with jax.named_scope("mamba2"):
            x_BTD, cache = pre_norm(lambda x: self.norm(under("norm", own), x), x_BTD, mix)
        return x_BTD, cache, {}

    def mix(
        self,
        own: Weights,
        h_BTD: jax.Array,
        mask: Mask,
        execution: Execution,
        cache: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """What is added to the residual stream, and the states after the last token."""
        S, P = self.state_dim, self.head_dim
        before_BKF, before_BKS, state_BNPS = (None, None, None) if cache is None else cache
        both = execution.contract("BTD,PDF->PBTF", h_BTD, own["in"])
        gate_BTF, x_BTF = (part[0] for part in jnp.split(both, 2))
        selected = execution.contract("BTD,DR->BTR", h_BTD, own["select"])
        step_BTN = execution.contract("BTD,DN->BTN", h_BTD, own["step"]).astype(jnp.float32)
        step_BTN = jax.nn.softplus(add_bias(step_BTN, own["step_bias"]))
        x_BTF, last_BKF = _convolved(x_BTF, own, "conv", mask, before_BKF)
        selected, last_BKS = _convolved(selected, own, "select_conv", mask, before_BKS)
        into_BTS, out_BTS = jnp.split(selected.astype(jnp.float32), [S], axis=-1)
        # Each head's channels follow each other, so that devices keep theirs.
        rows, places, split = jax.typeof(x_BTF).sharding.spec
        shape = (*x_BTF.shape[:2], self.num_heads, P)
        x_BTNP = reshape(x_BTF.astype(jnp.float32), shape, (rows, places, split, None))
        y_BTNP, state_BNPS = state_space_dual(
            x_BTNP, step_BTN, -jnp.exp(gather(own["decay"])), into_BTS, out_BTS,
            goes_on(mask), state_BNPS,
        )  # fmt: skip
        y_BTNP += x_BTNP * gather(own["skip"])[:, None]
        y_BTF = reshape(y_BTNP, x_BTF.shape, (rows, places, split))
        y_BTF *= jax.nn.silu(gate_BTF.astype(jnp.float32))
        y_BTF = rms_norm(y_BTF, own["gated_norm_scale"], epsilon=self.norm.epsilon)
        y_BTD = execution.contract("BTF,FD->BTD", y_BTF.astype(h_BTD.dtype), own["out"], RESIDUAL)
        if cache is None:
            return y_BTD, None
        return y_BTD, (last_BKF.astype(cache[0].dtype), last_BKS.astype(cache[1].dtype), state_BNPS)


def _convolved(
    x_BTF: jax.Array, own: Weights, name: str, mask: Mask, before_BKF: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """silu of a causal convolution, and what its next places need."""
    kernel_KF = gather(own[name]).astype(x_BTF.dtype)
    y_BTF, last_BKF = causal_convolution(x_BTF, kernel_KF, mask, before_BKF)
    return jax.nn.silu(add_bias(y_BTF, own[f"{name}_bias"])), last_BKF


def _rates(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The logarithms of numbers drawn evenly from 1 to 16, as the authors' code does."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, MOST_RATE))
