"""The list of what a step moves equals the compiled program's, byte for byte and axis for axis.

Compiled for TPUs; what the compiler does in another form than the textbook's is named, mode by
mode. Without a compile the list equals the closed forms of the papers.
"""

import dataclasses
import functools
import math

import pytest
import test_traffic
from conftest import lower_step, needs_libtpu
from test_traffic import LAYERS, LENGTH, MODELS, ROWS, VOCAB

from jaxtrain.analysis.planning.compiled.audit import Row, audit
from jaxtrain.analysis.planning.compiled.collectives import collectives
from jaxtrain.analysis.planning.machines.targets import tpu_devices
from jaxtrain.analysis.planning.textbook import facts, formulas
from jaxtrain.analysis.planning.textbook.facts import Expected
from jaxtrain.analysis.planning.textbook.traffic import branch_counts, expect_traffic
from jaxtrain.models.transformers.gemma import Gemma3
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.nn.attention.attention import Attention
from jaxtrain.nn.precision import Precision
from jaxtrain.nn.remat import Remat
from jaxtrain.parallel import gathering
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.parallel.sharding import Sharding
from jaxtrain.training.compose import compose
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.layouts import abstract_layout, layout
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.settings import Config, load_config

MIXTRAL = Mixtral(
    vocab_size=VOCAB, num_layers=LAYERS, embed_dim=256, num_heads=2, num_kv_heads=2, mlp_dim=512,
    num_experts=4, context_length=LENGTH,
)  # fmt: skip
GEMMA3 = Gemma3(
    vocab_size=VOCAB, num_layers=4, embed_dim=256, num_heads=2, num_kv_heads=2, head_dim=128,
    mlp_dim=512, context_length=LENGTH, global_every=4, sliding_window=100,
)  # fmt: skip


def of_patches() -> Config:
    """A ViT of a layer on each of four stages, of which no shard is narrower than a TPU's tile."""
    sizes = ["num_layers = 4", "embed_dim = 1024", "num_heads = 8", "mlp_dim = 512"]
    mesh = ["Mesh.pipe = 4", "Mesh.data = 2", "Mesh.fsdp = 1", "Pipeline.microbatches = 4"]
    bindings = [*(f"ViT.{one}" for one in sizes), *mesh, "Precision.compute = 'bfloat16'"]
    return load_config("vit_digits", bindings)


def of_pairs(*mesh: str) -> Config:
    """A T5 of four layers a stack, of which no shard is narrower than a TPU's tile."""
    sizes = ["num_layers = 4", "embed_dim = 512", "num_heads = 4", "head_dim = 128"]
    sizes += ["mlp_dim = 1024", "vocab_size = 1024"]
    bindings = [*(f"T5.{one}" for one in sizes), *mesh, "Precision.compute = 'bfloat16'"]
    return load_config("t5_tiny", [*bindings, "Attention.kernel = 'reference'"])


# Everything of the gradient is float32 or bfloat16; numbers alone are 4 bytes.
NUMBER = 4

# What the compiler makes of the textbook's collectives.
WHOLE = "reduce-scatter as all-reduce: twice the wire"
GATHERED = "all-gather as all-reduce: twice the wire"


@functools.cache
def base() -> Config:
    return load_config("gpt_quickstart")


def config_of(
    model,
    mesh: dict,
    *,
    rows: int = ROWS,
    length: int = LENGTH,
    accumulation: int = 1,
    **sections,
) -> Config:
    """A configuration of a tiny model; `sections` replace those of the quickstart."""
    data = dataclasses.replace(base().train.data, sequence_length=length)
    model = dataclasses.replace(model, context_length=length)
    train = dataclasses.replace(
        base().train, model=model, data=data, global_batch_size=rows, accumulation=accumulation
    )
    plain = {"precision": Precision(compute="bfloat16"), "attention": Attention(kernel="reference")}
    return dataclasses.replace(
        base(), train=train, mesh=Mesh(**{"fsdp": 1, **mesh}), **{**plain, **sections}
    )


def tied(model):
    return dataclasses.replace(model, tie_embeddings=True)


def deep(model):
    return dataclasses.replace(model, num_layers=4)


