"""What is computed in which dtype, read from the step's jaxpr; and loss scaling."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_layout, make_step, text_batch
from flax import nnx
from jax.extend.core import jaxprs_in_params

from jaxtrain.analysis.verify.runs import float32_islands
from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.convolutional.resnet import ResNet
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.precision import Precision, to_compute
from jaxtrain.training.guard import GOOD_STEPS_TO_DOUBLE

SMALL = {"vocab_size": 64, "num_layers": 2, "embed_dim": 32, "num_heads": 4, "context_length": 8}
GPT_MODEL = GPT(**SMALL)
LLAMA_MODEL = Llama(**SMALL, num_kv_heads=2, mlp_dim=48)
RESNET_MODEL = ResNet(depth=20, num_classes=10, channels=1, width=8)
TEXT = text_batch(rows=4, length=8, vocab_size=64)
IMAGES = Batch(
    inputs=np.ones((4, 8, 8, 1), np.float32),
    targets=np.zeros(4, np.int32),
    loss_mask=np.ones(4, np.float32),
)
MODELS = {
    "gpt": (GPT_MODEL, TEXT),
    "llama": (LLAMA_MODEL, TEXT),
    "resnet": (RESNET_MODEL, IMAGES),
}


def equations(jaxpr):
    """Every equation of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def dtypes_of(found, primitive: str) -> set[str]:
    """The floating dtypes that a primitive's operands have."""
    dtypes = (v.aval.dtype for e in found if e.primitive.name == primitive for v in e.invars)
    return {dtype.name for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}


@pytest.mark.parametrize("model", MODELS)
def test_a_bfloat16_step_computes_products_in_bfloat16_and_the_rest_in_float32(model):
    settings, batch = MODELS[model]
    layout = make_layout()
    # The reference attention computes in float32 on purpose.
    program = make_step(
        settings, layout, precision=Precision(compute="bfloat16"), execution=Execution(kernel="xla")
    )

    def loss(state, batch):
        weights = to_compute(state.params, "bfloat16")
        return program.setup.sums(weights, state.statistics, batch, train=True)

    with layout.active():
        step = jax.make_jaxpr(program.train_step)(program.abstract_state(), batch)
        forward = jax.make_jaxpr(loss)(program.abstract_state(), batch)

    found = list(equations(step.jaxpr))
    assert dtypes_of(found, "conv_general_dilated") == (
        {"bfloat16"} if model == "resnet" else set()
    )
    # A product with a weight, or of gradients for one, has no batch dimensions; attention has.
    with_weights, attention = [], []
    for equation in found:
        if equation.primitive.name == "dot_general":
            _, batch_dimensions = equation.params["dimension_numbers"]
            (attention if batch_dimensions[0] else with_weights).append(equation)
    assert len(with_weights) >= 3
    assert dtypes_of(with_weights, "dot_general") == {"bfloat16"}
    # The gradient of float32 logits is the one float32 operand; the other is never upcast.
    for equation in attention:
        assert "bfloat16" in {v.aval.dtype.name for v in equation.invars}
    # Norms, softmax and the loss are what these are used for.
    for name in ("exp", "log", "rsqrt", "reduce_max"):
        assert dtypes_of(found, name) == {"float32"}, name
    assert dtypes_of(list(equations(forward.jaxpr)), "reduce_sum") == {"float32"}


def test_float32_islands_are_those_that_the_policy_leaves():
    """Softmax and rotations, norms and the loss; the products of the mlp in float32 alone."""

    def islands(compute: str) -> dict[str, list[str]]:
        program = make_step(
            LLAMA_MODEL, make_layout(), precision=Precision(compute=compute),
            execution=Execution(kernel="xla"),
        )  # fmt: skip
        with program.setup.layout.active():
            return float32_islands(
                jax.make_jaxpr(program.setup.gradients)(program.abstract_state(), TEXT)
            )

    found = islands("bfloat16")
    assert set(found) == {"attention", "attention/norm", "mlp/norm", "norm", "loss"}
    assert found["norm"] == found["mlp/norm"] == ["rsqrt", "sums"]
    assert {"exp", "log", "sums"} <= set(found["loss"])
    assert {"cos", "sin", "exp"} <= set(found["attention"])
    assert "products" in islands("float32")["mlp"]


@pytest.mark.parametrize("model", MODELS)
def test_parameters_moments_statistics_and_metrics_stay_float32(model):
    settings, batch = MODELS[model]
    layout = make_layout()
    program = make_step(settings, layout, precision=Precision(compute="bfloat16"))
    with layout.active():
        state, metrics, _ = jax.eval_shape(program.train_step, program.abstract_state(), batch)
    leaves = jax.tree.leaves((state.params, state.opt_state, state.statistics, metrics))
    floating = [leaf.dtype.name for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert len(floating) > 20
    assert set(floating) == {"float32"}


@pytest.mark.parametrize("model", MODELS)
def test_only_the_weights_of_products_are_cast(model):
    shapes = nnx.eval_shape(lambda: MODELS[model][0].build(jax.random.key(0)))
    params = nnx.state(shapes, nnx.Param)
    cast = jax.eval_shape(lambda params: to_compute(params, "bfloat16"), params)
    for path, variable in nnx.to_flat_state(cast):
        is_vector = any(word in str(path[-1]) for word in ("bias", "scale"))
        expected = "float32" if is_vector else "bfloat16"
        assert variable.get_value().dtype.name == expected, path


def test_bfloat16_masters_when_asked_for():
    program = make_step(GPT_MODEL, make_layout(), precision=Precision(params="bfloat16"))
    state = program.abstract_state()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"bfloat16"}


