"""The host stays a few programs ahead of the devices: simulated ones wait for each other else."""

import contextlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import Trainer, load_config
from jaxtrain.data.loader import batches
from jaxtrain.run.metrics.log import RUN_AHEAD_STEPS
from jaxtrain.training.compiled_step import RUN_AHEAD_PROGRAMS, RunAhead

# Of a device that XLA's CPU client lets be unfinished before it waits, holding a thread.
XLA_S_LIMIT = 32


class Unfinished:
    """A program, noting how many of its results were unfinished whenever it was called.

    The second takes a device about a second, since the first one of an evaluation is waited for.
    The next wait for its result, so that a slow host, as on a busy machine, gets as far ahead as
    it may.
    """

    def __init__(self, mesh):
        self.results, self.counts = [], []

        # Each device for itself, the first alone with work: no collectives.
        @jax.shard_map(mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        def repeat(x, turns):
            is_first = jnp.array([jax.lax.axis_index(axis) == 0 for axis in mesh.axis_names]).all()
            turns = jnp.where(is_first, turns, 1)
            return jax.lax.fori_loop(0, turns, lambda _, y: jnp.sin(y) + 1.0, x)

        # Compiled once, also where the first sums are not on the mesh yet.
        self.program = jax.jit(
            lambda sums, turns: jax.tree.map(lambda x: repeat(x, turns), sums),
            in_shardings=(jax.NamedSharding(mesh, jax.P()), None),
        )

    def __call__(self, sums):
        result = self.program(sums, 50_000_000 if len(self.counts) == 1 else 1)
        self.results.append(jax.tree.leaves(result)[0])
        self.counts.append(sum(not one.is_ready() for one in self.results))
        return result


def one(mesh):
    """A number on each of a mesh's devices: programs on one device alone may be run at once."""
    return jax.device_put(jnp.ones(()), jax.NamedSharding(mesh, jax.P()))


def test_the_host_waits_for_the_program_a_few_before(devices):
    mesh = jax.sharding.Mesh(devices, "x")
    ahead, program, number = RunAhead(), Unfinished(mesh), one(mesh)
    for _ in range(3 * RUN_AHEAD_PROGRAMS):
        number = program(number)
        ahead.add(number)
    # It waits no more than it has to: the devices always have some.
    assert max(program.counts) == RUN_AHEAD_PROGRAMS + 1 < XLA_S_LIMIT // 2


def test_evaluations_and_steps_in_a_row_do_not_run_away_from_the_devices(tiny_config):
    bindings = ["Train.eval_batches = 40", "TextData.source = 'embedded'"]
    trainer = Trainer(load_config(tiny_config, bindings))
    program = Unfinished(trainer.mesh)
    trainer._evaluation._eval_step = lambda state, batch, sums: program(sums)
    trainer.evaluate()
    assert len(program.counts) > XLA_S_LIMIT
    assert max(program.counts) == RUN_AHEAD_PROGRAMS + 1

    program, losses = Unfinished(trainer.mesh), [one(trainer.mesh)]

    def step(arrays, batch):
        losses.append(program(losses[-1]))
        return arrays, {"loss": losses[-1]}

    trainer._stepper.train_step = step
    batch = next(batches(trainer.dataset.train, global_batch_size=8, seed=0, threads=0))
    for _ in range(XLA_S_LIMIT + 1):
        trainer.step(batch)
    assert max(program.counts) == RUN_AHEAD_STEPS + 1


# Trains; test_optimizer.py has the average on eight devices in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_averaged_parameters_lie_as_the_parameters_do(tiny_config, zero):
    bindings = ["Optimizer.average_decay = 0.9", f"Sharding.zero = {zero}", "Train.eval_batches=1"]
    trainer = Trainer(load_config(tiny_config, bindings))
    trainer.train(steps=2)
    params = trainer.program.eval_state(trainer.state).params
    wanted = trainer.program.abstract_state().params
    assert jax.tree.map(lambda x: x.sharding, params) == jax.tree.map(lambda x: x.sharding, wanted)
    differ = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, trainer.state.params)
    assert max(jax.tree.leaves(differ)) > 0  # not the parameters themselves


# Steps and evaluations of many batches, none waited for by hand. With its own timeout XLA ends the
# process after a minute in which a collective waits for a device.
RUN = """
import sys
import jax
from jaxtrain.parallel.devices import simulate_devices
mesh, file = sys.argv[1:]
sizes = {axis: int(size) for axis, size in (part.split("=") for part in mesh.split())}
count = 1
for size in sizes.values():
    count *= size
simulate_devices(count)
from jaxtrain import Trainer, load_config
from jaxtrain.data.loader import batches
axes = {axis: 1 for axis in ("data", "fsdp", "tensor")} | sizes
bindings = [f"Mesh.{axis} = {size}" for axis, size in axes.items()]
trainer = Trainer(load_config(file, bindings))
batch = next(batches(trainer.dataset.train, global_batch_size=8, seed=0, threads=0))
for _ in range(3):
    for _ in range(150):
        trainer.step(batch)
    trainer.evaluate()
"""
MESHES = ["data=2 fsdp=2", "fsdp=2 tensor=2", "data=2 fsdp=2 tensor=2", "data=2 pipe=2"]


@contextlib.contextmanager
def busy_processors():
    """A process beside, for each processor, that never rests."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.chaos
@pytest.mark.parametrize("mesh", MESHES)
def test_no_device_waits_for_ever_on_busy_processors(mesh, tiny_config):
    """Five processes on each mesh; without a limit to how far the host runs ahead, most of them
    end in an evaluation."""
    extra = "Optimizer.average_decay = 0.9\nTextData.source = 'embedded'\nTrain.eval_batches = 60\n"
    file = tiny_config.with_name("ahead.gin")
    file.write_text(f"include {str(tiny_config)!r}\n{extra}")
    aborts = "--xla_cpu_collective_call_terminate_timeout_seconds=40"
    kept = {**os.environ, "XLA_FLAGS": aborts}
    with busy_processors():
        for number in range(5):
            done = subprocess.run(
                [sys.executable, "-c", RUN, mesh, str(file)], env=kept, capture_output=True
            )
            assert done.returncode == 0, (number, done.stderr.decode()[-2000:])
