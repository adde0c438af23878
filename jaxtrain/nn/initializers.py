"""Weight initializers by name (fan-in, fan-out, Xavier, He).

A weight [..., I, O] has as fan-in I, as fan-out O, both times the pixels of a convolution's kernel.
Drawn with variance 1 / fan-in a layer keeps the variance of what it is given (LeCun et al. 1998,
"Efficient BackProp"), with 2 / (fan-in + fan-out) about that and its gradient's (Glorot and Bengio
2010), with 2 / fan-in that of what a ReLU leaves the half of (He et al. 2015, arXiv 1502.01852).
"""

from typing import Literal

import jax

from jaxtrain.nn.parameters import Initializer

InitializerName = Literal[
    "he_normal", "he_uniform", "glorot_normal", "glorot_uniform", "lecun_normal", "lecun_uniform"
]

_scaled = jax.nn.initializers.variance_scaling
INITIALIZERS: dict[InitializerName, Initializer] = {
    "he_normal": _scaled(2.0, "fan_in", "normal"),
    "he_uniform": _scaled(2.0, "fan_in", "uniform"),
    "glorot_normal": _scaled(1.0, "fan_avg", "normal"),
    "glorot_uniform": _scaled(1.0, "fan_avg", "uniform"),
    "lecun_normal": _scaled(1.0, "fan_in", "normal"),
    "lecun_uniform": _scaled(1.0, "fan_in", "uniform"),
}
HE, GLOROT = INITIALIZERS["he_normal"], INITIALIZERS["glorot_normal"]


def initializer_of(name: InitializerName | None, activation: str) -> Initializer:
    """How a layer is drawn; None: as its results go through this activation.

    Args:
      name: what the settings say.
      activation: a name of `dense.ACTIVATIONS`.
    """
    if name is not None:
        return INITIALIZERS[name]
    return GLOROT if activation in ("sigmoid", "tanh") else HE
