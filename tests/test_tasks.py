"""Tasks: how questions become tokens, lm-eval's arithmetic, the command."""

import json
import math
import re
import types

import numpy as np
import pytest
import tokenizers

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.tokenization.tokenizer import ByteTokenizer
from jaxtrain.run.tasks.lm_eval_model import lm_eval_model
from jaxtrain.run.tasks.tasks import Question, Score, Task, encode_pair, results
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import load_config

# -- questions as tokens ---------------------------------------------------------------------------


class Merging:
    """A space and the letter after it are one token, as in byte-pair tokenizers; no end of text."""

    end_of_text = None

    def encode(self, text):
        pieces = re.findall(" ?[^ ]| ", text)
        return [1000 * (len(piece) - 1) + ord(piece[-1]) for piece in pieces]


def test_white_space_at_a_contexts_end_is_the_continuations():
    expected = encode_pair(Merging(), "ab", " cd", length=9)
    assert expected.continuation == [1000 + ord("c"), ord("d")]
    assert expected.tokens == [ord("a"), ord("b"), 1000 + ord("c")]
    assert encode_pair(Merging(), "ab ", "cd", length=9) == expected


def test_what_does_not_fit_is_left_out_at_the_beginning():
    found = encode_pair(ByteTokenizer(), "abcdef", "gh", length=4)
    assert bytes(found.tokens) == b"defg"
    assert bytes(found.continuation) == b"gh"
    assert found.truncated
    whole = encode_pair(ByteTokenizer(), "abcdef", "gh", length=7)
    assert bytes(whole.tokens) == b"abcdefg"
    assert not whole.truncated


def test_an_empty_context_is_the_end_of_a_text():
    found = encode_pair(ByteTokenizer(), "", "ab", length=4)
    assert found.tokens == [0, ord("a")]
    with pytest.raises(UserError, match="the tokenizer has no end-of-text token"):
        encode_pair(Merging(), "", "ab", length=4)
    with pytest.raises(UserError, match="has 5 tokens, more than the model's context of 4"):
        encode_pair(ByteTokenizer(), "a", "bcdef", length=4)
    with pytest.raises(UserError, match="has no token of its own"):
        encode_pair(ByteTokenizer(), "a", "", length=4)


# -- the arithmetic --------------------------------------------------------------------------------


def test_choices_are_compared_whole_by_characters_and_by_bytes():
    # The right one is the last. Whole, by characters, by bytes: the sums are made so that the
    # first question is right by none, the second by bytes alone, the third by characters too.
    choices = ["ab", "\u00e9" * 4]  # 2 characters and bytes; 4 characters, 8 bytes
    sums = [(-2.0, -9.0), (-2.0, -5.0), (-2.0, -3.0), (-4.0, -3.0)]
    task = Task("t", [Question("", "", choices, 1)] * 4, is_choice=True)
    scores = [Score(log_likelihood=one, greedy=False) for two in sums for one in two]
    found = results(task, [], scores)
    assert (found["acc"], found["acc_norm"], found["acc_bytes"]) == (0.25, 0.5, 0.75)
    assert found["acc_stderr"] == pytest.approx(math.sqrt(0.25 * 0.75 * 4 / 3 / 4))
    assert found["questions"] == 4


def test_targets_are_right_when_every_token_is_the_likeliest():
    task = Task("t", [Question("", "", ["x"], 0)] * 2, is_choice=False)
    scores = [Score(log_likelihood=-1.0, greedy=True), Score(log_likelihood=-3.0, greedy=False)]
    found = results(task, [], scores)
    assert found["exact_match"] == 0.5
    assert found["perplexity"] == pytest.approx(math.exp(2.0))
    one = results(Task("t", task.questions[:1], is_choice=False), [], scores[:1])
    assert one["exact_match_stderr"] is None


# -- the command -----------------------------------------------------------------------------------

QUESTIONS = [
    {"prompt": "x =", "choices": ["0", "1 sum", "sum"], "answer": 1},
    {"prompt": "def ", "choices": ["return", "x y"], "answer": "return"},
    {"prompt": "", "choices": ["def", "sum : x"], "answer": 0},
]


