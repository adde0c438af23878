"""AdamW, SGD, clipping, averages and schedules equal PyTorch; Lion equals its published rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_layout, make_program, text_batch
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.models.gpt import GPT
from jaxtrain.models.resnet import ResNet
from jaxtrain.optimizer import Optimizer, Schedule, averaged, make_optimizer, make_schedule

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


ADAMW = {"name": "adamw", "b1": 0.8, "b2": 0.9, "epsilon": 1e-6}
SGD = {"name": "sgd", "momentum": 0.8}


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize(("settings", "make"), [(ADAMW, adamw), (SGD, sgd)], ids=["adamw", "sgd"])
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
        name="lion", learning_rate=rate, weight_decay=decay, clip_norm=None, b1=b1, b2=b2
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
        Optimizer(name="sgd", weight_decay=1.0, clip_norm=None), optax.constant_schedule(1.0)
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
    start = averaged(opt_state)
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
        found = averaged(opt_state)
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
        Optimizer(name="sgd", average_decay=decay, weight_decay=0.0, clip_norm=None, momentum=0.0),
        optax.constant_schedule(1.0),
    )
    params = {"w": nnx.Param(jnp.full((4,), 1e6), axes=("embed",))}
    gradient = {"w": nnx.Param(jnp.full((4,), 1e6 - 1.0), axes=("embed",))}
    opt_state = optimizer.init(params)
    _, opt_state = optimizer.update(gradient, opt_state, params)
    # 1e6 - (1e6 - 1): to float32's rounding of the million's share, an eighth.
    np.testing.assert_allclose(averaged(opt_state)["w"].get_value(), 1.0, atol=0.25)


def test_bfloat16_parameters_are_averaged_in_float32():
    optimizer = make_optimizer(
        Optimizer(name="sgd", average_decay=0.9), optax.constant_schedule(1.0)
    )
    params = {"w": nnx.Param(jnp.ones((4,), jnp.bfloat16), axes=("embed",))}
    assert averaged(optimizer.init(params))["w"].get_value().dtype == jnp.float32


def test_without_a_decay_no_average_is_kept():
    params = state_of(INITIAL)
    without, with_average = (
        make_optimizer(Optimizer(average_decay=decay), optax.constant_schedule(1.0)).init(params)
        for decay in (None, 0.9)
    )
    assert averaged(without) is None
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
        program = make_program(model, make_layout(**sizes), optimizer=optimizer)
        state = program.create(seed=0)
        placed = jax.device_put(batch, program.batch_shardings(batch))
        step = program.jit_train_step()
        with program.layout.active():
            for _ in range(3):
                state, _ = step(state, placed)
        return program, state, placed

    return after_three(), after_three(fsdp=4, data=2, zero=1)


def test_the_average_on_eight_devices_equals_one(trained):
    (_, one, _), (program, eight, _) = trained
    found, expected = averaged(eight.opt_state), averaged(one.opt_state)
    # Adam's first steps are of size learning_rate whatever the gradient's: where it is next to
    # nothing, the order of a sum decides, as it does of the parameters.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), found, expected)
    wanted = jax.tree.map(lambda leaf: leaf.sharding, averaged(program.abstract_state().opt_state))
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
        consensus = program.consensus(state)
        jax.tree.map(np.testing.assert_array_equal, consensus.params, averaged(state.opt_state))
        assert jax.tree.map(lambda x: x.sharding, consensus.params) == jax.tree.map(
            lambda x: x.sharding, state.params
        )
        evaluate = jax.jit(program.eval_step)
        with program.layout.active():
            zeros = program.no_sums(state, batch)
            plain, average = (evaluate(s, batch, zeros)["loss"] for s in (state, consensus))
        assert float(plain) != float(average)
        without = dataclasses.replace(state, opt_state=())
        assert program.consensus(without) is without


# -- schedules -------------------------------------------------------------------------------------

PEAK, FINAL = 0.3, 0.1


def torch_schedule(name: str, warmup: int, decay: int):
    """The learning rate of every step, from PyTorch's schedulers in sequence."""
    torch = pytest.importorskip("torch")
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    rest = STEPS - warmup
    parts, ends = [], []
    if warmup:
        parts.append(schedulers.LambdaLR(optimizer, lambda step: step / warmup))
        ends.append(warmup)
    if name == "cosine":
        parts.append(schedulers.CosineAnnealingLR(optimizer, T_max=rest, eta_min=FINAL * PEAK))
    elif name == "linear":
        parts.append(schedulers.LinearLR(optimizer, 1.0, FINAL, total_iters=rest))
    else:
        parts.append(schedulers.ConstantLR(optimizer, factor=1.0))
    if name == "wsd":
        parts.append(schedulers.LinearLR(optimizer, 1.0, FINAL, total_iters=decay))
        ends.append(STEPS - decay)
    scheduler = schedulers.SequentialLR(optimizer, parts, ends)
    rates = []
    for _ in range(STEPS + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_schedules_equal_torch(name, warmup):
    decay = 6 if name == "wsd" else 0
    settings = Schedule(name=name, warmup_steps=warmup, final_fraction=FINAL, decay_steps=decay)
    schedule = make_schedule(settings, PEAK, STEPS)
    rates = [float(schedule(step)) for step in range(STEPS + 1)]
    np.testing.assert_allclose(rates, torch_schedule(name, warmup, decay), rtol=2e-6, atol=1e-8)
    ends_at = PEAK if name == "constant" else PEAK * FINAL
    assert rates[STEPS] == pytest.approx(ends_at, rel=1e-6)
    assert max(rates) == pytest.approx(PEAK)


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
        (lambda: Optimizer(b2=1.0), "Optimizer.b2=1.0; use 0 to below 1"),
        (
            lambda: Schedule(warmup_steps=-1),
            "Schedule.warmup_steps=-1, Schedule.decay_steps=0; use 0 or more",
        ),
        (lambda: Schedule(final_fraction=2.0), "Schedule.final_fraction=2.0; use 0 to 1"),
        (
            lambda: Schedule(name="wsd"),
            "Schedule.name='wsd' with Schedule.decay_steps=0: 'wsd' wants decay_steps above 0, "
            "the others 0",
        ),
        (
            lambda: Schedule(name="cosine", decay_steps=5),
            "Schedule.name='cosine' with Schedule.decay_steps=5: 'wsd' wants decay_steps above 0, "
            "the others 0",
        ),
        (
            lambda: make_schedule(Schedule(name="wsd", warmup_steps=8, decay_steps=4), PEAK, 10),
            "Schedule.warmup_steps=8 + Schedule.decay_steps=4 is more than Train.steps=10; use "
            "Train.steps = 12 or more, or a shorter warm-up",
        ),
        (
            lambda: make_schedule(Schedule(warmup_steps=50), PEAK, 30),
            "Schedule.warmup_steps=50 is more than Train.steps=30; use Train.steps = 50 or more, "
            "or a shorter warm-up",
        ),
    ],
)
def test_refusals(make, sentence):
    with pytest.raises(UserError) as refusal:
        make()
    assert str(refusal.value) == sentence
