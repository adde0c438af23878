"""Float8 products: each within the format's error, the same on every mesh, and learning alike."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_experts
from conftest import make_layout, make_step, text_batch
from flax import nnx
from jax.extend.core import jaxprs_in_params

from jaxtrain.analysis.planning.machines.targets import (
    compiler_options,
    parse_target,
    target_devices,
)
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.matmul.contract import einsum_of
from jaxtrain.nn.matmul.eight_bit import E4M3, E5M2, float8_einsum, over_batch, quantize_float8
from jaxtrain.nn.matmul.grouped import Grouped
from jaxtrain.nn.precision import Precision
from jaxtrain.parallel.mesh import Mesh, make_mesh
from jaxtrain.parallel.sharding import Layout, Sharding
from jaxtrain.training.compiled_step import CompiledStep

# Of both formats: half a step relative to the number, and half a step where numbers are so small
# that the steps no longer shrink with them (OCP's "8-bit Floating Point Specification").
ROUNDING = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}
MODEL = GPT(vocab_size=32, num_layers=2, embed_dim=32, num_heads=4, context_length=16)
BATCH = text_batch(rows=8, length=16, vocab_size=32)
FLOAT8 = Execution(kernel="reference", einsum=float8_einsum)


def error_of(x, dtype) -> np.ndarray:
    """The most that each element may be off after rounding."""
    relative, smallest = ROUNDING[dtype]
    x = np.abs(np.asarray(x, np.float64))
    scale = x.max() / float(jnp.finfo(dtype).max)
    return np.maximum(relative * x, smallest * scale) * (1 + 1e-6)


# -- one array, one product ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_an_array_is_scaled_to_its_format_and_rounded_to_nearest(dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(64, 32)) * 10.0 ** rng.uniform(-6, 3, (64, 32))).astype(np.float32)
    found, scale = quantize_float8(jnp.asarray(x), dtype)
    largest = float(ml_dtypes.finfo(dtype).max)
    assert np.abs(np.asarray(found, np.float32)).max() == largest
    np.testing.assert_allclose(float(scale), np.abs(x).max() / largest, rtol=1e-6)
    back = np.asarray(found, np.float64) * float(scale)
    assert (np.abs(back - x) <= error_of(x, dtype)).all()
    # Not vacuous: this is rounding to a few bits.
    assert np.abs(back / x - 1)[np.abs(x) > 1].max() > ROUNDING[dtype][0] / 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_in_the_product(value):
    x = jnp.ones((4, 8)).at[1, 2].set(value)
    assert jnp.isnan(float8_einsum("RD,DF->RF", x, jnp.ones((8, 4)), None)).any()


def test_an_array_of_zeros_stays_zero():
    for dtype in (E4M3, E5M2):
        found, scale = quantize_float8(jnp.zeros((4, 4)), dtype)
        assert not np.asarray(found, np.float32).any()
        assert np.isfinite(1 / scale)


EQUATIONS = {
    "BTD,PDNH->PBTNH": ((2, 8, 16), (3, 16, 4, 4)),
    "BTNH,NHD->BTD": ((2, 8, 4, 4), (4, 4, 16)),
    "BTD,DF->BTF": ((2, 8, 16), (16, 24)),
    "RF,FD->RD": ((16, 24), (24, 16)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_product_and_gradients_are_within_the_error_of_their_operands(equation):
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in EQUATIONS[equation])
    inputs, result = equation.split("->")
    left, right = inputs.split(",")
    y, transpose = jax.vjp(lambda x, w: float8_einsum(equation, x, w, None), x, w)
    g = jnp.asarray(rng.normal(size=y.shape), jnp.float32)
    dx, dw = transpose(g)
    for found, of, a, b in (
        (y, equation, (x, E4M3), (w, E4M3)),
        (dx, f"{result},{right}->{left}", (g, E5M2), (w, E4M3)),
        (dw, f"{left},{result}->{right}", (x, E4M3), (g, E5M2)),
    ):
        (a, a_dtype), (b, b_dtype) = a, b
        exact = np.einsum(of, np.asarray(a, np.float64), np.asarray(b, np.float64))
        a_error, b_error = error_of(a, a_dtype), error_of(b, b_dtype)
        a, b = np.abs(a), np.abs(b)
        bound = sum(np.einsum(of, *pair) for pair in ((a, b_error), (a_error, b + b_error)))
        error = np.abs(np.asarray(found, np.float64) - exact)
        assert (error <= bound).all()
        # Not vacuous: float32's own error is a thousandth of this.
        assert error.max() > 1e-3 * np.abs(exact).max()


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"fsdp": 8, "zero": 2}], ids=str)
def test_a_product_on_a_mesh_is_that_of_one_device(sizes):
    """One element is far larger than all others: scales of parts would be other scales."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(8, 8, 16)).astype(np.float32)
    x[5, 3, 2] = 300.0
    weights = {
        ("embed", "mlp"): ("BTD,DF->BTF", rng.normal(size=(16, 24)), None),
        ("mlp", "embed"): ("BTF,FD->BTD", rng.normal(size=(24, 16)), ("batch", "length", "embed")),
    }

    def both(x, up, down):
        for param, (equation, _, out) in zip((up, down), weights.values(), strict=True):
            x = FLOAT8.contract(equation, x, param, out)
        return (x * jnp.cos(jnp.arange(x.size).reshape(x.shape))).sum()

    params = [
        nnx.Param(jnp.asarray(value, jnp.float32), axes=axes)
        for axes, (_, value, _) in weights.items()
    ]
    gradient = jax.value_and_grad(both, argnums=(0, 1, 2))
    expected = jax.jit(gradient)(x, *params)
    layout = make_layout(**sizes)
    with layout.active():
        placed = [
            p.replace(jax.device_put(p.get_value(), layout.sharding_of(layout.parameter(axes))))
            for p, axes in zip(params, weights, strict=True)
        ]
        rows = jax.device_put(
            x, layout.sharding_of(layout.activation(("batch", "length", "embed")))
        )
        found = jax.jit(gradient)(rows, *placed)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


