"""Parser of targets such as `v5p:4x4x4`, and their compile-only devices."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator

import jax
from jax.experimental import topologies

from jaxtrain.analysis.planning.machines.calibration import Calibration
from jaxtrain.config.errors import NoCompilerError, UserError, nearest
from jaxtrain.parallel.chips import CHIPS, MOST_OF_A_GPU, Chip, Slices

# Ten times the largest machine ever built: the search factors the number of devices.
MOST_DEVICES = 2**20


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine to plan for.

    Attributes:
      chip: its chip, one of `chips.CHIPS`.
      shape: TPUs: chips along each torus dimension; GPUs: hosts, GPUs per host; CPU: simulated
        devices.
      calibration: a step of the user's stack measured on this chip, which scales closed-form times
        by how similar their steps are to it; None if not calibrated.
    """

    chip: Chip
    shape: tuple[int, ...]
    calibration: Calibration | None = None

    @property
    def name(self) -> str:
        """The value of --target."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def devices(self) -> int:
        """Number of JAX devices; of one slice, if there are several."""
        return math.prod(self.shape) * self.chip.devices


def parse_target(target: str, *, network: float | None = None, disk: float | None = None) -> Target:
    """Parse a target such as "v5e:2x4", "h100:2x8" or "cpu:8".

    Args:
      target: the value of --target. A GPU host is one NVLink domain: a GB200 rack is "gb200:1x72".
      network: Gb/s of each device between hosts or slices; None: as in `CHIPS`.
      disk: GB/s of its host's disks for each device; None: `chips.DISK_BANDWIDTH`.

    Raises:
      UserError: the format is wrong, the chip is unknown, it has no such grid, or `network` or
        `disk` is not a finite number above 0.
    """
    name, _, grid = target.partition(":")
    chip = CHIPS.get(name)
    if chip is None:
        called = {other: chip.name for chip in CHIPS.values() for other in chip.also_called}
        close = nearest(name, [*CHIPS, *called])
        close = called.get(close or "", close)
        raise UserError(
            f"target {target!r}: no chip {name!r}{f'; did you mean {close!r}?' if close else ''} "
            f"(there are {', '.join(CHIPS)}, written as in 'v5e:2x4', 'h100:2x8' or 'cpu:8')"
        )
    if network is not None:
        if not (math.isfinite(network) and network > 0):
            raise UserError(
                f"--network={network:g}; use the Gb/s of each device's adapter, such as 400"
            )
        chip = dataclasses.replace(chip, dcn_bandwidth=network * 1e9 / 8)
    if disk is not None:
        if not (math.isfinite(disk) and disk > 0):
            raise UserError(
                f"--disk={disk:g}; use the GB/s that each device has of its host's disks, such as 5"
            )
        chip = dataclasses.replace(chip, disk_bandwidth=disk * 1e9)
    if re.fullmatch(r"\d+(x\d+)*", grid) is None:
        example = chip.slices.grids[1] if chip.slices else _EXAMPLES[chip.kind](chip)
        raise UserError(
            f"target {target!r} does not have the form {name}:{_FORMS[chip.kind]}, "
            f"for example '{name}:{example}'"
        )
    shape = tuple(int(size) for size in grid.split("x"))
    error = _CHECKS[chip.kind](chip, shape)
    if error is None and math.prod(shape) > MOST_DEVICES:
        inner = shape[1:]
        close = _format_shape((MOST_DEVICES // math.prod(inner), *inner))
        error = f"at most {MOST_DEVICES:,} devices are planned for; the nearest is '{name}:{close}'"
    if error is not None:
        raise UserError(f"target {target!r}: {error}")
    return Target(chip, shape)


def with_memory(target: Target, fraction: float | None) -> Target:
    """Return the target with `Train.gpu_memory_fraction` of its GPU memory available to programs.

    It is unchanged for None and for chips other than GPUs.
    """
    chip = target.chip
    if fraction is None or chip.memory_bytes is None:
        return target
    size = int(chip.memory_bytes * fraction)
    return dataclasses.replace(target, chip=dataclasses.replace(chip, hbm_bytes=size))


def most_memory(target: Target) -> int | None:
    """Return the bytes of a GPU available at Train.gpu_memory_fraction=0.94, `MOST_OF_A_GPU`; None
    for other chips, and if that is not more than now."""
    chip = target.chip
    if chip.memory_bytes is None or chip.hbm_bytes is None:
        return None
    room = int(chip.memory_bytes * MOST_OF_A_GPU)
    return room if room > chip.hbm_bytes else None


def target_devices(target: Target, *, slices: int = 1) -> list[jax.Device]:
    """Return devices for `jax.make_mesh` and `jit(...).lower().compile()`; only CPUs can execute.

    Args:
      target: the machine; CPUs are simulated devices of this process, all others compile-only.
      slices: TPUs: number of such slices joined by the data-center network. GPU hosts are joined
        by it already, and simulated devices form as many slices as `Mesh.dcn` says.

    Raises:
      NoCompilerError: the target's compiler is not installed.
      UserError: the compiler rejects the target, slices are requested of other chips than TPUs, or
        JAX already runs on other devices in this process.
    """
    assert slices >= 1
    kind = target.chip.kind
    if kind != "tpu" and slices > 1:
        more = f"{target.chip.name}:{target.shape[0] * slices}"
        more += "".join(f"x{size}" for size in target.shape[1:])
        raise UserError(
            f"target {target.name!r} in {slices} slices: only TPUs have slices; all of these "
            f"devices are {more!r}"
        )
    if kind == "cpu":
        return _simulate(target)
    with native_stderr_kept() as noise:
        if kind == "gpu":
            return gpu_devices(target.chip, *target.shape, noise=noise)
        return _tpu(target, slices, noise)


def tpu_devices(target: str, *, slices: int = 1) -> list[jax.Device]:
    """Return compile-only devices of a target in text form, such as "v5e:2x4".

    Raises:
      UserError: see `parse_target` and `target_devices`.
    """
    return target_devices(parse_target(target), slices=slices)


def compiler_options(target: Target) -> dict[str, int | float]:
    """Return the options of `jit(...).lower(...).compile()` for a target."""
    # There is no GPU for autotuning.
    return {"xla_gpu_autotune_level": 0} if target.chip.kind == "gpu" else {}


@contextlib.contextmanager
def native_stderr_kept() -> Iterator[Callable[[], str]]:
    """Capture what libraries write to the stderr of the process; the yielded function reads it.

    libtpu and XLA warn there, bypassing Python, that there is no TPU and no GPU.
    """
    with tempfile.TemporaryFile() as kept:
        saved = os.dup(2)
        os.dup2(kept.fileno(), 2)

        def read() -> str:
            kept.seek(0)
            return kept.read().decode(errors="replace")

        try:
            yield read
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _tpu(target: Target, slices: int, noise: Callable[[], str]) -> list[jax.Device]:
    extra: dict[str, object] = {}
    if math.prod(target.shape) == 1:
        # libtpu otherwise assumes hosts of 2x2 chips.
        extra["chips_per_host_bounds"] = (1, 1, 1)
    if target.chip.name == "v4":
        # One device per chip, as on real ones; libtpu otherwise assumes one per core.
        extra["chip_config_name"] = "megacore"
    if slices > 1:
        extra["num_slices"] = slices
    slices_of = target.chip.slices
    assert slices_of is not None, "a TPU"
    chip = slices_of.compiler_s_name or target.chip.name
    # Do not query the metadata server of a cloud machine about absent hardware.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Skip the lock that gives a machine's chips to one process: two may compile concurrently.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{chip}:{_format_shape(target.shape)}", **extra
        )
    except RuntimeError as error:
        if "not installed" in str(error):
            raise NoCompilerError(
                f"target {target.name!r} is compiled by libtpu, which is not installed; "
                "pip install 'jaxtrain[tpu]'"
            ) from error
        message = f"{error} {noise()}".strip()
        raise UserError(f"target {target.name!r}: libtpu rejects it: {message}") from error
    return list(description.devices)


def _simulate(target: Target) -> list[jax.Device]:
    """Return CPU devices of this process; JAX's backend must not be initialized before."""
    count = target.devices
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(
            f"target {target.name!r} needs {count} simulated CPU devices, but JAX already runs on "
            f"{len(devices)} in this process; start a new one, or plan for 'cpu:{len(devices)}'"
        )
    return devices[:count]


