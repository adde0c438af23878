"""Eight simulated devices for every test, and the small runs that several tests share."""

import gc
import importlib.util
import math
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

# A user's own flags, for processes that train for long: see `optimized_environment`.
os.environ.setdefault("JAXTRAIN_TEST_XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
# Compiling dominates the suite: LLVM's optimizations of the machine code are left out, XLA's own
# passes (partitioning, fusion, memory) are not. Halves the time of the tests of the step; so does
# the older way of writing a fusion's machine code, which jaxlib 0.12 rejects as an unknown flag.
# Small programs gain nothing from several threads, neither where they run nor where they compile.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_multi_thread_eigen=false --xla_cpu_parallel_codegen_split_count=1 "
    + "--xla_cpu_use_fusion_emitters=false " * version("jaxlib").startswith("0.10.")
    + os.environ.get("XLA_FLAGS", "")
)
# SOAP's factorizations are of small matrices: OpenBLAS's threads, several for each device,
# wait for each other three times as long as they compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# The lock of libtpu gives a machine's chips to one process; here several only compile.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# Many tests compile the same programs: what one process of a session has compiled the others load.
# The folder is the session's own: nothing is left in the user's home. The first process names it
# after itself, the others inherit it.
os.environ.setdefault(
    "JAXTRAIN_TEST_CACHE", f"{tempfile.gettempdir()}/jaxtrain-tests-{os.getpid()}"
)
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["JAXTRAIN_TEST_CACHE"]
# Small programs compile as fast as they are written and read.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Where in the source an operation was made is written into every program: a tenth of the time of
# tracing and lowering, and no test reads it.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

import jax  # noqa: E402 - after the flags
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from jaxtrain.parallel.devices import offer_cpu_devices  # noqa: E402 - after the settings

offer_cpu_devices(int(os.environ.get("JAXTRAIN_TEST_DEVICES", "8")))
jax.config.update("jax_platforms", "cpu")

from jaxtrain.data.batch import Batch  # noqa: E402 - after the devices are made
from jaxtrain.nn.execution import Execution  # noqa: E402
from jaxtrain.nn.precision import Precision  # noqa: E402
from jaxtrain.parallel.mesh import Mesh, make_mesh  # noqa: E402
from jaxtrain.parallel.sharding import Accumulate, Layout, Masters  # noqa: E402
from jaxtrain.run.inference.predict import Predictor, predict  # noqa: E402
from jaxtrain.training.compiled_step import CompiledStep  # noqa: E402
from jaxtrain.training.exchange.exchange import Exchange  # noqa: E402
from jaxtrain.training.exchange.methods import exchange_with  # noqa: E402
from jaxtrain.training.guard import Guard  # noqa: E402
from jaxtrain.training.objectives.losses import Loss  # noqa: E402
from jaxtrain.training.objectives.objective import objective_named  # noqa: E402
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer  # noqa: E402
from jaxtrain.training.optimizers.schedule import Schedule, make_schedule  # noqa: E402
from jaxtrain.training.setup import Setup  # noqa: E402
from jaxtrain.training.step import Step, Transform, apply_transforms, base_step  # noqa: E402
from jaxtrain.training.transforms import (  # noqa: E402
    balance_experts,
    estimate_curvature,
    guard_update,
)

pytest_plugins = ["reporting"]

# A busy machine draws examples slowly, and no test asserts a time.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu compiles for TPUs: pip install 'jaxtrain[tpu]'",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow cases."""
    found: dict[str, set[str]] = {}  # test function -> its cases
    named: dict[str, set[str]] = {}  # ... and those that its marker names
    for item in items:
        function, _, case = item.nodeid.partition("[")
        found.setdefault(function, set()).add(case.removesuffix("]"))
        for marker in item.iter_markers("slow_cases"):
            named.setdefault(function, set()).update(marker.args)
            if case.removesuffix("]") in marker.args:
                item.add_marker(pytest.mark.slow)
    gone = {
        function: cases - found[function]
        for function, cases in named.items()
        if cases - found[function]
    }
    if gone and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"slow_cases names cases that do not exist: {gone}")


def pytest_unconfigure() -> None:
    """The session's compiled programs go with it."""
    if os.environ["JAXTRAIN_TEST_CACHE"].endswith(f"-{os.getpid()}"):
        shutil.rmtree(os.environ["JAXTRAIN_TEST_CACHE"], ignore_errors=True)


# Nor need the collector walk over a million objects of traced programs after every few thousand
# more: a tenth of the suite's time.
gc.set_threshold(50_000, 20, 50)


