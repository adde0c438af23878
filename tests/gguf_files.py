"""GGUF files of random Llamas, written by the package `gguf` as llama.cpp's converter does."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
_IN_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip


def llama(**changes) -> transformers.LlamaForCausalLM:
    """A Llama of transformers with wide random weights."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model.eval()


def metadata(model) -> dict[str, object]:
    """What the converter writes of a model's sizes."""
    config = model.config
    return {
        "llama.vocab_size": config.vocab_size, "llama.context_length": 64,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim, "llama.rope.freq_base": 10000.0,
        "general.name": "tiny", "general.file_type": 0,
    }  # fmt: skip


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """As the format keeps queries and keys: row 2i + s of a head was row s H/2 + i."""
    H = len(rows) // heads
    found = np.empty_like(rows)
    for head in range(heads):
        for pair in range(H // 2):
            for side in range(2):
                there, here = head * H + 2 * pair + side, head * H + side * (H // 2) + pair
                found[there] = rows[here]
    return found


def write(
    path: Path,
    model,
    said: dict[str, object],
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    quantize: Callable[[np.ndarray, GGMLQuantizationType], np.ndarray] = quantize,
    architecture: str = "llama",
) -> Path:
    """Writes a model with this metadata; None leaves a key out. Matrices are of one kind, their
    blocks made by `quantize`, which the package does not do for K-quants.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in said.items():
        add(writer, key, value)
    for name, value in model.state_dict().items():
        rows, called = value.numpy(), _ENDS.get(name)
        if called is None:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            called = f"blk.{layer}.{_IN_LAYER[part]}.weight"
            heads = {"self_attn.q_proj": model.config.num_attention_heads,
                     "self_attn.k_proj": model.config.num_key_value_heads}.get(part)  # fmt: skip
            rows = rows if heads is None else interleaved(rows, heads)
        if rows.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(called, quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(called, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: GGUFWriter, key: str, value: object) -> None:
    """One key-value pair, in the type that llama.cpp reads."""
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
