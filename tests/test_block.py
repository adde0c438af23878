"""Parts put together in a way that no shipped model has equal a peer's; their names lie flat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step, text_batch
from flax import nnx
from parity import assert_equal, evaluate
from tiny_models import name_of, places, some_tokens

from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.attention.multi_head import MultiHead
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.normalization import LayerNorm, RMSNorm
from jaxtrain.nn.parameters import merge_weights, normal, param, residual_stddev
from jaxtrain.nn.transformer.block import Block
from jaxtrain.nn.transformer.decoder import Decoder
from jaxtrain.nn.transformer.language_model import hidden_states, logits
from jaxtrain.nn.transformer.mlp import SwiGLU, TwoLayers
from jaxtrain.parallel.sharding import is_variable

V, L, D, N, K, F, C = 64, 2, 32, 4, 2, 48, 24
SIZES = Llama(
    vocab_size=V, num_layers=L, embed_dim=D, num_heads=N, num_kv_heads=K, mlp_dim=F,
    context_length=C, rope_theta=10000.0, sliding_window=5,
)  # fmt: skip
SPREAD = residual_stddev(L)
SWIGLU = SwiGLU(embed_dim=D, mlp_dim=F, residual_stddev=SPREAD)
BIASED_MLP = TwoLayers(embed_dim=D, mlp_dim=F, residual_stddev=SPREAD)
MULTI_HEAD = MultiHead(embed_dim=D, num_heads=N, head_dim=D // N, residual_stddev=SPREAD)
LAYER_NORM = LayerNorm(dim=D, epsilon=1e-5)
RMS_NORM = RMSNorm(dim=D, epsilon=1e-5)


def build(block: Block, key: jax.Array) -> Decoder:
    """Untied, without learned positions."""
    key_tokens, key_output, key_layers = jax.random.split(key, 3)
    shape, axes = (V, D), ("vocab", "vocab_embed")
    return Decoder(
        block,
        key_layers,
        num_layers=L,
        token_embedding=param(key_tokens, shape, axes, normal(0.2)),
        norm=block.norm,
        output=param(key_output, shape, axes, normal(0.2)),
    )


def test_layer_norms_around_grouped_queries_and_a_swiglu_are_stablelm():
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    transformers = pytest.importorskip("transformers")
    block = Block(attention=SIZES.block.attention, mlp=SWIGLU, norm=LAYER_NORM)
    structure, params = nnx.split(build(block, jax.random.key(0)), nnx.Param)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), params
    )
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable)
    ours = {name_of(path): np.asarray(leaf.get_value()) for path, leaf in leaves}
    peer = transformers.StableLmForCausalLM(
        transformers.StableLmConfig(
            vocab_size=V, num_hidden_layers=L, hidden_size=D, num_attention_heads=N,
            num_key_value_heads=K, intermediate_size=F, max_position_embeddings=C,
            rope_theta=10000.0, partial_rotary_factor=1.0, layer_norm_eps=1e-5,
            attention_dropout=0.0, hidden_dropout=0.0, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    theirs = {
        "model.embed_tokens.weight": ours.pop("token_embedding"),
        "lm_head.weight": ours.pop("output"),
        "model.norm.weight": ours.pop("norm_scale"),
        "model.norm.bias": ours.pop("norm_bias"),
    }
    matrices = {
        "self_attn.q_proj": "query", "self_attn.k_proj": "key", "self_attn.v_proj": "value",
        "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down",
    }  # fmt: skip
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    stacked = {f"{their}.weight": ours.pop(f"layers/{own}") for their, own in matrices.items()}
    stacked = {name: x.reshape(L, x.shape[1], -1).swapaxes(1, 2) for name, x in stacked.items()}
    out = ours.pop("layers/out")
    stacked["self_attn.o_proj.weight"] = out.reshape(L, -1, D).swapaxes(1, 2)
    for their, own in norms.items():
        stacked[f"{their}.weight"] = ours.pop(f"layers/{own}_scale")
        stacked[f"{their}.bias"] = ours.pop(f"layers/{own}_bias")
    assert ours == {}
    for name, value in stacked.items():
        theirs |= {f"model.layers.{i}.{name}": value[i] for i in range(L)}
    peer.load_state_dict({name: torch.tensor(x) for name, x in theirs.items()})
    tokens = some_tokens(2, 5)  # as long as the window, which the peer does not have

    def run(params):
        model = nnx.merge(structure, params)
        h_BTD, _, auxiliary = hidden_states(model, tokens, places(2, 5), Mask(), Execution())
        assert auxiliary == {}
        return logits(model, h_BTD)

    with torch.no_grad():
        expected = peer(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert expected.std() > 0.5
    np.testing.assert_allclose(jax.jit(run)(params), expected, rtol=1e-4, atol=1e-4)


class Mixed:
    """Grouped queries with a window and rotary positions, a GELU with biases, RMS norms."""

    objective = "next_token"
    block = Block(attention=SIZES.block.attention, mlp=BIASED_MLP, norm=RMS_NORM)

    def build(self, key):
        return build(self.block, key)


# Two programs; the block's outputs are in the fast part.
@pytest.mark.slow
def test_another_block_trains_on_a_mesh_as_on_one_device():
    batch = text_batch(rows=8, length=16, vocab_size=48)
    expected = evaluate(make_step(Mixed(), make_layout()), batch)
    layout = make_layout(sequence_parallel=True, data=2, fsdp=2, tensor=2)
    assert_equal(evaluate(make_step(Mixed(), layout), batch, expected), expected)


@pytest.mark.parametrize("attention", [SIZES.block.attention, MULTI_HEAD])
@pytest.mark.parametrize("mlp", [SWIGLU, BIASED_MLP])
def test_matmul_parameters_are_those_with_two_sides(attention, mlp):
    block = Block(attention=attention, mlp=mlp, norm=LAYER_NORM)
    own = jax.eval_shape(block.weights, jax.random.key(0))
    sizes = {name: weight.get_value().size for name, weight in own.items()}
    vectors = [name for name in own if name.endswith(("_bias", "_scale"))]
    assert block.matmul_parameters() == sum(sizes.values()) - sum(sizes[n] for n in vectors)


def test_two_parts_with_a_parameter_of_one_name_are_not_put_together():
    weight = param(jax.random.key(0), (2,), ("vector",), normal(1.0))
    with pytest.raises(AssertionError, match="two parameters of one name"):
        merge_weights({"up": weight}, {"down": weight, "up": weight})


@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=["layer", "rms"])
def test_the_gradients_of_a_norm_are_pytorchs(norm):
    """Its derivative is by hand; of the input and of its parameters, far from 0 and 1."""
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(0).normal
    x, d_y, scale, bias = draw(3, 2, (2, 5, D)), draw(0, 1, (2, 5, D)), draw(1, 1, D), draw(0, 1, D)
    own = norm.weights(jax.random.key(0))
    given = {"scale": scale, "bias": bias}

    def run(x, values):  # noqa: ANN001, ANN202
        return norm({name: own[name].replace(values[name]) for name in own}, x)

    values = {name: jnp.asarray(given[name], jnp.float32) for name in own}
    d_x, d_own = jax.vjp(run, jnp.asarray(x, jnp.float32), values)[1](jnp.asarray(d_y, jnp.float32))
    theirs = {name: torch.tensor(value, requires_grad=True) for name, value in given.items()}
    of_x = torch.tensor(x, requires_grad=True)
    if "bias" in own:
        y = torch.nn.functional.layer_norm(of_x, (D,), theirs["scale"], theirs["bias"], 1e-5)
    else:
        y = torch.nn.functional.rms_norm(of_x, (D,), theirs["scale"], 1e-5)
    y.backward(torch.tensor(d_y))
    np.testing.assert_allclose(d_x, of_x.grad, atol=2e-6)
    for name in own:
        np.testing.assert_allclose(d_own[name], theirs[name].grad, rtol=1e-5, atol=1e-5)
