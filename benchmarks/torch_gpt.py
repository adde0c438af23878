"""GPT with LoRA adapters, and GPT with a KV cache that generates, in plain PyTorch.

They take our weights as `torch_models` does.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.torch_models import GPT, Block, Weights, fill

LORA_ALPHA = 16.0


class LoRALinear(nn.Module):
    """A frozen linear layer and a trained product of two matrices beside it, as PEFT has it."""

    def __init__(self, base: nn.Linear, down: Any, up: Any) -> None:
        """Takes A [in, rank] and B [rank, out]."""
        super().__init__()
        rank = down.shape[1]
        self.base, self.scale = base.requires_grad_(False), LORA_ALPHA / rank
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        fill(self.down.weight, down.T)
        fill(self.up.weight, up.T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


class LoRAGPT(GPT):
    """GPT whose linear layers have adapters, which alone are trained; q, k and v share an A."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.requires_grad_(False)
        for i, block in enumerate(self.blocks):
            for name in ("qkv", "out", "up", "down"):
                base = getattr(block, name)
                down = weights[f"layers.{name}.lora_a"][i]
                up = weights[f"layers.{name}.lora_b"][i]
                rank = down.shape[-1]
                if name == "qkv":
                    up = up.swapaxes(0, 1)  # [3, rank, heads, head_dim]
                down, up = down.reshape(base.in_features, rank), up.reshape(rank, -1)
                setattr(block, name, LoRALinear(base, down, up))


class CachedGPT(GPT):
    """GPT that decodes greedily; keys and values of past tokens stay in preallocated tensors."""

    def forward(self, tokens: torch.Tensor, caches: list[torch.Tensor], start: int) -> torch.Tensor:
        """The likeliest next token [B, 1].

        Args:
          tokens: the next ones of each row [B, T].
          caches: of each layer, keys and values [2, B, heads, length, head_dim]; they are written.
          start: how many tokens they hold.
        """
        end = start + tokens.shape[1]
        x = self.tokens(tokens) + self.places.weight[start:end]
        for block, cache in zip(self.blocks, caches, strict=True):
            x = _attend(block, x, cache, start, end)
            x = x + block.down(functional.gelu(block.up(block.norm_2(x)), approximate="tanh"))
        logits = functional.linear(self.norm(x[:, -1]), self.tokens.weight)
        return logits.argmax(-1, keepdim=True)

    @torch.no_grad()
    def generate(self, inputs: torch.Tensor, count: int) -> torch.Tensor:
        """The next tokens [B, count] of prompts `inputs` [B, T]."""
        (rows, length), (first, *_) = inputs.shape, self.blocks
        heads, dim = first.heads, first.out.in_features
        shape = (2, rows, heads, length + count, dim // heads)
        caches = [torch.empty(shape) for _ in self.blocks]
        found = [self(inputs, caches, 0)]
        for start in range(length, length + count - 1):
            found.append(self(found[-1], caches, start))
        return torch.cat(found, 1)


def _attend(
    block: Block, x: torch.Tensor, cache: torch.Tensor, start: int, end: int
) -> torch.Tensor:
    B, T, D = x.shape
    qkv = block.qkv(block.norm_1(x)).view(B, T, 3, block.heads, D // block.heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    cache[0, :, :, start:end], cache[1, :, :, start:end] = k, v
    keys, values = cache[:, :, :, :end]
    y = functional.scaled_dot_product_attention(q, keys, values, is_causal=T > 1)
    return x + block.out(y.transpose(1, 2).reshape(B, T, D))