LLAMA, LLAMA8 = MODELS["llama"], MODELS["llama8"]
FULL = Remat(policy="full")
INT8 = Precision(compute="bfloat16", matmul="int8")
ULYSSES = Attention(kernel="reference", context_parallel="ulysses")

# The configuration, and the forms that the compiler chooses.
OWN = {
    "fsdp x tensor, accumulation, full, chunks": (
        config_of(
            LLAMA8, {"fsdp": 2, "tensor": 4}, rows=16, accumulation=2, remat=FULL,
            loss=Loss(chunk_size=32),
        ),
        {WHOLE},
    ),
    "sequence parallel, learned positions, elementwise again": (
        config_of(
            dataclasses.replace(MODELS["gpt"], num_layers=3), {"data": 4, "tensor": 2},
            sharding=Sharding(sequence_parallel=True), remat=Remat(policy="elementwise"),
        ),
        set(),
    ),
    "int8 products, sequence parallel": (
        config_of(
            LLAMA8, {"fsdp": 2, "tensor": 4}, sharding=Sharding(sequence_parallel=True),
            precision=INT8,
        ),
        {WHOLE},
    ),
    "fsdp, tied, chunks": (config_of(tied(LLAMA), {"fsdp": 8}, loss=Loss(chunk_size=32)), set()),
    "local, hsdp, accumulation": (
        config_of(
            LLAMA, {"data": 2, "fsdp": 4}, rows=16, accumulation=2,
            sharding=Sharding(accumulate="local"),
        ),
        set(),
    ),
    "pipe x fsdp, pairs": (
        of_pairs("Mesh.pipe = 2", "Mesh.fsdp = 4", "Pipeline.microbatches = 4"), {WHOLE},
    ),
}  # fmt: skip
# Of experts alone: tests/test_experts_overlap.py.
SLOW = {
    "data x tensor, tied": (config_of(tied(LLAMA8), {"data": 2, "tensor": 4}), set()),
    "fsdp x tensor, sequence parallel, named": (
        config_of(
            LLAMA8, {"fsdp": 2, "tensor": 4}, sharding=Sharding(sequence_parallel=True),
            remat=dataclasses.replace(FULL, save=("attention_out",), offload=("mlp_up",)),
        ),
        {WHOLE},
    ),
    "sequence parallel, chunks": (
        config_of(
            LLAMA8, {"tensor": 8}, sharding=Sharding(sequence_parallel=True),
            loss=Loss(chunk_size=32),
        ),
        set(),
    ),
    "ring, layers of two kinds": (config_of(GEMMA3, {"context": 4, "data": 2}, length=256), set()),
    "ulysses, full": (
        config_of(
            LLAMA8, {"context": 4, "data": 2}, length=256, remat=FULL, attention=ULYSSES
        ),
        set(),
    ),
    "accumulation x fsdp x context, ring": (
        config_of(LLAMA, {"context": 2, "fsdp": 4}, length=256, rows=16, accumulation=2), {WHOLE},
    ),
    "expert x fsdp, full": (
        config_of(MIXTRAL, {"expert": 4, "fsdp": 2}, remat=FULL), {WHOLE},
    ),
    "accumulation x expert x data, zero 1": (
        config_of(
            MIXTRAL, {"expert": 2, "data": 2, "fsdp": 2}, rows=16, accumulation=2,
            sharding=Sharding(zero=1),
        ),
        set(),
    ),
    "pipe x fsdp, gpipe, tied": (
        config_of(
            tied(deep(LLAMA)), {"pipe": 4, "fsdp": 2}, rows=16,
            pipeline=Pipeline(schedule="gpipe", microbatches=4),
        ),
        {WHOLE},
    ),
    "pipe x fsdp x tensor, full": (
        config_of(
            deep(LLAMA), {"pipe": 2, "fsdp": 2, "tensor": 2}, rows=16, remat=FULL,
            pipeline=Pipeline(microbatches=4),
        ),
        {WHOLE},
    ),
    "fsdp, pairs, not tied": (of_pairs("Mesh.fsdp = 8", "T5.tie_embeddings = False"), set()),
    "pipe x data, patches": (of_patches(), {WHOLE}),
    "masters, pipe, accumulation": (
        config_of(
            deep(LLAMA), {"pipe": 2, "fsdp": 4}, rows=32, accumulation=2,
            pipeline=Pipeline(microbatches=4), sharding=Sharding(zero=1, masters="sharded"),
        ),
        {WHOLE},
    ),
    "masters, tensor, replicas": (
        config_of(
            LLAMA, {"data": 2, "fsdp": 2, "tensor": 2}, rows=16, accumulation=2,
            sharding=Sharding(zero=1, masters="sharded"),
        ),
        set(),
    ),
    "local, one microbatch": (
        config_of(LLAMA, {"fsdp": 8}, sharding=Sharding(accumulate="local")), set(),
    ),
    "local, ten microbatches, zero 2": (
        config_of(
            LLAMA, {"fsdp": 8}, rows=80, accumulation=10,
            sharding=Sharding(zero=2, accumulate="local"),
        ),
        set(),
    ),
    "accumulation x pipe x fsdp, zero 1, tied": (
        config_of(
            tied(deep(LLAMA)), {"pipe": 2, "fsdp": 4}, rows=32, accumulation=2,
            pipeline=Pipeline(microbatches=4), sharding=Sharding(zero=1),
        ),
        {WHOLE},
    ),
    "accumulation x pipe x data x fsdp, zero 0": (
        config_of(
            deep(LLAMA), {"pipe": 2, "data": 2, "fsdp": 2}, rows=32, accumulation=2,
            pipeline=Pipeline(microbatches=4), sharding=Sharding(zero=0),
        ),
        {WHOLE},
    ),
    "ring, named": (
        config_of(
            LLAMA, {"context": 4, "data": 2}, length=256,
            remat=dataclasses.replace(FULL, save=("attention",), offload=("residual",)),
        ),
        set(),
    ),
    "fsdp x context, ring": (
        config_of(LLAMA, {"context": 2, "fsdp": 4}, length=256), set(),
    ),
    "pipe x data x context, ulysses": (
        config_of(
            deep(LLAMA8), {"pipe": 2, "context": 2, "data": 2}, length=256, rows=8,
            pipeline=Pipeline(microbatches=4), attention=ULYSSES,
        ),
        set(),
    ),
    "pipe x data x expert": (
        config_of(
            deep(MIXTRAL), {"pipe": 2, "expert": 2, "data": 2}, rows=16,
            pipeline=Pipeline(microbatches=4),
        ),
        set(),
    ),
    "expert x tensor, slots": (
        config_of(dataclasses.replace(MIXTRAL, capacity_factor=1.0), {"expert": 4, "tensor": 2}),
        set(),
    ),
    "fewer kv heads than devices": (
        config_of(dataclasses.replace(LLAMA8, num_kv_heads=2), {"tensor": 8}), set(),
    ),
    "zero bubble": (
        config_of(
            deep(LLAMA), {"pipe": 2, "data": 2, "fsdp": 2}, rows=16,
            pipeline=Pipeline(schedule="zero_bubble", microbatches=4),
        ),
        {WHOLE},
    ),
    "dualpipe_v": (
        config_of(
            deep(LLAMA), {"pipe": 2, "data": 4}, rows=16,
            pipeline=Pipeline(schedule="dualpipe_v", microbatches=4, virtual_stages=2),
        ),
        set(),
    ),
    "interleaved": (
        config_of(
            deep(LLAMA), {"pipe": 2, "data": 4}, rows=16,
            pipeline=Pipeline(schedule="interleaved", microbatches=4, virtual_stages=2),
        ),
        set(),
    ),
    "2d": (
        config_of(LLAMA8, {"tensor": 4, "data": 2}, sharding=Sharding(tensor_layout="2d")),
        {WHOLE},
    ),
    "2.5d": (
        config_of(
            dataclasses.replace(MODELS["gpt"], embed_dim=512, num_layers=3), {"tensor": 8},
            sharding=Sharding(tensor_layout="2.5d", tensor_depth=2),
        ),
        {WHOLE},
    ),
    "3d": (
        config_of(LLAMA8, {"tensor": 8}, sharding=Sharding(tensor_layout="3d")),
        {WHOLE},
    ),
    "int8 products, 3d, full": (
        config_of(
            LLAMA8, {"tensor": 8}, sharding=Sharding(tensor_layout="3d"), precision=INT8,
            remat=FULL,
        ),
        {WHOLE},
    ),
    "int8 products, pipe x tensor": (
        config_of(
            deep(LLAMA), {"pipe": 4, "tensor": 2}, rows=16, pipeline=Pipeline(microbatches=4),
            precision=INT8,
        ),
        {WHOLE},
    ),
    "local sgd": (
        config_of(
            MODELS["gpt"], {"data": 4, "fsdp": 2},
            exchange=Exchange(method="local_sgd", period=2),
        ),
        {WHOLE},
    ),
    "gossip": (
        config_of(MODELS["gpt"], {"data": 4, "fsdp": 2}, exchange=Exchange(method="gossip")),
        {WHOLE},
    ),
    "int8": (
        config_of(MODELS["gpt"], {"data": 4, "fsdp": 2}, exchange=Exchange(method="int8")),
        {WHOLE, GATHERED},
    ),
    "top_k": (
        # A narrow model, since the sort of a larger array takes longer to compile.
        config_of(
            dataclasses.replace(MODELS["gpt"], num_layers=2, embed_dim=128, num_heads=1),
            {"data": 4, "fsdp": 2}, exchange=Exchange(method="top_k"),
        ),
        {WHOLE, GATHERED},
    ),
}  # fmt: skip
CASES = [*OWN, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@functools.cache
def compiled(name: str) -> tuple[str, dict[str, int]]:
    """The text of the compiled step, and the sizes of its mesh."""
    return compiled_step({**OWN, **SLOW}[name][0])


def compiled_step(config: Config) -> tuple[str, dict[str, int]]:
    over = layout(config, tpu_devices("v5e:2x4"))
    program = compose(config, over)
    batch = config.train.data.abstract_batch(config.train.global_batch_size)
    done = lower_step(program, batch).compile({"exec_time_optimization_effort": -1.0})
    return done.as_text(), dict(over.mesh.shape)


def audited(config: Config, text: str, sizes: dict[str, int]) -> list[Row]:
    """The audit without its row of numbers alone (losses, norms), of which there are few."""
    over = abstract_layout(config, 8)
    found = collectives(text, sizes, branch_counts(config, over))
    rows = audit(found, expect_traffic(config, over), sizes, small=NUMBER)
    moved, textbook = {}, {}
    for one in found:
        moved[one.axis] = moved.get(one.axis, 0) + one.total_bytes
    for row in rows:
        textbook[row.axis] = textbook.get(row.axis, 0) + row.bytes
    assert moved == textbook  # nothing is lost between the two
    return rows


def faults(rows: list[Row], forms: set[str]) -> list[object]:
    """What is not explained, whose bytes are not the textbook's, and forms other than `forms`."""
    numbers = [row for row in rows if row.textbook_bytes is None and row.bytes <= row.count * 64]
    arrays = [row for row in rows if row not in numbers]
    found: list[object] = [row for row in arrays if not row.explained]
    found += [row for row in arrays if " (" not in row.cause and row.bytes != row.textbook_bytes]
    chosen = {row.cause.partition(" (")[2].rstrip(")") for row in arrays} - {""}
    found += sorted(chosen ^ forms)
    if sum(row.count for row in numbers) > 200:
        found.append("more than 200 single numbers")
    return found


# The cases that are left run the same code.
@pytest.mark.slow_cases("sequence parallel, learned positions, elementwise again")
@pytest.mark.slow_cases(
    "int8 products, sequence parallel", "fsdp, tied, chunks", "pipe x fsdp, pairs",
    "local, hsdp, accumulation",
)  # fmt: skip
@needs_libtpu
@pytest.mark.parametrize("name", CASES)
def test_everything_that_moves_is_explained_and_the_textbooks(name):
    config, forms = {**OWN, **SLOW}[name]
    assert faults(audited(config, *compiled(name)), forms) == []


@needs_libtpu
def test_the_two_gradients_of_a_large_tied_table_are_reduced_separately(monkeypatch):
    config, forms = OWN["fsdp, tied, chunks"]
    monkeypatch.setattr(gathering, "LARGE_TABLE", 1)
    rows = audited(config, *compiled_step(config))
    assert faults(rows, forms) == []
    (table,) = [row for row in rows if row.cause.startswith("gradients: token_embedding")]
    assert table.count == 2


@pytest.mark.slow
def test_the_cpu_s_compiler_sends_float32_for_bfloat16_and_does_not_join_sums():
    """A layer's q, k and v (2 more), gate and up (1 more) each sum their gradient of the stream."""
    config, _ = SLOW["pipe x fsdp x tensor, full"]
    program = compose(config, layout(config))
    batch = config.train.data.abstract_batch(config.train.global_batch_size)
    over = abstract_layout(config, 8)
    text = lower_step(program, batch).compile().as_text()
    found = collectives(text, over.mesh.shape, branch_counts(config, over))
    rows = audit(found, expect_traffic(config, over), dict(over.mesh.shape), widens=True)
    (rest,) = [row for row in rows if not row.explained]
    layers, microbatches = 2, 4
    stream = 4 * (16 // microbatches // 2) * LENGTH * 256
    assert (rest.kind, rest.axis, rest.count) == ("all-reduce", "tensor", 3 * layers * microbatches)
    assert rest.bytes == rest.count * stream


# Mode -> microbatches, and the axes that sum every gradient: a device's own of all of them, once.
ONCE = {
    "fsdp x context, ring": (1, "context"),
    "accumulation x fsdp x context, ring": (2, "context"),
    "pipe x data x context, ulysses": (4, "data+context"),
    "pipe x data x expert": (4, "data+expert"),
}


@needs_libtpu
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in ONCE]
)
def test_gradients_cross_context_and_expert_once_whatever_the_number_of_microbatches(name):
    microbatches, axis = ONCE[name]
    config, _ = {**OWN, **SLOW}[name]
    text, sizes = compiled(name)
    found = collectives(text, sizes, branch_counts(config, abstract_layout(config, 8)))
    sums = sum(
        one.total_bytes
        for one in found
        if one.kind == "all-reduce" and one.axis == axis and one.bytes > 64
    )
    numbers = {"matrix": 0, "vector": 0}
    for weight in facts.weights_of(config.train.model):
        if "expert" in axis and "experts" in weight.axes:
            continue  # each device along expert has others
        held = math.prod(weight.shape) * (config.train.model.num_layers if weight.is_layer else 1)
        if weight.is_layer or weight.is_matrix:  # a stage's layers, a part of each table
            held //= sizes["pipe"]
        if weight.is_matrix:  # along embed
            held //= sizes["fsdp"]
        numbers["matrix" if weight.is_matrix else "vector"] += held
    # One microbatch's in bfloat16, sums in float32; scales always.
    width = 2 if microbatches == 1 else 4
    assert sums == width * numbers["matrix"] + 4 * numbers["vector"]


