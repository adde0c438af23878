"""GPT and Llama equal transformers, are causal, keep documents apart, and generate with a cache."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_sparse_attention import PATTERNS, keys_of
from tiny_models import MODELS, C, D, F, K, N, V, name_of, parameters, places, some_tokens, split

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.kv_cache import Cache
from jaxtrain.nn.precision import to_compute
from jaxtrain.nn.transformer import language_model, mlp
from jaxtrain.parallel.sharding import is_variable


@functools.partial(jax.jit, static_argnums=(0, 1))
def hidden(name, execution, params, tokens, positions, mask, cache=None):  # noqa: ANN001, ANN201
    model = nnx.merge(split(name)[0], params)
    return language_model.hidden_states(model, tokens, positions, mask, execution, cache)[:2]


@functools.partial(jax.jit, static_argnums=0)
def logits(name, params, tokens, positions, segment_ids):  # noqa: ANN001, ANN201
    mask = Mask(segment_ids_BT=segment_ids, segment_ids_BS=segment_ids)
    model = nnx.merge(split(name)[0], params)
    h_BTD = language_model.hidden_states(model, tokens, positions, mask, Execution())[0]
    return language_model.logits(model, h_BTD)


# -- the same as transformers ---------------------------------------------------------------------


def peer(name: str) -> Any:
    """The same architecture in transformers, its parameters drawn at random."""
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    transformers = pytest.importorskip("transformers", reason="transformers is the peer")
    ends = {"bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager"}
    sizes = MODELS[name]
    if name == "gpt":
        config = transformers.GPT2Config(
            vocab_size=V, n_positions=C, n_embd=D, n_layer=4, n_head=N, **ends
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        if name == "llama-scaled":
            rope |= {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 12,
            }  # fmt: skip
        common = {
            "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 4,
            "num_attention_heads": N, "num_key_value_heads": K, "max_position_embeddings": C,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": sizes.tie_embeddings,
            "rope_parameters": rope, **ends,
        }  # fmt: skip
        if name == "llama-window":
            config = transformers.MistralConfig(**common, sliding_window=3)
            model = transformers.MistralForCausalLM(config)
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
    torch.manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_norm = "norm" in path or "ln_" in path
            parameter.normal_(1.0 if is_norm and path.endswith("weight") else 0.0, 0.2)
    return model.eval()


def translate(name: str, model: Any) -> dict[str, np.ndarray]:
    """The peer's parameters under our names, in our shapes."""
    theirs = {path: x.detach().numpy() for path, x in model.named_parameters()}
    H, L = D // N, 4

    def stacked(path: str, shape: tuple[int, ...], change=lambda x: x) -> np.ndarray:  # noqa: ANN001
        return np.stack([change(theirs[path.format(i)]).reshape(shape) for i in range(L)])

    if name == "gpt":
        h = "transformer.h.{}."
        ours = {
            "token_embedding": theirs["transformer.wte.weight"],
            "position_embedding": theirs["transformer.wpe.weight"],
            "norm_scale": theirs["transformer.ln_f.weight"],
            "norm_bias": theirs["transformer.ln_f.bias"],
            "layers/qkv": stacked(h + "attn.c_attn.weight", (D, 3, N, H)).swapaxes(1, 2),
            "layers/qkv_bias": stacked(h + "attn.c_attn.bias", (3, N, H)),
            "layers/out": stacked(h + "attn.c_proj.weight", (N, H, D)),
            "layers/out_bias": stacked(h + "attn.c_proj.bias", (D,)),
            "layers/up": stacked(h + "mlp.c_fc.weight", (D, 4 * D)),
            "layers/up_bias": stacked(h + "mlp.c_fc.bias", (4 * D,)),
            "layers/down": stacked(h + "mlp.c_proj.weight", (4 * D, D)),
            "layers/down_bias": stacked(h + "mlp.c_proj.bias", (D,)),
        }
        for norm, their_norm in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            ours[f"layers/{norm}_scale"] = stacked(f"{h}{their_norm}.weight", (D,))
            ours[f"layers/{norm}_bias"] = stacked(f"{h}{their_norm}.bias", (D,))
        return ours
    h = "model.layers.{}."
    ours = {
        "token_embedding": theirs["model.embed_tokens.weight"],
        "norm_scale": theirs["model.norm.weight"],
        "layers/attention_norm_scale": stacked(h + "input_layernorm.weight", (D,)),
        "layers/mlp_norm_scale": stacked(h + "post_attention_layernorm.weight", (D,)),
        "layers/query": stacked(h + "self_attn.q_proj.weight", (D, N, H), np.transpose),
        "layers/key": stacked(h + "self_attn.k_proj.weight", (D, K, H), np.transpose),
        "layers/value": stacked(h + "self_attn.v_proj.weight", (D, K, H), np.transpose),
        "layers/out": stacked(h + "self_attn.o_proj.weight", (N, H, D), np.transpose),
        "layers/gate": stacked(h + "mlp.gate_proj.weight", (D, F), np.transpose),
        "layers/up": stacked(h + "mlp.up_proj.weight", (D, F), np.transpose),
        "layers/down": stacked(h + "mlp.down_proj.weight", (F, D), np.transpose),
    }
    if not MODELS[name].tie_embeddings:
        ours["output"] = theirs["lm_head.weight"]
    return ours


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    model = peer(name)
    values = translate(name, model)
    assert {path: v.get_value().shape for path, v in parameters(MODELS[name]).items()} == {
        path: value.shape for path, value in values.items()
    }
    params = jax.tree_util.tree_map_with_path(
        lambda path, v: v.replace(jnp.asarray(values[name_of(path)])),
        split(name)[1],
        is_leaf=is_variable,
    )
    tokens = some_tokens(2, C)
    with torch.no_grad():
        expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert expected.std() > 0.5
    np.testing.assert_allclose(
        logits(name, params, tokens, places(2, C), None), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kernel", ["reference", pytest.param("sparse", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["dilated", *(pytest.param(n, marks=pytest.mark.slow) for n in PATTERNS
                          if n != "dilated")],
)  # fmt: skip
def test_llama_with_a_pattern_equals_transformers_with_its_dense_mask(
    name: str, kernel: str
) -> None:
    """What is added to their scores is the logarithm of how often the papers' sets have a key."""
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    model, tokens = peer("llama"), some_tokens(2, C)
    pattern = PATTERNS[name]
    counts_NTT = np.zeros((N, C, C))
    for head, place in np.ndindex(N, C):
        np.add.at(counts_NTT[head, place], keys_of(pattern, place, head), 1)
    assert (counts_NTT == 0).sum() > N * C * (C - 1) // 2  # more than a causal mask hides
    with np.errstate(divide="ignore"), torch.no_grad():
        added = torch.tensor(np.maximum(np.log(counts_NTT), -1e9), dtype=torch.float32)
        given = {"attention_mask": added.expand(2, N, C, C)}
        expected = model(torch.tensor(tokens, dtype=torch.long), **given).logits.numpy()
    values = translate("llama", model)
    sizes = dataclasses.replace(MODELS["llama"], attention_pattern=pattern)
    ours = jax.tree_util.tree_map_with_path(
        lambda path, v: v.replace(jnp.asarray(values[name_of(path)])),
        split("llama")[1],
        is_leaf=is_variable,
    )

    @jax.jit
    def told(params: Any) -> jax.Array:
        module = nnx.merge(nnx.split(nnx.eval_shape(sizes.build, jax.random.key(0)))[0], params)
        h_BTD = language_model.hidden_states(
            module, tokens, places(2, C), Mask(), Execution(kernel=kernel)
        )[0]
        return language_model.logits(module, h_BTD)

    np.testing.assert_allclose(told(ours), expected, rtol=1e-4, atol=1e-4)