# -- loss scaling ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half():
    """A float16 step with a dynamic loss scale: (program, compiled step)."""
    layout = make_layout()
    precision = Precision(compute="float16", loss_scale="dynamic")
    program = make_step(GPT_MODEL, layout, precision=precision)
    return program, jax.jit(program.train_step)


def take_step(half, scale: float, good_steps: int = 0):
    program, step = half
    state = program.create(0)
    state = dataclasses.replace(
        state,
        step=jnp.asarray(7, jnp.int32),
        loss_scale=jnp.array([scale, good_steps], jnp.float32),
    )
    with program.setup.layout.active():
        placed = jax.device_put(TEXT, program.setup.batch_shardings(TEXT))
        return state, *step(state, placed)[:2]


def test_an_overflow_changes_nothing_but_halves_the_scale(half):
    # float16 ends at 65,504: a loss scaled by 2^40 has infinite gradients.
    old, new, metrics = take_step(half, 2.0**40, good_steps=5)
    assert metrics["skipped"] == 1
    assert not np.isfinite(metrics["grad_norm"])
    for before, after in (
        (old.params, new.params),
        (old.opt_state, new.opt_state),
        (old.statistics, new.statistics),
    ):
        jax.tree.map(np.testing.assert_array_equal, before, after)
    np.testing.assert_array_equal(new.loss_scale, [2.0**39, 0])
    assert new.step == 8


def test_a_good_step_counts_and_a_full_window_doubles_the_scale(half):
    old, new, metrics = take_step(half, 2.0**10)
    assert metrics["skipped"] == 0
    np.testing.assert_array_equal(new.loss_scale, [2.0**10, 1])
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), old.params, new.params)
    assert all(jax.tree.leaves(changed))
    _, new, _ = take_step(half, 2.0**10, good_steps=GOOD_STEPS_TO_DOUBLE - 2)
    np.testing.assert_array_equal(new.loss_scale, [2.0**10, GOOD_STEPS_TO_DOUBLE - 1])
    _, new, _ = take_step(half, 2.0**10, good_steps=GOOD_STEPS_TO_DOUBLE - 1)
    np.testing.assert_array_equal(new.loss_scale, [2.0**11, 0])


def gradients(precision: Precision):
    layout = make_layout()
    program = make_step(GPT_MODEL, layout, precision=precision)
    with layout.active():
        return jax.jit(program.setup.gradients)(program.create(0), TEXT)[:2]


# Two programs; dynamic scales are in the fast part.
@pytest.mark.slow
def test_a_fixed_scale_gives_the_gradients_and_loss_of_none():
    plain, plain_metrics = gradients(Precision(compute="float32"))
    scaled, metrics = gradients(Precision(compute="float32", loss_scale=1000.0))
    assert optax.global_norm(plain) > 0.1
    np.testing.assert_allclose(metrics["loss"], plain_metrics["loss"], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5), scaled, plain)


def test_a_state_s_scale_is_unused_without_loss_scaling():
    """As where a run in float16 goes on in float32."""
    program = make_step(GPT_MODEL, make_layout())
    with program.setup.layout.active():
        state, step = program.create(0), jax.jit(program.setup.gradients)
        plain = step(state, TEXT)[:2]
        scaled = step(state.replace(loss_scale=jnp.array([1000.0, 3.0])), TEXT)[:2]
    jax.tree.map(np.testing.assert_array_equal, scaled, plain)


def test_scaled_float16_gradients_are_near_those_of_float32():
    expected, _ = gradients(Precision(compute="float32"))
    half, _ = gradients(Precision(compute="float16", loss_scale=1024.0))
    difference = optax.global_norm(jax.tree.map(jnp.subtract, half, expected))
    # float16 rounds to 2^-11; a gradient lost to underflow would be an error of order 1.
    assert difference / optax.global_norm(expected) < 2**-7


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"compute": "float16"},
            "Precision.compute='float16' with Precision.loss_scale=None: gradients underflow; "
            "set Precision.loss_scale='dynamic' (or compute in 'bfloat16')",
        ),
        ({"loss_scale": 0.0}, "Precision.loss_scale=0.0; use a number above 0"),
        *(
            (
                {"matmul": name},
                f"Precision.matmul={name!r}: no device that multiplies block-scaled operands "
                "(NVIDIA's Blackwell) was available to test it on; use "
                "Precision.matmul='float8' or 'compute'",
            )
            for name in ("mxfp8", "nvfp4")
        ),
    ],
)
def test_refusals(changes, sentence):
    with pytest.raises(UserError) as refusal:
        Precision(**changes)
    assert str(refusal.value) == sentence
