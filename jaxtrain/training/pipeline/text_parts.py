"""Pipeline parts of language models.

Letters: B batch, T length, D embed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from jaxtrain.data.batch import Batch
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.transformer.language_model import enter
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.objectives.tokens import TokenObjective
from jaxtrain.training.pipeline.parts import Parts, Stream, Variables


@dataclasses.dataclass(frozen=True)
class TextParts(Parts):
    """Those of a `Transformer`; its stream is [B, T, D].

    Attributes:
      leading: how many layers stand before the equal ones.
    """

    objective: TokenObjective
    leading: int = 0

    travels: ClassVar[Mapping[str, int]] = {"stream": 0}

    def enter(
        self, number: int, layers: Variables, outer: Variables, before: Stream, micro: Batch
    ) -> Stream:
        """As in `Parts`."""
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
        """As in `Parts`."""
        del number
        model, mask = self.model(layers, outer), self.objective.mask(micro)

        def run_layer(layer: Any, x_BTD: jax.Array, execution: Execution) -> tuple[jax.Array, Sums]:
            y_BTD, _, auxiliary = model.run_layer(layer, x_BTD, micro.positions, mask, execution)
            return y_BTD, auxiliary

        x_BTD, auxiliary = self.over_places(
            run_layer, x["stream"], model.layers, numbers, self.execution
        )
        return {"stream": x_BTD}, auxiliary

    @property
    def enter_has_layers(self) -> bool:
        """As in `Parts`: those before the equal ones."""
        return self.leading > 0

    @property
    def head_has_layers(self) -> bool:
        """As in `Parts`: the modules of multi-token prediction."""
        return self.objective.tells_further

    def head(self, layers: Variables, outer: Variables, x: Stream, micro: Batch) -> Sums:
        """As in `Parts`."""
        model = self.model(layers, outer)
        h_BTD = model.finish(x["stream"])
        return self.objective.of_finished(
            model, h_BTD, micro, self.execution, self.loss, train=self.train
        )
