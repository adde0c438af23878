"""8-bit AdamW: block-quantized moments."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.reader import configurable
from jaxtrain.nn.precision import is_matrix, is_of_matrix
from jaxtrain.parallel.sharding import Layout, is_variable
from jaxtrain.training.optimizers import eight_bits
from jaxtrain.training.optimizers.direction import AdamRule
from jaxtrain.training.optimizers.matrices import each
from jaxtrain.training.optimizers.moments import ROUNDED
from jaxtrain.training.optimizers.rule import Kept


class CodedMoments(NamedTuple):
    """The state.

    Attributes:
      count: int32 scalar, updates so far.
      mu, nu: moving means of the gradients and of their squares: of a matrix `eight_bits.Coded`,
        of others float32.
    """

    count: jax.Array
    mu: Any
    nu: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam8bit(AdamRule):
    """8-bit AdamW (arXiv 2110.02861): a matrix's moments are kept as codes of bitsandbytes' dynamic
    map, times the largest of each block of 256; norm scales' and biases' are float32. A step is
    AdamW's of the moments before they are rounded."""

    name: ClassVar[str] = "adam8bit"
    dtype: ClassVar[str | None] = "8 bits"
    no_mean: ClassVar[str | None] = ROUNDED

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(_init, self._update)

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        if not is_of_matrix(axes):
            return super().keeps(shape, axes)
        blocks = eight_bits.blocks_of(shape, axes)
        return (Kept(shape, axes, "uint8"), Kept(blocks, axes, "float32")) * 2

    def validate_layout(self, params: Any, layout: Layout) -> Iterator[str]:
        """A sentence for each kind of matrix whose blocks the layout cuts through."""
        variables = jax.tree.leaves(params, is_leaf=is_variable)
        return eight_bits.validate([v for v in variables if is_matrix(v)], layout)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        t = count.astype(jnp.float32)
        of_mu, of_nu = 1 / (1 - self.b1**t), 1 / (1 - self.b2**t)

        def mean(rate: float, *, signed: bool) -> Any:
            def one(gradient: Any, old: Any) -> Any:
                g = gradient.get_value()
                last = eight_bits.decode(old, signed=signed) if _codes_of(old) else old.get_value()
                value = g if signed else g * g
                return gradient.replace(rate * last + (1 - rate) * value)

            return one

        def step(m: jax.Array, v: jax.Array) -> jax.Array:
            return of_mu * m / (jnp.sqrt(of_nu * v) + self.epsilon)

        mu = each(mean(self.b1, signed=True), updates, state.mu)
        nu = each(mean(self.b2, signed=False), updates, state.nu)
        kept = CodedMoments(count, _quantize(mu, signed=True), _quantize(nu, signed=False))
        return jax.tree.map(step, mu, nu), kept


def _init(params: Any) -> CodedMoments:
    def zeros(*, signed: bool) -> Any:
        def one(param: Any) -> Any:
            if is_matrix(param):
                return eight_bits.first(param, signed=signed)
            return param.replace(jnp.zeros_like(param.get_value()))

        return each(one, params)

    return CodedMoments(jnp.zeros((), jnp.int32), zeros(signed=True), zeros(signed=False))


def _quantize(means: Any, *, signed: bool) -> Any:
    """What stays of float32 means."""
    return each(lambda v: eight_bits.encode(v, signed=signed) if is_matrix(v) else v, means)


def _codes_of(kept: Any) -> bool:
    return isinstance(kept, eight_bits.Coded)
