"""A run becomes a published model: safetensors, config.json, and what was carried along."""

import json
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from jaxtrain.config.buckets import Place, on_disk, place
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import refused_path, remove_tree, write_atomically
from jaxtrain.data.mixture import text_of
from jaxtrain.data.text.templated import Templated
from jaxtrain.models.weights import safetensors
from jaxtrain.models.weights.family import Family, family_for
from jaxtrain.models.weights.folder import CARRIED, CONFIG, INDEX, TOKENIZER, WEIGHTS, Folder
from jaxtrain.models.weights.names import their_shapes
from jaxtrain.run.huggingface import receipt
from jaxtrain.run.huggingface.importing import CARRIED_FOLDER
from jaxtrain.run.huggingface.parameters import shapes_of, their_tensors
from jaxtrain.training.settings import Config
from jaxtrain.training.step import Program

FILE_BYTES = 5 * 10**9  # of the largest file, as transformers has it
Dtype = Literal["float32", "bfloat16"]
_TEMPLATE = "chat_template.jinja"
_TOKENIZER = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", _TEMPLATE)
_WRITTEN = {"float32": "F32", "bfloat16": "BF16"}


def export_run(
    out: str,
    config: Config,
    program: Program,
    params: nnx.State,
    workdir: Place | None,
    *,
    dtype: Dtype,
    console: Console,
    file_bytes: int = FILE_BYTES,
) -> receipt.Receipt:
    """Writes a folder that transformers reads, whole or not at all, and compares it with the run.

    Args:
      out: the folder, which is not there yet or empty.
      config: the run's configuration.
      program: whose layout and order of layers the parameters have.
      params: what is exported.
      workdir: the run's folder, with what an import has carried along; None: there is none.
      dtype: of the files.
      console: where the receipt goes.
      file_bytes: the tensors are cut into files of at most this size.

    Raises:
      UserError: the model is known nowhere else, the folder cannot be made, or there are several
        processes, each of which has a part of the parameters.
    """
    if jax.process_count() > 1:
        raise UserError(
            f"--out {out}: a run of {jax.process_count()} processes is exported by one alone; call "
            "'jaxtrain export-hf' on its folder, with bindings of Mesh for one machine"
        )
    model = config.train.model
    carried = _carried(config, workdir)
    content = json.loads(carried.pop(CONFIG, b"{}"))
    family, said = family_for(model, content.get("model_type"))
    folder = on_disk(out)
    with refused_path(f"--out {out}", needs="name a folder that can be made"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--out {out} is there already; name a folder that is new")
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = folder.absolute().with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
        beside.mkdir()
    names = family.names(model)
    try:
        shapes = their_shapes(names, shapes_of(program))
        made = their_tensors(names, params, program.layer_order)
        _write_weights(beside, shapes, _WRITTEN[dtype], made, file_bytes)
        for name, copied in carried.items():
            write_atomically(beside / name, copied)
        whole = _settings(content, family, said, config, dtype)
        write_atomically(beside / CONFIG, json.dumps(whole, indent=2).encode())
        made = their_tensors(names, params, program.layer_order)
        stored = Folder(beside).tensors()
        found = receipt.compare(
            beside, family.architecture, stored, made, program, model, params, called=folder
        )
        content = json.dumps(found.to_json(), indent=1).encode()
        write_atomically(beside / receipt.FILE, content)
        if folder.exists():
            folder.rmdir()
        beside.rename(folder)
    finally:
        remove_tree(beside)
    found.show(console)
    return found


def _carried(config: Config, workdir: Place | None) -> dict[str, bytes]:
    """What goes along: of the import, of what the run started from, or the run's tokenizer."""
    start = config.train.start_from
    for one in (workdir, None if start is None else place(start)):
        if one is None:
            continue
        for folder in (one / CARRIED_FOLDER, one):
            if (folder / CONFIG).is_file():
                if isinstance(folder, Path):
                    return Folder(folder.absolute()).carried()
                files = {name: folder / name for name in CARRIED}
                return {name: f.read_bytes() for name, f in files.items() if f.is_file()}
    return _of_tokenizer(config)


def _of_tokenizer(config: Config) -> dict[str, bytes]:
    """The files of the tokenizer's folder, and the chat template that the data name."""
    data = config.train.data
    data = data if isinstance(data, Templated) else text_of(data)
    found: dict[str, bytes] = {}
    if data is not None and data.tokenizer != "byte":
        folder = place(data.tokenizer).parent
        found = {
            name: (folder / name).read_bytes() for name in _TOKENIZER if (folder / name).is_file()
        }
        found[TOKENIZER] = place(data.tokenizer).read_bytes()
    if isinstance(data, Templated) and data.chat_template is not None:
        found[_TEMPLATE] = data.open_template().source.encode()
    return found


def _settings(
    carried: Mapping[str, Any],
    family: Family,
    said: Mapping[str, Any],
    config: Config,
    dtype: Dtype,
) -> dict[str, Any]:
    """The config.json: what was carried along and what the sizes say, the latter over it."""
    if carried.get("model_type") != family.model_type:
        carried = {"bos_token_id": None, "eos_token_id": _end_of_text(config)}
    # Rotary positions are said in the older of two ways, which all versions read.
    ours = {
        **{name: value for name, value in carried.items() if name != "rope_parameters"},
        **said,
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


def _write_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    tensors: Iterable[tuple[str, np.ndarray]],
    file_bytes: int,
) -> None:
    """One file, or several with an index, the tensors taken one at a time."""
    parts = list(_cut(shapes, safetensors.DTYPES[dtype].itemsize, file_bytes))
    files = [WEIGHTS]
    if len(parts) > 1:
        files = [
            f"model-{number:05}-of-{len(parts):05}.safetensors"
            for number in range(1, len(parts) + 1)
        ]
    values = (tensor for _, tensor in tensors)
    for name, part in zip(files, parts, strict=True):
        own = (next(values) for _ in part)
        safetensors.write(folder / name, part, dtype, own)
    if len(parts) > 1:
        size = sum(map(math.prod, shapes.values())) * safetensors.DTYPES[dtype].itemsize
        table = {tensor: file for file, part in zip(files, parts, strict=True) for tensor in part}
        content = {"metadata": {"total_size": size}, "weight_map": table}
        write_atomically(folder / INDEX, json.dumps(content, indent=1).encode())


def _cut(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, most: int
) -> Iterator[dict[str, tuple[int, ...]]]:
    """The tensors in their order, in parts of at most `most` bytes, or of one tensor."""
    part: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in shapes.items():
        one = math.prod(shape) * itemsize
        if part and size + one > most:
            yield part
            part, size = {}, 0
        part[name] = shape
        size += one
    yield part
