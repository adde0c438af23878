"""GPT in plain PyTorch as nanoGPT writes it, and what all of PyTorch's models here share.

They take our weights, so that both sides compute the same losses. `weights` maps a parameter's
path in our model, its names joined by dots, to its array.
"""

import math
from collections.abc import Mapping
from typing import Any

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


def make_linear(weights: Weights, name: str) -> nn.Linear:
    """A linear layer with our weight [in, out] and bias of this name."""
    weight = weights[f"{name}.weight"]
    linear = nn.Linear(*weight.shape)
    fill(linear.weight, weight.T)
    fill(linear.bias, weights[f"{name}.bias"])
    return linear


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

    def __init__(self, weights: Weights, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        table = weights["token_embedding"]
        layers, _, dim, heads = weights["layers.qkv"].shape[:4]
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

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs) + self.places.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def adamw(
    model: nn.Module, learning_rate: float, weight_decay: float = 0.1
) -> torch.optim.Optimizer:
    """AdamW, fused, that decays matrices only."""
    groups = parameter_groups(model, weight_decay)
    return torch.optim.AdamW(groups, learning_rate, (0.9, 0.95), 1e-8, fused=True)


def sgd(
    model: nn.Module, learning_rate: float, weight_decay: float = 5e-4
) -> torch.optim.Optimizer:
    """Nesterov momentum that decays matrices only, fused."""
    groups = parameter_groups(model, weight_decay)
    return torch.optim.SGD(groups, learning_rate, 0.9, nesterov=True, fused=True)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters in two groups: matrices, which decay, and the others."""
    matrices, others = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if is_matrix(parameter) else others).append(parameter)
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def is_matrix(parameter: nn.Parameter) -> bool:
    """Whether a parameter has two dimensions or more that are not 1 (a ViT's class token is a
    vector [1, 1, D]) and is not marked, as the rates of a Mamba's states are, as one that does not
    decay."""
    marked = getattr(parameter, "_no_weight_decay", False)
    return sum(size > 1 for size in parameter.shape) >= 2 and not marked


def clip(model: nn.Module, norm: float | None) -> None:
    """Scales the gradients down to a global norm."""
    if norm is not None and not math.isinf(norm):
        nn.utils.clip_grad_norm_(model.parameters(), norm)
