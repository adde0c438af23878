"""Batches that do not divide over the devices: rows that have zero weight change nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import Batch, Trainer, load_config
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.analysis.planning.plan import plan
from jaxtrain.analysis.planning.search.search import search
from jaxtrain.config.errors import UserError
from jaxtrain.training.layouts import rows_held
from jaxtrain.training.preflight import preflight

# What is left of an update is the gradient: a step of it changes the parameters by 0.1 of it.
PLAIN = [
    "Optimizer.name='sgd'", "SGD.momentum=0.0", "Optimizer.learning_rate=0.1",
    "Optimizer.clip_norm=None", "Optimizer.weight_decay=0.0", "Schedule.name='constant'",
    "Schedule.warmup_steps=0", "Precision.compute='float32'", "Train.eval_every=0",
    "Train.save_every=0", "Train.log_every=1",
]  # fmt: skip
AXES = ("data", "fsdp", "tensor", "context", "pipe", "expert")
CONFIGS = {
    "gpt": ["Train.eval_batches=None"],
    "moe": [
        "Mixtral.embed_dim=32", "Mixtral.mlp_dim=32", "Mixtral.num_experts=4",
        "Mixtral.context_length=32", "TextData.sequence_length=32",
    ],
    "vit_digits": ["ViT.num_layers=2"],
    "mlp_digits": [],
    "t5_tiny": [
        "T5.embed_dim=32", "T5.mlp_dim=32", "T5.head_dim=8", "T5.context_length=32",
        "TextData.sequence_length=32",
    ],
}  # fmt: skip
FILES = {"moe": "mixtral_tiny"}


def on(sizes: dict[str, int], more: tuple[str, ...] = ()) -> list[str]:
    return [*(f"Mesh.{axis}={sizes.get(axis, 1)}" for axis in AXES), *more]


def trained(config, rows: int, where: list[str], devices) -> tuple[list[np.ndarray], list, Trainer]:
    """All parameters after two steps, the losses and what is evaluated."""
    own = CONFIGS.get(config, CONFIGS["gpt"])
    bindings = [*PLAIN, "Train.eval_batches=1", *own, f"Train.global_batch_size={rows}"]
    read = load_config(FILES.get(config, config), [*bindings, *where])
    trainer = Trainer(read, devices=devices)
    trainer.train(steps=2)
    losses = [line["loss"] for line in trainer.history if "loss" in line]
    if read.train.eval_batches is None:
        losses.append(trainer.evaluate()["eval_loss"])
    return list(trainer.weights().values()), losses, trainer


@functools.cache
def alone(config, rows: int, device) -> tuple[list[np.ndarray], list]:
    return trained(config, rows, on({}), [device])[:2]


PIPED = ("Pipeline.microbatches=2", "Attention.context_parallel='ulysses'")
SLOW = pytest.mark.slow


@pytest.mark.slow_cases("moe-{'fsdp': 2, 'expert': 4}-()")
@pytest.mark.parametrize(
    ("config", "sizes", "more"),
    [
        ("gpt", {"fsdp": 4, "tensor": 2}, ("Train.accumulation=2",)),
        pytest.param("gpt", {"pipe": 2, "data": 2, "context": 2}, PIPED, marks=SLOW),
        ("moe", {"fsdp": 2, "expert": 4}, ()),
        pytest.param("mlp_digits", {"data": 8}, (), marks=SLOW),
        pytest.param("t5_tiny", {"fsdp": 4}, (), marks=SLOW),
    ],
    ids=str,
)
def test_a_filled_batch_trains_as_its_rows_alone_on_one_device(
    tiny_config, devices, config, sizes, more
):
    rows, count = 7, int(np.prod(list(sizes.values())))
    config = tiny_config if config == "gpt" else config
    one, expected = alone(config, rows, devices[0])
    where = on(sizes, (*more, "Train.fill_batch=True"))
    many, found, trainer = trained(config, rows, where, devices[:count])
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    for a, b in zip(many, one, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)
    held = trainer.abstract_batch().inputs.shape[0]
    assert held > rows
    assert held == rows_held(trainer.config, trainer.layout)


def own_batch(trainer: Trainer, rows: int) -> Batch:
    abstract = trainer.config.train.data.abstract_batch(rows)
    rng = np.random.default_rng(3)
    vocabulary = trainer.config.train.model.vocab_size

    def drawn(leaf) -> np.ndarray:
        return rng.integers(0, vocabulary, leaf.shape).astype(leaf.dtype)

    length = abstract.inputs.shape[1]
    return Batch(
        inputs=drawn(abstract.inputs),
        targets=drawn(abstract.targets),
        loss_mask=rng.integers(0, 2, (rows, length)).astype(np.float32),
        segment_ids=np.ones((rows, length), np.int32),
        positions=np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    )


# Another caller of the same filling.
@pytest.mark.slow
def test_a_batch_of_ones_own_is_filled_too(tiny_config, devices):
    asked = [*PLAIN, "Train.global_batch_size=8", "Train.fill_batch=True"]
    one = Trainer(load_config(tiny_config, [*asked, *on({})]), devices=devices[:1])
    where = on({"data": 2, "fsdp": 2})
    many = Trainer(load_config(tiny_config, [*asked, *where]), devices=devices[:4])
    batch = own_batch(one, rows=5)
    placed = jax.tree.map(jnp.asarray, batch)  # of NumPy's or a device's arrays
    expected, found = one.gradients(batch), many.gradients(batch)
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-6)
    assert float(one.step(batch)["loss"]) == pytest.approx(
        float(many.step(placed)["loss"]), rel=1e-5
    )
    for name, weight in one.weights().items():
        np.testing.assert_allclose(many.weights()[name], weight, rtol=0, atol=2e-6)


def test_a_batch_of_ones_own_that_would_be_counted_is_refused(devices):
    asked = ["Train.global_batch_size=8", "Train.fill_batch=True", *on({"data": 4})]
    trainer = Trainer(load_config("resnet_digits", asked), devices=devices[:4])
    images = trainer.config.train.data.abstract_batch(5)
    batch = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), images)
    says = "Batch.inputs has 5 rows, which are not 8, .* the running statistics of ResNet"
    with pytest.raises(UserError, match=says):
        trainer.step(batch)


def test_what_a_filled_batch_is_filled_with_is_said_in_one_line(tiny_config, devices):
    said = []
    where = on({"data": 4}, ("Train.global_batch_size=7", "Train.fill_batch=True"))

    class Console:
        def print(self, text, **_: object) -> None:
            said.append(text)

    Trainer(load_config(tiny_config, where), devices=devices[:4], console=Console())
    (line,) = [text for text in said if "global_batch_size" in str(text)]
    assert line == (
        "Train.global_batch_size=7 is filled to 8 rows, a multiple of its 4 devices and their "
        "microbatches: 1 have zero weight, 12.5% of the work"
    )


@pytest.mark.parametrize(
    ("config", "more", "says"),
    [
        ("resnet_digits", (), "running statistics of ResNet; the nearest multiple of 4 is 8"),
        (
            "mixtral_tiny",
            ("TextData.separate_documents=False",),
            "which recognize them with TextData.separate_documents=True",
        ),
        ("tiny", ("Exchange.method='local_sgd'", "Exchange.period=2"), "replicas of Exchange"),
        ("tiny", ("Train.noise_scale_every=1", "Train.accumulation=2"), "noise_scale_every=1"),
    ],
)
def test_what_would_count_such_rows_is_refused(tiny_config, config, more, says):
    name = tiny_config if config == "tiny" else config
    where = on({"data": 4}, ("Train.global_batch_size=7", "Train.fill_batch=True", *more))
    with pytest.raises(UserError, match="Train.fill_batch=True .*" + says):
        preflight.check(load_config(name, where), device_count=4, platform="cpu")


def test_a_batch_that_does_not_divide_is_not_filled_unless_asked(tiny_config):
    where = on({"data": 4}, ("Train.global_batch_size=7",))
    with pytest.raises(UserError, match="is 8, or fill the batch: Train.fill_batch=True"):
        preflight.check(load_config(tiny_config, where), device_count=4, platform="cpu")


def test_a_plan_counts_the_idle_share(tiny_config):
    def planned(rows: int):
        where = on({"data": 2, "fsdp": 3}, (f"Train.global_batch_size={rows}",))
        config = load_config(tiny_config, [*where, "GPT.embed_dim=48", "Train.fill_batch=True"])
        return plan(config, "h100:1x6", compile=False)

    filled, whole = planned(8), planned(12)
    assert filled.time.seconds == whole.time.seconds
    assert filled.total == whole.total
    assert filled.tokens_per_second == pytest.approx(whole.tokens_per_second * 8 / 12)
    assert filled.time.mfu == pytest.approx(whole.time.mfu * 8 / 12)
    assert any("is filled to 12 rows" in words for words in filled.advice)
    assert whole.advice == [words for words in filled.advice if "is filled" not in words]


def test_what_is_compiled_has_all_rows(tiny_config):
    where = on({"data": 4}, ("Train.global_batch_size=6", "Train.fill_batch=True"))
    made = plan(load_config(tiny_config, where), "cpu:4")
    assert made.compiled.argument_bytes == made.estimate.arguments.total


# Prices a whole search; filled batches are in the fast part above.
@pytest.mark.slow
def test_a_search_fills_batches_that_do_not_divide(tiny_config):
    """4 heads, 2 layers and 8 rows: nothing divides by 5."""
    found = search(load_config(tiny_config, on({"data": 5})), parse_target("h100:1x5"))
    assert found.candidates
    for one in found.candidates:
        assert "Train.fill_batch=True" in one.bindings
        assert preflight.check(one.config, device_count=5, platform="gpu", reads_data=False) is None
