"""Local checkpoint tier: frequent saves to each host's own disk or memory, with copies on peers.

Each process writes its own shards to `<local_directory>/<run>/<layout key>/<step>/`, without
waiting for the others. Whether a step is whole is decided when a run resumes: all processes gather
which folders they hold, and restore the newest step of which every process finds its shards, on its
own disk or on a peer's. `<run>` comes from a random id in `checkpoints/local.json` of the run's
folder. It is drawn again whenever the run resumes from anything else, so that no abandoned state is
ever found.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.config.buckets import AnyPath, on_disk
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import full_disk, path_errors, remove_tree, write_atomically
from jaxtrain.config.untrusted import parse_json
from jaxtrain.run.checkpoint import local_shards, manifest, sealing
from jaxtrain.run.checkpoint.local_peers import PeerCopies
from jaxtrain.run.checkpoint.manifest import (
    CheckpointError,
    Leaf,
    await_fingerprints,
    damage_error,
    fingerprints,
    start_fingerprints,
)
from jaxtrain.training.settings import Checkpoint

_ID = re.compile(r"[0-9a-f]{16}")
_OWNER = "workdir"  # in the run's folder here: for whoever finds it


@dataclasses.dataclass(frozen=True)
class Restored:
    """A state from local checkpoints.

    Attributes:
      step: of the state.
      arrays: the global arrays by name.
      extra: its metadata.
      line: where it was found, to print.
    """

    step: int
    arrays: dict[str, jax.Array]
    extra: dict[str, Any]
    line: str


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Who writes what; equal for a whole attempt.

    Attributes:
      key: of this process's shards.
      writes: whether this process writes them, and not another one with the same disk.
      copies: shards of other hosts that this process copies: their keys, and the addresses of the
        processes that write them.
    """

    key: str
    writes: bool
    copies: Mapping[str, str]


