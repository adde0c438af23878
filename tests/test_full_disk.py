"""A disk that is full: what is written, what waits, and what the last line says."""

import errno
import json
import os
import subprocess
import sys
import types
import warnings

import pytest
from orbax.checkpoint._src.serialization import serialization
from test_checkpoint_failures import can_mount, small_disk, small_files

from jaxtrain.cli import main
from jaxtrain.config.files import Appended, FullDiskError, full_disk, room, write_atomically
from jaxtrain.run.checkpoint.sealing import filter_late_errors
from jaxtrain.run.metrics.files import MetricsFiles, read_lines
from jaxtrain.training.objectives.objective import Yardstick

ROOM = rf"{os.strerror(errno.EFBIG)}; [\d,]+ bytes are free there, of the [\d,]+ of the file system"


def test_the_reason_is_found_under_what_libraries_say_of_it():
    assert full_disk(OSError(errno.ENOSPC, "")) == "No space left on device"
    assert full_disk(OSError(errno.EDQUOT, "")) == os.strerror(errno.EDQUOT)
    wrapped = ValueError(
        "RESOURCE_EXHAUSTED: " + "x" * 400 + " [OS error 28: No space left on device]"
    )
    assert full_disk(wrapped) == "No space left on device"
    outer = RuntimeError("could not save")
    outer.__cause__ = wrapped
    assert full_disk(outer) == "No space left on device"
    assert full_disk(OSError(errno.EIO, "Input/output error")) is None


def test_the_file_system_of_a_place_is_named(tmp_path):
    told = room(tmp_path / "not" / "there" / "yet")
    mounted = told.rpartition(" at ")[2]
    assert os.path.ismount(mounted)
    assert tmp_path.is_relative_to(mounted)


def test_a_file_that_finds_no_room_stays_as_it_was(tmp_path):
    file = tmp_path / "file"
    write_atomically(file, b"before")
    with small_files(tmp_path) as limit:
        limit(True)
        with pytest.raises(FullDiskError, match=f"{file}: {ROOM}"):
            write_atomically(file, b"x" * 100_000)
        limit(False)
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]


def test_pieces_that_find_no_room_wait_for_it_whole(tmp_path):
    pieces = [bytes([65 + number]) * 30_000 for number in range(5)]
    with small_files(tmp_path) as limit:
        file = Appended(tmp_path / "file")
        limit(True)
        for piece in pieces[:4]:
            file.append(piece)
            assert (tmp_path / "file").read_bytes() in (pieces[0], b"".join(pieces[:2]))
        limit(False)
        file.append(pieces[4])
        assert (tmp_path / "file").read_bytes() == b"".join(pieces)
        limit(True)
        file.append(b"lost")
        with pytest.raises(FullDiskError, match=f"file: {ROOM}"):
            file.close()
        limit(False)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    again = Appended(tmp_path / "file")
    again.append(b"more")
    again.close()
    assert (tmp_path / "file").read_bytes() == b"".join(pieces) + b"more"


