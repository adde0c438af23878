"""What moves between devices in a real step, compiled for TPUs, is what the textbook says.

Every array that a collective moves is matched: kind, mesh axis, dtype, dimensions and how often a
step. What is left over on either side fails.
"""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import pytest
from conftest import lower_step, make_step, needs_libtpu, text_batch

from jaxtrain.analysis.planning.compiled.collectives import collectives
from jaxtrain.analysis.planning.machines.targets import tpu_devices
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.precision import Precision
from jaxtrain.nn.remat import POLICIES
from jaxtrain.parallel.mesh import Mesh, make_mesh
from jaxtrain.parallel.sharding import Layout, Sharding, is_variable

pytestmark = needs_libtpu

# The TPU compiler scatters along whole tiles (16 rows of bfloat16, 128 columns) and reduces smaller
# pieces in full: hence a head_dim of 128, an embed_dim of 256, and 16 places on each of 8 devices.
LAYERS, VOCAB, LENGTH, ROWS = 3, 128, 128, 8
MODELS = {
    "llama": Llama(
        vocab_size=VOCAB, num_layers=LAYERS, embed_dim=256, num_heads=2, num_kv_heads=2,
        mlp_dim=512, context_length=LENGTH,
    ),
    "llama8": Llama(
        vocab_size=VOCAB, num_layers=LAYERS, embed_dim=256, num_heads=8, num_kv_heads=8,
        mlp_dim=512, context_length=LENGTH,
    ),
    "gpt": GPT(
        vocab_size=VOCAB, num_layers=LAYERS, embed_dim=256, num_heads=2, context_length=LENGTH
    ),
}  # fmt: skip
COMPUTE, COMPUTE_BYTES = "bf16", 2

