"""Moments in bfloat16: rounded without bias, alike on every mesh, and no slower to learn."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from conftest import make_layout, make_step, text_batch, with_exchange
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.parallel.sharding import shardings
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.optimizers.moments import Rounded, keep_moments, round_to_bfloat16
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.rule import rules
from jaxtrain.training.optimizers.rules.elementwise import AdamW
from jaxtrain.training.pipeline.schedules import Stages
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import Checkpoint, load_config
from jaxtrain.training.state import with_shardings

CONSTANT = optax.constant_schedule(1e-2)
ULP = 2.0**-7  # between the bfloat16 numbers from 1 to 2


def bits_of(x) -> np.ndarray:
    return np.asarray(x).view(np.uint16)


# -- one number ------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [1.0 + ULP / 3, -1.7e-3, 3.1e-39, 2.9e38, 1.0, -0.0])
def test_over_all_bits_the_mean_is_the_number_itself(x):
    x32 = np.float32(x)
    found = round_to_bfloat16(jnp.full(2**16, x32), jnp.arange(2**16, dtype=jnp.uint32))
    # Neighbours as NumPy's extension type has them, which we did not write.
    nearest = ml_dtypes.bfloat16(x32)
    around = {float(nearest)}
    if float(nearest) != float(x32):
        away = math.inf if float(nearest) < float(x32) else -math.inf
        around.add(float(np.nextafter(nearest, ml_dtypes.bfloat16(away))))
    assert set(np.asarray(found, np.float64)) == around
    # 2^16 multiples of 2^-16 of a step: float64 holds each sum.
    assert np.asarray(found, np.float64).mean() == float(x32)


def test_what_is_no_number_stays_so():
    x = jnp.array([jnp.inf, -jnp.inf, jnp.nan, -jnp.nan], jnp.float32)
    for bits in (0, 1, 2**16 - 1):
        found = np.asarray(round_to_bfloat16(x, jnp.full(4, bits, jnp.uint32)), np.float32)
        np.testing.assert_array_equal(found, x)


# -- the bits --------------------------------------------------------------------------------------


def parameters(**shapes) -> nnx.State:
    """Zeros with named axes: name = (shape, axes)."""
    return nnx.State({n: nnx.Param(jnp.zeros(s), axes=axes) for n, (s, axes) in shapes.items()})


def test_bits_are_even_and_independent_over_elements_steps_names_and_moments():
    """Gradients a quarter of a step above 1: the first moment goes up with probability 1/4, the
    second, of 1 + 2^-8 + 2^-18, with 1/2 + 2^-11."""
    n, steps = 2**14, 8
    rule = keep_moments(optax.scale_by_adam(0.0, 0.0), "bfloat16")
    params = parameters(a=((n,), ("embed",)), b=((n,), ("embed",)))
    gradients = jax.tree.map(lambda x: x + 1 + ULP / 4, params)

    def step(state, _):
        _, state = rule.update(gradients, state, params)
        return state, [
            jnp.stack([moment[name].get_value() for name in ("a", "b")]) > 1
            for moment in (state.rule.mu, state.rule.nu)
        ]

    _, up = jax.jit(lambda state: jax.lax.scan(step, state, None, steps))(rule.init(params))
    first, second = (np.asarray(x, np.float64) for x in up)  # [steps, names, n]
    total = first.size
    for found, probability in ((first, 0.25), (second, 0.5 + 2**-11)):
        deviation = math.sqrt(probability * (1 - probability))
        # Five standard deviations of a mean of `total` independent draws.
        assert abs(found.mean() - probability) < 5 * deviation / math.sqrt(total)
        unit = (found - probability) / deviation
        pairs = {
            "elements": unit[:, :, 1:] * unit[:, :, :-1],
            "rows of 64": unit[:, :, 64:] * unit[:, :, :-64],
            "steps": unit[1:] * unit[:-1],
            "names": unit[:, 0] * unit[:, 1],
        }
        for name, products in pairs.items():
            assert abs(products.mean()) < 5 / math.sqrt(products.size), name
    both = (first - 0.25) * (second - 0.5) / math.sqrt(0.25 * 0.75 * 0.25)
    assert abs(both.mean()) < 5 / math.sqrt(total)


SHAPES = {
    "stacked": ((6, 8, 16), ("layers", "embed", "mlp")),
    "table": ((16, 8), ("vocab", "embed")),
    "scale": ((8,), ("embed",)),
}
# Three layers a stage; two virtual stages a rank; stages of unequal length, so that one is padded.
PIPELINES = {"pipe": (3, 3), "interleaved": (2, 2, 1, 1), "padded": (4, 2)}


def moments_after(steps: int, layout=None, stages: Stages | None = None):
    """Both moments, layers in the model's order, after gradients drawn alike for every layout."""
    optimizer = make_optimizer(Optimizer(moments="bfloat16", clip_norm=None), CONSTANT)
    params, order = parameters(**SHAPES), None
    rng = np.random.default_rng(0)
    gradients = [
        jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
        for _ in range(steps)
    ]
    if stages is not None:
        params, *gradients = (stages.to_stages(x) for x in (params, *gradients))
        order = stages.order.tolist()

    def update(gradients, state, params):
        return optimizer.update(gradients, state, params, layers=order)[1]

    if layout is None:
        step, state = jax.jit(update), optimizer.init(params)
        for gradient in gradients:
            state = step(gradient, state, params)
    else:
        place = shardings(params, layout.moment, layout)
        params, *gradients = (jax.device_put(x, place) for x in (params, *gradients))
        state = optimizer.init(params)
        state = jax.device_put(state, shardings(state, layout.moment, layout))
        with layout.active():
            step = jax.jit(update).lower(gradients[0], state, params).compile()
            text = step.as_text()
            for gradient in gradients:
                state = step(gradient, state, params)
        # Each device rounds its own elements: nothing is sent, no index is made whole.
        assert not any(word in text for word in ("all-", "collective-", "reduce-scatter"))
    state = jax.device_get(state)
    if stages is not None:
        state = stages.to_layers(state)
    return [bits_of(x) for moment in state[0].rule[1:] for x in jax.tree.leaves(moment)]