# -- without a compile ---------------------------------------------------------------------------


def of(config: Config, cause: str, devices: int = 8) -> list[Expected]:
    found = expect_traffic(config, abstract_layout(config, devices))
    return [one for one in found if one.cause.startswith(cause)]


def total(found: list[Expected]) -> dict[str, tuple[int, int]]:
    """Kind -> arrays, bytes."""
    sums: dict[str, tuple[int, int]] = {}
    for one in found:
        count, size = sums.get(one.kind, (0, 0))
        sums[one.kind] = count + one.count, size + one.total_bytes
    return sums


def same(found: list[Expected], textbook: list[formulas.Traffic], layers: int) -> None:
    sums = {}
    for one in textbook:
        count, size = sums.get(one.kind, (0, 0))
        sums[one.kind] = count + layers * one.count, size + layers * one.count * one.bytes
    assert total(found) == sums


def test_the_list_holds_the_closed_forms():
    B, T, D, N, K, H, w = 4, 512, 1024, 16, 4, 64, 2
    model = dataclasses.replace(
        LLAMA, embed_dim=D, num_heads=N, num_kv_heads=K, mlp_dim=4096, num_layers=6
    )

    def make(mesh, rows, model=model, **sections):
        return config_of(model, mesh, rows=rows, length=T, **sections)

    three = make({"fsdp": 8}, 8 * B)
    query = formulas.zero3_weight(D * N * H, devices=8, element_bytes=w)
    same([*of(three, "parameters: layers/query"), *of(three, "gradients: layers/query")], query, 6)
    two = make({"fsdp": 8}, 8 * B, sharding=Sharding(zero=2))
    gate = formulas.zero2_weight(D * 4096, devices=8, element_bytes=w, master_bytes=4)
    same([*of(two, "update: layers/gate"), *of(two, "gradients: layers/gate")], gate, 6)

    split = make({"tensor": 4}, B)
    blocks = [*of(split, "attention output", 4), *of(split, "mlp output", 4)]
    same(blocks, [formulas.tensor_layer(B, T, D, element_bytes=w)], 6)
    split = make({"tensor": 4}, B, sharding=Sharding(sequence_parallel=True))
    blocks = [*of(split, "attention output", 4), *of(split, "mlp output", 4)]
    same(blocks, formulas.sequence_layer(B, T, D, devices=4, element_bytes=w), 6)
    asked = Sharding(sequence_parallel=True, collective_matmul=True)
    split = make({"tensor": 4}, B, sharding=asked)
    blocks = [*of(split, "attention output", 4), *of(split, "mlp output", 4)]
    same(blocks, [formulas.sequence_ring_layer(B, T, D, devices=4, element_bytes=w)], 6)

    ring = make({"context": 4}, B)
    around = formulas.ring_attention(B, T // 4, K, H, devices=4, element_bytes=w)
    found = total(of(ring, "ring of keys and values", 4))["collective-permute"]
    # Keys and values go together, once forward and once backward.
    assert found == (6 * around.count, 6 * 2 * around.count * around.bytes)
    ring = make({"context": 4}, B, attention=ULYSSES)
    there, back = of(ring, "queries", 4)[0], of(ring, "attention output", 4)[0]
    textbook = formulas.ulysses(B, T // 4, N, K, H, element_bytes=w)
    assert there.total_bytes + back.total_bytes == 6 * 2 * sum(t.count * t.bytes for t in textbook)

    mixture = dataclasses.replace(
        MIXTRAL, embed_dim=D, num_heads=N, num_kv_heads=K, capacity_factor=1.0
    )
    slots = mixture.num_experts * B * math.ceil(T * 2 / mixture.num_experts)
    experts = make({"expert": 4}, 4 * B, mixture)
    same(of(experts, "tokens to experts", 4), [formulas.expert_layer(slots, D, element_bytes=w)], 3)

    pipeline = Pipeline(schedule="gpipe", microbatches=8)
    piped = make({"pipe": 2}, 8 * B, pipeline=pipeline)
    one = formulas.pipeline_boundary(B, T, D, element_bytes=w)
    same(of(piped, "pipeline boundary", 2), [one], 8)


def test_gradients_of_data_parallelism_are_all_parameters():
    config = config_of(LLAMA, {"data": 8}, precision=Precision(compute="float32"))
    parameters = sum(
        weight.copies * math.prod(weight.shape) for weight in test_traffic.weights(LLAMA)
    )
    found = total(expect_traffic(config, abstract_layout(config, 8)))
    assert found["all-reduce"][1] == formulas.data_parallel(parameters, element_bytes=4).bytes
    assert list(found) == ["all-reduce"]


def test_one_device_moves_nothing_and_a_model_is_traced_once(monkeypatch):
    config = config_of(LLAMA, {}, rows=3)
    assert expect_traffic(config, abstract_layout(config, 1)) == []
    monkeypatch.setattr(facts, "parameter_shapes", None)  # would fail if it were asked again
    for mesh in ({"data": 8}, {"fsdp": 8}, {"tensor": 2, "fsdp": 4}):
        config = config_of(LLAMA, mesh)
        assert expect_traffic(config, abstract_layout(config, 8))
