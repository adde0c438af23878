"""Initialization of jax.distributed once all processes of a run are connected."""

from typing import Any

import jax

from jaxtrain.config.errors import UserError, nearest_multiple
from jaxtrain.parallel.devices import offer_cpu_devices
from jaxtrain.run.cluster.cluster import Cluster, ClusterError, Say
from jaxtrain.run.cluster.hosts import validate_host_name
from jaxtrain.run.cluster.interface import Peers
from jaxtrain.run.cluster.relay import Relay
from jaxtrain.run.cluster.wire import bind_host, is_free, join_address, split_address

# JAX ends a process without a word to us when its heartbeats are late, by the wall clock: a clock
# that is set forward by days would end them all. Years, so that only the channel between the
# processes, which measures by a monotonic clock, decides who is lost.
_JAX_HEARTBEAT_SECONDS = 10 * 365 * 24 * 60 * 60
_JAX_SHUTDOWN_SECONDS = 10


def devices_per_process(simulated_devices: int, num_processes: int) -> int:
    """How many of a run's simulated devices each process makes.

    Raises:
      UserError: they do not divide.
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
    report: Say = lambda line: None,
) -> None:
    """Joins the processes into one JAX program, whose devices are those of all; opens the backend.

    With one process nothing is started; simulated devices are then `mesh.simulate_devices`'s.

    Args:
      cluster: from `detect`.
      peers: from the rendezvous of the same cluster.
      simulated_devices: CPU devices of the whole run; 0: those that are there.
      timeout_seconds: how long JAX waits for the others, who were all there a moment ago.
      report: takes a line on what was found.

    Raises:
      UserError: the simulated devices do not divide over the processes; JAX's port is taken;
        this host's name leads to loopback, where CPU devices of other machines cannot connect.
      ClusterError: JAX did not get the processes together.
    """
    report(cluster.found)
    if cluster.num_processes == 1:
        return
    assert peers.jax_coordinator is not None
    if simulated_devices:
        jax.config.update("jax_platforms", "cpu")
        count = devices_per_process(simulated_devices, cluster.num_processes)
        offer_cpu_devices(count)
    settings: Any = jax.config  # whose attributes are made at run time
    if settings.jax_platforms == "cpu":
        validate_host_name(peers)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM away from Python: its C++ handler replaces the program's own.
    jax.config.update("jax_enable_preemption_service", False)
    host, port = split_address(peers.jax_coordinator)
    # A port that is taken ends some versions of jaxlib with a segmentation fault.
    if cluster.process_id == 0 and not is_free(host, port):
        raise UserError(
            f"port {port} on this machine was taken just now by another program; start again"
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
            # What `detect` left open is meant so: all accelerators of this machine.
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeout_seconds),
            heartbeat_timeout_seconds=_JAX_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_JAX_SHUTDOWN_SECONDS,
            coordinator_bind_address=join_address(bind_host(host), port),
        )
        devices = jax.devices()
    except jax.errors.JaxRuntimeError as error:
        raise ClusterError(f"JAX could not join the processes: {error}") from error
    if devices[0].platform == "cpu":  # which no setting had said
        validate_host_name(peers)
    here = jax.local_device_count()
    report(f"{len(devices)} {devices[0].device_kind} devices, {here} of them on this process")
