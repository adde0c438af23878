"""Safetensors: the format's own package reads our files and we read its; bad ones are rejected."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.formats.safetensors import raw, read_header, write

peer = pytest.importorskip("safetensors.numpy", reason="the format's own package is the peer")

VALUES = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "half": np.array([1.5, -2.0], np.float16),
    "bfloat": np.array([[1.0], [3.1]], jnp.bfloat16),
    "whole": np.array([1, 2, 3], np.int64),
    "one": np.array(3.5, np.float32),
    "none": np.zeros((0, 4), np.float32),
}


def test_files_of_the_formats_own_package_are_read_bit_for_bit(tmp_path):
    peer.save_file(VALUES, tmp_path / "a.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "a.safetensors")
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert found[name].shape == value.shape, name
        assert found[name].bytes == value.nbytes, name
        if name != "whole":  # not a dtype that parameters have
            assert found[name].open().dtype == value.dtype
            assert np.array_equal(raw(found[name].open()), raw(value)), name


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_our_files_are_read_by_the_formats_own_package(tmp_path, dtype):
    values = {name: VALUES[name].astype(np.float32) for name in ("matrix", "half", "none")}
    file = tmp_path / "b.safetensors"
    # A view that does not lie in order in memory, too.
    values["turned"] = values["matrix"].T
    write(file, {name: value.shape for name, value in values.items()}, dtype, values.values())
    found = peer.load_file(file)
    assert found.keys() == values.keys()
    for name, value in values.items():
        as_written = value.astype(jnp.bfloat16 if dtype == "BF16" else np.float32)
        assert found[name].dtype == as_written.dtype
        assert np.array_equal(found[name], as_written), name


def test_nothing_is_left_of_a_file_whose_writing_fails(tmp_path):
    def tensors():
        yield np.zeros(2, np.float32)
        raise OSError("away")

    file = tmp_path / "c.safetensors"
    with pytest.raises(OSError, match="away"):
        write(file, {"a": (2,), "b": (2,)}, "F32", tensors())
    assert not file.exists()


def row(shape: object, begin: object, end: object, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "body", "said"),
    [
        (b"\xff" * 8, b"", "a header of 18446744073709551615 bytes does not fit"),
        ({"a": row([2], 0, 8)}, b"\0" * 4, "its tensors end at byte"),
        ({"a": row([2], 0, 8)}, b"\0" * 12, "its tensors end at byte"),
        ({"a": row([3], 0, 8)}, b"\0" * 8, "[3] of F32 are not 8 bytes"),
        ({"a": row([2], 4, 12)}, b"\0" * 12, "a does not begin where the tensor before it ends"),
        ({"a": row([2], 0, 8), "b": row([2], 4, 12)}, b"\0" * 12, "b does not begin where"),
        ({"a": row([-2], 0, 8)}, b"\0" * 8, "are no offsets and sizes"),
        ({"a": row([True], 0, 4)}, b"\0" * 4, "are no offsets and sizes"),
        ({"a": row([2], 0, 8, "F31")}, b"\0" * 8, "'F31' is none of the format's"),
        ({"a": {"dtype": "F32"}}, b"", "its header: 'data_offsets'"),
        ({"a": 3}, b"", "its header: "),
        ([], b"", "its header: "),
        (b'\x05\0\0\0\0\0\0\0{"a":', b"", "its header: "),
        (b'\x0f\0\0\0\0\0\0\0{"a":1, "a": 2}', b"", "a name stands in it twice"),
        (b"\x01\0", b"", "does not fit into its 2 bytes"),
    ],
)
def test_a_header_is_checked_against_the_file(tmp_path, header, body, said):
    if not isinstance(header, bytes):
        text = json.dumps(header).encode()
        header = len(text).to_bytes(8, "little") + text
    file = tmp_path / "bad.safetensors"
    file.write_bytes(header + body)
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        read_header(file)
    assert f"{file} is not a safetensors file (" in str(raised.value)
