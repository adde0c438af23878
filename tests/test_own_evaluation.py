"""Evaluation on batches of your own, generation from token ids, logits of images."""

import dataclasses

import numpy as np
import pytest
from conftest import text_batch

from jaxtrain import Trainer, load_config
from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.training.setup import Setup

V, T = 256, 32


@pytest.fixture(scope="module")
def trainer(tiny_config) -> Trainer:
    trainer = Trainer(load_config(tiny_config, ["Train.accumulation=2", "GPT.num_layers=1"]))
    rng = np.random.default_rng(0)
    drawn = {
        name: (value + 0.2 * rng.standard_normal(value.shape)).astype(value.dtype)
        for name, value in trainer.weights().items()
    }
    trainer.set_weights(drawn)
    return trainer


def cross_entropies(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """-log softmax(logits)[target], in float64."""
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    told = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - told


def test_each_target_of_ones_own_batches_counts_once(trainer):
    batches = [text_batch(rows=rows, length=T, vocab_size=V, seed=rows) for rows in (8, 4)]
    losses = [cross_entropies(trainer.logits(batch), batch.targets) for batch in batches]
    masks = [batch.loss_mask for batch in batches]
    counts = [mask.sum() for mask in masks]
    assert abs(counts[0] / 8 - counts[1] / 4) > 0.1  # a mean of means would be another number
    total = sum((loss * mask).sum() for loss, mask in zip(losses, masks, strict=True))
    found = trainer.evaluate(iter(batches))
    assert found["eval_loss"] == pytest.approx(total / sum(counts), rel=1e-5)


def test_an_evaluation_traces_the_model_once(trainer, monkeypatch):
    """What is traced again at every evaluation costs its time, and memory that nobody frees."""
    traced = []
    of_heldout = Setup._heldout_sums

    def counted(self, *arguments):
        traced.append(self)
        return of_heldout(self, *arguments)

    monkeypatch.setattr(Setup, "_heldout_sums", counted)
    batch = text_batch(rows=4, length=T, vocab_size=V)
    first = Trainer(trainer.config)
    values = first.evaluate([batch])
    assert len(traced) == 2  # for the zeros, and for the program
    assert first.evaluate([batch]) == values
    assert len(traced) == 2


def test_what_cannot_be_evaluated_is_refused(trainer):
    batch = text_batch(rows=8, length=T, vocab_size=V)
    nothing = dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    rows = text_batch(rows=6, length=T, vocab_size=V)
    for batches, word in (
        ([], "there is no batch to evaluate"),
        ([nothing], "none of the targets counts"),
        ([rows], "6 rows, which do not divide over the 4 devices"),
        ([batch.inputs], "takes a jaxtrain.Batch, not a ndarray"),
        (batch, "give a list of them"),
    ):
        with pytest.raises(UserError, match=word):
            trainer.evaluate(batches)


def greedy(trainer: Trainer, tokens: list[int], count: int) -> list[int]:
    """The likeliest next token, by the logits of everything before it, `count` times."""
    drawn = []
    for _ in range(count):
        drawn.append(int(trainer.logits([tokens + drawn])[0, -1].argmax()))
    return drawn


# Trains; targets of one's own batches are counted in the fast part.
@pytest.mark.slow
def test_token_ids_go_on_as_the_logits_say(trainer):
    prompt = [72, 101, 0, 255]
    found = trainer.generate(prompt, max_new_tokens=4, temperature=0.0)
    assert found == greedy(trainer, prompt, 4)
    assert trainer.generate(np.array(prompt), max_new_tokens=4, temperature=0.0) == found
    # As text it ends where a document ends, and is the same up to there.
    text = trainer.generate("He", max_new_tokens=20, seed=3)
    ids = trainer.generate([72, 101], max_new_tokens=20, seed=3)
    assert len(ids) == 20
    assert bytes(ids).partition(b"\0")[0].decode(errors="replace") == text
    assert len(trainer.generate([1] * (T - 2), temperature=0.0)) == 2


def test_a_prompt_that_holds_no_tokens_is_refused(trainer):
    for prompt, word in (
        ([], "is empty"),
        ([3, 256], "has the token 256; use 0 to 255"),
        ([-1], "has the token -1"),
        ([0.5], "float64"),
        ([[1, 2]], "the token ids of one text"),
        ([1] * T, "context_length"),
    ):
        with pytest.raises(UserError, match=word):
            trainer.generate(prompt)


IMAGES = """
Train.model = @ResNet()
Train.data = @ImageData()
Train.steps = 2
Train.global_batch_size = 8
Optimizer.learning_rate = 0.1
ImageData.source = 'synthetic'
ImageData.image_size = 8
ResNet.depth = 20
ResNet.width = 8
ResNet.channels = 1
ResNet.num_classes = 10
ImageData.num_classes = 10
Precision.compute = 'float32'
Mesh.fsdp = 8
"""


@pytest.fixture(scope="module")
def of_images() -> Trainer:
    return Trainer(load_config(IMAGES))


# The test before makes the same calls with tokens; tests/test_resnet.py has running statistics.
@pytest.mark.slow
def test_images_have_logits_and_running_statistics(of_images):
    sizes = of_images.config.train.model
    rng = np.random.default_rng(0)
    batch = Batch(
        rng.normal(size=(8, 8, 8, sizes.channels)).astype(np.float32),
        rng.integers(0, sizes.num_classes, 8).astype(np.int32),
        (np.arange(8) % 3 > 0).astype(np.float32),
    )
    of_images.step(batch)
    given = of_images.weights()
    logits = of_images.logits(batch.inputs)
    assert logits.shape == (8, sizes.num_classes)
    counts = batch.loss_mask > 0
    values = of_images.evaluate([batch])
    expected = cross_entropies(logits, batch.targets)[counts].mean()
    assert values["eval_loss"] == pytest.approx(expected, rel=1e-5)
    right = (logits.argmax(-1) == batch.targets)[counts].mean()
    assert values["eval_accuracy"] == pytest.approx(right)
    # The statistics are weights too: others give other logits.
    assert not {"mean", "variance"}.isdisjoint(n.split("/")[-1].split("_")[-1] for n in given)
    of_images.step(batch)
    assert np.abs(of_images.logits(batch.inputs) - logits).max() > 1e-4
    of_images.set_weights(given)
    np.testing.assert_array_equal(of_images.logits(batch.inputs), logits)
    with pytest.raises(UserError, match="the shape"):
        of_images.logits(batch.inputs[..., :0])
    with pytest.raises(UserError, match="reads images"):
        of_images.generate([1, 2])
