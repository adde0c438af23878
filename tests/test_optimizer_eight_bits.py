"""8-bit Adam: bitsandbytes' map, codes and updates; blocks that no mesh cuts; bytes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_layout
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.rules import adam8bit
from jaxtrain.training.optimizers.rules.adam8bit import Adam8bit
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config

# Real sizes: what blocks they have.
SIZES = {
    "mlp": ((12, 768, 3072), ("layers", "embed", "mlp"), (1, 4, 64)),
    "down": ((12, 3072, 768), ("layers", "mlp", "embed"), (1, 64, 4)),
    "output": ((12, 12, 64, 768), ("layers", "heads", "head_dim", "embed"), (1, 1, 64, 4)),
    "experts": ((2, 8, 4096, 14336), ("layers", "experts", "embed", "mlp"), (1, 1, 2, 128)),
    "kernel": ((3, 3, 64, 128), ("height", "width", "channels_in", "channels"), (1, 1, 64, 4)),
    "odd": ((50257, 768), ("vocab", "vocab_embed"), (1, 8)),
}


def published_map(*, signed: bool) -> np.ndarray:
    """Section 2.2 of arXiv 2110.02861 and its figure: seven decades, with 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        middles = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*middles, *(-middles if signed else ())]
    return np.sort(values)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_published_one_and_bitsandbytes(signed):
    found = adam8bit.dynamic_map(signed)
    np.testing.assert_allclose(found, published_map(signed=signed), rtol=3e-7)
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map(signed=signed).numpy()
    np.testing.assert_allclose(found, theirs, rtol=3e-7)


@pytest.mark.parametrize("signed", [True, False])
def test_each_number_takes_the_nearest_of_the_map(signed):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(64, 64)) * 10.0 ** rng.uniform(-9, 1, (64, 64))).astype(np.float32)
    x = x if signed else np.abs(x)
    x[:, :8] = 0.0  # a block of nothing among the others
    variable = nnx.Param(jnp.asarray(x), axes=("height", "width"))
    assert adam8bit.block_of(x.shape, ("height", "width")) == (4, 64)
    coded = jax.jit(lambda v: adam8bit.encode(v, signed=signed))(variable)
    decoded = np.asarray(adam8bit.decode(coded, signed=signed))
    for rows in range(0, 64, 4):
        block = x[rows : rows + 4].astype(np.float64)
        largest = np.abs(block).max()
        distance = np.abs(block[..., None] / largest - published_map(signed=signed))
        taken = np.abs(block - decoded[rows : rows + 4]) / largest
        np.testing.assert_allclose(taken, distance.min(-1), atol=2e-7)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_bitsandbytes_up_to_its_table(signed):
    """Its CPU code finds the nearest in a table of 2^16 places: where it takes another value than
    we do, ours is nearer, by no more than a place."""
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes.functional")
    rng = np.random.default_rng(3)
    x = rng.normal(size=(128, 256)).astype(np.float32)
    x = x if signed else x * x
    codes, largest = torch.ops.bitsandbytes.quantize_blockwise(
        torch.tensor(x), functional.create_dynamic_map(signed=signed), 256
    )
    mine = adam8bit.encode(nnx.Param(jnp.asarray(x), axes=("layers", "positions")), signed=signed)
    np.testing.assert_array_equal(mine.largest.get_value()[:, 0], largest.numpy())
    scaled, values = x / largest.numpy()[:, None], adam8bit.dynamic_map(signed)
    ours = np.abs(scaled - values[np.asarray(mine.codes.get_value())])
    theirs = np.abs(scaled - values[codes.numpy()])
    assert (ours <= theirs + 1e-7).all()
    assert (theirs <= ours + 2.0**-15).all()


@pytest.mark.parametrize("name", SIZES)
def test_blocks_have_256_numbers_within_what_devices_share(name):
    shape, axes, block = SIZES[name]
    assert adam8bit.block_of(shape, axes) == block
    kept = sum(array.bytes("float32") for array in Adam8bit().keeps(shape, axes))
    assert kept == 2 * (1 + 4 / math.prod(block)) * math.prod(shape)
    if name != "odd":
        assert kept == 2 * (1 + 4 / 256) * math.prod(shape)


