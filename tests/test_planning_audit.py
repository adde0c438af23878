"""The audit names what has no reason, what took another form and what lies elsewhere than meant."""

import dataclasses
import functools

import jax
import pytest
import test_traffic
from conftest import needs_libtpu
from jax.sharding import PartitionSpec as P
from test_planning_traffic import LLAMA, MODELS, audited, config_of

from jaxtrain.analysis.planning.compiled.audit import SMALL_THINGS, Row, audit, over_dcn, over_hosts
from jaxtrain.analysis.planning.compiled.collectives import Collective, collectives
from jaxtrain.analysis.planning.compiled.placement import find_misplaced, find_replicated, paddings
from jaxtrain.analysis.planning.textbook.facts import Expected
from jaxtrain.config.errors import UserError
from jaxtrain.nn.transformer.decoder import Decoder
from jaxtrain.parallel.sharding import Sharding, shard
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.compose import compose
from jaxtrain.training.layouts import abstract_layout, layout
from jaxtrain.training.preflight.preflight import check
from jaxtrain.training.settings import load_config
from jaxtrain.training.state import with_shardings

SIZES = {"data": 2, "fsdp": 4}
KIB = 1024


def moved(kind: str, axis: str, count: int, kib: int, op_name: str = "", shape=()) -> Collective:
    return Collective(kind, axis, count, kib * KIB, "bf16", shape, op_name, "")


def meant(kind: str, axis: str, count: int, kib: int, cause: str) -> Expected:
    return Expected(kind, axis, count, kib * KIB, cause, "")


def one(rows: list[Row]) -> Row:
    (row,) = rows
    return row


def test_equal_arrays_share_their_reasons():
    expected = [
        meant("all-reduce", "data", 3, 100, "gradients: up"),
        meant("all-reduce", "data", 3, 100, "gradients: gate"),
    ]
    rows = audit([moved("all-reduce", "data", 6, 100)], expected, SIZES)
    assert {row.cause: (row.count, row.bytes, row.textbook_bytes) for row in rows} == {
        "gradients: up": (3, 300 * KIB, 300 * KIB),
        "gradients: gate": (3, 300 * KIB, 300 * KIB),
    }
    assert all(row.explained for row in rows)


def test_an_array_of_two_rows_is_not_two_layers_of_another():
    """Equal to two layers' in bytes and count, and yet what both of its reasons expect."""
    expected = [
        meant("all-gather", "data", 6, 64, "attention: into the block"),
        meant("all-gather", "data", 6, 128, "mlp: side of the cube"),
    ]
    found = [
        moved("all-gather", "data", 3, 128, "attention/reshard", shape=(2, 128, 8, 32)),
        moved("all-gather", "data", 3, 128, "mlp/reshard", shape=(2, 128, 8, 32)),
        moved("all-gather", "data", 3, 64, "attention/reshard", shape=(2, 128, 4, 32)),
        moved("all-gather", "data", 3, 64, "attention/reshard", shape=(2, 128, 4, 32)),
    ]
    rows = audit(found, expected, SIZES)
    assert {row.cause: (row.count, row.bytes) for row in rows} == {
        "attention: into the block": (6, 6 * 64 * KIB),
        "mlp: side of the cube": (6, 6 * 128 * KIB),
    }


def test_arrays_laid_end_to_end_have_their_reasons_each():
    text = """
HloModule packed

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%end_to_end (x: f32[40960], y: f32[25600], z: f32[1]) -> f32[66561] {
  %x = f32[40960]{0} parameter(0)
  %y = f32[25600]{0} parameter(1)
  %z = f32[1]{0} parameter(2)
  ROOT %concatenate.1 = f32[66561]{0} concatenate(%x, %y, %z), dimensions={0}
}

ENTRY %main (p: f32[2,20480], q: f32[25600], r: f32[1]) -> f32[66561] {
  %p = f32[2,20480]{1,0} parameter(0)
  %q = f32[25600]{0} parameter(1)
  %r = f32[1]{0} parameter(2)
  %flat = f32[40960]{0} bitcast(%p)
  %wrapped = f32[66561]{0} fusion(%flat, %q, %r), kind=kLoop, calls=%end_to_end
  ROOT %all-reduce = f32[66561]{0} all-reduce(%wrapped), replica_groups={{0,1}}, to_apply=%add
}
"""
    expected = [
        meant("all-reduce", "data", 2, 80, "gradients: up"),
        meant("all-reduce", "data", 1, 100, "gradients: embedding"),
    ]
    found = collectives(text, {"data": 2})
    rows = audit(found, expected, {"data": 2})
    assert {row.cause: row.bytes for row in rows} == {
        "gradients: up": 160 * KIB,
        "gradients: embedding": 100 * KIB,
        SMALL_THINGS: 4,
    }
    assert sum(row.bytes for row in rows) == found[0].bytes
    _, unexpected, *_ = audit(found, expected[:1], {"data": 2})
    assert not unexpected.explained
    assert unexpected.bytes == 100 * KIB


