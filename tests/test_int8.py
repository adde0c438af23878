"""Int8 products: each within the error of its rows, the same on every mesh, kept as others are."""

import collections
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lower_step, make_layout, make_step, needs_libtpu, text_batch
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from test_float8 import dtypes_of_products
from test_tensor_layouts import grid

from jaxtrain.analysis.planning.compiled.collectives import collectives
from jaxtrain.analysis.planning.machines.targets import (
    compiler_options,
    parse_target,
    target_devices,
)
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.matmul.contract import contract, einsum_of, sides
from jaxtrain.nn.matmul.eight_bit import int8_einsum, quantize_int8
from jaxtrain.nn.precision import Precision
from jaxtrain.nn.remat import POLICIES, RESIDUAL, remat
from jaxtrain.parallel.mesh import Mesh, make_mesh
from jaxtrain.parallel.sharding import Layout, Sharding, shard

MODEL = GPT(vocab_size=32, num_layers=2, embed_dim=32, num_heads=4, context_length=16)
BATCH = text_batch(rows=8, length=16, vocab_size=32)
INT8 = Execution(kernel="reference", einsum=int8_einsum)
STREAM = ("batch", "residual_length", "embed")


def error_of(x: np.ndarray, summed: list[int]) -> np.ndarray:
    """The most that each element of a row may be off: half of the row's step."""
    largest = np.abs(x).max(tuple(summed), keepdims=True)
    return np.broadcast_to(largest / 127 / 2 * (1 + 1e-5), x.shape)


# -- one array, one product ------------------------------------------------------------------------


def test_a_row_is_rounded_as_pytorch_rounds_a_channel():
    """Quarters of a step: ties too, which go to the even one. Steps are powers of two."""
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    rng = np.random.default_rng(0)
    steps = 2.0 ** rng.integers(-20, 20, 24).astype(np.float32)
    x = rng.integers(-4 * 127, 4 * 127 + 1, (24, 500)).astype(np.float32) / 4
    x[:, 7] = -127.0
    x = x * steps[:, None]
    found, scale = quantize_int8(jnp.asarray(x), [1])
    np.testing.assert_array_equal(scale, steps)
    zeros = torch.zeros(24, dtype=torch.int32)
    expected = torch.fake_quantize_per_channel_affine(
        torch.from_numpy(x), torch.from_numpy(steps), zeros, 0, -128, 127
    )
    np.testing.assert_array_equal(found * steps[:, None], expected.numpy())
    assert found.min() == -127


def test_rows_are_scaled_each_for_itself():
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(6, 64, 5)) * 10.0 ** rng.uniform(-6, 6, (6, 1, 5))).astype(np.float32)
    found, scale = quantize_int8(jnp.asarray(x), [1])
    assert scale.shape == (6, 5)
    np.testing.assert_array_equal(np.abs(np.asarray(found, np.int32)).max(1), 127)
    back = np.asarray(found, np.float64) * np.asarray(scale)[:, None]
    assert (np.abs(back - x) <= error_of(x, [1])).all()
    # Not vacuous: these are steps of a 127th.
    assert (np.abs(back - x) / error_of(x, [1])).max() > 0.95


EQUATIONS = {
    "BTD,PDNH->PBTNH": ((2, 8, 16), (3, 16, 4, 4)),
    "BTNH,NHD->BTD": ((2, 8, 4, 4), (4, 4, 16)),
    "BTD,DF->BTF": ((2, 8, 16), (16, 24)),
    "RF,FD->RD": ((16, 24), (24, 16)),
}


def product_and_gradients(equation, x, weight, gradient=None):
    y, transpose = jax.vjp(lambda *both: int8_einsum(equation, *both, None), x, weight)
    gradient = jnp.ones_like(y) if gradient is None else gradient
    return y, *transpose(gradient)


def sizes(rng, letters: str, shape: tuple[int, ...], rows: str) -> np.ndarray:
    """A number between 1/1000 and 1000 for every row."""
    return 10.0 ** rng.uniform(-3, 3, [n if letters[i] in rows else 1 for i, n in enumerate(shape)])