class LocalCheckpoints:
    """Local checkpoints of one run; methods are called by all processes unless they say otherwise.

    Attributes:
      interval: steps between two saves.
    """

    def __init__(
        self,
        settings: Checkpoint,
        folder: AnyPath,
        *,
        layer_order: list[int] | None,
        report: Callable[[str], None],
        may_write: Callable[[], None],
        token: bytes | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        """Create the local directory and look for checkpoints of this run; none is read yet.

        Args:
          settings: with a `local_directory`.
          folder: `workdir/checkpoints`.
          layer_order: of a pipeline.
          report: called with each line to print, on every process.
          may_write: raises or exits if another attempt owns the run's folder.
          token: the run's secret; None: no copies on peers.
          address: of this machine, for peers.

        Raises:
          UserError: the directory cannot be created or belongs to another user.
        """
        assert settings.local_directory is not None
        named = f"Checkpoint.local_directory={settings.local_directory!r}"
        self._root = _root(settings.local_directory, named)
        with path_errors(named, needs="use a folder that can be made and written"):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.interval, self._keep = settings.local_interval, settings.local_keep
        self._asynchronous = settings.asynchronous
        self._folder, self._layer_order = folder, layer_order
        self._report, self._may_write = report, may_write
        self._storage = _storage(self._root)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="local")
        self._pending: concurrent.futures.Future[list[str]] | None = None
        self._plan: _Plan | None = None
        self._run: Path | None = None
        self._peers: PeerCopies | None = None
        if token is not None and jax.process_count() > 1:
            self._peers = PeerCopies(self._root, token, address, report)
        self._open_run(self._agree_on_id())
        self._warn_of_other_runs(named)

    def restore(
        self, wanted: Mapping[str, jax.ShapeDtypeStruct], *, at_least: int
    ) -> Restored | None:
        """Return the newest state of which all shards are found and intact; None if there is none.

        Args:
          wanted: its arrays by name, each with a sharding.
          at_least: older steps are not of interest.
        """
        self._settle()
        key = local_shards.layout_key(wanted, self._layer_order)
        failed: set[int] = set()
        lines: list[str] = []
        while True:
            row = {
                "key": key,
                "storage": self._storage,
                "held": [one for one in self._list_sealed() if one[1] >= at_least],
                "failed": sorted(failed),
                "address": self._address(),
            }
            rows = _gather(row)
            step = _newest_whole(rows)
            if step is None:
                if jax.process_index() == 0 and any(row["held"] for row in rows):
                    self._report(_not_whole(rows))
                return None
            found = self._obtain(step, key, rows, lines)
            for line in lines:
                self._report(line)
            lines.clear()
            sources = _gather(None if found is None else found[1])
            if found is None:
                failed.add(step)
            if None in sources:
                continue
            assert found is not None
            folder, _ = found
            arrays, error = self._read(folder, step, wanted)
            if error is not None:
                self._report(f"{error}; another checkpoint is used")
            if not all(_gather(error is None)):
                failed.add(step)
                continue
            assert self._drawn is not None
            self._write_id(self._drawn, step)
            return Restored(
                step,
                arrays,
                local_shards.read_extra(folder, step),
                _where(step, self._root, sources),
            )

    def save(self, step: int, arrays: Mapping[str, jax.Array], extra: dict[str, Any]) -> None:
        """Copy the state to host memory; it is written, and copied to peers, in the background.

        A failure is reported and costs this checkpoint alone.

        Args:
          step: of the state.
          arrays: the state by name.
          extra: JSON-able metadata.
        """
        self._settle()
        if self._run is None:
            self._begin_run()
        if self._plan is None:
            self._plan = self._make_plan(local_shards.layout_key(arrays, self._layer_order))
        plan = self._plan
        counted = start_fingerprints(arrays)
        content = local_shards.copy_to_host(arrays) if plan.writes else {}
        found = await_fingerprints(counted)
        leaves = {
            name: Leaf(found[name], tuple(x.shape), np.dtype(x.dtype).name)
            for name, x in arrays.items()
        }
        # Isolated from later changes by the caller.
        extra = json.loads(json.dumps(extra))
        self._pending = self._thread.submit(self._write, plan, step, content, leaves, extra)
        if not self._asynchronous:
            self._settle()

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints newer than `step`, to which a run goes back."""
        self._settle()
        self._forget_written()
        for key, newer in self._list_sealed():
            if newer > step and self._run is not None:
                _remove(self._run / key / str(newer))
        _gather(None)  # no process continues before they are deleted

    def abandon(self) -> None:
        """Delete all checkpoints: the run resumes from another state than the newest of them."""
        self._settle()
        self._forget_written()
        _gather(None)  # no peer still reads them
        run, self._run, self._plan = self._run, None, None
        if run is None:
            return
        self._may_write()
        if jax.process_index() == 0:
            (self._folder / sealing.LOCAL_ID_FILE).unlink(missing_ok=True)
        _remove(run)

    def close(self) -> None:
        """Wait for the save in progress."""
        try:
            self._settle()
        finally:
            self._thread.shutdown()
            if self._peers is not None:
                self._peers.close()

    # -- the run's folder ------------------------------------------------------------------------

    def _agree_on_id(self) -> str | None:
        """Return the id in the run's folder, as process 0 reads it."""
        found = None
        if jax.process_index() == 0:
            # Missing, or damaged.
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                found = str(parse_json((self._folder / sealing.LOCAL_ID_FILE).read_bytes())["id"])
        found = _gather(found)[0]
        return found if found is not None and _ID.fullmatch(found) else None

    def _write_id(self, drawn: str, resumed: int | None) -> None:
        """Write the id, and the step that the run has resumed from last, on process 0."""
        if jax.process_index() == 0:
            self._may_write()
            content = {"id": drawn, "resumed_step": resumed}
            write_atomically(self._folder / sealing.LOCAL_ID_FILE, json.dumps(content).encode())

    def _begin_run(self) -> None:
        """Draw an id, so that only checkpoints from now on are found."""
        drawn = _gather(secrets.token_hex(8))[0]
        self._write_id(drawn, None)
        self._open_run(drawn)
        assert self._run is not None
        with contextlib.suppress(FileExistsError):  # another process of this host
            self._run.mkdir(mode=0o700)
        (self._run / _OWNER).write_text(f"{self._folder.parent}\n")

    def _open_run(self, drawn: str | None) -> None:
        self._drawn = drawn
        if drawn is None:
            self._run = None
            return
        # A copy of a run's folder is another run.
        where = str(self._folder.parent)
        name = hashlib.blake2b(f"{drawn} {where}".encode(), digest_size=8).hexdigest()
        name = _gather(name)[0]
        self._run = self._root / name
        if self._run.is_symlink() or (
            self._run.exists() and self._run.stat().st_uid != os.geteuid()
        ):
            raise UserError(
                f"Checkpoint.local_directory: {self._run} is a link or belongs to another user; "
                "remove it, or use another directory"
            )

    def _warn_of_other_runs(self, named: str) -> None:
        others = [
            path
            for path in sorted(self._root.iterdir())
            if _ID.fullmatch(path.name) and path != self._run and path.is_dir()
        ]
        if not others:
            return
        size = 0
        with contextlib.suppress(OSError):  # another user's, or a run that is deleting files
            size = sum(sealing.folder_size(path) for path in others)
        first, *more = others
        owner = "an unknown run"
        with contextlib.suppress(OSError):
            owner = (first / _OWNER).read_text().strip()
        rest = f" and {len(more)} more" if more else ""
        self._report(
            f"{named} also holds {size:,} bytes of {owner} ({first}{rest}), which this run "
            "does not use; delete the folders of runs that have ended"
        )

    def _list_sealed(self) -> list[tuple[str, int]]:
        """Return layout key and step of each sealed folder on this process's disk."""
        if self._run is None or not self._run.is_dir():
            return []
        keys = [path for path in sorted(self._run.iterdir()) if _ID.fullmatch(path.name)]
        return [(path.name, step) for path in keys for step in sealing.sealed_steps(path)]

    # -- restoring -------------------------------------------------------------------------------

    def _obtain(
        self, step: int, key: str, rows: Sequence[dict[str, Any]], lines: list[str]
    ) -> tuple[Path, int | None] | None:
        """Return an intact folder with this process's shards, and the process that it came from
        (-1: its own disk); None if there is none. Damaged ones are deleted."""
        assert self._run is not None
        folder = self._run / key / str(step)
        if (key, step) in self._list_sealed():
            try:
                local_shards.check(folder, step)
            except CheckpointError as error:
                lines.append(f"{error}; it is deleted, and a copy is used if there is one")
                _remove(folder)
            else:
                return folder, -1
        return self._fetch(folder, rows, lines)

    def _fetch(
        self, folder: Path, rows: Sequence[dict[str, Any]], lines: list[str]
    ) -> tuple[Path, int] | None:
        """Copy a folder from one of the peers that hold it; return it and the peer's process."""
        key, step = folder.parent.name, int(folder.name)
        holders = [
            process
            for process, row in enumerate(rows)
            if [key, step] in row["held"] and row["storage"] != self._storage
        ]
        for process in holders:
            try:
                if self._peers is None:
                    break
                self._peers.fetch(rows[process]["address"], folder)
                return folder, process
            except (OSError, CheckpointError) as error:
                lines.append(f"process {process}'s copy of step {step} cannot be used ({error})")
        return None

    def _read(
        self, folder: Path, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct]
    ) -> tuple[dict[str, jax.Array], CheckpointError | None]:
        """Return the arrays, and an error if they are not those that were saved."""
        arrays: dict[str, jax.Array] = {}
        leaves: dict[str, Leaf] = {}
        try:
            leaves = manifest.read(folder, step).leaves
            arrays = local_shards.read(folder, step, wanted)
            error = None
        except CheckpointError as found:
            error = found
        if not all(_gather(error is None)):
            return arrays, error
        altered = [n for n, x in fingerprints(arrays).items() if x != leaves[n].fingerprint]
        if altered:
            error = damage_error(folder, step, f"the bytes of {', '.join(altered[:8])} changed")
        return arrays, error

    # -- saving ----------------------------------------------------------------------------------

    def _address(self) -> str | None:
        return None if self._peers is None else self._peers.address

    def _make_plan(self, key: str) -> _Plan:
        row = {
            "key": key,
            "storage": self._storage,
            "host": socket.gethostname(),
            "address": self._address(),
        }
        rows = _gather(row)
        own = jax.process_index()
        same = [p for p, r in enumerate(rows) if (r["key"], r["storage"]) == (key, self._storage)]
        copied = _copies(rows)
        copies = {rows[source]["key"]: rows[source]["address"] for source in copied.get(own, ())}
        return _Plan(key, writes=same[0] == own, copies=copies)

    def _settle(self) -> None:
        """Wait for the save in progress and report its failures."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        for line in pending.result():
            self._report(line)

    def _forget_written(self) -> None:
        if self._peers is not None:
            self._peers.finish(-1)

    # -- in the thread -----------------------------------------------------------------------------

    def _write(
        self,
        plan: _Plan,
        step: int,
        content: local_shards.Shards,
        leaves: dict[str, Leaf],
        extra: dict[str, Any],
    ) -> list[str]:
        """Write this process's shards, then copy those of its peers; return lines to report."""
        assert self._run is not None
        lines = []
        own, temporary = self._run / plan.key, self._run / plan.key / f"{step}.tmp"
        try:
            self._may_write()
            # All processes have taken part in this step, so they have sealed the last but one.
            for key in [plan.key, *plan.copies] if plan.writes else plan.copies:
                self._prune(self._run / key)
            if plan.writes:
                local_shards.write(temporary, step, content, leaves, extra)
                temporary.rename(own / str(step))
        except OSError as error:
            lines.append(
                f"the local checkpoint of step {step} could not be written to {own} "
                f"({full_disk(error) or error}); the run continues"
            )
            _remove(temporary)
        finally:
            if self._peers is not None:
                self._peers.finish(step)
        for key, address in plan.copies.items():
            try:
                assert self._peers is not None
                self._peers.fetch(address, self._run / key / str(step), wait=True)
            except (OSError, CheckpointError) as error:
                lines.append(
                    f"the local checkpoint of step {step} at {address} could not be copied "
                    f"({error}); the run continues"
                )
        return lines

    def _prune(self, folder: Path) -> None:
        """Delete all but the newest checkpoints, and the remains of killed saves."""
        if not folder.is_dir():
            return
        kept = {str(step) for step in sealing.sealed_steps(folder)[-self._keep :]}
        for path in folder.iterdir():
            if path.name not in kept:
                _remove(path)


