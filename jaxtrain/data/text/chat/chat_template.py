"""Chat templates (Jinja): a conversation as the text that a model was trained on.

A template is Jinja, from a tokenizer's folder, and is rendered as by transformers: in a
sandbox that calls only the functions named here, with the tokenizer's special tokens. A template
may mark the text that the model generates by `{% generation %}` ... `{% endgeneration %}`.
"""

import dataclasses
import datetime
import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError
from jaxtrain.config.untrusted import read_bounded
from jaxtrain.data.source import existing_path
from jaxtrain.data.text.chat.template_bounds import (
    MAX_SOURCE,
    add_bounds,
    bound_filters,
    bounds_extension,
    budget,
    charge_output,
    insert_budget,
)
from jaxtrain.data.tokenization.tokenizer_folder import SETTINGS, read_json, special_tokens

Message = Mapping[str, Any]
Span = tuple[int, int]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' ~ message.role ~ '\\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content ~ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content ~ '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS: Mapping[str, str] = {"chatml": CHATML}  # templates that need no file

_FILE = "chat_template.jinja"
_REASONING = ("reasoning_content", "thinking", "reasoning")  # their names, oldest first
_LEAST_JINJA = (3, 1, 6)  # sandboxes of older versions have known vulnerabilities
# Characters that occur in no text: they represent marks while a template is rendered.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_PROBE = "\ue000answer\ue001", "\ue000question\ue001"  # texts that templates do not write


