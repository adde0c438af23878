"""What lies beside an encoder of sentences: how hidden states become its embeddings, both ways.

sentence-transformers keeps this in files of its own: modules.json names the parts one after the
other, and the part of pooling has a config.json in its folder.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain.models.weights.asked import Asked

MODULES = "modules.json"
# Among what config.json asks for.
KEY = "sentence_transformers"
_FOLDER = "1_Pooling"
_TYPES = "sentence_transformers.models."
# How it calls ours, in older files a flag each, in newer ones the word behind "pooling_mode".
_MODES = {"mean": "mean_tokens", "first": "cls_token", "max": "max_tokens"}
_OTHERS = ("mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
_WORDS = {"mean": "mean", "cls": "first", "max": "max"}


def said_beside(read: Callable[[str], bytes | None]) -> dict[str, Any]:
    """What the files beside config.json say, to be read as if it stood there under `KEY`.

    Args:
      read: the content of a file of the folder; None: there is none.
    """
    content = read(MODULES)
    if content is None:
        return {}
    modules = _json(content)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        return {KEY: {"modules": [MODULES]}}  # is refused, as a module that is not known
    kinds = [str(one.get("type")).rpartition(".")[2] for one in modules]
    found: dict[str, Any] = {"modules": kinds}
    for kind, one in zip(kinds, modules, strict=True):
        place = str(one.get("path"))
        if kind == "Pooling" and re.fullmatch(r"[\w][\w.+-]*", place):
            settings = _json(read(f"{place}/config.json") or b"{}")
            found["pooling"] = settings if isinstance(settings, dict) else {}
    return {KEY: found}


def read_pooling(asked: Asked) -> dict[str, Any]:
    """The settings of embeddings; without such files the mean, as sentence-transformers has it."""
    beside = asked.table(KEY)
    modules = beside.content.get("modules", ["Transformer", "Pooling"])
    allowed = ["Transformer", "Pooling", "Normalize"]
    if modules not in (allowed[:2], allowed):
        asked.refuse(
            f"{MODULES} has {', '.join(modules)}; here it is Transformer and Pooling, with or "
            "without Normalize"
        )
    return {"pooling": _read_mode(asked, beside.table("pooling").content),
            "normalized": "Normalize" in modules}  # fmt: skip


def _read_mode(asked: Asked, settings: Mapping[str, Any]) -> str:
    """How hidden states become one vector."""
    every = [*_MODES.values(), *_OTHERS]
    flags = [mode for mode in every if settings.get(f"pooling_mode_{mode}")]
    for ours, mode in _MODES.items():
        if flags == [mode]:
            return ours
    word = settings.get("pooling_mode", "mean" if not flags else " and ".join(flags))
    if word not in _WORDS:
        asked.refuse(f"pooling_mode = {word!r}; here it is {', '.join(_WORDS)}, one of them")
    return _WORDS.get(word, "mean")


def written_beside(model: Any) -> dict[str, bytes]:
    """The files that sentence-transformers reads.

    Args:
      model: with `pooling` and `normalized`.
    """
    kinds = {"Transformer": "", "Pooling": _FOLDER}
    kinds |= {"Normalize": "2_Normalize"} if model.normalized else {}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{_TYPES}{kind}"}
        for number, (kind, path) in enumerate(kinds.items())
    ]
    flags = {f"pooling_mode_{mode}": ours == model.pooling for ours, mode in _MODES.items()}
    settings = {"word_embedding_dimension": model.embed_dim, **flags}
    files = {MODULES: modules, f"{_FOLDER}/config.json": settings}
    return {name: json.dumps(content, indent=2).encode() for name, content in files.items()}


def _json(content: bytes) -> Any:
    """Of a file that nobody vouches for; None: it is no JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