# -- who sees whom --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_place_sees_itself_and_what_came_before(name: str) -> None:
    T = 10
    structure, params = split(name)
    weights = jax.random.normal(jax.random.key(1), (D,))

    def outputs(table: jax.Array) -> jax.Array:
        model = nnx.merge(structure, params)
        model.token_embedding = model.token_embedding.replace(table)
        # Every token stands once: row s of the table is the embedding at place s.
        h_BTD, _, _ = language_model.hidden_states(
            model, places(1, T), places(1, T), Mask(), Execution()
        )
        return h_BTD[0] @ weights

    table = params["token_embedding"].get_value()
    influence = np.abs(jax.jit(jax.jacrev(outputs))(table)).max(-1)[:, :T]
    np.testing.assert_array_equal(influence > 0, np.tri(T, dtype=bool))


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    first, second, params = some_tokens(2, 7)[:1], some_tokens(2, 7)[1:, :6], split(name)[1]
    padding = np.zeros((1, 2), np.int32)
    lengths = {1: first.shape[1], 2: second.shape[1], 0: padding.shape[1]}
    packed = logits(
        name,
        params,
        np.concatenate([first, second, padding], axis=1),
        np.concatenate([places(1, length) for length in lengths.values()], axis=1),
        np.concatenate([np.full((1, n), i, np.int32) for i, n in lengths.items()], axis=1),
    )
    for start, document in ((0, first), (7, second)):
        length = document.shape[1]
        alone = logits(name, params, document, places(1, length), None)
        np.testing.assert_allclose(packed[:, start : start + length], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt", "llama", "llama-window"])
def test_with_cache_equals_without(name: str) -> None:
    T, prompt = 9, 5
    sizes, params = MODELS[name], split(name)[1]
    execution, tokens = Execution(kernel="reference"), some_tokens(2, T)
    expected, _ = hidden(name, execution, params, tokens, places(2, T), Mask())
    # More room than tokens, and rubbish in it: what is not filled must not be seen.
    facts = sizes.attention
    shape = (sizes.layers, 2, T + 3, facts.num_kv_heads, facts.key_dim)
    cache = Cache((jnp.full(shape, 7.0), jnp.full(shape, 7.0)), jnp.int32(0))
    found, start = [], 0
    for length in (prompt, *[1] * (T - prompt)):
        here = slice(start, start + length)
        mask = Mask(query_start=cache.length)
        h_BTD, cache = hidden(
            name, execution, params, tokens[:, here], places(2, T)[:, here], mask, cache
        )
        found.append(h_BTD)
        start += length
    assert int(cache.length) == T
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=1e-5, atol=1e-5)


