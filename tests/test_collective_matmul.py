"""Products around a ring along `tensor`: what they give, what they send, what they hide."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_parity_matrix
import test_pipeline
import test_planning_traffic as traffic
from conftest import make_layout, make_step, needs_libtpu
from jax.sharding import PartitionSpec as P
from parity import assert_equal, evaluate

from jaxtrain.analysis.planning.compiled.compiled import lower, options_of, target_layout
from jaxtrain.analysis.planning.compiled.schedule import simulate_schedule
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.analysis.planning.search.space import meshes_and_schedules
from jaxtrain.config.errors import UserError
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.matmul import collective_matmul
from jaxtrain.nn.remat import POLICIES
from jaxtrain.parallel.sharding import Sharding
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.preflight.preflight import check
from jaxtrain.training.settings import load_config

B, T, D, F, N, H = 2, 16, 8, 24, 8, 2


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def ringed(**sizes: int):
    return make_layout(sequence_parallel=True, collective_matmul=True, **sizes)


def grads(function, *arrays):
    """A sum that weighs every number of the results differently, and its gradients."""

    def weighed(*arrays):
        found = jax.tree.leaves(function(*arrays))
        return sum(jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))) for y in found)

    return jax.jit(jax.value_and_grad(weighed, range(len(arrays))))(*arrays)


MESHES = [{"tensor": 8}, {"fsdp": 2, "tensor": 4}, {"context": 2, "tensor": 4}, {"tensor": 2}]
IDS = ["eight", "beside a batch", "beside context", "two"]


def along_mesh(layout, function, specs, arrays, spec_of_all):
    """The function of arrays that lie so, and its gradients, as whole arrays."""

    def run(*arrays):
        placed = [jax.sharding.reshard(x, spec) for x, spec in zip(arrays, specs, strict=True)]
        found = function(*placed)
        return jax.tree.map(lambda y: jax.sharding.reshard(y, spec_of_all), found)

    with layout.active():
        return grads(run, *(jax.sharding.reshard(x, P()) for x in arrays))


@pytest.mark.parametrize("sizes", MESHES, ids=IDS)
def test_products_of_what_is_gathered_equal_einsum(sizes):
    layout, equations = ringed(**sizes), ("BTD,DF->BTF", "BTD,PDNH->PBTNH")
    x, up, qkv = draw(0, B, T, D), draw(1, D, F), draw(2, 3, D, N, H)

    def plain(x, up, qkv):
        pairs = zip(equations, (up, qkv), strict=True)
        return [jnp.einsum(equation, x, weight) for equation, weight in pairs]

    rows, length = layout.activation(("batch", "length"))
    wanted = [P(rows, length, "tensor"), P(None, rows, length, "tensor", None)]
    specs = [
        layout.activation(("batch", "residual_length", "embed")),
        P(None, "tensor"), P(None, None, "tensor", None),
    ]  # fmt: skip

    def around(x, up, qkv):
        return collective_matmul.gather_matmul(equations, x, [up, qkv], wanted)

    found = along_mesh(layout, around, specs, (x, up, qkv), P())
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), found,
                 grads(plain, x, up, qkv))  # fmt: skip


@pytest.mark.parametrize("sizes", MESHES, ids=IDS)
def test_a_product_that_is_scattered_equals_einsum(sizes):
    layout, equation = ringed(**sizes), "BTNH,NHD->BTD"
    x, out = draw(0, B, T, N, H), draw(1, N, H, D)
    rows, length = layout.activation(("batch", "length"))
    wanted = layout.activation(("batch", "residual_length", "embed"))
    specs = [P(rows, length, "tensor", None), P("tensor", None, None)]
    found = along_mesh(
        layout,
        lambda x, out: collective_matmul.matmul_scatter(equation, x, out, wanted),
        specs,
        (x, out),
        P(),
    )
    plain = grads(lambda x, out: jnp.einsum(equation, x, out), x, out)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), found, plain)


FULL = Execution(kernel="reference", remat=POLICIES["full"])
DOTS = Execution(kernel="reference", remat=POLICIES["dots"])
CASES = {
    "gpt": ("gpt", {"tensor": 8}, {}),
    "kv heads on several devices, full": (
        "llama", {"fsdp": 2, "tensor": 4, "zero": 2}, {"execution": FULL},
    ),
    "context, microbatches, dots": (
        "llama", {"context": 2, "fsdp": 2, "tensor": 2}, {"execution": DOTS, "accumulation": 2},
    ),
    "experts": ("mixtral", {"expert": 2, "fsdp": 2, "tensor": 2}, {}),
}  # fmt: skip


@pytest.mark.slow_cases(
    "kv heads on several devices, full", "context, microbatches, dots", "experts"
)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_one_device(case):
    model, sizes, changes = CASES[case]
    layout = ringed(**sizes)
    if sizes["tensor"] == 4:
        layout = dataclasses.replace(layout, whole=frozenset({"kv_heads"}))
    program = make_step(test_parity_matrix.MODELS[model], layout, **changes)
    expected = test_parity_matrix.one_device(model)
    assert_equal(evaluate(program, test_parity_matrix.BATCH, expected), expected)


# tests/test_extras_on_meshes.py has stages of GPipe and of 1F1B.
@pytest.mark.slow
def test_rings_inside_stages_equal_one_device():
    make, num_layers = test_pipeline.llama, 6
    pipeline = Pipeline(
        schedule="interleaved", virtual_stages=2, microbatches=4, backward="residuals"
    )
    program = make_step(make(num_layers), ringed(pipe=2, fsdp=2, tensor=2), pipeline=pipeline)
    expected = test_pipeline.one_device(make, num_layers)
    assert_equal(evaluate(program, test_pipeline.BATCH, expected), expected)


ASKED = Sharding(sequence_parallel=True, collective_matmul=True)
SENT = {
    "fsdp, full": traffic.config_of(
        traffic.LLAMA8, {"fsdp": 2, "tensor": 4}, sharding=ASKED, remat=traffic.FULL
    ),
    "in stages": traffic.config_of(
        traffic.deep(traffic.LLAMA), {"pipe": 2, "data": 2, "tensor": 2}, rows=16, sharding=ASKED,
        pipeline=Pipeline(microbatches=4),
    ),
}  # fmt: skip


# A TPU program; losses and gradients are in the fast part.
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("case", SENT)
def test_what_goes_around_is_the_closed_form(case):
    """Read from a TPU's program; fsdp's scatters of so small a model are sums."""
    rows = traffic.audited(SENT[case], *traffic.compiled_step(SENT[case]))
    assert traffic.faults(rows, {traffic.WHOLE} if "fsdp" in case else set()) == []
    sent = sum(row.count for row in rows if row.axis == "tensor" and "permute" in row.kind)
    # Layers times microbatches, steps around the ring, rings.
    assert sent == (3 * 3 * 11 if "fsdp" in case else 2 * 4 * 1 * (10 + 4))


def products(program) -> int:
    """How many products a step's program has."""
    batch = test_parity_matrix.BATCH
    state = jax.eval_shape(lambda: program.create(0))
    with program.setup.layout.active():
        return str(jax.make_jaxpr(program.train_step)(state, batch)).count(" dot_general[")


