"""GGUF files of Llama models: metadata, tokenizer, dequantization of weights.

A file is a header (magic, version, counts), key-value pairs, a row for each tensor, and their bytes
from the next multiple of the alignment on. Queries and keys are stored in it with the two halves of
each head interleaved, for another rotary convention; here they are reordered.

Types other than floats, Q8_0, Q4_0 and Q4_1 (Q4_K_M and its like) are dequantized by the package
`gguf`, of jaxtrain[gguf]. Its `GGUFReader` is not used: it trusts every count, so that a file of
73 bytes fills the memory (`tests/test_gguf_types.py`), and takes 20 times as long for a vocabulary.
Source: the format's description in ggml, docs/gguf.md, and the blocks of ggml-quants.
"""

import dataclasses
import functools
import importlib
import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.models.model import Model
from jaxtrain.models.weights.family import Family, model_of
from jaxtrain.models.weights.formats.gguf_metadata import (
    read_config,
    read_otherwise,
    read_special_ids,
    tokenizer_files,
)

MAGIC = b"GGUF"
_MOST = 1 << 24  # entries of a table, bytes of a text
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_TEXT, _TABLE = 8, 9
_HALF = np.dtype("<f2")


def _q8_0(block: np.ndarray) -> np.ndarray:
    return block["d"].astype(np.float32)[:, None] * block["q"]


def _nibbles(block: np.ndarray) -> np.ndarray:
    """The first 16 elements of a block are the low halves of its bytes, the others the high
    ones."""
    return np.concatenate([block["q"] & 15, block["q"] >> 4], axis=1).astype(np.float32)


def _q4_0(block: np.ndarray) -> np.ndarray:
    return block["d"].astype(np.float32)[:, None] * (_nibbles(block) - 8)


def _q4_1(block: np.ndarray) -> np.ndarray:
    scale, least = (block[name].astype(np.float32)[:, None] for name in ("d", "m"))
    return scale * _nibbles(block) + least


def _plain(block: np.ndarray) -> np.ndarray:
    return block.astype(np.float32)[:, None]


_Kind = tuple[np.dtype, int, Callable[[np.ndarray], np.ndarray]]
# Type id -> the dtype of a block, the elements in it, and the dequantizer.
_KINDS: dict[int, _Kind] = {
    0: (np.dtype("<f4"), 1, _plain),
    1: (_HALF, 1, _plain),
    30: (np.dtype(jnp.bfloat16), 1, _plain),
    2: (np.dtype([("d", _HALF), ("q", "u1", 16)]), 32, _q4_0),
    3: (np.dtype([("d", _HALF), ("m", _HALF), ("q", "u1", 16)]), 32, _q4_1),
    8: (np.dtype([("d", _HALF), ("q", "i1", 32)]), 32, _q8_0),
}