class TemplateError(ValueError):
    """Error that a template raises for a conversation, or fails with."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """Chat template, with its variables and its date.

    Attributes:
      source: Jinja.
      named: where it is written, for messages.
      special: the tokenizer's special tokens by name, such as `eos_token`.
      today: the date for `strftime_now`; None rejects a template that uses it.
    """

    source: str
    named: str
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    today: datetime.date | None = None

    @property
    def marks(self) -> bool:
        """Whether the template itself marks what the model is to generate."""
        return "generation" in self._tags

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        reply: bool = False,
    ) -> str:
        """Return the conversation as text.

        Args:
          messages: each with a `role` and whatever else the template reads, plain JSON values.
          tools: JSON schemas of functions, for templates that list them.
          reply: whether to add the beginning of the model's next message.

        Raises:
          TemplateError: the template rejects these messages, or fails.
        """
        return self.render_with_spans(messages, tools=tools, reply=reply)[0]

    def render_with_spans(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        reply: bool = False,
    ) -> tuple[str, list[Span]]:
        """Render like `text`, and return the character ranges that the template marks."""
        if any(mark in json.dumps(messages, ensure_ascii=False) for mark in (_BEGIN, _END)):
            raise TemplateError("a message holds U+FDD0 or U+FDD1, which are not characters")
        jinja2 = _jinja()
        compiled = self._compiled
        try:
            with budget():
                rendered = compiled.render(
                    messages=[_with_reasoning(message) for message in messages],
                    tools=tools,
                    documents=None,
                    add_generation_prompt=reply,
                    **self.special,
                )
        except (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError,
                ValueError, AttributeError, AssertionError) as error:  # fmt: skip
            raise TemplateError(str(error) or type(error).__name__) from error
        return _without_marks(rendered)

    @functools.cached_property
    def end_of_turn(self) -> str:
        """Return the text that ends the model's turn; else what precedes the next question.

        Raises:
          UserError: the template does not write plain questions and answers.
        """
        answer, question = _PROBE
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        try:
            tail = self.text(messages).partition(answer)[2].strip()
            if tail:
                return tail
            longer = self.text([*messages, {"role": "user", "content": question}])
        except TemplateError as error:
            raise UserError(
                f"{self.named} does not write a question and its answer ({error}); name another"
            ) from error
        between = longer.partition(answer)[2].partition(question)[0].strip()
        if not between:
            raise UserError(
                f"{self.named} writes nothing between an answer and the next question, so that no "
                "answer would end; name another"
            )
        return between

    def validate(self) -> "ChatTemplate":
        """Return the template; UserError if it is not a valid one."""
        _ = self._compiled
        return self

    @functools.cached_property
    def _environment(self) -> Any:
        return _environment(self._strftime_now)

    @functools.cached_property
    def _compiled(self) -> Any:
        jinja2 = _jinja()
        if len(self.source) > MAX_SOURCE:
            raise UserError(
                f"{self.named} has {len(self.source):,} characters, more than a template may have"
            )
        try:
            with budget():
                return _compile(self._environment, self.source)
        # Errors of Python's compiler for a template's code, mostly nesting that is too deep.
        except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError, TypeError,
                OverflowError, MemoryError, AssertionError) as error:  # fmt: skip
            raise UserError(f"{self.named} is not a Jinja template ({error})") from error

    @functools.cached_property
    def _tags(self) -> set[str]:
        tokens = list(self._environment.lex(self.source))
        named = [(kind, value) for _, kind, value in tokens if kind != "whitespace"]
        return {
            value
            for (before, _), (kind, value) in zip(named, named[1:], strict=False)
            if before == "block_begin" and kind == "name"
        }

    def _strftime_now(self, form: str) -> str:
        if self.today is None:
            raise _jinja().TemplateError(
                "it writes today's date, which would make other tokens tomorrow: set the data's "
                "`date`, such as '2026-07-26'"
            )
        return self.today.strftime(form)


def open_template(
    section: str, word_or_path: str | None, tokenizer: AnyPath | None, today: datetime.date | None
) -> ChatTemplate:
    """Return the template that settings name, or that of the tokenizer's folder.

    Args:
      section: the settings' class, for messages.
      word_or_path: one of `WORDS` or a file of Jinja; None: the one next to the tokenizer.
      tokenizer: the tokenizer.json; None: there is none.
      today: as in ChatTemplate.

    Raises:
      UserError: there is none, or it is not a template.
    """
    named = f"{section}.chat_template = {word_or_path!r}"
    if word_or_path is None:
        found = None if tokenizer is None else template_next_to(tokenizer, today)
        if found is None:
            where = "the byte tokenizer has" if tokenizer is None else f"{tokenizer.parent} holds"
            raise UserError(
                f"{named}: {where} no chat template ({_FILE}, or chat_template in {SETTINGS}); "
                f"name a file of Jinja or one of {', '.join(map(repr, WORDS))}"
            )
        return found
    if word_or_path in WORDS:
        source = WORDS[word_or_path]
    else:
        path = existing_path(f"{section}.chat_template", word_or_path, words=WORDS)
        source = _read(path, named)
    special = {} if tokenizer is None else special_tokens(tokenizer.parent)
    return ChatTemplate(source, named, special, today).validate()


def template_next_to(tokenizer: AnyPath, today: datetime.date | None) -> ChatTemplate | None:
    """Return the template in the folder of a tokenizer.json; None if there is none.

    Raises:
      UserError: it is not a template, or a file next to it is not JSON.
    """
    folder = tokenizer.parent
    if (folder / _FILE).exists():
        named = f"the chat template {folder / _FILE}"
        source: Any = _read(folder / _FILE, named)
    else:
        named = f"the chat template of {folder / SETTINGS}"
        source = read_json(folder / SETTINGS).get("chat_template")
        if isinstance(source, list):  # several by name, in older files
            pairs = [one for one in source if isinstance(one, dict)]
            source = {one.get("name"): one.get("template") for one in pairs}.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, named, special_tokens(folder), today).validate()


# -- the tokenizer's folder ----------------------------------------------------------------------


def _read(path: AnyPath, named: str) -> str:
    content = read_bounded(path, named=named, limit=MAX_SOURCE)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{named} is not UTF-8 text (byte {error.start})") from error


# -- Jinja ---------------------------------------------------------------------------------------


def _jinja() -> Any:
    # Imported here: only conversations need it, and it is an extra.
    try:
        jinja2 = importlib.import_module("jinja2")
    except ImportError as error:
        raise UserError(
            f"chat templates are rendered by jinja2, of jaxtrain[chat] ({error}); run: "
            "pip install 'jaxtrain[chat]'"
        ) from error
    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    if version < _LEAST_JINJA:
        raise UserError(
            f"chat templates are untrusted programs, and the sandbox of jinja2 "
            f"{jinja2.__version__} has known vulnerabilities; run: pip install -U 'jaxtrain[chat]'"
        )
    return jinja2


def _environment(strftime_now: Any) -> Any:
    """Return Jinja's sandbox with the extensions that chat templates rely on."""
    jinja2 = _jinja()
    sandbox = importlib.import_module("jinja2.sandbox")
    nodes, extension = jinja2.nodes, importlib.import_module("jinja2.ext")

    class Generation(extension.Extension):
        """Extension that marks the contents of a generation block."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_mark_generation")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark_generation(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
               sort_keys: bool = False) -> str:  # fmt: skip
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
            sort_keys=sort_keys,
        )  # fmt: skip

    def new_dict(*pairs: Any, **named: Any) -> dict[Any, Any]:
        return dict(*pairs, **named)

    class Names(jinja2.utils.Namespace):
        """Jinja's namespace, without names that begin with an underscore, as Python's own do."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace takes no {name!r}")
            super().__setitem__(name, value)

    def namespace(*pairs: Any, **named: Any) -> Any:
        made = Names()
        for name, value in dict(*pairs, **named).items():
            made[name] = value
        return made

    environment = add_bounds(sandbox.ImmutableSandboxedEnvironment)(
        trim_blocks=True, lstrip_blocks=True, finalize=charge_output,
        extensions=[Generation, extension.loopcontrols, bounds_extension(extension.Extension)],
    )  # fmt: skip
    environment.filters["tojson"] = tojson
    bound_filters(environment)
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": new_dict,  # not the class, whose attributes lead out of the sandbox
        "namespace": namespace,
    }
    return environment


def _compile(environment: Any, source: str) -> Any:
    nodes, visitor = _jinja().nodes, importlib.import_module("jinja2.visitor")
    tree = environment.parse(source)
    return environment.from_string(insert_budget(nodes, visitor, tree, environment))


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Return the message with its reasoning under the names that templates read, as transformers
    does.
    """
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _without_marks(rendered: str) -> tuple[str, list[Span]]:
    text, spans, begin = [], [], 0
    size = 0
    for part in rendered.replace(_END, _BEGIN).split(_BEGIN):
        text.append(part)
        size += len(part)
        # Parts are outside and inside by turns: blocks are not nested.
        if len(text) % 2 == 0:
            spans.append((begin, size))
        begin = size
    return "".join(text), spans
