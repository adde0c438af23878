"""Checkpoint metadata: config, data position and ancestry, and how a resumed run differs from them.

An ancestor is a checkpoint that a run's parameters were initialized from, a JSON object: `path`,
where it was stored; `step`, of its checkpoint, null for a published folder or file; and `digest`:
of a checkpoint the BLAKE2b of its manifest, which names the digest of each of its files, of a
published model that of such a list of its own.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import load
from jaxtrain.config.registry import with_present_names
from jaxtrain.config.untrusted import parse_json
from jaxtrain.data.loader import VERSION
from jaxtrain.data.source import Dataset
from jaxtrain.data.text.source import TextData
from jaxtrain.run.checkpoint import manifest
from jaxtrain.run.checkpoint.leaves import OtherLeavesError
from jaxtrain.run.checkpoint.manifest import CRC32, FORMAT, digest
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.optimizers.optimizer import Optimizer
from jaxtrain.training.optimizers.schedule import Schedule, make_schedule
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import Setup
from jaxtrain.training.step import Step

_DIGEST = "the data's sha256"
_OF_RATES = ("Optimizer.name", "Optimizer.learning_rate", "Schedule.")


def describe(
    config: Config,
    program: Step,
    digest: str,
    next_batch: int,
    ancestors: "Sequence[Ancestor]" = (),
) -> dict[str, Any]:
    """Return the metadata that are saved with a state.

    Args:
      config: the run's configuration.
      program: the run's program.
      digest: the data's sha256.
      next_batch: index of the next step's batch.
      ancestors: origins of the run's initial parameters.
    """
    return {
        "format": FORMAT,
        "ancestors": list(ancestors),
        "config": config.operative(),
        "data": {"next_batch": next_batch, **_position(config, digest)},
        "layer_order": program.setup.layer_order,
        "versions": versions(),
    }


def describe_parameters(
    config: Config, setup: Setup, ancestors: "Sequence[Ancestor]"
) -> dict[str, Any]:
    """Return the metadata of a checkpoint of parameters alone, before a run's first step.

    Args:
      config: the run's configuration.
      setup: their layout and layer order.
      ancestors: their origins.
    """
    return {
        "format": FORMAT,
        "ancestors": list(ancestors),
        "config": config.operative(),
        "data": {"next_batch": 0},
        "layer_order": setup.layer_order,
        "versions": versions(),
        "only_parameters": True,
    }


def versions() -> dict[str, str]:
    """Return the versions that a run's numbers depend on."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}


def require_same_run(
    extra: dict[str, Any], config: Config, dataset: Dataset, *, step: int, workdir: AnyPath | None
) -> None:
    """Raise UserError if resuming would be another run: other data, order or batches, or state of
    another update rule."""
    for name, now in _position(config, dataset.digest).items():
        saved = extra["data"].get(name)  # None for an order from before they had names
        if saved == now:
            continue
        setting, pythons = (name, repr(saved), repr(now)), None
        if name == _DIGEST:
            setting = _other_setting(extra["config"], config)
            pythons = _other_python(extra, config)
        if setting is not None:
            raise UserError(
                f"{workdir}: the checkpoint of step {step} was written with {setting[0]} = "
                f"{setting[1]}, this configuration has {setting[2]}: the data would not resume "
                "where it stopped; use the config.gin next to it, or another --workdir"
            )
        if pythons is not None:
            raise UserError(
                f"{workdir}: the checkpoint of step {step} was written under Python {pythons[0]}, "
                f"whose library is the training text; this is {pythons[1]}: the data would not "
                "resume where it stopped; use that Python, or another --workdir"
            )
        raise UserError(
            f"{workdir}: the checkpoint of step {step} was written with {name} = {saved!r}, which "
            f"is {now!r} now: the data would not resume where it stopped; restore them, "
            "or use another --workdir"
        )
    rule = next(x for x in extra["config"].splitlines() if x.startswith("Optimizer.name = "))
    if rule.partition(" = ")[2] != repr(config.optimizer.name):
        raise UserError(
            f"{workdir}: the checkpoint of step {step} was written with {rule}, this configuration "
            f"has {config.optimizer.name!r}, whose moments are different; use "
            f'-b "{rule}", or another --workdir'
        )


