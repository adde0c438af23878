"""Gemma 3, whose layers differ, equals transformers', and one device on every mesh."""

import dataclasses

import pytest
from conftest import make_layout, make_program, text_batch
from parity import assert_equal, evaluate
from tiny_models import count_parameters

from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gemma3 import Gemma3
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.pipeline.schedules import Pipeline

# Windows shorter than the texts, and patterns that neither depth is a multiple of.
SHAPES = {
    "small": Gemma3(vocab_size=64, num_layers=3, embed_dim=32, num_heads=4, num_kv_heads=2,
                    head_dim=16, mlp_dim=48, context_length=16, global_every=2, sliding_window=4,
                    local_rope_theta=100.0),
    "odd": Gemma3(vocab_size=61, num_layers=4, embed_dim=18, num_heads=3, num_kv_heads=1,
                  head_dim=10, mlp_dim=20, context_length=17, global_every=3, sliding_window=3,
                  query_width=6, rope_scaling=8.0, norm_eps=1e-3),
    "all_heads": Gemma3(vocab_size=23, num_layers=2, embed_dim=8, num_heads=2, num_kv_heads=2,
                        head_dim=2, mlp_dim=5, context_length=16, global_every=1,
                        rope_theta=100.0),
}  # fmt: skip


def pair_of(sizes: Gemma3):
    pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    transformers = pytest.importorskip("transformers", reason="transformers is the peer")
    from against_transformers import Pair, draw  # noqa: PLC0415

    slowed = {"rope_type": "linear", "factor": sizes.rope_scaling}
    config = transformers.Gemma3TextConfig(
        vocab_size=sizes.vocab_size, hidden_size=sizes.embed_dim, intermediate_size=sizes.mlp_dim,
        num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads, head_dim=sizes.head_dim,
        max_position_embeddings=sizes.context_length, rms_norm_eps=sizes.norm_eps,
        sliding_window=sizes.sliding_window, sliding_window_pattern=sizes.global_every,
        query_pre_attn_scalar=sizes.query_width or sizes.head_dim,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": sizes.local_rope_theta},
            "full_attention": {
                **(slowed if sizes.rope_scaling != 1 else {"rope_type": "default"}),
                "rope_theta": sizes.rope_theta,
            },
        },
        attn_implementation="eager",
        pad_token_id=None,  # its row of the embedding would have no gradient there
    )  # fmt: skip
    return Pair(sizes, draw(transformers.Gemma3ForCausalLM(config), scales=()), "gemma3_text")


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_gradient_equal_transformers(name):
    sizes = SHAPES[name]
    pair_of(sizes).compare(text_batch(rows=3, length=13, vocab_size=sizes.vocab_size))


def test_thirty_steps_have_the_losses_of_transformers():
    sizes = SHAPES["small"]
    pair_of(sizes).train([text_batch(rows=4, length=16, vocab_size=sizes.vocab_size, documents=1)])


def test_parameters_are_the_published_ones():
    """Those of google/gemma-3-1b: 999,885,952."""
    assert count_parameters(Gemma3()) == 999_885_952


@pytest.mark.parametrize("window", [3, 100])
def test_flops_are_a_sum_over_the_keys_that_queries_see(window):
    sizes = dataclasses.replace(SHAPES["small"], sliding_window=window)
    T, pairs = 16, 0
    for number in range(1, sizes.num_layers + 1):
        back = T if number % sizes.global_every == 0 else min(window, T)
        # Half a key less than a sum over whole places: the causal half of the published formula.
        pairs += (
            sum(min(place + 0.5, back) for place in range(T))
            if back == T
            else (back * T - back * back / 2)
        )
    scores = 12 * sizes.num_heads * sizes.head_dim * pairs / T
    assert sizes.flops_per_token(T) == 6 * sizes.matmul_parameters() + scores


@pytest.fixture(scope="module")
def one_device():
    sizes = SHAPES["small"]
    batch = text_batch(rows=16, length=16, vocab_size=sizes.vocab_size)
    return sizes, batch, evaluate(make_program(sizes, make_layout()), batch)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"context": 2, "fsdp": 2, "tensor": 2}, {"loss": Loss(chunk_size=4)}),
        # Two layers on one rank, and a place without any on the other.
        ({"pipe": 2, "fsdp": 2}, {"pipeline": Pipeline(schedule="1f1b", microbatches=2)}),
        ({"pipe": 2}, {"pipeline": Pipeline(schedule="zero_bubble", microbatches=2)}),
    ],
    ids=["context_tensor_chunks", "pipe", "zero_bubble"],
)
def test_every_mesh_computes_the_same(layout, changes, one_device):
    sizes, batch, expected = one_device
    assert_equal(evaluate(make_program(sizes, make_layout(**layout), **changes), batch), expected)


def test_a_pattern_of_no_layers_is_refused():
    with pytest.raises(UserError, match=r"Gemma3.global_every=0"):
        Gemma3(global_every=0)
