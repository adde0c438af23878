"""Rematerialization (activation checkpointing): policies, and names of saved activations."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.reader import configurable
from jaxtrain.config.values import OneOf
from jaxtrain.parallel.gathering import GATHERED, gathers_weights

RESIDUAL = "residual"  # the name that blocks give the residual stream they receive
KEPT = "kept"  # the name of a kernel's results, saved instead of its intermediates
PRODUCT = "product"  # the name of a matmul with a weight, saved instead of its unscaled sums

_policies = jax.checkpoint_policies

# Every activation that layers name, by its name in Remat.save and Remat.offload:
# its meaning.
NAMES = {
    RESIDUAL: "the residual stream that a layer receives",
    "query": "queries, before the rotary embedding",
    "key": "keys, before the rotary embedding",
    "value": "values",
    "attention": "output of the heads, before the output projection",
    "attention_out": "output of attention, added to the residual stream",
    "mlp_gate": (
        "output of the gate projection, before the activation function; per expert in a mixture"
    ),
    "mlp_up": (
        "output of the up projection, before the activation function; per expert in a mixture"
    ),
    "mixer_in": "input of a recurrence or a state space",
    "mixer": "its output, before the gate",
}
# Kernels with a custom derivative and unnamed results: cuDNN's attention and
# those of Pallas, by the names of their primitives.
_KERNELS = ("dot_product_attention_fwd_wrapper", "pallas_call")
# Names of Pallas kernels other than attention: experts' grouped matmuls.
OF_ROWS, OF_WEIGHTS = "grouped_rows", "grouped_weights"


def name_activation(x: jax.Array, name: str) -> jax.Array:
    """Name the activation x for Remat.save and Remat.offload; one of `NAMES`."""
    assert name in NAMES, name
    return checkpoint_name(x, name)


# Operations that are as fast to recompute as to load: one pass over their inputs, fused into the
# pass that uses them.
_CHEAP = frozenset(
    {
        "abs", "add", "add_any", "and", "bitcast_convert_type", "broadcast_in_dim", "clamp",
        "concatenate", "convert_element_type", "copy", "cos", "div", "eq", "erf", "exp", "exp2",
        "expand_dims", "expm1", "ge", "gt", "integer_pow", "iota", "le", "log", "log1p",
        "logistic", "lt", "max",
        "mesh_cast", "min", "mul", "name", "ne", "neg", "not", "one_minus_square", "or",
        "pad", "pow", "reshape", "reshard", "rsqrt", "select_n", "sign", "sin", "slice", "split",
        "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose",
    }
)  # fmt: skip


def all_but_gathered_weights(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Return the policy of 'none'.

    The result of a reshard is not saved either: it is the same weight before it is named, or a
    gathered stream. Nor is a reshape of it, which would be the same array.
    """
    return primitive.name not in ("reshard", "reshape") and parameters.get("name") != GATHERED


