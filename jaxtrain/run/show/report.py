"""Report at the start of a run: configuration, mesh, data, parameter table."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import count_of
from jaxtrain.config.writer import changes
from jaxtrain.data.source import SENTENCES, Dataset, sentences
from jaxtrain.models.model import passes_of
from jaxtrain.nn.attention.kernel_registry import Choice
from jaxtrain.nn.parameters import role_of
from jaxtrain.parallel.sharding import Layout, by_name, logical_axes
from jaxtrain.run.checkpoint.leaves import StoredLeaf
from jaxtrain.run.checkpoint.metadata import describe_ancestors
from jaxtrain.run.show.progress import print_lines
from jaxtrain.training.corruption import replicated_fraction
from jaxtrain.training.optimizers.groups import Part, factors_of
from jaxtrain.training.optimizers.optimizer import Optimizer
from jaxtrain.training.optimizers.unfreezing import Unfreezing
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.settings import Config, Train
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState

if TYPE_CHECKING:
    from jaxtrain.training.pipeline.schedules import Stages

_NO_WAIT = Unfreezing()


def human_bytes(count: float) -> str:
    """Return a byte count in binary units, such as '1.5 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def shard_bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of one device's shard of an array."""
    sharding = array.sharding
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    return math.prod(shape) * np.dtype(array.dtype).itemsize


def parameters(state: TrainState) -> dict[str, tuple[jax.Array, tuple[str, ...]]]:
    """Return every parameter by its name: the array, and what its dimensions mean."""
    named = by_name(state.params) | by_name(state.frozen)
    return {name: (one.get_value(), logical_axes(one)) for name, one in named.items()}


def parameter_rows(state: TrainState) -> list[tuple[str, tuple[int, ...], str, str, int, int]]:
    """Name, shape, logical axes, placement, parameters and bytes per device of every parameter."""
    rows = []
    for name, (value, axes) in parameters(state).items():
        sharding: Any = value.sharding  # a NamedSharding: parameters are on a mesh
        placement = ", ".join(_part(part) for part in sharding.spec)
        rows.append(
            (
                name,
                value.shape,
                ", ".join(axes),
                placement,
                math.prod(value.shape),
                shard_bytes(value),
            )
        )
    return rows


def _part(part: str | tuple[str, ...] | None) -> str:
    if part is None:
        return "-"
    return part if isinstance(part, str) else "x".join(part)


def parameter_table(state: TrainState, waits: Unfreezing = _NO_WAIT) -> Table:
    """Return every parameter: shape, logical axes, sharding, bytes per device; and, where some
    are not, whether it is trained, or from which step on."""
    rows, trained = parameter_rows(state), by_name(state.params)
    shows_trained = bool(by_name(state.frozen)) or bool(waits.steps)
    table = Table(title="Parameters", title_justify="left", show_footer=True)
    total = f"{sum(row[4] for row in rows):,}"
    per_device = human_bytes(sum(row[5] for row in rows))
    table.add_column("name", footer="total", overflow="fold")
    table.add_column("shape", footer=total, overflow="fold")
    table.add_column("logical axes", overflow="fold")
    table.add_column("placement", overflow="fold")
    table.add_column("bytes per device", footer=per_device, justify="right")
    if shows_trained:
        count = sum(row[4] for row in rows if row[0] in trained)
        table.add_column("trained", footer=f"{count:,}", justify="right")
    for name, shape, axes, placement, _, size in rows:
        row = [name, " x ".join(map(str, shape)), axes, placement, human_bytes(size)]
        trained_from = _when(waits, name, trained[name]) if name in trained else "frozen"
        table.add_row(*row, *([trained_from] if shows_trained else []))
    return table


def _when(waits: Unfreezing, name: str, param: Any) -> str:
    """Whether a parameter is trained from the start, or which of its layers are from when on."""
    parts = waits.parts(name, param)
    if not (parts and parts[-1][0].is_whole):
        parts.append((Part(name), 0))
    return ", ".join(
        ("yes" if not step else f"from step {step:,.0f}") + _layers(part) for part, step in parts
    )


def group_table(state: TrainState, optimizer: Optimizer) -> Table:
    """Return every parameter: its role, its part of the learning rate, its decay."""
    table = Table(title="Groups", title_justify="left")
    for column in ("name", "role", "learning rate", "decay"):
        table.add_column(column, overflow="fold")
    for name, param in by_name(state.params).items():
        parts = factors_of(optimizer.learning_rates, name, param)
        if not (parts and parts[-1][0].is_whole):
            parts.append((Part(name), 1.0))
        rates = ", ".join(
            f"{optimizer.learning_rate * factor:.3g}{_layers(part)}" for part, factor in parts
        )
        decay = optimizer.decay.of(name, param)
        table.add_row(name, role_of(param) or "-", rates, f"{decay:.3g}")
    return table


def _layers(part: Part) -> str:
    """Return the layers of a setting, '' where it holds for all."""
    if part.is_whole:
        return ""
    last = "" if math.isinf(part.last) else int(part.last) - 1
    return f" (layers {part.first} to {last})" if last != "" else f" (layers from {part.first})"


def show_parameters(
    console: Console, state: TrainState, optimizer: Optimizer, waits: Unfreezing
) -> None:
    """Print the parameter table, that of groups if any, and the state's memory on
    each device."""
    console.print(parameter_table(state, waits))
    if optimizer.learning_rates or optimizer.weight_decays:
        console.print(group_table(state, optimizer))
    sizes = {
        "parameters": state.params,
        "frozen parameters": state.frozen,
        "optimizer state": state.opt_state,
        "statistics": state.statistics,
    }
    held = {name: sum(map(shard_bytes, jax.tree.leaves(tree))) for name, tree in sizes.items()}
    console.print(
        "State per device: "
        + ", ".join(f"{name} {human_bytes(size)}" for name, size in held.items() if size)
    )


def format_mesh(sizes: Mapping[str, int]) -> str:
    """Return the axes above 1: "fsdp=8 x tensor=4"."""
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"


def show_mesh(console: Console, layout: Layout) -> None:
    """Print the mesh's axes and the order of its devices."""
    mesh = layout.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    axes = format_mesh(mesh.shape)
    kind = mesh.devices.flat[0].device_kind
    stage = f"ZeRO {layout.zero}{', sharded masters' if layout.masters == 'sharded' else ''}"
    console.print(f"Mesh: {axes} over {mesh.size} {kind} device(s), {stage}")
    order = np.vectorize(lambda device: device.id)(mesh.devices)
    *outer, inner = mesh.axis_names
    table = Table(title=f"Device order, {inner} along each row", title_justify="left")
    for name in outer:
        table.add_column(name, justify="right")
    table.add_column(f"devices {inner} = 0, 1, ...")
    shown = 16
    coordinates = list(np.ndindex(order.shape[:-1]))
    for coordinate in coordinates[:shown]:
        table.add_row(*map(str, coordinate), " ".join(map(str, order[coordinate])))
    console.print(table)
    if len(coordinates) > shown:
        console.print(f"... and {count_of(len(coordinates) - shown, 'more row')}")


