"""Gathers and scatters along two and three directions of a torus stay such in compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from conftest import needs_libtpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import load_config, plan
from jaxtrain.analysis.planning.compiled.collectives import collectives
from jaxtrain.analysis.planning.machines.targets import tpu_devices
from jaxtrain.parallel.compilation import xla_options
from jaxtrain.parallel.mesh import Mesh, make_mesh

pytestmark = needs_libtpu

WIDTH = 512
COLUMNS_OF_HALF_A_TILE = 64


def moved(target: str, devices: int, options: dict[str, str]) -> list[tuple[str, tuple[int, ...]]]:
    """What a gather and a scatter of matrices in bfloat16 become: kinds and operands."""
    mesh = make_mesh(Mesh(fsdp=devices), tpu_devices(target))

    def there_and_back(shard):
        whole = jax.lax.all_gather(2 * shard, "fsdp", axis=1, tiled=True)
        return jax.lax.psum_scatter(3 * whole, "fsdp", scatter_dimension=1, tiled=True) + shard

    spec = P(None, "fsdp")
    run = jax.shard_map(there_and_back, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    shape = WIDTH, COLUMNS_OF_HALF_A_TILE * devices
    given = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    compiled = jax.jit(run).lower(given).compile(options)
    return [(one.kind, one.shape) for one in collectives(compiled.as_text(), mesh)]


@pytest.mark.parametrize(("target", "devices"), [("v5p:4x4x4", 64), ("v6e:4x4", 16)])
def test_our_options_keep_gathers_and_scatters(target, devices):
    kind = tpu_devices(target)[0].device_kind
    assert moved(target, devices, xla_options("tpu", kind=kind)) == [
        ("all-gather", (WIDTH, COLUMNS_OF_HALF_A_TILE)),
        ("reduce-scatter", (WIDTH, COLUMNS_OF_HALF_A_TILE * devices)),
    ]


def test_by_itself_the_compiler_sums_the_whole_for_both():
    whole = WIDTH, COLUMNS_OF_HALF_A_TILE * 64
    assert moved("v5p:4x4x4", 64, {}) == [("all-reduce", whole)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5p:4x4x4", "v6e:8x8"])
def test_the_shipped_llama_8b_compiles_along_every_direction(target):
    """At its own widths and length: of smaller ones libtpu's emitter says nothing."""
    bindings = ["Llama.num_layers = 2", "TextData.source = 'synthetic'"]
    made = plan(load_config("llama_8b", bindings), target)
    # What a device puts in: whole gradients, and its parts of weights.
    large = {(row.kind, row.axis) for row in made.rows if row.bytes > 2**28}
    assert large == {("reduce-scatter", "fsdp")}
    assert sum(row.bytes for row in made.rows if row.kind == "all-gather") > 2**23
