"""Shared parts of conversation data: record files, tokenizer, chat template."""

import dataclasses
import datetime
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError, count_of, require_at_least
from jaxtrain.config.values import PathOr
from jaxtrain.data.skip_report import ending_of, file_facts, heldout_facts
from jaxtrain.data.source import (
    check_heldout_fraction,
    existing_path,
    hold_out,
    is_heldout,
    walk_files,
)
from jaxtrain.data.text.chat.chat_template import WORDS, ChatTemplate, open_template
from jaxtrain.data.text.formats import columnar, json_lines
from jaxtrain.data.text.pieces import plain_name
from jaxtrain.data.text.records import Records
from jaxtrain.data.tokenization.tokenizer import Tokenizer, open_tokenizer

T = TypeVar("T")

_ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Templated:
    """Records that a chat template makes text of.

    Attributes:
      source: a file of JSON lines (`.jsonl`, `.ndjson`, `.json`, perhaps `.gz` or `.zst`), a
        `.parquet` or `.arrow` file, or a folder of such, on a disk or at `'gs://BUCKET/PATH'`.
      heldout_source: likewise, of what is held out; None holds out a part of `source`.
      heldout_fraction: that part, evenly spaced over the records' order.
      tokenizer: the path of a Hugging Face tokenizer.json, or `'byte'`.
      end_of_text: the token of tokenizer.json that ends a text; None takes the tokenizer's own.
      add_special_tokens: as of TextData, for texts that no template writes; a template writes
        special tokens itself.
      chat_template: a file of Jinja, or `'chatml'`; None takes the one beside the tokenizer.
      date: the day that a template writes which asks for today's, such as '2026-07-26'.
      sequence_length: tokens a row.
      bad_records: how many records that cannot be used may be left out; they are counted, and the
        first are named.
    """

    source: Annotated[str, PathOr()]
    heldout_source: Annotated[str | None, PathOr()] = None
    heldout_fraction: float = 0.05
    tokenizer: Annotated[str, PathOr(("byte",))] = "byte"
    end_of_text: str | None = None
    add_special_tokens: bool | None = None
    chat_template: Annotated[str | None, PathOr(tuple(WORDS))] = None
    date: str | None = None
    sequence_length: int = 1024
    bad_records: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, self, "sequence_length")
        require_at_least(0, self, "bad_records")
        check_heldout_fraction(self._section, self.heldout_fraction)
        if self.date is not None:
            self._day()

    @property
    def _section(self) -> str:
        return type(self).__name__

    @property
    def vocab_size(self) -> int:
        """Ids are under this; reads the tokenizer file where there is one, and no text."""
        return self.open_tokenizer().vocab_size

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer, without reading any record.

        Raises:
          UserError: no such file, or it is no tokenizer.json.
        """
        path = self._tokenizer_path()
        return open_tokenizer(
            self.tokenizer, end_of_text=self.end_of_text, path=path, section=self._section,
            add_special_tokens=self.add_special_tokens,
        )  # fmt: skip

    def open_template(self, *, today: datetime.date | None = None) -> ChatTemplate:
        """The template, for the date that is set or else for `today`.

        Raises:
          UserError: there is none, or it is no template.
        """
        day = today if self.date is None else self._day()
        return open_template(self._section, self.chat_template, self._tokenizer_path(), day)

    def split(
        self, take: Callable[[dict[str, Any]], T]
    ) -> tuple[list[T], list[T], dict[str, int | str]]:
        """What `take` makes of the records to train on and of those held out, and facts of what is
        left out.

        Raises:
          UserError: a file cannot be read, too many records are bad, or a split has none.
        """
        setting = f"{self._section}.source"
        records = Records(
            "messages",
            self.bad_records,
            refused=f"{setting} = {self.source!r}",
            ways=f"or set {self._section}.bad_records",
        )
        left_out = Counter[str]()
        files = _files(setting, self.source, left_out)
        found = list(_take(files, records, take))
        if self.heldout_source is not None:
            own = f"{self._section}.heldout_source"
            more = _files(own, self.heldout_source, left_out)
            heldout = list(_take(more, records, take))
            records.reject()
            for name, part in ((setting, found), (own, heldout)):
                if not part:
                    raise UserError(f"{name}: there is no record in it; give at least one")
            facts = file_facts(len(files) + len(more), left_out)
            return found, heldout, facts | records.facts()
        records.reject()
        held = hold_out(len(found), self.heldout_fraction)
        fraction = f"{self._section}.heldout_fraction"
        if not held.any() or held.all():
            way = f"use a smaller one, or {self._section}.heldout_source"
            raise UserError(
                f"{fraction} = {self.heldout_fraction} cannot split the "
                f"{count_of(len(found), 'record')} of {setting} = {self.source!r}; "
                + (way if len(found) > 1 else "give at least 2 records")
            )
        facts = file_facts(len(files), left_out) | records.facts()
        if not is_heldout(len(found), self.heldout_fraction).any():
            facts |= heldout_facts(fraction, self.heldout_fraction, len(found), "record")
        train = [one for one, out in zip(found, held, strict=True) if not out]
        return train, [one for one, out in zip(found, held, strict=True) if out], facts

    def _tokenizer_path(self) -> Place | None:
        if self.tokenizer == "byte":
            return None
        return existing_path(f"{self._section}.tokenizer", self.tokenizer, words=("byte",))

    def _day(self) -> datetime.date:
        assert self.date is not None
        try:
            return datetime.date.fromisoformat(self.date)
        except ValueError as error:
            raise UserError(
                f"{self._section}.date = {self.date!r}: a day such as '2026-07-26'"
            ) from error


def _take(files: list[Place], records: Records, take: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    for path in files:
        read_taken = columnar.read_taken if columnar.is_columnar(path) else json_lines.read_taken
        yield from records.texts(read_taken(path, take))


def _files(setting: str, source: str, left_out: Counter[str]) -> list[Place]:
    """The file itself, or those of records under a folder, in order of their paths.

    Args:
      setting: the binding that names the source.
      source: its value.
      left_out: takes how many other files a folder has, by ending.
    """
    path = existing_path(setting, source)
    if not path.is_dir():
        return [path]
    walked = [one for one, *_ in walk_files(path, setting)]
    found = [one for one in walked if plain_name(one).endswith(_ENDINGS)]
    left_out.update(ending_of(one.name) for one in walked if not plain_name(one).endswith(_ENDINGS))
    if not found:
        raise UserError(
            f"{setting} = {source!r}: none of its {count_of(len(walked), 'file')} is one of "
            f"records ({', '.join(_ENDINGS)})"
        )
    return found