# The cases that are left run the same code.
@pytest.mark.slow_cases("BTD,DF->BTF", "RF,FD->RD")
@pytest.mark.parametrize("equation", EQUATIONS)
def test_product_and_gradients_are_within_the_error_of_their_operands(equation):
    """Tokens and channels of very different sizes: a scale for all of them would not do."""
    rng = np.random.default_rng(1)
    left, right, result = sides(equation)
    x, weight = (rng.normal(size=s).astype(np.float32) for s in EQUATIONS[equation])
    x *= sizes(rng, left, x.shape, result)
    shape = np.einsum(equation, x, weight).shape
    gradient = rng.normal(size=shape).astype(np.float32)
    gradient *= sizes(rng, result, shape, left)
    y, of_x, of_weight = product_and_gradients(equation, *map(jnp.asarray, (x, weight, gradient)))
    for found, of, a, b in (
        (y, equation, x, weight),
        (of_x, f"{result},{right}->{left}", gradient, weight),
    ):
        first, second, _ = sides(of)
        summed = [letter for letter in first if letter in second]
        a_error = error_of(a, [first.index(letter) for letter in summed])
        b_error = error_of(b, [second.index(letter) for letter in summed])
        exact = np.einsum(of, a.astype(np.float64), b)
        a, b = np.abs(a.astype(np.float64)), np.abs(b)
        bound = np.einsum(of, a, b_error) + np.einsum(of, a_error, b + b_error)
        error = np.abs(np.asarray(found, np.float64) - exact)
        assert (error <= bound).all()
        # Not vacuous: in the worst place it is more than a fiftieth of what it may be.
        assert (error / bound).max() > 0.02
    exact = np.einsum(f"{left},{result}->{right}", x.astype(np.float64), gradient)
    np.testing.assert_allclose(of_weight, exact, rtol=1e-5, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_in_the_product(value):
    """In the rows and columns that it is part of, and in no others."""
    bad = jnp.ones((4, 8)).at[1, 2].set(value)
    weight = jnp.ones((8, 5))
    y, of_x, _ = product_and_gradients("RD,DF->RF", bad, weight)
    assert (~np.isfinite(y)).all(1).tolist() == [False, True, False, False]
    assert np.isfinite(np.delete(y, 1, 0)).all()
    assert np.isfinite(of_x).all()
    y, of_x, _ = product_and_gradients("RD,DF->RF", jnp.ones((3, 8)), bad.T)
    assert (~np.isfinite(y)).all(0).tolist() == [False, True, False, False]
    assert (~np.isfinite(of_x)).all(0).tolist() == [place == 2 for place in range(8)]


def test_rows_of_zeros_stay_zero():
    x = jnp.ones((4, 8)).at[1].set(0).at[2].set(1e-38)
    y, of_x, _ = product_and_gradients("RD,DF->RF", x, jnp.zeros((8, 5)).at[:, 1].set(3.0))
    np.testing.assert_allclose(y[:, 1], [24, 0, 0, 24], rtol=1e-6, atol=1e-30)
    assert not np.delete(y, 1, 1).any()
    np.testing.assert_allclose(of_x, 3.0, rtol=1e-6)
    # What is divided by is a number even so: not every device makes 0 of a NaN.
    assert np.isfinite(1 / quantize_int8(x, [1])[1]).all()


def test_what_int32_cannot_hold_is_refused():
    x, weight = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 133_145), (133_145, 1)))
    sentence = (
        "Precision.matmul='int8': int32 holds the sum of 133,144 products, and 'RD,DF->RF' adds up "
        "133,145; use Precision.matmul='compute'"
    )
    with pytest.raises(UserError, match=re.escape(sentence)):
        jax.eval_shape(lambda *both: int8_einsum("RD,DF->RF", *both, None), x, weight)


# -- on a mesh -------------------------------------------------------------------------------------


def layouts() -> dict:
    sizes = {
        "fsdp": dict(fsdp=8, zero=2),
        "tensor": dict(fsdp=4, tensor=2),
        "sequence": dict(fsdp=2, tensor=4, sequence_parallel=True),
        "context": dict(fsdp=2, context=2, tensor=2, sequence_parallel=True),
    }
    found = {name: lambda of=of: make_layout(**of) for name, of in sizes.items()}
    grids = ("2d", "2d_fsdp", "2.5d", "3d")
    return found | {name: lambda name=name: grid(name) for name in grids}


