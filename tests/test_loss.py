"""Losses equal PyTorch and closed forms; chunked equals whole, a sharded vocabulary a whole one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step, text_batch
from jax.extend.core import jaxprs_in_params

from jaxtrain.analysis.planning.textbook.flops import count_flops
from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.precision import Precision
from jaxtrain.nn.transformer.language_model import hidden_states, logits
from jaxtrain.training.objectives.classification import Classification
from jaxtrain.training.objectives.language_modeling import NextToken
from jaxtrain.training.objectives.losses import Loss, cross_entropy, over_chunks

RNG = np.random.default_rng(0)
LOGITS = (4 * RNG.normal(size=(3, 5, 11))).astype(np.float32)
TARGETS = RNG.integers(0, 11, (3, 5)).astype(np.int32)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cross_entropy_equals_torch(label_smoothing, dtype):
    torch = pytest.importorskip("torch")
    logits = jnp.asarray(LOGITS, dtype)

    def mean(logits):
        return cross_entropy(logits, TARGETS, label_smoothing=label_smoothing).mean()

    value, gradient = jax.value_and_grad(mean)(logits)
    # PyTorch gets the same bfloat16 numbers, in float32: our loss does not compute in bfloat16.
    theirs = torch.tensor(np.asarray(logits.astype(jnp.float32)), requires_grad=True)
    expected = torch.nn.functional.cross_entropy(
        theirs.flatten(0, 1),
        torch.tensor(TARGETS).flatten().long(),
        label_smoothing=label_smoothing,
    )
    expected.backward()
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected.item(), rtol=1e-6)
    rounding = 1e-6 if dtype == "float32" else 2**-8  # of the gradient to bfloat16, relative
    np.testing.assert_allclose(
        gradient.astype(jnp.float32), theirs.grad.numpy(), rtol=rounding, atol=1e-7
    )


def test_cross_entropy_of_huge_logits_is_finite():
    logits = np.array([[3e4, -3e4, 0.0]], np.float32)
    np.testing.assert_array_equal(cross_entropy(logits, np.array([0], np.int32)), [0.0])
    np.testing.assert_array_equal(cross_entropy(logits, np.array([1], np.int32)), [6e4])


def test_z_loss_is_the_squared_log_partition():
    log_partition = np.log(np.exp(LOGITS.astype(np.float64)).sum(-1))
    plain = cross_entropy(LOGITS, TARGETS)
    with_z = cross_entropy(LOGITS, TARGETS, z_weight=0.01)
    np.testing.assert_allclose(with_z - plain, 0.01 * log_partition**2, rtol=1e-4, atol=1e-6)


class FixedLogits:
    """A classifier that says the same whatever it sees."""

    def __init__(self, logits_BC):
        self.logits_BC = logits_BC

    def __call__(self, images, statistics, execution, *, train):
        return self.logits_BC, statistics


def classified(model, batch, settings, *, train):
    sums, _ = Classification().sums(model, None, batch, Execution(), settings, train=train)
    return sums


def test_classification_sums_over_the_images_that_count():
    logits = jnp.array([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 9.0]])
    mask = np.array([1, 1, 1, 0], np.float32)
    batch = Batch(np.zeros((4, 1, 1, 1)), np.array([0, 1, 1, 1], np.int32), mask)
    sums = classified(FixedLogits(logits), batch, Loss(), train=True)
    right, wrong = np.log(1 + np.exp(-2.0)), np.log(1 + np.exp(2.0))
    assert Classification().counts(batch) == {"weight": 3}
    assert sums["accuracy"] == 2
    np.testing.assert_allclose(sums["loss"], 2 * right + wrong, rtol=1e-6)


def test_smoothing_and_z_loss_are_for_training_only():
    logits = jnp.asarray(LOGITS[0])
    batch = Batch(np.zeros((5, 1, 1, 1)), TARGETS[0], np.ones(5, np.float32))
    settings = Loss(z_weight=0.1, label_smoothing=0.1)
    model = FixedLogits(logits)
    plain = classified(model, batch, Loss(), train=True)["loss"]
    trained = classified(model, batch, settings, train=True)["loss"]
    evaluated = classified(model, batch, settings, train=False)["loss"]
    assert evaluated == plain
    assert abs(trained - plain) > 0.1


# -- language models -------------------------------------------------------------------------------

# No other array has this last dimension: not heads, widths, or rows of all tokens.
MODEL = GPT(vocab_size=104, num_layers=1, embed_dim=32, num_heads=4, context_length=12)
ROWS, LENGTH = 8, 12
# The upper half of the vocabulary never occurs.
BATCH = text_batch(rows=ROWS, length=LENGTH, vocab_size=48)


def test_next_token_sums_losses_and_weights_over_unmasked_targets():
    model = MODEL.build(jax.random.key(0))
    execution = Execution(kernel="reference")

    @jax.jit
    def run(model, batch):
        mask = Mask(segment_ids_BT=batch.segment_ids, segment_ids_BS=batch.segment_ids)
        h_BTD, _, _ = hidden_states(model, batch.inputs, batch.positions, mask, execution)
        sums = NextToken().sums(model, None, batch, execution, Loss(), train=True)
        return sums, logits(model, h_BTD)

    (sums, statistics), found = run(model, BATCH)
    found = np.asarray(found, np.float64)
    log_softmax = found - np.log(np.exp(found).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_softmax, BATCH.targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(sums["loss"], -(picked * BATCH.loss_mask).sum(), rtol=1e-6)
    counts = NextToken().counts(BATCH)
    assert counts == {"weight": BATCH.loss_mask.sum(), "tokens": BATCH.inputs.size}
    assert statistics is None


def gradients_on(layout, settings: Loss, model=MODEL, **changes):
    program = make_step(model, layout, loss=settings, **changes)
    state = program.create(0)
    batch = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
    with layout.active():
        gradients, metrics, _ = jax.jit(program.setup.gradients)(state, batch)
    return jax.tree.map(np.asarray, gradients), float(metrics["loss"])


@pytest.fixture(scope="module")
def whole():
    return gradients_on(make_layout(), Loss(z_weight=1e-3, label_smoothing=0.1))


@pytest.mark.slow_cases("1-1", "4-2")
@pytest.mark.parametrize(("chunk_size", "devices"), [(1, 1), (4, 1), (12, 1), (4, 2)])
def test_chunked_equals_whole(whole, chunk_size, devices):
    settings = Loss(chunk_size=chunk_size, z_weight=1e-3, label_smoothing=0.1)
    gradients, loss = gradients_on(make_layout(fsdp=devices), settings)
    np.testing.assert_allclose(loss, whole[1], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5), gradients, whole[0]
    )


def test_chunks_over_a_mesh_are_near_float32_in_bfloat16(whole):
    settings = Loss(chunk_size=4, z_weight=1e-3, label_smoothing=0.1)
    layout = make_layout(fsdp=2, tensor=2, context=2)
    gradients, loss = gradients_on(layout, settings, precision=Precision(compute="bfloat16"))
    np.testing.assert_allclose(loss, whole[1], rtol=1e-3)
    leaves = zip(*map(jax.tree.leaves, (gradients, whole[0])), strict=True)
    apart = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in leaves if b.any()]
    assert max(apart) < 0.05


def all_equations(jaxpr):
    """Every equation of a jaxpr and of its inner jaxprs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from all_equations(inner)


