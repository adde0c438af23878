"""Claims of `jaxtrain verify`: the computations to compare, with measured errors and tolerances."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.analysis.verify import packing, sample
from jaxtrain.analysis.verify.measures import (
    EQUAL,
    ROUNDING,
    Arrays,
    Claim,
    Finding,
    NotChecked,
    band,
    bits,
    equal,
    relative,
    relative_norm,
    same_bits,
    worst,
)
from jaxtrain.analysis.verify.runs import Bench, MeshRun
from jaxtrain.analysis.verify.sample import SEED
from jaxtrain.data.batch import Batch, kind_of
from jaxtrain.data.loader import batches
from jaxtrain.models.model import AttentionFacts, reads_images, reads_pairs
from jaxtrain.nn.attention.attention import Attention, attention, by_device
from jaxtrain.nn.attention.context import HEADS, KEYS, QUERIES, SEGMENTS, along_context
from jaxtrain.nn.attention.kernel_registry import KERNELS, TILE
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Scan
from jaxtrain.nn.parameters import is_layer
from jaxtrain.nn.precision import is_matrix
from jaxtrain.nn.remat import Remat
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.parallel.sharding import is_variable
from jaxtrain.run.checkpoint import metadata, saved
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.layouts import resolve_config
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.state import TrainState

# -- the attention kernel: outputs and gradients against the reference -----------------------------
# Letters: B batch, T length, N query heads, K kv heads, H head_dim.

RESULTS = ("output", "query gradient", "key gradient", "value gradient", "sink gradient")


def kernel_of(bench: Bench) -> str:
    """Return the name of the user's kernel, with 'auto' resolved for the simulated devices."""
    if bench.small.own.attention.kernel != "auto":
        return bench.small.own.attention.kernel
    return resolve_config(bench.within_stages.config, "cpu").attention.kernel


def kernel_name(bench: Bench) -> str:
    """Return the kernel's display name."""
    own, kernel = bench.small.own.attention.kernel, kernel_of(bench)
    return repr(own) if own == kernel else f"{own!r} (here {kernel!r})"


def compare_kernel(bench: Bench) -> Finding | NotChecked:
    """Compare the user's kernel on the mesh of one stage with the reference on one device."""
    own = kernel_of(bench)
    kernel = KERNELS[own]
    chip, interpreted = (kernel.only_on or "").upper(), kernel.interpreted
    if kernel.only_on is not None and interpreted is None:
        return NotChecked(f"{own!r} needs a {chip}; the other lines are proved with 'xla'")
    mesh, model = bench.within_stages, bench.small.config.train.model
    length = bench.batch.inputs.shape[1] if interpreted is None else TILE
    facts = model.attention
    assert facts is not None, "a kernel of a model without attention"
    inputs = _inputs(bench, facts, length)
    plain = Mask(
        causal=facts.causal, window=facts.window, softcap=facts.softcap, pattern=facts.pattern
    )
    where = ""
    if interpreted is not None:
        where = f" (interpreted: no {chip} is here; the other lines are proved with 'xla')"
        run = functools.partial(by_device, interpreted, of_one_too=True)
        found = _run_kernel(bench.one_device.layout, run, inputs, plain, "ring")
    else:
        method = mesh.config.attention.context_parallel

        def run_kernel(q: Any, k: Any, v: Any, mask: Mask) -> jax.Array:
            return attention(q, k, v, mask, kernel=own, context_parallel=method)

        found = _run_kernel(mesh.layout, run_kernel, inputs, plain, method)
    expected = _run_kernel(bench.one_device.layout, attention, inputs, plain, "ring")
    error, name = worst(found, expected)
    return Finding(error, EQUAL, f"largest in {name}{where}")


@dataclasses.dataclass(frozen=True)
class _Inputs:
    q_BTNH: np.ndarray
    k_BTKH: np.ndarray
    v_BTKH: np.ndarray
    weights_BTNH: np.ndarray
    segment_ids_BT: np.ndarray | None
    sinks_N: np.ndarray | None


