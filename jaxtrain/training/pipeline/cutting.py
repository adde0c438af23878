"""Selection of how a model is cut into pipeline parts."""

from typing import Any

from flax import nnx

from jaxtrain.nn.execution import Execution
from jaxtrain.nn.predictor import StackedPredictor
from jaxtrain.nn.transformer.encoder_decoder import EncoderDecoder
from jaxtrain.training.objectives.answers import AnswerObjective
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.objectives.objective import Objective
from jaxtrain.training.objectives.sequence_to_sequence import SequenceToSequence
from jaxtrain.training.objectives.tokens import TokenObjective
from jaxtrain.training.pipeline.image_parts import ImageParts
from jaxtrain.training.pipeline.pair_parts import PairParts
from jaxtrain.training.pipeline.parts import Parts
from jaxtrain.training.pipeline.text_parts import TextParts


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
    """What the stages of a pipeline compute; other arguments as of `Parts`.

    Args:
      model: the module, of which the shapes are enough.
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
