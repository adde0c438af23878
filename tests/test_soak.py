"""A long run's memory, threads and files stay what they were: a soak, and what it depends on."""

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from jaxtrain.run import garbage
from jaxtrain.run.garbage import ARENA_VARIABLES, LONG_RUN, Garbage

STEPS = 20_000
CONFIG = f"""
Train.model = @GPT()
Train.data = @TextData()
Train.steps = {STEPS}
Train.global_batch_size = 8
Train.log_every = 20
Train.eval_every = 200
Train.eval_batches = 2
Train.save_every = 20
GPT.vocab_size = 256
GPT.num_layers = 1
GPT.embed_dim = 16
GPT.num_heads = 2
GPT.context_length = 16
TextData.source = 'synthetic'
TextData.sequence_length = 16
Mesh.fsdp = 2
Precision.compute = 'float32'
"""


@pytest.fixture
def nothing_frozen():
    """As in a process that is no test's."""
    before = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if before:
        gc.freeze()


def leave_a_cycle() -> weakref.ref:
    class Thing:
        pass

    thing = Thing()
    thing.itself = thing
    return weakref.ref(thing)


def test_what_was_there_is_left_alone_and_what_a_run_leaves_is_freed(nothing_frozen):
    with Garbage(LONG_RUN) as garbage:
        before = leave_a_cycle()
        garbage.collect()  # not yet: the step is not compiled
        assert before() is not None
        garbage.settle()
        assert before() is None
        assert gc.get_freeze_count() > 10_000
        after = leave_a_cycle()
        garbage.collect()
        assert after() is None
        with Garbage(LONG_RUN) as inner:  # somebody froze them already: they stay so
            inner.settle()
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_a_short_run_is_left_to_python(nothing_frozen):
    with Garbage(LONG_RUN - 1) as garbage:
        garbage.settle()
        cycle = leave_a_cycle()
        garbage.collect()
        assert cycle() is not None
        assert gc.get_freeze_count() == 0


def test_a_start_is_scanned_rarely_and_a_run_as_often_as_python_does(monkeypatch):
    thresholds = gc.get_threshold()
    monkeypatch.setattr(garbage, "_USUAL", (700, 10, 10))
    try:
        garbage.collect_rarely()
        assert gc.get_threshold()[0] > 10_000
        with Garbage(LONG_RUN - 1) as run:
            run.settle()
        assert gc.get_threshold() == (700, 10, 10)
        gc.set_threshold(5_000, 5, 5)  # a caller's own stays
        with Garbage(LONG_RUN - 1) as run:
            run.settle()
        assert gc.get_threshold() == (5_000, 5, 5)
    finally:
        gc.set_threshold(*thresholds)


