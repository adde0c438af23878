"""`Pipeline`: settings of pipeline parallelism, and the layers of each stage.

`timetables.py` builds the schedules.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config.errors import UserError, count_of
from jaxtrain.config.reader import configurable
from jaxtrain.nn.execution import Scan
from jaxtrain.nn.execution import validate as validate_scan
from jaxtrain.nn.parameters import is_layer
from jaxtrain.parallel.sharding import is_variable, logical_axes

if TYPE_CHECKING:
    from jaxtrain.training.pipeline.timetables import Timetable

Name = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "dualpipe_v"]
SCHEDULES: tuple[str, ...] = get_args(Name)
# Their weight gradients are deferred until a rank is idle.
SPLIT = ("zero_bubble", "dualpipe_v")

Backward = Literal["recompute", "residuals"]

# Microbatches times virtual stages: this many on 4 ranks are scheduled in 10 seconds, four times as
# many in minutes.
MOST_TURNS = 4096


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Pipeline-parallel schedule of the stages over `Mesh.pipe`; only where Mesh.pipe is above 1.

    Attributes:
      schedule: 'gpipe': all forwards, then all backwards (arXiv 1811.06965); '1f1b': one forward,
        one backward, so that few microbatches are live (PipeDream-flush, arXiv 2006.09503);
        'interleaved': 1f1b over virtual stages (arXiv 2104.04473); 'zero_bubble': 1f1b whose
        weight gradients fill idle ticks (ZB-H1's time and ZB-H2's
        memory, arXiv 2401.10241); 'dualpipe_v': the same over two stages on each rank, down the
        ranks and back up, so that about half as much is live (DualPipe, arXiv 2412.19437, cut in
        half). In one tick all ranks run the same kind of work, so that none waits.
      microbatches: parts that each accumulated batch is cut into; more make the bubble smaller.
      virtual_stages: stages on each rank; at least 2 with 'interleaved', 2 with 'dualpipe_v',
        otherwise 1.
      backward: 'recompute' a stage from its saved input, or save the 'residuals' of its forward.
    """

    schedule: Name = "1f1b"
    microbatches: int = 1
    virtual_stages: int = 1
    backward: Backward = "recompute"

    def __post_init__(self) -> None:
        validate_schedule(self.schedule, self.microbatches, self.virtual_stages)

    @property
    def folded(self) -> bool:
        """Whether stages are folded along a V: `Timetable.folded`."""
        return self.schedule == "dualpipe_v"

    def table(self, ranks: int, *, passes: int = 1, train: bool = True) -> "Timetable":
        """Return the table of these settings on `ranks` ranks, or that of evaluation;
        `make_schedule`."""
        # Imported here: most runs have no pipeline.
        from jaxtrain.training.pipeline.timetables import forward_only, make_schedule

        if not train:
            chunks = self.virtual_stages * passes
            return forward_only(ranks, self.microbatches, chunks, folded=self.folded)
        return make_schedule(
            self.schedule, ranks=ranks, microbatches=self.microbatches,
            virtual_stages=self.virtual_stages, passes=passes,
        )  # fmt: skip


def validate(
    settings: Pipeline,
    ranks: int,
    *,
    num_layers: int | None,
    written: str = "num_layers",
    passes: int = 1,
    scan: Scan,
) -> Iterator[str]:
    """Yield an error message for each reason why a model's layers cannot be the stages of this
    schedule.

    Args:
      settings: the pipeline's.
      ranks: of the pipeline; 1 is none.
      num_layers: layers that are split into stages, of each pass; None: the model has none.
      written: the setting of their number, for messages.
      passes: as in `make_schedule`.
      scan: the loop over a stage's layers.
    """
    if ranks == 1:
        for field in dataclasses.fields(settings):
            value, default = getattr(settings, field.name), field.default
            if value != default:
                yield (
                    f"Pipeline.{field.name}={value!r} has no effect with Mesh.pipe=1; set "
                    f"Mesh.pipe above 1 or leave it at {default!r}"
                )
        return
    try:
        settings.table(ranks, passes=passes)
    except UserError as error:
        yield str(error)
    if num_layers is None:
        return
    try:
        longest = max(cut_layers(num_layers, ranks * settings.virtual_stages, written=written))
    except UserError as error:
        yield str(error)
        return
    of_stage = f"the {count_of(longest, 'layer')} of the longest stage"
    yield from validate_scan(scan, num_layers=longest, written=of_stage)


