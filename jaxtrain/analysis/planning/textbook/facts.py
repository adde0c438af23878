"""Sizes of a configured step, as inputs of the closed forms of traffic.

Letters: B rows that a device computes at once, T its shard of the sequence, D embed, N query heads,
K kv heads, H head_dim, V vocab, L layers on a device.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.analysis.planning.textbook.steady import crossings
from jaxtrain.models.model import Model, TokenModel, reads_tokens, token_model
from jaxtrain.nn.parameters import Role, role_of
from jaxtrain.nn.precision import is_matrix
from jaxtrain.parallel.gathering import is_reduced_first
from jaxtrain.parallel.sharding import Layout, by_name, logical_axes, parts_of
from jaxtrain.training.finetune.finetune import router_biases, tuning_of
from jaxtrain.training.layouts import rows_held
from jaxtrain.training.pipeline.parts import ImageParts, PairParts, TextParts
from jaxtrain.training.pipeline.schedules import deal
from jaxtrain.training.reduction import reduce_once_axes
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import parameter_shapes


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expected collectives of one kind, with arrays of one size and one cause.

    Attributes:
      kind: as in `collectives.KINDS`.
      axis: the mesh axis, or several joined with "+", in the mesh's order.
      count: runs per step, including loops, microbatches and recomputation.
      bytes: payload bytes of one device per run.
      cause: what is moved, and why.
      formula: the closed form in the literature.
      every: number of steps per execution, on average.
    """

    kind: str
    axis: str
    count: int
    bytes: int
    cause: str
    formula: str
    every: float = 1

    @property
    def total_bytes(self) -> int:
        """Payload bytes of one device during the step."""
        return self.count * self.bytes


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter.

    Attributes:
      name: path in the model.
      shape: shape in one layer, without the layers dimension.
      axes: logical axes of these dimensions.
      is_layer: whether every layer has one.
      is_matrix: whether it is used in the compute dtype; scales and biases are cast.
      role: its role, as declared by the model.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    is_layer: bool
    is_matrix: bool
    role: Role | None


@functools.lru_cache(maxsize=64)
def weights_of(model: Model) -> tuple[Weight, ...]:
    """Return the parameters of a model, from their shapes alone."""
    found = []
    for name, variable in by_name(parameter_shapes(model.build)).items():
        shape, axes = variable.get_value().shape, logical_axes(variable)
        layer = axes[:1] == ("layers",)
        matrix, role = is_matrix(variable), role_of(variable)
        found.append(Weight(name, shape[layer:], axes[layer:], layer, matrix, role))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _layer_slots(model: Model, ranks: int, chunks: int) -> int:
    """Return the slots for layers on one rank, including padding, which is computed too."""
    return deal(parameter_shapes(model.build), ranks, chunks).longest * chunks


