"""Secrets stay out of files and output, and files that run code or lead elsewhere are rejected."""

import ast
import pickle  # noqa: TID251 - to make what must not be loaded
import sys
from pathlib import Path

import jax
import pytest

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.source import existing_path
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.settings import Checkpoint

CANARY = "canary-7f3a9c"
SECRETS = [
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "MY_PASSWORD",
]
PACKAGE = Path(__file__).parent.parent / "jaxtrain"


def test_no_secret_of_the_environment_is_in_any_file_or_line(
    tiny_config, tmp_path, monkeypatch, capfd
):
    for number, name in enumerate(SECRETS):
        monkeypatch.setenv(name, f"{CANARY}-{number}")
    workdir = tmp_path / "run"
    assert main(["train", str(tiny_config), "--workdir", str(workdir)]) == 0
    assert main(["inspect", "--workdir", str(workdir)]) == 0
    assert main(["doctor"]) == 0
    captured = capfd.readouterr()
    assert "Held out" in captured.out
    assert CANARY not in captured.out + captured.err
    files = [path for path in workdir.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []


@pytest.mark.parametrize("url", ["gs://user:{}@bucket/text", "https://{}@host/file.txt"])
def test_a_url_with_credentials_is_refused_and_not_repeated(url, tiny_config, tmp_path, capsys):
    with pytest.raises(UserError, match="credentials") as caught:
        existing_path("TextData.source", url.format(CANARY))
    assert CANARY not in str(caught.value)
    binding = f"TextData.source = {url.format(CANARY)!r}"
    arguments = ["train", str(tiny_config), "--workdir", str(tmp_path / "run"), "-b", binding]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert CANARY not in captured.out + captured.err
    assert not (tmp_path / "run").exists()


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return exec, (f"import sys; sys.modules[{CANARY!r}] = sys",)


def test_a_pickle_beside_the_arrays_is_never_loaded(tmp_path):
    checkpoints = Checkpoints(tmp_path, Checkpoint())
    state = {"x": jax.numpy.arange(4.0)}
    checkpoints.save(1, state, {})
    checkpoints.close()
    for name in ("state/evil.pkl", "evil.pt", "state/array_metadatas/evil.npy"):
        (tmp_path / "checkpoints/1" / name).write_bytes(pickle.dumps(Evil()))
    again = Checkpoints(tmp_path, Checkpoint(), read_only=True)
    like = {"x": jax.ShapeDtypeStruct((4,), "float32", sharding=state["x"].sharding)}
    again.restore(1, like)
    again.verify(1)
    again.close()
    assert CANARY not in sys.modules


# Durations come from clocks that only grow: these say a wall time, to people or between machines.
WALL_CLOCKS = {
    "run/attempts/records.py",
    "run/attempts/goodput.py",
    "run/attempts/slurm.py",
    "run/attempts/watchdog.py",
    "run/show/html_page.py",
    "run/metrics/files.py",
    "run/metrics/tracking.py",
}


def test_the_wall_clock_measures_nothing():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called = f"{node.value.id}.{node.attr}"
                if called in ("time.time", "time.time_ns", "datetime.datetime"):
                    found.add(str(path.relative_to(PACKAGE)))
    assert found == WALL_CLOCKS