def other_data(extra: dict[str, Any], config: Config, dataset: Dataset) -> str | None:
    """Return how the data differ from those a checkpoint was trained on; None: they are the same.

    Args:
      extra: the checkpoint's metadata.
      config: the configuration that opened the data.
      dataset: the opened data.
    """
    saved = extra["data"].get(_DIGEST)
    if saved in (None, dataset.digest):  # parameters alone were not trained on this run's data
        return None
    setting, pythons = _other_setting(extra["config"], config), _other_python(extra, config)
    if setting is not None:
        return f"{setting[0]} was {setting[1]}, is {setting[2]}"
    if pythons is not None:
        return f"the embedded text was that of Python {pythons[0]}, and is now that of {pythons[1]}"
    return f"{_DIGEST} was {saved[:16]}, is {dataset.digest[:16]}"


def _other_python(extra: dict[str, Any], config: Config) -> tuple[str, str] | None:
    """Return the Python of a checkpoint and this one, where they differ and their library is the
    text."""
    data = config.train.data
    saved, now = extra["versions"]["python"], platform.python_version()
    if isinstance(data, TextData) and data.source == "embedded" and saved != now:
        return saved, now
    return None


def _position(config: Config, digest: str) -> dict[str, Any]:
    """Return the settings that decide the content of batch k, for every k."""
    return {
        "Train.seed": config.train.seed,
        "Train.global_batch_size": config.train.global_batch_size,
        _DIGEST: digest,
        "order": VERSION,
    }


def _other_setting(saved: str, config: Config) -> tuple[str, str, str] | None:
    """Return a setting of the data that is another than in the saved config, and both values as
    text."""
    found = _differing(saved, config, "Train.data ", f"{type(config.train.data).__name__}.")
    # The text's path matters least: the same text may be stored elsewhere now.
    return min(found, key=lambda one: one[0].endswith(".source"), default=None)


def _differing(saved: str, config: Config, *beginnings: str) -> list[tuple[str, str, str]]:
    """Yield settings that differ from the saved config: name, value there, value now."""
    before, now = (
        with_present_names(dict(line.split(" = ", 1) for line in bindings_of(text, *beginnings)))
        for text in (saved, config.operative())
    )
    return [(n, before[n], now[n]) for n in now if n in before and before[n] != now[n]]


# Settings that determine the arrays of a state, the most likely first.
_OF_STATE = (
    ("Train.model ",),
    ("Finetune.", "Optimizer.", "Precision.", "Exchange.", "Guard.", "Train.noise_scale_every "),
)


def with_settings(error: OtherLeavesError, saved: str, config: Config) -> UserError:
    """The error with the settings that differ in place of the arrays, where there are such.

    Args:
      error: the error about the arrays of a checkpoint.
      saved: the config that wrote them.
      config: the present one.
    """
    model, others = _OF_STATE
    for beginnings in ((*model, f"{type(config.train.model).__name__}."), others):
        found = _differing(saved, config, *beginnings)
        if found:
            lines = [
                f"  {n} = {a} when it was written, {b} in this configuration" for n, a, b in found
            ]
            return UserError("\n".join([error.headline, *lines]))
    return error


@dataclasses.dataclass(frozen=True)
class _Rates:
    """Settings that learning rates depend on, other than the run's length."""

    optimizer: Optimizer
    schedule: Schedule
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def bindings_of(config: str, *beginnings: str) -> list[str]:
    """Return the settings of a saved config whose names begin so, as bindings."""
    return [x for x in config.splitlines() if x.startswith(beginnings) and " = " in x]


def other_settings(extra: dict[str, Any], config: Config, step: int) -> Iterator[str]:
    """A sentence where a run resumes from `step` with other settings than were saved.

    Most may change, such as the mesh; others change what the same parameters compute, such as the
    frequencies of positions, which no array shape shows. Reports of `other_rate` are excluded.
    """
    names = ("Train.steps", *_OF_RATES) if any(other_rate(extra, config, step)) else ()
    found = [one for one in _differing(extra["config"], config, "") if not one[0].startswith(names)]
    if found:
        changed = ", ".join(f"{name} = {now} (was {before})" for name, before, now in found)
        yield f"Settings that differ from those of the checkpoint of step {step}: {changed}"