# -- experts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [False, True])
def test_products_of_experts_are_within_the_error_of_their_operands(slots):
    """Of 3, 0 and 5 rows; of 4 slots each."""
    rng = np.random.default_rng(3)
    sizes = None if slots else jnp.array([3, 0, 5], jnp.int32)
    x = rng.normal(size=(3, 4, 16) if slots else (8, 16))
    w = rng.normal(size=(3, 16, 12)) * [[[0.1]], [[1.0]], [[3.0]]]
    x, w = (jnp.asarray(a, jnp.float32) for a in (x, w))
    y, transpose = jax.vjp(lambda x, w: Grouped(float8=True)(x, w, sizes), x, w)
    g = jnp.asarray(rng.normal(size=y.shape), jnp.float32)
    dx, dw = transpose(g)

    def apart(a) -> np.ndarray:
        """Rows as all experts' slots, zeros in those of others."""
        a = np.asarray(a, np.float64)
        if slots:
            return a
        ends = np.cumsum([0, 3, 0, 5])
        own = [(np.arange(8) >= ends[e]) & (np.arange(8) < ends[e + 1]) for e in range(3)]
        return np.stack([np.where(mine[:, None], a, 0.0) for mine in own])

    for found, of, a, b in (
        (y, "esk,ekm->esm", (x, E4M3), (w, E4M3)),
        (dx, "esm,ekm->esk", (g, E5M2), (w, E4M3)),
        (dw, "esk,esm->ekm", (x, E4M3), (g, E5M2)),
    ):
        (a, a_error), (b, b_error) = (
            [one if one.shape == w.shape else apart(one) for one in (v, error_of(v, dtype))]
            for v, dtype in (a, b)
        )
        found = np.asarray(found, np.float64) if found.shape == w.shape else apart(found)
        exact = np.einsum(of, a, b)
        a, b = np.abs(a), np.abs(b)
        bound = sum(np.einsum(of, *pair) for pair in ((a, b_error), (a_error, b + b_error)))
        error = np.abs(found - exact)
        assert (error <= bound + 1e-5 * np.abs(exact).max() * (bound > 0)).all()
        assert error.max() > 1e-3 * np.abs(exact).max()


@pytest.mark.slow_cases("None")
@pytest.mark.parametrize("capacity_factor", [None, 2.0])
def test_experts_on_a_mesh_are_those_of_one_device(capacity_factor):
    """One element is far larger than all others: scales of parts would be other scales."""
    part, own = test_experts.experts(capacity_factor)
    x = jnp.concatenate([test_experts.X, test_experts.X])[:4].at[2, 3, 1].set(40.0)

    def run(by):
        def of(weights, x):
            given = {name: own[name].replace(value) for name, value in weights.items()}
            execution = Execution(grouped=by)
            return part({"experts": given}, x, Mask(), execution, out=test_experts.OUT)[0]

        return test_experts.outcome(of, test_experts.values(own), x)

    def apart(found, expected) -> float:
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        return max(
            float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(b))
            for a, b in pairs
        )

    expected = run(Grouped(float8=True))
    with make_layout(expert=2, fsdp=2, tensor=2).active():
        found = run(Grouped(float8=True))
    assert apart(found, expected) < 2e-3
    assert apart(expected, run(Grouped())) > 1e-2


