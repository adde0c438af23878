"""Saves the train state and restores it on any mesh: the only module that knows Orbax.

A checkpoint is one folder, `workdir/checkpoints/<step>/`, complete or absent: Orbax writes into a
temporary folder and renames it when everything is on disk. Inside lie the arrays under readable
names (`params/layers/attention/query`), one JSON object of the caller's (`extra`), and a
fingerprint of each array: TensorStore has checksums for its indices but none for the arrays' own
bytes, so that a flipped bit on the disk would come back as a wrong parameter.
"""

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxtrain.config import configurable
from jaxtrain.errors import UserError, nearest

FOLDER = "checkpoints"
_STATE, _EXTRA, _FINGERPRINTS = "state", "extra", "fingerprints"
# What Orbax and TensorStore raise for files that are missing, cut short or altered; TensorStore's
# statuses (DATA_LOSS, NOT_FOUND, ...) arrive as ValueError. What the devices raise, such as out of
# memory (jax.errors.JaxRuntimeError), is not among them.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)
_MAX_DIFFERENCES = 8

Tree = TypeVar("Tree")


class CheckpointError(RuntimeError):
    """A checkpoint whose files cannot be read: damaged, cut short or not written by jaxtrain."""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Which checkpoints stay on disk and how they get there.

    Attributes:
      keep: number of newest checkpoints kept; at least 1.
      keep_every: steps that are multiples of this are kept for ever; None keeps only the newest.
      asynchronous: write to disk while the next steps run; False waits for the disk.
    """

    keep: int = 3
    keep_every: int | None = None
    asynchronous: bool = True

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UserError(f"Checkpoint.keep = {self.keep}: at least 1 checkpoint must be kept")
        if self.keep_every is not None and self.keep_every < 1:
            raise UserError(
                f"Checkpoint.keep_every = {self.keep_every}: a number of steps of at least 1, "
                "or None to keep only the newest"
            )


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """One array of a checkpoint, as its metadata tell it.

    Attributes:
      shape: global shape.
      dtype: the dtype it was saved with.
      mesh: axis sizes of the mesh it was saved from; None for an array on a single device.
      spec: its PartitionSpec's entries on that mesh; None for an array on a single device.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    mesh: dict[str, int] | None = None
    spec: tuple[Any, ...] | None = None


