"""Checkpoint store on Orbax: save and restore the train state on any mesh.

A checkpoint is one folder, `workdir/checkpoints/<step>/`. Orbax writes the arrays under readable
names (`params/layers/attention/query`) and one JSON object of the caller's (`extra`) into a
temporary folder and renames it; then its manifest is written, and only with it the checkpoint
is complete, and only then older ones are deleted. Leftovers of a kill are either complete
or recognized and removed; later damage on the disk is detected before use.
Memory-mapped arrays (parameters or optimizer state on disk) are written one at a time.
"""

import asyncio
import concurrent.futures
import functools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxtrain.config.buckets import AnyPath, BucketError, to_path
from jaxtrain.config.untrusted import parse_json
from jaxtrain.parallel.sharding import flatten
from jaxtrain.run.checkpoint import manifest, sealing
from jaxtrain.run.checkpoint.leaves import StoredLeaf, groups, require_same_leaves, stored_leaf
from jaxtrain.run.checkpoint.manifest import (
    CheckpointError,
    Leaf,
    Manifest,
    Reading,
    UnreadError,
    await_fingerprints,
    damage_error,
    fingerprints,
    start_fingerprints,
    unread,
)
from jaxtrain.run.checkpoint.sealing import WRITE_SECONDS, Sealer, drain, unwritten
from jaxtrain.training.settings import Checkpoint

# Replicas write disjoint slices of what they share. A smaller slice is not worth the program that
# XLA compiles for it: a tiny model on two replicas has 80 of them.
_SLICE_BYTES = 2**20


