"""A checkpoint is whole or absent, fits what it is restored into, and says what it lacks."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.settings import Checkpoint

EXTRA = {"format": 1, "config": "Train.steps = 4\n", "data": {"next_batch": 7}, "versions": {}}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    step: jax.Array
    params: nnx.State
    opt_state: optax.OptState


class Model(nnx.Module):
    def __init__(self, *, mlp_dim=16, dtype=jnp.float32, bias=True):
        key = jax.random.key(0)
        self.up = nnx.Param(jax.random.normal(key, (8, mlp_dim), dtype), axes=("embed", "mlp"))
        self.scale = nnx.Param(jnp.linspace(0, 1, 8, dtype=jnp.bfloat16), axes=("embed",))
        if bias:
            self.bias = nnx.Param(jnp.arange(16.0), axes=("mlp",))


def make_state(mesh=None, **model):
    params = nnx.state(Model(**model))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = TrainState(jnp.int32(3), params, optimizer.init(params))
    return state if mesh is None else jax.tree.map(jax.device_put, state, shardings(state, mesh))


def make_mesh(*shape):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, ("fsdp", "tensor")[: len(shape)], devices=devices)


def shardings(tree, mesh):
    names = [*mesh.axis_names, None]
    specs = {2: P(names[0], names[1]), 1: P(names[0]), 0: P()}
    return jax.tree.map(lambda x: NamedSharding(mesh, specs[x.ndim]), tree)


def abstract(state, mesh=None):
    placed = jax.tree.map(lambda x: x.sharding, state) if mesh is None else shardings(state, mesh)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placed
    )


def bits(tree):
    return [
        (np.asarray(leaf).dtype, np.asarray(leaf).shape, np.asarray(leaf).tobytes())
        for leaf in jax.tree.leaves(tree)
    ]


@pytest.fixture
def opened():
    """Opens checkpoints and closes them at the end."""
    living = []

    def open_(workdir, read_only=False, **settings):
        living.append(Checkpoints(workdir, Checkpoint(**settings), read_only=read_only))
        return living[-1]

    yield open_
    for checkpoints in living:
        checkpoints.close()


@pytest.fixture
def saved(tmp_path, opened):
    """A folder with the checkpoint of step 3, from a 2 x 4 mesh."""
    checkpoints = opened(tmp_path)
    checkpoints.save(3, make_state(make_mesh(2, 4)), EXTRA)
    checkpoints.wait()
    return tmp_path


# -- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_restored_is_what_was_saved(tmp_path, opened, asynchronous):
    state = make_state(make_mesh(2, 4))
    checkpoints = opened(tmp_path, asynchronous=asynchronous)
    assert checkpoints.latest_step() is None
    checkpoints.save(3, state, EXTRA)
    checkpoints.close()
    reopened = opened(tmp_path)
    assert reopened.latest_step() == 3
    assert reopened.extra(3) == EXTRA
    restored = reopened.restore(3, abstract(state))
    assert bits(restored) == bits(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, state)


def test_replicas_divide_among_them_only_what_is_worth_a_program(tmp_path, opened, monkeypatch):
    """A slice of less than 1 MiB takes as long to compile as to write: one replica writes all."""
    cut, real = [], jax.lax.slice_in_dim

    def slice_in_dim(x, *arguments, **named):
        cut.append(x.shape)
        return real(x, *arguments, **named)

    monkeypatch.setattr(jax.lax, "slice_in_dim", slice_in_dim)
    replicated = NamedSharding(make_mesh(2), P())
    sizes = {"large": 2**18, "small": 2**18 - 1}
    state = {
        name: jax.device_put(jnp.arange(2.0 * size).reshape(2, size), replicated)
        for name, size in sizes.items()
    }
    checkpoints = opened(tmp_path)
    checkpoints.save(3, state, EXTRA)
    checkpoints.wait()
    assert cut == [(2, 2**18)] * 2
    assert bits(checkpoints.restore(3, abstract(state))) == bits(state)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (8,), (1,), (3, 2)])
def test_restores_onto_another_mesh_bit_for_bit(saved, opened, shape):
    state, mesh = make_state(), make_mesh(*shape)
    if shape == (3, 2):  # eight rows do not divide by three
        with pytest.raises(ValueError, match="divi"):
            opened(saved).restore(3, abstract(state, mesh))
        return
    restored = opened(saved).restore(3, abstract(state, mesh))
    assert bits(restored) == bits(state)
    for leaf, sharding in zip(
        jax.tree.leaves(restored), jax.tree.leaves(shardings(state, mesh)), strict=True
    ):
        assert leaf.sharding == sharding


def test_a_part_of_the_state_can_be_restored_alone(saved, opened):
    state = make_state()
    wanted = {"params": abstract(state, make_mesh(8)).params}
    restored = opened(saved).restore(3, wanted, partial=True)
    assert bits(restored["params"]) == bits(state.params)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_save_survives_the_donation_of_its_buffers(tmp_path, opened, sharded):
    mesh = make_mesh(2, 4)
    sharding = NamedSharding(mesh, P("fsdp", "tensor") if sharded else P())
    x = jax.device_put(jnp.arange(2.0**20).reshape(1024, 1024), sharding)
    want = np.array(x)
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    checkpoints = opened(tmp_path)
    checkpoints.save(1, {"x": x}, EXTRA)
    for _ in range(5):
        x = step(x)
    jax.block_until_ready(x)
    checkpoints.wait()
    like = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)}
    np.testing.assert_array_equal(checkpoints.restore(1, like)["x"], want)


def test_what_the_caller_changes_after_saving_is_not_saved(tmp_path, opened):
    extra = {"data": {"next_batch": 7}}
    checkpoints = opened(tmp_path)
    checkpoints.save(3, make_state(), extra)
    extra["data"]["next_batch"] = 8
    checkpoints.wait()
    assert checkpoints.extra(3) == {"data": {"next_batch": 7}}


def test_what_is_no_json_is_refused_before_anything_is_written(tmp_path, opened):
    checkpoints = opened(tmp_path)
    with pytest.raises(TypeError, match="JSON"):
        checkpoints.save(3, make_state(), {"data": object()})
    checkpoints.wait()
    assert checkpoints.latest_step() is None


def test_a_step_is_saved_once(saved, opened):
    checkpoints = opened(saved)
    written = (saved / "checkpoints/3").stat().st_mtime_ns
    checkpoints.save(3, make_state(), EXTRA)
    checkpoints.wait()
    assert (saved / "checkpoints/3").stat().st_mtime_ns == written
    assert checkpoints.steps() == [3]


# -- which stay -----------------------------------------------------------------------------------


def test_the_newest_stay_and_every_so_many_for_ever(tmp_path, opened):
    checkpoints = opened(tmp_path, keep=2, keep_every=4)
    for step in range(1, 12):
        checkpoints.save(step, {"x": jnp.arange(4.0)}, EXTRA)
    checkpoints.wait()
    assert checkpoints.steps() == [4, 8, 10, 11]
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == [4, 8, 10, 11]


def test_a_run_that_goes_back_drops_what_came_after(tmp_path, opened):
    checkpoints = opened(tmp_path, keep=9)
    for step in range(1, 6):
        checkpoints.save(step, {"x": jnp.full(4, step)}, EXTRA)
    checkpoints.drop_after(3)  # the one being written, too
    assert checkpoints.steps() == [1, 2, 3]
    checkpoints.save(4, {"x": jnp.full(4, -4)}, EXTRA)
    checkpoints.wait()
    restored = checkpoints.restore(4, abstract({"x": jnp.full(4, 0)}))
    assert bits(restored) == bits({"x": jnp.full(4, -4)})


def test_settings_that_keep_nothing_are_refused():
    with pytest.raises(UserError, match=r"Checkpoint.keep = 0: at least 1"):
        Checkpoint(keep=0)
    with pytest.raises(UserError, match=r"Checkpoint.keep_every = 0: .* or None"):
        Checkpoint(keep_every=0)


def test_looking_makes_nothing(tmp_path, opened):
    checkpoints = opened(tmp_path, read_only=True)
    assert checkpoints.latest_step() is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="no checkpoint of step 3 .* none at all"):
        checkpoints.extra(3)


# -- rejections


def refusal(saved, opened, state, **arguments):
    with pytest.raises(UserError) as raised:
        opened(saved).restore(3, abstract(state), **arguments)
    return str(raised.value)


def test_another_shape_is_refused(saved, opened):
    text = refusal(saved, opened, make_state(mlp_dim=32))
    assert "was written by a different model or optimizer" in text
    assert "(3 of its leaves differ)" in text  # the parameter and its two moments
    assert (
        "params/up: float32[8, 16] in the checkpoint, float32[8, 32] in this configuration" in text
    )


def test_another_dtype_is_refused(saved, opened):
    text = refusal(saved, opened, make_state(dtype=jnp.bfloat16))
    assert "params/up: float32[8, 16] in the checkpoint, bfloat16[8, 16] in this" in text


def test_a_leaf_too_many_is_refused(saved, opened):
    text = refusal(saved, opened, make_state(bias=False))
    assert "params/bias: float32[16] in the checkpoint, absent from this configuration" in text


def test_a_missing_leaf_is_refused_with_the_nearest_name(tmp_path, opened):
    checkpoints = opened(tmp_path)
    checkpoints.save(3, {"query": jnp.ones(4), "other": jnp.ones(4)}, EXTRA)
    checkpoints.wait()
    text = refusal(tmp_path, opened, {"querry": jnp.ones(4), "other": jnp.ones(4)})
    assert "querry: not in the checkpoint (it has query)" in text
    text = refusal(tmp_path, opened, {"querry": jnp.ones(4)}, partial=True)
    assert "querry: not in the checkpoint (it has query)" in text
    assert "(1 of its leaves differ)" in text


def test_many_differences_are_counted_not_listed(tmp_path, opened):
    checkpoints = opened(tmp_path)
    checkpoints.save(3, {f"w{i}": jnp.ones(4) for i in range(20)}, EXTRA)
    checkpoints.wait()
    text = refusal(tmp_path, opened, {f"w{i}": jnp.ones(5) for i in range(20)})
    assert text.count("float32[5]") == 8
    assert text.endswith("and 12 more")


def test_an_absent_step_is_refused_with_those_that_are_there(saved, opened):
    with pytest.raises(UserError, match="no checkpoint of step 4 in .*; there are 3"):
        opened(saved).restore(4, abstract(make_state()))


# -- looking inside -------------------------------------------------------------------------------


def test_the_tree_tells_names_shapes_dtypes_and_shardings(saved, opened):
    tree = opened(saved).tree(3)
    adam = [f"opt_state/1/0/{moment}/{name}" for moment in ("mu", "nu") for name in ("up", "bias")]
    for name in ("step", "params/up", "params/bias", "params/scale", "opt_state/1/0/count", *adam):
        assert name in tree
    assert not [name for name in tree if "value" in name]
    up, scale = tree["params/up"], tree["params/scale"]
    assert (up.shape, up.dtype, up.mesh, up.spec) == (
        (8, 16), np.float32, {"fsdp": 2, "tensor": 4}, ("fsdp", "tensor"),
    )  # fmt: skip
    assert (scale.shape, scale.dtype, scale.spec) == ((8,), jnp.bfloat16, ("fsdp",))


def test_saving_and_restoring_say_nothing(tmp_path, opened, caplog, capfd):
    with caplog.at_level(logging.INFO):
        checkpoints = opened(tmp_path)
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.arange(4.0)}, EXTRA)
        checkpoints.wait()
        checkpoints.restore(2, abstract({"x": jnp.arange(4.0)}))
        checkpoints.extra(2)
        checkpoints.tree(2)
    assert caplog.messages == []
    assert capfd.readouterr() == ("", "")
