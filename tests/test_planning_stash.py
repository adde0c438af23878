"""What waits for gradients of weights that a schedule takes later: counted, and in the program."""

import math

import pytest

from jaxtrain import load_config
from jaxtrain.analysis.planning.compiled.compiled import lower, options_of, target_layout
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.analysis.planning.textbook.memory import memory, memory_without_stash
from jaxtrain.analysis.planning.textbook.profile import layer_stash
from jaxtrain.analysis.planning.textbook.steady import waiting
from jaxtrain.training.layouts import abstract_layout
from jaxtrain.training.pipeline.backward import Backward
from jaxtrain.training.pipeline.schedules import Pipeline

ROWS, MICROBATCHES = 16, 4
SIZES = [
    "Llama.num_layers = 4", "Llama.embed_dim = 64", "Llama.num_heads = 4", "Llama.num_kv_heads = 2",
    "Llama.mlp_dim = 160", "Llama.vocab_size = 256", "TextData.sequence_length = 64",
    "Llama.context_length = 64", f"Train.global_batch_size = {ROWS}", "Train.accumulation = 1",
    "SOURCE = 'x'", "TOKENIZER = 'x'", "TextData.separate_documents = False",
]  # fmt: skip


def config_of(schedule: str, backward: str, policy: str, *more: str):
    pipeline = [
        "Mesh.pipe = 2", "Mesh.fsdp = 1", f"Pipeline.schedule = '{schedule}'",
        f"Pipeline.microbatches = {MICROBATCHES}", f"Pipeline.backward = '{backward}'",
        f"Remat.policy = '{policy}'", "Attention.kernel = 'reference'",
    ]  # fmt: skip
    return load_config("llama_8b", [*SIZES, *pipeline, *more])


@pytest.mark.slow_cases("none-recompute", "elementwise-residuals", "full-residuals")
@pytest.mark.parametrize("backward", ["residuals", "recompute"])
@pytest.mark.parametrize("policy", ["none", "elementwise", "full"])
def test_a_layer_s_share_is_that_of_the_stages_of_a_run(monkeypatch, backward, policy):
    """Two layers a stage. In one case of six they have one array of forty in common."""
    config, seen = config_of("zero_bubble", backward, policy), []

    def halves(self, *arguments):
        found = plain(self, *arguments)
        seen.append(sum(math.prod(x.shape) * x.dtype.itemsize for x in found.stash))
        return found

    plain = Backward.halves
    monkeypatch.setattr(Backward, "halves", halves)
    layout = target_layout(config, parse_target("cpu:2"))
    lower(config, layout, options_of(config, layout))
    monkeypatch.setattr(Backward, "halves", plain)
    layer = layer_stash(config, abstract_layout(config, 2), "cpu")
    rows = ROWS // MICROBATCHES
    assert seen[0] == pytest.approx(2 * rows * layer, rel=0.06)


def test_the_plan_counts_it_where_a_schedule_has_it():
    parts, without = {}, {}
    for schedule, chunks in (("1f1b", 1), ("zero_bubble", 1), ("dualpipe_v", 2)):
        more = f"Pipeline.virtual_stages = {chunks}"
        config = config_of(schedule, "residuals", "elementwise", more)
        layout = abstract_layout(config, 2)
        whole = memory(config, layout, "cpu")
        parts[schedule] = whole.parts
        without[schedule] = memory_without_stash(config, layout, "cpu")
        if without[schedule] is not None:
            without[schedule] -= whole.total
    name = "pipeline: for gradients of weights"
    assert name not in parts["1f1b"]
    assert without["1f1b"] is None
    # What the search compares first: the rest, in the phase that is the largest of both.
    assert without["zero_bubble"] == -parts["zero_bubble"][name]
    layer = layer_stash(config, abstract_layout(config, 2), "cpu")
    for schedule, chunks in (("zero_bubble", 1), ("dualpipe_v", 2)):
        pipeline = Pipeline(schedule=schedule, microbatches=MICROBATCHES, virtual_stages=chunks)
        places = waiting(pipeline, 2).stash
        assert places > 0
        assert parts[schedule][name] == places * (2 // chunks) * (ROWS // MICROBATCHES) * layer