def validate_schedule(schedule: str, microbatches: int, virtual_stages: int) -> None:
    """Raise UserError for microbatches or virtual stages that the schedule does not support."""
    for name, value in (("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if value < 1:
            raise UserError(f"Pipeline.{name}={value}; use at least 1")
        if value > MOST_TURNS:
            raise UserError(f"Pipeline.{name}={value}; use at most {MOST_TURNS}")
    written = f"Pipeline.virtual_stages={virtual_stages} with Pipeline.schedule={schedule!r}"
    if schedule == "interleaved" and virtual_stages < 2:
        raise UserError(
            f"{written}: it needs at least 2 virtual stages; set Pipeline.virtual_stages=2 or "
            "Pipeline.schedule='1f1b'"
        )
    if schedule == "dualpipe_v" and virtual_stages != 2:
        raise UserError(
            f"{written}: each rank has one stage of the forward order and one of the reverse "
            "order; set Pipeline.virtual_stages=2"
        )
    if schedule in ("gpipe", "1f1b", "zero_bubble") and virtual_stages > 1:
        raise UserError(
            f"{written}: only 'interleaved' and 'dualpipe_v' have virtual stages; set "
            "Pipeline.virtual_stages=1 or Pipeline.schedule='interleaved'"
        )


@functools.lru_cache(maxsize=1024)  # a search needs few cuts, each often
def cut_layers(
    num_layers: int,
    num_stages: int,
    *,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
    longest: int | None = None,
    written: str = "num_layers",
) -> tuple[int, ...]:
    """Return the number of layers of each stage, balanced by cost.

    The most expensive stage is as cheap as possible: every tick waits for it. Among the cuts of
    which that is true: the smallest sum of squared costs, then the fewest layers on the two ends,
    which also have embedding and head, then the fewest on early stages, which keep more
    microbatches alive.

    Args:
      num_layers: layers of the model.
      num_stages: ranks x virtual stages; each has at least one layer.
      first_cost: cost of the embedding, in layers.
      last_cost: cost of the head and the loss, in layers.
      longest: no stage has more layers; None is no bound. Where every stage is padded to the
        longest one, ceil(num_layers / num_stages) keeps the padding least.
      written: the setting of the number of layers, for messages.

    Raises:
      UserError: fewer layers than stages.
    """
    if num_layers < num_stages:
        raise UserError(
            f"{written}={num_layers} does not fill {num_stages} pipeline stages (Mesh.pipe x "
            f"Pipeline.virtual_stages), one layer each; use {written}={num_stages} or at most "
            f"{count_of(num_layers, 'stage')}"
        )
    longest = num_layers if longest is None else longest
    assert longest * num_stages >= num_layers, "stages too short for the layers"
    assert min(first_cost, last_cost) >= 0
    if num_stages == 1:
        return (num_layers,)
    inner = num_stages - 2
    best = None
    for first, last in itertools.product(range(1, min(longest, num_layers) + 1), repeat=2):
        middle = num_layers - first - last
        if middle < inner or middle > inner * longest:
            continue
        # Stages in between cost the same, so they differ by one layer at most.
        layers, more = divmod(middle, inner) if inner else (0, 0)
        cut = (first, *[layers] * (inner - more), *[layers + 1] * more, last)
        costs = (first + first_cost, *cut[1:-1], last + last_cost)
        key = (max(costs), sum(cost**2 for cost in costs), first + last, cut)
        if best is None or key < best:
            best = key
    assert best is not None
    return best[-1]


# -- layers of each stage --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stages:
    """Assignment of a model's layers to pipeline stages.

    They are placed on the ranks by `table.stage_on`. The stacked parameters are kept in
    stage order: rank after rank, chunk after chunk, each chunk padded to the longest stage, so that
    sharding the "layers" dimension over `pipe` gives every rank its own layers.

    Attributes:
      ranks: devices along `pipe`.
      cut: layers of each stage, the first stage first.
      folded: whether the stages go down the ranks and back up, as a V.
    """

    ranks: int
    cut: tuple[int, ...]
    folded: bool = False

    @property
    def longest(self) -> int:
        """Number of layers in the longest stage, to which chunks are padded."""
        return max(self.cut)

    @property
    def chunks(self) -> int:
        """Number of stages on each rank (virtual stages)."""
        return len(self.cut) // self.ranks

    @functools.cached_property
    def order(self) -> np.ndarray:
        """Layer at each index of the stage order, -1 for padding; int32 [slots]."""
        # Imported here: most runs have no stages.
        from jaxtrain.training.pipeline.timetables import stage_on

        first = np.cumsum((0, *self.cut))
        slots = []
        for rank in range(self.ranks):
            for chunk in range(self.chunks):
                stage = stage_on(rank, chunk, self.ranks, folded=self.folded)
                layers = range(first[stage], first[stage + 1])
                slots += [*layers, *[-1] * (self.longest - len(layers))]
        return np.array(slots, np.int32)

    @functools.cached_property
    def valid(self) -> np.ndarray:
        """Whether each index holds a layer; bool [slots]."""
        return self.order >= 0

    def to_stages(self, tree: Any) -> Any:
        """Return named arrays with their layers in stage order, zeros as padding."""
        return rearrange(tree, range(sum(self.cut)), self.order.tolist())

    def to_layers(self, tree: Any) -> Any:
        """Return named arrays with their layers in the model's order."""
        return rearrange(tree, self.order.tolist(), range(sum(self.cut)))


def deal(params: nnx.State, ranks: int, chunks: int, *, folded: bool = False) -> Stages:
    """Return a model's stages: contiguous runs of layers, balanced by cost.

    The longest stage has ceil(layers / stages) layers, so that no rank keeps more than it must;
    within that, the stage with the output matrix gets fewer.

    Args:
      params: the parameters' shapes, in the model's order.
      ranks: devices along `pipe`.
      chunks: stages on each of them.
      folded: as in `Stages`.
    """
    sizes = {True: 0, False: 0}
    count, output = 0, 0
    for variable in jax.tree.leaves(params, is_leaf=is_variable):
        shape, axes = variable.get_value().shape, logical_axes(variable)
        if is_layer(variable):
            count = shape[0]
        sizes[is_layer(variable)] += math.prod(shape)
        if axes[0] == "vocab":
            output = math.prod(shape)  # tied or not, the output matrix is one [V, D]
    last_cost = output / (sizes[True] / count)
    stages = ranks * chunks
    longest = math.ceil(count / stages)
    return Stages(ranks, cut_layers(count, stages, last_cost=last_cost, longest=longest), folded)


def rearrange(tree: Any, present: Sequence[int], wanted: Sequence[int]) -> Any:
    """Reorder the layers of named arrays from the order `present` to the order `wanted`.

    Args:
      tree: parameters, or optimizer state; what has no layers is unchanged.
      present: the layer in each slot, -1 for padding.
      wanted: likewise; padding becomes zeros.
    """
    slots = {layer: slot for slot, layer in enumerate(present)}
    # A slot beyond the last is filled with zeros.
    index = np.array([len(present) if n < 0 else slots[n] for n in wanted], np.int32)

    def one(variable: Any) -> Any:
        if not (is_variable(variable) and is_layer(variable)) or list(present) == list(wanted):
            return variable
        value = variable.get_value()
        return variable.replace(jnp.take(value, index, axis=0, mode="fill", fill_value=0))

    return jax.tree.map(one, tree, is_leaf=is_variable)