def test_two_layers_in_one_array_are_not_taken_for_another_weights_one():
    """[2, 256, 256] of the queries has as many bytes as one layer's [256, 512] of the gate."""
    expected = [
        meant("all-reduce", "data", 2, 200, "gradients: gate"),
        meant("all-reduce", "data", 2, 100, "gradients: query"),
    ]
    found = [
        moved("all-reduce", "data", 1, 200, shape=(2, 256, 256)),
        moved("all-reduce", "data", 1, 400, shape=(2, 256, 512)),
    ]
    rows = audit(found, expected, SIZES)
    assert {row.cause: row.bytes for row in rows} == {
        "gradients: gate": 400 * KIB,
        "gradients: query": 200 * KIB,
    }


def test_named_scopes_decide_between_equal_arrays():
    expected = [
        meant("all-reduce", "data", 1, 100, "attention output"),
        meant("all-reduce", "data", 1, 100, "mlp output"),
    ]
    rows = audit([moved("all-reduce", "data", 1, 100, "jvp()/mlp/dot")], expected, SIZES)
    assert {row.cause: row.count for row in rows} == {
        "mlp output": 1,
        "attention output (not moved)": 0,
    }


def test_layers_in_one_array_are_their_layers():
    expected = [meant("all-gather", "fsdp", 3, 100, "update: up")]
    rows = audit([moved("all-gather", "fsdp", 1, 300, shape=(3, 64, 64))], expected, SIZES)
    assert (one(rows).bytes, one(rows).textbook_bytes) == (300 * KIB, 300 * KIB)
    # Thrice the bytes of something else, without a dimension of 3, are not.
    rows = audit([moved("all-gather", "fsdp", 1, 300, shape=(64, 64))], expected, SIZES)
    assert [row.explained for row in rows] == [False, True]


def test_another_form_of_a_reduce_scatter_is_said():
    expected = [meant("reduce-scatter", "fsdp", 3, 100, "gradients: up")]
    row = one(audit([moved("all-reduce", "fsdp", 3, 100)], expected, SIZES))
    assert row.explained
    assert "twice the wire" in row.cause
    assert row.kind == "all-reduce"
    expected.append(meant("all-reduce", "data", 3, 25, "gradients: up"))
    row = one(audit([moved("all-reduce", "data+fsdp", 3, 100)], expected, SIZES))
    assert row.explained
    assert "reduced whole over data+fsdp" in row.cause
    assert row.textbook_bytes == 3 * 125 * KIB


