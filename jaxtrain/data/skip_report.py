"""Report of what a data source skips or decides by itself.

Facts of this kind are `files`, `files_left_out` and `endings_left_out` of a folder,
`bad_records` and `first_bad_records` of files of records, `converted` of images,
`heldout_rule`, and `no_end_of_text` of a tokenizer.
"""

from collections.abc import Mapping
from pathlib import PurePosixPath

from jaxtrain.config.errors import count_of

Facts = dict[str, float | int | str]

NO_ENDING = "no ending"

# Facts that are sentences or lists: shown on lines of their own.
SENTENCES = ("endings_left_out", "first_bad_records", "converted", "heldout_rule", "no_end_of_text")
_COUNTS = ("files", "files_left_out", "bad_records")


def ending_of(name: str) -> str:
    """The ending of a file's name in lower case, or that it has none."""
    return PurePosixPath(name).suffix.lower() or NO_ENDING


def file_facts(read: int, left_out: Mapping[str, int]) -> dict[str, int | str]:
    """Facts of a folder from which files are left out; none where all are read.

    Args:
      read: how many files are read.
      left_out: how many are not, by ending.
    """
    if not left_out:
        return {}
    most = sorted(left_out.items(), key=lambda pair: (-pair[1], pair[0]))
    return {
        "files": read,
        "files_left_out": sum(left_out.values()),
        "endings_left_out": ", ".join(f"{ending} {count:,}" for ending, count in most),
    }


def heldout_facts(
    setting: str, fraction: float, count: int, unit: str, *, each: str | None = None
) -> dict[str, int | str]:
    """The fact that one example is held out where the fraction alone would hold out none.

    Args:
      setting: the binding of the fraction.
      fraction: its value.
      count: of all examples, those held out too.
      unit: what they are, such as "document".
      each: the group of which one example each is held out, such as "class"; it has at most
        `count` examples.
    """
    of = f"{count_of(count, unit)}" if each is None else f"at most {count_of(count, unit)} a {each}"
    return {
        "heldout_rule": f"Held out the last of {of}, because {setting} = {fraction} of them is "
        "less than one"
    }


def merge(facts: Mapping[str, Mapping[str, object]]) -> Facts:
    """The facts of this kind of several sources together.

    Args:
      facts: by the name of the source.
    """
    found: Facts = {}
    for name in _COUNTS:
        values = [one[name] for one in facts.values() if name in one]
        if values:
            found[name] = sum(value for value in values if isinstance(value, int))
    for name in SENTENCES:
        lines = [f"{source}: {one[name]}" for source, one in facts.items() if name in one]
        if lines:
            found[name] = "; ".join(lines)
    return found


def sentences(facts: Mapping[str, object]) -> list[str]:
    """Return a message for each of these facts."""
    messages = []
    if "files_left_out" in facts:
        messages.append(
            f"Left out {count_of(_int(facts['files_left_out']), 'file')} next to the "
            f"{_int(facts['files']):,} that are read ({facts['endings_left_out']}): " + _way(facts)
        )
    if "first_bad_records" in facts:
        bad = count_of(_int(facts["bad_records"]), "record")
        messages.append(f"Left out {bad}: {facts['first_bad_records']}")
    whole = ("converted", "heldout_rule", "no_end_of_text")
    return messages + [str(facts[name]) for name in whole if name in facts]


def _way(facts: Mapping[str, object]) -> str:
    if "train_images" in facts:
        return "only PNG and JPEG files are read; convert the others"
    if "cut_documents" in facts:
        return "only files of records are read"
    return "their endings are not those of text; a pattern as the source, 'DIR/**', reads all files"


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
