"""Qwen's mixtures of experts, 3 and 2, by settings of Mixtral, equal transformers'."""

import pytest
from conftest import make_layout, make_step, text_batch
from parity import assert_equal, evaluate
from tiny_models import count_parameters

from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.training.pipeline.schedules import Pipeline

SHAPES = {
    "small": Mixtral(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2,
                     head_dim=16, mlp_dim=24, num_experts=6, experts_per_token=3,
                     context_length=16, qk_norm=True, balance_weight=0.0),
    "odd": Mixtral(vocab_size=61, num_layers=3, embed_dim=18, num_heads=3, num_kv_heads=1,
                   mlp_dim=20, num_experts=5, experts_per_token=2, normalize_gates=False,
                   context_length=17, qk_norm=True, balance_weight=0.0, norm_eps=1e-3),
    "shared": Mixtral(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2,
                      mlp_dim=24, shared_mlp_dim=40, num_experts=6, experts_per_token=3,
                      context_length=16, qkv_bias=True, balance_weight=0.0),
    "shared_odd": Mixtral(vocab_size=61, num_layers=3, embed_dim=18, num_heads=3, num_kv_heads=1,
                          mlp_dim=20, shared_mlp_dim=7, num_experts=5, experts_per_token=2,
                          normalize_gates=False, context_length=17, qkv_bias=True,
                          balance_weight=0.0, tie_embeddings=True),
}  # fmt: skip
SHARED = SHAPES["shared"]


def pair_of(sizes: Mixtral):
    from against_transformers import Apart, draw, transformers  # noqa: PLC0415

    shared = sizes.shared_mlp_dim
    kind, model_type = ("Qwen3Moe", "qwen3_moe") if shared is None else ("Qwen2Moe", "qwen2_moe")
    own = {"head_dim": sizes.attention.key_dim} if shared is None else {
        "shared_expert_intermediate_size": shared
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=sizes.vocab_size, hidden_size=sizes.embed_dim, intermediate_size=7,
        moe_intermediate_size=sizes.mlp_dim, num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.experts_per_token, norm_topk_prob=sizes.normalize_gates,
        num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads, tie_word_embeddings=sizes.tie_embeddings, **own,
        max_position_embeddings=sizes.context_length, rms_norm_eps=sizes.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        attn_implementation="eager", experts_implementation="eager",
        pad_token_id=None,  # its row of the embedding would have no gradient there
    )  # fmt: skip
    there = getattr(transformers, f"{kind}ForCausalLM")(config)
    return Apart(sizes, draw(there, scales=()), model_type)


@pytest.mark.slow_cases("odd", "small")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "shared_odd" else n for n in SHAPES]
)
def test_logits_and_every_gradient_equal_transformers(name):
    sizes = SHAPES[name]
    pair_of(sizes).compare(text_batch(rows=3, length=13, vocab_size=sizes.vocab_size))


@pytest.mark.slow
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


def test_parameters_with_a_shared_expert_are_the_published_ones():
    """Those of Qwen/Qwen1.5-MoE-A2.7B: 14,315,784,192."""
    sizes = Mixtral(
        vocab_size=151936, num_layers=24, embed_dim=2048, num_heads=16, num_kv_heads=16,
        mlp_dim=1408, shared_mlp_dim=5632, num_experts=60, experts_per_token=4, qkv_bias=True,
    )  # fmt: skip
    assert count_parameters(sizes) == 14_315_784_192


@pytest.fixture(scope="module")
def one_device():
    batch = text_batch(rows=16, length=16, vocab_size=SHARED.vocab_size)
    return batch, evaluate(make_step(SHARED, make_layout()), batch)


@pytest.mark.slow
def test_a_gated_shared_expert_on_a_mesh_is_one_devices(one_device):
    batch, expected = one_device
    layout = make_layout(pipe=2, expert=2, tensor=2, sequence_parallel=True)
    program = make_step(SHARED, layout, pipeline=Pipeline(microbatches=2))
    assert_equal(evaluate(program, batch, expected), expected)
