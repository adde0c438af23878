"""Export of a 4-bit run in AutoAWQ's layout.

The layout is that of `models/weights/formats/awq.py`; everything but linear layers of blocks is
float16.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.models.model import Model
from jaxtrain.models.weights.family import Name, family_for, their_shapes
from jaxtrain.models.weights.folder import CONFIG, Folder
from jaxtrain.models.weights.formats import awq
from jaxtrain.models.weights.formats.safetensors import read_header
from jaxtrain.nn.matmul.quantized import Quantized, unpack
from jaxtrain.nn.parameters import role_of
from jaxtrain.parallel.sharding import by_name, is_variable, logical_axes
from jaxtrain.run.checkpoint.metadata import RECEIPT, Ancestor
from jaxtrain.run.huggingface import receipt
from jaxtrain.run.huggingface.exporting import (
    companion_files,
    config_json_settings,
    generation_files,
    new_folder,
    require_one_process,
    write_weights,
)
from jaxtrain.run.huggingface.parameters import read_parameters, shapes_of, their_tensors
from jaxtrain.training.finetune.lora import LoRA
from jaxtrain.training.finetune.quantized_base import QuantizedBase, sides_of
from jaxtrain.training.finetune.tuning import Tuning
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import Setup, parameter_shapes
from jaxtrain.training.state import TrainState

_PARTS = {"codes": awq.CODES, "zeros": awq.ZEROS, "scales": awq.SCALES}


def export_awq(
    out: str,
    config: Config,
    setup: Setup,
    state: TrainState,
    workdir: AnyPath | None,
    *,
    ancestors: Sequence[Ancestor],
    console: Console,
) -> receipt.Receipt:
    """Write the folder atomically, and compare its content with the run.

    Args:
      out: the folder, missing or empty.
      config: the run's configuration.
      setup: of the state.
      state: the state to write.
      workdir: the run's folder, with files copied by an import; None: there is none.
      ancestors: of the run, for the receipt.
      console: for the receipt.

    Raises:
      UserError: the run is not quantized to int4, the model is not a published architecture or its
        matmuls are not linear layers there, or the folder cannot be created.
    """
    require_one_process(out)
    tuning = setup.tuning
    if not isinstance(tuning, QuantizedBase) or tuning.kind != "int4" or isinstance(tuning, LoRA):
        raise UserError(
            f"--out {out}: --awq writes a run of 'jaxtrain quantize --bits 4', and this one has "
            f"Finetune.quantize_bits={config.finetune.quantize_bits!r} and Finetune.lora_rank="
            f"{config.finetune.lora_rank}; quantize it first, or leave --awq out"
        )
    model, carried = config.train.model, companion_files(config, workdir)
    content = json.loads(carried.pop(CONFIG, b"{}"))
    family, config_json = family_for(model, content.get("model_type"))
    with setup.layout.active():
        params = _split_codes(tuning, state.frozen)
    names = _names(family.names(model), tuning, setup, family.architecture)
    ours = {"/".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(params)}
    order = setup.layer_order
    layers = None if order is None else sum(layer >= 0 for layer in order)
    shapes = {name: (layers or x.shape[0], *x.shape[1:]) if name.startswith("layers/") else x.shape
              for name, x in ours.items()}  # fmt: skip
    theirs = {name: _shape(name, shape) for name, shape in their_shapes(names, shapes).items()}
    dtypes = {name: "I32" if name.endswith((".qweight", ".qzeros")) else "F16" for name in theirs}
    quantization = {
        "quant_method": awq.METHOD, "version": "gemm", "bits": 4, "group_size": tuning.group,
        "zero_point": True, "modules_to_not_convert": None,
    }  # fmt: skip
    with new_folder(out) as (folder, temporary):
        made = their_tensors(names, params, order)
        write_weights(temporary, theirs, dtypes, ((name, _tensor(name, x)) for name, x in made))
        whole = config_json_settings(content, family, config_json, config, "float16")
        carried |= generation_files(config, workdir, carried, whole)
        for name, copied in carried.items():
            write_atomically(temporary / name, copied)
        whole["quantization_config"] = quantization
        write_atomically(temporary / CONFIG, json.dumps(whole, indent=2).encode())
        made = ((name, _tensor(name, x)) for name, x in their_tensors(names, params, order))
        found = _compare(temporary, family.architecture, made, setup, model, state, called=folder)
        found = dataclasses.replace(found, ancestors=tuple(ancestors))
        written = json.dumps(found.to_json(), indent=1).encode()
        write_atomically(temporary / RECEIPT, written)
    found.show(console)
    return found


def _compare(
    temporary: Path,
    architecture: str,
    made: Iterable[tuple[str, np.ndarray]],
    setup: Setup,
    model: Model,
    state: TrainState,
    *,
    called: Path,
) -> receipt.Receipt:
    """Compare the folder's tensors with the run's, and the logits of both: of the floats that we
    read in the folder, and of the run's codes.

    transformers reads such a folder only with a package of GPU kernels.
    """
    stored = {name: x for file in temporary.glob("*.safetensors") for name, x in
              read_header(file).items()}  # fmt: skip
    digests, differing = receipt.compare_tensors(stored, made)
    shapes = shapes_of(setup)
    count = sum(map(math.prod, shapes.values()))
    found = None
    if count <= receipt.MOST_PARAMETERS:
        tokens, _ = receipt.draw_input(model)
        params = read_parameters(Folder(temporary), setup, model)
        theirs = receipt.logits_of(setup.replace(tuning=Tuning()), model, params, tokens)
        ours = receipt.logits_of_state(setup, model, _in_half(state), tokens)
        against = "this run's codes, the rest in float16, against the floats of the written folder"
        size = np.asarray(tokens).size
        found = receipt.Logits.of(ours, theirs, size, against, independent=False)
    why_not = "transformers reads AutoAWQ's layout only with a package of kernels for GPUs"
    return receipt.Receipt(str(called), architecture, count, digests, differing, found, why_not)


@jax.jit
def _in_half(state: TrainState) -> TrainState:
    """Return the state with floats rounded to float16, as in the folder."""

    def one(variable: nnx.Variable) -> nnx.Variable:
        if role_of(variable) == "quantized":
            return variable
        value = variable.get_value()
        return variable.replace(value.astype(jnp.float16).astype(value.dtype))

    frozen = jax.tree.map(one, state.frozen, is_leaf=is_variable)
    return dataclasses.replace(state, frozen=frozen)


@functools.partial(jax.jit, static_argnums=0)
def _split_codes(tuning: QuantizedBase, frozen: nnx.State) -> nnx.State:
    """Return the parameters, quantized ones as codes, zeros and scales, a byte per code."""
    found: dict[Any, Any] = {}
    for path, variable in tuning.as_declared(frozen).items():
        value = variable.get_value()
        if isinstance(value, Quantized):
            for name, one in ("codes", unpack(value)), ("zeros", value.zeros), (
                "scales", value.scales,
            ):  # fmt: skip
                found[*path, name] = variable.replace(one)
        else:
            found[path] = variable
    return nnx.from_flat_state(found)


def _names(
    lines: tuple[Name, ...], tuning: QuantizedBase, setup: Setup, architecture: str
) -> tuple[Name, ...]:
    """Return the lines of the map, three for a quantized weight."""
    variables, found = by_name(parameter_shapes(setup.build)), list[Name]()
    for theirs, group in itertools.groupby(lines, key=lambda line: line.theirs):
        together = list(group)
        if together[0].ours not in tuning.quantized:
            _validate_latents(theirs, variables[together[0].ours], architecture)
            found += together
            continue
        for line in together:
            axes = logical_axes(variables[line.ours])
            _validate_others(line, sides_of(axes)[0], architecture)
        stem = theirs.removesuffix("weight")
        for ours, part in _PARTS.items():
            found += [
                dataclasses.replace(line, theirs=stem + part, ours=f"{line.ours}/{ours}")
                for line in together
            ]
    return tuple(found)


def _validate_latents(theirs: str, variable: Any, architecture: str) -> None:
    """Raise UserError for a linear layer that is not quantized."""
    if "latent" in logical_axes(variable):
        raise UserError(
            f"--awq: {theirs} of {architecture} is held in floats, and AutoAWQ reads every linear "
            "layer of a block as codes; export floats instead, without --awq"
        )


def _validate_others(line: Name, inside: tuple[int, ...], architecture: str) -> None:
    """Raise UserError for weights that are stored [in, out], unlike PyTorch's linear layers."""
    letters, there = line.form.split("->")
    last = there[there.rindex("(") + 1 : -1] if there.endswith(")") else there[-1]
    if set(last) != {letters[i] for i in inside} or not line.theirs.endswith(".weight"):
        raise UserError(
            f"--awq: {line.theirs} of {architecture} is not a linear layer [out, in], the only "
            "kind in AutoAWQ's layout; export floats instead, without --awq"
        )


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an AutoAWQ tensor, which is [out, in] without its packing."""
    if not name.endswith(tuple(_PARTS.values())):
        return shape
    if shape[0] % len(awq.ORDER):
        raise UserError(
            f"--awq: {name} has {shape[0]} outputs, and {len(awq.ORDER)} of them share a number in "
            "AutoAWQ's layout; export floats instead, without --awq"
        )
    return shape[1], shape[0] if name.endswith("scales") else shape[0] // len(awq.ORDER)


def _tensor(name: str, of: np.ndarray) -> np.ndarray:
    """Return a tensor in AutoAWQ's packed layout, from its unpacked form [out, in]."""
    if not name.endswith(tuple(_PARTS.values())):
        return of
    return of.T if name.endswith("scales") else awq.pack_codes(of.T)
