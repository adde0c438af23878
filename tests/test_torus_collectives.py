"""Gathers and scatters along two and three directions of a torus stay such in compiled programs."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import needs_libtpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import load_config, plan
from jaxtrain.analysis.planning.compiled.collectives import collectives
from jaxtrain.analysis.planning.machines.targets import tpu_devices
from jaxtrain.analysis.planning.textbook.formulas import wire_bytes
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


# Links that leave a chip of v5e, two in each direction of the torus.
LINKS = 4


def test_a_sum_along_both_directions_of_v5e_takes_as_long_as_two_scatters():
    """Of n bytes a sum sends 2 n through four links at once, a scatter along each direction n
    through two: the one that is requested and not formed, and the two that would be."""
    side, devices = 4, tpu_devices("v5e:4x4")
    square = np.empty((side, side), dtype=object)
    for device in devices:
        square[device.coords[0], device.coords[1]] = device
    mesh = jax.sharding.Mesh(square, ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def compiled(scatters: tuple[tuple[str, ...], ...]) -> str:
        def scatter(whole):
            whole = 2 * whole
            for axes in scatters:
                whole = jax.lax.psum_scatter(whole, axes, tiled=True)
            return 3 * whole

        run = jax.shard_map(
            scatter, mesh=mesh, in_specs=P(), out_specs=P(("x", "y")), check_vma=False
        )
        shape, whole = (16 * devices_in(mesh), WIDTH), NamedSharding(mesh, P())
        given = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
        options = xla_options("tpu", kind=devices[0].device_kind)
        return jax.jit(run).lower(given).compile(options).as_text()

    def links(one: str) -> list[int]:
        """Of each collective: a ring has one direction's two links, a way over a plane all four."""
        strategies = re.findall(r'"strategy":"(\w+)","debug":"[^"]*?num_dims:(\d)', one)
        rings = re.findall(r'"strategy":"StrategyRing"', one)
        return [2 * int(dims) for _, dims in strategies] + [2] * len(rings)

    def seconds(one: str) -> float:
        """Bytes through each link, by the textbook's ring of each collective."""
        found = collectives(one, mesh)
        return sum(
            wire_bytes(row.kind, row.bytes, devices_in(mesh, row.axis)) / through
            for row, through in zip(found, links(one), strict=True)
        )

    at_once, in_turn = compiled((("x", "y"),)), compiled((("x",), ("y",)))
    assert [one.kind for one in collectives(at_once, mesh)] == ["all-reduce"]
    assert [one.kind for one in collectives(in_turn, mesh)] == ["reduce-scatter"] * 2
    assert links(at_once) == [LINKS]
    assert links(in_turn) == [LINKS // 2] * 2
    assert seconds(at_once) == seconds(in_turn)


def devices_in(mesh: jax.sharding.Mesh, axis: str = "x+y") -> int:
    """How many devices stand along mesh axes."""
    return math.prod(mesh.shape[name] for name in axis.split("+"))


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
