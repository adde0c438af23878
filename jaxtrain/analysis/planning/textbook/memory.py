"""Memory of a train step on one device: exact state, temporary buffers in closed form."""

import dataclasses
import functools
import math
from typing import Any

import jax

from jaxtrain.analysis.planning.textbook.activation_traffic import stream_bytes
from jaxtrain.analysis.planning.textbook.facts import Facts
from jaxtrain.analysis.planning.textbook.profile import (
    layer_profile,
    layer_stash,
    least_profile,
    of_forward,
    of_weights,
    on_platform,
    residual_bytes_of_rows,
)
from jaxtrain.analysis.planning.textbook.state_bytes import (
    Arguments,
    StateShapes,
    argument_bytes,
    elements,
    shapes_of_state,
    without_layout,
)
from jaxtrain.analysis.planning.textbook.steady import waiting
from jaxtrain.models.model import TokenModel, passes_of, reads_tokens, token_model
from jaxtrain.nn.attention.kernel_registry import KERNELS
from jaxtrain.nn.attention.ring import queries_at_once
from jaxtrain.nn.remat import RESIDUAL
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.layouts import abstract_layout, resolve_config, rows_held
from jaxtrain.training.offload import Offload
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.settings import Config


@dataclasses.dataclass(frozen=True)
class Memory:
    """A step's memory on one device, at its peak.

    Attributes:
      arguments: the state and the batch, exact.
      gradients: accumulators and the gradients of one microbatch.
      parts: all other live buffers at the peak: name -> bytes.
      activations_on_host: activations offloaded to host memory until the backward pass.
      sent: bytes of them that a step sends to the host, and reads again.
      gradients_on_host: accumulators and gradients of microbatches in host memory.
      gradients_read: bytes of these that a step reads, to accumulate and for the update.
      left_out: bytes that are not part of the others but of measurements elsewhere: name -> bytes.
      logits: logits of a microbatch in the compute dtype, all positions at once.
    """

    arguments: Arguments
    gradients: int
    parts: dict[str, int]
    activations_on_host: int = 0
    sent: int = 0
    gradients_on_host: int = 0
    gradients_read: int = 0
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    logits: int = 0

    @property
    def host(self) -> int:
        """Total bytes in the memory of the device's host."""
        return self.arguments.host + self.activations_on_host + self.gradients_on_host

    @property
    def to_host(self) -> tuple[int, int]:
        """Bytes per step to and from the host: offloaded activations, and the state and gradients
        that are read."""
        return self.sent, self.arguments.read + self.gradients_read

    @property
    def temporaries(self) -> int:
        """Temporary bytes of the step, in addition to its arguments."""
        return self.gradients + sum(self.parts.values())

    @property
    def total(self) -> int:
        """Arguments and temporary buffers."""
        return self.arguments.total + self.temporaries

    @property
    def update_bytes(self) -> int:
        """Bytes that the update reads and writes: parameters, gradients, optimizer state."""
        held = self.arguments
        return held.params + held.optimizer + held.host + held.disk + self.gradients


def memory(config: Config, layout: Layout, platform: str) -> Memory:
    """Estimate the memory of a configuration on a layout (which may be abstract).

    Args:
      config: the configuration.
      layout: its layout.
      platform: 'tpu', 'gpu' or 'cpu', which decides the residuals of kernels.
    """
    config = resolve_config(config, platform)
    if not reads_tokens(config.train.model):
        arguments = argument_bytes(config, layout)
        return _of_whole_model(config, layout.of_microbatches, platform, arguments)
    return _step(config, layout, platform).memory()


def state_memory(config: Config, layout: Layout, platform: str) -> int:
    """Return the part of `memory(...).total` that is independent of the remat policy: state, batch,
    accumulators, and the copy of the parameters in the compute dtype.

    Args: see `memory`.
    """
    config = resolve_config(config, platform)
    if not reads_tokens(config.train.model):
        return argument_bytes(config, layout).total
    step = _step(config, layout, platform)
    return step.arguments.total + step.standing


