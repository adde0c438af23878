"""GGUF types of the package gguf: K-quants by their layout, and why its reader is not used."""

import re
import struct
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is the peer of this test")
pytest.importorskip("gguf", reason="gguf dequantizes the tensors")

import transformers
from gguf import GGMLQuantizationType
from gguf_files import llama, metadata, write
from test_gguf import SAID, gguf
from test_gguf_metadata import close, ours, theirs

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.formats.gguf import GgufFile, _kind

Q4_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K


def q4_k(codes, scales, mins, d, dmin) -> bytes:
    """One block of 256 values `d * scale * code - dmin * min`, as ggml-quants lays it out.

    Args:
      codes: 8 rows of 32 numbers under 16.
      scales: 8 numbers under 64.
      mins: 8 numbers under 64.
      d: factor of the scales.
      dmin: factor of the mins.
    """
    scales, mins = scales.tolist(), mins.tolist()
    packed = bytearray(12)
    for j in range(4):
        packed[j] = scales[j] | (scales[j + 4] >> 4) << 6
        packed[j + 4] = mins[j] | (mins[j + 4] >> 4) << 6
        packed[j + 8] = scales[j + 4] & 15 | (mins[j + 4] & 15) << 4
    pairs = [low | high << 4 for row in range(0, 8, 2)
             for low, high in zip(codes[row], codes[row + 1], strict=True)]  # fmt: skip
    return np.float16(d).tobytes() + np.float16(dmin).tobytes() + bytes(packed) + bytes(pairs)


def q6_k(codes, scales, d) -> bytes:
    """One block of 256 values `d * scale * (code - 32)`, as ggml-quants lays it out.

    Args:
      codes: 256 numbers under 64.
      scales: 16 signed bytes, each for 16 values.
      d: factor of the scales.
    """
    low, high = bytearray(128), bytearray(64)
    for index, code in enumerate(map(int, codes)):
        half, rest = divmod(index, 128)
        quarter, place = divmod(rest, 32)
        low[half * 64 + quarter % 2 * 32 + place] |= (code & 15) << 4 * (quarter // 2)
        high[half * 32 + place] |= (code >> 4) << 2 * quarter
    return bytes(low) + bytes(high) + np.array(scales, np.int8).tobytes() + np.float16(d).tobytes()


def random_blocks(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Blocks for a matrix of this shape; their values are as wide as `rows` are."""
    rng = np.random.default_rng(rows.size)
    blocks = []
    for _ in range(rows.size // 256):
        if kind == Q4_K:
            codes, scales = rng.integers(0, 16, (8, 32)), rng.integers(16, 48, 8)
            blocks.append(q4_k(codes, scales, scales, 0.002, 0.015))
        else:
            codes, scales = rng.integers(0, 64, 256), rng.integers(-64, 64, 16)
            blocks.append(q6_k(codes, scales, 0.0004))
    return np.frombuffer(b"".join(blocks), np.uint8).reshape(len(rows), -1)


def test_blocks_are_read_by_their_layout(tmp_path):
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 16, (3, 8, 32)), rng.integers(0, 64, (3, 8))
    mins = rng.integers(0, 64, (3, 8))
    fours = [q4_k(*block, 0.25, 0.5) for block in zip(codes, scales, mins, strict=True)]
    six_bits, signed = rng.integers(0, 64, (3, 256)), rng.integers(-128, 128, (3, 16))
    sixes = [q6_k(*block, 0.125) for block in zip(six_bits, signed, strict=True)]
    tensors = {
        "fours": ((3, 256), Q4_K, b"".join(fours)),
        "sixes": ((768,), Q6_K, b"".join(sixes)),
    }
    file = tmp_path / "a.gguf"
    file.write_bytes(gguf({"general.architecture": "llama"}, tensors))
    found = {name: tensor.open() for name, tensor in GgufFile(file)._read[1].items()}
    expected = 0.25 * scales[..., None] * codes - 0.5 * mins[..., None]
    np.testing.assert_array_equal(found["fours"], expected.reshape(3, 256))
    expected = 0.125 * signed[..., None] * (six_bits.reshape(3, 16, 16) - 32)
    np.testing.assert_array_equal(found["sixes"], expected.reshape(768))
    assert {value.dtype for value in found.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("kind", [Q4_K, Q6_K])
def test_logits_of_a_file_of_k_quants_are_those_of_transformers(tmp_path, kind):
    model = llama(hidden_size=256, intermediate_size=256)
    path = write(tmp_path / "model.gguf", model, metadata(model), kind=kind, quantize=random_blocks)
    read = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype="float32"
    )
    assert close(ours(path), theirs(read.eval()))


def test_an_import_of_k_quants_has_a_receipt(tmp_path, capsys):
    model = llama(hidden_size=256, intermediate_size=256)
    path = write(tmp_path / "model.gguf", model, metadata(model), kind=Q4_K, quantize=random_blocks)
    assert main(["import-hf", str(path), "--workdir", str(tmp_path / "run")]) == 0
    assert "Parity: the largest difference of a logit" in capsys.readouterr().out


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch, capsys):
    file = tmp_path / "a.gguf"
    file.write_bytes(gguf(SAID, {"x": ((256,), Q4_K, bytes(144))}))
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    _kind.cache_clear()
    assert main(["import-hf", str(file), "--workdir", str(tmp_path / "run")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{file}: its quantized tensors need jaxtrain[gguf]" in said
    assert "pip install 'jaxtrain[gguf]'" in said
    # What was read before there was the extra needs none.
    for kind, size, count in (
        (0, 4, 1),
        (1, 2, 1),
        (30, 2, 1),
        (2, 18, 32),
        (3, 20, 32),
        (8, 34, 32),
    ):
        file.write_bytes(gguf(SAID, {"x": ((count,), kind, bytes(size))}))
        assert not GgufFile(file)._read[1]["x"].open().any()


@pytest.mark.parametrize("kind", [15, 26, 99])  # Q8_K, I32, none
def test_a_type_that_the_package_does_not_dequantize_is_rejected(tmp_path, kind):
    file = tmp_path / "a.gguf"
    file.write_bytes(gguf(SAID, {"x": ((256,), kind, bytes(1024))}))
    words = f"x is quantized in an unsupported format (type {kind})"
    with pytest.raises(UserError, match=re.escape(words)):
        _ = GgufFile(file).family_and_model


def test_a_block_that_ends_after_the_file_is_rejected(tmp_path):
    file = tmp_path / "a.gguf"
    file.write_bytes(gguf(SAID, {"x": ((512,), Q4_K, bytes(288))})[:-1])
    with pytest.raises(UserError, match="x ends after the file"):
        _ = GgufFile(file).family_and_model


# Starts Python; what our reader says of such counts is in tests/test_gguf.py.
@pytest.mark.slow
def test_the_packages_reader_believes_a_count_and_ours_does_not(tmp_path):
    """Why the header is not read by the package: once this fails, it can be."""
    file = tmp_path / "a.gguf"
    file.write_bytes(
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 1 << 60)
    )
    code = (
        "import resource, sys\n"
        "import gguf\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "gguf.GGUFReader(sys.argv[1])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=300
    )
    assert "MemoryError" in found.stderr
    with pytest.raises(UserError, match=f"a count of {1 << 60}"):
        _ = GgufFile(file).family_and_model
