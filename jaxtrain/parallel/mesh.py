"""The device mesh: axes, their order, and the devices."""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from jaxtrain.config.errors import (
    UserError,
    did_you_mean,
    nearest_divisor,
    nearest_multiple,
    require_at_least,
)
from jaxtrain.config.reader import configurable
from jaxtrain.parallel.axis_rules import RULES, TensorLayout, factor_tensor
from jaxtrain.parallel.devices import device_word
from jaxtrain.parallel.sharding import parts_of

# Outermost (slowest links) first: to add an axis, name it here, in Mesh, and in
# axis_rules.py.
MESH_AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")

MOST_SIMULATED = 4096  # initialized in 5 seconds; 100 million were not in 7 minutes


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the mesh axes; at most one is -1 (the remaining devices); the product is the device
    count.

    Attributes:
      pipe: stages of consecutive layers (pipeline parallelism).
      data: devices that hold whole replicas of the state (or, with fsdp, of its shards: HSDP).
      fsdp: devices that shard the state as `Sharding.zero` specifies.
      expert: devices that share the experts of a mixture; data x fsdp x expert split the batch.
      context: devices that share each sequence (ring attention or Ulysses).
      tensor: devices that share each matmul (Megatron tensor parallelism).
      simulated_devices: run on this many simulated CPU devices; 0 uses the real devices.
      dcn: number of slices that an axis spans, for slices connected by the data-center network:
        {'data': 2} is 2 slices, each with half of `data` and all of the other axes. Sizes above
        count the devices of all slices.
    """

    pipe: int = 1
    data: int = 1
    fsdp: int = -1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    simulated_devices: int = 0
    # A dict is not hashable; two meshes that differ in it alone may share a hash.
    dcn: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for axis in MESH_AXES:
            size = getattr(self, axis)
            if size != -1 and size < 1:
                raise UserError(f"Mesh.{axis}={size}: a mesh axis has at least 1 device (or -1)")
        free = [axis for axis in MESH_AXES if getattr(self, axis) == -1]
        if len(free) > 1:
            raise UserError(
                f"Mesh.{' and Mesh.'.join(free)} are all -1; at most one axis may be inferred"
            )
        require_at_least(0, self, "simulated_devices")
        if self.simulated_devices > MOST_SIMULATED:
            raise UserError(
                f"Mesh.simulated_devices={self.simulated_devices}; use at most {MOST_SIMULATED}: "
                "each takes at least a thread of this machine"
            )
        for axis, slices in self.dcn.items():
            if axis not in MESH_AXES:
                raise UserError(
                    f"Mesh.dcn={self.dcn}: no mesh axis {axis!r}{did_you_mean(axis, MESH_AXES)}"
                )
            if slices < 1:
                raise UserError(f"Mesh.dcn={self.dcn}: {axis} spans at least 1 slice")

    @property
    def free_axis(self) -> str | None:
        """Axis of size -1, which takes the remaining devices; None if there is none."""
        return next((axis for axis in MESH_AXES if getattr(self, axis) == -1), None)

    def sizes(self, device_count: int) -> dict[str, int]:
        """Return the size of each axis on this many devices.

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
            fixed = device_count
        if fixed == device_count and -1 not in sizes.values():
            self._validate_cut_axes(sizes)
            return sizes
        raise UserError(
            f"{written}: the product {fixed}{' (without the -1)' if free else ''} does not "
            f"{'divide' if free else 'equal'} the {device_count} {device_word(device_count)} there "
            f"{'are' if device_count != 1 else 'is'}; {self._way_out(sizes, fixed, device_count)}"
        )

    def _validate_cut_axes(self, sizes: dict[str, int]) -> None:
        for axis, slices in self.dcn.items():
            if sizes[axis] % slices:
                raise UserError(
                    f"Mesh.dcn={self.dcn}: {slices} slices do not divide Mesh.{axis}={sizes[axis]};"
                    f" the nearest number of slices is {nearest_divisor(sizes[axis], slices)}, or "
                    f"set Mesh.{axis}={nearest_multiple(sizes[axis], slices)}"
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
            for axis, size in sizes.items():
                rest = fixed // abs(size)
                if size > 1 and device_count % rest == 0:
                    other = f"set Mesh.{axis}={nearest_divisor(device_count // rest, size)}"
        if fixed > device_count:
            return f"{other}, or take {fixed} devices (of a CPU by --simulate-devices {fixed})"
        return other


def validate(
    settings: Mesh,
    device_count: int,
    *,
    usable: Collection[str],
    model: str,
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield an error message for each reason why these devices cannot form the mesh of a model.

    Args:
      settings: the sizes.
      device_count: devices over all processes.
      usable: the axes that can split a dimension of the model: `usable_axes`.
      model: its name.
      reasons: axis -> why it is not among them, if the reason is not a size.
    """
    try:
        sizes = settings.sizes(device_count)
    except UserError as error:
        yield str(error)
        sizes = {axis: getattr(settings, axis) for axis in MESH_AXES}
    for axis in MESH_AXES:
        if sizes[axis] > 1 and axis not in usable:
            why = reasons.get(axis, "has no dimension that this axis could split")
            yield (
                f"Mesh.{axis}={sizes[axis]}: {model} {why}; use Mesh.{axis}=1 and "
                f"{' or '.join(usable)} instead"
            )


def usable_axes(logical: Collection[str], *, attends: bool) -> list[str]:
    """Return the mesh axes that the axis rules give to the batch or to a parameter of a model.

    A vocabulary alone does not make an axis usable: every device would compute all layers.

    Args:
      logical: logical axes of the model's parameters.
      attends: whether it has attention, whose sequences `context` splits.
    """
    names = {
        name for axis in logical if axis != "vocab" for name in parts_of(RULES[axis].parameter)
    }
    # The batch is split over expert too, but only if there are experts.
    names |= set(parts_of(RULES["batch"].activation)) - {"expert"}
    if attends:
        names.add("context")
    return [axis for axis in MESH_AXES if axis in names]


def make_mesh(
    settings: Mesh,
    devices: Sequence[jax.Device] | None = None,
    *,
    tensor_layout: TensorLayout = "1d",
    tensor_depth: int = 1,
) -> jax.sharding.Mesh:
    """Return the mesh of all devices (or of `devices`), with all axes explicit.

    Explicit axes make a sharding part of an array's type, so an inconsistent layout
    is an error while tracing; in automatic mode gradients came back without their fsdp sharding.

    Args:
      settings: the sizes.
      devices: in any order; neighbors along an axis are chosen by their links.
      tensor_layout, tensor_depth: as in Sharding: other layouts than 1d have axes `row` and
        `depth` with a smaller `tensor`.

    Raises:
      UserError: the sizes do not fit the devices or their slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = settings.sizes(len(devices))
    factors = factor_tensor(tensor_layout, sizes.pop("tensor"), tensor_depth)
    slices = slices_of(devices, settings.dcn)
    if len(slices) == 1:
        order = _order([*sizes.values(), *factors.values()], devices)
        return jax.sharding.Mesh(order, (*sizes, *factors), axis_types=_explicit(sizes, factors))
    if tensor_layout != "1d" and settings.dcn.get("tensor", 1) > 1:
        raise UserError(
            f"Mesh.dcn={settings.dcn}: the grid of Sharding.tensor_layout={tensor_layout!r} stays "
            "within a slice; give the slices to data or fsdp"
        )
    order = order_over_slices({**sizes, **factors}, settings.dcn, slices)
    return jax.sharding.Mesh(order, (*sizes, *factors), axis_types=_explicit(sizes, factors))


def abstract_mesh(
    settings: Mesh,
    device_count: int,
    *,
    tensor_layout: TensorLayout = "1d",
    tensor_depth: int = 1,
) -> jax.sharding.AbstractMesh:
    """Return the names and sizes of `make_mesh` without devices.

    Raises:
      UserError: the sizes do not fit this many devices.
    """
    sizes = settings.sizes(device_count)
    factors = factor_tensor(tensor_layout, sizes.pop("tensor"), tensor_depth)
    return jax.sharding.AbstractMesh(
        (*sizes.values(), *factors.values()),
        (*sizes, *factors),
        axis_types=_explicit(sizes, factors),
    )


def _order(sizes: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Arrange devices in the shape of a mesh by their links: the last axes get the closest
    neighbors.
    """
    try:
        return mesh_utils.create_device_mesh(sizes, devices)
    except NotImplementedError:
        # An axis of 32 on a grid of 4x4x4: it takes half of one direction together with another
        # axis.
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def _explicit(*axes: Mapping[str, int]) -> tuple[AxisType, ...]:
    return (AxisType.Explicit,) * sum(map(len, axes))


def slices_of(devices: Sequence[jax.Device], dcn: Mapping[str, int]) -> list[list[jax.Device]]:
    """Return the devices by slice: as they report it, else (CPUs, GPU hosts) in runs of equal
    length.

    Raises:
      UserError: `dcn` has another number of slices than the devices.
    """
    wanted = math.prod(dcn.values())
    known: dict[int, list[jax.Device]] = {}
    for device in devices:
        if hasattr(device, "slice_index"):
            known.setdefault(device.slice_index, []).append(device)
    # For GPUs each host is a slice, and in the order of hosts a mesh needs no `dcn`.
    is_reported = len(known) > 1 and (wanted > 1 or devices[0].platform == "tpu")
    if is_reported or (wanted > 1 and devices[0].platform == "tpu"):
        if len(known) != wanted:
            raise UserError(
                f"Mesh.dcn={dict(dcn)} has {wanted} {_slices(wanted)}, but the devices are in "
                f"{len(known)}; {_dcn_way_out(len(known))}"
            )
        return [known[index] for index in sorted(known)]
    if len(devices) % wanted:
        raise UserError(
            f"Mesh.dcn={dict(dcn)} has {wanted} slices, which do not divide the {len(devices)} "
            f"devices; the nearest number is {nearest_divisor(len(devices), wanted)}"
        )
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    size = len(devices) // wanted
    return [ordered[i : i + size] for i in range(0, len(devices), size)]


def _slices(count: int) -> str:
    return "slices" if count != 1 else "slice"


def _dcn_way_out(slices: int) -> str:
    return "set Mesh.dcn={}" if slices == 1 else f"set for example Mesh.dcn={{'data': {slices}}}"


def order_over_slices(
    sizes: Mapping[str, int], dcn: Mapping[str, int], slices: list[list[jax.Device]]
) -> np.ndarray:
    """Arrange devices in the shape of the mesh so that steps along an axis rarely leave a slice.

    Args:
      sizes: every axis of the mesh, over all slices.
      dcn: slices along an axis; 1 where it is missing.
      slices: the devices of each slice.
    """
    outer = [dcn.get(axis, 1) for axis in sizes]
    inner = [size // count for size, count in zip(sizes.values(), outer, strict=True)]
    blocks = np.empty(len(slices), dtype=object)
    for i, devices in enumerate(slices):
        blocks[i] = _order(inner, devices)
    return np.block(blocks.reshape(outer).tolist())
