"""Compile-only GPUs: the target configuration that XLA's compiler uses instead of a driver."""

import importlib.util
import math
import os
from collections.abc import Callable

import jax
from jax.experimental import topologies

from jaxtrain.config.errors import NoCompilerError, UserError
from jaxtrain.parallel.chips import CHIPS, GPU_MEMORY_FRACTION, Chip


def target_config(chip: Chip) -> str:
    """Return a GPU as XLA's `GpuTargetConfigProto` in text format.

    Constants for all GPUs: 1024 threads per block, warps of 32, 65536 registers, and the versions
    of CUDA and cuDNN that the compiler assumes.
    """
    gpu = chip.processor
    assert gpu is not None, "a GPU"
    major, minor = gpu.compute_capability
    whole = CHIPS[chip.name].hbm_bytes  # `chip` may have another memory fraction
    assert whole is not None
    assert chip.hbm_bandwidth is not None
    feature = "ACCELERATED_FEATURES" if gpu.accelerated else "NONE"
    return f"""\
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus_per_core}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {math.ceil(whole / GPU_MEMORY_FRACTION)}
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
