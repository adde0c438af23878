"""Memory that a CPU's programs free stays the process's, in blocks that glibc keeps."""

import json
import os
import subprocess
import sys

import pytest
from jax.experimental.serialize_executable import serialize

from jaxtrain import Trainer, load_config
from jaxtrain.parallel.compilation import xla_options

# Eight blocks such as XLA asks for, six times, on a thread as XLA's are.
BLOCKS = """
import ctypes, json, resource, threading
from jaxtrain.parallel.compilation import keep_memory
kept, size, found = keep_memory("cpu"), 16 * 2**20, []
library = ctypes.CDLL(None)
library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]

def use():
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [library.malloc(size) for _ in range(8)]
        for block in blocks:
            ctypes.memset(block, 1, size)
        for block in blocks:
            library.free(block)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=use)
thread.start()
thread.join()
print(json.dumps({"kept": kept, "pages": 8 * size // resource.getpagesize(), "faults": found}))
"""

# Products that are alive together.
PRODUCTS = """
import json, resource, sys, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp
from jaxtrain.parallel.compilation import keep_memory
from jaxtrain.parallel.compilation import xla_options
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
count, size, runs = map(int, sys.argv[1:])
keep_memory("cpu")

def run(x):
    products = [(x + i) @ x.T for i in range(count)]
    total = sum(product.max() for product in products)
    return sum(jnp.sin(product * total).sum() for product in products)

x = jnp.ones((size, 64)) / size
compiled = jax.jit(run, compiler_options=xla_options("cpu", 1000)).lower(x).compile()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(runs):
        jax.block_until_ready(compiled(x))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / runs

pages = compiled.memory_analysis().temp_size_in_bytes / resource.getpagesize()
print(json.dumps({"pages": pages, "faults": [faults() for _ in range(2 if runs else 0)]}))
"""


def run(program: str, *arguments: int, **environment: str):
    """What a process of its own found, and what it wrote to stderr."""
    names = ("MALLOC_", "GLIBC_TUNABLES", "TF_CPP", "XLA_FLAGS", "JAX_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**kept, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


needs_glibc = pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in os.confstr_names,
    reason="glibc's allocator is what is told to keep memory",
)


@needs_glibc
def test_what_is_freed_is_kept_unless_the_environment_chose():
    kept, _ = run(BLOCKS)
    assert kept["kept"]
    assert sum(kept["faults"][1:]) == 0
    plain, _ = run(BLOCKS, GLIBC_TUNABLES="")
    assert not plain["kept"]
    assert min(plain["faults"]) > plain["pages"] / 2


@pytest.mark.slow
@needs_glibc
def test_a_program_takes_next_to_no_fresh_pages():
    found, _ = run(PRODUCTS, 12, 1024, 150)
    assert found["pages"] > 10_000  # 40 MiB: glibc would map a single block
    # Each of XLA's threads has a heap, whose pages are new the first time.
    assert found["faults"][1] < found["pages"] / 10


def test_nothing_is_said_of_large_arrays_and_of_programs_that_no_cache_takes(tmp_path):
    """Arrays of 64 MiB. Python's warnings are errors in there; XLA's go to stderr."""
    _, said = run(PRODUCTS, 4, 4096, 0, JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    assert said == ""


def test_a_flag_of_the_user_s_has_the_size_of_blocks(monkeypatch):
    name = "xla_multiheap_size_constraint_per_heap"
    monkeypatch.setenv("XLA_FLAGS", "")
    assert name in xla_options("cpu", 1000)
    assert name not in xla_options("gpu", 1000)
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=-1")
    assert name not in xla_options("cpu", 1000)


@pytest.mark.slow
def test_a_short_run_keeps_its_program_on_disk_and_a_long_one_its_memory(monkeypatch):
    """A step of 58 MB of temporaries a device: XLA writes down programs of one block only."""
    monkeypatch.setenv("XLA_FLAGS", "")

    def written(steps: int):
        bindings = [f"Train.steps = {steps}", "Train.global_batch_size = 64"]
        lowered = Trainer(load_config("gpt_quickstart", bindings=bindings)).lower()
        return serialize(lowered.compile())

    assert written(499)
    with pytest.raises(Exception, match="Multiple temp buffer"):
        written(500)
