"""Replicas with their own parameters: against the synchronous step, single devices and numpy."""

import dataclasses
import functools
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_layout, make_step, text_batch, with_exchange
from rich.console import Console

from jaxtrain import Trainer, load_config
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.nn.execution import Execution
from jaxtrain.run.metrics.files import read_lines
from jaxtrain.run.metrics.log import MetricsLog
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.exchange.per_replica import means
from jaxtrain.training.exchange.replicas import mix_with_neighbours
from jaxtrain.training.guard import BadStepError
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.rules.elementwise import SGD
from jaxtrain.training.preflight import preflight

MODEL = GPT(vocab_size=32, num_layers=1, embed_dim=16, num_heads=4, context_length=8)
# Eight rows a batch, more targets in later rows: no two replicas have equally many.
BATCHES = [text_batch(rows=8, length=8, vocab_size=32, seed=seed) for seed in range(4)]
# Sums of a few thousand float32 products in another order, over four steps.
TOLERANCE = 5e-6


def sgd(momentum: float = 0.9) -> optax.GradientTransformation:
    """Linear in the gradient: no clipping. Decay and Nesterov momentum are."""
    settings = Optimizer(
        rule=SGD(momentum=momentum), learning_rate=0.1, weight_decay=0.01, clip_norm=None
    )
    return make_optimizer(settings, optax.constant_schedule(0.1))


def program_on(sizes: dict[str, int], settings: Exchange, **changes):
    layout = make_layout(**sizes)
    changes = {"optimizer": sgd(), **changes}
    return with_exchange(settings, make_step(MODEL, layout, **changes))


@functools.cache
def compiled(program):
    return CompiledStep(program)


def run(program, batches, state=None):
    """The state after these batches, and each step's metrics as numbers."""
    state = program.create(seed=0) if state is None else state
    metrics = []
    with program.setup.layout.active():
        step = compiled(program)
        for batch in batches:
            placed = jax.device_put(batch, program.setup.batch_shardings(batch))
            state, found = step(state, placed)
            found = means(found) if "weight" in found else found
            metrics.append({name: float(value) for name, value in found.items()})
        assert step.on_arrays._cache_size() <= 1
    return state, metrics


def values(tree) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_close(found, expected, atol=TOLERANCE) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@functools.cache
def synchronous():
    """Parameters and metrics of four synchronous steps."""
    state, metrics = run(program_on({"fsdp": 1}, Exchange()), BATCHES)
    return values(state.params), metrics


@functools.cache
def one_device():
    """A synchronous program on one device, its fresh state, and its compiled step."""
    program = program_on({"fsdp": 1}, Exchange())
    return program, program.create(seed=0), jax.jit(program.train_step)


def alone(state, batches, replica: int, replicas: int):
    """One replica's rows of these batches on a device of its own, and how many targets it saw."""
    program, fresh, step = one_device()
    state = fresh if state is None else state
    rows = 8 // replicas
    seen = 0.0
    with program.setup.layout.active():
        for batch in batches:
            mine = jax.tree.map(lambda x: x[replica * rows : (replica + 1) * rows], batch)
            state, *_ = step(state, mine)
            seen += mine.loss_mask.sum()
    return state, seen


# -- local SGD ---------------------------------------------------------------------------------


# tests/test_exchange_compression.py has an exchange that is the synchronous step.
@pytest.mark.slow_cases(
    "{'data': 2, 'context': 2}",
    "{'data': 4, 'fsdp': 2}",
    "{'data': 2, 'fsdp': 2, 'tensor': 2, 'zero': 2}",
)
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 4, "fsdp": 2},
        {"data": 2, "fsdp": 2, "tensor": 2, "zero": 2},
        {"data": 2, "context": 2},
    ],
    ids=str,
)
def test_averaging_after_every_step_is_the_synchronous_step(sizes):
    params, metrics = synchronous()
    # The kernel that CPUs have by default, rings and chunks: all look at how arrays are split.
    execution = Execution(kernel="xla" if "context" in sizes else "blocked")
    changes = {"execution": execution, "loss": Loss(chunk_size=4)}
    state, found = run(program_on(sizes, Exchange(method="local_sgd"), **changes), BATCHES)
    for mine, theirs in zip(found, metrics, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=TOLERANCE)
        assert mine["replica_spread"] > 1e-4
    for replica in range(sizes["data"]):
        assert_close([x[replica] for x in values(state.params)], params)


