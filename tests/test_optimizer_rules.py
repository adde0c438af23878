"""Every update rule: PyTorch's or its published formula, on every mesh, and what it keeps."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import compile_step, make_layout, make_step, text_batch
from flax import nnx

from jaxtrain.analysis.planning.textbook.state_bytes import argument_bytes
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.nn.precision import Precision
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.parallel.sharding import is_variable, logical_axes, shardings
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.optimizers.matrices import sides
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.parameter_averages import ScheduleFree
from jaxtrain.training.optimizers.rule import rules
from jaxtrain.training.optimizers.rules.adafactor import Adafactor
from jaxtrain.training.optimizers.rules.elementwise import (
    Adagrad,
    Adam,
    AdamSAGE,
    Adan,
    NAdamW,
    RAdam,
    RMSprop,
    memory_length,
)
from jaxtrain.training.optimizers.rules.muon import Muon, newton_schulz, orthogonalize
from jaxtrain.training.optimizers.rules.trust_ratio import LAMB, LARS
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import Checkpoint, load_config
from jaxtrain.training.step import averaged_params
from jaxtrain.training.transforms import estimate_of

STEPS, RATE, DECAY = 20, 1e-2, 0.3
# name -> shape, what the dimensions mean, and the same as so many matrices (or vectors) of a size.
PARAMETERS = {
    "weight": ((4, 6), ("embed", "mlp"), 1, (4, 6)),
    "tall": ((8, 3), ("mlp", "embed"), 1, (8, 3)),
    "stacked": ((2, 4, 6), ("layers", "embed", "mlp"), 2, (4, 6)),
    "experts": ((2, 3, 4, 6), ("layers", "experts", "embed", "mlp"), 6, (4, 6)),
    "kernel": ((3, 3, 2, 4), ("height", "width", "channels_in", "channels"), 1, (18, 4)),
    "table": ((8, 4), ("vocab", "vocab_embed"), 1, (8, 4)),
    "qkv": ((2, 3, 4, 2, 3), ("layers", "qkv", "embed", "heads", "head_dim"), 6, (4, 6)),
    "output": ((2, 3, 4), ("heads", "head_dim", "embed"), 1, (6, 4)),
    "bias": ((6,), ("mlp",), 1, (6,)),
    "biases": ((2, 3, 2, 3), ("layers", "qkv", "heads", "head_dim"), 6, (6,)),
    "scales": ((2, 4), ("layers", "vector"), 2, (4,)),
}
RNG = np.random.default_rng(0)
INITIAL = {n: RNG.normal(size=s[0]).astype(np.float32) for n, s in PARAMETERS.items()}
GRADIENTS = [
    {
        name: (10.0 ** RNG.uniform(-2, 1) * RNG.normal(size=x.shape)).astype(np.float32)
        for name, x in INITIAL.items()
    }
    for _ in range(STEPS)
]


def state_of(values) -> nnx.State:
    """The values as parameters with named axes."""
    return nnx.State(
        {name: nnx.Param(jnp.asarray(v), axes=PARAMETERS[name][1]) for name, v in values.items()}
    )


def optimizer_of(rule, schedule=None, **shared):
    settings = {"learning_rate": RATE, "weight_decay": DECAY, "clip_norm": None, **shared}
    schedule = schedule or optax.constant_schedule(RATE)
    return make_optimizer(Optimizer(rule=rule, **settings), schedule)


def ours(rule, schedule=None):
    """The parameters and the state after each of the steps."""
    optimizer, params = optimizer_of(rule, schedule), state_of(INITIAL)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, gradients):
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for gradients in GRADIENTS:
        params, opt_state = step(params, opt_state, state_of(gradients))
        yield params, opt_state


def apart(values) -> dict[str, list[np.ndarray]]:
    """Every matrix and vector for itself."""
    return {
        name: list(np.asarray(value).reshape(PARAMETERS[name][2], *PARAMETERS[name][3]))
        for name, value in values.items()
    }


def assert_same_path(ours, theirs, rtol=1e-5, atol=1e-6):
    count = 0
    for step, ((params, _), expected) in enumerate(zip(ours, theirs, strict=True)):
        found = apart({name: params[name].get_value() for name in PARAMETERS})
        for name in PARAMETERS:
            for a, b in zip(found[name], expected[name], strict=True):
                np.testing.assert_allclose(
                    a, b, rtol=rtol, atol=atol, err_msg=f"{name}, step {step}"
                )
        count += 1
    assert count == STEPS


# -- PyTorch's -------------------------------------------------------------------------------------


def torch_path(make):
    """`make(optim, parameters, decay)` is an optimizer; one for matrices, one for vectors."""
    torch = pytest.importorskip("torch")
    params = {
        name: [torch.nn.Parameter(torch.tensor(x.copy())) for x in values]
        for name, values in apart(INITIAL).items()
    }
    decayed = [p for values in params.values() for p in values if p.ndim == 2]
    others = [p for values in params.values() for p in values if p.ndim == 1]
    optimizers = [make(torch.optim, decayed, DECAY), make(torch.optim, others, 0.0)]
    for gradients in GRADIENTS:
        for name, values in apart(gradients).items():
            for parameter, gradient in zip(params[name], values, strict=True):
                parameter.grad = torch.tensor(gradient.copy())
        for optimizer in optimizers:
            optimizer.step()
        yield {n: [p.detach().numpy().copy() for p in values] for n, values in params.items()}


TORCH = {
    "adam": (
        Adam(b1=0.8, b2=0.9, epsilon=1e-6),
        lambda optim, params, decay: optim.Adam(
            params, RATE, betas=(0.8, 0.9), eps=1e-6, weight_decay=decay
        ),
    ),
    "adagrad": (
        Adagrad(),
        lambda optim, params, decay: optim.Adagrad(params, RATE, weight_decay=decay),
    ),
    "rmsprop": (
        RMSprop(decay=0.9),
        lambda optim, params, decay: optim.RMSprop(params, RATE, alpha=0.9, weight_decay=decay),
    ),
    "rmsprop with momentum": (
        RMSprop(decay=0.9, momentum=0.8),
        lambda optim, params, decay: optim.RMSprop(
            params, RATE, alpha=0.9, weight_decay=decay, momentum=0.8
        ),
    ),
    "radam": (
        RAdam(),
        lambda optim, params, decay: optim.RAdam(
            params, RATE, weight_decay=decay, decoupled_weight_decay=True
        ),
    ),
    "nadamw": (
        NAdamW(),
        lambda optim, params, decay: optim.NAdam(
            params, RATE, weight_decay=decay, decoupled_weight_decay=True
        ),
    ),
    "adafactor": (
        Adafactor(),
        lambda optim, params, decay: optim.Adafactor(params, RATE, weight_decay=decay),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_rules_equal_torch(name):
    rule, make = TORCH[name]
    assert_same_path(ours(rule), torch_path(make))


def test_muon_is_torchs_to_its_bfloat16():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    for shape in ((16, 40), (40, 16), (24, 24)):
        x = rng.normal(size=shape).astype(np.float32)
        p = torch.nn.Parameter(torch.zeros(shape))
        muon = torch.optim.Muon(
            [p], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw"
        )
        p.grad = torch.tensor(x)
        muon.step()
        found = np.asarray(newton_schulz(jnp.asarray(x))) * 0.2 * math.sqrt(max(shape))
        difference = np.linalg.norm(found + p.detach().numpy()) / np.linalg.norm(found)
        assert difference < 0.02, shape


def test_newton_schulz_is_the_quintic_on_singular_values():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 12, 7))
    expected = []
    for matrix in x:
        u, values, v = np.linalg.svd(matrix, full_matrices=False)
        values = values / np.linalg.norm(values)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        expected.append(u @ np.diag(values) @ v)
        assert ((values > 0.6) & (values < 1.3)).all()
    found = newton_schulz(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    # A loop, whose body stands in the program once.
    assert str(jax.make_jaxpr(newton_schulz)(found)).count("dot_general") == 3


@pytest.mark.parametrize("b2", [0.9, 0.999, 0.9999])
def test_the_length_of_a_memory_is_its_formula(b2):
    t = np.array([1, 2, 5, 6, 7, 100, 900, 1100, 30_000], np.float64)
    expected = 2 / (1 - b2) - 1 - 2 * t * b2**t / (1 - b2**t)
    found = memory_length(jnp.asarray(t, jnp.float32), b2)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


# -- published formulas, in float64 ----------------------------------------------------------------


def published(rule):
    """`rule(name, params, decay, memory, step)` gives a parameter after a step, all by itself."""
    params = {n: [x.astype(np.float64) for x in xs] for n, xs in apart(INITIAL).items()}
    memory = {n: [{} for _ in xs] for n, xs in params.items()}
    for step, gradients in enumerate(GRADIENTS, start=1):
        for name, values in apart(gradients).items():
            for number, g in enumerate(values):
                w = params[name][number]
                decay = DECAY if w.ndim == 2 else 0.0
                after = rule(w, g.astype(np.float64), decay, memory[name][number], step, name)
                params[name][number] = after
        yield {name: [x.copy() for x in xs] for name, xs in params.items()}


def mean(memory, key, rate, value, step):
    """An exponential mean, and the same debiased."""
    memory[key] = rate * memory.get(key, 0.0) + (1 - rate) * value
    return memory[key], memory[key] / (1 - rate**step)


def lamb(w, g, decay, memory, step, name):
    """Algorithm 2 of arXiv 1904.00962."""
    _, m = mean(memory, "m", 0.9, g, step)
    _, v = mean(memory, "v", 0.999, g * g, step)
    r = m / (np.sqrt(v) + 1e-6) + decay * w
    trust = np.linalg.norm(w) / np.linalg.norm(r) if w.ndim == 2 else 1.0
    return w - RATE * trust * r


def lars(w, g, decay, memory, step, name):
    """Algorithm 1 of arXiv 1708.03888."""
    size = np.linalg.norm(w)
    local = 0.02 * size / (np.linalg.norm(g) + decay * size) if w.ndim == 2 else 1.0
    memory["v"] = 0.8 * memory.get("v", 0.0) + RATE * local * (g + decay * w)
    return w - memory["v"]


def adan(w, g, decay, memory, step, name):
    """Algorithm 1 of arXiv 2208.06677 with 1 - beta for beta, debiased as in its code."""
    difference = g - memory.get("g", g)
    memory["g"] = g
    _, m = mean(memory, "m", 0.98, g, step)
    _, v = mean(memory, "v", 0.92, difference, step)
    _, n = mean(memory, "n", 0.99, (g + 0.92 * difference) ** 2, step)
    return w - RATE * ((m + 0.92 * v) / (np.sqrt(n) + 1e-8) + decay * w)


def sage(w, g, decay, memory, step, name):
    """AdamW's step times |I - s| / (s + epsilon^2), of arXiv 2202.02664 and its code."""
    sensitivity = np.abs(w * g)
    _, m = mean(memory, "m", 0.9, g, step)
    _, v = mean(memory, "v", 0.999, g * g, step)
    _, s = mean(memory, "s", 0.75, sensitivity, step)
    scale = np.abs(sensitivity - s) / (s + 1e-16)
    return w - RATE * (scale * m / (np.sqrt(v) + 1e-8) + decay * w)


