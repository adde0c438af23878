"""A run goes on in any layout from a checkpoint of any other: state, order of the data, losses.

Nothing random is part of a state: parameters are drawn from Train.seed, the order of the data and
its augmentation from Train.seed and the place in the stream, so that the step is the position.
"""

import dataclasses
import itertools
import platform
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from conftest import make_layout

from jaxtrain.config.errors import UserError
from jaxtrain.data.loader import batches
from jaxtrain.data.source import Dataset
from jaxtrain.run.checkpoint import metadata, saved
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.compose import compose
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.settings import Checkpoint, Config, load_config
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step, averaged_params

BY_ROWS = frozenset(
    {
        ("vocab", "vocab_embed"), ("embed", "mlp"), ("mlp", "embed"),
        ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim"),
        ("heads", "head_dim", "embed"),
    }
)  # fmt: skip
# Name -> mesh and ZeRO stage, and bindings.
LAYOUTS = {
    "one": ({}, []),
    "data": ({"data": 8}, []),
    # Tables, mlps and attention split by rows, as a TPU may have them.
    "zero3": ({"fsdp": 8, "by_rows": BY_ROWS}, []),
    "zero1": ({"fsdp": 4, "data": 2, "zero": 1, "by_rows": BY_ROWS}, []),
    "masters": ({"fsdp": 2, "data": 2, "zero": 1, "masters": "sharded"}, []),
    "tensor": ({"fsdp": 4, "tensor": 2, "sequence_parallel": True}, []),
    "interleaved": (
        {"pipe": 2, "tensor": 2},
        [
            "Pipeline.schedule = 'interleaved'",
            "Pipeline.virtual_stages = 2",
            "Pipeline.microbatches = 2",
        ],
    ),
    # Six layers on four stages, so that two of them have padding.
    "uneven": ({"pipe": 4, "fsdp": 2}, ["Pipeline.microbatches = 4"]),
    "accumulated": ({"tensor": 2, "fsdp": 2}, ["Train.accumulation = 2"]),
}
# A Llama with tied embeddings: few arrays, for restoring and comparing them is most of the time.
LLAMA = """
Llama.vocab_size = 256
Llama.num_layers = 6
Llama.embed_dim = 32
Llama.num_heads = 4
Llama.num_kv_heads = 2
Llama.mlp_dim = 48
Llama.context_length = 16
Llama.tie_embeddings = True
"""
BINDINGS = [
    "Train.model = @Llama()",
    "TextData.sequence_length = 16",
    "Attention.kernel = 'reference'",
    "Optimizer.average_decay = 0.8",
    "Train.seed = 3",
]
SAVED, LAST = 2, 4
# Relative, of float32 losses (whose last bit is 1e-7): sums of a few thousand products in another
# order, in each of four steps.
TOLERANCE = 2e-6


@dataclasses.dataclass(frozen=True)
class Run:
    """A layout's program, compiled once, and its run of LAST steps, saved after SAVED of them."""

    config: Config
    dataset: Dataset
    program: Step
    step: Any
    folder: Path
    losses: list[float]
    saved: Any
    last: Any


def go_on(config, dataset, program, step, state: TrainState, first: int, last: int):
    """The state after steps `first` + 1 to `last`, and their losses."""
    train = config.train
    stream = batches(
        dataset.train,
        global_batch_size=train.global_batch_size,
        seed=train.seed,
        start=first,
        threads=0,
    )
    losses = []
    with program.setup.layout.active():
        for batch in islice(stream, last - first):
            batch = jax.device_put(batch, program.setup.batch_shardings(batch))
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    return state, losses


def in_model_order(program, state):
    """Everything that a run goes on with, layers in the model's order, on the host."""
    stacked = (state.params, state.opt_state)
    if program.setup.stages is not None:
        stacked = program.setup.stages.to_layers(jax.device_get(stacked))
    return jax.device_get((stacked, state.step, state.statistics, state.loss_scale))


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module")
def run(tiny_config, tmp_path_factory):
    """The uninterrupted run in each layout that is requested."""
    lines = tiny_config.read_text().splitlines()
    llama = tmp_path_factory.mktemp("config") / "llama.gin"
    llama.write_text("\n".join(line for line in lines if not line.startswith("GPT.")) + LLAMA)
    found = {}

    def get(name):
        if name not in found:
            sizes, bindings = LAYOUTS[name]
            config = load_config(llama, [*BINDINGS, *bindings])
            dataset = config.train.data.open(seed=config.train.seed)
            program = compose(config, make_layout(**sizes))
            step = CompiledStep(program)
            parts = (config, dataset, program, step)
            state, losses = go_on(*parts, program.create(config.train.seed), 0, SAVED)
            folder = tmp_path_factory.mktemp(name)
            checkpoints = Checkpoints(folder, Checkpoint(asynchronous=False))
            extra = metadata.describe(config, program, dataset.digest, SAVED)
            checkpoints.save(SAVED, state, extra)
            checkpoints.close()
            saved = in_model_order(program, state)
            state, more = go_on(*parts, state, SAVED, LAST)
            last = in_model_order(program, state)
            found[name] = Run(*parts, folder, losses + more, saved, last)
            assert step.on_arrays._cache_size() == 1
        return found[name]

    return get


