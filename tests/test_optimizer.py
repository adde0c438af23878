"""AdamW, SGD, clipping, averages and schedules equal PyTorch; Lion equals its published rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_layout, make_step, text_batch
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.models.convolutional.resnet import ResNet
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.rules.elementwise import SGD, AdamW, Lion
from jaxtrain.training.optimizers.schedule import Schedule, make_schedule, notes
from jaxtrain.training.step import averaged_params

STEPS = 20
# name -> (shape, what the dimensions mean, whether it is decayed)
PARAMETERS = {
    "weight": ((4, 6), ("embed", "mlp"), True),
    "stacked_weight": ((2, 4, 6), ("layers", "embed", "mlp"), True),
    "kernel": ((3, 3, 2, 4), ("height", "width", "channels_in", "channels"), True),
    "bias": ((6,), ("mlp",), False),
    "stacked_scale": ((2, 4), ("layers", "embed"), False),
}
RNG = np.random.default_rng(0)
INITIAL = {n: RNG.normal(size=s).astype(np.float32) for n, (s, _, _) in PARAMETERS.items()}
# Norms from 0.1 to 100: some are clipped to 1 and some are not.
GRADIENTS = [
    {
        name: (10.0 ** RNG.uniform(-2, 1) * RNG.normal(size=shape)).astype(np.float32)
        for name, (shape, _, _) in PARAMETERS.items()
    }
    for _ in range(STEPS)
]


def state_of(values) -> nnx.State:
    """The values as parameters with named axes."""
    return nnx.State(
        {name: nnx.Param(jnp.asarray(v), axes=PARAMETERS[name][1]) for name, v in values.items()}
    )


def ours(settings: Optimizer, schedule):
    """The parameters after each of the steps."""
    optimizer = make_optimizer(settings, schedule)
    params = state_of(INITIAL)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, gradients):
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for gradients in GRADIENTS:
        params, opt_state = step(params, opt_state, state_of(gradients))
        yield {name: np.asarray(params[name].get_value()) for name in PARAMETERS}


def theirs(make, schedule=None, clip_norm=None):
    """The same from PyTorch; `make` builds an optimizer from parameter groups."""
    torch = pytest.importorskip("torch")
    params = {n: torch.nn.Parameter(torch.tensor(v)) for n, v in INITIAL.items()}
    decayed = [params[name] for name, (_, _, decay) in PARAMETERS.items() if decay]
    others = [params[name] for name, (_, _, decay) in PARAMETERS.items() if not decay]
    optimizer = make(torch.optim, decayed, others)
    for step, gradients in enumerate(GRADIENTS):
        for name, gradient in gradients.items():
            params[name].grad = torch.tensor(gradient)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(params.values(), clip_norm)
        if schedule is not None:
            for group in optimizer.param_groups:
                group["lr"] = float(schedule(step))
        optimizer.step()
        yield {name: p.detach().numpy().copy() for name, p in params.items()}


def assert_same_path(ours, theirs, rtol=1e-5):
    count = 0
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name in PARAMETERS:
            np.testing.assert_allclose(
                a[name], b[name], rtol=rtol, atol=1e-6, err_msg=f"{name}, step {step}"
            )
        count += 1
    assert count == STEPS


def adamw(optim, decayed, others):
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)


def sgd(optim, decayed, others):
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return optim.SGD(groups, lr=1e-2, momentum=0.8, nesterov=True, weight_decay=0.3)


ADAMW = {"rule": AdamW(b1=0.8, b2=0.9, epsilon=1e-6)}
NESTEROV = {"rule": SGD(momentum=0.8)}


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("settings", "make"), [(ADAMW, adamw), (NESTEROV, sgd)], ids=["adamw", "sgd"]
)
def test_update_rules_and_clipping_equal_torch(settings, make, clip_norm):
    settings = Optimizer(**settings, learning_rate=1e-2, weight_decay=0.3, clip_norm=clip_norm)
    assert_same_path(
        ours(settings, optax.constant_schedule(1e-2)), theirs(make, clip_norm=clip_norm)
    )


def test_a_scheduled_clipped_run_equals_torch():
    schedule = make_schedule(Schedule(name="cosine", warmup_steps=5), 1e-2, STEPS)
    settings = Optimizer(**ADAMW, learning_rate=1e-2, weight_decay=0.3, clip_norm=1.0)
    assert_same_path(ours(settings, schedule), theirs(adamw, schedule, clip_norm=1.0))


def test_lion_equals_its_published_rule():
    """Algorithm 2 of arXiv 2302.06675."""
    b1, b2, rate, decay = 0.9, 0.95, 1e-2, 0.3

    def published():
        params = {name: value.astype(np.float64) for name, value in INITIAL.items()}
        momentum = {name: np.zeros_like(value) for name, value in params.items()}
        for gradients in GRADIENTS:
            for name, gradient in gradients.items():
                direction = np.sign(b1 * momentum[name] + (1 - b1) * gradient)
                if PARAMETERS[name][2]:
                    direction = direction + decay * params[name]
                params[name] = params[name] - rate * direction
                momentum[name] = b2 * momentum[name] + (1 - b2) * gradient
            yield dict(params)

    settings = Optimizer(
        rule=Lion(b1=b1, b2=b2), learning_rate=rate, weight_decay=decay, clip_norm=None
    )
    assert_same_path(ours(settings, optax.constant_schedule(rate)), published())


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (GPT(vocab_size=8, num_layers=1, embed_dim=8, num_heads=2, context_length=4), 6),
        (ResNet(depth=20, num_classes=10, channels=1, width=8), 22),
    ],
    ids=["gpt", "resnet"],
)
def test_exactly_the_weights_of_products_and_lookups_decay(model, sizes):
    shapes = nnx.state(nnx.eval_shape(lambda: model.build(jax.random.key(0))), nnx.Param)
    params = jax.tree.map(lambda shape: jnp.ones(shape.shape), shapes)
    optimizer = make_optimizer(
        Optimizer(rule=SGD(), weight_decay=1.0, clip_norm=None), optax.constant_schedule(1.0)
    )
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    decayed = 0
    for path, update in nnx.to_flat_state(updates):
        moved = bool((update.get_value() != 0).all())
        decayed += moved
        is_weight = not any(word in str(path[-1]) for word in ("bias", "scale"))
        assert moved == is_weight, path
    # Not vacuous: GPT's two tables, qkv, out, up, down; ResNet's 21 kernels and the head.
    assert decayed == sizes


# -- the average of the parameters -----------------------------------------------------------------

DECAY = 0.8


def test_the_average_equals_torch():
    """PyTorch's exponential average of zeros and the parameters, divided by what zeros weigh."""
    torch = pytest.importorskip("torch")
    swa = torch.optim.swa_utils
    settings = Optimizer(**ADAMW, learning_rate=1e-2, average_decay=DECAY)
    optimizer = make_optimizer(settings, optax.constant_schedule(1e-2))
    plain = make_optimizer(
        dataclasses.replace(settings, average_decay=None), optax.constant_schedule(1e-2)
    )
    params = state_of(INITIAL)
    opt_state, plain_state = optimizer.init(params), plain.init(params)
    start = averaged_params(opt_state, params)
    jax.tree.map(np.testing.assert_array_equal, start, params)
    module = torch.nn.ParameterDict({n: torch.zeros(v.shape) for n, v in INITIAL.items()})
    theirs = swa.AveragedModel(module, multi_avg_fn=swa.get_ema_multi_avg_fn(DECAY))
    theirs.update_parameters(module)  # PyTorch takes what it sees first as it is
    for step, gradients in enumerate(GRADIENTS, start=1):
        updates, opt_state = jax.jit(optimizer.update)(state_of(gradients), opt_state, params)
        unaveraged, plain_state = jax.jit(plain.update)(state_of(gradients), plain_state, params)
        # The average changes nothing of the run.
        jax.tree.map(np.testing.assert_array_equal, updates, unaveraged)
        params = optax.apply_updates(params, updates)
        for name, parameter in module.items():
            parameter.data = torch.tensor(np.asarray(params[name].get_value()))
        theirs.update_parameters(module)
        found = averaged_params(opt_state, params)
        for name, average in theirs.module.items():
            np.testing.assert_allclose(
                found[name].get_value(),
                average.detach().numpy() / (1 - DECAY**step),
                rtol=1e-6,
                atol=1e-7,
                err_msg=f"{name}, step {step}",
            )


