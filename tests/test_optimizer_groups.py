"""Groups of parameters, penalties and clipping: PyTorch's and optax's, on a mesh, in a table."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_layout
from flax import nnx
from rich.console import Console

from jaxtrain.config.errors import UserError
from jaxtrain.parallel.sharding import shardings
from jaxtrain.run.show.report import group_table
from jaxtrain.training.compose import compose
from jaxtrain.training.layouts import abstract_layout
from jaxtrain.training.optimizers.groups import scale_groups
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.parameter_averages import ScheduleFree
from jaxtrain.training.optimizers.rules.elementwise import SGD, AdamW
from jaxtrain.training.optimizers.rules.muon import Muon
from jaxtrain.training.optimizers.rules.trust_ratio import LAMB, LARS
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config

RATE, DECAY = 1e-2, 0.3
# name -> shape, what the dimensions mean, role.
PARAMETERS = {
    "table": ((8, 4), ("vocab", "vocab_embed"), "embedding"),
    "head": ((4, 8), ("embed", "vocab"), "output"),
    "up": ((2, 4, 6), ("layers", "embed", "mlp"), None),
    "bias": ((2, 6), ("layers", "mlp"), None),
    "scale": ((4,), ("vector",), "norm"),
}
NESTED = ("up", "bias")


def tree_of(seed: int, scale: float = 1.0) -> nnx.State:
    rng = np.random.default_rng(seed)
    made = {
        name: nnx.Param(
            jnp.asarray(scale * rng.normal(size=shape), jnp.float32), axes=axes, role=role
        )
        for name, (shape, axes, role) in PARAMETERS.items()
    }
    layers = {name: made.pop(name) for name in NESTED}
    return nnx.State({**made, "layers": layers})


def arrays(tree) -> dict[str, np.ndarray]:
    return {
        name: np.asarray((tree["layers"] if name in NESTED else tree)[name].get_value())
        for name in PARAMETERS
    }


def ours(settings: Optimizer, steps: int = 5):
    optimizer = make_optimizer(settings, optax.constant_schedule(settings.learning_rate))
    params = tree_of(0)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for seed in range(1, steps + 1):
        updates, state = update(tree_of(seed), state, params)
        params = optax.apply_updates(params, updates)
        yield arrays(params)


def assert_same(found, expected):
    for name in PARAMETERS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_groups_are_torchs_parameter_groups():
    torch = pytest.importorskip("torch")
    params = {n: torch.nn.Parameter(torch.tensor(v)) for n, v in arrays(tree_of(0)).items()}
    # The embedding by its role, everything in the layers by its name, the first that fits.
    rates = {"table": 0.1, "up": 3.0, "bias": 3.0, "head": 1.0, "scale": 1.0}
    decays = {"table": DECAY, "up": 0.0, "bias": 0.7, "head": 0.5, "scale": 0.0}
    theirs = torch.optim.AdamW(
        [
            {"params": [p], "lr": RATE * rates[name], "weight_decay": decays[name]}
            for name, p in params.items()
        ],
        betas=(0.9, 0.95),
    )
    settings = Optimizer(
        learning_rate=RATE,
        weight_decay=DECAY,
        clip_norm=None,
        learning_rates={"embedding": 0.1, "layers/*": 3.0, "layers/up": 99.0},
        weight_decays={"output": 0.5, "layers/bias": 0.7, "*/up": 0.0},
    )
    for seed, found in enumerate(ours(settings), start=1):
        for name, gradient in arrays(tree_of(seed)).items():
            params[name].grad = torch.tensor(gradient)
        theirs.step()
        assert_same(found, {name: p.detach().numpy() for name, p in params.items()})


OF_LAYERS = {"layers/*[0:1]": 0.25, "layers/up": 3.0, "layers/bias[1:]": 2.0, "layers/*": 9.0}


def test_rates_of_layers_are_torchs_parameter_groups():
    torch = pytest.importorskip("torch")
    rates = {"up": (0.25, 3.0), "bias": (0.25, 2.0)}
    params = {
        (name, layer): torch.nn.Parameter(torch.tensor(arrays(tree_of(0))[name][layer]))
        for name, layer in itertools.product(NESTED, range(2))
    }
    theirs = torch.optim.AdamW(
        [{"params": [p], "lr": RATE * rates[n][i]} for (n, i), p in params.items()],
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    settings = Optimizer(
        learning_rate=RATE, weight_decay=0.0, clip_norm=None, learning_rates=OF_LAYERS
    )
    for seed, found in enumerate(ours(settings), start=1):
        for (name, layer), p in params.items():
            p.grad = torch.tensor(arrays(tree_of(seed))[name][layer])
        theirs.step()
        for (name, layer), p in params.items():
            np.testing.assert_allclose(found[name][layer], p.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_layers_in_the_order_of_stages_have_their_own_rates():
    """Places that hold none, as a pipeline's shorter stages have, are not moved otherwise."""
    rule = scale_groups({"layers/*[1:2]": 5.0, "layers/*[2:]": 7.0})
    tree = {"layers": {"up": nnx.Param(jnp.ones((4, 3)), axes=("layers", "mlp"))}}
    scaled, _ = rule.update(tree, rule.init(tree), tree, layers=(2, -1, 0, 1))
    np.testing.assert_array_equal(scaled["layers"]["up"].get_value()[:, 0], [7, 1, 1, 5])


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (["Optimizer.learning_rates = {'layers/*[4:]': 0.1}"],
         "'layers/*[4:]' matches no layer of these parameters, which have 4"),
        (["Optimizer.learning_rates = {'token_embedding[0:1]': 0.1}"], "which have none"),
        (["Optimizer.weight_decays = {'layers/up[0:2]': 0.1}"],
         "weight decay applies to all layers: use 'layers/up'"),
    ],
    ids=str,
)  # fmt: skip
def test_layers_that_are_not_there_are_refused(bindings, message):
    with pytest.raises(UserError) as refused:
        preflight.check(
            load_config("gpt_quickstart", ["Mesh.tensor=1", *bindings]),
            device_count=4, platform="cpu",
        )  # fmt: skip
    assert message in str(refused.value)


