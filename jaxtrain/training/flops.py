"""Model FLOPs of a configuration's step."""

import math

import jax

from jaxtrain.data.batch import example_shape
from jaxtrain.models.model import Model, reads_tokens
from jaxtrain.nn.parameters import role_of
from jaxtrain.nn.precision import is_matrix
from jaxtrain.parallel.sharding import by_name, logical_axes
from jaxtrain.training.finetune.finetune import Finetune, tuning_of
from jaxtrain.training.finetune.tuning import Tuning
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import parameter_shapes


def flops_per_step(config: Config) -> float:
    """Return the model FLOPs of a step: 6 N per token and causal attention,
    without recomputation (arXiv 2204.02311, appendix B).

    A frozen weight of a model that reads tokens needs 4 N: it has no gradient. The backward pass
    before the first trained weight, which is not needed, is counted all the same.
    """
    train = config.train
    example = example_shape(train.data.abstract_batch(1))
    whole = train.model.flops(example)
    if config.finetune != Finetune() and reads_tokens(train.model):
        tuning = tuning_of(config.finetune, train.model.build)
        unneeded = _count_frozen(train.model, tuning)
        adapters = jax.eval_shape(
            lambda: tuning.draw(parameter_shapes(train.model.build), jax.random.key(0))
        )
        added = sum(math.prod(x.shape) for x in jax.tree.leaves(adapters))
        whole += math.prod(example) * (6 * added - 2 * unneeded)
    return whole * train.global_batch_size


def _count_frozen(model: Model, tuning: Tuning) -> float:
    """Return the number of frozen weights used per token; of experts, those that
    it is routed to.
    """
    shapes = parameter_shapes(model.build)
    tied = all(role_of(variable) != "output" for variable in by_name(shapes).values())
    count = 0.0
    for name, variable in by_name(shapes).items():
        only_read = role_of(variable) == "position" or (
            role_of(variable) == "embedding" and not tied
        )
        if name in tuning.frozen and is_matrix(variable) and not only_read:
            size = math.prod(variable.get_value().shape)
            if "experts" in logical_axes(variable) and role_of(variable) != "router":
                assert model.experts is not None, "experts belong to a mixture"
                size *= model.experts.per_token / model.experts.count
            count += size
    return count