def show_attention(console: Console, choice: Choice | None) -> None:
    """Print the chosen attention kernel, and why; nothing for a model without attention."""
    if choice is not None:
        text = f"Attention: kernel {choice.kernel!r}, {choice.why}"
        print_lines(console, text)


def show_stages(console: Console, stages: "Stages", pipeline: Pipeline, stacks: int) -> None:
    """Print the number of layers of each pipeline stage, for each of the model's stacks."""
    layers = ", ".join(map(str, stages.cut))
    twice = "; twice around, through the encoder and the decoder" * (stacks > 1)
    padded = "" if stages.valid.all() else f", each padded to {stages.longest}"
    console.print(
        f"Pipeline: {pipeline.schedule}, {count_of(pipeline.microbatches, 'microbatch')} over "
        f"{stages.ranks} ranks; layers of each stage: {layers}{padded}{twice}"
    )


def show_run(
    console: Console,
    config: Config,
    setup: Setup,
    attention: Choice | None,
    dataset: Dataset,
    state: TrainState,
) -> None:
    """Print mesh, attention's kernel, stages, data and parameters of a run."""
    show_mesh(console, setup.layout)
    show_attention(console, attention)
    if setup.stages is not None:
        show_stages(console, setup.stages, config.pipeline, passes_of(config.train.model))
    show_facts(console, dataset.facts, dataset.digest)
    show_mixing(console, dataset, config.train)
    if config.corruption.compare_replicas_every:
        share = f"{replicated_fraction(state):.0%}"
        console.print(f"Replicas: {share} of the state's bytes have copies to be compared with")
    show_parameters(console, state, config.optimizer, setup.unfreezing)


