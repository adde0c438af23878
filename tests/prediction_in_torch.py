"""Modules that tell further tokens (arXiv 2412.19437, section 2.2) around transformers' layer."""

from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)

from jaxtrain.data.batch import Batch


class Module(DeepseekV3DecoderLayer):
    """Its parameters have the names of published files: a layer with more around it."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        D, epsilon = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = (DeepseekV3RMSNorm(D, eps=epsilon) for _ in range(2))
        self.eh_proj = torch.nn.Linear(2 * D, D, bias=False)
        self.shared_head = torch.nn.ModuleDict({"norm": DeepseekV3RMSNorm(D, eps=epsilon)})

    def further(self, hidden: torch.Tensor, embedded: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Hidden states of the token after those that are embedded; all of one document."""
        length = hidden.shape[1]
        unseen = torch.full((length, length), -torch.inf).triu(1)[None, None]
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        places = rotary(x, torch.arange(length)[None])
        x = self(x, attention_mask=unseen, position_embeddings=places)
        return self.shared_head["norm"](x)


def loss_of_modules(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over modules of their losses, each over the count of next tokens (equation 24)."""
    body, total = model.model, torch.zeros(())
    modules = body.layers[model.config.num_hidden_layers :]
    for row, ids in enumerate(batch.segment_ids):
        for document in np.unique(ids[ids > 0]):
            here = np.flatnonzero(ids == document)
            tokens = torch.tensor(batch.inputs[row : row + 1, here]).long()
            targets = torch.tensor(batch.targets[row, here]).long()
            counts = torch.tensor(batch.loss_mask[row, here])
            hidden = body(tokens).last_hidden_state
            for k, module in enumerate(modules, start=1):
                if len(here) <= k:
                    break
                embedded = body.embed_tokens(tokens[:, k:])
                hidden = module.further(hidden[:, :-1], embedded, body.rotary_emb)
                losses = cross_entropy(model.lm_head(hidden)[0], targets[k:], reduction="none")
                total = total + (losses * counts[k:]).sum()
    return total / len(modules) / float(batch.loss_mask.sum())
