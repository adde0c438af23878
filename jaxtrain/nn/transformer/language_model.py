"""Interfaces of language models (embed, run layers, finish, compute logits) and encoder-decoders.

Letters: B batch, S source length, T length, D embed, V vocab.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.attention.mask import Mask, apply_softcap
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.kv_cache import Cache, LayerCache
from jaxtrain.nn.layers import add_bias
from jaxtrain.nn.matmul.contract import contract
from jaxtrain.nn.parameters import role_of
from jaxtrain.parallel.gathering import GradientSlice, reduce_first

# Sums over the rows of a batch, each a float32 scalar, that layers return with their activations:
# their means over documents' tokens become metrics. "auxiliary_loss" is added to the loss;
# EXPERT_LOAD is not a metric but an array [L, E] that updates router biases.
Auxiliary = dict[str, jax.Array]
EXPERT_LOAD = "expert_load"


class Transformer(Protocol):
    """A language model in parts for the layer loop, pipelines and generation.

    Attributes:
      layers: the stacked layers' parameters, from `jaxtrain.nn.parameters.stack`.
    """

    layers: Any

    @property
    def leading(self) -> Sequence[Callable[..., tuple[jax.Array, LayerCache | None, Auxiliary]]]:
        """Layers that precede those and differ from them, each a call like `run_layer` with its
        own parameters; they return no sums. Empty in most models: ()."""
        ...

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Return the residual stream [B, T, D] that goes into the first layer."""
        ...

    def run_layer(
        self,
        layer: Any,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
        cache: LayerCache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, LayerCache | None, Auxiliary]:
        """Run one layer: the new residual stream, the extended cache, the auxiliary sums.

        `execution.layer` is its index, for models whose layers differ.
        """
        ...

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """Return the normalized residual stream after the last layer."""
        ...

    def output_matrix(self) -> nnx.Param:
        """Return the output matrix [V, D]."""
        ...

    def output_bias(self) -> nnx.Param | None:
        """Return the output bias [V]; None: none."""
        ...

    def logit_softcap(self) -> float | None:
        """Return the softcap of the logits; None: none."""
        ...


class PredictsMore(Transformer, Protocol):
    """A language model with optional multi-token prediction."""

    @property
    def predicting(self) -> Sequence[Callable[..., tuple[jax.Array, Auxiliary]]]:
        """Modules that predict one more token each, called like a `PredictionModule` with its own
        parameters: its final hidden states yield logits like the model's, and are the input of the
        next."""
        ...


class OutputHead(Protocol):
    """Output head: the last three members of a `Transformer`."""

    def output_matrix(self) -> nnx.Param:
        """As in `Transformer`."""
        ...

    def output_bias(self) -> nnx.Param | None:
        """As in `Transformer`."""
        ...

    def logit_softcap(self) -> float | None:
        """As in `Transformer`."""
        ...


# Einsum of hidden states and output matrix to logits.
LOGITS = "BTD,VD->BTV"


def logits(model: OutputHead, x_BTD: jax.Array) -> jax.Array:
    """Logits [B, T, V] of final hidden states."""
    logits_BTV, size = padded_logits(model, x_BTD), vocabulary(model)
    if logits_BTV.shape[-1] == size:
        return logits_BTV
    # The first V of a split dimension do not divide over its devices: every one gets all.
    spec = jax.typeof(logits_BTV).sharding.spec
    return jax.sharding.reshard(logits_BTV, P(*spec[:-1], None))[..., :size]


def padded_logits(model: OutputHead, x_BTD: jax.Array) -> jax.Array:
    """Logits [B, T, V or more], 0 for tokens from V on: split over `tensor`, whatever V is."""
    x_BTD, matrix = head_operands(model, x_BTD)
    logits_BTV, bias = contract(LOGITS, x_BTD, matrix), model.output_bias()
    if bias is not None:
        logits_BTV = add_bias(logits_BTV, bias)
    return apply_softcap(logits_BTV, model.logit_softcap())


def head_operands(model: OutputHead, x_BTD: jax.Array) -> tuple[jax.Array, nnx.Param]:
    """Return final hidden states and the output matrix; see `reduce_first`."""
    matrix = model.output_matrix()
    is_tied = role_of(matrix) == "embedding"
    return reduce_first(x_BTD, matrix) if is_tied else (x_BTD, matrix)