def muon(w, g, decay, memory, step, name):
    """Nesterov momentum through five turns of the quintic, 0.2 sqrt(longer side); else AdamW."""
    if w.ndim == 1 or name == "table":
        _, m = mean(memory, "m", 0.9, g, step)
        _, v = mean(memory, "v", 0.95, g * g, step)
        return w - RATE * (m / (np.sqrt(v) + 1e-8) + decay * w)
    m, _ = mean(memory, "m", 0.95, g, step)
    x = 0.95 * m + 0.05 * g
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return w - RATE * (0.2 * math.sqrt(max(w.shape)) * x + decay * w)


PUBLISHED = {
    "lamb": (LAMB(), lamb),
    "lars": (LARS(momentum=0.8, trust=0.02), lars),
    "adan": (Adan(), adan),
    "adam_sage": (AdamSAGE(), sage),
    "muon": (Muon(), muon),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_rules_equal_their_published_formula(name):
    rule, formula = PUBLISHED[name]
    # Seven digits through the quintic's slope of 3.4, five times.
    assert_same_path(ours(rule), published(formula), atol=1e-5 if name == "muon" else 2e-6)


def test_schedule_free_equals_its_published_rule_and_evaluates_its_average():
    """Section 4 of arXiv 2405.15682: y between z and x; z by RMSprop, debiased; x their mean,
    weighted by the largest learning rate so far, squared."""
    rates = [RATE * min(step / 5, 1) for step in range(1, STEPS + 1)]
    found = ours(ScheduleFree(), lambda count: jnp.asarray(rates)[count])
    zs = {n: [x.astype(np.float64) for x in xs] for n, xs in apart(INITIAL).items()}
    xs, seconds = {n: list(v) for n, v in zs.items()}, {n: [0.0] * len(v) for n, v in zs.items()}
    total = 0.0
    for step, ((params, opt_state), gradients) in enumerate(
        zip(found, GRADIENTS, strict=True), start=1
    ):
        rate, total = rates[step - 1], total + rates[step - 1] ** 2
        share = rate**2 / total
        evaluated = averaged_params(opt_state, params)
        mine = apart({name: params[name].get_value() for name in PARAMETERS})
        average = apart({name: evaluated[name].get_value() for name in PARAMETERS})
        for name, values in apart(gradients).items():
            for i, g in enumerate(values):
                y = 0.1 * zs[name][i] + 0.9 * xs[name][i]
                seconds[name][i] = 0.999 * seconds[name][i] + 0.001 * g.astype(np.float64) ** 2
                direction = g / (np.sqrt(seconds[name][i] / (1 - 0.999**step)) + 1e-8)
                direction = direction + (DECAY if g.ndim == 2 else 0.0) * y
                zs[name][i] = zs[name][i] - rate * direction
                xs[name][i] = (1 - share) * xs[name][i] + share * zs[name][i]
                y = 0.1 * zs[name][i] + 0.9 * xs[name][i]
                np.testing.assert_allclose(mine[name][i], y, rtol=1e-5, atol=2e-6)
                np.testing.assert_allclose(average[name][i], xs[name][i], rtol=1e-5, atol=2e-6)


# -- which parameters are matrices ----------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_sides_are_those_of_the_matrices(name):
    shape, axes, count, size = PARAMETERS[name]
    stack, rows, columns = sides(axes)
    assert stack + rows + columns == tuple(range(len(axes)))
    of = [math.prod(shape[i] for i in part) for part in (stack, rows, columns)]
    assert of == [count, *size] if len(size) == 2 else of == [count, 1, *size]


# -- on a mesh ------------------------------------------------------------------------------------

SPREAD = {
    "weight": ((8, 16), ("embed", "mlp")),
    "layers": ((4, 8, 16), ("layers", "embed", "mlp")),
    "three": ((3, 16, 8), ("layers", "mlp", "embed")),
    "qkv": ((4, 3, 8, 4, 2), ("layers", "qkv", "embed", "heads", "head_dim")),
    "experts": ((4, 2, 8, 16), ("layers", "experts", "embed", "mlp")),
    "kernel": ((3, 3, 2, 8), ("height", "width", "channels_in", "channels")),
    "table": ((16, 8), ("vocab", "vocab_embed")),
    "bias": ((4, 16), ("layers", "mlp")),
}
RULES = {name: rule() for name, rule in rules().items()} | {"rms": RMSprop(momentum=0.9)}


def spread_state(seed: int, names) -> nnx.State:
    rng = np.random.default_rng(seed)
    values = {name: rng.normal(size=shape) for name, (shape, _) in SPREAD.items()}
    return nnx.State(
        {n: nnx.Param(jnp.asarray(values[n], jnp.float32), axes=SPREAD[n][1]) for n in names}
    )


def after_three(rule, names, layout=None):
    """The parameters after three updates, and the optimizer's state."""
    optimizer, params = optimizer_of(rule), spread_state(0, names)
    gradients = [spread_state(seed, names) for seed in (1, 2, 3)]

    def update(gradient, state, params):
        # Of the rules, those that ask for it alone look at the curvature.
        squares = jax.tree.map(jnp.square, gradient)
        updates, state = optimizer.update(
            gradient, state, params, curvature=(jnp.array(True), squares)
        )
        return optax.apply_updates(params, updates), state

    if layout is None:
        step, state = jax.jit(update), optimizer.init(params)
        for gradient in gradients:
            params, state = step(gradient, state, params)
        return params, state
    place = shardings(params, layout.moment, layout)
    params, *gradients = (jax.device_put(x, place) for x in (params, *gradients))
    state = optimizer.init(params)
    of_state = shardings(state, layout.moment, layout)
    state = jax.device_put(state, of_state)
    with layout.active():
        step = jax.jit(update, out_shardings=(place, of_state))
        for gradient in gradients:
            params, state = step(gradient, state, params)
    return params, state


@functools.cache
def on_one_device(name, names):
    return jax.device_get(after_three(RULES[name], names))[0]


# A rule of each kind of state. That every rule's arrays are those that `keeps` names,
# test_moments.py proves without a compile.
KINDS = ("adamw", "sgd", "adafactor", "muon", "schedule_free", "adam8bit", "soap", "sophia_g")

MESHES = [{"fsdp": 8}, {"fsdp": 2, "tensor": 2, "expert": 2}, {"pipe": 2, "fsdp": 2, "tensor": 2}]
# shampoo, soap: tests/test_optimizer_preconditioned.py.
OTHERS = [name for name in RULES if name not in ("shampoo", "soap")]
# What looks beyond an element. In a pipeline layers have another order, and padding.
BEYOND = ("adafactor", "muon", "lamb", "schedule_free")
# These and each kind of state on every mesh; of what looks at elements alone, each rule on one.
ON_MESHES = [
    (name, sizes)
    for n, name in enumerate(OTHERS)
    for m, sizes in enumerate(MESHES)
    if (name in BEYOND if "pipe" in sizes else name in (*KINDS, *BEYOND) or m == n % 2)
]


# A rule of each kind of state, on one mesh each; the others take turns.
FAST = dict.fromkeys(("adafactor", "sophia_h"), MESHES[1]) | {"adamw": MESHES[0], "muon": MESHES[2]}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(*one, marks=[pytest.mark.slow] * (FAST.get(one[0]) != one[1]))
        for one in ON_MESHES
    ],
    ids=str,
)
def test_updates_on_a_mesh_are_those_of_one_device(name, sizes):
    names = tuple(SPREAD)
    if "pipe" in sizes:
        # Layers that do not divide over it have padding by the time they come here.
        names = tuple(name for name in SPREAD if name != "three")
    layout = make_layout(**sizes)
    one = on_one_device(name, names)
    found, state = after_three(RULES[name], names, layout)
    # What the quintic makes of another order of sums.
    atol = 2e-5 if name == "muon" else 2e-6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol), one, found)
    # The state lies as the rule says: a factor with its dimension.
    for variable in jax.tree.leaves(state, is_leaf=is_variable):
        if is_variable(variable):
            wanted = layout.sharding_of(layout.moment(logical_axes(variable)))
            assert variable.get_value().sharding.is_equivalent_to(wanted, variable.get_value().ndim)


