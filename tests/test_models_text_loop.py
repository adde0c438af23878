"""Loop and remat leave the mathematics as it is; counts of parameters and FLOPs are exact."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from conftest import text_batch
from flax import nnx
from tiny_models import LLAMA, MODELS, C, D, V, name_of, parameters, split

from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.normalization import LayerNorm, RMSNorm
from jaxtrain.nn.remat import POLICIES, Remat
from jaxtrain.parallel.axis_rules import RULES
from jaxtrain.parallel.sharding import logical_axes
from jaxtrain.training.objectives.language_modeling import NextToken
from jaxtrain.training.objectives.losses import Loss

SIZES = {
    **MODELS,
    "gpt2-124m": GPT(),
    "llama3-8b": Llama(),
    "llama3.2-1b": Llama(num_layers=16, embed_dim=2048, mlp_dim=8192, tie_embeddings=True),
}


# -- however the loop is run ----------------------------------------------------------------------

BATCH = text_batch(rows=2, length=C, vocab_size=V)


def loss_fn(name: str, execution: Execution):  # noqa: ANN201
    def loss(params):  # noqa: ANN001, ANN202
        model = nnx.merge(split(name)[0], params)
        return NextToken().sums(model, {}, BATCH, execution, Loss(), train=True)[0]["loss"]

    return loss


@functools.cache
def loss_and_grads(name: str, execution: Execution) -> Any:
    return jax.jit(jax.value_and_grad(loss_fn(name, execution)))(split(name)[1])


@pytest.mark.slow_cases(
    "gpt-dots-1",
    "gpt-full-0",
    "llama-offload-1",
    "gpt-none-2",
    "llama-elementwise-0",
    "llama-full-1",
    "llama-none-0",
    "llama-full-2",
)
@pytest.mark.parametrize(
    ("name", "remat", "layers_per_iteration"),
    [
        ("gpt", "none", 2),
        ("gpt", "dots", 1),
        ("gpt", "elementwise", 1),
        ("llama", "elementwise", 0),
        ("gpt", "full", 0),
        ("llama", "none", 0),
        ("llama", "full", 1),
        ("llama", "full", 2),
        ("llama", "offload", 1),
        ("llama", Remat(policy="full", save=("query", "attention"), offload=("mlp_up",)), 1),
        ("gpt", Remat(policy="dots", offload=("attention", "mlp_up", "residual")), 1),
    ],
)
def test_loop_and_remat_do_not_change_the_mathematics(
    name: str, remat: str | Remat, layers_per_iteration: int
) -> None:
    policy = POLICIES[remat] if isinstance(remat, str) else remat.kept
    execution = Execution(remat=policy, layers_per_iteration=layers_per_iteration)
    loss, grads = loss_and_grads(name, execution)
    expected_loss, expected_grads = loss_and_grads(name, Execution())
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)

    def equal(path, found, expected):  # noqa: ANN001, ANN202
        # In the norm, as roundings add up; a single element's may be of terms that cancel.
        apart = np.linalg.norm(np.asarray(found, np.float64) - np.asarray(expected, np.float64))
        assert apart <= 2e-6 * np.linalg.norm(expected), name_of(path)

    jax.tree_util.tree_map_with_path(equal, grads, expected_grads)


def kept_for_backward(name: str, remat: str, layers_per_iteration: int) -> list[Any]:
    """Abstract values of what the backward pass is handed, besides what is no activation."""
    execution = Execution(remat=POLICIES[remat], layers_per_iteration=layers_per_iteration)
    loss = loss_fn(name, execution)
    kept = jax.tree.leaves(jax.eval_shape(lambda params: jax.vjp(loss, params)[1], split(name)[1]))
    weights = {v.get_value().shape for v in parameters(MODELS[name]).values()}
    return [x for x in kept if x.shape not in weights]


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_remat_keeps_what_it_says(name: str) -> None:
    layers, rows = MODELS[name].num_layers, BATCH.inputs.shape
    size = {
        policy: sum(x.size for x in kept_for_backward(name, policy, 1))
        for policy in ("none", "elementwise", "dots", "full")
    }
    assert size["none"] > size["elementwise"] > size["dots"] > size["full"]

    def of_layers(policy: str) -> list[tuple[int, ...]]:
        return [x.shape for x in kept_for_backward(name, policy, 1) if x.shape[:1] == (layers,)]

    # 'full': the stacked inputs of the layers and nothing else of them.
    assert of_layers("full") == [(layers, *rows, D)]
    # 'dots': products with weights, but not the attention weights of all pairs of places.
    squares = {
        policy: [shape for shape in of_layers(policy) if shape.count(C) > 1]
        for policy in ("none", "dots")
    }
    assert squares["none"]
    assert not squares["dots"]
    assert of_layers("offload") == [(layers, *rows, D)]


def test_what_is_kept_between_the_products_of_an_mlp() -> None:
    """The result of `up`, and by 'none' its gelu, which the gradient of `down` reads."""
    hidden = (MODELS["gpt"].num_layers, *BATCH.inputs.shape, 4 * D)
    kept = {
        policy: sum(x.size == np.prod(hidden) for x in kept_for_backward("gpt", policy, 1))
        for policy in ("none", "elementwise")
    }
    assert kept == {"none": 2, "elementwise": 1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_keeps_its_input_and_two_numbers_a_row(dtype: str) -> None:
    """In the input's dtype, not in the float32 that it is computed in; its parameters besides."""
    x = jax.ShapeDtypeStruct((2, 6, D), dtype)
    for norm, numbers in ((LayerNorm(dim=D, epsilon=1e-5), 2), (RMSNorm(dim=D, epsilon=1e-5), 1)):
        own = norm.weights(jax.random.key(0))
        kept = jax.eval_shape(lambda x, norm=norm, own=own: jax.vjp(
            lambda x: norm(own, x), x)[1], x)  # fmt: skip
        shapes = sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(kept))
        assert shapes == sorted(
            [(x.shape, dtype), *[((2, 6, 1), "float32")] * numbers,
             *[((D,), "float32")] * len(own)]
        )  # fmt: skip


