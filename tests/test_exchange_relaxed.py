"""Old gradients, votes, narrow matrices, graphs of neighbours: plain loops and closed forms."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import lower_step, make_layout, make_step, with_exchange
from test_exchange import BATCHES, MODEL, assert_close, program_on, run, synchronous, values
from test_exchange_compression import exchange
from test_exchange_traffic import BATCH, by_kind, shard_sizes
from test_exchange_traffic import program_on as traffic_program

from jaxtrain.analysis.planning.compiled.collectives import collectives
from jaxtrain.analysis.planning.textbook.facts import Facts
from jaxtrain.analysis.planning.textbook.traffic import exchange_traffic
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.parallel.sharding import by_name, is_variable, logical_axes
from jaxtrain.training.exchange import exchange as settings
from jaxtrain.training.exchange.compression import Signs
from jaxtrain.training.exchange.exchange import Exchange, neighbours
from jaxtrain.training.exchange.power_sgd import PowerSGD, narrow
from jaxtrain.training.exchange.replicas import mix_with_neighbours
from jaxtrain.training.optimizers.matrices import sides
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.rules.elementwise import SGD
from jaxtrain.training.settings import load_config

P = jax.P
RATE = 0.1
LLAMA = Llama(
    vocab_size=40, num_layers=1, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=16,
    context_length=8,
)  # fmt: skip
LONGER = dataclasses.replace(MODEL, context_length=16)  # than any batch
# The model of test_exchange_traffic.
OF_MODEL = [
    "GPT.vocab_size = 64", "GPT.num_layers = 2", "GPT.embed_dim = 32", "GPT.num_heads = 8",
    "GPT.context_length = 16", "TextData.sequence_length = 16",
]  # fmt: skip


# -- asynchronous ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_gradients_of_now_are_the_synchronous_step():
    method = Exchange(method="asynchronous", staleness=0)
    state, found = run(program_on({"fsdp": 2, "tensor": 2}, method), BATCHES)
    params, metrics = synchronous()
    assert_close(values(state.params), params)
    for mine, theirs in zip(found, metrics, strict=True):
        assert mine == pytest.approx(theirs, abs=5e-6)


@pytest.mark.parametrize("compensation", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_gradients_are_those_of_the_parameters_some_steps_ago(compensation):
    """w(t+1) = w(t) - lr (g + lambda g g (w(t) - w(t - 2))), g at w(t - 2), by a loop over them."""
    plain = Optimizer(rule=SGD(momentum=0.0), learning_rate=RATE, weight_decay=0.0, clip_norm=None)
    optimizer = make_optimizer(plain, optax.constant_schedule(RATE))
    one = program_on({"fsdp": 1}, Exchange(), optimizer=optimizer)
    fresh = one.create(seed=0)
    gradients = jax.jit(one.setup.gradients)
    past = [values(fresh.params)] * 3  # w(t - 2), w(t - 1), w(t)
    losses = []
    with one.setup.layout.active():
        for batch in BATCHES:
            then = jax.tree.unflatten(jax.tree.structure(fresh.params), past[0])
            g, metrics, _ = gradients(dataclasses.replace(fresh, params=then), batch)
            losses.append(float(metrics["loss"]))
            after = [
                now - RATE * (g + compensation * g * g * (now - old))
                for g, now, old in zip(values(g), past[2], past[0], strict=True)
            ]
            past = [*past[1:], after]

    method = Exchange(method="asynchronous", staleness=2, compensation=compensation)
    program = program_on({"data": 2, "fsdp": 2}, method, optimizer=optimizer)
    state, found = run(program, BATCHES)
    assert [one["loss"] for one in found] == pytest.approx(losses, abs=5e-6)
    assert_close(values(state.params), past[2])
    assert_close(values(state.exchange), past[0] + past[1])
    assert not np.allclose(losses[3], synchronous()[1][3]["loss"], atol=1e-4)


# -- signs ----------------------------------------------------------------------------------------


def test_votes_are_those_of_torch():
    """A third of the gradients are exactly 0, some for all replicas; and there are ties."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    numbers = [rng.standard_normal((4, *shape)).astype(np.float32) for shape in ((7, 5), (301,))]
    numbers = [x * (rng.random(x.shape) > 1 / 3) for x in numbers]
    numbers[0][:, 2] = 0.0
    numbers[0][:, 3] = -0.0
    sent, left = exchange(Signs())(numbers, [np.zeros_like(x) for x in numbers])
    assert left == []
    for mine, told in zip(numbers, sent, strict=True):
        expected = torch.tensor(mine).sign().sum(0).sign().numpy()
        assert (expected == 0).any()
        np.testing.assert_array_equal(told, np.stack([expected] * 4))


