"""Generation: the cache changes nothing, sampling draws from the right distribution."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step

from jaxtrain import Trainer, load_config
from jaxtrain.config.errors import UserError
from jaxtrain.models.recurrent.rnn import LSTM
from jaxtrain.models.state_space.mamba import Mamba
from jaxtrain.models.transformers.deepseek import DeepSeek
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.precision import Precision
from jaxtrain.nn.transformer.language_model import hidden_states, logits
from jaxtrain.run.generation import decoding
from jaxtrain.run.generation.decoding import Sampling, adjust_logits, draw, for_texts, prefill
from jaxtrain.run.generation.generate import generate

SIZES = {
    "gpt": GPT(vocab_size=32, num_layers=2, embed_dim=16, num_heads=4, context_length=24),
    "llama": Llama(
        vocab_size=32,
        num_layers=2,
        embed_dim=16,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=24,
        context_length=24,
    ),
    "mamba": Mamba(vocab_size=32, num_layers=2, embed_dim=16, context_length=24),
    "deepseek": DeepSeek(
        vocab_size=32,
        num_layers=3,
        dense_layers=1,
        embed_dim=16,
        num_heads=2,
        query_rank=6,
        key_value_rank=4,
        plain_dim=4,
        rotary_dim=2,
        value_dim=3,
        mlp_dim=24,
        expert_mlp_dim=8,
        num_experts=4,
        experts_per_token=2,
        expert_groups=2,
        groups_per_token=1,
        context_length=24,
        rope_original_context_length=8,
    ),  # fmt: skip
    "lstm": LSTM(vocab_size=32, num_layers=2, embed_dim=16, context_length=24),
}
PROMPT = [3, 1, 4, 1, 5]
PROMPTS = [PROMPT, [2], [6, 5, 3, 5, 8, 9, 7, 9, 3]]
GREEDY = Sampling(temperature=0.0)


def sharper(state):
    """The state with larger weights: a fresh model's likeliest tokens are nearly tied."""
    return dataclasses.replace(state, params=jax.tree.map(lambda x: 8 * x, state.params))


@pytest.mark.slow_cases("deepseek", "gpt", "lstm")
@pytest.mark.parametrize("name", SIZES)
def test_greedy_with_cache_equals_the_whole_text_again_for_every_token(name):
    sizes = SIZES[name]
    program = make_step(sizes, make_layout())
    state = sharper(program.create(seed=0))
    [answer] = generate(
        program.setup, sizes, state, [PROMPT], max_new_tokens=10, sampling=GREEDY, seed=0
    )
    model, text = program.setup.model(state), list(PROMPT)

    # One padded shape for every length: causality keeps the padding out.
    def last_logits(tokens, length):
        positions = jnp.arange(24)[None]
        h, _, _ = hidden_states(model, tokens[None], positions, Mask(), program.setup.execution)
        return logits(model, h)[0, length - 1]

    run = jax.jit(last_logits)
    with program.setup.layout.active():
        for _ in range(10):
            padded = np.zeros(24, np.int32)
            padded[: len(text)] = text
            text.append(int(run(padded, len(text)).argmax()))
    assert answer.tokens == text[len(PROMPT) :]
    assert len(set(answer.tokens)) > 2


# Other caches, the same loop over layers.
# Two models; answers with a cache are in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mamba", "lstm"])
def test_one_cpu_decodes_without_a_loop_over_layers_to_equal_answers(name, monkeypatch):
    """Deeper models keep the loop; the cache that comes out is stacked in both."""
    sizes = SIZES[name]

    def run(most):
        monkeypatch.setattr(decoding, "MOST_UNSTACKED", most)
        decoding.advance.clear_cache()
        program = make_step(sizes, make_layout())
        state = sharper(program.create(seed=0))
        assert decoding.unstacks_layers(program.setup.model(state), program.setup.layout) == (
            most == 2
        )
        settings = {"max_new_tokens": 10, "sampling": GREEDY, "seed": 0}
        return generate(program.setup, sizes, state, PROMPTS, **settings)

    for ours, looped in zip(run(2), run(1), strict=True):
        assert ours.tokens == looped.tokens
        np.testing.assert_allclose(ours.log_probabilities, looped.log_probabilities, atol=1e-5)


def test_several_devices_and_other_platforms_decode_with_the_loop(monkeypatch):
    program = make_step(SIZES["gpt"], make_layout())
    model = program.setup.model(program.create(seed=0))
    assert decoding.unstacks_layers(model, program.setup.layout)
    assert not decoding.unstacks_layers(model, make_layout(data=2))
    for platform in ("gpu", "tpu"):
        monkeypatch.setattr(decoding, "platform_of", lambda mesh, platform=platform: platform)
        assert not decoding.unstacks_layers(model, program.setup.layout)


