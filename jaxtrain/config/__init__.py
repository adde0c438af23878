"""Where settings come from: .gin files, checked values, paths, buckets; errors with a way out."""

from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable

__all__ = ["UserError", "configurable"]
