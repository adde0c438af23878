"""Closed forms of what a step executes against the traced step, over random sizes of every model.

The traced step is an independent count: the products of a jaxpr, with loops multiplied out.
"""

import dataclasses
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_every_model_answers import MODELS, config_of

from jaxtrain.analysis.planning.textbook.flops import products_of, shape_of
from jaxtrain.analysis.planning.timing.executed import (
    activation_bytes,
    executed_flops,
    of_one_row,
    row_flops,
    score_fraction,
    trace_gradients,
    work,
)
from jaxtrain.data.batch import example_shape
from jaxtrain.models.model import AttentionFacts
from jaxtrain.models.transformers.gemma import Gemma3
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.training.layouts import abstract_layout
from jaxtrain.training.settings import load_config

DECODERS = [name for name, cls in MODELS.items() if cls.inputs == "tokens"]
# What closed forms say over what the traced step does: bytes, then FLOPs (without what kernels
# skip) over the model's own. Biases of experts are products of the trace; a state-space model's
# scan has products of its own, which its FLOPs count as published.
BYTES = {"GPTOSS": (0.8, 1.0), "Mamba": (1.0, 1.25), "Mamba2": (0.4, 1.0)}
FLOPS = {"GPTOSS": (1.0, 1.1), "DeepSeek": (1.0, 1.05), "Mamba": (0.75, 1.1), "Mamba2": (0.9, 1.2)}
ROWS = 8  # of `config_of`


@st.composite
def sizes_of(draw, name):
    """Sizes of a model, none of which is the multiple that machines like."""
    cls, integers = MODELS[name], st.integers
    known = {field.name for field in dataclasses.fields(cls)}
    kv_heads, experts = draw(integers(1, 3)), 2 * draw(integers(1, 3))
    heads = kv_heads * draw(integers(1, 2))
    found = {
        "vocab_size": draw(integers(260, 300)), "num_layers": draw(integers(2, 5)),
        "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 2 * draw(integers(2, 8)),
        "embed_dim": heads * 2 * draw(integers(4, 11)), "mlp_dim": draw(integers(9, 90)),
        "expert_mlp_dim": draw(integers(7, 40)), "shared_experts": draw(integers(1, 2)),
        "shared_mlp_dim": draw(st.none() | integers(5, 40)), "num_experts": experts,
        "experts_per_token": draw(integers(1, experts)), "expert_groups": 1, "groups_per_token": 1,
        "query_rank": draw(st.none() | integers(3, 40)), "key_value_rank": draw(integers(3, 40)),
        "plain_dim": draw(integers(1, 11)), "rotary_dim": 2 * draw(integers(1, 4)),
        "value_dim": draw(integers(2, 11)), "dense_layers": draw(integers(0, 1)),
        "predicted_tokens": draw(integers(1, 3)), "sliding_window": draw(integers(1, 15)),
        "state_dim": draw(integers(3, 8)),
    }  # fmt: skip
    if name == "Mamba":  # of a narrower one the scan is most of the FLOPs
        found |= {"embed_dim": 2 * draw(integers(8, 20))}
    if name == "Mamba2":
        found |= {"embed_dim": 8 * draw(integers(2, 5)), "head_dim": 8}
    own = {key: value for key, value in found.items() if key in known}
    return dataclasses.replace(config_of(name).train.model, **own)


def with_model(name, model, kernel):
    config = config_of(name)
    train = dataclasses.replace(config.train, model=model)
    attention = dataclasses.replace(config.attention, kernel=kernel)
    return dataclasses.replace(config, train=train, attention=attention)


def elements(config, rows):
    """Of all operands and results of products, those of attention's scores aside."""
    one = of_one_row(config)
    train = dataclasses.replace(one.train, global_batch_size=rows)
    return sum(
        product.times * math.prod(shape_of(array))
        for product in products_of(trace_gradients(dataclasses.replace(one, train=train)))
        if "BKGTS" not in product.scope
        for array in (*product.equation.invars[:2], *product.equation.outvars)
    )