# One array that is moved: (kind, axis, dtype, dimensions above 1 in ascending order).
Moved = tuple[str, str, str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way of laying out the step, and the closed form of its traffic.

    Attributes:
      model: a name in MODELS.
      layout: the mesh's axes, `zero`, `masters`, `sequence_parallel` and `accumulation`.
      expected: parameters -> how often a step each array is moved.
    """

    model: str
    layout: dict[str, Any]
    expected: "collections.abc.Callable[[list[Weight]], collections.Counter[Moved]]"


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter: its name, its layer's dimensions, in how many layers it stands.

    Attributes:
      name: path in the model.
      shape: dimensions without the layers.
      copies: layers, or 1.
      axes: what the dimensions mean, without the layers.
    """

    name: str
    shape: tuple[int, ...]
    copies: int
    axes: tuple[str, ...]

    @property
    def is_matrix(self) -> bool:
        return len([a for a in self.axes if a not in ("qkv", "head_dim")]) > 1

    @property
    def split(self) -> bool:
        """Whether fsdp splits it from its ZeRO stage on."""
        return any(axis in ("embed", "vocab_embed") for axis in self.axes)

    @property
    def dtype(self) -> str:
        """Of its gradient: that of the computation, but norms compute in float32."""
        return "f32" if "norm" in self.name else COMPUTE

    @property
    def rows(self) -> tuple[int, ...]:
        """Dimensions of the whole as rows [embed, the rest], in which form it is scattered once."""
        (embed,) = (n for n, a in zip(self.shape, self.axes, strict=True) if "embed" in a)
        return dims(embed, math.prod(self.shape) // embed)

    def dims(self, devices: int = 1) -> tuple[int, ...]:
        """Dimensions of one of `devices` shards."""
        split = [devices if axis in ("embed", "vocab_embed") else 1 for axis in self.axes]
        return dims(*(size // parts for size, parts in zip(self.shape, split, strict=True)))


def dims(*sizes: int) -> tuple[int, ...]:
    return tuple(sorted(size for size in sizes if size > 1))


def weights(model) -> list[Weight]:
    shapes = jax.eval_shape(lambda: model.build(jax.random.key(0)))
    found = []
    for path, variable in jax.tree_util.tree_leaves_with_path(shapes, is_leaf=is_variable):
        if not is_variable(variable):
            continue
        shape, axes = variable.get_value().shape, variable.get_metadata()["axes"]
        layers = axes[0] == "layers"
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found.append(Weight(name, shape[layers:], shape[0] if layers else 1, axes[layers:]))
    return found


# -- the closed forms ----------------------------------------------------------------------------


def data_parallel(
    axis: str, parameters: list[Weight], dtype: str | None = None
) -> collections.Counter:
    """Every gradient is all-reduced once."""
    moved = collections.Counter()
    for weight in parameters:
        moved["all-reduce", axis, dtype or weight.dtype, weight.dims()] += weight.copies
    return moved


def zero1(
    axis: str, devices: int, parameters: list[Weight], dtype: str | None = None
) -> collections.Counter:
    """Gradients of matrices are reduce-scattered once a step, updated float32 parameters
    gathered; those of vectors are all-reduced."""
    moved = data_parallel(axis, [weight for weight in parameters if not weight.split], dtype)
    for weight in parameters:
        if weight.split:
            moved["reduce-scatter", axis, dtype or weight.dtype, weight.rows] += weight.copies
            moved["all-gather", axis, "f32", weight.dims(devices)] += weight.copies
    return moved


def sharded_masters(
    axis: str, devices: int, parameters: list[Weight], dtype: str | None = None
) -> collections.Counter:
    """As of ZeRO 1, but for the weights: gathered before the first pass in the dtype that they are
    computed in."""
    moved = collections.Counter()
    for (kind, over, given, dims), times in zero1(axis, devices, parameters, dtype).items():
        moved[kind, over, COMPUTE if kind == "all-gather" else given, dims] += times
    return moved


def zero1_of_replicas(devices: int, parameters: list[Weight]) -> collections.Counter:
    """ZeRO 1 over fsdp of sums in float32; each device's shards are all-reduced over data."""
    matrices = [weight for weight in parameters if weight.split]
    moved = zero1("fsdp", devices, matrices, "f32")
    for weight in matrices:
        moved["all-reduce", "data", "f32", weight.dims(devices)] += weight.copies
    vectors = [weight for weight in parameters if not weight.split]
    return moved + data_parallel("data+fsdp", vectors, "f32")


def zero2(axis: str, devices: int, parameters: list[Weight]) -> collections.Counter:
    """Gradients of matrices are reduce-scattered, updated float32 parameters gathered."""
    moved = collections.Counter()
    for weight in parameters:
        if not weight.split:
            moved["all-reduce", axis, weight.dtype, weight.dims()] += weight.copies
            continue
        moved["reduce-scatter", axis, weight.dtype, weight.dims()] += weight.copies
        moved["all-gather", axis, "f32", weight.dims(devices)] += weight.copies
    return moved


def zero3(axis: str, devices: int, parameters: list[Weight]) -> collections.Counter:
    """A layer's weights are gathered twice, those around the layers once; gradients are
    reduce-scattered."""
    moved = collections.Counter()
    for weight in parameters:
        if not weight.split:
            moved["all-reduce", axis, weight.dtype, weight.dims()] += weight.copies
            continue
        times = 2 * weight.copies if weight.copies > 1 else 1
        moved["all-gather", axis, weight.dtype, weight.dims(devices)] += times
        moved["reduce-scatter", axis, weight.dtype, weight.dims()] += weight.copies
    return moved


def hybrid(devices: int, accumulation: int, parameters: list[Weight]) -> collections.Counter:
    """HSDP: ZeRO 3 over fsdp in every pass; then each device's shards, and the vectors, are
    all-reduced over data once."""
    moved = collections.Counter()
    for array, times in zero3("fsdp", devices, parameters).items():
        moved[array] = times * accumulation
    for weight in parameters:
        shard = weight.dims(devices) if weight.split else weight.dims()
        dtype = weight.dtype if accumulation == 1 else "f32"
        moved["all-reduce", "data", dtype, shard] += weight.copies
    if accumulation > 1:
        # In the loop over microbatches the compiler sums one of the two tables whole: half a tile
        # of columns is each device's.
        table = dims(VOCAB, 256)
        moved["reduce-scatter", "fsdp", COMPUTE, table] -= accumulation
        moved["all-reduce", "fsdp", COMPUTE, table] += accumulation
    return moved


def vocabulary_loss() -> collections.Counter:
    """One number a token each: the greatest logit (of bfloat16 logits, which loses nothing), the
    sum of exponentials, the target's logit."""
    per_token = dims(ROWS, LENGTH)
    return collections.Counter(
        {
            ("all-reduce", "tensor", COMPUTE, per_token): 1,
            ("all-reduce", "tensor", "f32", per_token): 2,
        }
    )


def tensor(parameters: list[Weight]) -> collections.Counter:
    """4 all-reduces of [B, T, D] a layer; one where the vocabulary's rows are looked up, one where
    the gradient leaves the logits."""
    stream = dims(ROWS, LENGTH, 256)
    moved = collections.Counter({("all-reduce", "tensor", COMPUTE, stream): 4 * LAYERS + 2})
    return moved + vocabulary_loss()


def sequence(parameters: list[Weight]) -> collections.Counter:
    """Each all-reduce as a reduce-scatter and an all-gather; each device has seen a part of the
    tokens, so the gradients of norms are summed."""
    whole, part = dims(ROWS, LENGTH, 256), dims(ROWS, LENGTH // 8, 256)
    moved = collections.Counter(
        {
            ("reduce-scatter", "tensor", COMPUTE, whole): 4 * LAYERS + 2,
            ("all-gather", "tensor", COMPUTE, part): 4 * LAYERS + 2,
        }
    )
    vectors = [weight for weight in parameters if weight.axes == ("vector",)]
    return moved + data_parallel("tensor", vectors) + vocabulary_loss()


MODES = {
    "data": Mode("llama", {"data": 8}, functools.partial(data_parallel, "data")),
    "data gpt": Mode("gpt", {"data": 8}, functools.partial(data_parallel, "data")),
    "zero0": Mode("llama", {"fsdp": 8, "zero": 0}, functools.partial(data_parallel, "fsdp")),
    "zero1": Mode("llama", {"fsdp": 8, "zero": 1}, functools.partial(zero1, "fsdp", 8)),
    "masters": Mode(
        "llama",
        {"fsdp": 8, "zero": 1, "masters": "sharded"},
        functools.partial(sharded_masters, "fsdp", 8),
    ),
    "zero2": Mode("llama", {"fsdp": 8, "zero": 2}, functools.partial(zero2, "fsdp", 8)),
    "zero3": Mode("llama", {"fsdp": 8, "zero": 3}, functools.partial(zero3, "fsdp", 8)),
    "hsdp": Mode("llama", {"data": 2, "fsdp": 4}, functools.partial(hybrid, 4, 1)),
    "tensor": Mode("llama8", {"tensor": 8}, tensor),
    "sequence": Mode("llama8", {"tensor": 8, "sequence_parallel": True}, sequence),
}

# Sums of microbatches, in float32, cross once, however many there are.
for times in (2, 10):
    summed = {
        "data": ({"data": 8}, functools.partial(data_parallel, "data", dtype="f32")),
        "zero0": ({"fsdp": 8, "zero": 0}, functools.partial(data_parallel, "fsdp", dtype="f32")),
        "zero1": ({"fsdp": 8, "zero": 1}, functools.partial(zero1, "fsdp", 8, dtype="f32")),
        "masters": (
            {"fsdp": 8, "zero": 1, "masters": "sharded"},
            functools.partial(sharded_masters, "fsdp", 8, dtype="f32"),
        ),
        "replicas, zero1": (
            {"data": 2, "fsdp": 4, "zero": 1}, functools.partial(zero1_of_replicas, 4),
        ),
        "hsdp": ({"data": 2, "fsdp": 4}, functools.partial(hybrid, 4, times)),
    }  # fmt: skip
    for name, (sizes, form) in summed.items():
        MODES[f"{name}, {times} microbatches"] = Mode(
            "llama", {**sizes, "accumulation": times}, form
        )
SLOW = [name for name in MODES if "10" in name and name[:4] != "data"]
SLOW += ["zero0, 2 microbatches", "hsdp, 2 microbatches"]


@functools.cache
def step_of(model: str, num_layers: int = LAYERS, remat: str = "none", **layout: Any):
    """The compiled step and its mesh."""
    zero, sequence_parallel = layout.pop("zero", 3), layout.pop("sequence_parallel", False)
    accumulation, masters = layout.pop("accumulation", 1), layout.pop("masters", "whole")
    mesh = make_mesh(Mesh(**{"fsdp": 1, **layout}), tpu_devices("v5e:2x4"))
    program = make_step(
        dataclasses.replace(MODELS[model], num_layers=num_layers),
        Layout(mesh, zero, bool(sequence_parallel), masters=masters),
        precision=Precision(compute="bfloat16"),
        execution=Execution(kernel="reference", remat=POLICIES[remat]),
        accumulation=accumulation,
    )
    # The traffic is decided before the compiler searches for fast tilings: spare the search.
    options = {"exec_time_optimization_effort": -1.0}
    rows = ROWS * accumulation
    batch = text_batch(rows=rows, length=LENGTH, vocab_size=VOCAB)
    return lower_step(program, batch).compile(options), mesh


def moved_by(found) -> collections.Counter:
    """Arrays moved; gradients of all layers in one array count as one of each layer."""
    moved = collections.Counter()
    for one in found:
        stacked = one.shape[0] == LAYERS and one.count == 1 and len(one.shape) > 1
        shape = one.shape[1:] if stacked else one.shape
        moved[one.kind, one.axis, one.dtype, dims(*shape)] += LAYERS if stacked else one.count
    return moved


CASES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODES]


# Each is compiled once for both tests. Left are weights gathered, gradients scattered and summed.
DEAR = pytest.mark.slow_cases(
    "data", "data gpt", "data, 10 microbatches", "data, 2 microbatches", "hsdp", "masters",
    "masters, 2 microbatches",  # tests/test_sharded_masters.py compiles it for TPUs
    "replicas, zero1, 2 microbatches", "sequence", "tensor", "zero0", "zero1, 2 microbatches",
    "zero2",
)  # fmt: skip


# The cases that are left run the same code.
@pytest.mark.slow_cases("zero1")
@DEAR
@pytest.mark.parametrize("name", CASES)
def test_traffic_equals_the_closed_form(name):
    mode = MODES[name]
    parameters = weights(MODELS[mode.model])
    compiled, mesh = step_of(mode.model, **mode.layout)
    found = collectives(compiled.as_text(), mesh)
    scalars = [one for one in found if one.bytes <= 4]
    # Loss, its weight, and the gradient norm's share of every parameter, at most twice each.
    assert sum(one.count for one in scalars) <= 2 * (len(parameters) + 2)
    loops = int("accumulation" in mode.layout)  # over microbatches, not over layers
    assert all(one.kind == "all-reduce" for one in scalars)
    assert max(one.op_name.count("while") for one in scalars) <= loops
    moved = moved_by(one for one in found if one not in scalars)
    expected = mode.expected(parameters)
    assert sorted((moved - expected).items()) == []  # not in the textbook
    assert sorted((expected - moved).items()) == []  # in the textbook alone


@DEAR
@pytest.mark.parametrize("name", CASES)
def test_the_audit_explains_it_too(name):
    """The product's list of what a step moves, of the same compiled programs."""
    from test_planning_traffic import WHOLE, audited, config_of, faults  # which takes MODELS

    mode = MODES[name]
    sizes = dict(mode.layout)
    sharding = Sharding(
        zero=sizes.pop("zero", 3),
        sequence_parallel=sizes.pop("sequence_parallel", False),
        masters=sizes.pop("masters", "whole"),
    )
    accumulation = sizes.pop("accumulation", 1)
    config = config_of(
        MODELS[mode.model], sizes, sharding=sharding, rows=ROWS * accumulation,
        accumulation=accumulation,
    )  # fmt: skip
    step, mesh = step_of(mode.model, **mode.layout)
    rows = audited(config, step.as_text(), dict(mesh.shape))
    assert faults(rows, {WHOLE} if name.startswith("hsdp,") else set()) == []


@pytest.mark.slow
def test_zero3_temporaries_do_not_grow_with_the_layers_weights():
    """A layer adds its saved input and its gradient's shard; its gathered weights come and go."""
    layer = sum(
        COMPUTE_BYTES * math.prod(w.shape) for w in weights(MODELS["llama"]) if w.copies > 1
    )
    saved = COMPUTE_BYTES * LENGTH * 256 * ROWS // 8
    shard = 4 * layer // COMPUTE_BYTES // 8  # of the gradient, in float32

    def temporaries(num_layers: int) -> int:
        compiled, _ = step_of("llama", num_layers, "full", fsdp=8)
        return compiled.memory_analysis().temp_size_in_bytes

    growth = (temporaries(2 * LAYERS) - temporaries(LAYERS)) / LAYERS
    assert growth < 2 * (saved + shard)
    assert 2 * (saved + shard) < layer


@pytest.mark.slow  # which has its two programs
def test_sums_of_microbatches_take_one_float32_gradient_however_many_there_are():
    parameters = sum(w.copies * math.prod(w.shape) for w in weights(MODELS["llama"]))

    def temporaries(microbatches: int) -> int:
        compiled, _ = step_of("llama", data=8, accumulation=microbatches)
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2) > 4 * parameters
    # Ten microbatches' tokens and masks, cut out of the batch, are what more there may be.
    assert temporaries(10) - temporaries(2) < 0.05 * 4 * parameters
