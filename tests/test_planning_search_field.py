"""What a search tries, how it ranks what it cannot tell apart, and what it says without a fit."""

import dataclasses
import re

import pytest

from jaxtrain import load_config
from jaxtrain.analysis.planning.machines.targets import parse_target, with_memory
from jaxtrain.analysis.planning.search.candidates import TIE, Candidate, assign_ranks, rank
from jaxtrain.analysis.planning.search.search import price, search
from jaxtrain.analysis.planning.search.space import (
    counts,
    meshes_and_schedules,
    stages_and_policies,
)
from jaxtrain.config.errors import UserError
from jaxtrain.parallel.mesh import MESH_AXES

LLAMA_70B = [
    "Llama.num_layers=80", "Llama.embed_dim=8192", "Llama.num_heads=64", "Llama.mlp_dim=28672",
    "Llama.tie_embeddings=False", "TextData.separate_documents=False",
]  # fmt: skip


def test_what_published_runs_have_is_tried():
    """MaxText's, NeMo's and Megatron-LM's layouts, as `published_runs.csv` writes them."""
    config = load_config("llama_8b", [*LLAMA_70B, "Train.global_batch_size=512"])
    machine = parse_target("h100:8x8")
    tried = [
        {**mesh, **rest}
        for mesh in meshes_and_schedules(config, machine, 64)
        for rest in stages_and_policies(config, machine, mesh)
    ]
    published = [
        # NeMo 25: TP4 PP4 CP2, interleaved by 5; Megatron-LM: TP8 PP8, one stage a rank.
        {"Mesh.tensor": 4, "Mesh.pipe": 4, "Mesh.context": 2, "Pipeline.virtual_stages": 5},
        {"Mesh.tensor": 8, "Mesh.pipe": 8, "Pipeline.schedule": "1f1b"},
        {"Mesh.tensor": 4, "Mesh.pipe": 4, "Pipeline.backward": "residuals"},
        {"Mesh.fsdp": 64, "Remat.policy": "elementwise", "Sharding.zero": 3},
        {"Mesh.fsdp": 32, "Mesh.tensor": 2, "Remat.policy": "full", "Sharding.zero": 1},
        {"Mesh.tensor": 2, "Mesh.pipe": 2, "Mesh.context": 2, "Mesh.fsdp": 8},
        # MaxText on v6e: inputs, queries, keys, values and attention on the hosts.
        {"Mesh.fsdp": 64, "Remat.offload": ("residual", "query", "key", "value", "attention")},
    ]
    for layout in published:
        assert any(layout.items() <= one.items() for one in tried), layout
    # Stages that keep what they need keep it on the device: `jaxtrain train` rejects the others.
    assert not any(
        one.get("Remat.offload") and one.get("Pipeline.backward") == "residuals" for one in tried
    )


def test_microbatches_that_are_no_whole_rounds_are_tried_where_there_are_no_others():
    """60 rows over 8 ranks: of their divisors above 16 none is a multiple of 8."""
    config = load_config("gpt2_124m", ["Train.global_batch_size=60"])
    layout = {f"Mesh.{axis}": 1 for axis in MESH_AXES} | {"Mesh.pipe": 8}
    found = [one["Pipeline.microbatches"] for one in counts(config, layout)]
    assert found == [20, 30, 60]
    interleaved = {**layout, "Pipeline.schedule": "interleaved"}
    assert len(list(counts(config, interleaved))) == 1


def candidate(seconds, total):
    config = load_config("gpt2_124m", ["GPT.num_layers=1"])
    found = price(config, parse_target("h100:1x8"))
    time = dataclasses.replace(found.time, compute=seconds, exposed=0.0, bubble=0.0)
    rest = total - found.memory.arguments.total - found.memory.gradients
    needed = dataclasses.replace(found.memory, parts={"rest": rest})
    return Candidate({}, config, dataclasses.replace(found, time=time, memory=needed))


def test_what_the_prediction_cannot_tell_apart_shares_a_rank_the_smallest_first():
    gib = 2**30
    close, far = 1 + 0.9 * TIE, 1 + 1.1 * TIE
    given = [(1.0, 30), (close, 20), (far, 10), (far * close, 40), (5.0, 1)]
    found = rank([candidate(seconds, size * gib) for seconds, size in reversed(given)])
    assert [(one.rank, one.price.memory.total // gib) for one in found] == [
        (1, 20), (1, 30), (3, 10), (3, 40), (5, 1),
    ]  # fmt: skip
    # In an order that is given, as after compiling, ranks follow it.
    assert [one.rank for one in assign_ranks([found[4], found[0], found[1]])] == [1, 2, 2]


@pytest.mark.slow
def test_where_nothing_fits_the_ways_out_are_true():
    """The settings that it names make the layout fit, and as many devices as it says do."""
    config = load_config("llama_1b", ["Train.global_batch_size=8", "Llama.num_layers=15"])
    with pytest.raises(UserError) as error:
        search(config, parse_target("l4:1x1"))
    said = re.search(
        r"the smallest takes \S+ GiB a device, \S+ [GM]iB too much \((.*)\): with (.*) it fits, "
        r"and so it does on about (\d+) devices$",
        str(error.value),
    )
    assert said, str(error.value)
    smallest = re.findall(r"([A-Z]\w+\.\w+=(?:'\w+'|\w+|\([^)]*\)))", said[1])
    settings = said[2].split(" and ")
    base = ["Train.global_batch_size=8", "Llama.num_layers=15"]

    def fits(*bindings):
        config = load_config("llama_1b", [*base, *smallest, *bindings])
        part = config.train.gpu_memory_fraction  # which may be what makes it fit
        return price(config, with_memory(parse_target("l4:1x1"), part)).fits

    assert not fits()
    assert fits(*settings)
    assert search(config, parse_target(f"l4:1x{said[3]}")).candidates