@pytest.mark.parametrize("decay", [0.5, 0.9999, 0.9999999])
def test_the_first_parameters_have_no_part_in_the_average(decay):
    optimizer = make_optimizer(
        Optimizer(rule=SGD(momentum=0.0), average_decay=decay, weight_decay=0.0, clip_norm=None),
        optax.constant_schedule(1.0),
    )
    params = {"w": nnx.Param(jnp.full((4,), 1e6), axes=("embed",))}
    gradient = {"w": nnx.Param(jnp.full((4,), 1e6 - 1.0), axes=("embed",))}
    opt_state = optimizer.init(params)
    _, opt_state = optimizer.update(gradient, opt_state, params)
    # 1e6 - (1e6 - 1): to float32's rounding of the million's share, an eighth.
    np.testing.assert_allclose(averaged_params(opt_state, params)["w"].get_value(), 1.0, atol=0.25)


def test_bfloat16_parameters_are_averaged_in_float32():
    optimizer = make_optimizer(
        Optimizer(rule=SGD(), average_decay=0.9), optax.constant_schedule(1.0)
    )
    params = {"w": nnx.Param(jnp.ones((4,), jnp.bfloat16), axes=("embed",))}
    assert averaged_params(optimizer.init(params), params)["w"].get_value().dtype == jnp.float32


