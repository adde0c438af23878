"""Chat templates: text, tokens and answers' marks are those of transformers.

In a sandbox, and without a word of today.
"""

import contextlib
import datetime
import json
import textwrap

import numpy as np
import pytest
from chat_model import save_tokenizer

from jaxtrain.config.errors import UserError
from jaxtrain.data.text.chat import chat_template
from jaxtrain.data.text.chat.chat_template import ChatTemplate, TemplateError, open_template
from jaxtrain.data.text.chat.conversations import format_conversation
from jaxtrain.data.tokenization.file_tokenizer import FileTokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is 2 + 2?\n"},
    {"role": "assistant", "content": "4 \u2013 vi\u00e8r \U0001f642\n"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"b": "<int>", "a": 1}}}]

# Each in the manner of a family: what they use of Jinja, not their words.
TEMPLATES = {
    "chatml": chat_template.CHATML,
    "default system, no marks": """
        {%- if messages[0].role != 'system' %}<|im_start|>system
        Help.<|im_end|>
        {% endif -%}
        {% for message in messages %}
            {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}<|im_end|>
        {% endfor %}
        {% if add_generation_prompt %}<|im_start|>assistant
        {% endif %}""",
    "brackets": """
        {%- set ns = namespace(system='') -%}
        {%- for m in messages -%}
          {%- if m['role'] == 'system' -%}
            {%- set ns.system = m['content'] ~ '\n\n' -%}{% continue %}
          {%- elif m['role'] == 'user' -%}
            {{- bos_token + '[INST] ' + ns.system + m['content'].strip() + ' [/INST] ' -}}
            {%- set ns.system = '' -%}
          {%- else -%}
            {%- generation -%}{{- m['content'] + eos_token -}}{%- endgeneration -%}
          {%- endif -%}
        {%- endfor -%}""",
    "tools": """
        {%- if tools %}{{ tools | tojson(indent=2) }}{{ dict(a=1, b='x') | tojson }}{% endif %}
        {%- for m in messages %}{% if loop.index0 is odd %}~{% endif %}{{ m.role }}: {{ m.content }}
        {% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}
        {% endfor %}{% if add_generation_prompt %}assistant: {% endif %}""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def peer(folder):
    return save_tokenizer(folder)


def opened(folder, source):
    (folder / "chat_template.jinja").write_text(source)
    return open_template("ChatData", None, folder / "tokenizer.json", None)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("reply", [False, True])
def test_the_tokens_are_those_of_transformers(folder, peer, name, reply):
    source = textwrap.dedent(TEMPLATES[name])
    ours, tokenizer = opened(folder, source), FileTokenizer(folder / "tokenizer.json")
    talk = [*TALK[:-1], {**TALK[-1], "thinking": "3 + 3 is 6"}]
    for tools in (None, TOOLS):
        expected = peer.apply_chat_template(
            talk, tools=tools, chat_template=source, add_generation_prompt=reply, tokenize=False
        )
        text = ours.text(talk, tools=tools, reply=reply)
        assert text == expected
        theirs = peer.apply_chat_template(
            talk, tools=tools, chat_template=source, add_generation_prompt=reply, return_dict=True
        )
        assert tokenizer.encode(text) == theirs["input_ids"]


@pytest.mark.parametrize("name", ["chatml", "brackets"])
def test_what_the_template_marks_is_what_transformers_says_is_the_assistant_s(folder, peer, name):
    source = textwrap.dedent(TEMPLATES[name])
    ours, tokenizer = opened(folder, source), FileTokenizer(folder / "tokenizer.json")
    # Where a mark is at a space, theirs loses the place, since its tokens' places leave spaces out.
    talk = [*TALK[:2], {"role": "assistant", "content": "4 vi\u00e8r"}, *TALK[3:]]
    theirs = peer.apply_chat_template(
        talk, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, told = format_conversation({"messages": talk}, lambda: ours).encode(tokenizer)
    assert ids.tolist() == theirs["input_ids"]
    assert told.tolist() == [bool(one) for one in theirs["assistant_masks"]]
    assert 0 < told.sum() < len(told)


def test_without_marks_an_answer_is_what_it_adds(folder, peer):
    ours = opened(folder, textwrap.dedent(TEMPLATES["default system, no marks"]))
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    ids, told = format_conversation({"messages": TALK}, lambda: ours).encode(tokenizer)
    parts = np.flatnonzero(np.diff(told, prepend=False, append=False)).reshape(-1, 2)
    answers = [tokenizer.decode(ids[begin:end]) for begin, end in parts]
    assert answers == ["4 \u2013 vi\u00e8r \U0001f642<|im_end|>\n", "6<|im_end|>\n"]
    # Of a prompt and a completion only the completion's, in text as in messages.
    for form, answer in (
        ({"prompt": TALK[:4], "completion": TALK[4:]}, "6<|im_end|>\n"),
        ({"prompt": "2 + 2 = ", "completion": "4"}, "4<|im_end|>"),
    ):
        ids, told = format_conversation(form, lambda: ours).encode(tokenizer)
        assert tokenizer.decode(ids[told]) == answer
        assert np.flatnonzero(told)[-1] == len(ids) - 1


def test_a_config_of_any_age_gives_its_template_and_tokens(tmp_path, peer):
    peer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    file = tmp_path / "tokenizer_config.json"
    said = json.loads(file.read_text())
    named = [
        {"name": "other", "template": "no"},
        {"name": "default", "template": "{{ eos_token }}"},
    ]
    for template, token in (("{{ eos_token }}", "</s>"), (named, {"content": "</s>"})):
        file.write_text(json.dumps({**said, "chat_template": template, "eos_token": token}))
        found = open_template("ChatData", None, tmp_path / "tokenizer.json", None)
        assert found.text(TALK) == "</s>"
    file.write_text("{}")
    with pytest.raises(UserError, match="holds no chat template.*'chatml'"):
        open_template("ChatData", None, tmp_path / "tokenizer.json", None)


def test_the_end_of_a_turn_is_found_whether_the_template_names_it_or_not():
    assert ChatTemplate(chat_template.CHATML, "it").end_of_turn == "<|im_end|>"
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert ChatTemplate(plain, "it").end_of_turn == "user:"
    with pytest.raises(UserError, match="no answer would end"):
        _ = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "it").end_of_turn


def test_today_is_written_where_a_day_is_given_and_refused_where_none_is():
    source = "{{ strftime_now('%d %b %Y') }}"
    day = datetime.date(2024, 7, 26)
    assert ChatTemplate(source, "it", today=day).text(TALK) == "26 Jul 2024"
    with pytest.raises(TemplateError, match="writes today's date"):
        ChatTemplate(source, "it").text(TALK)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__ }}",
        "{{ dict.__globals__ }}",
        "{{ strftime_now.__func__.__globals__ }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{% set n = namespace(__class__=1) %}",
        "{{ messages.append(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ ''|attr('__class__') }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10**8) %}x{% endfor %}",
    ],
)
def test_a_template_reaches_nothing_but_what_it_is_given(attack):
    template = ChatTemplate(attack, "it")
    with contextlib.suppress(TemplateError):  # what is unsafe is undefined, or rejected
        assert template.text(TALK) == ""


def test_a_template_s_own_refusal_and_a_broken_one_are_sentences(folder, peer, tmp_path):
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}", "it")
    with pytest.raises(TemplateError, match="roles must alternate"):
        refusing.text(TALK)
    with pytest.raises(UserError, match="is not a Jinja template"):
        opened(folder, "{% for m in messages %}")
    with pytest.raises(UserError, match="chat_template = 'chatmi'.*did you mean 'chatml'"):
        open_template("ChatData", "chatmi", None, None)
