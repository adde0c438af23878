"""Speculative decoding: greedy answers are the plain ones, draws have the model's distribution."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step

from jaxtrain.config.errors import UserError
from jaxtrain.models.recurrent.rnn import LSTM
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.run.generation.decoding import Sampling, adjust_logits
from jaxtrain.run.generation.generate import generate
from jaxtrain.run.generation.speculative import (
    DraftModel,
    PromptLookup,
    _accept,
    rolls_back,
    speculate,
)

SIZES = Llama(
    vocab_size=24, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24,
    context_length=48,
)  # fmt: skip
PROMPT = [3, 1, 4, 1, 5]
GREEDY = Sampling(temperature=0.0)


def made(layout, seed, spread=0.0):
    """A program and a state with wide weights, those of seed 0 and `spread` of another's."""
    program = make_step(SIZES, layout)
    other = program.create(seed=seed).params
    params = jax.tree.map(lambda x, y: 8 * (x + spread * y), program.create(seed=0).params, other)
    return program, dataclasses.replace(program.create(seed=0), params=params)


MESHES = {"one": make_layout(), "mesh": make_layout(3, data=2, fsdp=2, tensor=2)}


@pytest.mark.slow_cases("mesh")
@pytest.mark.parametrize("mesh", MESHES)
def test_greedy_answers_are_the_plain_ones(mesh):
    """Of a draft that knows nothing better, of one that is often right, and of prompt lookup."""
    program, state = made(MESHES[mesh], 0)
    near, near_state = made(MESHES[mesh], 1, spread=0.3)
    settings = {"max_new_tokens": 20, "seed": 0}
    for sampling in (GREEDY, Sampling(temperature=0.0, repetition_penalty=1.5)):
        [plain] = generate(program.setup, SIZES, state, [PROMPT], sampling=sampling, **settings)
        draft = DraftModel(near.setup, SIZES, near_state, 3)
        for guesser in (draft, PromptLookup(SIZES.vocab_size, 3)):
            found = speculate(
                program.setup, SIZES, state, PROMPT, guesser, sampling=sampling, **settings
            )
            assert found.answer.tokens == plain.tokens
            np.testing.assert_allclose(
                found.answer.log_probabilities, plain.log_probabilities, atol=2e-4
            )
            assert found.answer.ended == plain.ended == "length"
        if sampling is GREEDY and mesh == "one":
            found = speculate(
                program.setup, SIZES, state, PROMPT, draft, sampling=sampling, **settings
            )
            assert 0 < found.accepted < found.guessed
            end = plain.tokens[9]
            first = plain.tokens.index(end)
            ended = speculate(
                program.setup,
                SIZES,
                state,
                PROMPT,
                draft,
                sampling=sampling,
                ends=[end],
                **settings,
            )
            assert ended.answer.tokens == plain.tokens[:first]
            assert ended.answer.ended == "end"


@pytest.mark.slow_cases("sampling1")
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_k=9)])
def test_a_draft_that_is_the_model_is_always_right(sampling):
    """So both caches hold what they should after each pass, whatever is counted out."""
    program, state = made(MESHES["one"], 0)
    found = speculate(
        program.setup, SIZES, state, PROMPT, DraftModel(program.setup, SIZES, state, 3),
        sampling=sampling, max_new_tokens=13, seed=1,
    )  # fmt: skip
    assert found.passes == 3  # a token of the prompt, then four of each pass
    assert found.accepted == found.guessed == 9


def test_lookup_takes_what_followed_the_longest_end():
    def guessed(text):
        tokens, from_KV = PromptLookup(10, 3).propose(text, jax.random.key(0))
        assert (np.asarray(from_KV).argmax(-1)[: int(from_KV.sum())] ==
                tokens[: int(from_KV.sum())]).all()  # fmt: skip
        return tokens[: int(from_KV.sum())].tolist()

    assert guessed([1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 2, 3]) == [7, 8, 2]  # the latest place
    assert guessed([1, 2, 3, 4, 5, 9, 1, 3, 7, 2, 3]) == [4, 5, 9]
    assert guessed([7, 1, 2, 1]) == [2, 1]
    assert guessed([1, 2, 3]) == []


def test_draws_have_the_models_distribution():
    """5,000 passes: the first token, and the second where the first guess was kept."""
    V, K, draws = 5, 2, 5000
    rng = np.random.default_rng(0)
    logits_TV = jnp.asarray(1.5 * rng.standard_normal((K + 1, V)), jnp.float32)
    drawing = Sampling(temperature=0.9, top_k=4).drawing()
    from_KV = jax.nn.softmax(jnp.asarray(rng.standard_normal((K, V)), jnp.float32))

    def one(key):
        of_guess, of_pass = jax.random.split(key)
        guesses_K = jax.random.categorical(of_guess, jnp.log(from_KV)).astype(jnp.int32)
        return _accept(logits_TV, guesses_K, from_KV, None, drawing, of_pass)[:2]

    count, tokens = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(2), draws))
    expected_TV = np.asarray(jax.nn.softmax(adjust_logits(logits_TV, None, drawing)), np.float64)
    for place in range(K + 1):
        drawn = np.asarray(tokens)[np.asarray(count) >= place, place]
        assert len(drawn) >= draws / 4**place
        found = np.bincount(drawn, minlength=V)
        assert not found[expected_TV[place] == 0].any()
        allowed = expected_TV[place] > 0
        wanted = len(drawn) * expected_TV[place][allowed]
        chi_square = ((found[allowed] - wanted) ** 2 / wanted).sum()
        assert chi_square < 16.27  # 3 degrees of freedom, one time in a thousand


def test_a_guess_is_penalised_at_the_places_after_it():
    """Each place has 2 before 3; what was there is halved: 2, then 3, then 2 again (1 to 0.9)."""
    logits_TV = jnp.tile(jnp.array([-1.0, -1.0, 2.0, 1.8, -1.0]), (3, 1))
    guesses = jnp.array([2, 3], jnp.int32)
    drawing = Sampling(temperature=0.0, repetition_penalty=2.0).drawing()
    count, tokens, _ = _accept(
        logits_TV, guesses, jax.nn.one_hot(guesses, 5), jnp.zeros(5, bool), drawing,
        jax.random.key(0),
    )  # fmt: skip
    assert int(count) == 2
    assert tokens.tolist() == [2, 3, 2]


def test_what_cannot_forget_is_refused():
    with pytest.raises(UserError, match=r"@LSTM\(\) keeps one state of all tokens so far"):
        rolls_back(LSTM(vocab_size=24, num_layers=1, embed_dim=8, context_length=8))
    with pytest.raises(UserError, match=r"@Mixtral\(\) have a capacity"):
        rolls_back(
            Mixtral(
                vocab_size=24, num_layers=1, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=8,
                context_length=8, capacity_factor=1.0,
            )
        )  # fmt: skip