def test_without_a_decay_no_average_is_kept():
    params = state_of(INITIAL)
    without, with_average = (
        make_optimizer(Optimizer(average_decay=decay), optax.constant_schedule(1.0)).init(params)
        for decay in (None, 0.9)
    )
    assert averaged_params(without, params) is None
    assert jax.tree.structure(with_average[:-1]) == jax.tree.structure(without)


GPT_SIZES = {"vocab_size": 32, "num_layers": 2, "embed_dim": 16, "num_heads": 2}
AVERAGED = Optimizer(learning_rate=1e-2, average_decay=DECAY)


@pytest.fixture(scope="module")
def trained():
    """Programs and their states after three steps, on one device and on eight."""
    batch = text_batch(rows=8, length=8, vocab_size=32)

    def after_three(**sizes):
        optimizer = make_optimizer(AVERAGED, optax.constant_schedule(1e-2))
        model = GPT(context_length=8, **GPT_SIZES)
        program = make_step(model, make_layout(**sizes), optimizer=optimizer)
        state = program.create(seed=0)
        placed = jax.device_put(batch, program.setup.batch_shardings(batch))
        step = CompiledStep(program)
        with program.setup.layout.active():
            for _ in range(3):
                state, _ = step(state, placed)
        return program, state, placed

    return after_three(), after_three(fsdp=4, data=2, zero=1)


def test_the_average_on_eight_devices_equals_one(trained):
    (_, one, _), (program, eight, _) = trained
    found, expected = (averaged_params(state.opt_state, state.params) for state in (eight, one))
    # Adam's first steps are of size learning_rate whatever the gradient's: where it is next to
    # nothing, the order of a sum decides, as it does of the parameters.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), found, expected)
    abstract = program.abstract_state()
    average = averaged_params(abstract.opt_state, abstract.params)
    wanted = jax.tree.map(lambda leaf: leaf.sharding, average)
    assert jax.tree.map(lambda x: x.sharding, found) == wanted
    # ZeRO 1: the average lies split over fsdp as the moments do, the parameters do not.
    moments = jax.tree.leaves(eight.opt_state[1].mu)
    for average, moment in zip(jax.tree.leaves(found), moments, strict=True):
        assert average.sharding == moment.sharding
    largest = max(jax.tree.leaves(found), key=lambda x: x.size)
    assert "fsdp" in largest.sharding.spec
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(eight.params))


def test_evaluation_uses_the_average(trained):
    for program, state, batch in trained:
        consensus = program.eval_state(state)
        jax.tree.map(
            np.testing.assert_array_equal,
            consensus.params,
            averaged_params(state.opt_state, state.params),
        )
        assert jax.tree.map(lambda x: x.sharding, consensus.params) == jax.tree.map(
            lambda x: x.sharding, state.params
        )
        evaluate = jax.jit(program.setup.eval_step)
        with program.setup.layout.active():
            zeros = program.setup.no_sums(state, batch)
            plain, smooth = (evaluate(s, batch, zeros)["loss"] for s in (state, consensus))
        assert float(plain) != float(smooth)
        without = dataclasses.replace(state, opt_state=())
        assert program.eval_state(without) is without


# -- schedules -------------------------------------------------------------------------------------

PEAK, FINAL = 0.3, 0.1


# name -> what else it is given; `length` is a decay's from the peak to the run's last step.
TORCH = {
    "constant": lambda of, optimizer, length: of.ConstantLR(optimizer, factor=1.0),
    "linear": lambda of, optimizer, length: of.LinearLR(optimizer, 1.0, FINAL, length),
    "cosine": lambda of, optimizer, length: of.CosineAnnealingLR(optimizer, length, PEAK * FINAL),
    "wsd": lambda of, optimizer, length: of.ConstantLR(optimizer, factor=1.0),
    "exponential": lambda of, optimizer, length: of.ExponentialLR(optimizer, FINAL ** (1 / length)),
}
WSD_DECAY = 6