def compare(name, model):
    config = with_model(name, model, "tpu")
    (T,) = example_shape(config.train.data.abstract_batch(1))
    told = getattr(model, "predicted_tokens", 1)
    # Logits: 2 bytes an element in the trace and the hidden states with them, 12 in all elsewhere.
    of_layers = elements(config, 2) - elements(config, 1)
    of_layers -= 3 * told * (model.vocab_size + model.embed_dim) * T
    found = activation_bytes(config, pipelined=False, devices=1) / ROWS
    found -= 12 * told * model.vocab_size * T
    low, high = BYTES.get(name, (1.0, 1.0))
    assert low * (1 - 1e-9) <= found / (2 * of_layers) <= high * (1 + 1e-9)
    row = row_flops(config)
    executed = row.executed - row.scores * (1 - score_fraction(config))
    low, high = FLOPS.get(name, (1.0, 1.0))
    assert low * (1 - 1e-9) <= executed / model.flops((T,)) <= high * (1 + 1e-9)
    assert executed_flops(config, abstract_layout(config, 1)) == pytest.approx(executed * ROWS)


@pytest.mark.parametrize("name", ["DeepSeek", "Gemma3", "Mixtral"])
@settings(max_examples=2, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_closed_forms_are_the_traced_step(name, data):
    compare(name, data.draw(sizes_of(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
@settings(
    max_examples=4, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(data=st.data())
def test_closed_forms_are_the_traced_step_of_every_model(name, data):
    compare(name, data.draw(sizes_of(name)))


def test_latents_are_read_and_written_once():
    """DeepSeek-V3's queries: a latent of 1,536 in, 128 heads of 192 out, a token and layer."""
    config = with_model("DeepSeek", config_of("DeepSeek").train.model, "tpu")
    wider = dataclasses.replace(config.train.model, query_rank=1536 + 12)

    def of(model):
        train = dataclasses.replace(config.train, model=model)
        return activation_bytes(
            dataclasses.replace(config, train=train), pipelined=False, devices=1
        )

    # Both sides of the latent: what comes out of query_down, what goes into query_up.
    layers = wider.num_layers + wider.predicted_tokens - 1
    assert of(wider) - of(config.train.model) == ROWS * 16 * layers * 2 * 3 * 2 * 1536


@pytest.mark.parametrize(
    ("facts", "T", "expected"),
    [
        ({}, 100, 1 / 2),
        ({"causal": False}, 100, 1),
        ({"window": 20}, 100, 0.2 * 0.9),
        ({"window": 200}, 100, 1 / 2),
        ({"window": 20, "window_share": 5 / 6}, 100, 5 / 6 * 0.18 + 1 / 6 * 0.5),
    ],
)
def test_scores_of_a_window_are_those_it_shows(facts, T, expected):
    one = AttentionFacts(num_heads=2, num_kv_heads=1, key_dim=8, value_dim=8, **facts)
    assert one.visible_share(T) == pytest.approx(expected)


def test_a_kernel_that_skips_does_the_scores_that_are_counted_for_mfu():
    """Of Gemma 3, five of whose six layers have a window: 3.5 forward passes of the pairs."""
    length, names = 4096, ("TextData.sequence_length = 4096", "Attention.kernel = 'tpu'")
    config = load_config("gemma3_1b", [*names, "Remat.policy = 'none'"])
    model = config.train.model
    assert isinstance(model, Gemma3)
    _, scores = work(config, pipelined=False, devices=config.train.global_batch_size)
    of_model = model.block.attention.score_flops_per_token(length) * length * model.num_layers
    assert scores == pytest.approx(3.5 / 3 * of_model, rel=1e-6)
    full = dataclasses.replace(model.attention, window=None)
    assert score_fraction(config) < 0.5 * full.visible_share(length)


# Compiles two steps; closed forms are compared with traced steps in the fast part.
@pytest.mark.slow
def test_products_of_a_loop_over_layers_are_read_in_each():
    """An encoder-decoder, whose layers are one loop's body."""

    def of(layers):
        config = load_config("transformer_addition", [f"Transformer.num_layers = {layers}"])
        attention = dataclasses.replace(config.attention, kernel="reference")
        config = dataclasses.replace(config, attention=attention)
        return activation_bytes(config, pipelined=False, devices=1)

    two, four, six = of(2), of(4), of(6)
    assert four - two == six - four > two / 2


def test_texts_without_a_window_are_as_before():
    """The figures that other tests and fits rest on: half of the pairs."""
    config = with_model("Llama", config_of("Llama").train.model, "tpu")
    assert isinstance(config.train.model, Llama)
    whole = dataclasses.replace(config.train.model, sliding_window=None)
    assert score_fraction(with_model("Llama", whole, "tpu")) == 0.5
