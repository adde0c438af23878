"""DeepSeek-V2 and V3 equal transformers' and one device on every mesh; biases follow the load."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step, text_batch
from flax import nnx
from parity import assert_equal, evaluate
from tiny_models import count_parameters

from jaxtrain.analysis.planning.textbook import sizes as formulas
from jaxtrain.analysis.planning.textbook.flops import count_flops
from jaxtrain.config.errors import UserError
from jaxtrain.models.model import bias_speed_of
from jaxtrain.models.transformers.deepseek import DeepSeek
from jaxtrain.models.weights.family import model_of
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.kv_cache import empty_cache
from jaxtrain.parallel.sharding import by_name
from jaxtrain.training.finetune.finetune import Finetune, router_biases, tuning_of
from jaxtrain.training.transforms import update_biases

YARN = {"rope_scaling": 4.0, "rope_original_context_length": 6, "rope_score_factor": 0.707}
V2 = {"router": "softmax", "bias_speed": 0.0, "normalize_gates": False}
SHAPES = {
    "v3": DeepSeek(
        vocab_size=64, num_layers=3, dense_layers=1, embed_dim=32, num_heads=4, query_rank=12,
        key_value_rank=16, plain_dim=8, rotary_dim=4, value_dim=6, mlp_dim=24, expert_mlp_dim=16,
        num_experts=8, experts_per_token=3, expert_groups=4, groups_per_token=2,
        context_length=32, balance_weight=0.0, rope_scaling=1.0, predicted_tokens=3,
    ),
    # Values wider than keys, queries of the stream, experts from the first layer on; even widths,
    # without which theirs does not run.
    "v2": DeepSeek(
        vocab_size=61, num_layers=2, dense_layers=0, embed_dim=18, num_heads=3, query_rank=None,
        key_value_rank=6, plain_dim=4, rotary_dim=2, value_dim=7, mlp_dim=20, expert_mlp_dim=9,
        shared_experts=2, num_experts=6, experts_per_token=2, expert_groups=3, groups_per_token=2,
        context_length=24, balance_weight=0.0, routed_scale=1.7, norm_eps=1e-3, **V2, **YARN,
    ),
    "no_groups": DeepSeek(
        vocab_size=23, num_layers=3, dense_layers=2, embed_dim=8, num_heads=1, query_rank=3,
        key_value_rank=2, plain_dim=1, rotary_dim=2, value_dim=3, mlp_dim=5, expert_mlp_dim=3,
        num_experts=5, experts_per_token=4, expert_groups=1, groups_per_token=1,
        context_length=24, balance_weight=0.0, normalize_gates=False, tie_embeddings=True, **YARN,
    ),
}  # fmt: skip


def pair_of(sizes: DeepSeek):
    from against_transformers import Apart, draw, torch, transformers  # noqa: PLC0415
    from prediction_in_torch import Module, loss_of_modules  # noqa: PLC0415

    class Biased(Apart):
        """With the buffers that are parameters of ours; they have no gradient.

        Attributes:
          loads: tokens that went to each expert of each layer when the loss was computed.
        """

        def loss(self, batch):
            gates = [m for n, m in self.theirs.named_modules() if n.endswith("mlp.gate")]
            self.loads = np.zeros((len(gates), self.sizes.num_experts))

            def count(layer, chosen):
                self.loads[layer] += np.bincount(chosen.ravel(), minlength=self.loads.shape[1])

            hooks = [
                gate.register_forward_hook(lambda _, __, out, i=i: count(i, out[2].numpy()))
                for i, gate in enumerate(gates)
            ]
            found, modules = super().loss(batch), self.sizes.predicted_tokens - 1
            if modules:
                for hook in hooks[:-modules]:  # the modules' loss runs the model once more
                    hook.remove()
                found += self.sizes.prediction_weight * loss_of_modules(self.theirs, batch)
            for hook in hooks:
                hook.remove()
            return found

        def ours(self, tensors):
            of_values = any(isinstance(value, torch.nn.Parameter) for value in tensors.values())
            added = {
                name: value if of_values else torch.zeros_like(value)
                for name, value in self.theirs.named_buffers()
                if name.endswith("e_score_correction_bias")
            }
            return super().ours({**tensors, **added})

    rope = {"rope_type": "default", "rope_theta": sizes.rope_theta}
    if sizes.rope_scaling != 1:
        rope = {
            "rope_type": "yarn", "rope_theta": sizes.rope_theta, "factor": sizes.rope_scaling,
            "original_max_position_embeddings": sizes.rope_original_context_length,
            "mscale": sizes.rope_score_factor, "mscale_all_dim": sizes.rope_score_factor,
        }  # fmt: skip
    settings = {
        "vocab_size": sizes.vocab_size, "hidden_size": sizes.embed_dim,
        "intermediate_size": sizes.mlp_dim, "moe_intermediate_size": sizes.expert_mlp_dim,
        "num_hidden_layers": sizes.num_layers, "first_k_dense_replace": sizes.dense_layers,
        "num_attention_heads": sizes.num_heads, "num_key_value_heads": sizes.num_heads,
        "n_shared_experts": sizes.shared_experts, "n_routed_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.experts_per_token, "n_group": sizes.expert_groups,
        "topk_group": sizes.groups_per_token, "routed_scaling_factor": sizes.routed_scale,
        "norm_topk_prob": sizes.normalize_gates, "q_lora_rank": sizes.query_rank,
        "kv_lora_rank": sizes.key_value_rank, "qk_nope_head_dim": sizes.plain_dim,
        "qk_rope_head_dim": sizes.rotary_dim, "v_head_dim": sizes.value_dim,
        "max_position_embeddings": sizes.context_length, "rms_norm_eps": sizes.norm_eps,
        "tie_word_embeddings": sizes.tie_embeddings, "rope_parameters": rope,
        "attn_implementation": "eager", "experts_implementation": "eager",
        "pad_token_id": None,  # its row of the embedding would have no gradient there
    }  # fmt: skip
    if sizes.router == "softmax":
        config = transformers.DeepseekV2Config(**settings, topk_method="group_limited_greedy")
        return Biased(sizes, draw(transformers.DeepseekV2ForCausalLM(config)), "deepseek_v2")
    config = transformers.DeepseekV3Config(**settings)
    theirs = transformers.DeepseekV3ForCausalLM(config)
    for number in range(1, sizes.predicted_tokens):
        theirs.model.layers.append(Module(config, sizes.num_layers - 1 + number))
    draw(theirs)
    with torch.no_grad():
        for name, value in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.normal_(0.0, 0.2)
    return Biased(sizes, theirs, "deepseek_v3")


@pytest.mark.parametrize(
    "name", ["v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v2", "no_groups"))]
)
def test_logits_and_every_gradient_equal_transformers(name):
    """Those of the modules that tell further tokens too; and as many went to each expert."""
    sizes, pair = SHAPES[name], pair_of(SHAPES[name])
    batch = text_batch(rows=3, length=13, vocab_size=sizes.vocab_size)
    metrics = pair.compare(batch)
    if sizes.router == "sigmoid":
        load = np.asarray(metrics["expert_load"]) * (batch.segment_ids != 0).sum()
        np.testing.assert_allclose(load, pair.loads, atol=1e-3)
        assert pair.loads.std() > 0


@pytest.mark.slow
def test_thirty_steps_have_the_losses_of_transformers():
    sizes = dataclasses.replace(SHAPES["v3"], predicted_tokens=2)
    pair_of(sizes).train([text_batch(rows=4, length=16, vocab_size=sizes.vocab_size, documents=1)])


def closed(sizes: DeepSeek) -> int:
    attention = formulas.latent_attention_parameters(
        D=sizes.embed_dim, N=sizes.num_heads, Q=sizes.query_rank, C=sizes.key_value_rank,
        P=sizes.plain_dim, R=sizes.rotary_dim, H=sizes.value_dim,
    )  # fmt: skip
    layer = attention + 2 * sizes.embed_dim
    layer += (sizes.num_experts + sizes.shared_experts) * 3 * sizes.embed_dim * sizes.expert_mlp_dim
    layer += sizes.num_experts * (sizes.embed_dim + (sizes.router == "sigmoid"))
    module = formulas.prediction_module_parameters(D=sizes.embed_dim, layer=layer)
    return (sizes.predicted_tokens - 1) * module + formulas.deepseek_parameters(
        V=sizes.vocab_size, L=sizes.num_layers, D=sizes.embed_dim, F=sizes.mlp_dim,
        f=sizes.expert_mlp_dim, E=sizes.num_experts, shared=sizes.shared_experts,
        dense=sizes.dense_layers, attention=attention, biases=sizes.router == "sigmoid",
        tied=sizes.tie_embeddings,
    )  # fmt: skip


def test_parameters_are_the_published_ones():
    """Of DeepSeek-V2-Lite 15,706,484,224; of V3 671,026,404,352 and a bias for each expert."""
    lite = DeepSeek(
        vocab_size=102400, num_layers=27, dense_layers=1, embed_dim=2048, num_heads=16,
        query_rank=None, mlp_dim=10944, expert_mlp_dim=1408, shared_experts=2, num_experts=64,
        experts_per_token=6, expert_groups=1, groups_per_token=1, **V2,
    )  # fmt: skip
    assert count_parameters(lite) == closed(lite) == 15_706_484_224
    assert count_parameters(DeepSeek()) == closed(DeepSeek()) == 671_026_404_352 + 58 * 256
    for sizes in SHAPES.values():
        assert count_parameters(sizes) == closed(sizes)


def test_the_module_of_v3_is_the_published_one():
    """Of deepseek-ai/DeepSeek-V3: beside the projection 11.5 billion parameters, of which 2.4 are
    active, embedding and output matrix with them (README_WEIGHTS.md there); and the numbers of all
    of its tensors but scales, in which both stand twice: 680,571,043,840 in float8, 3,918,786,560
    in bfloat16, and a bias of each expert."""
    one, two = DeepSeek(), DeepSeek(predicted_tokens=2)
    own = count_parameters(two) - count_parameters(one)
    assert own == closed(two) - closed(one)
    projection = 2 * one.embed_dim**2
    assert round((own - projection) / 1e9, 1) == 11.5
    shared = 2 * one.vocab_size * one.embed_dim
    in_files = 680_571_043_840 + 3_918_786_560 + 59 * 256
    assert count_parameters(two) + shared == in_files
    active = two.matmul_parameters() - one.matmul_parameters() + shared // 2
    assert round((active - projection) / 1e9, 1) == 2.4
    T = 4096
    scores = 6 * 128 * (192 + 128) * T / 2
    more = two.flops_per_token(T) - one.flops_per_token(T)
    assert more == 6 * (active - shared // 2) + scores


def test_the_settings_that_v3_is_published_with_are_the_defaults():
    """Of deepseek-ai/DeepSeek-V3, float8 as its files have it."""
    published = {
        "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                         "type": "yarn"},
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
        "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    }  # fmt: skip
    eight_bits = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                  "weight_block_size": [128, 128]}  # fmt: skip
    published["quantization_config"] = eight_bits
    assert model_of(published, where="config.json")[1] == DeepSeek()
    with pytest.raises(UserError, match="quantization_config"):
        model_of({**published, "quantization_config": {"quant_method": "awq"}}, where="it")


def test_flops_are_those_of_what_a_token_goes_through():
    """Active parameters as published: 37 billion, with the embedding that is only looked up."""
    sizes = DeepSeek()
    active = sizes.matmul_parameters() + sizes.vocab_size * sizes.embed_dim
    assert round(active / 1e9, 1) == 37.6
    T = 4096
    scores = 61 * 128 * (192 + 128) * T / 2  # multiply-adds forward, of causal attention
    assert sizes.flops_per_token(T) == 6 * sizes.matmul_parameters() + 6 * scores
    kept = sum(np.prod(one.shape) for one in sizes.cached)
    assert kept == 512 + 64


def program_of(sizes, layout, **changes):
    tuning = tuning_of(Finetune(), sizes.build, router_biases(sizes))
    return make_step(sizes, layout, tuning=tuning, bias_speed=bias_speed_of(sizes), **changes)


AXES = ("layers", "classes")
BATCH = text_batch(rows=16, length=16, vocab_size=64)
SMALL = dataclasses.replace(SHAPES["v3"], balance_weight=0.01, predicted_tokens=2)
# Modules that predict further tokens are on meshes in test_extras_on_meshes.py.
ALONE = dataclasses.replace(SMALL, predicted_tokens=1)


# Compiles two large steps; logits and gradients are in the fast part, tests/test_mixtral.py has
# experts on a mesh.
@pytest.mark.slow
def test_a_mesh_computes_the_same_and_moves_the_biases_alike():
    program = program_of(ALONE, make_layout(data=2, tensor=2, expert=2))
    expected = evaluate(program_of(ALONE, make_layout()), BATCH)
    for bias in by_name(expected["frozen"]).values():
        moved = np.abs(np.round(bias.get_value() / SMALL.bias_speed))
        assert set(moved.ravel()) <= {0, 1, 2}, "two steps"
        assert moved.max() == 2
    assert_equal(evaluate(program, BATCH, expected), expected)


def test_biases_move_against_the_load_error_and_nothing_else_does():
    program = program_of(SMALL, make_layout(fsdp=1))
    shapes = program.shapes()
    assert list(by_name(shapes.frozen)) == ["layers/experts/bias", "predictors/0/experts/bias"]
    assert not any(name.endswith("bias") for name in by_name(shapes.params))
    rng = np.random.default_rng(0)
    bias = rng.normal(size=(2, 4)).astype(np.float32)
    load = np.array([[3, 3, 3, 3], [8, 0, 4, 4], [4, 4, 0, 8]])
    other = nnx.Param(jnp.ones((2, 4)), axes=("layers", "vector"), role="norm")
    own = nnx.Param(jnp.asarray(bias), axes=AXES, role="balance")
    alone = nnx.Param(jnp.zeros(4), axes=AXES[1:], role="balance")
    teacher = {"b": own.replace(own.get_value() + 1)}
    frozen = nnx.State({"b": own, "last": alone, "n": other, "teacher": teacher})
    with program.setup.layout.active():
        found = update_biases(frozen, jnp.asarray(load, jnp.float32), 0.5, None)
    np.testing.assert_array_equal(found["n"].get_value(), other.get_value())
    np.testing.assert_array_equal(found["teacher"]["b"].get_value(), bias + 1)
    moved = np.asarray(found["b"].get_value()) - bias
    np.testing.assert_allclose(moved, [[0, 0, 0, 0], [-0.5, 0.5, 0, 0]], atol=1e-6)
    np.testing.assert_array_equal(found["last"].get_value(), [0, 0, 0.5, -0.5])
    assert update_biases(frozen, None, 0.5, None) is frozen


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dense_layers": 3}, r"DeepSeek.dense_layers=3 with DeepSeek.num_layers=3; use 0 to 2"),
        ({"expert_groups": 3}, r"DeepSeek.expert_groups=3 does not divide DeepSeek.num_experts=8"),
        ({"experts_per_token": 5}, r"have 4 experts; use 1 to 4"),
        ({"expert_groups": 8}, r"sum of its two best experts .*; use at most 4, or 1"),
        ({"router": "softmax"}, r"DeepSeek.bias_speed=0.001 has no effect with DeepSeek.router="),
        ({"rotary_dim": 3}, r"DeepSeek.rotary_dim=3 is not an even number above 0; the nearest is"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}], ids=["one_device", "tensor"])
def test_queries_taken_to_the_latents_attend_as_heads_with_keys_and_values_of_their_own(layout):
    """Token by token with a cache, where they are taken, and all at once, where they are not."""
    T = 4
    program = make_step(SMALL, make_layout(**layout))
    execution, latent = program.setup.execution, dataclasses.replace(SMALL.latent, query_scale=1.3)
    own = latent.weights(jax.random.split(jax.random.key(0), latent.num_keys))
    own = jax.tree.map(lambda x: 10 * x, own)
    h_BTD = jax.random.normal(jax.random.key(1), (2, T, SMALL.embed_dim))
    places_BT = jnp.broadcast_to(jnp.arange(T), (2, T))

    def attend(h_BTD, places_BT, **cached):
        mask = Mask(query_start=cached.get("start"))
        return latent(own, h_BTD, places_BT, mask, execution, out=HIDDEN, **cached)

    def token_by_token():
        cache = empty_cache(SMALL.cached, layers=0, rows=2, room=T, dtype=jnp.float32).layers
        cache, found = tuple(array[0] for array in cache), []
        for place in range(T):
            now = slice(place, place + 1)
            y_BTD, cache = attend(h_BTD[:, now], places_BT[:, now], cache=cache, start=place)
            found.append(y_BTD)
        return jnp.concatenate(found, axis=1)

    with program.setup.layout.active():
        expected = jax.jit(lambda: attend(h_BTD, places_BT)[0])()
        found = jax.jit(token_by_token)()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_a_token_that_is_written_makes_no_keys_and_values_of_the_tokens_before_it():
    """Of V3 at 4,096 places: the products as arXiv 2405.04434 has them, 87 times fewer."""
    latent, S = DeepSeek().latent, 4096
    D, N, R, C, P, Q = 7168, 128, 64, 512, 128, 1536

    def products(T):
        def run(own, h_BTD, cache):
            mask, places_BT = Mask(query_start=S - T), jnp.zeros((1, T), int)
            return latent(
                own, h_BTD, places_BT, mask, Execution(), out=HIDDEN, cache=cache, start=S - T
            )

        shapes = jax.eval_shape(
            lambda: (
                latent.weights(jax.random.split(jax.random.key(0), latent.num_keys)),
                jnp.zeros((1, T, D)),
                (jnp.zeros((1, S, C)), jnp.zeros((1, S, R))),
            )
        )
        return count_flops(jax.make_jaxpr(run)(*shapes)).matmul / 2

    around = D * Q + Q * N * (P + R) + D * (C + R) + N * P * D
    made = C * N * 2 * P
    assert products(1) == around + made + N * S * 2 * (C + R)
    # A prompt is read with keys and values, which are made once for all of its tokens.
    assert products(S) == S * around + S * made + N * S * S * 2 * (P + R)
