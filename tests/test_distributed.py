"""Processes of a run joined by jax.distributed: their devices, their signals, their losses."""

import socket

import pytest
from cluster import TOKEN, slurm_job, start_processes

from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster.distributed_init import Relay, devices_per_process


def test_simulated_devices_are_those_of_the_whole_run():
    assert devices_per_process(8, 2) == 4
    with pytest.raises(UserError, match=r"Mesh\.simulated_devices=8 does not divide over 3 .* 9"):
        devices_per_process(8, 3)


def test_a_relay_outlives_what_it_relays_to():
    with socket.create_server(("127.0.0.1", 0)) as far:
        relay = Relay("127.0.0.1", far.getsockname()[1])
        near = socket.create_connection(("127.0.0.1", relay.port))
        there, _ = far.accept()
    with near, there:
        near.sendall(b"question")
        assert there.recv(100) == b"question"
        there.sendall(b"answer")
        assert near.recv(100) == b"answer"
        there.close()
        near.sendall(b"are you there?")
        near.settimeout(0.3)
        with pytest.raises(TimeoutError):
            near.recv(100)
    # Nobody listens there any more: a new connection ends, so that its owner tries again.
    with socket.create_connection(("127.0.0.1", relay.port)) as again:
        assert again.recv(100) == b""


PROGRAM = """
import os, signal, sys, threading
from pathlib import Path
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtrain.run.cluster.detection import detect
from jaxtrain.run.cluster.distributed_init import start
from jaxtrain.run.cluster.cluster import Listeners
from jaxtrain.run.cluster.channel import rendezvous
from jaxtrain.run.cluster.authentication import RunToken

def say(*words):
    sys.stdout.write(" ".join(str(word) for word in words) + "\\n")

def stop(number, frame):
    peers.request_stop(signal.Signals(number).name)

def lost(process, host, why, table):
    say("lost", process)
    # Ten times as long as JAX takes to abort when its own connection breaks.
    threading.Event().wait(1)
    say("all said")
    os._exit(1)

cluster = detect(os.environ)
token = RunToken(os.environ, Path("/nowhere/token"))
peers = rendezvous(cluster, {"jax": jax.__version__}, token=token, timeout_seconds=30)
peers.listen(Listeners(on_lost=lost))
signal.signal(signal.SIGTERM, stop)
start(cluster, peers, simulated_devices=4, timeout_seconds=30, report=say)
mesh = jax.make_mesh((4,), ("data",))
with jax.set_mesh(mesh):
    add = jax.shard_map(lambda x: jax.lax.psum(x.sum(), "data"), in_specs=P("data"), out_specs=P())
    total = jax.jit(lambda: add(jax.reshard(jnp.arange(8), P("data"))))()
say("psum", int(total), jax.process_index(), jax.process_count(), jax.local_device_count())
tick = 0
while (reason := peers.tick(tick := tick + 1)) is None:
    threading.Event().wait(0.01)
say("stopped by", reason)
peers.goodbye()
say("ended")
"""


def two_tasks(tmp_path):
    """Two Slurm tasks on this machine."""
    job = slurm_job(2)
    job["environment"]["JAXTRAIN_TOKEN"] = TOKEN
    return start_processes(2, PROGRAM, folder=tmp_path, **job)


def test_two_slurm_tasks_join_and_sigterm_stays_with_the_program(tmp_path):
    with two_tasks(tmp_path) as processes:
        for number, process in enumerate(processes):
            process.wait_for(f"psum 28 {number} 2 2")
            assert f"Slurm: process {number} of 2, coordinator localhost:" in process.log()
            assert "4 cpu devices, 2 of them" in process.log()
        processes[1].handle.terminate()
        for process in processes:
            process.wait_for("stopped by SIGTERM")
            assert process.end() == 0, process.log()


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("victim", [0, 1])
def test_jax_leaves_time_to_say_who_was_lost(tmp_path, victim):
    with two_tasks(tmp_path) as processes:
        for process in processes:
            process.wait_for("psum 28")
        processes[victim].handle.kill()
        living = processes[1 - victim]
        living.wait_for(f"lost {victim}")
        living.wait_for("all said")
        assert living.end() == 1
