"""PartitionSpecs from logical axes for one mesh, and the ZeRO stages; `shard` for activations.

A parameter declares the logical axes of its dimensions (`("embed", "mlp")`); the axis rules
(`axis_rules.py`) map them to the mesh axes that split them. All mesh axes are
`AxisType.Explicit`: shardings are part of the types, and change only where a `reshard` says so.
Hardly anything else in the package names a mesh axis for an array.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError, did_you_mean, nearest_multiple
from jaxtrain.config.reader import configurable
from jaxtrain.parallel.axis_rules import ROWS, RULES_BY_LAYOUT, AxisRule, MeshAxes, TensorLayout
from jaxtrain.parallel.axis_rules import validate as validate_tensor_layout

Accumulate = Literal["shard", "local"]
Masters = Literal["whole", "sharded"]
# Logical axes that are not split if any number of rows is accepted: `Trainer.logits`.
_OF_THE_BATCH = ("batch", "inner_batch", "length", "residual_length")

# NNX would otherwise shard variables by itself while a module is being built.
nnx.use_eager_sharding(False)


# Why other stages cannot have replicated weights with sharded masters.
MASTERS_ELSEWHERE = {
    0: "stage 0 shards nothing and updates whole parameters",
    2: "stage 2 shards the gradients of whole parameters",
    3: "stage 3 splits the parameters already, and gathers one layer at a time "
    "(Sharding.accumulate='local': all at once)",
}


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
    """Sharding beyond the batch: ZeRO stages (FSDP), tensor parallelism, sequence parallelism.

    Attributes:
      zero: what the fsdp axis shards (ZeRO, arXiv 1910.02054): 0 nothing, 1 the optimizer state,
        2 and the gradients, 3 and the parameters.
      sequence_parallel: shard the residual stream between tensor-parallel blocks over `tensor`
        along the sequence (arXiv 2205.05198).
      tensor_layout: how Mesh.tensor devices share a matmul: '1d' (Megatron, arXiv
        1909.08053); '2d' (a q x q grid, Optimus, arXiv 2104.05343); '2.5d' (tensor_depth grids,
        Tesseract, arXiv 2105.14500); '3d' (a cube, arXiv 2105.14450).
      tensor_depth: grids of the 2.5d layout: Mesh.tensor = tensor_depth q^2.
      collective_matmul: with sequence_parallel, matmuls process a part of the sequence while
        the next one is sent around `tensor`, instead of gathering and scattering all of it (doi
        10.1145/3567955.3567959).
      accumulate: where stages 2 and 3 add up the gradients of microbatches: 'shard' gathers weights
        and scatters gradients along fsdp for every microbatch; 'local' gathers and scatters once a
        step, and every device holds whole weights and float32 gradients meanwhile.
      masters: where stage 1 keeps the parameters in Precision.params: 'whole' on every device of
        the fsdp axis, or 'sharded' over it as the moments are (Megatron-LM's distributed
        optimizer): a step then casts and gathers them once into whole weights in
        Precision.compute.
    """

    zero: Literal[0, 1, 2, 3] = 3
    sequence_parallel: bool = False
    collective_matmul: bool = False
    tensor_layout: TensorLayout = "1d"
    tensor_depth: int = 1
    accumulate: Accumulate = "shard"
    masters: Masters = "whole"


def validate(settings: Sharding, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield an error message for each reason why this sharding is invalid on a mesh of
    these sizes.
    """
    yield from validate_tensor_layout(
        settings.tensor_layout, depth=settings.tensor_depth, tensor=sizes["tensor"]
    )


