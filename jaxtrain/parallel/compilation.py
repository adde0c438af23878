"""XLA options by platform, and the persistent compilation cache."""

import contextlib
import ctypes
import hashlib
import math
import mmap
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jaxlib
from jaxlib import utils as jaxlib_utils

from jaxtrain.config.files import cache_folder

_Result = TypeVar("_Result")

# For a block of temporary buffers with more than one array. Programs of one block stay in the cache
# of compiled programs; XLA cannot serialize those of several.
BLOCK_BYTES = 31 * 2**20

# mallopt's options (glibc's malloc.h) and their values. Blocks up to 32 MiB, glibc's limit, are not
# memory-mapped; the free end of a heap is not returned; and a thread's heap, of 64 MiB, stays even
# if it is empty, since it is released only if that much is free in the previous heap.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_TOP_PAD = -3, -1, -2
_KEPT = {_M_MMAP_THRESHOLD: 32 * 2**20, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 64 * 2**20}
_WARNING, _ERROR = "1", 2  # of XLA's log


def keep_memory(platform: str) -> bool:
    """Make malloc keep memory that programs on CPUs free.

    If glibc's `MALLOC_*` or `GLIBC_TUNABLES` are set, nothing is changed. Two
    warnings about programs of several blocks are suppressed: XLA's log of every array above
    BLOCK_BYTES, and with it its other warnings, unless `TF_CPP_MIN_LOG_LEVEL` is set to another
    level than JAX's own; and JAX's that such a program cannot be cached.

    Args:
      platform: of the devices: "cpu", "gpu" or "tpu".

    Returns:
      whether memory is kept: False without glibc.
    """
    if platform != "cpu":
        return False
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", _WARNING) == _WARNING:
        jaxlib_utils.absl_set_min_log_level(_ERROR)
    unwritten = "Error writing persistent compilation cache entry.*Multiple temp buffer"
    warnings.filterwarnings("ignore", message=unwritten, category=UserWarning)
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return all(library.mallopt(option, value) for option, value in _KEPT.items())


# Seconds that a simulated device waits for another in a collective until XLA logs it, and from then
# on until it ends the process with SIGABRT. The defaults of 20 and 40 are too short for uneven or
# large devices on a busy laptop. A run's watchdog reports a hang long before: see `Timeouts`.
_COLLECTIVE_TIMEOUTS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 10 * 60,
    "xla_cpu_collective_call_terminate_timeout_seconds": 24 * 60 * 60,
}


