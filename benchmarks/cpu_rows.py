"""Rows of `cpu_vs_torch`: our config and bindings, the batches of both sides, and PyTorch's model.

Both sides have the same optimizer without a schedule: SGD with Nesterov momentum for convolutional
networks, AdamW for the others. Dropout and label smoothing are 0.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

BATCHES = 10
# The fields of our `Batch` that both sides read; missing masks are 1 and positions count from 0.
Fields = dict[str, np.ndarray]

COMMON = (
    "Mesh.fsdp = 1", "Mesh.tensor = 1", "Precision.compute = 'float32'",
    "Schedule.warmup_steps = 0", "Schedule.name = 'constant'", "Train.steps = 1000000000",
)  # fmt: skip
DECODER = ("Attention.kernel = 'blocked'", "Remat.policy = 'elementwise'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
      title: the row's name in the table.
      config: a shipped config.
      bindings: gin bindings over it, without the optimizer's.
      batches: makes the batches that both sides cycle through, in this order.
      peer: PyTorch's model, "torch_text.GRU": a name in a module of this package. It takes our
        weights and maps a batch to its mean loss.
      unit: what throughput counts.
      units: how many of them a step has.
      optimizer: of both sides.
      learning_rate: of both sides.
      weight_decay: of both sides, of matrices only.
      clip_norm: of both sides.
      tolerance: the largest relative difference of the losses of 10 steps.
      published: the peer takes a folder with our model as transformers reads it, in place of a
        mapping from the names of our parameters, joined by dots, to arrays.
      new_tokens: of each of a batch's prompts, its `inputs`, which both sides generate greedily in
        place of a train step; their tokens are compared in place of losses. 0: a train step.
    """

    title: str
    config: str
    bindings: tuple[str, ...]
    batches: Callable[[], list[Fields]]
    peer: str
    unit: str
    units: int
    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    tolerance: float = 1e-4
    published: bool = False
    new_tokens: int = 0

    def all_bindings(self) -> list[str]:
        """The bindings over the shipped config, the optimizer's too."""
        return [
            *COMMON, *self.bindings,
            f"Optimizer.name = {self.optimizer!r}",
            f"Optimizer.learning_rate = {self.learning_rate}",
            f"Optimizer.weight_decay = {self.weight_decay}",
            f"Optimizer.clip_norm = {self.clip_norm}",
        ]  # fmt: skip

    def make_peer(self, weights: Any) -> Any:
        """PyTorch's model with our weights: a `torch.nn.Module`."""
        module, _, name = self.peer.rpartition(".")
        return getattr(importlib.import_module(f"benchmarks.{module}"), name)(weights)


def bind(model: str, sizes: Mapping[str, Any]) -> tuple[str, ...]:
    """Gin bindings of a model's sizes."""
    return tuple(f"{model}.{name} = {value!r}" for name, value in sizes.items())


# -- text ------------------------------------------------------------------------------------------


def _next_tokens(vocab_size: int, batch: int, length: int) -> list[Fields]:
    # A skewed vocabulary: there is something to learn in ten steps.
    shape = (BATCHES, batch, length + 1)
    tokens = (vocab_size * np.random.default_rng(0).random(shape) ** 3).astype(np.int32)
    return [{"inputs": rows[:, :-1], "targets": rows[:, 1:]} for rows in tokens]


def _text(vocab_size: int, batch: int, length: int) -> tuple[str, ...]:
    return (
        "TextData.source = 'synthetic'", f"TextData.synthetic_vocab_size = {vocab_size}",
        f"TextData.sequence_length = {length}", "TextData.separate_documents = False",
        f"Train.global_batch_size = {batch}",
    )  # fmt: skip


def _language_model(
    title: str, config: str, model: str, sizes: Mapping[str, Any], batch: int, length: int,
    peer: str, bindings: tuple[str, ...] = (), **changes: Any,
) -> Row:  # fmt: skip
    vocab_size = sizes["vocab_size"]
    return Row(
        title=f"{title}, T {length}, batch {batch}", config=config, peer=peer,
        bindings=(*bind(model, sizes), *_text(vocab_size, batch, length), *bindings),
        batches=functools.partial(_next_tokens, vocab_size, batch, length),
        unit="tokens", units=batch * length, **changes,
    )  # fmt: skip


def gpt(title: str, layers: int, dim: int, heads: int, length: int, batch: int) -> Row:
    """A GPT-2 with a vocabulary of 65 characters, as nanoGPT writes it."""
    sizes = {
        "num_layers": layers, "embed_dim": dim, "num_heads": heads, "context_length": length,
        "vocab_size": 65,
    }  # fmt: skip
    return _language_model(
        title, "gpt_quickstart", "GPT", sizes, batch, length, "torch_models.GPT", DECODER
    )


