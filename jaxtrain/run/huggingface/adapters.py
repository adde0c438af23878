"""PEFT adapters (LoRA): read and write adapter_config.json and adapter_model.safetensors."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.config.buckets import on_disk
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors, write_atomically
from jaxtrain.config.key_table import KeyTable, Only, check_keys, ignore_keys, only, read_keys
from jaxtrain.config.untrusted import read_json_object
from jaxtrain.models.weights.family import Name, family_for, their_shapes
from jaxtrain.models.weights.formats import safetensors
from jaxtrain.parallel.sharding import by_name, logical_axes
from jaxtrain.run.huggingface.exporting import new_folder, require_one_process
from jaxtrain.run.huggingface.parameters import their_tensors
from jaxtrain.training.finetune.lora import DOWN, MAGNITUDE, UP, LoRA
from jaxtrain.training.finetune.quantized_base import sides_of
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import Setup, parameter_shapes
from jaxtrain.training.state import TrainState

_CHANGES_BASE = (
    "other initializations also change the base weights when PEFT loads the adapter; let PEFT "
    "convert it: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
)
KEYS: KeyTable = {
    **read_keys("peft_type", "r", "lora_alpha", "use_rslora", "use_dora"),
    **ignore_keys(
        "it records where the adapter comes from, or who wrote it",
        "task_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping",
        "inference_mode",
    ),
    **ignore_keys("the tensors of the file show which weights have adapters",
                 "target_modules", "exclude_modules", "layers_pattern"),
    **ignore_keys("the architecture determines how a weight is stored", "fan_in_fan_out"),
    **ignore_keys("dropout acts only in training; Finetune.lora_dropout sets it", "lora_dropout"),
    **ignore_keys("it records how values were initialized",
                 "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    **ignore_keys("it sets where and how PEFT computes, and changes no value",
                 "runtime_config", "megatron_config", "megatron_core", "merge_weights"),
    **ignore_keys("use_qalora is false", "qalora_group_size"),
    "init_lora_weights": only(
        True, False, "gaussian", "eva", "orthogonal", "mica", reason=_CHANGES_BASE
    ),
    "bias": only("none"),
    "modules_to_save": Only((None, [])),
    "rank_pattern": Only((None, {}), reason="all adapters have one rank"),
    "alpha_pattern": Only((None, {}), reason="all adapters have one alpha"),
    "layers_to_transform": Only((None, []), reason="all layers have adapters"),
    "layer_replication": Only((None, []), reason="layers are not repeated"),
    "trainable_token_indices": Only((None, [], {})),
    "target_parameters": Only((None, [])),
    "alora_invocation_tokens": only(None, reason="adapters act on every token"),
    "lora_bias": only(False),
    "use_qalora": only(False),
    "use_bdlora": only(None, False),
    "ensure_weight_tying": only(False),
    "enable_lora": only(None),
    **dict.fromkeys(
        ("arrow_config", "kasa_config", "monteclora_config", "velora_config"), only(None)
    ),
}  # fmt: skip


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_adapter(
    out: str, config: Config, setup: Setup, state: TrainState, *, report: Callable[[str], None]
) -> None:
    """Write the adapters of a state as a PEFT folder.

    Args:
      out: the folder, missing or empty.
      config: the run's configuration.
      setup: of the state.
      state: the state to write.
      report: called with each line to print.

    Raises:
      UserError: there are no adapters, the model is not a published architecture, the folder cannot
        be created, or there are several processes, each of which has a part of them.
    """
    tuning = _tuning(setup, f"--out {out}")
    require_one_process(out)
    pairs = _names(config, setup, tuning)
    names = tuple(name for pair in pairs for name in pair[1:])
    shapes = their_shapes(names, _shapes(setup, tuning))
    made = (tensor for _, tensor in their_tensors(names, state.params, setup.layer_order))
    content = _adapter_config(config, tuning, pairs)
    with new_folder(out) as (folder, temporary):
        safetensors.write(temporary / WEIGHTS, shapes, "F32", made)
        write_atomically(temporary / CONFIG, json.dumps(content, indent=2).encode())
    report(f"{len(shapes)} tensors of {len(tuning.targets)} adapters in {folder}")


def read_adapter(source: str, config: Config, setup: Setup) -> dict[str, np.ndarray]:
    """Return the adapters of a PEFT folder by our names, unsharded, the layers in the model's
    order.

    Raises:
      UserError: there is none, or its kind, rank, scale or shape differs from this run's.
    """
    tuning, folder = _tuning(setup, f"Finetune.adapter={source!r}"), on_disk(source)
    with path_errors(f"Finetune.adapter={source!r}", needs=f"name a folder with {CONFIG}"):
        content = read_json_object(folder / CONFIG)
        stored = safetensors.read_header(folder / WEIGHTS)
    pairs = _names(config, setup, tuning)
    names = tuple(name for pair in pairs for name in pair[1:])
    shapes = _shapes(setup, tuning)
    reasons = list(_setting_differences(content, config, tuning))
    wanted, there = their_shapes(names, shapes), _targets(stored, config)
    if there and there != tuning.targets:
        reasons.append(
            f"it has adapters of {', '.join(sorted(there))}; use Finetune.lora_targets="
            f"{tuple(sorted(there))!r}"
        )
    else:
        reasons += _tensor_differences(wanted, stored)
    if reasons:
        rest = [f"and {len(reasons) - 8} more"] if len(reasons) > 8 else []
        lines = "\n".join(f"  {reason}" for reason in [*reasons[:8], *rest])
        raise UserError(
            f"Finetune.adapter={source!r} is not an adapter of this run's model, rank and "
            f"targets:\n{lines}"
        )
    dtype = np.dtype(config.precision.params)
    found = {}
    for name in names:
        shape = shapes[name.ours]
        value = np.empty(shape, dtype)
        for index, there in name.tensors(shape):
            value[index] = name.to_ours(stored[there].open(), shape)
        found[name.ours] = value
    return found


def _tensor_differences(
    wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, safetensors.Tensor]
) -> list[str]:
    """Return the tensors that the file lacks, has in addition, or has in another shape."""
    found = [f"{name} is missing" for name in wanted if name not in stored]
    found += [f"{name} belongs to no adapter of this run" for name in stored if name not in wanted]
    return found + [
        f"{name} is {stored[name].dtype} {list(stored[name].shape)}, it must be {list(shape)} of "
        f"{', '.join(safetensors.DTYPES)}"
        for name, shape in wanted.items()
        if name in stored
        and (stored[name].shape != shape or stored[name].dtype not in safetensors.DTYPES)
    ]


def _targets(stored: Iterable[str], config: Config) -> frozenset[str]:
    """Return the weights whose adapters the file contains."""
    family, _ = family_for(config.train.model, None)
    down = "\n".join(name for name in stored if ".lora_A." in name)
    found = set()
    for line in family.names(config.train.model):
        pieces = re.split(r"\{[^}]*\}", _PREFIX + line.theirs.removesuffix(".weight"))
        wanted = r"\w+".join(map(re.escape, pieces))
        if re.search(rf"^{wanted}\.lora_A", down, re.MULTILINE):
            found.add(line.ours)
    return frozenset(found)


def _tuning(setup: Setup, where: str) -> LoRA:
    if not isinstance(setup.tuning, LoRA):
        raise UserError(f"{where}: the run trains no adapters; set Finetune.lora_rank, such as 16")
    return setup.tuning


def _shapes(setup: Setup, tuning: LoRA) -> dict[str, tuple[int, ...]]:
    """Return the shapes of A and B by name, the layers in the model's order and number."""
    shapes = parameter_shapes(setup.build)
    drawn = jax.eval_shape(lambda: tuning.draw(shapes, jax.random.key(0)))
    return {name: variable.get_value().shape for name, variable in by_name(drawn).items()}


