"""Runs whose folder is in a bucket: the real gcsfs and TensorStore talk to a stand-in of it."""

import binascii
import contextlib
import hashlib
import io
import json
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest
from cluster import start_processes
from gcs_stand_in import GcsStandIn, serving

from jaxtrain import Trainer, load_config
from jaxtrain.__main__ import main
from jaxtrain.cli import parser
from jaxtrain.config.buckets import to_path
from jaxtrain.run.attempts import records
from jaxtrain.run.checkpoint import manifest, sealing
from jaxtrain.run.checkpoint.manifest import CheckpointError
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.run.commands import supervise
from jaxtrain.training.settings import Checkpoint

pytest.importorskip("gcsfs", reason="pip install 'jaxtrain[gcs]'")

TIMES = {"step_seconds", "tokens_per_second", "mfu", "goodput", "goodput_seconds"}
ATTEMPTS = {"attempts", "restarts"}
EVERY_TWO = ["-b", "Train.eval_every = 2", "-b", "Train.save_every = 2", "-b", "Train.steps = 4"]
EVERY_TWO += ["-b", "Schedule.name = 'constant'"]  # does not depend on the last step's number


@pytest.fixture(scope="module")
def gcs():
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def _everything_is_permitted(gcs):
    yield
    gcs.refuse = lambda *_: None


def lines(content: bytes) -> list[dict]:
    """metrics.jsonl without what a clock measured."""
    rows = [json.loads(line) for line in content.decode().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES | ATTEMPTS} for row in rows]


def arrays(state) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def put_folder(gcs: GcsStandIn, folder: Path, bucket: str, prefix: str) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            name = f"{prefix}/{file.relative_to(folder).as_posix()}"
            gcs.put(bucket, name, file.read_bytes())


