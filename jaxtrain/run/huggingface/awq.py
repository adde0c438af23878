"""A run in 4 bits becomes a folder in AutoAWQ's layout (its version `gemm`).

A linear layer [out, in] is three tensors there: `qweight` int32 [in, out / 8], `qzeros` int32
[in / group, out / 8] and `scales` float16 [in / group, out]; its weight is (code - zero) scale. An
int32 has the codes of 8 neighbours of out, in its least bits that of number 0, then of 2, 4, 6, 1,
3, 5 and 7. Everything else is float16.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.models.weights.family import family_for
from jaxtrain.models.weights.folder import CONFIG
from jaxtrain.models.weights.names import Name, their_shapes
from jaxtrain.nn.products.quantised import Quantised, unpacked
from jaxtrain.parallel.sharding import logical_axes
from jaxtrain.run.huggingface.exporting import carried_along, settings, write_weights
from jaxtrain.run.huggingface.new_folder import new_folder, refuse_several_processes
from jaxtrain.run.huggingface.parameters import their_tensors
from jaxtrain.training.finetune.few_bits import FewBits, sides_of
from jaxtrain.training.finetune.lora import LoRA
from jaxtrain.training.finetune.tuning import named
from jaxtrain.training.settings import Config
from jaxtrain.training.step import Program, TrainState, parameter_shapes

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PARTS = {"codes": "qweight", "zeros": "qzeros", "scales": "scales"}


def export_awq(
    out: str,
    config: Config,
    program: Program,
    state: TrainState,
    workdir: Place | None,
    *,
    say: Callable[[str], None],
) -> None:
    """Writes the folder, whole or not at all.

    Args:
      out: the folder, which is not there yet or empty.
      config: the run's configuration.
      program: whose state it is.
      state: what is written.
      workdir: the run's folder, with what an import has carried along; None: there is none.
      say: takes a line for people.

    Raises:
      UserError: the run is not held in 4 bits of even steps, the model is known nowhere else or its
        products are no linear layers there, or the folder cannot be made.
    """
    refuse_several_processes(out)
    tuning = program.tuning
    if not isinstance(tuning, FewBits) or tuning.kind != "int4" or isinstance(tuning, LoRA):
        raise UserError(
            f"--out {out}: --awq writes a run of 'jaxtrain quantize --bits 4', and this one has "
            f"Finetune.few_bits={config.finetune.few_bits!r} and Finetune.lora_rank="
            f"{config.finetune.lora_rank}; quantize it first, or leave --awq out"
        )
    model, carried = config.train.model, carried_along(config, workdir)
    content = json.loads(carried.pop(CONFIG, b"{}"))
    family, said = family_for(model, content.get("model_type"))
    with program.layout.active():
        params = _apart(tuning, state.frozen)
    names = _names(family.names(model), tuning, program, family.architecture)
    ours = {"/".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(params)}
    order = program.layer_order
    layers = None if order is None else sum(layer >= 0 for layer in order)
    shapes = {name: (layers or x.shape[0], *x.shape[1:]) if name.startswith("layers/") else x.shape
              for name, x in ours.items()}  # fmt: skip
    theirs = {name: _shape(name, shape) for name, shape in their_shapes(names, shapes).items()}
    dtypes = {name: "I32" if name.endswith((".qweight", ".qzeros")) else "F16" for name in theirs}
    quantization = {
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": tuning.group,
        "zero_point": True, "modules_to_not_convert": None,
    }  # fmt: skip
    with new_folder(out) as (folder, beside):
        made = their_tensors(names, params, order)
        write_weights(beside, theirs, dtypes, ((name, _tensor(name, x)) for name, x in made))
        for name, copied in carried.items():
            write_atomically(beside / name, copied)
        whole = settings(content, family, said, config, "float16")
        whole["quantization_config"] = quantization
        write_atomically(beside / CONFIG, json.dumps(whole, indent=2).encode())
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    say(f"{len(theirs)} tensors of {family.architecture} in {folder}, {size:,} bytes")


@functools.partial(jax.jit, static_argnums=0)
def _apart(tuning: FewBits, frozen: nnx.State) -> nnx.State:
    """The parameters, of those in few bits codes, zeros and scales, a byte a code."""
    found: dict[Any, Any] = {}
    for path, variable in tuning.as_declared(frozen).items():
        value = variable.get_value()
        if isinstance(value, Quantised):
            for name, one in ("codes", unpacked(value)), ("zeros", value.zeros), (
                "scales", value.scales,
            ):  # fmt: skip
                found[*path, name] = variable.replace(one)
        else:
            found[path] = variable
    return nnx.from_flat_state(found)


def _names(
    lines: tuple[Name, ...], tuning: FewBits, program: Program, architecture: str
) -> tuple[Name, ...]:
    """The lines of the map, three for one of a weight in few bits."""
    variables, found = named(parameter_shapes(program.build)), list[Name]()
    for theirs, group in itertools.groupby(lines, key=lambda line: line.theirs):
        together = list(group)
        if together[0].ours not in tuning.few_bits:
            _refuse_latents(theirs, variables[together[0].ours], architecture)
            found += together
            continue
        for line in together:
            axes = logical_axes(variables[line.ours])
            _refuse_others(line, sides_of(axes)[0], architecture)
        stem = theirs.removesuffix("weight")
        for ours, part in _PARTS.items():
            found += [
                dataclasses.replace(line, theirs=stem + part, ours=f"{line.ours}/{ours}")
                for line in together
            ]
    return tuple(found)


def _refuse_latents(theirs: str, variable: Any, architecture: str) -> None:
    """Raises UserError for a linear layer that is held in floats."""
    if "latent" in logical_axes(variable):
        raise UserError(
            f"--awq: {theirs} of {architecture} is held in floats, and AutoAWQ reads every linear "
            "layer of a block as codes; export floats instead, without --awq"
        )


def _refuse_others(line: Name, inside: tuple[int, ...], architecture: str) -> None:
    """Raises UserError for what is stored [in, out] there, and no linear layer of PyTorch's."""
    letters, there = line.form.split("->")
    last = there[there.rindex("(") + 1 : -1] if there.endswith(")") else there[-1]
    if set(last) != {letters[i] for i in inside} or not line.theirs.endswith(".weight"):
        raise UserError(
            f"--awq: {line.theirs} of {architecture} is no linear layer [out, in], which alone has "
            "a place in AutoAWQ's layout; export floats instead, without --awq"
        )


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor of AutoAWQ's, where without its packing it is [out, in]."""
    if not name.endswith(tuple(_PARTS.values())):
        return shape
    if shape[0] % len(ORDER):
        raise UserError(
            f"--awq: {name} has {shape[0]} outputs, and {len(ORDER)} of them share a number in "
            "AutoAWQ's layout; export floats instead, without --awq"
        )
    return shape[1], shape[0] if name.endswith("scales") else shape[0] // len(ORDER)


def _tensor(name: str, of: np.ndarray) -> np.ndarray:
    """A tensor of AutoAWQ's, of what it is without its packing, [out, in]."""
    if not name.endswith(tuple(_PARTS.values())):
        return of
    return of.T if name.endswith("scales") else packed(of.T)


def packed(codes_IO: np.ndarray) -> np.ndarray:
    """Codes of 4 bits as int32 [in, out / 8]."""
    eight = codes_IO.reshape(len(codes_IO), -1, len(ORDER)).astype(np.uint32)
    found = np.zeros(eight.shape[:2], np.uint32)
    for place, number in enumerate(ORDER):
        found |= eight[:, :, number] << np.uint32(4 * place)
    return found.view(np.int32)
