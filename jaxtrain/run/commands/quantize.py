"""The command `quantize`: a trained run to one with 4- or 8-bit weights."""

import argparse
import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config.buckets import AnyPath, on_disk, to_path
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors, write_atomically
from jaxtrain.data.text.source import TextData
from jaxtrain.models.model import token_model
from jaxtrain.models.weights.folder import TOKENIZER
from jaxtrain.nn.parameters import role_of
from jaxtrain.parallel.devices import platform_of_device
from jaxtrain.parallel.sharding import by_name
from jaxtrain.run.activation_aware import READ, clip, read_by, rows_of, scale, scaling_groups
from jaxtrain.run.attempts import DONE
from jaxtrain.run.attempts.folder import CARRIED_FOLDER
from jaxtrain.run.checkpoint import metadata
from jaxtrain.run.commands.read_run import open_run
from jaxtrain.run.generation.answer import tokenizer_of
from jaxtrain.run.huggingface.exporting import companion_files
from jaxtrain.run.huggingface.importing import (
    create_atomically,
    require_free,
    save_first,
)
from jaxtrain.run.show.progress import print_lines, terminal
from jaxtrain.run.trainer import Trainer
from jaxtrain.run.weights import merge_adapters, on_host, shard_weights
from jaxtrain.training import layouts
from jaxtrain.training.compose import compose
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.finetune.finetune import Finetune
from jaxtrain.training.finetune.quantized_base import (
    QuantizedBase,
    SettingNames,
    can_adapt,
    validate_blocks,
)
from jaxtrain.training.finetune.tuning import Tuning
from jaxtrain.training.objectives.distillation import Distillation
from jaxtrain.training.offload import Offload
from jaxtrain.training.optimizers.optimizer import Optimizer
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import Setup, parameter_shapes
from jaxtrain.training.step import base_step

Reporter = Callable[[str], None]
_OPTIONS = SettingNames("--bits 4", "--group-size {}", "--bits 8")


def quantize(arguments: argparse.Namespace) -> int:
    """Create the new run's folder: config.gin, a checkpoint, and files copied by an import."""
    bits, group, text = arguments.bits, arguments.group_size, arguments.calibrate
    for name, value in (("--group-size", group), ("--calibrate", text)):
        if bits == 8 and value is not None:
            raise UserError(
                f"{name} {value} with --bits 8: 8-bit weights have one scale per output and are "
                "rounded to nearest; leave it out, or use --bits 4"
            )
    if group is not None and (group < 2 or group % 2):
        near = max(2, group + 1 if group % 2 else group)
        raise UserError(
            f"--group-size {group}: two codes share a byte, so it must be even; the nearest even "
            f"number is {near}"
        )
    console, out = terminal(), to_path(arguments.out)
    require_free("--out", out)
    trainer = open_run(arguments, console=console)
    weight_format = "int8" if bits == 8 else "int4"
    write_quantized(
        trainer, out, weight_format, group=group or Finetune.quantize_group, text=text,
        report=functools.partial(print_lines, console),
    )  # fmt: skip
    return DONE


def write_quantized(
    trainer: Trainer,
    out: AnyPath,
    weight_format: Literal["int8", "int4"],
    *,
    group: int,
    text: str | None,
    report: Reporter,
) -> None:
    """Write the folder of the run with its layers' quantized weights.

    Args:
      trainer: of the run.
      out: the new folder.
      weight_format: the format of the weights.
      group: elements that share a scale in int4.
      text: a file with calibration text for int4; None: no calibration.
      report: called with each line to print.

    Raises:
      UserError: the model has no such weights, sizes do not divide into groups, the text cannot be
        read, or there are several processes.
    """
    if jax.process_count() > 1:
        raise UserError(
            f"quantize: a run of {jax.process_count()} processes is quantized by one process; "
            "bind its Mesh for one machine"
        )
    shapes = parameter_shapes(trainer.config.train.model.build)
    if not any(map(can_adapt, by_name(shapes).values())):
        raise UserError(
            f"--workdir {trainer.workdir}: the model has no transformer layers to quantize; "
            "name a run of a model that has"
        )
    config = _config(trainer, weight_format, group, out)
    layout, device = layouts.layout(config), jax.local_devices()[0]
    if weight_format == "int4":
        for error in validate_blocks(shapes, layout, weight_format, group, says=_OPTIONS):
            raise UserError(error)
    preflight.check(
        config, device_count=trainer.mesh.size, platform=platform_of_device(device),
        kind=device.device_kind, reads_data=False, trains=False,
    )  # fmt: skip
    before = trainer.program.setup
    state = trainer.program.eval_state(trainer.state)
    params = merge_adapters(before, state)
    whole = before.replace(build=config.train.model.build, tuning=Tuning())
    was = _bytes(params)
    if text is not None:
        params = _scale(trainer, whole, params, group, text, report)
    step = compose(config, layout)
    setup = step.setup
    with warnings.catch_warnings():
        # Codes are smaller than the floats.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        # Arguments are donated, and may include the trainer's own arrays.
        made = step.create(config.train.seed, jax.tree.map(jnp.copy, params))
    made = dataclasses.replace(made, step=state.step)
    extra = metadata.describe_parameters(config, setup, trainer.ancestors)
    del extra["only_parameters"]
    with create_atomically(out):
        with path_errors(f"--out {out}", needs="use a folder that can be made and written"):
            if isinstance(out, Path):
                (out / CARRIED_FOLDER).mkdir(parents=True, exist_ok=True)
            for name, content in companion_files(trainer.config, trainer.workdir).items():
                write_atomically(out / CARRIED_FOLDER / name, content)
        save_first(trainer.steps_done, made, extra, config=config, workdir=out, report=report)
    report(
        f"{out}: {_bytes(made.frozen):,} bytes of parameters, were {was:,}; a weight of the layers "
        f"takes {_bits(setup, made.frozen):.2f} bits"
    )


