"""Whole runs of several processes, struck by faults, end as they should and lose nothing.

Every run is `jaxtrain train` as users start it, in real processes on loopback; what is compared is
the final state's fingerprint, array by array, with that of a run that nothing happened to.
"""

import contextlib
import json

import pytest
from cluster import start_processes

TINY = """
Train.model = @GPT()
Train.data = @TextData()
Train.steps = 8
Train.global_batch_size = 8
Train.log_every = 1
Train.eval_every = 4
Train.eval_batches = 3
Train.save_every = 2
GPT.vocab_size = 256
GPT.num_layers = 1
GPT.embed_dim = 16
GPT.num_heads = 2
GPT.context_length = 16
TextData.source = {text!r}
TextData.sequence_length = 16
Mesh.data = 2
Mesh.fsdp = 2
Precision.compute = 'float32'
Optimizer.learning_rate = 0.01
Deadlines.minimum_seconds = 2
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A .gin file of a run that takes a second besides starting."""
    folder = tmp_path_factory.mktemp("survival")
    text = folder / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number:02}.txt").write_text(f"document {number} " * 40)
    file = folder / "tiny.gin"
    file.write_text(TINY.format(text=str(text)))
    return file


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Where all these runs find their compiled programs again."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def runs(config, compiled, tmp_path):
    """Starts the processes of a run; `faults` as in faulty.py, each once in that workdir."""

    @contextlib.contextmanager
    def start(workdir, *bindings, count=2, faults="", supervised=False, environment=None):
        marks = tmp_path / f"marks-{workdir}"
        marks.mkdir(exist_ok=True)
        words = ["train", str(config), "--workdir", str(tmp_path / workdir)]
        words += ["--simulate-devices", "4"]
        for binding in bindings:
            words += ["-b", binding]
        program = (
            "import os, sys, faulty\n"
            f"words = {words!r}\n"
            "if os.environ['COUNT'] != '1':\n"
            "    words += ['--coordinator', os.environ['COORDINATOR'], '--num-processes',\n"
            "              os.environ['COUNT'], '--process-id', os.environ['PROCESS']]\n"
            "sys.exit(faulty.main(words, supervised=" + repr(supervised) + "))\n"
        )
        variables = {
            "FAULTS": faults,
            "MARKS": str(marks),
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            **(environment or {}),
        }
        logs = tmp_path / f"logs-{workdir}-{len(list(tmp_path.iterdir()))}"
        with start_processes(
            count, program, folder=logs, devices_per_process=4 // count, environment=variables
        ) as processes:
            yield processes

    return start


def end_of(folder):
    return json.loads((folder / "exit.json").read_text())


def state_of(folder):
    """The newest checkpoint's step, and each array's fingerprint."""
    steps = [int(path.parent.name) for path in folder.glob("checkpoints/*/manifest.json")]
    manifest = json.loads((folder / f"checkpoints/{max(steps)}/manifest.json").read_text())
    leaves = manifest["manifest"]["leaves"]
    return max(steps), {name: leaf["fingerprint"] for name, leaf in leaves.items()}


def metrics_of(folder):
    """Losses and evaluations by step, each once; nothing that a clock decides."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = {}
    for line in lines:
        for name in ("loss", "eval_loss"):
            if name in line:
                assert (line["step"], name) not in kept, "a step stands twice"
                kept[line["step"], name] = line[name]
    return kept


@pytest.fixture(scope="module")
def unharmed(config, compiled, tmp_path_factory):
    """The final state and metrics of the run that nothing happens to, on two processes."""
    folder = tmp_path_factory.mktemp("unharmed")
    start = runs.__wrapped__(config, compiled, folder)
    with start("run") as processes:
        assert [process.end() for process in processes] == [0, 0], processes[0].log()
    return state_of(folder / "run"), metrics_of(folder / "run")


POINTS = {
    "while compiling": "1:enter:compile:1:SIGTERM",
    "in a step": "1:enter:step:3:SIGTERM",
    "evaluating": "0:enter:evaluation:4:SIGTERM",
    "saving, twice": "1:enter:save:4:SIGTERM 1:leave:save:4:SIGTERM",
}


@pytest.mark.parametrize("point", POINTS)
def test_a_signal_to_one_process_saves_the_same_step_in_all(point, runs, unharmed, tmp_path):
    with runs("run", faults=POINTS[point]) as processes:
        assert [process.end() for process in processes] == [75, 75], processes[0].log()
        struck = int(POINTS[point][0])
        assert "STRUCK" in processes[struck].log()
    ended = end_of(tmp_path / "run")
    assert ended["status"] == "preempted"
    assert f"SIGTERM on process {struck}" in ended["reason"]
    step, _ = state_of(tmp_path / "run")
    assert step == ended["step"] < 8
    with runs("run") as processes:
        assert [process.end() for process in processes] == [0, 0], processes[0].log()
    assert (state_of(tmp_path / "run"), metrics_of(tmp_path / "run")) == unharmed
    assert end_of(tmp_path / "run") == {
        "status": "done", "reason": "trained to step 8", "step": 8, "attempt": 2
    }  # fmt: skip


LOSSES = {
    "a worker in a step": "1:enter:step:5:SIGKILL",
    "process 0 in a save": "0:leave:save:4:SIGKILL",
    "a worker frozen": "1:enter:step:5:SIGSTOP",
    "an error on a worker": "1:enter:step:5:raise",
    "a worker that hangs": "1:enter:data:5:hang",
}
WORDS = {
    "a worker in a step": "process 1 (host",
    "process 0 in a save": "process 0 (host",
    "a worker frozen": "process 1 (host",
    "an error on a worker": "struck at enter step 5",
    "a worker that hangs": "process 1",
}


@pytest.mark.parametrize("loss", LOSSES)
def test_supervised_processes_join_again_and_lose_nothing(loss, runs, unharmed, tmp_path):
    """Whatever ends one process ends all, with the reason on disk; the restart goes on."""
    bindings = ["Deadlines.step = 6", "Deadlines.data = 6"]
    with runs("run", *bindings, faults=LOSSES[loss], supervised=True) as processes:
        assert [process.end() for process in processes] == [0, 0], processes[0].log()
    folder = tmp_path / "run"
    assert (state_of(folder), metrics_of(folder)) == unharmed
    assert end_of(folder)["attempt"] == 2
    reasons = [
        json.loads(file.read_text())["reason"] for file in folder.glob("attempts/reason-1-*")
    ]
    first = json.loads((folder / "attempts/1.json").read_text())["exit"]
    assert any(WORDS[loss] in told for told in [*reasons, first]), [reasons, first]
    if "SIGKILL" not in LOSSES[loss] and "raise" not in LOSSES[loss]:
        stacks = "".join(file.read_text() for file in folder.glob("attempts/stacks-1-*.txt"))
        assert "train.py" in stacks
