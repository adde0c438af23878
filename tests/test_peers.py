"""The channel between real processes: meeting, losses, failures, and one tick to stop at."""

import pytest
from cluster import start_processes

# Meets the others, says so, and does what its variables say until it is stopped.
PROGRAM = """
import os, signal, sys, threading, time
from jaxtrain.channel import rendezvous
from jaxtrain.cluster import Cluster, ClusterError
from jaxtrain.errors import UserError
from jaxtrain.peers import Listeners

def say(*words):
    sys.stdout.write(" ".join(str(word) for word in words) + "\\n")

cluster = Cluster(
    kind="flags",
    coordinator=os.environ["COORDINATOR"],
    num_processes=int(os.environ["COUNT"]),
    process_id=int(os.environ["PROCESS"]),
    hosts={0: "node0", 1: "node1", 2: "node2"},
)
try:
    peers = rendezvous(
        cluster,
        {"jax": os.environ.get("VERSION", "0.12"), "config": "abc"},
        timeout_seconds=float(os.environ.get("TIMEOUT", "30")),
        report=lambda line: say("report", line),
        welcome={"attempt": 10 + cluster.process_id},
        heartbeat_seconds=0.2,
        silence_seconds=float(os.environ.get("SILENCE", "20")),
    )
except UserError as error:
    say("user error:", error)
    sys.exit(2)
except ClusterError as error:
    say("cluster error:", error)
    sys.exit(1)
over = threading.Event()

def lost(process, host, why, table):
    say("lost", process, host, why, "last seen", table[process].get("phase"))
    over.set()

def failed(process, host, reason):
    say("failed", process, reason)
    over.set()

peers.listen(
    Listeners(activity=lambda: {"phase": "step"}, on_lost=lost, on_failed=failed)
)
say("met", cluster.process_id, peers.welcome["attempt"], peers.jax_coordinator)
job = os.environ.get("JOB", "wait")
if job == "wait":
    seen = threading.Event()
    while not over.wait(0.05):
        rows = peers.table()
        if len(rows) == len(peers.hosts) and all("phase" in row for row in rows.values()):
            if not seen.is_set():
                say("table complete")
            seen.set()
    say("cause", peers.cause)
    os._exit(1)
if job == "fail":
    say("first cause", peers.failed("KeyError: 'x'"))
    os._exit(1)
if job == "goodbye":
    peers.goodbye(10)
    say("ended")
"""


def run(tmp_path, count=2, **options):
    return start_processes(count, PROGRAM, folder=tmp_path, **options)


@pytest.mark.parametrize("count", [2, 3])
def test_all_meet_hear_the_welcome_of_process_0_and_end_together(tmp_path, count):
    with run(tmp_path, count, environment={"JOB": "goodbye"}) as processes:
        met = [process.wait_for("met").split() for process in processes]
        assert [words[1] for words in met] == [str(number) for number in range(count)]
        assert {words[2] for words in met} == {"10"}
        assert len({words[3] for words in met}) == 1
        assert [process.end() for process in processes] == [0] * count
        assert all("ended" in process.log() for process in processes)
        assert all("lost" not in process.log() for process in processes)