def test_muon_sends_layers_to_their_devices_where_they_divide_and_gathers_one_at_a_time_else():
    """Four layers on fsdp=4 take an all-to-all there and back, on fsdp=8 a loop over layers."""

    def text(**sizes) -> str:
        layout = make_layout(**sizes)
        x = jax.device_put(
            jnp.ones((4, 32, 48)), layout.sharding_of(layout.moment(("layers", "embed", "mlp")))
        )
        with layout.active():
            function = functools.partial(orthogonalize, dims=sides(("layers", "embed", "mlp")))
            return jax.jit(function).lower(x).compile().as_text()

    shared, gathered = text(fsdp=4), text(fsdp=8)
    for program, wanted in ((shared, [2, 0, 0]), (gathered, [0, 1, 0])):
        kinds = ("all-to-all", "all-gather", "all-reduce")
        assert [program.count(f" {kind}(") for kind in kinds] == wanted
    # One layer of 32 x 48 is whole at a time, never all four.
    for program in (shared, gathered):
        assert "f32[32,48]" in program
        assert "f32[4,32,48]" not in program


# -- the step: bytes, resume -----------------------------------------------------------------------

MODEL = GPT(vocab_size=32, num_layers=2, embed_dim=16, num_heads=2, context_length=8)
BATCH = text_batch(rows=8, length=8, vocab_size=32)


