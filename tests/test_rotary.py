"""Rotary frequencies are the paper's, YaRN's transformers', and so is a Llama with these."""

import numpy as np
import pytest
from conftest import text_batch

from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.attention.grouped_query import GroupedQuery
from jaxtrain.nn.attention.rotary import Rotary, Yarn

SIZES = Llama(
    vocab_size=61, num_layers=2, embed_dim=48, num_heads=4, num_kv_heads=2, mlp_dim=40,
    context_length=32, rope_theta=1000.0, rope_type="yarn", rope_scaling=4.0,
    rope_low_frequency_factor=0.2, rope_high_frequency_factor=1.0, rope_original_context_length=8,
)  # fmt: skip


def test_rotary_alone_is_the_paper_s():
    # arXiv 2104.09864, equation 15: theta_i = 10000^(-2 (i - 1) / d), i from 1 to d / 2.
    d = 64
    expected = [10000.0 ** (-2 * (i - 1) / d) for i in range(1, d // 2 + 1)]
    np.testing.assert_allclose(Rotary().frequencies(d), expected, rtol=2e-6)
    expected = [500.0 ** (-2 * (i - 1) / d) for i in range(1, d // 2 + 1)]
    np.testing.assert_allclose(Rotary(theta=500.0).frequencies(d), expected, rtol=2e-6)


def test_a_part_of_one_s_own_names_nothing_that_it_has_not():
    """Attention without a window, a longer context or YaRN's factors is what it is by default."""
    own = GroupedQuery(
        embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, residual_stddev=0.0025,
        rotary=Rotary(theta=500000.0),
    )  # fmt: skip
    assert own == Llama().block.attention
    slowed = Yarn(theta=1e4, scaling=4.0, original_context_length=4096)
    # arXiv 2309.00071, section 3.2: alpha = 1 and beta = 32 for the Llama family.
    assert (slowed.low_frequency_factor, slowed.high_frequency_factor) == (1.0, 32.0)


def their_config(sizes: Llama):
    pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    transformers = pytest.importorskip("transformers", reason="transformers is the peer")
    from jaxtrain.models.weights.family import family_for  # noqa: PLC0415

    said = family_for(sizes, "llama")[1]
    rope = {**said.pop("rope_scaling"), "rope_theta": said.pop("rope_theta")}
    return transformers.LlamaConfig(**said, rope_parameters=rope)


@pytest.mark.parametrize(
    ("theta", "scaling", "head_dim", "length", "low", "high"),
    [
        (1e4, 4.0, 64, 4096, 1.0, 32.0),
        (1e6, 40.0, 128, 32768, 1.0, 32.0),
        (500.0, 2.0, 6, 16, 0.5, 3.0),
    ],
)
def test_frequencies_and_factor_are_those_of_transformers(
    theta, scaling, head_dim, length, low, high
):
    sizes = Llama(
        vocab_size=8, num_layers=1, embed_dim=head_dim, num_heads=1, num_kv_heads=1, mlp_dim=4,
        context_length=length, rope_theta=theta, rope_type="yarn", rope_scaling=scaling,
        rope_low_frequency_factor=low, rope_high_frequency_factor=high,
        rope_original_context_length=length,
    )  # fmt: skip
    config = their_config(sizes)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    ours = Yarn(
        theta=theta, scaling=scaling, low_frequency_factor=low, high_frequency_factor=high,
        original_context_length=length,
    )  # fmt: skip
    np.testing.assert_allclose(ours.frequencies(head_dim), expected.numpy(), rtol=2e-6)
    assert ours.scale == pytest.approx(factor, rel=1e-12)
    assert ours == sizes.block.attention.rotary


def test_logits_and_every_gradient_of_a_llama_equal_transformers():
    config = their_config(SIZES)
    import transformers  # noqa: PLC0415
    from against_transformers import Pair, draw  # noqa: PLC0415

    config._attn_implementation = "eager"
    pair = Pair(SIZES, draw(transformers.LlamaForCausalLM(config)), "llama")
    pair.compare(text_batch(rows=3, length=29, vocab_size=SIZES.vocab_size))


def test_a_type_that_would_do_nothing_is_refused():
    with pytest.raises(UserError, match=r"Llama.rope_type='yarn' has no effect with"):
        Llama(rope_type="yarn")
