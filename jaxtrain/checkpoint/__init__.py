"""Checkpoints: sealed with digests, restored on any mesh, complete or absent whatever happens."""

from jaxtrain.checkpoint.leaves import StoredLeaf
from jaxtrain.checkpoint.manifest import CheckpointError
from jaxtrain.checkpoint.retention import FOLDER
from jaxtrain.checkpoint.settings import Checkpoint
from jaxtrain.checkpoint.store import Checkpoints

__all__ = ["FOLDER", "Checkpoint", "CheckpointError", "Checkpoints", "StoredLeaf"]
