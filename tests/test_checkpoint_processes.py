"""Several processes write one checkpoint, and agree on which is there and which is good."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.settings import Checkpoint

TWO_PROCESSES = """
import resource, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address, process, workdir = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
jax.distributed.initialize(address, num_processes=2, process_id=process)
from jaxtrain.run.checkpoint import sealing
from jaxtrain.training.settings import Checkpoint
from jaxtrain.run.checkpoint.manifest import CheckpointError
from jaxtrain.run.checkpoint.store import Checkpoints
sealing._AGREE_SECONDS = 2
want = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
def place(*spec):
    sharding = NamedSharding(jax.make_mesh((2, 2), ("fsdp", "tensor")), P(*spec))
    return jax.make_array_from_callback(want.shape, sharding, lambda index: want[index])
lines = []
checkpoints = Checkpoints(workdir, Checkpoint(keep=1), report=lines.append)
for step in (1, 2):
    checkpoints.save(step, {"x": place("fsdp", "tensor")}, {"step": step})
checkpoints.wait()
assert checkpoints.steps() == [2], checkpoints.steps()
other = place("tensor").sharding
like = {"x": jax.ShapeDtypeStruct(want.shape, want.dtype, sharding=other)}
restored = checkpoints.restore(2, like)["x"]
assert restored.sharding == other
for shard in restored.addressable_shards:
    np.testing.assert_array_equal(shard.data, want[shard.index])
assert lines == [], lines

# One process cannot write its part: for both, the step is not there, and the next one is.
def fails(step):
    checkpoints.save(step, {"x": place("fsdp", "tensor")}, {})
    try:
        checkpoints.wait()
        raise SystemExit("process 1 wrote what it could not write")
    except CheckpointError as error:
        assert f"step {step} could not be written" in str(error), error
    assert checkpoints.steps() == [2], checkpoints.steps()
if process == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
fails(3)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
# The same, told only after Orbax has written and renamed everything.
if process == 1:
    follow = checkpoints._sealer.follow
    def late(step, written, leaves):
        def failing():
            written()
            raise OSError("a network file system says no in the end")
        follow(step, failing, leaves)
    checkpoints._sealer.follow = late
fails(4)
# On a busy machine the other process may still write where remains are removed: the next save does.
said = [line for line in lines if "the remains of a save could not be removed" not in line]
assert "step 3" in said[0] and "step 4" in said[1], lines
checkpoints = Checkpoints(workdir, Checkpoint(keep=2), report=lines.append)
checkpoints.save(5, {"x": place("fsdp", "tensor")}, {"step": 5})
checkpoints.wait()
assert checkpoints.steps() == [2, 5], checkpoints.steps()

# A damaged file is found by the process whose share it is: both resume from the step before.
if process == 0:
    file = max((workdir / "checkpoints/5").rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
lines.clear()
checkpoints = Checkpoints(workdir, Checkpoint(keep=2), report=lines.append)
assert checkpoints.newest_good() == 2
assert "step 5" in lines[0], lines
assert checkpoints.restore(2, like)["x"].sharding == other
checkpoints.close()
"""


def test_two_processes_agree_on_what_is_written_and_what_is_good(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, address, str(index), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": path},
        )
        for index in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    names = {entry.name for entry in (tmp_path / "checkpoints").iterdir()}
    assert names == {"2", "damaged-5"}
    want = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    checkpoints = Checkpoints(tmp_path, Checkpoint(), read_only=True)
    like = jax.ShapeDtypeStruct(want.shape, want.dtype, sharding=jnp.zeros(1).sharding)
    np.testing.assert_array_equal(checkpoints.restore(2, {"x": like})["x"], want)
    assert checkpoints.extra(2) == {"step": 2}
