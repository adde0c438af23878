"""Every mesh axis alone, every pair that makes sense, and four axes at once equal one device."""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import test_context_step
import test_mixtral
import test_pipeline
import test_reduction
import test_step
from conftest import make_layout, make_step, text_batch
from parity import assert_equal, evaluate

from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.nn.execution import Execution
from jaxtrain.parallel.mesh import MESH_AXES

TESTS = Path(__file__).parent
BATCH = text_batch(rows=16, length=16, vocab_size=48)
MODELS = {
    **test_step.MODELS,
    "mixtral": Mixtral(
        vocab_size=64, num_layers=2, embed_dim=32, num_heads=8, num_kv_heads=2, mlp_dim=16,
        num_experts=4, context_length=16, router_z_weight=0.01,
    ),
}  # fmt: skip

# A stage's attention exchanges heads: a ring's permutes would need every stage to take part.
ULYSSES = Execution(kernel="reference", context_parallel="ulysses")

# What the tests of the single modes do not have: groups of key-value heads without a third axis.
DATA_TENSOR = {"data": 4, "tensor": 2}


@functools.cache
def one_device(model):
    return evaluate(make_step(MODELS[model], make_layout()), BATCH)


def test_loss_and_gradients_equal_one_device():
    program = make_step(MODELS["llama"], make_layout(**DATA_TENSOR))
    assert_equal(evaluate(program, BATCH), one_device("llama"))


def axes_of(sizes):
    return {axis for axis in MESH_AXES if sizes.get(axis, 1) > 1}


def test_the_matrix_has_every_axis_and_every_pair():
    meshes = [axes_of(DATA_TENSOR)]
    meshes += [axes_of(sizes) for _, _, sizes, _ in test_pipeline.CASES.values()]
    meshes += [axes_of(test_step.LAYOUTS[layout]) for _, layout in test_step.CASES]
    meshes += [axes_of(test_mixtral.LAYOUTS[layout]) for _, layout in test_mixtral.CASES]
    meshes += [axes_of(sizes) for _, sizes, _ in test_context_step.STEPS.values()]
    meshes += [axes_of(sizes) for _, sizes, _ in test_reduction.CASES.values()]
    for axis in MESH_AXES:
        assert {axis} in meshes, f"{axis} alone"
    for pair in itertools.combinations(MESH_AXES, 2):
        assert any(set(pair) <= axes for axes in meshes), pair


@pytest.mark.slow
def test_four_axes_at_once_on_sixteen_devices():
    environment = {**os.environ, "JAXTRAIN_TEST_DEVICES": "16"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "four_axes.py"],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "2 passed" in done.stdout