def _scale(
    trainer: Trainer, setup: Setup, params: nnx.State, group: int, text: str, report: Reporter
) -> nnx.State:
    """Return the parameters with weights scaled and clipped by their inputs on a text."""
    sizes = token_model(trainer.config.train.model)
    of = scaling_groups(sizes)
    if not of:
        raise UserError(
            f"--calibrate {text}: the weights of a @Llama() are scaled, and this model is a "
            f"@{type(sizes).__name__}(); leave it out to round them to nearest"
        )
    with path_errors(f"--calibrate {text}", needs="name a text file that can be read"):
        content = on_disk(text).read_text(encoding="utf-8", errors="replace")
    tokens = tokenizer_of(trainer.config.train, command="quantize").encode(content)
    if not tokens:
        raise UserError(f"--calibrate {text}: the file is empty; name one with text")
    rows_BT = rows_of(tokens, sizes.context_length)
    report(f"Calibrated on {rows_BT.size:,} of the {len(tokens):,} tokens of {text}")
    state = dataclasses.replace(trainer.state, params=params, opt_state=(), frozen=nnx.State({}))
    seen = read_by(setup, state, rows_BT, list(READ))
    values = {name: x.astype(np.float32) for name, x in on_host(params, setup.stages).items()}
    scale(values, seen, of, group=group, report=report)
    clip(values, seen, group=group, report=report)
    dtype = np.dtype(trainer.config.precision.params)
    values = {name: x.astype(dtype) for name, x in values.items()}
    return shard_weights(base_step(setup).abstract_state().params, values, setup.stages)


def _config(
    trainer: Trainer, weight_format: Literal["int8", "int4"], group: int, out: AnyPath
) -> Config:
    """Return the configuration of an inference-only run, without training settings."""
    config = trainer.config
    train = dataclasses.replace(config.train, start_from=None)
    if isinstance(train.objective, Distillation):
        train = dataclasses.replace(train, objective=None)
    data, workdir = train.data, trainer.workdir
    if isinstance(data, TextData) and workdir is not None and data.tokenizer != "byte":
        own = f"{CARRIED_FOLDER}/{TOKENIZER}"
        if to_path(data.tokenizer) == workdir / own:
            train = dataclasses.replace(
                train, data=dataclasses.replace(data, tokenizer=str(out / own))
            )
    return dataclasses.replace(
        config,
        train=train,
        finetune=Finetune(quantize_bits=weight_format, quantize_group=group),
        optimizer=Optimizer(),
        exchange=Exchange(),
        offload=Offload(),
    )


def _bytes(params: nnx.State) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def _bits(setup: Setup, frozen: nnx.State) -> float:
    """Bits of a quantized weight."""
    held = sum(
        v.get_value().size * v.get_value().dtype.itemsize
        for v in by_name(frozen).values()
        if role_of(v) == "quantized"
    )
    assert isinstance(setup.tuning, QuantizedBase), "as configured"
    shapes = by_name(parameter_shapes(setup.build))
    return 8 * held / sum(shapes[name].get_value().size for name in setup.tuning.quantized)