class Checkpoints:
    """The checkpoints of one run's folder."""

    def __init__(self, workdir: Path, settings: Checkpoint, *, read_only: bool = False) -> None:
        """Opens `workdir/checkpoints`, making it and removing what killed saves left behind.

        Args:
          read_only: for programs that look at a run which may be training at this moment: nothing
            is made or removed, because an unfinished save may be a living one.
        """
        # Orbax tells every phase of every save through absl's logger; failures come as exceptions.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.folder = Path(workdir).absolute() / FOLDER
        self._read_only = read_only
        policies: list[ocp.checkpoint_managers.PreservationPolicy] = [
            ocp.checkpoint_managers.LatestN(settings.keep)
        ]
        if settings.keep_every is not None:
            policies.append(ocp.checkpoint_managers.EveryNSteps(settings.keep_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
            enable_async_checkpointing=settings.asynchronous,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
        )
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=options,
            item_names=(_STATE, _EXTRA, _FINGERPRINTS),
            item_handlers={
                _STATE: ocp.PyTreeCheckpointHandler(),
                _EXTRA: ocp.JsonCheckpointHandler(),
                _FINGERPRINTS: ocp.JsonCheckpointHandler(),
            },
        )

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step, or None where there is none."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Saves `state` and `extra` as the checkpoint of `step`.

        Returns when the arrays have been copied to host memory, so that the next step may be given
        (donated) their buffers; the disk is written behind the next steps' back. A save that is
        still being written is waited for first, and its failure is raised here. A step that is
        already there is left as it is: the same run at the same step has the same state.

        Args:
          step: number of optimizer steps done.
          state: any pytree of arrays.
          extra: JSON-able values that belong to the state: config, data position, versions.
        """
        assert not self._read_only, "opened read-only"
        if step in self.steps():
            return
        # Serialised here: an unserialisable value is found before anything is written, and a dict
        # that the caller goes on changing does not reach the writing thread.
        extra = json.loads(json.dumps(extra))
        names, leaves, _ = _flatten(state)
        arrays = dict(zip(names, leaves, strict=True))
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{
                    _STATE: ocp.args.PyTreeSave(arrays),
                    _EXTRA: ocp.args.JsonSave(extra),
                    _FINGERPRINTS: ocp.args.JsonSave(_fingerprints(arrays)),
                }
            ),
            force=True,
        )

    def restore(self, step: int, abstract_state: Tree, *, partial: bool = False) -> Tree:
        """The state of `step`, in the shardings of `abstract_state`, whatever mesh wrote it.

        Args:
          abstract_state: the tree wanted, each leaf a `jax.ShapeDtypeStruct` with a sharding.
          partial: `abstract_state` is a part of the saved tree under the same names, for example
            `{"params": ...}`; what it does not name is not read.

        Raises:
          UserError: the saved tree has other leaves, shapes or dtypes: nothing is cast or reshaped.
          ValueError: a shape does not divide over its sharding.
          CheckpointError: the files cannot be read.
        """
        names, leaves, treedef = _flatten(abstract_state)
        wanted = dict(zip(names, leaves, strict=True))
        self._refuse_differences(step, wanted, partial=partial)
        for leaf in wanted.values():
            leaf.sharding.shard_shape(leaf.shape)  # ValueError where it does not divide
        restore_args = {
            name: ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            )
            for name, leaf in wanted.items()
        }
        item = ocp.args.PyTreeRestore(
            item=wanted, restore_args=restore_args, partial_restore=partial
        )
        arrays = self._read(step, _STATE, item)
        saved = self._read(step, _FINGERPRINTS, ocp.args.JsonRestore())
        altered = [
            name for name, found in _fingerprints(arrays).items() if found != saved.get(name)
        ]
        if altered:
            names = ", ".join(altered[:_MAX_DIFFERENCES])
            raise _damaged(self.folder, step, f"the bytes of {names} changed")
        return jax.tree.unflatten(treedef, [arrays[name] for name in names])

    def extra(self, step: int) -> dict[str, Any]:
        """The JSON object saved with `step`.

        Raises:
          UserError: there is no such checkpoint.
          CheckpointError: the file cannot be read.
        """
        return self._read(step, _EXTRA, ocp.args.JsonRestore())

    def tree(self, step: int) -> dict[str, StoredLeaf]:
        """Names, shapes, dtypes and shardings of the arrays saved at `step`, none of them read.

        Raises:
          UserError: there is no such checkpoint.
          CheckpointError: its metadata cannot be read.
        """
        self._refuse_absent(step)
        with _Reading(self.folder, step):
            metadata = self._manager.item_metadata(step)[_STATE]
            return {name: _stored_leaf(leaf) for name, leaf in metadata.tree.items()}

    def verify(self, step: int) -> None:
        """Reads every array of `step`, one after the other onto one device, and checks it.

        Raises:
          UserError: there is no such checkpoint.
          CheckpointError: something cannot be read or is not what was written.
        """
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        for name, leaf in self.tree(step).items():
            abstract = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            self.restore(step, {name: abstract}, partial=True)
        self.extra(step)

    def wait(self) -> None:
        """Returns when the save in progress is complete on disk; raises what went wrong with it."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the save in progress and lets go of the folder."""
        self._manager.close()

    # -- reading -------------------------------------------------------------------------------

    def _read(self, step: int, item: str, arguments: Any) -> Any:
        self._refuse_absent(step)
        with _Reading(self.folder, step):
            return self._manager.restore(step, args=ocp.args.Composite(**{item: arguments}))[item]

    def _refuse_absent(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            there = f"there are {', '.join(map(str, steps))}" if steps else "there is none at all"
            raise UserError(f"no checkpoint of step {step} in {self.folder}; {there}")

    def _refuse_differences(
        self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct], *, partial: bool
    ) -> None:
        stored = self.tree(step)
        differences = list(_differences(wanted, stored, partial=partial))
        if not differences:
            return
        shown = differences[:_MAX_DIFFERENCES]
        rest = len(differences) - len(shown)
        lines = [f"  {line}" for line in shown] + ([f"  and {rest} more"] if rest else [])
        raise UserError(
            f"the checkpoint of step {step} in {self.folder} was written by another model or "
            f"optimizer than this configuration's ({len(differences)} of its leaves differ); "
            "use the config.gin beside it, or another workdir:\n" + "\n".join(lines)
        )


