"""Names of hosts that lead to loopback, and what JAX is told about lost processes."""

from types import SimpleNamespace

import jax
import pytest
from cluster import free_ports

from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster.channel import _address_here
from jaxtrain.run.cluster.cluster import Cluster, OneProcess
from jaxtrain.run.cluster.distributed_init import resolve, start, validate_host_name

HOSTS = {"node1": ["127.0.1.1"], "node2": ["10.0.0.2", "127.0.1.1"], "node3": []}


def peers(process, address="10.0.0.1"):
    return SimpleNamespace(
        hosts={0: "node1", 1: "node2", 2: "node3"}, process_id=process, address=address
    )


def test_debian_s_own_line_is_rejected_with_the_one_to_write():
    with pytest.raises(UserError) as caught:
        validate_host_name(peers(0), HOSTS.__getitem__)
    assert str(caught.value) == (
        "host node1 is 127.0.1.1 by its own /etc/hosts, where no other machine can connect; in "
        "/etc/hosts of node1, replace the line '127.0.1.1 node1' with: 10.0.0.1 node1"
    )


@pytest.mark.parametrize(
    ("process", "address"),
    [(1, "10.0.0.2"), (2, "10.0.0.3"), (0, "127.0.0.1")],
    ids=["its own address comes first", "an unknown name", "all processes are here"],
)
def test_other_names_pass(process, address):
    validate_host_name(peers(process, address), HOSTS.__getitem__)


def test_localhost_resolves_to_loopback():
    assert {"127.0.0.1", "::1"} & set(resolve("localhost"))
    assert resolve("no-such-host.invalid") == []


def link(*address):
    return SimpleNamespace(socket=SimpleNamespace(getsockname=lambda: address))


def test_the_address_is_that_of_a_connection_to_another_machine():
    here, there = link("::ffff:127.0.0.1", 1, 0, 0), link("::ffff:10.0.0.1", 2, 0, 0)
    assert _address_here([here, there]) == "10.0.0.1"
    assert _address_here([link("10.0.0.2", 1)]) == "10.0.0.2"
    assert _address_here([here]) == "127.0.0.1"


def test_no_clock_that_is_set_forward_ends_jax_s_processes(monkeypatch):
    """JAX measures its heartbeats by the wall clock: 3 days must not be too late."""
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **words: given.update(words))
    names = ("jax_cpu_collectives_implementation", "jax_enable_preemption_service")
    before = {name: getattr(jax.config, name) for name in names}
    address = f"127.0.0.1:{free_ports()}"
    together = OneProcess()
    together.num_processes, together.jax_coordinator = 2, address
    try:
        start(Cluster(kind="flags", coordinator=address, num_processes=2), together)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert given["heartbeat_timeout_seconds"] > 365 * 24 * 3600
    assert given["num_processes"] == 2