@pytest.mark.slow_cases("deepseek", "gpt", "lstm")
@pytest.mark.parametrize("name", SIZES)
def test_a_padded_row_has_the_logits_of_the_row_alone(name):
    """Whatever stands in the padding, whose last token here would be seen first."""
    sizes = SIZES[name]
    step = make_step(sizes, make_layout())
    program, state = for_texts(step.setup), sharper(step.create(seed=0))
    tokens_BT, padding_B = decoding.pad_prompts(program, sizes, PROMPTS)
    assert tokens_BT.shape == (4, 16)
    assert padding_B.tolist() == [11, 15, 7, 15]
    tokens_BT = np.where(np.arange(16) < padding_B[:, None], 31, tokens_BT)
    with program.layout.active():
        together, _ = prefill(program, sizes, state, tokens_BT, padding_B, room=24)
        for row, prompt in enumerate(PROMPTS):
            tokens, nothing = np.array([prompt], np.int32), np.zeros(1, np.int32)
            alone, _ = prefill(program, sizes, state, tokens, nothing, room=24)
            largest = np.abs(alone).max()  # float32 rounds sums of such sizes
            np.testing.assert_allclose(together[row], alone[0], rtol=0, atol=1e-5 * largest)
    assert np.abs(together).max() > 0.5


def test_an_answer_does_not_depend_on_the_prompts_beside_it():
    sizes = SIZES["llama"]
    program = make_step(sizes, make_layout())
    state = sharper(program.create(seed=0))
    settings = {"sampling": Sampling(temperature=1.0), "seed": 1, "max_new_tokens": 8}
    together = generate(program.setup, sizes, state, PROMPTS, **settings)
    apart = generate(program.setup, sizes, state, PROMPTS, batch_size=1, **settings)
    assert [a.tokens for a in together] == [a.tokens for a in apart]
    same = generate(program.setup, sizes, state, [PROMPT, PROMPT], **settings)
    assert same[0].tokens == together[0].tokens
    assert same[1].tokens != same[0].tokens


def test_other_lengths_numbers_and_settings_of_a_bucket_compile_nothing(caplog):
    sizes = SIZES["gpt"]
    program = make_step(sizes, make_layout())
    state = program.create(seed=0)

    def write(lengths, new, sampling):
        prompts = [[1] * length for length in lengths]
        generate(
            program.setup, sizes, state, prompts, max_new_tokens=new, sampling=sampling, seed=0
        )

    write([3, 5, 2], 5, Sampling(temperature=0.5, top_k=3))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        write([16, 1, 7], 7, Sampling(temperature=0.9, top_k=5))
        compiled = [line for line in caplog.messages if "jit(advance)" in line or "prefill" in line]
        assert not compiled
        write([17, 1, 7], 7, Sampling(temperature=0.9, top_k=5))
    assert any("prefill" in line for line in caplog.messages)


# Two models; padded rows are in the fast part.
@pytest.mark.slow
def test_experts_with_a_capacity_see_no_padding():
    """Padding would take slots: prompts of one length go together, unpadded."""
    sizes = Mixtral(
        vocab_size=32, num_layers=1, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24,
        context_length=24, num_experts=4, capacity_factor=0.5,
    )  # fmt: skip
    step = make_step(sizes, make_layout())
    program = for_texts(step.setup)
    tokens_BT, padding_B = decoding.pad_prompts(program, sizes, [PROMPT])
    assert tokens_BT.tolist() == [PROMPT]
    assert padding_B.tolist() == [0]
    state = sharper(step.create(seed=0))
    prompts = [PROMPT, [2, 2], [7, 7, 7, 7, 7]]
    settings = {"sampling": GREEDY, "seed": 0, "max_new_tokens": 3}
    together = generate(program, sizes, state, prompts, **settings)
    apart = [generate(program, sizes, state, [one], **settings)[0] for one in prompts]
    assert [a.tokens for a in together] == [a.tokens for a in apart]


MESHES = ({}, {"data": 2, "fsdp": 2, "tensor": 2}, {"pipe": 2, "tensor": 2})


