"""State space models equal transformers'; from a cache, and on a mesh, they are the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step, text_batch
from parity import assert_equal, evaluate
from tiny_models import count_parameters

from jaxtrain.models.state_space.mamba import Mamba
from jaxtrain.models.state_space.mamba2 import Mamba2
from jaxtrain.nn.kv_cache import empty_cache
from jaxtrain.run.generation.decoding import next_logits
from jaxtrain.training.pipeline.schedules import Pipeline

SHAPES = {
    "mamba": Mamba(vocab_size=64, num_layers=2, embed_dim=32, state_dim=8, context_length=16),
    "mamba odd": Mamba(vocab_size=61, num_layers=3, embed_dim=18, state_dim=5, step_rank=3,
                       conv_width=3, context_length=17),
    "mamba one state": Mamba(vocab_size=23, num_layers=1, embed_dim=8, expand=3, state_dim=1,
                             conv_width=2, context_length=16, norm_eps=1e-3),
    "mamba2": Mamba2(vocab_size=64, num_layers=2, embed_dim=32, head_dim=8, state_dim=8,
                     context_length=16),
    "mamba2 odd": Mamba2(vocab_size=61, num_layers=3, embed_dim=18, head_dim=4, state_dim=5,
                         conv_width=3, context_length=17),
    "mamba2 one head": Mamba2(vocab_size=23, num_layers=1, embed_dim=8, expand=3, head_dim=24,
                              state_dim=1, conv_width=2, context_length=16, norm_eps=1e-3),
}  # fmt: skip
FAMILIES = ("mamba", "mamba2")

# -- against transformers --------------------------------------------------------------------------


def pair_of(sizes: Mamba | Mamba2):
    from against_transformers import Pair, draw, transformers  # noqa: PLC0415

    name = type(sizes).__name__
    own = {"time_step_rank": sizes.block.step_rank} if isinstance(sizes, Mamba) else {
        "num_heads": sizes.block.num_heads, "head_dim": sizes.head_dim, "n_groups": 1,
        "chunk_size": 4, "tie_word_embeddings": True,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        vocab_size=sizes.vocab_size, hidden_size=sizes.embed_dim, state_size=sizes.state_dim,
        num_hidden_layers=sizes.num_layers, expand=sizes.expand, conv_kernel=sizes.conv_width,
        layer_norm_epsilon=sizes.norm_eps, use_cache=False, **own,
    )  # fmt: skip
    return Pair(sizes, draw(getattr(transformers, f"{name}ForCausalLM")(config)), name.lower())


@pytest.mark.slow_cases("mamba2", "mamba odd", "mamba one state", "mamba2 one head")
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_gradient_equal_transformers(name):
    sizes = SHAPES[name]
    pair_of(sizes).compare(text_batch(rows=3, length=13, vocab_size=sizes.vocab_size))


# Trains; logits and gradients are in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_thirty_steps_have_the_losses_of_transformers(family):
    sizes = dataclasses.replace(SHAPES[family], num_layers=1)
    pair_of(sizes).train([text_batch(rows=4, length=8, vocab_size=sizes.vocab_size, documents=1)])


def test_parameters_are_the_published_ones():
    """state-spaces/mamba-130m-hf: 129,135,360; mamba2-130m, its vocabulary padded to 50,288 rows:
    128,989,632."""
    assert count_parameters(Mamba()) == 129_135_360
    D, F, N, S, K = 768, 1536, 24, 128, 4
    layer = D * (2 * F + 2 * S + N) + (F + 2 * S) * (K + 1) + 3 * N + F + F * D + D
    assert count_parameters(Mamba2()) == 24 * layer + 50288 * D + D == 128_989_632


# -- generation ------------------------------------------------------------------------------------


# The cases that are left run the same code.
@pytest.mark.slow_cases("mamba odd")
@pytest.mark.parametrize("name", ["mamba odd", "mamba2 odd"])
def test_cached_logits_are_those_of_the_whole_text(name):
    """Of rows that are padded on the left too, the second so far that it has one token at first."""
    sizes, padding = SHAPES[name], np.array([0, 3])
    program = make_step(sizes, make_layout(fsdp=1))
    state, objective, execution = (
        program.create(0),
        program.setup.objective,
        program.setup.execution,
    )
    tokens = np.random.default_rng(0).integers(0, sizes.vocab_size, (2, 9)).astype(np.int32)
    with program.setup.layout.active():
        model = program.setup.model(state)
        texts = [row[None, before:] for row, before in zip(tokens, padding, strict=True)]
        read = jax.jit(lambda x: objective.logits(model, {}, objective.reading(x), execution)[0])
        whole = [read(x) for x in texts]
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


@pytest.fixture(scope="module", params=FAMILIES)
def one_device(request):
    sizes = SHAPES[request.param]
    batch = text_batch(rows=16, length=8, vocab_size=64)
    return sizes, batch, evaluate(make_step(sizes, make_layout()), batch)


# tests/test_lstm.py has a recurrent model on meshes in the fast part.
@pytest.mark.slow
def test_a_mesh_computes_the_same(one_device):
    sizes, batch, expected = one_device
    layout = make_layout(pipe=2, fsdp=2, tensor=2, sequence_parallel=True, zero=1)
    program = make_step(sizes, layout, pipeline=Pipeline(microbatches=2), accumulation=2)
    assert_equal(evaluate(program, batch, expected), expected)
