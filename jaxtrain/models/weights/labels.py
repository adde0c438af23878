"""Class names of a published classifier: id2label and label2id of config.json."""

from typing import Any

from jaxtrain.models.weights.asked import Asked


def read_classes(asked: Asked) -> int:
    """How many there are; two where nothing is said, as transformers has it."""
    names = asked.table("id2label").content
    return len(names) if names else asked.whole("num_labels", 2)


def write_classes(count: int) -> dict[str, Any]:
    """Return tables of `count` classes, named by number as in transformers."""
    names = {str(number): f"LABEL_{number}" for number in range(count)}
    return {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}}
