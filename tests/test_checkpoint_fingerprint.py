"""An array's fingerprint is the sum that its definition says, in every form, dtype and layout."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.run.checkpoint.manifest import fingerprints

SHAPES = [
    (),
    (1,),
    (0, 3),
    (7,),
    (8,),
    (3, 5),
    (4, 6),
    (3, 4, 5),
    (2, 3, 4, 8),
    (1, 1, 9),
    (70_001,),
]
DTYPES = ["float32", "bfloat16", "float16", "int8", "uint32", "bool"]


def defined(x):
    """Bits times an odd number drawn from the place, summed modulo 2**32, by whole numbers."""
    bits = np.ascontiguousarray(x).reshape(-1).view(f"uint{8 * x.dtype.itemsize}")
    return sum(int(b) * (i * 2654435769 % 2**32 | 1) for i, b in enumerate(bits)) % 2**32


def drawn(shape, dtype):
    whole = np.random.default_rng(len(shape)).integers(0, 2**32, shape, np.uint32)
    if dtype == "bool":
        return whole % 2 == 0
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return whole.astype(f"uint{8 * dtype.itemsize}").view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_sum_of_its_definition(dtype):
    """One device's arrays are counted where they are, those of several by one program."""
    arrays = {str(shape): drawn(shape, dtype) for shape in SHAPES}
    expected = {name: defined(x) for name, x in arrays.items()}
    everywhere = NamedSharding(jax.make_mesh((2,), ("a",), devices=jax.devices()[:2]), P())
    for place in (jax.devices()[1], everywhere):
        assert fingerprints(jax.device_put(arrays, place)) == expected


def test_counting_leaves_an_array_to_be_donated():
    """What still looked at its memory would make the next step copy it."""
    x = jnp.arange(2.0**16)
    place = x.unsafe_buffer_pointer()
    fingerprints({"x": x})
    y = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(x)
    assert x.is_deleted()
    assert y.unsafe_buffer_pointer() == place


def test_no_layout_changes_it():
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    arrays = {"even": drawn((8, 4, 12), "float32"), "odd": drawn((4, 8, 5), "bfloat16")}
    arrays |= {"rows": drawn((16, 3), "int8"), "flat": drawn((4096,), "float32")}
    specs = {
        "even": (P(), P("a", "b"), P(None, "a", "b"), P(("a", "b")), P("b", None, "a")),
        "odd": (P("a", "b"), P("b"), P(None, ("b", "a"))),
        "rows": (P(("b", "a")), P("a")),
        "flat": (P(("a", "b")), P("b")),
    }
    placed = {
        f"{name} {spec}": jax.device_put(arrays[name], NamedSharding(mesh, spec))
        for name in arrays
        for spec in specs[name]
    }
    expected = {name: defined(x) for name, x in arrays.items()}
    for name, number in fingerprints(placed).items():
        assert number == expected[name.split()[0]], name