@dataclasses.dataclass(frozen=True)
class Facts:
    """Sizes of a configuration on a mesh.

    Attributes:
      config: the configuration.
      layout: its layout, on a mesh or on an abstract one.
    """

    config: Config
    layout: Layout

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis of the mesh, in its order."""
        return dict(self.layout.mesh.shape)

    def size(self, axis: str) -> int:
        """Return the devices along one axis; 1 if the mesh has no such axis."""
        return self.sizes.get(axis, 1)

    def axis_name(self, axes: Collection[str]) -> str:
        """Return the name of a collective's axis: joined in the mesh's order, without size 1."""
        return "+".join(name for name, size in self.sizes.items() if size > 1 and name in axes)

    def devices(self, axes: Collection[str]) -> int:
        """Return the number of devices along several axes."""
        return math.prod(self.size(axis) for axis in axes)

    @functools.cached_property
    def model(self) -> Model:
        """The model's settings."""
        return self.config.train.model

    @property
    def text_model(self) -> TokenModel:
        """The model's settings, if it reads tokens."""
        return token_model(self.model)

    @functools.cached_property
    def is_text(self) -> bool:
        """Whether it is a stack of layers over tokens."""
        return self.model.inputs == "tokens"

    @functools.cached_property
    def weights(self) -> tuple[Weight, ...]:
        """The model's parameters."""
        return weights_of(self.model)

    @functools.cached_property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that are not trained."""
        return tuning_of(self.config.finetune, self.model.build, router_biases(self.model)).frozen

    @functools.cached_property
    def value_bytes(self) -> int:
        """Bytes per element in the compute dtype."""
        return jnp.dtype(self.config.precision.compute).itemsize

    @functools.cached_property
    def master_bytes(self) -> int:
        """Bytes per element of the master parameters."""
        return jnp.dtype(self.config.precision.params).itemsize

    @functools.cached_property
    def sum_bytes(self) -> int:
        """Bytes per element of the gradient accumulators."""
        return jnp.dtype(self.config.precision.gradients).itemsize

    def gradient_bytes(self, weight: Weight) -> int:
        """Return the bytes per element of a weight's gradient in its reduction: norms, routers and
        biases of attention scores compute in float32."""
        in_scores = weight.role == "position" and "heads" in weight.axes
        return 4 if weight.role in ("norm", "router") or in_scores else self.value_bytes

    def reduced_bytes(self, weight: Weight) -> int:
        """Return the bytes per element of a weight's gradient that is reduced once per step: of the
        accumulator if there are microbatches, else of the dtype in which it is computed."""
        if self.passes > 1 or self.size("pipe") > 1:
            return self.sum_bytes
        return self.value_bytes if weight.is_matrix else self.master_bytes

    @functools.cached_property
    def summed_once(self) -> tuple[str, ...]:
        """Mesh axes over which gradients are reduced once per step instead of once per pass."""
        return () if self.replicas_alone else reduce_once_axes(self.layout, self.passes)

    @functools.cached_property
    def of_microbatches(self) -> "Facts":
        """The same with the layout of the microbatches; itself if that is the step's layout."""
        within = self.layout.of_microbatches
        return self if within is self.layout else dataclasses.replace(self, layout=within)

    @functools.cached_property
    def micros(self) -> int:
        """Microbatches of the pipeline for each gradient."""
        return self.config.pipeline.microbatches if self.size("pipe") > 1 else 1

    @functools.cached_property
    def passes(self) -> int:
        """Forward and backward passes of each layer in a step."""
        return self.config.train.accumulation * self.micros

    @functools.cached_property
    def L(self) -> int:  # noqa: N802 - a letter of the legend
        """Layers that a device computes."""
        if self.model.layers is None:
            return 1
        if self.size("pipe") == 1:
            return self.model.layers
        return _layer_slots(self.model, self.size("pipe"), self.config.pipeline.virtual_stages)

    @functools.cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that shard the batch."""
        return parts_of(self.layout.activation(("batch",))[0])

    @functools.cached_property
    def B(self) -> int:  # noqa: N802
        """Rows that a device computes at once."""
        rows = rows_held(self.config, self.layout)
        return max(rows // (self.devices(self.batch_axes) * self.passes), 1)

    @functools.cached_property
    def length(self) -> int:
        """Tokens of a row."""
        return self.config.train.data.abstract_batch(1).inputs.shape[1]

    @functools.cached_property
    def T(self) -> int:  # noqa: N802
        """A device's shard of the sequence."""
        return self.length // self.size("context")

    @functools.cached_property
    def is_tied(self) -> bool:
        """Whether embedding and output matrix are tied: no other parameter is the output."""
        return all(weight.role != "output" for weight in self.weights)

    @functools.cached_property
    def reduces_head_first(self) -> bool:
        """Whether the gradient of a tied embedding as output matrix is reduced separately."""
        return self.is_tied and any(
            is_reduced_first(self.layout, weight.axes, math.prod(weight.shape))
            for weight in self.weights
            if weight.role == "embedding"
        )

    @functools.cached_property
    def chunks(self) -> int:
        """Number of sequence chunks of the loss, computed one after the other."""
        size = self.config.loss.chunk_size
        return 1 if size is None or not self.is_text else self.length // size

    @functools.cached_property
    def output_numbers(self) -> int:
        """Elements of the output matrix (or embedding) on a device, as used in compute."""
        for weight in self.weights:
            if "vocab" in weight.axes:
                placed = self.layout.sharding_of(self.layout.weight(weight.axes))
                return math.prod(placed.shard_shape(weight.shape))
        return 0

    @functools.cached_property
    def stream_bytes(self) -> int:
        """Bytes of the residual stream between blocks, not sharded along the sequence: B T D."""
        return self.B * self.T * self.text_model.embed_dim * self.value_bytes

    @functools.cached_property
    def replicas_alone(self) -> bool:
        """Whether gradients are not all-reduced over data (see `Exchange`)."""
        together = ("synchronous", "asynchronous")
        return self.config.exchange.method not in together and self.size("data") > 1

    @functools.cached_property
    def gathers_weights(self) -> bool:
        """Whether layers all-gather their weights over fsdp: no gathered array is then saved."""
        return self.layout.splits_parameters and self.size("fsdp") > 1

    @functools.cached_property
    def recomputes(self) -> bool:
        """Whether the backward pass recomputes a layer's forward pass, except its last matmul."""
        return self.config.remat.kept.repeats_products

    def repeats(self, name: str) -> bool:
        """Return whether the activation with this name is recomputed in the backward pass."""
        return self.recomputes and name not in self.config.remat.kept.names

    def crossings(self) -> dict[str, dict[str, int]]:
        """Return `steady.crossings` of the configured pipeline."""
        pipeline = self.config.pipeline
        return crossings(
            pipeline.schedule, self.size("pipe"), pipeline.microbatches, pipeline.virtual_stages,
            tuple(self.travels.items()),
        )  # fmt: skip

    @property
    def travels(self) -> Mapping[str, int]:
        """Arrays that pipeline stages send to each other: `Parts.travels`."""
        parts = {"pairs": PairParts, "images": ImageParts}.get(self.model.inputs, TextParts)
        return parts.travels


