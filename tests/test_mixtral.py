"""Mixtral equals transformers, and its step equals one device's wherever experts and tokens go."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import lower_step, make_layout, make_step, text_batch, with_exchange
from flax import nnx
from parity import assert_equal, evaluate
from tiny_models import C, D, F, K, N, V, name_of, parameters, places, some_tokens

from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.moe import dispatch
from jaxtrain.nn.moe.dispatch import slots_per_expert
from jaxtrain.nn.remat import POLICIES
from jaxtrain.nn.transformer.language_model import hidden_states, logits
from jaxtrain.parallel.sharding import is_variable
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.generation.generate import generate
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.pipeline.schedules import Pipeline

E = 4
PEER = Mixtral(
    vocab_size=V, num_layers=2, embed_dim=D, num_heads=N, num_kv_heads=K, mlp_dim=F, num_experts=E,
    context_length=C, rope_theta=10000.0,
)  # fmt: skip

# -- the same as transformers --------------------------------------------------------------------


def peer(sizes: Mixtral) -> Any:
    """The same architecture in transformers, its parameters drawn at random."""
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    transformers = pytest.importorskip("transformers", reason="transformers is the peer")
    config = transformers.MixtralConfig(
        vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=sizes.num_layers,
        num_attention_heads=N, num_key_value_heads=K, max_position_embeddings=C,
        num_local_experts=E, num_experts_per_tok=sizes.experts_per_token, rms_norm_eps=1e-5,
        router_aux_loss_coef=sizes.balance_weight, output_router_logits=True, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=0,
        eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in path else 0.0, 0.2)
    return model.eval()


def translate(sizes: Mixtral, model: Any) -> dict[str, np.ndarray]:
    """The peer's parameters under our names, in our shapes."""
    theirs = {path: x.detach().numpy() for path, x in model.named_parameters()}
    H, h = D // N, "model.layers.{}."

    def stacked(path: str, change: Any = lambda x: x) -> np.ndarray:
        return np.stack([change(theirs[(h + path).format(i)]) for i in range(sizes.num_layers)])

    def heads(path: str, count: int) -> np.ndarray:
        return stacked(f"self_attn.{path}.weight", lambda x: x.T.reshape(D, count, H))

    gate, up = np.split(stacked("mlp.experts.gate_up_proj").swapaxes(-1, -2), 2, axis=-1)
    return {
        "token_embedding": theirs["model.embed_tokens.weight"],
        "output": theirs["lm_head.weight"],
        "norm_scale": theirs["model.norm.weight"],
        "layers/attention_norm_scale": stacked("input_layernorm.weight"),
        "layers/mlp_norm_scale": stacked("post_attention_layernorm.weight"),
        "layers/query": heads("q_proj", N),
        "layers/key": heads("k_proj", K),
        "layers/value": heads("v_proj", K),
        "layers/out": stacked("self_attn.o_proj.weight", lambda x: x.T.reshape(N, H, D)),
        "layers/experts/router": stacked("mlp.gate.weight", np.transpose),
        "layers/experts/gate": gate,
        "layers/experts/up": up,
        "layers/experts/down": stacked("mlp.experts.down_proj").swapaxes(-1, -2),
    }


