"""float16 on a mesh: one device's overflow skips the step on all; metrics tell the scale."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step, text_batch

from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.nn.precision import Precision
from jaxtrain.training.compiled_step import CompiledStep

MODEL = GPT(vocab_size=32, num_layers=2, embed_dim=16, num_heads=2, context_length=8)


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("zero", [3, 1])
def test_an_overflow_of_one_device_skips_the_step_on_all(zero):
    """Targets count in one device's rows alone: the others' gradients are zeros, at any scale."""
    batch = text_batch(rows=8, length=8, vocab_size=32)
    mask = np.zeros_like(batch.loss_mask)
    mask[-2:] = 1.0  # of the last of four that split the batch
    program = make_step(
        MODEL,
        make_layout(zero, fsdp=4, tensor=2),
        precision=Precision(compute="float16", loss_scale="dynamic"),
    )
    shardings = program.setup.batch_shardings(batch)
    placed = jax.device_put(dataclasses.replace(batch, loss_mask=mask), shardings)
    step, state = CompiledStep(program), program.create(seed=0)
    first = 2.0**20
    state = dataclasses.replace(
        state, loss_scale=jax.device_put(jnp.array([first, 3.0]), state.loss_scale.sharding)
    )

    def shards(state):
        kept = {"params": state.params, "opt_state": state.opt_state}
        arrays = jax.tree.leaves(kept)
        return [[np.asarray(part.data) for part in x.addressable_shards] for x in arrays]

    scales, skipped, tried = [], [], 0
    with program.setup.layout.active():
        while tried < 20 and (not skipped or skipped[-1]):
            before = shards(state)
            state, metrics = step(state, placed)
            tried += 1
            scales.append(float(metrics["loss_scale"]))
            skipped.append(bool(metrics["skipped"]))
            assert bool(np.isfinite(metrics["grad_norm"])) != skipped[-1]
            same = [
                all((a == b).all() for a, b in zip(old, new, strict=True))
                for old, new in zip(before, shards(state), strict=True)
            ]
            assert all(same) == skipped[-1], tried
            if not skipped[-1]:
                # Every device has moved, those too whose rows count nothing.
                moved = zip(before[0], shards(state)[0], strict=True)
                assert all((a != b).any() for a, b in moved)
    # Halved at each overflow, kept at the first good step; each step tells the scale it had.
    assert skipped.count(True) >= 2
    assert not skipped[-1]
    assert scales == [first / 2**number for number in range(len(scales))]
    assert np.asarray(state.loss_scale).tolist() == [scales[-1], 1.0]
    assert len({tuple(np.asarray(s.data)) for s in state.loss_scale.addressable_shards}) == 1
    assert int(state.step) == tried
