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


class T5(nn.Module):
    """`T5ForConditionalGeneration`: the mean loss of the targets' tokens."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model: Any = transformers.T5ForConditionalGeneration.from_pretrained(
            folder, dropout_rate=0.0
        )

    def forward(
        self, source: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        return self.model(input_ids=source, decoder_input_ids=inputs, labels=targets).loss


class CausalLM(nn.Module):
    """A language model: the mean loss of next tokens, which the targets are already."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, use_cache=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=inputs).logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