def _dear(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Gathered weights are not saved: they are named reshards."""
    return primitive.name not in _CHEAP or parameters.get("name") in (KEPT, PRODUCT)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Remat policy: what the backward pass reuses of a layer's forward pass.

    Attributes:
      saves: the policy function of jax.checkpoint: whether, or where, a result is saved.
      repeats_products: whether the layer's matmuls with weights are recomputed, except its last and
        those that are saved by name.
      names: activations saved by name, on the device or on its host.
    """

    saves: Callable[..., Any]
    repeats_products: bool = False
    names: frozenset[str] = frozenset()

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is recomputed if no weights are gathered."""
        return self.saves is all_but_gathered_weights

    def having(self, save: tuple[str, ...], offload: tuple[str, ...]) -> "Policy":
        """Return the same policy that also saves activations by name, on the device or on its
        host."""
        if not save and not offload:
            return self
        by_name = _policies.save_and_offload_only_these_names(
            names_which_can_be_saved=save,
            names_which_can_be_offloaded=offload,
            offload_src="device",
            offload_dst="pinned_host",
        )
        naming = _naming()

        def saves(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
            name = parameters["name"] if primitive is naming else None
            if name == KEPT or _is_attention(primitive, parameters):
                name = "attention"
            if name not in (*save, *offload):
                return self.saves(primitive, *arguments, **parameters)
            return by_name(naming, *arguments, name=name)

        return dataclasses.replace(self, saves=saves, names=self.names | {*save, *offload})


def is_grouped(parameters: dict[str, Any]) -> bool:
    """Whether a `pallas_call` with these parameters is one of `grouped_kernel`."""
    return parameters.get("name") in (OF_ROWS, OF_WEIGHTS)


def _is_attention(primitive: Any, parameters: dict[str, Any]) -> bool:
    return primitive.name in _KERNELS and not is_grouped(parameters)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def elementwise(function: Callable[..., jax.Array], *inputs: jax.Array) -> jax.Array:
    """function(*inputs), elementwise, saving only the inputs for the backward pass.

    The function is recomputed. JAX's own saves every intermediate, some in float32.
    """
    return function(*inputs)


def _forward(function: Callable[..., jax.Array], *inputs: jax.Array) -> tuple[jax.Array, Any]:
    return function(*inputs), inputs


def _backward(function: Callable[..., jax.Array], inputs: Any, gradient: jax.Array) -> Any:
    return jax.vjp(function, *inputs)[1](gradient)


elementwise.defvjp(_forward, _backward)


@functools.cache
def _naming() -> Any:
    """Return the primitive that names an activation, as policies receive it."""
    return jax.make_jaxpr(lambda x: checkpoint_name(x, RESIDUAL))(0.0).eqns[0].primitive


# What each value of Remat.policy saves; those that save most first.
POLICIES = {
    "none": Policy(all_but_gathered_weights),
    "elementwise": Policy(_dear),
    "dots": Policy(
        _policies.save_from_both_policies(
            _policies.dots_with_no_batch_dims_saveable, _policies.save_only_these_names(PRODUCT)
        )
    ),
    "full": Policy(_policies.nothing_saveable, repeats_products=True),
}
POLICIES["offload"] = POLICIES["full"].having(save=(), offload=(RESIDUAL,))


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Remat:
    """Rematerialization: what is saved of each layer's forward pass.

    Attributes:
      policy: 'none' saves everything except weights gathered over fsdp; 'elementwise' saves what is
        expensive (results of matmuls, reductions, kernels) and recomputes elementwise work, which
        is faster where memory is slow, as on CPUs; 'dots' saves the results of
        matmuls with weights and recomputes the rest; 'full' saves each layer's input only
        (arXiv 1604.06174); 'offload' saves each layer's input too, but in host memory.
      save: activations that are saved whatever the policy, by the names that layers
        give them: 'residual' 'query' 'key' 'value' 'attention' (of kernels that save no scores,
        with the residuals of their own backward pass) 'attention_out' 'mlp_gate' 'mlp_up'
        'mixer_in' 'mixer' (of states and recurrences). With 'full' these alone are not recomputed.
      offload: like `save`, but the activations are kept in pinned host memory; a name may be in
        only one of `save` and `offload`.
    """

    policy: Annotated[str, OneOf(tuple(POLICIES))] = "none"
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sentences = list(_errors_of(self))
        if sentences:
            raise UserError("\n".join(sentences))

    @property
    def kept(self) -> Policy:
        """Return the policy that a name and the activations' names select."""
        return _policy_of(self)

    @property
    def offloads(self) -> bool:
        """Whether any activation is offloaded to host memory."""
        return self.policy == "offload" or bool(self.offload)

    @property
    def named(self) -> dict[str, tuple[str, ...]]:
        """Activations saved by name, by setting."""
        return {"Remat.save": self.save, "Remat.offload": self.offload}


@functools.cache
def _policy_of(settings: Remat) -> Policy:
    return POLICIES[settings.policy].having(settings.save, settings.offload)


def _errors_of(settings: Remat) -> Iterator[str]:
    """Yield each reason why activations cannot be saved by these names."""
    for setting, names in settings.named.items():
        for name in names:
            if name not in NAMES:
                yield (
                    f"{setting}={names}: no layer names an activation "
                    f"{name!r}{did_you_mean(name, NAMES)}"
                )
    for name in settings.save:
        if name in settings.offload:
            yield f"Remat.save and Remat.offload both have {name!r}; leave it in one of them"


def validate(settings: Remat) -> Iterator[str]:
    """Yield each reason why a policy and the activation names are incompatible."""
    for setting, names in settings.named.items():
        if names and settings.policy == "none":
            yield (
                f"{setting}={names} with Remat.policy='none', which saves all other activations "
                "too; use Remat.policy='full' to save only these, or 'dots'"
            )
    if settings.policy == "offload" and RESIDUAL in (*settings.save, *settings.offload):
        yield (
            f"Remat.policy='offload' has {RESIDUAL!r} in host memory already; leave it out of "
            "Remat.save and Remat.offload, or use Remat.policy='full'"
        )


def remat(layer: Callable[..., Any], policy: Policy, *, prevent_cse: bool) -> Callable[..., Any]:
    """Return `layer` with rematerialization by the policy.

    Args:
      layer: the function.
      policy: one of `POLICIES`.
      prevent_cse: False inside a scan, whose loop body already keeps XLA from merging the passes.
    """
    if policy.keeps_all and not gathers_weights():
        return layer
    return jax.checkpoint(layer, policy=policy.saves, prevent_cse=prevent_cse)