def test_metrics_catch_up_when_there_is_room_again(tmp_path):
    line = {"loss": 1.0, "why": "w" * 40_000}
    with small_files(tmp_path) as limit:
        files = MetricsFiles(tmp_path, 0, Yardstick())
        limit(True)
        for step in (1, 2, 3):
            files.write({"step": step, **line})
        assert [one["step"] for one in read_lines(tmp_path / "metrics.jsonl")] == [1]
        limit(False)
        files.write({"step": 4, **line})
        files.close()
    assert [one["step"] for one in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


# Starts Python and trains; tests/test_train_faults.py takes the folder from a run in this
# process.
@pytest.mark.slow_cases("small_files")
@pytest.mark.parametrize("kind", [pytest.param(small_disk, marks=pytest.mark.slow), small_files])
def test_a_run_on_a_full_disk_ends_with_the_reason_and_nothing_half_written(
    kind, tiny_config, tmp_path
):
    """In a process of its own: the limit of a file's size is a process's."""
    if kind is small_disk and not can_mount(tmp_path):
        pytest.skip("no right to mount a small file system")
    script = (
        "import resource, sys; from jaxtrain.cli import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2);"
        "sys.exit(main(sys.argv[2:]))"
    )
    limit = 1 << (30 if kind is small_disk else 16)
    bindings = ["Train.save_every = 1", "Checkpoint.max_failed_saves = 2", "GPT.embed_dim = 256"]
    words = [word for binding in bindings for word in ("-b", binding)]
    with kind(tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", script, str(limit), "train", str(tiny_config), "--workdir",
             str(tmp_path / "run"), "--simulate-devices", "8", *words],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        last = done.stderr.splitlines()[-1]
        folder = tmp_path / "run" / "checkpoints"
        assert last.startswith("jaxtrain: the checkpoint of step ")
        assert f"could not be written to {folder} (" in last
        reason = errno.ENOSPC if kind is small_disk else errno.EFBIG
        assert f"({os.strerror(reason)}); " in last
        assert " bytes are free there, of the " in last
        if kind is small_disk:
            assert last.endswith(f"of the file system mounted at {tmp_path}")
        assert list(folder.iterdir()) == []
        told = json.loads((tmp_path / "run" / "exit.json").read_text())
        assert told["status"] == "failed"
        assert f"jaxtrain: {told['reason']}" == last


def test_nothing_is_printed_of_parts_whose_writing_was_cancelled(monkeypatch):
    """Orbax begins several parts of an array at once; when one fails, others may not have begun."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    outer = serialization.async_serialize_from_host.__code__
    code = next(x for x in outer.co_consts if getattr(x, "co_name", "") == "write_fragment")
    part = types.FunctionType(code, {}, closure=tuple(types.CellType() for _ in code.co_freevars))

    async def another(_):
        pass

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        filter_late_errors.__wrapped__()
        for coroutine in (part, another):
            coroutine(None)
    assert [str(one.message).rpartition(".")[2] for one in seen] == ["another' was never awaited"]


def test_another_file_that_finds_no_room_is_a_sentence(monkeypatch, capsys, tmp_path):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "file"))

    monkeypatch.setattr("jaxtrain.analysis.commands.show_doctor", full)
    assert main(["doctor"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"jaxtrain: {tmp_path / 'file'}: No space left on device; ")
    assert told.count("\n") == 1


def test_a_picture_and_a_store_that_find_no_room_are_named_and_not_half_there(
    tiny_config, tmp_path, capsys
):
    text = tmp_path / "text.txt"
    text.write_text("some words of a line\n" * 10_000)
    with small_files(tmp_path) as limit:
        limit(True)
        store = ["prepare", str(text), "--tokenizer", "byte", "--out", str(tmp_path / "store")]
        assert main(store) == 1
        assert f"jaxtrain: {tmp_path / 'store'}" in capsys.readouterr().err
        picture, rows = tmp_path / "drawn.png", ["-b", "Train.global_batch_size = 64"]
        words = ["-b", "Mesh.pipe = 2", "-b", "Pipeline.microbatches = 64", *rows]
        assert main(["timeline", str(tiny_config), "--png", str(picture), *words]) == 1
        limit(False)
    assert f"jaxtrain: {picture}: {os.strerror(errno.EFBIG)}; " in capsys.readouterr().err
    assert not picture.exists()
    assert main(store) == 0  # goes on


def test_too_little_memory_is_a_sentence(monkeypatch, capsys):
    def large(_):
        raise MemoryError("Unable to allocate 29.8 GiB")

    monkeypatch.setattr("jaxtrain.analysis.commands.show_doctor", large)
    assert main(["doctor"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("jaxtrain: this machine has too little memory (Unable to allocate 29.8")
    assert told.count("\n") == 1