def least_memory(config: Config, layout: Layout, platform: str) -> int:
    """Return a lower bound of `memory(...).total` that traces one layer for all meshes: state,
    batch, accumulators, the copy in the compute dtype, gradients, logits, and residuals of layers.

    Args: see `memory`.
    """
    config = resolve_config(config, platform)
    if not reads_tokens(config.train.model):
        return argument_bytes(config, layout).total
    step = _step(config, layout, platform)
    return step.arguments.total + step.standing + step.least


def memory_without_stash(config: Config, layout: Layout, platform: str) -> int | None:
    """Return a lower bound of `memory(...).total`: all of it except what a schedule keeps for
    gradients of weights, whose trace takes longest; None if the schedule keeps nothing for them.

    Args: see `memory`.
    """
    config = resolve_config(config, platform)
    ranks = layout.mesh.shape["pipe"]
    if ranks == 1 or not waiting(config.pipeline, ranks).stash:
        return None
    step = dataclasses.replace(_step(config, layout, platform), counts_stash=False)
    return step.memory().total


def _step(config: Config, layout: Layout, platform: str) -> "_Step":
    """Return the step of a configuration that is resolved for the platform."""
    within = layout.of_microbatches
    # Weights that are sharded at rest and gathered for all microbatches need a separate copy.
    local = layout.splits_parameters and not within.splits_parameters
    local = local and layout.mesh.shape["fsdp"] > 1
    copied = local or config.offload.parameters != "none"
    return _Step(config, within, platform, argument_bytes(config, layout), copied, local)


_LOGITS = "float32 logits and their gradient (PyTorch's loss)"
# 1,271 MiB on a V100 and 1,573 on an A100: bigscience-workshop/bigscience, train/tr11-176B-ml/
# chronicles-prequel.md.
_OF_LIBRARIES = {"CUDA's context and libraries": 1573 * 2**20}
# For schedules that split a stage's backward pass into input and weight gradients.
_STASH = "pipeline: for gradients of weights"
_TABLES = "collective buffers: embedding and output matrix"


