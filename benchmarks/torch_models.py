"""The same GPT, LSTM and ResNet in plain PyTorch, as nanoGPT and torchvision write them.

They take our weights, so that both sides compute the same numbers. `weights` maps a parameter's
path in our model, its names joined by dots, to its array.
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Weights = Mapping[str, np.ndarray]


def fill(target: torch.Tensor, value: np.ndarray) -> None:
    """Copies a weight; shapes must agree."""
    if tuple(target.shape) != value.shape:
        raise ValueError(f"a weight of shape {value.shape} does not fit {tuple(target.shape)}")
    with torch.no_grad():
        target.copy_(torch.from_numpy(np.ascontiguousarray(value)))


class Block(nn.Module):
    """A pre-norm block of GPT-2."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(D, dim=2)
        q, k, v = (y.view(B, T, self.heads, D // self.heads).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(B, T, D))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 with tied embeddings; `forward` is the mean loss of next tokens."""

    def __init__(self, weights: Weights, heads: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        table = weights["token_embedding"]
        layers, _, dim = weights["layers.qkv"].shape[:3]
        self.tokens = nn.Embedding(*table.shape)
        self.places = nn.Embedding(*weights["position_embedding"].shape)
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        fill(self.tokens.weight, table)
        fill(self.places.weight, weights["position_embedding"])
        fill(self.norm.weight, weights["norm_scale"])
        fill(self.norm.bias, weights["norm_bias"])
        for i, block in enumerate(self.blocks):
            own = {name[7:]: x[i] for name, x in weights.items() if name.startswith("layers.")}
            fill(block.norm_1.weight, own["attention_norm_scale"])
            fill(block.norm_1.bias, own["attention_norm_bias"])
            fill(block.norm_2.weight, own["mlp_norm_scale"])
            fill(block.norm_2.bias, own["mlp_norm_bias"])
            fill(block.qkv.weight, own["qkv"].transpose(0, 2, 3, 1).reshape(3 * dim, dim))
            fill(block.qkv.bias, own["qkv_bias"].reshape(3 * dim))
            fill(block.out.weight, own["out"].reshape(dim, dim).T)
            fill(block.out.bias, own["out_bias"])
            fill(block.up.weight, own["up"].T)
            fill(block.up.bias, own["up_bias"])
            fill(block.down.weight, own["down"].T)
            fill(block.down.bias, own["down_bias"])

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class LSTM(nn.Module):
    """An LSTM language model on `torch.nn.LSTM`; `forward` is the mean loss of next tokens."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        layers, dim, _ = weights["layers.recurrent"].shape
        self.tokens = nn.Embedding(*weights["token_embedding"].shape)
        self.cells = nn.LSTM(dim, dim, layers, batch_first=True)
        self.output = nn.Linear(dim, len(weights["output"]), bias=False)
        fill(self.tokens.weight, weights["token_embedding"])
        fill(self.output.weight, weights["output"])
        for i in range(layers):
            fill(getattr(self.cells, f"weight_ih_l{i}"), weights["layers.input"][i].T)
            fill(getattr(self.cells, f"weight_hh_l{i}"), weights["layers.recurrent"][i].T)
            fill(getattr(self.cells, f"bias_ih_l{i}"), weights["layers.gates_bias"][i])
            # Ours is one bias, so the other is zero and stays so.
            unused = getattr(self.cells, f"bias_hh_l{i}")
            fill(unused, 0 * weights["layers.gates_bias"][i])
            unused.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.output(self.cells(self.tokens(tokens))[0])
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Normed(nn.Module):
    """A convolution and its batch norm."""

    def __init__(self, weights: Weights, path: str, stride: int) -> None:
        super().__init__()
        kernel = weights[f"{path}.kernel"].transpose(3, 2, 0, 1)
        channels_out, channels_in, size, _ = kernel.shape
        self.convolution = nn.Conv2d(channels_in, channels_out, size, stride, size // 2, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)
        fill(self.convolution.weight, kernel)
        fill(self.norm.weight, weights[f"{path}.scale"])
        fill(self.norm.bias, weights[f"{path}.bias"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.convolution(x))


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, weights: Weights, path: str, stride: int) -> None:
        super().__init__()
        self.first = Normed(weights, f"{path}.convolutions.0", stride)
        self.second = Normed(weights, f"{path}.convolutions.1", 1)
        self.shortcut: nn.Module = nn.Identity()
        if f"{path}.shortcut.kernel" in weights:
            self.shortcut = Normed(weights, f"{path}.shortcut", stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """The CIFAR form of depth 20; `forward` is the mean loss of labels."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.stem = Normed(weights, "stem", 1)
        self.blocks = nn.Sequential(
            *(BasicBlock(weights, f"blocks.{i}", 2 if i in (3, 6) else 1) for i in range(9))
        )
        self.head = nn.Linear(*weights["head"].shape)
        fill(self.head.weight, weights["head"].T)
        fill(self.head.bias, weights["head_bias"])

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.blocks(functional.relu(self.stem(images)))
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class ConvNet(nn.Module):
    """Convolutions and poolings, then fully connected layers; `forward` is the mean loss of labels.

    Args:
      weights: ours, by name.
      parts: one letter and numbers each: "c4.2" is a convolution of stride 4 with 2 pixels of
        padding, followed by the activation; "m3.2" and "a2.2" take the largest and the mean of 3
        x 3 and 2 x 2 pixels at a stride of 2; a third number is the padding in pixels.
      side: pixels of a side before the fully connected layers, by adaptive average pooling.
      activation: a function of `torch`.
    """

    def __init__(
        self, weights: Weights, parts: Sequence[str], side: int, activation: str = "relu"
    ) -> None:
        super().__init__()
        self.act, self.side, layers = getattr(torch, activation), side, []
        names = sorted({name.rpartition(".")[0] for name in weights}, key=_in_order)
        convolutions = (name for name in names if re.fullmatch(r"convolutions\.\d+", name))
        for part in parts:
            numbers = [int(number) for number in part[1:].split(".")]
            if part[0] == "c":
                layers.append(self._convolution(weights, next(convolutions), *numbers))
            else:
                pool = nn.MaxPool2d if part[0] == "m" else nn.AvgPool2d
                layers.append(pool(*numbers))
        self.parts = nn.ModuleList(layers)
        dense = [name for name in names if name.startswith("dense")]
        self.dense = nn.ModuleList(self._linear(weights, name) for name in (*dense, "head"))

    def _convolution(self, weights: Weights, name: str, stride: int, padding: int) -> nn.Module:
        kernel = weights[f"{name}.weight"].transpose(3, 2, 0, 1)
        channels_out, channels_in, size, _ = kernel.shape
        convolution = nn.Conv2d(channels_in, channels_out, size, stride, padding)
        fill(convolution.weight, kernel)
        fill(convolution.bias, weights[f"{name}.bias"])
        if f"{name}.norm.scale" not in weights:
            return convolution
        norm = nn.BatchNorm2d(channels_out)
        fill(norm.weight, weights[f"{name}.norm.scale"])
        fill(norm.bias, weights[f"{name}.norm.bias"])
        return nn.Sequential(convolution, norm)

    def _linear(self, weights: Weights, name: str) -> nn.Module:
        linear = nn.Linear(*weights[f"{name}.weight"].shape)
        fill(linear.weight, weights[f"{name}.weight"].T)
        fill(linear.bias, weights[f"{name}.bias"])
        return linear

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = images
        for part in self.parts:
            pools = isinstance(part, nn.MaxPool2d | nn.AvgPool2d)
            x = part(x) if pools else self.act(part(x))
        if x.shape[2:] != (self.side, self.side):
            x = functional.adaptive_avg_pool2d(x, self.side)
        x = x.permute(0, 2, 3, 1).flatten(1)
        for i, layer in enumerate(self.dense):
            x = layer(self.act(x) if i else x)
        return functional.cross_entropy(x, labels)


def _in_order(name: str) -> list[tuple[int, str]]:
    """ "convolutions.10" after "convolutions.9"."""
    return [(int(word) if word.isdigit() else -1, word) for word in name.split(".")]


def adamw(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW, fused, that decays matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, learning_rate, (0.9, 0.95), 1e-8, fused=True)


def sgd(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Nesterov momentum that decays matrices only, fused."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 5e-4},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, learning_rate, 0.9, nesterov=True, fused=True)


def clip(model: nn.Module, norm: float | None) -> None:
    """Scales the gradients down to a global norm."""
    if norm is not None and not math.isinf(norm):
        nn.utils.clip_grad_norm_(model.parameters(), norm)
