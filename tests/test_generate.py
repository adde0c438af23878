"""Generation: the cache changes nothing, sampling draws from the right distribution."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_program

from jaxtrain import Trainer, load_config
from jaxtrain.config.errors import UserError
from jaxtrain.models.recurrent.lstm import LSTM
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.cache import empty_cache
from jaxtrain.nn.precision import Precision
from jaxtrain.nn.transformer import hidden, logits
from jaxtrain.run.generate import Sampling, for_one_text, generate, next_logits, sample

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
    "lstm": LSTM(vocab_size=32, num_layers=2, embed_dim=16, context_length=24),
}
PROMPT = [3, 1, 4, 1, 5]
GREEDY = Sampling(temperature=0.0)


def sharper(state):
    """The state with larger weights: a fresh model's likeliest tokens are nearly tied."""
    return dataclasses.replace(state, params=jax.tree.map(lambda x: 8 * x, state.params))


@pytest.mark.parametrize("name", SIZES)
def test_greedy_with_cache_equals_the_whole_text_again_for_every_token(name):
    sizes = SIZES[name]
    program = make_program(sizes, make_layout())
    state = sharper(program.create(seed=0))
    found = generate(program, sizes, state, PROMPT, max_new_tokens=10, sampling=GREEDY, seed=0)
    model, text = program.model(state), list(PROMPT)

    # One padded shape for every length: causality keeps the padding out.
    def last_logits(tokens, length):
        positions = jnp.arange(24)[None]
        h, _, _ = hidden(model, tokens[None], positions, Mask(), program.execution)
        return logits(model, h)[0, length - 1]

    run = jax.jit(last_logits)
    with program.layout.active():
        for _ in range(10):
            padded = np.zeros(24, np.int32)
            padded[: len(text)] = text
            text.append(int(run(padded, len(text)).argmax()))
    assert found == text[len(PROMPT) :]
    assert len(set(found)) > 2


MESHES = ({}, {"data": 2, "fsdp": 2, "tensor": 2}, {"pipe": 2, "tensor": 2})


def test_generation_on_a_mesh_equals_one_device():
    sizes, texts = SIZES["llama"], []
    sampling = Sampling(temperature=0.9, top_k=10)
    for axes in MESHES:
        program = make_program(sizes, make_layout(3, **axes))
        state = program.create(seed=0)
        program = dataclasses.replace(program, layout=for_one_text(program.layout))
        texts.append(
            generate(program, sizes, state, PROMPT, max_new_tokens=12, sampling=sampling, seed=3)
        )
    assert texts[0] == texts[1] == texts[2]


def test_bfloat16_logits_on_a_mesh_are_near_those_of_one_device():
    """The default's: XLA's CPU compiler aborts the process over some bfloat16 sums on meshes."""
    sizes, found = SIZES["llama"], []
    for axes in MESHES:
        program = make_program(
            sizes, make_layout(3, **axes), precision=Precision(compute="bfloat16")
        )
        state = sharper(program.create(seed=0))
        program = dataclasses.replace(program, layout=for_one_text(program.layout))

        def run(state, program=program):
            dtype = jnp.dtype("bfloat16")
            cache = empty_cache(sizes.cached, layers=sizes.layers, rows=1, room=12, dtype=dtype)
            return next_logits(program.model(state), np.array([PROMPT]), cache, program.execution)

        with program.layout.active():
            found.append(np.asarray(jax.jit(run)(state)[0]))
    limit = 8 * 2**-8 * np.abs(found[0]).max()  # roundings of some sums a layer
    np.testing.assert_allclose(found[1], found[0], atol=limit)
    np.testing.assert_allclose(found[2], found[0], atol=limit)


LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))[[2, 0, 3, 1]]
TRUE = np.array([0.15, 0.5, 0.1, 0.25])


def frequencies(sampling: Sampling) -> np.ndarray:
    draws = 20_000
    rows = jnp.broadcast_to(LOGITS, (draws, 4))
    return np.bincount(sample(rows, jax.random.key(0), sampling), minlength=4) / draws


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
        ({"temperature": -1.0}, "--temperature -1.0: use 0"),
        ({"top_k": 0}, "--top-k 0: use at least 1"),
        ({"top_p": 1.5}, "--top-p 1.5: use a probability"),
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
    with pytest.raises(UserError, match="--prompt is empty"):
        trainer.generate("", max_new_tokens=2)
