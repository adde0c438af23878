"""The processes of one run: they meet, notice each other's loss or failure, and stop together."""

from jaxtrain.peers.channel import rendezvous
from jaxtrain.peers.cluster import Cluster, ClusterError, Flags
from jaxtrain.peers.hub import Cause, Table
from jaxtrain.peers.interface import Alone, Listeners, Peers

__all__ = [
    "Alone",
    "Cause",
    "Cluster",
    "ClusterError",
    "Flags",
    "Listeners",
    "Peers",
    "Table",
    "rendezvous",
]
