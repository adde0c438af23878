"""Claims of `jaxtrain verify`: the computations to compare, with measured errors and tolerances."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jaxtrain.analysis.verify import attend, packing, resume, sample
from jaxtrain.analysis.verify.measures import (
    ROUNDING,
    Claim,
    Finding,
    NotChecked,
    band,
    bits,
    equal,
    relative,
    relative_norm,
    same_bits,
)
from jaxtrain.analysis.verify.resume import STEPS_AFTER, STEPS_BEFORE
from jaxtrain.analysis.verify.runs import Bench, MeshRun
from jaxtrain.data.batch import kind_of
from jaxtrain.models.model import reads_images, reads_pairs
from jaxtrain.nn.attention.attention import Attention
from jaxtrain.nn.execution import Scan
from jaxtrain.nn.parameters import is_layer
from jaxtrain.nn.precision import is_matrix
from jaxtrain.nn.remat import Remat
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.parallel.sharding import is_variable
from jaxtrain.training.objectives.losses import Loss


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
                lambda: resume.check_resume(bench))  # fmt: skip
    if own.exchange.method != "synchronous":
        yield Claim("exchange", f"first loss of {own.exchange.method!r} = the synchronous one",
                    lambda: resume.check_exchange(bench))  # fmt: skip
    if text and own.train.model.attention is not None:
        yield Claim("kernel", f"attention {attend.kernel_name(bench)} = reference",
                    lambda: attend.compare(bench))  # fmt: skip
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
