"""Memory of published runs: what their sources state, and how runs that do not fit are counted."""

import csv
import dataclasses
import re

import pytest

from benchmarks import published_memory
from benchmarks.published_memory import (
    FILES,
    GIB,
    Held,
    against_peaks,
    allocate_as_stack,
    as_its_stack,
    as_published,
    parse_bindings,
    read_memory,
    statements,
    unfit,
)
from jaxtrain import load_config
from jaxtrain.analysis.planning.machines.targets import parse_target

ROWS = {row["id"]: row for file in FILES for row in csv.DictReader(file.open(newline=""))}
ONE = Held("a", "A", "dense", "h100", "zero 1", 10, {}, 10, 10, 20, None)


def test_lines_are_of_runs_and_have_a_source():
    assert statements().keys() <= ROWS.keys()
    for name, line in statements().items():
        assert len(line["source"]) > 20, name
        assert any(line[column] for column in line.keys() - {"id", "source"}), name
        assert line["sums"] in ("", "float32", "whole"), name
        assert not line["repeated"] or 0 < float(line["repeated"]) <= 1, name
        assert not line["gib"] or 10 < float(line["gib"]) < 200, name
    assert sum(bool(line["gib"]) for line in statements().values()) >= 30


def test_what_is_offloaded_is_what_rows_say():
    """A row whose own notes have its layers' inputs in host memory is planned so."""
    for name, row in ROWS.items():
        words = f"{row.get('remat', '')} {row['notes']}"
        if re.search(r"\binputs?\b[^;]*offloaded", words):
            assert "'residual'" in statements()[name]["bindings"], name
            assert "Remat.offload" in statements()[name]["bindings"], name


@pytest.mark.parametrize("name", ["v6e-8b-8", "h100x-tt-8b-8", "h200-kf-01", "7x-405b-256"])
def test_bindings_are_settings(name):
    config = load_config("llama_8b", parse_bindings(statements()[name]["bindings"]))
    kept = config.remat.policy, config.remat.save, config.remat.offload, config.precision.params
    assert kept != ("none", (), (), "float32")


def test_zero_1_of_gpu_clusters_has_sharded_masters():
    """On GPUs alone; in recipes that reduce gradients in bfloat16 those sums too."""
    implied = {name: as_its_stack(row) for name, row in ROWS.items()}
    some = [name for name, more in implied.items() if more]
    assert len(some) == 70
    assert all("Sharding.zero=1" in ROWS[name]["bindings"] for name in some)
    assert {ROWS[name]["stack"] for name in some if len(implied[name]) > 1} == {
        "NeMo", "Megatron-Bridge",
    }  # fmt: skip
    found = load_config("llama_8b", implied["h100-nemo-8b-8"] + ["Sharding.zero = 1"])
    assert (found.sharding.masters, found.precision.gradients) == ("sharded", "bfloat16")


def test_runs_that_do_not_fit_are_counted_by_layout():
    given = [dataclasses.replace(ONE, needed=size) for size in (10, 11, 20, 21)]
    assert "| GPU | zero 1 | 4 | 3 | 1 | 0 |" in unfit(given)


def test_estimates_are_held_against_peaks():
    given = [
        dataclasses.replace(ONE, needed=2 * size, allocated=size, published=10)
        for size in (10, 11, 13)
    ]
    assert "| A | 3 | 2.20 | 1.10 | 2 | 1.00-1.30 |" in against_peaks([*given, ONE])


def test_what_a_stack_allocates_otherwise():
    """FSDP: no copy of 2 bytes, a logit of 10; sums of microbatches are as here."""
    row = {"stack": "torchtitan", "notes": ""}
    config = load_config("llama_8b", ["Mesh.fsdp=8", "Train.accumulation=2"])
    machine = parse_target("h100:1x8")
    parts = {
        "parameters": 400, "gradients": 600, "parameters in the compute dtype": 200,
        "activations: mlp": 1000, "logits": 20,
    }  # fmt: skip
    found = allocate_as_stack(row, config, machine, parts, {"logits": "10"}, 20)
    assert found == 400 + 600 + 1000 + 10 * 10
    assert allocate_as_stack({**row, "stack": "MaxText"}, config, machine, parts, {}, 20) == 2220
    # Whole sums in float32 of weights that are split over 8 devices, a hundred numbers each.
    whole = allocate_as_stack(row, config, machine, parts, {"sums": "whole"}, 20)
    assert whole == 400 + 4 * 800 + 2 * 800 + 1000 + 20


def test_what_a_source_states_and_no_binding_expresses():
    """Half of the layers offloaded; a first moment of 2 bytes beside one of 4; an MLP of two."""
    parts = {
        "parameters": 400, "optimizer": 800, "activations: mlp": 1200, "activations": 100,
        "one layer's backward pass": 50,
    }  # fmt: skip
    row = {"notes": ""}
    assert as_published(row, parts, {}) == parts
    halves = {"activations: mlp": 600, "activations": 50}
    assert as_published(row, parts, {"offloaded": "0.5"}) == parts | halves
    assert as_published(row, parts, {"first_moment": "bfloat16"}) == parts | {"optimizer": 600}
    stand_in = {"notes": "2-matrix ReLU mlp as 3 of two thirds the width"}
    less = {"activations: mlp": 900, "one layer's backward pass": 40}
    assert as_published(stand_in, parts, {}) == parts | less
    both = as_published(stand_in, parts, {"offloaded": "0.5"})
    assert both == parts | halves | {"activations: mlp": 450, "one layer's backward pass": 40}


