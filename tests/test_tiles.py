"""On TPUs fsdp splits tables, mlps and heads where its shards of embed are a part of a tile."""

import dataclasses
import math

import pytest
from conftest import needs_libtpu
from jax.sharding import PartitionSpec as P

from jaxtrain.analysis.planning.compiled.collectives import Collective, collectives
from jaxtrain.analysis.planning.compiled.compiled import lower, options_of, target_layout
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.parallel.dividing import in_tiles
from jaxtrain.parallel.mesh import Mesh, abstract_mesh
from jaxtrain.parallel.sharding import Layout, by_name, logical_axes
from jaxtrain.training.layouts import shapes_of
from jaxtrain.training.settings import Config, load_config

TABLE, UP, DOWN = ("vocab", "vocab_embed"), ("layers", "embed", "mlp"), ("layers", "mlp", "embed")
BY_EMBED = {TABLE: P(None, "fsdp"), UP: P(None, "fsdp", None), DOWN: P(None, None, "fsdp")}
BY_ROWS = {TABLE: P("fsdp", None), UP: P(None, None, "fsdp"), DOWN: P(None, "fsdp", None)}
# Attention's, split along each head.
QKV = ("layers", "qkv", "embed", "heads", "head_dim")
QUERY = ("layers", "embed", "heads", "head_dim")
KEY, OUT = ("layers", "embed", "kv_heads", "head_dim"), ("layers", "heads", "head_dim", "embed")
HEADS = {QKV, QUERY, KEY, OUT}
BY_EMBED |= {axes: P(*("fsdp" if axis == "embed" else None for axis in axes)) for axes in HEADS}
BY_ROWS |= {axes: P(*("fsdp" if axis == "head_dim" else None for axis in axes)) for axes in HEADS}
SYNTHETIC = ["TextData.source = 'synthetic'", "TextData.tokenizer = 'byte'"]


def laid_out(name: str, zero: int = 3, *bindings: str, **sizes: int) -> Layout:
    """The rule's layout of a shipped model's sizes."""
    config = load_config(name, [*SYNTHETIC, *bindings])
    mesh = abstract_mesh(Mesh(**{"fsdp": 1, **sizes}), math.prod(sizes.values()))
    return in_tiles(Layout(mesh, zero), shapes_of(config.train.model))


LLAMA = {QUERY, KEY, OUT}
# 70B of arXiv 2307.09288: columns of 8192.
WIDE = ("Llama.embed_dim=8192", "Llama.num_heads=64", "Llama.mlp_dim=28672")


@pytest.mark.parametrize(
    ("name", "bindings", "fsdp", "by_rows"),
    [
        ("gpt2_124m", (), 4, set()),  # 192 columns of embed
        ("gpt2_124m", (), 8, {TABLE, QKV, OUT}),  # 96; 6288 rows of the table, 8 x 12 of heads
        ("gpt2_124m", ("GPT.vocab_size=50257",), 8, {QKV, OUT}),  # odd
        ("gpt2_124m", (), 64, {TABLE, UP, DOWN, QKV, OUT}),  # 12 of 128; 12 rows are 16
        ("gpt2_124m", (), 256, {UP, DOWN}),  # 3; 12 rows of the mlp are 16, a fourth of a head
        ("llama_8b", (), 16, set()),  # 256
        ("llama_8b", (), 32, {TABLE, *LLAMA}),  # 128; 4008 rows
        ("llama_8b", (), 64, {TABLE, *LLAMA}),  # 64; 2004 rows, padded to 2008
        ("llama_8b", (), 256, {TABLE, UP, DOWN}),  # 16; 501 rows, padded to 504, and 56
        ("llama_8b", (), 512, set()),  # 8; 250.5 rows and 28, which would be padded to 32
        ("llama_1b", (), 64, {TABLE, UP, DOWN, *LLAMA}),  # 32; 128 rows of the mlp, 8 of keys
        ("llama_8b", WIDE, 256, {TABLE, UP, DOWN}),  # 32; 112 rows of the mlp
    ],
)  # fmt: skip
def test_which_weights_are_split_by_rows(name, bindings, fsdp, by_rows):
    layout = laid_out(name, 3, *bindings, fsdp=fsdp)
    shapes = by_name(shapes_of(load_config(name, [*SYNTHETIC, *bindings]).train.model)).values()
    there = {logical_axes(variable) for variable in shapes}
    assert by_rows <= there
    for axes in there & set(BY_ROWS):
        wanted = BY_ROWS if axes in by_rows else BY_EMBED
        assert (
            layout.parameter(axes) == layout.moment(axes) == layout.gradient(axes) == wanted[axes]
        )
        assert layout.weight(axes) == P(*[None] * len(axes))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_stages_shard_the_rows_as_they_shard_embed(zero):
    layout = laid_out("llama_1b", zero, fsdp=64)
    whole, split = P(None, None), P("fsdp", None)
    specs = layout.moment(TABLE), layout.gradient(TABLE), layout.parameter(TABLE)
    assert specs == tuple(split if zero >= stage else whole for stage in (1, 2, 3))
    assert layout.weight(TABLE) == whole


