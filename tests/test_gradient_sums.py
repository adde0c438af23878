"""`Precision.gradients`: the dtype in which gradients of microbatches are summed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step
from test_accumulate_local import K, N, configured, moved
from test_step import BATCH, MODELS

from jaxtrain.analysis.planning.textbook.memory import memory
from jaxtrain.nn.precision import Precision
from jaxtrain.parallel.sharding import by_name
from jaxtrain.training.layouts import abstract_layout
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.setup import split_microbatches

LLAMA = dataclasses.replace(MODELS["llama"], num_layers=4)
SHORT = Precision(compute="float32", gradients="bfloat16")
LONG = Precision(compute="float32")
HALF = 2.0**-9  # bfloat16 rounds by half a unit in the last of 8 places


def program_of(precision, *, accumulation=1, pipeline=None, **sizes):
    more = {} if pipeline is None else {"pipeline": pipeline}
    return make_step(
        LLAMA, make_layout(**sizes), precision=precision, accumulation=accumulation, **more
    )


def gradients(program, batch=BATCH, counts=None):
    """By name, layers in the model's order."""
    state = program.create(0)
    batch = jax.device_put(batch, program.setup.batch_shardings(batch))
    with program.setup.layout.active():
        grads = jax.jit(lambda s, b: program.setup.gradients(s, b, counts)[0])(state, batch)
    if program.setup.stages is not None:
        grads = program.setup.stages.to_layers(jax.device_get(grads))
    return {name: np.asarray(v.get_value()) for name, v in by_name(grads).items()}


def norm(tree):
    return np.sqrt(sum(np.square(x.astype(np.float64)).sum() for x in tree.values()))


def test_each_addition_is_rounded():
    """As adding the microbatches' gradients up in bfloat16 by hand."""
    one, counts = program_of(LONG), None
    micros = split_microbatches(BATCH, 4)
    counts = one.setup.objective.counts(BATCH)
    total = None
    for place in range(4):
        micro = jax.tree.map(lambda x, place=place: x[place], micros)
        mine = {name: jnp.bfloat16(g) for name, g in gradients(one, micro, counts).items()}
        total = mine if total is None else {name: g + mine[name] for name, g in total.items()}
    found = gradients(program_of(SHORT, accumulation=4))
    exact = gradients(program_of(LONG, accumulation=4))
    assert total is not None
    by_hand = {name: np.asarray(g, np.float32) for name, g in total.items()}
    for name, grad in found.items():
        assert (grad == np.asarray(jnp.bfloat16(grad), np.float32)).all(), name
    off = {name: grad - by_hand[name] for name, grad in found.items()}
    # Products in another order round differently here and there.
    assert norm(off) < 0.05 * HALF * norm(exact)
    assert norm({name: found[name] - exact[name] for name in exact}) > 0.3 * HALF * norm(exact)


# Compiles three steps; tests/test_reduction.py has sharded masters in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 4, "tensor": 2, "zero": 1, "masters": "sharded", "accumulation": 4},
        pytest.param({"data": 2, "fsdp": 4, "accumulation": 2}, marks=pytest.mark.slow),
        {
            "pipe": 2, "fsdp": 2, "zero": 1, "masters": "sharded",
            "pipeline": Pipeline(microbatches=4),
        },
    ],
    ids=["masters", "hsdp", "pipe"],
)  # fmt: skip
def test_sums_on_a_mesh_are_float32s_but_for_rounding(sizes):
    exact, found = (
        gradients(program_of(LONG, accumulation=4)),
        gradients(program_of(SHORT, **sizes)),
    )
    off = norm({name: found[name] - exact[name] for name in exact}) / norm(exact)
    # 4 terms and 3 additions of them, and a sum over at most 4 devices; none of it is not rounded.
    assert 0.2 * HALF < off < 7 * HALF
    whole = gradients(program_of(LONG, **sizes))
    assert norm({name: whole[name] - exact[name] for name in exact}) < 1e-5 * norm(exact)


def test_sums_take_and_send_half_as_much():
    """Whole sums of ZeRO 1: 2 N in place of 4 N bytes; a microbatch's own are as they were."""
    long = configured("shard", accumulation=2, zero=1)
    short = dataclasses.replace(
        long, precision=dataclasses.replace(long.precision, gradients="bfloat16")
    )
    assert moved(long)["reduce-scatter"] == 4 * N
    assert moved(short)["reduce-scatter"] == 2 * N
    assert moved(short)["all-gather"] == moved(long)["all-gather"]
    layout = abstract_layout(long, K)
    more, less = (memory(config, layout, "gpu").gradients for config in (long, short))
    assert more - less == pytest.approx(2 * N, rel=0.05)
    once = dataclasses.replace(short, train=dataclasses.replace(short.train, accumulation=1))
    assert moved(once) == moved(configured("shard", accumulation=1, zero=1))
