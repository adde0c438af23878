"""What to change so that a configuration fits: bindings that load, checked, cheapest first."""

import functools
import re

import pytest

from jaxtrain.analysis.planning.advice import fixes_for, remarks
from jaxtrain.analysis.planning.compiled.audit import Row
from jaxtrain.analysis.planning.machines.targets import parse_target, with_memory
from jaxtrain.analysis.planning.search.search import price
from jaxtrain.analysis.planning.search.variants import apply_changes, bindings_of, rejection_reason
from jaxtrain.training.layouts import abstract_layout
from jaxtrain.training.settings import load_config

NONE = ("Train.accumulation=5", "Remat.policy='none'")


@functools.cache
def too_large(name: str, target: str, bindings: tuple[str, ...] = ()):
    config, machine = load_config(name, bindings), parse_target(target)
    before = price(config, machine)
    assert not before.fits
    over = before.memory.total - machine.chip.hbm_bytes
    return config, machine, before, fixes_for(config, machine, over=over)


@pytest.mark.parametrize(
    "changes",
    [
        {"Mesh.tensor": 4, "Mesh.fsdp": 2, "Sharding.sequence_parallel": True},
        {"Attention.kernel": "tpu", "Remat.policy": "full", "Loss.chunk_size": 128},
        {"Train.accumulation": 2, "Pipeline.microbatches": 4, "Precision.params": "bfloat16"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_pasted_bindings_are_the_changed_configuration(changes):
    plain = load_config("gpt_quickstart")
    found = apply_changes(plain, changes)
    assert found == load_config("gpt_quickstart", bindings_of(changes))
    assert found != plain


def test_a_refusal_names_its_reasons():
    target = parse_target("v5e:2x4")
    config = load_config("gpt_quickstart")
    assert rejection_reason(config, target) is None
    found = rejection_reason(apply_changes(config, {"Mesh.tensor": 3, "Mesh.fsdp": 1}), target)
    assert found is not None
    assert "Mesh" in found
    both = apply_changes(config, {"Attention.kernel": "cudnn", "Train.accumulation": 3})
    found = rejection_reason(both, target)
    assert found is not None
    assert "cudnn" in found
    assert "accumulation" in found


def test_fixes_fit_load_and_come_cheapest_first():
    config, target, before, found = too_large("gpt2_124m", "v5e:1x1", NONE)
    assert found
    assert [fix.slower for fix in found] == sorted(fix.slower for fix in found)
    for fix in found:
        variant = load_config("gpt2_124m", [*NONE, *fix.bindings])
        after = price(variant, target)
        assert variant == apply_changes(config, fix.changes)
        assert fix.fits
        assert after.fits
        assert rejection_reason(variant, target) is None
        assert fix.saved == before.memory.total - after.memory.total > 0
        assert fix.slower == pytest.approx(after.seconds / before.seconds - 1)
        assert fix.sentence.endswith("(fits)")
        assert all(f'-b "{binding}"' in fix.sentence for binding in fix.bindings)


@pytest.mark.slow
def test_where_one_change_is_not_enough_several_are_combined():
    """The state of 1.2 billion parameters is too much, and so are the inputs of 16 layers for 64
    rows."""
    bindings = ("Sharding.zero=0", "Train.accumulation=1")
    config, target, _, found = too_large("llama_1b", "v5e:2x2", bindings)
    combined, *rest = found
    assert combined.fits
    assert len(combined.changes) > 1
    assert price(apply_changes(config, combined.changes), target).fits
    assert rest
    assert not any(fix.fits for fix in rest)
    assert all(fix.sentence.endswith("(not enough alone)") for fix in rest)
    assert [fix.saved for fix in rest] == sorted((fix.saved for fix in rest), reverse=True)


def test_what_has_no_closed_form_is_one_remark_and_what_should_have_one_is_flagged():
    mesh, target = ["Mesh.fsdp = 2", "Mesh.tensor = 2"], parse_target("v5e:2x2")

    def said(name: str) -> list[str]:
        config = load_config(name, mesh)
        rows = [
            Row("all-gather", axis, 2, 2**20, "unexpected: x", "", None, False)
            for axis in ("tensor", "tensor", "fsdp")
        ]
        told = remarks(config, target, abstract_layout(config, 4), rows, ())
        return [line for line in told if "collectives over" in line or "flagged" in line]

    together, of_fsdp = said("resnet_mnist5k")
    assert together.startswith("4 collectives over tensor, 2.0 MiB a step, belong to layers of")
    assert of_fsdp.startswith("flagged: all-gather over fsdp, 1.0 MiB a step")
    assert [line.split(",")[0] for line in said("gpt_quickstart")] == [
        "flagged: all-gather over tensor",
        "flagged: all-gather over tensor",
        "flagged: all-gather over fsdp",
    ]


def test_chunks_of_the_loss_that_are_too_small_are_told_with_one_that_is_not():
    """512 places of a sequence over eight devices are 64 on each, of two rows 128."""
    bindings = ["Mesh.fsdp=1", "Mesh.context=8", "Train.accumulation=128"]
    target = parse_target("v5p:2x2x2")

    def told(*more: str) -> tuple[float, list[str]]:
        config = load_config("llama_1b", [*bindings, *more])
        cost = price(config, target).time
        assert cost.seconds is not None
        lines = remarks(config, target, abstract_layout(config, 8), (), ())
        return cost.chunks / cost.seconds, [line for line in lines if "chunk_size" in line]

    share, (line,) = told("Loss.chunk_size=512")
    assert share > 0.01
    assert " is 128 positions on a device: " in line
    (pasted,) = re.findall(r'-b "(Loss.chunk_size=\d+)" is faster', line)
    less, nothing = told(pasted)
    assert less <= 0.01
    assert not nothing


def test_a_gpu_s_memory_that_jax_leaves_alone_is_the_first_way_out():
    """0.9 of a board of 24 GB by itself, 0.94 where it is requested; of an H100 0.94 by itself."""
    bindings = ["Train.accumulation=8", "Remat.policy='none'"]
    config, target = load_config("gpt2_124m", bindings), parse_target("rtx4090:1x1")
    found = fixes_for(config, target, over=2**29)[0]
    assert found.changes == {"Train.gpu_memory_fraction": 0.94}
    assert found.saved == pytest.approx(23.64 * 2**30 * (0.94 - 0.9), abs=2)
    assert "968.3 MiB more of each GPU for programs (fits)" in found.sentence
    whole = with_memory(target, 0.94)
    others = parse_target("h100:1x1"), parse_target("v5e:1x1")
    for machine, over in ((target, 2**30), (whole, 1), *((other, 1) for other in others)):
        fixes = fixes_for(config, machine, over=over)
        assert not any("Train.gpu_memory_fraction" in fix.changes for fix in fixes)
