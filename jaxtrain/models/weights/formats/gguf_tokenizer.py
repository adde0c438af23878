"""GGUF tokenizer, converted to the files of a Hugging Face folder.

Supported are byte-level BPE tokenizers (`tokenizer.ggml.model` = 'gpt2') with a pre-tokenizer known
here (`tokenizer.ggml.pre`).
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.errors import UserError

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
