"""A bit that differs between replicas, or between a step and its replay, is found and named."""

import dataclasses
import itertools
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import make_layout, make_step, text_batch

from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.corruption import (
    Corruption,
    CorruptionError,
    compare_replicas,
    differing_replicas,
    replay_step,
    replica_digests,
    replicated_fraction,
)
from jaxtrain.training.pipeline.schedules import Pipeline

MODEL = GPT(vocab_size=32, num_layers=2, embed_dim=16, num_heads=2, context_length=8)
BATCHES = [text_batch(rows=8, length=8, vocab_size=32, seed=seed) for seed in range(3)]
LAYOUTS = {
    "data8": {"data": 8},
    "zero0": {"fsdp": 4, "data": 2, "zero": 0},
    "zero1": {"fsdp": 4, "data": 2, "zero": 1},
    "zero2": {"fsdp": 8, "zero": 2},
    "zero3": {"fsdp": 4, "tensor": 2, "sequence_parallel": True},
    "pipe": {"pipe": 2, "data": 4},
}


@pytest.fixture(scope="module")
def trained():
    """Program, compiled step and the state after two steps, of each layout that is requested."""
    found = {}

    def get(name):
        if name not in found:
            layout = make_layout(**LAYOUTS[name])
            pipeline = Pipeline(microbatches=2) if name == "pipe" else Pipeline()
            program = make_step(MODEL, layout, pipeline=pipeline)
            step, state = CompiledStep(program), program.create(seed=0)
            batches = [jax.device_put(b, program.setup.batch_shardings(b)) for b in BATCHES]
            with layout.active():
                for batch in batches[:2]:
                    state, _ = step(state, batch)
            found[name] = program, step, state, batches[2]
        return found[name]

    return get


def flip_bit(x, *device_ids):
    """The array with the last bit of one element changed in these devices' copies alone."""

    def copy(shard):
        data = np.array(shard.data)
        if shard.device.id in device_ids:
            data.reshape(-1).view(np.uint8)[data.nbytes // 2 // 4 * 4] ^= 1
        return jax.device_put(data, shard.device)

    copies = [copy(shard) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, copies)


def with_parameter(state, name, change):
    """The state with the one parameter changed that has `name` in its name."""
    changed = []

    def one(path, x):
        if name in jax.tree_util.keystr(path, simple=True, separator="/"):
            changed.append(path)
            return change(x)
        return x

    params = jax.tree_util.tree_map_with_path(one, state.params)
    assert len(changed) == 1
    return dataclasses.replace(state, params=params)


def placed_copy(state):
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, state), may_alias=False)


@pytest.mark.slow_cases("data8", "pipe", "zero1", "zero3", "zero0")
@pytest.mark.parametrize("name", LAYOUTS)
def test_trained_replicas_are_equal_and_a_replayed_step_too(name, trained):
    program, step, state, batch = trained(name)
    before = step.on_arrays._cache_size()
    # What the loop's guard forbids there, it forbids here.
    with program.setup.layout.active(), jax.transfer_guard("disallow"):
        assert differing_replicas(state) == []
        compare_replicas(state, 2)
        expected, expected_metrics = step(placed_copy(state), batch)
        after, metrics = replay_step(step, placed_copy(state), batch, 3)
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    jax.tree.map(np.testing.assert_array_equal, metrics, expected_metrics)
    assert jax.tree.map(lambda x: x.sharding, after) == jax.tree.map(lambda x: x.sharding, state)
    assert step.on_arrays._cache_size() == before  # the run's own program, no other


def test_a_flipped_bit_of_one_replica_is_named(trained):
    _, _, state, _ = trained("data8")
    for device in (0, 5):
        altered = with_parameter(state, "token_embedding", lambda x, d=device: flip_bit(x, d))
        (found,) = differing_replicas(altered)
        assert (found.leaf, found.devices, found.majority) == (
            "params/token_embedding", (device,), True
        )  # fmt: skip
    with pytest.raises(CorruptionError) as error:
        compare_replicas(altered, 17)
    assert str(error.value) == (
        "step 17: replicas that should be identical differ: params/token_embedding on "
        "device 5 (alone against the majority); resume from a checkpoint of an earlier step "
        "without these devices"
    )


def test_every_array_of_the_state_is_looked_at(trained):
    _, _, state, _ = trained("data8")
    leaves, structure = jax.tree.flatten(state)
    for number, leaf in enumerate(leaves):
        altered = [*leaves[:number], flip_bit(leaf, 3), *leaves[number + 1 :]]
        (found,) = differing_replicas(structure.unflatten(altered))
        assert found.devices == (3,)


