"""A training loop of your own: init, train step and eval step, own steps' metrics, tensors."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
from conftest import text_batch

from jaxtrain import Batch, Trainer, load_config
from jaxtrain.config.errors import UserError

OWN = text_batch(rows=8, length=32, vocab_size=256)


def tensors(batch: Batch, **dtypes) -> Batch:
    """The batch as PyTorch's: int64 tokens, as its loaders give them."""
    fields = {name: getattr(batch, name) for name in vars(batch)}
    made = {name: torch.from_numpy(x) for name, x in fields.items() if x is not None}
    made = {name: x if x.is_floating_point() else x.long() for name, x in made.items()}
    return dataclasses.replace(batch, **made)


def make(config, *bindings, workdir=None) -> Trainer:
    return Trainer(load_config(config, ["Train.log_every = 2", *bindings]), workdir)


def test_a_loop_of_functions_takes_the_steps_of_a_trainer(tiny_config):
    stepped, looped = make(tiny_config), make(tiny_config)
    expected = [float(stepped.step(OWN)["loss"]) for _ in range(3)]
    state = looped.functions.init(seed=stepped.config.train.seed)
    found = []
    for _ in range(3):
        state, metrics = looped.functions.train_step(state, OWN)
        found.append(float(metrics["loss"]))
    assert found == expected
    assert found[-1] < found[0]
    values = looped.functions.eval_step(state, OWN)
    assert values["eval_loss"] == stepped.evaluate([OWN])["eval_loss"]
    looped.state = state
    assert looped.steps_done == 3
    for name, array in stepped.weights().items():
        np.testing.assert_array_equal(looped.weights()[name], array)


def test_the_pure_functions_run_where_the_layout_is_active(tiny_config):
    trainer = make(tiny_config)
    program = trainer.program
    batch = jax.device_put(OWN, program.setup.batch_shardings(OWN))
    for function in (program.train_step, jax.jit(program.train_step)):
        with pytest.raises(UserError, match=r"use trainer\.functions\.train_step\(state, batch\)"):
            function(trainer.state, batch)
    with trainer.layout.active():
        _, metrics, _ = jax.jit(program.train_step)(trainer.state, batch)
    assert float(metrics["loss"]) == pytest.approx(float(trainer.step(OWN)["loss"]), rel=1e-6)


def test_own_steps_are_lines_of_the_history(tiny_config):
    trainer = make(tiny_config)
    losses = [float(trainer.step(OWN)["loss"]) for _ in range(5)]
    lines = [line for line in trainer.history if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 4]
    assert [line["loss"] for line in lines] == [losses[0], losses[1], losses[3]]
    assert all(line["tokens_per_second"] > 0 for line in lines)
    trainer.train(steps=1)
    assert [line["step"] for line in trainer.history if "loss" in line] == [1, 2, 4, 6]


def test_own_steps_are_lines_of_the_file(tiny_config, tmp_path):
    trainer = make(tiny_config, workdir=str(tmp_path / "run"))
    spoiled = dataclasses.replace(OWN, loss_mask=np.zeros_like(OWN.loss_mask))
    trainer.step(OWN)
    trainer.step(spoiled)  # nothing counts, and nothing ends
    trainer.close()
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [1, 2]


def test_tensors_are_taken_as_arrays_are(tiny_config):
    of_arrays, of_tensors = make(tiny_config), make(tiny_config)
    own = tensors(OWN)
    assert float(of_arrays.step(OWN)["loss"]) == float(of_tensors.step(own)["loss"])
    assert of_arrays.evaluate([OWN]) == of_tensors.evaluate([own])
    np.testing.assert_array_equal(of_arrays.logits(OWN), of_tensors.logits(own))
    gradients = of_tensors.gradients(own)
    for name, array in of_arrays.gradients(OWN).items():
        np.testing.assert_array_equal(gradients[name], array)


def test_a_tensor_may_be_changed_once_it_was_given(tiny_config):
    trainer, own = make(tiny_config), tensors(OWN)
    expected = float(make(tiny_config).step(OWN)["loss"])
    metrics = trainer.step(own)
    own.inputs.zero_()
    own.targets.zero_()
    assert float(metrics["loss"]) == expected


def test_a_tensor_that_numpy_cannot_read_is_refused(tiny_config):
    own = tensors(OWN)
    graded = dataclasses.replace(own, loss_mask=own.loss_mask.clone().requires_grad_())
    with pytest.raises(UserError, match=r"Batch\.loss_mask is a Tensor that NumPy cannot read"):
        make(tiny_config).step(graded)
    halves = dataclasses.replace(own, loss_mask=own.loss_mask.bfloat16())
    with pytest.raises(UserError, match=r"x\.detach\(\)\.float\(\)\.cpu\(\)"):
        make(tiny_config).step(halves)
