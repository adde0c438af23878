"""RoPE settings of a config.json, read and written: `rope_scaling` and `rope_parameters`.

Older files have `rope_theta` next to an object `rope_scaling`, those of transformers 5 all of it in
`rope_parameters`. A file may mix both; transformers then completes one object, and so does this.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import KeyTable, Only, check_keys, ignore_keys, read_keys
from jaxtrain.models.weights.config_file import (
    ConfigFile,
    Row,
    integer,
    number,
    read_rows,
    write_rows,
)

# Keys of rotary positions in config.json.
KEYS = read_keys(
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "original_max_position_embeddings",
)  # fmt: skip
# The settings of each type.
_OF_TYPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    "yarn": (
        "factor", "beta_slow", "beta_fast", "original_max_position_embeddings",
        "attention_factor", "mscale", "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
_EVERY = {key for keys in _OF_TYPE.values() for key in keys}


def _turns(key: str, setting: str, default: float) -> Row:
    """Row of a number of turns; 0 means the default."""
    return Row(
        read_keys(key),
        lambda rope: {setting: rope.number(key, default) or default},
        lambda model: {key: getattr(model, setting)},
    )


_FACTOR = number("factor", "rope_scaling")
_ORIGINAL = integer("original_max_position_embeddings", "rope_original_context_length")
# The settings of each scaling.
SCALINGS: Mapping[str, tuple[Row, ...]] = {
    "default": (),
    "linear": (_FACTOR,),
    "llama3": (
        _FACTOR,
        number("low_freq_factor", "rope_low_frequency_factor"),
        number("high_freq_factor", "rope_high_frequency_factor"),
        _ORIGINAL,
    ),
    "yarn": (
        _FACTOR,
        _turns("beta_slow", "rope_low_frequency_factor", 1.0),
        _turns("beta_fast", "rope_high_frequency_factor", 32.0),
        _ORIGINAL,
    ),
}


def rotary(
    *,
    theta: float,
    context_length: int,
    fraction: bool = False,
    whole_pairs: bool = True,
    unsaid: Mapping[str, Any] | None = None,
) -> Row:
    """Return the row of rotary positions of a model with `RopeSettings`.

    Args:
      theta: the base if the file has none.
      context_length: the longest context if the file has none.
      fraction: whether only a part of each head may be rotated; such positions have no scaling.
      whole_pairs: as in `nn.attention.rotary.Yarn`.
      unsaid: the object if the file has none.
    """
    types = ("default",) if fraction else tuple(SCALINGS)

    def read(config: ConfigFile) -> dict[str, Any]:
        length = config.integer("max_position_embeddings", context_length)
        kind, rope = standardize(
            config, theta=theta, context_length=length, types=types, unsaid=unsaid
        )
        found: dict[str, Any] = {"rope_theta": rope.number("rope_theta")}
        if fraction:
            found["rope_fraction"] = rope.number("partial_rotary_factor")
        else:
            reject_fraction(rope)
        found |= {"rope_type": "llama3", "rope_scaling": 1.0, **read_rows(SCALINGS[kind], rope)}
        if kind == "yarn" or found["rope_scaling"] != 1:
            found["rope_type"] = kind
        if kind == "yarn":
            for key in ("attention_factor", "mscale", "mscale_all_dim"):
                rope.only(key, [None], default=None)
            rope.only("truncate", [whole_pairs], default=True)
        return found

    def write(model: Any) -> dict[str, Any]:
        kind, scaling = model.rope_type, None
        if model.rope_scaling != 1:
            scaling = {"rope_type": kind, **(write_rows(SCALINGS[kind], model) or {})}
            scaling |= {"truncate": False} if kind == "yarn" and not whole_pairs else {}
        return {"rope_theta": model.rope_theta, "rope_scaling": scaling}

    return Row(KEYS, read, write)


def reject_fraction(rope: ConfigFile) -> None:
    """Reject rotary positions of only a part of each head."""
    rope.only("partial_rotary_factor", [1.0], default=1.0)


def standardize(
    config: ConfigFile,
    *,
    theta: float,
    context_length: int,
    types: tuple[str, ...],
    unsaid: Mapping[str, Any] | None = None,
) -> tuple[str, ConfigFile]:
    """Return the type of the rotary positions, and their settings merged into one object.

    `rope_scaling` overrides `rope_parameters`; settings that both lack come from config.json
    itself.

    Args:
      config: the config.json; collects keys and types that are not supported.
      theta: the base if the file has none.
      context_length: the longest context, which a scaling extends unless it has its own.
      types: the supported values of rope_type.
      unsaid: the object if the file has neither.
    """
    scaling, parameters = config.table("rope_scaling"), config.table("rope_parameters")
    if unsaid is not None and config.content.get("rope_parameters") is None:
        parameters = config.inner(unsaid)
    rope = dict(scaling.content or parameters.content)
    for key, default in ("rope_theta", theta), ("partial_rotary_factor", 1.0):
        if rope.get(key) is None:
            found = config.content.get(key)
            rope[key] = default if found is None else found
    kind = validate_type(config, rope, types)
    if "original_max_position_embeddings" in _OF_TYPE[kind]:
        key = "original_max_position_embeddings"
        if config.content.get(key) is not None:
            rope[key] = config.content[key]
        rope.setdefault(key, context_length)
    return kind, config.inner(rope)


def validate_type(config: ConfigFile, rope: Mapping[str, Any], types: tuple[str, ...]) -> str:
    """Return the rope_type of an object, and collect settings that it does not have."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in types:
        config.reject(f"rope_type = {kind!r}; it must be {' or '.join(map(repr, types))}")
        return "default"
    for reason in check_keys(rope, _table(kind)):
        config.reject(reason)
    return kind


def _table(kind: str) -> KeyTable:
    """Return the keys of an object of one type; those of other types are ignored."""
    unread = Only((None,), reason=f"rope_type {kind!r} does not read it")
    return {
        **dict.fromkeys(_EVERY, unread),
        **({"factor": Only((None, 1), reason="rope_type 'default' applies no scaling")}
           if kind == "default" else {}),
        **read_keys("rope_type", "rope_theta", "partial_rotary_factor", *_OF_TYPE[kind]),
        **ignore_keys("rope_type is used where both are given", "type"),
    }  # fmt: skip
