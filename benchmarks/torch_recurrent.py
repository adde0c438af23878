"""Recurrent language models on `torch.nn.RNN`, `torch.nn.GRU` and `torch.nn.LSTM`.

They take our weights as `torch_models` does; `forward` is the mean loss of next tokens.
"""

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from benchmarks.torch_models import Weights, fill


class Recurrent(nn.Module):
    """Embedding, recurrent layers and an output matrix."""

    cells_class: ClassVar[type[nn.RNNBase]]
    # Of ours: what is added to the input's product, and to the state's.
    input_bias: ClassVar[str] = "layers.input_bias"
    recurrent_bias: ClassVar[str | None] = "layers.recurrent_bias"

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        layers, dim, _ = weights["layers.recurrent"].shape
        self.tokens = nn.Embedding(*weights["token_embedding"].shape)
        self.cells = self.cells_class(dim, dim, layers, batch_first=True)
        self.output = nn.Linear(dim, len(weights["output"]), bias=False)
        fill(self.tokens.weight, weights["token_embedding"])
        fill(self.output.weight, weights["output"])
        for i in range(layers):
            fill(getattr(self.cells, f"weight_ih_l{i}"), weights["layers.input"][i].T)
            fill(getattr(self.cells, f"weight_hh_l{i}"), weights["layers.recurrent"][i].T)
            fill(getattr(self.cells, f"bias_ih_l{i}"), weights[self.input_bias][i])
            bias = getattr(self.cells, f"bias_hh_l{i}")
            if self.recurrent_bias is not None:
                fill(bias, weights[self.recurrent_bias][i])
            else:
                nn.init.zeros_(bias).requires_grad_(False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.output(self.cells(self.tokens(inputs))[0])
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RNN(Recurrent):
    """Elman's, with tanh."""

    cells_class = nn.RNN


class GRU(Recurrent):
    """Gated recurrent units."""

    cells_class = nn.GRU


class LSTM(Recurrent):
    """Long short-term memory; our one bias is the input's, so the state's stays zero."""

    cells_class = nn.LSTM
    input_bias = "layers.gates_bias"
    recurrent_bias = None
