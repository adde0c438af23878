"""Counted FLOPs equal closed forms to the last one, and XLA's own count of an unrolled program."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from conftest import make_layout, make_step, text_batch
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec as P

from jaxtrain.analysis.planning.textbook.flops import Flops, count_flops
from jaxtrain.data.batch import Batch
from jaxtrain.models.convolutional.resnet import ResNet
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.remat import POLICIES
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.pipeline.schedules import Pipeline

T, V, ROWS = 64, 512, 8


def ones(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def count(function: Any, *arguments: Any, **options: Any) -> Flops:
    return count_flops(jax.make_jaxpr(function)(*arguments), **options)


# -- single operations -----------------------------------------------------------------------------


def test_a_product_and_its_two_gradients():
    def product(x, w):
        return jnp.einsum("bij,bjk->bik", x, w)

    x, w = ones(5, 7, 11), ones(5, 11, 13)
    forward = 2 * 5 * 7 * 11 * 13
    assert count(product, x, w).matmul == forward
    gradient = jax.grad(lambda x, w: product(x, w).sum(), argnums=(0, 1))
    assert count(gradient, x, w).matmul == 3 * forward


def chain(recompute: bool):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    run = jax.checkpoint(layer, prevent_cse=False) if recompute else layer
    return jax.grad(lambda x, w: jax.lax.scan(run, x, w)[0].sum(), argnums=(0, 1))


def test_a_loop_is_multiplied_and_full_recomputation_costs_four_thirds():
    """Forward one, backward two (arXiv 2104.04473, appendix: 3x and with recomputation 4x)."""
    x, w = ones(7, 11), ones(6, 11, 11)
    forward = 6 * 2 * 7 * 11 * 11
    assert count(chain(False), x, w).matmul == 3 * forward
    assert count(chain(True), x, w).matmul == 4 * forward


def test_a_branch_counts_as_the_dearest_and_says_what_the_cheapest_costs():
    def either(yes, x):
        return jax.lax.cond(yes, lambda x: x @ x @ x, lambda x: x @ x, x)

    flops = count(either, True, ones(5, 5))
    assert (flops.matmul, flops.matmul_least) == (2 * 250, 250)


def test_a_loop_of_unknown_length_is_reported():
    def until(x):
        return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x, x)

    flops = count(jax.jit(until), ones(5, 5))
    assert flops.matmul == 250
    assert len(flops.unknown_loops) == 1
    # The trip count of this one is known.
    known = count(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x @ x, x), ones(5, 5))
    assert (known.matmul, known.unknown_loops) == (750, ())


def test_code_that_is_not_shown_is_reported():
    def outside(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((5, 5), jnp.float32), x @ x)

    flops = count(outside, ones(5, 5))
    assert (flops.matmul, flops.opaque) == (250, ("pure_callback",))


def test_called_functions_and_hand_written_gradients_are_counted():
    @jax.custom_vjp
    def square(x):
        return x @ x

    square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x + x @ g,))
    assert count(jax.jit(square), ones(5, 5)).matmul == 250
    assert count(jax.grad(lambda x: square(x).sum()), ones(5, 5)).matmul == 750


def test_the_caller_picks_scopes_inside_loops_too():
    def layer(x, _):
        with jax.named_scope("attention"):
            x = x @ x
        with jax.named_scope("mlp"):
            return x @ x @ x, None

    flops = count(
        lambda x: jax.lax.scan(layer, x, length=3)[0], ones(5, 5), choose=lambda s: "attention" in s
    )
    assert (flops.matmul, flops.chosen) == (9 * 250, 3 * 250)


def test_ragged_products_and_their_gradients_cost_what_dense_ones_do():
    def product(x, w, sizes):
        return jax.lax.ragged_dot(x, w, sizes).sum()

    x, w, sizes = ones(12, 5), ones(3, 5, 7), jax.ShapeDtypeStruct((3,), jnp.int32)
    assert count(product, x, w, sizes).matmul == 2 * 12 * 5 * 7
    assert count(jax.grad(product, argnums=(0, 1)), x, w, sizes).matmul == 3 * 2 * 12 * 5 * 7


def test_every_device_of_a_manual_region_counts_once():
    layout = make_layout(data=2, fsdp=4)

    def inner(x):
        return jax.shard_map(
            lambda x: x @ x.T, in_specs=P("fsdp"), out_specs=P("fsdp"), axis_names={"fsdp"}
        )(jax.sharding.reshard(x, P("fsdp")))

    def outer(x):
        return jax.shard_map(inner, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})(x)

    x = jax.ShapeDtypeStruct((16, 6), jnp.float32, sharding=layout.sharding_of(P("data")))
    with layout.active():
        flops = count(outer, x)
    # 8 devices, two rows each: [2, 6] x [6, 2].
    assert flops.matmul == 8 * 2 * 2 * 6 * 2


def test_elementwise_is_one_for_each_element():
    flops = count(lambda x, y: jnp.exp(x * y + 1).sum(), ones(4, 5), ones(4, 5))
    assert (flops.matmul, flops.elementwise) == (0, 4 * 20)
    assert count(lambda x: x.T.reshape(5, 4)[:2], ones(4, 5)).elementwise == 0
    assert flops.total == 80


def test_a_kernel_counts_once_for_each_place_of_its_grid():
    """Splash attention: forward 2 products; gradients 4 and 3, both making the scores again."""
    length, heads, width = 256, 2, 64
    masks = splash.splash_attention_mask.MultiHeadMask([splash.FullMask((length, length))] * heads)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes = splash.BlockSizes(**dict.fromkeys(names, 128))
    kernel = splash.make_splash_mha(masks, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    x = ones(heads, length, width)
    one = 2 * heads * length * length * width
    assert count(kernel, x, x, x).matmul == 2 * one
    gradient = jax.grad(lambda *qkv: kernel(*qkv).sum(), argnums=(0, 1, 2))
    row_sums = 2 * heads * length * width  # of output times its gradient
    assert count(gradient, x, x, x).matmul == (2 + 4 + 3) * one + row_sums


# -- convolutions ----------------------------------------------------------------------------------

CONVOLUTIONS = {
    "same": {"window_strides": (1, 1), "padding": "SAME"},
    "strided": {"window_strides": (2, 3), "padding": ((1, 1), (2, 0))},
    "dilated": {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 2)},
    "holes": {"window_strides": (1, 2), "padding": ((1, 2), (0, 1)), "lhs_dilation": (2, 3)},
    "grouped": {"window_strides": (2, 2), "padding": "SAME", "feature_group_count": 2},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_their_gradients_equal_xlas_count(name):
    options = CONVOLUTIONS[name]
    groups = options.get("feature_group_count", 1)

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, **options, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def gradient(x, kernel, cotangent):
        return jax.vjp(convolve, x, kernel)[1](cotangent)

    x, kernel = ones(2, 9, 10, 4), ones(3, 3, 4 // groups, 6)
    cotangent = jax.eval_shape(convolve, x, kernel)
    forward = count(convolve, x, kernel).matmul
    assert forward == jax.jit(convolve).lower(x, kernel).cost_analysis()["flops"]
    # The trace holds the forward pass, and each of its multiply-adds once in either gradient.
    assert count(gradient, x, kernel, cotangent).matmul == 3 * forward


def multiply_adds_by_hand(sizes: ResNet, image: int) -> tuple[int, int]:
    """Of a forward pass on one image: of the first layer, and of all; pixel by pixel."""

    def run(convolution, height):
        size, stride, half = convolution.size, convolution.stride, convolution.size // 2
        outputs = (height + 2 * half - size) // stride + 1
        met = sum(
            0 <= output * stride + place - half < height
            for output, place in itertools.product(range(outputs), range(size))
        )
        return met**2 * convolution.channels_in * convolution.channels, outputs

    first, height = run(sizes.stem, image)
    total = first
    for block in sizes.blocks():
        if block.shortcut is not None:
            total += run(block.shortcut, height)[0]
        for convolution in block.convolutions:
            products, height = run(convolution, height)
            total += products
    return first, total + sizes.features * sizes.num_classes


def test_a_resnets_step_is_three_forward_passes_less_the_gradient_of_the_images():
    sizes, image, rows = ResNet(depth=20, num_classes=10, width=4), 17, 2
    images = jax.ShapeDtypeStruct((rows, image, image, 3), jnp.float32)
    batch = Batch(
        inputs=images,
        targets=jax.ShapeDtypeStruct((rows,), jnp.int32),
        loss_mask=ones(rows),
    )
    # One CPU alone would multiply padding too: it takes kernels' gradients from patches of images.
    program = make_step(sizes, make_layout(data=2))
    with program.setup.layout.active():
        flops = count(program.train_step, program.abstract_state(), batch)
    first, total = multiply_adds_by_hand(sizes, image)
    assert flops.matmul == rows * 2 * (3 * total - first)
    # The usual formula counts products with padding too, and the gradient of the images.
    assert flops.matmul < rows * sizes.flops((image, image, 3))


# -- whole steps -----------------------------------------------------------------------------------


def gpt(D: int = 32, L: int = 2) -> GPT:
    return GPT(vocab_size=V, num_layers=L, embed_dim=D, num_heads=4, context_length=T)


def llama(D: int = 32, L: int = 2) -> Llama:
    return Llama(
        vocab_size=V, num_layers=L, embed_dim=D, num_heads=4, num_kv_heads=2, mlp_dim=3 * D,
        context_length=T,
    )  # fmt: skip


def mixtral() -> Mixtral:
    return Mixtral(
        vocab_size=V, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48,
        num_experts=4, context_length=T,
    )  # fmt: skip


MODELS = {"gpt": gpt(), "llama": llama(), "mixtral": mixtral()}


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


BATCH = abstract(text_batch(rows=ROWS, length=T, vocab_size=V))


def program_of(model: Any, *, layers_per_iteration: int = 1, remat: str = "none", **changes: Any):
    execution = Execution(
        kernel="reference", layers_per_iteration=layers_per_iteration, remat=POLICIES[remat]
    )
    layout = changes.pop("layout", None) or make_layout(data=1)
    return make_step(model, layout, execution=execution, **changes)


def count_step(program: Any, **options: Any) -> Flops:
    with program.setup.layout.active():
        return count(program.train_step, program.abstract_state(), BATCH, **options)


def closed_form(model: Any) -> float:
    """The model's own 6 N + attention, with the whole square of scores that 'reference' makes.

    Nothing else is a product: embeddings are looked up and their gradient is a scatter-add,
    biases, norms, softmax and the optimizer are elementwise.
    """
    causal = 6 * model.num_layers * T * model.embed_dim
    return (model.flops_per_token(T) + causal) * ROWS * T


@functools.cache
def plain_step(name: str) -> Flops:
    return count_step(program_of(MODELS[name]))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_the_closed_form_exactly(name):
    flops = plain_step(name)
    assert flops.matmul == flops.matmul_least == closed_form(MODELS[name])
    assert (flops.unknown_loops, flops.opaque) == ((), ())


def test_attention_scores_can_be_counted_apart():
    """The two products with keys and values: 12 L D T a token where none is masked away."""
    flops = count_step(program_of(gpt()), choose=lambda scope: "BKGTS" in scope)
    assert flops.chosen == 12 * 2 * 32 * T * ROWS * T


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_per_iteration": 0},
        {"loss": Loss(chunk_size=T)},
        {"loss": Loss(chunk_size=T), "layout": make_layout(3, fsdp=2)},
        {"accumulation": 4},
        {"layout": make_layout(3, fsdp=2, tensor=2, data=2)},
        {"layout": make_layout(2, fsdp=2, tensor=4, sequence_parallel=True)},
    ],
    ids=["unrolled", "chunked", "chunked-fsdp", "accumulated", "fsdp-tensor", "sequence"],
)
def test_how_a_step_is_laid_out_does_not_change_its_products(changes):
    flops = count_step(program_of(gpt(), **changes))
    assert flops.matmul == plain_step("gpt").matmul


def test_experts_on_several_ranks_compute_rows_that_fill_up():
    """Dropless exchanges have room for all rows of every rank: E ranks do E times the products."""
    model, ranks = MODELS["mixtral"], 4
    flops = count_step(program_of(model, layout=make_layout(expert=ranks)))
    experts = 6 * 3 * model.embed_dim * model.mlp_dim * model.experts_per_token
    filling = (ranks - 1) * experts * model.num_layers * ROWS * T
    assert flops.matmul == plain_step("mixtral").matmul + filling


def test_full_remat_makes_each_layer_again_but_for_its_last_product():
    extra = count_step(program_of(gpt(), remat="full")).matmul - plain_step("gpt").matmul
    # qkv, out and up: 3 + 1 + 4 D^2 parameters; no gradient needs what `down` gives.
    layer = 2 * (3 + 1 + 4) * 32**2 + 4 * T * 32
    assert extra == 2 * layer * ROWS * T


def test_a_pipeline_lies_between_its_cheapest_and_dearest_ticks():
    """A rank's tick does one action of several; idle ticks do none."""
    layout = make_layout(0, pipe=2)
    program = program_of(gpt(), layout=layout, pipeline=Pipeline(schedule="gpipe", microbatches=4))
    flops = count_step(program)
    assert flops.matmul_least <= plain_step("gpt").matmul < flops.matmul


@pytest.mark.parametrize(
    ("model", "remat"), [(gpt, "none"), (llama, "full")], ids=["gpt", "llama-recomputed"]
)
def test_a_step_equals_xlas_count_of_the_unrolled_program(model, remat):
    """The compiled program's arithmetic, wide enough that products are most of it. Not run."""
    program = program_of(model(D=1024), layers_per_iteration=0, remat=remat)
    with program.setup.layout.active():
        arguments = (program.abstract_state(), BATCH)
        flops = count(program.setup.gradients, *arguments)
        analysis: Any = jax.jit(program.setup.gradients).lower(*arguments).compile().cost_analysis()
    assert flops.matmul == pytest.approx(analysis["flops"], rel=0.01)
    assert flops.total == pytest.approx(analysis["flops"], rel=0.005)
    # A loop's body would have been counted once.
    looped = program_of(model(D=1024), remat=remat)
    assert count_step(looped).matmul == flops.matmul


def test_counts_add_up():
    one = Flops(4, 3, 2, 1, 5, ("loop",), ("call",))
    assert one.times(3) + one == dataclasses.replace(
        one.times(4), unknown_loops=("loop",) * 2, opaque=("call",) * 2
    )