def split_over(spec: P) -> Iterator[tuple[int, str]]:
    """Yield the dimension and mesh axis of every sharded dimension of a spec."""
    for dim, part in enumerate(spec):
        for axis in parts_of(part):
            yield dim, axis


# -- loss chunks that are too small: each chunk reads the whole output matrix ----------------------
# A device reads the output matrix [V, D] twice for a chunk's matmuls and accumulates its gradient
# in float32: 2 e V D + 8 V D bytes with e bytes per value, against 6 R V D FLOPs for R positions.
# On v5p, about 300 positions take as long in matmuls as in memory traffic.

# The smallest memory-bound fraction of a step that is worth a remark.
CHUNKS_WORTH = 0.01


def chunk_work(config: Config, layout: Layout) -> tuple[int, int]:
    """Return the bytes and FLOPs of a step's chunked loss on a device that computes it: one of a
    pipeline's last stage, for which the other ranks wait. 0, 0 without chunks."""
    facts = Facts(config, layout).of_microbatches
    if not facts.is_text or config.loss.chunk_size is None:
        return 0, 0
    passes, matrix = facts.passes, facts.output_numbers
    moved = passes * facts.chunks * (2 * facts.value_bytes + 2 * 4) * matrix
    return moved, 6 * passes * facts.B * facts.T * matrix


def positions_per_chunk(config: Config, layout: Layout) -> int:
    """Return R, the number of positions of a chunk on one device."""
    facts = Facts(config, layout).of_microbatches
    return facts.B * facts.T // facts.chunks


def larger_chunks(config: Config) -> Iterator[dict[str, Any]]:
    """Yield bindings of chunks larger than the configured ones, up to a whole sequence."""
    chunk = config.loss.chunk_size
    if chunk is None or not reads_tokens(config.train.model):
        return
    length = config.train.data.abstract_batch(1).inputs.shape[1]
    while length % (chunk := 2 * chunk) == 0:
        yield {"Loss.chunk_size": chunk}