def _check_tpu(chip: Chip, shape: tuple[int, ...]) -> str | None:
    """Return why there is no such slice, and the nearest one; None if it exists."""
    there = chip.slices
    assert there is not None, "a TPU"
    if _is_slice(there, shape):
        return None
    grids = [tuple(map(int, grid.split("x"))) for grid in there.grids]
    # The same chips in the documented order, otherwise about as many.
    close = tuple(sorted(shape))
    if not _is_slice(there, close):
        close = min(grids, key=lambda grid: (abs(math.prod(grid) - math.prod(shape)), grid))
    more = ""
    if there.most_chips is not None:
        more = f", and ascending multiples of 4 up to {there.most_chips} chips together"
    return (
        f"{chip.name} has no slice of {_format_shape(shape)} chips; the nearest is "
        f"'{chip.name}:{_format_shape(close)}' (there are {', '.join(there.grids)}{more})"
    )


def _is_slice(there: Slices, shape: tuple[int, ...]) -> bool:
    if _format_shape(shape) in there.grids:
        return True
    return (
        there.most_chips is not None
        and len(shape) == 3
        and list(shape) == sorted(shape)
        and all(size > 0 and size % 4 == 0 for size in shape)
        and math.prod(shape) <= there.most_chips
    )


def _check_gpu(chip: Chip, shape: tuple[int, ...]) -> str | None:
    most, alone = chip.most_together, chip.dcn_bandwidth is None
    if len(shape) == 2 and shape[0] > 0 and 1 <= shape[1] <= most:
        if alone and shape[0] > 1:
            return (
                f"{chip.name} is in no machine with a known network: plan for one host, or pass "
                f"--network; the nearest is '{chip.name}:1x{shape[1]}'"
            )
        return None
    if len(shape) == 2:
        close = (max(shape[0], 1), min(max(shape[1], 1), most))
    else:
        # The number of hosts is missing: use as many as hold these GPUs.
        per_host = min(max(shape[0], 1), most)
        close = (max(shape[0] // per_host, 1), per_host)
    if alone:
        close = (1, close[1])
    return (
        f"a GPU target is hosts x GPUs per host, of which one of {chip.name} has 1 to {most}; the "
        f"nearest is '{chip.name}:{_format_shape(close)}'"
    )


def _check_cpu(chip: Chip, shape: tuple[int, ...]) -> str | None:
    if len(shape) == 1 and shape[0] > 0:
        return None
    close = max(math.prod(shape), 1)
    return (
        f"a CPU target is a number of simulated devices, at least 1; the nearest is 'cpu:{close}'"
    )


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


_EXAMPLES = {"gpu": lambda chip: f"1x{chip.most_together}", "cpu": lambda chip: "8"}
_FORMS = {"tpu": "GRID", "gpu": "HOSTSxGPUS", "cpu": "DEVICES"}
_CHECKS = {"tpu": _check_tpu, "gpu": _check_gpu, "cpu": _check_cpu}


# -- compile-only GPUs: the target configuration that XLA uses instead of a driver -----------------


def target_config(chip: Chip) -> str:
    """Return a GPU as XLA's `GpuTargetConfigProto` in text format.

    Constants for all GPUs: 1024 threads per block, warps of 32, 65536 registers, and the versions
    of CUDA and cuDNN that the compiler assumes.
    """
    gpu = chip.processor
    assert gpu is not None, "a GPU"
    major, minor = gpu.compute_capability
    assert chip.hbm_bandwidth is not None
    feature = "ACCELERATED_FEATURES" if gpu.accelerated else "NONE"
    return f"""\
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus_per_core}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {chip.memory_bytes}
  memory_bandwidth: {round(chip.hbm_bandwidth)}
  l2_cache_size: {gpu.l2_bytes}
  shared_memory_per_core: {gpu.shared_bytes_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_bytes_per_block}
  threads_per_warp: 32
  threads_per_core_limit: {gpu.threads_per_core}
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{chip.device_kinds[0]}"
"""


def gpu_devices(
    chip: Chip, hosts: int, gpus_per_host: int, *, noise: Callable[[], str]
) -> list[jax.Device]:
    """Return compile-only devices of GPU hosts, each host with its own NVLink switch.

    Args:
      chip: a GPU.
      hosts, gpus_per_host: their numbers.
      noise: returns the compiler's stderr output, for the error message.

    Raises:
      NoCompilerError: JAX's CUDA plugin is not installed, or does not compile for this chip.
      UserError: JAX has already rejected it in this process; the compiler rejects the target.
    """
    name = f"{chip.name}:{hosts}x{gpus_per_host}"
    if chip.processor is None:
        raise NoCompilerError(f"target {name!r}: no compiler for it comes with JAX's CUDA plugin")
    # Without this, the plugin looks for a driver on import and fails to load.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        description = topologies.get_topology_desc(
            platform="cuda",
            topology_name=name,
            target_config=target_config(chip),
            # NVLink domains, hosts in each, GPUs in each host.
            topology=f"{hosts}x1x{gpus_per_host}",
        )
    except NotImplementedError as error:
        if _plugin_installed():
            raise UserError(
                f"target {name!r}: JAX has already rejected its CUDA plugin in this process, "
                "because there is no driver; set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before it starts"
            ) from error
        raise NoCompilerError(
            f"target {name!r} is compiled by JAX's CUDA plugin, which is not installed; "
            "pip install 'jaxtrain[cuda13]' (4.4 GB)"
        ) from error
    except RuntimeError as error:
        message = f"{error} {noise()}".strip()
        raise UserError(f"target {name!r}: the CUDA compiler rejects it: {message}") from error
    return list(description.devices)


def _plugin_installed() -> bool:
    return any(
        importlib.util.find_spec(package) is not None
        for package in ("jax_cuda13_plugin", "jax_cuda12_plugin")
    )