def test_replicas_send_their_own_tokens_to_experts():
    """Ragged products, which cannot be traced along an axis whose devices have rows of their own;
    without a loss of balance, which is a replica's own."""
    model = Mixtral(
        vocab_size=32, num_layers=1, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=16,
        num_experts=4, context_length=8, balance_weight=0.0,
    )  # fmt: skip
    found = []
    for sizes, settings in (({"fsdp": 1}, Exchange()), ({"data": 2}, Exchange(method="local_sgd"))):
        plain = make_step(model, make_layout(**sizes), optimizer=sgd())
        state, _ = run(with_exchange(settings, plain), BATCHES[:1])
        found.append(values(state.params))
    assert_close([x[0] for x in found[1]], found[0])


def test_replicas_begin_with_the_synchronous_parameters_and_keep_their_layout():
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    program = program_on(sizes, Exchange(method="diloco", period=2), optimizer=sgd(0.0))
    plain = one_device()[1]
    state = program.create(seed=0)
    for mine, theirs in zip(values(state.params), values(plain.params), strict=True):
        # The tests' way of compiling fusions (conftest) rounds the last bit of a draw by program.
        np.testing.assert_allclose(mine, np.stack([theirs] * 2), rtol=1e-6, atol=1e-8)
    before = jax.tree.map(lambda x: x.sharding, state)
    after, _ = run(program, BATCHES[:1], state)
    assert jax.tree.leaves(jax.tree.map(lambda x: x.sharding, after)) == jax.tree.leaves(before)
    wanted = jax.tree.map(lambda x: x.sharding, program.abstract_state())
    assert jax.tree.leaves(wanted) == jax.tree.leaves(before)


def test_each_replica_is_a_run_of_its_own_until_the_average():
    program = program_on({"data": 4}, Exchange(method="local_sgd", period=4))
    state, metrics = run(program, BATCHES[:3])
    trained = [alone(None, BATCHES[:3], r, 4)[0] for r in range(4)]
    for r, expected in enumerate(trained):
        assert_close([x[r] for x in values(state.params)], values(expected.params))
    assert [m["replica_spread"] for m in metrics] == [0.0] * 3
    consensus = program.eval_state(state)
    assert_close(values(consensus.params), [x.mean(0) for x in values(state.params)], 1e-7)

    state, (last,) = run(program, BATCHES[3:], state)
    ends, seen = zip(*(alone(None, BATCHES, r, 4) for r in range(4)), strict=True)
    share = np.asarray(seen) / sum(seen)
    for part in ("params", "opt_state"):
        every = zip(*(values(getattr(end, part)) for end in ends), strict=True)
        expected = [np.tensordot(share, np.stack(xs), 1) for xs in every]
        for r in range(4):
            assert_close([x[r] for x in values(getattr(state, part))], expected)
    assert last["replica_spread"] > 1e-3


# -- DiLoCo ------------------------------------------------------------------------------------


def test_diloco_is_nesterov_on_the_mean_movement():
    settings = Exchange(method="diloco", period=2, outer_learning_rate=0.7, outer_momentum=0.9)
    state, _ = run(program_on({"data": 2}, settings), BATCHES)

    single = one_device()[1]
    outer = values(single.params)
    momentum = [np.zeros_like(x) for x in outer]
    replicas = [single, single]
    structure = jax.tree.structure(single.params)
    for batches in (BATCHES[:2], BATCHES[2:]):
        params = structure.unflatten([jnp.asarray(x) for x in outer])
        starts = [dataclasses.replace(replica, params=params) for replica in replicas]
        ended = [alone(start, batches, r, 2) for r, start in enumerate(starts)]
        replicas, seen = zip(*ended, strict=True)
        share = np.asarray(seen) / sum(seen)
        ends = zip(*(values(replica.params) for replica in replicas), strict=True)
        moved = [
            x - np.tensordot(share, np.stack(xs), 1) for x, xs in zip(outer, ends, strict=True)
        ]
        momentum = [0.9 * m + d for m, d in zip(momentum, moved, strict=True)]
        outer = [x - 0.7 * (d + 0.9 * m) for x, d, m in zip(outer, moved, momentum, strict=True)]
    assert_close(values(state.exchange["outer"]), outer)
    assert_close(values(state.exchange["momentum"]), momentum)
    for r in range(2):
        assert_close([x[r] for x in values(state.params)], outer)
        # The inner optimizer's moments stay with their replica.
        assert_close([x[r] for x in values(state.opt_state)], values(replicas[r].opt_state))


