"""Files of tagged sentences: JSON lines and CoNLL columns."""

from collections.abc import Iterator

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError
from jaxtrain.data.pairs.files import field, records, text_of
from jaxtrain.data.text.pieces import BYTE_ORDER_MARK, plain_name, reading

COLUMNS = (".conll", ".iob", ".bio", ".txt")
ENDINGS = (".jsonl", ".json", *COLUMNS)
DOCUMENT = "-DOCSTART-"  # the word of a line that is none of a sentence
Sentence = tuple[list[str], list[str]]


def read(path: Place, setting: str, words_field: str, tags_field: str) -> Iterator[Sentence]:
    """The words and tags of a file's sentences, one after the other; none of them is empty.

    Args:
      path: the file, perhaps compressed (.gz, .zst).
      setting: what names the file, for messages.
      words_field, tags_field: the names of a record's two lists.

    Raises:
      UserError: it has another ending, cannot be read, or a record or line holds no words and tags.
    """
    said, name = f"{setting} = {str(path)!r}", plain_name(path)
    if not name.endswith(ENDINGS):
        raise UserError(f"{said}: it takes a file that ends in {', '.join(ENDINGS)}")
    with reading(path) as stream:
        lines = (
            line.removeprefix(BYTE_ORDER_MARK) if not number else line
            for number, line in enumerate(stream)
        )
        if name.endswith(COLUMNS):
            yield from _of_columns(lines, said)
            return
        for where, record in records(lines, said):
            words, tags = (_strings(record, one, where) for one in (words_field, tags_field))
            if len(words) != len(tags):
                raise UserError(
                    f"{where} has {len(words)} words in {words_field!r} and {len(tags)} tags in "
                    f"{tags_field!r}; each word has one"
                )
            if words:
                yield words, tags


def _strings(record: dict, name: str, where: str) -> list[str]:
    value = field(record, name, where)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UserError(f"{where}: {name!r} is no list of strings")
    return [text_of(one, f"{where}: {name!r}") for one in value]


def _of_columns(lines: Iterator[bytes], said: str) -> Iterator[Sentence]:
    """A line a word, its tag the last column; empty lines between sentences."""
    words, tags = list[str](), list[str]()
    for number, line in enumerate(lines, start=1):
        try:
            columns = line.decode("utf-8").split()
        except UnicodeDecodeError as error:
            raise UserError(f"{said}: line {number} is no UTF-8 text") from error
        if not columns or columns[0] == DOCUMENT:
            if words:
                yield words, tags
            words, tags = [], []
            continue
        if len(columns) < 2:
            raise UserError(
                f"{said}: line {number} has one column, {columns[0]!r}; a word's line ends with "
                "its tag"
            )
        words.append(columns[0])
        tags.append(columns[-1])
    if words:
        yield words, tags