def lora(layers: int, dim: int, heads: int, length: int, batch: int, rank: int) -> Row:
    """A GPT-2 whose adapters alone are trained."""
    row = gpt(
        f"LoRA of rank {rank}: GPT {layers} layers x {dim}", layers, dim, heads, length, batch
    )
    bindings = (*row.bindings, f"Finetune.lora_rank = {rank}", "Finetune.lora_alpha = 16.0")
    return dataclasses.replace(row, bindings=bindings, peer="torch_gpt.LoRAGPT")


def generation(layers: int, dim: int, heads: int, prompt: int, new_tokens: int, batch: int) -> Row:
    """Greedy decoding with a KV cache."""
    row = gpt("", layers, dim, heads, prompt + new_tokens, batch)
    return dataclasses.replace(
        row, peer="torch_gpt.CachedGPT", tolerance=0.0,
        title=f"GPT {layers} layers x {dim} generates {new_tokens} tokens after {prompt}, "
        f"batch {batch}",
        batches=functools.partial(_prompts, 65, batch, prompt), units=batch * new_tokens,
        new_tokens=new_tokens,
    )  # fmt: skip


def _prompts(vocab_size: int, batch: int, length: int) -> list[Fields]:
    return [{"inputs": one["inputs"]} for one in _next_tokens(vocab_size, batch, length)]


def recurrent(name: str, layers: int, dim: int, length: int, batch: int) -> Row:
    """An RNN, GRU or LSTM with a vocabulary of 65 characters."""
    sizes = {"num_layers": layers, "embed_dim": dim, "vocab_size": 65}
    return _language_model(
        f"{name} {layers} layers x {dim}", f"{name.lower()}_quickstart", name, sizes, batch, length,
        f"torch_recurrent.{name}", ("Mesh.data = 1",),
    )  # fmt: skip


def mamba(layers: int, dim: int, length: int, batch: int, state: int = 16) -> Row:
    """A Mamba with a vocabulary of 65 characters, against that of transformers."""
    sizes = {"num_layers": layers, "embed_dim": dim, "vocab_size": 65, "state_dim": state}
    return _language_model(
        f"Mamba {layers} layers x {dim}", "mamba_quickstart", "Mamba", sizes, batch, length,
        "torch_published.CausalLM", published=True,
    )  # fmt: skip


def mixtral(layers: int, dim: int, experts: int, per_token: int, length: int, batch: int) -> Row:
    """A mixture of experts that drops no tokens, against that of transformers."""
    sizes = {
        "num_layers": layers, "embed_dim": dim, "num_heads": 4, "num_kv_heads": 4,
        "mlp_dim": 2 * dim, "num_experts": experts, "experts_per_token": per_token,
        "vocab_size": 65, "capacity_factor": None, "balance_weight": 0.0, "router_z_weight": 0.0,
    }  # fmt: skip
    return _language_model(
        f"Mixtral {layers} layers x {dim}, {per_token} of {experts} experts", "mixtral_tiny",
        "Mixtral", sizes, batch, length, "torch_published.CausalLM", ("Mesh.expert = 1",),
        published=True,
    )  # fmt: skip


def _pairs(vocab_size: int, batch: int, source: int, target: int) -> list[Fields]:
    shape = (BATCHES, batch, source + target + 1)
    tokens = (vocab_size * np.random.default_rng(0).random(shape) ** 3).astype(np.int32)
    return [
        {"source": rows[:, :source], "inputs": rows[:, source:-1], "targets": rows[:, source + 1 :]}
        for rows in tokens
    ]


def t5(
    vocab_size: int, layers: int, dim: int, heads: int, source: int, target: int, batch: int
) -> Row:
    """A T5 of equally many layers in both stacks, against that of transformers."""
    sizes = {
        "vocab_size": vocab_size, "num_layers": layers, "embed_dim": dim, "num_heads": heads,
        "head_dim": dim // heads, "mlp_dim": 4 * dim, "context_length": source,
    }  # fmt: skip
    return Row(
        title=f"T5 2 x {layers} layers x {dim}, {source} to {target} tokens, batch {batch}",
        config="t5_tiny", peer="torch_published.T5", published=True,
        bindings=(*bind("T5", sizes), *_text(vocab_size - 100, batch, source)),
        batches=functools.partial(_pairs, vocab_size, batch, source, target),
        unit="tokens", units=batch * (source + target),
    )  # fmt: skip