def _names(config: Config, setup: Setup, tuning: LoRA) -> list[tuple[Name, ...]]:
    """Return the map's line of each weight that has an adapter, and those of its A, B and
    magnitude."""
    family, _ = family_for(config.train.model, None)
    shapes = by_name(parameter_shapes(setup.build))
    for line in family.names(config.train.model):
        if line.ours in tuning.targets and (line.rows or line.turn):
            raise UserError(
                f"Finetune.lora_targets: {line.ours} is a part of {line.theirs} of "
                f"{family.architecture}, whose adapter there is one for the whole tensor; export "
                "the merged weights with 'jaxtrain export-hf' without an adapter's folder"
            )
    return [
        (line, *_of_adapter(line, logical_axes(shapes[line.ours]))[: 2 + tuning.magnitudes])
        for line in family.names(config.train.model)
        if line.ours in tuning.targets
    ]


def _of_adapter(line: Name, axes: tuple[str, ...]) -> tuple[Name, Name, Name]:
    """Return a is [r, in] there, B [out, r] and m [out], whichever way the weight itself is
    stored."""
    letters, there = line.form.split("->")
    inside, outside = sides_of(axes)
    taken = {letters[i] for i in inside}
    groups = [group.strip("()") for group in _group(there)]
    into = next(group for group in groups if set(group) == taken)
    out_of = next(group for group in groups if set(group) == {letters[i] for i in outside})
    down = letters[0] + "".join(letters[i] for i in inside) + "R"
    up = "".join(
        "R" if i == inside[0] else letter
        for i, letter in enumerate(letters)
        if i == inside[0] or i in (0, *outside)
    )
    theirs = _PREFIX + line.theirs.removesuffix(".weight")
    return (
        Name(f"{theirs}.lora_A.weight", f"{line.ours}/{DOWN}", f"{down}->R({into})"),
        Name(f"{theirs}.lora_B.weight", f"{line.ours}/{UP}", f"{up}->({out_of})R"),
        Name(
            f"{theirs}.lora_magnitude_vector",
            f"{line.ours}/{MAGNITUDE}",
            f"{letters[0]}{''.join(letters[i] for i in outside)}->({out_of})",
        ),
    )


