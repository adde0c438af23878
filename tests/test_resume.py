"""A checkpoint of any pipeline is restored into any other, and into none."""

import jax
import numpy as np
import pytest
from conftest import make_layout, make_program

from jaxtrain import resume
from jaxtrain.checkpoint import Checkpoint, Checkpoints
from jaxtrain.models.gpt import GPT
from jaxtrain.pipeline.schedules import Pipeline

MODEL = GPT(vocab_size=64, num_layers=6, embed_dim=32, num_heads=8, context_length=16)
LAYOUTS = {
    "one": ({}, {}),
    "fsdp": ({"fsdp": 8}, {}),
    "pipe2": ({"pipe": 2, "tensor": 2}, {}),
    "pipe4_uneven": ({"pipe": 4, "fsdp": 2}, {}),
    "interleaved": (
        {"pipe": 2, "data": 2, "zero": 1},
        {"schedule": "interleaved", "virtual_stages": 2, "microbatches": 2},
    ),
}


def program(name):
    sizes, pipeline = LAYOUTS[name]
    return make_program(MODEL, make_layout(**sizes), pipeline=Pipeline(**pipeline))


def in_model_order(program, tree):
    tree = jax.device_get(tree)
    return tree if program.stages is None else program.stages.to_layers(tree)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder and the state in it, for each layout; every leaf is different from the others."""
    found = {}

    def get(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            writer = program(name)
            state = writer.create(seed=0)
            # Optimizer moments that are not all zero.
            state = jax.tree.map(lambda x: x + 1 if x.ndim else x, state)
            checkpoints = Checkpoints(folder, Checkpoint(asynchronous=False))
            checkpoints.save(3, state, {"layer_order": writer.layer_order})
            checkpoints.close()
            found[name] = folder, in_model_order(writer, (state.params, state.opt_state))
        return found[name]

    return get


PAIRS = [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b]


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_every_layout_reads_every_other(writer, reader, saved):
    folder, expected = saved(writer)
    checkpoints = Checkpoints(folder, Checkpoint(), read_only=True)
    new = program(reader)
    state = resume.restore(checkpoints, 3, new)
    found = in_model_order(new, (state.params, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    wanted = jax.tree.map(lambda leaf: leaf.sharding, new.abstract_state())
    assert jax.tree.map(lambda x: x.sharding, state) == wanted
