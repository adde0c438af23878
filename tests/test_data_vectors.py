"""VectorData: files and small tables, their split, their scaling, and what is rejected of them."""

import json

import numpy as np
import pytest

from jaxtrain.__main__ import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.vectors.source import VectorData


@pytest.fixture
def table(tmp_path):
    """A .npz and a .csv of the same 40 examples: four features, three classes or two numbers."""
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (40, 4))
    x[:, 3] = 7  # a feature that says nothing
    y = np.stack([x[:, 0] + 2 * x[:, 1], x[:, 2]], 1)
    labels = np.arange(40) % 3
    np.savez(tmp_path / "numbers.npz", x=x, y=y)
    np.savez(tmp_path / "labels.npz", x=x, y=labels)
    rows = [",".join(map(repr, row)) for row in np.concatenate([x, y], 1).tolist()]
    (tmp_path / "numbers.csv").write_text("a,b,c,d,p,q\n" + "\n".join(rows) + "\n")
    return tmp_path, x, y, labels


def numbers(folder, name="numbers.npz", **changes):
    settings = {"features": 4, "num_classes": None, "num_targets": 2, "scaling": "none"}
    return VectorData(source=str(folder / name), **settings | changes)


def test_files_hold_the_examples_and_every_fifth_is_held_out(table):
    folder, x, y, _ = table
    held = np.arange(40) % 5 == 4
    for name in ("numbers.npz", "numbers.csv"):
        found = numbers(folder, name).open(seed=0)
        for split, kept in ((found.train, ~held), (found.heldout, held)):
            batch = split.examples(np.arange(len(split)))
            np.testing.assert_array_equal(batch.inputs, x[kept].astype(np.float32))
            np.testing.assert_array_equal(batch.targets, y[kept].astype(np.float32))
            one = split.example(3, None)
            np.testing.assert_array_equal(one.inputs, batch.inputs[3])
            assert (one.loss_mask == 1).all()
            assert (batch.loss_mask == 1).all()
    assert (found.unit, found.facts["train_vectors"], found.facts["heldout_vectors"]) == (
        "vectors", 32, 8,
    )  # fmt: skip


def test_of_each_class_every_fifth_is_held_out(table):
    folder, _, _, labels = table
    found = VectorData(source=str(folder / "labels.npz"), features=4, num_classes=3).open(seed=0)
    train, heldout = found.train.y, found.heldout.y
    assert train.dtype == np.int32
    for label in range(3):
        assert (heldout == label).sum() == (labels == label).sum() // 5
    assert len(train) + len(heldout) == 40


def test_scaling_is_that_of_the_training_part(table):
    folder, _, _, _ = table
    found = numbers(folder, scaling="standard").open(seed=0)
    for values in (found.train.x[:, :3], found.train.y):
        np.testing.assert_allclose(values.mean(0), 0, atol=1e-6)
        np.testing.assert_allclose(values.std(0), 1, atol=1e-6)
    assert (found.train.x[:, 3] == 0).all()  # without a spread, not divided by it
    unit = numbers(folder, scaling="unit").open(seed=0)
    assert (unit.train.x.min(), unit.train.x.max()) == (0, 1)
    plain = numbers(folder).open(seed=0)
    assert len({found.digest, unit.digest, plain.digest}) == 3


def test_a_demo_table_is_that_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    found = VectorData(source="digits", scaling="none").open(seed=0)
    pixels = datasets.load_digits().data.astype(np.float32)
    both = np.concatenate([found.train.x, found.heldout.x])
    assert sorted(map(bytes, both)) == sorted(map(bytes, pixels))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"features": 5}, "VectorData.features = 4"),
        ({"num_targets": 1}, "set VectorData.num_targets = 2"),
        ({"num_targets": 1, "num_classes": 3}, "set VectorData.num_classes = None"),
        ({"name": "labels.npz", "num_targets": 1, "num_classes": 9}, "VectorData.num_classes = 3"),
        ({"name": "nothing.npz"}, "no such file or folder"),
        ({"name": "wrong.npz"}, "no arrays of numbers x and y"),
        ({"name": "holes.npz"}, "x[1] has a value that is not finite"),
        ({"name": "wrong.csv"}, "row 2 of numbers is '1,2'; use 3 values"),
        ({"name": "table.txt"}, "it takes a .npz or a .csv file"),
        ({"heldout_fraction": 0.001}, "0 would be held out"),
    ],
)
def test_mistakes_are_refused(table, changes, said):
    folder = table[0]
    np.savez(folder / "wrong.npz", x=np.ones((2, 2)), z=np.ones(2))
    np.savez(folder / "holes.npz", x=np.array([[1, 2], [np.nan, 1]]), y=np.ones(2))
    (folder / "wrong.csv").write_text("1,2,3\n1,2\n")
    (folder / "table.txt").write_text("1,2,3\n")
    with pytest.raises(UserError) as refusal:
        numbers(folder, **changes).open(seed=0)
    assert said in str(refusal.value)


def test_targets_and_classes_do_not_go_together():
    with pytest.raises(UserError, match="num_targets=2 has no effect with"):
        VectorData(num_targets=2)


def test_linear_regression_finds_the_least_squares(table, tmp_path):
    """Trained through the command line, with the loss of the closed form."""
    folder, x, y, _ = table
    file = tmp_path / "run.gin"
    file.write_text(
        f"""
Train.model = @MLP()
Train.data = @VectorData()
Train.steps = 200
Train.global_batch_size = 32
MLP.widths = (4, 2)
MLP.objective = 'regression'
VectorData.source = {str(folder / "numbers.npz")!r}
VectorData.features = 4
VectorData.num_classes = None
VectorData.num_targets = 2
Optimizer.learning_rate = 0.05
Optimizer.weight_decay = 0.0
Precision.compute = 'float32'
"""
    )
    assert main(["data", str(file)]) == 0
    assert main(["train", str(file), "--workdir", str(tmp_path / "run")]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["eval_loss"] < 1e-4  # y is linear in x: the least squares are 0
    assert "vectors_per_second" in json.loads(lines[-2])
