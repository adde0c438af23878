"""Parameter counts equal the published totals, the models' trees and the models' own FLOPs."""

import functools
import math

import jax
import pytest

from jaxtrain.analysis.planning.textbook import sizes
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.training.finetune.finetune import Finetune, tuning_of
from jaxtrain.training.settings import load_config
from jaxtrain.training.setup import parameter_shapes


@functools.cache
def model_of(config: str):
    return load_config(config).train.model


def gpt(model: GPT) -> int:
    return sizes.gpt_parameters(
        V=model.vocab_size, L=model.num_layers, D=model.embed_dim, C=model.context_length
    )


def llama_sizes(model: Llama | Mixtral) -> dict[str, int]:
    return {
        "V": model.vocab_size, "L": model.num_layers, "D": model.embed_dim, "N": model.num_heads,
        "K": model.num_kv_heads, "F": model.mlp_dim, "tied": model.tie_embeddings,
    }  # fmt: skip


def llama(model: Llama) -> int:
    return sizes.llama_parameters(**llama_sizes(model))


def mixtral(model: Mixtral) -> int:
    return sizes.mixtral_parameters(**llama_sizes(model), E=model.num_experts)


def in_tree(model) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameter_shapes(model.build)))


PUBLISHED = {
    # Radford et al. 2019 as released: 124M; arXiv 2407.21783: 8B; arXiv 2401.04088: 47B.
    "gpt2": (GPT(), gpt, 124.4e6),
    "llama3-8b": (Llama(), llama, 8.03e9),
    "mixtral-8x7b": (Mixtral(), mixtral, 46.7e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones_and_the_trees(name):
    model, closed_form, published = PUBLISHED[name]
    assert closed_form(model) == pytest.approx(published, rel=1e-3)
    assert closed_form(model) == in_tree(model)


@pytest.mark.parametrize(
    ("config", "closed_form"),
    [("gpt2_124m", gpt), ("llama_8b", llama), ("mixtral_8x7b", mixtral)],
)
def test_shipped_configs_have_as_many(config, closed_form):
    model = model_of(config)
    assert closed_form(model) == in_tree(model)


def test_ties_and_other_shapes():
    shape = {"vocab_size": 61, "num_layers": 3, "embed_dim": 32, "num_heads": 4, "mlp_dim": 40}
    tied = Llama(**shape, num_kv_heads=1, tie_embeddings=True)
    assert llama(tied) == in_tree(tied)
    small = Mixtral(**shape, num_kv_heads=2, num_experts=5, tie_embeddings=True)
    assert mixtral(small) == in_tree(small)


def test_a_mixtrals_token_uses_what_its_paper_says():
    model = Mixtral()
    active = sizes.mixtral_active_parameters(**llama_sizes(model), E=8, k=2)
    assert active == pytest.approx(12.9e9, rel=2e-3)  # "13B active", arXiv 2401.04088
    # All of them but one of the two tables and the norms multiply.
    norms = (2 * model.num_layers + 1) * model.embed_dim
    assert active - model.vocab_size * model.embed_dim - norms == model.matmul_parameters()


def test_twelve_layers_d_squared():
    model = GPT()
    assert sizes.transformer_parameters(12, 768) == 84_934_656
    table = model.vocab_size * model.embed_dim
    assert model.matmul_parameters() == sizes.transformer_parameters(12, 768) + table


@pytest.mark.parametrize("name", PUBLISHED)
def test_flops_a_token_are_the_models_own(name):
    model = PUBLISHED[name][0]
    count = functools.partial(
        sizes.flops_per_token, model.matmul_parameters(), L=model.num_layers, D=model.embed_dim,
        T=1024,
    )  # fmt: skip
    assert count(causal=True) == model.flops_per_token(1024)
    scores = sizes.attention_flops_per_token(
        L=model.num_layers, D=model.embed_dim, T=1024, causal=True
    )
    assert count(causal=False) - count(causal=True) == scores


def test_adapters_have_as_many_as_are_drawn():
    model = Llama(
        vocab_size=64, num_layers=3, embed_dim=32, num_heads=8, num_kv_heads=2, mlp_dim=48
    )
    D, q, kv, F = 32, 32, 8, 48
    layer = [(D, q), (D, kv), (D, kv), (q, D), (D, F), (D, F), (F, D)]
    adapters = tuning_of(Finetune(lora_rank=4), model.build)
    drawn = jax.eval_shape(adapters.draw, parameter_shapes(model.build), jax.random.key(0))
    held = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(drawn))
    assert sizes.lora_parameters(4, 3 * layer) == held
