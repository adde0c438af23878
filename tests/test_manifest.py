"""A manifest has the digests that other programs find, and no changed byte of it goes unseen."""

import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

from jaxtrain.config.errors import UserError
from jaxtrain.run.checkpoint import manifest
from jaxtrain.run.checkpoint.manifest import CRC32, CheckpointError, Leaf, digest

LEAVES = {"params/up": Leaf(4_000_000_000, (2, 3), "bfloat16"), "step": Leaf(7, (), "int32")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A sealed folder `7` with files at two depths, one of them empty, one with an odd name."""
    folder = tmp_path_factory.mktemp("sealed") / "7"
    (folder / "state/d").mkdir(parents=True)
    (folder / "state/d/one").write_bytes(bytes(range(256)) * 5000)
    (folder / "state/über alles").write_bytes(b"x")
    (folder / "empty").write_bytes(b"")
    manifest.seal(folder, 7, LEAVES)
    return folder


def test_what_is_sealed_is_read(folder):
    found = manifest.read(folder, 7)
    assert (found.format, found.step, found.leaves) == (4, 7, LEAVES)
    assert {name: size for name, (size, _) in found.files.items()} == {
        "empty": 0,
        "state/d/one": 1_280_000,
        "state/über alles": 1,
    }
    manifest.check(folder, found, found.files)
    assert manifest.is_sealed(folder)
    assert not manifest.is_sealed(folder / "state")


def printed(*command):
    """What a program prints; the test is skipped where there is none."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, check=True).stdout


def test_digests_are_those_of_gzip(folder):
    for name, (size, written) in manifest.read(folder, 7).files.items():
        trailer = printed("gzip", "-c", str(folder / name))[-8:]  # RFC 1952, section 2.3.1
        assert struct.unpack("<II", trailer) == (int(written.removeprefix("crc32:"), 16), size)
        assert written.startswith("crc32:")


def test_the_digests_that_buckets_make_are_compared(folder, tmp_path):
    """A manifest with what md5sum prints; every file with one bit flipped is named."""
    shutil.copytree(folder, tmp_path / "7")
    content = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    for name in content["files"]:
        said = printed("md5sum", str(folder / name)).split()[0].decode()
        content["files"][name][1] = "md5:" + said.removeprefix("\\")
    (tmp_path / "7/manifest.json").write_bytes(manifest._envelope(content))
    found = manifest.read(tmp_path / "7", 7)
    assert found.leaves == LEAVES
    manifest.check(tmp_path / "7", found, found.files)
    for name in found.files:
        good = (folder / name).read_bytes()
        bad = good[:-1] + bytes([good[-1] ^ 1]) if good else b"1"
        (tmp_path / "7" / name).write_bytes(bad)
        with pytest.raises(
            CheckpointError, match=f"step 7 .*{name} (does not match its digest|has 1 bytes)"
        ):
            manifest.check(tmp_path / "7", found, found.files)
        (tmp_path / "7" / name).write_bytes(good)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(data=strategies.data())
def test_no_change_that_the_digest_promises_to_find_goes_unseen(tmp_path_factory, data):
    """Within four bytes in a row, or in two bits anywhere."""
    file = tmp_path_factory.getbasetemp() / "changed"
    content = data.draw(strategies.binary(min_size=4, max_size=9000))
    file.write_bytes(content)
    before = digest(file, CRC32)
    bits = 8 * len(content)
    place = strategies.integers(0, bits - 1)
    if data.draw(strategies.booleans()):
        first = data.draw(strategies.integers(0, len(content) - 4))
        change = data.draw(strategies.integers(1, 2**32 - 1)) << 8 * first
    else:
        change = 1 << data.draw(place) | 1 << data.draw(place)
    changed = int.from_bytes(content, "little") ^ change
    file.write_bytes(changed.to_bytes(len(content), "little"))
    after = digest(file, CRC32)
    assert (before[0], after[0]) == (len(content), len(content))
    assert before[1] != after[1]


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(data=strategies.data())
def test_no_change_of_the_manifest_itself_goes_unseen(folder, data):
    file = folder / "manifest.json"
    content = file.read_bytes()
    place = data.draw(strategies.integers(0, len(content) - 1))
    kind = data.draw(strategies.sampled_from(["flip", "cut", "insert", "remove"]))
    changed = {
        "flip": content[:place]
        + bytes([content[place] ^ 1 << data.draw(strategies.integers(0, 7))])
        + content[place + 1 :],
        "cut": content[:place],
        "insert": content[:place] + b" " + content[place:],
        "remove": content[:place] + content[place + 1 :],
    }[kind]
    hypothesis.assume(changed != content)
    file.write_bytes(changed)
    try:
        with pytest.raises(CheckpointError, match=r"step 7 in .*/7 cannot be read .manifest.json"):
            manifest.read(folder, 7)
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"[" * 100_000,
        b'{"manifest": {}}',
        b'{"manifest": [1]}',
        b"\xff",
    ],
)
def test_what_is_no_manifest_is_said_in_one_sentence(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="step 1 in .*manifest.json: ") as raised:
        manifest.read(tmp_path, 1)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"a": [1]}},
        {"files": {"a": "bc"}},
        {"files": 3},
        {"files": {"a": [1, "crc64:0123456789abcdef"]}},
        {"leaves": {"x": {}}},
        {"leaves": {"x": {"fingerprint": 1, "shape": 3, "dtype": "int8"}}},
        {"format": "2"},
        {"format": None},
    ],
)
def test_a_manifest_of_another_form_is_refused_though_its_digest_agrees(folder, tmp_path, change):
    content = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    (tmp_path / "manifest.json").write_bytes(manifest._envelope({**content, **change}))
    with pytest.raises(CheckpointError, match=r"manifest.json: "):
        manifest.read(tmp_path, 7)


