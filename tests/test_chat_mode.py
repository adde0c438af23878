"""`jaxtrain generate --chat`: greedy turns are transformers' by the same template.

An answer ends with its turn, and the oldest turns go where the context ends.
"""

import io
import sys

import jax
import numpy as np
import pytest
import torch
from chat_model import save_model, save_tokenizer, talks, write_lines
from conftest import make_layout, make_step

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.text.chat.chat_template import CHATML
from jaxtrain.models.recurrent.rnn import LSTM
from jaxtrain.run.generation.chat import Chat, PrefixCache
from jaxtrain.run.generation.decoding import Sampling, for_texts
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import load_config

QUESTIONS = ["What is 2 + 2?", "And the name?"]
TOKENS = 6


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """A folder of transformers', its tokenizer and its model."""
    folder = tmp_path_factory.mktemp("model")
    return folder, save_tokenizer(folder), save_model(folder)


@pytest.fixture(scope="module")
def trainer(peer):
    mesh = ["Mesh.fsdp = 1", "Precision.compute = 'float32'"]
    return Trainer(load_config(f"hf:{peer[0]}", mesh), devices=jax.devices()[:1])


def asked(text, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def theirs(peer, messages):
    """The model's turn by transformers, as many tokens as ours."""
    _, tokenizer, model = peer
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    inputs = torch.tensor([ids["input_ids"]])
    with torch.no_grad():
        made = model.generate(inputs, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)
    return tokenizer.decode(made[0, inputs.shape[1] :]).partition("<|im_end|>")[0]


def test_turns_from_standard_input_are_those_of_transformers(peer, tmp_path, monkeypatch, capsys):
    run = str(tmp_path / "run")
    assert main(["import-hf", str(peer[0]), "--workdir", run, "-b", "Mesh.fsdp = 8"]) == 0
    capsys.readouterr()
    messages = [{"role": "system", "content": "Be brief."}]
    expected = ""
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = theirs(peer, messages)
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    asked("\n".join(["", *QUESTIONS]), monkeypatch)  # blank lines ask nothing
    words = ["--chat", "--system", "Be brief.", "--temperature", "0"]
    words += ["--max-new-tokens", str(TOKENS), "-b", "Precision.compute = 'float32'"]
    assert main(["generate", "--workdir", run, *words]) == 0
    assert capsys.readouterr().out == expected


# tests/test_generate_text.py has stop strings in the fast part.
@pytest.mark.slow
def test_an_answer_ends_with_its_turn_and_is_shown_while_it_is_written(peer, trainer):
    greedy = {"sampling": Sampling(temperature=0.0), "max_new_tokens": TOKENS}
    whole = Chat(trainer, **greedy).answer(QUESTIONS[0]).text
    # The same questions, and turns of the model's that end with a letter of its answer.
    turn = "{% generation %}{{ message.content ~ '<|im_end|>' }}"
    assert turn in CHATML
    ending = CHATML.replace(turn, turn.replace("<|im_end|>", whole[3]))
    file = peer[0] / "chat_template.jinja"
    before = file.read_text()
    file.write_text(ending)
    try:
        chat, pieces = Chat(trainer, **greedy), []
    finally:
        file.write_text(before)
    answer = chat.answer(QUESTIONS[0], show=pieces.append)
    assert answer.text == whole[: whole.index(whole[3])]
    assert "".join(pieces) == answer.text
    assert answer.ended == "stop"
    assert chat.messages[-1] == {"role": "assistant", "content": answer.text}


LSTM_OF_BYTES = LSTM(vocab_size=64, num_layers=1, embed_dim=16, context_length=400)


# The cases that are left run the same code.
@pytest.mark.slow_cases("state")
@pytest.mark.parametrize("model", [None, LSTM_OF_BYTES], ids=["attention", "state"])
def test_what_is_kept_between_texts_gives_what_reading_all_of_them_gives(model, trainer):
    program, state = for_texts(trainer.program.setup), trainer.state
    sizes = trainer.config.train.model
    if model is not None:
        step = make_step(model, make_layout(fsdp=1))
        sizes, program, state = model, for_texts(step.setup), step.create(0)
    rng = np.random.default_rng(0)
    memory, text = PrefixCache(), list[int]()
    # Turns that go on; one that changes the end of what was said; one that restarts.
    for change, new in ((0, 5), (0, 3), (0, 20), (4, 9), (0, 1), (60, 2)):
        text = text[: max(0, len(text) - change)] + rng.integers(0, 64, new).tolist()
        with program.layout.active():
            begun = memory.begin(program, sizes, state, text, new=4)
            again = PrefixCache().begin(program, sizes, state, text, new=4)
        np.testing.assert_allclose(begun.logits_BV, again.logits_BV, atol=1e-4, rtol=1e-4)
        anew = change > 0 and (model is not None or change == 60)
        assert memory.read == (len(text) if anew else new)
        memory.keep(begun, begun.cache, [])


def test_a_turn_reads_what_the_text_has_besides(trainer):
    greedy = {"sampling": Sampling(temperature=0.0), "max_new_tokens": TOKENS}
    chat, told = Chat(trainer, **greedy), []
    for number, question in enumerate([*QUESTIONS, "And 3 + 3?"]):
        answer = chat.answer(question)
        alone = Chat(trainer, **greedy)
        alone.messages = chat.messages[: 2 * number]
        again = alone.answer(question)
        assert answer.tokens == again.tokens
        np.testing.assert_allclose(answer.log_probabilities, again.log_probabilities, atol=1e-4)
        told.append((chat.prefix_cache.read, alone.prefix_cache.read))
    assert told[0][0] == told[0][1]
    # The text of an answer may be other tokens than were drawn: then it is read again.
    assert told[1][0] < told[1][1]
    assert told[2][0] < told[2][1] // 2


def test_the_oldest_turns_go_where_the_context_ends(trainer):
    chat = Chat(trainer, system="Be brief.", max_new_tokens=2)
    for number in range(6):
        chat.answer(f"What is the answer to question {number}?")
    assert chat.messages[0]["role"] == "system"
    assert chat.messages[1]["role"] == "user"
    assert len(chat.messages) < 13
    assert "question 5" in chat.messages[-2]["content"]
    with pytest.raises(UserError, match="context_length"):
        chat.answer("What is the answer? " * 50)


@pytest.mark.slow
def test_a_model_of_bytes_learns_turns_and_talks(tmp_path, monkeypatch, capsys):
    source = write_lines(tmp_path / "talks.jsonl", [{"messages": talk} for talk in talks(40)])
    run = str(tmp_path / "run")
    bindings = [
        "Train.data=@ChatData()",
        f"ChatData.source='{source}'",
        "ChatData.chat_template='chatml'",
        "ChatData.sequence_length=256",
        "Train.steps=2",
        "Train.eval_batches=1",
        "GPT.num_layers=1",
        "GPT.embed_dim=32",
        "Mesh.tensor=1",
        "Mesh.fsdp=8",
    ]
    words = [word for binding in bindings for word in ("-b", binding)]
    assert main(["train", "gpt_quickstart", "--workdir", run, *words]) == 0
    capsys.readouterr()
    asked("What is 3 + 1?\n", monkeypatch)
    assert main(["generate", "--workdir", run, "--chat", "--max-new-tokens", "3"]) == 0
    assert len(capsys.readouterr().out) >= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chat", "--beams", "2"], "--beams 2 with --chat"),
        (["--chat", "--draft", "lookup"], "--draft lookup with --chat"),
        (["--chat", "--log-probabilities"], "--log-probabilities with --chat"),
        (["--prompt", "x", "--system", "y"], "--system applies to a conversation"),
    ],
)
def test_what_does_not_go_with_a_conversation_is_refused(words, said, capsys):
    assert main(["generate", "--workdir", "nowhere", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_model_without_a_template_says_what_to_do(tiny_config):
    trainer = Trainer(load_config(tiny_config))
    with pytest.raises(UserError, match=r"no chat template next to it.*@ChatData\(\)"):
        Chat(trainer)