def test_a_vote_that_is_not_finite_is_seen():
    numbers = np.ones((4, 9), np.float32)
    numbers[2, 3], numbers[1, 5] = np.inf, np.nan
    (told,), _ = exchange(Signs())([numbers], [np.zeros_like(numbers)])
    np.testing.assert_array_equal(np.isnan(told[0]), [i in (3, 5) for i in range(9)])


# Compiles a step; delayed gradients are in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name", "read"),
    [
        (LLAMA, "token_embedding", np.unique([batch.inputs for batch in BATCHES])),
        (LONGER, "position_embedding", np.unique([batch.positions for batch in BATCHES])),
    ],
    ids=["tokens", "positions"],
)
def test_what_no_replica_reads_does_not_move(model, name, read):
    plain = Optimizer(rule=SGD(momentum=0.9), weight_decay=0.0, clip_norm=None)
    optimizer = make_optimizer(plain, optax.constant_schedule(RATE))
    settings = Exchange(method="sign_sgd")
    program = with_exchange(settings, make_step(model, make_layout(data=4), optimizer=optimizer))
    before = np.asarray(by_name(program.create(seed=0).params)[name].get_value())
    state, _ = run(program, BATCHES)
    moved = np.abs(np.asarray(by_name(state.params)[name].get_value()) - before).max(-1)
    is_read = np.isin(np.arange(len(moved)), read)
    assert not is_read.all()
    np.testing.assert_array_equal(moved > 0, is_read)


def narrow_bytes(r: int) -> int:
    """Of the model's arrays on fsdp=2: D = 32 is split in two, but in norms and biases."""
    layers, V, T, D, F, half = 2, 64, 16, 32, 128, 16
    qkv, out = 3 * (half + D), D + half
    up, down, tables = half + F, F + half, (V + half) + (T + half)
    vectors = layers * (4 * D + 3 * D + D + F + D) + 2 * D
    return 4 * (layers * r * (qkv + out + up + down) + r * tables + vectors)


@pytest.mark.slow_cases("power_sgd", "gossip")
@pytest.mark.parametrize("method", ["sign_sgd", "power_sgd", "gossip"])
def test_what_moves_is_its_formula(method):
    """Signs: two bits an element each way. An exponential graph of four: two permutes of all."""
    sizes = {"data": 4, "fsdp": 2}
    graph = "exponential" if method == "gossip" else "ring"
    text = lower_step(traffic_program(sizes, method=method, graph=graph), BATCH).compile().as_text()
    found = collectives(text, make_layout(**sizes).mesh)
    found = by_kind([one for one in found if "data" in one.axis.split("+")])
    shards = shard_sizes(sizes)
    if method == "gossip":
        assert found == {("collective-permute", "f32"): 2 * 4 * sum(shards)}
        expected = {"collective-permute": 2 * 4 * sum(shards)}
    elif method == "power_sgd":
        expected = {"all-reduce": narrow_bytes(4)}
        assert found.keys() == {("all-reduce", "f32")}
        assert 0 <= found["all-reduce", "f32"] - narrow_bytes(4) <= 64
    else:
        each = math.ceil(sum(shards) / 16)  # bytes of a replica's part
        assert found.pop(("all-to-all", "u8")) == 4 * each
        assert found.pop(("all-gather", "u8")) == each
        assert found.keys() <= {("all-reduce", "f32")}
        assert sum(found.values()) <= 64  # sums of targets and of losses
        expected = {"all-to-all": 4 * each, "all-gather": each}
    # The textbook's, of the same model.
    bindings = [f"Exchange.method={method!r}", f"Exchange.graph={graph!r}", *OF_MODEL]
    config = load_config("gpt_quickstart", bindings)
    told: dict[str, int] = {}
    for one in exchange_traffic(Facts(config, make_layout(**sizes))):
        told[one.kind] = told.get(one.kind, 0) + one.total_bytes
    assert told == expected


