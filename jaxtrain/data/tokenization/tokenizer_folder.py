"""Files next to a tokenizer.json: special tokens, end of text, key tables.

transformers reads tokenizer_config.json and special_tokens_map.json together with tokenizer.json,
and takes from config.json and generation_config.json which tokens end a text.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors
from jaxtrain.config.key_table import KeyTable, Nested, Only, ignore_keys, read_keys, validate_keys
from jaxtrain.config.shipped import MODEL_CONFIG
from jaxtrain.config.untrusted import read_json_object

SETTINGS, SPECIAL_MAP = "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"
# Models whose tokenizer.json transformers uses unchanged although the folder names LlamaTokenizer.
AS_IN_FILE = ("mistral", "mixtral", "phi3")
SPECIAL = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
)  # fmt: skip

# Of tokenizer.json: what `tokenizers` reads.
TOKENIZER_KEYS: KeyTable = {
    **read_keys("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder"),
    **ignore_keys("the library reads all versions", "version"),
    **ignore_keys("the tokenizer neither truncates nor pads a text", "truncation", "padding"),
    "model": Nested(
        {
            **read_keys(
                "type", "vocab", "merges", "unk_token", "unk_id", "fuse_unk", "byte_fallback",
                "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix",
                "max_input_chars_per_word",
            ),
            "dropout": Only((None, 0.0), reason=(
                "it samples different tokens each time a text is read"
            )),
        }
    ),
}  # fmt: skip

# Of tokenizer_config.json, next to a tokenizer.json. Names of further tokens end in `_token`.
SETTINGS_KEYS: KeyTable = {
    **read_keys(
        *SPECIAL, "additional_special_tokens", "extra_special_tokens", "added_tokens_decoder",
        "model_specific_special_tokens", "split_special_tokens", "chat_template",
        # Compared with the same settings in tokenizer.json.
        "do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space",
        "tokenizer_class", "legacy",
    ),
    **ignore_keys(
        "tokenizer.json already contains its effect on the tokenizer",
        "add_bos_token", "add_eos_token", "sp_model_kwargs", "from_slow", "use_fast",
        "do_basic_tokenize", "never_split", "extra_ids", "unk_id", "vocab", "merges", "vocab_file",
        "merges_file", "tokenizer_file", "tokenizer_object", "post_processor", "gguf_file",
        "fix_mistral_regex", "tokenizer", "_spm_precompiled_charsmap", "added_tokens_file",
        "special_tokens_map_file", "full_tokenizer_file", "init_inputs", "trim_offsets",
        "do_lower_case_special_tokens", "keep_accents", "remove_space", "add_dummy_prefix_space",
    ),
    **ignore_keys(
        "the data's own settings truncate and pad texts",
        "model_max_length", "max_len", "max_length", "padding_side", "truncation_side", "stride",
        "truncation", "truncation_strategy", "padding", "pad_to_multiple_of", "pad_token_type_id",
        "pad_to_max_length", "tokenizer_padding", "tokenizer_truncation", "_json_padding",
        "_json_truncation",
    ),
    **ignore_keys(
        "a text is decoded as tokenizer.json has it",
        "clean_up_tokenization_spaces", "spaces_between_special_tokens", "errors",
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
    ),
    **ignore_keys("no code of the folder is run", "auto_map"),
    **ignore_keys(
        "it names a class or a file, or describes data that are not read here",
        "processor_class", "backend", "name_or_path", "model_input_names",
        "verbose", "device_map", "is_local", "local_files_only", "files_loaded", "image_token_id",
        "use_default_system_prompt", "response_schema", "response_template", "chat_control_tokens",
        "transformers_version", "_commit_hash",
    ),
}  # fmt: skip

# Of special_tokens_map.json.
SPECIAL_MAP_KEYS: KeyTable = read_keys(
    *SPECIAL, "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"
)


@dataclasses.dataclass(frozen=True)
class TokenizerFolder:
    """Tokenizer settings from the files next to a tokenizer.json.

    Attributes:
      special: special tokens by name, such as `eos_token`.
      more: all tokens that the files name, in the order in which those that the
        tokenizer.json lacks are added: their text, and whether they are special.
      split_special: whether a special token's text in a document is text like any other.
      ends: ids of config.json or generation_config.json that end a text.
      prefix: for Llama-style tokenizers, where a space is put before a text: 'first', at its
        beginning; 'always', after special tokens too; or 'never'. None: as in tokenizer.json.
    """

    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: tuple[tuple[str, bool], ...] = ()
    split_special: bool = False
    ends: tuple[int, ...] = ()
    prefix: Literal["first", "always", "never"] | None = None


def read_folder(tokenizer: AnyPath, content: Mapping[str, Any]) -> TokenizerFolder:
    """Read the files next to a tokenizer.json.

    Args:
      tokenizer: the tokenizer.json.
      content: its content.

    Raises:
      UserError: one of the files is not JSON, has an unknown key, or contradicts the
        tokenizer.json.
    """
    folder = tokenizer.parent
    config = read_json(folder / SETTINGS)
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    plain = {key: value for key, value in config.items() if key not in tokens}
    where = str(folder / SETTINGS)
    validate_keys(plain, SETTINGS_KEYS, where=where)
    conflicts = list(_conflicts(config, content))
    if conflicts:
        lines = "\n".join(f"  {one}" for one in conflicts)
        raise UserError(f"{where} contradicts {tokenizer}; correct one of them:\n{lines}")
    model = read_json(folder / MODEL_CONFIG)
    return TokenizerFolder(
        special=special_tokens(folder),
        more=tuple(_more(config, _special_map(folder, config))),
        split_special=config.get("split_special_tokens") is True,
        ends=ends_of(read_json(folder / GENERATION)) or ends_of(model),
        prefix=_prefix(config, model, content),
    )


def special_tokens(folder: AnyPath) -> dict[str, str]:
    """Return special tokens by name, such as `eos_token`, as transformers reads them in a
    folder.
    """
    config = read_json(folder / SETTINGS)
    named = {**config, **_special_map(folder, config)}
    found = {name: _text(named.get(name)) for name in SPECIAL}
    return {name: text for name, text in found.items() if text is not None}


def ends_of(content: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of `eos_token_id`, which is a number, a list, or absent."""
    end_ids = content.get("eos_token_id")
    ids = end_ids if isinstance(end_ids, list) else [end_ids]
    return tuple(one for one in ids if isinstance(one, int) and not isinstance(one, bool))