def torch_schedule(name: str, warmup: int):
    """The learning rate of every step, from PyTorch's schedulers in sequence."""
    torch = pytest.importorskip("torch")
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    parts, ends = [], []
    if warmup:
        parts.append(schedulers.LambdaLR(optimizer, lambda epoch: (epoch + 1) / warmup))
        ends.append(warmup - 1)  # the step of the peak is the decay's first
    parts.append(TORCH[name](schedulers, optimizer, STEPS - max(warmup, 1)))
    if name == "wsd":
        parts.append(schedulers.LinearLR(optimizer, 1.0, FINAL, total_iters=WSD_DECAY))
        ends.append(STEPS - 1 - WSD_DECAY)
    scheduler = schedulers.SequentialLR(optimizer, parts, ends)
    return followed(optimizer, scheduler)


def followed(optimizer, scheduler) -> list[float]:
    """The learning rate of each of STEPS steps."""
    rates = []
    for step in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < STEPS - 1:
            scheduler.step()
    return rates


def rates_of(steps: int = STEPS, *, count: int | None = None, **settings) -> np.ndarray:
    """The learning rates of a run's steps, or of its first `count`."""
    schedule = make_schedule(Schedule(**settings), PEAK, steps)
    return np.asarray(jax.vmap(schedule)(np.arange(count or steps)), np.float64)


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("name", TORCH)
def test_schedules_equal_torch(name, warmup):
    decay = WSD_DECAY if name == "wsd" else 0
    rates = rates_of(name=name, warmup_steps=warmup, final_fraction=FINAL, decay_steps=decay)
    np.testing.assert_allclose(rates, torch_schedule(name, warmup), rtol=2e-6, atol=1e-8)


def test_one_cycle_equals_torch():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK, total_steps=STEPS, pct_start=6 / STEPS, cycle_momentum=False,
        final_div_factor=1 / 25 / FINAL,
    )  # fmt: skip
    rates = rates_of(name="one_cycle", warmup_steps=6, final_fraction=FINAL)
    np.testing.assert_allclose(rates, followed(optimizer, scheduler), rtol=2e-6)


def test_polynomial_equals_torch():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, STEPS - 1, power=3.0)
    rates = rates_of(name="polynomial", power=3.0, final_fraction=0.0)
    np.testing.assert_allclose(rates, followed(optimizer, scheduler), rtol=2e-6, atol=1e-8)


def test_piecewise_equals_torch():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9], gamma=0.1)
    rates = rates_of(name="piecewise", factors={5: 0.1, 9: 0.1})
    np.testing.assert_allclose(rates, followed(optimizer, scheduler), rtol=2e-6)


def test_inverse_sqrt_is_its_formula():
    """lr = peak min(s / w, sqrt(w / s)) (arXiv 1706.03762, section 5.3), not below the last."""
    step = np.arange(1, 401)
    expected = PEAK * np.maximum(np.minimum(step / 4, np.sqrt(4 / step)), 0.15 * (step > 4))
    rates = rates_of(400, name="inverse_sqrt", warmup_steps=4, final_fraction=0.15)
    np.testing.assert_allclose(rates, expected, rtol=2e-6)
    assert rates[-1] == pytest.approx(0.15 * PEAK)


def test_warm_restarts_are_cosines_from_peak_to_end_one_after_the_other():
    """lr = final + (peak - final) (1 + cos(pi t / n)) / 2 for t = 0..n (arXiv 1608.03983)."""
    cycle = FINAL + (1 - FINAL) * (1 + np.cos(np.pi * np.arange(6) / 5)) / 2
    expected = PEAK * np.concatenate([[1 / 3, 2 / 3], cycle, cycle, cycle])
    rates = rates_of(20, name="warm_restarts", warmup_steps=3, decay_steps=5, final_fraction=FINAL)
    np.testing.assert_allclose(rates, expected, rtol=2e-6)


ENDING = [
    {"name": "linear"},
    {"name": "cosine", "warmup_steps": 3},
    {"name": "polynomial"},
    {"name": "one_cycle", "warmup_steps": 5},
    {"name": "wsd", "decay_steps": 1},
    {"name": "wsd", "decay_steps": 4, "warmup_steps": 2},
]


