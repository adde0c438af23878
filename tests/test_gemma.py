"""The three Gemmas equal transformers', and one device on every mesh."""

import dataclasses
from typing import Any

import pytest
from conftest import make_layout, make_step, text_batch
from parity import assert_equal, evaluate
from tiny_models import count_parameters

from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gemma import Gemma, Gemma2, Gemma3
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.pipeline.schedules import Pipeline

SMALL: dict[str, Any] = dict(
    vocab_size=64, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=48,
    context_length=16,
)  # fmt: skip
ODD: dict[str, Any] = dict(
    vocab_size=61, embed_dim=18, num_heads=3, num_kv_heads=1, head_dim=10, mlp_dim=20,
    context_length=17, norm_eps=1e-3,
)  # fmt: skip
ALL_HEADS: dict[str, Any] = dict(
    vocab_size=23, embed_dim=8, num_heads=2, num_kv_heads=2, head_dim=2, mlp_dim=5,
    context_length=16, rope_theta=100.0,
)  # fmt: skip
# Caps that bend what random weights give, windows shorter than the texts, and patterns that neither
# depth is a multiple of.
SHAPES = {
    "gemma": Gemma(**SMALL, num_layers=2),
    "gemma odd": Gemma(**ODD, num_layers=3),
    "gemma all heads": Gemma(**ALL_HEADS, num_layers=1),
    "gemma2": Gemma2(**SMALL, num_layers=3, sliding_window=4, attention_softcap=1.0,
                     logit_softcap=2.0),
    "gemma2 odd": Gemma2(**ODD, num_layers=4, global_every=3, sliding_window=3, query_width=6,
                         attention_softcap=0.5, logit_softcap=None),
    "gemma2 all heads": Gemma2(**ALL_HEADS, num_layers=2, sliding_window=5, attention_softcap=None,
                               logit_softcap=1.0),
    "gemma3": Gemma3(**SMALL, num_layers=3, global_every=2, sliding_window=4,
                     local_rope_theta=100.0),
    "gemma3 odd": Gemma3(**ODD, num_layers=4, global_every=3, sliding_window=3, query_width=6,
                         rope_scaling=8.0),
    "gemma3 all heads": Gemma3(**ALL_HEADS, num_layers=2, global_every=1),
}  # fmt: skip
FAMILIES = ("gemma", "gemma2", "gemma3")


