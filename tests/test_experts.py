"""Experts equal a dense reference, forward and gradient, and drop what NumPy says they drop."""

import contextlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.moe.dispatch import slots_per_expert
from jaxtrain.nn.moe.experts import Experts, router_statistics
from jaxtrain.nn.moe.routing import Routes

B, T, D, F, E, k = 3, 10, 8, 12, 4, 2
OUT = ("batch", "length", "embed")
WEIGHTS = ("router", "gate", "up", "down")


def experts(capacity_factor: float | None) -> tuple[Experts, dict[str, nnx.Param]]:
    """The part and its parameters, wide enough that every expert matters."""
    made = Experts(
        embed_dim=D, mlp_dim=F, num_experts=E, experts_per_token=k,
        capacity_factor=capacity_factor, residual_stddev=1.0, balance_weight=1.0,
        router_z_weight=0.0, num_layers=1,
    )  # fmt: skip
    own = made.weights(jax.random.split(jax.random.key(0), 1))["experts"]
    assert tuple(own) == WEIGHTS
    for name, weight in own.items():
        drawn = jax.random.normal(jax.random.key(len(name)), weight.get_value().shape) * 0.5
        own[name] = weight.replace(drawn)
    return made, own


X = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, D), np.float32))


def dense(weights: dict[str, jax.Array], x_BTD: jax.Array, kept_BTE: jax.Array) -> jax.Array:
    """Every expert on every token, those not chosen or not kept masked out."""
    probability_BTE = jax.nn.softmax(x_BTD @ weights["router"])
    chosen = probability_BTE >= jnp.sort(probability_BTE)[..., -k:][..., :1]
    gates = jnp.where(chosen, probability_BTE, 0.0)
    gates /= gates.sum(-1, keepdims=True)
    h = jax.nn.silu(jnp.einsum("BTD,EDF->BTEF", x_BTD, weights["gate"]))
    h *= jnp.einsum("BTD,EDF->BTEF", x_BTD, weights["up"])
    y = jnp.einsum("BTEF,EFD->BTED", h, weights["down"])
    return (y * (gates * kept_BTE)[..., None]).sum(2)


def run_whole(part: Experts, own: dict[str, nnx.Param], x: jax.Array, out=OUT):
    return part({"experts": own}, x, Mask(), Execution(), out=out)


def values(own: dict[str, nnx.Param]) -> dict[str, jax.Array]:
    return {name: weight.get_value() for name, weight in own.items()}


def outcome(run, weights, x):
    """What comes out, and the gradients of a weighted sum of it."""
    pick = jax.random.normal(jax.random.key(9), x.shape)
    loss = lambda weights, x: (run(weights, x) * pick).sum()  # noqa: E731
    return jax.jit(run)(weights, x), jax.jit(jax.grad(loss, (0, 1)))(weights, x)


def run_with(part: Experts, own: dict[str, nnx.Param], out: tuple[str, ...] = OUT):
    """The part as a function of its weights."""

    def run(weights, x):
        return run_whole(part, {n: own[n].replace(weights[n]) for n in WEIGHTS}, x, out)[0]

    return run


def kept_by_hand(weights: dict[str, np.ndarray], capacity: int) -> np.ndarray:
    """Row by row, token by token, best expert first: whoever finds the expert full is dropped."""
    logits = np.asarray(X) @ weights["router"]
    kept = np.zeros((B, T, E))
    for b in range(B):
        taken = [0] * E
        for t in range(T):
            for e in np.argsort(-logits[b, t])[:k]:
                if taken[e] < capacity:
                    kept[b, t, e] = 1
                    taken[e] += 1
    return kept


