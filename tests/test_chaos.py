"""Runs that are killed again and again at random end as the run that never was."""

import json
import random
import signal
import stat
import threading
import time

import pytest
from survival import Runs, metrics_of, state_of, strike, trainer_of, unharmed_run

STEPS = 24
BINDINGS = [f"Train.steps = {STEPS}", "Timeouts.step = 8", "Timeouts.data = 8"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("chaos"))


@pytest.fixture(scope="module")
def unharmed(runs):
    return unharmed_run(runs, *BINDINGS)


def faults(seed: int, count: int) -> str:
    """Strikes at random processes, phases and steps, none before the first checkpoint."""
    rng = random.Random(seed)
    drawn = []
    for step in sorted(rng.sample(range(3, STEPS), count)):
        phase = rng.choice(["step", "data"] + ["save"] * (step % 2 == 0))
        action = rng.choice(["SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP", "raise"])
        event = rng.choice(["enter", "leave"])
        drawn.append(f"{rng.randrange(2)}:{event}:{phase}:{step}:{action}")
    return " ".join(drawn)


def run_to_its_end(runs, name, struck, limit_seconds):
    """Starts the same command again as long as it was stopped by a signal; how often it began."""
    for starts in range(1, 50):
        with runs.start(
            name, *BINDINGS, faults=struck, supervised=True, limit_seconds=limit_seconds
        ) as processes:
            ends = [process.end() for process in processes]
        assert ends in ([0, 0], [75, 75]), (struck, ends, processes[0].log(), processes[1].log())
        if ends == [0, 0]:
            return starts
    raise AssertionError("it never ends")


def secret_is_kept(runs, folder):
    """The token that all starts of the run used is in its file, and in no other and in no log."""
    file = folder / "attempts" / "token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_bytes().strip()
    logs = [log for logs in runs.folder.glob(f"logs-{folder.name}-*") for log in logs.iterdir()]
    files = [*logs, *(one for one in folder.rglob("*") if one.is_file())]
    assert len(logs) >= 2
    assert [one for one in files if token in one.read_bytes()] == [file]


@pytest.mark.slow_cases("17-1")
@pytest.mark.parametrize(
    ("seed", "count"),
    # Every change: a notice to process 1 alone, upon which both save the same step and go on later.
    [(17, 1), *(pytest.param(seed, 8, marks=pytest.mark.chaos) for seed in range(1, 6))],
)
def test_random_faults_leave_no_trace_in_the_result(runs, unharmed, seed, count):
    name, struck = f"struck{seed}", faults(seed, count)
    run_to_its_end(runs, name, struck, limit_seconds=120.0 * count)
    folder = runs.folder / name
    assert (state_of(folder), metrics_of(folder)) == unharmed
    secret_is_kept(runs, folder)
    hit = {mark.name for mark in (runs.folder / f"marks-{name}").iterdir()}
    assert hit, "no fault struck"


@pytest.mark.chaos
def test_a_soak_under_a_punisher_reports_its_goodput(runs, capsys):
    """Four minutes of a run whose processes are killed about every 40 s, whatever they are at."""
    rng, over = random.Random(7), threading.Event()
    kills = []
    bindings = ["Train.steps = 1000000", "Train.save_every = 20", "Train.log_every = 20"]
    with runs.start(
        "soak", *bindings, "Train.eval_every = 0", supervised=True, limit_seconds=400.0
    ) as processes:

        def punish():
            while not over.wait(rng.expovariate(1 / 40)):
                victim = trainer_of(rng.choice(processes))
                if victim is not None:
                    number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                    kills.append(number.name)
                    strike(victim, number)

        punisher = threading.Thread(target=punish)
        punisher.start()
        time.sleep(240)
        over.set()
        punisher.join()
        for process in processes:
            process.send(signal.SIGTERM)
        ends = [process.end() for process in processes]
    account = json.loads((runs.folder / "soak/goodput.json").read_text())
    step, _ = state_of(runs.folder / "soak")
    total = {}
    for attempt in account["attempts"]:
        for cause, seconds in attempt.items():
            total[cause] = total.get(cause, 0.0) + seconds
    goodput = total["step"] / sum(total.values())
    with capsys.disabled():
        shown = ", ".join(f"{cause} {seconds:.0f} s" for cause, seconds in total.items())
        told = f"soak: {len(kills)} kills, {len(account['attempts'])} attempts, step {step}"
        print(f"\n{told}, goodput {goodput:.0%} ({shown}); ends {ends}")  # noqa: T201
    assert len(kills) >= 3
    assert len(account["attempts"]) > 2
    assert step > 0
