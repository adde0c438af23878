"""Cost of failures and checkpoint saves: detect, replace, restart, compile, restore, write."""

import dataclasses
from typing import TYPE_CHECKING

import jax

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.run.attempts.begin import SILENCE_SECONDS
from jaxtrain.training.compose import compose
from jaxtrain.training.layouts import abstract_layout
from jaxtrain.training.settings import SAMPLES, Config, Timeouts

if TYPE_CHECKING:
    from jaxtrain.analysis.planning.result import Plan

# Seconds from a failure to the next launch if software restarts the job: MegaScale detects,
# diagnoses and replaces in less than 10 minutes (arXiv 2402.15627, section 6.3); retries on 504
# B200 are 11 minutes apart (arXiv 2605.09370). START_SECONDS of it are the launch.
REPLACE_SECONDS = 540.0
START_SECONDS = 60.0  # processes, imports, rendezvous, devices, data: assumed for many hosts
STANDBY_SECONDS = 15.0  # the same if processes stand by with JAX imported: assumed
# REPLACE_SECONDS if people restart the job: fitted to OPT-175B and Alibaba's June 2023, see
# `benchmarks/goodput.py`, which also has the error on runs outside the fit.
BY_HAND_SECONDS = 3.4 * 3600

# Fraction of failures in which a job hangs or goes wrong without an error: 5,948 of 44,184 in
# ByteDance's three months (arXiv 2509.16293).
SILENT_PART = 5_948 / 44_184

# Bytes/s at which a host reads or writes checkpoints: Llama 3's file system sustained 2 TB/s for
# 2,048 hosts (arXiv 2407.21783, section 3.3.1). `plan --storage` replaces it.
STORAGE_BANDWIDTH = 1e9
HOST_BANDWIDTH = 1.6e10  # bytes/s from a device to its host if unknown for the chip: PCIe 3
SAVE_SECONDS = 1.0  # of a save in addition to its copy: barriers and metadata, assumed

# Minimum seconds to compile a step without a cache: Llama 8B's for 64 v5p took 132 s, and a plan's
# compile is faster than a run's.
COMPILE_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Recovery:
    """Seconds from a failure to the first step after it, by cause.

    Attributes:
      notice: until the other processes end; the mean over failures.
      replace: until a host replaces the lost one.
      start: processes, rendezvous, devices, data.
      compile: compiling the step; 0 if the program is in a cache that every host reads.
      restore: reading the newest complete checkpoint.
    """

    notice: float
    replace: float
    start: float
    compile: float
    restore: float

    @property
    def seconds(self) -> float:
        """Sum of all causes."""
        return self.notice + self.replace + self.start + self.compile + self.restore


@dataclasses.dataclass(frozen=True)
class Saving:
    """Bytes and seconds of one checkpoint.

    Attributes:
      state_bytes: bytes of the whole state, each array once.
      host_bytes: bytes that one host reads to restore the state of its devices.
      step_seconds: seconds for which a save blocks the steps.
      write_seconds: seconds from then until the checkpoint is complete.
      restore_seconds: seconds until a host has read its part.
    """

    state_bytes: int
    host_bytes: int
    step_seconds: float
    write_seconds: float
    restore_seconds: float


def state_bytes(config: Config, devices: int) -> int:
    """Return the bytes of the state in a checkpoint: shapes times dtypes, exact."""
    shapes = compose(config, abstract_layout(config, devices)).shapes()
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def devices_per_host(target: Target) -> int:
    """Return the number of the target's JAX devices per host."""
    if target.chip.kind == "gpu":
        return target.shape[-1]
    if target.chip.kind == "cpu":
        return target.devices
    # Cloud TPU hosts have 4 chips; those of v5e and v6e have 8 if a slice is one host.
    return min(target.devices, 4 * target.chip.devices)


def seconds_to_notice(timeouts: Timeouts, step_seconds: float) -> float:
    """Return the mean seconds until a failure is detected.

    A lost process is detected by missing heartbeats, a hung one by the step timeout.
    """
    deadline = timeouts.of("step", [step_seconds] * SAMPLES)
    silent = BY_HAND_SECONDS if deadline is None else deadline
    return (1 - SILENT_PART) * SILENCE_SECONDS + SILENT_PART * silent


def saving(plan: "Plan", storage: float, *, local: bool = False) -> Saving:
    """Return the cost of a checkpoint of a plan's state.

    Args:
      plan: a plan, with its memory per device.
      storage: bytes/s at which a host reads or writes checkpoints.
      local: save to the hosts' local disks instead; a lost host's part is then read from a peer.
    """
    chip, config = plan.target.chip, plan.config
    held = plan.estimate.arguments
    on_device = held.params + held.optimizer + held.host + held.disk
    on_host = devices_per_host(plan.target)
    hosts = max(1, plan.devices // on_host)
    whole = state_bytes(config, plan.devices)
    host_bytes = min(whole, on_device * on_host)
    copy = SAVE_SECONDS + on_device / (chip.host_bandwidth or HOST_BANDWIDTH)
    if local:
        write = on_device / chip.disk_bandwidth
        restore = write + on_device / (chip.dcn_bandwidth or chip.disk_bandwidth)
    else:
        write, restore = whole / hosts / storage, host_bytes / storage
    if not config.checkpoint.asynchronous:
        copy, write = copy + write, 0.0
    return Saving(whole, host_bytes, copy, write, restore)


def compile_seconds(plan: "Plan") -> float:
    """Return the seconds in which a run compiles its step without a cache."""
    return max(COMPILE_SECONDS, plan.compiled.seconds if plan.compiled else 0.0)