def train(config, workdir, *more: str) -> str:
    """What a run from the command line prints; it has to end well."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["train", str(config), "--workdir", str(workdir), *EVERY_TWO, *more]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def local(tiny_config, tmp_path_factory):
    """4 steps on a disk, from text on a disk."""
    workdir = tmp_path_factory.mktemp("local")
    train(tiny_config, workdir)
    return workdir


@pytest.fixture(scope="module")
def in_bucket(gcs, tiny_config, local):
    """The same from text in a bucket, in a bucket, stopped after 2 steps and gone on with."""
    put_folder(gcs, tiny_config.parent, "data", "corpus")
    gcs.buckets["runs"] = {}
    source = ["-b", "TextData.source = 'gs://data/corpus'"]
    there_when_sealed = {}

    def note(method, bucket, name):
        if method == "POST" and name.endswith("manifest.json"):
            found = lines(gcs.read(bucket, "first/metrics.jsonl"))
            there_when_sealed[name.split("/")[2]] = [line["step"] for line in found]

    gcs.refuse = note
    train(tiny_config, "gs://runs/first", *source, "-b", "Train.steps = 2")
    at_two = gcs.names("runs", "first/checkpoints/2/")
    told = train(tiny_config, "gs://runs/first", *source)
    return "gs://runs/first", at_two, told, there_when_sealed


def test_the_commands_of_the_page_are_commands():
    page = (Path(__file__).parent.parent / "docs" / "buckets.md").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", page, re.S)
    whole = parser()
    commands = [shlex.split(line) for line in block.splitlines()]
    commands = [words[1:] for words in commands if words[0] == "jaxtrain"]
    assert len(commands) >= 4
    for words in commands:
        words = supervise.parse(words[1:]).train if words[0] == "supervise" else words
        found = whole.parse_args(words)
        assert found.workdir.startswith("gs://")
        if words[0] == "train":
            load_config(found.config, bindings=found.gin_bindings)


@pytest.mark.slow
def test_a_run_in_a_bucket_is_the_run_on_a_disk(gcs, local, in_bucket):
    name, at_two, told, _ = in_bucket
    assert "Resuming from the checkpoint of step 2 in gs://runs/first" in told
    assert lines(gcs.read("runs", "first/metrics.jsonl")) == lines(
        (local / "metrics.jsonl").read_bytes()
    )
    # TensorStore wrote the arrays there itself, and nothing touched the older checkpoint.
    assert any("/d/" in name for name in at_two)
    assert at_two == gcs.names("runs", "first/checkpoints/2/")
    here = Trainer(load_config(local / "config.gin"), local, read_only=True)
    there = Trainer(load_config(local / "config.gin"), name, read_only=True)
    assert here.steps_done == there.steps_done == 4
    for mine, its in zip(arrays(here.state), arrays(there.state), strict=True):
        np.testing.assert_array_equal(mine, its)


# Three runs; tests/test_buckets.py has every request in the fast part.
@pytest.mark.slow
def test_a_checkpoint_is_not_there_before_its_metrics(in_bucket):
    assert in_bucket[-1] == {"2": [1, 2, 2], "4": [1, 2, 2, 3, 4, 4]}


# The runs of the test before.
@pytest.mark.slow
def test_a_run_leaves_the_files_of_the_contract_in_its_bucket(gcs, in_bucket):
    names = {name.removeprefix("first/") for name in gcs.names("runs", "first/")}
    files = {"config.gin", "metrics.jsonl", "loss.png", "exit.json", "goodput.json", "goodput.png"}
    assert files <= names
    assert any(name.startswith("tensorboard/") for name in names)
    assert {"checkpoints/2/manifest.json", "checkpoints/4/manifest.json"} <= names
    assert "lock.json" not in names
    ended = json.loads(gcs.read("runs", "first/exit.json"))
    assert (ended["status"], ended["step"], ended["attempt"]) == ("done", 4, 2)
    written = [
        name for method, bucket, name in gcs.requests if (method, bucket) == ("POST", "runs")
    ]
    last = len(written) - 1 - written[::-1].index("first/exit.json")
    assert not any("tensorboard" in n or n.endswith(".png") for n in written[last:]), written[last:]
    assert "ended" in json.loads(gcs.read("runs", "first/attempts/2.json"))
    assert not Path("gs:").exists()


# The runs of the tests before.
@pytest.mark.slow
def test_eval_and_inspect_read_a_run_in_a_bucket(gcs, local, in_bucket, capsys):
    assert main(["eval", "--workdir", str(local)]) == 0
    before = {name: gcs.read("runs", name) for name in gcs.names("runs")}
    assert main(["eval", "--workdir", "gs://runs/first"]) == 0
    here, there = capsys.readouterr().out.splitlines()
    assert here == there
    assert main(["inspect", "--verify", "--workdir", "gs://runs/first"]) == 0
    assert "Verified: every array" in capsys.readouterr().out
    assert {name: gcs.read("runs", name) for name in gcs.names("runs")} == before


# The runs of the tests before.
@pytest.mark.slow
def test_a_run_copied_to_a_disk_is_whole_there(gcs, in_bucket, tmp_path):
    for name in gcs.names("runs", "first/"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gcs.read("runs", name))
    folder = tmp_path / "first" / "checkpoints" / "4"
    found = manifest.read(folder, 4)
    manifest.check(folder, found, found.files)
    victim = next(name for name in found.files if "/d/" in name)
    (folder / victim).write_bytes(bytes(len((folder / victim).read_bytes())))
    with pytest.raises(CheckpointError, match="does not match its digest"):
        manifest.check(folder, found, found.files)


def test_only_what_the_bucket_has_no_digest_of_is_read_back(gcs):
    """An object made of others has no MD5."""
    gcs.put("parts", "7/plain", b"plain")
    gcs.put("parts", "7/whole", b"whole", composed=True)
    folder = to_path("gs://parts/7")
    gcs.requests.clear()
    found = manifest.seal(folder, 7, {})
    assert found.files == {
        "plain": (5, f"md5:{hashlib.md5(b'plain').hexdigest()}"),
        "whole": (5, f"crc32:{binascii.crc32(b'whole'):08x}"),
    }
    manifest.check(folder, found, found.files)
    assert "7/plain" not in {name for _, _, name in gcs.requests}
    for name, composed in (("plain", False), ("whole", True)):
        gcs.put("parts", f"7/{name}", b"other", composed=composed)
        with pytest.raises(CheckpointError, match=f"{name} does not match its digest"):
            manifest.check(folder, found, found.files)
        gcs.put("parts", f"7/{name}", name.encode(), composed=composed)


@pytest.fixture
def copied(gcs, in_bucket):
    """The run once more, under another name, to be spoilt."""
    gcs.buckets["copy"] = {
        name: found for name, found in gcs.buckets["runs"].items() if name.startswith("first/")
    }
    return "gs://copy/first"


@pytest.mark.slow
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_it_used(gcs, copied, tiny_config):
    victim = next(n for n in gcs.names("copy", "first/checkpoints/4/") if "/d/" in n)
    gcs.put("copy", victim, gcs.read("copy", victim)[:-1] + b"?")
    told = train(tiny_config, copied)
    assert "does not match its digest" in told
    assert "Resuming from the checkpoint of step 2" in told
    assert gcs.read("copy", victim.replace("/4/", "/damaged-4/")).endswith(b"?")
    assert "first/checkpoints/4/manifest.json" in gcs.names("copy")


# Several runs; tests/test_checkpoint_killed.py kills saves on a disk in the fast part.
@pytest.mark.slow
def test_what_a_killed_save_left_is_removed(gcs, copied, local):
    del gcs.buckets["copy"]["first/checkpoints/4/manifest.json"]
    config = load_config(local / "config.gin")
    checkpoints = Checkpoints(to_path(copied), config.checkpoint)
    assert checkpoints.steps() == [2]
    assert "the remains of a save that was never finished" in checkpoints.cleaned[0]
    assert gcs.names("copy", "first/checkpoints/4/") == []
    sealing.delete(checkpoints.folder, 2)
    assert gcs.names("copy", "first/checkpoints/") == []
    checkpoints.close()


@pytest.mark.slow
def test_a_bucket_that_is_lost_costs_nothing_that_was_saved(gcs, copied, tiny_config, capsys):
    """From the moment the checkpoint of step 6 is begun, nothing can be written any more."""
    lost = []
    before = {name: gcs.read("copy", name) for name in gcs.names("copy", "first/checkpoints/")}

    def refuse(method, bucket, name):
        lost.extend([name] * ("checkpoints/6" in name))
        return 403 if lost and method == "POST" else None

    gcs.refuse = refuse
    arguments = [*EVERY_TWO, "-b", "Train.steps = 8", "-b", "Checkpoint.max_failed_saves = 1"]
    assert main(["train", str(tiny_config), "--workdir", copied, *arguments]) == 1
    told = capsys.readouterr()
    assert "the checkpoint of step 6 could not be written to gs://copy/first" in told.err
    assert "Traceback" not in told.err
    assert {name: gcs.read("copy", name) for name in before} == before
    gcs.refuse = lambda *_: None
    records.record_end(to_path(copied), 3)  # it could not say so; we, its process, are still alive
    told = train(tiny_config, copied, "-b", "Train.steps = 6")
    assert "Resuming from the checkpoint of step 4" in told


@pytest.mark.slow
def test_a_trainer_of_its_own_keeps_its_run_in_a_bucket(gcs, local):
    gcs.buckets["notebook"] = {}
    config = load_config(local / "config.gin", ["Train.steps = 2"])
    trainer = Trainer(config, "gs://notebook/run")
    trainer.train()
    assert "run/checkpoints/2/manifest.json" in gcs.names("notebook")
    found = lines(gcs.read("notebook", "run/metrics.jsonl"))
    assert found == lines((local / "metrics.jsonl").read_bytes())[: len(found)]
    assert [line["step"] for line in found] == [1, 2, 2]
    trainer.close()
    assert {"run/config.gin", "run/loss.png"} <= set(gcs.names("notebook"))


@pytest.mark.slow
def test_two_processes_write_one_run_into_a_bucket(gcs, tiny_config, tmp_path):
    gcs.buckets["pair"] = {}
    mesh = ["Mesh.data = 1", "Mesh.fsdp = 2", "Mesh.tensor = 1", "Train.steps = 2"]
    words = ["train", str(tiny_config), "--workdir", "gs://pair/run"]
    words += ["--coordinator", "{coordinator}", "--num-processes", "{count}"]
    words += ["--process-id", "{process}", *(word for one in mesh for word in ("-b", one))]
    environment = gcs.environment()
    with start_processes(2, words, folder=tmp_path, environment=environment) as processes:
        for process in processes:
            assert process.end() == 0, process.log()
    names = gcs.names("pair", "run/checkpoints/2/")
    assert {name.split("/")[4] for name in names if "ocdbt.process" in name} == {
        "ocdbt.process_0",
        "ocdbt.process_1",
    }
    checkpoints = Checkpoints(to_path("gs://pair/run"), Checkpoint(), read_only=True)
    assert checkpoints.steps() == [2]
    checkpoints.verify(2)
    checkpoints.close()
    assert [line["step"] for line in lines(gcs.read("pair", "run/metrics.jsonl"))] == [1, 2, 2]


def test_a_refused_run_leaves_nothing_in_its_bucket(gcs, tiny_config, capsys):
    gcs.buckets["none"] = {}
    wrong = ["-b", "TextData.source = '/nowhere/text'"]
    assert main(["train", str(tiny_config), "--workdir", "gs://none/run", *wrong]) == 2
    assert "/nowhere/text" in capsys.readouterr().err
    assert gcs.names("none") == []
