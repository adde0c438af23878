"""Configuration: .gin files, validated values, paths, buckets, user errors."""

from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable

__all__ = ["UserError", "configurable"]
