"""Llama, Mixtral and ResNet-50 in plain PyTorch, as transformers and torchvision write them.

They take our weights as `torch_models` does. Llama can also be built from its sizes alone. A
mixture's experts are multiplied by PyTorch's own product for them (`grouped_mm`), rows sorted.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.torch_images import Normed
from benchmarks.torch_models import Weights, fill

Sizes = Mapping[str, Any]


class SwiGLU(nn.Module):
    """silu(gate x) * up x, and down."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim, mlp = sizes["embed_dim"], sizes["mlp_dim"]
        self.gate, self.up = nn.Linear(dim, mlp, bias=False), nn.Linear(dim, mlp, bias=False)
        self.down = nn.Linear(mlp, dim, bias=False)

    def load(self, own: Weights) -> None:
        """Takes our weights."""
        for name in ("gate", "up", "down"):
            fill(getattr(self, name).weight, own[name].T)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(h)) * self.up(h))


class Mixture(nn.Module):
    """SwiGLU experts, of which each token goes through those that its router scores highest."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        E, D, F = sizes["num_experts"], sizes["embed_dim"], sizes["mlp_dim"]
        self.count, self.per_token = E, sizes["experts_per_token"]
        self.router = nn.Linear(D, E, bias=False)
        self.gate, self.up = (nn.Parameter(torch.zeros(E, D, F)) for _ in range(2))
        self.down = nn.Parameter(torch.zeros(E, F, D))

    def load(self, own: Weights) -> None:
        """Takes our weights."""
        fill(self.router.weight, own["experts.router"].T)
        for name in ("gate", "up", "down"):
            fill(getattr(self, name), own[f"experts.{name}"])

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        rows = h.flatten(0, 1)
        with torch.autocast(h.device.type, enabled=False):
            logits = rows.float() @ self.router.weight.float().T
        top, experts = logits.topk(self.per_token)
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        counts = (chosen[:, None] == torch.arange(self.count, device=h.device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        autocasts = torch.is_autocast_enabled(h.device.type)
        dtype = torch.get_autocast_dtype(h.device.type) if autocasts else self.gate.dtype

        def through(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            # Autocast does not know this product.
            return functional.grouped_mm(x.to(dtype), weights.to(dtype), offs=ends)

        x = rows[order // self.per_token]
        y = through(functional.silu(through(x, self.gate)) * through(x, self.up), self.down)
        y = y[order.argsort()].view(-1, self.per_token, h.shape[-1]).float()
        return (y * top.softmax(-1)[..., None]).sum(1).to(dtype).view_as(h)


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, and SwiGLU or experts, each behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim = sizes["embed_dim"]
        self.heads, self.kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
        kv_dim = dim // self.heads * self.kv_heads
        eps = sizes["norm_eps"]
        self.norm_1, self.norm_2 = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)
        self.query, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, kv_dim, bias=False)
        self.value = nn.Linear(dim, kv_dim, bias=False)
        self.mlp = Mixture(sizes) if "num_experts" in sizes else SwiGLU(sizes)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        B, T, D = x.shape
        h = self.norm_1(x)
        q = self.query(h).view(B, T, self.heads, -1).transpose(1, 2)
        k = self.key(h).view(B, T, self.kv_heads, -1).transpose(1, 2)
        v = self.value(h).view(B, T, self.kv_heads, -1).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.norm_2(x))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: the halves of a head turned against each other, in float32."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Llama(nn.Module):
    """`forward` is the mean loss of next tokens; `recompute` keeps no activations of a layer."""

    def __init__(self, sizes: Sizes, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        vocab, dim = sizes["vocab_size"], sizes["embed_dim"]
        self.tokens = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([LlamaBlock(sizes) for _ in range(sizes["num_layers"])])
        self.norm = nn.RMSNorm(dim, sizes["norm_eps"])
        self.output = nn.Linear(dim, vocab, bias=False)
        if sizes["tie_embeddings"]:
            self.output.weight = self.tokens.weight
        self.half, self.theta = dim // sizes["num_heads"] // 2, sizes["rope_theta"]
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def load(self, weights: Weights) -> None:
        """Takes our weights."""
        dim = self.norm.weight.shape[0]
        fill(self.tokens.weight, weights["token_embedding"])
        fill(self.norm.weight, weights["norm_scale"])
        if "output" in weights:
            fill(self.output.weight, weights["output"])
        blocks: Any = self.blocks
        for i, block in enumerate(blocks):
            own = {name[7:]: x[i] for name, x in weights.items() if name.startswith("layers.")}
            fill(block.norm_1.weight, own["attention_norm_scale"])
            fill(block.norm_2.weight, own["mlp_norm_scale"])
            for name in ("query", "key", "value"):
                fill(getattr(block, name).weight, own[name].reshape(dim, -1).T)
            fill(block.out.weight, own["out"].reshape(dim, dim).T)
            block.mlp.load(own)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        turns = torch.arange(self.half, device=x.device, dtype=torch.float32) / self.half
        places = torch.arange(tokens.shape[1], device=x.device, dtype=torch.float32)
        radians = places[:, None] * self.theta**-turns
        cos, sin = radians.cos(), radians.sin()
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        logits = self.output(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut."""

    def __init__(self, weights: Weights, path: str, stride: int) -> None:
        super().__init__()
        strides = (1, stride, 1)
        self.convolutions = nn.ModuleList(
            [Normed(weights, f"{path}.convolutions.{i}", strides[i]) for i in range(3)]
        )
        self.shortcut: nn.Module = nn.Identity()
        if f"{path}.shortcut.kernel" in weights:
            self.shortcut = Normed(weights, f"{path}.shortcut", stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.convolutions
        h = third(functional.relu(second(functional.relu(first(x)))))
        return functional.relu(h + self.shortcut(x))


class ResNet50(nn.Module):
    """The ImageNet form, v1.5; `forward` is the mean loss of labels."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.stem = Normed(weights, "stem", 2)
        first_of_stage = (3, 7, 13)
        self.blocks = nn.Sequential(
            *(Bottleneck(weights, f"blocks.{i}", 2 if i in first_of_stage else 1)
              for i in range(16))
        )  # fmt: skip
        self.head = nn.Linear(*weights["head"].shape)
        fill(self.head.weight, weights["head"].T)
        fill(self.head.bias, weights["head_bias"])

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.stem(images)), 3, 2, 1)
        logits = self.head(self.blocks(x).mean((2, 3)))
        return functional.cross_entropy(logits.float(), labels)
