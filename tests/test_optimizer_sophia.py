"""Sophia: the published update, Hutchinson's and Gauss-Newton-Bartlett's estimates, every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_layout, make_step, text_batch
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.finetune.tuning import Tuning
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.rules.sophia import SophiaG, SophiaH
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config
from jaxtrain.training.transforms import (
    draw_targets,
    estimate_of,
    gauss_newton_bartlett,
    hutchinson,
    signs,
)

MODEL = GPT(vocab_size=16, num_layers=1, embed_dim=8, num_heads=2, context_length=8)
BATCH = text_batch(rows=8, length=8, vocab_size=16)
ESTIMATES = {"hutchinson": hutchinson, "gauss_newton_bartlett": gauss_newton_bartlett}


def program_on(rule=None, **sizes):
    changes = {}
    if rule is not None:
        settings = Optimizer(rule=rule, learning_rate=1e-2)
        optimizer = make_optimizer(settings, optax.constant_schedule(1e-2))
        changes = {"optimizer": optimizer, "curvature": estimate_of(rule)}
    return make_step(MODEL, make_layout(**sizes), **changes)


def test_the_update_is_its_reference():
    """Given the same curvature every third step."""
    torch = pytest.importorskip("torch")
    peers = pytest.importorskip("pytorch_optimizer")
    rng, shape, gamma = np.random.default_rng(0), (4, 6), 0.5
    rule = SophiaH(b1=0.8, b2=0.9, gamma=gamma)
    settings = Optimizer(rule=rule, weight_decay=0.3, clip_norm=None)
    optimizer = make_optimizer(settings, optax.constant_schedule(1e-2))

    def tree(x):
        return nnx.State({"w": nnx.Param(jnp.asarray(x, jnp.float32), axes=("embed", "mlp"))})

    first = rng.normal(size=shape).astype(np.float32)
    params, parameter = tree(first), torch.nn.Parameter(torch.tensor(first))
    theirs = peers.SophiaH(
        [parameter], 1e-2, betas=(0.8, 0.9), weight_decay=0.3, p=1.0, update_period=10**6
    )
    state, update, clipped = optimizer.init(params), jax.jit(optimizer.update), 0.0
    for step in range(20):
        g, due = rng.normal(size=shape).astype(np.float32), step % 3 == 0
        h = rng.normal(size=shape).astype(np.float32) * 4
        updates, state = update(tree(g), state, params, curvature=(jnp.array(due), tree(h)))
        params = optax.apply_updates(params, updates)
        parameter.grad = torch.tensor(g)
        theirs.step(hessian=[torch.tensor(gamma * h)] if due else None)
        found = np.asarray(params["w"].get_value())
        np.testing.assert_allclose(found, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)
        m, h_mean = (x["w"].get_value() for x in (state[0].mu, state[0].nu))
        clipped += float((jnp.abs(m) >= gamma * h_mean).mean()) / 20
    assert 0.1 < clipped < 0.9


@pytest.fixture(scope="module")
def one_device():
    """The program, its state after three steps, and both estimates there."""
    program = program_on()
    state = program.create(seed=0)
    step, batch = CompiledStep(program), jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
    with program.setup.layout.active():
        for _ in range(3):
            state, _ = step(state, batch)
        found = {
            name: jax.jit(estimate, static_argnums=0)(program.setup, state, batch)
            for name, estimate in ESTIMATES.items()
        }
    return program, state, found


def test_hutchinson_is_the_hessian_between_signs(one_device):
    """By central differences of the gradient along the signs, that it took."""
    program, state, found = one_device
    with program.setup.layout.active():
        gradients = jax.jit(
            lambda params: program.setup.gradients(
                dataclasses.replace(state, params=params), BATCH
            )[0]
        )
        u = jax.device_get(signs(state))
        shift = jax.jit(
            lambda params, step: jax.tree.map(lambda w, s: w + step * s, params, u)
        )  # one program, not one for each shape

        def moved(step):
            return jax.device_get(gradients(shift(state.params, step)))

        along = jax.tree.map(lambda a, b: (a - b) / np.float32(6e-4), moved(3e-4), moved(-3e-4))
    every = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(u)])
    assert set(every) == {-1.0, 1.0}
    assert abs(every.mean()) < 4 / np.sqrt(every.size)
    expected = jax.tree.map(np.multiply, u, along)
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=2e-3 * scale),
        jax.device_get(found["hutchinson"]),
        expected,
    )


def test_gauss_newton_bartlett_is_n_squares_of_drawn_targets(one_device):
    program, state, found = one_device
    with program.setup.layout.active():
        drawn = np.asarray(jax.jit(draw_targets, static_argnums=0)(program.setup, state, BATCH))
        batch = dataclasses.replace(BATCH, targets=drawn)
        gradients = jax.jit(lambda: program.setup.gradients(state, batch)[0])()
    n = float(BATCH.loss_mask.sum())
    jax.tree.map(
        lambda h, g: np.testing.assert_allclose(h, n * g * g, rtol=1e-4, atol=1e-9),
        found["gauss_newton_bartlett"],
        gradients,
    )


# Draws 2,000 steps' targets.
@pytest.mark.slow
def test_drawn_targets_are_as_likely_as_the_model_says(one_device):
    """2,000 steps' draws of 64 places against the softmax, within five standard deviations."""
    program, state, _ = one_device
    model = program.setup.model(state)
    with program.setup.layout.active():
        logits = program.setup.objective.logits(
            model, state.statistics, BATCH, program.setup.execution
        )

        def draw(step):
            return draw_targets(program.setup, dataclasses.replace(state, step=step), BATCH)

        draws = np.asarray(jax.jit(lambda: jax.lax.map(draw, jnp.arange(2000)))())
    likely = np.asarray(jax.nn.softmax(logits))
    for token in range(MODEL.vocab_size):
        share = (draws == token).mean(0)
        error = np.sqrt(likely[..., token] * (1 - likely[..., token]) / 2000)
        assert (np.abs(share - likely[..., token]) < 5 * error + 1e-9).all()