def test_twenty_steps_are_bitsandbytes():
    """Its CPU code, to which every block is handed over as a run of 256."""
    torch = pytest.importorskip("torch")
    bitsandbytes = pytest.importorskip("bitsandbytes")
    rng = np.random.default_rng(1)
    shape, axes = (8, 64, 64), ("layers", "height", "width")
    assert adam8bit.block_of(shape, axes) == (1, 4, 64)  # so that runs they are
    settings = Optimizer(rule=Adam8bit(b1=0.8, b2=0.9), weight_decay=0.3, clip_norm=None)
    optimizer = make_optimizer(settings, optax.constant_schedule(1e-2))
    first = rng.normal(size=shape).astype(np.float32)
    params = nnx.State({"w": nnx.Param(jnp.asarray(first), axes=axes)})
    opt_state, update = optimizer.init(params), jax.jit(optimizer.update)
    parameter = torch.nn.Parameter(torch.tensor(first))
    theirs = bitsandbytes.optim.AdamW8bit([parameter], 1e-2, betas=(0.8, 0.9), weight_decay=0.3)
    for step in range(20):
        g = (10.0 ** rng.uniform(-2, 1) * rng.normal(size=shape)).astype(np.float32)
        updates, opt_state = update(
            nnx.State({"w": nnx.Param(jnp.asarray(g), axes=axes)}), opt_state, params
        )
        params = optax.apply_updates(params, updates)
        parameter.grad = torch.tensor(g)
        theirs.step()
        kept = theirs.state[parameter]
        for moment, name in (("mu", "1"), ("nu", "2")):
            mine = getattr(opt_state[0], moment)["w"]
            largest = kept[f"absmax{name}"].numpy()
            np.testing.assert_allclose(
                mine.largest.get_value().reshape(-1), largest, rtol=1e-6, err_msg=f"step {step}"
            )
            apart = np.asarray(mine.codes.get_value()) != kept[f"state{name}"].numpy()
            assert apart.mean() < 0.05, step
            # From its codes on: those that its table has not next to the number.
            mine.codes.set_value(jnp.asarray(kept[f"state{name}"].numpy()))
        found = np.asarray(params["w"].get_value())
        np.testing.assert_allclose(found, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 2, "tensor": 2, "pipe": 2}], ids=str)
def test_codes_on_a_mesh_are_those_of_one_device(sizes):
    rng = np.random.default_rng(2)
    shape, axes = (2, 512, 64), ("layers", "embed", "mlp")
    assert adam8bit.block_of(shape, axes) == (1, 16, 4)

    def there_and_back(variable):
        coded = adam8bit.encode(variable, signed=True)
        return coded, adam8bit.decode(coded, signed=True)

    variable = nnx.Param(jnp.asarray(rng.normal(size=shape), jnp.float32), axes=axes)
    one = jax.device_get(jax.jit(there_and_back)(variable))
    layout = make_layout(**sizes)
    with layout.active():
        spread = jax.device_put(variable, layout.sharding_of(layout.moment(axes)))
        compiled = jax.jit(there_and_back).lower(spread).compile()
        jax.tree.map(np.testing.assert_array_equal, one, jax.device_get(compiled(spread)))
        for array in jax.tree.leaves(compiled(spread)):
            assert array.sharding.is_equivalent_to(layout.sharding_of(layout.moment(axes)), 3)
    # No block lies on two devices: nothing is sent.
    assert not any(word in compiled.as_text() for word in ("all-reduce", "all-gather", "permute"))


def test_a_mesh_that_would_cut_a_block_is_refused():
    config = load_config(
        "gpt2_124m",
        [
            "Optimizer.name = 'adam8bit'",
            "Mesh.fsdp = -1",
            "Mesh.data = 1",
            "Train.global_batch_size=768",
            "Train.accumulation=1",
        ],
    )
    preflight.check(config, device_count=96, platform="tpu", reads_data=False)
    with pytest.raises(UserError) as refusal:
        preflight.check(config, device_count=384, platform="tpu", reads_data=False)
    assert (
        "Optimizer.name='adam8bit' with Mesh.fsdp=384: of 768 along embed each device has 2, which "
        "cuts through blocks of 4; let a divisor of 192 share them"
    ) in str(refusal.value).splitlines()


def test_moments_of_another_dtype_and_their_means_are_refused():
    with pytest.raises(UserError) as refusal:
        Optimizer(rule=Adam8bit(), moments="bfloat16")
    assert str(refusal.value) == (
        "Optimizer.moments='bfloat16' with Optimizer.name='adam8bit', which keeps its moments in 8 "
        "bits; use 'float32', the default"
    )
    config = load_config(
        "gpt_quickstart",
        ["Optimizer.name = 'adam8bit'", "Exchange.method = 'local_sgd'", "Mesh.data = -1"],
    )
    with pytest.raises(
        UserError, match="so that a slow moment would never change; use another rule, such as"
    ):
        preflight.check(config, device_count=8, platform="cpu", reads_data=False)