def _differences(
    wanted: Mapping[str, jax.ShapeDtypeStruct], stored: Mapping[str, StoredLeaf], *, partial: bool
) -> Iterable[str]:
    """One clause for each leaf that is missing, left over, or of another shape or dtype."""
    for name, leaf in wanted.items():
        if name not in stored:
            close = nearest(name, stored.keys() - wanted.keys())
            hint = f" (it has {close})" if close else ""
            yield f"{name}: not in the checkpoint{hint}"
        elif (tuple(leaf.shape), leaf.dtype) != (stored[name].shape, stored[name].dtype):
            yield (
                f"{name}: {_form(stored[name])} in the checkpoint, {_form(leaf)} in this "
                "configuration"
            )
    if not partial:
        for name in stored.keys() - wanted.keys():
            yield f"{name}: {_form(stored[name])} in the checkpoint, absent from this configuration"


def _fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """One number for each array: the same on every mesh, another if any element changes."""
    # One program for all arrays: a program each, all in flight, starves simulated devices' threads
    # until their reductions wait for one another for ever.
    found = jax.device_get(_fingerprint_all(dict(arrays)))
    return {name: int(x) for name, x in found.items()}


@jax.jit
def _fingerprint_all(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _fingerprint(x) for name, x in arrays.items()}


def _fingerprint(x: jax.Array) -> jax.Array:
    """The elements' bits times an odd number drawn from each one's place, summed modulo 2**32.

    Sums of integers do not depend on their order, so the layout does not matter; an odd factor has
    an inverse modulo 2**32, so no change of a single element goes unseen.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    place = jnp.uint32(0)
    for axis, size in enumerate(bits.shape):
        index = jnp.arange(size, dtype=jnp.uint32)
        place = place * jnp.uint32(size) + jnp.expand_dims(index, range(1, bits.ndim - axis))
    # 2654435769 = 2**32 / golden ratio (Knuth, The Art of Computer Programming 3, section 6.4).
    return jnp.sum(bits * (place * jnp.uint32(2654435769) | jnp.uint32(1)), dtype=jnp.uint32)


class _Reading:
    """While a checkpoint is read: what its files raise becomes a CheckpointError.

    A context manager, because Orbax raises a bare Exception for an array that it cannot read.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if type(error) is Exception or isinstance(error, _DAMAGE):
            cause = error.__cause__ or error
            detail = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise _damaged(self._folder, self._step, detail[:300]) from error


def _damaged(folder: Path, step: int, detail: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {step} in {folder / str(step)} cannot be read ({detail}); "
        "where its files are damaged, delete that folder to go on from the one before it"
    )


def _form(leaf: jax.ShapeDtypeStruct | StoredLeaf) -> str:
    return f"{np.dtype(leaf.dtype).name}[{', '.join(map(str, leaf.shape))}]"


def _flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Names, leaves and structure of a pytree; a name joins the keys on the way with "/"."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [_name(path) for path, _ in paths]
    assert len(set(names)) == len(names), "two leaves of the state have one name"
    return names, [leaf for _, leaf in paths], treedef


def _name(path: tuple[Any, ...]) -> str:
    # A parameter object (flax's Variable) is a pytree node whose one child is called "value";
    # the array it holds is called as the parameter is.
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _stored_leaf(leaf: Any) -> StoredLeaf:
    sharding = leaf.sharding
    mesh = spec = None
    if hasattr(sharding, "partition_spec"):
        mesh = dict(zip(sharding.axis_names, map(int, sharding.shape), strict=True))
        spec = tuple(sharding.partition_spec)
    return StoredLeaf(tuple(leaf.shape), np.dtype(leaf.dtype), mesh, spec)
