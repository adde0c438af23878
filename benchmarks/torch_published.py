"""Models of transformers with our weights, read from a folder that our side exports.

`forward` takes a batch's tensors and is its mean loss; all dropout is 0.
"""

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional


class BERT(nn.Module):
    """`BertForMaskedLM`: the mean loss of the tokens whose mask is 1."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model: Any = transformers.BertForMaskedLM.from_pretrained(
            folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )

    def forward(
        self, inputs: torch.Tensor, targets: torch.Tensor, loss_mask: torch.Tensor
    ) -> torch.Tensor:
        labels = targets.masked_fill(loss_mask == 0, -100)
        return self.model(input_ids=inputs, labels=labels).loss


class ViT(nn.Module):
    """`ViTForImageClassification`: the mean loss of labels."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model: Any = transformers.ViTForImageClassification.from_pretrained(
            folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(inputs).logits, targets)
