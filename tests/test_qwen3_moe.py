"""Qwen 3's mixture of experts, by settings of Mixtral, equals transformers'."""

import pytest
from conftest import text_batch
from tiny_models import count_parameters

from jaxtrain.models.transformers.mixtral import Mixtral

SHAPES = {
    "small": Mixtral(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2,
                     head_dim=16, mlp_dim=24, num_experts=6, experts_per_token=3,
                     context_length=16, qk_norm=True, balance_weight=0.0),
    "odd": Mixtral(vocab_size=61, num_layers=3, embed_dim=18, num_heads=3, num_kv_heads=1,
                   mlp_dim=20, num_experts=5, experts_per_token=2, normalize_gates=False,
                   context_length=17, qk_norm=True, balance_weight=0.0, norm_eps=1e-3),
}  # fmt: skip


def pair_of(sizes: Mixtral):
    pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    transformers = pytest.importorskip("transformers", reason="transformers is the peer")
    from against_transformers import Apart, draw  # noqa: PLC0415

    config = transformers.Qwen3MoeConfig(
        vocab_size=sizes.vocab_size, hidden_size=sizes.embed_dim, intermediate_size=7,
        moe_intermediate_size=sizes.mlp_dim, num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.experts_per_token, norm_topk_prob=sizes.normalize_gates,
        num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads, head_dim=sizes.key_dim,
        max_position_embeddings=sizes.context_length, rms_norm_eps=sizes.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        attn_implementation="eager", experts_implementation="eager",
        pad_token_id=None,  # its row of the embedding would have no gradient there
    )  # fmt: skip
    return Apart(sizes, draw(transformers.Qwen3MoeForCausalLM(config), scales=()), "qwen3_moe")


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_gradient_equal_transformers(name):
    sizes = SHAPES[name]
    pair_of(sizes).compare(text_batch(rows=3, length=13, vocab_size=sizes.vocab_size))


def test_thirty_steps_have_the_losses_of_transformers():
    sizes = SHAPES["odd"]
    pair_of(sizes).train([text_batch(rows=4, length=16, vocab_size=sizes.vocab_size, documents=1)])


def test_parameters_are_the_published_ones():
    """Those of Qwen/Qwen3-30B-A3B: 30,532,122,624."""
    sizes = Mixtral(
        vocab_size=151936, num_layers=48, embed_dim=2048, num_heads=32, num_kv_heads=4,
        head_dim=128, mlp_dim=768, num_experts=128, experts_per_token=8, qk_norm=True,
    )  # fmt: skip
    assert count_parameters(sizes) == 30_532_122_624