@pytest.mark.parametrize(
    ("sizes", "table"),
    [
        ({"tensor": 2}, P("tensor", "fsdp")),
        ({"pipe": 2}, P(None, ("fsdp", "pipe"))),
        ({"data": 2}, P("fsdp", None)),
        ({"data": 2, "tensor": 2}, P("tensor", "fsdp")),
    ],
)
def test_beside_other_axes_than_data_embed_is_split(sizes, table):
    assert laid_out("llama_1b", fsdp=64, **sizes).parameter(TABLE) == table


@pytest.mark.parametrize(
    "bindings",
    [
        ["Optimizer.name = 'adam8bit'"],  # blocks of 256 numbers
        ["Optimizer.name = 'adafactor'"],  # factored moments
        ["Finetune.lora_rank = 4"],
    ],
)  # fmt: skip
@needs_libtpu
def test_what_has_other_sizes_keeps_embed_split(bindings):
    bindings = [*SYNTHETIC, "Mesh.data=1", "Mesh.fsdp=8", *bindings]
    layout = target_layout(load_config("gpt2_124m", bindings), parse_target("v5e:2x4"))
    assert layout.parameter(TABLE) == P(None, "fsdp")
    assert not layout.by_rows


def moved(config, layout, least: int = 2**22) -> list[Collective]:
    """What a step moves of so many bytes and more."""
    options = options_of(config, layout) | {"exec_time_optimization_effort": -1.0}
    compiled = lower(config, layout, options).compile()
    return [one for one in collectives(compiled.as_text(), layout.mesh) if one.bytes >= least]


def of_table(found: list[Collective]) -> list[tuple[str, str]]:
    """Kind and axis of the collectives of a whole table's gradient."""
    found = [one for one in found if math.prod(one.shape) > 40000 * 2048]
    return [(one.kind, one.axis) for one in found if one.kind != "all-gather"]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.rotated("schedules")
def test_a_tables_gradient_is_scattered():
    """Of 32 columns a device, which the compiler would sum whole. A large tied table has two, the
    lookup's and the head's, each reduced first: scattered along fsdp, and rows of their sum are
    summed along data (HSDP)."""
    config = load_config(
        "llama_1b",
        [
            *SYNTHETIC, "Llama.num_layers=1", "Llama.vocab_size=50304", "Llama.num_heads=16",
            "Llama.mlp_dim=2048", "TextData.sequence_length=128", "Train.accumulation=1",
            "Train.global_batch_size=128", "Attention.kernel='reference'", "Mesh.data=2",
            "Mesh.fsdp=64",
        ],
    )  # fmt: skip
    layout = target_layout(config, parse_target("v5p:4x4x8"))
    found = moved(config, layout, 2**21)
    assert of_table(found) == [("reduce-scatter", "fsdp")] * 2
    shards = [one.shape for one in found if one.axis == "data" and 50304 // 64 in one.shape]
    assert shards == [(50304 // 64, 2048)]
    plain = dataclasses.replace(layout, by_rows=frozenset())
    assert of_table(moved(config, plain)) == [("all-reduce", "fsdp")] * 2


def attention_of(name: str, target: str, *bindings: str) -> tuple[Config, Layout]:
    """One layer of a shipped model on all devices of a target."""
    devices = parse_target(target).devices
    bindings = (
        *SYNTHETIC, *bindings, "TextData.sequence_length=128", "Train.accumulation=1",
        f"Train.global_batch_size={devices}", "Attention.kernel='reference'", "Mesh.data=1",
        f"Mesh.fsdp={devices}",
    )  # fmt: skip
    config = load_config(name, bindings)
    return config, target_layout(config, parse_target(target))


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target", "bindings", "sizes"),
    [
        # 12 heads are no whole tile, and a shard of embed is 96 columns.
        ("gpt2_124m", "v5e:2x4", ("GPT.num_layers=1",), {3 * 768 * 768, 768 * 768}),
        # A square matrix, of which the compiler may put either dimension first.
        ("llama_8b", "v5p:2x4x4", ("Llama.num_layers=1",), {4096 * 4096, 4096 * 1024}),
    ],
)  # fmt: skip
def test_attentions_gradients_are_scattered(name, target, bindings, sizes):
    config, layout = attention_of(name, target, *bindings)
    of_heads = [one for one in moved(config, layout, 2**20) if math.prod(one.shape) in sizes]
    kinds = {one.kind for one in of_heads if one.kind != "all-gather"}
    assert kinds == {"reduce-scatter"}
    plain = dataclasses.replace(
        layout, by_rows=frozenset(axes for axes in layout.by_rows if "head_dim" not in axes)
    )
    of_heads = [one for one in moved(config, plain, 2**20) if math.prod(one.shape) in sizes]
    assert "all-reduce" in {one.kind for one in of_heads}
