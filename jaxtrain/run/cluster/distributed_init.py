"""Initialization of jax.distributed once all processes of a run are connected.

JAX's client aborts a process (SIGABRT) about 0.1 s after its connection to process 0 breaks, before
the process can write a reason. Over a local relay, the connection stays open and only becomes
silent; the control channel then reports the lost process and ends this one. A host name that
/etc/hosts maps to loopback, where other machines cannot connect, is an error.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxtrain.config.errors import UserError, nearest_multiple
from jaxtrain.parallel.devices import offer_cpu_devices
from jaxtrain.run.cluster.cluster import (
    Cluster,
    ClusterError,
    Peers,
    Reporter,
    join_address,
    split_address,
)
from jaxtrain.run.cluster.wire import bind_host, is_free, is_loopback

_CHUNK = 1 << 16


class Relay:
    """TCP relay from a loopback port of this machine to one address.

    Attributes:
      port: the loopback port.
    """

    def __init__(self, host: str, port: int) -> None:
        """Start the daemon thread that relays to HOST:PORT."""
        self.port = 0
        self._target = (host, port)
        self._listening = threading.Event()
        threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="jaxtrain-relay", daemon=True
        ).start()
        self._listening.wait()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        async with server:
            await server.serve_forever()

    async def _carry(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """Relay one connection until the local side closes it, even if the remote side did."""
        with contextlib.closing(back):
            try:
                far, there = await asyncio.open_connection(*self._target)
            except OSError:
                # The server is not up yet: close the connection, so that the client retries.
                return
            answers = asyncio.create_task(_pass_on(far, back))
            with contextlib.closing(there):
                await _pass_on(near, there)
                # Do not relay that the remote side closed: this is the purpose of the relay.
                await _until_end(near)
            answers.cancel()


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(_CHUNK):
            sink.write(data)
            await sink.drain()


async def _until_end(source: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await source.read(_CHUNK):
            pass


def resolve(host: str) -> list[str]:
    """Return the addresses of a host in the resolver's order; empty if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


def validate_host_name(peers: Peers, resolve: Callable[[str], Sequence[str]] = resolve) -> None:
    """Validate that this host's name resolves to an address that other machines can reach.

    Gloo, which implements the collectives of CPU devices, listens at the first address of the name
    and sends it to the other processes. Debian's default /etc/hosts maps the name to 127.0.1.1.

    Args:
      peers: the processes of the run.
      resolve: returns the addresses of a host name.

    Raises:
      UserError: the name resolves to loopback, and a process runs on another machine.
    """
    name, address = peers.hosts[peers.process_id], peers.address
    found = next(iter(resolve(name)), None)
    if is_loopback(address) or found is None or not is_loopback(found):
        return
    raise UserError(
        f"host {name} is {found} by its own /etc/hosts, where no other machine can connect; in "
        f"/etc/hosts of {name}, replace the line '{found} {name}' with: {address} {name}"
    )


# JAX aborts a process without a callback when its heartbeats are late by the wall clock; setting
# that clock forward by days would abort all of them. Ten years, so that only the control channel,
# which uses a monotonic clock, decides which processes are lost.
_JAX_HEARTBEAT_SECONDS = 10 * 365 * 24 * 60 * 60
_JAX_SHUTDOWN_SECONDS = 10


def devices_per_process(simulated_devices: int, num_processes: int) -> int:
    """Return the number of simulated devices per process.

    Raises:
      UserError: the number of processes does not divide the number of devices.
    """
    if simulated_devices % num_processes:
        raise UserError(
            f"Mesh.simulated_devices={simulated_devices} does not divide over {num_processes} "
            f"processes; the nearest number is {nearest_multiple(simulated_devices, num_processes)}"
        )
    return simulated_devices // num_processes


def start(
    cluster: Cluster,
    peers: Peers,
    *,
    simulated_devices: int = 0,
    timeout_seconds: float = 300.0,
    report: Reporter = lambda line: None,
) -> None:
    """Initialize jax.distributed and the backend, with the devices of all processes.

    A single process needs neither: `mesh.simulate_devices` creates its simulated devices.

    Args:
      cluster: the cluster from `detect`.
      peers: the peers from the rendezvous of the same cluster.
      simulated_devices: the number of simulated CPU devices of the whole run; 0 uses the real ones.
      timeout_seconds: the time limit for the initialization of JAX; all processes are connected.
      report: called with a line on the detected cluster and its devices.

    Raises:
      UserError: the number of processes does not divide the simulated devices; JAX's port is in
        use; or this host's name resolves to loopback, where other machines cannot connect to CPU
        devices.
      ClusterError: the initialization of JAX failed.
    """
    report(cluster.found)
    assert peers.jax_coordinator is not None
    if simulated_devices:
        jax.config.update("jax_platforms", "cpu")
        count = devices_per_process(simulated_devices, cluster.num_processes)
        offer_cpu_devices(count)
    settings: Any = jax.config  # its attributes are created at run time
    if settings.jax_platforms == "cpu":
        validate_host_name(peers)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The C++ handler of this service would replace Python's handler of SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    host, port = split_address(peers.jax_coordinator)
    # Some versions of jaxlib crash with a segmentation fault if the port is in use.
    if cluster.process_id == 0 and not is_free(host, port):
        raise UserError(
            f"port {port} on this machine was just taken by another program; start again"
        )
    address = peers.jax_coordinator
    if cluster.process_id:
        address = join_address("127.0.0.1", Relay(host, port).port)
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            local_device_ids=cluster.local_device_ids,
            # Values that `detect` did not set are intended: all accelerators of this machine.
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeout_seconds),
            heartbeat_timeout_seconds=_JAX_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_JAX_SHUTDOWN_SECONDS,
            coordinator_bind_address=join_address(bind_host(host), port),
        )
        devices = jax.devices()
    except jax.errors.JaxRuntimeError as error:
        raise ClusterError(f"JAX could not join the processes: {error}") from error
    if devices[0].platform == "cpu":  # without a setting
        validate_host_name(peers)
    here = jax.local_device_count()
    report(f"{len(devices)} {devices[0].device_kind} devices, {here} of them on this process")
