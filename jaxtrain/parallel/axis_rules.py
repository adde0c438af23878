"""Axis rules: which mesh axes shard which logical axis, for parameters, weights and activations.

`sharding.Layout` resolves them for one mesh into `PartitionSpec`s.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from jaxtrain.config.errors import UserError

MeshAxes = str | tuple[str, ...] | None
TensorLayout = Literal["1d", "2d", "2.5d", "3d"]


class AxisRule(NamedTuple):
    """Axis rule: the mesh axes that a dimension is split over.

    Attributes:
      parameter: of a parameter at rest; fsdp takes part from its ZeRO stage on.
      weight: of a parameter while it is computed with.
      activation: of an activation.
    """

    parameter: MeshAxes
    weight: MeshAxes
    activation: MeshAxes


_BATCH = ("data", "fsdp", "expert")
_WHOLE, _TENSOR = AxisRule(None, None, None), AxisRule("tensor", "tensor", "tensor")

#   logical axis       parameter, weight, activation
RULES: dict[str, AxisRule] = {
    "batch": AxisRule(None, None, _BATCH),
    # Rows inside attention and the MLP: a 3D layout splits them differently.
    "inner_batch": AxisRule(None, None, _BATCH),
    # Leading dimension of per-replica arrays along data (see `Exchange`).
    "replica": AxisRule("data", "data", "data"),
    "length": AxisRule(None, None, "context"),
    "residual_length": AxisRule(None, None, "context"),  # and "tensor" under sequence parallelism
    "embed": AxisRule("fsdp", None, None),
    # Along embed too, for embedding and head: every stage of a
    # pipeline keeps a part, and all of it is gathered once per step.
    "vocab_embed": AxisRule(("fsdp", "pipe"), None, None),
    "positions": _WHOLE,
    # Norm scales and biases along embed: replicated, since a collective for each of them costs more
    # latency than its few kilobytes save.
    "vector": _WHOLE,
    "mlp": _TENSOR,
    "gates": _WHOLE,  # every gate of a recurrent layer reads the whole state at every position
    "heads": _TENSOR,
    "kv_heads": _TENSOR,  # but see Layout.whole
    "head_dim": _WHOLE,
    "latent": _WHOLE,  # latent dimension of queries, or of keys and values
    "latent_in": AxisRule("fsdp", None, None),  # the same, where they are computed from it
    "vocab": _TENSOR,
    "experts": AxisRule("expert", "expert", "expert"),
    "layers": AxisRule("pipe", "pipe", None),
    "qkv": _WHOLE,
    "height": _WHOLE,
    "width": _WHOLE,
    "channels_in": _WHOLE,
    # Of a residual network, each of whose convolutions has a multiple of fsdp outputs.
    "channels": AxisRule(("tensor", "fsdp"), "tensor", "tensor"),
    "classes": _WHOLE,
    # Of a layer of any width: its output is sharded, and is gathered for the next layer.
    "fan_in": AxisRule("fsdp", None, None),
    "fan_out": _TENSOR,
    "side": _WHOLE,  # of a preconditioner's rows, sharded like the matrix's side: the whole side
    "rank": _WHOLE,  # of an adapter: its other dimensions are the weight's
    "narrow": _WHOLE,  # too few, or odd: see nn/layers.py
    "state": _WHOLE,  # of a channel of a state space
}

# What fsdp may split instead of embed; of heads, a part of each: see
# `jaxtrain.parallel.dividing.in_tiles`.
ROWS = ("vocab", "mlp", "head_dim")

# The other layouts of tensor parallelism: what differs from RULES. Axes of the mesh are gathered or
# reduced where a matmul needs it: see `jaxtrain.nn.matmul.contract.contract`.
_2D = RULES | {
    # Optimus (arXiv 2104.05343): a q x q grid, `row` x `tensor`.
    "batch": AxisRule(None, None, (*_BATCH, "row")),
    "inner_batch": AxisRule(None, None, (*_BATCH, "row")),
    "embed": AxisRule(("fsdp", "row"), None, "tensor"),
    "vocab_embed": AxisRule(("fsdp", "pipe", "row"), None, None),
    "positions": AxisRule("tensor", None, None),
    "vector": AxisRule(None, "tensor", None),
}
_2_5D = _2D | {
    # Tesseract (arXiv 2105.14500): `depth` such grids, each with its own rows of the batch.
    "batch": AxisRule(None, None, (*_BATCH, "depth", "row")),
    "inner_batch": AxisRule(None, None, (*_BATCH, "depth", "row")),
}
_3D = RULES | {
    # arXiv 2105.14450: a cube, x = `depth`, y = `row`, z = `tensor`. Rows of the batch are split
    # along x and y and embed along z; inside attention and the MLP, y and z swap.
    "batch": AxisRule(None, None, (*_BATCH, "depth", "row")),
    "inner_batch": AxisRule(None, None, (*_BATCH, "depth", "tensor")),
    # z first: gathering along the last axes moves contiguous runs.
    "embed": AxisRule(("tensor", "fsdp", "depth"), "tensor", "tensor"),
    "vocab_embed": AxisRule(("fsdp", "pipe", "depth", "row"), None, None),
    "positions": AxisRule("tensor", None, None),
    "vector": AxisRule(None, "tensor", None),
    "mlp": AxisRule("row", "row", "row"),
    "heads": AxisRule("row", "row", "row"),
    "kv_heads": AxisRule("row", "row", "row"),
}
RULES_BY_LAYOUT: dict[str, dict[str, AxisRule]] = {"1d": RULES, "2d": _2D, "2.5d": _2_5D, "3d": _3D}


def factor_tensor(layout: TensorLayout, tensor: int, depth: int) -> dict[str, int]:
    """Return the mesh axes that replace `tensor`, outermost first.

    Args:
      layout: a name in RULES_BY_LAYOUT.
      tensor: devices that share each matmul.
      depth: grids of the 2.5d layout.

    Raises:
      UserError: this number of devices does not form such a grid.
    """
    if layout == "1d":
        return {"tensor": tensor}
    if depth < 1:
        raise UserError(f"Sharding.tensor_depth={depth}: there is at least 1 grid")
    form, grids, sides = _FORMS[layout]
    grids = depth if grids is None else grids
    q = round((tensor / grids) ** (1 / sides))
    if grids * q**sides != tensor:
        low = math.floor((tensor / grids) ** (1 / sides))
        fitting = [grids * side**sides for side in (max(low, 1), max(low, 1) + 1)]
        given = f" with Sharding.tensor_depth={depth}" if layout == "2.5d" else ""
        raise UserError(
            f"Mesh.tensor={tensor} is not {form}, as Sharding.tensor_layout={layout!r}{given} has "
            f"it; the nearest are {fitting[0]} and {fitting[1]}"
        )
    if layout == "2d":
        return {"row": q, "tensor": q}
    return {"depth": depth if layout == "2.5d" else q, "row": q, "tensor": q}


# Formula of Mesh.tensor, the number of grids (None: tensor_depth), the exponent of q.
_FORMS: dict[str, tuple[str, int | None, int]] = {
    "2d": ("a square q^2", 1, 2),
    "2.5d": ("tensor_depth q^2", None, 2),
    "3d": ("a cube q^3", 1, 3),
}


def validate(layout: TensorLayout, *, depth: int, tensor: int) -> Iterator[str]:
    """Yield an error message for each reason why this layout of `Mesh.tensor` is invalid.

    Args:
      layout: a name in RULES_BY_LAYOUT.
      depth: grids of the 2.5d layout.
      tensor: the size of that axis.
    """
    if layout != "2.5d" and depth != 1:
        yield (
            f"Sharding.tensor_depth={depth} has no effect with "
            f"Sharding.tensor_layout={layout!r}; leave it at 1 or set "
            "Sharding.tensor_layout='2.5d'"
        )
    if layout == "1d" or tensor == 1:
        return
    try:
        factor_tensor(layout, tensor, depth)
    except UserError as error:
        yield str(error)
