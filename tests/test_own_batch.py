"""A batch of your own: what stands where nothing counts changes nothing, all else is rejected."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step, text_batch
from flax import nnx

from jaxtrain import Trainer, load_config
from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.convolutional.resnet import ResNet
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.nn.execution import Execution
from jaxtrain.training.objectives.classification import Classification
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.objectives.tokens import token_loss

# -- where nothing counts -------------------------------------------------------------------------

MODEL = GPT(vocab_size=64, num_layers=1, embed_dim=16, num_heads=2, context_length=8)
TEXT = text_batch(rows=8, length=8, vocab_size=64)
IMAGES = Batch(
    inputs=np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype(np.float32),
    targets=np.arange(8, dtype=np.int32),
    loss_mask=(np.arange(8) % 3 > 0).astype(np.float32),
)


def step_on(program, *batches: Batch):
    """Gradients, metrics and statistics of a first step on each of the batches."""
    state = program.create(0)
    placed = [jax.device_put(batch, program.setup.batch_shardings(batch)) for batch in batches]
    with program.setup.layout.active():
        gradients = jax.jit(program.setup.gradients)
        return [jax.tree.map(np.asarray, gradients(state, batch)) for batch in placed]


def assert_same_bits(found, expected):
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow_cases("{'tensor': 2}-whole", "{'fsdp': 8}-whole", "{'tensor': 2}-chunked")
@pytest.mark.parametrize("chunk_size", [None, 4], ids=["whole", "chunked"])
@pytest.mark.parametrize("layout", [{"fsdp": 8}, {"tensor": 2}], ids=str)
def test_targets_that_do_not_count_may_be_anything(layout, chunk_size):
    settings = Loss(chunk_size=chunk_size, z_weight=1e-3, label_smoothing=0.1)
    program = make_step(MODEL, make_layout(**layout), loss=settings)
    masked = TEXT.loss_mask == 0
    assert 0.2 < masked.mean() < 0.8
    spoiled = [
        dataclasses.replace(TEXT, targets=np.where(masked, value, TEXT.targets).astype(np.int32))
        for value in (-100, 2**31 - 1)
    ]
    expected, *found = step_on(program, TEXT, *spoiled)
    for one in found:
        assert_same_bits(one, expected)


@pytest.mark.parametrize("chunk_size", [None, 4], ids=["whole", "chunked"])
def test_hidden_states_that_do_not_count_may_be_no_numbers(chunk_size):
    rng = np.random.default_rng(0)
    h, matrix = rng.normal(size=(8, 8, 16)), rng.normal(size=(64, 16))

    class Head:
        def __init__(self, matrix_VD):
            self.matrix = nnx.Param(matrix_VD, axes=("vocab", "embed"))

        def output_matrix(self):
            return self.matrix

        def output_bias(self):
            return None

        def logit_softcap(self):
            return None

    @jax.jit
    def found(h_BTD):
        def loss(h_BTD, matrix_VD):
            settings = Loss(chunk_size=chunk_size, z_weight=1e-3)
            return token_loss(Head(matrix_VD), h_BTD, TEXT, settings, train=True)

        return jax.value_and_grad(loss, (0, 1))(h_BTD, jnp.asarray(matrix, jnp.float32))

    h = h.astype(np.float32)
    spoiled = np.where(TEXT.loss_mask[..., None] == 0, np.nan, h).astype(np.float32)
    assert_same_bits(found(spoiled), found(h))


# Compiles a ResNet on eight devices; targets of texts are in the fast part.
@pytest.mark.slow
def test_labels_and_pixels_that_do_not_count_may_be_anything():
    sizes = ResNet(depth=20, num_classes=10, channels=1, width=8)
    program = make_step(sizes, make_layout(fsdp=8), loss=Loss(label_smoothing=0.1))
    masked = IMAGES.loss_mask == 0
    of_zeros = np.where(masked[:, None, None, None], 0, IMAGES.inputs)
    clean = dataclasses.replace(IMAGES, inputs=of_zeros)
    of_nothing = np.where(masked[:, None, None, None], np.nan, IMAGES.inputs).astype(np.float32)
    targets = np.where(masked, -100, IMAGES.targets).astype(np.int32)
    spoiled = dataclasses.replace(IMAGES, inputs=of_nothing, targets=targets)
    expected, found = step_on(program, clean, spoiled)
    assert_same_bits(found, expected)


def test_logits_that_do_not_count_may_be_no_numbers():
    mask = np.array([1, 0, 1], np.float32)
    batch = Batch(np.zeros((3, 1, 1, 1), np.float32), np.array([0, 700, 1], np.int32), mask)

    @jax.jit
    def found(logits_BC):
        def loss(logits_BC):
            def model(images, statistics, execution, *, train):
                return logits_BC, statistics

            sums, _ = Classification().sums(model, (), batch, Execution(), Loss(), train=True)
            return sums["loss"], sums

        return jax.value_and_grad(loss, has_aux=True)(logits_BC)

    logits = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    spoiled = logits.copy()
    spoiled[1] = np.nan, np.inf
    assert_same_bits(found(spoiled), found(logits))


# -- what is rejected ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer(tiny_config):
    return Trainer(load_config(tiny_config, ["Train.accumulation = 2", "Loss.chunk_size = 8"]))


OWN = text_batch(rows=8, length=32, vocab_size=256)
COUNTED = np.unravel_index(np.argmax(OWN.loss_mask), OWN.loss_mask.shape)


def with_value(name: str, value, place=COUNTED) -> Batch:
    x = getattr(OWN, name).copy()
    x[place] = value
    return dataclasses.replace(OWN, **{name: x})


def longer(length: int) -> Batch:
    return text_batch(rows=8, length=length, vocab_size=256)


PLACE = ", ".join(map(str, COUNTED))
REFUSED = {
    "input": (
        with_value("inputs", 256),
        f"Batch.inputs[{PLACE}] is 256; use 0 to 255 (GPT.vocab_size=256)",
    ),
    "target": (
        with_value("targets", -100),
        f"Batch.targets[{PLACE}] is -100; use 0 to 255 (GPT.vocab_size=256)",
    ),
    "position": (
        with_value("positions", 32),
        f"Batch.positions[{PLACE}] is 32; use 0 to 31 (GPT.context_length=32)",
    ),
    "segment": (
        with_value("segment_ids", -1),
        f"Batch.segment_ids[{PLACE}] is -1; use 0 or more, and finite",
    ),
    "mask": (
        with_value("loss_mask", np.nan),
        f"Batch.loss_mask[{PLACE}] is nan; use 0 or more, and finite",
    ),
    "long": (
        longer(64),
        "Batch.inputs has sequences of 64 tokens; use at most 32 (GPT.context_length)",
    ),
    "chunks": (
        longer(30),
        "Batch.inputs has sequences of 30 tokens, no multiple of 8 (Loss.chunk_size); the nearest "
        "is 32",
    ),
    "rows": (
        jax.tree.map(lambda x: x[:6], OWN),
        "Batch.inputs has 6 rows, which do not divide over the 4 devices that split the batch "
        "times Train.accumulation=2; the nearest multiple of 8 is 8",
    ),
    "no positions": (
        dataclasses.replace(OWN, positions=None),
        "Batch.positions is None; use an array of NumPy or JAX, int32 [8, 32]",
    ),
    "a list": (
        dataclasses.replace(OWN, targets=OWN.targets.tolist()),
        "Batch.targets is a list; use an array of NumPy or JAX, int32 [8, 32]",
    ),
    "dtype": (
        dataclasses.replace(OWN, inputs=OWN.inputs.astype(np.float32)),
        "Batch.inputs has the dtype float32; use int32 [B, T]",
    ),
    "boolean mask": (
        dataclasses.replace(OWN, loss_mask=OWN.loss_mask > 0),
        "Batch.loss_mask has the dtype bool; use float32 [8, 32]",
    ),
    "images": (IMAGES, "Batch.inputs has the dtype float32; use int32 [B, T]"),
    "shape": (
        dataclasses.replace(OWN, targets=OWN.targets[:, :5]),
        "Batch.targets has the shape [8, 5]; use int32 [8, 32]",
    ),
    "no rows": (
        jax.tree.map(lambda x: x[:0], OWN),
        "Batch.inputs has the shape [0, 32]; use int32 [B, T]",
    ),
    "a dict": (
        {"inputs": OWN.inputs},
        "Trainer.step takes a jaxtrain.Batch, not a dict",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(trainer, what):
    batch, sentence = REFUSED[what]
    with pytest.raises(UserError) as refusal:
        trainer.step(batch)
    assert str(refusal.value) == sentence
    assert trainer.steps_done == 0


def test_arrays_on_devices_are_asked_for_their_shapes_alone(trainer):
    def refused(batch: Batch) -> str:
        with trainer.layout.active():
            placed = jax.device_put(batch, trainer.program.setup.batch_shardings(batch))
        try:
            trainer.program.setup.validate(placed, trainer.config.train.model)
        except UserError as error:
            return str(error)
        return ""

    assert refused(with_value("inputs", 256)) == ""
    assert "64 tokens; use at most 32" in refused(longer(64))


def test_images_are_refused_by_their_own_objective():
    sizes = ResNet(depth=20, num_classes=10, channels=1, width=8)
    program = make_step(sizes, make_layout())
    program.setup.validate(IMAGES, sizes)
    refused = {
        "targets[7] is 10; use 0 to 9 (ResNet.num_classes=10)": {"targets": IMAGES.targets + 3},
        "inputs has the shape [8, 8, 8, 2]; use float32 [B, H, W, 1]": {
            "inputs": IMAGES.inputs[..., [0, 0]]
        },
        "positions is not None; images have no documents": {"positions": IMAGES.targets},
    }
    for sentence, changes in refused.items():
        with pytest.raises(UserError) as refusal:
            program.setup.validate(dataclasses.replace(IMAGES, **changes), sizes)
        assert str(refusal.value) == f"Batch.{sentence}"
    # The image with the label that is out of bounds does not count.
    program.setup.validate(
        dataclasses.replace(IMAGES, targets=np.where(IMAGES.loss_mask, 0, 99)), sizes
    )
