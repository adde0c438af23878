"""RNN and GRU equal PyTorch's, with and without documents, and one device on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_torch import GRADIENTS, OUTPUTS, assert_same_step, filled, name_of, step_on
from conftest import make_layout, make_step, text_batch
from flax import nnx

from jaxtrain.models.recurrent.rnn import GRU, RNN
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.kv_cache import empty_cache
from jaxtrain.nn.transformer.language_model import hidden_states, logits
from jaxtrain.training.state import TrainState

SHAPES = {
    "rnn": RNN(vocab_size=64, num_layers=2, embed_dim=32, context_length=24),
    "gru": GRU(vocab_size=64, num_layers=2, embed_dim=32, context_length=24),
    "rnn_odd": RNN(vocab_size=61, num_layers=1, embed_dim=9, context_length=24),
    "gru_odd": GRU(vocab_size=61, num_layers=3, embed_dim=11, context_length=24),
    "gru_one": GRU(vocab_size=7, num_layers=1, embed_dim=1, context_length=24),
    "rnn_deep": RNN(vocab_size=17, num_layers=4, embed_dim=8, context_length=24),
}


def torch_twin(torch, sizes):
    """Their network, and its parameters under our paths."""
    kind = {"RNN": torch.nn.RNN, "GRU": torch.nn.GRU}[type(sizes).__name__]
    torch.manual_seed(0)
    D = sizes.embed_dim
    table = torch.nn.Embedding(sizes.vocab_size, D)
    layers = kind(D, D, sizes.num_layers, batch_first=True)
    output = torch.nn.Linear(D, sizes.vocab_size, bias=False)
    values = {"token_embedding": table.weight, "output": output.weight}
    stacked = {"input": "weight_ih", "recurrent": "weight_hh",
               "input_bias": "bias_ih", "recurrent_bias": "bias_hh"}  # fmt: skip
    for ours, theirs in stacked.items():
        values[f"layers/{ours}"] = [
            dict(layers.named_parameters())[f"{theirs}_l{i}"] for i in range(sizes.num_layers)
        ]

    def numpy(of):
        def one(path):
            value = values[path]
            if not isinstance(value, list):
                return of(value)
            return np.stack([of(v).T for v in value])

        return {path: one(path) for path in values}

    return (table, layers, output), numpy


def state_of(sizes, values):
    shapes = nnx.eval_shape(lambda: sizes.build(jax.random.key(0)))
    params = filled(nnx.state(shapes, nnx.Param), values)
    return TrainState(jnp.int32(0), params, (), nnx.State({}), jnp.array([1.0, 0.0]))


# The cases that are left run the same code.
@pytest.mark.slow_cases("rnn", "gru", "gru_one")
@pytest.mark.parametrize("name", SHAPES)
def test_loss_and_every_gradient_equal_torch(name):
    torch = pytest.importorskip("torch")
    sizes = SHAPES[name]
    (table, layers, output), numpy = torch_twin(torch, sizes)
    batch = text_batch(rows=4, length=13, vocab_size=sizes.vocab_size)
    state = state_of(sizes, numpy(lambda v: np.array(v.detach())))
    program = make_step(sizes, make_layout(fsdp=1))
    with program.setup.layout.active():
        found, metrics, _ = jax.jit(program.setup.gradients)(state, batch)
    total, tokens = 0.0, torch.tensor(batch.inputs).long()
    for row, ids in enumerate(batch.segment_ids):  # each document from a state of zeros
        for document in np.unique(ids):
            here = np.flatnonzero(ids == document)
            h, _ = layers(table(tokens[row : row + 1, here]))
            targets = torch.tensor(batch.targets[row, here]).long()
            losses = torch.nn.functional.cross_entropy(output(h)[0], targets, reduction="none")
            total = total + (losses * torch.tensor(batch.loss_mask[row, here])).sum()
    mean = total / float(batch.loss_mask.sum())
    mean.backward()
    np.testing.assert_allclose(metrics["loss"], float(mean.detach()), rtol=OUTPUTS)
    expected = numpy(lambda v: np.array(v.grad))
    for path, variable in nnx.to_flat_state(found):
        value = expected.pop(name_of(path))
        off = np.linalg.norm(np.asarray(variable.get_value()) - value)
        assert off <= GRADIENTS * np.linalg.norm(value), path
    assert not expected


@pytest.mark.parametrize("name", ["rnn", "gru"])
def test_logits_equal_torch_and_place_after_place_the_same(name):
    torch = pytest.importorskip("torch")
    sizes = SHAPES[name]
    (table, layers, output), numpy = torch_twin(torch, sizes)
    tokens = np.random.default_rng(0).integers(0, sizes.vocab_size, (2, 9)).astype(np.int32)
    with torch.no_grad():
        expected = output(layers(table(torch.tensor(tokens).long()))[0]).numpy()
    state = state_of(sizes, numpy(lambda v: np.array(v.detach())))
    structure = nnx.split(nnx.eval_shape(lambda: sizes.build(jax.random.key(0))))[0]
    model = nnx.merge(structure, state.params)
    cache = empty_cache(sizes.cached, layers=sizes.layers, rows=2, room=9, dtype=jnp.float32)
    found, execution = [], Execution(kernel="reference")
    run = jax.jit(
        lambda tokens, cache: hidden_states(model, tokens, tokens, Mask(), execution, cache)
    )
    for part in np.split(tokens, [4, 5], 1):
        h_BTD, cache, _ = run(part, cache)
        found.append(logits(model, h_BTD))
    np.testing.assert_allclose(np.concatenate(found, 1), expected, atol=OUTPUTS, rtol=OUTPUTS)


BATCH = text_batch(rows=16, length=8, vocab_size=61)


# Compiles two steps; test_lstm.py has meshes in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gru", {"fsdp": 8, "zero": 3}),
        ("gru", {"data": 2, "fsdp": 2, "tensor": 2, "zero": 2, "accumulation": 2}),
        ("rnn", {"data": 2, "fsdp": 4, "zero": 1}),
        ("rnn", {"data": 8}),
    ],
    ids=str,
)
def test_every_mesh_computes_the_same(name, layout):
    if name not in ALONE:
        ALONE[name] = step_on(SHAPES[name], BATCH)
    assert_same_step(step_on(SHAPES[name], BATCH, **layout), ALONE[name])


ALONE = {}
