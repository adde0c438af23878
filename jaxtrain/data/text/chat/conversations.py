"""Conversations as text, with the character ranges of the assistant's answers.

A record has `messages`, each of a `role` and its `content`: what the role 'assistant' says is
written by the model. Or it has a `prompt` and a `completion`, both messages, or both text that no
template changes: the completion is written by the model.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxtrain.config.errors import did_you_mean
from jaxtrain.data.text.chat.chat_template import ChatTemplate, Message, Span, TemplateError
from jaxtrain.data.text.formats.json_lines import BadLineError, kind, string
from jaxtrain.data.tokenization.tokenizer import Tokenizer, closing

ANSWERS = "assistant"  # the role of the model

Template = Callable[[], ChatTemplate]  # asked for where there are messages


@dataclasses.dataclass(frozen=True)
class Written:
    """A conversation as text.

    Attributes:
      text: all of it.
      told: the places, in characters, of what the model is to write.
      ends: whether it is a whole text, which the tokenizer's special tokens surround; those behind
        it and the end of a text the model writes too.
    """

    text: str
    told: tuple[Span, ...]
    ends: bool

    def encode(self, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Its tokens, and which of them the model is to write: bool, as long.

        A token is where its first character is.
        """
        ids, starts = tokenizer.encode_with_places(self.text)
        places = np.asarray(starts, np.int64)
        told = np.zeros(len(ids), bool)
        for begin, end in self.told:
            told |= (places >= begin) & (places < end)
        if self.ends:
            begin, end = tokenizer.before, closing(tokenizer)
            ids = [*begin, *ids, *end]
            told = np.concatenate([np.zeros(len(begin), bool), told, np.ones(len(end), bool)])
        return np.asarray(ids, tokenizer.dtype), told


def format_conversation(
    record: dict[str, Any], template: Template, messages: str = "messages"
) -> Written:
    """A record's conversation as text.

    Args:
      record: messages, or `prompt` and `completion`; perhaps `tools`.
      template: gives what writes messages; not asked where there is text alone.
      messages: the field that holds them.

    Raises:
      BadLineError: it is none, or the template rejects it.
    """
    if messages in record:
        return _apply_template(_messages(messages, record[messages]), 0, record, template)
    for name in ("prompt", "completion"):
        if name not in record:
            hint = did_you_mean(name, record)
            raise BadLineError(f"no field {messages!r}, nor {name!r}{hint}")
    return format_answer(record, "completion", template)


def format_answer(record: dict[str, Any], answer: str, template: Template) -> Written:
    """A record's `prompt` with the answer in another field, both messages or both text.

    Raises:
      BadLineError: as of `format_conversation`.
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
            f"{name!r} is {kind(value) if value != [] else 'empty'}, where a list of messages is "
            "wanted"
        )
    for number, message in enumerate(value):
        at = f"{name}[{number}]"
        if not isinstance(message, dict):
            raise BadLineError(f"{at} is {kind(message)}, where a message in braces is wanted")
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
    """Messages of which those from `first` on may be the model's."""
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadLineError(f"'tools' is {kind(tools)}, where a list is wanted")
    if all(message["role"] != ANSWERS for message in messages[first:]):
        raise BadLineError(f"no message has the role {ANSWERS!r}, so there is nothing to learn")
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
    """Spans of the model's messages: what each adds to the text before it and the beginning of
    an answer."""
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
