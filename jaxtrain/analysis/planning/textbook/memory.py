"""Memory of a train step on one device: its state exactly, what the step makes by closed forms."""

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
    on_platform,
)
from jaxtrain.analysis.planning.textbook.residuals import (
    of_forward,
    of_weights,
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
from jaxtrain.nn.attention.kernels import KERNELS
from jaxtrain.nn.attention.ring import queries_at_once
from jaxtrain.nn.remat import RESIDUAL
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.kernel import resolve_config
from jaxtrain.training.layouts import abstract_layout, rows_held
from jaxtrain.training.offload.offload import Offload
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.settings import Config


@dataclasses.dataclass(frozen=True)
class Memory:
    """A step's memory on one device, at the moment it is largest.

    Attributes:
      arguments: the state and the batch, exact.
      gradients: accumulators and the gradients of one microbatch.
      parts: everything else that is alive then: name -> bytes.
      activations_on_host: what the backward pass has in the memory of the device's host.
      sent: what of them a step sends there, and reads again.
      gradients_on_host: accumulators and gradients of microbatches there.
      gradients_read: what a step reads of these, to sum them and to update with the sum.
      left_out: what is in none of the others, and others measure with it: name -> bytes.
      logits: of a microbatch in the compute dtype, all positions at once.
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
        """All that lies in the memory of the device's host."""
        return self.arguments.host + self.activations_on_host + self.gradients_on_host

    @property
    def to_host(self) -> tuple[int, int]:
        """Bytes of a step to and from the host: of activations, and what of a state and of
        gradients is read."""
        return self.sent, self.arguments.read + self.gradients_read

    @property
    def temporaries(self) -> int:
        """All that the step makes beside its arguments."""
        return self.gradients + sum(self.parts.values())

    @property
    def total(self) -> int:
        """Everything."""
        return self.arguments.total + self.temporaries

    @property
    def update_bytes(self) -> int:
        """What the update reads, and writes again: parameters, gradients, optimizer state."""
        held = self.arguments
        return held.params + held.optimizer + held.host + held.disk + self.gradients


def memory(config: Config, layout: Layout, platform: str) -> Memory:
    """The estimate for a configuration on a layout (which may be abstract).

    Args:
      config: the configuration.
      layout: its layout.
      platform: 'tpu', 'gpu' or 'cpu', which decides what kernels keep.
    """
    config = resolve_config(config, platform)
    if not reads_tokens(config.train.model):
        arguments = argument_bytes(config, layout)
        return _of_whole_model(config, layout.of_microbatches, platform, arguments)
    return _step(config, layout, platform).memory()


def state_memory(config: Config, layout: Layout, platform: str) -> int:
    """Bytes of `memory(...).total` that no remat policy changes: state, batch, accumulators, and
    the parameters' copy in the compute dtype.

    Args: as `memory`.
    """
    config = resolve_config(config, platform)
    if not reads_tokens(config.train.model):
        return argument_bytes(config, layout).total
    step = _step(config, layout, platform)
    return step.arguments.total + step.standing


def least_memory(config: Config, layout: Layout, platform: str) -> int:
    """A lower bound of `memory(...).total` for which one layer is traced for all meshes: state,
    batch, accumulators, the copy in the compute dtype, gradients, logits, and what layers keep.

    Args: as `memory`.
    """
    config = resolve_config(config, platform)
    if not reads_tokens(config.train.model):
        return argument_bytes(config, layout).total
    step = _step(config, layout, platform)
    return step.arguments.total + step.standing + step.least


def _step(config: Config, layout: Layout, platform: str) -> "_Step":
    """The step of a configuration that is resolved for the platform."""
    within = layout.of_microbatches
    # Weights that are split at rest and whole for all microbatches are a copy of their own.
    local = layout.splits_parameters and not within.splits_parameters
    local = local and layout.mesh.shape["fsdp"] > 1
    copied = local or config.offload.parameters != "none"
    return _Step(config, within, platform, argument_bytes(config, layout), copied, local)


_LOGITS = "float32 logits and their gradient (PyTorch's loss)"
# 1,271 MiB on a V100 and 1,573 on an A100: bigscience-workshop/bigscience, train/tr11-176B-ml/
# chronicles-prequel.md.
_OF_LIBRARIES = {"CUDA's context and libraries": 1573 * 2**20}
# Of schedules that take a stage's gradients in two halves.
_STASH = "pipeline: for gradients of weights"
_TABLES = "collective buffers: embedding and output matrix"


@dataclasses.dataclass(frozen=True)
class _Step:
    """A transformer's train step on one device.

    Attributes:
      config: the configuration.
      layout: the one that microbatches see.
      platform: 'tpu', 'gpu' or 'cpu'.
      arguments: the state and the batch.
      copied: whether microbatches compute with a copy of the parameters whatever its dtype.
      sums_locally: whether fsdp splits the parameters at rest, and neither the copy nor sums.
    """

    config: Config
    layout: Layout
    platform: str
    arguments: Arguments
    copied: bool
    sums_locally: bool

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

    # -- what is alive all the time --------------------------------------------------------------

    @property
    def standing(self) -> int:
        """Bytes beside the arguments in every phase."""
        return self._accumulators + self._copies

    @property
    def least(self) -> int:
        """Bytes beside these in the largest phase, of each no more than is known without a trace
        of this layout: a layer keeps its input at least, unless that is in host memory."""
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
        on_host = self._compute * self._numbers_on_host
        gradients = self._gradients(itemsize=self._compute) - on_host
        of_layers = self._gradients(itemsize=self._compute, layers=True) - on_host
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
        """Bytes of gradients as they are accumulated; only the layers', or only the others'."""
        return itemsize * elements(self._state, self.layout, "gradient", "trained", layers)

    @property
    def _numbers_on_host(self) -> int:
        """Gradients that lie there while they are taken."""
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
        """Bytes of one number of a sum of microbatches' gradients."""
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
        # A pipeline's ranks each keep accumulators for the embedding and the head.
        outer = self._gradients(itemsize=self._summed, layers=False)
        own = self._gradients(itemsize=self._summed, layers=True)
        return (own + outer) * (2 if self.config.train.accumulation > 1 else 1)

    # -- the phases of a microbatch --------------------------------------------------------------

    @functools.cached_property
    def _profile(self) -> Any:
        return layer_profile(self.config, self.layout, self.platform)

    @functools.cached_property
    def _kept(self) -> dict[str, int]:
        """Activations that wait for the backward pass of the layers."""
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
        if table.stash:
            of_layer = layer_stash(self.config, self.layout, self.platform)
            found[_STASH] = round(of_layer * self._rows) * of_stage * table.stash
        return found

    @property
    def _offloaded(self) -> int:
        """The same in host memory; of a pipeline's stages, which compute again, one's at a time."""
        layers = self._model.layers
        if self._ranks > 1:
            layers = self._layers_of_stage
        return round(self._profile.offloaded * self._rows) * layers

    @property
    def _sent(self) -> int:
        """What goes there in a step: of all microbatches, and of all stages of a rank."""
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
        """The output matrix (or embedding) as it is computed with, on one device."""
        return self._compute * Facts(self.config, self.layout).output_numbers

    @property
    def _gathers(self) -> bool:
        return self.layout.splits_parameters and self.layout.mesh.shape["fsdp"] > 1

    def _tables(self) -> dict[str, int]:
        """The output matrix gathered, and its gradient before and after it is summed."""
        return {_TABLES: self._table * (1 + self._gathers) + self._table_gradient}

    @property
    def _table_gradient(self) -> int:
        """The output matrix's gradient on one device, before it is summed over fsdp."""
        if self.config.loss.chunk_size is None:
            return self._table
        return self._table // self._compute * 4  # summed over the chunks in float32

    @property
    def _waiting_table(self) -> dict[str, int]:
        """While the layers run backward, the head's gradient of an embedding that both ends have
        waits for the other end's: the two are summed over fsdp together."""
        tied = Facts(self.config, self.layout).is_tied and self._gathers and self._ranks == 1
        return {_TABLES: self._table_gradient * tied}

    def _logits(self) -> int:
        length = self.config.train.data.abstract_batch(1).inputs.shape[1]
        length //= self.layout.mesh.shape["context"]
        chunk, itemsize = self.config.loss.chunk_size, self._compute
        if chunk is not None:
            length = min(length, chunk // self.layout.mesh.shape["context"])
            # A loop over chunks keeps them in float32; in one piece that form lives in fusions.
            itemsize = 4
        tokens = self._rows * length
        whole = self._table / self._compute / self._model.embed_dim
        late = "vocab" in self.layout.whole  # of the table, not of the logits
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
        """A PyTorch loss keeps the logits of all positions in the compute dtype, and in float32
        with their gradient."""
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

    def _layers(self) -> dict[str, int]:
        of_layers = self._gradients(itemsize=self._compute, layers=True)
        of_layers -= self._compute * self._numbers_on_host
        # Gradients of one kind's products at a time; where the layer runs again all results too.
        results = self._profile.products if self.config.remat.kept.repeats_products else 0
        products = round((results + self._profile.widest) * self._rows)
        return {
            **self._kept,
            "gradients": of_layers,
            "one layer's backward pass": products + 2 * self._stream,
            "one layer's attention scores": self._scores(),
            "one layer's gradients in the ring": self._sums_in_ring(),
            "collective buffers: one layer's weights": self._gathered_layer,
            **self._waiting_table,
        }

    @property
    def _gathered_layer(self) -> int:
        """Bytes of one layer's weights, gathered, and of the next one's."""
        held = elements(self._state, self.layout, "weight", "weights", layers=True)
        return 2 * (self._compute * held // self._model.layers) * self._gathers

    def _scores(self) -> int:
        """Bytes of one layer's attention scores in its backward pass, of a kernel that makes all.

        The probabilities, their gradient and the scores' are float32 arrays; the probabilities may
        be kept from the forward pass. Where they are recomputed, a TPU's compiler needs two of the
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
        """Whether keys travel around `context`, and meet a chunk of queries at a time."""
        ring = self.config.attention.context_parallel == "ring"
        return ring and self.layout.mesh.shape["context"] > 1

    def _sums_in_ring(self) -> int:
        """Bytes of a ring's float32 gradients in one layer: of the queries, and of keys and values
        at home, on their way and of the block at hand."""
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
        """The update: what it reads is sharded differently from what it writes, and both wait."""
        gradients = self._gradients(itemsize=4)
        return {"gradients": gradients, "state on its way": 2 * self.arguments.streamed}

    @property
    def _holds_both_sums(self) -> bool:
        """A TPU's compiler holds the sums before and after a microbatch's gradients are added where
        the weights were gathered; a GPU's adds in place."""
        one_stage = self._ranks == 1 and self._accumulators
        return bool(self.sums_locally and one_stage and self.platform != "gpu")

    def _summing(self) -> dict[str, int]:
        """A microbatch's whole gradients are added."""
        return {"gradients": self._gradients(itemsize=self._summed)}

    def _embedding(self) -> dict[str, int]:
        of_layers = self._gradients(itemsize=self._compute)
        of_layers -= self._compute * self._numbers_on_host
        return {"gradients": of_layers, "residual stream": 2 * self._stream, **self._tables()}


def _of_whole_model(config: Config, layout: Layout, platform: str, arguments: Arguments) -> Memory:
    """A model without a loop over equal layers, or with two: what the objective's backward pass
    keeps, of a pipeline's stage its part of it."""
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
    if table.stash:  # beside each product's input, which is kept, its output's gradient
        waits[_STASH] = activations * table.stash // stages
    sent = on_host * config.train.accumulation * pipeline.microbatches // sizes["pipe"]
    return Memory(arguments, gradients, waits, on_host // stages, sent)
