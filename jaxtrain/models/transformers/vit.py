"""Vision Transformer: patches and a class token.

Source: Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words" (arXiv 2010.11929), equations 1 to
4, without its dropout.
Letters: B batch, H height, W width, C channels in, P patches, T tokens (P + 1), D embed, K size
of a patch.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.errors import UserError, nearest_multiple, require_at_least, require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.models.model import AttentionFacts, Inputs
from jaxtrain.nn.attention.attention import Mask
from jaxtrain.nn.attention.multi_head import MultiHead
from jaxtrain.nn.convnet import IMAGES
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.layers import Dense, add_bias
from jaxtrain.nn.normalization import LayerNorm
from jaxtrain.nn.parameters import (
    add_prefix,
    constant,
    normal,
    param,
    residual_stddev,
    stack,
    under,
)
from jaxtrain.nn.predictor import through_layers
from jaxtrain.nn.transformer.block import RESIDUAL, Block
from jaxtrain.nn.transformer.mlp import TwoLayers, exact_gelu
from jaxtrain.parallel.gathering import dtype_of, gather
from jaxtrain.parallel.sharding import reshape, shard


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ViT:
    """Sizes of a Vision Transformer; the defaults are ViT-B/16 for ImageNet.

    Attributes:
      num_classes: number of classes.
      channels: channels of the images: 3 for RGB, 1 for gray.
      image_size: height and width of the images, in pixels.
      patch_size: height and width of a patch, in pixels.
      num_layers: blocks.
      embed_dim: width of the residual stream.
      num_heads: attention heads; embed_dim / num_heads is the head_dim.
      mlp_dim: width inside the MLP.
      norm_eps: epsilon of the layer norms.
    """

    num_classes: int = 1000
    channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    num_layers: int = 12
    embed_dim: int = 768
    num_heads: int = 12
    mlp_dim: int = 3072
    norm_eps: float = 1e-6

    inputs: ClassVar[Inputs] = "images"
    objective = "classification"
    experts = None
    cached = ()
    settings: ClassVar[dict[str, str]] = {
        "embed": "embed_dim", "vocab_embed": "embed_dim", "fan_in": "embed_dim",
        "fan_out": "num_classes", "heads": "num_heads", "mlp": "mlp_dim", "layers": "num_layers",
    }  # fmt: skip

    def __post_init__(self) -> None:
        sizes = [field.name for field in dataclasses.fields(self) if field.name != "norm_eps"]
        require_at_least(1, self, *sizes)
        require_positive(self, "norm_eps")
        for name, parts in (("image_size", "patch_size"), ("embed_dim", "num_heads")):
            value, part = vars(self)[name], vars(self)[parts]
            if value % part:
                raise UserError(
                    f"ViT.{name}={value} does not divide by ViT.{parts}={part}; the nearest "
                    f"{name} is {nearest_multiple(value, part)}"
                )

    @property
    def layers(self) -> int:
        """All blocks are one stack."""
        return self.num_layers

    @property
    def attention(self) -> AttentionFacts:
        """Every token sees every other."""
        return self.block.attention.facts

    @property
    def least_pixels(self) -> int:
        """Reject images of another size: each position has its own embedding."""
        return self.image_size

    @property
    def tokens(self) -> int:
        """Patches, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def patch_numbers(self) -> int:
        """Numbers of a patch."""
        return self.patch_size**2 * self.channels

    @property
    def block(self) -> Block:
        """The layers' definition."""
        D, N, stddev = self.embed_dim, self.num_heads, residual_stddev(self.num_layers)
        return Block(
            attention=MultiHead(
                embed_dim=D, num_heads=N, head_dim=D // N, residual_stddev=stddev, causal=False
            ),
            mlp=TwoLayers(
                embed_dim=D, mlp_dim=self.mlp_dim, residual_stddev=stddev, function=exact_gelu
            ),
            norm=LayerNorm(dim=D, epsilon=self.norm_eps),
        )  # fmt: skip

    def build(self, key: jax.Array) -> "ViTModel":
        """Return the newly initialized module."""
        return ViTModel(self, key)

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one image: 6 per parameter and token, and full attention.

        Raises UserError for an image of another size.
        """
        if shape[:2] != (self.image_size,) * 2:
            raise UserError(
                f"ViT.image_size={self.image_size}, but the images have {shape[0]} x {shape[1]} "
                f"pixels; set ViT.image_size={shape[0]}, or scale them to {self.image_size}"
            )
        T, D = self.tokens, self.embed_dim
        blocks = self.num_layers * T * (self.block.matmul_parameters() + 2 * T * D)
        return 6.0 * (blocks + (T - 1) * self.patch_numbers * D + D * self.num_classes)


class ViTModel(nnx.Module):
    """Images to logits: a `StackedPredictor`."""

    def __init__(self, sizes: ViT, key: jax.Array) -> None:
        key_patches, key_class, key_positions, key_layers, key_head = jax.random.split(key, 5)
        D, K = sizes.embed_dim, sizes.patch_numbers
        # As small as the positions: with larger patches these would be lost in the norm.
        self.patches = param(key_patches, (K, D), ("narrow", "vocab_embed"), normal(0.02))
        self.patches_bias = param(key_patches, (D,), ("vector",), constant(0.0))
        self.class_token = param(key_class, (D,), ("vector",), normal(0.02))
        self.position_embedding = param(
            key_positions,
            (sizes.tokens, D),
            ("positions", "vocab_embed"),
            normal(0.02),
            role="position",
        )
        self.block, self.norm, self.patch_size = sizes.block, sizes.block.norm, sizes.patch_size
        self.layers = nnx.data(stack(self.block.weights, sizes.num_layers, key_layers))
        for name, weight in add_prefix("norm", self.norm.weights(key)).items():
            setattr(self, name, weight)
        self.head = Dense(key_head, D, sizes.num_classes, normal(0.01), role="output")

    @jax.named_scope("embedding")
    def embed(self, images_BHWC: jax.Array, execution: Execution) -> jax.Array:
        """Return the residual stream [B, T, D] that goes into the first layer."""
        images_BHWC = shard(images_BHWC, IMAGES)
        B, H, W, C = images_BHWC.shape
        S = self.patch_size
        x = images_BHWC.astype(dtype_of(self.patches))
        rows = jax.typeof(x).sharding.spec[0]
        x = reshape(x, (B, H // S, S, W // S, S, C), (rows, *[None] * 5))
        x, P = x.transpose(0, 1, 3, 2, 4, 5), (H // S) * (W // S)
        x_BPK = reshape(x, (B, P, S * S * C), (rows, None, None))
        x_BPD = add_bias(execution.contract("BPK,KD->BPD", x_BPK, self.patches), self.patches_bias)
        first_D = gather(self.class_token).astype(x_BPD.dtype)
        first_B1D = shard(jnp.broadcast_to(first_D, (B, 1, len(first_D))), RESIDUAL)
        x_BTD = jnp.concatenate([first_B1D, shard(x_BPD, RESIDUAL)], 1)
        return x_BTD + gather(self.position_embedding).astype(x_BTD.dtype)

    def run_layer(self, layer: Any, x_BTD: jax.Array, execution: Execution) -> jax.Array:
        """Run one block."""
        positions_BT = jnp.zeros(x_BTD.shape[:2], jnp.int32)  # added by the embedding
        return self.block(layer, x_BTD, positions_BT, Mask(causal=False), execution)[0]

    @jax.named_scope("head")
    def finish(self, x_BTD: jax.Array, execution: Execution) -> jax.Array:
        """Logits [B, C] from the class token's output of the last layer."""
        return self.head(self.norm(under("norm", vars(self)), x_BTD[:, 0]), execution)

    def __call__(
        self, images_BHWC: jax.Array, statistics: Any, execution: Execution, *, train: bool
    ) -> tuple[jax.Array, Any]:
        """Logits [B, C]; as in `Predictor`."""
        del train
        return through_layers(self, images_BHWC, execution), statistics
