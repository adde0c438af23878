"""What moves over `data` in the compiled step of every exchange: kind, bytes and when."""

import dataclasses
import functools
import math
import re

import jax
import optax
import pytest
import test_traffic
from conftest import lower_step, make_layout, make_step, text_batch, with_exchange
from test_planning_traffic import config_of, of, total

from jaxtrain.analysis.planning.compiled.collectives import Collective, collectives
from jaxtrain.analysis.planning.textbook.facts import Facts
from jaxtrain.analysis.planning.textbook.traffic import exchange_traffic
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.parameter_averages import ScheduleFree
from jaxtrain.training.optimizers.rules.adafactor import Adafactor
from jaxtrain.training.optimizers.rules.elementwise import SGD
from jaxtrain.training.optimizers.rules.muon import Muon
from jaxtrain.training.settings import load_config

MODEL = GPT(vocab_size=64, num_layers=2, embed_dim=32, num_heads=8, context_length=16)
BATCH = text_batch(rows=16, length=16, vocab_size=64)
BLOCK = 256
# A few scalars: sums of targets and of losses, that compressed steps need of all replicas.
SCALARS = 64


def program_on(sizes: dict[str, int], **settings):
    return with_exchange(Exchange(**settings), make_step(MODEL, make_layout(**sizes)))


@functools.cache
def compiled(sizes: tuple[tuple[str, int], ...], method: str, period: int = 1) -> str:
    """The text of the compiled step."""
    program = program_on(dict(sizes), method=method, period=period)
    return lower_step(program, BATCH).compile().as_text()


def over_data(sizes: dict[str, int], method: str, period: int = 1) -> list[Collective]:
    text = compiled(tuple(sizes.items()), method, period)
    mesh = make_layout(**sizes).mesh
    return [one for one in collectives(text, mesh) if "data" in one.axis.split("+")]


def shard_sizes(sizes: dict[str, int], part: str = "params") -> list[int]:
    """Numbers in one device's shard of every floating array of the synchronous state."""
    state = program_on(sizes).abstract_state()
    return [
        math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(getattr(state, part))
        if x.ndim
    ]