# -- narrow matrices ------------------------------------------------------------------------------


@functools.cache
def test_a_matrix_that_two_factors_make_no_smaller_is_sent_whole():
    axes = ("embed", "mlp")  # rank (n + m) of n m elements
    assert narrow((4, 4), axes, 2) is None
    assert narrow((4, 4), axes, 1) is not None
    assert narrow((3, 6), axes, 2) is None
    assert narrow((4, 5), axes, 2) is not None


def power(rank: int):
    """A program on a mesh, its fresh state, and what it tells of gradients: jitted."""
    program = program_on({"data": 4, "fsdp": 2}, Exchange(method="power_sgd", rank=rank))
    reduction = PowerSGD(rank)

    def tell(grads, state):
        return reduction.reduce(grads, state.params, state.exchange)

    return program, program.create(seed=0), jax.jit(tell)


def told_of(rank: int, steps: list) -> list:
    """What arrives and is kept of gradients [k, ...] by name, step by step."""
    program, state, tell = power(rank)
    found = []
    with program.setup.layout.active():
        for values_of in steps:
            left = by_name(state.exchange["left"])
            grads = {n: v.replace(place(values_of[n], v)) for n, v in left.items()}
            structure = jax.tree.structure(state.exchange["left"], is_leaf=is_variable)
            arrived, kept = tell(structure.unflatten(grads.values()), state)
            state = dataclasses.replace(state, exchange=kept)
            found.append((by_name(arrived), kept))
    return found


def place(x: np.ndarray, like: Any) -> jax.Array:
    return jax.device_put(x.astype(np.float32), like.get_value().sharding)


def matrices(x: Any, variable: Any) -> np.ndarray:
    """A parameter's array (or its replicas') as matrices [..., rows, columns]."""
    axes = logical_axes(variable)
    lead = x.ndim - len(axes)
    dims = sides(axes)
    shape = [x.shape[lead + i] for i in dims.stack]
    rows, columns = (math.prod(x.shape[lead + i] for i in part) for part in dims[1:])
    return np.asarray(x, np.float64).reshape(*x.shape[:lead], *shape, rows, columns)


def draws(rank: int | None, steps: int) -> list:
    """Replicas' gradients by name; of this rank in all, where one is given."""
    program, state, _ = power(2)
    rng, found = np.random.default_rng(0), []
    for _ in range(steps):
        values_of = {}
        for name, param in by_name(state.params).items():
            shape = param.get_value().shape
            x = rng.standard_normal((4, *shape))
            if rank is not None and sides(logical_axes(param)).rows:
                whole = matrices(x, param)
                left = rng.standard_normal((*whole.shape[1:-1], rank))
                x = left @ rng.standard_normal((4, *whole.shape[1:-2], rank, whole.shape[-1]))
                x = x.reshape(4, *shape)
            values_of[name] = x
        found.append(values_of)
    return found


def test_matrices_of_the_rank_arrive_as_they_are():
    (values_of,) = draws(2, 1)
    ((arrived, kept),) = told_of(2, [values_of])
    params = by_name(power(2)[1].params)
    narrowed = set(kept["basis"])
    assert {"layers/up", "layers/down"} <= narrowed < set(params)
    for name, variable in arrived.items():
        expected = values_of[name].sum(0)
        bound = 2e-4 * np.abs(expected).max()
        np.testing.assert_allclose(variable.get_value(), expected, rtol=0, atol=bound, err_msg=name)