# The cases that are left run the same code.
@pytest.mark.slow_cases("1", "0")
@pytest.mark.parametrize("layers_per_iteration", [1, 2, 0])
def test_the_program_shows_the_remat(layers_per_iteration: int) -> None:
    def text(remat: str) -> str:
        execution = Execution(remat=POLICIES[remat], layers_per_iteration=layers_per_iteration)
        return str(jax.make_jaxpr(jax.grad(loss_fn("llama", execution)))(split("llama")[1]))

    assert "remat" not in text("none")
    for policy in ("elementwise", "dots", "full", "offload"):
        assert "remat" in text(policy)
    assert "host" not in text("full")
    assert "host" in text("offload")


# -- closed forms ---------------------------------------------------------------------------------


def test_parameter_counts_are_the_published_ones() -> None:
    counts = {
        name: sum(v.get_value().size for v in parameters(SIZES[name]).values())
        for name in ("gpt2-124m", "llama3-8b", "llama3.2-1b")
    }
    # As transformers counts openai-community/gpt2, Meta-Llama-3-8B and Llama-3.2-1B.
    assert counts == {
        "gpt2-124m": 124_439_808, "llama3-8b": 8_030_261_248, "llama3.2-1b": 1_235_814_400,
    }  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_matmul_parameters_are_the_matrices(name: str) -> None:
    sizes = SIZES[name]
    matrices = {
        path: variable.get_value().size
        for path, variable in parameters(sizes).items()
        if not path.endswith(("scale", "bias")) and path != "position_embedding"
    }
    if "output" in matrices:
        del matrices["token_embedding"]  # rows are looked up, not multiplied
    assert sizes.matmul_parameters() == sum(matrices.values())


def product_flops(jaxpr: Any) -> int:
    """Multiplications and additions of all matrix products in a program."""
    total = 0
    for equation in jaxpr.eqns:
        assert equation.primitive.name not in ("scan", "while"), "a loop would be counted once"
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            depth = int(np.prod([left[axis] for axis in contracted]))
            total += 2 * depth * equation.outvars[0].aval.size
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                total += product_flops(value.jaxpr)
    return total


@pytest.mark.parametrize("name", ["gpt", "llama", "llama-tied"])
def test_flops_are_those_of_the_program(name: str) -> None:
    sizes = MODELS[name]
    execution = Execution(kernel="reference", layers_per_iteration=0)
    jaxpr = jax.make_jaxpr(jax.grad(loss_fn(name, execution)))(split(name)[1])
    # The reference computes the whole square of which causal attention needs half.
    unneeded = 12 * sizes.num_layers * (C / 2) * D
    counted = product_flops(jaxpr.jaxpr) / BATCH.inputs.size
    assert sizes.flops_per_token(C) == counted - unneeded


def test_flops_of_a_window_count_the_keys_it_leaves() -> None:
    T, window = 64, 24
    seen = np.asarray(Mask(window=window).visible(T, T)).sum() / T
    wide, narrow = LLAMA(), LLAMA(sliding_window=window)
    all_keys, keys = (
        (sizes.flops_per_token(T) - 6 * sizes.matmul_parameters()) / (12 * sizes.num_layers * D)
        for sizes in (wide, narrow)
    )
    assert all_keys == T / 2
    # The closed form leaves out the half key by which the diagonal sticks out.
    assert seen - 0.5 <= keys <= seen
    assert LLAMA(sliding_window=T).flops_per_token(T) == wide.flops_per_token(T)


@pytest.mark.parametrize("name", MODELS)
def test_every_axis_that_may_be_sharded_has_a_setting(name: str) -> None:
    sizes = MODELS[name]
    for path, variable in parameters(sizes).items():
        for axis, size in zip(logical_axes(variable), variable.get_value().shape, strict=True):
            if RULES[axis][0] is not None:
                assert size % getattr(sizes, sizes.settings[axis]) == 0, path


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            lambda: GPT(embed_dim=100, num_heads=12),
            "GPT.embed_dim=100 does not divide by GPT.num_heads=12; the nearest embed_dim is 96",
        ),
        (
            lambda: Llama(embed_dim=100, num_heads=12, num_kv_heads=4),
            "Llama.embed_dim=100 does not divide by twice Llama.num_heads=12; the nearest "
            "embed_dim is 96",
        ),
        (
            lambda: Llama(num_heads=32, num_kv_heads=7),
            "Llama.num_kv_heads=7 does not divide Llama.num_heads=32; the nearest "
            "num_kv_heads is 8",
        ),
        (
            lambda: Llama(sliding_window=0),
            "Llama.sliding_window=0; use None or at least 1 token",
        ),
        (lambda: Llama(rope_scaling=0.5), "Llama.rope_scaling=0.5; use 1.0 (none) or more"),
        (
            lambda: Llama(rope_low_frequency_factor=4.0),
            "Llama.rope_low_frequency_factor=4.0 is not below "
            "Llama.rope_high_frequency_factor=4.0 and above 0; Llama 3.1 has 1.0 and 4.0, YaRN "
            "1.0 and 32.0",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, sentence: str) -> None:  # noqa: ANN001
    with pytest.raises(UserError) as error:
        sizes()
    assert str(error.value) == sentence
