"""GGUF metadata, converted to the files of a Hugging Face folder: config.json and tokenizer.

Defaults are those of llama.cpp, which wrote the format: see `load_hparams` in its llama-model.cpp
and the keys in its gguf-py, gguf/constants.py.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.errors import UserError
from jaxtrain.config.key_table import KeyTable, Only, check_keys, ignore_keys, only, read_keys
from jaxtrain.models.weights.config_file import ConfigFile

ARCHITECTURE = "llama"


def _of_others(reason: str, *keys: str) -> KeyTable:
    """Return a table of keys that no supported file has."""
    return dict.fromkeys(keys, Only((None,), reason=reason))


_GENERAL: KeyTable = {
    **read_keys("general.architecture", "general.alignment"),
    "general.type": Only(("model",), default="model", reason=(
        "the file does not contain a whole model"
    )),
    "general.quantization_version": Only((2,), default=2, reason=(
        "its blocks have a different format"
    )),
    **ignore_keys("each tensor has its own type", "general.file_type"),
    **ignore_keys(
        "it names or describes the file, its authors and its sources",
        *(f"general.{key}" for key in (
            "name", "author", "version", "organization", "finetune", "basename", "description",
            "quantized_by", "size_label", "license", "license.name", "license.link", "url", "doi",
            "uuid", "repo_url", "source.url", "source.doi", "source.uuid", "source.repo_url",
            "source.huggingface.repository", "base_model.count", "dataset.count", "tags",
            "languages", "datasets", "parameter_count",
        )),
        *(f"general.{what}.{{id}}.{key}" for what in ("base_model", "dataset") for key in (
            "name", "author", "version", "organization", "description", "url", "doi", "uuid",
            "repo_url",
        )),
    ),
    **ignore_keys(
        "how tokens are drawn is set where text is generated",
        *(f"general.sampling.{key}" for key in (
            "sequence", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold", "temp",
            "penalty_last_n", "penalty_repeat", "mirostat", "mirostat_tau", "mirostat_eta",
        )),
    ),
    "split.count": Only(
        (0, 1), default=1,
        reason="it is one of several files; merge them with 'llama-gguf-split --merge'",
    ),
    **ignore_keys("there is one file", "split.no", "split.tensors.count"),
}  # fmt: skip

_TOKENIZER: KeyTable = {
    **read_keys(
        "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id", "tokenizer.ggml.unknown_token_id",
        "tokenizer.ggml.padding_token_id", "tokenizer.ggml.add_bos_token",
        "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix",
        "tokenizer.chat_template",
    ),
    **ignore_keys("byte-pair merges have ranks in place of scores", "tokenizer.ggml.scores"),
    **ignore_keys(
        "it names a token for one kind of prompt, and the token is in the vocabulary anyway",
        *(f"tokenizer.ggml.{key}_token_id" for key in (
            "seperator", "mask", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep",
            "prefix", "suffix", "middle", "cls",
        )),
    ),
    **ignore_keys(
        "the template without a name is taken",
        "tokenizer.chat_templates", "tokenizer.chat_template.{name}",
    ),
    **ignore_keys(
        "it belongs to a tokenizer of another model, none of which is imported",
        "tokenizer.ggml.token_type_count", "tokenizer.ggml.add_sep_token",
        "tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap",
        "tokenizer.rwkv.world",
    ),
    **ignore_keys("the keys of tokenizer.ggml give the same", "tokenizer.huggingface.json"),
}  # fmt: skip

# The rest of a key after the architecture's name.
_SIZES = (
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count",
    "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length",
)  # fmt: skip
_NO_EXPERTS = Only((0,), default=0, reason="mixtures of experts are not read from GGUF")
_MODEL: KeyTable = {
    **read_keys(*_SIZES),
    **ignore_keys("rows of queries and keys are in one order in all files", "tensor_data_layout"),
    **ignore_keys("it records how the weights were made", "rope.scaling.finetuned"),
    **dict.fromkeys((
        "expert_count", "expert_used_count", "expert_shared_count", "expert_group_count",
        "expert_group_used_count", "leading_dense_block_count", "nextn_predict_layers",
    ), _NO_EXPERTS),
    "use_parallel_residual": only(False),
    "attention.causal": only(True),
    "attention.sliding_window": Only((None, 0), reason="Llamas of GGUF have no window"),
    "attention.max_alibi_bias": Only((0,), default=0, reason="positions are rotary"),
    "attention.clamp_kqv": Only((0,), default=0, reason="keys, queries and values have no bound"),
    "rope.scaling.attn_factor": only(1.0),
    "rope.scaling.yarn_attn_factor": only(1.0),
    "rope.scaling.yarn_ext_factor": only(1.0),
    "rope.scaling.yarn_log_multiplier": only(0.0),
    "rope.scaling.yarn_beta_fast": only(32.0),
    "rope.scaling.yarn_beta_slow": only(1.0),
    "hidden_activation": only("silu"),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), only(1.0)),
    "pooling_type": Only((0,), default=0, reason="the model has no embedding head"),
    **_of_others(
        "it belongs to another architecture",
        "embedding_length_out", "features_length", "expert_feed_forward_length",
        "expert_shared_feed_forward_length", "expert_chunk_feed_forward_length",
        "expert_weights_scale", "expert_weights_norm", "expert_gating_func", "expert_group_scale",
        "experts_per_group", "moe_every_n_layers", "moe_latent_size", "n_deepstack_layers",
        "deepstack_mapping",
        "decoder_start_token_id", "decoder_block_count", "attn_logit_softcapping",
        "router_logit_softcapping", "final_logit_softcapping", "swin_norm",
        "rescale_every_n_layers", "time_mix_extra_dim", "time_decay_extra_dim",
        "token_shift_count", "interleave_moe_layer_step", "full_attention_interval",
        "activation_sparsity_scale", "altup.active_idx", "altup.num_inputs",
        "embedding_length_per_layer_input", "swiglu_clamp_exp", "swiglu_clamp_shexp",
        "{dense}_feat_in", "{dense}_feat_out", "attention.layer_norm_epsilon",
        "attention.group_norm_epsilon", "attention.group_norm_groups", "attention.q_lora_rank",
        "attention.kv_lora_rank", "attention.decay_lora_rank", "attention.iclr_lora_rank",
        "attention.value_residual_mix_lora_rank", "attention.gate_lora_rank",
        "attention.relative_buckets_count", "attention.scale", "attention.output_scale",
        "attention.temperature_length", "attention.temperature_scale", "attention.key_length_mla",
        "attention.value_length_mla", "attention.key_length_swa", "attention.value_length_swa",
        "attention.shared_kv_layers", "attention.sliding_window_pattern",
        "attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k",
        "rope.dimension_count_swa", "rope.dimension_sections", "rope.freq_base_swa",
        "rope.scaling.alpha", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size",
        "ssm.time_step_rank", "ssm.group_count", "ssm.dt_b_c_rms", "kda.head_dim", "wkv.head_size",
        "posnet.embedding_length", "posnet.block_count", "convnext.embedding_length",
        "convnext.block_count", "shortconv.l_cache",
    ),
    **_of_others("a classifier is not read from GGUF", "classifier.output_labels"),
}  # fmt: skip
# All keys that a reader may use; other programs add their own, such as
# quantize.imatrix.file.
TABLE: KeyTable = {
    **_GENERAL,
    **_TOKENIZER,
    **{f"{ARCHITECTURE}.{key}": entry for key, entry in _MODEL.items()},
}
_NAMESPACES = (
    "general", "split", "tokenizer", ARCHITECTURE, "adapter", "imatrix", "clip", "diffusion",
    "xielu",
)  # fmt: skip


def key_in_table(key: str) -> str:
    """Return a key as the table has it: numbers and names that a file chooses are written in
    braces."""
    key = re.sub(r"^(general\.(?:base_model|dataset))\.\d+\.", r"\1.{id}.", key)
    return re.sub(r"^(tokenizer\.chat_template)\..+", r"\1.{name}", key)


def read_config(metadata: Mapping[str, Any], *, tied: bool, where: str) -> dict[str, Any]:
    """Return the equivalent config.json.

    Args:
      metadata: the key-value pairs of the file.
      tied: whether the embedding is the output matrix, too.
      where: the file, for messages.

    Raises:
      UserError: the file is of another architecture, or has keys and values that are not supported.
    """
    kind = metadata.get("general.architecture")
    if kind != ARCHITECTURE:
        raise UserError(
            f"{where}: GGUF files of 'llama' are supported, not those of {kind!r}; take the "
            "model's safetensors"
        )
    known = {key_in_table(key): value for key, value in metadata.items()
             if key.partition(".")[0] in _NAMESPACES}  # fmt: skip
    config = ConfigFile(
        {key.removeprefix(f"{ARCHITECTURE}."): value for key, value in known.items()}
    )
    for reason in check_keys(known, TABLE):
        config.reject(reason)
    tokens = known.get("tokenizer.ggml.tokens")
    heads = _of_all_layers(config, "attention.head_count")
    width = config.integer("embedding_length")
    head_dim = config.integer("attention.key_length", width // max(heads, 1))
    for key in "attention.value_length", "rope.dimension_count":
        config.only(key, [head_dim], default=head_dim)
    content = {
        "vocab_size": config.integer(
            "vocab_size", len(tokens) if isinstance(tokens, list) else None
        ),
        "num_hidden_layers": config.integer("block_count"),
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": _of_all_layers(config, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _of_all_layers(config, "feed_forward_length"),
        "max_position_embeddings": config.integer("context_length"),
        "rope_theta": config.number("rope.freq_base", 10000.0),
        "rms_norm_eps": config.number("attention.layer_norm_rms_epsilon"),
        "rope_scaling": _rope_scaling(config),
        "tie_word_embeddings": tied,
        "architectures": ["LlamaForCausalLM"],
        "model_type": ARCHITECTURE,
    }
    if config.reasons:
        lines = "\n".join(f"  {reason}" for reason in config.reasons)
        raise UserError(f"{where}: its metadata has what is not supported here:\n{lines}")
    return content


def read_otherwise(metadata: Mapping[str, Any]) -> str | None:
    """Return why transformers reads a file differently from llama.cpp; None if it does not.

    Its `load_gguf_checkpoint` reorders queries and keys only if both counts of heads are
    present, takes a head's width from the rotary positions, and ignores Llama's scaling.
    """
    own = {key.removeprefix(f"{ARCHITECTURE}."): value for key, value in metadata.items()}
    if own.get("attention.head_count_kv") is None:
        return "transformers leaves rows interleaved where attention.head_count_kv is missing"
    for key in "attention.head_count", "attention.head_count_kv", "feed_forward_length":
        if isinstance(own[key], list):
            return f"transformers does not read the list {key}"
    if "attention.key_length" in own and "rope.dimension_count" not in own:
        return "transformers ignores attention.key_length"
    if _rope_scaling(ConfigFile(own)) is not None:
        return "transformers ignores the scaling of rotary positions in GGUF files of a Llama"
    return None


def _of_all_layers(config: ConfigFile, key: str, default: int | None = None) -> int:
    """Read a number that a file has once, or once per layer; the layers here are alike."""
    value = config.content.get(key)
    if not isinstance(value, list):
        return config.integer(key, default)
    if len(set(value)) != 1 or type(value[0]) is not int:
        config.reject(f"{key} = {value}; it must be the same whole number for all layers")
        return 1
    return value[0]


def _rope_scaling(config: ConfigFile) -> dict[str, Any] | None:
    """Return the rope_type of a factor: without a type it is linear, and 0 means none."""
    factor = config.number("rope.scaling.factor", config.number("rope.scale_linear", 0.0))
    kind = config.content.get("rope.scaling.type") or "linear"
    config.only("rope.scaling.type", ["none", "linear", "yarn"], default="linear")
    if kind == "none" or factor in (0.0, 1.0):
        return None
    found: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = config.integer("context_length")
        key = "rope.scaling.original_context_length"
        found["original_max_position_embeddings"] = config.integer(key, original)
    return found


# -- tokenizer -------------------------------------------------------------------------------------
# Supported are byte-level BPE tokenizers (`tokenizer.ggml.model` = 'gpt2') with a pre-tokenizer
# known here (`tokenizer.ggml.pre`).

_PREFIX = "tokenizer.ggml."
# Pre-tokenizers by llama.cpp's names, in the form of tokenizer.json.
_SPLITS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [],
    "smollm": [{"type": "Digits", "individual_digits": True}],
}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# Token types.
_CONTROL, _USER_DEFINED = 3, 4
# Names of the ids -> names of the tokens in tokenizer_config.json.
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Ids that end an answer: end of text, of turn, of message.
_ENDS = ("eos", "eot", "eom")


def read_special_ids(metadata: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return config.json's entries for special tokens; several ends are a list.

    Raises:
      UserError: an id is not one of the file's tokens.
    """
    named = [_id(metadata, end, where=where) for end in _ENDS]
    ends = list(dict.fromkeys(one for one in named if one is not None))
    return {
        "bos_token_id": _id(metadata, "bos", where=where),
        "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None,
    }