def _masked_tokens(vocab_size: int, batch: int, length: int) -> list[Fields]:
    rng, found = np.random.default_rng(0), []
    for _ in range(BATCHES):
        targets = ((vocab_size - 1) * rng.random((batch, length)) ** 3).astype(np.int32)
        chosen = rng.random(targets.shape) < 0.15
        inputs = np.where(chosen, vocab_size - 1, targets).astype(np.int32)
        found.append({"inputs": inputs, "targets": targets, "loss_mask": chosen.astype(np.float32)})
    return found


def bert(vocab_size: int, layers: int, dim: int, heads: int, length: int, batch: int) -> Row:
    """A BERT trained on masked tokens, against that of transformers."""
    sizes = {
        "vocab_size": vocab_size, "num_layers": layers, "embed_dim": dim, "num_heads": heads,
        "mlp_dim": 4 * dim, "context_length": length,
    }  # fmt: skip
    return Row(
        title=f"BERT {layers} layers x {dim}, T {length}, batch {batch}",
        config="bert_tiny", peer="torch_published.BERT", published=True,
        bindings=(
            *bind("BERT", sizes), *_text(vocab_size - 1, batch, length),
            # All logits are 65 MB, which glibc maps anew at every step.
            f"Loss.chunk_size = {length // 2}",
        ),
        batches=functools.partial(_masked_tokens, vocab_size, batch, length),
        unit="tokens", units=batch * length,
    )  # fmt: skip


# -- vectors and images ----------------------------------------------------------------------------


def _vectors(features: int, batch: int) -> list[Fields]:
    rng = np.random.default_rng(0)
    return [
        {
            "inputs": rng.random((batch, features), np.float32),
            "targets": rng.integers(0, 10, batch, np.int32),
        }
        for _ in range(BATCHES)
    ]


def _feed_forward(
    name: str, config: str, widths: tuple[int, ...], batch: int, bindings: tuple[str, ...] = ()
) -> Row:
    return Row(
        title=f"{name} {'-'.join(map(str, widths))}, batch {batch}",
        config=config, peer=f"torch_images.{name}",
        bindings=(
            f"{name}.widths = {widths}", "VectorData.source = 'mnist5k'",
            f"VectorData.features = {widths[0]}", f"Train.global_batch_size = {batch}", *bindings,
        ),
        batches=functools.partial(_vectors, widths[0], batch),
        unit="vectors", units=batch,
    )  # fmt: skip


def mlp(widths: tuple[int, ...], batch: int) -> Row:
    """From vectors of 784 features to 10 classes."""
    return _feed_forward("MLP", "mlp_digits", widths, batch, ("MLP.dropout = 0.0",))


def autoencoder(widths: tuple[int, ...], batch: int) -> Row:
    """From vectors of 784 features to a code and back."""
    return _feed_forward("Autoencoder", "autoencoder_mnist5k", widths, batch)


def _images(pixels: int, batch: int) -> list[Fields]:
    rng = np.random.default_rng(0)
    return [
        {
            "inputs": rng.standard_normal((batch, pixels, pixels, 3), np.float32),
            "targets": rng.integers(0, 10, batch, np.int32),
        }
        for _ in range(BATCHES)
    ]


def image_classifier(
    name: str, config: str, peer: str, bindings: tuple[str, ...], pixels: int, batch: int,
    **changes: Any,
) -> Row:  # fmt: skip
    """A network for images in color and 10 classes."""
    return Row(
        title=f"{name}, {pixels} x {pixels}, batch {batch}", config=config, peer=peer,
        bindings=(
            "ImageData.source = 'synthetic'", f"ImageData.image_size = {pixels}",
            "ImageData.channels = 3", "ImageData.mean = (0.5, 0.5, 0.5)",
            "ImageData.std = (0.25, 0.25, 0.25)", f"Train.global_batch_size = {batch}", *bindings,
        ),
        batches=functools.partial(_images, pixels, batch), unit="images", units=batch, **changes,
    )  # fmt: skip


# Batch norms on random images are chaotic: larger steps drift apart within ten of them.
_SGD = {"optimizer": "sgd", "learning_rate": 1e-4, "weight_decay": 5e-4, "clip_norm": None}
_VGG = ("VGG.head_width = 512", "VGG.channels = 3", "VGG.dropout = 0.0")


def lenet(pixels: int, batch: int) -> Row:
    """LeNet without padding."""
    sizes = ("LeNet.channels = 3", "LeNet.padding = 0")
    return image_classifier(
        "LeNet", "lenet_mnist5k", "torch_images.make_lenet", sizes, pixels, batch, **_SGD
    )