@pytest.mark.slow_cases("None", "2.0", "0.4")
@pytest.mark.parametrize("capacity_factor", [None, E / k, 1.0, 0.4])
def test_outputs_and_gradients_equal_every_expert_on_every_token(capacity_factor):
    part, own = experts(capacity_factor)
    ours, weights = run_with(part, own), values(own)
    capacity = T if capacity_factor is None else math.ceil(capacity_factor * T * k / E)
    kept = kept_by_hand({n: np.asarray(w) for n, w in weights.items()}, capacity)
    dropped = B * T * k - kept.sum()
    assert (dropped > 0) == (capacity_factor in (1.0, 0.4))
    expected, expected_gradients = outcome(lambda w, x: dense(w, x, kept), weights, X)
    found, gradients = outcome(ours, weights, X)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        gradients, expected_gradients,
    )  # fmt: skip
    auxiliary = run_whole(part, own, X)[1]
    assert auxiliary["router_dropped"] == pytest.approx(dropped / k)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_the_gradients_of_gathered_rows_are_gathered(capacity_factor, ranks):
    """A scatter that adds rows is atomic additions on a GPU."""
    part, own = experts(capacity_factor)
    x = jnp.concatenate([X, X[:1]])
    layout = make_layout(0, expert=ranks).active() if ranks > 1 else contextlib.nullcontext()
    with layout:
        loss = lambda w, x: run_with(part, own)(w, x).sum()  # noqa: E731
        text = jax.jit(jax.grad(loss, (0, 1))).lower(values(own), x).as_text()
    results = re.findall(r"stablehlo\.scatter.*?-> tensor<(\S+)>\n", text, re.DOTALL)
    assert results, "the router's own"
    assert not [shape for shape in results if shape.endswith(f"x{D}xf32")]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_rows_split_over_context_equal_whole_rows(sequence_parallel):
    part, own = experts(None)
    weights, x = values(own), jnp.concatenate([X, X])[:4, :8]
    expected = outcome(run_with(part, own), weights, x)
    axes = ("batch", "residual_length", "embed")
    layout = make_layout(0, sequence_parallel=sequence_parallel, expert=2, context=2, tensor=2)
    with layout.active():
        found = outcome(run_with(part, own, axes), weights, x)
    assert found[0].sharding.spec == layout.activation(axes)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )


# The cases that are left run the same code.
@pytest.mark.slow_cases("1.0")
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_an_expert_that_nobody_chooses_and_one_that_all_choose(capacity_factor):
    """All rows go to one rank: the buffers between ranks hold them."""
    part, own = experts(capacity_factor)
    own["router"] = own["router"].replace(jnp.zeros((D, E)).at[0].set(jnp.array([3.0, 2, 1, 0])))
    x = jnp.abs(jnp.concatenate([X, X[:1]]))  # four rows; every token likes experts 0 and 1
    expected = run_whole(part, own, x)[0]
    layout = make_layout(0, expert=4)
    with layout.active():
        found, auxiliary = jax.jit(lambda x: run_whole(part, own, x))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert auxiliary["router_max_load"] / x[..., 0].size == pytest.approx(E / k)
    assert auxiliary["router_dropped"] == (0 if capacity_factor is None else 4 * (T - T * k / E))


def test_statistics_by_hand_and_padding_left_out():
    logits = np.random.default_rng(1).standard_normal((2, 3, 4)).astype(np.float32)
    order = np.argsort(-logits, axis=-1)[..., :2]
    kept = np.array([[[1, 1], [1, 0], [0, 0]], [[1, 1], [0, 1], [0, 0]]], bool)
    segments = np.array([[1, 1, 2], [1, 1, 0]])
    routed = Routes(jnp.asarray(order), jnp.zeros(order.shape), jax.nn.softmax(logits))
    found, load = router_statistics(jnp.asarray(logits), routed, kept, segments)
    counted = np.concatenate([order[0].ravel(), order[1, :2].ravel()])
    assert load.tolist() == np.bincount(counted, minlength=4).tolist()
    balance = z = most = 0.0
    for row, tokens in ((0, 3), (1, 2)):
        scores = np.exp(logits[row, :tokens])
        P = (scores / scores.sum(-1, keepdims=True)).mean(0)
        f = np.bincount(order[row, :tokens].ravel(), minlength=4) / tokens
        balance += tokens * 4 * (f * P).sum()
        most += tokens * f.max() / (2 / 4)
        z += (np.log(scores.sum(-1)) ** 2).sum()
    assert found["balance"] == pytest.approx(balance, rel=1e-5)
    assert found["z"] == pytest.approx(z, rel=1e-5)
    assert found["max_load"] == pytest.approx(most, rel=1e-5)
    assert found["dropped"] == pytest.approx((1 + 2 + 1) / 2)


@pytest.mark.parametrize(
    ("arguments", "slots"),
    [((1.0, 16, 2, 8), 4), ((1.25, 16, 2, 8), 5), ((1.1, 16, 2, 8), 5), ((9.0, 16, 2, 8), 16)],
)
def test_slots_are_the_closed_form_and_never_more_than_a_row_can_fill(arguments, slots):
    assert slots_per_expert(*arguments) == slots


def test_a_capacity_with_split_rows_is_refused():
    layout = make_layout(0, context=2)
    part, own = experts(1.25)
    with layout.active(), pytest.raises(UserError, match=r"capacity_factor=1.25 .* Mesh.context"):
        jax.jit(lambda x: run_whole(part, own, x))(X)