def vocabulary(model: OutputHead) -> int:
    """Return V, the vocabulary size."""
    value = model.output_matrix().get_value()
    return (value.weight if isinstance(value, GradientSlice) else value).shape[0]


def enter(
    model: Transformer,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    mask: Mask,
    execution: Execution,
    cache: Cache | None = None,
) -> tuple[jax.Array, list[LayerCache]]:
    """Input of the first stacked layer [B, T, D], and the extended caches of the layers
    before it."""
    x_BTD, caches = model.embed(tokens_BT, positions_BT), []
    start = 0 if cache is None else cache.length
    for number, layer in enumerate(model.leading):
        own = None if cache is None else tuple(array[number] for array in cache.layers)

        def run(x_BTD: jax.Array, own: LayerCache | None, layer: Any = layer) -> Any:
            return layer(x_BTD, positions_BT, mask, execution, own, start)[:2]

        x_BTD, own = execution.remat_layer(run)(x_BTD, own)
        caches += [] if own is None else [own]
    return x_BTD, caches


def hidden_states(
    model: Transformer,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    mask: Mask,
    execution: Execution,
    cache: Cache | None = None,
) -> tuple[jax.Array, Cache | None, Auxiliary]:
    """Final hidden states [B, T, D], the extended cache, and the layers' auxiliary sums."""
    x_BTD, leading = enter(model, tokens_BT, positions_BT, mask, execution, cache)
    start = 0 if cache is None else cache.length

    def run_layer(layer: Any, x_BTD: jax.Array, own: Any) -> tuple[jax.Array, Any]:
        number, layer_cache = own
        x_BTD, layer_cache, auxiliary = model.run_layer(
            layer, x_BTD, positions_BT, mask, execution.of_layer(number), layer_cache, start
        )
        return x_BTD, (layer_cache, auxiliary)

    if isinstance(model.layers, list):
        assert cache is not None, "layers are unstacked for generation alone"
        each = [(jnp.int32(number), own) for number, own in enumerate(cache.layers)]
        x_BTD, outs = execution.over_layers(run_layer, x_BTD, model.layers, each)
        caches, auxiliaries = map(list, zip(*outs, strict=True))
        auxiliary = jax.tree.map(lambda *of_layers: sum(of_layers), *auxiliaries)
        return model.finish(x_BTD), Cache(caches, cache.length + tokens_BT.shape[1]), auxiliary
    numbers = jnp.arange(jax.tree.leaves(model.layers)[0].shape[0])
    own = numbers, None if cache is None else cache.layers
    if cache is not None and leading:
        own = numbers, tuple(array[len(leading) :] for array in cache.layers)
    x_BTD, (caches, auxiliary) = execution.over_layers(run_layer, x_BTD, model.layers, own)
    if cache is not None:
        if leading:
            arrays = zip(*leading, caches, strict=True)
            caches = tuple(jnp.concatenate([*(x[None] for x in a[:-1]), a[-1]]) for a in arrays)
        cache = Cache(caches, cache.length + tokens_BT.shape[1])
    return model.finish(x_BTD), cache, jax.tree.map(lambda x: x.sum(0), auxiliary)


class PairModule(OutputHead, Protocol):
    """Encoder-decoder: sources to a memory of the module's own form, and targets from it."""

    def encode(self, source_BS: jax.Array, mask: Mask, execution: Execution, /) -> Any:
        """Encode the sources; the mask has their segment ids, and is not causal."""
        ...

    def decode(
        self,
        tokens_BT: jax.Array,
        memory: Any,
        mask: Mask,
        of_memory: Mask,
        execution: Execution,
        /,
    ) -> jax.Array:
        """Final hidden states [B, T, D] of whole targets.

        Args:
          tokens_BT: the targets' tokens so far, each row from its first.
          memory: from `encode`.
          mask: which of the targets' tokens a token sees.
          of_memory: which of the memory's it sees.
          execution: kernels, precision and dropout.
        """
        ...

    def remember(self, memory: Any, execution: Execution, /) -> Any:
        """Return the memory in the form for generation: computed once, read for every token. The
        second dimension of each array is the row, as of a cache, so that beams can be
        distinguished."""
        ...

    def go_on(
        self,
        tokens_BT: jax.Array,
        remembered: Any,
        of_memory: Mask,
        execution: Execution,
        cache: Cache,
        /,
    ) -> tuple[jax.Array, Cache]:
        """Final hidden states [B, T, D] of tokens that follow a cache's targets, and the
        cache with it; the other arguments are as in `decode`."""
        ...
