"""`attention(q, k, v, mask)`: dispatch to a kernel, for any layout.

Letters: B batch, T query length, S key length, N query heads, K kv heads, H head_dim.
"""

import dataclasses
import functools
from typing import Annotated

import jax
from jaxtyping import Array, Float

from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable
from jaxtrain.config.values import OneOf
from jaxtrain.nn.attention import context, patterns
from jaxtrain.nn.attention.context import KEYS, QUERIES, ContextParallel
from jaxtrain.nn.attention.kernel_registry import KERNELS, Request, Run, validate
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.remat import name_activation
from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.sharding import activation_spec, current_layout, on_each_device, shard


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention kernel, and context parallelism: attention of sequences sharded over the mesh.

    Attributes:
      kernel: 'auto' (the fastest one on the platform that supports what this run needs; a run and a
        plan report which, and why); 'reference' (plain einsums in float32, every mask, every
        dtype); 'xla' (jax.nn.dot_product_attention as XLA compiles it, every mask); 'blocked'
        (tiles that fit a CPU's cache, every mask and dtype); 'sparse' (computes only the scores of
        a model's attention_pattern); 'cudnn' (cuDNN's flash attention, NVIDIA GPUs, no
        segment ids); 'triton' (a Pallas kernel for NVIDIA GPUs that ships with JAX, with segment
        ids); 'tpu' (splash attention, a Pallas kernel that ships with JAX).
        If a named kernel does not support a run, that is an error: there is no fallback.
      context_parallel: what Mesh.context above 1 does: 'ring' sends keys and values around
        (kernels 'reference' and 'xla', computed block by block); 'ulysses'
        exchanges heads for whole sequences, with any kernel.
    """

    kernel: Annotated[str, OneOf(("auto", *KERNELS))] = "auto"
    context_parallel: ContextParallel = "ring"


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask: Mask,
    *,
    kernel: str = "reference",
    context_parallel: str = "ring",
) -> Float[Array, "B T N H"]:
    """softmax(q k / sqrt(H) + bias) v over the visible keys, softmax in float32, N a multiple of K.

    Before the bias, scores may be soft-capped, and the softmax may have a sink in addition to its
    keys: see `Mask`.

    Where the layout splits sequences, `context_parallel` selects the method, and the
    tokens must be ordered as `jaxtrain.nn.attention.context.along_context` orders them for it. The
    kernel is a concrete one: `training.layouts.resolve_kernel` resolves 'auto'.

    Raises:
      UserError: while tracing, if the kernel does not support this; all reasons in one message.
    """
    request = Request(
        platform=platform_of(jax.sharding.get_abstract_mesh()),
        dtype=q_BTNH.dtype.name,
        causal=mask.causal,
        window=mask.window,
        segment_ids=mask.segment_ids_BT is not None,
        cached=mask.query_start is not None,
        head_dim=q_BTNH.shape[-1],
        T=q_BTNH.shape[1] * context.split_before(),
        S=k_BSKH.shape[1] * context.split_before(),
        biased=mask.bias_CNTS is not None,
        capped=mask.softcap is not None,
        sinks=mask.sinks_N is not None,
        pattern=mask.pattern,
    )
    errors = list(validate(kernel, request))
    parts, layout = context.split(), current_layout()
    tensor = 1 if layout is None else layout.size(layout.activation(("heads",))[0])
    if KERNELS[kernel].by_pattern:
        errors += patterns.validate(
            mask.pattern,
            num_heads=q_BTNH.shape[2],
            parts=tensor * (parts if context_parallel == "ulysses" else 1),
        )
    if parts > 1:
        errors += context.validate(
            context_parallel,
            context=parts,
            length=request.T,
            tensor=tensor,
            num_heads=q_BTNH.shape[2],
            kernel=kernel,
            pattern=mask.pattern,
        )
    if errors:
        raise UserError("\n".join(errors))
    if parts > 1:
        assert mask.query_start is None, "a key-value cache is not split"
        if context_parallel == "ulysses":
            return context.ulysses(_run(kernel), q_BTNH, k_BSKH, v_BSKH, mask)
        # Imported here: most runs do not split sequences.
        from jaxtrain.nn.attention.ring import ring_attention

        return ring_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            mask,
            exact=kernel == "reference",
        )
    run = _run(kernel) if KERNELS[kernel].plain else functools.partial(by_device, _run(kernel))
    return run(q_BTNH, k_BSKH, v_BSKH, mask)


def _run(kernel: str) -> Run:
    """Wrap a kernel so that remat policies know its results by name; kernels other than plain ones
    name what they save themselves."""
    own = KERNELS[kernel]
    return (lambda *given: name_activation(own.run(*given), "attention")) if own.plain else own.run


def by_device(
    kernel: Run,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: Mask,
    *,
    of_one_too: bool = False,
) -> jax.Array:
    """Run a kernel without sharding support on each device's rows and heads.

    No communication: a device has the keys of all its rows, and the kv heads of its query heads.
    `of_one_too`: use `shard_map` on a mesh of one device too, which Pallas's interpreter needs.
    """
    queries, keys, layout = activation_spec(QUERIES), activation_spec(KEYS), current_layout()
    alone = layout is None or (layout.mesh.size == 1 and not of_one_too)
    if queries is None or alone:
        return kernel(q_BTNH, k_BSKH, v_BSKH, mask)
    run = on_each_device(kernel, (queries, keys, keys, context.specs(mask)), queries)
    mask = context.shard_mask(mask)
    return run(shard(q_BTNH, QUERIES), shard(k_BSKH, KEYS), shard(v_BSKH, KEYS), mask)