def show_config(console: Console, gin_text: str) -> None:
    """Print the resolved configuration of a run."""
    console.print("Configuration (saved as config.gin):")
    console.print(escape(gin_text), highlight=False, soft_wrap=True)


def show_own_config(console: Console, config: Config, *, verbose: bool) -> None:
    """Print the settings that differ from their defaults, or all of them."""
    if verbose:
        show_config(console, config.to_gin())
        return
    print_lines(
        console, "Settings that differ from their defaults (config.gin has all; --verbose):"
    )
    print_lines(console, changes(config))


def show_facts(console: Console, facts: Mapping[str, object], digest: str) -> None:
    """Print facts of the data, and which files and records are skipped."""
    parts = [f"{name} {_fact(value)}" for name, value in facts.items() if name not in SENTENCES]
    prefix = f"{', '.join(parts)}; " if parts else ""
    console.print(f"Data: {prefix}sha256 {digest[:16]}", soft_wrap=True)
    print_lines(console, *sentences(facts))


def show_mixing(console: Console, dataset: Dataset, train: Train) -> None:
    """Print the sources of a mixture: sizes, weights, epochs at the run's end."""
    mixing = dataset.mixing
    if mixing is None:
        return
    size, seed = train.global_batch_size, train.seed
    seen = mixing.count_seen(train.steps, global_batch_size=size, seed=seed)
    table = Table(title=f"Mixture, after {train.steps:,} steps", title_justify="left")
    table.add_column("source")
    stages = list(mixing.stages)
    # With changing weights, the stage after the run's end is shown too.
    while stages[-1][0] >= train.steps and not (mixing.linear and stages[-2][0] < train.steps):
        stages.pop()
    word = "to step" if mixing.linear else "from step"
    shares = ["weight" if not step else f"{word} {step:,}" for step, _ in stages]
    for column in ("tokens", "rows", *shares, "rows drawn", "epochs"):
        table.add_column(column, justify="right")
    for number, source in enumerate(mixing.sources):
        name = f"{source.name} (once)" if mixing.once[number] else source.name
        weights = [f"{of_stage[number]:.4g}" for _, of_stage in stages]
        drawn = seen[source.name]
        table.add_row(
            name, f"{source.tokens:,}", f"{source.rows:,}", *weights,
            f"{drawn.rows:,}", f"{drawn.epochs:.2f}",
        )  # fmt: skip
    console.print(table)


def _fact(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def show_checkpoint(
    console: Console, folder: AnyPath, extra: Mapping[str, Any], tree: Mapping[str, StoredLeaf]
) -> None:
    """Print a checkpoint's step, versions, configuration and arrays."""
    console.print(f"Checkpoint of step {folder.name} in {folder}", soft_wrap=True)
    versions = ", ".join(f"{name} {version}" for name, version in extra["versions"].items())
    console.print(f"Format {extra['format']}, written with {versions}", soft_wrap=True)
    for name, value in extra["data"].items():
        console.print(f"{name}: {value}", soft_wrap=True)
    print_lines(console, *describe_ancestors(extra.get("ancestors", [])))
    show_config(console, extra["config"])
    table = Table(title="Arrays", title_justify="left", show_footer=True)
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in tree.values())
    table.add_column("name", footer=f"{len(tree)} arrays", overflow="fold")
    table.add_column("shape", overflow="fold")
    table.add_column("dtype")
    table.add_column("sharding", overflow="fold")
    table.add_column("bytes", footer=human_bytes(total), justify="right")
    for name, leaf in tree.items():
        mesh = "" if leaf.mesh is None else " on " + "x".join(map(str, leaf.mesh.values()))
        spec = ", ".join(_part(_to_tuple(part)) for part in leaf.spec or ())
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        table.add_row(
            name, " x ".join(map(str, leaf.shape)), leaf.dtype.name, spec + mesh, human_bytes(size)
        )
    console.print(table)


def _to_tuple(part: Any) -> str | tuple[str, ...] | None:
    return tuple(part) if isinstance(part, list) else part