@pytest.mark.parametrize("settings", ENDING, ids=str)
@pytest.mark.parametrize("steps", [7, 20, 1000])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_the_last_step_has_the_final_fraction_and_the_one_before_has_more(settings, steps, final):
    rates = rates_of(steps, **settings, final_fraction=final)
    assert rates[-1] == pytest.approx(final * PEAK, rel=1e-7, abs=0)
    assert final == 1 or rates[-2] > rates[-1]
    top = max(settings.get("warmup_steps", 0), 1)
    assert rates[top - 1] == rates.max() == pytest.approx(PEAK, rel=1e-7)
    first = 1 if top == 1 else 1 / 25 if settings["name"] == "one_cycle" else 1 / top
    assert rates[0] == pytest.approx(first * PEAK)


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "one_cycle", "exponential"])
def test_a_run_made_longer_with_its_decays_length_keeps_its_rates(name):
    short = Schedule(name=name, warmup_steps=3)
    rates = rates_of(20, name=name, warmup_steps=3)
    kept = short.with_same_decay(20)
    longer = rates_of(40, name=name, warmup_steps=3, decay_steps=kept.decay_steps)
    np.testing.assert_array_equal(longer[:20], rates)
    np.testing.assert_array_equal(longer[20:], rates[-1])
    assert kept.with_same_decay(40) == kept
    constant = Schedule(name="constant")
    assert constant.with_same_decay(20) == constant


def test_a_warm_up_longer_than_the_run_grows_as_far_as_it_goes():
    for settings in ({"name": "cosine"}, {"name": "wsd", "decay_steps": 2}, {"name": "constant"}):
        rates = rates_of(5, warmup_steps=50, **settings)
        np.testing.assert_allclose(rates, PEAK * np.arange(1, 6) / 50, rtol=1e-6)
        (note,) = notes(Schedule(warmup_steps=50, **settings), 5)
        assert "Schedule.warmup_steps=50 is more than Train.steps=5" in note
        assert "grows to 10% of" in note
    # The peak is in the last step: there is nothing to decay in.
    assert rates_of(4, name="cosine", warmup_steps=4)[-1] == pytest.approx(PEAK)
    assert not list(notes(Schedule(warmup_steps=4), 4))
    wsd = {"name": "wsd", "warmup_steps": 8, "decay_steps": 4}
    (note,) = notes(Schedule(**wsd), 10)
    assert "the learning rate decays over 2 steps" in note
    expected = [*np.arange(1, 9) / 8, 0.55, 0.1]
    np.testing.assert_allclose(rates_of(10, **wsd), PEAK * np.array(expected), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: Optimizer(learning_rate=0.0),
            "Optimizer.learning_rate=0.0; use a number above 0",
        ),
        (
            lambda: Optimizer(clip_norm=-1.0),
            "Optimizer.clip_norm=-1.0; use None or a number above 0",
        ),
        (lambda: Optimizer(weight_decay=-0.1), "Optimizer.weight_decay=-0.1; use 0 or more"),
        (
            lambda: Optimizer(average_decay=1.0),
            "Optimizer.average_decay=1.0; use None, or a number above 0 and below 1 such as 0.999",
        ),
        (lambda: AdamW(b2=1.0), "AdamW.b2=1.0; use 0 to below 1"),
        (lambda: Schedule(warmup_steps=-1), "Schedule.warmup_steps=-1; use 0 or more"),
        (lambda: Schedule(final_fraction=2.0), "Schedule.final_fraction=2.0; use 0 to 1"),
        (
            lambda: Schedule(name="wsd"),
            "Schedule.name='wsd' with Schedule.decay_steps=0; set the number of decay steps, such "
            "as a tenth of Train.steps",
        ),
        (
            lambda: Schedule(name="exponential", final_fraction=0.0),
            "Schedule.final_fraction=0.0 with Schedule.name='exponential', which never reaches 0; "
            "use above 0, such as 0.01",
        ),
        (
            lambda: Schedule(name="constant", decay_steps=5),
            "Schedule.decay_steps=5 has no effect for Schedule.name='constant', which does not "
            "end; use 0",
        ),
        (
            lambda: Schedule(factors={60: 0.1}),
            "Schedule.factors={60: 0.1} with Schedule.name='cosine': these belong to 'piecewise', "
            "such as {60: 0.1, 80: 0.1}; set both or neither",
        ),
        (
            lambda: Schedule(name="piecewise", factors={0: 0.1}),
            "Schedule.factors: 0 has 0.1; use steps from 1 on and factors above 0",
        ),
        (
            lambda: Schedule(power=1.0),
            "Schedule.power=1.0 has no effect for Schedule.name='cosine'; leave it at 2.0 or set "
            "Schedule.name='polynomial'",
        ),
    ],
)
def test_refusals(make, sentence):
    with pytest.raises(UserError) as refusal:
        make()
    assert str(refusal.value) == sentence