# A special case of the Nesterov update that the test before checks.
@pytest.mark.slow
def test_diloco_without_momentum_at_rate_one_is_plain_averaging():
    bare = Exchange(method="diloco", outer_learning_rate=1.0, outer_momentum=0.0)
    changes = {"optimizer": sgd(momentum=0.0)}
    one, _ = run(program_on({"data": 2}, bare, **changes), BATCHES)
    two, _ = run(program_on({"data": 2}, Exchange(method="local_sgd"), **changes), BATCHES)
    assert_close(values(one.params), values(two.params), 1e-6)


# -- gossip -----------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [2, 3, 4, 8])
def test_mixing_keeps_the_mean_and_contracts_by_the_second_eigenvalue(replicas):
    layout = make_layout(data=replicas)
    slowest = np.cos(2 * np.pi * np.arange(replicas) / replicas)[:, None] * np.linspace(1, 2, 5)
    noise = np.random.default_rng(0).standard_normal((replicas, 7))
    start = [np.float32(3.0 + slowest), np.float32(noise)]
    place = functools.partial(jax.device_put, device=layout.sharding_of(jax.P("data")))
    with layout.active():
        mixed = values(jax.jit(mix_with_neighbours)([place(x) for x in start]))
    shifts = (-1, 1) if replicas > 2 else (1,)
    for before, after in zip(start, mixed, strict=True):
        expected = before + sum(np.roll(before, shift, 0) for shift in shifts)
        np.testing.assert_allclose(after, expected / (1 + len(shifts)), atol=1e-6)
        np.testing.assert_allclose(after.mean(0), before.mean(0), atol=1e-6)
    # Two replicas have one neighbour each: they agree at once.
    second = 1 / 3 + 2 / 3 * math.cos(2 * math.pi / replicas) if replicas > 2 else 0.0
    np.testing.assert_allclose(mixed[0] - 3.0, second * slowest, atol=1e-6)

    def spread(x: np.ndarray) -> float:
        return np.linalg.norm(x - x.mean(0))

    largest = max(abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi * i / replicas)) for i in
                  range(1, replicas)) if replicas > 2 else 0.0  # fmt: skip
    assert spread(mixed[1]) <= largest * spread(start[1]) + 1e-6


# Three programs; DiLoCo's average is in the fast part.
@pytest.mark.slow
def test_gossip_is_a_step_alone_then_the_mean_with_both_neighbours():
    program = program_on({"data": 4, "fsdp": 2}, Exchange(method="gossip"))
    state, _ = run(program, BATCHES[:1])
    ends = [values(alone(None, BATCHES[:1], r, 4)[0].params) for r in range(4)]
    for r in range(4):
        around = zip(ends[r - 1], ends[r], ends[(r + 1) % 4], strict=True)
        expected = [(a + b + c) / 3 for a, b, c in around]
        assert_close([x[r] for x in values(state.params)], expected)


# -- metrics ----------------------------------------------------------------------------------


def test_losses_of_replicas_are_weighed_by_their_targets_and_read_only_where_due():
    vectors = {
        "loss": jnp.array([1.0, 4.0]),
        "weight": jnp.array([3.0, 1.0]),
        "learning_rate": jnp.asarray(0.1),
    }
    found = {name: float(value) for name, value in means(vectors).items()}
    assert found == pytest.approx({"loss": 1.75, "learning_rate": 0.1})
    nothing = means({**vectors, "weight": jnp.zeros(2)})
    assert float(nothing["loss"]) == pytest.approx(2.5)

    log = MetricsLog(
        None, total_steps=100, unit="tokens", units_per_step=1, flops_per_step=None,
        peak_flops=None, first_step=0, log_every=10, terminal=Console(quiet=True),
    )  # fmt: skip
    broken = {**vectors, "loss": jnp.array([1.0, math.nan])}
    for step in range(2, 9):
        log.later(step, broken)  # not written: nobody looks across replicas
    with pytest.raises(BadStepError):
        log.flush()  # before an evaluation or a checkpoint somebody does