@pytest.mark.parametrize("rule", [AdamW(), LAMB(), LARS(), Muon(), ScheduleFree()], ids=repr)
def test_a_factor_for_all_is_another_learning_rate(rule):
    """Also of what remembers rates (lars) and of iterates beside the parameters."""
    shared = {"rule": rule, "weight_decay": DECAY, "clip_norm": None}
    factor = Optimizer(learning_rate=RATE, learning_rates={"*": 0.25}, **shared)
    rate = Optimizer(learning_rate=RATE / 4, **shared)
    for found, expected in zip(ours(factor, 3), ours(rate, 3), strict=True):
        assert_same(found, expected)


def test_penalties_are_their_gradients():
    def penalty(params):
        matrices = [params["table"], params["head"], params["layers"]["up"]]
        return sum(0.2 * jnp.abs(w).sum() + 0.3 * jnp.square(w).sum() / 2 for w in matrices)

    plain = {"rule": SGD(momentum=0.0), "learning_rate": RATE, "weight_decay": 0.0}
    settings = Optimizer(**plain, clip_norm=None, l1=0.2, l2=0.3)
    gradient = jax.tree.map(jnp.add, tree_of(1), jax.grad(penalty)(tree_of(0)))
    expected = jax.tree.map(lambda w, g: w - RATE * g, tree_of(0), gradient)
    assert_same(next(ours(settings)), arrays(expected))
    # Part of what is clipped.
    clipped = next(ours(Optimizer(**plain, clip_norm=0.5, l1=0.2, l2=0.3)))
    moved = [clipped[name] - value for name, value in arrays(tree_of(0)).items()]
    size = np.sqrt(sum(np.square(part).sum() for part in moved))
    np.testing.assert_allclose(size, 0.5 * RATE, rtol=1e-4)


def test_clipping_by_value_is_torchs():
    torch = pytest.importorskip("torch")
    settings = Optimizer(
        rule=SGD(momentum=0.0), learning_rate=1.0, weight_decay=0.0, clip_norm=None, clip_value=0.3
    )
    found = next(ours(settings))
    for name, gradient in arrays(tree_of(1)).items():
        p = torch.nn.Parameter(torch.tensor(arrays(tree_of(0))[name]))
        p.grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_value_([p], 0.3)
        np.testing.assert_allclose(found[name], (p - p.grad).detach().numpy(), rtol=1e-6)


def test_adaptive_clipping_is_optaxs_layer_by_layer():
    settings = Optimizer(
        rule=SGD(momentum=0.0), learning_rate=1.0, weight_decay=0.0, clip_norm=None, clip_ratio=0.4
    )
    found, before, gradients = next(ours(settings)), arrays(tree_of(0)), arrays(tree_of(1))
    reference = optax.adaptive_grad_clip(0.4)

    def clipped(gradient, weight):
        return reference.update(gradient, reference.init(weight), weight)[0]

    shortened = 0
    for name, gradient in gradients.items():
        one = functools.partial(jax.vmap(clipped)) if name in NESTED else clipped
        expected = gradient if name == "head" else one(gradient, before[name])
        np.testing.assert_allclose(before[name] - found[name], expected, rtol=1e-5, atol=1e-6)
        shortened += np.abs(expected).sum() < 0.99 * np.abs(gradient).sum()
    assert shortened == 4  # all but what makes logits