@pytest.mark.parametrize(("name", "part", "share", "fits_by_it"), [
    ("gb200-nemo-70b-64-fp8", "activations: mlp", 0.5, True),
    ("7x-ds3-128", "optimizer", 0.75, False), ("v5p-32b-64x1", "activations: mlp", 0.75, True),
])  # fmt: skip
def test_an_estimate_has_what_its_source_states(name, part, share, fits_by_it, monkeypatch):
    row = ROWS[name]
    stated = read_memory(row)
    monkeypatch.setattr(published_memory, "as_published", lambda row, parts, more: parts)
    bare = read_memory(row)
    assert stated.parts[part] == pytest.approx(share * bare.parts[part], rel=1e-6)
    assert stated.needed <= stated.room
    assert (bare.needed > bare.room) == fits_by_it


@pytest.mark.parametrize(("name", "live", "arguments"), [
    ("v4-22b-x1", 26.40, 3.88), ("v4-52b-x1", 25.82, 3.03), ("v5p-405b-512", 82.88, 8.91),
    ("v6e-gpt3-256", 22.28, 7.79),
])  # fmt: skip
def test_large_models_on_tpus_need_what_libtpu_finds(name, live, arguments, monkeypatch):
    """GiB of the steps of these rows, which libtpu 0.0.42 accepts (2026-11-29). At their peak at
    most 0.7 of a layer's weights are gathered."""
    monkeypatch.setattr(published_memory, "as_published", lambda row, parts, more: parts)
    found = read_memory(ROWS[name])
    assert found.needed == pytest.approx((live + arguments) * GIB, rel=0.04)
    assert found.needed < found.room


def test_experts_of_megatron_keep_less():
    """The copies of a tensor rank's own tokens alone, beside gate and up."""
    bindings = [
        "Mesh.tensor=2",
        "Mesh.fsdp=4",
        "Mesh.expert=1",
        "Mixtral.embed_dim=64",
        "Mixtral.mlp_dim=32",
    ]
    config = load_config("mixtral_8x7b", [*bindings, "Mixtral.head_dim=64"])
    row, parts = {"stack": "Megatron-LM", "notes": ""}, {"parameters": 0, "gradients": 0}
    machine, parts = parse_target("h100:1x8"), parts | {"activations: experts": 1000}
    found = allocate_as_stack(row, config, machine, parts, {}, 0)
    assert found == round(1000 * (64 / 2 + 2 * 32 / 2) / (64 + 2 * 32 / 2))
    other = allocate_as_stack({**row, "stack": "MaxText"}, config, machine, parts, {}, 0)
    assert other == 1000


def test_weights_are_split_over_a_sequences_ranks_and_nvidia_smi_counts_cudas_context():
    config = load_config("llama_8b", ["Mesh.fsdp=2", "Mesh.context=4"])
    parts = {"parameters": 400, "gradients": 0, "activations: mlp": 7}
    machine = parse_target("h100:1x8")
    row = {"stack": "torchtitan", "notes": ""}
    assert allocate_as_stack(row, config, machine, parts, {}, 0) == 107
    smi = {"source": "by nvidia-smi"}
    assert allocate_as_stack(row, config, machine, parts, smi, 0) == 107 + 1573 * 2**20


def test_a_pipeline_of_one_forward_and_one_backward_waits_for_fewer_microbatches():
    """4 stages have 4 microbatches each at most; in lockstep 7."""
    row = {"stack": "Megatron-LM", "notes": ""}
    bindings = [
        "Mesh.pipe=4", "Mesh.fsdp=2", "Pipeline.schedule='1f1b'", "Pipeline.microbatches=8",
        "Pipeline.backward='residuals'", "Precision.gradients='bfloat16'",
    ]  # fmt: skip
    config = load_config("llama_8b", bindings)
    parts = {"parameters": 4, "gradients": 100, "activations: mlp": 700}
    found = allocate_as_stack(row, config, parse_target("h100:1x8"), parts, {}, 0)
    assert found == 4 + 50 + 400


def test_a_run_that_repeats_a_part_of_its_layers_lies_between():
    row = ROWS["fms-h100-13b"]
    some = float(statements()["fms-h100-13b"]["repeated"])
    found = read_memory(row)
    all_, none = (
        read_memory({**row, "id": "another", "bindings": row["bindings"].replace("'dots'", policy)})
        for policy in ("'full'", "'elementwise'")
    )
    assert all_.needed < found.needed < none.needed
    between = all_.needed + (1 - some) * (none.needed - all_.needed)
    assert found.needed == pytest.approx(between, abs=2)
    assert found.most == found.room  # 0.94 of 80 GB
    assert found.needed / GIB > 30  # an activation of 40 layers of 8,192 tokens