@pytest.mark.slow_cases("adam8bit", "muon", "schedule_free", "sgd", "soap", "sophia_g", "adamw")
@pytest.mark.parametrize("name", KINDS)
def test_a_run_keeps_what_its_rule_says_and_goes_on_bit_for_bit(name, tmp_path):
    """ZeRO 3: every dimension of the state is split as the parameter's."""
    settings = Optimizer(rule=RULES[name], learning_rate=1e-3)
    layout = make_layout(fsdp=4, tensor=2)
    optimizer = make_optimizer(settings, optax.constant_schedule(1e-3))
    estimate = estimate_of(settings.rule)
    program = make_step(MODEL, layout, optimizer=optimizer, curvature=estimate)
    compiled = compile_step(program, BATCH)
    placed = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))

    def go_on(state):
        with layout.active():
            for _ in range(2):
                state, _ = compiled(state, placed)
        return state

    # The closed form: what the rule keeps of each parameter, split as its dimensions are.
    params = program.shapes().params
    kept = params_bytes = 0
    for variable in jax.tree.leaves(params, is_leaf=is_variable):
        shape, axes = variable.get_value().shape, logical_axes(variable)
        for array in settings.keeps(shape, axes):
            part = layout.sharding_of(layout.moment(array.axes)).shard_shape(array.shape)
            kept += array._replace(shape=part).bytes(settings.moments)
        part = layout.sharding_of(layout.parameter(axes)).shard_shape(shape)
        params_bytes += 4 * math.prod(part)
    scalars = [x for x in jax.tree.leaves(program.shapes().opt_state) if x.ndim == 0]
    kept += 4 * len(scalars)
    batch = 5 * 4 * BATCH.inputs.size // 4
    arguments = compiled.on_arrays.memory_analysis().argument_size_in_bytes
    assert arguments == params_bytes + kept + batch + 4 * 3  # step and loss_scale's two
    config = load_config("gpt_quickstart")
    train = dataclasses.replace(
        config.train, model=MODEL, global_batch_size=8,
        data=dataclasses.replace(config.train.data, sequence_length=8),
    )  # fmt: skip
    config = dataclasses.replace(
        config, train=train, optimizer=settings, precision=Precision(compute="float32"),
        mesh=Mesh(fsdp=4, tensor=2),
    )  # fmt: skip
    assert argument_bytes(config, layout).optimizer == kept

    state = go_on(program.create(seed=0))
    before = jax.device_get(state.params)
    checkpoints = Checkpoints(tmp_path, Checkpoint(asynchronous=False))
    checkpoints.save(2, state, {})
    straight = jax.device_get(go_on(state))
    resumed = jax.device_get(go_on(checkpoints.restore(2, program.abstract_state())))
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    moved = jax.tree.map(lambda a, b: (a != b).any(), straight.params, before)
    assert all(jax.tree.leaves(moved))


