"""A configuration becomes the pure functions of a run."""

from jaxtrain.exchange import ExchangeProgram, with_exchange
from jaxtrain.layers import Execution
from jaxtrain.optimizer import make_optimizer, make_schedule
from jaxtrain.settings import Config
from jaxtrain.sharding import Layout
from jaxtrain.step import Program


def make_program(config: Config, layout: Layout) -> Program | ExchangeProgram:
    """The pure functions that a configuration makes on a layout."""
    schedule = make_schedule(config.schedule, config.optimizer.learning_rate, config.train.steps)
    program = Program(
        build=config.train.model.build,
        objective=config.train.model.objective,
        optimizer=make_optimizer(config.optimizer, schedule),
        schedule=schedule,
        layout=layout,
        precision=config.precision,
        loss=config.loss,
        execution=Execution(
            kernel=config.attention.kernel,
            context_parallel=config.attention.context_parallel,
            remat=config.remat.policy,
            layers_per_iteration=config.scan.layers_per_iteration,
        ),
        accumulation=config.train.accumulation,
        pipeline=config.pipeline,
        guard=config.guard,
    )
    return with_exchange(config.exchange, program)