def scattered(count: int, kib: int, rows: int) -> Collective:
    """Of so many rows on 4 devices."""
    return moved("reduce-scatter", "fsdp", count, kib, shape=(rows, kib * KIB // 2 // rows))


def test_shards_padded_to_whole_tiles_are_the_textbook_s_up_to_a_third():
    expected = [meant("reduce-scatter", "fsdp", 2, 192, "gradients: out")]  # 12 rows each
    row = one(audit([scattered(2, 256, rows=64)], expected, SIZES))
    assert row.explained
    assert row.cause == "gradients: out (padded to whole tiles)"
    assert (row.bytes, row.textbook_bytes) == (512 * KIB, 384 * KIB)
    for kib, rows in ((260, 64), (256, 48)):  # more; 12 rows each are no tiles
        found = audit([scattered(2, kib, rows)], expected, SIZES)
        assert [row.explained for row in found] == [False, True]


def test_the_least_padded_is_taken_for_padding():
    expected = [
        meant("reduce-scatter", "fsdp", 2, 200, "gradients: key"),
        meant("reduce-scatter", "fsdp", 2, 240, "gradients: out"),
    ]
    rows = audit([scattered(2, 256, rows=64)], expected, SIZES)
    assert {row.cause: row.count for row in rows} == {
        "gradients: out (padded to whole tiles)": 2,
        "gradients: key (not moved)": 0,
    }


def test_after_a_padded_scatter_less_than_a_shard_moves_back_once():
    expected = [meant("reduce-scatter", "fsdp", 2, 316, "gradients: token_embedding")]
    scatter = scattered(2, 320, rows=160)
    for found, explained in (
        (moved("collective-permute", "fsdp", 2, 79), True),
        (moved("collective-permute", "fsdp", 3, 79), False),
        (moved("collective-permute", "fsdp", 2, 80), False),  # a whole shard
        (moved("collective-permute", "data", 2, 79), False),
    ):
        rows = [row for row in audit([scatter, found], expected, SIZES) if row.kind == found.kind]
        assert all(row.explained for row in rows) is explained
        assert sum(row.bytes for row in rows) == found.total_bytes
    assert all(row.explained for row in audit([scatter], expected, SIZES))
    (row,) = audit([moved("collective-permute", "fsdp", 2, 80)], [], SIZES)
    assert not row.explained  # nothing was padded


def test_shards_that_lie_further_move_back_in_as_many_pieces_more():
    """12 rows padded to 16 on 9 devices: the last one's begin two shards later."""
    expected = [meant("reduce-scatter", "fsdp", 1, 1080, "gradients: out")]
    scatter = scattered(1, 1440, rows=144)
    for count, explained in ((3, True), (4, False)):
        found = [scatter, moved("collective-permute", "fsdp", count, 160)]
        assert all(row.explained for row in audit(found, expected, {"fsdp": 9})) is explained
    found = [scatter, moved("collective-permute", "fsdp", 1, 161)]
    assert not all(row.explained for row in audit(found, expected, {"fsdp": 9}))


def test_rows_move_back_to_the_smallest_shards_that_they_are_parts_of():
    expected = [
        meant("reduce-scatter", "fsdp", 1, 632, "gradients: token_embedding"),
        meant("reduce-scatter", "fsdp", 1, 316, "gradients: out"),
    ]
    found = [
        scattered(1, 640, rows=320), scattered(1, 320, rows=160),
        moved("collective-permute", "fsdp", 1, 70), moved("collective-permute", "fsdp", 1, 150),
    ]  # fmt: skip
    rows = audit(found, expected, SIZES)
    assert all(row.explained for row in rows)
    back = {row.cause: row.bytes for row in rows if row.kind == "collective-permute"}
    words = "(padded to whole tiles: rows moved back)"
    assert back == {
        f"gradients: token_embedding {words}": 150 * KIB,
        f"gradients: out {words}": 70 * KIB,
    }


def test_a_gather_written_as_a_sum_is_a_gather():
    expected = [meant("all-gather", "fsdp", 1, 25, "replicas: scales")]
    row = one(audit([moved("all-reduce", "fsdp", 1, 100)], expected, SIZES))
    assert row.explained
    assert "all-gather as all-reduce" in row.cause
    # Counted alike: an all-reduce is given the whole array, a gather only a device's part.
    assert (row.bytes, row.textbook_bytes) == (100 * KIB, 100 * KIB)


def test_a_cpu_s_float32_in_place_of_bfloat16_is_the_textbook_s_and_nothing_else_is():
    """Of two sums with as many bytes, the one that was bfloat16 is not taken for the other."""
    expected = [
        meant("all-reduce", "fsdp", 3, 50, "attention output"),
        meant("reduce-scatter", "fsdp", 2, 100, "gradients: up"),
        meant("all-reduce", "data", 1, 100, "gradients: norm"),
    ]
    found = [
        dataclasses.replace(moved("all-reduce", axis, count, kib), dtype="f32")
        for axis, count, kib in (("fsdp", 3, 100), ("fsdp", 2, 200), ("data", 1, 100))
    ]
    rows = audit(found, expected, SIZES, widens=True)
    assert all(row.explained for row in rows)
    moved_by = {row.cause.partition(" (")[0]: (row.bytes, row.textbook_bytes) for row in rows}
    assert moved_by == {
        "attention output": (300 * KIB, 150 * KIB),
        "gradients: up": (400 * KIB, 200 * KIB),
        "gradients: norm": (100 * KIB, 100 * KIB),
    }
    assert sum("(bfloat16 as float32" in row.cause for row in rows) == 2
    assert not all(row.explained for row in audit(found, expected, SIZES))  # another compiler's


def test_the_greatest_of_bfloat16_numbers_may_be_sent_as_float32():
    """And not taken for a gradient that has as many bytes as the textbook's."""
    expected = [
        meant("all-reduce", "tensor", 40, 12, "loss: greatest logit"),
        meant("all-reduce", "tensor", 120, 12, "gradients: norm"),
    ]
    found = [
        dataclasses.replace(moved("all-reduce", "tensor", 120, 12), dtype="f32"),
        dataclasses.replace(
            moved("all-reduce", "tensor", 40, 24, "jit(step)/jvp(loss)/reduce_max"), dtype="f32"
        ),
    ]
    rows = {row.cause.partition(" (")[0]: row for row in audit(found, expected, SIZES)}
    assert {name: (row.count, row.bytes) for name, row in rows.items()} == {
        "loss: greatest logit": (40, 40 * 24 * KIB),
        "gradients: norm": (120, 120 * 12 * KIB),
    }
    assert all(row.explained for row in rows.values())


def test_what_nobody_expects_is_flagged_unless_it_is_small():
    found = [
        moved("all-gather", "data", 2, 500, "jit(step)/mlp/reshard", (8, 128)),
        moved("all-reduce", "data", 2, 30),
        moved("all-reduce", "data", 1, 1),
    ]
    large, small = audit(found, [], SIZES)
    assert not large.explained
    assert large.textbook_bytes is None
    assert large.cause == "unexpected: bf16[8,128] from jit(step)/mlp/reshard"
    assert (small.cause, small.count, small.bytes) == (SMALL_THINGS, 3, 61 * KIB)
    assert small.explained
    # More often than expected: what is too much has no reason.
    rows = audit(
        [moved("all-reduce", "data", 3, 100)], [meant("all-reduce", "data", 2, 100, "x")], SIZES
    )
    assert [(row.explained, row.count) for row in rows] == [(True, 2), (False, 1)]


def test_what_does_not_move_is_said():
    row = one(audit([], [meant("all-gather", "fsdp", 2, 100, "parameters: up")], SIZES))
    assert (row.count, row.bytes, row.textbook_bytes) == (0, 0, 200 * KIB)
    assert row.cause == "parameters: up (not moved)"


def test_axes_over_slices_and_hosts_are_slow():
    expected = [
        meant("all-reduce", "data+fsdp", 1, 100, "x"),
        meant("all-reduce", "fsdp", 1, 9, "y"),
    ]
    found = [moved("all-reduce", "data+fsdp", 1, 100), moved("all-reduce", "fsdp", 1, 9)]
    rows = audit(found, expected, SIZES, dcn=over_dcn({"data": 2, "fsdp": 1}))
    assert [row.link for row in rows] == ["dcn", "ici"]
    assert [row.link for row in audit(found, expected, SIZES)] == ["ici", "ici"]
    sizes = {"data": 4, "fsdp": 4, "tensor": 2}
    assert over_hosts(sizes, 8) == {"data"}
    assert over_hosts(sizes, 4) == {"data", "fsdp"}
    assert over_hosts(sizes, 32) == set()
    assert over_hosts(sizes, 1) == {"data", "fsdp", "tensor"}


# Compiles a step; texts of compiled steps are in the fast part.
@pytest.mark.slow
@needs_libtpu
def test_a_sharding_without_need_is_found_in_a_compiled_step(monkeypatch):
    """Between two parts of the model every device is given the whole batch, and drops it again."""
    finish = Decoder.finish

    def planted(self, x_BTD):  # noqa: ANN001, ANN202
        x_BTD = jax.sharding.reshard(finish(self, x_BTD), P(None, None, None))
        return shard(jax.lax.optimization_barrier(x_BTD), ("batch", "length", "embed"))

    monkeypatch.setattr(Decoder, "finish", planted)
    # Two layers: no other test compiles this, so none is handed the planted program.
    step, mesh = test_traffic.step_of("llama", 2, data=8)
    config = config_of(dataclasses.replace(LLAMA, num_layers=2), {"data": 8})
    rows = audited(config, step.as_text(), dict(mesh.shape))
    flagged = [row for row in rows if not row.explained]
    row_bytes = 128 * 256 * 2  # of the one row of the batch that a device has
    # Forward and, of the gradient, backward.
    assert [(row.kind, row.axis, row.bytes) for row in flagged] == [
        ("all-gather", "data", row_bytes)
    ] * 2
    assert all("reshard" in row.cause for row in flagged)


# -- where parameters lie ------------------------------------------------------------------------


def test_parameters_that_could_be_shared_are_listed():
    config = config_of(LLAMA, {"fsdp": 8}, sharding=Sharding(zero=1))
    found = find_replicated(config, abstract_layout(config, 8), threshold=100_000)
    bytes_of = {row.name: row.bytes for row in found}
    assert bytes_of["layers/up"] == 4 * 3 * 256 * 512
    assert bytes_of["output"] == 4 * 128 * 256
    assert all("norm" not in name for name in bytes_of)
    assert {row.way_out for row in found} == {"Sharding.zero = 3"}
    assert all(8 * (row.bytes - row.saving) == row.bytes for row in found)
    config = config_of(LLAMA, {"fsdp": 8})
    assert find_replicated(config, abstract_layout(config, 8), threshold=10_000) == []
    few = dataclasses.replace(MODELS["llama8"], num_kv_heads=2)
    config = config_of(few, {"tensor": 8})
    found = find_replicated(config, abstract_layout(config, 8), threshold=10_000)
    assert {row.name for row in found} == {"layers/key", "layers/value"}
    assert {row.axis for row in found} == {"tensor"}
    assert "Llama.num_kv_heads a multiple of 8" in found[0].way_out


@functools.cache
def tiny(out: bool):
    """A program, and its train step compiled with or without the intended results' shardings."""
    config = config_of(dataclasses.replace(LLAMA, num_layers=1), {"fsdp": 4}, length=16)
    over = layout(config, jax.devices()[:4])
    program = compose(config, over)
    batch = config.train.data.abstract_batch(config.train.global_batch_size)
    with over.active():
        if out:
            return program, CompiledStep(program).lower(batch).compile()
        batch = with_shardings(batch, program.setup.batch_shardings(batch))
        return program, jax.jit(_gathered(program)).lower(program.abstract_state(), batch).compile()


def _gathered(program):
    """A step that gives one of its results whole to every device."""

    def step(state, batch):  # noqa: ANN001, ANN202
        params = state.params
        whole = jax.tree.map(lambda x: x, params)
        spec = P(None, None)
        value = jax.sharding.reshard(params["output"].get_value(), spec)
        whole["output"] = params["output"].replace(value)
        return dataclasses.replace(state, params=whole), batch.inputs

    return step


def test_where_the_state_lies_is_held_against_the_intention():
    assert find_misplaced(*tiny(True)) == []
    row = one(find_misplaced(*tiny(False)))
    assert (row.name, row.way, row.bytes) == ("params/output/value", "out", 4 * 128 * 256)
    assert "fsdp" in row.intended
    assert "fsdp" not in row.actual


def test_a_configuration_that_does_not_divide_does_with_the_proposals():
    bindings = [
        "Mesh.fsdp = 1",
        "Mesh.data = 1",
        "Mesh.tensor = 8",
        "GPT.embed_dim = 96",
        "GPT.num_heads = 6",
        "Train.global_batch_size = 8",
    ]
    config = load_config("gpt_quickstart", bindings)
    with pytest.raises(UserError, match="does not divide"):
        check(config, device_count=8, platform="cpu")
    found = paddings(config, abstract_layout(config, 8))
    assert [one.binding for one in found] == ["GPT.num_heads = 8"]
    padded = load_config("gpt_quickstart", [*bindings, *(one.binding for one in found)])
    check(padded, device_count=8, platform="cpu")
    assert paddings(padded, abstract_layout(padded, 8)) == []


def test_a_padded_setting_is_one_that_the_model_takes():
    """mlp is 4 embed_dim, so 4 x 90 would do with 92; but 6 heads want a multiple of 6."""
    bindings = ["GPT.embed_dim = 90", "GPT.num_heads = 6"]
    bindings += ["Mesh.fsdp = 1", "Mesh.data = 1", "Mesh.tensor = 16"]
    config = load_config("gpt_quickstart", bindings)
    found = {one.setting: one for one in paddings(config, abstract_layout(config, 16))}
    assert found["GPT.embed_dim"].padded == 96