@pytest.fixture(scope="module")
def on_one_device():
    return moments_after(3)


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 8, "zero": 0}], ids=str
)
def test_moments_are_the_same_bits_on_every_mesh(sizes, on_one_device):
    found = moments_after(3, make_layout(**sizes))
    assert len(found) == 6
    for one, other in zip(found, on_one_device, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", PIPELINES)
def test_moments_are_the_same_bits_wherever_a_layer_stands(name, on_one_device):
    stages = Stages(2, PIPELINES[name])
    found = moments_after(3, make_layout(pipe=2, fsdp=2, tensor=2), stages)
    for one, other in zip(found, on_one_device, strict=True):
        np.testing.assert_array_equal(one, other)


# -- learning --------------------------------------------------------------------------------------


def to_nearest(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same with moments rounded to the nearest bfloat16: what does not work."""

    def kept(state):
        return jax.tree.map(
            lambda x: x.astype(jnp.bfloat16).astype(x.dtype) if x.dtype == jnp.float32 else x, state
        )

    def update(updates, state, params=None):
        updates, state = rule.update(updates, state, params)
        return updates, kept(state)

    return optax.GradientTransformation(rule.init, update)


def test_a_slow_second_moment_gets_where_it_should_and_rounded_to_nearest_does_not():
    """Gradients of 1 and b2 = 0.999: after t steps the second moment is 1 - 0.999^t.

    From 1/4 on the next step, 0.001 x 3/4, is less than half of the 2^-9 between neighbours, so
    that rounding to the nearest ends there.
    """
    n, steps = 1024, 2000
    params = parameters(w=((n,), ("embed",)))
    ones = jax.tree.map(jnp.ones_like, params)
    adam = optax.scale_by_adam(0.9, 0.999)

    def run(rule):
        def step(state, _):
            return rule.update(ones, state, params)[1], None

        return jax.jit(lambda s: jax.lax.scan(step, s, None, steps)[0])(rule.init(params))

    stalled = run(to_nearest(adam)).nu["w"].get_value()
    assert set(np.asarray(stalled)) == {0.25}
    found = np.asarray(run(keep_moments(adam, "bfloat16")).rule.nu["w"].get_value(), np.float64)
    # A step's rounding has at most the variance (2^-8 / 2)^2 below 1, and fades by 0.999 a step.
    variance = 2.0**-18 / (1 - 0.999**2)
    assert abs(found.mean() - (1 - 0.999**steps)) < 5 * math.sqrt(variance / n)


def test_a_regression_learns_as_with_float32_moments_and_to_nearest_does_not():
    """Gradients fall by 100 after 30 steps: a second moment that cannot shrink again makes
    all later steps too short. b2 = 0.998 takes 0.2 % off it a step, and bfloat16's neighbours are
    at least 0.39 % apart."""
    D, rows, steps, seeds = 16, 8, 3000, 3
    rule = AdamW(b2=0.998)
    settings = {"rule": rule, "learning_rate": 3e-3, "weight_decay": 0.0, "clip_norm": None}

    def final_loss(optimizer, seed):
        key, wanted_key, noise_key = jax.random.split(jax.random.key(seed), 3)
        wanted = jax.random.normal(wanted_key, (D, D))
        params = parameters(w=((D, D), ("embed", "mlp")))

        def loss(params, key, scale):
            x = jax.random.normal(key, (rows, D))
            noise = jax.random.normal(jax.random.fold_in(key, 1), (rows, D))
            return jnp.square(x @ (params["w"].get_value() - wanted) * scale + 0.1 * noise).mean()

        def step(carry, number):
            params, state = carry
            scale = jnp.where(number < 30, 10.0, 1.0)
            gradients = jax.grad(loss)(params, jax.random.fold_in(key, number), scale)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        first = (params, optimizer.init(params))
        (params, _), _ = jax.lax.scan(step, first, jnp.arange(steps))
        return jnp.square(params["w"].get_value() - wanted).mean()

    def losses(optimizer):
        return np.asarray(jax.jit(jax.vmap(lambda s: final_loss(optimizer, s)))(jnp.arange(seeds)))

    rate = optax.constant_schedule(settings["learning_rate"])
    exact = losses(make_optimizer(Optimizer(**settings), rate))
    rounded = losses(make_optimizer(Optimizer(moments="bfloat16", **settings), rate))
    adam = to_nearest(optax.scale_by_adam(0.9, rule.b2))
    nearest = losses(optax.chain(adam, optax.scale_by_learning_rate(rate)))
    # What three seeds differ by is what a run's noise makes of the loss.
    spread = exact.max() - exact.min()
    assert (np.abs(rounded - exact) < spread).all(), (rounded, exact)
    assert (nearest - exact > 5 * spread).all(), (nearest, exact)


# -- the step --------------------------------------------------------------------------------------

MODEL = GPT(vocab_size=32, num_layers=2, embed_dim=16, num_heads=2, context_length=8)
BATCH = text_batch(rows=8, length=8, vocab_size=32)


@pytest.mark.parametrize("name", rules())
def test_every_rule_keeps_its_moments_in_the_dtype_asked_for(name):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters(**SHAPES))
    for dtype in ("float32", "bfloat16") if rules()[name].dtype is None else ("float32",):
        settings = Optimizer(rule=rules()[name](), moments=dtype)
        optimizer = make_optimizer(settings, CONSTANT)
        before = optimizer.init(params)
        update = functools.partial(optimizer.update, curvature=(jnp.array(True), params))
        _, after = jax.eval_shape(update, params, before, params)
        kept = [array for shape in SHAPES.values() for array in settings.keeps(*shape)]
        wanted = sorted((x.shape, x.dtype or dtype) for x in kept)
        for state in (before, after):
            found = [(x.shape, x.dtype.name) for x in jax.tree.leaves(state) if x.ndim]
            assert sorted(found) == wanted
        assert jax.tree.structure(before) == jax.tree.structure(after)
        assert sum(x.bytes(dtype) for x in kept) == sum(
            x.nbytes for x in jax.tree.leaves(before) if x.ndim
        )


@pytest.mark.slow_cases("{'pipe': 2, 'fsdp': 2}")
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"zero": 2, "fsdp": 4, "tensor": 2}, marks=pytest.mark.slow),
        {"pipe": 2, "fsdp": 2},
    ],
    ids=str,
)
def test_a_resumed_run_is_the_run_never_stopped_bit_for_bit(sizes, tmp_path):
    optimizer = make_optimizer(Optimizer(learning_rate=1e-2, moments="bfloat16"), CONSTANT)
    program = make_step(MODEL, make_layout(**sizes), optimizer=optimizer)
    if "pipe" in sizes:
        pipeline = dataclasses.replace(program.setup.pipeline, microbatches=2)
        program = program.rebuild(pipeline=pipeline)
    step = CompiledStep(program)
    placed = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))

    def go_on(state):
        with program.setup.layout.active():
            for _ in range(2):
                state, _ = step(state, placed)
        return state

    state = go_on(program.create(seed=0))
    checkpoints = Checkpoints(tmp_path, Checkpoint(asynchronous=False))
    checkpoints.save(2, state, {})
    stored = {name: x.dtype.name for name, x in checkpoints.tree(2).items()}
    moments = [dtype for name, dtype in stored.items() if "/mu/" in name or "/nu/" in name]
    assert set(moments) == {"bfloat16"}
    assert len(moments) == 2 * len(jax.tree.leaves(state.params))
    straight = jax.device_get(go_on(state))
    resumed = jax.device_get(go_on(checkpoints.restore(2, program.abstract_state())))
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    assert step.on_arrays._cache_size() == 1
    kept = straight.opt_state[1]
    assert isinstance(kept, Rounded)
    assert kept.count == 4
    assert all(x.any() for x in jax.tree.leaves(kept.rule))


def test_replicas_with_their_own_moments_take_them():
    program = make_step(
        MODEL,
        make_layout(data=2, fsdp=4),
        optimizer=make_optimizer(Optimizer(moments="bfloat16"), CONSTANT),
    )
    program = with_exchange(Exchange(method="diloco", period=2), program)
    batch = with_shardings(BATCH, program.setup.batch_shardings(BATCH))
    before = program.abstract_state()
    with program.setup.layout.active():
        after, *_ = jax.eval_shape(program.train_step, before, batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), before
    )


def test_a_mean_of_rounded_moments_is_refused():
    config = load_config(
        "gpt_quickstart",
        ["Optimizer.moments = 'bfloat16'", "Exchange.method = 'local_sgd'", "Mesh.data = -1"],
    )
    with pytest.raises(UserError) as refusal:
        preflight.check(config, device_count=8, platform="cpu", reads_data=False)
    assert (
        "Exchange.method='local_sgd' with Optimizer.moments='bfloat16': the mean of the "
        "replicas' moments would be rounded to nearest, so that a slow moment would never change; "
        "use Optimizer.moments='float32' or Exchange.method='diloco', which averages no moments"
    ) in str(refusal.value).splitlines()