LAYOUTS = layouts()


def two_products(dtype):
    """Up and down with one element far larger than all others in each operand, and the loss."""
    rng = np.random.default_rng(2)
    x, up, down = (rng.normal(size=s).astype(np.float32) for s in ((8, 8, 16), (16, 24), (24, 16)))
    x[5, 3, 2] = up[2, 7] = down[3, 5] = 300.0
    params = [
        nnx.Param(jnp.asarray(value, dtype), axes=axes)
        for value, axes in ((up, ("embed", "mlp")), (down, ("mlp", "embed")))
    ]

    def loss(x, up, down):
        h = INT8.contract("BTD,DF->BTF", shard(x, ("batch", "length", "embed")), up)
        x = INT8.contract("BTF,FD->BTD", h, down, STREAM)
        return (x.astype(jnp.float32) * jnp.cos(jnp.arange(x.size).reshape(x.shape))).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2)), jnp.asarray(x, dtype), params


def on_layout(layout, gradient, x, params):
    with layout.active():
        placed = [
            p.replace(jax.device_put(p.get_value(), layout.sharding_of(layout.parameter(p.axes))))
            for p in params
        ]
        rows = jax.device_put(x, layout.sharding_of(layout.activation(STREAM)))
        return jax.tree.leaves(jax.jit(gradient)(rows, *placed))