def alexnet(pixels: int, batch: int, width: int = 64, head_width: int = 4096) -> Row:
    """AlexNet as torchvision has it."""
    sizes = {"width": width, "head_width": head_width, "channels": 3, "dropout": 0.0}
    return image_classifier(
        "AlexNet", "alexnet_mnist5k", "torch_images.make_alexnet", bind("AlexNet", sizes), pixels,
        batch,
        # Larger steps overshoot, and the sides drift apart by rounding alone.
        **{**_SGD, "learning_rate": 1e-6},
    )  # fmt: skip


def vgg11(pixels: int, batch: int, width: int = 64, norm: str | None = None) -> Row:
    """VGG-11, with or without batch norms."""
    return image_classifier(
        f"VGG-11{' with batch norms' if norm else ''}", "vgg11_mnist5k", "torch_images.make_vgg11",
        (*_VGG, f"VGG.width = {width}", f"VGG.norm = {norm!r}"), pixels, batch,
        # Without norms inductor's rounding alone is 1.3e-4 from eager's after eight steps of 1e-4.
        **{**_SGD, "learning_rate": 1e-4 if norm else 1e-5},
    )  # fmt: skip


def resnet20(pixels: int, batch: int, width: int | None = None) -> Row:
    """The form for CIFAR."""
    sizes = (f"ResNet.width = {width}", "ResNet.channels = 3", "ImageData.crop = 'resized'")
    return image_classifier(
        "ResNet-20", "resnet_digits", "torch_images.ResNet", sizes, pixels, batch,
        **{**_SGD, "learning_rate": 0.01},
    )  # fmt: skip


def resnet18(pixels: int, batch: int, width: int | None = None) -> Row:
    """The form for ImageNet, with 10 classes."""
    sizes = ("ResNet.depth = 18", f"ResNet.width = {width}", "ResNet.channels = 3")
    return image_classifier(
        "ResNet-18", "resnet_digits", "torch_images.ResNet",
        (*sizes, "ImageData.crop = 'resized'"), pixels, batch, **_SGD,
    )  # fmt: skip


def googlenet(pixels: int, batch: int, width: int = 64) -> Row:
    """GoogLeNet with batch norms, as torchvision has it."""
    sizes = {
        "width": width, "channels": 3, "norm": "batch", "dropout": 0.0, "auxiliary_dropout": 0.0,
    }  # fmt: skip
    return image_classifier(
        "GoogLeNet", "googlenet_mnist5k", "torch_images.GoogLeNet", bind("GoogLeNet", sizes),
        pixels, batch, **_SGD,
    )  # fmt: skip


def vit(pixels: int, patch: int, layers: int, dim: int, heads: int, batch: int) -> Row:
    """A Vision Transformer, against that of transformers."""
    sizes = {
        "image_size": pixels, "patch_size": patch, "channels": 3, "num_layers": layers,
        "embed_dim": dim, "num_heads": heads, "mlp_dim": 4 * dim,
    }  # fmt: skip
    return image_classifier(
        f"ViT {layers} layers x {dim}, patches of {patch}", "vit_digits", "torch_published.ViT",
        bind("ViT", sizes), pixels, batch, published=True,
    )  # fmt: skip


ROWS = {
    "gpt_char": gpt("nanoGPT char: 4 layers x 128", 4, 128, 4, 64, 12),
    "gpt_256": gpt("GPT 4 layers x 256", 4, 256, 8, 256, 8),
    "gpt_384": gpt("GPT 6 layers x 384", 6, 384, 6, 256, 4),
    "lora": lora(4, 256, 8, 256, 8, 8),
    "generation": generation(4, 256, 8, 64, 64, 8),
    "mixtral": mixtral(4, 128, 4, 2, 128, 8),
    "t5": t5(8000, 4, 256, 4, 128, 32, 16),
    "mamba": mamba(4, 256, 64, 4),
    "bert": bert(8000, 4, 256, 4, 128, 16),
    "rnn": recurrent("RNN", 2, 256, 64, 32),
    "gru": recurrent("GRU", 2, 256, 64, 32),
    "lstm": recurrent("LSTM", 2, 256, 64, 32),
    "mlp": mlp((784, 512, 512, 10), 128),
    "autoencoder": autoencoder((784, 512, 128, 32), 128),
    "lenet": lenet(32, 128),
    "alexnet": alexnet(224, 16),
    "vgg11": vgg11(32, 32),
    "vgg11_norm": vgg11(32, 32, norm="batch"),
    "resnet20": resnet20(32, 64),
    "resnet18": resnet18(224, 8),
    "googlenet": googlenet(224, 8),
    "vit": vit(64, 8, 6, 256, 4, 16),
}  # fmt: skip
