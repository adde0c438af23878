"""Communication-reduced data parallelism: other ways for the replicas along `data` to agree."""

from jaxtrain.exchange.compression import Compressed, Int8, TopK
from jaxtrain.exchange.program import ExchangeProgram
from jaxtrain.exchange.replicas import Replicas
from jaxtrain.exchange.rules import Averaging, DiLoCo, Gossip
from jaxtrain.exchange.settings import Exchange
from jaxtrain.step import Program


def with_exchange(settings: Exchange, program: Program) -> Program | ExchangeProgram:
    """The program whose replicas along `data` agree as the settings say."""
    match settings.method:
        case "synchronous":
            return program
        case "local_sgd":
            return Replicas(program, Averaging(settings.period))
        case "diloco":
            rule = DiLoCo(settings.period, settings.outer_learning_rate, settings.outer_momentum)
            return Replicas(program, rule)
        case "gossip":
            return Replicas(program, Gossip())
        case "int8":
            return Compressed(program, Int8())
        case "top_k":
            return Compressed(program, TopK(settings.keep))
