"""Pipeline parts of encoder-decoders.

So each rank has a part of both stacks, and of their parameters as much as of a language model's.
Letters: B batch, S source length, T target length, D embed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.transformer.block import RESIDUAL
from jaxtrain.nn.transformer.encoder_decoder import EncoderDecoder
from jaxtrain.parallel.sharding import shard
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.objectives.sequence_to_sequence import SequenceToSequence, masks_of
from jaxtrain.training.pipeline.parts import Parts, Stream, Variables

ENCODER, DECODER = 0, 1  # the passes
_STACKS = ("encoder_layers", "decoder_layers")


@dataclasses.dataclass(frozen=True)
class PairParts(Parts):
    """Those of an `EncoderDecoder`.

    The source's stream [B, S, D] goes through the encoder's stages, and from stage to stage of the
    decoder as what was read; there the target's [B, T, D] goes beside it.

    Attributes:
      read_by_layers: `EncoderDecoder.read_by_layers`.
    """

    objective: SequenceToSequence
    read_by_layers: frozenset[str] = frozenset()

    travels: ClassVar[Mapping[str, int]] = {"source": ENCODER, "target": DECODER}
    passes: ClassVar[int] = len(_STACKS)

    def in_pass(self, number: int, name: str) -> bool:
        """As in `Parts`."""
        return name.split("/")[0] == _STACKS[number]

    def is_shared(self, name: str) -> bool:
        """As in `Parts`."""
        return name in self.read_by_layers

    def enter(
        self, number: int, layers: Variables, outer: Variables, before: Stream, micro: Batch
    ) -> Stream:
        """As in `Parts`. The target has a place from the first stage on, since what stages pass on
        has one shape; it is zeros there, and is not sent."""
        model, execution = self.model(layers, outer), self.of_micro(micro)
        if number == ENCODER:
            assert micro.source is not None, "a batch of pairs has sources"
            shape = jax.eval_shape(lambda: model.enter_target(micro.inputs, execution))
            spec = P() if shape.sharding is None else shape.sharding.spec
            nothing_BTD = jnp.zeros(shape.shape, shape.dtype, out_sharding=spec)
            return {"source": model.enter_source(micro.source, execution), "target": nothing_BTD}
        # Between stages it lies as the streams do; each gathers it once for all its layers.
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
        """As in `Parts`; there are no auxiliary sums."""
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
        """What resumes from a stage of the encoder."""
        mask = model.of_source(masks_of(micro).source, x_BSD.shape[1])

        def layer(own: Any, x_BSD: jax.Array, execution: Execution) -> tuple[jax.Array, Sums]:
            return model.read_layer(own, x_BSD, mask, execution), {}

        with jax.named_scope("encoder"):
            x_BSD, _ = self.over_places(layer, x_BSD, model.encoder_layers, numbers, execution)
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
        """What resumes from a stage of the decoder."""
        masks, length = masks_of(micro), x_BTD.shape[1]
        mask = model.of_target(masks.target, length, length)
        memory_BSD = shard(x_BSD, HIDDEN)

        def layer(own: Any, x_BTD: jax.Array, execution: Execution) -> tuple[jax.Array, Sums]:
            y_BTD = model.write_layer(own, x_BTD, memory_BSD, mask, masks.of_memory, execution)
            return y_BTD, {}

        with jax.named_scope("decoder"):
            x_BTD, _ = self.over_places(layer, x_BTD, model.decoder_layers, numbers, execution)
        return {"source": x_BSD, "target": x_BTD}

    def head(self, layers: Variables, outer: Variables, x: Stream, micro: Batch) -> Sums:
        """As in `Parts`."""
        model = self.model(layers, outer)
        h_BTD = model.finish_target(x["target"], self.of_micro(micro))
        return self.objective.of_hidden(model, h_BTD, micro, self.loss, train=self.train)