def _inputs(bench: Bench, facts: AttentionFacts, length: int) -> _Inputs:
    rng = np.random.default_rng(SEED)
    rows = len(bench.batch.inputs)

    def draw(heads: int, width: int) -> np.ndarray:
        return rng.normal(size=(rows, length, heads, width)).astype(np.float32)

    segments = None
    if bench.batch.segment_ids is not None:
        segments = 1 + np.cumsum(rng.random((rows, length)) < 0.1, axis=1, dtype=np.int32)
    few, many = facts.num_kv_heads, facts.num_heads
    keys, values = facts.key_dim, facts.value_dim
    arrays = draw(many, keys), draw(few, keys), draw(few, values), draw(many, values)
    sinks = rng.normal(size=many).astype(np.float32) if facts.sinks else None
    return _Inputs(*arrays, segments, sinks)


def _run_kernel(
    layout: Any,
    attend: Callable[..., jax.Array],
    inputs: _Inputs,
    plain: Mask,
    method: str,
) -> Arrays:
    """Return the output and the gradients of its weighted sum, in token order."""

    def both(arrays: _Inputs) -> Any:
        segments: Any = arrays.segment_ids_BT
        mask = dataclasses.replace(plain, segment_ids_BT=segments, segment_ids_BS=segments)

        def weighted_sum(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            out_BTNH = attend(q, k, v, dataclasses.replace(mask, sinks_N=sinks))
            return (out_BTNH * arrays.weights_BTNH).sum(), out_BTNH

        gradient = jax.grad(weighted_sum, argnums=(0, 1, 2, 3), has_aux=True)
        gradients, out_BTNH = gradient(arrays.q_BTNH, arrays.k_BTKH, arrays.v_BTKH, arrays.sinks_N)
        return out_BTNH, *gradients

    def arrange(x_BT: jax.Array) -> jax.Array:
        return along_context(x_BT, method)

    with layout.active():
        rows, length = inputs.q_BTNH.shape[:2]
        order_BT = np.asarray(jax.jit(arrange)(jnp.tile(jnp.arange(length), (rows, 1))))
        order = order_BT[0]
        axes = {
            "q_BTNH": QUERIES, "k_BTKH": KEYS, "v_BTKH": KEYS, "weights_BTNH": QUERIES,
            "segment_ids_BT": SEGMENTS, "sinks_N": HEADS,
        }  # fmt: skip
        placed: dict[str, Any] = {"segment_ids_BT": None, "sinks_N": None}
        for field in dataclasses.fields(inputs):
            array = getattr(inputs, field.name)
            if array is not None:
                sharding = layout.sharding_of(layout.activation(axes[field.name]))
                placed[field.name] = jax.device_put(_in_order(array, order), sharding)
        compiled = jax.jit(lambda values: both(_Inputs(**values))).lower(placed).compile()
        found = [np.asarray(x) for x in jax.tree.leaves(compiled(placed))]
    back = np.argsort(order)
    return {name: _in_order(x, back) for name, x in zip(RESULTS, found, strict=False)}


def _in_order(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Permute the positions of an array; return attention sinks, which have none, unchanged."""
    return x if x.ndim == 1 else x[:, order]


# -- resume, and gradient exchanges that start like the synchronous one ----------------------------

STEPS_BEFORE, STEPS_AFTER = 2, 2


def check_resume(bench: Bench) -> Finding:
    """Compare a run that is saved, restored and resumed with an uninterrupted one."""
    mesh = bench.meshes[0]
    config = mesh.config
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), config.checkpoint)
        state, _ = _run_saved(bench, mesh, mesh.fresh(), 0, STEPS_BEFORE)
        extra = metadata.describe(config, mesh.training, bench.data.digest, STEPS_BEFORE)
        checkpoints.save(STEPS_BEFORE, state, extra)
        checkpoints.wait()
        straight, expected = _run_saved(bench, mesh, state, STEPS_BEFORE, STEPS_AFTER)
        straight = mesh.name_arrays(straight)
        position = checkpoints.extra(STEPS_BEFORE)["data"]["next_batch"]
        state = saved.restore(checkpoints, STEPS_BEFORE, mesh.training)
        state, found = _run_saved(bench, mesh, state, position, STEPS_AFTER)
        checkpoints.close()
    state = mesh.name_arrays(state)
    different = [name for name in straight if not same_bits(state[name], straight[name])]
    for number, (one, other) in enumerate(zip(found, expected, strict=True), STEPS_BEFORE + 1):
        different += [
            f"{name} of step {number}" for name in other if not same_bits(one[name], other[name])
        ]
    return bits(different, len(straight) + sum(map(len, expected)), "arrays and metrics")


def check_exchange(bench: Bench) -> Finding:
    """Compare the mean first loss of the replicas, weighted by targets, with the full batch."""
    mesh = bench.meshes[0]
    found = jax.block_until_ready(mesh.train_step(mesh.fresh(), mesh.shard_batch(bench.batch)))
    metrics = {name: np.asarray(value) for name, value in found[1].items()}
    weights = metrics.get("weight", np.ones(()))
    loss = float((metrics["loss"] * weights).sum() / weights.sum())
    error = relative(loss, bench.one_device_step.loss)
    return Finding(error, EQUAL, f"loss {error:.1e}; the update differs, as the method intends")


def _run_saved(
    bench: Bench, mesh: MeshRun, state: TrainState, first: int, count: int
) -> tuple[TrainState, list[dict[str, np.ndarray]]]:
    """Run `count` steps on the batches from index `first`; return the state and the metrics."""
    train, metrics = mesh.config.train, []
    stream: Iterator[Batch] = batches(
        bench.data.train,
        global_batch_size=train.global_batch_size,
        seed=train.seed,
        start=first,
        threads=0,
    )
    for _ in range(count):
        state, found = jax.block_until_ready(mesh.train_step(state, mesh.shard_batch(next(stream))))
        metrics.append({name: np.asarray(value) for name, value in found.items()})
    return state, metrics


# -- claims ----------------------------------------------------------------------------------------


def claims(bench: Bench) -> Iterator[Claim]:
    """Yield all claims about a configuration; programs are compiled on demand."""
    own, small = bench.small.own, bench.small.config
    text = small.train.model.inputs == "tokens"
    for mesh in bench.meshes:
        name = mesh_name(mesh)
        yield Claim("initial", f"initial parameters on {name} = on one device",
                    lambda mesh=mesh: initial(bench, mesh))  # fmt: skip
        yield Claim("mesh", f"{name} = one device", lambda mesh=mesh: on_mesh(bench, mesh))
    if own.precision != small.precision:
        dtypes = f"params {own.precision.params}, compute {own.precision.compute}"
        dtypes += f", {own.precision.matmul} products" * (own.precision.matmul != "compute")
        yield Claim("precision", f"{dtypes} near float32, on {mesh_name(bench.meshes[0])}",
                    lambda: own_precision(bench))  # fmt: skip
    if text:
        yield Claim("accumulation", "2 microbatches of unequal token counts = one batch",
                    lambda: accumulation(bench))  # fmt: skip
        where = mesh_name(bench.within_stages)
        of = packing.Documents(bench)
        yield Claim(
            "packing",
            f"documents packed in a row = each document by itself, on {where}",
            of.as_alone,
        )
        yield Claim("isolation", f"a changed document does not change the others, on {where}",
                    of.check_isolation)  # fmt: skip
    else:
        of = "of the same images" if reads_images(small.train.model) else "of unequal counts"
        yield Claim("accumulation", f"2 microbatches {of} = one batch",
                    lambda: accumulation(bench))  # fmt: skip
    yield Claim("resume", f"{STEPS_BEFORE} steps + save + restore + {STEPS_AFTER} steps = "
                f"{STEPS_BEFORE + STEPS_AFTER} steps, on {mesh_name(bench.meshes[0])}",
                lambda: check_resume(bench))  # fmt: skip
    if own.exchange.method != "synchronous":
        yield Claim("exchange", f"first loss of {own.exchange.method!r} = the synchronous one",
                    lambda: check_exchange(bench))  # fmt: skip
    if text and own.train.model.attention is not None:
        yield Claim("kernel", f"attention {kernel_name(bench)} = reference",
                    lambda: compare_kernel(bench))  # fmt: skip
    if text or reads_pairs(small.train.model):
        yield Claim("execution", "recomputation, layer loop, loss chunks and kernel = none of them",
                    lambda: execution(bench))  # fmt: skip


def mesh_name(mesh: MeshRun) -> str:
    """Return the axes larger than 1, such as 'fsdp=4 x tensor=2'."""
    sizes = {axis: getattr(mesh.config.mesh, axis) for axis in MESH_AXES}
    return " x ".join(f"{a}={n}" for a, n in sizes.items() if n > 1) or "one device"


# -- equal steps ----------------------------------------------------------------------------------


def initial(bench: Bench, mesh: MeshRun) -> Finding | NotChecked:
    """Compare the initial parameters on a mesh and on one device, bit for bit."""
    if mesh.devices == 1:
        return NotChecked("every mesh axis is 1: there is nothing to compare")
    found, expected = mesh.initial, bench.one_device.initial
    different = [name for name in expected if not same_bits(found[name], expected[name])]
    return bits(different, len(expected), "parameters")


def on_mesh(bench: Bench, mesh: MeshRun) -> Finding | NotChecked:
    """Compare loss, gradients and statistics of the first step on a mesh and on one device."""
    if mesh.devices == 1:
        return NotChecked("every mesh axis is 1: there is nothing to compare")
    run = mesh.first_step if mesh.training is mesh.program else mesh.gradients
    return equal(run(bench.batch), bench.one_device_step)


def accumulation(bench: Bench) -> Finding:
    """Compare two microbatches with one batch, on one device."""
    if kind_of(bench.batch) == "images":
        batch = sample.twins(bench.batch)
        whole, parts = (bench.with_accumulation(count, batch) for count in (1, 2))
        # Running statistics are updated once per microbatch, so they differ by design.
        whole, parts = (dataclasses.replace(step, statistics={}) for step in (whole, parts))
        return equal(parts, whole)
    whole = bench.whole_step
    if bench.small.config.train.accumulation > 1:
        return equal(bench.one_device_step, whole)
    return equal(bench.with_accumulation(2, bench.batch), whole)


def execution(bench: Bench) -> Finding:
    """Compare the step with its execution settings (kernel, remat, scan) and with none of them."""
    small, model = bench.small.config, bench.small.config.train.model
    plain = dataclasses.replace(
        small,
        train=dataclasses.replace(small.train, accumulation=1),
        attention=Attention() if model.attention is None else Attention(kernel="reference"),
        remat=Remat(policy="none"),
        scan=Scan(layers_per_iteration=0),
        offload=dataclasses.replace(small.offload, gradients="none"),
        loss=dataclasses.replace(small.loss, chunk_size=Loss().chunk_size),
    )
    return equal(bench.whole_step, MeshRun(plain).gradients(bench.batch, bench.one_device.created))


def own_precision(bench: Bench) -> Finding:
    """Compare the step in the precision of the configuration with float32, within a tolerance."""
    own, config = bench.small.own, bench.meshes[0].config
    kernel = config.attention.kernel
    if own.precision.compute == "float16" and kernel == "xla":
        kernel = "reference"  # the 'xla' kernel needs float16 matmuls, which CPUs lack
    config = dataclasses.replace(
        config,
        precision=own.precision,
        attention=dataclasses.replace(config.attention, kernel=kernel),
    )
    run = MeshRun(config)
    found, expected = run.gradients(bench.batch), bench.one_device_step
    loss = relative(found.loss, expected.loss)
    norm = relative_norm(found.gradients, expected.gradients)
    dtypes = own.precision.compute, own.precision.gradients, own.precision.params
    lowest = next((dtype for dtype in dtypes if dtype in ROUNDING), own.precision.params)
    limit = band(lowest, own.precision.matmul, _matrices(bench.one_device.created.params))
    islands = ", ".join(f"{scope} ({', '.join(how)})" for scope, how in run.islands.items())
    return Finding(
        max(loss, norm),
        limit,
        f"loss {loss:.1e}, gradients {norm:.1e} of norm; in float32 all the same: {islands}",
    )


def _matrices(params: Any) -> int:
    """Return the number of matrices and convolution kernels of a model, over all layers."""
    found = [v for v in jax.tree.leaves(params, is_leaf=is_variable) if is_matrix(v)]
    return sum(v.get_value().shape[0] if is_layer(v) else 1 for v in found)