STAGES = [("adafactor", 3), ("muon", 2), ("schedule_free", 1)]


@pytest.mark.slow  # updates on meshes are in the fast part
@pytest.mark.parametrize(("name", "zero"), STAGES)
def test_losses_and_evaluation_on_a_mesh_are_those_of_one_device(name, zero):
    def losses(**sizes):
        optimizer = make_optimizer(Optimizer(rule=RULES[name]), optax.constant_schedule(1e-3))
        program = make_step(MODEL, make_layout(**sizes), optimizer=optimizer)
        placed = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
        state, found = program.create(seed=0), []
        step = CompiledStep(program)
        with program.setup.layout.active():
            for _ in range(3):
                state, metrics = step(state, placed)
                found.append(float(metrics["loss"]))
        consensus = program.eval_state(state)
        evaluate = jax.jit(program.setup.eval_step)
        with program.setup.layout.active():
            sums = evaluate(consensus, placed, program.setup.no_sums(state, placed))
        return [*found, float(sums["loss"] / sums["weight"])]

    np.testing.assert_allclose(losses(fsdp=2, tensor=2, zero=zero), losses(), rtol=2e-6)


# -- rejections


def test_two_averages_are_refused():
    with pytest.raises(UserError) as refusal:
        Optimizer(rule=ScheduleFree(), average_decay=0.9)
    assert str(refusal.value) == (
        "Optimizer.average_decay=0.9 with Optimizer.name='schedule_free', which already averages "
        "the parameters; use None"
    )


def test_every_rules_settings_are_checked():
    for rule in rules().values():
        for field in dataclasses.fields(rule):
            with pytest.raises(UserError, match=rf"{rule.__name__}\.{field.name}=-1"):
                rule(**{field.name: -1.0})


@pytest.mark.parametrize("name", rules())
def test_every_rule_can_be_chosen_and_checked(name):
    config = load_config("gpt_quickstart", [f"Optimizer.name = {name!r}"])
    assert config.optimizer.name == name
    preflight.check(config, device_count=8, platform="cpu", reads_data=False)