# -- activations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 2e-6), ("bfloat16", 2.0**-8)])
def test_gelu_and_its_gradient_equal_torchs(
    monkeypatch: pytest.MonkeyPatch, platform: str, dtype: str, rounding: float
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(mlp, "platform_of", lambda mesh: platform)
    x = jnp.linspace(-12, 12, 4801).astype(dtype)
    y, back = jax.vjp(mlp.gelu, x)
    (gradient,) = back(jnp.ones_like(x))
    assert y.dtype == gradient.dtype == dtype
    theirs = torch.tensor(np.asarray(x, np.float64), requires_grad=True)
    torch.nn.functional.gelu(theirs, approximate="tanh").sum().backward()
    expected = torch.nn.functional.gelu(theirs, approximate="tanh").detach()
    # XLA's tanh on CPUs ends 1.3e-6 short of 1, which x is multiplied by.
    close = functools.partial(np.testing.assert_allclose, rtol=rounding, atol=1e-5)
    close(np.asarray(y, np.float64), expected)
    close(np.asarray(gradient, np.float64), theirs.grad)


# -- in 16 bits ----------------------------------------------------------------------------------


# The cases that are left run the same code.
@pytest.mark.slow_cases("bfloat16-0.001953125-gpt", "float16-0.000244140625-llama")
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 2.0**-9), ("float16", 2.0**-12)])
def test_half_precision_stays_near_float32(name: str, dtype: str, rounding: float) -> None:
    execution, tokens = Execution(kernel="reference"), some_tokens(2, C)
    params = split(name)[1]
    expected, _ = hidden(name, execution, params, tokens, places(2, C), Mask())
    found, _ = hidden(name, execution, to_compute(params, dtype), tokens, places(2, C), Mask())
    assert found.dtype == dtype
    error = np.asarray(found, np.float32) - expected
    relative = np.sqrt(np.square(error).mean() / np.square(expected).mean())
    # Each of the 8 branches is rounded about 4 times on its way (norm, two products, what is
    # between them), each weight once; independent roundings add as the root of their number.
    assert rounding / 2 < relative < rounding * 4 * np.sqrt(8 * 4)
