"""Weights in and out by name, logits and gradients: transformers' on every mesh, with replicas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_layout, make_step, text_batch, with_exchange
from flax import nnx

from jaxtrain import Trainer, load_config
from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.run.weights import weights, with_weights
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.parameter_averages import ScheduleFree
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.step import averaged_params, restart_averages

L, D, N, T, V = 3, 32, 4, 32, 256  # 3 layers: of two stages one is padded
BATCH = text_batch(rows=8, length=T, vocab_size=V)
# Rows that are one text each, as GPT-2 of transformers reads them.
BATCH = dataclasses.replace(
    BATCH,
    segment_ids=np.ones_like(BATCH.segment_ids),
    positions=np.tile(np.arange(T, dtype=np.int32), (8, 1)),
)
TOKENS = BATCH.inputs[:3, :17].astype(np.int64)  # no number of rows that a mesh would split
ONE_DEVICE = ["Mesh.data=1", "Mesh.fsdp=1", "Mesh.tensor=1"]
MESHES = {
    "one device": ONE_DEVICE,
    "pipeline": ["Mesh.data=1", "Mesh.pipe=2", "Pipeline.microbatches=2"],
    "zero 1, int8": ["Sharding.zero=1", "Exchange.method='int8'", "Mesh.tensor=1", "Mesh.fsdp=4"],
    "diloco": ["Exchange.method='diloco'", "Exchange.period=2", "Optimizer.average_decay=0.9"],
}


@pytest.fixture(scope="module")
def peer():
    """GPT-2 of transformers, drawn at random: its weights by our names, logits and gradients."""
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    transformers = pytest.importorskip("transformers", reason="transformers is the peer")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=V, n_positions=T, n_embd=D, n_layer=L, n_head=N, bos_token_id=0,
            eos_token_id=0, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_scale = "ln_" in path and path.endswith("weight")
            parameter.normal_(1.0 if is_scale else 0.0, 0.2)
        logits = model(torch.tensor(TOKENS)).logits.numpy()
    told = model(torch.tensor(BATCH.inputs.astype(np.int64))).logits
    losses = torch.nn.functional.cross_entropy(
        told.flatten(0, 1), torch.tensor(BATCH.targets.astype(np.int64)).flatten(), reduction="none"
    )
    mask = torch.tensor(BATCH.loss_mask).flatten()
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    by_name = dict(model.named_parameters())
    return {
        "weights": by_our_names({n: p.detach().numpy() for n, p in by_name.items()}),
        "gradients": by_our_names({n: p.grad.numpy() for n, p in by_name.items()}),
        "logits": logits,
        "loss": loss.item(),
    }


def by_our_names(theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters of transformers' GPT-2, or their gradients, under our names in our shapes."""

    def stacked(name: str, *shape: int) -> np.ndarray:
        return np.stack([theirs[f"transformer.h.{i}.{name}"].reshape(shape) for i in range(L)])

    found = {
        "token_embedding": theirs["transformer.wte.weight"],
        "position_embedding": theirs["transformer.wpe.weight"],
        "norm_scale": theirs["transformer.ln_f.weight"],
        "norm_bias": theirs["transformer.ln_f.bias"],
        "layers/qkv": stacked("attn.c_attn.weight", D, 3, N, D // N).swapaxes(1, 2),
        "layers/qkv_bias": stacked("attn.c_attn.bias", 3, N, D // N),
        "layers/out": stacked("attn.c_proj.weight", N, D // N, D),
        "layers/out_bias": stacked("attn.c_proj.bias", D),
        "layers/up": stacked("mlp.c_fc.weight", D, 4 * D),
        "layers/up_bias": stacked("mlp.c_fc.bias", 4 * D),
        "layers/down": stacked("mlp.c_proj.weight", 4 * D, D),
        "layers/down_bias": stacked("mlp.c_proj.bias", D),
    }
    for ours, name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        found[f"layers/{ours}_scale"] = stacked(f"{name}.weight", D)
        found[f"layers/{ours}_bias"] = stacked(f"{name}.bias", D)
    return found


def make_trainer(config, mesh: str, *bindings: str) -> Trainer:
    devices = jax.devices()[:1] if mesh == "one device" else None
    bindings = [f"GPT.num_layers={L}", *MESHES[mesh], *bindings]
    return Trainer(load_config(config, bindings), devices=devices)


@pytest.fixture(scope="module", params=MESHES)
def trainer(request, tiny_config) -> Trainer:
    return make_trainer(tiny_config, request.param)


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.slow
def test_with_the_weights_of_transformers_everything_is_as_there(trainer, peer):
    before = jax.tree.map(lambda x: x.sharding, trainer.state)
    trainer.set_weights(peer["weights"])
    assert jax.tree.map(lambda x: x.sharding, trainer.state) == before
    for evaluated in (False, True):
        found = trainer.weights(evaluated=evaluated)
        assert_close(found, peer["weights"], 0.0)
        assert {x.dtype for x in found.values()} == {np.dtype(np.float32)}
    found = trainer.logits(TOKENS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, peer["logits"], rtol=1e-4, atol=1e-4)
    gradients = trainer.gradients(BATCH)
    assert max(np.abs(x).max() for x in peer["gradients"].values()) > 1e-2
    assert_close(gradients, peer["gradients"], 1e-5)
    # Nothing was updated by asking, and the first step is taken at these weights.
    assert_close(trainer.weights(), peer["weights"], 0.0)
    metrics = trainer.step(BATCH)
    if trainer.config.exchange.method == "synchronous":
        squares = [np.square(x.astype(np.float64)).sum() for x in peer["gradients"].values()]
        assert float(metrics["loss"]) == pytest.approx(peer["loss"], abs=1e-5)
        assert float(metrics["grad_norm"]) == pytest.approx(np.sqrt(sum(squares)), rel=1e-4)


def aligned(x: np.ndarray) -> np.ndarray:
    """The same numbers where JAX's CPU devices could use the memory as it is."""
    memory = np.empty(x.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    copy = memory[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


# Two programs; weights of PyTorch's are in the fast part.
@pytest.mark.slow
def test_its_own_weights_change_nothing_but_averages(trainer):
    trainer.step(BATCH)
    before = jax.device_get(trainer.state)
    given = {name: aligned(value) for name, value in trainer.weights().items()}
    kept = {name: value.copy() for name, value in given.items()}
    trainer.set_weights(given)
    for value in given.values():
        value[...] = np.nan  # the trainer has copies
    after = jax.device_get(trainer.state)
    if trainer.config.exchange.method != "diloco":
        jax.tree.map(np.testing.assert_array_equal, after, before)
    else:
        mu = before.opt_state[1].mu
        jax.tree.map(np.testing.assert_array_equal, after.opt_state[1].mu, mu)
        assert np.abs(jax.tree.leaves(mu)[0]).max() > 0
    found = trainer.weights()
    assert_close(found, kept, 0.0)
    trainer.step(BATCH)
    assert_close(found, kept, 0.0)


def test_interleaved_stages_have_the_layers_of_one_device():
    model = GPT(vocab_size=V, num_layers=5, embed_dim=16, num_heads=2, context_length=T)
    pipeline = Pipeline(schedule="interleaved", virtual_stages=2, microbatches=2)
    program = make_step(model, make_layout(pipe=2), pipeline=pipeline)
    placed = [layer for layer in program.setup.layer_order if layer >= 0]
    assert sorted(placed) == [0, 1, 2, 3, 4] != placed
    assert -1 in program.setup.layer_order
    state, alone = program.create(0), make_step(model, make_layout())
    found, expected = weights(program, state), weights(alone, alone.create(0))
    assert_close(found, expected, 0.0)  # a key gives the same parameters on every mesh
    given = {name: value + 1 for name, value in found.items()}
    after = with_weights(program, state, given)
    assert_close(weights(program, after), given, 0.0)
    padding = np.array(program.setup.layer_order) == -1
    assert not np.asarray(after.params["layers"]["up"].get_value())[padding].any()


def test_replicas_and_what_they_agree_on_begin_with_the_weights(tiny_config):
    model = GPT(vocab_size=V, num_layers=2, embed_dim=16, num_heads=2, context_length=T)
    settings = Exchange(method="diloco", period=4)
    program = with_exchange(settings, make_step(model, make_layout(1, data=2, fsdp=2)))
    state = program.create(0)
    given = {
        name: value + 1 for name, value in weights(program, program.current_state(state)).items()
    }
    after = with_weights(program, state, given)
    for name, value in given.items():
        part, leaf = name.split("/") if "/" in name else (None, name)
        for tree, form in ((after.params, (2, *value.shape)), (after.exchange["outer"], None)):
            found = np.asarray((tree if part is None else tree[part])[leaf].get_value())
            expected = value if form is None else np.broadcast_to(value, form)
            np.testing.assert_array_equal(found, expected, err_msg=name)
    assert jax.tree.map(lambda x: x.sharding, after) == jax.tree.map(lambda x: x.sharding, state)


@pytest.mark.parametrize(
    "settings",
    [
        Optimizer(average_decay=0.9, weight_decay=0.0),
        Optimizer(rule=ScheduleFree(), weight_decay=0.0),
    ],
    ids=["average", "schedule-free"],
)
def test_an_average_begins_anew_with_weights_that_are_set(settings):
    optimizer = make_optimizer(settings, lambda step: 0.1)

    def named(*values: float):
        return {"w": nnx.Param(jnp.array(values, jnp.float32), axes=("embed",))}

    def evaluated(state, params):
        return np.asarray(averaged_params(state, params)["w"].get_value())

    params = named(0.0, 1.0, 2.0, 3.0)
    state = optimizer.init(params)
    for value in (1.0, -2.0, 3.0):
        updates, state = optimizer.update(named(*[value] * 4), state, params)
        params = optax.apply_updates(params, updates)
    new = named(5.0, -1.0, 0.5, 2.0)
    assert np.abs(evaluated(state, params) - params["w"].get_value()).max() > 1e-3
    state = restart_averages(state, new)
    np.testing.assert_allclose(evaluated(state, new), new["w"].get_value(), rtol=1e-6)
    updates, state = optimizer.update(named(*[1.0] * 4), state, new)
    params = optax.apply_updates(new, updates)
    # The first update's result is the whole average: nothing of the weights before is in it.
    np.testing.assert_allclose(evaluated(state, params), params["w"].get_value(), rtol=1e-6)


@pytest.mark.parametrize("trainer", ["pipeline"], indirect=True)
def test_other_weights_are_refused_in_one_sentence(trainer):
    given = trainer.weights()
    given["layers/upp"] = given.pop("layers/up")
    given["norm_scale"] = given["norm_scale"].astype(np.float64)
    given["layers/down"] = given["layers/down"][:2]
    given["norm_bias"] = [0.0] * D
    before = trainer.weights()
    with pytest.raises(UserError) as error:
        trainer.set_weights(given)
    assert str(error.value) == (
        "Trainer.set_weights: the weights do not match this model; missing: layers/up; unknown: "
        "layers/upp (perhaps layers/up); of another form: "
        "layers/down (float32[2, 128, 32]; use float32[3, 128, 32]), "
        "norm_bias (a list; use float32[32]), norm_scale (float64[32]; use float32[32]); "
        "Trainer.weights() has the names, shapes and dtypes"
    )
    assert_close(trainer.weights(), before, 0.0)


@pytest.mark.parametrize("trainer", ["pipeline"], indirect=True)
def test_logits_of_documents_are_those_of_each_alone(trainer):
    halves = BATCH.inputs[:2, :16].reshape(4, 8)
    packed = Batch(
        inputs=BATCH.inputs[:2, :16],
        targets=BATCH.inputs[:2, :16],
        loss_mask=np.zeros((2, 16), np.float32),
        segment_ids=np.repeat(np.array([[1, 2]] * 2, np.int32), 8, axis=1),
        positions=np.tile(np.arange(8, dtype=np.int32), (2, 2)),
    )
    alone = trainer.logits(halves).reshape(2, 16, V)
    np.testing.assert_allclose(trainer.logits(packed), alone, rtol=1e-5, atol=1e-5)
    assert np.abs(trainer.logits(packed.inputs) - alone)[:, 8:].max() > 1e-2


@pytest.mark.parametrize("trainer", ["one device"], indirect=True)
def test_tokens_that_are_none_have_no_logits(trainer):
    for tokens, word in (
        ([[0, 256]], "Batch.inputs[0, 1] is 256; use 0 to 255 (GPT.vocab_size=256)"),
        ([[2**32]], "Batch.inputs[0, 0] is 4294967296"),
        ([[0.5]], "dtype float64"),
        ([1, 2], "the shape [2]"),
        (np.zeros((1, T + 1), np.int32), "use at most 32 (GPT.context_length)"),
    ):
        with pytest.raises(UserError) as error:
            trainer.logits(tokens)
        assert str(error.value).startswith("Trainer.logits: ")
        assert word in str(error.value)
