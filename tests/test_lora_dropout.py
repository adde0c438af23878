"""LoRA's dropout: with the same draws steps are peft's, and any mesh drops the same.

Evaluation drops nothing.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step, text_batch
from parity import assert_equal, evaluate
from test_dora import LENGTH, RATE, ROWS, TOKENS, peer, trainer_of
from test_lora import MODELS, Begun

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.nn.dropout import Draws, dropout
from jaxtrain.training.finetune.finetune import Finetune, tuning_of
from jaxtrain.training.finetune.lora import number_of
from jaxtrain.training.optimizers.rules.elementwise import AdamW

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

RATE_OF_DROPOUT, STEPS = 0.3, 4
PARTS = {"q_proj": "layers/query", "o_proj": "layers/out", "down_proj": "layers/down"}


class Given(torch.nn.Module):
    """Multiplies by what it is given: what our dropout makes of ones."""

    def __init__(self, name, layer, shape):
        super().__init__()
        self.name, self.layer, self.shape, self.step = name, layer, shape, 0

    def forward(self, x):
        draws = Draws.of_step(0, jnp.int32(self.step), jnp.arange(ROWS))
        place = number_of(PARTS[self.name])
        made = dropout(jnp.ones(self.shape), RATE_OF_DROPOUT, draws, place, self.layer)
        return x * torch.tensor(np.array(made)).reshape(x.shape)


# Trains with PEFT; tests/test_lora.py has ten steps without dropout in the fast part.
@pytest.mark.slow
def test_steps_are_peft_s_with_the_same_draws(tmp_path):
    theirs = peer("llama", tmp_path, use_dora=False)
    ours = trainer_of(
        "llama",
        tmp_path,
        "Finetune.lora_magnitudes = False",
        f"Finetune.lora_dropout = {RATE_OF_DROPOUT}",
    )
    shapes = {"q_proj": (32,), "o_proj": (4, 8), "down_proj": (48,)}
    given = []
    for layer, block in enumerate(theirs.base_model.model.model.layers):
        for name in PARTS:
            module = getattr(block.mlp if name == "down_proj" else block.self_attn, name)
            one = Given(name, layer, (ROWS, LENGTH, *shapes[name]))
            module.lora_dropout["default"] = one
            given.append(one)
    rule = AdamW()
    optimizer = torch.optim.AdamW(
        [value for value in theirs.parameters() if value.requires_grad],
        RATE, (rule.b1, rule.b2), rule.epsilon, weight_decay=0.0,
    )  # fmt: skip
    inputs, targets = TOKENS[:, :-1].astype(np.int32), TOKENS[:, 1:].astype(np.int32)
    ones = np.ones((ROWS, LENGTH), np.int32)
    places = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    batch = Batch(inputs, targets, ones.astype(np.float32), ones, places)
    found, wanted = [], []
    theirs.train()
    for step in range(STEPS):
        for one in given:
            one.step = step
        found.append(float(ours.step(batch)["loss"]))
        optimizer.zero_grad()
        logits = theirs(torch.tensor(inputs).long()).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.tensor(targets).long().flatten()
        )
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    np.testing.assert_allclose(found, wanted, rtol=5e-5)
    # What is dropped is in training alone.
    for one in given:
        one.forward = lambda x: x
    with torch.no_grad():
        expected = theirs(torch.tensor(inputs).long()).logits
    np.testing.assert_allclose(ours.logits(inputs), expected, rtol=0, atol=3e-4)
    assert abs(found[0] - plain_loss(tmp_path, batch)) > 1e-3


def plain_loss(folder, batch):
    return float(
        trainer_of("llama", folder, "Finetune.lora_magnitudes = False").step(batch)["loss"]
    )


BATCH = text_batch(rows=8, length=16, vocab_size=48)


def program_on(layout, **changes):
    made = tuning_of(Finetune(lora_rank=4, lora_alpha=6.0, lora_dropout=0.3), MODELS["llama"].build)
    return make_step(MODELS["llama"], layout, tuning=Begun(**vars(made)), **changes)


@functools.cache
def one_device():
    return evaluate(program_on(make_layout()), BATCH)


# tests/test_vector_models.py has dropout on a mesh in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("collective_matmul", [False, True])
def test_any_mesh_and_accumulation_drop_the_same(collective_matmul):
    """On a mesh of every pair of the axes that adapters with dropout may have."""
    layout = make_layout(
        data=2, fsdp=2, tensor=2, sequence_parallel=True, collective_matmul=collective_matmul
    )
    assert_equal(evaluate(program_on(layout, accumulation=2), BATCH), one_device())


def test_what_cannot_drop_is_refused():
    for settings, reason in (
        ({"lora_dropout": 0.1}, "lora_dropout=0.1 with Finetune.lora_rank=None"),
        ({"lora_rank": 4, "lora_dropout": 1.0}, "lora_dropout=1.0; use 0 to below 1"),
        ({"lora_rank": 4, "lora_dropout": 0.1, "lora_magnitudes": True}, "lora_magnitudes=True"),
    ):
        with pytest.raises(UserError, match=reason):
            Finetune(**settings)
