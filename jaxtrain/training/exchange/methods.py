"""The transform of an exchange method."""

from jaxtrain.training.exchange.asynchronous import delay_gradients
from jaxtrain.training.exchange.compression import Coded, Int8, Signs, TopK, compress_gradients
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.exchange.power_sgd import PowerSGD
from jaxtrain.training.exchange.replicas import agree
from jaxtrain.training.exchange.rules import Averaging, DiLoCo, Gossip
from jaxtrain.training.exchange.streaming import stream_fragments
from jaxtrain.training.step import Transform


def exchange_with(settings: Exchange) -> Transform:
    """The transform to replicas along `data` that agree as the settings say."""
    match settings.method:
        case "synchronous":
            return lambda build: build
        case "local_sgd":
            return agree(Averaging(settings.period))
        case "diloco":
            rule = DiLoCo(settings.period, settings.outer_learning_rate, settings.outer_momentum)
            if settings.streams:
                return stream_fragments(rule, settings.fragments, settings.delay, settings.mixing)
            return agree(rule)
        case "gossip":
            return agree(Gossip(settings.graph))
        case "int8":
            return compress_gradients(Coded(Int8()))
        case "top_k":
            return compress_gradients(Coded(TopK(settings.keep)))
        case "sign_sgd":
            return compress_gradients(Coded(Signs()))
        case "power_sgd":
            return compress_gradients(PowerSGD(settings.rank))
        case "asynchronous":
            return delay_gradients(settings.staleness, settings.compensation)
