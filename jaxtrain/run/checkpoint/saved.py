"""Checkpoints of a run's folder: restore into any layout, go back to an earlier one, save."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.reader import load
from jaxtrain.data.source import Dataset
from jaxtrain.nn.parameters import is_layer
from jaxtrain.parallel.sharding import flatten, is_variable
from jaxtrain.run.checkpoint import metadata, sealing
from jaxtrain.run.checkpoint.leaves import OtherLeavesError
from jaxtrain.run.checkpoint.manifest import CheckpointError, UnreadError
from jaxtrain.run.checkpoint.metadata import Ancestor, bindings_of, of_checkpoint
from jaxtrain.run.checkpoint.save_schedule import (
    DEFAULT_MTBF_HOURS,
    AutomaticInterval,
    FixedInterval,
    SaveSchedule,
)
from jaxtrain.run.checkpoint.states import Initial, PeerAccess, RunStates
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.run.phases import Phases
from jaxtrain.training.finetune.finetune import Finetune, router_biases_of, tuning_of
from jaxtrain.training.finetune.tuning import partition
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState, with_shardings
from jaxtrain.training.step import Step, base_step

if TYPE_CHECKING:
    from jaxtrain.run.checkpoint.local_checkpoints import LocalCheckpoints


class SavedRun(RunStates):
    """The states of a run with a folder: its checkpoints."""

    keeps = True

    def __init__(
        self,
        workdir: AnyPath,
        config: Config,
        program: Step,
        initial: Initial,
        *,
        read_only: bool,
        report: Callable[[str], None],
        may_write: Callable[[], None],
        before_seal: Callable[[], None],
        phases: Phases,
        peers: PeerAccess,
    ) -> None:
        """Open the checkpoints; args: as of `states_of`."""
        super().__init__(config, program, initial, report)
        self._workdir, self._read_only, self._phases = workdir, read_only, phases
        if not read_only and jax.process_index() == 0:
            sealing.reject_others(workdir)
        self._checkpoints = Checkpoints(
            workdir,
            config.checkpoint,
            read_only=read_only,
            report=report,
            may_write=may_write,
            before_seal=before_seal,
        )
        for line in self._checkpoints.cleaned:
            report(line)
        self._local: LocalCheckpoints | None = None
        if not read_only:
            self._local = self._open_local(may_write, peers)
        self.schedule = self._schedule()
        self._described: dict[str, Any] | None = None  # the metadata of every save

    def _open_local(
        self, may_write: Callable[[], None], peers: PeerAccess
    ) -> "LocalCheckpoints | None":
        settings, folder = self._config.checkpoint, self._checkpoints.folder
        if settings.local_directory is None:
            if jax.process_index() == 0:
                _forget_local_checkpoints(folder, may_write)
            return None
        # Imported here: most runs have no local checkpoints.
        from jaxtrain.run.checkpoint.local_checkpoints import LocalCheckpoints

        return LocalCheckpoints(
            settings,
            folder,
            layer_order=self._program.setup.layer_order,
            report=peers.report,
            may_write=may_write,
            token=peers.token,
            address=peers.address,
        )

    def _schedule(self) -> SaveSchedule:
        train, mtbf = self._config.train, self._config.checkpoint.mtbf
        if train.save_every != "auto":
            return FixedInterval(train.save_every)
        hours = DEFAULT_MTBF_HOURS if mtbf is None else mtbf
        return AutomaticInterval(
            mtbf=hours * 3600 / self._program.setup.layout.mesh.size,
            steps=train.steps,
            phases=self._phases,
            agree=_largest,
            report=self._report,
        )

    def restore_step(self, step: int) -> tuple[TrainState, int]:
        with self._phases.phase("restore", step):
            return self._restore(step, None)

    def newest(self, open_data: Callable[[], Dataset]) -> tuple[TrainState, int]:
        return self._newest(None if self._read_only else open_data())

    def rewind(self, step: int, dataset: Dataset) -> tuple[TrainState, int]:
        self._checkpoints.drop_after(step)
        if self._local is not None:
            self._local.drop_after(step)
        return self._newest(dataset)

    def _newest(self, dataset: Dataset | None) -> tuple[TrainState, int]:
        newest = None
        if self._local is not None and dataset is not None:
            from jaxtrain.run.checkpoint.local_checkpoints import agree_on

            newest = agree_on(self._checkpoints.latest_step())
            found = self._newest_local(dataset, at_least=newest or 0)
            if found is not None:
                return found
        while True:
            with self._phases.phase("restore"):
                try:
                    step = self._checkpoints.newest_good()
                except UnreadError:
                    raise
                except CheckpointError:
                    found = self._newest_local(dataset, at_least=0)
                    if found is None:
                        raise
                    self._checkpoints.put_aside("a local one is used")
                    return found
            if step != newest and (found := self._newest_local(dataset, at_least=step or 0)):
                return found  # the newest in the run's folder is damaged
            if step is None:
                self._begin_local(None)
                return self._first(), 0
            with self._phases.phase("restore", step):
                try:
                    found = self._restore(step, dataset)
                except CheckpointError as error:
                    if self._read_only or isinstance(error, UnreadError):
                        raise
                    self._checkpoints.pass_over(step, error)
                    continue
            self._begin_local(step)
            return found

    def _newest_local(
        self, dataset: Dataset | None, *, at_least: int
    ) -> tuple[TrainState, int] | None:
        """Return the newest state in local checkpoints that all processes have, and its
        position; None if there is none of `at_least` this step."""
        if self._local is None or dataset is None:
            return None
        names, leaves, treedef = flatten(self._program.abstract_state())
        with self._phases.phase("restore"), jax.transfer_guard("allow"):
            found = self._local.restore(dict(zip(names, leaves, strict=True)), at_least=at_least)
        if found is None:
            return None
        self._require_same_run(found.extra, dataset, found.step)
        self._report(found.line)
        self.extra, self.ancestors = found.extra, found.extra["ancestors"]
        state = jax.tree.unflatten(treedef, [found.arrays[name] for name in names])
        return state, found.extra["data"]["next_batch"]

    def _begin_local(self, step: int | None) -> None:
        """Delete local checkpoints, from none of which the run resumes."""
        if self._local is None:
            return
        if step is not None:
            self._report(
                f"Resumed from the checkpoint of step {step} in {self._checkpoints.folder}"
            )
        self._local.abandon()

    def is_due_locally(self, step: int) -> bool:
        return self._local is not None and step % self._local.interval == 0

    def save_locally(self, step: int, state: TrainState, *, next_batch: int, digest: str) -> None:
        assert self._local is not None
        names, leaves, _ = flatten(state)
        with jax.transfer_guard("allow"):
            extra = self._metadata(next_batch, digest)
            self._local.save(step, dict(zip(names, leaves, strict=True)), extra)

    def save(self, step: int, state: TrainState, *, next_batch: int, digest: str) -> None:
        with jax.transfer_guard("allow"):
            self._checkpoints.save(step, state, self._metadata(next_batch, digest))

    def _metadata(self, next_batch: int, digest: str) -> dict[str, Any]:
        if self._described is None:
            self._described = metadata.describe(self._config, self._program, digest, 0)
        data = {**self._described["data"], "next_batch": next_batch}
        return {**self._described, "ancestors": self.ancestors, "data": data}

    def line(self, step: int) -> list[Ancestor]:
        if step not in self._checkpoints.steps():
            return self.ancestors
        return of_checkpoint(self._checkpoints, self._workdir, step)

    def on_disk(self) -> int:
        return self._checkpoints.latest_step() or 0

    def keep_best(self, steps: Sequence[int]) -> None:
        self._checkpoints.keep_best(steps)

    def wait(self) -> None:
        self._checkpoints.wait()
        if self._local is not None:
            with jax.transfer_guard("allow"):
                self._local.abandon()  # the newest state is in the run's folder

    def close(self) -> None:
        try:
            if self._local is not None:
                self._local.close()
        finally:
            self._checkpoints.close()

    def _restore(self, step: int, dataset: Dataset | None) -> tuple[TrainState, int]:
        extra = self._checkpoints.extra(step)
        self.ancestors = extra.get(
            "ancestors", []
        )  # none for a checkpoint from before they were stored
        if extra.get("only_parameters"):
            state, self.extra = self._initial.from_parameters(self._checkpoints, step), extra
            return state, 0
        if dataset is not None:
            self._require_same_run(extra, dataset, step)
        try:
            state = restore(self._checkpoints, step, self._program)
        except OtherLeavesError as error:
            raise metadata.with_settings(error, extra["config"], self._config) from error
        self.extra = extra
        return state, extra["data"]["next_batch"]

    def _require_same_run(self, extra: dict[str, Any], dataset: Dataset, step: int) -> None:
        """Raise UserError if resuming would be another run; report other settings."""
        metadata.require_same_run(extra, self._config, dataset, step=step, workdir=self._workdir)
        for notes in (metadata.other_settings, metadata.other_rate):
            for note in notes(extra, self._config, step):
                self._report(note)


def _forget_local_checkpoints(folder: AnyPath, may_write: Callable[[], None]) -> None:
    """Let no later attempt find local checkpoints: this one writes none; called by process 0.

    Args:
      folder: `workdir/checkpoints`.
      may_write: raises or exits if another attempt owns the run's folder.
    """
    if (folder / sealing.LOCAL_ID_FILE).exists():
        may_write()
        (folder / sealing.LOCAL_ID_FILE).unlink(missing_ok=True)


def _largest(values: Sequence[float]) -> Sequence[float]:
    """Return the maximum over processes of each value; the same on all of them."""
    if jax.process_count() == 1:
        return values
    gathered = multihost_utils.process_allgather(np.array(values, np.float32))
    return [float(value) for value in np.max(gathered, axis=0)]


@dataclasses.dataclass(frozen=True)
class _Tuned:
    """The trainable part of a run's model."""

    finetune: Finetune
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def restore(checkpoints: Checkpoints, step: int, program: Step) -> TrainState:
    """Return the state of `step` in the program's layout, whatever mesh and stages wrote it.

    A pipeline stores its layers in stage order; if the saved order differs they are read
    in that order and then rearranged.
    """

    def read(part: Callable[[TrainState], Any]) -> Any:
        return _restore(checkpoints, step, program, part)

    if program.files is None:
        return read(lambda state: state)
    checkpoints.reject_left_over(step, program.abstract_state())
    return program.files.restore(read(program.in_memory), read)


