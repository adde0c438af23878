"""What waits at a pipeline's rank, as a TPU's compiler moves it."""

import math
import re

import pytest
from conftest import needs_libtpu

from jaxtrain.analysis.planning.compiled.compiled import lower, target_layout
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.training.pipeline.slots import slots
from jaxtrain.training.pipeline.timetables import make_schedule
from jaxtrain.training.settings import load_config

RANKS, MICROBATCHES, WIDTH, TOKENS = 4, 16, 512, 8 * 256


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_no_action_copies_what_waits_for_others(schedule):
    """A branch that hands a buffer on, or reads a place of it in another layout, had all its places
    copied in every tick."""
    chunks = 2 if schedule == "interleaved" else 1
    config = load_config(
        "llama_1b",
        [
            "SOURCE = 'x'", "TOKENIZER = 'x'", "TextData.separate_documents = False",
            "TextData.sequence_length = 256", "Llama.context_length = 256",
            "Llama.vocab_size = 256", f"Llama.embed_dim = {WIDTH}", "Llama.num_heads = 4",
            "Llama.num_kv_heads = 4", "Llama.mlp_dim = 2048",
            f"Llama.num_layers = {RANKS * chunks}", "Attention.kernel = 'xla'", "Mesh.fsdp = 1",
            f"Mesh.pipe = {RANKS}", f"Pipeline.schedule = '{schedule}'",
            f"Pipeline.virtual_stages = {chunks}", "Pipeline.backward = 'residuals'",
            f"Pipeline.microbatches = {MICROBATCHES}", "Remat.policy = 'elementwise'",
            "Train.accumulation = 1", f"Train.global_batch_size = {8 * MICROBATCHES}",
        ],
    )  # fmt: skip
    table = slots(
        make_schedule(schedule, ranks=RANKS, microbatches=MICROBATCHES, virtual_stages=chunks),
        backward="residuals",
    )
    layout = target_layout(config, parse_target("v5e:2x2"))
    text = lower(config, layout).compile({"exec_time_optimization_effort": -1.0}).as_text() or ""
    places = table.num_residual_slots
    assert places > 2
    copied = [
        shape
        for shape in re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text)
        if shape.startswith(f"{places},")
        and math.prod(map(int, shape.split(","))) >= places * TOKENS * WIDTH
    ]
    assert copied == []
    assert re.search(rf"= \w+\[{places},[\d,]+\]", text), "the buffers are in the program"