MESHES = [{"data": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]


@pytest.mark.slow_cases(
    "diloco-{'data': 2, 'fsdp': 2, 'tensor': 2}",
    "local_sgd-{'data': 2, 'fsdp': 2, 'tensor': 2}",
    "local_sgd-{'data': 4}",
)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_the_inner_step_moves_nothing_over_data(method, sizes):
    found = over_data(sizes, method, period=2)
    # Everything stands in the branch that is taken every `period` steps...
    assert found
    assert all("/cond/branch_1_fun/" in one.op_name for one in found)
    assert {one.kind for one in found} == {"all-reduce"}
    # ... in which the parameters (and, averaged too, the moments) are reduced once, as float32.
    numbers = sum(shard_sizes(sizes))
    if method == "local_sgd":
        numbers += sum(shard_sizes(sizes, "opt_state"))
    payload = sum(one.total_bytes for one in found)
    assert 4 * numbers <= payload <= 4 * numbers + SCALARS


@pytest.mark.slow_cases("{'data': 4}", "{'data': 2, 'fsdp': 2, 'tensor': 2}")
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_gossip_permutes_with_its_neighbours_and_nothing_else(sizes):
    found = over_data(sizes, "gossip")
    assert {one.kind for one in found} == {"collective-permute"}
    neighbours = 2 if sizes["data"] > 2 else 1
    assert sum(one.total_bytes for one in found) == 4 * neighbours * sum(shard_sizes(sizes))


def by_kind(found: list[Collective]) -> dict[tuple[str, str], int]:
    total: dict[tuple[str, str], int] = {}
    for one in found:
        key = (one.kind, one.dtype)
        total[key] = total.get(key, 0) + one.total_bytes
    return total


@pytest.mark.slow_cases("{'data': 4}", "{'data': 2, 'fsdp': 2, 'tensor': 2}")
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_int8_moves_a_byte_a_number_each_way(sizes):
    k, found = sizes["data"], by_kind(over_data(sizes, "int8"))
    blocks = sum(math.ceil(size / BLOCK) for size in shard_sizes(sizes, "params"))
    blocks = math.ceil(blocks / k) * k
    # Operands: of the all-to-all everything, of which (k-1)/k leaves the device; of the gather
    # its own part, which goes to k-1 others: 2n(k-1)/k bytes of int8 in all.
    assert found.pop(("all-to-all", "s8")) == blocks * BLOCK
    assert found.pop(("all-gather", "s8")) == blocks * BLOCK // k
    assert found.pop(("all-to-all", "f32")) == blocks * 4
    assert found.pop(("all-gather", "f32")) == blocks * 4 // k
    assert found.keys() <= {("all-reduce", "f32")}
    assert sum(found.values()) <= SCALARS


@pytest.mark.slow_cases("{'data': 4}")
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_top_k_moves_values_and_places_of_what_it_keeps(sizes):
    k, found = sizes["data"], by_kind(over_data(sizes, "top_k"))
    # A part of each array is each replica's: so many of its entries to it, and so many from it.
    kept = sum(max(1, math.ceil(0.01 * math.ceil(size / k))) for size in shard_sizes(sizes))
    for dtype in ("f32", "s32"):
        assert found.pop(("all-to-all", dtype)) == 4 * kept * k
        assert found.pop(("all-gather", dtype)) == 4 * kept
    assert found.keys() <= {("all-reduce", "f32")}
    assert sum(found.values()) <= SCALARS


@pytest.mark.slow
def test_over_other_axes_replicas_move_what_the_synchronous_step_moves():
    """ZeRO stays: no array that is sharded over fsdp is gathered on its way to its replica."""
    sizes = {"data": 2, "fsdp": 2}
    mesh = make_layout(**sizes).mesh

    def gathers(method: str) -> int:
        text = compiled(tuple(sizes.items()), method)
        found = [one for one in collectives(text, mesh) if one.axis == "fsdp"]
        return sum(one.total_bytes for one in found if one.kind == "all-gather")

    assert gathers("gossip") <= gathers("synchronous")
    assert gathers("int8") <= gathers("synchronous")
    assert re.search("involuntary", compiled(tuple(sizes.items()), "gossip"), re.I) is None


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer(),
        Optimizer(rule=SGD(), average_decay=0.9),
        Optimizer(rule=Adafactor()),
        Optimizer(rule=Muon()),
        Optimizer(rule=ScheduleFree()),
    ],
    ids=lambda one: one.name,
)
def test_the_plan_of_local_sgd_has_all_that_is_averaged(optimizer):
    """Every floating array of a synchronous state, each shard once, as float32."""
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    config = load_config("gpt_quickstart", ["Exchange.method = 'local_sgd'"])
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, model=MODEL), optimizer=optimizer
    )
    layout = make_layout(**sizes)
    planned = sum(one.total_bytes for one in exchange_traffic(Facts(config, layout)))
    made = make_optimizer(optimizer, optax.constant_schedule(1.0))
    state = make_step(MODEL, layout, optimizer=made).abstract_state()
    numbers = [
        math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves((state.params, state.opt_state))
        if x.ndim
    ]
    assert planned == 4 * sum(numbers)


def test_what_runs_seldom_says_so():
    exchange = Exchange(method="diloco", period=50)
    config = config_of(test_traffic.MODELS["gpt"], {"data": 8}, exchange=exchange)
    assert {one.every for one in of(config, "")} == {50}
    parameters = sum(
        weight.copies * math.prod(weight.shape)
        for weight in test_traffic.weights(test_traffic.MODELS["gpt"])
    )
    assert total(of(config, "replicas"))["all-reduce"][1] == 4 * parameters
