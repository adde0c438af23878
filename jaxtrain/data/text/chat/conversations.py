"""Conversations as text, with the character ranges of the assistant's answers, and their sources.

A record has `messages`, each of a `role` and its `content`: content of the role 'assistant' is
written by the model. Or it has a `prompt` and a `completion`, both messages, or both text that no
template changes: the completion is written by the model.
"""

import dataclasses
import datetime
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import numpy as np

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError, count_of, did_you_mean, require_at_least
from jaxtrain.config.values import PathOr
from jaxtrain.data.source import (
    check_heldout_fraction,
    ending_of,
    existing_path,
    file_facts,
    heldout_facts,
    hold_out,
    is_heldout,
    walk_files,
)
from jaxtrain.data.text.chat.chat_template import (
    WORDS,
    ChatTemplate,
    Message,
    Span,
    TemplateError,
    open_template,
)
from jaxtrain.data.text.documents import Records, plain_name
from jaxtrain.data.text.formats import columnar, json_lines
from jaxtrain.data.text.formats.json_lines import BadLineError, kind, string
from jaxtrain.data.tokenization.tokenizer import Tokenizer, closing, open_tokenizer

ANSWERS = "assistant"  # the role of the model

Template = Callable[[], ChatTemplate]  # called only if there are messages


