"""Where a step's time goes: a trace of a few steps, read as layers and operations."""

from jaxtrain.profiling.recorder import Recorder

__all__ = ["Recorder"]
