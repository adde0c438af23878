"""Preferences: ten steps of DPO equal PyTorch's with a frozen copy of the model.

A run that goes on reads the reference that it began with.
"""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from against_torch import trained
from chat_model import NAMES, save_model, save_tokenizer, write_lines
from conftest import make_layout, make_step, text_batch
from parity import assert_equal, evaluate

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.text.chat.preferences import PreferenceData
from jaxtrain.data.text.source import TextData
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.run.reference import FILE
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.objectives.preference import DPO
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.settings import load_config

STEPS, RATE, BETA, LENGTH = 10, 1e-3, 0.3, 96


def pairs(first, count):
    def one(number):
        name = NAMES[number % len(NAMES)]
        return {
            "prompt": [{"role": "user", "content": f"I am {name}. What is {number} + 1?"}],
            "chosen": [{"role": "assistant", "content": f"{number + 1}, {name}!"}],
            "rejected": [{"role": "assistant", "content": "No." * (1 + number % 3)}],
        }

    return [one(number) for number in range(first, first + count)]


TRAIN, HELDOUT = pairs(0, 8), pairs(8, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    save_model(folder)
    write_lines(folder / "pairs.jsonl", TRAIN)
    write_lines(folder / "heldout.jsonl", HELDOUT)
    return folder


def config_of(folder, *bindings):
    return load_config(
        f"hf:{folder}",
        [
            "Train.data = @PreferenceData()",
            f"PreferenceData.source = '{folder}/pairs.jsonl'",
            f"PreferenceData.heldout_source = '{folder}/heldout.jsonl'",
            f"PreferenceData.tokenizer = '{folder}/tokenizer.json'",
            f"PreferenceData.sequence_length = {LENGTH}",
            "Train.objective = @DPO()",
            f"DPO.beta = {BETA}",
            f"Train.steps = {STEPS}",
            f"Train.global_batch_size = {len(TRAIN)}",
            "Train.log_every = 1",
            "Precision.compute = 'float32'",
            f"Optimizer.learning_rate = {RATE}",
            "Optimizer.weight_decay = 0.0",
            "Optimizer.clip_norm = None",
            "Schedule.name = 'constant'",
            "Schedule.warmup_steps = 0",
            "Mesh.fsdp = 1",
            *bindings,
        ],
    )


def theirs(folder):
    """PyTorch and transformers, one text at a time: the mean of each step's losses, margins and
    accuracies, and those of the held-out pairs at the end."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, reference = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))

    def told(by, pair, answer):
        made = tokenizer.apply_chat_template(
            [*pair["prompt"], *pair[answer]], return_dict=True, return_assistant_tokens_mask=True
        )
        ids = torch.tensor([made["input_ids"]])
        mask = torch.tensor(made["assistant_masks"])[1:]
        logs = by(ids).logits[0, :-1].log_softmax(-1)
        return (logs.gather(-1, ids[0, 1:, None])[:, 0] * mask).sum()

    def means(examples):
        margins = []
        for pair in examples:
            with torch.no_grad():
                before = [told(reference, pair, answer) for answer in ("chosen", "rejected")]
            now = [told(model, pair, answer) for answer in ("chosen", "rejected")]
            margins.append(BETA * ((now[0] - before[0]) - (now[1] - before[1])))
        margin = torch.stack(margins)
        loss = -torch.nn.functional.logsigmoid(margin).mean()
        return loss, margin.mean().item(), (margin > 0).float().mean().item()

    return trained(model, means, TRAIN, HELDOUT, steps=STEPS, rate=RATE)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A run of ten steps, stopped after four and gone on with by another trainer."""
    workdir = tmp_path_factory.mktemp("run") / "run"
    devices = jax.devices()[:1]
    config = config_of(folder, "Train.save_every = 4")
    first = Trainer(config, workdir, devices=devices)
    first.train(steps=4)
    first.close()
    second = Trainer(config, workdir, devices=devices)
    assert second.steps_done == 4
    told = second.train()
    return second, told, workdir


# Two runs; tests/test_distillation.py has two models in a run in the fast part.
@pytest.mark.slow
def test_ten_steps_are_pytorch_s_over_a_restart(folder, run):
    trainer, told, _ = run
    steps, heldout = theirs(folder)
    lines = [line for line in trainer.history if "loss" in line]
    ours = np.array([[line[name] for name in ("loss", "margin", "accuracy")] for line in lines])
    # At first nothing is gained, but for rounding: of that the accuracy tells.
    assert abs(ours[0, 1]) < 1e-5
    ours[0, 2] = steps[0, 2] = 0
    np.testing.assert_allclose(ours, steps, rtol=2e-4, atol=2e-6)
    assert steps[0, 0] == pytest.approx(np.log(2))
    assert steps[-1, 0] < 0.6
    found = [told[f"eval_{name}"] for name in ("loss", "margin", "accuracy")]
    np.testing.assert_allclose(found, heldout, rtol=1e-3)
    assert "eval_perplexity" not in told


# The run of the test before.
@pytest.mark.slow
def test_the_reference_of_a_run_is_asked_for_and_looked_at(folder, run):
    _, _, workdir = run
    file, config = workdir / FILE, config_of(folder)
    content = file.read_bytes()
    broken = bytearray(content)
    broken[len(broken) // 2] ^= 1
    for damaged, reason in ((bytes(broken), "damaged"), (b"", "damaged"), (None, "there is no")):
        file.unlink(missing_ok=True)
        if damaged is not None:
            file.write_bytes(damaged)
        trainer = Trainer(config, workdir, devices=jax.devices()[:1], read_only=True)
        with pytest.raises(UserError, match=reason):
            trainer.evaluate()
    file.write_bytes(content)


def test_a_row_is_a_pair_of_which_no_text_ends_in_its_own_half(folder):
    data = PreferenceData(
        source=str(folder / "pairs.jsonl"), heldout_source=str(folder / "heldout.jsonl"),
        tokenizer=str(folder / "tokenizer.json"), sequence_length=LENGTH,
    )  # fmt: skip
    whole = data.open(seed=0)
    assert whole.facts["cut_documents"] == 0
    batch = whole.train.examples(np.arange(8))
    for row in range(8):
        for document, answer in ((1, "chosen"), (2, "rejected")):
            own = batch.segment_ids[row] == document
            assert batch.positions[row, own].tolist() == list(range(own.sum()))
            told = batch.targets[row][own & (batch.loss_mask[row] > 0)]
            text = TRAIN[row][answer][0]["content"] + "<|im_end|>"
            assert whole.tokenizer.decode(told) == text
    lengths = whole.train.document_lengths().reshape(-1, 2)
    room = int(lengths.sum(1).max()) - 4  # two inputs less than the longest pair has
    less = PreferenceData(**{**vars(data), "sequence_length": room}).open(seed=0)
    shorter = less.train.document_lengths().reshape(-1, 2)
    assert less.facts["cut_documents"] > 0
    assert (shorter - 1).sum(1).max() == room
    assert ((shorter == lengths) | (shorter - 1 >= room // 2)).all()


def test_what_does_not_go_together_says_what_does(folder):
    config = config_of(folder)
    for train, reason in (
        ({"objective": None}, r"@PreferenceData\(\) has pairs.*use Train.objective=@DPO\(\)"),
        ({"data": TextData(source="embedded")}, r"@TextData\(\) has no pairs"),
    ):
        changed = dataclasses.replace(config.train, **train)
        with pytest.raises(UserError, match=reason):
            Trainer(dataclasses.replace(config, train=changed), devices=jax.devices()[:1])
    with pytest.raises(UserError, match=r"Loss.chunk_size=16 has no effect for.*@DPO\(\)"):
        Trainer(config_of(folder, "Loss.chunk_size = 16"), devices=jax.devices()[:1])
    with pytest.raises(UserError, match="DPO.beta=-1.0; use a number above 0"):
        config_of(folder, "DPO.beta = -1.0")


# -- meshes ----------------------------------------------------------------------------------------

GPT2 = GPT(vocab_size=48, num_layers=2, embed_dim=16, num_heads=2, context_length=16)


def some_pairs():
    batch = text_batch(rows=8, length=16, vocab_size=48)
    batch.loss_mask[3] = 0  # a row that counts nowhere
    drawn = np.random.default_rng(1).normal(-4, 1, batch.loss_mask.shape)
    return dataclasses.replace(batch, reference=drawn.astype(np.float32))


@pytest.fixture(scope="module")
def one_device():
    return evaluate(make_step(GPT2, make_layout(), objective=DPO(beta=0.2)), some_pairs())


# A sum over rows; tests/test_masked_token.py has another objective on a mesh.
@pytest.mark.slow_cases("context", "pipe", "fsdp_tensor_accumulation")
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"fsdp": 2, "tensor": 2}, {"accumulation": 2}),
        ({"context": 2, "fsdp": 2}, {}),
        ({"pipe": 2, "fsdp": 2}, {"pipeline": Pipeline(schedule="1f1b", microbatches=2)}),
    ],
    ids=["fsdp_tensor_accumulation", "context", "pipe"],
)
def test_a_step_on_a_mesh_equals_one_device(one_device, layout, changes):
    program = make_step(GPT2, make_layout(**layout), objective=DPO(beta=0.2), **changes)
    assert_equal(evaluate(program, some_pairs(), one_device), one_device)


@pytest.mark.slow
def test_the_file_of_the_guide_trains_as_it_is_printed(folder, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parent.parent / "docs" / "post_training.md").read_text()
    (text,) = re.findall(r"```gin\n(include .*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    Path("preferences.gin").write_text(text)
    Path("pairs.jsonl").write_bytes((folder / "pairs.jsonl").read_bytes())
    short = ["Train.steps = 1", "Train.eval_batches = 1", "PreferenceData.heldout_fraction = 0.3",
             "GPT.num_layers = 1", "GPT.embed_dim = 32"]  # fmt: skip
    words = [word for binding in short for word in ("-b", binding)]
    assert main(["train", "preferences.gin", "--simulate-devices", "8", *words]) == 0
    said = capsys.readouterr().out
    assert "with preferences.gin nothing uses TextData" in said
    assert "eval_margin" in said
