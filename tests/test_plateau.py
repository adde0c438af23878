"""A learning rate that falls on plateaus: PyTorch's, over a restart too, and what is rejected."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_layout, make_step, text_batch
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.rules.elementwise import SGD
from jaxtrain.training.optimizers.schedule import Schedule, on_plateau, rate_taken
from jaxtrain.training.settings import Checkpoint

# Falls, stays, falls a little (by less than a ten-thousandth), falls again, stays.
LOSSES = [5.0, 4.0, 3.0, 3.1, 3.0, 3.0, 2.9999, 3.0, 2.0, 2.1, 2.1, 2.1, 2.1, 2.1, 2.1, 1.9]
PLAIN = Optimizer(rule=SGD(momentum=0.0), weight_decay=0.0, clip_norm=None)


def torchs(patience: int) -> list[float]:
    """The rates that PyTorch has after each loss; it waits for more than `patience` of them."""
    torch = pytest.importorskip("torch")
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, factor=0.5, patience=patience - 1)
    rates = []
    for loss in LOSSES:
        plateau.step(loss)
        rates.append(sgd.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("window", [1, 3])
def test_rates_are_pytorchs(window):
    settings = Schedule(
        name="constant", plateau_patience=2, plateau_factor=0.5, plateau_window=window
    )
    schedule = optax.constant_schedule(1.0)
    optimizer: Any = make_optimizer(PLAIN, schedule, scaled=on_plateau(settings))
    params = nnx.State({"w": nnx.Param(jnp.zeros(3), axes=("vector",))})
    gradients, state = jax.tree.map(jnp.ones_like, params), optimizer.init(params)
    update = jax.jit(lambda state, value: optimizer.update(gradients, state, params, value=value))
    moved, rates = [], []
    for number, loss in enumerate(LOSSES):
        for one in (loss - 0.3, loss, loss + 0.3)[:window] if window > 1 else (loss,):
            before = state
            updates, state = update(state, jnp.float32(one))
        moved.append(-float(updates["w"].get_value()[0]))
        rates.append(float(rate_taken(schedule, before, state, jnp.array(number))))
    assert moved == rates == torchs(2)
    assert min(rates) < 0.3


def test_it_survives_a_restart(tmp_path):
    """Each step's loss is a plateau: what is known of them is in the checkpoint."""
    settings = Schedule(name="constant", plateau_patience=2, plateau_window=1)
    schedule = optax.constant_schedule(1e-9)  # the loss stays
    optimizer = make_optimizer(PLAIN, schedule, scaled=on_plateau(settings))
    model = GPT(vocab_size=32, num_layers=1, embed_dim=16, num_heads=4, context_length=8)
    program = make_step(model, make_layout(fsdp=2), optimizer=optimizer, schedule=schedule)
    batch = text_batch(rows=8, length=8, vocab_size=32)
    placed = jax.device_put(batch, program.setup.batch_shardings(batch))
    step, state, rates = CompiledStep(program), program.create(0), []
    checkpoints = Checkpoints(tmp_path, Checkpoint(asynchronous=False))
    with program.setup.layout.active():
        for number in range(6):
            if number == 4:  # one of two windows has passed since the last fall
                checkpoints.save(4, state, {})
                state = checkpoints.restore(4, program.abstract_state())
            state, metrics = step(state, placed)
            rates.append(float(metrics["learning_rate"]))
    checkpoints.close()
    np.testing.assert_allclose(rates, [1e-9, 1e-9, 5e-10, 5e-10, 2.5e-10, 2.5e-10], rtol=1e-6)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UserError, match="Schedule.plateau_factor=1.5; use above 0 and below 1"):
        Schedule(plateau_patience=2, plateau_factor=1.5)
    with pytest.raises(
        UserError, match="plateau_window=7 has no effect with Schedule.plateau_pati"
    ):
        Schedule(plateau_window=7)