def _root(name: str, named: str) -> Path:
    """Return the local directory, `~` and environment variables expanded."""
    expanded = os.path.expandvars(name)
    if "$" in expanded:
        raise UserError(f"{named}: an environment variable in it is not set on this host")
    root = on_disk(expanded)
    if not root.is_absolute():
        raise UserError(f"{named} is {root} on this host; use an absolute path")
    return root


def _storage(root: Path) -> str:
    """Return what identifies a directory: equal for two processes that share it."""
    stat = root.stat()
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = socket.gethostname()
    return f"{machine} {stat.st_dev} {stat.st_ino}"


def _remove(folder: Path) -> None:
    """Delete a folder; a kill meanwhile leaves nothing that looks like a finished checkpoint."""
    with contextlib.suppress(OSError):  # gone, or a link
        (folder / "manifest.json").unlink()
    with contextlib.suppress(OSError):
        remove_tree(folder)


def _newest_whole(rows: Sequence[dict[str, Any]]) -> int | None:
    """Return the newest step of which each process's shards are held by one; None if there is
    none."""
    held = {(key, step) for row in rows for key, step in row["held"]}
    failed = {step for row in rows for step in row["failed"]}
    can_fetch = all(row["address"] is not None for row in rows)

    def finds(row: dict[str, Any], step: int) -> bool:
        return [row["key"], step] in row["held"] or (can_fetch and (row["key"], step) in held)

    steps = sorted({step for _, step in held} - failed)
    return next((s for s in reversed(steps) if all(finds(row, s) for row in rows)), None)


