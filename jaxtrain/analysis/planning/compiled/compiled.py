"""Compilation of the train step for a target machine, and the cache of its results."""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.analysis.planning.compiled.placement import find_misplaced
from jaxtrain.analysis.planning.machines.targets import (
    Target,
    compiler_options,
    native_stderr_kept,
    target_devices,
)
from jaxtrain.analysis.planning.textbook.state_bytes import argument_bytes
from jaxtrain.config import files
from jaxtrain.config.errors import UserError
from jaxtrain.parallel.compilation import with_known_options, xla_options
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training import layouts
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.compose import compose
from jaxtrain.training.layouts import rows_held
from jaxtrain.training.settings import Config

# Options for libtpu in addition to a run's own (figures: docs/design/planning_model.md).
_QUICK = {"exec_time_optimization_effort": -1.0}
# XLA finds the tiles of some matmuls, mostly small ones, only by autotuning on a GPU. Without one
# it fails with these messages: jaxlib 0.10, and 0.11.
_NO_TILES = ("output tile sizes", "No supported config found for HLO")
_WITHOUT_TILES = (
    "XLA cannot choose the tiles of a matmul without a GPU to autotune on: compiled with "
    "cuBLAS for all matmuls (xla_gpu_enable_triton_gemm=false)"
)
# An instruction such as "%fusion.178.remat2 = ".
_REPEATED = re.compile(r"^ *(?:ROOT )?%?[\w.-]+\.remat[\w.]* = ", re.MULTILINE)
_FORMAT = 1
_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The result of compiling a train step for a target.

    Attributes:
      argument_bytes: state and batch on one device, including tile padding.
      temp_bytes: memory that the program reserves in addition; None if the compiler failed without
        reporting it.
      live_bytes: peak live part of it; None if the compiler does not report it. A TPU's compiler
        reserves more if there is room, for overlap.
      unaliased_bytes: outputs that do not alias an argument.
      host_bytes: bytes in host memory.
      error: the compiler's message if the program does not fit into memory.
      text: HLO text of the scheduled program; "" if it did not fit.
      warnings: warnings of the partitioner about wasted work, and arrays of the state whose
        sharding differs from the layout's.
      seconds: compile time.
      cached: whether an earlier plan compiled it.
    """

    argument_bytes: int
    temp_bytes: int | None
    live_bytes: int | None
    unaliased_bytes: int
    host_bytes: int
    error: str | None
    text: str
    warnings: tuple[str, ...]
    seconds: float
    cached: bool = False

    @property
    def repeated(self) -> int:
        """Number of operations that the compiler rematerializes by itself to save memory, by the
        names that XLA gives them."""
        return len(_REPEATED.findall(self.text))


def cache_folder() -> Path:
    """Return the folder of compiled plans and compiler messages."""
    return files.cache_folder("plans")


def target_layout(config: Config, target: Target) -> Layout:
    """Return the layout of a configuration on the (compile-only) devices of a target.

    Raises:
      UserError: the compiler of the target is not installed, or the mesh does not fit it.
    """
    slices = 1
    if target.chip.kind == "tpu":
        for count in config.mesh.dcn.values():
            slices *= count
    return layouts.layout(config, target_devices(target, slices=slices))


def lower(
    config: Config, layout: Layout, options: Mapping[str, str] | None = None
) -> jax.stages.Lowered:
    """Lower the same step that `jaxtrain train` runs, from shapes, without creating arrays."""
    step = CompiledStep(compose(config, layout), options)
    with layout.active():
        return step.lower(config.train.data.abstract_batch(rows_held(config, layout)))


def compile_step(
    config: Config, layout: Layout, target: Target, *, thorough: bool = False
) -> Compiled:
    """Compile the step of a layout from `target_layout`, or read it from the cache.

    Args:
      config: the configuration.
      layout: from `target_layout`.
      target: the machine.
      thorough: whether a TPU's compiler uses the full effort of a run; otherwise it compiles
        about ten times as fast, and memory differs by a few percent.

    Raises:
      UserError: the compiler fails with a bug of its own.
    """
    options = options_of(config, layout)
    more: Any = compiler_options(target)
    if target.chip.kind == "tpu" and not thorough:
        more |= _QUICK
    noticed: list[str] = []

    def compile_with(known: dict[str, str]) -> jax.stages.Compiled:
        step = lowered if known == options else lower(config, layout, known)
        try:
            return step.compile(more)
        except jax.errors.JaxRuntimeError as error:
            if not any(words in str(error) for words in _NO_TILES):
                raise
        noticed.append(_WITHOUT_TILES)
        return step.compile(more | {"xla_gpu_enable_triton_gemm": False})

    with native_stderr_kept() as noise:
        lowered = lower(config, layout, options)
        key = _key(lowered, target, layout, {**options, **more})
        found = _read(key)
        if found is None:
            started = time.perf_counter()
            try:
                compiled = with_known_options(options, compile_with, lambda missing: None)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    why = str(error).splitlines()[0][:300]
                    raise UserError(
                        f"target {target.name!r}: its compiler crashes on this step: {why}; "
                        "use plan --no-compile for the closed-form estimate"
                    ) from error
                found = _out_of_memory(
                    str(error), argument_bytes(config, layout).total, time.perf_counter() - started
                )
            else:
                seconds = time.perf_counter() - started
                found = _facts(config, layout, target, compiled, noise(), seconds)
                found = dataclasses.replace(found, warnings=(*found.warnings, *noticed))
            _write(key, found, noise())
    return found


def options_of(config: Config, layout: Layout) -> dict[str, str]:
    """Return XLA's options for the step of a run on the devices of a layout from
    `target_layout`."""
    assert isinstance(layout.mesh, jax.sharding.Mesh), "devices, which have their options"
    device = layout.mesh.devices.flat[0]
    return xla_options(device.platform, config.train.steps, device.device_kind)


def _facts(
    config: Config,
    layout: Layout,
    target: Target,
    compiled: jax.stages.Compiled,
    compiler_log: str,
    seconds: float,
) -> Compiled:
    stats: Any = compiled.memory_analysis()
    arguments = stats.argument_size_in_bytes
    host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
    elsewhere = [
        f"{one.name} enters {one.way} as {one.actual}, where the layout has {one.intended}"
        for one in find_misplaced(compose(config, layout), compiled)
    ]
    # On other chips the peak excludes loop-carried buffers; on a TPU it includes host memory.
    live = stats.peak_memory_in_bytes - arguments - stats.host_argument_size_in_bytes
    live = live if target.chip.kind == "tpu" else None
    return Compiled(
        argument_bytes=arguments,
        temp_bytes=stats.temp_size_in_bytes,
        live_bytes=live,
        unaliased_bytes=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        host_bytes=host,
        error=None,
        text=compiled.as_text() or "",
        warnings=(*partitioner_warnings(compiler_log), *elsewhere),
        seconds=seconds,
    )


def partitioner_warnings(compiler_log: str) -> tuple[str, ...]:
    """Return the lines in which XLA reports an involuntary full rematerialization."""
    lines = [line for line in compiler_log.splitlines() if "nvoluntary full remat" in line]
    return tuple(re.sub(r"^.*?\] ", "", line) for line in lines)


def _out_of_memory(message: str, arguments: int, seconds: float) -> Compiled:
    """Parse "... memory required for HLO temporaries (23.68G) exceeds available HBM (15.75G)"."""
    required = re.search(r"temporaries \(([\d.]+)([KMGT]?)\) exceeds", message)
    size = required and round(float(required.group(1)) * _UNITS[required.group(2) or "B"])
    return Compiled(
        argument_bytes=arguments,
        temp_bytes=size,
        live_bytes=None,
        unaliased_bytes=0,
        host_bytes=0,
        error=message.splitlines()[0],
        text="",
        warnings=(),
        seconds=seconds,
    )


# -- the cache -----------------------------------------------------------------------------------


def _key(
    lowered: jax.stages.Lowered, target: Target, layout: Layout, options: Mapping[str, Any]
) -> str:
    devices = layout.mesh.devices if isinstance(layout.mesh, jax.sharding.Mesh) else ()
    facts = [
        str(_FORMAT), target.name, str(len(devices)), json.dumps(options, sort_keys=True),
        os.environ.get("XLA_FLAGS", ""), os.environ.get("LIBTPU_INIT_ARGS", ""),
        *(f"{name} {_version(name)}" for name in ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")),
        lowered.as_text(),
        # The comparable text has no scopes, which the report uses for causes: hash the sources too.
        _sources(),
        str([int(d.id) for d in layout.mesh.devices.flat] if len(devices) else []),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """Return a digest of this package's source."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[3].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(key: str) -> Compiled | None:
    try:
        stored = json.loads(gzip.decompress((cache_folder() / f"{key}.json.gz").read_bytes()))
    except (OSError, ValueError, EOFError):
        return None  # missing or truncated: compile again
    fields: dict[str, Any] = {**stored, "warnings": tuple(stored["warnings"]), "cached": True}
    return Compiled(**fields)


def _write(key: str, compiled: Compiled, compiler_log: str) -> None:
    """Write to the cache; if the folder is not writable, the next plan only compiles again."""
    folder = cache_folder()
    fields = {f.name: getattr(compiled, f.name) for f in dataclasses.fields(compiled)}
    fields.pop("cached")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "compiler.log").write_text(compiler_log)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(gzip.compress(json.dumps(fields).encode()))
        os.replace(file.name, folder / f"{key}.json.gz")
