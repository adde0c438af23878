"""Named policies for recomputing or offloading activations in the backward pass."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import jax

from jaxtrain.config.reader import configurable
from jaxtrain.config.values import OneOf
from jaxtrain.parallel.gathering import GATHERED, gathers_weights

RESIDUAL = "residual"  # the name that blocks give the residual stream they receive
KEPT = "kept"  # the name of a kernel's results, in place of what it makes on the way to them
PRODUCT = "product"  # the name of a product with a weight, in place of the sums it is scaled from

_policies = jax.checkpoint_policies


# What is as quick to do again as to read back: one pass over what it is given, fused into the pass
# that asks for it.
_CHEAP = frozenset(
    {
        "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "concatenate",
        "convert_element_type", "copy", "cos", "div", "eq", "erf", "exp", "exp2", "expand_dims",
        "expm1", "ge", "gt", "integer_pow", "iota", "le", "log", "log1p", "logistic", "lt", "max",
        "mesh_cast", "min", "mul", "name", "ne", "neg", "not", "one_minus_square", "or",
        "pad", "pow", "reshape", "reshard", "rsqrt", "select_n", "sign", "sin", "slice", "split",
        "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose",
    }
)  # fmt: skip


def all_but_gathered_weights(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """The policy of 'none'.

    What a reshard gives is not kept either: it is the same weight before it got its name.
    """
    return primitive.name != "reshard" and parameters.get("name") != GATHERED


def _dear(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Gathered weights are not: they have a name and are reshards."""
    return primitive.name not in _CHEAP or parameters.get("name") in (KEPT, PRODUCT)


@dataclasses.dataclass(frozen=True)
class Policy:
    """What the backward pass has of a layer's forward pass.

    Attributes:
      saves: what jax.checkpoint asks of each result: whether, or where, the backward pass has it.
      repeats_products: whether the layer's products with weights run again, but for its last.
      offloads: whether what is kept lies in the host's memory.
    """

    saves: Callable[..., Any]
    repeats_products: bool = False
    offloads: bool = False


# What each value of Remat.policy keeps; those that keep most first.
POLICIES = {
    "none": Policy(all_but_gathered_weights),
    "elementwise": Policy(_dear),
    "dots": Policy(
        _policies.save_from_both_policies(
            _policies.dots_with_no_batch_dims_saveable, _policies.save_only_these_names(PRODUCT)
        )
    ),
    "full": Policy(_policies.nothing_saveable, repeats_products=True),
    "offload": Policy(
        _policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[RESIDUAL],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        repeats_products=True,
        offloads=True,
    ),
}


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Remat:
    """What the backward pass keeps of each layer's forward pass.

    Attributes:
      policy: 'none' keeps everything but weights gathered over fsdp; 'elementwise' keeps what is
        dear (results of products, reductions and kernels) and does elementwise work again, which
        is faster where memory is slow, as on CPUs; 'dots' keeps the results of
        matrix products with weights and recomputes the rest; 'full' keeps each layer's input only
        (arXiv 1604.06174); 'offload' keeps each layer's input too, but in host memory.
    """

    policy: Annotated[str, OneOf(tuple(POLICIES))] = "none"

    @property
    def kept(self) -> Policy:
        """What the policy's name stands for."""
        return POLICIES[self.policy]


def remat(layer: Callable[..., Any], policy: Policy, *, prevent_cse: bool) -> Callable[..., Any]:
    """The function `layer`, recomputed in the backward pass as the policy says.

    Args:
      layer: the function.
      policy: one of `POLICIES`.
      prevent_cse: False inside a scan, whose loop body already keeps XLA from merging the passes.
    """
    if policy.saves is all_but_gathered_weights and not gathers_weights():
        return layer
    return jax.checkpoint(layer, policy=policy.saves, prevent_cse=prevent_cse)
