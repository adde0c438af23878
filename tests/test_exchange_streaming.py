"""Streaming DiLoCo: against DiLoCo, a loop in numpy, bytes by formula; and stopped midway."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lower_step, make_layout, transformed
from flax import nnx
from test_exchange import (
    BATCHES,
    DILOCO,
    alone,
    assert_close,
    one_device,
    program_on,
    run,
    stopped_and_not,
    values,
)
from test_exchange_relaxed import OF_MODEL
from test_exchange_traffic import BATCH, SCALARS, shard_sizes
from test_exchange_traffic import program_on as traffic_program

from jaxtrain import load_config
from jaxtrain.analysis.planning.compiled.collectives import collectives
from jaxtrain.analysis.planning.textbook.facts import Facts
from jaxtrain.analysis.planning.textbook.traffic import exchange_traffic
from jaxtrain.config.errors import UserError
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.exchange import exchange as settings
from jaxtrain.training.exchange import replicas
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.exchange.streaming import Fragments, stream_fragments

DiLoCo = functools.partial(Exchange, method="diloco")


def fragment_of(shape: tuple[int, ...], count: int) -> np.ndarray:
    """Which fragment each number of an array on one device is in: [...]."""
    for dim, size in enumerate(shape):
        if size % count == 0:
            places = np.arange(size) % count
            return np.broadcast_to(places.reshape(-1, *(1,) * (len(shape) - dim - 1)), shape)
    size = int(np.prod(shape))
    return (np.arange(size) // -(-size // count)).reshape(shape)


# -- fragments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_fragments_are_every_so_manyth_layer_and_together_everything(sizes):
    layout = make_layout(**sizes)
    shapes = {
        "layers": ((6, 4, 8), ("layers", "embed", "mlp")),  # two layers a fragment
        "table": ((12, 4), ("vocab", "embed")),  # no layers: rows
        "shift": ((2, 8), ("layers", "embed")),  # neither: numbers of a device's shard
    }
    rng = np.random.default_rng(0)
    numbers = {name: rng.standard_normal((2, *shape)) for name, (shape, _) in shapes.items()}
    tree = nnx.State(
        {
            name: nnx.Param(
                jax.device_put(
                    np.float32(numbers[name]), layout.sharding_of(layout.moment(("replica", *axes)))
                ),
                axes=("replica", *axes),
            )
            for name, (_, axes) in shapes.items()
        }
    )
    pieces = Fragments(3)
    with layout.active():
        parts = [jax.jit(pieces.cut)(tree, jnp.int32(place)) for place in range(3)]
        zeros = jax.tree.map(jnp.zeros_like, tree)
        paste = jax.jit(pieces.paste)
        for place, part in enumerate(parts):
            zeros = paste(zeros, part, jnp.int32(place))
    jax.tree.map(np.testing.assert_array_equal, zeros, tree)
    for place, (layers, shift, table) in enumerate(parts):
        expected = np.float32(numbers["layers"][:, place::3])
        assert sorted(np.ravel(layers)) == sorted(np.ravel(expected))
        expected = np.float32(numbers["table"][:, place::3])
        assert sorted(np.ravel(table)) == sorted(np.ravel(expected))
        whole = shift.shape[1] * 3
        assert 16 <= whole <= 16 + 2 * layout.size(layout.moment(("embed",))[0])


# -- whole programs -------------------------------------------------------------------------------


def loop(method: Exchange, steps: int):
    """Four replicas on a device each, fragments and their outer steps in numpy, float32.

    Returns:
      The replicas' parameters [4][arrays], the outer ones and their momentum.
    """
    H, P = method.period, method.fragments
    fresh = one_device()[1]
    structure = jax.tree.structure(fresh.params)
    outer = [x.copy() for x in values(fresh.params)]
    momentum = [np.zeros_like(x) for x in outer]
    places = [fragment_of(x.shape, P) for x in outer]
    states, seen, coming = [fresh] * 4, np.zeros((P, 4)), {}

    def send(step: int) -> None:
        for p in (p for p in range(P) if step and step % H == p * H // P):
            share = np.float32(seen[p] / seen[p].sum())
            every = zip(*(values(s.params) for s in states), strict=True)
            for i, xs in enumerate(every):
                moved = outer[i] - np.tensordot(share, np.stack(xs), 1)
                m = 0.9 * momentum[i] + moved
                momentum[i] = np.where(places[i] == p, m, momentum[i])
                new = outer[i] - 0.7 * (moved + 0.9 * m)
                outer[i] = np.where(places[i] == p, new, outer[i])
            coming[step + method.delay] = p, [x.copy() for x in outer]
            seen[p] = 0

    for step in range(1, steps + 1):
        if method.delay:  # what is there as a step begins is sent during that step
            send(step - 1)
        ran = [alone(s, [BATCHES[step % 4]], r, 4) for r, s in enumerate(states)]
        states = [state for state, _ in ran]
        seen += [float(targets) for _, targets in ran]
        if not method.delay:
            send(step)
        if step in coming:
            p, told = coming.pop(step)
            for r, state in enumerate(states):
                a = method.mixing
                after = [
                    np.where(place == p, a * x + (1 - a) * new, x).astype(np.float32)
                    for place, x, new in zip(places, values(state.params), told, strict=True)
                ]
                states[r] = dataclasses.replace(state, params=structure.unflatten(after))
    return [values(state.params) for state in states], outer, momentum


@pytest.mark.parametrize(
    ("sizes", "method"),
    [
        pytest.param(
            {"data": 4},
            DiLoCo(period=5, fragments=2, delay=3, mixing=0.25),
            marks=pytest.mark.slow,
        ),
        # A fragment a step, in no branch; three that no dimension divides by.
        pytest.param({"data": 4}, DiLoCo(period=3, fragments=3, delay=1), marks=pytest.mark.slow),
        pytest.param(
            {"data": 4, "tensor": 2},
            DiLoCo(period=2, fragments=2, mixing=0.5),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_twenty_steps_are_those_of_a_loop(sizes, method):
    state, metrics = run(program_on(sizes, method), [BATCHES[step % 4] for step in range(1, 21)])
    replicas, outer, momentum = loop(method, 20)
    for r in range(4):
        assert_close([x[r] for x in values(state.params)], replicas[r], 2e-5)
    assert_close(values(state.exchange["outer"]), outer, 2e-5)
    assert_close(values(state.exchange["momentum"]), momentum, 2e-5)
    sent = [i for i, (a, b) in enumerate(zip(metrics, metrics[1:], strict=False), 1)
            if a["replica_spread"] != b["replica_spread"]]  # fmt: skip
    assert sent  # of the last fragment


@pytest.mark.slow
def test_one_fragment_that_comes_at_once_is_diloco_bit_for_bit():
    # As a run compiles: the tests' way (conftest) rounds the last bit by program.
    options = {
        "xla_backend_optimization_level": "3",
        "xla_llvm_disable_expensive_passes": "False",
        "xla_cpu_use_fusion_emitters": "True",
    }
    sizes, whole = {"data": 2, "fsdp": 2}, DiLoCo(period=2)
    rule = replicas.DiLoCo(whole.period, whole.outer_learning_rate, whole.outer_momentum)
    streamed = transformed(program_on(sizes, Exchange()), stream_fragments(rule, 1, 0, 0.0))
    found = []
    for program in (program_on(sizes, whole), streamed):
        state = program.create(seed=0)
        with program.setup.layout.active():
            step = CompiledStep(program, options)
            for batch in BATCHES:
                state, _ = step(state, jax.device_put(batch, program.setup.batch_shardings(batch)))
        found.append(
            (state.params, state.opt_state, *map(state.exchange.get, ("outer", "momentum")))
        )
    for one, other in zip(*map(values, found), strict=True):
        np.testing.assert_array_equal(one, other)


# -- traffic --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "method"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, DiLoCo(period=6, fragments=2, delay=2)),
        pytest.param({"data": 4}, DiLoCo(period=3, fragments=3, delay=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_sends_one_fragment_at_most(sizes, method):
    fields = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    text = lower_step(traffic_program(sizes, **fields), BATCH).compile().as_text()
    found = [
        one for one in collectives(text, make_layout(**sizes).mesh) if "data" in one.axis.split("+")
    ]
    # In the branch that is taken where one has its turn; where all steps have, there is none.
    in_branch = ["/cond/branch_1_fun/" in one.op_name for one in found]
    assert found
    assert all(in_branch) if method.period > method.fragments else not any(in_branch)
    assert {one.kind for one in found} == {"all-reduce"}
    # As many layers, rows or numbers of each array: of all, 1/P.
    P, shards = method.fragments, shard_sizes(sizes)
    numbers = sum(-(-size // P) for size in shards)
    assert sum(shards) / P <= numbers <= sum(shards) / P + len(shards)
    payload = sum(one.total_bytes for one in found)
    assert 4 * numbers <= payload <= 4 * numbers + SCALARS
    # The textbook's: of a step that sends one, and in how many steps one does.
    bindings = [f"Exchange.{name}={value!r}" for name, value in fields.items()]
    config = load_config("gpt_quickstart", [*bindings, *OF_MODEL])
    told = list(exchange_traffic(Facts(config, make_layout(**sizes))))
    assert sum(one.total_bytes for one in told) == 4 * numbers
    assert {one.every for one in told} == {method.period / P}


# -- a whole run ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_resumed_with_a_fragment_on_its_way_is_the_run_never_stopped(tiny_config, tmp_path):
    streamed = ["Exchange.fragments = 2", "Exchange.delay = 2", "Exchange.mixing = 0.25"]

    def on_its_way(state):
        # The second was sent after two steps and comes after four.
        outer, params = (values(tree) for tree in (state.exchange["outer"], state.params))
        assert any(np.abs(x - y[0]).max() > 0 for x, y in zip(outer, params, strict=True))
        assert all(np.abs(y - y[:1]).max() > 0 for y in params)

    stopped_and_not(load_config(tiny_config, [*DILOCO, *streamed]), tmp_path, on_its_way)


# -- what is rejected ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (
            DiLoCo(period=4, fragments=8),
            "Exchange.fragments=8 with Exchange.period=4: a step sends one fragment at most; use "
            "at most 4 fragments or a longer period",
        ),
        (
            DiLoCo(period=4, delay=4),
            "Exchange.delay=4 with Exchange.period=4: a fragment would be sent again before it has "
            "come; use Exchange.delay=3 or a longer period",
        ),
        (
            Exchange(method="local_sgd", fragments=2),
            "Exchange.fragments=2 has no effect for Exchange.method='local_sgd'; leave it at 1 or "
            "set Exchange.method to 'diloco'",
        ),
        (
            Exchange(mixing=0.5),
            "Exchange.mixing=0.5 has no effect for Exchange.method='synchronous'; leave it at 0.0 "
            "or set Exchange.method to 'diloco'",
        ),
    ],
)
def test_what_has_no_turn_is_refused(method, says):
    assert list(settings.validate(method, make_layout(data=4))) == [says]


@pytest.mark.parametrize(("name", "value"), [("fragments", 0), ("delay", -1), ("mixing", 1.0)])
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(UserError, match=f"Exchange.{name}={value}"):
        Exchange(**{name: value})