def test_generation_on_a_mesh_equals_one_device():
    sizes, texts, told = SIZES["llama"], [], []
    sampling = Sampling(temperature=0.9, top_k=10)
    for axes in MESHES:
        program = make_step(sizes, make_layout(3, **axes))
        found = generate(
            program.setup, sizes, program.create(seed=0), PROMPTS, max_new_tokens=12,
            sampling=sampling, seed=3,
        )  # fmt: skip
        texts.append([answer.tokens for answer in found])
        told.append([answer.log_probabilities for answer in found])
    assert texts[0] == texts[1] == texts[2]
    np.testing.assert_allclose(told[1], told[0], atol=1e-4)
    np.testing.assert_allclose(told[2], told[0], atol=1e-4)


# Generation on a mesh is in the fast part in float32.
@pytest.mark.slow
def test_bfloat16_logits_on_a_mesh_are_near_those_of_one_device():
    """The default's: XLA's CPU compiler aborts the process over some bfloat16 sums on meshes."""
    sizes, found = SIZES["llama"], []
    for axes in MESHES:
        program = make_step(sizes, make_layout(3, **axes), precision=Precision(compute="bfloat16"))
        state = sharper(program.create(seed=0))
        program = for_texts(program.setup)
        tokens_BT, padding_B = decoding.pad_prompts(program, sizes, [PROMPT])
        with program.layout.active():
            logits_BV, _ = prefill(program, sizes, state, tokens_BT, padding_B, room=16)
        found.append(np.asarray(logits_BV)[:1])
    limit = 8 * 2**-8 * np.abs(found[0]).max()  # roundings of some sums a layer
    np.testing.assert_allclose(found[1], found[0], atol=limit)
    np.testing.assert_allclose(found[2], found[0], atol=limit)


LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))[[2, 0, 3, 1]]
TRUE = np.array([0.15, 0.5, 0.1, 0.25])


def frequencies(sampling: Sampling) -> np.ndarray:
    draws = 20_000
    drawing, rows = sampling.drawing(), jnp.broadcast_to(LOGITS, (draws, 4))
    keys = jax.random.split(jax.random.key(0), draws)
    return np.bincount(draw(adjust_logits(rows, None, drawing), keys, drawing), minlength=4) / draws


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), TRUE),
        (Sampling(temperature=0.5), TRUE**2 / (TRUE**2).sum()),
        (Sampling(top_k=2), np.array([0, 0.5, 0, 0.25]) / 0.75),
        (Sampling(top_p=0.6), np.array([0, 0.5, 0, 0.25]) / 0.75),
        (Sampling(top_p=0.5), np.array([0, 1.0, 0, 0])),
        (Sampling(top_k=3, top_p=0.99), np.array([0.15, 0.5, 0, 0.25]) / 0.9),
        (Sampling(temperature=0.0), np.array([0, 1.0, 0, 0])),
        (Sampling(top_k=99), TRUE),
        (Sampling(min_p=0.4), np.array([0, 0.5, 0, 0.25]) / 0.75),
    ],
)
def test_draws_follow_the_distribution(sampling, expected):
    found = frequencies(sampling)
    # Four standard deviations of a frequency over 20,000 draws; what is cut off never appears.
    deviation = np.sqrt(expected * (1 - expected) / 20_000)
    assert (np.abs(found - expected) <= 4 * deviation + 1e-12).all(), found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"temperature": -1.0}, "--temperature -1.0: use a finite number, 0"),
        ({"temperature": math.inf}, "--temperature inf: use a finite number, 0"),
        ({"temperature": math.nan}, "--temperature nan: use a finite number, 0"),
        ({"top_k": 0}, "--top-k 0: use at least 1"),
        ({"top_p": 1.5}, "--top-p 1.5: use a probability"),
        ({"min_p": -0.1}, "--min-p -0.1: use a share"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty 0.0: use a number above 0"),
    ],
)
def test_impossible_sampling_is_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        Sampling(**arguments)


def test_the_trainer_generates_text_and_refuses_what_does_not_fit(tiny_config):
    trainer = Trainer(load_config(tiny_config))
    text = trainer.generate("def ", max_new_tokens=12, temperature=0.0)
    assert isinstance(text, str)
    assert text == trainer.generate("def ", max_new_tokens=12, temperature=0.0, seed=5)
    with pytest.raises(UserError, match=r"prompt of 4 tokens is more than GPT.context_length=32; "):
        trainer.generate("def ", max_new_tokens=29)
    with pytest.raises(UserError, match="40 tokens leaves no room in GPT.context_length=32; use a"):
        trainer.generate("def " * 10)
    with pytest.raises(UserError, match="--prompt is empty"):
        trainer.generate("", max_new_tokens=2)
