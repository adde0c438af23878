"""A tiny Llama with a tokenizer and a chat template, as transformers saves them, and talks."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from jaxtrain.data.text.chat.chat_template import CHATML

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
NAMES = ["Ada", "Bo", "Cleo", "Dirk", "Eva", "Finn", "Gil", "Hana"]


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer's files, its offsets like GPT-2's, and transformers' of it."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(["What is the answer? user\nassistant\n system 2 + 2"] * 4, trainer)
    peer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="<|im_end|>", chat_template=CHATML
    )
    peer.save_pretrained(folder)
    return peer


SIZES = {
    "vocab_size": 352, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


def save_model(folder: Path, *, seed: int = 0, **sizes: int) -> LlamaForCausalLM:
    """A Llama with random weights for that tokenizer."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(2.0)  # so that attention tells tokens apart
    model.save_pretrained(folder)
    return model


def talks(count: int) -> list[list[dict[str, str]]]:
    """Conversations of one or two questions, of several lengths."""
    found = []
    for number in range(count):
        name = NAMES[number % len(NAMES)]
        talk = [
            {"role": "user", "content": f"I am {name}. What is {number} + 1?"},
            {"role": "assistant", "content": f"{number + 1}, {name}!" * (1 + number % 3)},
        ]
        if number % 2:
            talk += [
                {"role": "user", "content": "And the name?"},
                {"role": "assistant", "content": name},
            ]
        found.append(talk)
    return found


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