# Threads that all hold memory at once, each from an arena where there are enough of them.
MANY_THREADS = """
import ctypes, os, sys, threading
from jaxtrain.run.garbage import share_arenas
share_arenas()
libc, threads = ctypes.CDLL(None), 64 * os.cpu_count()
libc.malloc.restype = ctypes.c_void_p
all_there = threading.Barrier(threads)
def hold():
    libc.malloc(100_000)
    all_there.wait()
those = [threading.Thread(target=hold) for _ in range(threads)]
for one in those: one.start()
for one in those: one.join()
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


def arenas(folder: Path, **environment: str) -> int:
    """How many arenas glibc says that so many threads were given."""
    variables = {name: x for name, x in os.environ.items() if name not in ARENA_VARIABLES}
    subprocess.run(
        [sys.executable, "-c", MANY_THREADS, folder / "arenas.xml"],
        env=variables | environment,
        check=True,
    )
    return (folder / "arenas.xml").read_text().count("<heap nr=")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's arenas")
def test_threads_share_an_arena_a_core_unless_the_user_says_otherwise(tmp_path):
    cores = os.cpu_count() or 1
    assert arenas(tmp_path) <= max(cores, 2)
    assert arenas(tmp_path, MALLOC_ARENA_MAX=str(4 * cores)) == 4 * cores


# Blocks of which only every thousandth stays: the free ones between them are of use to nobody else.
HOLES = """
import ctypes, os
from jaxtrain.run.garbage import LONG_RUN, Garbage
libc, size = ctypes.CDLL(None), 1000
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def held():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
blocks = [libc.malloc(size) for _ in range(100_000)]
for block in blocks: ctypes.memset(block, 1, size)
with Garbage(LONG_RUN) as garbage:
    garbage.settle()
    for number, block in enumerate(blocks):
        if number % 1000 < 999: libc.free(block)
    before = held()
    garbage.collect()
    print((before - held()) / (size * len(blocks)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc_trim")
def test_what_evaluations_and_saves_free_is_given_back():
    words = [sys.executable, "-c", HOLES]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert float(done.stdout) > 0.9


# Blocks of memory that Python holds after each of 24 saves of 16 arrays.
SAVES = """
import gc, sys
import jax.numpy as jnp
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.settings import Checkpoint
arrays = {f"array_{i}": jnp.arange(8.0) for i in range(16)}
checkpoints = Checkpoints(sys.argv[1], Checkpoint(keep=1))
for step in range(24):
    checkpoints.save(step, arrays, {})
    checkpoints.wait()
    gc.collect()
    print(sys.getallocatedblocks())
checkpoints.close()
"""


# Saves and restores in a process of its own, again and again.
@pytest.mark.slow
def test_a_save_leaves_no_more_python_objects_than_tensorstore_leaks(tmp_path):
    """TensorStore 0.1.86 leaks 4 objects an array and about 280 a save (docs/reliability.md).

    In a process of its own: what other tests left running allocates between two counts.
    """
    words = [sys.executable, "-c", SAVES, tmp_path / "run"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    left = [int(line) for line in done.stdout.split()]
    assert left[-1] - left[11] < 12 * (6 * 16 + 320)


def held(process: int) -> tuple[float, int, int]:
    """Megabytes, threads and open files of a process."""
    folder = Path("/proc") / str(process)
    pages = int((folder / "statm").read_text().split()[1])
    megabytes = pages * os.sysconf("SC_PAGESIZE") / 1e6
    return megabytes, len(os.listdir(folder / "task")), len(os.listdir(folder / "fd"))


@pytest.mark.chaos
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says it in /proc")
def test_a_run_of_20000_steps_ends_with_what_it_held_at_step_1000(tmp_path, capsys):
    (tmp_path / "soak.gin").write_text(CONFIG)
    words = ["train", "soak.gin", "--simulate-devices", "2", "--workdir", "run"]
    log = (tmp_path / "log").open("w")
    # The first run of a configuration, whatever other tests have left compiled.
    first = os.environ | {"JAXTRAIN_CACHE": str(tmp_path / "cache")}
    first.pop("JAX_COMPILATION_CACHE_DIR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", *words], cwd=tmp_path, stdout=log, stderr=log, env=first
    )
    metrics, seen = tmp_path / "run" / "metrics.jsonl", {}
    try:
        while process.poll() is None:
            step = last_step(metrics)
            for begin, end in ((1000, 2000), (STEPS - 1000, STEPS)):
                if begin <= step < end:
                    seen.setdefault(begin, []).append(held(process.pid))
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
        log.close()
    assert process.returncode == 0, (tmp_path / "log").read_text()[-2000:]
    assert all(len(samples) >= 10 for samples in seen.values()), seen
    # Pools begin threads as they are needed: in the end no more wait than once were at work.
    early, late = (
        [at(values) for at, values in zip(by, zip(*seen[begin], strict=True), strict=True)]
        for begin, by in zip(
            sorted(seen),
            ((statistics.median, max, min), (statistics.median, min, min)),
            strict=True,
        )
    )
    with capsys.disabled():
        names = ("megabytes", "threads", "files")
        told = ", ".join(f"{n} {a:g} -> {b:g}" for n, a, b in zip(names, early, late, strict=True))
        print(f"\nsoak of {STEPS} steps: {told}")  # noqa: T201
    for before, after in zip(early, late, strict=True):
        assert after <= 1.01 * before, (early, late)


def last_step(metrics: Path) -> int:
    """The last whole line's step; 0 before there is one."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 2000))
        lines = file.read().decode().split("\n")[:-1]
    return json.loads(lines[-1])["step"] if lines and lines[-1].startswith("{") else 0
