"""Shampoo and SOAP: reference implementations, formulas, every mesh, whole matrices nowhere."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_layout
from flax import nnx

from jaxtrain.parallel.sharding import is_variable, logical_axes, shardings
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.rules.shampoo import Shampoo
from jaxtrain.training.optimizers.rules.soap import SOAP

STEPS, RATE = 12, 1e-2
# Square: where the first gradients leave a direction out, its place in SOAP's basis is whatever the
# decomposition makes of rounding errors.
SQUARE = {
    "weight": ((6, 6), ("embed", "mlp"), (1, 6, 6)),
    "stacked": ((2, 4, 4), ("layers", "embed", "mlp"), (2, 4, 4)),
    "qkv": ((2, 3, 4, 2, 2), ("layers", "qkv", "embed", "heads", "head_dim"), (6, 4, 4)),
    "kernel": ((2, 2, 2, 8), ("height", "width", "channels_in", "channels"), (1, 8, 8)),
    "bias": ((6,), ("mlp",), (1, 6)),
}
OBLONG = SQUARE | {
    "wide": ((4, 6), ("embed", "mlp"), (1, 4, 6)),
    "tall": ((2, 8, 3), ("layers", "mlp", "embed"), (2, 8, 3)),
}


def values_of(sizes, seed):
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=s[0]).astype(np.float32) for n, s in sizes.items()}


def state_of(sizes, values) -> nnx.State:
    return nnx.State(
        {name: nnx.Param(jnp.asarray(v), axes=sizes[name][1]) for name, v in values.items()}
    )


def optimizer_of(rule, rate=RATE, decay=0.0):
    settings = Optimizer(rule=rule, learning_rate=rate, weight_decay=decay, clip_norm=None)
    return make_optimizer(settings, optax.constant_schedule(rate))


def ours(rule, sizes, rate=RATE, decay=0.0):
    optimizer, params = optimizer_of(rule, rate, decay), state_of(sizes, values_of(sizes, 0))
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, gradients):
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for seed in range(1, STEPS + 1):
        params, opt_state = step(params, opt_state, state_of(sizes, values_of(sizes, seed)))
        yield {name: np.asarray(params[name].get_value()) for name in sizes}


def theirs(make, sizes):
    torch = pytest.importorskip("torch")
    pytest.importorskip("pytorch_optimizer")

    def apart(values):
        return {n: list(v.reshape(sizes[n][2])) for n, v in values.items()}

    params = {
        name: [torch.nn.Parameter(torch.tensor(x.copy())) for x in values]
        for name, values in apart(values_of(sizes, 0)).items()
    }
    optimizer = make([p for values in params.values() for p in values])
    for seed in range(1, STEPS + 1):
        for name, values in apart(values_of(sizes, seed)).items():
            for parameter, gradient in zip(params[name], values, strict=True):
                parameter.grad = torch.tensor(gradient.copy())
        optimizer.step()
        yield {
            n: np.stack([p.detach().numpy() for p in values]).reshape(sizes[n][0])
            for n, values in params.items()
        }


def assert_same_path(found, expected, rtol=1e-5, atol=1e-5):
    pairs = list(zip(found, expected, strict=True))
    assert len(pairs) == STEPS
    for step, (a, b) in enumerate(pairs):
        for name in a:
            np.testing.assert_allclose(
                a[name], b[name], rtol=rtol, atol=atol, err_msg=f"{name}, step {step}"
            )


def test_soap_is_its_reference():
    optimizers = pytest.importorskip("pytorch_optimizer")
    rule = SOAP(b1=0.9, b2=0.95, b3=0.8, every=3)
    make = lambda params: optimizers.SOAP(  # noqa: E731
        params,
        RATE,
        betas=(0.9, 0.95),
        shampoo_beta=0.8,
        precondition_frequency=3,
        weight_decay=0.0,
    )
    assert_same_path(ours(rule, SQUARE), theirs(make, SQUARE))


def test_soap_moves_nothing_by_its_first_update_and_decays_from_the_second_on():
    """The reference decays what was moved already: rate^2 decay = 2e-7 of a direction apart."""
    optimizers = pytest.importorskip("pytorch_optimizer")
    rate, decay = 1e-3, 0.2
    sizes = {name: SQUARE[name] for name in ("weight", "stacked", "kernel")}
    make = lambda params: optimizers.SOAP(  # noqa: E731
        params, rate, betas=(0.95, 0.95), precondition_frequency=10, weight_decay=decay
    )
    found = list(ours(SOAP(), sizes, rate, decay))
    assert_same_path(found, theirs(make, sizes), rtol=0, atol=5e-6)
    begin = values_of(sizes, 0)
    assert all(np.array_equal(found[0][name], begin[name]) for name in sizes)
    plain = list(ours(SOAP(), sizes, rate))
    assert np.abs(plain[-1]["weight"] - found[-1]["weight"]).max() > 5e-5  # what the decay moves


def test_soap_leaves_sides_alone_that_are_too_long():
    optimizers = pytest.importorskip("pytorch_optimizer")
    sizes = {name: SQUARE[name] for name in ("weight", "stacked", "kernel")}
    make = lambda params: optimizers.SOAP(  # noqa: E731
        params, RATE, betas=(0.95, 0.95), precondition_frequency=10, max_precondition_dim=6,
        weight_decay=0.0,
    )  # fmt: skip
    assert_same_path(ours(SOAP(largest=6), sizes), theirs(make, sizes))


def test_shampoo_is_its_reference():
    """Whose momentum is another, and whose vectors have whole preconditioners."""
    optimizers = pytest.importorskip("pytorch_optimizer")
    sizes = {name: size for name, size in OBLONG.items() if name != "bias"}
    make = lambda params: optimizers.Shampoo(params, RATE, preconditioning_compute_steps=1)  # noqa: E731
    assert_same_path(ours(Shampoo(momentum=0.0, every=1), sizes), theirs(make, sizes), atol=5e-5)


def test_shampoo_is_its_formula():
    """Algorithm 1 of arXiv 1802.09568 with momentum, roots from the updates 1, 4, 7, ..., one side
    where the other is too long; Adagrad where there is none."""

    sizes = {name: size for name, size in OBLONG.items() if name != "wide"}  # rank 4 of 6 at first

    def root(x, order):
        values, vectors = np.linalg.eigh(x)
        return vectors @ np.diag(np.maximum(values, 1e-6) ** (-1 / order)) @ vectors.T

    def path():
        params = {n: v.astype(np.float64) for n, v in values_of(sizes, 0).items()}
        memory = {}
        for step in range(STEPS):
            for name, gradient in values_of(sizes, step + 1).items():
                size = sizes[name][2]
                moved = []
                for number, g in enumerate(gradient.reshape(size).astype(np.float64)):
                    own = memory.setdefault((name, number), {"sides": {}, "trace": 0.0})
                    kept = [side for side, n in enumerate(g.shape) if g.ndim == 2 and n <= 6]
                    if not kept:
                        own["squares"] = own.get("squares", 1e-6) + g * g
                        scaled = g / np.sqrt(own["squares"])
                    else:
                        scaled = g
                        for side in kept:
                            total = own["sides"].get(side, 1e-6 * np.eye(g.shape[side]))
                            own["sides"][side] = total + (g @ g.T if side == 0 else g.T @ g)
                            if step % 3 == 0:
                                own["root", side] = root(own["sides"][side], 2 * len(kept))
                            of = own["root", side]
                            scaled = of @ scaled if side == 0 else scaled @ of
                    own["trace"] = 0.8 * own["trace"] + scaled
                    moved.append(own["trace"])
                params[name] = params[name] - RATE * np.stack(moved).reshape(gradient.shape)
            yield dict(params)

    rule = Shampoo(momentum=0.8, every=3, largest=6)
    assert_same_path(ours(rule, sizes), path(), rtol=1e-4, atol=1e-4)


SPREAD = {
    "layers": ((4, 16, 16), ("layers", "embed", "mlp"), None),
    "three": ((3, 16, 16), ("layers", "mlp", "embed"), None),
    "qkv": ((4, 3, 8, 4, 2), ("layers", "qkv", "embed", "heads", "head_dim"), None),
    "table": ((16, 8), ("vocab", "vocab_embed"), None),
    "bias": ((4, 16), ("layers", "mlp"), None),
}


@pytest.mark.slow_cases(
    "shampoo-{'fsdp': 8}", "soap-{'fsdp': 8}", "shampoo-{'pipe': 2, 'fsdp': 2, 'tensor': 2}"
)
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"pipe": 2, "fsdp": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize(
    "rule", [SOAP(every=1, largest=16), Shampoo(every=2, epsilon=0.1)], ids=lambda r: r.name
)
def test_updates_on_a_mesh_are_those_of_one_device(rule, sizes):
    # The table is not square; what does not divide over stages comes padded to a pipeline.
    left_out = {"soap": {"table"}}.get(rule.name, set()) | ({"three"} if "pipe" in sizes else set())
    chosen = {name: size for name, size in SPREAD.items() if name not in left_out}
    optimizer = optimizer_of(rule)
    params, *gradients = (state_of(chosen, values_of(chosen, seed)) for seed in range(4))

    def update(gradient, state, params):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    one, state = params, optimizer.init(params)
    step = jax.jit(update)
    for gradient in gradients:
        one, state = step(gradient, state, one)
    one = jax.device_get(one)

    layout = make_layout(**sizes)
    place = shardings(params, layout.moment, layout)
    found, *gradients = (jax.device_put(x, place) for x in (params, *gradients))
    state = optimizer.init(found)
    of_state = shardings(state, layout.moment, layout)
    state = jax.device_put(state, of_state)
    with layout.active():
        step = jax.jit(update, out_shardings=(place, of_state))
        for gradient in gradients:
            found, state = step(gradient, state, found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), one, found)
    for variable in jax.tree.leaves(state, is_leaf=is_variable):
        if is_variable(variable):
            wanted = layout.sharding_of(layout.moment(logical_axes(variable)))
            assert variable.get_value().sharding.is_equivalent_to(wanted, variable.get_value().ndim)


# Devices that come to a decomposition together, as after every sum: large enough for LAPACK's
# kernels to be shared out among threads.
TOGETHER = """
import jax
import jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 8)
from jaxtrain.parallel.mesh import Mesh, make_mesh
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.optimizers.rules.preconditioners import eigenbasis, power_iterate