@dataclasses.dataclass(frozen=True)
class _Step:
    """A transformer's train step on one device.

    Attributes:
      config: the configuration.
      layout: the layout of microbatches.
      platform: 'tpu', 'gpu' or 'cpu'.
      arguments: the state and the batch.
      copied: whether microbatches use a copy of the parameters whatever its dtype.
      sums_locally: whether fsdp shards the parameters at rest, but neither the copy nor the
        accumulators.
      counts_stash: whether what a schedule keeps for gradients of weights is counted.
    """

    config: Config
    layout: Layout
    platform: str
    arguments: Arguments
    copied: bool
    sums_locally: bool
    counts_stash: bool = True

    def memory(self) -> Memory:
        phases = [self._head(), self._head_end(), self._layers(), self._embedding()]
        if self.arguments.streamed:
            phases.append(self._streaming())
        if self._numbers_on_host:
            whole = self._gradients(itemsize=self._summed)
            phases.append({"gradients": whole - self._accumulators})
        if self._holds_both_sums:
            phases.append(self._summing())
        largest = max(phases, key=lambda phase: sum(phase.values()))
        gradients = self._accumulators + largest.pop("gradients")
        if self._copies:
            largest["parameters in the compute dtype"] = self._copies
        alive = {name: size for name, size in largest.items() if size}
        numbers, each, many = self._numbers_on_host, self._compute, self._microbatches > 1
        total = self._summed
        on_host = numbers * (total + 2 * each if many else each)
        read = numbers * (total + self._microbatches * (total + each) if many else each)
        return Memory(
            self.arguments, gradients, alive, self._offloaded, self._sent, on_host, read,
            self._left_out, self._logits_at_once,
        )  # fmt: skip

    # -- live in all phases ----------------------------------------------------------------------

    @property
    def standing(self) -> int:
        """Bytes in addition to the arguments in every phase."""
        return self._accumulators + self._copies

    @property
    def least(self) -> int:
        """Lower bound of the bytes in addition to these in the largest phase, without a trace of
        this layout: a layer saves at least its input, unless that is offloaded."""
        sizes, model = self.layout.mesh.shape, self._model
        length = self.config.train.data.abstract_batch(1).inputs.shape[1] // sizes["context"]
        stream = self._compute * length * model.embed_dim
        if self.layout.sequence_parallel:
            stream //= sizes["tensor"]
        stream = int(stream * self._rows)
        of_row, results = least_profile(self.config, self.layout, self.platform)
        of_layer = 0 if RESIDUAL in self.config.remat.offload else stream
        of_layer = max(of_layer, int(of_row * self._rows))
        if self._ranks == 1:
            kept = of_layer * model.layers
        else:
            table = waiting(self.config.pipeline, self._ranks)
            of_stage = self._layers_of_stage * (table.residuals or 1)
            kept = of_layer * of_stage + (table.inputs + table.gradients) * stream
        gradients, of_layers = self._all_gradients, self._gradients_of_layers
        tables = sum(self._tables().values())
        return max(
            kept + 3 * stream + self._logits() + tables,
            kept
            + 2 * stream
            + int(results * self._rows)
            + of_layers
            + self._gathered_layer
            + self._waiting_table[_TABLES],
            gradients + 2 * stream + tables,
        )

    @functools.cached_property
    def _state(self) -> StateShapes:
        return shapes_of_state(without_layout(self.config, self.layout))

    def _gradients(self, *, itemsize: int, layers: bool | None = None) -> int:
        """Return the bytes of gradient accumulators; only the layers', or only the others'."""
        return itemsize * elements(self._state, self.layout, "gradient", "trained", layers)

    @property
    def _numbers_on_host(self) -> int:
        """Elements of gradients that are offloaded to host memory."""
        if self.config.offload.gradients == "none":
            return 0
        return elements(self._state, self.layout, "gradient", "layers' matrices", True)

    @property
    def _model(self) -> TokenModel:
        return token_model(self.config.train.model)

    @property
    def _compute(self) -> int:
        return jax.numpy.dtype(self.config.precision.compute).itemsize

    @property
    def _summed(self) -> int:
        """Bytes per element of the gradient accumulators."""
        return jax.numpy.dtype(self.config.precision.gradients).itemsize

    @property
    def _microbatches(self) -> int:
        return self.config.train.accumulation * self._piped

    @property
    def _ranks(self) -> int:
        return self.layout.mesh.shape["pipe"]

    @property
    def _piped(self) -> int:
        return self.config.pipeline.microbatches if self._ranks > 1 else 1

    @functools.cached_property
    def _rows(self) -> float:
        """Rows of one microbatch on one device."""
        held = rows_held(self.config, self.layout)
        return held / self._microbatches / self.layout.batch_devices()

    @property
    def _layers_of_stage(self) -> int:
        return math.ceil(self._model.layers / self._ranks / self.config.pipeline.virtual_stages)

    @property
    def _copies(self) -> int:
        if not self.copied and self.config.precision.compute == self.config.precision.params:
            return 0
        return self._compute * elements(self._state, self.layout, "parameter", "cast", None)

    @property
    def _accumulators(self) -> int:
        if self._microbatches == 1:
            return 0
        if self._ranks == 1:
            whole = self._gradients(itemsize=self._summed)
            return whole - self._summed * self._numbers_on_host
        # Each pipeline rank has accumulators for the embedding and the head.
        outer = self._gradients(itemsize=self._summed, layers=False)
        own = self._gradients(itemsize=self._summed, layers=True)
        return (own + outer) * (2 if self.config.train.accumulation > 1 else 1)

    # -- the phases of a microbatch --------------------------------------------------------------

    @functools.cached_property
    def _profile(self) -> Any:
        return layer_profile(self.config, self.layout, self.platform)

    @functools.cached_property
    def _kept(self) -> dict[str, int]:
        """Activations saved for the backward pass of the layers."""
        layers = self._model.layers
        kept = {f"activations: {k}": round(v * self._rows) for k, v in self._profile.kept}
        if self._ranks == 1:
            return {name: size * layers for name, size in kept.items()}
        pipeline = self.config.pipeline
        table = waiting(pipeline, self._ranks)
        of_stage = self._layers_of_stage
        streams = table.inputs + table.gradients
        stream = round(self._profile.stream * self._rows)
        at_once = table.residuals or 1
        found = {name: size * of_stage * at_once for name, size in kept.items()}
        found["pipeline: inputs and gradients of stages"] = streams * stream
        if table.stash and self.counts_stash:
            of_layer = layer_stash(self.config, self.layout, self.platform)
            found[_STASH] = round(of_layer * self._rows) * of_stage * table.stash
        return found

    @property
    def _offloaded(self) -> int:
        """Activations offloaded to host memory; with a pipeline, which recomputes, of one stage."""
        layers = self._model.layers
        if self._ranks > 1:
            layers = self._layers_of_stage
        return round(self._profile.offloaded * self._rows) * layers

    @property
    def _sent(self) -> int:
        """Bytes offloaded in a step: of all microbatches, and of all stages of a rank."""
        stages = self.config.pipeline.virtual_stages if self._ranks > 1 else 1
        return self._offloaded * self._microbatches * stages

    @property
    def _stream(self) -> int:
        return round(self._profile.stream * self._rows)

    @property
    def _hidden(self) -> int:
        return round(self._profile.hidden * self._rows)

    @property
    def _table(self) -> int:
        """Bytes of the output matrix (or embedding) in the compute dtype, on one device."""
        return self._compute * Facts(self.config, self.layout).output_numbers

    @property
    def _gathers(self) -> bool:
        return self.layout.splits_parameters and self.layout.mesh.shape["fsdp"] > 1

    def _tables(self) -> dict[str, int]:
        """Return the gathered output matrix, and its gradient before and after its reduction."""
        return {_TABLES: self._table * (1 + self._gathers) + self._table_gradient}

    @property
    def _table_gradient(self) -> int:
        """Bytes of the output matrix's gradient on one device, before its reduction over fsdp."""
        if self.config.loss.chunk_size is None:
            return self._table
        return self._table // self._compute * 4  # accumulated over the chunks in float32

    @property
    def _waiting_table(self) -> dict[str, int]:
        """The head's gradient of a small tied embedding, which is live during the backward pass of
        the layers: it is reduced over fsdp together with the gradient of the lookup."""
        facts = Facts(self.config, self.layout)
        together = facts.is_tied and not facts.reduces_head_first
        return {_TABLES: self._table_gradient * (together and self._gathers and self._ranks == 1)}

    def _logits(self) -> int:
        length = self.config.train.data.abstract_batch(1).inputs.shape[1]
        length //= self.layout.mesh.shape["context"]
        chunk, itemsize = self.config.loss.chunk_size, self._compute
        if chunk is not None:
            length = min(length, chunk // self.layout.mesh.shape["context"])
            # A loop over chunks stores them in float32; without chunks that form is fused away.
            itemsize = 4
        tokens = self._rows * length
        whole = self._table / self._compute / self._model.embed_dim
        late = "vocab" in self.layout.whole  # the table is not sharded, the logits are
        devices = self.layout.size(self.layout.activation(("vocab",))[0]) if late else 1
        vocabulary = math.ceil(whole / devices)
        return round(tokens * vocabulary * itemsize)

    @property
    def _logits_at_once(self) -> int:
        loss = dataclasses.replace(self.config.loss, chunk_size=None)
        config = dataclasses.replace(self.config, loss=loss)
        return dataclasses.replace(self, config=config)._logits()

    @property
    def _left_out(self) -> dict[str, int]:
        """Additional bytes of a PyTorch loss, which keeps the logits of all positions in the
        compute dtype, and in float32 with their gradient."""
        if self.platform != "gpu":
            return {}
        others = self._logits_at_once // self._compute * (self._compute + 2 * 4)
        return {_LOGITS: max(others - self._logits(), 0), **_OF_LIBRARIES}

    def _head(self) -> dict[str, int]:
        return {
            **self._kept,
            "gradients": 0,
            "hidden states of the head": 3 * self._hidden,
            "logits": self._logits(),
            **self._tables(),
        }

    def _head_end(self) -> dict[str, int]:
        # The gradient of the final norm's input, in float32 and again in the layers' layout.
        wide = 2 * self._hidden * 4 // self._compute
        return {**self._kept, "gradients": 0, "hidden states of the head": 3 * self._hidden + wide}

    @property
    def _gradients_of_layers(self) -> int:
        """Bytes of a microbatch's gradients of the layers at once: in a pipeline those of one of
        a rank's stages, which a tick adds to the accumulators; of several microbatches those of one
        iteration of the loop over layers (see `execution.Fused`)."""
        whole = self._gradients(itemsize=self._compute, layers=True)
        if self._fuses:
            return whole * self.config.scan.layers_per_iteration // self._model.layers
        stages = self.config.pipeline.virtual_stages if self._ranks > 1 else 1
        return (whole - self._compute * self._numbers_on_host) // stages

    @property
    def _fuses(self) -> bool:
        """Whether the loop over layers adds a microbatch's gradients to the accumulators."""
        in_loop = 0 < self.config.scan.layers_per_iteration < self._model.layers
        on_device = self.config.offload.gradients == "none"
        return in_loop and on_device and self._ranks == 1 and self._microbatches > 1

    @property
    def _all_gradients(self) -> int:
        """Bytes of a microbatch's gradients after its last layer; those of the layers may have
        been added to the accumulators."""
        outer = self._gradients(itemsize=self._compute, layers=False)
        if self._ranks > 1 or self._fuses:
            return outer
        return outer + self._gradients_of_layers

    def _layers(self) -> dict[str, int]:
        # Gradients of one kind of matmul at a time; with recomputation also all matmul results.
        results = self._profile.products if self.config.remat.kept.repeats_products else 0
        products = round((results + self._profile.widest) * self._rows)
        return {
            **self._kept,
            "gradients": self._gradients_of_layers,
            "one layer's backward pass": products + 2 * self._stream,
            "one layer's attention scores": self._scores(),
            "one layer's gradients in the ring": self._sums_in_ring(),
            "collective buffers: one layer's weights": self._gathered_layer,
            **self._waiting_table,
        }

    @property
    def _gathered_layer(self) -> int:
        """Bytes of one layer's gathered weights, and of the next layer's. A TPU's compiler gathers
        each weight for its matmul: with the next one's no more than a layer's."""
        held = elements(self._state, self.layout, "weight", "weights", layers=True)
        layers = 1 if self.platform == "tpu" else 2
        return layers * (self._compute * held // self._model.layers) * self._gathers

    def _scores(self) -> int:
        """Return the bytes of one layer's attention scores in its backward pass, if the kernel
        materializes them.

        The probabilities, their gradient and the scores' are float32 arrays; the probabilities may
        be saved from the forward pass. If they are recomputed, a TPU's compiler needs two of the
        three at once, and a byte of mask for each score (Llama 1B on v5e:4x4 and GPT-2 124M on
        v5e:2x4, jaxlib 0.10.2).
        """
        attention = self._model.attention
        if attention is None or not KERNELS[self.config.attention.kernel].plain:
            return 0
        length = self.config.train.data.abstract_batch(1).inputs.shape[1]
        sizes = self.layout.mesh.shape
        heads = math.ceil(attention.num_heads / sizes["tensor"])
        of_row = heads * (length // sizes["context"]) * length
        if self._in_ring:
            run = length // (2 * sizes["context"])
            of_row, bytes_a_score = heads * queries_at_once(run) * run, 3 * 4
        elif self.config.remat.kept.keeps_all:
            bytes_a_score = 2 * 4
        else:
            bytes_a_score = 2 * 4 + 1 if self.platform == "tpu" else 3 * 4
        return round(bytes_a_score * of_row * self._rows)

    @property
    def _in_ring(self) -> bool:
        """Whether attention is a ring over `context`, with chunks of queries."""
        ring = self.config.attention.context_parallel == "ring"
        return ring and self.layout.mesh.shape["context"] > 1

    def _sums_in_ring(self) -> int:
        """Return the bytes of ring attention's float32 gradients in one layer: of the queries, and
        of keys and values at home, in flight and in the current block."""
        attention = self._model.attention
        if attention is None or not self._in_ring:
            return 0
        length = self.config.train.data.abstract_batch(1).inputs.shape[1]
        sizes = self.layout.mesh.shape
        of_token = attention.num_heads * attention.key_dim
        of_token += 3 * attention.num_kv_heads * (attention.key_dim + attention.value_dim)
        tokens = self._rows * length / sizes["context"]
        return round(4 * tokens * of_token / sizes["tensor"])

    def _streaming(self) -> dict[str, int]:
        """Return the buffers of the update, whose inputs and outputs are sharded differently."""
        gradients = self._gradients(itemsize=4)
        return {"gradients": gradients, "state on its way": 2 * self.arguments.streamed}

    @property
    def _holds_both_sums(self) -> bool:
        """Whether the accumulators are live twice, before and after adding a microbatch's
        gradients: on TPUs if the weights were gathered; GPUs accumulate in place.

        With sharded masters the loop over layers adds in place there too. With 'local' sums libtpu
        0.0.42 still reserves as much, for copies in the layout of the reduce-scatter.
        """
        in_place = self._fuses and self.config.sharding.accumulate == "shard"
        one_stage = self._ranks == 1 and self._accumulators and not in_place
        return bool(self.sums_locally and one_stage and self.platform != "gpu")

    def _summing(self) -> dict[str, int]:
        """Return the buffers for adding a microbatch's unsharded gradients."""
        return {"gradients": self._gradients(itemsize=self._summed)}

    def _embedding(self) -> dict[str, int]:
        stream = 2 * self._stream
        return {"gradients": self._all_gradients, "residual stream": stream, **self._tables()}


def _of_whole_model(config: Config, layout: Layout, platform: str, arguments: Arguments) -> Memory:
    """Return the memory of a model without a loop over equal layers, or with two such loops: the
    residuals of the objective, divided by the stages of a pipeline."""
    rows = rows_held(config, layout) // config.train.accumulation
    sizes, pipeline, own = dict(layout.mesh.shape), config.pipeline, layout
    if sizes["pipe"] > 1:
        rows //= pipeline.microbatches
        mesh: Any = {**sizes, "pipe": 1, "dcn": {}}
        plain = dataclasses.replace(
            config, offload=Offload(), mesh=Mesh(**mesh), pipeline=Pipeline()
        )
        layout = abstract_layout(plain, math.prod(sizes.values()) // sizes["pipe"]).of_microbatches
    layout = of_weights(on_platform(layout, platform, "planned"))
    activations, on_host = residual_bytes_of_rows(of_forward(config), layout, rows)
    facts = Facts(config, own)
    gradients = (facts.sum_bytes if facts.passes > 1 else 4) * elements(
        shapes_of_state(without_layout(config, own)), own, "gradient", "trained", None
    )
    if sizes["pipe"] == 1:
        sent = on_host * config.train.accumulation
        more = _OF_LIBRARIES if platform == "gpu" else {}
        parts = {"activations": activations}
        return Memory(arguments, gradients, parts, on_host, sent, left_out=dict(more))
    table = waiting(pipeline, sizes["pipe"], passes_of(config.train.model))
    stages = sizes["pipe"] * pipeline.virtual_stages
    waits = {
        "activations": activations * (table.residuals or 1) // stages,
        "pipeline: inputs and gradients of stages": (table.inputs + table.gradients)
        * sum(stream_bytes(facts, name) for name in facts.travels),
    }
    if table.stash:  # each matmul's input is saved already: add its output gradient
        waits[_STASH] = activations * table.stash // stages
    sent = on_host * config.train.accumulation * pipeline.microbatches // sizes["pipe"]
    return Memory(arguments, gradients, waits, on_host // stages, sent)