def test_rows_that_are_elsewhere_count_in_a_scale():
    """Where gradients are summed once a step, devices along `data` see their own rows alone."""
    x = np.ones((8, 4), np.float32)
    x[7, 1] = 448.0 * 3
    layout = make_layout(data=2)
    inside = dataclasses.replace(layout, manual=frozenset({"data"}), one_batch=frozenset({"data"}))

    def scale(part):
        with inside.current():
            return quantize_float8(part, E4M3, over_batch())[1]

    over = jax.P("data")
    found = jax.shard_map(
        lambda part: scale(part)[None], mesh=layout.mesh, in_specs=over, out_specs=over,
        axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    np.testing.assert_allclose(jax.jit(found)(x), [3.0, 3.0])


# -- a model ---------------------------------------------------------------------------------------


def dtypes_of_products(jaxpr):
    """The operands' dtypes and the result's, of every product in a jaxpr."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(v.aval.dtype.name for v in (*equation.invars, *equation.outvars))
        for inner in jaxprs_in_params(equation.params):
            yield from dtypes_of_products(inner)


def test_the_products_of_the_layers_are_float8_and_no_others():
    layout = make_layout(fsdp=2)
    settings = Precision(compute="bfloat16", matmul="float8")
    program = make_step(MODEL, layout, precision=settings, execution=FLOAT8)
    with layout.active():
        step = jax.make_jaxpr(program.train_step)(program.abstract_state(), BATCH)
    found = collections.Counter(dtypes_of_products(step.jaxpr))
    products = 4  # queries, keys and values together; out; up; down: in a loop over layers
    in_float8 = {kinds: n for kinds, n in found.items() if "float8" in kinds[0]}
    assert in_float8 == {
        ("float8_e4m3fn", "float8_e4m3fn", "bfloat16"): products,
        ("float8_e5m2", "float8_e4m3fn", "bfloat16"): products,
        ("float8_e4m3fn", "float8_e5m2", "bfloat16"): products,
    }
    # The head: logits, and the gradients of both its operands.
    assert sum(n for kinds, n in found.items() if kinds[:2] == ("bfloat16", "bfloat16")) >= 3


def test_float16_is_too_narrow_for_the_sums():
    with pytest.raises(UserError, match="beyond float16's 65,504"):
        Precision(compute="float16", loss_scale="dynamic", matmul="float8")


# -- what a GPU's compiler makes of it -------------------------------------------------------------


def operands_of_products(text):
    """The dtypes of both operands of every product that is still one in a compiled program."""
    for computation in text.split("\n}\n"):
        dtypes = dict(re.findall(r"%([\w.-]+) = (\w+)\[", computation))
        for a, b in re.findall(r" dot\(%([\w.-]+), %([\w.-]+)\)", computation):
            yield dtypes[a], dtypes[b]


def lower_for(target, matmul):
    """The step of a small Llama with products of 8 bits, sharded over all of a target's devices."""
    layout = Layout.of(make_mesh(Mesh(fsdp=8), target_devices(target)), Sharding(zero=3))
    model = Llama(
        vocab_size=128, num_layers=2, embed_dim=256, num_heads=4, num_kv_heads=4, mlp_dim=512,
        context_length=128,
    )  # fmt: skip
    program = make_step(
        model,
        layout,
        precision=Precision(compute="bfloat16", matmul=matmul),
        execution=Execution(kernel="xla", einsum=einsum_of(matmul)),
    )
    with layout.active():
        return CompiledStep(program).lower(text_batch(rows=16, length=128, vocab_size=128))


@pytest.mark.cuda_compile
@pytest.mark.parametrize("target", ["h100:1x8", "b200:1x8"])
def test_the_cuda_compiler_gives_every_float8_product_to_the_float8_units(target):
    found = parse_target(target)
    lowered = lower_for(found, "float8")
    products = 7  # of each layer; the loop's body stands once
    # Kernels of XLA's own, which are chosen where none can be tried: float8 goes in.
    text = lowered.compile(compiler_options(found)).as_text()
    pairs = collections.Counter(operands_of_products(text))
    assert {pair: n for pair, n in pairs.items() if "f8" in pair[0] + pair[1]} == {
        ("f8e4m3fn", "f8e4m3fn"): products,
        ("f8e5m2", "f8e4m3fn"): products,
        ("f8e4m3fn", "f8e5m2"): products,
    }
    # The library's, which a GPU that is there may prefer.
    options = {**compiler_options(found), "xla_gpu_enable_triton_gemm": False}
    text = lowered.compile(options).as_text()
    assert len(re.findall(r'custom_call_target="__cublas\$lt\$matmul\$f8"', text)) == 3 * products