def test_two_replicas_of_a_shard_accuse_each_other_and_other_shards_nobody(trained):
    program, _, state, _ = trained("zero1")
    # The moments lie in four shards over fsdp, each on two devices along data.
    moments, structure = jax.tree.flatten(state.opt_state)
    place = next(i for i, x in enumerate(moments) if x.ndim == 2 and "fsdp" in x.sharding.spec)
    moments[place] = flip_bit(moments[place], 6)
    altered = dataclasses.replace(state, opt_state=structure.unflatten(moments))
    (found,) = differing_replicas(altered)
    shard = {s.device.id: s.index for s in moments[place].addressable_shards}
    twins = tuple(sorted(device for device, index in shard.items() if index == shard[6]))
    assert len(twins) == 2
    assert (found.devices, found.majority) == (twins, False)
    assert "one of them or more" in str(found)
    assert program.setup.layout.mesh.shape["data"] == 2


def test_what_one_device_holds_alone_cannot_be_compared(trained):
    _, _, state, _ = trained("zero3")
    leaf = max(jax.tree.leaves(state.params), key=lambda x: x.size)
    assert len(set(map(str, leaf.sharding.devices_indices_map(leaf.shape).values()))) == 8
    altered = jax.tree.map(lambda x: flip_bit(x, 1) if x is leaf else x, state)
    assert differing_replicas(altered) == []
    assert 0 < replicated_fraction(state) < 0.5
    assert replicated_fraction(trained("data8")[2]) == 1
    one = make_step(MODEL, make_layout()).abstract_state()
    assert replicated_fraction(one) == 0


def test_digests_are_each_devices_own(trained):
    _, _, state, _ = trained("zero3")
    digests = np.asarray(replica_digests(state))
    leaves = jax.tree.leaves(state)
    assert digests.shape == (8, len(leaves))
    for column, leaf in enumerate(leaves):
        by_device = {s.device.id: np.array(s.data) for s in leaf.addressable_shards}
        order = [by_device[device.id] for device in leaf.sharding.mesh.devices.flat]
        expected = [published(data) for data in order]
        np.testing.assert_array_equal(digests[:, column], expected)


def published(data):
    """The digest's formula in numpy."""
    bits = data.reshape(-1).view(np.uint32).astype(np.uint64)
    factors = (np.arange(bits.size, dtype=np.uint64) * 2654435769) % 2**32 | 1
    return int((bits * factors % 2**32).sum() % 2**32)


def test_a_step_whose_replay_differs_is_named(trained):
    program, step, state, batch = trained("zero0")
    calls = itertools.count()

    def faulty(state, batch):
        """The step, which on its second call has one device write one wrong bit."""
        after, metrics = step(state, batch)
        if next(calls) == 1:
            after = with_parameter(after, "position_embedding", lambda x: flip_bit(x, 2))
        return after, metrics

    with program.setup.layout.active(), pytest.raises(CorruptionError) as error:
        replay_step(faulty, placed_copy(state), batch, 3)
    assert str(error.value).startswith(
        "step 3 run twice from the same state and batch gave two results: "
        "params/position_embedding on device 2; a device computes incorrectly"
    )


def test_refusals():
    with pytest.raises(UserError, match="Corruption.replay_every=-1; use 0 or more"):
        Corruption(replay_every=-1)
    with pytest.raises(UserError, match="Corruption.compare_replicas_every=-2; use 0 or more"):
        Corruption(compare_replicas_every=-2)


TWO_PROCESSES = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtrain.training.corruption import CorruptionError, compare_replicas, replay_step

port, process = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
mesh = jax.make_mesh((2, 2), ("data", "fsdp"))
sharding = NamedSharding(mesh, P("fsdp"))
whole = np.arange(8, dtype=np.float32)
local = [
    jax.device_put(whole[index], device)
    for device, index in sharding.addressable_devices_indices_map((8,)).items()
]
state = {"w": jax.make_array_from_single_device_arrays((8,), sharding, local)}
step = jax.jit(lambda state, batch: ({"w": 2 * state["w"]}, {}), donate_argnums=0)
state, _ = replay_step(step, state, None, 1)
compare_replicas(state, 1)
copies = [shard.data for shard in state["w"].addressable_shards]
if process == 1:
    copies[0] = copies[0].at[0].add(1)
state = {"w": jax.make_array_from_single_device_arrays((8,), sharding, copies)}
try:
    compare_replicas(state, 2)
except CorruptionError as error:
    print("FOUND", error)
"""


def test_every_process_names_the_same_device():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, port, str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = []
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
            said += [line for line in output.splitlines() if line.startswith("FOUND")]
        assert len(said) == 2
        assert said[0] == said[1]
        assert "step 2: replicas that should be identical differ: w on devices" in said[0]
    finally:
        for process in processes:
            process.kill()