def extend_collective_timeouts() -> None:
    """Let XLA wait hours for a slow simulated device; call before anything opens the backend.

    Timeouts in `XLA_FLAGS` are not changed.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    more = [
        f"--{name}={seconds}"
        for name, seconds in _COLLECTIVE_TIMEOUTS.items()
        if name not in flags and _has_flag(name)
    ]
    if more:
        os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *more])


def _has_flag(name: str) -> bool:
    """Whether this jaxlib has an XLA flag; an unknown one in XLA_FLAGS ends the process."""
    for library in Path(jaxlib.__file__).parent.glob("*jax_common*"):
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return content.find(name.encode()) >= 0
    return False


# XLA's options for training and evaluation, each with what was measured in benchmarks/history/.
_XLA_OPTIONS: dict[str, dict[str, str]] = {
    "cpu": {
        # XLA's own default without YNNPACK's convolutions: with XLA's, a step of ResNet-20 takes
        # three quarters of the time. Matmuls and reductions stay YNNPACK's.
        "xla_cpu_experimental_ynn_fusion_type": (
            "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
        ),
    },
}

# By `jax.Device.device_kind`. libtpu's collectives delay the matmuls around them on v5p and v6e,
# whose SparseCores can run them concurrently with matmuls, as TPU7x's do by default: published
# recipes have these flags (MaxText's `xla_flags_library.py`), the first six for what is moved, the
# others for how. In compiled programs all of ZeRO 3's collectives are then overlapped but its last
# reductions. Their flag for all-reduces is left out: with it libtpu 0.0.42 aborts
# (offload_collective_ strategies.cc) on Llama 8B over v5p:4x4x4.
_SPARSE_CORES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    # Along two and three directions of the torus libtpu otherwise all-reduces and slices,
    # and along three it gathers by an all-reduce of zeros: twice the traffic, and Llama 8B on
    # v5p:4x4x4 has no gather or scatter left.
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_disable_megacore_partitioning": "true",
    "xla_sc_enable_instruction_fusion": "false",
}
# By default libtpu's all-to-all is synchronous. With this flag it schedules the experts'
# overlapping the matmuls of another part, also in the branches of pipelines (published recipes have
# it too); on other chips it has not been tried.
_ALL_TO_ALL = {"xla_tpu_enable_async_all_to_all": "true"}
_V5P, _V6E = ("TPU v5", "TPU v5p"), ("TPU v6 lite", "TPU v6e")
_OF_DEVICES: dict[str, dict[str, str]] = dict.fromkeys((*_V5P, *_V6E), _SPARSE_CORES | _ALL_TO_ALL)

# The same for train steps of long runs, which may take longer to compile: runs
# of at least `_LONG_RUN` steps.
_OF_LONG_RUNS: dict[str, dict[str, str]] = {
    # Temporary buffers in blocks that the process keeps: a step of 60 to 400 ms takes 0.70 to 0.89
    # of the time (see `allocation`), but 2 to 5 s of compilation per launch are not cached.
    "cpu": {"xla_multiheap_size_constraint_per_heap": str(BLOCK_BYTES)},
    # How much of the vector memory a matmul's tiles may fill: three quarters of v5p's and TPU7x's,
    # where libtpu allows 16 or 32 MiB. By its own estimate a step takes 3 to 20% fewer cycles;
    # compilation takes 2 to 5 times as long. Nothing changes on v4.
    "tpu": {"xla_tpu_scoped_vmem_limit_kib": str(48 * 1024)},
}
_LONG_RUN = {"cpu": 500, "tpu": 10_000}
# v6e's matrix units are four times as big and its vector memory twice.
_OF_LONG_RUNS_ON = dict.fromkeys(_V6E, {"xla_tpu_scoped_vmem_limit_kib": str(96 * 1024)})


# Of programs that run once, such as the initialization of a state: less optimized machine code, by
# XLA's older emitters. GoogLeNet's compiles in a quarter of the time, the quickstart's in less than
# half; 124 million parameters are drawn as fast. Numbers differ by rounding.
_OF_ONE_RUN = {
    "cpu": {"xla_backend_optimization_level": "1", "xla_cpu_use_fusion_emitters": "False"},
}


def run_once(
    function: Callable[..., _Result], platform: str, *arguments: Any, **how: Any
) -> _Result:
    """Call a jitted function once: compiled soon, rather than into the fastest code.

    Options that `XLA_FLAGS` sets win; one that this version's compiler lacks is left out.

    Args:
      function: is jitted.
      platform: of the devices: "cpu", "gpu" or "tpu".
      arguments: of the function.
      how: arguments of `jax.jit`.
    """
    options = _not_in_environment(_OF_ONE_RUN.get(platform, {}))
    known = with_known_options(options, _compile_nothing, lambda line: None)
    return jax.jit(function, compiler_options=known, **how)(*arguments)


def xla_options(platform: str, steps: int = 0, kind: str = "") -> dict[str, str]:
    """Return `compiler_options` for `jax.jit`, without options that the environment sets itself.

    XLA_FLAGS and, for TPUs, LIBTPU_INIT_ARGS win.

    Args:
      platform: of the devices: "cpu", "gpu" or "tpu".
      steps: for a train step: of the whole run, so that each launch has the same program.
      kind: `jax.Device.device_kind`.
    """
    options = _XLA_OPTIONS.get(platform, {}) | _OF_DEVICES.get(kind, {})
    if steps >= _LONG_RUN.get(platform, math.inf):
        options = options | _OF_LONG_RUNS[platform] | _OF_LONG_RUNS_ON.get(kind, {})
    return _not_in_environment(options)


def _not_in_environment(options: Mapping[str, str]) -> dict[str, str]:
    chosen = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    chosen_names = set(re.findall(r"--(\w+)", chosen))
    return {name: value for name, value in options.items() if name not in chosen_names}


def options_of_run(
    platform: str, kind: str, steps: int, report: Callable[[str], object]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the `xla_options` of train step and evaluation that this version's compiler has."""
    of_steps = with_known_options(xla_options(platform, steps, kind), _compile_nothing, report)
    options = xla_options(platform, kind=kind)
    return of_steps, {name: value for name, value in options.items() if name in of_steps}


def _compile_nothing(options: dict[str, str]) -> dict[str, str]:
    if options:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    return options


def with_known_options(
    options: Mapping[str, str],
    compiled: Callable[[dict[str, str]], _Result],
    report: Callable[[str], object],
) -> _Result:
    """Compile with the options that this version's compiler supports.

    Compilers remove options without notice, and reject a program with an unknown option.

    Args:
      options: as in `xla_options`.
      compiled: compiles with options.
      report: called with a line for each missing option.
    """
    left = dict(options)
    while True:
        try:
            return compiled(left)
        except jax.errors.JaxRuntimeError as error:
            missing = re.search(r"No such compile option: '(\w+)'", str(error))
            if missing is None or left.pop(missing.group(1), None) is None:
                raise
            report(
                f"this version's compiler has no option {missing.group(1)}: compiled without it "
                "(docs/performance.md, XLA flags)"
            )


def keep_compiled_programs() -> Path | None:
    """Enable JAX's persistent compilation cache, shared by the processes of this machine.

    JAX's own settings win: `JAX_COMPILATION_CACHE_DIR` names another folder, and
    `JAX_ENABLE_COMPILATION_CACHE=false` disables it. Call before anything is compiled.

    Returns:
      the folder, `$JAXTRAIN_CACHE/compiled/<processor>`; None where JAX's settings chose.
    """
    settings: Any = jax.config  # whose attributes are created at run time
    chosen = "JAX_COMPILATION_CACHE_DIR" in os.environ or settings.jax_compilation_cache_dir
    if chosen or not settings.jax_enable_compilation_cache:
        return None
    folder = cache_folder("compiled") / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # no writable folder: compile again
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # JAX caches programs that took a second to compile; a launch has a hundred faster ones,
        # together as long as the step's, and a few kilobytes each.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


def _processor() -> str:
    """Return this machine's instruction set, as a folder name.

    JAX's key says "cpu" for every processor, and homes are shared: a program for one may hold
    instructions that another lacks (https://github.com/jax-ml/jax/issues/38445).
    """
    described = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = [line for line in lines if line.startswith(("flags", "Features"))]
        described += features[0] if features else ""
    return f"{platform.machine()}-{hashlib.sha256(described.encode()).hexdigest()[:8]}"