@pytest.mark.parametrize(
    "name", ["..", "../x", "a/../../x", "/etc/passwd", "a//b", "./a", "", "a\0"]
)
def test_a_name_that_is_no_file_inside_is_refused(tmp_path, name):
    manifest.seal(tmp_path, 7, {})
    content = json.loads((tmp_path / "manifest.json").read_bytes())["manifest"]
    content["files"] = {name: [0, "crc32:00000000"]}
    (tmp_path / "manifest.json").write_bytes(manifest._envelope(content))
    with pytest.raises(CheckpointError, match="which is not a file inside the checkpoint"):
        manifest.read(tmp_path, 7)


def test_a_later_format_is_told_from_a_broken_one(tmp_path):
    content = {"format": 5, "step": 7, "whatever": ["later", "needs"]}
    (tmp_path / "manifest.json").write_bytes(manifest._envelope(content))
    with pytest.raises(UserError, match="format 5, written by a newer jaxtrain; .* up to 4"):
        manifest.read(tmp_path, 7)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files: Linux")
def test_files_and_folders_are_on_the_disk_before_the_manifest_vouches_for_them(
    tmp_path, monkeypatch
):
    (tmp_path / "7/state").mkdir(parents=True)
    (tmp_path / "7/state/file").write_text("1")
    events, fsync, replace = [], os.fsync, Path.replace

    def noted_fsync(number):
        events.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def noted_replace(source, target):
        events.append("named")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    manifest.seal(tmp_path / "7", 7, {})
    before, after = events[: events.index("named")], events[events.index("named") + 1 :]
    names = ["7/state/file", "7/state", "7", ""]
    assert {str(tmp_path / name) for name in names} <= set(before)
    assert any(name.startswith(str(tmp_path / "7/.manifest.json.")) for name in before)
    assert after == [str(tmp_path / "7")]


def test_a_second_seal_replaces_the_first_and_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "a").write_text("1")
    manifest.seal(tmp_path, 1, LEAVES)
    (tmp_path / "a").write_text("2")
    manifest.seal(tmp_path, 1, LEAVES)
    found = manifest.read(tmp_path, 1)
    assert found.files.keys() == {"a"}
    manifest.check(tmp_path, found, found.files)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "manifest.json"}


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (Exception("a chunk is missing\nand a long trace"), "a chunk is missing"),
        (Exception(), "Exception"),
    ],
)
def test_an_error_of_reading_is_told_by_its_first_line(tmp_path, error, detail):
    with pytest.raises(CheckpointError) as told, manifest.Reading(tmp_path, 3):
        raise error
    assert str(told.value) == f"the checkpoint of step 3 in {tmp_path} cannot be read ({detail})"
