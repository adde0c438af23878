"""Answers as text: stop strings, what a terminal sees, prompts and answers in files."""

import json

import pytest

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.tokenization.tokenizer import ByteTokenizer
from jaxtrain.run.generation.answer import Stopping, continuation, cut_at_stop, text_before_stop
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import load_config

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def run(tiny_config, tmp_path_factory):
    """A run of a few steps: it writes words of its data over and over."""
    workdir = tmp_path_factory.mktemp("generate") / "run"
    trainer = Trainer(load_config(tiny_config, ["Train.steps = 8"]), workdir)
    trainer.train()
    trainer.close()
    return trainer


# -- stop strings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one\ntwo\nthree", ["\n"], "one"),
        ("one two three", ["three", "two"], "one "),
        ("one two", ["four"], "one two"),
        ("one", [], "one"),
        ("stop", ["stop"], ""),
    ],
)
def test_a_text_is_cut_before_the_first_stop_string(text, stop, expected):
    assert cut_at_stop(text, stop) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc EN", "abc "),  # may become "END"
        ("abc E", "abc "),
        ("abc ENx", "abc ENx"),
        ("abc END", "abc "),
        ("caf\ufffd", "caf"),  # the first byte of a character
    ],
)
def test_only_what_will_stay_is_shown(text, expected):
    assert text_before_stop(text, ["END", "nothing"]) == expected


def test_the_fewest_tokens_that_have_the_stop_string():
    prompt, answer = list(b"go: "), list(b"a to be stopped at END and more END")
    stopping = Stopping(ByteTokenizer(), [prompt], ["END"])
    assert stopping.find_stop(0, answer) == len(b"a to be stopped at END")
    assert stopping.find_stop(0, answer[:20]) is None
    assert stopping.text(0, answer[:22]) == "a to be stopped at "
    with pytest.raises(UserError, match="--stop is empty"):
        Stopping(ByteTokenizer(), [prompt], [""])


def test_the_first_tokens_of_an_answer_are_read_after_the_prompt():
    """Tokenizers of the SentencePiece kind leave out the space before a text's first word."""

    class Words:
        def decode(self, ids):
            return "".join(f" w{one}" for one in ids).removeprefix(" ")

    assert continuation(Words(), [1, 2], [3]) == " w3"


def test_answers_end_at_stop_strings_and_are_the_plain_ones_until_then(run):
    prompts = ["def ", "return x ", "0 "]
    plain = run.answers(prompts, max_new_tokens=20, sampling=GREEDY)
    assert {answer.ended for answer in plain} <= {"length", "end"}
    stop = plain[1].text[14:16]
    found = run.answers(prompts, max_new_tokens=20, sampling=GREEDY, stop=[stop])
    for before, after in zip(plain, found, strict=True):
        assert after.text == before.text.split(stop)[0]
        if stop in before.text:
            assert after.ended == "stop"
            assert after.tokens == before.tokens[: before.text.index(stop) + len(stop)]
            assert len(after.log_probabilities) == len(after.tokens)
        else:
            assert after == before
    assert found[1].ended == "stop"


def test_the_pieces_that_are_shown_are_the_answer(run):
    pieces = []
    [answer] = run.answers(["def "], max_new_tokens=20, sampling=GREEDY, show=pieces.append)
    assert "".join(pieces) == answer.text
    assert len(pieces) > 4
    assert [answer] == run.answers(["def "], max_new_tokens=20, sampling=GREEDY)


def test_tokens_and_texts_do_not_mix(run):
    with pytest.raises(UserError, match="token ids go with no text"):
        run.answers([[1, 2], "text"], max_new_tokens=2)
    with pytest.raises(UserError, match="token ids go with no text"):
        run.answers([[1, 2]], max_new_tokens=2, stop=["x"])


# -- the command -----------------------------------------------------------------------------------


def generate(run, *words):
    return main(["generate", "--workdir", str(run.workdir), "--temperature", "0", *words])