@pytest.mark.parametrize("changes", [{}, {"capacity_factor": E / 2}, {"experts_per_token": 3}])
def test_logits_and_losses_equal_transformers(changes: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    # One layer and one row: transformers pools all layers and rows before it multiplies f and P.
    sizes = dataclasses.replace(PEER, num_layers=1 if changes == {} else 2, **changes)
    model = peer(sizes)
    values = translate(sizes, model)
    assert {path: v.get_value().shape for path, v in parameters(sizes).items()} == {
        path: value.shape for path, value in values.items()
    }
    structure, shapes = nnx.split(nnx.eval_shape(lambda: sizes.build(jax.random.key(0))), nnx.Param)
    params = jax.tree_util.tree_map_with_path(
        lambda path, v: v.replace(jnp.asarray(values[name_of(path)])), shapes, is_leaf=is_variable
    )

    @jax.jit
    def ours(params, tokens):  # noqa: ANN001, ANN202
        model = nnx.merge(structure, params)
        h_BTD, _, auxiliary = hidden_states(model, tokens, places(1, C), Mask(), Execution())
        return logits(model, h_BTD), auxiliary

    tokens = some_tokens(1, C)
    found, auxiliary = ours(params, tokens)
    labels = torch.tensor(tokens, dtype=torch.long)
    with torch.no_grad():
        theirs = model(labels, labels=labels)
    assert theirs.logits.std() > 0.5
    np.testing.assert_allclose(found, theirs.logits.numpy(), rtol=1e-4, atol=1e-4)
    if sizes.num_layers == 1:
        balance = theirs.aux_loss.item()
        assert balance > 1.05 * sizes.experts_per_token  # an even load would give k
        assert auxiliary["router_balance_loss"] / C == pytest.approx(balance, rel=1e-4)
        nats = -jax.nn.log_softmax(found[0, :-1])[jnp.arange(C - 1), tokens[0, 1:]].mean()
        loss = float(nats + auxiliary["auxiliary_loss"] / C)
        assert loss == pytest.approx(theirs.loss.item(), abs=1e-4)
        z = torch.logsumexp(theirs.router_logits[0].float(), -1).square().sum().item()
        assert auxiliary["router_z_loss"] == pytest.approx(z, rel=1e-4)


def test_auxiliary_losses_are_means_over_tokens_as_in_transformers():
    """Of documents, however many targets count; each row by itself, as its tokens weigh."""
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    sizes = dataclasses.replace(PEER, num_layers=1, balance_weight=0.05, router_z_weight=0.01)
    model = peer(sizes)
    values = translate(sizes, model)
    batch = text_batch(rows=3, length=C, vocab_size=V)
    lengths = [C, C - 5, 2]
    real = np.arange(C) < np.array(lengths)[:, None]
    batch = dataclasses.replace(
        batch,
        segment_ids=real.astype(np.int32),
        positions=np.tile(np.arange(C, dtype=np.int32), (3, 1)),
    )
    balance = z = 0.0
    for tokens, length in zip(batch.inputs, lengths, strict=True):
        row = torch.tensor(tokens[None], dtype=torch.long)
        padding = (torch.arange(C) < length)[None].long()
        with torch.no_grad():
            theirs = model(row, attention_mask=padding, output_router_logits=True)
        balance += length * theirs.aux_loss.item() / sum(lengths)
        partition = torch.logsumexp(theirs.router_logits[0].reshape(C, -1)[:length].float(), -1)
        z += partition.square().sum().item() / sum(lengths)
    one = np.zeros_like(batch.loss_mask)
    one[0, 3] = 1
    program = make_step(sizes, make_layout())
    state = program.create(0)
    params = jax.tree_util.tree_map_with_path(
        lambda path, v: v.replace(jnp.asarray(values[name_of(path)])),
        state.params,
        is_leaf=is_variable,
    )
    state = dataclasses.replace(state, params=params)
    norms = []
    with program.setup.layout.active():
        gradients = jax.jit(program.setup.gradients)
        for mask in (real.astype(np.float32), one, np.zeros_like(one)):
            found, metrics, _ = gradients(state, dataclasses.replace(batch, loss_mask=mask))
            assert metrics["router_balance_loss"] == pytest.approx(balance, rel=1e-4)
            assert metrics["router_z_loss"] == pytest.approx(z, rel=1e-4)
            assert metrics["auxiliary_loss"] == pytest.approx(0.05 * balance + 0.01 * z, rel=1e-4)
            norms.append(float(optax.global_norm(found)))
    # Without any target the auxiliary losses alone have a gradient: not one that grows.
    assert 0 < norms[2] < norms[0]


# -- on a mesh as on one device ------------------------------------------------------------------

SIZES = Mixtral(
    vocab_size=64, num_layers=2, embed_dim=32, num_heads=8, num_kv_heads=2, mlp_dim=48,
    num_experts=8, context_length=16, balance_weight=0.05, router_z_weight=0.01,
)  # fmt: skip
MODELS = {
    "dropless": SIZES,
    "capacity": dataclasses.replace(SIZES, capacity_factor=1.0),
}
BATCH = text_batch(rows=16, length=16, vocab_size=48)
# The last row ends in padding, which routes but counts nowhere.
BATCH.segment_ids[-1, 11:], BATCH.loss_mask[-1, 11:] = 0, 0.0

LAYOUTS = {
    "expert8": {"expert": 8},
    "expert_tensor_sequence": {"expert": 4, "tensor": 2, "sequence_parallel": True},
    "expert_hsdp": {"data": 2, "expert": 2, "fsdp": 2, "zero": 3},
    "expert_context_tensor": {"expert": 2, "context": 2, "tensor": 2},
    "expert_hsdp_zero2": {"data": 2, "expert": 2, "fsdp": 2, "zero": 2},
}
CASES = [
    ("dropless", "expert8"),
    ("dropless", "expert_context_tensor"),
    ("dropless", "expert_hsdp_zero2"),
    ("capacity", "expert_tensor_sequence"),
    ("capacity", "expert_hsdp"),
]


@functools.cache
def one_device(name):
    """The same model on one device."""
    return evaluate(make_step(MODELS[name], make_layout()), BATCH)


@pytest.mark.slow_cases(
    "capacity-expert_hsdp",
    "capacity-expert_tensor_sequence",
    "dropless-expert8",
    "dropless-expert_hsdp_zero2",
)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_loss_and_gradients_equal_one_device(name, layout, capfd):
    expected = one_device(name)
    capfd.readouterr()
    found = evaluate(make_step(MODELS[name], make_layout(**LAYOUTS[layout])), BATCH)
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err
    assert_equal(found, expected)
    metrics = found["metrics"]
    assert metrics["auxiliary_loss"] == pytest.approx(
        0.05 * metrics["router_balance_loss"] + 0.01 * metrics["router_z_loss"], rel=1e-5
    )
    assert (metrics["router_dropped"] > 0.02) == (name == "capacity")
    assert metrics["router_max_load"] > 1.2


# Compiles three steps each; the experts of one part on a mesh are in the fast part above.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [("dropless", "expert_context_tensor"), ("capacity", "expert_tensor_sequence")],
)
def test_tokens_that_go_in_two_parts_equal_one_device(name, layout, monkeypatch):
    """Of five slots an expert the first part has three, the second two."""
    monkeypatch.setattr(dispatch, "ROWS_OF_A_PART", 1)
    factor = {"dropless": None, "capacity": 1.25}[name]
    sizes = dataclasses.replace(SIZES, capacity_factor=factor)
    alone = evaluate(make_step(sizes, make_layout()), BATCH)
    program = make_step(sizes, make_layout(**LAYOUTS[layout]))
    found = exchanges(lower_step(program, BATCH).compile().as_text())["f32"]
    # Each part there and back, forward and backward, and its gates there and their gradient back.
    assert len(found) == 12
    assert len(set(found)) == {"dropless": 2, "capacity": 4}[name]
    assert_equal(evaluate(program, BATCH, alone), alone)


