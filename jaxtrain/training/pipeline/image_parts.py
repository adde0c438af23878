"""Pipeline parts of Vision Transformers.

Letters: B batch, T patches and what stands beside them, D embed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from jaxtrain.data.batch import Batch
from jaxtrain.nn.execution import Execution
from jaxtrain.training.objectives.answers import AnswerObjective, countable
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.pipeline.parts import Parts, Stream, Variables


@dataclasses.dataclass(frozen=True)
class ImageParts(Parts):
    """Those of a `StackedPredictor`; its stream is [B, T, D]."""

    objective: AnswerObjective

    travels: ClassVar[Mapping[str, int]] = {"stream": 0}

    def enter(
        self, number: int, layers: Variables, outer: Variables, before: Stream, micro: Batch
    ) -> Stream:
        """As in `Parts`."""
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
        """As in `Parts`; there are no auxiliary sums."""
        del number
        model = self.model(layers, outer)

        def run_layer(layer: Any, x_BTD: jax.Array, execution: Execution) -> tuple[jax.Array, Sums]:
            return model.run_layer(layer, x_BTD, execution), {}

        x_BTD, _ = self.over_places(
            run_layer, x["stream"], model.layers, numbers, self.of_micro(micro)
        )
        return {"stream": x_BTD}, {}

    def head(self, layers: Variables, outer: Variables, x: Stream, micro: Batch) -> Sums:
        """As in `Parts`."""
        model = self.model(layers, outer)
        with jax.named_scope("loss"):
            answers_BC = model.finish(x["stream"], self.of_micro(micro))
            return self.objective.of_predicted(answers_BC, micro, self.loss, train=self.train)
