"""What older versions wrote is read; another model's arrays are refused, and none is cast."""

import hashlib
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import Trainer, load_config
from jaxtrain.checkpoint import Checkpoint, CheckpointError, Checkpoints
from jaxtrain.errors import UserError

FORMAT_1 = Path(__file__).parent / "fixtures_checkpoint/format1"
EXPECTED = json.loads((FORMAT_1 / "expected.json").read_text())


@pytest.fixture
def old(tmp_path):
    """A copy of the folder of a run that format 1 saved at step 4 of 6."""
    shutil.copytree(FORMAT_1 / "workdir", tmp_path / "old")
    return tmp_path / "old"


def resumed(workdir):
    # Paths in the saved configuration are those of where it ran.
    source = str(FORMAT_1 / "data")
    bindings = [f"TextData.source = {source!r}", "Mesh.data = 2", "Mesh.tensor = 2"]
    config = load_config(workdir / "config.gin", bindings)
    return config, Trainer(config, workdir)


def test_format_1_is_restored_bit_for_bit_and_goes_on_in_the_present_one(old):
    """Against digests of the arrays and losses that the run which wrote it recorded in memory."""
    step = EXPECTED["step"]
    checkpoints = Checkpoints(old, Checkpoint())
    assert checkpoints.cleaned == []
    assert checkpoints.newest_good() == step
    assert checkpoints.extra(step)["format"] == 1
    checkpoints.verify(step)
    tree = checkpoints.tree(step)
    assert tree.keys() == EXPECTED["sha256"].keys()
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for n, x in tree.items()}
    for name, x in checkpoints.restore(step, like).items():
        digest = hashlib.sha256(np.asarray(x).tobytes()).hexdigest()
        assert digest == EXPECTED["sha256"][name], name
    checkpoints.close()

    config, trainer = resumed(old)
    assert trainer.steps_done == step
    trainer.train()
    trainer.close()
    lines = [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]
    losses = {str(line["step"]): line["loss"] for line in lines if "loss" in line}
    assert losses.keys() == {"5", "6"}
    for number, loss in losses.items():
        # Another mesh and perhaps another compiler: another order of float32 sums.
        assert loss == pytest.approx(EXPECTED["losses"][number], rel=1e-5)
    checkpoints = Checkpoints(old, config.checkpoint, read_only=True)
    assert checkpoints.steps() == [4, 6]
    assert checkpoints.extra(6)["format"] == 4
    assert not (old / "checkpoints/6/fingerprints").exists()


def test_damage_in_format_1_is_found_in_the_arrays(old):
    file = max((old / "checkpoints/4").rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="step 4 in .*checkpoints/4 cannot be read"):
        Checkpoints(old, Checkpoint(), read_only=True).verify(4)
    (old / "checkpoints/4/fingerprints/metadata").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read .fingerprints/metadata: "):
        Checkpoints(old, Checkpoint(), read_only=True).extra(4)


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