@pytest.mark.slow_cases("zero3", "masters", "accumulated", "data", "tensor", "uneven", "zero1")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_alike(name, run):
    expected, found = run("one"), run(name)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=TOLERANCE)
    # Not vacuous: every step moves the loss, the average is not the parameters, moments are there.
    assert min(np.abs(np.diff(expected.losses))) > 1e3 * TOLERANCE
    (params, opt_state), *_ = expected.saved
    both = (params, averaged_params(opt_state, params))
    for one, average in zip(*map(jax.tree.leaves, both), strict=True):
        assert (one != average).any()
    assert all(x.any() for x in jax.tree.leaves(opt_state))


# Files hold whole arrays by their names, whatever layout writes them. Hence each layout reads its
# own files and those of one device, and one device reads each layout's. Pipelines store layers in
# the order of their stages: each of them also reads every other's.
PIPELINES = [name for name, (sizes, _) in LAYOUTS.items() if "pipe" in sizes]
# Masters that fsdp splits are ZeRO 3's parameters, of a step that is ZeRO 1's.
SHARDED = {"zero1", "zero3", "masters"}
PAIRS = [
    (writer, reader)
    for writer, reader in itertools.product(LAYOUTS, LAYOUTS)
    if writer == reader
    or "one" in (writer, reader)
    or {writer, reader} <= set(PIPELINES)
    or ("masters" in (writer, reader) and {writer, reader} <= SHARDED)
]
SLOW = ("accumulated", "data", "tensor", "uneven", "zero1")


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(*pair, marks=pytest.mark.slow if set(pair) & set(SLOW) else ())
        for pair in PAIRS
    ],
)
def test_every_layout_goes_on_from_every_other(writer, reader, run):
    written, new = run(writer), run(reader)
    checkpoints = Checkpoints(written.folder, Checkpoint(), read_only=True)
    extra = checkpoints.extra(SAVED)
    metadata.require_same_run(extra, new.config, new.dataset, step=SAVED, workdir=written.folder)
    state = saved.restore(checkpoints, SAVED, new.program)
    assert_equal(in_model_order(new.program, state), written.saved)
    wanted = jax.tree.map(lambda leaf: leaf.sharding, new.program.abstract_state())
    assert jax.tree.map(lambda x: x.sharding, state) == wanted
    parts = (new.config, new.dataset, new.program, new.step)
    state, losses = go_on(*parts, state, extra["data"]["next_batch"], LAST)
    np.testing.assert_allclose(losses, run("one").losses[SAVED:], rtol=TOLERANCE)
    if writer == reader:
        assert losses == new.losses[SAVED:]
        assert_equal(in_model_order(new.program, state), new.last)
    assert new.step.on_arrays._cache_size() == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer": {"sharpness_radius": 0.05}},
        {"exchange": {"method": "sign_sgd"}},
        {"exchange": {"method": "asynchronous", "staleness": 0}},
    ],
    ids=str,
)
def test_a_pipelines_layers_are_put_in_order_for_a_program_around_another(changed, run):
    """Its state has the same arrays, so that nothing else would tell that layers change places."""
    written = run("interleaved")
    ((section, settings),) = changed.items()
    config: Any = written.config
    section_now = dataclasses.replace(getattr(config, section), **settings)
    config = dataclasses.replace(config, pipeline=Pipeline(), **{section: section_now})
    program = compose(config, make_layout(data=2))
    checkpoints = Checkpoints(written.folder, Checkpoint(), read_only=True)
    state = saved.restore(checkpoints, SAVED, program)
    assert_equal(in_model_order(program, state), written.saved)


def test_a_pipelines_checkpoint_of_fewer_layers_is_refused(run):
    """Places that hold no layer would do for those that are missing."""
    written = run("interleaved")
    model = dataclasses.replace(written.config.train.model, num_layers=8)
    train = dataclasses.replace(written.config.train, model=model)
    config = dataclasses.replace(written.config, train=train, pipeline=Pipeline())
    checkpoints = Checkpoints(written.folder, Checkpoint(), read_only=True)
    with pytest.raises(UserError, match="has 6 layers, this configuration's model 8; use .*gin"):
        saved.restore(checkpoints, SAVED, compose(config, make_layout(fsdp=2)))


def opened(letter: str) -> Dataset:
    """Data with a digest and nothing to train on."""
    nothing: Any = ()
    return Dataset(nothing, nothing, letter * 64, {}, None, "tokens")


def test_embedded_text_of_another_python_is_named_as_the_cause():
    config = load_config("gpt_quickstart")
    versions = {**metadata.versions(), "python": "3.9.1"}
    program = compose(config, make_layout(fsdp=4, tensor=2))
    position = metadata.describe(config, program, "a" * 64, 0)["data"]
    extra = {"config": config.operative(), "data": position, "versions": versions}
    dataset = opened("b")
    now = platform.python_version()
    told = metadata.other_data(extra, config, dataset)
    assert told == f"the embedded text was that of Python 3.9.1, and is now that of {now}"
    with pytest.raises(UserError) as caught:
        metadata.require_same_run(extra, config, dataset, step=4, workdir=Path("runs"))
    told = f"under Python 3.9.1, whose library is the training text; this is {now}: "
    assert told in str(caught.value)
    assert str(caught.value).endswith("use that Python, or another --workdir")
    assert metadata.other_data(extra, config, opened("a")) is None
    other = load_config("gpt_quickstart", ["TextData.source = 'README.md'"])
    told = metadata.other_data(extra, other, dataset)
    assert told is not None
    assert told.startswith("TextData.source was 'embedded', is ")