@pytest.fixture(scope="module")
def run(tiny_config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("tasks") / "run"
    trainer = Trainer(load_config(tiny_config, ["Train.steps = 8"]), workdir)
    trainer.train()
    trainer.close()
    return trainer


def lines(file, records):
    file.write_text("\n".join(json.dumps(one) for one in records))
    return str(file)


def test_the_command_tells_what_the_models_logits_say(run, tmp_path, capsys):
    choice = lines(tmp_path / "choice.jsonl", QUESTIONS)
    target = {"prompt": "return", "target": "x sum = 0"}
    exact = lines(tmp_path / "exact.jsonl", [target])
    words = ["evaluate-tasks", "--workdir", str(run.workdir), "--tasks", choice, exact]
    assert main([*words, "--batch-size", "3"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())

    def sum_of(context, continuation):
        tokens = np.array(list((context.encode() or b"\0") + continuation.encode()))
        padded = np.zeros((1, 24), tokens.dtype)  # one program for all; what follows is not seen
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(run.logits(padded), np.float64)[0, : len(tokens) - 1]
        told = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        own = np.arange(len(tokens) - 1) >= len(tokens) - 1 - len(continuation.encode())
        return float(told[np.arange(len(own)), tokens[1:]][own].sum())

    right = {"acc": [], "acc_norm": []}
    for question in QUESTIONS:
        prompt, choices = question["prompt"].rstrip(" "), question["choices"]
        gap = " " * (1 + question["prompt"].endswith(" "))
        sums = np.array([sum_of(prompt, f"{gap}{one}") for one in choices])
        answer = question["answer"]
        answer = choices.index(answer) if isinstance(answer, str) else answer
        right["acc"].append(sums.argmax() == answer)
        right["acc_norm"].append((sums / [len(one) for one in choices]).argmax() == answer)
    assert first["task"] == "choice"
    assert first["questions"] == 3
    assert first["step"] == 8
    assert first["truncated"] == 0
    for name, values in right.items():
        assert first[name] == pytest.approx(np.mean(values)), name
    loss = -sum_of("return", " " + target["target"])
    assert second["perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)
    assert second["exact_match"] == 0.0


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a"}, "t.jsonl:1: no field 'target'"),
        ({"prompt": "a", "target": ""}, "t.jsonl:1: 'target' is empty"),
        ({"prompt": "a", "choices": ["x"], "answer": 0}, "use a list of at least two strings"),
        ({"prompt": "a", "choices": ["x", "y"], "answer": 2}, "'answer' is 2; use 0 to 1"),
        ({"prompt": "a", "choices": ["x", "y"], "answer": "z"}, "'answer' is 'z'; use 0 to 1"),
        ({"prompt": "a", "target": "b" * 40}, "t.jsonl:1: the continuation has 41 tokens"),
    ],
)
def test_a_line_that_asks_nothing_is_refused(run, tmp_path, capsys, record, words):
    file = lines(tmp_path / "t.jsonl", [record])
    assert main(["evaluate-tasks", "--workdir", str(run.workdir), "--tasks", file]) == 2
    assert words in capsys.readouterr().err


# -- lm-eval itself --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.rotated("peers")
def test_every_number_is_that_of_lm_eval_on_the_same_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    lm_eval = pytest.importorskip(
        "lm_eval", reason="lm-eval is the peer: pip install 'lm-eval[hf]'"
    )
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    source, rng = tmp_path / "source", np.random.default_rng(0)
    words = ["the", "a", "cat", "dog", "sat", "ran", "caf\u00e9", "on", "mat", "and", "then"]
    texts = [" ".join(rng.choice(words, 12)) for _ in range(200)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    learner = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, learner)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>"
    )
    torch.manual_seed(0)
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=len(fast), **sizes, **ends)
    ).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.2 * torch.randn_like(value))
    model.save_pretrained(source)
    fast.save_pretrained(source)

    def phrase(least, most):
        return " ".join(rng.choice(words, rng.integers(least, most)))

    asked = [
        {"prompt": phrase(1, 40), "choices": [phrase(1, 5) for _ in range(4)],
         "answer": int(rng.integers(4))}
        for _ in range(60)
    ]  # fmt: skip
    targets = [{"prompt": phrase(1, 10), "target": phrase(1, 2)} for _ in range(60)]
    choice = lines(tmp_path / "choice.jsonl", asked)
    exact = lines(tmp_path / "exact.jsonl", targets)
    of_files = {"dataset_path": "json", "test_split": "train", "doc_to_text": "{{prompt}}"}
    tasks = [
        {**of_files, "task": "choice", "dataset_kwargs": {"data_files": choice},
         "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer",
         "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")]},
        {**of_files, "task": "exact", "dataset_kwargs": {"data_files": exact},
         "output_type": "loglikelihood", "doc_to_target": "{{' ' + target}}",
         "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}]},
        {**of_files, "task": "rolling", "dataset_kwargs": {"data_files": choice},
         "output_type": "loglikelihood_rolling", "doc_to_target": "{{prompt}}", "doc_to_text": "",
         "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]},
        {**of_files, "task": "written", "dataset_kwargs": {"data_files": choice},
         "output_type": "generate_until", "doc_to_target": "{{answer}}",
         "generation_kwargs": {"until": ["a", "th"], "max_gen_toks": 7},
         "metric_list": [{"metric": "exact_match"}]},
    ]  # fmt: skip

    def evaluated(one):
        return lm_eval.simple_evaluate(model=one, tasks=tasks, bootstrap_iters=0)

    of_transformers = evaluated(HFLM(pretrained=model, tokenizer=fast, device="cpu"))
    theirs = of_transformers["results"]
    run = tmp_path / "run"
    words = ["import-hf", str(source), "--workdir", str(run), "-b", "Mesh.fsdp=4"]
    assert main([*words, "-b", "Mesh.data=2", "-b", "Precision.compute='float32'"]) == 0
    capsys.readouterr()
    assert main(["evaluate-tasks", "--workdir", str(run), "--tasks", choice, exact]) == 0
    of_choice, of_exact = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    for name in ("acc", "acc_norm", "acc_bytes"):
        assert of_choice[name] == pytest.approx(theirs["choice"][f"{name},none"]), name
    assert of_choice["truncated"] > 0
    assert of_exact["exact_match"] == pytest.approx(theirs["exact"]["acc,none"])
    assert of_exact["perplexity"] == pytest.approx(theirs["exact"]["perplexity,none"], rel=1e-4)
    # And asked by lm-eval itself, which has tasks of more kinds.
    trainer = Trainer(load_config(run / "config.gin"), run, read_only=True)
    asked_here = lm_eval_model(trainer)
    of_run = evaluated(asked_here)
    for name, numbers in theirs.items():
        for metric, value in numbers.items():
            if isinstance(value, float):
                assert of_run["results"][name][metric] == pytest.approx(value, rel=1e-4), metric
    one, other = (
        [sample["resps"] for sample in found["samples"]["written"]]
        for found in (of_run, of_transformers)
    )
    assert one == other
    assert len({str(response) for response in one}) > 3
    for settings, said in (({"max_gen_toks": 32}, "max_gen_toks=32"), ({"untl": "x"}, "'until'")):
        request = types.SimpleNamespace(args=("the cat", settings))
        with pytest.raises(UserError, match=said):
            asked_here.generate_until([request])