class _ArrayByArray(ocp.type_handlers.ArrayHandler):
    """Orbax's array handler, extended to arrays in files, each read, written and released."""

    def __init__(self) -> None:
        super().__init__()
        vars(self).update(vars(ocp.type_handlers.get_type_handler(jax.Array)))
        self._min_slice_bytes_for_replica_parallel = _SLICE_BYTES

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Returns when arrays in memory have left the devices; those in files are read while what
        is returned is waited for, and nothing may change them until then."""
        entries = list(zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True))
        there = [one for one in entries if not isinstance(one[0], jax.Array)]
        here = [one for one in entries if isinstance(one[0], jax.Array)]
        written = list(await super().serialize(*zip(*here, strict=True)))
        own = super().serialize

        async def array_by_array() -> None:
            # In sequence: Orbax adds a line to one file for each.
            for pending in written:
                await asyncio.to_thread(pending.result)
            for value, info, arg in there:
                for future in await own([value.read()], [info], [arg]):
                    await asyncio.to_thread(future.result)

        if not there:
            return written
        return [
            ocp.future.CommitFutureAwaitingContractedSignals(
                array_by_array(), name="arrays_in_files"
            )
        ]


def handler_registry() -> Any:
    """Return Orbax's handlers of a state's leaves: arrays, in memory or in files."""
    registry = ocp.type_handlers.create_type_handler_registry()

    def is_array(kind: type) -> bool:
        # An `offload.files.FileArray` is known by its method: the module is not imported for that.
        return issubclass(kind, jax.Array) or hasattr(kind, "read")

    registry.add(jax.Array, _ArrayByArray(), is_array)
    return registry


_STATE, _EXTRA_FILE = "state", "extra/metadata"  # where Orbax puts the two items of a save
_FILE_BYTES = (
    64 * 2**20
)  # approximate size of a data file: each is digested by one thread, so there should be several
_log = logging.getLogger(__name__)

Tree = TypeVar("Tree")


class Checkpoints:
    """Checkpoints of one run's folder.

    Attributes:
      folder: `workdir/checkpoints`, absolute.
      cleaned: a line for each leftover of killed saves that was removed.
    """

    def __init__(
        self,
        workdir: AnyPath,
        settings: Checkpoint,
        *,
        read_only: bool = False,
        report: Callable[[str], None] = _log.warning,
        may_write: Callable[[], None] = lambda: None,
        before_seal: Callable[[], None] = lambda: None,
    ) -> None:
        """Open `workdir/checkpoints`, creating it and removing leftovers of killed saves.

        Args:
          read_only: for programs that inspect a run that may be training: nothing
            is created or removed, because an unfinished save may be in progress.
          report: called with each line to print: little space, a failed save, a damaged
            checkpoint. Called from the thread that calls the method concerned.
          may_write: called before leftovers are removed and before each save, and on process 0
            again before the save counts as done, then in another thread; raises or exits where
            another attempt owns the folder. Its error is raised here, in `save` or `wait`.
          before_seal: then called, in that thread: copies to the run's folder the files that belong
            to the checkpoint. If it raises OSError the save has failed.
        """
        # Orbax logs every phase of every save through absl's logger; failures come as exceptions.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        root = to_path(workdir)
        self.folder = (root.absolute() if isinstance(root, Path) else root) / sealing.FOLDER
        self._settings, self._read_only = settings, read_only
        self._report, self._may_write = report, may_write
        self._sealer = Sealer(
            self.folder,
            keep=settings.keep,
            keep_every=settings.keep_every,
            max_failures=settings.max_failed_saves,
            barrier=_barrier,
            report=report,
            may_write=may_write,
            before_seal=before_seal,
        )
        # Uncompressed: float32 parameters lose 8% of their bytes to zstd, for most of the time.
        arrays = ocp.PyTreeCheckpointHandler(
            use_compression=False, type_handler_registry=handler_registry()
        )
        options = ocp.AsyncOptions(
            timeout_secs=WRITE_SECONDS,
            barrier_sync_fn=self._sealer.barrier_of_writer,
            # Where a folder cannot be made next to the steps, Orbax's other threads wait for it
            # until a timeout, and the interpreter for them: 20 minutes. Several processes end
            # without waiting for threads.
            create_directories_asynchronously=jax.process_count() > 1,
        )
        items = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(async_options=options),
            state=arrays,
            extra=ocp.JsonCheckpointHandler(),
        )
        self._writer = ocp.AsyncCheckpointer(items, async_options=options)
        self._reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
        # Steps whose files have been compared with their digests, and those found damaged.
        self._intact: dict[int, Manifest] = {}
        self._bad: dict[int, CheckpointError] = {}
        self.cleaned: list[str] = []
        if not read_only and jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            if sealing.leftovers(self.folder):
                may_write()
                self.cleaned = sealing.sweep(self.folder)

    def latest_step(self) -> int | None:
        """Return the newest complete checkpoint's step, or None; `newest_good` also reads its
        files."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, in order."""
        return sealing.sealed_steps(self.folder)

    def newest_good(self) -> int | None:
        """Return the newest step whose files are all intact; called by all processes.

        Newer damaged ones are moved aside: renamed to `damaged-<step>`, so that their steps
        may be saved again, or, if opened read-only, left in place.

        Returns:
          None if there is no checkpoint.

        Raises:
          CheckpointError: there are checkpoints, and none of them is good; nothing was changed. Or
            one cannot be read because of a system error.
          UserError: a newer jaxtrain wrote the newest checkpoint.
        """
        while True:
            step = max((step for step in self.steps() if step not in self._bad), default=-1)
            step = int(ocp.multihost.broadcast_one_to_all(np.int32(step)))
            if step < 0:
                break
            try:
                self._check_files(step)
            except UnreadError:
                raise
            except CheckpointError as error:
                self.pass_over(step, error)
                continue
            self.put_aside()
            return step
        if not self._bad:
            return None
        # Without any the run would restart, and discard its metrics.
        newest, *before = sorted(self._bad, reverse=True)
        steps = "that of step" if len(before) == 1 else "those of steps"
        nor = f", nor can {steps} {', '.join(map(str, before))}" if before else ""
        raise CheckpointError(
            f"{self._bad[newest]}{nor}: no good one is left, and nothing was changed; restore one "
            f"from a backup, or delete {self.folder} to begin at step 0"
        )

    def pass_over(self, step: int, error: CheckpointError) -> None:
        """Let `newest_good` fall back to one before a damaged checkpoint; called by all
        processes."""
        self._bad[step] = error

    def put_aside(self, instead: str = "the previous checkpoint is used") -> None:
        """Report the damaged checkpoints that were skipped for a good one, and rename them,
        unless opened read-only.

        Args:
          instead: what is used, for the report.
        """
        for step, error in sorted(self._bad.items(), reverse=True):
            renamed = ""
            if not self._read_only and jax.process_index() == 0:
                self._may_write()
                moved_to = sealing.put_aside(self.folder, step)
                renamed = f"it was moved to {moved_to}: inspect and delete it; "
            self._report(f"{error}; {renamed}{instead}")
        if not self._read_only:
            self._bad.clear()

    def keep_best(self, steps: Sequence[int]) -> None:
        """From now on keep the last of these steps that is saved, however many are newer.

        Args:
          steps: each better than those before it.
        """
        self._sealer.best = tuple(steps)

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints newer than `step`, to which a run goes back; called by all
        processes.

        The next attempt would find them, although the run has abandoned them.
        """
        self._sealer.settle()
        if jax.process_index() == 0:
            self._may_write()
            for newer in self.steps():
                if newer > step:
                    sealing.delete(self.folder, newer)
        _from_all(1)  # no process continues and saves one of these steps before they are deleted

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Save `state` and `extra` as the checkpoint of `step`; called by all processes.

        Returns when the arrays are in host memory, so that the next step may be given (donated)
        their buffers; the disk is written during the next steps. A save still being written
        is waited for first. If it failed, its leftovers are removed and it is reported; the run
        continues and saves again when the next save is due. An existing step are unchanged.
        For arrays in files, which the next step changes, the write is waited for too.

        Args:
          step: number of optimizer steps done.
          state: any pytree of arrays.
          extra: JSON-able values that belong to the state: config, data position, versions.

        Raises:
          CheckpointError: Checkpoint.max_failed_saves consecutive saves before this one failed.
        """
        assert not self._read_only, "opened read-only"
        self._sealer.settle()
        last = away = None
        try:
            steps = self.steps()
            if step in steps:
                return
            last = max(steps, default=None)
            self._may_write()
        except BucketError as error:
            away = error
        self._bad.pop(step, None)
        self._intact.pop(step, None)
        # Detects unserializable values here, and isolates it from later changes by the caller.
        extra = json.loads(json.dumps(extra))
        names, leaves, _ = flatten(state)
        self._sealer.warn_of_little_space(last)
        arrays = dict(zip(names, leaves, strict=True))
        counted = start_fingerprints(arrays)  # while the writer copies them
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays, ocdbt_target_data_file_size=_FILE_BYTES),
            extra=ocp.args.JsonSave(extra),
        )
        written = functools.partial(drain, self._writer.wait_until_finished)
        self._sealer.begin()
        try:
            if away is not None:  # existing content would be overwritten
                raise away
            self._writer.save(str(self._path(step)), args=items, force=True)
        except unwritten() as error:
            written = functools.partial(drain, self._writer.wait_until_finished, error)
        found = await_fingerprints(counted)
        summaries = {
            name: Leaf(found[name], tuple(x.shape), np.dtype(x.dtype).name)
            for name, x in arrays.items()
        }
        self._sealer.follow(step, written, summaries)
        if not self._settings.asynchronous or any(not isinstance(x, jax.Array) for x in leaves):
            self._sealer.settle()

    def restore(self, step: int, abstract_state: Tree, *, partial: bool = False) -> Tree:
        """Return the state of `step`, in the shardings of `abstract_state`, whatever mesh wrote it.

        Called by all processes. The files' digests are compared, and the arrays' fingerprints; one
        process alone does the former while it reads. The result has passed both.

        Args:
          abstract_state: the requested tree, each leaf a `jax.ShapeDtypeStruct` with a sharding.
          partial: `abstract_state` is a part of the saved tree under the same names, for example
            `{"params": ...}`; what it does not name is not read.

        Raises:
          UserError: the saved tree has other leaves, shapes or dtypes: nothing is cast or reshaped.
          ValueError: a shape does not divide over its sharding.
          CheckpointError: the files cannot be read or are damaged.
        """
        names, leaves, treedef = flatten(abstract_state)
        wanted = dict(zip(names, leaves, strict=True))
        if jax.process_count() > 1:
            self._validate_absent(step)
            # All agree first: a process that stopped halfway would leave the others waiting.
            self._check_files(step)
        try:
            stored = self.tree(step)
        except CheckpointError:
            self._check_files(step)  # names the file, if only Orbax reads it
            raise
        require_same_leaves(wanted, stored, partial=partial, folder=self._path(step))
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="check") as thread:
            checked = thread.submit(self._check_files, step)
            try:
                arrays = self._read(step, wanted, partial=partial)
                found = fingerprints(arrays)
            finally:
                saved = checked.result().leaves  # names the file, if reading it failed too
        altered = [n for n, x in found.items() if n not in saved or x != saved[n].fingerprint]
        if altered:
            names = ", ".join(altered[:8])
            raise damage_error(self._path(step), step, f"the bytes of {names} changed")
        return jax.tree.unflatten(treedef, [arrays[name] for name in wanted])

    def reject_left_over(self, step: int, abstract_state: Any) -> None:
        """Raise UserError if `step` has arrays that this state, read in parts, lacks."""
        stored = self.tree(step)
        names, leaves, _ = flatten(abstract_state)
        known: dict[str, Any] = dict(zip(names, leaves, strict=True))
        known |= {name: leaf for name, leaf in stored.items() if name in known}
        require_same_leaves(known, stored, partial=False, folder=self._path(step))

    def _read(
        self, step: int, wanted: dict[str, jax.ShapeDtypeStruct], *, partial: bool
    ) -> dict[str, jax.Array]:
        """Return the arrays of these names."""
        for leaf in wanted.values():
            leaf.sharding.shard_shape(leaf.shape)  # ValueError where it does not divide
        restore_args = {
            name: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)
            for name, x in wanted.items()
        }
        item = ocp.args.PyTreeRestore(
            item=wanted, restore_args=restore_args, partial_restore=partial
        )
        with Reading(self._path(step), step):
            return self._reader.restore(str(self._path(step) / _STATE), args=item)

    def extra(self, step: int) -> dict[str, Any]:
        """Return the JSON object saved with `step`.

        Raises:
          UserError: there is no such checkpoint.
          CheckpointError: the file cannot be read or is damaged.
        """
        self._check_described(step, lambda name: name == _EXTRA_FILE)
        with Reading(self._path(step), step):
            return parse_json((self._path(step) / _EXTRA_FILE).read_bytes())

    def tree(self, step: int) -> dict[str, StoredLeaf]:
        """Names, shapes, dtypes and shardings of the arrays saved at `step`, none of them read.

        Raises:
          UserError: there is no such checkpoint.
          CheckpointError: its metadata cannot be read or are damaged.
        """
        self._check_described(step, lambda name: "/d/" not in name)
        with Reading(self._path(step), step):
            found: Any = self._reader.metadata(str(self._path(step) / _STATE)).item_metadata
            if found is None:
                raise ValueError("Orbax cannot read its metadata, and says why in its log")
            return {name: stored_leaf(leaf) for name, leaf in found.tree.items()}

    def verify(self, step: int) -> None:
        """Read all of `step`: every file, then every array, a few at a time onto one device.

        Raises:
          UserError: there is no such checkpoint.
          CheckpointError: something cannot be read or is damaged.
        """
        self._validate_absent(step)
        self._intact.pop(step, None)
        self._check_files(step)
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        for part in groups(self.tree(step)):
            wanted = {
                name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
                for name, leaf in part.items()
            }
            self.restore(step, wanted, partial=True)
        self.extra(step)

    def wait(self) -> None:
        """Return when the last save is complete on disk, for all processes.

        Raises:
          CheckpointError: it failed; its leftovers are removed.
        """
        self._sealer.wait()

    def close(self) -> None:
        """Wait for the save in progress and close the folder; raises like `wait`."""
        try:
            self.wait()
        finally:
            self._writer.close()
            self._sealer.close()
            self._reader.close()

    # -- reading ------------------------------------------------------------------------------

    def _path(self, step: int) -> AnyPath:
        return self.folder / str(step)

    def _check_described(self, step: int, wanted: Callable[[str], bool]) -> None:
        """Compare the requested files with the manifest, on this process alone."""
        self._validate_absent(step)
        found = manifest.read(self._path(step), step)
        manifest.check(self._path(step), found, filter(wanted, found.files))

    def _check_files(self, step: int) -> Manifest:
        """Compare all files with their digests, each process a part; all raise, or none."""
        if step in self._intact:
            return self._intact[step]
        own = found = None
        try:
            found = manifest.read(self._path(step), step)
            share = list(found.files)[jax.process_index() :: jax.process_count()]
            manifest.check(self._path(step), found, share)
        except CheckpointError as error:
            own = error
        # System errors take precedence over damage: none moves aside what another cannot read.
        worst = 0 if own is None else 2 if isinstance(own, UnreadError) else 1
        worst_of_each = _from_all(worst)
        found_by = int(np.argmax(worst_of_each))
        if own is not None and worst == worst_of_each[found_by]:
            raise own
        if worst_of_each[found_by] == 2:
            raise unread(self._path(step), step, f"process {found_by} may not")
        if worst_of_each[found_by] == 1:
            raise damage_error(self._path(step), step, f"process {found_by} found it damaged")
        assert found is not None
        self._intact[step] = found
        return found

    def _validate_absent(self, step: int) -> None:
        if step not in self.steps() and self._path(step).exists():
            manifest.read(self._path(step), step)  # which explains why it is invalid
        sealing.require_sealed(self.folder, step)


def _from_all(number: int) -> np.ndarray:
    """Return every process's value, in order."""
    if jax.process_count() == 1:
        return np.array([number])
    return np.asarray(multihost_utils.process_allgather(np.array(number))).reshape(-1)


def _barrier(*, key: str, timeout_ms: int) -> None:
    # Through the coordination service: any thread may wait for it.
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)