def tokenizer_files(metadata: Mapping[str, Any], *, where: str) -> dict[str, bytes]:
    """Return tokenizer.json and the files next to it; none for an unsupported tokenizer.

    Args:
      metadata: the key-value pairs of the file.
      where: the file, for messages.

    Raises:
      UserError: the parts of the tokenizer are inconsistent.
    """
    split = metadata.get(f"{_PREFIX}pre", "gpt-2")
    if metadata.get(f"{_PREFIX}model") != "gpt2" or split not in _SPLITS:
        return {}
    names = _list(metadata, "tokens", str, where=where)
    vocab = {name: number for number, name in enumerate(names)}
    kinds = _list(metadata, "token_type", int, where=where) or [1] * len(names)
    if not names or len(vocab) < len(names) or len(kinds) != len(names):
        raise UserError(
            f"{where}: {_PREFIX}tokens has {len(names):,} texts, {len(vocab):,} of them different, "
            f"and {_PREFIX}token_type {len(kinds):,} numbers; fetch the file again"
        )
    special = {
        theirs: names[number]
        for ours, theirs in _SPECIAL.items()
        if (number := _id(metadata, ours, where=where)) is not None
    }
    added = {token: _flag(metadata, f"add_{token}_token", where=where) for token in ("bos", "eos")}
    if _flag(metadata, "add_space_prefix", where=where):
        raise UserError(
            f"{where}: {_PREFIX}add_space_prefix is true, which a tokenizer of {_PREFIX}model = "
            "'gpt2' does not do; take the model's safetensors and tokenizer.json"
        )
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(number, name, special=kind == _CONTROL)
            for number, (name, kind) in enumerate(zip(names, kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_SPLITS[split], _BYTES]},
        "post_processor": _post_processor(special, added, vocab, where=where),
        "decoder": _BYTES,
        "model": {"type": "BPE", "vocab": vocab, "merges": _merges(metadata, vocab, where=where)},
    }
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    settings |= {f"add_{token}_token": one for token, one in added.items()}
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    ids = read_special_ids(metadata, where=where)
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
        "generation_config.json": json.dumps(
            {key: value for key, value in ids.items() if value is not None}, indent=2
        ).encode(),
    }


