"""Another model's arrays are rejected with their differences, and none is cast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.run.checkpoint.leaves import StoredLeaf, groups
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.settings import Checkpoint

DTYPES = ["float32", "bfloat16", "float16", "int32"]


@pytest.fixture(scope="module")
def every_dtype(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("dtypes")
    checkpoints = Checkpoints(workdir, Checkpoint(keep=9))
    for step, dtype in enumerate(DTYPES):
        checkpoints.save(step, {"params": {"up": jnp.ones((2, 3), dtype)}}, {})
    checkpoints.close()
    return workdir


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_no_dtype_is_cast_into_another(every_dtype, stored, wanted):
    checkpoints = Checkpoints(every_dtype, Checkpoint(), read_only=True)
    x = jnp.ones((2, 3), wanted)
    like = {"params": {"up": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)}}
    for partial in (False, True):
        if stored == wanted:
            found = checkpoints.restore(DTYPES.index(stored), like, partial=partial)
            assert found["params"]["up"].dtype == stored
            continue
        with pytest.raises(UserError) as raised:
            checkpoints.restore(DTYPES.index(stored), like, partial=partial)
        assert (
            f"params/up: {stored}[2, 3] in the checkpoint, {wanted}[2, 3] in this configuration"
        ) in str(raised.value)


def test_the_differences_fit_one_screen_and_name_the_config_that_wrote_it(tmp_path):
    """A model with many more layers and a head of another name."""
    layers = {f"layers/{number}/up": jnp.ones((4, 4)) for number in range(200)}
    checkpoints = Checkpoints(tmp_path, Checkpoint())
    checkpoints.save(1, {**layers, "head": jnp.ones(4)}, {})
    checkpoints.close()
    like = {
        name: jax.ShapeDtypeStruct((5, 4), "float32", sharding=jnp.ones(1).sharding)
        for name in [*layers, "heads"]
    }
    with pytest.raises(UserError) as raised:
        checkpoints.restore(1, like)
    text = str(raised.value)
    assert len(text.splitlines()) <= 24
    assert f"use {tmp_path / 'config.gin'}, which wrote it" in text
    assert "(202 of its leaves differ)" in text
    assert text.endswith("and 194 more")


def test_arrays_are_read_in_parts_of_at_most_256_mib():
    mib = [200, 200, 56, 57, 300, 1, 255, 1]
    leaves = {
        str(at): StoredLeaf((1024, 256 * size), np.dtype("float32")) for at, size in enumerate(mib)
    }
    parts = [[mib[int(name)] for name in part] for part in groups(leaves)]
    assert parts == [[200], [200, 56], [57], [300], [1, 255], [1]]
