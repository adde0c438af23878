"""tokenizer_config.json and generation_config.json of an exported model.

With them transformers' AutoTokenizer reads a text as the run does, and generate() ends an answer
where the run ends it. What an import has carried along stays as it is.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.buckets import Place
from jaxtrain.data.pairs.source import PairData
from jaxtrain.data.text.chat.conversations import Templated
from jaxtrain.data.text.source import text_of
from jaxtrain.data.tokenization.file_tokenizer import FileTokenizer
from jaxtrain.data.tokenization.tokenizer import ByteTokenizer
from jaxtrain.data.tokenization.tokenizer_folder import GENERATION, SETTINGS, ends_of
from jaxtrain.models.weights.folder import TOKENIZER
from jaxtrain.run.generation.published_defaults import ends_of_run
from jaxtrain.training.settings import Config

END_OF_BYTES = "<|endoftext|>"  # what byte 0, which text does not use, is called


def generation_files(
    config: Config, workdir: Place | None, carried: Mapping[str, bytes], settings: Mapping[str, Any]
) -> dict[str, bytes]:
    """Return the files, by name, that an export has besides what is carried along.

    Args:
      config: the run's configuration.
      workdir: the run's folder, if it has one.
      carried: the files that go along anyway.
      settings: the export's config.json.
    """
    tokenizer, found = _tokenizer_of(config), dict[str, bytes]()
    if isinstance(tokenizer, ByteTokenizer) and TOKENIZER not in carried:
        found[TOKENIZER] = byte_tokenizer().encode()
        found[SETTINGS] = _format({"tokenizer_class": _CLASS, "eos_token": END_OF_BYTES})
    if isinstance(tokenizer, FileTokenizer):
        if TOKENIZER in carried and tokenizer.is_surrounded_otherwise:
            found[TOKENIZER] = tokenizer.to_json().encode()
        if SETTINGS not in carried:
            found[SETTINGS] = _format({"tokenizer_class": _CLASS, **tokenizer.special_names()})
    ends = ends_of_run(config, workdir) if tokenizer is not None else ()
    said = json.loads(carried.get(GENERATION, b"{}"))
    if ends and set(ends_of(said)) != set(ends):
        ids = {key: settings[key] for key in _IDS if settings.get(key) is not None}
        if isinstance(tokenizer, FileTokenizer) and tokenizer.before:
            ids.setdefault("bos_token_id", tokenizer.before[0])
        end = ends[0] if len(ends) == 1 else list(ends)
        found[GENERATION] = _format({**ids, **said, "eos_token_id": end})
    return found


_CLASS = "PreTrainedTokenizerFast"  # of any tokenizer.json, which is taken as it is
_IDS = ("bos_token_id", "pad_token_id", "decoder_start_token_id")


def byte_tokenizer() -> str:
    """The tokenizer.json of the byte tokenizer: a token a byte of UTF-8, and byte 0 an end."""
    import tokenizers

    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # The library writes a byte as a character that can be seen: these as themselves, in their
    # order, and the rest as those from U+0100 on.
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in seen]
    names = {byte: chr(byte) for byte in seen}
    names |= {byte: chr(0x100 + number) for number, byte in enumerate(rest)}
    vocab = {name: byte for byte, name in names.items() if byte} | {END_OF_BYTES: 0}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.pre_tokenizer, made.decoder = level, tokenizers.decoders.ByteLevel()
    made.add_special_tokens([END_OF_BYTES])
    return made.to_str()


def _tokenizer_of(config: Config) -> Any:
    """The tokenizer of the run's texts; None where it has none."""
    data = config.train.data
    text = data if isinstance(data, Templated | PairData) else text_of(data)
    if text is None or text.source == "synthetic":
        return None
    return text.open_tokenizer()


def _format(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode()
