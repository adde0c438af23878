"""The LSTM equals torch.nn.LSTM, keeps documents apart, and is the same on every mesh."""

import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_layout, make_step, text_batch
from flax import nnx
from parity import assert_equal, evaluate
from tiny_models import places, some_tokens

from jaxtrain import load_config
from jaxtrain.__main__ import main
from jaxtrain.analysis.planning.compiled.compiled import lower
from jaxtrain.analysis.planning.textbook.flops import count_flops
from jaxtrain.analysis.planning.textbook.profile import layer_profile
from jaxtrain.analysis.planning.textbook.sizes import lstm_parameters
from jaxtrain.analysis.planning.textbook.state_bytes import argument_bytes
from jaxtrain.config.errors import UserError
from jaxtrain.models.recurrent.rnn import LSTM
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.kv_cache import empty_cache
from jaxtrain.nn.remat import POLICIES
from jaxtrain.nn.transformer.language_model import hidden_states, logits
from jaxtrain.run.generation.decoding import Sampling, next_logits
from jaxtrain.run.generation.generate import generate
from jaxtrain.training import layouts
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.preflight import preflight
from jaxtrain.training.setup import parameter_shapes

V, D, L, T = 64, 32, 2, 16
SIZES = LSTM(vocab_size=V, num_layers=L, embed_dim=D, context_length=24)
BATCH = text_batch(rows=16, length=T, vocab_size=48)


@functools.cache
def split() -> tuple[Any, Any]:
    """Structure and parameters, drawn wide enough that gates open and close."""
    structure, params = nnx.split(SIZES.build(jax.random.key(0)), nnx.Param)
    rng = np.random.default_rng(0)
    return structure, jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape, np.float32)), params
    )


@jax.jit
def logits_and_gradients(params, tokens, targets, weights, segment_ids):  # noqa: ANN001, ANN201
    """Logits, and the gradients of the weighted sum of losses."""

    def loss(params):  # noqa: ANN001, ANN202
        model = nnx.merge(split()[0], params)
        mask = Mask(segment_ids_BT=segment_ids, segment_ids_BS=segment_ids)
        h_BTD, _, _ = hidden_states(model, tokens, places(*tokens.shape), mask, Execution())
        found = logits(model, h_BTD)
        losses = optax.softmax_cross_entropy_with_integer_labels(found, targets)
        return (weights * losses).sum(), found

    return jax.grad(loss, has_aux=True)(params)[::-1]


# -- the same as PyTorch --------------------------------------------------------------------------


def test_logits_and_gradients_equal_torch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    params = split()[1]
    ours = {name: np.asarray(params["layers"][name].get_value()) for name in params["layers"]}
    table, output = (np.asarray(params[n].get_value()) for n in ("token_embedding", "output"))
    cells, tokens = torch.nn.LSTM(D, D, L, batch_first=True), some_tokens(4, T)
    targets, weights = np.roll(tokens, 1), np.random.default_rng(1).random((4, T), np.float32)
    for i in range(L):
        values = {
            f"weight_ih_l{i}": ours["input"][i].T, f"weight_hh_l{i}": ours["recurrent"][i].T,
            f"bias_ih_l{i}": 0.25 * ours["gates_bias"][i],
            f"bias_hh_l{i}": 0.75 * ours["gates_bias"][i],
        }  # fmt: skip
        with torch.no_grad():
            for name, value in values.items():
                getattr(cells, name).copy_(torch.from_numpy(value.copy()))
    theirs = {"table": torch.tensor(table), "output": torch.tensor(output)}
    for leaf in theirs.values():
        leaf.requires_grad_()
    x = torch.nn.functional.embedding(torch.tensor(tokens, dtype=torch.long), theirs["table"])
    theirs_V = cells(x)[0] @ theirs["output"].T
    losses = torch.nn.functional.cross_entropy(
        theirs_V.flatten(0, 1),
        torch.tensor(targets, dtype=torch.long).flatten(),
        reduction="none",
    )
    (torch.tensor(weights).flatten() * losses).sum().backward()
    found, gradients = logits_and_gradients(params, tokens, targets, weights, None)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    expected = theirs_V.detach().numpy()
    assert expected.std() > 0.1
    close(found, expected)
    close(gradients["token_embedding"].get_value(), theirs["table"].grad.numpy())
    close(gradients["output"].get_value(), theirs["output"].grad.numpy())
    names = {"input": "weight_ih_l", "recurrent": "weight_hh_l", "gates_bias": "bias_hh_l"}
    for name, their in names.items():
        grads = [getattr(cells, f"{their}{i}").grad.numpy().T for i in range(L)]
        close(gradients["layers"][name].get_value(), np.stack(grads))


