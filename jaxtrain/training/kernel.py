"""Attention kernel of a configuration: its request to `nn.attention.kernel_registry.choose`."""

import dataclasses
from typing import Any

from jaxtrain.models.model import reads_pairs, reads_tokens
from jaxtrain.nn.attention.kernel_registry import Choice, Request, choose
from jaxtrain.training.settings import Config


def resolve_kernel(config: Config, platform: str) -> Choice | None:
    """Return the attention kernel of a configuration on a platform, with 'auto' resolved; None for
    a model without attention.

    Args:
      config: the configuration; a Mesh.context of -1 is treated as splitting sequences.
      platform: 'cpu', 'gpu', `kernel_registry.OLD_GPU` or 'tpu': of the target devices.
    """
    request = kernel_request(config, platform)
    if request is None:
        return None
    kernel = config.attention.kernel
    return choose(request) if kernel == "auto" else Choice(kernel, "as Attention.kernel says")


def kernel_request(config: Config, platform: str) -> Request | None:
    """Return the requirements of a configuration's model on an attention kernel; None without
    attention over text.

    For pairs it is the cross-attention: a kernel that supports that without a causal
    mask also supports self-attention.
    """
    model, batch = config.train.model, config.train.data.abstract_batch(1)
    attention = model.attention
    if not (reads_tokens(model) or reads_pairs(model)) or attention is None:
        return None
    length = batch.inputs.shape[1]
    return Request(
        platform=platform,
        dtype=config.precision.compute,
        causal=attention.causal,
        window=attention.window,
        segment_ids=batch.segment_ids is not None,
        cached=False,
        head_dim=attention.key_dim,
        T=length,
        S=length if batch.source is None else batch.source.shape[1],
        biased=attention.biased,
        capped=attention.softcap is not None,
        sinks=attention.sinks,
        pattern=attention.pattern,
        in_ring=config.mesh.context != 1 and config.attention.context_parallel == "ring",
    )


def resolve_config(config: Config, platform: str) -> Config:
    """Return the configuration with 'auto' replaced by the chosen kernel."""
    if config.attention.kernel != "auto":
        return config
    choice = resolve_kernel(config, platform)
    kernel: Any = "reference" if choice is None else choice.kernel
    return dataclasses.replace(
        config, attention=dataclasses.replace(config.attention, kernel=kernel)
    )