# tests/test_feature_compatibility.py has every pair of features, in the slow part, too.
@pytest.mark.slow
def test_accumulation_equals_the_big_batch_auxiliary_losses_included():
    layout = make_layout(expert=4, fsdp=2)
    program = make_step(MODELS["capacity"], layout, accumulation=2)
    expected = one_device("capacity")
    assert_equal(evaluate(program, BATCH, expected), expected)


# tests/test_exchange.py has experts of replicas in the fast part.
@pytest.mark.slow
def test_replicas_that_tell_each_other_everything_are_one_device_too():
    """Each has its own number of targets and of tokens, and the means are over all of them."""
    program = with_exchange(
        Exchange(method="top_k", keep=1.0), make_step(MODELS["capacity"], make_layout(data=4))
    )
    state = program.create(0)
    batch = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
    with program.setup.layout.active():
        step = CompiledStep(program)
        state, _ = step(state, batch)
        _, metrics = step(state, batch)
    for name, value in one_device("capacity")["metrics"].items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5), name


@pytest.mark.slow
def test_remat_and_unrolling_change_nothing():
    execution = Execution(kernel="xla", remat=POLICIES["full"], layers_per_iteration=2)
    layout = make_layout(2, sequence_parallel=True, fsdp=2, expert=2, tensor=2)
    program = make_step(SIZES, layout, accumulation=2, execution=execution)
    expected = one_device("dropless")
    assert_equal(evaluate(program, BATCH, expected), expected)