def all_values(jaxpr):
    """Every value that they compute."""
    for equation in all_equations(jaxpr):
        yield from (variable.aval for variable in equation.outvars)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_a_chunk_size_keeps_whole_logits_from_existing(chunk_size):
    layout = make_layout()
    program = make_step(MODEL, layout, loss=Loss(chunk_size=chunk_size))
    with layout.active():
        jaxpr = jax.make_jaxpr(program.train_step)(program.abstract_state(), BATCH)
    V = MODEL.vocab_size
    logits = [v for v in all_values(jaxpr.jaxpr) if v.shape[-1:] == (V,)]
    largest = max(v.size for v in logits)
    assert largest == ROWS * (chunk_size or LENGTH) * V


@pytest.mark.parametrize(("chunk_size", "devices"), [(None, 1), (4, 1), (4, 2)])
def test_logits_are_computed_once(chunk_size, devices):
    layout = make_layout(fsdp=devices)
    program = make_step(MODEL, layout, loss=Loss(chunk_size=chunk_size))
    with layout.active():
        jaxpr = jax.make_jaxpr(program.setup.gradients)(program.abstract_state(), BATCH)
    found = count_flops(jaxpr, lambda scope: "loss" in scope).chosen
    assert found == 3 * 2 * ROWS * LENGTH * MODEL.embed_dim * MODEL.vocab_size


