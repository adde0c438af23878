"""Confusion matrices, macro F1 and top-5 equal scikit-learn's, on every mesh."""

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step
from PIL import Image
from test_text_classification import texts

from jaxtrain.__main__ import main
from jaxtrain.data.batch import Batch
from jaxtrain.models.feed_forward.mlp import MLP
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.transformers.vit import ViT
from jaxtrain.run.metrics.files import class_names
from jaxtrain.run.show.figures import confusion_figure
from jaxtrain.training.objectives.classification import evaluation_sums, macro_f1, metrics_of
from jaxtrain.training.objectives.losses import CONFUSION
from jaxtrain.training.objectives.tokens import add_sums

sklearn_metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is the peer")

C = 7
TOLD = {"objective": "token_classification", "num_classes": C}
BERT_OF_TOKENS = BERT(
    vocab_size=64, num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16, context_length=12, **TOLD
)
VIT = ViT(num_classes=C, channels=1, image_size=12, patch_size=6, num_layers=2, embed_dim=16,
          num_heads=2, mlp_dim=16)  # fmt: skip


def vectors(rows: int, seed: int) -> Batch:
    """Vectors of which the last do not count, as in a padded last batch."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(rows) < rows - 3 * seed).astype(np.float32)
    labels = rng.integers(0, C - 1, rows).astype(np.int32)
    return Batch(rng.normal(size=(rows, 12)).astype(np.float32), labels, mask)


def images(rows: int, seed: int) -> Batch:
    """The same numbers as pixels."""
    batch = vectors(rows, seed)
    return dataclasses.replace(
        batch, inputs=batch.inputs[:, :, None, None] * np.ones((12, 1), np.float32)
    )


def tagged(rows: int, seed: int) -> Batch:
    """Texts of all lengths, each of whose tokens has a label."""
    batch, rng = texts(rows, classes=2, vocab_size=64), np.random.default_rng(seed)
    labels = rng.integers(0, C - 1, batch.inputs.shape).astype(np.int32)
    every = batch.segment_ids.astype(np.float32)
    return dataclasses.replace(batch, targets=labels, loss_mask=every)


def state_of(program):
    """Weights under which logits differ."""
    state = program.create(seed=0)
    return dataclasses.replace(state, params=jax.tree.map(lambda x: 3 * x, state.params))


def evaluated(model, batches, layout) -> dict:
    """What an evaluation says of these batches."""
    program = make_step(model, layout)
    state = state_of(program)
    sums = program.setup.no_sums(state, batches[0])
    with layout.active():
        step = jax.jit(program.setup.eval_step)
        for batch in batches:
            sums = step(state, jax.device_put(batch, program.setup.batch_shardings(batch)), sums)
    return program.setup.objective.evaluation(jax.device_get(sums))


def logits_of(model, batches) -> list[np.ndarray]:
    """Of every place of each batch, on one device."""
    program = make_step(model, make_layout(fsdp=1))
    setup = program.setup

    @jax.jit
    def run(state, batch):
        return setup.objective.logits(setup.model(state), state.statistics, batch, setup.execution)

    with setup.layout.active():
        state = state_of(program)
        return [np.asarray(run(state, batch)) for batch in batches]


CASES: dict = {
    "vectors": (MLP(widths=(12, 9, C)), vectors, [{"data": 2, "fsdp": 2, "tensor": 2}]),
    "bert": (BERT_OF_TOKENS, tagged, [{"data": 2, "context": 2, "tensor": 2}]),
    "vit": (VIT, images, [{"pipe": 2, "fsdp": 2}]),
}


@pytest.mark.parametrize(
    "case", ["vectors", *(pytest.param(one, marks=pytest.mark.slow) for one in ("bert", "vit"))]
)
def test_every_mesh_counts_as_scikit_learn_does(case):
    model, make, layouts = CASES[case]
    batches = [make(16, seed) for seed in (0, 1, 2)]
    counted = [batch.loss_mask > 0 for batch in batches]
    labels = np.concatenate([b.targets[one] for b, one in zip(batches, counted, strict=True)])
    each = zip(logits_of(model, batches), counted, strict=True)
    logits = np.concatenate([all_of_batch[one] for all_of_batch, one in each])
    told = logits.argmax(-1)
    matrix = sklearn_metrics.confusion_matrix(labels, told, labels=range(C))
    assert np.count_nonzero(matrix) > 2 * C, "nearly all is told alike: nothing would show"
    f1 = sklearn_metrics.f1_score(labels, told, average="macro")
    top5 = sklearn_metrics.top_k_accuracy_score(labels, logits, k=5, labels=range(C))
    for layout in layouts:
        found = evaluated(model, batches, make_layout(**layout))
        assert found["eval_confusion"] == matrix.tolist()
        assert found["eval_macro_f1"] == pytest.approx(f1)
        assert found["eval_top5_accuracy"] == pytest.approx(top5)
        assert found["eval_accuracy"] == pytest.approx((told == labels).mean())


def test_of_equal_logits_the_first_class_comes_first():
    """As of accuracy, whose argmax takes the first."""
    logits, labels = np.zeros((C, C), np.float32), np.arange(C)
    sums = evaluation_sums(jax.numpy.asarray(logits), jax.numpy.asarray(labels), np.ones(C))
    assert sums["top5_accuracy"] == 5
    assert sums["confusion"][:, 0].tolist() == [1] * C


def test_few_classes_have_no_top_5_and_many_no_matrix():
    few = evaluation_sums(jax.numpy.zeros((2, 5)), jax.numpy.zeros(2, int), np.ones(2))
    assert few.keys() == {"confusion"}
    many = evaluation_sums(jax.numpy.zeros((2, 1025)), jax.numpy.zeros(2, int), np.ones(2))
    assert many.keys() == {"top5_accuracy"}
    assert metrics_of(np.eye(101)).keys() == {"macro_f1"}


def test_a_class_that_is_neither_label_nor_told_is_in_no_mean():
    labels, told = [0, 0, 3, 3, 3], [0, 3, 3, 3, 1]
    matrix = sklearn_metrics.confusion_matrix(labels, told, labels=range(5))
    assert macro_f1(matrix) == pytest.approx(
        sklearn_metrics.f1_score(labels, told, average="macro")
    )


def test_the_picture_has_a_dark_cell_where_a_label_is_told():
    counts = (np.arange(30)[:, None] == (np.arange(30) + 1) % 30) * 5
    with Image.open(io.BytesIO(confusion_figure(counts.tolist(), ["a"] * 30).png())) as image:
        assert image.format == "PNG"
        shades = np.asarray(image.convert("L"))
    assert (shades < 20).mean() > 0.5 / 30  # 30 of 900 cells, of which most of the picture is
    assert class_names({"class_names": "cat, dog"}) == ["cat", "dog"]
    assert class_names({}) == []


def test_a_run_leaves_the_matrix_in_its_metrics_and_as_a_picture(tmp_path, capsys):
    workdir = tmp_path / "run"
    bindings = ["Train.steps=2", "Train.log_every=1", "VectorData.source='iris'",
                "VectorData.features=4", "VectorData.num_classes=3", "MLP.widths=(4, 3)",
                "Train.global_batch_size=8", "Train.save_every=0"]  # fmt: skip
    words = [word for binding in bindings for word in ("-b", binding)]
    assert main(["train", "mlp_digits", *words, "--workdir", str(workdir)]) == 0
    said = capsys.readouterr().out
    assert "eval_macro_f1" in said
    assert "[[" not in said
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    matrix = np.array(lines[-1]["eval_confusion"])
    assert matrix.sum(1).tolist() == [10, 10, 10]
    with Image.open(workdir / "confusion.png") as image:
        image.load()
    assert main(["eval", "--workdir", str(workdir)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval_confusion"] == matrix.tolist()
    right = sum(np.diagonal(matrix)) / matrix.sum()
    assert found["eval_accuracy"] == pytest.approx(right)


def test_counts_of_tokens_stay_whole_numbers_beyond_what_float32_can_tell():
    """As those of images do; 2^24 + 1 is the first that float32 has not."""
    many = jnp.full((2, 2), 2**24 + 1, jnp.int32)
    alone = add_sums({}, {CONFUSION: many})[CONFUSION]
    both = add_sums({CONFUSION: many}, {CONFUSION: many})[CONFUSION]
    assert alone.dtype == both.dtype == jnp.int32
    np.testing.assert_array_equal(alone, 2**24 + 1)
    np.testing.assert_array_equal(both, 2**25 + 2)
    assert add_sums({}, {"loss": jnp.ones(())})["loss"] == 1
