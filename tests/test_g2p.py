"""A published encoder-decoder: the weights of g2p-en 2.1.0 tell the words that its own code tells.

`pip install --no-deps g2p-en==2.1.0`: what else it wants is for sentences, and is not imported.
"""

import ast
import importlib.util
import os
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_torch import filled
from conftest import make_layout, make_step
from flax import nnx

from jaxtrain.models.recurrent.seq2seq import Seq2Seq
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.generation.targets import targets
from jaxtrain.training.state import TrainState

FOUND = importlib.util.find_spec("g2p_en")  # without importing it
pytestmark = pytest.mark.skipif(
    FOUND is None, reason="g2p-en carries the weights: pip install --no-deps g2p-en==2.1.0"
)

# In the dictionary and not, short and long; of their alphabet all letters.
WORDS = (
    "a", "the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "sphinx", "quartz",
    "judge", "my", "vow", "phoneme", "grapheme", "zebra", "jaxtrain", "tensorflowing", "colonel",
    "psychology", "through", "thorough", "activationist", "xylophone", "yacht", "queue", "rhythm",
    "antidisestablishmentarianism", "knightsbridge",
)  # fmt: skip
BEGIN, END, LONGEST = 2, 3, 20  # of their phonemes; 2 ends a word of letters too


@pytest.fixture(scope="module")
def theirs():
    """Their class, without what it does for sentences."""
    assert FOUND is not None
    assert FOUND.origin is not None
    folder = Path(FOUND.origin).parent
    tree = ast.parse((folder / "g2p.py").read_text())
    own = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "G2p"]
    none = types.SimpleNamespace(dict=dict)
    names = {
        "np": np, "os": os, "dirname": str(folder), "cmudict": none,
        "construct_homograph_dictionary": dict,
    }  # fmt: skip
    exec(compile(ast.Module(own, []), "g2p.py", "exec"), names)
    return names["G2p"]()


def ours(variables) -> dict[str, np.ndarray]:
    """Their arrays under our paths: both tables have a row for each phoneme, there are more."""
    letters, phonemes = variables["enc_emb"], variables["dec_emb"]
    table = np.zeros_like(phonemes)
    table[: len(letters)] = letters
    found = {
        "source_embedding": table, "target_embedding": phonemes,
        "output": variables["fc_w"], "bias": variables["fc_b"],
    }  # fmt: skip
    for stack, short in (("encoder", "enc"), ("decoder", "dec")):
        for part, name in (("input", "ih"), ("recurrent", "hh")):
            at = f"{stack}_layers/{part}"
            found[at] = variables[f"{short}_w_{name}"].T[None]
            found[f"{at}_bias"] = variables[f"{short}_b_{name}"][None]
    return found


def test_words_are_told_as_by_its_own_code(theirs):
    assert sum(value.size for value in theirs.variables.values()) == 834_890
    sizes = Seq2Seq(vocab_size=74, embed_dim=256, context_length=32, attends=False)
    program = make_step(sizes, make_layout())
    shapes = nnx.eval_shape(lambda: sizes.build(jax.random.key(0)))
    values = ours(theirs.variables)
    params = filled(nnx.state(shapes, nnx.Param), values)
    assert not values, "all of them are taken"
    state = TrainState(jnp.int32(0), params, (), nnx.State({}), jnp.array([1.0, 0.0]))
    sources = [[theirs.g2idx[letter] for letter in word] + [BEGIN] for word in WORDS]
    answers = targets(
        program.setup, sizes, state, sources, begin=BEGIN, ends=[END], max_new_tokens=LONGEST,
        sampling=Sampling(temperature=0.0), seed=0, batch_size=len(sources),
    )  # fmt: skip
    told = {
        word: [theirs.idx2p[token] for token in answer.tokens]
        for word, answer in zip(WORDS, answers, strict=True)
    }
    assert told == {word: theirs.predict(word) for word in WORDS}
    assert told["brown"] == ["B", "R", "AW1", "N"]
