"""Tokens go to their experts beside the products of others, in programs compiled for a TPU."""

import dataclasses

import pytest
from conftest import lower_step, needs_libtpu
from test_planning_traffic import LAYERS, MIXTRAL, audited, compiled_step, config_of, faults

from jaxtrain import load_config
from jaxtrain.analysis.planning.compiled.audit import Row
from jaxtrain.analysis.planning.compiled.compiled import options_of, target_layout
from jaxtrain.analysis.planning.compiled.schedule import simulate_schedule
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.nn.moe import dispatch
from jaxtrain.training.compose import compose

pytestmark = needs_libtpu

MIXTURE = (
    "Mixtral.vocab_size = 256", "Mixtral.num_layers = 1", "Mixtral.embed_dim = 512",
    "Mixtral.mlp_dim = 2048", "Mixtral.num_experts = 4", "Mixtral.capacity_factor = 1.0",
    "Mixtral.context_length = 2048", "TextData.sequence_length = 2048", "Mesh.fsdp = 1",
    "Mesh.expert = 4", "Train.global_batch_size = 4", "Precision.compute = 'bfloat16'",
    "Attention.kernel = 'reference'",
)  # fmt: skip
ASKED = "xla_tpu_enable_async_all_to_all"


def share_waited(*, asked: bool) -> float:
    """Of the time that the experts' exchanges take in a step compiled as for a run."""
    target = parse_target("v5p:2x2x1")
    config = load_config("mixtral_tiny", MIXTURE)
    layout = target_layout(config, target)
    options = options_of(config, layout)
    assert options.pop(ASKED) == "true"
    batch = config.train.data.abstract_batch(config.train.global_batch_size)
    done = lower_step(compose(config, layout), batch)
    text = done.compile(options | ({ASKED: "true"} if asked else {})).as_text()
    found = simulate_schedule(config, layout, target, text, attention=0, thorough=True)
    waited, sent = found.waits["all-to-all", "expert"]
    assert sent > 0
    return waited / sent


@pytest.mark.slow
@pytest.mark.rotated("schedules")
def test_one_part_goes_beside_the_products_of_the_other(monkeypatch):
    """The first part there and the last one back are waited for; in one part more than half is."""
    monkeypatch.setattr(dispatch, "ROWS_OF_A_PART", 1)
    assert share_waited(asked=True) < 0.5
    assert share_waited(asked=False) == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [None, pytest.param(1.1, marks=pytest.mark.slow)])
def test_tokens_that_go_to_their_experts_in_two_parts_are_the_same_bytes(factor, monkeypatch):
    """The parts of the slots are 36 and 35 of 71, which the compiler tells apart."""
    sizes = dataclasses.replace(MIXTRAL, capacity_factor=factor)
    config = config_of(sizes, {"expert": 4, "data": 2})
    rows = audited(config, *compiled_step(config))
    assert faults(rows, set()) == []
    whole = of_experts(rows)
    monkeypatch.setattr(dispatch, "ROWS_OF_A_PART", 1)
    rows = audited(config, *compiled_step(config))
    assert faults(rows, set()) == []
    cut = of_experts(rows)
    assert sum(row.bytes for row in cut) == sum(row.bytes for row in whole)
    assert sum(row.count for row in cut) == 2 * sum(row.count for row in whole) == 2 * 4 * LAYERS


def of_experts(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.cause == "tokens to experts and back"]
