"""Mesh axes and their order, the devices they are laid over, and simulated devices."""

import contextlib
import dataclasses
import math

import jax
from jax.sharding import AxisType

from jaxtrain.config import configurable
from jaxtrain.errors import UserError

# Outermost (slowest links) first: an axis is added by naming it here, in Mesh, and in the tables of
# sharding.py.
MESH_AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the mesh axes; at most one is -1 (what is left); the product is the device count.

    Attributes:
      pipe: stages that each hold a run of the layers (pipeline parallelism).
      data: devices that hold whole replicas of the state (or, with fsdp, of its shards: HSDP).
      fsdp: devices that share the state as `Sharding.zero` says.
      expert: devices that share the experts of a mixture; data x fsdp x expert split the batch.
      context: devices that share each sequence (ring attention or Ulysses).
      tensor: devices that share each matrix product (Megatron tensor parallelism).
      simulated_devices: run on this many simulated CPU devices; 0 uses the devices that are there.
    """

    pipe: int = 1
    data: int = 1
    fsdp: int = -1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    simulated_devices: int = 0

    def __post_init__(self) -> None:
        for axis in MESH_AXES:
            size = getattr(self, axis)
            if size != -1 and size < 1:
                raise UserError(f"Mesh.{axis}={size}: a mesh axis has at least 1 device (or -1)")
        free = [axis for axis in MESH_AXES if getattr(self, axis) == -1]
        if len(free) > 1:
            raise UserError(
                f"Mesh.{' and Mesh.'.join(free)} are all -1; at most one axis takes what is left"
            )
        if self.simulated_devices < 0:
            raise UserError(f"Mesh.simulated_devices={self.simulated_devices}; use 0 or more")

    def sizes(self, device_count: int) -> dict[str, int]:
        """The size of every axis on this many devices.

        Raises:
          UserError: the product is not the device count; devices would be idle or missing.
        """
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        fixed = math.prod(size for size in sizes.values() if size != -1)
        written = ", ".join(f"Mesh.{axis}={size}" for axis, size in sizes.items() if size != 1)
        written = written or "every Mesh axis=1"
        free = [axis for axis, size in sizes.items() if size == -1]
        if free and device_count % fixed == 0:
            sizes[free[0]] = device_count // fixed
            return sizes
        if not free and fixed == device_count:
            return sizes
        raise UserError(
            f"{written}: the product {fixed}{' (without the -1)' if free else ''} does not "
            f"{'divide' if free else 'equal'} the {device_count} {_devices(device_count)} there "
            f"{'are' if device_count != 1 else 'is'}; {self._way_out(sizes, fixed, device_count)}"
        )

    def _way_out(self, sizes: dict[str, int], fixed: int, device_count: int) -> str:
        if -1 not in sizes.values():
            for axis in ("fsdp", "data", "tensor"):
                rest = fixed // sizes[axis]
                if device_count % rest == 0:
                    other = f"set Mesh.{axis}={device_count // rest}"
                    break
            else:
                other = "set Mesh.fsdp=-1 and Mesh.tensor=1"
        else:
            other = "make the other axes divide it"
        if fixed > device_count:
            return f"{other}, or pass --simulate-devices {fixed}"
        return other


def _devices(count: int) -> str:
    return "devices" if count != 1 else "device"


def offer_cpu_devices(count: int) -> None:
    """Splits the CPU into `count` devices; where JAX has opened its backend already, nothing."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def simulate_devices(count: int) -> None:
    """Makes JAX run on `count` simulated CPU devices; call before anything opens the backend.

    Raises:
      UserError: JAX already runs on other devices in this process.
    """
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
    offer_cpu_devices(count)
    if jax.device_count() != count or jax.default_backend() != "cpu":
        raise UserError(
            f"Mesh.simulated_devices={count}, but JAX already runs on {jax.device_count()} "
            f"{jax.default_backend()} {_devices(jax.device_count())} in this process; "
            "start a new one"
        )


def make_mesh(settings: Mesh, devices: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The mesh of all devices (or of `devices`), every axis explicit.

    Explicit axes make a sharding part of an array's type, so a layout that does not hold together
    is an error while tracing; in automatic mode gradients came back without their fsdp sharding.
    """
    devices = jax.devices() if devices is None else devices
    sizes = settings.sizes(len(devices))
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Explicit,) * len(sizes),
        devices=devices,
    )
