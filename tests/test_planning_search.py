"""The search over layouts: deterministic, never behind a hand-written recipe, nothing silent."""

import functools
import itertools

import pytest

from jaxtrain import load_config
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.analysis.planning.search import SHOWN, TIE, _allowed, price, search
from jaxtrain.analysis.planning.variants import changed, refusal
from jaxtrain.config.errors import UserError

KERNEL = ["Attention.kernel = 'tpu'"]
TARGET = "v5e:2x4"


@functools.cache
def found():
    """Llama 1B on 8 small chips, where memory is short."""
    return search(load_config("llama_1b", KERNEL), parse_target(TARGET))


def test_the_ranking_is_by_time_and_everything_fits():
    ranks = [one.rank for one in found().candidates]
    assert ranks == sorted(ranks)
    assert ranks[0] == 1
    for one, after in itertools.pairwise(found().candidates):
        faster = one.price.seconds <= after.price.seconds
        assert faster or (
            one.rank == after.rank and one.price.memory.total <= after.price.memory.total
        )
    assert len(found().shown) == SHOWN
    assert all(one.price.fits for one in found().candidates)
    assert all(one.reason for one in found().shown)
    fastest = min(one.price.seconds for one in found().candidates)
    first = found().shown[0]
    assert first.price.seconds <= fastest * (1 + TIE)
    said = (
        "the fastest that fits" if first.price.seconds == fastest else "and the smallest of those"
    )
    assert said in first.reason


@pytest.mark.parametrize(
    "recipe",
    [
        {"Mesh.fsdp": 8},
        {"Mesh.fsdp": 2, "Mesh.tensor": 4, "Sharding.sequence_parallel": True},
        {"Mesh.data": 2, "Mesh.fsdp": 2, "Mesh.tensor": 2, "Sharding.sequence_parallel": True},
        {"Mesh.data": 8, "Mesh.fsdp": 1, "Sharding.zero": 0},
    ],
    ids=["fsdp", "fsdp x tensor 4", "3d", "data"],
)
@pytest.mark.parametrize("policy", ["none", "elementwise", "dots", "full"])
def test_no_hand_written_recipe_is_faster(recipe, policy):
    """With any number of microbatches that fits."""
    target = parse_target(TARGET)
    best = min(one.price.seconds for one in found().candidates)
    tried = 0
    for accumulation in (1, 2, 4, 8, 16, 32):
        changes = {**recipe, "Remat.policy": policy, "Train.accumulation": accumulation}
        config = changed(load_config("llama_1b", KERNEL), changes)
        if refusal(config, target) is not None:
            continue
        tried += 1
        priced = price(config, target)
        assert not priced.fits or best <= priced.seconds * (1 + 1e-9)
    assert tried


def test_bindings_can_be_pasted():
    for one in found().shown:
        pasted = load_config("llama_1b", [*KERNEL, *one.bindings])
        assert pasted == one.config
        assert refusal(pasted, parse_target(TARGET)) is None


@pytest.mark.slow
def test_the_same_question_has_the_same_answer():
    again = search(load_config("llama_1b", KERNEL), parse_target(TARGET))
    assert again == found()


def test_what_was_not_taken_is_counted():
    assert found().priced > found().too_large > 0
    counted = found().to_json()["search"]
    assert (counted["priced"], counted["slower"]) == (found().priced, found().slower)
    refused = {}
    config = load_config(
        "llama_1b", [*KERNEL, "Llama.num_heads=12", "Llama.num_kv_heads=4", "Llama.head_dim=64"]
    )
    assert list(_allowed(config, parse_target(TARGET), 1, refused))
    assert any("Llama.num_heads=12 does not divide" in reason for reason in refused), refused


def test_nothing_fits():
    config = load_config("llama_8b", KERNEL)
    with pytest.raises(UserError, match=r"none of \d+ layouts fits into 1 x 15.8 GiB"):
        search(config, parse_target("v5e:1x1"))