def restore_parameters(
    checkpoints: Checkpoints, step: int, setup: Setup, unread: Collection[str] = ()
) -> nnx.State:
    """Return the parameters and running statistics of `step`, in the sharding of a state of
    `train_all`; nothing else is read.

    Args:
      checkpoints: another run's, or this one's.
      step: of the checkpoint.
      setup: their target.
      unread: names of those that are skipped, with their companions.
    """
    saved_bindings = bindings_of(checkpoints.extra(step)["config"], "Finetune.")
    saved = load(_Tuned, None, saved_bindings, search_path=Path())
    tuning = tuning_of(saved.finetune, setup.build, router_biases_of(setup.build))
    source = base_step(setup.replace(tuning=tuning))

    def select_parts(state: TrainState) -> dict[str, nnx.State]:
        def reads(name: str, _: Any) -> bool:
            return not any(name == one or name.startswith(f"{one}/") for one in unread)

        parts = {"params": state.params, "frozen": state.frozen, "statistics": state.statistics}
        return {name: partition(part, reads)[0] for name, part in parts.items()}

    found = _restore(checkpoints, step, source, select_parts)
    with setup.layout.active():
        params = jax.jit(tuning.merge)((found["params"], found["frozen"]))
    return nnx.merge_state(params, found["statistics"])