def pair_of(sizes: Any):
    from against_transformers import Pair, draw, transformers  # noqa: PLC0415

    turned: dict[str, Any] = {"rope_type": "default", "rope_theta": sizes.rope_theta}
    own: dict[str, Any] = {"rope_parameters": turned}
    name, config, model_type = type(sizes).__name__, f"{type(sizes).__name__}Config", "gemma"
    if not isinstance(sizes, Gemma):
        own["sliding_window"] = sizes.sliding_window
        own["query_pre_attn_scalar"] = sizes.query_width or sizes.head_dim
    if isinstance(sizes, Gemma2):
        model_type = "gemma2"
        own["layer_types"] = [
            "sliding_attention" if number % sizes.global_every else "full_attention"
            for number in range(1, sizes.num_layers + 1)
        ]
        own["attn_logit_softcapping"] = sizes.attention_softcap
        own["final_logit_softcapping"] = sizes.logit_softcap
    if isinstance(sizes, Gemma3):
        config, model_type = "Gemma3TextConfig", "gemma3_text"
        own["sliding_window_pattern"] = sizes.global_every
        if sizes.rope_scaling != 1:
            turned |= {"rope_type": "linear", "factor": sizes.rope_scaling}
        local = {"rope_type": "default", "rope_theta": sizes.local_rope_theta}
        own["rope_parameters"] = {"sliding_attention": local, "full_attention": turned}
    there = getattr(transformers, config)(
        vocab_size=sizes.vocab_size, hidden_size=sizes.embed_dim, intermediate_size=sizes.mlp_dim,
        num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads, head_dim=sizes.head_dim,
        max_position_embeddings=sizes.context_length, rms_norm_eps=sizes.norm_eps,
        attn_implementation="eager",
        pad_token_id=None,  # its row of the embedding would have no gradient there
        **own,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(there)
    return Pair(sizes, draw(model, scales=()), model_type)


@pytest.mark.slow_cases(
    "gemma",
    "gemma2",
    "gemma all heads",
    "gemma odd",
    "gemma2 all heads",
    "gemma2 odd",
    "gemma3 all heads",
    "gemma3 odd",
)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_gradient_equal_transformers(name):
    sizes = SHAPES[name]
    pair_of(sizes).compare(text_batch(rows=3, length=13, vocab_size=sizes.vocab_size))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_thirty_steps_have_the_losses_of_transformers(family):
    sizes = SHAPES[family]
    pair_of(sizes).train([text_batch(rows=4, length=16, vocab_size=sizes.vocab_size, documents=1)])


@pytest.mark.parametrize(
    ("sizes", "published"),
    [(Gemma(), 2_506_172_416), (Gemma2(), 2_614_341_888), (Gemma3(), 999_885_952)],
    ids=["google/gemma-2b", "google/gemma-2-2b", "google/gemma-3-1b"],
)
def test_parameters_are_the_published_ones(sizes, published):
    assert count_parameters(sizes) == published


@pytest.mark.parametrize("window", [3, 100])
def test_flops_are_a_sum_over_the_keys_that_queries_see(window):
    sizes = dataclasses.replace(SHAPES["gemma3"], sliding_window=window)
    T, pairs = 16, 0
    for number in range(1, sizes.num_layers + 1):
        back = T if number % sizes.global_every == 0 else min(window, T)
        # Half a key less than a sum over whole places: the causal half of the published formula.
        pairs += (
            sum(min(place + 0.5, back) for place in range(T))
            if back == T
            else (back * T - back * back / 2)
        )
    scores = 12 * sizes.num_heads * sizes.head_dim * pairs / T
    assert sizes.flops_per_token(T) == 6 * sizes.matmul_parameters() + scores


@pytest.fixture(scope="module", params=FAMILIES)
def one_device(request):
    sizes = SHAPES[request.param]
    batch = text_batch(rows=16, length=16, vocab_size=sizes.vocab_size)
    return sizes, batch, evaluate(make_step(sizes, make_layout()), batch)


# What the first Gemma has the others have too.
SEQUENCE = (
    {"context": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True},
    {"loss": Loss(chunk_size=4)},
)
# Where layers are odd in number: two on one rank, and a place without any on the other.
PIPE = {"pipe": 2, "fsdp": 2}, {"pipeline": Pipeline(schedule="1f1b", microbatches=2)}


# Two steps are compiled for each; test_parity_matrix.py has a decoder's mesh in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("one_device", "mesh"),
    [("gemma2", SEQUENCE), ("gemma3", PIPE)],
    ids=["gemma2-sequence", "gemma3-pipe"],
    indirect=["one_device"],
)
def test_every_mesh_computes_the_same(mesh, one_device):
    sizes, batch, expected = one_device
    layout, changes = mesh
    program = make_step(sizes, make_layout(**layout), **changes)
    assert_equal(evaluate(program, batch, expected), expected)


@pytest.mark.parametrize(
    ("model", "setting", "value", "said"),
    [
        (Gemma, "head_dim", 7, r"Gemma.head_dim=7 is not an even number"),
        (Gemma2, "attention_softcap", 0, r"Gemma2.attention_softcap=0"),
        (Gemma2, "logit_softcap", 0, r"Gemma2.logit_softcap=0"),
        (Gemma2, "query_width", 0, r"Gemma2.query_width=0"),
        (Gemma3, "global_every", 0, r"Gemma3.global_every=0"),
    ],
)
def test_settings_that_cannot_be_are_refused(model, setting, value, said):
    with pytest.raises(UserError, match=said):
        model(**{setting: value})