def _not_whole(rows: Sequence[dict[str, Any]]) -> str:
    """Return why no local checkpoint is used."""
    held = {(key, step) for row in rows for key, step in row["held"]}
    step = max(step for _, step in held)
    lacking = [str(p) for p, row in enumerate(rows) if (row["key"], step) not in held]
    of = f"process{'es' if len(lacking) > 1 else ''} {', '.join(lacking)}"
    if len(lacking) == len(rows):
        why = "it was written on another mesh or number of processes, or by another model"
    elif lacking:
        why = f"the shards of {of} are on no host"
    else:
        why = "it cannot be read"
    return f"The local checkpoint of step {step} is not used: {why}"


def _where(step: int, root: Path, sources: Sequence[int]) -> str:
    fetched = [f"process {p} from process {q}'s copy" for p, q in enumerate(sources) if q >= 0]
    rest = f"; {', '.join(fetched)}" if fetched else ""
    return f"Resumed from the local checkpoint of step {step} in {root}{rest}"


def _copies(rows: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    """Return whose shards each process copies: of each layout key that one disk alone would hold,
    at the next host.

    A process at the same position of that host takes them; without another host, one of another
    directory.
    """
    disks: dict[str, set[str]] = {}
    for row in rows:
        disks.setdefault(row["key"], set()).add(row["storage"])
    hosts = list(dict.fromkeys(row["host"] for row in rows))
    name = "host" if len(hosts) > 1 else "storage"
    groups = list(dict.fromkeys(row[name] for row in rows))
    members = {group: [p for p, r in enumerate(rows) if r[name] == group] for group in groups}
    found: dict[int, list[int]] = {}
    seen: set[str] = set()
    for process, row in enumerate(rows):
        if row["key"] in seen or len(disks[row["key"]]) > 1 or len(groups) < 2:
            continue
        if row["address"] is None:
            continue
        seen.add(row["key"])
        position = members[row[name]].index(process)
        target = members[groups[(groups.index(row[name]) + 1) % len(groups)]]
        found.setdefault(target[position % len(target)], []).append(process)
    return found


def agree_on(value: Any) -> Any:
    """Return process 0's JSON-able value on all processes."""
    return _gather(value)[0]


def _gather(value: Any) -> list[Any]:
    """Return a JSON-able value of every process, in order."""
    if jax.process_count() == 1:
        return [json.loads(json.dumps(value))]
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array(content.size))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: content.size] = content
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [parse_json(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