def turns(x):
    def turn(_, x):
        for function in (eigenbasis, lambda x: power_iterate(x, x)[0]):
            x = function(x) + 0 * x.sum()
        return x
    return jax.lax.fori_loop(0, 5, turn, x)

layout = Layout(make_mesh(Mesh(fsdp=8)))
with layout.active():
    identities = jnp.broadcast_to(jnp.eye(96), (32, 96, 96))
    x = jax.device_put(identities, layout.sharding_of(jax.P("fsdp")))
    print(jax.jit(turns)(x).shape)
"""


def test_simulated_devices_that_decompose_together_do_not_wait_for_one_another():
    """In a process of its own: those that do wait cannot be stopped otherwise."""
    words = [sys.executable, "-c", TOGETHER]
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, check=False, env=alone
    )
    assert done.stdout == "(32, 96, 96)\n", done.stderr[-2000:]


THREADS = """
from jaxtrain.parallel.devices import simulate_devices
simulate_devices(2)
import scipy.linalg
from threadpoolctl import threadpool_info
print([x["num_threads"] for x in threadpool_info() if "scipy.libs" in x["filepath"]])
"""


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("users", [None, "2"])
def test_a_simulated_device_decomposes_in_its_own_thread(users):
    pytest.importorskip("threadpoolctl")
    kept = {name: x for name, x in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    asked = {} if users is None else {"OPENBLAS_NUM_THREADS": users}
    words = [sys.executable, "-c", THREADS]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=kept | asked)
    assert done.stdout == f"[{users or 1}]\n"
