"""Finds the processes of this run, and joins them into one JAX program."""

from jaxtrain.distributed.detection import detect
from jaxtrain.distributed.joining import devices_per_process, start

__all__ = ["detect", "devices_per_process", "start"]