@dataclasses.dataclass(frozen=True)
class Written:
    """Conversation as text.

    Attributes:
      text: all of it.
      answers: the character spans that the model is to generate.
      ends: whether it is a whole text, which the tokenizer's special tokens surround; those after
        it and the end-of-text token are generated too.
    """

    text: str
    answers: tuple[Span, ...]
    ends: bool

    def encode(self, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens, and a mask of those that the model is to generate: bool, of the same
        length.

        A token belongs to its first character.
        """
        ids, starts = tokenizer.encode_with_offsets(self.text)
        offsets = np.asarray(starts, np.int64)
        answer_mask = np.zeros(len(ids), bool)
        for begin, end in self.answers:
            answer_mask |= (offsets >= begin) & (offsets < end)
        if self.ends:
            begin, end = tokenizer.before, closing(tokenizer)
            ids = [*begin, *ids, *end]
            answer_mask = np.concatenate(
                [np.zeros(len(begin), bool), answer_mask, np.ones(len(end), bool)]
            )
        return np.asarray(ids, tokenizer.dtype), answer_mask


def format_conversation(
    record: dict[str, Any], template: Template, messages: str = "messages"
) -> Written:
    """Format a record's conversation as text.

    Args:
      record: messages, or `prompt` and `completion`; perhaps `tools`.
      template: returns the template of messages; not called for plain text.
      messages: the field with the messages.

    Raises:
      BadLineError: it is not a conversation, or the template rejects it.
    """
    if messages in record:
        return _apply_template(_messages(messages, record[messages]), 0, record, template)
    for name in ("prompt", "completion"):
        if name not in record:
            hint = did_you_mean(name, record)
            raise BadLineError(f"no field {messages!r}, nor {name!r}{hint}")
    return format_answer(record, "completion", template)


def format_answer(record: dict[str, Any], answer: str, template: Template) -> Written:
    """Format a record's `prompt` with the answer in another field, both messages or both text.

    Raises:
      BadLineError: as in `format_conversation`.
    """
    prompt, completion = record["prompt"], record[answer]
    if isinstance(prompt, str):
        before, after = string("prompt", prompt), string(answer, completion)
        if not after:
            raise BadLineError(f"{answer!r} is empty")
        return Written(before + after, ((len(before), len(before) + len(after)),), True)
    before = _messages("prompt", prompt)
    after = _messages(answer, completion)
    return _apply_template([*before, *after], len(before), record, template)


def _messages(name: str, value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadLineError(
            f"{name!r} is {kind(value) if value != [] else 'empty'}, but it must be a list of "
            "messages"
        )
    for number, message in enumerate(value):
        at = f"{name}[{number}]"
        if not isinstance(message, dict):
            raise BadLineError(f"{at} is {kind(message)}, but it must be a JSON object")
        for field in ("role", "content"):
            if field not in message and not (field == "content" and "tool_calls" in message):
                raise BadLineError(f"{at} has no {field!r}{did_you_mean(field, message)}")
        string(f"{at}.role", message["role"])
        if message.get("content") is not None or "tool_calls" not in message:
            string(f"{at}.content", message["content"])
    return value


def _apply_template(
    messages: list[Message], first: int, record: dict[str, Any], opened: Template
) -> Written:
    """Format messages, of which those from `first` on may be the model's."""
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadLineError(f"'tools' is {kind(tools)}, but it must be a list")
    if all(message["role"] != ANSWERS for message in messages[first:]):
        raise BadLineError(f"no message has the role {ANSWERS!r}, so there is nothing to train on")
    template = opened()
    try:
        text, spans = template.render_with_spans(messages, tools=tools)
        if template.marks:
            before = len(template.text(messages[:first], tools=tools)) if first else 0
            spans = [span for span in spans if span[0] >= before]
        else:
            spans = _by_difference(messages, first, text, tools, template)
    except TemplateError as error:
        raise BadLineError(f"the chat template rejects it ({error})") from error
    return Written(text, tuple(spans), False)


def _by_difference(
    messages: Sequence[Message],
    first: int,
    text: str,
    tools: Sequence[Any] | None,
    template: ChatTemplate,
) -> list[Span]:
    """Return the spans of the model's messages: the text that each adds after the start of an
    answer.
    """
    found = []
    for number in range(first, len(messages)):
        if messages[number]["role"] != ANSWERS:
            continue
        before = template.text(messages[:number], tools=tools, reply=True)
        after = template.text(messages[: number + 1], tools=tools)
        if not (text.startswith(before) and text.startswith(after) and len(before) < len(after)):
            raise BadLineError(
                f"the chat template writes messages[{number}] otherwise where others follow it, so "
                "that its position is unknown; mark it with {% generation %} in "
                f"{template.named}, or end the conversation there"
            )
        found.append((len(before), len(after)))
    return found


T = TypeVar("T")

_ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Templated:
    """Base of records that a chat template formats as text.

    Attributes:
      source: a file of JSON lines (`.jsonl`, `.ndjson`, `.json`, perhaps `.gz` or `.zst`), a
        `.parquet` or `.arrow` file, or a folder of them, on a disk or at `'gs://BUCKET/PATH'`.
      heldout_source: source of held-out records; None holds out a part of `source`.
      heldout_fraction: fraction of `source` that is held out, evenly spaced over its records.
      tokenizer: the path of a Hugging Face tokenizer.json, or `'byte'`.
      end_of_text: the token of tokenizer.json that ends a text; None takes the tokenizer's own.
      add_special_tokens: as in TextData, for texts that templates do not write; a template writes
        special tokens itself.
      chat_template: a file of Jinja, or `'chatml'`; None takes the one next to the tokenizer.
      date: the date for templates that write today's, such as '2026-07-26'.
      sequence_length: tokens per row.
      bad_records: how many unusable records may be skipped; they are counted, and the
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
        """Vocabulary size: all ids are below it. Reads the tokenizer file if there is one, and no
        text.
        """
        return self.open_tokenizer().vocab_size

    def open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, without reading any record.

        Raises:
          UserError: no such file, or it is not a tokenizer.json.
        """
        path = self._tokenizer_path()
        return open_tokenizer(
            self.tokenizer, end_of_text=self.end_of_text, path=path, section=self._section,
            add_special_tokens=self.add_special_tokens,
        )  # fmt: skip

    def open_template(self, *, today: datetime.date | None = None) -> ChatTemplate:
        """Return the template, for the configured date or else for `today`.

        Raises:
          UserError: there is none, or it is not a template.
        """
        day = today if self.date is None else self._day()
        return open_template(self._section, self.chat_template, self._tokenizer_path(), day)

    def split(
        self, take: Callable[[dict[str, Any]], T]
    ) -> tuple[list[T], list[T], dict[str, int | str]]:
        """Return what `take` returns for the training and held-out records, and facts of what is
        left out.

        Raises:
          UserError: a file cannot be read, too many records are bad, or a split is empty.
        """
        setting = f"{self._section}.source"
        records = Records(
            "messages",
            self.bad_records,
            setting=f"{setting} = {self.source!r}",
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
                    raise UserError(f"{name}: it is empty; give at least one")
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

    def _tokenizer_path(self) -> AnyPath | None:
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


def _take(
    files: list[AnyPath], records: Records, take: Callable[[dict[str, Any]], T]
) -> Iterator[T]:
    for path in files:
        read_taken = columnar.read_taken if columnar.is_columnar(path) else json_lines.read_taken
        yield from records.texts(read_taken(path, take))


def _files(setting: str, source: str, left_out: Counter[str]) -> list[AnyPath]:
    """Return the file itself, or the record files under a folder, sorted by path.

    Args:
      setting: the binding that names the source.
      source: its value.
      left_out: filled with the number of other files of a folder, by suffix.
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
