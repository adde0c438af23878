"""GPT-OSS, with attention sinks and experts of biases, equals transformers'."""

import dataclasses

import jax
import pytest
from conftest import make_layout, make_step, text_batch
from flax import nnx
from parity import assert_equal, evaluate
from tiny_models import count_parameters

from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gpt_oss import GPTOSS
from jaxtrain.nn.precision import is_matrix

# Gates that random weights clamp, windows shorter than the texts, positions slowed between pairs.
SMALL = GPTOSS(
    vocab_size=64, num_layers=3, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=24,
    num_experts=6, experts_per_token=3, context_length=16, sliding_window=4, swiglu_limit=1.0,
    rope_theta=100.0, rope_scaling=4.0, rope_original_context_length=40,
)  # fmt: skip
SHAPES = {
    "small": SMALL,
    "odd": GPTOSS(vocab_size=61, num_layers=4, embed_dim=18, num_heads=3, num_kv_heads=1,
                  head_dim=10, mlp_dim=20, num_experts=5, experts_per_token=2, context_length=17,
                  global_every=3, sliding_window=3, rope_type="llama3", rope_scaling=1.0,
                  norm_eps=1e-3, tie_embeddings=True),
    "all_heads": GPTOSS(vocab_size=23, num_layers=2, embed_dim=8, num_heads=2, num_kv_heads=2,
                        head_dim=8, mlp_dim=5, num_experts=3, experts_per_token=1,
                        context_length=16, sliding_window=5, swiglu_limit=0.5, rope_theta=50.0,
                        rope_scaling=8.0, rope_original_context_length=60),
}  # fmt: skip


def pair_of(sizes: GPTOSS):
    from against_transformers import Pair, draw, transformers  # noqa: PLC0415

    slowed = {
        "rope_type": "yarn", "factor": sizes.rope_scaling, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": sizes.rope_original_context_length,
    }  # fmt: skip
    config = transformers.GptOssConfig(
        vocab_size=sizes.vocab_size, hidden_size=sizes.embed_dim, intermediate_size=sizes.mlp_dim,
        num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads, head_dim=sizes.head_dim,
        num_local_experts=sizes.num_experts, num_experts_per_tok=sizes.experts_per_token,
        max_position_embeddings=sizes.context_length, rms_norm_eps=sizes.norm_eps,
        sliding_window=sizes.sliding_window, swiglu_limit=sizes.swiglu_limit,
        layer_types=[
            "sliding_attention" if number % sizes.global_every else "full_attention"
            for number in range(1, sizes.num_layers + 1)
        ],
        rope_parameters={
            **(slowed if sizes.rope_type == "yarn" else {"rope_type": "default"}),
            "rope_theta": sizes.rope_theta,
        },
        tie_word_embeddings=sizes.tie_embeddings,
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    return Pair(sizes, draw(transformers.GptOssForCausalLM(config)), "gpt_oss")


@pytest.mark.slow_cases("all_heads", "odd")
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_gradient_equal_transformers(name):
    sizes = SHAPES[name]
    pair_of(sizes).compare(text_batch(rows=3, length=13, vocab_size=sizes.vocab_size))


@pytest.mark.slow
def test_thirty_steps_have_the_losses_of_transformers():
    sizes = SMALL
    pair_of(sizes).train([text_batch(rows=4, length=16, vocab_size=sizes.vocab_size, documents=1)])


@pytest.mark.parametrize(
    ("sizes", "billions"),
    [
        (GPTOSS(), (20.91, 3.61)),
        (GPTOSS(num_layers=36, num_experts=128), (116.83, 5.13)),
    ],
    ids=["20b", "120b"],
)
def test_parameters_are_the_published_ones(sizes, billions):
    """All, and those that a token uses but for its embedding (arXiv 2508.10925, table 1)."""
    total = count_parameters(sizes)
    assert round(total / 1e9, 2) == billions[0]
    assert sizes.matmul_parameters() / 1e9 == pytest.approx(billions[1], abs=0.01)


def test_biases_and_sinks_are_no_matrices():
    """So they do not decay, and keep their float32."""
    shapes = nnx.state(nnx.eval_shape(lambda: SMALL.build(jax.random.key(0))), nnx.Param)
    for path, variable in nnx.to_flat_state(shapes):
        vector = "bias" in path[-1] or "norm" in path[-1] or path[-1] == "sinks"
        assert is_matrix(variable) != vector, path


# Two steps are compiled; without a capacity every pair of axes is in test_extras_on_meshes.py.
@pytest.mark.slow
def test_a_capacity_on_a_mesh_is_that_of_one_device():
    sizes = dataclasses.replace(SMALL, balance_weight=0.02, capacity_factor=1.0)
    batch = text_batch(rows=16, length=16, vocab_size=64)
    expected = evaluate(make_step(sizes, make_layout()), batch)
    program = make_step(sizes, make_layout(expert=2, tensor=2))
    assert_equal(evaluate(program, batch, expected), expected)


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(UserError, match=r"GPTOSS.swiglu_limit=0"):
        GPTOSS(swiglu_limit=0)
