"""Local checkpoints of one process: the newest whole state is found, damaged ones are not used."""

import io
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxtrain.config.errors import UserError
from jaxtrain.parallel.sharding import flatten
from jaxtrain.run.attempts.records import newest_step
from jaxtrain.run.checkpoint import local_shards
from jaxtrain.run.loop import Loop
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import Checkpoint, load_config

STEPS = 12
SAVED = 5  # steps between two saves in the run's folder


class Crash(Exception):  # noqa: N818
    """The process ends at once, in a test."""


class Run:
    """A run that is started several times.

    Attributes:
      workdir: its folder.
      local: the local directory.
      printed: the lines of the last start.
    """

    def __init__(self, config: Path, workdir: Path, local: Path | None) -> None:
        self.config, self.workdir, self.local = config, workdir, local
        self.printed = ""

    def start(self, monkeypatch, *bindings: str, crash: int | None = None) -> Trainer:
        """Trains to the end, or until a step is due that crashes."""
        take, console = Loop._take_step, Console(file=io.StringIO(), width=400)

        def take_or_crash(self: Loop, stream, step: int, log) -> None:  # noqa: ANN001
            if step == crash:
                raise Crash
            take(self, stream, step, log)

        settings = [f"Train.steps={STEPS}", f"Train.save_every={SAVED}", "Train.log_every=1"]
        settings += ["Mesh.fsdp=4", "Mesh.tensor=1", "Checkpoint.local_interval=2"]
        if self.local is not None:
            settings.append(f"Checkpoint.local_directory={str(self.local)!r}")
        trainer = Trainer(
            load_config(self.config, [*settings, *bindings]), self.workdir, console=console
        )
        with monkeypatch.context() as patch:
            patch.setattr(Loop, "_take_step", take_or_crash)
            try:
                trainer.train()
            except Crash:
                pass
            finally:
                trainer.close()
                self.printed = console.file.getvalue()
        return trainer

    def held(self) -> list[int]:
        """Steps of the local checkpoints of all runs."""
        return sorted(int(path.parent.name) for path in self.local.glob("*/*/*/manifest.json"))

    def losses(self) -> dict[int, float]:
        lines = map(json.loads, (self.workdir / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}


def bits(trainer: Trainer) -> dict[str, bytes]:
    names, leaves, _ = flatten(trainer.state)
    return {n: np.asarray(x).tobytes() for n, x in zip(names, leaves, strict=True)}


@pytest.fixture
def run(tiny_config, tmp_path) -> Run:
    return Run(tiny_config, tmp_path / "run", tmp_path / "local")


@pytest.fixture(scope="module")
def undisturbed(tiny_config, tmp_path_factory) -> tuple[dict, dict]:
    """The last state and the losses of a run without a crash or local checkpoints."""
    run = Run(tiny_config, tmp_path_factory.mktemp("undisturbed"), None)
    with pytest.MonkeyPatch.context() as monkeypatch:
        return bits(run.start(monkeypatch)), run.losses()


def test_a_run_resumes_from_its_local_checkpoint_bit_for_bit(run, undisturbed, monkeypatch):
    run.start(monkeypatch, crash=10)
    assert run.held() == [4, 6, 8]  # the oldest goes when the next is written
    trainer = run.start(monkeypatch)
    assert "Resumed from the local checkpoint of step 8 in" in run.printed
    assert "which this run does not use" not in run.printed  # its own folder
    assert (bits(trainer), run.losses()) == undisturbed
    assert run.held() == []
    assert not (run.workdir / "checkpoints/local.json").exists()


def test_a_resume_from_a_local_checkpoint_counts_as_progress(run, monkeypatch):
    """Of a run that `supervise` restarts, and that saves nothing in its folder meanwhile."""
    run.start(monkeypatch, "Train.save_every=0", crash=7)
    assert newest_step(run.workdir) is None
    run.start(monkeypatch, "Train.save_every=0", crash=8)
    assert newest_step(run.workdir) == 6


def damage(run: Run, step: int) -> None:
    (file,) = run.local.glob(f"*/*/{step}/arrays-0.bin")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_local_file_is_not_used(run, undisturbed, monkeypatch):
    run.start(monkeypatch, crash=9)
    damage(run, 8)
    trainer = run.start(monkeypatch)
    assert re.search(
        r"checkpoint of step 8 .* does not match its digest\); it is deleted",
        run.printed,
    )
    assert "Resumed from the local checkpoint of step 6" in run.printed
    assert (bits(trainer), run.losses()) == undisturbed


# Three starts of a run; a damaged file sends a run to that folder in the fast part.
@pytest.mark.slow
def test_a_newer_checkpoint_in_the_runs_folder_is_used(run, undisturbed, monkeypatch):
    run.start(monkeypatch, crash=8)
    damage(run, 6)
    trainer = run.start(monkeypatch)
    assert "Resumed from the local" not in run.printed
    assert f"Resumed from the checkpoint of step 5 in {run.workdir}/checkpoints" in run.printed
    assert (bits(trainer), run.losses()) == undisturbed


# Three starts of a run; a damaged file is in the fast part.
@pytest.mark.slow
def test_a_wiped_directory_costs_the_steps_since_the_last_save(run, undisturbed, monkeypatch):
    run.start(monkeypatch, crash=9)
    for path in run.local.rglob("manifest.json"):
        path.unlink()
    trainer = run.start(monkeypatch)
    assert "Resumed from the checkpoint of step 5" in run.printed
    assert (bits(trainer), run.losses()) == undisturbed


# Three starts of a run; a damaged local file is in the fast part.
@pytest.mark.slow
def test_a_local_checkpoint_stands_in_for_a_damaged_one(run, undisturbed, monkeypatch):
    """Of a step that is saved in both, and where no other is left in the run's folder."""
    run.start(monkeypatch, "Train.save_every=9", crash=10)
    file = max((run.workdir / "checkpoints/9").rglob("d/*"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    trainer = run.start(monkeypatch, "Train.save_every=9")
    assert "damaged-9: inspect and delete it; a local one is used" in run.printed
    assert "Resumed from the local checkpoint of step 8" in run.printed
    assert (bits(trainer), run.losses()) == undisturbed
    assert (run.workdir / "checkpoints/9/manifest.json").exists()


@pytest.mark.slow
def test_another_mesh_reads_the_runs_folder(run, monkeypatch):
    run.start(monkeypatch, crash=9)
    run.start(monkeypatch, "Mesh.fsdp=2", "Mesh.data=4")
    assert "it was written on another mesh or number of processes" in run.printed
    assert "Resumed from the checkpoint of step 5" in run.printed
    assert sorted(run.losses()) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_another_run_with_the_same_directory_is_left_alone(run, tiny_config, monkeypatch):
    run.start(monkeypatch, crash=9)
    kept = run.held()
    other = Run(tiny_config, run.workdir.with_name("other"), run.local)
    other.start(monkeypatch)
    assert "Resumed" not in other.printed
    assert re.search(rf"also holds [\d,]+ bytes of {run.workdir} ", other.printed)
    assert sorted(other.losses()) == list(range(1, STEPS + 1))
    assert run.held() == kept
    run.start(monkeypatch)
    assert "Resumed from the local checkpoint of step 8" in run.printed


@pytest.mark.slow
def test_what_a_run_has_abandoned_is_not_found_again(run, monkeypatch):
    """It went on from the run's folder without the directory, with another learning rate."""
    run.start(monkeypatch, crash=9)
    local, run.local = run.local, None
    run.start(monkeypatch, "Optimizer.learning_rate=0.5", crash=7)
    run.local = local
    run.start(monkeypatch)
    assert "Resumed from the checkpoint of step 5" in run.printed


def test_a_failed_write_costs_one_local_checkpoint(run, undisturbed, monkeypatch):
    write = local_shards.write

    def fails_once(folder: Path, step: int, *rest: object) -> None:
        if step == 6:
            folder.mkdir()
            raise OSError(28, "No space left on device")
        write(folder, step, *rest)

    monkeypatch.setattr(local_shards, "write", fails_once)
    trainer = run.start(monkeypatch)
    assert "the local checkpoint of step 6 could not be written" in run.printed
    assert bits(trainer) == undisturbed[0]


def test_a_run_that_goes_back_leaves_no_newer_local_checkpoint(run, monkeypatch):
    run.start(monkeypatch, crash=10)
    trainer = Trainer(
        load_config(
            run.config,
            [f"Train.steps={STEPS}", "Mesh.fsdp=4", "Mesh.tensor=1",
             f"Checkpoint.local_directory={str(run.local)!r}"],
        ),
        run.workdir,
    )  # fmt: skip
    trainer._saved.rewind(7, trainer.dataset)
    assert run.held() == [4, 6]
    trainer.close()


def test_shards_are_read_as_they_were_written(tmp_path):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    spec = jax.sharding.PartitionSpec
    rng = np.random.default_rng(0)
    wanted = {
        "split": (rng.standard_normal((8, 3)).astype(np.float32), spec("fsdp")),
        "both": (rng.integers(0, 100, (4, 8)).astype(np.int8), spec("data", "fsdp")),
        "half": (jax.numpy.bfloat16(rng.standard_normal(6)), spec()),
        "scalar": (np.int32(7), spec()),
        "empty": (np.zeros((0, 4), np.float32), spec()),
    }
    arrays = {
        name: jax.device_put(value, jax.sharding.NamedSharding(mesh, where))
        for name, (value, where) in wanted.items()
    }
    local_shards.write(tmp_path / "3", 3, local_shards.copy_to_host(arrays), {}, {"a": 1})
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in arrays.items()
    }
    assert local_shards.layout_key(abstract, None) == local_shards.layout_key(arrays, None)
    assert local_shards.layout_key(arrays, None) != local_shards.layout_key(arrays, [1, 0])
    local_shards.check(tmp_path / "3", 3)
    found = local_shards.read(tmp_path / "3", 3, abstract)
    for name, (value, _) in wanted.items():
        assert found[name].dtype == np.asarray(value).dtype
        assert found[name].sharding == arrays[name].sharding
        np.testing.assert_array_equal(found[name], value)
    # Each distinct shard once, on however many devices.
    size = sum(file.stat().st_size for file in (tmp_path / "3").glob("*.bin"))
    assert size <= sum(np.asarray(value).nbytes for value, _ in wanted.values()) + 64 * 16


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"local_directory": "gs://bucket/x"}, "absolute path on each host's own disk"),
        ({"local_directory": "relative"}, "absolute path on each host's own disk"),
        ({"local_keep": 1}, "Checkpoint.local_keep=1; use at least 2"),
        ({"local_interval": 0}, "Checkpoint.local_interval=0; use at least 1"),
    ],
)
def test_invalid_settings_are_rejected(settings, expected):
    with pytest.raises(UserError, match=re.escape(expected)):
        Checkpoint(**settings)


def test_an_unset_variable_in_the_directory_is_an_error(run, monkeypatch):
    monkeypatch.delenv("NO_SUCH_DISK", raising=False)
    run.local = Path("$NO_SUCH_DISK/run")
    with pytest.raises(UserError, match="an environment variable in it is not set on this host"):
        run.start(monkeypatch)


@pytest.mark.slow
def test_moments_in_host_memory_come_back_there(run, monkeypatch):
    offload = "Offload.optimizer_state='host'"
    expected = Run(run.config, run.workdir.with_name("expected"), None)
    state = bits(expected.start(monkeypatch, offload))
    run.start(monkeypatch, offload, crash=9)
    trainer = run.start(monkeypatch, offload)
    assert "Resumed from the local checkpoint of step 8" in run.printed
    assert bits(trainer) == state
    assert run.losses() == expected.losses()
