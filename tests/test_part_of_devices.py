"""Trainers on parts of the devices, side by side in one process."""

import jax
import numpy as np
import pytest

from jaxtrain import Trainer, load_config
from jaxtrain.config.errors import UserError

ONE = ["Mesh.data=1", "Mesh.fsdp=1", "Mesh.tensor=1"]


# Trains and evaluates on three meshes; which devices are refused is in the fast part.
@pytest.mark.slow
def test_one_device_and_four_train_side_by_side_as_eight_do(tiny_config, devices):
    """Each step is the same on every mesh: the losses are, and what is evaluated after them."""
    four = ["Mesh.data=1"]
    trainers = [
        Trainer(load_config(tiny_config)),
        Trainer(load_config(tiny_config, ONE), devices=devices[:1]),
        Trainer(load_config(tiny_config, four), devices=devices[4:]),
    ]
    losses = []
    for _ in range(3):  # in turns
        for trainer in trainers:
            trainer.train(steps=1)
            losses.append(trainer.history[-2]["loss"])
    np.testing.assert_allclose(losses, np.repeat(losses[::3], 3), rtol=1e-5)
    held = [{shard.device.id for x in jax.tree.leaves(t.state) for shard in x.addressable_shards}
            for t in trainers]  # fmt: skip
    assert held == [set(range(8)), {0}, {4, 5, 6, 7}]
    values = [trainer.evaluate()["eval_loss"] for trainer in trainers]
    np.testing.assert_allclose(values, values[0], rtol=1e-5)
    texts = {trainer.generate("def ", max_new_tokens=5, temperature=0) for trainer in trainers}
    assert len(texts) == 1


def test_the_product_of_the_axes_is_the_number_of_these_devices(tiny_config, devices):
    with pytest.raises(UserError, match=r"the product 8 does not equal the 2 devices there are"):
        Trainer(load_config(tiny_config), devices=devices[:2])


def test_a_choice_of_devices_that_is_none_is_refused(tiny_config, devices):
    config = load_config(tiny_config, ONE)
    with pytest.raises(UserError, match="give at least one device"):
        Trainer(config, devices=[])
    with pytest.raises(UserError, match=r"\[0, 1, 0\]is listed twice"):
        Trainer(config, devices=[devices[0], devices[1], devices[0]])
