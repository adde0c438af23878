"""State space models: from a cache as from the whole text, and one device on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_program, text_batch
from parity import assert_equal, evaluate

from jaxtrain.models.state_space.mamba import Mamba
from jaxtrain.models.state_space.mamba2 import Mamba2
from jaxtrain.nn.cache import empty_cache
from jaxtrain.run.generation.decoding import next_logits
from jaxtrain.training.pipeline.schedules import Pipeline

ODD = {
    "mamba": Mamba(vocab_size=61, num_layers=3, embed_dim=18, state_dim=5, step_rank=3,
                   conv_width=3, context_length=17),
    "mamba2": Mamba2(vocab_size=61, num_layers=3, embed_dim=18, head_dim=4, state_dim=5,
                     conv_width=3, context_length=17),
}  # fmt: skip

# -- generation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ODD)
def test_cached_logits_are_those_of_the_whole_text(name):
    """Of rows that are padded on the left too, the second so far that it has one token at first."""
    sizes, padding = ODD[name], np.array([0, 3])
    program = make_program(sizes, make_layout(fsdp=1))
    state, objective, execution = program.create(0), program.objective, program.execution
    tokens = np.random.default_rng(0).integers(0, sizes.vocab_size, (2, 9)).astype(np.int32)
    with program.layout.active():
        model = program.model(state)
        texts = [row[None, before:] for row, before in zip(tokens, padding, strict=True)]
        whole = [objective.logits(model, {}, objective.reading(x), execution)[0] for x in texts]
        cache = empty_cache(sizes.cached, layers=3, rows=2, room=9, dtype=jnp.dtype("float32"))
        run = jax.jit(lambda t, c: next_logits(model, t, c, padding, execution, room=9, last=1))
        done = 0
        for part in np.split(tokens, [4, 5, 7], 1):
            found, cache = run(part, cache)
            done += part.shape[1]
            for row, before in enumerate(padding):
                expected = whole[row][done - before - 1]
                np.testing.assert_allclose(found[row, 0], expected, rtol=1e-5, atol=1e-6)


# -- meshes ----------------------------------------------------------------------------------------

ON_MESH = {
    "mamba": Mamba(vocab_size=64, num_layers=2, embed_dim=32, state_dim=8, context_length=16),
    "mamba2": Mamba2(vocab_size=64, num_layers=2, embed_dim=32, head_dim=8, state_dim=8,
                     context_length=16),
}  # fmt: skip


@pytest.fixture(scope="module", params=ON_MESH)
def one_device(request):
    sizes = ON_MESH[request.param]
    batch = text_batch(rows=16, length=8, vocab_size=64)
    return sizes, batch, evaluate(make_program(sizes, make_layout()), batch)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
        ({"fsdp": 2, "tensor": 4, "sequence_parallel": True, "zero": 1}, {"accumulation": 2}),
        ({"pipe": 2, "fsdp": 2}, {"pipeline": Pipeline(schedule="1f1b", microbatches=2)}),
    ],
    ids=["tensor", "sequence_parallel", "pipe"],
)
def test_every_mesh_computes_the_same(layout, changes, one_device):
    sizes, batch, expected = one_device
    assert_equal(evaluate(make_program(sizes, make_layout(**layout), **changes), batch), expected)