@functools.cache
def _kind(number: int) -> _Kind:
    """Return a row as in `_KINDS`, from the package gguf if there is none.

    Raises:
      ValueError: gguf cannot dequantize it either.
      ImportError: gguf is not installed.
    """
    if number in _KINDS:
        return _KINDS[number]
    quants = importlib.import_module("gguf.quants")
    try:
        kind = quants.GGMLQuantizationType(number)
        size, bytes_per_block = quants.GGML_QUANT_SIZES[kind]
        quants.dequantize(np.zeros((1, bytes_per_block), np.uint8), kind)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"quantized in an unsupported format (type {number})") from error

    block = np.dtype([("q", "u1", bytes_per_block)])
    return block, size, lambda blocks: quants.dequantize(blocks["q"], kind)


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Location of a tensor in a file.

    Attributes:
      file: the file.
      begin: its first byte, from the start of the file.
      kind: its ggml type.
      shape: its shape, the contiguous dimension last.
      heads: number of heads with interleaved halves; 0: it has no heads.
    """

    file: Path
    begin: int
    kind: int
    shape: tuple[int, ...]
    heads: int = 0

    @property
    def dtype(self) -> str:
        """Dtype of the tensor, as in safetensors."""
        return "F32"

    def open(self) -> np.ndarray:
        """Return the tensor as float32."""
        form, size, floats = _kind(self.kind)
        blocks = np.memmap(self.file, form, "r", self.begin, math.prod(self.shape) // size)
        values = floats(blocks).reshape(self.shape)
        if not self.heads:
            return values
        pairs = values.reshape(self.heads, -1, 2, *self.shape[1:])
        return pairs.swapaxes(1, 2).reshape(self.shape)


_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def _name(name: str) -> str:
    """Return a tensor's name in a Hugging Face folder; its own name if unknown."""
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if found is not None and found[2] in _IN_LAYER:
        return f"model.layers.{found[1]}.{_IN_LAYER[found[2]]}.weight"
    return _NAMES.get(name, name)


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A GGUF file, with the interface of `folder.Folder`.

    Attributes:
      path: the file.
    """

    path: Path

    @functools.cached_property
    def _read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        try:
            with self.path.open("rb") as stream:
                return _Reader(self.path, stream).everything()
        except ImportError as error:
            raise UserError(
                f"{self.path}: its quantized tensors need jaxtrain[gguf] ({error}); run: pip "
                "install 'jaxtrain[gguf]'"
            ) from error
        except (struct.error, ValueError, OverflowError) as error:
            raise UserError(
                f"{self.path} is not a supported GGUF file ({error}); fetch it again, or take "
                "the model's safetensors"
            ) from error

    @functools.cached_property
    def content(self) -> Mapping[str, Any]:
        """The equivalent config.json; UserError names unsupported metadata."""
        metadata, tensors = self._read
        tied = "lm_head.weight" not in tensors
        return {
            **read_config(metadata, tied=tied, where=str(self.path)),
            **read_special_ids(metadata, where=str(self.path)),
        }

    @functools.cached_property
    def family_and_model(self) -> tuple[Family, Model]:
        """The family and the sizes; UserError for what is not supported."""
        return model_of(self.content, where=str(self.path))

    @property
    def read_otherwise(self) -> str | None:
        """As in `folder.Folder`."""
        return read_otherwise(self._read[0])

    def tensors(self) -> dict[str, GgufTensor]:
        """Return every tensor by its name in a Hugging Face folder."""
        heads = {
            "self_attn.q_proj": self.content["num_attention_heads"],
            "self_attn.k_proj": self.content["num_key_value_heads"],
        }
        found = dict(self._read[1])
        for name, tensor in found.items():
            part = ".".join(name.split(".")[3:5])
            if part in heads:
                found[name] = dataclasses.replace(tensor, heads=heads[part])
        return found

    def extra_files(self) -> dict[str, bytes]:
        """config.json, and the tokenizer and its chat template if supported."""
        config = json.dumps(self.content, indent=2).encode()
        return {"config.json": config, **tokenizer_files(self._read[0], where=str(self.path))}


class _Reader:
    """Reads a file from its beginning to the tensors' bytes; all counts and sizes are checked."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file, self._stream, self._size = file, stream, file.stat().st_size

    def everything(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Return the key-value pairs, and the tensors."""
        if self._stream.read(4) != MAGIC or self._number("I") not in (2, 3):
            raise ValueError("it does not begin like version 2 or 3")
        count, pairs = self._count(), self._count()
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text()
            if key in metadata:
                raise ValueError(f"it has the key {key} twice")
            metadata[key] = self._value(self._number("I"))
        rows = [self._row() for _ in range(count)]
        if len({row[0] for row in rows}) < count:
            raise ValueError("it has two tensors of one name")
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"an alignment of {align!r}")
        start = -(-self._stream.tell() // align) * align
        return metadata, {_name(row[0]): self._tensor(start, *row) for row in rows}

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._stream.read(struct.calcsize(form)))[0]

    def _count(self) -> int:
        found = self._number("Q")
        if found > _MOST:
            raise ValueError(f"a count of {found}")
        return found

    def _text(self) -> str:
        return self._stream.read(self._count()).decode()

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _TABLE and depth == 0:
            inner = self._number("I")
            return [self._value(inner, 1) for _ in range(self._count())]
        if kind not in _SCALARS:
            raise ValueError(f"a value of kind {kind}")
        found = self._number(_SCALARS[kind])
        # The shortest decimal of the float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(found))) if kind == 6 else found

    def _row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        sizes = [self._number("Q") for _ in range(self._number("I"))]
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _tensor(
        self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> GgufTensor:
        try:
            form, size, _ = _kind(kind)
        except ValueError as error:
            raise ValueError(f"{name} is {error}") from error
        count = math.prod(shape)
        if not 1 <= len(shape) <= 4 or shape[-1] % size:
            raise ValueError(f"{name} is {list(shape)}")
        if start + offset + count // size * form.itemsize > self._size:
            raise ValueError(f"{name} ends after the file")
        return GgufTensor(self._file, start + offset, kind, shape)
