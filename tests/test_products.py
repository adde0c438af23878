"""Products with weights: the einsum's values and gradients, without copies of activations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.attention.blocked import blocked_attention
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.matmul.contract import contract, einsum
from jaxtrain.nn.remat import POLICIES, remat
from jaxtrain.parallel.sharding import Layout, shard

SIZES = dict(B=4, T=32, D=24, F=96, N=4, K=2, H=6, P=3, V=40)
EQUATIONS = [
    "BTD,PDNH->PBTNH", "BTD,DNH->BTNH", "BTD,DKH->BTKH", "BTNH,NHD->BTD", "BTD,DF->BTF",
    "BTF,FD->BTD", "BTD,VD->BTV", "TBD,DF->TBF", "BD,DV->BV",
]  # fmt: skip


MEANING = dict(
    B="batch", T="length", D="embed", F="mlp", N="heads", K="kv_heads", H="head_dim", P="qkv",
    V="vocab",
)  # fmt: skip


def operands(equation: str) -> list[np.ndarray]:
    """x, the weight, and a gradient of the result."""
    rng = np.random.default_rng(0)
    letters = re.split(",|->", equation)
    return [rng.standard_normal([SIZES[x] for x in side], np.float32) for side in letters]


def named(letters: str) -> tuple[str, ...]:
    return tuple(MEANING[letter] for letter in letters)


def product(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """The product of a model's parameter of this value, laid out as a model would."""
    left, right, out = re.split(",|->", equation)
    parameter = nnx.Param(weight, axes=named(right))
    spec = tuple({"length": "residual_length"}.get(name, name) for name in named(out))
    summed = set(left) & set(right) & set("NF")
    return contract(equation, x, parameter, spec if summed else None)


def on_a_mesh(equation: str, layout: Layout) -> tuple:
    """The jitted product with its gradients, and what goes in, laid out."""
    left, right, out = re.split(",|->", equation)

    def run(x, weight, gradient):
        x = shard(x, named(left))
        result, back = jax.vjp(lambda *a: product(equation, *a), x, weight)
        return result, *back(jax.sharding.reshard(gradient, jax.typeof(result).sharding.spec))

    x, weight, gradient = operands(equation)
    weight = jax.device_put(weight, layout.sharding_of(layout.parameter(named(right))))
    return jax.jit(run), (x, weight, gradient)


def check(equation: str, result, of_x, of_weight) -> None:
    x, weight, gradient = operands(equation)
    left, right, out = re.split(",|->", equation)
    close = dict(rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(result, np.einsum(equation, x, weight), **close)
    np.testing.assert_allclose(of_x, np.einsum(f"{out},{right}->{left}", gradient, weight), **close)
    np.testing.assert_allclose(of_weight, np.einsum(f"{left},{out}->{right}", x, gradient), **close)


def copied(function, equation: str) -> list[str]:
    """The copies of something as large as x in the program for the result and the gradients."""
    x, weight, gradient = operands(equation)

    def run(x, weight, gradient):
        result, back = jax.vjp(lambda *a: function(equation, *a), x, weight)
        return result, *back(gradient)

    return copies(jax.jit(run).lower(x, weight, gradient).compile().as_text(), x.size)


def copies(text: str, size: int) -> list[str]:
    """The shapes of copies with at least so many numbers, in a compiled program."""
    found = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    return [dims for dims in found if np.prod([int(n) for n in dims.split(",")]) >= size]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_values_and_gradients_are_the_einsums(equation):
    x, weight, gradient = operands(equation)
    result, back = jax.vjp(lambda *a: product(equation, *a), x, weight)
    check(equation, result, *back(jnp.asarray(gradient)))


MESHES = {
    "fsdp": dict(fsdp=4),
    "zero 1": dict(zero=1, fsdp=2),
    "tensor": dict(fsdp=2, tensor=2, data=2),
    "sequence": dict(fsdp=2, tensor=2, sequence_parallel=True),
    "sequence, a row each": dict(fsdp=4, tensor=2, sequence_parallel=True),
    "context": dict(fsdp=2, context=2),
}


@pytest.mark.parametrize("equation", EQUATIONS[:7])
@pytest.mark.parametrize("mesh", MESHES)
def test_so_they_are_over_a_mesh(equation, mesh):
    layout = make_layout(**MESHES[mesh])
    with layout.active():
        run, arguments = on_a_mesh(equation, layout)
        check(equation, *run(*arguments))


@pytest.mark.parametrize("equation", ["BTNH,NHD->BTD", "BTD,DNH->BTNH", "BTD,DF->BTF"])
def test_no_activation_is_copied(equation):
    assert copied(product, equation) == []


def test_an_einsum_over_heads_copies_activations():
    # Otherwise there is no reason for `product` to have a way of its own.
    assert copied(einsum, "BTNH,NHD->BTD")


@pytest.mark.parametrize("equation", ["BTNH,NHD->BTD", "BTD,DNH->BTNH", "BTD,DF->BTF"])
def test_no_activation_is_copied_on_the_devices_of_a_mesh(equation):
    layout = make_layout(fsdp=2)
    with layout.active():
        run, (x, weight, gradient) = on_a_mesh(equation, layout)
        inputs = [jax.device_put(a, layout.sharding_of(P("fsdp"))) for a in (x, gradient)]
        text = run.lower(inputs[0], weight, inputs[1]).compile().as_text()
    # Activations have rows, 2 x 32 on a device; weights, which are shared out, are not that long.
    copied = [dims.split(",") for dims in copies(text, 0)]
    assert [dims for dims in copied if {"32", "64"} & set(dims)] == []


def test_elementwise_remat_keeps_what_attention_gives_and_nothing_from_inside():
    shape = (4, 128, 4, 8)
    q = jnp.ones(shape)

    def attend(q):
        return blocked_attention(jnp.sin(q), q, q, Mask()).sum()

    back = jax.vjp(remat(attend, POLICIES["elementwise"], prevent_cse=False), q)[1]
    sizes = sorted(x.size for x in jax.tree.leaves(back))
    # A number a row of scores, the result, and what went in.
    assert sizes == [q.size // 8, q.size, q.size]