def validate_length(
    settings: Sharding, sizes: Mapping[str, int], *, length: int, written: str
) -> Iterator[str]:
    """Yield an error message if sequences do not divide over the devices of the residual stream.

    Args:
      settings: what is sharded.
      sizes: of every axis in Mesh.
      length: of the sequences.
      written: the setting that causes it.
    """
    tensor, parts = sizes["tensor"], sizes["context"] * sizes["tensor"]
    if not settings.sequence_parallel:
        return
    if length % tensor:
        yield (
            f"{written}={length} does not divide over Mesh.tensor={tensor} "
            f"(Sharding.sequence_parallel); the nearest is {nearest_multiple(length, tensor)}"
        )
    elif length % parts and tensor > 1:
        yield (
            f"{written}={length} does not divide over Mesh.context x Mesh.tensor="
            f"{parts} (Sharding.sequence_parallel); the nearest is "
            f"{nearest_multiple(length, parts)}"
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """Axis rules resolved for one mesh: from logical axes to PartitionSpecs.

    Attributes:
      mesh: the device mesh, or an abstract one.
      zero: the ZeRO stage.
      sequence_parallel: whether the residual stream is sharded over `tensor`.
      collective_matmul: as in `Sharding`.
      split_batch: whether activations are split over the batch and along the sequence;
        `Trainer.logits` turns this off.
      manual: mesh axes that the code being traced handles itself, inside a `jax.shard_map` over
        them (or a `jax.vmap` over replicas): no spec mentions these.
      tensor_layout: key of its axis rules in RULES_BY_LAYOUT.
      whole: logical axes of parameters that are not split over the tensor axes, because their size
        does not divide: kv heads, each of which then serves several devices.
      unstaged: logical axes of parameters that the stages of a pipeline do not split, because their
        size does not divide: every stage has all of it.
      one_batch: those of `manual` whose devices have rows of one batch, or positions of its rows,
        and share its statistics.
      accumulate, masters: as in `Sharding`.
      by_rows: logical axes, as `own_axes` has them, of parameters that fsdp splits along the one of
        ROWS in place of embed, whose shards would be less than a tile.
    """

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    zero: int = 3
    sequence_parallel: bool = False
    collective_matmul: bool = False
    split_batch: bool = True
    manual: frozenset[str] = frozenset()
    tensor_layout: TensorLayout = "1d"
    whole: frozenset[str] = frozenset()
    unstaged: frozenset[str] = frozenset()
    one_batch: frozenset[str] = frozenset()
    accumulate: Accumulate = "shard"
    masters: Masters = "whole"
    by_rows: frozenset[tuple[str, ...]] = frozenset()

    @classmethod
    def of(
        cls,
        mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
        settings: Sharding,
        num_kv_heads: int | None = None,
    ) -> "Layout":
        """Return the layout of a run.

        Args:
          mesh: the device mesh, or an abstract one.
          settings: what is sharded.
          num_kv_heads: key-value heads of the model; None where it has no attention.
        """
        layout = cls(
            mesh,
            settings.zero,
            settings.sequence_parallel,
            settings.collective_matmul,
            tensor_layout=settings.tensor_layout,
            accumulate=settings.accumulate,
            masters=settings.masters,
        )
        devices = layout.size(layout.weight(("kv_heads",))[0])
        if num_kv_heads is None or num_kv_heads % devices == 0:
            return layout
        return dataclasses.replace(layout, whole=frozenset({"kv_heads"}))

    @property
    def of_microbatches(self) -> "Layout":
        """Return the layout between a step's first gather and its last reduction: of
        `accumulate='local'` and `masters='sharded'` that of ZeRO 1, with weights and gradients
        whole along fsdp.
        """
        if self.accumulate == "shard" and self.masters == "whole":
            return self
        return dataclasses.replace(
            self, zero=min(self.zero, 1), accumulate="shard", masters="whole"
        )

    @property
    def splits_parameters(self) -> bool:
        """Whether fsdp splits the parameters at rest."""
        return self.zero == 3 or self.masters == "sharded"

    def activation(self, axes: tuple[str, ...]) -> P:
        """Return the PartitionSpec of an activation."""
        return self._spec(axes, [self._activation_axis(axis) for axis in axes])

    def weight(self, axes: tuple[str, ...]) -> P:
        """Return the PartitionSpec of a parameter during the computation: gathered over fsdp.

        Layers stay on their stage; embedding and head are gathered over pipe too.
        """
        return _of_stage(self, None, axes)

    def parameter(self, axes: tuple[str, ...]) -> P:
        """Return the PartitionSpec of a parameter at rest."""
        return _of_stage(self, 1 if self.masters == "sharded" else 3, axes)

    def gradient(self, axes: tuple[str, ...]) -> P:
        """Return the PartitionSpec of an accumulated gradient."""
        return _of_stage(self, 2, axes)

    def moment(self, axes: tuple[str, ...]) -> P:
        """Return the PartitionSpec of optimizer state, and of parameters and gradients during the
        update.
        """
        return _of_stage(self, 1, axes)

    def batch_devices(self) -> int:
        """Return the number of devices that the batch is split over."""
        return self.size(self.activation(("batch",))[0])

    def size(self, part: MeshAxes) -> int:
        """Return the number of devices that split a dimension with this part of a spec."""
        return math.prod(self.mesh.shape[name] for name in parts_of(part))

    def sharding_of(self, spec: P) -> NamedSharding:
        """Return the sharding of this mesh with this spec."""
        return NamedSharding(self.mesh, spec)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Activate this layout (and its mesh) for `shard` and `gather` while tracing."""
        assert isinstance(self.mesh, jax.sharding.Mesh), "an abstract mesh has no devices"
        with jax.set_mesh(self.mesh), self.current():
            yield

    def check_active(self) -> None:
        """Check that some layout is active, which a step over several devices needs.

        Raises:
          UserError: none is.
        """
        if _LAYOUT.get() is None and self.mesh.size > 1:
            raise UserError(
                f"the step of a program over {self.mesh.size} devices is called where its layout "
                "is not active; use trainer.functions.train_step(state, batch) and eval_step, or "
                "call it within `with trainer.layout.active():`"
            )

    @contextlib.contextmanager
    def enter_manual(self, *axes: str) -> Iterator["Layout"]:
        """Activate the layout for code inside a `jax.shard_map` over these axes."""
        layout = self.with_manual(*axes)
        with layout.current():
            yield layout

    def with_manual(self, *axes: str) -> "Layout":
        """Return the layout with these mesh axes manual too: its specs omit them."""
        return dataclasses.replace(self, manual=self.manual | set(axes))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Activate this layout where the mesh is set already."""
        token = _LAYOUT.set(self)
        try:
            yield
        finally:
            _LAYOUT.reset(token)

    def _rule(self, axis: str) -> AxisRule:
        rules = RULES_BY_LAYOUT[self.tensor_layout]
        if axis not in rules:
            raise ValueError(f"unknown logical axis {axis!r}{did_you_mean(axis, rules)}")
        return rules[axis]

    def _of_parameter(self, axis: str) -> AxisRule:
        rule = self._rule(axis)
        if axis in self.unstaged:
            rule = rule._replace(parameter=without(rule.parameter, ("pipe",)))
        return AxisRule(None, None, rule.activation) if axis in self.whole else rule

    def _activation_axis(self, axis: str) -> MeshAxes:
        part = self._rule(axis).activation
        if axis in _OF_THE_BATCH and not self.split_batch:
            return None
        if axis == "residual_length" and self.sequence_parallel:
            return (*parts_of(part), "tensor")
        return part

    def _spec(self, axes: tuple[str, ...], parts: list[MeshAxes]) -> P:
        used = [name for part in parts for name in parts_of(part)]
        if len(set(used)) != len(used):
            raise ValueError(f"{axes} would shard two dimensions over one mesh axis: {parts}")
        unseen = self.manual | {name for name, size in self.mesh.shape.items() if size == 1}
        return P(*(without(part, unseen) for part in parts))


@functools.lru_cache(maxsize=65536)  # a search needs a few specs of thousands of layouts
def _of_stage(layout: Layout, stage: int | None, axes: tuple[str, ...]) -> P:
    """Return the PartitionSpec of a parameter during the computation (None), or of what ZeRO splits
    from this stage on.
    """
    rules = [layout._of_parameter(axis) for axis in axes]
    if stage is None:
        return layout._spec(axes, [rule.weight for rule in rules])
    kept = [rule.parameter for rule in rules]
    if own_axes(axes) in layout.by_rows:
        kept = [
            "fsdp" if axis in ROWS else without(part, ("fsdp",))
            for axis, part in zip(axes, kept, strict=True)
        ]
    if layout.zero < stage:
        kept = [without(part, ("fsdp",)) for part in kept]
    return layout._spec(axes, kept)


_LAYOUT: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("layout", default=None)


def parts_of(part: MeshAxes) -> tuple[str, ...]:
    """Return the mesh axes in one dimension's part of a PartitionSpec."""
    return () if part is None else (part,) if isinstance(part, str) else part


def without(part: MeshAxes, dropped: Collection[str]) -> MeshAxes:
    """Return a dimension's part of a spec without these mesh axes."""
    kept = tuple(name for name in parts_of(part) if name not in dropped)
    return None if not kept else kept[0] if len(kept) == 1 else kept


def shard(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Reshard activation `x` by its logical axes; unchanged without a mesh."""
    layout = _LAYOUT.get()
    if layout is None:
        return x
    if x.ndim != len(axes):
        raise ValueError(f"an array of shape {x.shape} has {len(axes)} axis names: {axes}")
    return jax.sharding.reshard(x, layout.activation(axes))


def reshape(x: jax.Array, shape: Sequence[int], parts: Sequence[MeshAxes]) -> jax.Array:
    """Return x with this shape, each dimension sharded as its part of a spec says."""
    if jax.sharding.get_abstract_mesh().empty:
        return x.reshape(shape)
    return jax.lax.reshape(x, shape, out_sharding=P(*parts))


def current_layout() -> Layout | None:
    """Return the layout of the code being traced; None without a mesh."""
    return _LAYOUT.get()


def on_each_device(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """Run `function` on each device with its own shards, under the current layout.

    Replication cannot be checked through a kernel or a hand-written collective, so every result
    is trusted to match `out_specs`; tests compare it with one device.
    """
    layout = _LAYOUT.get()
    assert layout is not None, "no layout is active"
    # Inside a pipeline stage the axis pipe is manual already, and context inside a ring. Generation
    # hides them as well, but is not inside a shard_map, nor is data when one replica's shapes are
    # needed; XLA's CPU compiler aborts on bfloat16 sums between devices while an axis is not
    # manual.
    idle = {"pipe", "context", "data"} - set(jax.sharding.get_abstract_mesh().manual_axes)
    free = set(layout.mesh.axis_names) - (layout.manual - idle)

    def run(*shards: Any) -> Any:
        with layout.enter_manual(*free):
            return function(*shards)

    return jax.shard_map(
        run, in_specs=in_specs, out_specs=out_specs, axis_names=free, check_vma=False
    )


def reduce_scatter_tokens(x_BTD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum [B, T, D] over the devices along mesh axes; each device keeps its own positions
    (reduce-scatter).
    """
    B, T, D = x_BTD.shape
    if B > 1:
        return jax.lax.psum_scatter(x_BTD, axes, scatter_dimension=1, tiled=True)
    # With a dimension of 1 before it a TPU's compiler scatters nothing: it sums the whole.
    return jax.lax.psum_scatter(x_BTD.reshape(T, D), axes, tiled=True)[None]


def along(
    over: tuple[str, ...], function: Callable[..., Any], *arguments: Any, out_specs: Any
) -> Any:
    """Run `function(*arguments)` for each index of some mesh axes; the others stay explicit.

    Between the two regions the other axes are automatic: a `shard_map` of JAX 0.10 treats what no
    spec mentions as replicated over EXPLICIT axes, and gathers it at its boundary.

    Args:
      over: the mesh axes; collectives inside name them.
      function: takes the arguments' parts along these axes.
      arguments: pytrees of arrays.
      out_specs: the whole specs of the results, or a prefix of their tree.
    """
    layout = _LAYOUT.get()
    assert layout is not None, "no layout is active"
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, arguments)
    others = tuple(set(layout.mesh.axis_names) - layout.manual - set(over))

    def explicit(*parts: Any) -> Any:
        with layout.enter_manual(*over):
            return function(*parts)

    def manual(*parts: Any) -> Any:
        inside = _each_spec(specs, over)
        return jax.sharding.explicit_axes(explicit, axes=others, in_sharding=inside)(*parts)

    mapped = jax.shard_map(
        manual,
        in_specs=_each_spec(specs, others),
        out_specs=_each_spec(out_specs, others),
        axis_names=set(over),
        check_vma=False,
    )
    return jax.sharding.auto_axes(mapped, axes=others, out_sharding=out_specs)(*arguments)


def _each_spec(specs: Any, dropped: Collection[str]) -> Any:
    """Return the tree of specs without these mesh axes."""
    return jax.tree.map(
        lambda spec: P(*(without(part, dropped) for part in spec)),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )


def mean_over_batch(means):  # noqa: ANN001, ANN201 - any pytree of arrays, the same out
    """Turn means over this device's rows into means over all rows of the batch.

    Explicit axes need no correction: there an array's mean is over all of it. Devices along an
    axis of `Layout.one_batch` each hold equally many rows of the batch, and see only their own.
    """
    layout = _LAYOUT.get()
    if layout is None or not layout.one_batch:
        return means
    return jax.lax.pmean(means, tuple(sorted(layout.one_batch)))


def size_of_batch(size: int) -> int:
    """Return the size in the global batch of a dimension that has `size` on this device."""
    layout = _LAYOUT.get()
    return size if layout is None else size * layout.size(tuple(layout.one_batch))


def activation_spec(axes: tuple[str, ...]) -> P | None:
    """Return the PartitionSpec that `shard` would use, for `out_sharding=`; None without a mesh."""
    layout = _LAYOUT.get()
    return None if layout is None else layout.activation(axes)


def is_variable(x: object) -> bool:
    """Whether `x` is an NNX variable: the leaf of a tree of named parameters."""
    return isinstance(x, nnx.Variable)


def name_of(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf of a tree, its keys joined: 'layers/up'."""
    # A variable is a node with one child "value"; the array has the variable's name.
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Return names, leaves and structure of a pytree; a name joins the keys with "/"."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [name_of(path) for path, _ in paths]
    assert len(set(names)) == len(names), "two leaves of the state have one name"
    return names, [leaf for _, leaf in paths], treedef


def by_name(tree: Any) -> dict[str, nnx.Variable]:
    """Return the variables of a tree by name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable)
    return {name_of(path): variable for path, variable in leaves}


def logical_axes(variable: nnx.Variable) -> tuple[str, ...]:
    """Return the logical axis names of a parameter's dimensions, as its model declared them."""
    return variable.get_metadata()["axes"]


def own_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the logical axis names of one layer's parameter on one replica."""
    return tuple(axis for axis in axes if axis not in ("replica", "layers"))


def shardings(tree, spec, layout: Layout):  # noqa: ANN001, ANN201 - any pytree in, the same out
    """Return the tree with a NamedSharding instead of each array; unnamed leaves are replicated.

    Args:
      tree: a pytree whose NNX variables name their axes.
      spec: one of the layout's methods: `layout.parameter`, `layout.moment`, `layout.gradient`.
      layout: the layout.
    """

    def one(leaf):  # noqa: ANN001, ANN202
        if is_variable(leaf):
            return leaf.replace(layout.sharding_of(spec(logical_axes(leaf))))
        return layout.sharding_of(P())

    return jax.tree.map(one, tree, is_leaf=is_variable)


def reshard(tree, spec, layout: Layout):  # noqa: ANN001, ANN201
    """Return the tree with each named array moved to the sharding that `spec` gives."""
    return jax.tree.map(
        lambda v: v.replace(jax.sharding.reshard(v.get_value(), spec(logical_axes(v)))),
        tree,
        is_leaf=is_variable,
    )