def test_dots_keeps_what_a_ring_made():
    """What runs again is attention's scores, as without rings."""
    model, none = test_parity_matrix.MODELS["gpt"], Execution(kernel="reference")
    again = [
        products(make_step(model, layout, execution=DOTS))
        - products(make_step(model, layout, execution=none))
        for layout in (ringed(tensor=2), make_layout(tensor=2, sequence_parallel=True))
    ]
    assert again[0] == again[1] > 0


SMALL = (
    "GPT.num_layers = 2", "GPT.embed_dim = 2048", "GPT.num_heads = 16", "GPT.vocab_size = 8192",
    "GPT.context_length = 2048", "TextData.sequence_length = 2048", "Train.accumulation = 1",
    "TextData.source = 'synthetic'", "TextData.tokenizer = 'byte'",
    "TextData.separate_documents = False", "Train.global_batch_size = 4", "Mesh.data = 1",
    "Mesh.tensor = 4", "Sharding.sequence_parallel = True", "Attention.kernel = 'reference'",
    "Train.steps = 100",  # the options of long runs take half as long again to compile
)  # fmt: skip


@needs_libtpu
@pytest.mark.slow
@pytest.mark.rotated("schedules")
def test_a_tpu_s_schedule_puts_products_beside_what_is_sent():
    """Of what layers send along tensor a step waits for less than half; without rings for most."""
    target, waited = parse_target("v5p:2x2x1"), {}
    for asked in (False, True):
        config = load_config("gpt2_124m", [*SMALL, f"Sharding.collective_matmul = {asked}"])
        layout = target_layout(config, target)
        options = options_of(config, layout)
        text = lower(config, layout, options).compile().as_text() or ""
        found = simulate_schedule(config, layout, target, text, attention=0.0, thorough=True)
        of_layers = [
            found.waits.get((kind, "tensor"), (0.0, 0.0))
            for kind in (("collective-permute",) if asked else ("all-gather", "reduce-scatter"))
        ]
        waited[asked] = [math.fsum(part) for part in zip(*of_layers, strict=True)]
    assert waited[True][0] < 0.5 * waited[True][1]
    assert waited[False][0] > waited[True][0]


def test_stages_of_an_encoder_and_a_decoder_are_refused_and_not_tried():
    pipe = ["Mesh.pipe=2", "Mesh.fsdp=1", "Mesh.tensor=2", "Mesh.data=2", "Pipeline.microbatches=4"]
    asked = ["Sharding.sequence_parallel=True", "Sharding.collective_matmul=True"]
    devices = {"device_count": 8, "platform": "cpu"}
    with pytest.raises(UserError, match="Sharding.collective_matmul=True with Mesh.pipe=2"):
        check(load_config("t5_tiny", [*pipe, *asked]), **devices)
    check(load_config("t5_tiny", [*pipe, asked[0]]), **devices)
    for one in meshes_and_schedules(load_config("t5_tiny"), parse_target("h100:1x8"), 8):
        assert one["Mesh.pipe"] == 1 or not one.get("Sharding.collective_matmul", False)


@pytest.mark.parametrize(("machine", "most"), [("v5p:2x2x2", 2), ("h100:1x8", 8)])
def test_a_search_sends_around_rings_where_they_have_all_links(machine, most):
    config, seen = load_config("gpt_quickstart"), set()
    for one in meshes_and_schedules(config, parse_target(machine), 8):
        split, schedule = one["Mesh.tensor"], one.get("Pipeline.schedule")
        seen.add((split, schedule))
        wanted = 1 < split <= most and schedule not in ("zero_bubble", "dualpipe_v")
        assert one.get("Sharding.collective_matmul", False) == wanted
    assert seen >= {(2, None), (2, "1f1b"), (2, "zero_bubble"), (4, None), (1, None)}
