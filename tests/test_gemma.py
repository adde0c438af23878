"""Gemma equals transformers', and one device on every mesh."""

import pytest
from conftest import make_layout, make_program, text_batch
from parity import assert_equal, evaluate
from tiny_models import count_parameters

from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gemma import Gemma
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.pipeline.schedules import Pipeline

SHAPES = {
    "small": Gemma(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2,
                   head_dim=16, mlp_dim=48, context_length=16),
    "odd": Gemma(vocab_size=61, num_layers=3, embed_dim=18, num_heads=3, num_kv_heads=1,
                 head_dim=10, mlp_dim=20, context_length=17, norm_eps=1e-3),
    "all_heads": Gemma(vocab_size=23, num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=2,
                       head_dim=2, mlp_dim=5, context_length=16, rope_theta=100.0),
}  # fmt: skip


def pair_of(sizes: Gemma):
    pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    transformers = pytest.importorskip("transformers", reason="transformers is the peer")
    from against_transformers import Pair, draw  # noqa: PLC0415

    config = transformers.GemmaConfig(
        vocab_size=sizes.vocab_size, hidden_size=sizes.embed_dim, intermediate_size=sizes.mlp_dim,
        num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads, head_dim=sizes.head_dim,
        max_position_embeddings=sizes.context_length, rms_norm_eps=sizes.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        attn_implementation="eager",
        pad_token_id=None,  # its row of the embedding would have no gradient there
    )  # fmt: skip
    return Pair(sizes, draw(transformers.GemmaForCausalLM(config), scales=()), "gemma")


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_gradient_equal_transformers(name):
    sizes = SHAPES[name]
    pair_of(sizes).compare(text_batch(rows=3, length=13, vocab_size=sizes.vocab_size))


def test_thirty_steps_have_the_losses_of_transformers():
    sizes = SHAPES["small"]
    pair_of(sizes).train([text_batch(rows=4, length=16, vocab_size=sizes.vocab_size, documents=1)])


def test_parameters_are_the_published_ones():
    """Those of google/gemma-2b: 2,506,172,416."""
    assert count_parameters(Gemma()) == 2_506_172_416


@pytest.fixture(scope="module")
def one_device():
    sizes = SHAPES["small"]
    batch = text_batch(rows=16, length=16, vocab_size=sizes.vocab_size)
    return sizes, batch, evaluate(make_program(sizes, make_layout()), batch)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"context": 2, "fsdp": 2, "tensor": 2}, {"loss": Loss(chunk_size=4)}),
        ({"pipe": 2, "fsdp": 2}, {"pipeline": Pipeline(schedule="1f1b", microbatches=2)}),
    ],
    ids=["context_tensor_chunks", "pipe"],
)
def test_every_mesh_computes_the_same(layout, changes, one_device):
    sizes, batch, expected = one_device
    assert_equal(evaluate(make_program(sizes, make_layout(**layout), **changes), batch), expected)


def test_heads_that_cannot_be_halved_are_refused():
    with pytest.raises(UserError, match=r"Gemma.head_dim=7 is no even number"):
        Gemma(head_dim=7)