def _group(there: str) -> list[str]:
    """ "(NH)D" -> ["NH", "D"]."""
    return [part for piece in there.split("(") for part in _until_bracket(piece) if part]


def _until_bracket(piece: str) -> list[str]:
    inside, bracket, rest = piece.partition(")")
    return [inside, *rest] if bracket else list(inside)


def _adapter_config(config: Config, tuning: LoRA, pairs: list[tuple[Name, ...]]) -> dict[str, Any]:
    """Return the adapter_config.json."""
    family, _ = family_for(config.train.model, None)
    others = {
        line.theirs.removesuffix(".weight").rpartition(".")[2]
        for line in family.names(config.train.model)
        if line.ours not in tuning.targets and "." in line.theirs.removesuffix(".weight")
    }
    modules = []
    for line, *_ in pairs:
        parts = line.theirs.removesuffix(".weight").split(".")
        # The last word names the module, unless a module without an adapter has it too.
        modules.append(".".join(parts[-2:] if parts[-1] in others else parts[-1:]))
    settings = config.finetune
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.train.start_from,
        "r": tuning.rank,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": settings.lora_dropout,
        "use_rslora": settings.lora_scale == "sqrt_rank",
        "use_dora": tuning.magnitudes,
        "bias": "none",
        "fan_in_fan_out": all(_is_stored_by_input(pair[0], pair[1]) for pair in pairs),
        "target_modules": sorted(set(modules)),
        "inference_mode": True,
    }


def _is_stored_by_input(line: Name, down: Name) -> bool:
    """Whether the weight is [in, out] there."""
    first = _group(line.form.split("->")[1])[0]
    return first == _group(down.form.split("->")[1])[1]


def _setting_differences(content: Mapping[str, Any], config: Config, tuning: LoRA) -> list[str]:
    """Return settings of an adapter_config.json that differ here."""
    for key in ("r", "lora_alpha"):
        value = content.get(key, 8)  # as in peft
        if type(value) not in (int, float) or not value > 0:
            return [f"{key} is {value!r}, which is not a positive number"]
    settings, rank, alpha = config.finetune, content.get("r", 8), content.get("lora_alpha", 8)
    found = list(check_keys(content, KEYS))
    scale = alpha / (math.sqrt(rank) if content.get("use_rslora") else rank)
    ours = settings.lora_alpha / (
        math.sqrt(tuning.rank) if settings.lora_scale == "sqrt_rank" else tuning.rank
    )
    if content.get("peft_type") != "LORA":
        found.append(f"peft_type is {content.get('peft_type')!r}, here 'LORA'")
    if rank != tuning.rank:
        found.append(f"r is {rank}; use Finetune.lora_rank={rank}")
    elif not math.isclose(scale, ours):
        kind = "sqrt_rank" if content.get("use_rslora") else "rank"
        found.append(
            f"lora_alpha is {alpha} and use_rslora {content.get('use_rslora')}; use "
            f"Finetune.lora_alpha={alpha} and Finetune.lora_scale={kind!r}"
        )
    if bool(content.get("use_dora")) != tuning.magnitudes:
        found.append(
            f"use_dora is {content.get('use_dora')}; use Finetune.lora_magnitudes="
            f"{bool(content.get('use_dora'))}"
        )
    return found
