"""Import of a published model as a run with a checkpoint of step 0.

The receipt compares logits; differences from training in transformers (losses other
than the model's own, dropout) are printed.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from rich.console import Console

from jaxtrain.config.buckets import AnyPath, BucketPath, require
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors, remove_tree, write_atomically
from jaxtrain.data.pairs.classed import LabelledText
from jaxtrain.data.pairs.source import PairData
from jaxtrain.data.text.source import TextData
from jaxtrain.models.model import Model
from jaxtrain.models.weights.config_file import DROPOUT
from jaxtrain.models.weights.folder import TOKENIZER, Published, match, open_published
from jaxtrain.nn.parameters import Statistic
from jaxtrain.parallel.devices import platform_of_device, simulate_devices
from jaxtrain.run.attempts.folder import CARRIED_FOLDER
from jaxtrain.run.checkpoint import metadata
from jaxtrain.run.checkpoint.metadata import RECEIPT, of_published
from jaxtrain.run.checkpoint.sealing import FOLDER, reject_others
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.run.huggingface import receipt
from jaxtrain.run.huggingface.parameters import read_parameters, shapes_of, their_tensors
from jaxtrain.training import layouts
from jaxtrain.training.compose import compose
from jaxtrain.training.finetune.finetune import router_biases_of
from jaxtrain.training.finetune.tuning import Tuning, partition
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import Setup


def import_run(
    config: Config, workdir: AnyPath, *, console: Console, report: Callable[[str], None]
) -> receipt.Receipt:
    """Create the run's folder: config.gin, a sealed checkpoint of step 0, and copied files.

    Args:
      config: of `hf:DIR`, with overrides.
      workdir: the run's folder, without a run yet.
      console: for the receipt.
      report: called with each line to print.

    Raises:
      UserError: the folder holds a run, or the configuration cannot run on these devices, or the
        published model's files are invalid.
    """
    source = config.train.start_from
    assert source is not None, "not a configuration of hf:DIR"
    folder = open_published(source, named="SRC_DIR")
    require_free("--workdir", workdir)
    config = _with_own_tokenizer(config, folder, workdir)
    if config.mesh.simulated_devices:
        simulate_devices(config.mesh.simulated_devices)
    device = jax.local_devices()[0]
    platform, kind = platform_of_device(device), device.device_kind
    preflight.check(
        config, device_count=jax.device_count(), platform=platform, kind=kind, reads_data=False
    )
    program = compose(config, layouts.layout(config)).setup.replace(tuning=Tuning())
    params = read_parameters(folder, program, config.train.model)
    with create_atomically(workdir):
        return _write(config, workdir, folder, params, program, console=console, report=report)


def _write(
    config: Config,
    workdir: AnyPath,
    source: Published,
    params: nnx.State,
    setup: Setup,
    *,
    console: Console,
    report: Callable[[str], None],
) -> receipt.Receipt:
    with path_errors(f"--workdir {workdir}", needs="use a folder that can be made and written"):
        carried = workdir / CARRIED_FOLDER
        if isinstance(carried, Path):
            carried.mkdir(parents=True, exist_ok=True)
        for name, content in source.extra_files().items():
            write_atomically(carried / name, content)
    extra = metadata.describe_parameters(config, setup, of_published(source.path))
    save_first(0, _partition(params, setup), extra, config=config, workdir=workdir, report=report)
    (family, _), model = source.family_and_model, config.train.model
    shapes, tensors = shapes_of(setup), source.tensors()
    stored = match(family, model, shapes, tensors, where=str(config.train.start_from))
    made = their_tensors(family.names(model), params, setup.layer_order)
    found = receipt.compare(
        source.path, family.architecture, stored, made, setup, model, params,
        read_otherwise=source.read_otherwise,
    )  # fmt: skip
    differences = training_differences(model, source.content)
    found = dataclasses.replace(found, training_differences=differences)
    content = json.dumps(found.to_json(), indent=1).encode()
    write_atomically(carried / RECEIPT, content)
    found.show(console)
    return found


def _partition(params: nnx.State, setup: Setup) -> dict[str, nnx.State]:
    """Return the parameters in the form of a run that trains all of them."""
    untrained = router_biases_of(setup.build)
    statistics, params = partition(params, lambda _, x: isinstance(x, Statistic))
    trained, frozen = partition(params, lambda name, _: name not in untrained)
    parts = {"params": trained, "frozen": frozen, "statistics": statistics}
    return {name: part for name, part in parts.items() if part}


def save_first(
    step: int,
    state: Any,
    extra: dict[str, Any],
    *,
    config: Config,
    workdir: AnyPath,
    report: Callable[[str], None],
) -> None:
    """Write the checkpoint that a new run begins with, then its config.gin.

    Raises:
      CheckpointError: it cannot be written; there is no later save to wait for.
    """
    once = dataclasses.replace(config.checkpoint, max_failed_saves=1)
    checkpoints = Checkpoints(workdir, once, report=report)
    try:
        checkpoints.save(step, state, extra)
        checkpoints.wait()
    finally:
        checkpoints.close()
    write_atomically(workdir / "config.gin", config.operative().encode())


@contextlib.contextmanager
def create_atomically(workdir: AnyPath) -> Iterator[None]:
    """Remove a new run's folder if an error occurs within the context."""
    is_new = not workdir.exists()
    try:
        yield
    except BaseException:
        remove_tree(workdir if is_new else workdir / FOLDER)
        raise


