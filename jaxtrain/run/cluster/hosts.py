"""Detects a host name that /etc/hosts maps to loopback, where other machines cannot connect."""

import socket
from collections.abc import Callable, Sequence

from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster.interface import Peers
from jaxtrain.run.cluster.wire import is_loopback


def resolve(host: str) -> list[str]:
    """Return the addresses of a host in the resolver's order; none if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


def validate_host_name(peers: Peers, resolve: Callable[[str], Sequence[str]] = resolve) -> None:
    """Check that this host's own name leads to an address that other machines reach.

    Gloo, which carries the collectives of CPU devices, listens at the first address of the name
    and announces it to the other processes. Debian's default /etc/hosts maps the name to 127.0.1.1.

    Args:
      peers: the processes of the run.
      resolve: gives the addresses of a host name.

    Raises:
      UserError: the name leads to loopback, and a process runs on another machine.
    """
    name, address = peers.hosts[peers.process_id], peers.address
    found = next(iter(resolve(name)), None)
    if is_loopback(address) or found is None or not is_loopback(found):
        return
    raise UserError(
        f"host {name} is {found} by its own /etc/hosts, where no other machine can connect; in "
        f"/etc/hosts of {name}, replace the line '{found} {name}' with: {address} {name}"
    )