@pytest.mark.slow_cases("{'data': 2, 'fsdp': 2, 'zero': 2}")
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "zero": 2}], ids=str
)
def test_estimates_and_steps_on_a_mesh_are_those_of_one_device(sizes, one_device):
    program = program_on(**sizes)
    place = program.shardings(program.shapes())
    state = jax.device_put(jax.device_get(one_device[1]), place)
    batch = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
    with program.setup.layout.active():
        for name, estimate in ESTIMATES.items():
            found = jax.jit(estimate, static_argnums=0)(program.setup, state, batch)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6),
                jax.device_get(found),
                jax.device_get(one_device[2][name]),
            )


# Three compiled steps; the estimates themselves are in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [pytest.param(SophiaH(every=2), marks=pytest.mark.slow), SophiaG(every=2)],
    ids=("sophia_h", "sophia_g"),
)
def test_the_curvature_is_taken_every_few_steps_of_the_first_microbatch(rule):
    program = program_on(rule, fsdp=2).rebuild(accumulation=2)
    step, state = CompiledStep(program), program.create(seed=0)
    batch = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
    first = jax.tree.map(lambda x: x[::2], BATCH)
    first = jax.device_put(first, program.setup.batch_shardings(first))
    changed = []
    with program.setup.layout.active():
        expected = jax.jit(ESTIMATES[rule.curvature], static_argnums=0)(
            program.setup.replace(accumulation=1), state, first
        )
        expected = jax.device_get(expected)
        for _ in range(4):
            before = jax.device_get(state.opt_state[1].nu)
            state, _ = step(state, batch)
            after = jax.device_get(state.opt_state[1].nu)
            if not changed:
                jax.tree.map(
                    lambda h, new: np.testing.assert_allclose(h, 0.01 * new, rtol=1e-4, atol=1e-8),
                    after,
                    expected,
                )
            pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
            changed.append(any((a != b).any() for a, b in pairs))
    assert changed == [True, False, True, False]


# Two compiled steps; tests/test_finetune_freeze.py has frozen parameters in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [pytest.param(SophiaH(), marks=pytest.mark.slow), SophiaG()],
    ids=("sophia_h", "sophia_g"),
)
def test_only_what_is_trained_has_a_curvature(rule):
    """Of the others nothing is kept, and the estimate is the model's in which they stand still."""
    tuning = Tuning(frozen=frozenset({"token_embedding", "layers/up"}))
    program = program_on(rule, fsdp=2).rebuild(tuning=tuning)
    step, state = CompiledStep(program), program.create(seed=0)
    batch = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
    frozen = jax.device_get(state.frozen)
    with program.setup.layout.active():
        state, _ = step(state, batch)
    kept = state.opt_state[1].nu
    assert jax.tree.structure(kept) == jax.tree.structure(state.params)
    assert "token_embedding" not in kept
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(jax.device_get(kept)))
    jax.tree.map(np.testing.assert_array_equal, frozen, jax.device_get(state.frozen))


@pytest.mark.parametrize(
    ("bindings", "sentence"),
    [
        (
            ["Mesh.pipe = 2", "Mesh.fsdp = 2", "Optimizer.name = 'sophia_g'"],
            "Optimizer.name='sophia_g' with Mesh.pipe=2: its curvature estimate needs whole layers "
            "and sequences; use Mesh.pipe=1 or another rule, such as "
            "Optimizer.name='adamw'",
        ),
        (
            ["Exchange.method = 'diloco'", "Mesh.data = -1", "Mesh.fsdp = 1",
             "Optimizer.name = 'sophia_h'"],
            "Optimizer.name='sophia_h' with Exchange.method='diloco': each replica would "
            "estimate its own curvature; use Exchange.method='synchronous' or another rule, "
            "such as Optimizer.name='adamw'",
        ),
    ],
)  # fmt: skip
def test_refusals(bindings, sentence):
    config = load_config("gpt_quickstart", bindings)
    with pytest.raises(UserError) as refusal:
        preflight.check(config, device_count=8, platform="cpu", reads_data=False)
    assert sentence in str(refusal.value).splitlines()
