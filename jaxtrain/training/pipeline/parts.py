"""Parts that a pipeline splits a model into: text, image and encoder-decoder models.

Letters: B batch, T length (patches of an image, and extra tokens), S source length,
D embed.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.nn.dropout import Draws
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.parameters import is_layer
from jaxtrain.nn.predictor import StackedPredictor
from jaxtrain.nn.transformer.block import RESIDUAL
from jaxtrain.nn.transformer.encoder_decoder import EncoderDecoder
from jaxtrain.nn.transformer.language_model import enter
from jaxtrain.parallel.sharding import shard
from jaxtrain.training.finetune.tuning import partition
from jaxtrain.training.objectives.classification import AnswerObjective, countable
from jaxtrain.training.objectives.losses import Loss, Sums
from jaxtrain.training.objectives.objective import Objective
from jaxtrain.training.objectives.sequence_to_sequence import SequenceToSequence, masks_of
from jaxtrain.training.objectives.tokens import TokenObjective

# Named arrays: a tree of them, or the trained and the frozen ones.
Variables = Any

# What is sent from stage to stage: arrays, or their shapes, by name.
Stream = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Parts(abc.ABC):
    """Model split into the computations of the first, each and the last stage of a pass.

    Attributes:
      graphdef: the model's structure.
      objective: the training objective.
      execution: kernels, precision and dropout.
      loss: the loss's settings.
      train: whether losses include their training terms.
      padded: whether slots of a stage are empty.
      seed: of random numbers in training.
      step: optimizer steps taken, seeds random numbers; None: no random numbers.
      travels: what is sent from stage to stage, and the first pass that sends it.
      passes: how often a microbatch goes around the ring.
    """

    graphdef: Any
    objective: Objective[Any]
    execution: Execution
    loss: Loss
    train: bool
    padded: bool
    seed: int = 0
    step: jax.Array | None = None

    travels: ClassVar[Mapping[str, int]]
    passes: ClassVar[int] = 1

    @abc.abstractmethod
    def enter(
        self, number: int, layers: Variables, outer: Variables, before: Stream, micro: Batch
    ) -> Stream:
        """Return the input of a pass's first layer, given the outputs of the passes before it."""

    @abc.abstractmethod
    def run_layers(
        self,
        number: int,
        layers: Variables,
        outer: Variables,
        x: Stream,
        micro: Batch,
        numbers: jax.Array,
    ) -> tuple[Stream, Sums]:
        """Run the layers of one stage; return the output of the last and their auxiliary sums.

        Args:
          number: index of the pass.
          layers: the stage's parameters, their leading dimension padded to the longest stage.
          outer: the parameters around the layers.
          x: the stage's input.
          micro: the microbatch.
          numbers: the layer in each of the stage's slots, -1 for an empty one; int32 [slots].
        """

    @abc.abstractmethod
    def head(self, layers: Variables, outer: Variables, x: Stream, micro: Batch) -> Sums:
        """Return the objective's sums of the last pass's final outputs."""

    @property
    def enter_has_layers(self) -> bool:
        """Whether `enter` runs layers, which may have permutes."""
        return False

    @property
    def head_has_layers(self) -> bool:
        """Whether `head` runs layers of its own, which may have permutes."""
        return False

    def in_pass(self, number: int, name: str) -> bool:
        """Whether parameters of the layers belong to this pass."""
        del number, name
        return True

    def is_shared(self, name: str) -> bool:
        """Whether every layer reads a parameter from around the layers."""
        del name
        return False

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn."""
        return self.train and self.objective.draws

    def split(self, params: Any) -> tuple[Variables, Variables]:
        """Split parameters into those of the layers and those around them.

        Args:
          params: a tree of named arrays, or a tuple of such.
        """
        return _split(params, lambda _, variable: is_layer(variable))

    def of_pass(self, number: int, layers: Any) -> tuple[Variables, Variables]:
        """Split the layers into those of a pass and those of the others."""
        return _split(layers, lambda name, _: self.in_pass(number, name))

    def split_shared(self, outer: Any) -> tuple[Variables, Variables]:
        """Split the parameters around the layers: those that every layer reads, and the rest."""
        return _split(outer, lambda name, _: self.is_shared(name))

    def join(self, one: nnx.State, other: nnx.State) -> nnx.State:
        """Join parameters: the inverse of `split`, `of_pass` and `split_shared`."""
        return nnx.merge_state(one, other)

    def model(self, layers: Variables, outer: Variables) -> Any:
        """Return the module with these parameters."""
        return nnx.merge(self.graphdef, self.join(layers, outer))

    def of_micro(self, micro: Batch) -> Execution:
        """Return the execution settings for a microbatch, with the random draws of its rows."""
        if self.step is None or micro.rows is None:
            return self.execution
        draws = Draws.of_step(self.seed, self.step, micro.rows)
        return dataclasses.replace(self.execution, draws=draws)

    def run_stage_layers(
        self,
        run_layer: Callable[[Any, jax.Array, Execution], tuple[jax.Array, Sums]],
        x: jax.Array,
        stacked: Any,
        numbers: jax.Array,
        execution: Execution,
    ) -> tuple[jax.Array, Sums]:
        """Run the layers of a stage in order; return the output and their sums.

        Args:
          run_layer: runs one layer: its parameters, input, and execution.
          x: the input of the first.
          stacked: the parameters of all.
          numbers: as in `run_layers`.
          execution: kernels, precision and dropout.
        """

        def one(layer: Any, x: jax.Array, number: jax.Array) -> tuple[jax.Array, Sums]:
            y, auxiliary = run_layer(layer, x, execution.of_layer(number))
            if not self.padded:
                return y, auxiliary
            valid = number >= 0
            # Computed and discarded, not skipped: a tick lasts as long as the longest stage anyway.
            return jnp.where(valid, y, x), jax.tree.map(lambda a: a * valid, auxiliary)

        x, auxiliary = execution.over_layers(one, x, stacked, numbers)
        return x, jax.tree.map(lambda x: x.sum(0), auxiliary)


def crossing(way: str, name: str, first_pass: int) -> str:
    """Return the name of a stream part's exchange in tables and programs.

    It is the direction alone for a part that crosses every boundary between stages.
    """
    return f"{way}_{name}" if first_pass else way


def _split(params: Any, first: Callable[[str, Any], bool]) -> tuple[Variables, Variables]:
    if isinstance(params, tuple):
        one, other = zip(*(_split(part, first) for part in params), strict=True)
        return one, other
    return partition(params, first)


@dataclasses.dataclass(frozen=True)
class TextParts(Parts):
    """Pipeline parts of a `Transformer`; its stream is [B, T, D].

    Attributes:
      leading: number of leading layers before the scanned ones.
    """

    objective: TokenObjective
    leading: int = 0

    travels: ClassVar[Mapping[str, int]] = {"stream": 0}

    def enter(
        self, number: int, layers: Variables, outer: Variables, before: Stream, micro: Batch
    ) -> Stream:
        """Embed the tokens, as in `Parts`."""
        del number, before
        model, mask = self.model(layers, outer), self.objective.mask(micro)
        assert micro.positions is not None, "a batch of text has positions"
        x_BTD, _ = enter(model, micro.inputs, micro.positions, mask, self.execution)
        return {"stream": x_BTD}

    def run_layers(
        self,
        number: int,
        layers: Variables,
        outer: Variables,
        x: Stream,
        micro: Batch,
        numbers: jax.Array,
    ) -> tuple[Stream, Sums]:
        """Run the layers of one stage, as in `Parts`."""
        del number
        model, mask = self.model(layers, outer), self.objective.mask(micro)

        def run_layer(layer: Any, x_BTD: jax.Array, execution: Execution) -> tuple[jax.Array, Sums]:
            y_BTD, _, auxiliary = model.run_layer(layer, x_BTD, micro.positions, mask, execution)
            return y_BTD, auxiliary

        x_BTD, auxiliary = self.run_stage_layers(
            run_layer, x["stream"], model.layers, numbers, self.execution
        )
        return {"stream": x_BTD}, auxiliary

    @property
    def enter_has_layers(self) -> bool:
        """Whether there are leading layers before the stacked ones, as in `Parts`."""
        return self.leading > 0

    @property
    def head_has_layers(self) -> bool:
        """Whether the head has multi-token prediction modules, as in `Parts`."""
        return self.objective.multi_token_prediction

    def head(self, layers: Variables, outer: Variables, x: Stream, micro: Batch) -> Sums:
        """Return the sums of the final hidden states, as in `Parts`."""
        model = self.model(layers, outer)
        h_BTD = model.finish(x["stream"])
        return self.objective.of_finished(
            model, h_BTD, micro, self.execution, self.loss, train=self.train
        )


@dataclasses.dataclass(frozen=True)
class ImageParts(Parts):
    """Pipeline parts of a `StackedPredictor`; its stream is [B, T, D]."""

    objective: AnswerObjective

    travels: ClassVar[Mapping[str, int]] = {"stream": 0}

    def enter(
        self, number: int, layers: Variables, outer: Variables, before: Stream, micro: Batch
    ) -> Stream:
        """Embed the inputs, as in `Parts`."""
        del number, before
        model = self.model(layers, outer)
        return {"stream": model.embed(countable(micro), self.of_micro(micro))}

    def run_layers(
        self,
        number: int,
        layers: Variables,
        outer: Variables,
        x: Stream,
        micro: Batch,
        numbers: jax.Array,
    ) -> tuple[Stream, Sums]:
        """Run the layers of one stage, as in `Parts`; there are no auxiliary sums."""
        del number
        model = self.model(layers, outer)

        def run_layer(layer: Any, x_BTD: jax.Array, execution: Execution) -> tuple[jax.Array, Sums]:
            return model.run_layer(layer, x_BTD, execution), {}

        x_BTD, _ = self.run_stage_layers(
            run_layer, x["stream"], model.layers, numbers, self.of_micro(micro)
        )
        return {"stream": x_BTD}, {}

    def head(self, layers: Variables, outer: Variables, x: Stream, micro: Batch) -> Sums:
        """Return the sums of the predictions, as in `Parts`."""
        model = self.model(layers, outer)
        with jax.named_scope("loss"):
            answers_BC = model.finish(x["stream"], self.of_micro(micro))
            return self.objective.of_predicted(answers_BC, micro, self.loss, train=self.train)


ENCODER, DECODER = 0, 1  # the passes
_STACKS = ("encoder_layers", "decoder_layers")


@dataclasses.dataclass(frozen=True)
class PairParts(Parts):
    """Pipeline parts of an `EncoderDecoder`.

    The source's stream [B, S, D] goes through the encoder's stages, and from stage to stage of the
    decoder as the memory; there the target's [B, T, D] is passed with it.

    Attributes:
      read_by_layers: `EncoderDecoder.read_by_layers`.
    """

    objective: SequenceToSequence
    read_by_layers: frozenset[str] = frozenset()

    travels: ClassVar[Mapping[str, int]] = {"source": ENCODER, "target": DECODER}
    passes: ClassVar[int] = len(_STACKS)

    def in_pass(self, number: int, name: str) -> bool:
        """Whether a parameter belongs to a pass (encoder or decoder), as in `Parts`."""
        return name.split("/")[0] == _STACKS[number]

    def is_shared(self, name: str) -> bool:
        """Whether every layer reads a parameter, as in `Parts`."""
        return name in self.read_by_layers

    def enter(
        self, number: int, layers: Variables, outer: Variables, before: Stream, micro: Batch
    ) -> Stream:
        """Return the input of the encoder's or the decoder's first layer, as in `Parts`.

        The target has a slot from the first stage on, because the stream has one shape on all
        stages; in the encoder it is zeros and is not sent.
        """
        model, execution = self.model(layers, outer), self.of_micro(micro)
        if number == ENCODER:
            assert micro.source is not None, "a batch of pairs has sources"
            shape = jax.eval_shape(lambda: model.enter_target(micro.inputs, execution))
            spec = P() if shape.sharding is None else shape.sharding.spec
            nothing_BTD = jnp.zeros(shape.shape, shape.dtype, out_sharding=spec)
            return {"source": model.enter_source(micro.source, execution), "target": nothing_BTD}
        # Between stages it is sharded like the streams; each gathers it once for all its layers.
        memory_BSD = shard(model.finish_source(before["source"], execution), RESIDUAL)
        return {"source": memory_BSD, "target": model.enter_target(micro.inputs, execution)}

    def run_layers(
        self,
        number: int,
        layers: Variables,
        outer: Variables,
        x: Stream,
        micro: Batch,
        numbers: jax.Array,
    ) -> tuple[Stream, Sums]:
        """Run the layers of one stage, as in `Parts`; there are no auxiliary sums."""
        model, execution = self.model(layers, outer), self.of_micro(micro)
        stage = self._read if number == ENCODER else self._write
        return stage(model, x["source"], x["target"], micro, numbers, execution), {}

    def _read(
        self,
        model: EncoderDecoder,
        x_BSD: jax.Array,
        x_BTD: jax.Array,
        micro: Batch,
        numbers: jax.Array,
        execution: Execution,
    ) -> Stream:
        """Return the stream after a stage of the encoder."""
        mask = model.of_source(masks_of(micro).source, x_BSD.shape[1])

        def layer(own: Any, x_BSD: jax.Array, execution: Execution) -> tuple[jax.Array, Sums]:
            return model.read_layer(own, x_BSD, mask, execution), {}

        with jax.named_scope("encoder"):
            x_BSD, _ = self.run_stage_layers(layer, x_BSD, model.encoder_layers, numbers, execution)
        return {"source": x_BSD, "target": x_BTD}

    def _write(
        self,
        model: EncoderDecoder,
        x_BSD: jax.Array,
        x_BTD: jax.Array,
        micro: Batch,
        numbers: jax.Array,
        execution: Execution,
    ) -> Stream:
        """Return the stream after a stage of the decoder."""
        masks, length = masks_of(micro), x_BTD.shape[1]
        mask = model.of_target(masks.target, length, length)
        memory_BSD = shard(x_BSD, HIDDEN)

        def layer(own: Any, x_BTD: jax.Array, execution: Execution) -> tuple[jax.Array, Sums]:
            y_BTD = model.write_layer(own, x_BTD, memory_BSD, mask, masks.of_memory, execution)
            return y_BTD, {}

        with jax.named_scope("decoder"):
            x_BTD, _ = self.run_stage_layers(layer, x_BTD, model.decoder_layers, numbers, execution)
        return {"source": x_BSD, "target": x_BTD}

    def head(self, layers: Variables, outer: Variables, x: Stream, micro: Batch) -> Sums:
        """Return the sums of the decoder's hidden states, as in `Parts`."""
        model = self.model(layers, outer)
        h_BTD = model.finish_target(x["target"], self.of_micro(micro))
        return self.objective.of_hidden(model, h_BTD, micro, self.loss, train=self.train)


def parts_of(
    model: nnx.Module,
    objective: Objective[Any],
    execution: Execution,
    loss: Loss,
    *,
    train: bool,
    padded: bool,
    seed: int,
) -> Parts:
    """Return the parts of a model for pipeline stages. Other arguments as in `Parts`.

    Args:
      model: the module; shapes suffice.
    """
    graphdef = nnx.split(model, nnx.Param, ...)[0]
    if isinstance(objective, TokenObjective):
        text: Any = model
        leading = len(text.leading)
        return TextParts(graphdef, objective, execution, loss, train, padded, seed, None, leading)
    if isinstance(objective, AnswerObjective):
        assert isinstance(model, StackedPredictor), "images are of one stack"
        return ImageParts(graphdef, objective, execution, loss, train, padded, seed)
    assert isinstance(objective, SequenceToSequence), "what has no equal layers has no stages"
    assert isinstance(model, EncoderDecoder), "pairs are of two stacks"
    names = model.read_by_layers
    return PairParts(graphdef, objective, execution, loss, train, padded, seed, None, names)