def pytest_collection_finish() -> None:
    """What is imported and collected stays: the collector, which each file ends with, need not walk
    over half a million objects again and again (0.4 s a file)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def programs_go_with_their_file():
    """What a file has traced and compiled no other asks for, and a worker would hold gigabytes.

    What remains, mostly modules, is frozen: later collections need not scan it.
    """
    yield
    jax.clear_caches()
    gc.collect()
    gc.freeze()


def optimized_environment() -> dict[str, str]:
    """This process's environment without the flags above: steps take a third of the time, as
    compiling takes three times as long."""
    return {**os.environ, "XLA_FLAGS": os.environ["JAXTRAIN_TEST_XLA_FLAGS"]}


def unreadable(path: Path) -> None:
    """Takes the permission to read a file or folder away; skips the test where nothing helps."""
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root may read everything")


def text_batch(
    *, rows: int, length: int, vocab_size: int, seed: int = 0, documents: int = 2
) -> Batch:
    """Random tokens, two documents a row or one, a third of the targets masked, unevenly by row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (rows, length + 1)).astype(np.int32)
    cut = rng.integers(1, length, (rows, 1))
    place = np.arange(length)[None, :]
    second = (place >= cut) & (documents == 2)
    keep = rng.random((rows, length)) < np.linspace(0.3, 1.0, rows)[:, None]
    return Batch(
        inputs=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_mask=keep.astype(np.float32),
        segment_ids=(1 + second).astype(np.int32),
        positions=np.where(second, place - cut, place).astype(np.int32),
    )


def make_layout(
    zero: int = 3,
    *,
    sequence_parallel: bool = False,
    collective_matmul: bool = False,
    accumulate: Accumulate = "shard",
    masters: Masters = "whole",
    by_rows: frozenset[tuple[str, ...]] = frozenset(),
    **sizes: int,
) -> Layout:
    """A layout on the first devices: make_layout(2, fsdp=4, tensor=2)."""
    mesh = Mesh(**{"fsdp": 1, **sizes})
    count = math.prod(sizes.values())
    placed = make_mesh(mesh, jax.devices()[:count])
    return Layout(
        placed, zero, sequence_parallel, collective_matmul, accumulate=accumulate,
        masters=masters, by_rows=by_rows,
    )  # fmt: skip


def predicted(given, model, data, logits, *, top: int, say=print) -> list:
    """What `predict` tells with these logits."""
    says = Predictor(logits=logits, embeddings=logits, numbers=logits, write=list)
    objective = objective_named(model.objective)
    return list(predict(given, model, data, says, objective=objective, top=top, report=say))


def make_step(
    model, layout: Layout, *, guard=None, curvature=None, bias_speed=None, **changes
) -> Step:
    """A float32 step with AdamW; `changes` replace fields of its setup."""
    schedule = make_schedule(Schedule(name="constant"), 1e-2, 100)
    setup = Setup(
        build=model.build,
        objective=objective_named(model.objective).of(model),
        optimizer=make_optimizer(Optimizer(learning_rate=1e-2), schedule),
        schedule=schedule,
        layout=layout,
        precision=Precision(compute="float32"),
        loss=Loss(),
        execution=Execution(kernel="reference"),
    ).replace(**changes)
    guard = Guard() if guard is None else guard
    transforms = []
    if curvature is not None:
        transforms.append(estimate_curvature(curvature))
    if bias_speed is not None:
        transforms.append(balance_experts(bias_speed))
    if guard.in_step or setup.precision.loss_scale == "dynamic":
        transforms.append(guard_update(guard))
    return apply_transforms(base_step, *transforms)(setup)


def transformed(step: Step, transform: Transform) -> Step:
    """The step with a transform around it."""
    return transform(step.build)(step.setup)


def with_exchange(settings: Exchange, step: Step) -> Step:
    """The step whose replicas agree as the settings say."""
    return transformed(step, exchange_with(settings))


def lower_step(program: Step, batch: Batch) -> jax.stages.Lowered:
    """The train step for batches like this one, lowered from shapes alone: no array is made."""
    with program.setup.layout.active():
        return CompiledStep(program).lower(batch)


def compile_step(program: Step, batch: Batch) -> CompiledStep:
    """The train step compiled for batches like this one; another program would be rejected."""
    step = CompiledStep(program)
    with program.setup.layout.active():
        step.compile(batch)
    return step


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """The eight simulated devices."""
    assert jax.device_count() == 8
    return jax.devices()


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory) -> Path:
    """A .gin file that trains a tiny GPT on a few documents in seconds."""
    folder = tmp_path_factory.mktemp("tiny")
    rng = np.random.default_rng(0)
    words = ["def", "return", "x", "y", "(", ")", ":", "\n    ", "\n", "sum", "=", "0", "1"]
    for number in range(24):
        text = " ".join(rng.choice(words, 400))
        (folder / f"document{number:02}.txt").write_text(text)
    file = folder / "tiny.gin"
    file.write_text(
        f"""
Train.model = @GPT()
Train.data = @TextData()
Train.steps = 8
Train.global_batch_size = 8
Train.log_every = 1
Train.eval_batches = 2
GPT.vocab_size = 256
GPT.num_layers = 2
GPT.embed_dim = 32
GPT.num_heads = 4
GPT.context_length = 32
TextData.source = {str(folder)!r}
TextData.sequence_length = 32
Mesh.data = 2
Mesh.fsdp = 2
Mesh.tensor = 2
Precision.compute = 'float32'
Optimizer.learning_rate = 0.01
"""
    )
    return file