# tests/test_pipeline.py has experts without a capacity there.
@pytest.mark.slow
def test_experts_inside_the_stages_of_a_pipeline():
    layout = make_layout(sequence_parallel=True, pipe=2, expert=2, tensor=2)
    pipeline = Pipeline(schedule="1f1b", microbatches=4)
    program = make_step(MODELS["capacity"], layout, pipeline=pipeline)
    expected = one_device("capacity")
    assert_equal(evaluate(program, BATCH, expected), expected)


# -- memory and traffic --------------------------------------------------------------------------


@pytest.mark.slow_cases("capacity")
@pytest.mark.parametrize("name", MODELS)
def test_two_exchanges_of_the_closed_form_and_each_rank_its_experts(name):
    ranks, rows, T, k, D_ = 4, 16, 16, 2, 32
    program = make_step(MODELS[name], make_layout(expert=ranks))
    found = exchanges(lower_step(program, BATCH).compile().as_text())
    own = rows // ranks
    if name == "capacity":
        payload = SIZES.num_experts * own * slots_per_expert(1.0, T, k, SIZES.num_experts) * D_
    else:
        payload = ranks * own * T * k * D_
    # Tokens there and back, and their gates there, in the loop over layers forward and in the one
    # backward.
    assert sorted(found["f32"]) == [payload // D_] * 2 + [payload] * 4
    assert found["s32"] == ([] if name == "capacity" else [SIZES.num_experts])
    for path in ("gate", "up", "down"):
        weight = program.abstract_state().params["layers"]["experts"][path].get_value()
        shard = weight.sharding.shard_shape(weight.shape)
        assert math.prod(shard) * ranks == math.prod(weight.shape)
        assert shard[1] == SIZES.num_experts // ranks


def exchanges(text: str) -> dict[str, list[int]]:
    """Values in the operands of each all-to-all in a compiled program, by dtype."""
    found: dict[str, list[int]] = {"f32": [], "s32": []}
    for line in text.splitlines():
        match = re.search(r"= (.*?) all-to-all(?:-start)?\(", line)
        if match:
            arrays = re.findall(r"(f32|s32)\[([\d,]+)\]", match.group(1))
            values = sum(math.prod(map(int, shape.split(","))) for _, shape in arrays)
            found[arrays[0][0]].append(values)
    return found


# -- generation and rejections ---------------------------------------------------------------------


@pytest.mark.slow
def test_generation_on_an_expert_mesh_equals_one_device():
    texts = []
    for layout in (make_layout(), make_layout(3, fsdp=2, expert=2, tensor=2)):
        program = make_step(SIZES, layout)
        state = program.create(seed=0)
        sampling = Sampling(temperature=0.9, top_k=10)
        texts.append(
            generate(
                program.setup,
                SIZES,
                state,
                [[3, 1, 4, 1, 5]],
                max_new_tokens=8,
                sampling=sampling,
                seed=3,
            )[0].tokens
        )
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts_per_token": 9}, r"experts_per_token=9 with Mixtral.num_experts=8; use 1 to 8"),
        ({"experts_per_token": 0}, r"experts_per_token=0 with"),
        ({"capacity_factor": 0.0}, r"capacity_factor=0.0; use None \(dropless\) or a number"),
        ({"balance_weight": -1.0}, r"balance_weight=-1.0; use 0"),
        ({"num_kv_heads": 3}, r"Mixtral.num_kv_heads=3 does not divide Mixtral.num_heads=8"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(SIZES, **changes)


def test_flops_count_the_experts_a_token_goes_through():
    # Mixtral 8x7B (arXiv 2401.04088): 47B parameters, of which a token uses 13B.
    sizes = Mixtral()
    total = sum(math.prod(v.get_value().shape) for v in parameters(sizes).values())
    assert total == pytest.approx(46.7e9, rel=1e-3)
    table = sizes.vocab_size * sizes.embed_dim  # looked up, not multiplied
    assert sizes.matmul_parameters() + table == pytest.approx(12.88e9, rel=1e-3)
    assert sizes.flops_per_token(4096) > 6 * sizes.matmul_parameters()
