"""Devices of this process: simulated CPU devices, platform, GPU memory."""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend import backend

from jaxtrain.config.errors import UserError
from jaxtrain.parallel.chips import GPU_MEMORY_FRACTION, chip_of, gpu_memory_fraction
from jaxtrain.parallel.compilation import extend_collective_timeouts, keep_compiled_programs

# Values that libtpu otherwise requests from a cloud's metadata server. Programs compiled for other
# TPUs stay as they are: a topology's name includes their chips.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# JAX's own, the first in place of the second; setting both is an error.
_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
SIMULATED_DEVICES = 8  # as many as a TPU or GPU host has chips


def device_word(count: int) -> str:
    """Return "device" or "devices", as the number requires."""
    return "devices" if count != 1 else "device"


def offer_cpu_devices(count: int) -> None:
    """Simulate `count` CPU devices; does nothing once JAX has initialized its backend."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
        extend_collective_timeouts()


def outwait_given_cpu_devices() -> None:
    """Extend XLA's timeouts if the environment simulates CPU devices; call before the backend is
    opened.
    """
    settings: Any = jax.config  # whose attributes are created at run time
    flags = os.environ.get("XLA_FLAGS", "")
    if settings.jax_num_cpu_devices > 1 or "xla_force_host_platform_device_count" in flags:
        extend_collective_timeouts()


def has_tpu_chips(root: Path = Path("/")) -> bool:
    """Whether there are TPU device files: /dev/accel0 (v2 to v4) or /dev/vfio/0 (later ones)."""
    return any(root.glob("dev/accel[0-9]*")) or any(root.glob("dev/vfio/[0-9]*"))


def pass_over_libtpu(root: Path = Path("/")) -> None:
    """Silence libtpu on a machine without TPUs; call before the backend is opened.

    libtpu is installed to compile for absent TPUs (`jaxtrain[tpu]`, `jaxtrain[dev]`). JAX tries it
    at the start of every process, and it then writes errors to the terminal, past Python, about
    TPUs that it does not find. Without any accelerator JAX leaves it alone. With GPUs JAX chooses
    as usual; the variables whose absence libtpu would report are set beforehand, which changes
    nothing else. No message of a library is hidden.

    Args:
      root: of the file system.
    """
    settings: Any = jax.config  # whose attributes are created at run time
    plugins = {point.name for point in importlib.metadata.entry_points(group="jax_plugins")}
    chosen, is_installed = settings.jax_platforms, importlib.util.find_spec("libtpu") is not None
    platforms = platforms_without_libtpu(
        chosen, is_installed=is_installed, plugins=plugins, root=root
    )
    if platforms is not None:
        jax.config.update("jax_platforms", platforms)
    elif is_installed and not chosen and not has_tpu_chips(root):
        for name, value in _NO_TPU.items():
            os.environ.setdefault(name, value)


def platforms_without_libtpu(
    chosen: str | None, *, is_installed: bool, plugins: Collection[str], root: Path = Path("/")
) -> str | None:
    """Return a value for `jax_platforms` that avoids libtpu on hosts without TPUs; None: no change.

    Args:
      chosen: its present value: by the user, or by JAX, which chooses "tpu,cpu" if it detects TPUs.
      is_installed: whether libtpu is.
      plugins: names of JAX's other plugins.
      root: of the file system.
    """
    nvidia = ("nvidia[0-9]*", "nvidiactl", "dxg")
    has_gpus = any(any(root.glob(f"dev/{name}")) for name in nvidia)
    others = [name for name in plugins if not name.startswith("xla_cuda")]
    if chosen or not is_installed or has_tpu_chips(root) or has_gpus or others:
        return None
    return "cpu"


def take_gpu_memory(fraction: float | None, root: Path = Path("/")) -> None:
    """Set the fraction of each GPU's memory that JAX takes; call before the backend is opened.

    Args:
      fraction: of the memory; None: as the environment has it, else `gpu_memory_fraction` of this
        host's GPUs.
      root: of the file system.
    """
    if fraction is None and any(os.environ.get(name) for name in _MEMORY_VARIABLES):
        return
    for name in _MEMORY_VARIABLES:
        os.environ.pop(name, None)
    os.environ[_MEMORY_VARIABLES[0]] = f"{fraction or _fraction_of_this_host(root):.4g}"


def _fraction_of_this_host(root: Path) -> float:
    """Return the least `gpu_memory_fraction` of the GPUs that NVIDIA's driver lists; 0.9 if it
    lists none or one that is not in the table.
    """
    texts = [path.read_text() for path in root.glob("proc/driver/nvidia/gpus/*/information")]
    models = [model.strip() for text in texts for model in re.findall(r"^Model:(.*)$", text, re.M)]
    memory = [chip.memory_bytes if (chip := chip_of(model)) else None for model in models]
    return min(
        (gpu_memory_fraction(size) if size else GPU_MEMORY_FRACTION for size in memory),
        default=GPU_MEMORY_FRACTION,
    )


def other_gpu_memory(fraction: float | None, device: Any) -> str | None:
    """Return a warning if JAX had taken another part of a GPU's memory before the fraction was set.

    Args:
      fraction: the requested part; None: any.
      device: a device of the run.
    """
    chip = chip_of(device.device_kind)
    if fraction is None or chip is None or chip.memory_bytes is None:
        return None
    taken = device.memory_stats()["bytes_limit"] / chip.memory_bytes
    if abs(taken - fraction) < 0.02:  # the driver keeps some of it
        return None
    return (
        f"Train.gpu_memory_fraction={fraction:g} came too late: JAX has taken {taken:.0%} of the "
        "GPUs' memory already; start a new process, or set XLA_CLIENT_MEM_FRACTION first"
    )


def simulate_devices(count: int) -> None:
    """Make JAX run on `count` simulated CPU devices; call before anything opens the backend.

    Each device's matrix decompositions use one thread, unless the environment says otherwise: the
    LAPACK that JAX takes from SciPy would start as many per device as there are cores, which
    on 2 cores and 8 devices took more than five times the CPU time.

    Raises:
      UserError: JAX already runs on other devices in this process.
    """
    if count > 1:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when SciPy's is first loaded
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
    offer_cpu_devices(count)
    if jax.device_count() != count or jax.default_backend() != "cpu":
        raise UserError(
            f"Mesh.simulated_devices={count}, but JAX already runs on {jax.device_count()} "
            f"{jax.default_backend()} {device_word(jax.device_count())} in this process; "
            "start a new one"
        )


def use_devices(count: int | None = None) -> list[jax.Device]:
    """Return the devices that a notebook runs on: accelerators if there are any, else simulated
    ones.

    Call before anything else, so that CPU devices can still be simulated; compiled programs are
    cached on disk from then on, as on the command line.

    Args:
      count: how many a notebook's layouts need: the accelerators if there are exactly `count`, else
        `count` simulated CPU devices. None takes all accelerators, or simulates 8.

    Raises:
      UserError: JAX already runs on another number of devices in this process.
    """
    keep_compiled_programs()
    pass_over_libtpu()
    simulated = SIMULATED_DEVICES if count is None else count
    offer_cpu_devices(simulated)
    if jax.default_backend() == "cpu":
        simulate_devices(simulated)
    elif count not in (None, jax.device_count()):
        # Only now are the devices known: initialize the backends again, with the CPU alone.
        backend.clear_backends()
        simulate_devices(simulated)
    return jax.devices()


def select_devices(devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """Return the devices of a run: all of them, or as many as requested.

    Raises:
      UserError: there is none, one is listed twice, or a process of the run has none of them.
    """
    pass_over_libtpu()
    if devices is None:
        return jax.devices()
    chosen = list(devices)
    if not chosen:
        raise UserError("Trainer(devices=[]): give at least one device, such as jax.devices()[:1]")
    if len(set(chosen)) != len(chosen):
        ids = [device.id for device in chosen]
        raise UserError(f"Trainer(devices=...): one of the devices {ids}is listed twice")
    idle = set(range(jax.process_count())) - {device.process_index for device in chosen}
    if idle:
        raise UserError(
            f"Trainer(devices=...): none of them is of process {min(idle)}, which would have "
            f"nothing to do; give some of each of the {jax.process_count()} processes"
        )
    return chosen


# Platform name of GPUs other than NVIDIA's from this compute capability on: neither cuDNN nor
# Pallas has flash attention for them (docs.nvidia.com/deeplearning/cudnn, "scaled dot product
# attention").
OLD_GPU = "gpu before Ampere"
_AMPERE = 8


def platform_of(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> str:
    """Return a mesh's platform: 'cpu', 'gpu', OLD_GPU or 'tpu'; JAX's default if unspecified."""
    if isinstance(mesh, jax.sharding.Mesh):
        return platform_of_device(mesh.devices.flat[0])
    device = mesh.abstract_device
    if device is None:
        return platform_of_device(jax.devices()[0])
    return "gpu" if device.platform == "cuda" else device.platform


def platform_of_device(device: Any) -> str:
    """Return the platform of a device, which may be only a compilation target."""
    if device.platform not in ("gpu", "cuda"):
        return device.platform
    # Other vendors' GPUs have text there.
    major = str(device.compute_capability).partition(".")[0]
    return "gpu" if major.isdigit() and int(major) >= _AMPERE else OLD_GPU