def require_free(named: str, workdir: AnyPath) -> None:
    """Raise UserError if a new run's folder has a run already, or cannot be created.

    Args:
      named: its option, for messages.
      workdir: the folder.
    """
    if isinstance(workdir, BucketPath):
        require(named, workdir)
    with path_errors(f"{named} {workdir}", needs="use a folder that can be made and written"):
        reject_others(workdir)
        if (workdir / "config.gin").exists() or (workdir / "checkpoints").exists():
            raise UserError(f"{named} {workdir}: there is a run already; name a folder that is new")


def _with_own_tokenizer(config: Config, source: Published, workdir: AnyPath) -> Config:
    """Return the configuration with the copied tokenizer instead of the source's.

    A tokenizer inside a GGUF file has no path for the configuration.
    """
    data, is_file = config.train.data, source.path.is_file()
    theirs = "byte" if is_file else str(source.path / TOKENIZER)
    if not isinstance(data, TextData | PairData | LabelledText) or data.tokenizer != theirs:
        return config
    if TOKENIZER not in source.extra_files():
        return config
    if is_file and data.source == "synthetic":
        data = dataclasses.replace(data, source="embedded")
    root = workdir.absolute() if isinstance(workdir, Path) else workdir
    data = dataclasses.replace(data, tokenizer=str(root / CARRIED_FOLDER / TOKENIZER))
    return dataclasses.replace(config, train=dataclasses.replace(config.train, data=data))


def training_differences(model: Model, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note for each of them; most models have none.

    Args:
      model: the sizes of the imported model.
      content: of its config.json.
    """
    return (*_balancing(model, content), *_dropout(content))


def _balancing(model: Model, content: Mapping[str, Any]) -> Iterator[str]:
    weight = getattr(model, "balance_weight", 0.0)
    if model.experts is None or not weight:
        return
    name = f"{type(model).__name__}.balance_weight = {weight}"
    if "router_aux_loss_coef" not in content:
        yield f"{name} multiplies a load-balancing loss, which transformers does not have"
        return
    unused = "" if content.get("output_router_logits") else ", where output_router_logits is true,"
    yield (
        f"{name} multiplies the load-balancing loss of each row and layer by itself, averaged; in "
        f"transformers router_aux_loss_coef{unused} multiplies one of all rows and layers together"
    )


def _dropout(content: Mapping[str, Any]) -> Iterator[str]:
    found = [f"{key} = {content[key]}" for key in DROPOUT if content.get(key)]
    if found:
        yield f"{', '.join(found)} of config.json is not used: bind this package's own settings"