def read_json(path: AnyPath) -> dict[str, Any]:
    """Return the object of a JSON file; empty if there is no file.

    Raises:
      UserError: it cannot be read, or is not a JSON object.
    """
    with path_errors(str(path), needs="use a file that can be read"):
        if not path.exists():
            return {}
    return read_json_object(path)


def _special_map(folder: AnyPath, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return special_tokens_map.json, which overrides a tokenizer_config.json without listed
    tokens.
    """
    if "added_tokens_decoder" in config:
        return {}
    found = read_json(folder / SPECIAL_MAP)
    plain = {key: value for key, value in found.items() if not key.endswith("_token")}
    validate_keys(plain, SPECIAL_MAP_KEYS, where=str(folder / SPECIAL_MAP))
    return found


def _more(config: Mapping[str, Any], mapped: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield all tokens that the files name, in the order in which transformers adds them."""
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        for number in sorted(listed, key=lambda key: int(key) if key.isdigit() else -1):
            text = _text(listed[number])
            if text is not None:
                one = listed[number]
                yield text, isinstance(one, dict) and one.get("special") is True
    named = {**config, **mapped}
    others = [key for key in named if key.endswith("_token") and key not in SPECIAL]
    values = [named.get(name) for name in (*SPECIAL, *others)]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        values += _values(named.get(key))
    for value in values:
        text = _text(value)
        if text is not None:
            yield text, True


def _values(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _text(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def _prefix(
    config: Mapping[str, Any], model: Mapping[str, Any], content: Mapping[str, Any]
) -> Literal["first", "always", "never"] | None:
    """Return where LlamaTokenizer prefixes a space, for a tokenizer.json without byte-level BPE.

    transformers selects that class by its name in the folder. None: as in tokenizer.json.
    """
    class_ = str(config.get("tokenizer_class")).removesuffix("Fast")
    if class_ != "LlamaTokenizer" or model.get("model_type") in AS_IN_FILE:
        return None
    every = [*_parts(content.get("pre_tokenizer")), *_parts(content.get("decoder"))]
    if content["model"].get("type") != "BPE" or any(one["type"] == "ByteLevel" for one in every):
        return None
    if config.get("add_prefix_space") is False:
        return "never"
    return "always" if config.get("legacy") is True else "first"


def _conflicts(config: Mapping[str, Any], content: Mapping[str, Any]) -> Iterator[str]:
    """Yield a clause for each setting that has another value in tokenizer.json."""
    compared = [
        ("normalizer", "BertNormalizer", "do_lower_case", "lowercase"),
        ("normalizer", "BertNormalizer", "strip_accents", "strip_accents"),
        ("normalizer", "BertNormalizer", "tokenize_chinese_chars", "handle_chinese_chars"),
        ("pre_tokenizer", "ByteLevel", "add_prefix_space", "add_prefix_space"),
    ]
    for part, kind, theirs, key in compared:
        if config.get(theirs) is None:
            continue
        for one in _parts(content.get(part)):
            if one.get("type") == kind and one.get(key) != config[theirs]:
                yield f"{theirs} = {config[theirs]!r}, but its {part} has {key} = {one.get(key)!r}"


def _parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a component of tokenizer.json, or those of a sequence of them."""
    if not isinstance(component, dict):
        return
    yield component
    for key in ("normalizers", "pretokenizers", "decoders"):
        for one in component.get(key) or []:
            yield from _parts(one)