def _restore(
    checkpoints: Checkpoints,
    step: int,
    program: Step,
    part: Callable[[TrainState], Any],
) -> Any:
    """Return a part of the state, whatever mesh and stages wrote it."""
    saved, whole_state = checkpoints.extra(step).get("layer_order"), program.abstract_state()
    wanted_part = part(whole_state)
    partial = wanted_part is not whole_state
    if saved == program.setup.layer_order:
        return checkpoints.restore(step, wanted_part, partial=partial)
    # Imported here: most runs resume with their layers in the order in which they were saved.
    from jaxtrain.training.pipeline.schedules import rearrange

    num_layers = _num_layers(program.setup)
    present = list(range(num_layers)) if saved is None else saved
    if (found := sum(layer >= 0 for layer in present)) != num_layers:
        raise OtherLeavesError(
            f"the checkpoint of step {step} in {checkpoints.folder} has {found} layers, this "
            f"configuration's model {num_layers}; use {checkpoints.folder.parent / 'config.gin'}, "
            "which wrote it, or another workdir",
            (),
        )
    wanted = program.setup.layer_order or list(range(num_layers))
    state = checkpoints.restore(step, part(_in_order(program, present)), partial=partial)
    whole = program.setup.layout.with_manual("pipe")

    def deal(state: Any) -> Any:
        def one(variable: Any) -> Any:
            if not (is_variable(variable) and is_layer(variable)):
                return variable
            value, axes = variable.get_value(), variable.get_metadata()["axes"]
            # Layers are taken from all stages: first they have to be gathered.
            value = jax.sharding.reshard(value, whole.moment(axes))
            return rearrange(variable.replace(value), present, wanted)

        return jax.tree.map(one, state, is_leaf=is_variable)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted_part)
    with program.setup.layout.active():
        return jax.jit(deal, out_shardings=shardings)(state)


def _num_layers(setup: Setup) -> int:
    sizes = {
        variable.get_value().shape[0]
        for variable in jax.tree.leaves(
            base_step(setup).abstract_state().weights, is_leaf=is_variable
        )
        if is_layer(variable)
    }
    order = setup.layer_order
    return sizes.pop() if order is None else sum(layer >= 0 for layer in order)


def _in_order(program: Step, present: list[int]) -> TrainState:
    """Return the abstract state with its layers in another order, over pipe where their number
    divides."""

    def one(variable: Any) -> Any:
        if not (is_variable(variable) and is_layer(variable)):
            return variable
        shape = variable.get_value()
        return variable.replace(jax.ShapeDtypeStruct((len(present), *shape.shape[1:]), shape.dtype))

    shapes = jax.tree.map(one, program.shapes(), is_leaf=is_variable)
    layout = program.setup.layout
    if len(present) % layout.mesh.shape["pipe"]:
        program = program.rebuild(layout=layout.with_manual("pipe"))
    return with_shardings(shapes, program.shardings(shapes))