# -- documents and generation ---------------------------------------------------------------------


def test_packed_documents_do_not_see_each_other() -> None:
    params, lengths = split()[1], (7, 6, 3)
    tokens = some_tokens(1, sum(lengths))
    segment_ids = np.repeat(np.array([[1, 2, 0]], np.int32), lengths, axis=1)
    weights = (segment_ids > 0).astype(np.float32)
    found, gradients = logits_and_gradients(params, tokens, tokens, weights, segment_ids)
    first, second = slice(0, 7), slice(7, 13)
    parts = [
        logits_and_gradients(params, tokens[:, s], tokens[:, s], weights[:, s], None)
        for s in (first, second)
    ]
    for s, (alone, _) in zip((first, second), parts, strict=True):
        np.testing.assert_allclose(found[:, s], alone, rtol=1e-5, atol=1e-5)
    added = jax.tree.map(jnp.add, parts[0][1], parts[1][1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, added)


def test_a_state_carried_token_by_token_equals_the_whole_text() -> None:
    prompt, tokens, (structure, params) = 5, some_tokens(2, 9), split()
    zeros = np.zeros(tokens.shape, np.float32)
    expected, _ = logits_and_gradients(params, tokens, tokens, zeros, None)

    @jax.jit
    def after(tokens, cache):  # noqa: ANN001, ANN202
        model = nnx.merge(structure, params)
        padding = jnp.zeros(2, jnp.int32)
        found, cache = next_logits(model, tokens, cache, padding, Execution(), room=0, last=1)
        return found[:, 0], cache

    empty = empty_cache(SIZES.cached, layers=L, rows=2, room=0, dtype=jnp.dtype("bfloat16"))
    last, cache = after(tokens[:, :prompt], empty)
    found = [last]
    for place in range(prompt, 9):
        last, cache = after(tokens[:, place : place + 1], cache)
        found.append(last)
    assert int(cache.length) == 9
    np.testing.assert_allclose(
        np.stack(found, axis=1), expected[:, prompt - 1 :], rtol=1e-5, atol=1e-5
    )


# Gradients on a mesh are in the fast part, and tests/test_generate.py generates on one.
@pytest.mark.slow
def test_generation_on_a_mesh_equals_one_device() -> None:
    texts = []
    for layout in (make_layout(), make_layout(3, data=2, fsdp=4)):
        program = make_step(SIZES, layout)
        texts.append(
            generate(
                program.setup, SIZES, program.create(seed=0), [[3, 1, 4]], max_new_tokens=8,
                sampling=Sampling(top_k=10), seed=3,
            )[0].tokens
        )  # fmt: skip
    assert texts[0] == texts[1]


# Trains; gradients are in the fast part, and tests/test_generate.py generates.
@pytest.mark.slow
def test_it_trains_and_generates(tiny_config, tmp_path, capsys) -> None:
    text = tiny_config.read_text().replace("@GPT()", "@LSTM()").replace("GPT.", "LSTM.")
    text = text.replace("LSTM.num_heads = 4\n", "").replace("Mesh.tensor = 2\n", "")
    file = tmp_path / "lstm.gin"
    file.write_text(text.replace("Mesh.fsdp = 2", "Mesh.fsdp = 4"))
    run = str(tmp_path / "run")
    assert main(["train", str(file), "--workdir", run]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]
    assert losses[-1] < losses[0]
    capsys.readouterr()
    assert main(["generate", "--workdir", run, "--prompt", "def", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out.strip()


# -- on a mesh as on one device -------------------------------------------------------------------

# Mesh and other fields of Setup.
LAYOUTS = {
    "zero0": ({"fsdp": 8, "zero": 0}, {}),
    "zero1_full": ({"fsdp": 8, "zero": 1}, {"execution": Execution(remat=POLICIES["full"])}),
    "zero2_elementwise": (
        {"fsdp": 8, "zero": 2},
        {"execution": Execution(remat=POLICIES["elementwise"])},
    ),
    "zero3_unrolled": ({"fsdp": 8, "zero": 3}, {"execution": Execution(layers_per_iteration=0)}),
    "hsdp_dots": ({"data": 2, "fsdp": 4}, {"execution": Execution(remat=POLICIES["dots"])}),
    "pipe": ({"pipe": 2, "data": 2, "fsdp": 2}, {"pipeline": Pipeline(microbatches=2)}),
}


@functools.cache
def one_device() -> dict[str, Any]:
    return evaluate(make_step(SIZES, make_layout()), BATCH)


@pytest.mark.slow_cases("zero1_full", "zero0", "zero2_elementwise", "hsdp_dots", "zero3_unrolled")
@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_equal_one_device(name, capfd) -> None:
    expected = one_device()
    sizes, changes = LAYOUTS[name]
    capfd.readouterr()
    found = evaluate(make_step(SIZES, make_layout(**sizes), **changes), BATCH, expected)
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err
    assert_equal(found, expected)


def test_sixteen_bits_stay_near_float32() -> None:
    params, tokens = split()[1], some_tokens(2, T)
    none = np.zeros(tokens.shape, np.float32)
    exact, _ = logits_and_gradients(params, tokens, tokens, none, None)
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    found, _ = logits_and_gradients(halves, tokens, tokens, none, None)
    assert found.dtype == jnp.bfloat16
    error = np.asarray(found, np.float32) - exact
    relative = np.sqrt(np.square(error).mean() / np.square(exact).mean())
    # 8 bits; a layer rounds its gates' inputs, its output and the weights, and its state carries
    # what h was rounded to from place to place.
    assert 2.0**-10 < relative < 2.0**-9 * 8


# -- what is planned ------------------------------------------------------------------------------


def test_it_has_the_parameters_of_the_closed_form() -> None:
    """The medium model of arXiv 1409.2329 has "20m" in table 3 of arXiv 1508.06615."""
    for model in (LSTM(), SIZES):
        closed_form = lstm_parameters(V=model.vocab_size, L=model.num_layers, D=model.embed_dim)
        shapes = jax.tree.leaves(parameter_shapes(model.build))
        assert closed_form == sum(math.prod(leaf.shape) for leaf in shapes)
    assert lstm_parameters(V=10000, L=2, D=650) == pytest.approx(20e6, rel=0.02)


def test_a_step_has_the_products_of_the_closed_form_exactly() -> None:
    program = make_step(SIZES, make_layout(data=1))
    with program.setup.layout.active():
        jaxpr = jax.make_jaxpr(program.train_step)(program.abstract_state(), BATCH)
    flops = count_flops(jaxpr)
    assert SIZES.matmul_parameters() == 8 * L * D**2 + V * D
    assert flops.matmul == SIZES.flops_per_token(T) * BATCH.inputs.size
    assert (flops.unknown_loops, flops.opaque) == ((), ())


@functools.cache
def config(*bindings: str) -> Any:
    small = (f"LSTM.embed_dim = {D}", f"TextData.sequence_length = {T}")
    return load_config("lstm_quickstart", [*small, *bindings])


def test_arguments_are_those_of_the_compiled_step_to_the_byte() -> None:
    layout = layouts.layout(config(), jax.devices())
    stats: Any = lower(config(), layout).compile().memory_analysis()
    # The compiled step has no place for what it does not read: the order is in the recurrence.
    positions = 4 * T * config().train.global_batch_size // 8
    assert argument_bytes(config(), layout).total - positions == stats.argument_size_in_bytes


def test_a_layer_keeps_its_input_four_gates_its_cell_and_its_output() -> None:
    layout = layouts.abstract_layout(config(), 8)
    found = layer_profile(config(), layout, "cpu")
    assert found.stream == 4 * T * D
    # And whether each place goes on, 1 byte, and the state before the first.
    assert 0 <= found.kept_bytes - 4 * T * 7 * D <= T + 2 * 4 * D


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        (
            ("Mesh.tensor = 2", "Mesh.data = 1"),
            "Mesh.tensor=2: LSTM has no dimension that this axis",
        ),
        (
            ("Mesh.context = 2", "Mesh.data = 1"),
            "Mesh.context=2: LSTM has no dimension that this axis",
        ),
        (
            ("Mesh.expert = 2", "Mesh.data = 1"),
            "Mesh.expert=2: LSTM has no dimension that this axis",
        ),
        (("Attention.kernel = 'xla'",), "Attention.kernel='xla' has no effect for LSTM; leave it"),
        (("Precision.matmul = 'float8'",), "Precision.matmul='float8' for LSTM: the matmul at"),
        (("TextData.sequence_length = 512",), "is longer than LSTM.context_length=256"),
    ],
)
def test_what_it_cannot_use_is_refused(bindings: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as error:
        preflight.check(
            load_config("lstm_quickstart", list(bindings)), device_count=8, platform="cpu"
        )
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) == 1
