"""Pooling and normalization files of sentence-transformers, read and written.

sentence-transformers stores this in separate files: modules.json lists the parts in
order, and the pooling part has a config.json in its folder.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain.config.key_table import (
    KeyTable,
    Nested,
    Only,
    check_keys,
    ignore_keys,
    only,
    read_keys,
)
from jaxtrain.config.untrusted import MalformedError, parse_json
from jaxtrain.models.weights.config_file import SENTENCES_KEY, ConfigFile

MODULES = "modules.json"
_TRANSFORMER, _WHOLE = "sentence_bert_config.json", "config_sentence_transformers.json"
_FOLDER = "1_Pooling"
_TYPES = "sentence_transformers.models."
# Its names of our modes, in older files a flag each, in newer ones the value of "pooling_mode".
_MODES = {"mean": "mean_tokens", "first": "cls_token", "max": "max_tokens"}
_OTHERS = ("mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
_WORDS = {"mean": "mean", "cls": "first", "max": "max"}
# Key tables by part.
TABLES: Mapping[str, KeyTable] = {
    "pooling": {
        **read_keys(
            "pooling_mode", *(f"pooling_mode_{mode}" for mode in (*_MODES.values(), *_OTHERS))
        ),
        **ignore_keys("config.json says it", "word_embedding_dimension", "embedding_dimension"),
        **ignore_keys("texts get no prompt prefix here", "include_prompt"),
    },
    "normalize": {
        "module_input_name": only("sentence_embedding"),
        "module_output_name": only("sentence_embedding"),
    },
    "transformer": {
        **read_keys("max_seq_length"),
        **ignore_keys("it changes how values are computed, but not the values", "unpad_inputs"),
        "do_lower_case": only(False, reason="tokenizer.json says it"),
        "transformer_task": only("feature-extraction"),
        "module_output_name": only("token_embeddings"),
        "modality_config": Nested({
            "text": Nested({
                "method": only("forward"), "method_output_name": only("last_hidden_state"),
            }),
        }),
        **dict.fromkeys(
            ("processing_kwargs", "model_args", "tokenizer_args", "config_args"),
            Only((None, {}), reason="no arguments are passed to the model or its tokenizer"),
        ),
        **dict.fromkeys(
            ("query_length", "document_length", "query_expansion", "tokenizer_name_or_path"),
            only(None),
        ),
    },
    "whole": {
        **ignore_keys("it records versions of programs", "__version__", "requirements"),
        **ignore_keys("default_prompt_name selects the prompt put before each text", "prompts"),
        **ignore_keys("it compares embeddings and does not compute them", "similarity_fn_name"),
        "default_prompt_name": only(None, reason="texts get no prompt prefix here"),
        "model_type": only("SentenceTransformer"),
        "truncate_dim": only(None, reason="embeddings are whole"),
    },
}  # fmt: skip


def read_sentence_files(read: Callable[[str], bytes | None]) -> dict[str, Any]:
    """Contents of the files next to config.json, as an entry `SENTENCES_KEY` of it.

    Args:
      read: the content of a file of the folder; None: there is none.
    """
    content = read(MODULES)
    if content is None:
        return {}
    modules = _json(content)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        return {SENTENCES_KEY: {"modules": [MODULES]}}  # rejected as an unknown module
    kinds = [str(one.get("type")).rpartition(".")[2] for one in modules]
    found: dict[str, Any] = {"modules": kinds}
    for kind, one in zip(kinds, modules, strict=True):
        path = str(one.get("path"))
        if kind in ("Pooling", "Normalize") and re.fullmatch(r"[\w][\w.+-]*", path):
            found[kind.lower()] = _settings(read(f"{path}/config.json"))
    found["transformer"], found["whole"] = _settings(read(_TRANSFORMER)), _settings(read(_WHOLE))
    return {SENTENCES_KEY: found}


def read_pooling(config: ConfigFile) -> dict[str, Any]:
    """Read the settings of embeddings; without such files the mean, as in sentence-transformers."""
    pooling = config.table(SENTENCES_KEY)
    modules = pooling.content.get("modules", ["Transformer", "Pooling"])
    allowed = ["Transformer", "Pooling", "Normalize"]
    if modules not in (allowed[:2], allowed):
        config.reject(
            f"{MODULES} has {', '.join(modules)}; it must be Transformer and Pooling, with or "
            "without Normalize"
        )
    for name, table in TABLES.items():
        for reason in check_keys(pooling.table(name).content, table):
            config.reject(reason)
    return {"pooling": _read_mode(config, pooling.table("pooling").content),
            "normalized": "Normalize" in modules}  # fmt: skip


def _read_mode(config: ConfigFile, settings: Mapping[str, Any]) -> str:
    """Read the pooling mode."""
    every = [*_MODES.values(), *_OTHERS]
    flags = [mode for mode in every if settings.get(f"pooling_mode_{mode}")]
    word = settings.get("pooling_mode")
    if word is None:  # in older files
        for ours, mode in _MODES.items():
            if flags == [mode]:
                return ours
        word = " and ".join(flags) or "mean"
    if isinstance(word, list) and len(word) == 1:
        word = word[0]
    if not isinstance(word, str) or word not in _WORDS:
        config.reject(f"pooling_mode = {word!r}; it must be {', '.join(_WORDS)}, one of them")
        return "mean"
    return _WORDS[word]


def write_sentence_files(model: Any) -> dict[str, bytes]:
    """Return the files for sentence-transformers.

    Args:
      model: with `pooling` and `normalized`.
    """
    kinds = {"Transformer": "", "Pooling": _FOLDER}
    kinds |= {"Normalize": "2_Normalize"} if model.normalized else {}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{_TYPES}{kind}"}
        for number, (kind, path) in enumerate(kinds.items())
    ]
    flags = {f"pooling_mode_{mode}": ours == model.pooling for ours, mode in _MODES.items()}
    settings = {"word_embedding_dimension": model.embed_dim, **flags}
    files = {MODULES: modules, f"{_FOLDER}/config.json": settings}
    return {name: json.dumps(content, indent=2).encode() for name, content in files.items()}


def _settings(content: bytes | None) -> dict[str, Any]:
    """Read a file's settings; empty if missing or not an object."""
    found = _json(content or b"{}")
    return found if isinstance(found, dict) else {}


def _json(content: bytes) -> Any:
    """Parse an untrusted file; None: it is not JSON."""
    try:
        return parse_json(content)
    except MalformedError:
        return None
