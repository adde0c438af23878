"""Atomic export of a run to a new folder: safetensors, config.json, tokenizer files.

With tokenizer_config.json and generation_config.json transformers' AutoTokenizer reads a text as
the run does, and generate() ends an answer where the run ends it. Files copied by an import
are unchanged.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from jaxtrain.config.buckets import AnyPath, on_disk, to_path
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors, remove_tree, write_atomically
from jaxtrain.data.pairs.source import PairData
from jaxtrain.data.text.chat.conversations import Templated
from jaxtrain.data.text.source import text_of
from jaxtrain.data.tokenization.file_tokenizer import FileTokenizer
from jaxtrain.data.tokenization.tokenizer import ByteTokenizer
from jaxtrain.data.tokenization.tokenizer_folder import GENERATION, SETTINGS, ends_of
from jaxtrain.models.weights.family import Family, family_for, their_shapes
from jaxtrain.models.weights.folder import CARRIED, CONFIG, INDEX, TOKENIZER, WEIGHTS, Folder
from jaxtrain.models.weights.formats import safetensors
from jaxtrain.run.checkpoint.metadata import RECEIPT, Ancestor
from jaxtrain.run.generation.answer import ends_of_run, published_folder
from jaxtrain.run.huggingface import receipt
from jaxtrain.run.huggingface.parameters import shapes_of, their_tensors
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import Setup


@contextlib.contextmanager
def new_folder(out: str) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of this name, and the temporary sibling that is written and then renamed to
    it.

    Raises:
      UserError: the folder is not empty, or cannot be created.
    """
    folder = on_disk(out)
    with path_errors(f"--out {out}", needs="name a folder that can be made"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--out {out} is there already; name a folder that is new")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.absolute().with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
        temporary.mkdir()
    try:
        yield folder, temporary
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        remove_tree(temporary)


def require_one_process(out: str) -> None:
    """Raise UserError in a run of several processes, which have only parts of the arrays."""
    if jax.process_count() > 1:
        raise UserError(
            f"--out {out}: a run of {jax.process_count()} processes is exported by one process; "
            "call 'jaxtrain export-hf' on its folder, with bindings of Mesh for one machine"
        )


FILE_BYTES = 5 * 10**9  # of the largest file, as in transformers
Dtype = Literal["float32", "bfloat16"]
_TEMPLATE = "chat_template.jinja"
_TOKENIZER = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", _TEMPLATE)
_WRITTEN = {"float32": "F32", "bfloat16": "BF16"}


def export_run(
    out: str,
    config: Config,
    setup: Setup,
    params: nnx.State,
    workdir: AnyPath | None,
    *,
    dtype: Dtype,
    ancestors: Sequence[Ancestor],
    console: Console,
    file_bytes: int = FILE_BYTES,
) -> receipt.Receipt:
    """Write a folder that transformers reads, atomically, and compare it with the run.

    Args:
      out: the folder, missing or empty.
      config: the run's configuration.
      setup: layout and layer order of the parameters.
      params: the parameters to export, including running statistics.
      workdir: the run's folder, with files copied by an import; None: there is none.
      dtype: of the files.
      ancestors: of the run, for the receipt.
      console: for the receipt.
      file_bytes: maximum size of a file.

    Raises:
      UserError: the model is not a published architecture, the folder cannot be created, or there
        are several processes, each of which has a part of the parameters.
    """
    require_one_process(out)
    model = config.train.model
    carried = companion_files(config, workdir)
    content = json.loads(carried.pop(CONFIG, b"{}"))
    family, config_json = family_for(model, content.get("model_type"))
    names = family.names(model)
    with new_folder(out) as (folder, temporary):
        shapes, counts = their_shapes(names, shapes_of(setup)), family.counts(model)
        dtypes = dict.fromkeys(counts, "I64") | dict.fromkeys(shapes, _WRITTEN[dtype])
        made = their_tensors(names, params, setup.layer_order)
        zeros = ((name, np.zeros((), np.int64)) for name in counts)
        every = dict.fromkeys(counts, ()) | shapes
        write_weights(temporary, every, dtypes, itertools.chain(zeros, made), file_bytes)
        whole = config_json_settings(content, family, config_json, config, dtype)
        carried |= generation_files(config, workdir, carried, whole)
        for name, copied in {**carried, **family.extra_files(model)}.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            write_atomically(temporary / name, copied)
        write_atomically(temporary / CONFIG, json.dumps(whole, indent=2).encode())
        made = their_tensors(names, params, setup.layer_order)
        stored = {name: x for name, x in Folder(temporary).tensors().items() if name in shapes}
        found = receipt.compare(
            temporary, family.architecture, stored, made, setup, model, params, called=folder
        )
        found = dataclasses.replace(found, ancestors=tuple(ancestors))
        content = json.dumps(found.to_json(), indent=1).encode()
        write_atomically(temporary / RECEIPT, content)
    found.show(console)
    return found


def companion_files(config: Config, workdir: AnyPath | None) -> dict[str, bytes]:
    """Return the files to copy: of the import, of the run's start, or the run's tokenizer."""
    folder = published_folder(config, workdir)
    if folder is None:
        return _of_tokenizer(config)
    if isinstance(folder, Path):
        return Folder(folder.absolute()).extra_files()
    files = {name: folder / name for name in CARRIED}
    return {name: f.read_bytes() for name, f in files.items() if f.is_file()}


def _of_tokenizer(config: Config) -> dict[str, bytes]:
    """Return the files of the tokenizer's folder, and the chat template that the data name."""
    data = config.train.data
    data = data if isinstance(data, Templated | PairData) else text_of(data)
    found: dict[str, bytes] = {}
    if data is not None and data.tokenizer != "byte":
        folder = to_path(data.tokenizer).parent
        found = {
            name: (folder / name).read_bytes() for name in _TOKENIZER if (folder / name).is_file()
        }
        found[TOKENIZER] = to_path(data.tokenizer).read_bytes()
    if isinstance(data, Templated) and data.chat_template is not None:
        found[_TEMPLATE] = data.open_template().source.encode()
    return found


# Rotary positions are written in the older of two formats, which all versions read; and weights
# are floats.
_NOT_CARRIED = ("rope_parameters", "original_max_position_embeddings", "quantization_config")


def config_json_settings(
    carried: Mapping[str, Any],
    family: Family,
    content: Mapping[str, Any],
    config: Config,
    dtype: str,
) -> dict[str, Any]:
    """Return the config.json: the original one, overridden by keys from the sizes.

    Args:
      carried: the original one.
      family: its family.
      content: keys from the sizes.
      config: the run's configuration.
      dtype: PyTorch's name of the files' float dtype.
    """
    if carried.get("model_type") != family.model_type:
        carried = {"bos_token_id": None, "eos_token_id": _end_of_text(config)}
    # Original class names are kept, if their number matches.
    named = [table for table in ("id2label", "label2id")
             if len(carried.get(table) or {}) == len(content.get(table, {}))]  # fmt: skip
    content = {key: value for key, value in content.items() if key not in named}
    ours = {
        **{name: value for name, value in carried.items() if name not in _NOT_CARRIED},
        **content,
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
    }
    ours.pop("dtype", None)
    return ours


def _end_of_text(config: Config) -> int | None:
    data = config.train.data
    if isinstance(data, Templated):
        return data.open_tokenizer().end_of_text
    text = text_of(data)
    if text is not None and text.source != "synthetic":
        return text.open_tokenizer().end_of_text
    return None


def write_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    tensors: Iterable[tuple[str, np.ndarray]],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write one file, or several with an index, consuming tensors one at a time."""
    sizes = {name: math.prod(s) * safetensors.itemsize(dtypes[name]) for name, s in shapes.items()}
    parts = [{name: shapes[name] for name in part} for part in _split_shards(sizes, file_bytes)]
    files = [WEIGHTS]
    if len(parts) > 1:
        files = [
            f"model-{number:05}-of-{len(parts):05}.safetensors"
            for number in range(1, len(parts) + 1)
        ]
    values = (tensor for _, tensor in tensors)
    for name, part in zip(files, parts, strict=True):
        own = (next(values) for _ in part)
        safetensors.write(folder / name, part, dtypes, own)
    if len(parts) > 1:
        table = {tensor: file for file, part in zip(files, parts, strict=True) for tensor in part}
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": table}
        write_atomically(folder / INDEX, json.dumps(content, indent=1).encode())


def _split_shards(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Yield the tensors in their order, in parts of at most `most` bytes, or of one tensor."""
    part: list[str] = []
    size = 0
    for name, one in sizes.items():
        if part and size + one > most:
            yield part
            part, size = [], 0
        part.append(name)
        size += one
    yield part


END_OF_BYTES = "<|endoftext|>"  # name of byte 0, which text does not use


def generation_files(
    config: Config,
    workdir: AnyPath | None,
    carried: Mapping[str, bytes],
    settings: Mapping[str, Any],
) -> dict[str, bytes]:
    """Return the files of an export, by name, besides copied ones.

    Args:
      config: the run's configuration.
      workdir: the run's folder, if it has one.
      carried: the copied files.
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
    content = json.loads(carried.get(GENERATION, b"{}"))
    if ends and set(ends_of(content)) != set(ends):
        ids = {key: settings[key] for key in _IDS if settings.get(key) is not None}
        if isinstance(tokenizer, FileTokenizer) and tokenizer.before:
            ids.setdefault("bos_token_id", tokenizer.before[0])
        end = ends[0] if len(ends) == 1 else list(ends)
        found[GENERATION] = _format({**ids, **content, "eos_token_id": end})
    return found


_CLASS = "PreTrainedTokenizerFast"  # of any tokenizer.json, which is used unchanged
_IDS = ("bos_token_id", "pad_token_id", "decoder_start_token_id")


def byte_tokenizer() -> str:
    """Return the tokenizer.json of the byte tokenizer: a token a byte of UTF-8, and byte 0 an
    end."""
    import tokenizers

    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # The library writes bytes as visible characters: these as themselves, in
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
    """Return the tokenizer of the run's texts; None if it has none."""
    data = config.train.data
    text = data if isinstance(data, Templated | PairData) else text_of(data)
    if text is None or text.source == "synthetic":
        return None
    return text.open_tokenizer()


def _format(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode()