@pytest.mark.parametrize("name", LAYOUTS)
def test_products_on_a_mesh_are_those_of_one_device(name):
    """Scales of parts of a row would be other scales."""
    gradient, x, params = two_products("float32")
    expected = jax.tree.leaves(jax.jit(gradient)(x, *params))
    for one, other in zip(on_layout(LAYOUTS[name](), gradient, x, params), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("name", ["tensor", "sequence"])
def test_bfloat16_sums_between_devices_are_near(name):
    gradient, x, params = two_products("bfloat16")
    expected = jax.tree.leaves(jax.jit(gradient)(x, *params))
    for one, other in zip(on_layout(LAYOUTS[name](), gradient, x, params), expected, strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        # A few roundings to 8 bits: the product's, and that of each device's part.
        np.testing.assert_allclose(one, other, rtol=0, atol=2**-6 * np.abs(other).max())


# -- a model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"tensor": 2}], ids=str)
def test_two_of_three_products_of_the_layers_are_int8_and_no_others(sizes):
    layout, found = make_layout(**sizes), {}
    for matmul in ("compute", "int8"):
        settings = Precision(compute="bfloat16", matmul=matmul)
        execution = dataclasses.replace(INT8, einsum=einsum_of(matmul))
        program = make_step(MODEL, layout, precision=settings, execution=execution)
        with layout.active():
            step = jax.make_jaxpr(program.train_step)(program.abstract_state(), BATCH)
        found[matmul] = collections.Counter(dtypes_of_products(step.jaxpr))
    products = 4  # queries, keys and values together; out; up; down: in a loop over layers
    in_int8 = ("int8", "int8", "int32")
    assert found["int8"][in_int8] == 2 * products
    # In bfloat16: the weights' gradients, the head, attention's scores.
    found["compute"]["bfloat16", "bfloat16", "bfloat16"] -= 2 * products
    assert found["int8"] - collections.Counter({in_int8: 2 * products}) == found["compute"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_what_is_kept_is_what_is_kept_otherwise(sizes, policy):
    """The same arrays of the same dtypes, so no int32 sums, which are twice as large."""
    x = jnp.ones((4, 8, 16), jnp.bfloat16)
    params = [
        nnx.Param(jnp.ones(shape, jnp.bfloat16), axes=axes)
        for shape, axes in (((16, 24), ("embed", "mlp")), ((24, 16), ("mlp", "embed")))
    ]

    def kept(matmul):
        def mlp(x, up, down):
            x = shard(checkpoint_name(x, RESIDUAL), ("batch", "length", "embed"))
            h = jax.nn.gelu(contract("BTD,DF->BTF", x, up, by=einsum_of(matmul)))
            return jnp.sin(contract("BTF,FD->BTD", h, down, STREAM, by=einsum_of(matmul)))

        layer = remat(mlp, POLICIES[policy], prevent_cse=False)
        back = jax.eval_shape(lambda *given: jax.vjp(layer, *given)[1], x, *params)
        return collections.Counter((a.shape, a.dtype.name) for a in jax.tree.leaves(back))

    with make_layout(**sizes).active():
        assert kept("int8") == kept("compute")


def test_loss_scaling_does_for_float16_what_it_does_otherwise():
    """Sums are scaled before they are cast, so none is beyond 65,504 that float16 has not got."""
    found = {}
    for matmul in ("compute", "int8"):
        settings = Precision(compute="float16", loss_scale=2.0**15, matmul=matmul)
        execution = dataclasses.replace(INT8, einsum=einsum_of(matmul))
        program = make_step(MODEL, make_layout(fsdp=1), precision=settings, execution=execution)
        batch = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
        with program.setup.layout.active():
            grads, metrics, _ = jax.jit(program.setup.gradients)(program.create(0), batch)
        norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
        found[matmul] = np.array([metrics["loss"], norm])
    assert np.isfinite(found["int8"]).all()
    assert (found["int8"] != found["compute"]).any()
    np.testing.assert_allclose(found["int8"], found["compute"], rtol=0.02)


# -- what a TPU's compiler makes of it -------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled_step() -> tuple[str, dict[str, int]]:
    """The train step of a Llama whose sums are split and scattered over `tensor`, and the mesh."""
    target = parse_target("v5e:2x2")
    mesh = make_mesh(Mesh(fsdp=2, tensor=2), target_devices(target))
    layout = Layout.of(mesh, Sharding(sequence_parallel=True))
    model = Llama(
        vocab_size=128, num_layers=2, embed_dim=256, num_heads=4, num_kv_heads=4, mlp_dim=512,
        context_length=128,
    )  # fmt: skip
    program = make_step(
        model,
        layout,
        precision=Precision(compute="bfloat16", matmul="int8"),
        execution=INT8,
    )
    lowered = lower_step(program, text_batch(rows=8, length=128, vocab_size=128))
    quick: Any = {**compiler_options(target), "exec_time_optimization_effort": -1.0}
    return lowered.compile(quick).as_text(), dict(mesh.shape)


@pytest.mark.slow
@needs_libtpu
def test_the_tpu_compiler_multiplies_int8(compiled_step):
    text, _ = compiled_step
    dtypes = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    products = re.findall(r"= (\w+)\[[^=]* convolution\((%[\w.-]+), (%[\w.-]+)\)", text)
    found = collections.Counter((dtypes[a], dtypes[b], result) for result, a, b in products)
    layer = 7  # products, each forward and for its activation; the loop's body stands once
    assert {kinds: n for kinds, n in found.items() if "s8" in kinds} == {
        ("s8", "s8", "s32"): 2 * layer
    }
    # The weights' gradients, and the head's three.
    assert sum(n for kinds, n in found.items() if kinds[:2] == ("bf16", "bf16")) == layer + 3


# A TPU program; products on meshes are in the fast part.
@pytest.mark.slow
@needs_libtpu
def test_sums_of_activations_go_from_device_to_device_in_bfloat16(compiled_step):
    """As many as without int8, and beside them the rows' largest elements."""
    moved = [one for one in collectives(*compiled_step) if one.axis == "tensor" and one.count == 2]
    assert {one.dtype for one in moved} == {"bf16"}
    B, T, D = 4, 128, 256
    sums = [one.shape for one in moved if one.kind == "reduce-scatter"]
    assert sums == [(B, T, D)] * 4  # attention and mlp, forward and backward
    largest = collections.Counter(one.shape for one in moved if one.kind == "all-reduce")
    # Forward of out and down; backward of queries, keys, values, gate and up.
    assert largest == {(B, T): 2 + 5, (D,): 2 + 5}