def other_rate(extra: dict[str, Any], config: Config, step: int) -> Iterator[str]:
    """A sentence where a run resumes from `step` with another learning rate than was saved.

    This is intended if it was changed, and surprising if a schedule that decays to the last
    step was given more steps.
    """
    saved = dict(line.split(" = ", 1) for line in extra["config"].splitlines() if " = " in line)
    bindings = bindings_of(extra["config"], *_OF_RATES)
    try:
        before = load(_Rates, None, bindings, search_path=Path())
    except UserError:
        return  # of a version with other settings: not comparable
    steps = int(saved["Train.steps"])
    old, new = (
        float(np.asarray(make_schedule(one.schedule, one.optimizer.learning_rate, length)(step)))
        for one, length in ((before, steps), (config, config.train.steps))
    )
    if math.isclose(old, new, rel_tol=1e-5):
        return
    now = dict(line.split(" = ", 1) for line in config.operative().splitlines() if " = " in line)
    names = [name for name in now if name.startswith((*_OF_RATES, "Train.steps")) and name in saved]
    changed = ", ".join(f"{n} = {now[n]} (was {saved[n]})" for n in names if now[n] != saved[n])
    kept = before.schedule.with_same_decay(steps)
    way_out = ""
    if kept != config.schedule and kept != before.schedule:
        way_out = f"; Schedule.decay_steps = {kept.decay_steps} keeps the decay as it was"
    yield (
        f"The learning rate of step {step + 1} is {new:.3g}, by the checkpoint's schedule it would "
        f"be {old:.3g}: {changed}{way_out}"
    )


Ancestor = dict[str, Any]

RECEIPT = "parity.json"  # of an exported model: its agreement with its run


def of_checkpoint(checkpoints: Checkpoints, workdir: AnyPath, step: int) -> list[Ancestor]:
    """Return a run's sealed checkpoint and its ancestors, the nearest first.

    Raises:
      CheckpointError: its manifest or its metadata is damaged.
    """
    own = {
        "path": _name(workdir),
        "step": step,
        "digest": manifest.own_digest(checkpoints.folder / str(step), step),
    }
    return [own, *checkpoints.extra(step).get("ancestors", [])]


def of_published(path: Path) -> list[Ancestor]:
    """Return a Hugging Face folder or a GGUF file, and the ancestors that an export has written
    down.

    Process 0 alone reads the files for the digest, which is null in the others.
    """
    from jaxtrain.models.weights.folder import CONFIG, INDEX

    files = [path]
    if path.is_dir():
        files = sorted([*path.glob("*.safetensors"), path / CONFIG, path / INDEX])
    found = None
    if jax.process_index() == 0:
        listed = [[file.name, *digest(file, CRC32)] for file in files if file.is_file()]
        found = _blake2b(json.dumps(listed).encode())
    own = {"path": _name(path), "step": None, "digest": found}
    return [own, *_read_ancestors(path / RECEIPT)]


def describe_ancestors(ancestors: Sequence[Ancestor]) -> list[str]:
    """Describe each ancestor in one line."""
    lines = []
    for ancestor in ancestors:
        verb = "Its parameters were initialized from" if not lines else "which began as those of"
        step = "" if ancestor["step"] is None else f", step {ancestor['step']:,}"
        lines.append(f"{verb} {ancestor['path']}{step} ({ancestor['digest']})")
    return lines


def _read_ancestors(receipt: Path) -> list[Ancestor]:
    """Return the ancestors in a receipt; [] if there are none."""
    try:
        found = parse_json(receipt.read_bytes())["ancestors"]
        return [
            {
                "path": str(one["path"]),
                "step": None if one["step"] is None else int(one["step"]),
                "digest": None if one["digest"] is None else str(one["digest"]),
            }
            for one in found
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _name(where: AnyPath) -> str:
    return str(where if isinstance(where, BucketPath) else where.absolute())


def _blake2b(content: bytes) -> str:
    return "blake2b:" + hashlib.blake2b(content, digest_size=32).hexdigest()
