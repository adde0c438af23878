"""T5 equals transformers' T5ForConditionalGeneration, in training and through its files."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from against_transformers import draw, torch, transformers
from pairs import Given, SequencePair, pairs
from rich.console import Console
from tiny_models import count_parameters

from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.t5 import INSIDE, T5
from jaxtrain.nn.transformer.encoder_decoder import AROUND, DECODER, ENCODER
from jaxtrain.nn.transformer.positional_embedding import Relative
from jaxtrain.run.huggingface import importing
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import load_config

SHAPES = {
    "small": T5(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, head_dim=8, mlp_dim=64,
                context_length=16, buckets=8, distance=12),
    "odd": T5(vocab_size=61, num_layers=3, embed_dim=18, num_heads=3, head_dim=5, mlp_dim=20,
              context_length=17, mlp="gated_gelu", tie_embeddings=False, scale_outputs=False,
              dropout=0.3),
    "one_head": T5(vocab_size=23, num_layers=1, embed_dim=8, num_heads=1, head_dim=16, mlp_dim=5,
                   context_length=16, mlp="gated_gelu", norm_eps=1e-5, buckets=10, distance=9),
}  # fmt: skip


def peer_of(sizes: T5, spread: float = 0.25):
    """Theirs, dropping what we drop; but for attention's weights."""
    config = transformers.T5Config(
        vocab_size=sizes.vocab_size, d_model=sizes.embed_dim, d_kv=sizes.head_dim,
        d_ff=sizes.mlp_dim, num_layers=sizes.num_layers, num_heads=sizes.num_heads,
        relative_attention_num_buckets=sizes.buckets,
        relative_attention_max_distance=sizes.distance, dropout_rate=0.0,
        layer_norm_epsilon=sizes.norm_eps, tie_word_embeddings=sizes.scale_outputs,
        feed_forward_proj={"relu": "relu", "gated_gelu": "gated-gelu"}[sizes.mlp],
        attn_implementation="eager",
    )  # fmt: skip
    made = transformers.T5ForConditionalGeneration(config)
    if not sizes.tie_embeddings:  # transformers 5 ties even where config.json says not to
        made.lm_head.weight = torch.nn.Parameter(torch.empty_like(made.shared.weight))
    # Unscaled scores of wider weights are so far apart that one ReLU at its kink changes gradients.
    made = draw(made, spread=spread)
    for place, first, stack in ((0, ENCODER, made.encoder), (2, DECODER, made.decoder)):
        stack.dropout = Given(sizes.dropout, AROUND + place, AROUND + place + 1)
        for number, block in enumerate(stack.block):
            for part, layer in enumerate(block.layer):
                layer.dropout = Given(sizes.dropout, first + part, layer=number)
            inside = Given(sizes.dropout, first + INSIDE, layer=number)
            block.layer[-1].DenseReluDense.dropout = inside
    return made


def batch_of(sizes: T5, rows: int = 4):
    return pairs(rows=rows, source=13, target=9, vocab_size=sizes.vocab_size)


@pytest.mark.slow_cases("one_head", "odd")
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_gradient_equal_transformers(name):
    sizes = SHAPES[name]
    SequencePair(sizes, peer_of(sizes), "t5").compare(batch_of(sizes))


@pytest.mark.slow
def test_thirty_steps_have_the_losses_of_transformers():
    sizes = dataclasses.replace(SHAPES["small"], mlp="gated_gelu")
    SequencePair(sizes, peer_of(sizes, 0.15), "t5").train([batch_of(sizes)])


@pytest.mark.parametrize(("buckets", "distance"), [
    (32, 128), (8, 20), (64, 300), (10, 20), (4, 3), (5, 9), (6, 100), (7, 30), (11, 6), (30, 128),
])  # fmt: skip
@pytest.mark.parametrize("both_ways", [True, False])
def test_distances_have_the_buckets_of_transformers(buckets, distance, both_ways):
    ahead = np.arange(-400, 401)
    of = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    expected = of(torch.tensor(ahead), bidirectional=both_ways, num_buckets=buckets,
                  max_distance=distance)  # fmt: skip
    ours = Relative(
        num_heads=1, buckets=buckets, distance=distance, both_ways=both_ways, stddev=1.0
    )
    np.testing.assert_array_equal(ours.bucket(jnp.asarray(ahead)), expected)


def test_parameters_are_those_of_the_published_sizes():
    """t5-small has 60,506,624 parameters, google/t5-v1_1-small 76,961,152 (their model cards)."""
    new = T5(mlp="gated_gelu", num_layers=8, num_heads=6, mlp_dim=1024, tie_embeddings=False,
             scale_outputs=False)  # fmt: skip
    for sizes, expected in ((T5(), 60_506_624), (new, 76_961_152)):
        assert count_parameters(sizes) == expected


# -- files -----------------------------------------------------------------------------------------


def test_a_model_of_transformers_comes_in_and_goes_out_bit_for_bit(tmp_path):
    sizes = SHAPES["small"]
    theirs = peer_of(sizes)
    theirs.save_pretrained(tmp_path / "there")
    config = load_config(f"hf:{tmp_path / 'there'}", ["Mesh.fsdp = 2", "Mesh.tensor = 2",
                         "Mesh.data = 2", "Precision.compute = 'float32'"])  # fmt: skip
    found = importing.import_run(
        config, tmp_path / "run", console=Console(quiet=True), report=lambda line: None
    )
    assert found.passed
    assert found.logits is not None
    trainer = Trainer(config, tmp_path / "run", read_only=True)
    batch = batch_of(sizes)
    with torch.no_grad():
        expected = SequencePair(sizes, theirs, "t5").logits(batch).numpy()
    np.testing.assert_allclose(
        trainer.logits(SequencePair(sizes, theirs, "t5").reading(None, batch)), expected,
        atol=1e-4, rtol=1e-4,
    )  # fmt: skip
    receipt = trainer.export_huggingface(tmp_path / "back")
    assert receipt.passed
    assert receipt.logits is not None
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "back")
    for name, value in theirs.named_parameters():
        assert torch.equal(value, dict(again.named_parameters())[name]), name
    content = json.loads((tmp_path / "back" / "config.json").read_text())
    assert content["decoder_start_token_id"] == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"buckets": 3}, r"T5.buckets=3; use at least 4"),
        ({"distance": 16}, r"T5.distance=16 is not beyond the 16 distances.*at least 17"),
        ({"head_dim": 0}, r"T5.head_dim=0"),
        ({"dropout": 1.0}, r"T5.dropout=1.0; use 0 to below 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        T5(**changes)