# -- whole runs -------------------------------------------------------------------------------

SMALL = ["GPT.num_layers = 1", "GPT.embed_dim = 16", "Train.log_every = 2"]
DILOCO = [*SMALL, "Exchange.method = 'diloco'", "Exchange.period = 4", "Mesh.tensor = 1",
          "Mesh.data = 4"]  # fmt: skip


def stopped_and_not(config, folder, check=lambda state: None) -> Trainer:
    """A run that was stopped after three steps, held to one that was not, bit for bit.

    `check` is given the state where it stops.
    """
    whole = Trainer(config, folder / "whole")
    whole.train(steps=3)
    check(whole.state)
    shutil.copytree(folder / "whole", folder / "resumed")
    whole.train()
    whole.close()
    second = Trainer(config, folder / "resumed")
    assert second.steps_done == 3
    second.train()
    second.close()
    for a, b in zip(values(second.state), values(whole.state), strict=True):
        np.testing.assert_array_equal(a, b)
    return second


@pytest.mark.slow
def test_a_run_resumed_between_exchanges_is_the_run_never_stopped(tiny_config, tmp_path):
    second = stopped_and_not(load_config(tiny_config, DILOCO), tmp_path)
    logged = read_lines(tmp_path / "resumed" / "metrics.jsonl")
    spreads = {line["step"]: line["replica_spread"] for line in logged if "loss" in line}
    assert spreads[1] == spreads[2] == 0.0
    assert spreads[4] == spreads[6] > 0.0  # of the last exchange
    assert spreads[8] != spreads[6]

    # Evaluation and generation see the mean of the replicas, as one model.
    def with_params(function):
        params = jax.tree.map(
            lambda x: jax.device_put(np.float32(function(np.asarray(x))), x.sharding),
            second.state.params,
        )
        return dataclasses.replace(second.state, params=params)

    apart = with_params(lambda x: x + np.reshape([-0.3, -0.1, 0.0, 0.8], (4, *[1] * (x.ndim - 1))))
    second.state = apart
    found = second.evaluate(), second.generate("def ", max_new_tokens=5, temperature=0.0)
    second.state = with_params(lambda x: np.stack([x.mean(0)] * 4))
    expected = second.evaluate(), second.generate("def ", max_new_tokens=5, temperature=0.0)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1] == expected[1]


# -- rejections ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bindings", "sentence"),
    [
        (["Exchange.period = 4"],
         "Exchange.period=4 has no effect for Exchange.method='synchronous'; leave it at 1 or set "
         "Exchange.method to 'local_sgd' or 'diloco'"),
        (["Exchange.method = 'local_sgd'", "Exchange.outer_momentum = 0.5"],
         "Exchange.outer_momentum=0.5 has no effect for Exchange.method='local_sgd'; leave it at "
         "0.9 or set Exchange.method to 'diloco'"),
        (["Exchange.method = 'int8'", "Exchange.keep = 0.1"],
         "Exchange.keep=0.1 has no effect for Exchange.method='int8'; leave it at 0.01 or set "
         "Exchange.method to 'top_k'"),
        (["Exchange.method = 'gossip'", "Mesh.data = 1", "Mesh.fsdp = 4"],
         "Exchange.method='gossip' with Mesh.data=1: there are no replicas to exchange with; use "
         "Mesh.data=2 or Exchange.method='synchronous'"),
        (["Exchange.method = 'diloco'", "Mesh.pipe = 2", "Mesh.tensor = 1"],
         "Exchange.method='diloco' with Mesh.pipe=2: pipelines reduce their gradients "
         "synchronously; use Mesh.pipe=1 or Exchange.method='synchronous'"),
    ],
)  # fmt: skip
def test_what_cannot_be_exchanged_is_refused(bindings, sentence, tiny_config):
    with pytest.raises(UserError) as refused:
        preflight.check(load_config(tiny_config, bindings), device_count=8, platform="cpu")
    assert sentence in str(refused.value).splitlines()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("period", 0),
        ("outer_learning_rate", 0.0),
        ("outer_momentum", 1.0),
        ("keep", 0.0),
        ("keep", 1.5),
    ],
)
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(UserError, match=f"Exchange.{name}={value}; use"):
        Exchange(**{name: value})