def test_what_arrives_is_the_projection_and_the_rest_is_kept():
    """Algorithm 1 of arXiv 1905.13727 in float64, with the basis that each step left."""
    steps = draws(None, 3)
    basis = by_name(power(2)[1].exchange["basis"])
    left: dict[str, Any] = dict.fromkeys(steps[0], 0.0)
    for values_of, (arrived, kept) in zip(steps, told_of(2, steps), strict=True):
        for name, variable in arrived.items():
            pending = values_of[name] + left[name]
            rest = np.asarray(by_name(kept["left"])[name].get_value(), np.float64)
            if name not in basis:
                np.testing.assert_allclose(variable.get_value(), pending.sum(0), atol=1e-5)
                assert not rest.any()
                continue
            M = matrices(pending, variable).sum(0)
            q = np.asarray(basis[name].get_value(), np.float64).reshape(*M.shape[:-2], -1, 2)
            P = np.linalg.qr(M @ q)[0]
            expected = P @ np.swapaxes(P, -1, -2) @ M
            found = matrices(variable.get_value(), variable)
            np.testing.assert_allclose(found, expected, atol=2e-4, err_msg=name)
            # Error feedback: nothing is lost.
            np.testing.assert_allclose(
                found + matrices(rest, variable).sum(0), M, atol=1e-4, err_msg=name
            )
            left[name] = rest
        basis = by_name(kept["basis"])


@pytest.mark.slow
def test_where_all_is_told_whole_it_is_the_synchronous_step():
    params, _ = synchronous()
    method = Exchange(method="power_sgd", rank=1000)
    state, _ = run(program_on({"data": 2, "fsdp": 2}, method), BATCHES)
    assert_close(values(state.params), params)


# -- graphs ---------------------------------------------------------------------------------------


def second_of_ring(k: int) -> float:
    return max(abs(1 + 2 * math.cos(2 * math.pi * i / k)) / 3 for i in range(1, k))


GRAPHS = {
    ("ring", 8): second_of_ring(8),
    # Both circles' eigenvalues and the one on the diagonal, over five.
    ("torus", 9): max(
        abs(1 + 2 * math.cos(2 * math.pi * i / 3) + 2 * math.cos(2 * math.pi * j / 3)) / 5
        for i in range(3) for j in range(3) if i or j
    ),
    # arXiv 2110.13363, proposition 1: 1 - 2 / (1 + ceil(log2 k)) for even k.
    ("exponential", 8): 1 - 2 / (1 + 3),
    ("exponential", 6): 1 - 2 / (1 + 3),
}  # fmt: skip


@pytest.mark.parametrize(("graph", "replicas"), GRAPHS)
def test_a_graph_keeps_the_mean_and_shrinks_distances_by_its_second_singular_value(graph, replicas):
    permutes = neighbours(graph, replicas)
    mixing = np.eye(replicas)
    for to in permutes:
        assert sorted(to) == list(range(replicas))
        mixing[to, range(replicas)] += 1
    mixing /= 1 + len(permutes)
    assert set(np.unique(mixing)) == {0.0, 1 / (1 + len(permutes))}
    np.testing.assert_allclose(mixing.sum(0), 1)
    np.testing.assert_allclose(mixing.sum(1), 1)
    values = np.linalg.svd(mixing - 1 / replicas)[1]
    assert values[0] == pytest.approx(GRAPHS[graph, replicas], abs=1e-9)


@pytest.mark.parametrize("graph", ["torus", "exponential"])
def test_mixing_is_by_its_matrix(graph):
    layout = make_layout(data=8)
    start = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32)
    expected = start.copy()
    for to in neighbours(graph, 8):
        expected[to] += start
    with layout.active():
        placed = jax.device_put(start, layout.sharding_of(P("data")))
        mixed = jax.jit(mix_with_neighbours, static_argnums=1)(placed, graph)
    np.testing.assert_allclose(mixed, expected / (1 + len(neighbours(graph, 8))), atol=1e-6)


# -- what is rejected ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "sizes", "says"),
    [
        (Exchange(method="gossip", graph="torus"), {"data": 2}, "Exchange.graph='torus'"),
        (Exchange(staleness=3), {"data": 2}, "Exchange.staleness=3 has no effect"),
        (Exchange(method="int8", graph="torus"), {"data": 4}, "Exchange.graph='torus' has no eff"),
    ],
)
def test_what_goes_with_nothing_is_refused(method, sizes, says):
    (sentence,) = settings.validate(method, make_layout(**sizes))
    assert says in sentence


def test_asynchronous_needs_no_replicas():
    assert not list(settings.validate(Exchange(method="asynchronous"), make_layout(fsdp=2)))
    with pytest.raises(UserError, match=re.escape("Exchange.staleness=-1")):
        Exchange(method="asynchronous", staleness=-1)
