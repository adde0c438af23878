"""Every registered model through logits, predict, generate, plan and export.

The models are found by walking the package, so that a new one is tested as soon as it is there.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pairs import pair
from PIL import Image

from jaxtrain import Trainer, load_config, plan
from jaxtrain.analysis.bindings import models
from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import stack
from jaxtrain.models.weights.family import families
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.run.generation.decoding import Sampling

MODELS = {cls.__name__: cls for cls in models()}
# Of every setting that a model has; a model that needs others says so below.
SIZES = {
    "vocab_size": 260, "num_layers": 2, "embed_dim": 16, "num_heads": 2, "num_kv_heads": 1,
    "head_dim": 8, "mlp_dim": 24, "expert_mlp_dim": 12, "num_experts": 4, "experts_per_token": 2,
    "context_length": 32, "channels": 1, "num_classes": 10, "dense_layers": 1, "expert_groups": 2,
    "groups_per_token": 1, "query_rank": 12, "key_value_rank": 10, "plain_dim": 6, "rotary_dim": 4,
    "value_dim": 5, "image_size": 32, "patch_size": 8, "sliding_window": 7, "width": 8,
    "state_dim": 4, "predicted_tokens": 2, "head_width": 32,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "VGG": {"depth": 11}, "ResNet": {"depth": 18}, "Mamba2": {"head_dim": 8},
    "MLP": {"widths": (64, 16, 10)}, "Autoencoder": {"widths": (64, 12, 3)},
    "SignalCNN": {"features": 64},
}  # fmt: skip
DATA = {
    "tokens": (
        "@TextData()", "TextData.source = 'embedded'", "TextData.tokenizer = 'byte'",
        "TextData.sequence_length = 16",
    ),
    "pairs": (
        "@PairData()", "PairData.source = 'addition'", "PairData.source_length = 8",
        "PairData.target_length = 8", "PairData.addition_digits = 1",
        "PairData.addition_pairs = 40",
    ),
    "images": (
        "@ImageData()", "ImageData.source = 'synthetic'", "ImageData.image_size = 64",
        "ImageData.channels = 1", "ImageData.num_classes = 10",
    ),
    "vectors": (
        "@VectorData()", "VectorData.source = 'digits'", "VectorData.features = 64",
        "VectorData.num_classes = 10",
    ),
}  # fmt: skip
SIDE = {"ViT": 32, "GoogLeNet": 32, "LeNet": 32, "ResNet": 32}
# One of each kind of input and of state is in the fast part: test_state_space.py has Mamba's, and
# test_gemma.py Gemma's.
FAST = {"Autoencoder", "GPT", "LSTM", "LeNet", "Seq2Seq", "ViT"}


def by_cost(names):
    return [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in names]


def of_kind(*inputs):
    return [name for name, cls in MODELS.items() if cls.inputs in inputs]


@functools.cache
def config_of(name):
    cls = MODELS[name]
    known = {field.name for field in dataclasses.fields(cls)}
    sizes = {key: size for key, size in SIZES.items() if key in known}
    sizes |= {"image_size": SIDE[name]} if "image_size" in known else {}
    data, *settings = DATA[cls.inputs]
    bindings = [f"{name}.{key} = {size!r}" for key, size in {**sizes, **OWN.get(name, {})}.items()]
    if cls.inputs == "images":
        settings[1] = f"ImageData.image_size = {SIDE.get(name, 64)}"
    return load_config(
        "\n".join([
            f"Train.model = @{name}()", f"Train.data = {data}", "Train.steps = 1",
            "Train.global_batch_size = 8", "Mesh.fsdp = 1", "Mesh.data = -1",
            "Precision.compute = 'float32'", *settings, *bindings, "",
        ])
    )  # fmt: skip


@functools.cache
def trainer_of(name):
    return Trainer(config_of(name))


@functools.cache
def heldout(name):
    examples = trainer_of(name).dataset.heldout
    return stack([examples.example(number, None) for number in range(2)])


# -- answers by another way ------------------------------------------------------------------------


@functools.cache
def parts(name):
    """The structure and the parameters of the trainer's module, and its running statistics, on no
    mesh."""
    trainer = trainer_of(name)
    with trainer.layout.active():
        structure, state = nnx.split(trainer.program.setup.model(trainer.state))
    state, statistics = jax.device_get((state, trainer.state.statistics))
    return structure, *jax.tree.map(jnp.asarray, (state, statistics))


def logits_of_layers(name, tokens_BT):
    """One layer after the other, and the last product by numpy."""
    structure, state, _ = parts(name)
    facts = trainer_of(name).config.train.model.attention
    mask = Mask(causal=facts is None or facts.causal)

    @jax.jit
    def run(state, tokens_BT):
        model = nnx.merge(structure, state)
        places_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        x_BTD = model.embed(tokens_BT, places_BT)
        for layer in model.leading:
            x_BTD = layer(x_BTD, places_BT, mask, Execution(kernel="reference"))[0]
        for number in range(jax.tree.leaves(model.layers)[0].shape[0]):
            layer = jax.tree.map(lambda x, number=number: x[number], model.layers)
            execution = Execution(kernel="reference").of_layer(number)
            x_BTD = model.run_layer(layer, x_BTD, places_BT, mask, execution)[0]
        return model.finish(x_BTD)

    h_BTD = np.asarray(run(state, jnp.asarray(tokens_BT)), np.float64)
    model = nnx.merge(structure, state)
    found = h_BTD @ np.asarray(model.output_matrix().get_value(), np.float64).T
    if (bias := model.output_bias()) is not None:
        found += np.asarray(bias.get_value())
    cap = model.logit_softcap()
    return found if cap is None else cap * np.tanh(found / cap)


def answers_of(name, inputs):
    """Of images and vectors, the first of several."""
    structure, state, statistics = parts(name)

    @jax.jit
    def run(state, statistics, inputs):
        return nnx.merge(structure, state)(inputs, statistics, Execution(), train=False)[0]

    found = run(state, statistics, jnp.asarray(inputs))
    return np.asarray(found[0] if isinstance(found, tuple) else found)


def softmax(logits):
    likely = np.exp(np.float64(logits) - np.max(logits, -1, keepdims=True))
    return likely / likely.sum(-1, keepdims=True)


# -- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", by_cost(of_kind("tokens")))
def test_logits_of_tokens_are_those_of_the_layers(name):
    batch = heldout(name)
    found = trainer_of(name).logits(batch.inputs)
    np.testing.assert_allclose(found, logits_of_layers(name, batch.inputs), atol=2e-5, rtol=1e-4)
    assert np.ptp(found) > 1e-3


# The cases that are left run the same code.
@pytest.mark.slow_cases("ViT")
@pytest.mark.parametrize("name", by_cost(of_kind("images", "vectors")))
def test_predictions_are_the_model_s_answers(name):
    trainer, batch = trainer_of(name), heldout(name)
    if trainer.program.setup.objective.name == "reconstruction":
        with pytest.raises(UserError, match=r"Trainer.logits: .*'reconstruction' has no logits"):
            trainer.logits(batch.inputs)
        data = trainer.config.train.data
        told = trainer.predict(data.vectors_again(batch.inputs))
        expected = data.vectors_again(answers_of(name, batch.inputs))
        np.testing.assert_allclose([one.numbers for one in told], expected, rtol=1e-4, atol=1e-4)
        return
    expected = answers_of(name, batch.inputs)
    assert expected.shape == (2, 10)
    for given in (batch, batch.inputs, batch.inputs[:1]):
        found = trainer.logits(given)
        np.testing.assert_allclose(found, expected[: len(found)], rtol=1e-4, atol=1e-5)
    given, rows = images(name) if MODELS[name].inputs == "images" else vectors(name)
    told = trainer.predict(given, top=10)
    for one, probabilities in zip(told, softmax(answers_of(name, rows)), strict=True):
        by_class = {int(label): probability for label, probability in one.classes}
        found = [by_class[label] for label in range(10)]
        np.testing.assert_allclose(found, probabilities, rtol=1e-4, atol=1e-6)


def images(name):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 40, 40), dtype=np.uint8)
    given = [Image.fromarray(one) for one in pixels]
    data = trainer_of(name).config.train.data
    return given, np.stack([data.prepare(one, None) for one in given])


def vectors(name):
    table = np.random.default_rng(0).uniform(0, 16, (2, 64)).astype(np.float32)
    return table, trainer_of(name).config.train.data.prepare(table)


@pytest.mark.parametrize("name", by_cost(of_kind("tokens")))
def test_what_is_written_has_the_logits_of_the_whole_text(name):
    """Greedy, token by token with a cache: each is the likeliest, with its log-probability."""
    trainer, prompt = trainer_of(name), [100, 101, 102]
    if not trainer.config.train.model.cached:
        with pytest.raises(UserError, match=f"Train.model=@{name}.*only causal models"):
            trainer.generate(prompt, max_new_tokens=4)
        (told,) = trainer.predict("a[MASK]c", top=260)
        tokens = np.array([[ord("a"), 259, ord("c")]])
        likely = softmax(logits_of_layers(name, tokens)[0, 1])
        np.testing.assert_allclose([p for _, p in told.classes], np.sort(likely)[::-1], rtol=1e-4)
        return
    (answer,) = trainer.answers([prompt], max_new_tokens=4, sampling=Sampling(temperature=0.0))
    tokens, texts = answer.tokens, np.array([[*prompt, *answer.tokens]])
    assert len(tokens) == 4 or answer.ended == "end"
    logits_TV = logits_of_layers(name, texts)[0, len(prompt) - 1 : -1]
    assert tokens == logits_TV.argmax(-1).tolist()
    likely = np.log(softmax(logits_TV))[np.arange(len(tokens)), tokens]
    np.testing.assert_allclose(answer.log_probabilities, likely, atol=1e-4)


@pytest.mark.parametrize("name", by_cost(of_kind("pairs")))
def test_targets_that_are_written_have_the_logits_of_pairs(name):
    trainer, source = trainer_of(name), list(b"1+2")
    with pytest.raises(UserError, match="reads pairs: give a Batch with source"):
        trainer.logits(heldout(name).inputs)
    (answer,) = trainer.answers([source], max_new_tokens=4, sampling=Sampling(temperature=0.0))
    row = pair(np.array(source), np.array(answer.tokens), (8, 8), 0)
    logits_TV = trainer.logits(stack([row]))[0, : len(answer.tokens)]
    assert answer.tokens == logits_TV.argmax(-1).tolist()
    likely = np.log(softmax(logits_TV))[np.arange(len(answer.tokens)), answer.tokens]
    np.testing.assert_allclose(answer.log_probabilities, likely, atol=1e-4)
    (told,) = trainer.predict("1+2")
    assert told.text == trainer.generate("1+2", temperature=0.0)


@pytest.mark.parametrize("name", by_cost(of_kind("images", "vectors")))
def test_what_reads_no_text_writes_none(name):
    with pytest.raises(UserError, match="has no tokenizer; only models trained on text generate"):
        trainer_of(name).generate("a")


# The cases that are left run the same code.
@pytest.mark.slow_cases(
    "Autoencoder",
    "LSTM",
    "ViT",
)
@pytest.mark.parametrize("name", by_cost(MODELS))
def test_plans_count_the_parameters_that_are_there(name):
    found = plan(config_of(name), "h100:1x1", compile=False)
    numbers = sum(x.size for x in jax.tree.leaves(trainer_of(name).state.weights))
    assert found.to_json()["memory"]["params"] == 4 * numbers
    assert found.to_json()["step_seconds"] > 0


UNKNOWN = [name for name, cls in MODELS.items() if all(one.model is not cls for one in families())]


# Those of a known architecture are exported and read again in test_huggingface_models.py.
@pytest.mark.parametrize("name", by_cost(UNKNOWN))
def test_what_has_no_architecture_there_is_not_exported(name, tmp_path):
    with pytest.raises(UserError, match=f"@{name}.* is not a known Hugging Face architecture"):
        trainer_of(name).export_huggingface(tmp_path / "out")
    assert not (tmp_path / "out").exists()