def test_gradients_of_chunks_are_summed_in_float32():
    h, ones = jnp.ones((1, 300, 1), jnp.bfloat16), jnp.ones((1, 300))

    def total(matrix_VD):
        def losses(logits, *_):
            return logits[..., 0].astype(jnp.float32)

        return over_chunks(losses, 1, h, matrix_VD, ones, ones)

    # In bfloat16 256 + 1 is 256.
    assert jax.grad(total)(jnp.ones((1, 1), jnp.bfloat16)) == 300


def test_the_gradient_of_the_loss_mask_is_each_tokens_loss():
    rng = np.random.default_rng(0)
    h, matrix = (rng.standard_normal(shape, np.float32) for shape in [(2, 6, 8), (10, 8)])
    targets = rng.integers(10, size=(2, 6), dtype=np.int32)

    def total(mask_BT):
        def losses(logits, targets, mask):
            return cross_entropy(logits, targets) * mask

        return over_chunks(losses, 2, jnp.asarray(h), jnp.asarray(matrix), targets, mask_BT)

    found = jax.grad(total)(jnp.full((2, 6), 0.5))
    np.testing.assert_allclose(found, cross_entropy(h @ matrix.T, targets), rtol=1e-5)


def test_small_probabilities_keep_their_precision_in_float16():
    V, scale = 1_100_000, 2.0**14
    h, targets = jnp.ones((1, 1, 1), jnp.float16), jnp.zeros((1, 1), jnp.int32)

    def total(matrix_VD):
        return scale * over_chunks(losses, 1, h, matrix_VD, targets, jnp.ones((1, 1)))

    def losses(logits, targets, _):
        return cross_entropy(logits, targets)

    gradient = jax.grad(total)(jnp.zeros((V, 1), jnp.float16))
    # 1 / V alone would be 15.25 of the smallest steps between float16 numbers.
    np.testing.assert_allclose(gradient[1:], scale / V, rtol=1e-3)


@pytest.mark.parametrize("devices", [1, 2])
def test_no_constant_of_the_logits_size_is_read_by_every_chunk(devices):
    layout = make_layout(fsdp=devices)
    program = make_step(MODEL, layout, loss=Loss(chunk_size=4))
    with layout.active():
        jaxpr = jax.make_jaxpr(program.setup.gradients)(program.abstract_state(), BATCH)
    # A loop is given the places of the vocabulary, and nothing else that ends in one.
    given = [
        v.aval.shape
        for equation in all_equations(jaxpr.jaxpr)
        if equation.primitive.name == "scan"
        for v in equation.invars
    ]
    assert {shape for shape in given if shape[-1:] == (MODEL.vocab_size,)} <= {(1, 1, 104)}


def test_a_vocabulary_sharded_eight_ways_equals_a_whole_one():
    # Untied: with a tied table the softmax gives every row a gradient.
    model = Llama(
        vocab_size=96,
        num_layers=1,
        embed_dim=32,
        num_heads=8,
        num_kv_heads=8,
        mlp_dim=16,
        context_length=LENGTH,
        tie_embeddings=False,
    )
    settings = Loss(z_weight=1e-3, label_smoothing=0.1)
    expected, expected_loss = gradients_on(make_layout(), settings, model)
    gradients, loss = gradients_on(make_layout(tensor=8), settings, model)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5), gradients, expected
    )
    table_VD = gradients["token_embedding"].get_value()
    assert (np.abs(table_VD[48:]) == 0).all()
    seen = np.unique(BATCH.inputs[:, :-1][BATCH.loss_mask[:, :-1] > 0])
    assert (np.abs(table_VD[seen]).max(-1) > 0).all()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"chunk_size": 0}, "Loss.chunk_size=0; use None or at least 1"),
        ({"label_smoothing": 1.0}, "Loss.label_smoothing=1.0; use 0 to below 1"),
    ],
)
def test_refusals(changes, sentence):
    with pytest.raises(UserError) as refusal:
        Loss(**changes)
    assert str(refusal.value) == sentence
