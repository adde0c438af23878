"""Family of published models: names and settings, in both directions."""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import jaxtrain.models.weights.families
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.key_table import KeyTable, check_keys
from jaxtrain.models.model import Model
from jaxtrain.models.weights.config_file import ConfigFile, Row, read_rows, write_rows
from jaxtrain.models.weights.config_keys import QUANTIZATION, apply_aliases
from jaxtrain.models.weights.formats import awq
from jaxtrain.models.weights.names import Name

# Errors that families raise for unexpected values.
_OTHER_KINDS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Family of published models: config.json keys and tensor names; an entry of a file's
    `FAMILIES`.

    Attributes:
      architecture: its name in config.json, "LlamaForCausalLM".
      model_type: its short name, "llama".
      model: the class of our sizes.
      rows: the keys of its config.json and the settings of `model`, in the order of the file.
      names: the map between its tensors and our parameters.
      prefix: of all names except an output matrix's; files of a model without its
        output matrix may lack it.
      copies: tensors that may be stored in a file a second time, where they are tied -> the first.
      buffers: a regular expression of tensors that are not parameters: they follow from the sizes.
      counts: names of tensors with an integer that is unused here; written as 0, before
        all others.
      extra_files: contents of further files of the checkpoint, by name.
      dequantized: methods of config.json's quantization_config whose weights are read as the floats
        that they represent.
      aliases: other names of keys of config.json -> the names here.
    """

    architecture: str
    model_type: str
    model: type
    rows: tuple[Row, ...]
    names: Callable[[Any], tuple[Name, ...]]
    prefix: str
    copies: Mapping[str, str]
    buffers: str = r"(?!)"
    counts: Callable[[Any], tuple[str, ...]] = lambda _: ()
    extra_files: Callable[[Any], Mapping[str, bytes]] = lambda _: {}
    dequantized: tuple[str, ...] = (awq.METHOD,)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def keys(self) -> KeyTable:
        """The entry of each key of a config.json; a later row overrides an earlier one."""
        return {key: entry for row in self.rows for key, entry in row.keys.items()}

    def read(self, config: ConfigFile) -> dict[str, Any]:
        """Return the settings of `model` from a config.json."""
        return read_rows(self.rows, config)

    def write(self, model: Any) -> dict[str, Any] | None:
        """Return the config.json of sizes; None: they are not of this family."""
        return write_rows(self.rows, model)


def families() -> list[Family]:
    """Return all families, in the order of their files."""
    package = jaxtrain.models.weights.families
    modules = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    return [
        family
        for module in modules
        for family in getattr(importlib.import_module(module.name), "FAMILIES", ())
    ]


def family_of(content: Mapping[str, Any], *, where: str) -> Family:
    """Return the family of a config.json.

    Raises:
      UserError: the family is not supported; names the nearest.
    """
    known = {family.architecture: family for family in families()}
    named = content.get("architectures") or [f"model_type {content.get('model_type')!r}"]
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UserError(f"{where}: architectures = {named!r}; use a list of names")
    for name in named:
        if name in known:
            return known[name]
    # Of several heads on one body, the first is the default.
    by_type = {family.model_type: family for family in reversed(known.values())}
    if content.get("model_type") in by_type and not content.get("architectures"):
        return by_type[content["model_type"]]
    hint = did_you_mean(str(named[0]), known)
    raise UserError(f"{where}: the architecture {named[0]} is not supported{hint}")


def model_of(content: Mapping[str, Any], *, where: str) -> tuple[Family, Model]:
    """Return the family and the sizes of a config.json.

    Args:
      content: of config.json.
      where: the file, for the message.

    Raises:
      UserError: everything that is not supported, in one message.
    """
    family = family_of(content, where=where)
    config = ConfigFile(apply_aliases(content, family.aliases))
    config.reasons += check_keys(config.content, family.keys)
    quantized = config.table("quantization_config").content
    method = quantized.get("quant_method")
    if method not in family.dequantized:
        config.only("quantization_config", [None], default=None)
    else:
        within = "quantization_config."
        config.reasons += check_keys(quantized, QUANTIZATION[method], within=within)
    model = None
    try:
        model = family.model(**family.read(config))
    except UserError as error:
        config.reasons += str(error).splitlines()
    except _OTHER_KINDS as error:  # for example a list instead of a number, or a depth of 0
        config.reject(f"values of other kinds than {family.architecture} has ({error!r})")
    if config.reasons or model is None:
        lines = "\n".join(f"  {reason}" for reason in config.reasons)
        raise UserError(f"{where}: these settings are not supported:\n{lines}")
    return family, model


def family_for(model: Model, preferred: str | None) -> tuple[Family, dict[str, Any]]:
    """Return the family of sizes, and their config.json.

    Args:
      model: the sizes.
      preferred: the model_type of the run's original files, if several match.

    Raises:
      UserError: there is none.
    """
    fitting = []
    # No published architecture has a sparse attention pattern.
    has_pattern = model.attention is not None and model.attention.pattern is not None
    for family in families():
        fits = isinstance(model, family.model) and not has_pattern
        content = family.write(model) if fits else None
        if content is not None:
            fitting.append((family, content))
    if not fitting:
        raise UserError(
            f"Train.model=@{type(model).__name__}() with these settings is not a known Hugging "
            f"Face architecture; there are {', '.join(f.architecture for f in families())}"
        )
    return next((one for one in fitting if one[0].model_type == preferred), fitting[0])
