"""Mixed precision policy: dtypes of master parameters and of compute; setting of loss scaling."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp

from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable
from jaxtrain.nn.parameters import role_of
from jaxtrain.parallel.sharding import is_variable, logical_axes


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Mixed precision: dtypes of the parameters at rest and in matmuls.

    The loss, norms and softmax are always float32.

    Attributes:
      params: the dtype of the master parameters; that of the moments is Optimizer.moments. An
        update is added in float32; to 'bfloat16' it is rounded stochastically, as moments are.
      compute: the dtype of matmuls and of the activations between them.
      float32_products: precision of float32 matmuls: 'device' is its default,
        TF32 on GPUs since Ampere and bfloat16 on TPUs; 'tf32' has at least 10 bits (three bfloat16
        matmuls on TPUs), 'float32' all 23. For Precision.compute='float32', and the routers and
        optimizers that always compute in float32. Plans price the default.
      gradients: the dtype in which gradients of microbatches are summed, on a device and between
        devices (Megatron-LM's grad_reduce_in_fp32). Those of a step with one microbatch have the
        compute dtype.
      loss_scale: None, or the factor of the loss that keeps float16 gradients from
        underflowing: a fixed number, or 'dynamic' (halved on overflow, doubled after 1,000 good
        steps).
      matmul: 'float8' computes the matmuls with weights inside a transformer's layers, forward
        and backward, in float8 (e4m3, gradients e5m2), each tensor scaled by its own largest
        element and the sums in float32. 'int8' computes the same matmuls, except the weights'
        gradients, in int8 with int32 sums, each row scaled by its own largest element. The
        embedding, the head, attention's scores and the norms are unchanged. For devices with
        units for them; a CPU computes the same values, slowly, for tests. 'mxfp8' and 'nvfp4' (a
        scale per 32 and per 16 elements) are rejected until there is a device to test them on.
    """

    params: Literal["float32", "bfloat16"] = "float32"
    compute: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    float32_products: Literal["device", "tf32", "float32"] = "device"
    gradients: Literal["float32", "bfloat16"] = "float32"
    loss_scale: Literal["dynamic"] | float | None = None
    matmul: Literal["compute", "float8", "int8", "mxfp8", "nvfp4"] = "compute"

    def __post_init__(self) -> None:
        if self.matmul in ("mxfp8", "nvfp4"):
            raise UserError(
                f"Precision.matmul={self.matmul!r}: no device that multiplies block-scaled "
                "operands (NVIDIA's Blackwell) was available to test it on; use "
                "Precision.matmul='float8' or 'compute'"
            )
        if self.compute == "float16" and self.loss_scale is None:
            raise UserError(
                "Precision.compute='float16' with Precision.loss_scale=None: gradients underflow; "
                "set Precision.loss_scale='dynamic' (or compute in 'bfloat16')"
            )
        if self.compute == "float16" and self.matmul == "float8":
            raise UserError(
                "Precision.matmul='float8' with Precision.compute='float16': a float8 product of "
                "448 x 448 is beyond float16's 65,504; use Precision.compute='bfloat16'"
            )
        if isinstance(self.loss_scale, float) and not self.loss_scale > 0:
            raise UserError(f"Precision.loss_scale={self.loss_scale}; use a number above 0")

    @contextlib.contextmanager
    def products(self) -> Iterator[None]:
        """Trace float32 matmuls with the precision `float32_products`."""
        if self.float32_products == "device":
            yield
        else:
            with jax.default_matmul_precision(_PRODUCTS[self.float32_products]):
                yield


# JAX's names.
_PRODUCTS = {"tf32": "tensorfloat32", "float32": "float32"}


def is_matrix(variable) -> bool:  # noqa: ANN001 - an NNX variable
    """Whether a parameter is the weight of a matmul or a lookup, not a scale or a bias."""
    return is_of_matrix(logical_axes(variable))


def is_of_matrix(axes: tuple[str, ...]) -> bool:
    """Whether these logical axes are those of a matrix.

    It then has at least two dimensions besides those that only stack weights; the heads' two
    dimensions count once, since together they are one side of the matmul. The rates of a channel's
    states belong to that channel.
    """
    stacked = ("layers", "qkv", "experts", "head_dim", "state")
    return sum(axis not in stacked for axis in axes) >= 2


def to_master(params, dtype: str):  # noqa: ANN001, ANN201 - any pytree of parameters, the same out
    """Cast the parameters to the master dtype; biases of routers stay float32.

    Their updates are below bfloat16's resolution.
    """

    def one(variable):  # noqa: ANN001, ANN202
        if role_of(variable) == "balance":
            return variable
        return variable.replace(variable.get_value().astype(dtype))

    return jax.tree.map(one, params, is_leaf=is_variable)


def to_compute(params, dtype: str):  # noqa: ANN001, ANN201
    """Cast the parameters to the compute dtype, matrices only.

    Norm scales and biases are unchanged and are cast where they are used: bfloat16 has 8 bits of
    precision, so a scale near 1 would lose every update below 0.4%.
    """

    def one(variable):  # noqa: ANN001, ANN202
        if not is_matrix(variable) or role_of(variable) == "quantized":
            return variable
        return variable.replace(variable.get_value().astype(jnp.dtype(dtype)))

    return jax.tree.map(one, params, is_leaf=is_variable)
