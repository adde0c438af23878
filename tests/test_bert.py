"""BERT equals transformers' BertForMaskedLM, and one device on every mesh."""

import jax
import numpy as np
import pytest
from conftest import make_layout, make_step, text_batch
from parity import assert_equal, evaluate
from tiny_models import count_parameters

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.training.objectives.language_modeling import mask_tokens
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.pipeline.schedules import Pipeline

SHAPES = {
    "small": BERT(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64,
                  context_length=16),
    "odd": BERT(vocab_size=61, num_layers=3, embed_dim=18, num_heads=3, mlp_dim=20,
                context_length=17, token_types=3),
    "one_head": BERT(vocab_size=23, num_layers=1, embed_dim=8, num_heads=1, mlp_dim=5,
                     context_length=16, token_types=1, norm_eps=1e-6),
}  # fmt: skip


def batch_of(sizes: BERT, *, rows: int = 4, length: int = 16, packed: bool = True) -> Batch:
    """Two documents a row, or one, masked."""
    documents = 2 if packed else 1
    text = text_batch(
        rows=rows, length=length, vocab_size=sizes.vocab_size - 1, documents=documents
    )
    made = [
        mask_tokens(
            jax.tree.map(lambda x, i=i: x[i], text), np.random.default_rng(i), sizes.vocab_size
        )
        for i in range(rows)
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *made)


def pair_of(sizes: BERT):
    from against_transformers import Pair, draw, transformers  # noqa: PLC0415

    config = transformers.BertConfig(
        vocab_size=sizes.vocab_size, hidden_size=sizes.embed_dim,
        num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads,
        intermediate_size=sizes.mlp_dim, max_position_embeddings=sizes.context_length,
        type_vocab_size=sizes.token_types, layer_norm_eps=sizes.norm_eps,
        attn_implementation="eager",
        pad_token_id=None,  # its row of the embedding would have no gradient there
    )  # fmt: skip
    return Pair(sizes, draw(transformers.BertForMaskedLM(config)), "bert")


@pytest.mark.slow_cases("one_head", "small")
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_gradient_equal_transformers(name):
    sizes = SHAPES[name]
    # All three in one product: of keys' biases the gradient is zero, of the others' it is not.
    changes = {"loss": Loss(chunk_size=4)} if name == "odd" else {}
    pair_of(sizes).compare(batch_of(sizes), **changes)


@pytest.mark.slow
def test_thirty_steps_have_the_losses_of_transformers():
    sizes = SHAPES["small"]
    pair_of(sizes).train([batch_of(sizes, packed=False)])


def test_parameters_and_flops_are_the_published_ones():
    """BERT-base: 109,514,298 parameters with the head (transformers), 110M in the paper."""
    sizes = BERT()
    assert count_parameters(sizes) == 109_514_298
    matrices = 12 * (4 * 768**2 + 2 * 768 * 3072) + 768**2 + 30522 * 768
    assert sizes.flops((512,)) == 512 * 6 * (matrices + 12 * 2 * 512 * 768)


# -- meshes ----------------------------------------------------------------------------------------

ON_MESH = SHAPES["small"]


@pytest.fixture(scope="module")
def one_device():
    batch = batch_of(ON_MESH, rows=16)
    return batch, evaluate(make_step(ON_MESH, make_layout()), batch)


# tests/test_masked_token.py has BERT's step on a mesh in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"context": 2, "tensor": 2, "sequence_parallel": True, "zero": 2}, {"accumulation": 2}),
        (
            {"pipe": 2, "data": 2, "fsdp": 2},
            {"pipeline": Pipeline(microbatches=2), "loss": Loss(chunk_size=4)},
        ),
    ],
    ids=["context_sequence_parallel", "pipe_chunks"],
)
def test_every_mesh_computes_the_same(layout, changes, one_device):
    batch, expected = one_device
    program = make_step(ON_MESH, make_layout(**layout), **changes)
    assert_equal(evaluate(program, batch, expected), expected)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"embed_dim": 30, "num_heads": 4}, r"BERT.embed_dim=30 does not divide by BERT.num_heads"),
        ({"token_types": 0}, r"BERT.token_types=0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        BERT(**changes)