def _added_token(number: int, name: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, **flags, "special": special}


def _post_processor(
    special: Mapping[str, str], added: Mapping[str, bool], vocab: Mapping[str, int], *, where: str
) -> dict[str, Any] | None:
    """Post-processor that adds begin and end tokens around a text."""
    names = {token: special.get(f"{token}_token") for token, one in added.items() if one}
    if None in names.values():
        raise UserError(
            f"{where}: {_PREFIX}add_bos_token or {_PREFIX}add_eos_token is true, and no "
            "bos_token_id or eos_token_id says which token that is; fetch the file again"
        )
    if not names:
        return None

    def template(text: str, number: int) -> list[dict[str, Any]]:
        parts = [("SpecialToken", names.get("bos")), ("Sequence", text),
                 ("SpecialToken", names.get("eos"))]  # fmt: skip
        return [{kind: {"id": name, "type_id": number}} for kind, name in parts if name]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": [*template("A", 0), *template("B", 1)],
        "special_tokens": {
            name: {"id": name, "ids": [vocab[name]], "tokens": [name]}
            for name in names.values()
            if name is not None
        },
    }


def _merges(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], *, where: str
) -> list[list[str]]:
    found = [pair.split(" ") for pair in _list(metadata, "merges", str, where=where)]
    for pair in found:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise UserError(
                f"{where}: {_PREFIX}merges has {' '.join(pair)!r}, which is not a pair of tokens "
                "that merge into a third; fetch the file again"
            )
    return found


def _list(metadata: Mapping[str, Any], key: str, kind: type, *, where: str) -> list[Any]:
    found = metadata.get(_PREFIX + key, [])
    if not isinstance(found, list) or not all(type(one) is kind for one in found):
        raise UserError(f"{where}: {_PREFIX}{key} is not a list of {kind.__name__}; fetch it again")
    return found


def _id(metadata: Mapping[str, Any], name: str, *, where: str) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    found, tokens = metadata.get(key), metadata.get(f"{_PREFIX}tokens")
    count = len(tokens) if isinstance(tokens, list) else 1 << 31
    if found is not None and (type(found) is not int or not 0 <= found < count):
        raise UserError(f"{where}: {key} = {found!r}; it must be a whole number under {count:,}")
    return found


def _flag(metadata: Mapping[str, Any], key: str, *, where: str) -> bool:
    found = metadata.get(_PREFIX + key, False)
    if not isinstance(found, bool):
        raise UserError(f"{where}: {_PREFIX}{key} = {found!r}; it must be true or false")
    return found
