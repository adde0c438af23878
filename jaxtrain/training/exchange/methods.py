"""Selection of the program for an exchange method."""

from jaxtrain.training.exchange.asynchronous import Asynchronous
from jaxtrain.training.exchange.compression import Compressed, Int8, TopK
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.exchange.exchange_program import ExchangeProgram
from jaxtrain.training.exchange.power_sgd import PowerSGD
from jaxtrain.training.exchange.replicas import Replicas
from jaxtrain.training.exchange.rules import Averaging, DiLoCo, Gossip
from jaxtrain.training.exchange.signs import Signs
from jaxtrain.training.exchange.streaming import Streaming
from jaxtrain.training.step import Program


def with_exchange(settings: Exchange, program: Program) -> Program | ExchangeProgram:
    """The program whose replicas along `data` agree as the settings say."""
    match settings.method:
        case "synchronous":
            return program
        case "local_sgd":
            return Replicas(program, Averaging(settings.period))
        case "diloco":
            rule = DiLoCo(settings.period, settings.outer_learning_rate, settings.outer_momentum)
            if settings.streams:
                return Streaming(program, rule, settings.fragments, settings.delay, settings.mixing)
            return Replicas(program, rule)
        case "gossip":
            return Replicas(program, Gossip(settings.graph))
        case "int8":
            return Compressed(program, Int8())
        case "top_k":
            return Compressed(program, TopK(settings.keep))
        case "sign_sgd":
            return Compressed(program, Signs())
        case "power_sgd":
            return PowerSGD(program, settings.rank)
        case "asynchronous":
            return Asynchronous(program, settings.staleness, settings.compensation)