# Two programs; updates of groups are in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"pipe": 2, "fsdp": 2}], ids=str)
def test_all_of_it_on_a_mesh_is_that_of_one_device(sizes):
    settings = Optimizer(
        learning_rates={"embedding": 0.1, "layers/*[1:]": 0.3},
        weight_decays={"layers/bias": 0.5}, l1=0.1,
        clip_value=1.5, clip_ratio=0.4, clip_norm=1.0,
    )  # fmt: skip
    optimizer = make_optimizer(settings, optax.constant_schedule(RATE))
    layout, params = make_layout(**sizes, tensor=2), tree_of(0)
    one = optimizer.update(tree_of(1), optimizer.init(params), params)[0]
    place = shardings(params, layout.moment, layout)
    spread, gradients = jax.device_put(params, place), jax.device_put(tree_of(1), place)
    with layout.active():
        found = jax.jit(optimizer.update)(gradients, optimizer.init(spread), spread)[0]
    assert_same(arrays(found), arrays(one))


def test_a_table_says_which_parameter_gets_what():
    config = load_config(
        "gpt_quickstart",
        [
            "Mesh.fsdp = 1", "Mesh.tensor = 1", "Optimizer.learning_rate = 0.02",
            "Optimizer.learning_rates = {'embedding': 0.5, 'layers/out[0:1]': 0.25}",
            "Optimizer.weight_decay = 0.3",
            "Optimizer.weight_decays = {'layers/up_bias': 0.7}", "GPT.num_layers = 1",
            "TextData.source = 'synthetic'",
        ],
    )  # fmt: skip
    preflight.check(config, device_count=1, platform="cpu", reads_data=False)
    shapes = compose(config, abstract_layout(config, 1)).shapes()
    console = Console(width=120)
    with console.capture() as capture:
        console.print(group_table(shapes, config.optimizer))
    rows = {
        cells[0]: cells[1:]
        for line in capture.get().splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│┃ ").split("│")]) == 4
    }
    assert rows["token_embedding"] == ["embedding", "0.01", "0.3"]
    assert rows["layers/up_bias"] == ["-", "0.02", "0.7"]
    assert rows["layers/up"] == ["-", "0.02", "0.3"]
    assert rows["layers/out"] == ["-", "0.005 (layers 0 to 0), 0.02", "0.3"]


@pytest.mark.parametrize(
    ("binding", "sentence"),
    [
        (
            "Optimizer.learning_rates = {'embeding': 0.5}",
            "Optimizer.learning_rates: no trained parameter has the name or role 'embeding'; "
            "did you mean 'embedding'?",
        ),
        (
            "Optimizer.learning_rates = {'embedding': 0.0}",
            "Optimizer.learning_rates: 'embedding' has 0.0; use a factor above 0",
        ),
        (
            "Optimizer.weight_decays = {'layers/*': -1.0}",
            "Optimizer.weight_decays: 'layers/*' has -1.0; use 0 or more",
        ),
        ("Optimizer.clip_ratio = 0.0", "Optimizer.clip_ratio=0.0; use None or a number above 0"),
        ("Optimizer.l1 = -1.0", "Optimizer.l1=-1.0; use 0 or more"),
    ],
)
def test_refusals(binding, sentence):
    def checked():
        config = load_config("gpt_quickstart", [binding])
        preflight.check(config, device_count=8, platform="cpu", reads_data=False)

    with pytest.raises(UserError) as refusal:
        checked()
    assert sentence in str(refusal.value)


def test_what_is_frozen_is_in_no_group_and_adapters_are():
    def checked(*bindings):
        config = load_config("gpt_quickstart", list(bindings))
        preflight.check(config, device_count=8, platform="cpu", reads_data=False)

    freeze = "Finetune.freeze = ('token_embedding',)"
    checked(freeze, "Optimizer.learning_rates = {'position': 0.5}")
    with pytest.raises(UserError, match="no trained parameter has the name or role 'embedding'"):
        checked(freeze, "Optimizer.learning_rates = {'embedding': 0.5}")
    checked("Finetune.lora_rank = 2", "Optimizer.learning_rates = {'*/up/*': 16.0}")
    with pytest.raises(UserError, match="no trained parameter has the name or role 'position'"):
        checked("Finetune.lora_rank = 2", "Optimizer.learning_rates = {'position': 0.5}")