def test_a_file_of_prompts_is_answered_by_json_lines_in_order(run, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    given = [{"prompt": "return x ", "id": 7}, {"prompt": "0 "}, {"prompt": "def "}]
    file.write_text("\n\n".join(json.dumps(one) for one in given) + "\n")
    words = ("--prompts", str(file), "--max-new-tokens", "6", "--batch-size", "2")
    assert generate(run, *words, "--log-probabilities") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["return x ", "0 ", "def "]
    assert lines[0]["id"] == 7
    for line in lines:
        assert line["ended"] == "length"
        assert len(line["tokens"]) == len(line["log_probabilities"]) == 6
        assert bytes(line["tokens"]).decode(errors="replace") == line["answer"]
        [alone] = run.answers([line["prompt"]], max_new_tokens=6, sampling=GREEDY)
        assert line["answer"] == alone.text
        assert line["log_probabilities"] == pytest.approx(alone.log_probabilities, abs=1e-4)


def test_a_terminal_sees_the_text_while_it_is_written_and_a_pipe_the_same_text(
    run, capsys, monkeypatch
):
    words = ("--prompt", "def ", "--max-new-tokens", "12")
    assert generate(run, *words) == 0
    text = capsys.readouterr().out
    assert text.startswith("def ")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    pieces = []
    write = __import__("sys").stdout.write
    monkeypatch.setattr("sys.stdout.write", lambda piece: pieces.append(piece) or write(piece))
    assert generate(run, *words) == 0
    assert capsys.readouterr().out == text
    assert len(pieces) > 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "it is empty"),
        ("nonsense\n", "prompts.jsonl:1: no JSON"),
        ('{"prompt": "a"}\n[1]\n', "prompts.jsonl:2: not a JSON object"),
        ('{"promt": "a"}\n', "prompts.jsonl:1: no field 'prompt'; did you mean 'promt'?"),
        ('{"prompt": 1}\n', "prompts.jsonl:1: 'prompt' is 1; use a string"),
        ('{"prompt": ""}\n', "prompts.jsonl:1: 'prompt' is empty"),
        (None, "use a file that can be read"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused_by_its_line(run, tmp_path, capsys, content, words):
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    assert generate(run, "--prompts", str(file)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow_cases("itself")
@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_guesses_change_no_greedy_answer_and_are_counted(run, capsys, draft):
    assert generate(run, "--prompt", "def ", "--max-new-tokens", "16") == 0
    plain = capsys.readouterr().out
    folder = str(run.workdir) if draft == "itself" else draft
    words = ["--prompt", "def ", "--max-new-tokens", "16", "--draft", folder, "--guesses", "2"]
    assert generate(run, *words) == 0
    out, said = capsys.readouterr()
    assert out == plain
    if draft == "itself":  # a token of the prompt, then three of each of five passes
        assert "10 of 10 draft tokens were accepted (100%), 3.00 tokens per forward pass" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--guesses", "2"], "--guesses 2: there is no draft model; add --draft"),
        (["--draft", "lookup", "--guesses", "0"], "--guesses 0: use at least 1"),
        (
            ["--draft", "lookup", "--stop", "x"],
            "--draft lookup with --stop: speculative decoding generates one",
        ),
        (
            ["--draft", "lookup", "--beams", "2"],
            "--draft lookup with --beams 2: speculative decoding generates",
        ),
        (["--beams", "2", "--top-k", "3"], "--top-k 3 with --beams 2: beam search does not sample"),
        (["--length-penalty", "2"], "--length-penalty applies to beam search; add --beams"),
        (["--beams", "0"], "--beams 0: use at least 1"),
        (["--beams", "2", "--stop", "x"], "--beams 2: a beam ends at the end-of-text token"),
    ],
)
def test_what_beams_and_guesses_do_not_do_is_refused(run, capsys, words, told):
    assert main(["generate", "--workdir", str(run.workdir), "--prompt", "a", *words]) == 2
    assert told in capsys.readouterr().err


def test_beams_answer_by_lines_with_a_score(run, capsys):
    words = ["--prompt", "0 ", "--max-new-tokens", "6", "--beams", "2", "--log-probabilities"]
    assert main(["generate", "--workdir", str(run.workdir), *words]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["score"] == pytest.approx(sum(line["log_probabilities"]) / 6, rel=1e-4)


@pytest.mark.parametrize("words", [("--prompt", "a", "--batch-size", "0"),
                                   ("--prompt", "a", "--max-new-tokens", "0")])  # fmt: skip
def test_numbers_out_of_range_are_refused(run, capsys, words):
    assert generate(run, *words) == 2
    assert f"{words[2]} 0: use at least 1" in capsys.readouterr().err
