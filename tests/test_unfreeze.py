"""Parameters that wait for their step: PyTorch's with `requires_grad=False` until then."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_layout
from flax import nnx
from test_optimizer_groups import NESTED, arrays, assert_same, tree_of
from test_optimizer_rules import KINDS

from jaxtrain.config.errors import UserError
from jaxtrain.parallel.sharding import shardings
from jaxtrain.run.show.report import parameter_table
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.compose import compose
from jaxtrain.training.layouts import abstract_layout
from jaxtrain.training.offload.streaming import stream_update
from jaxtrain.training.optimizers.optimizer import Optimizer, chain, make_optimizer
from jaxtrain.training.optimizers.rule import rules
from jaxtrain.training.optimizers.rules.elementwise import SGD, AdamW
from jaxtrain.training.optimizers.unfreezing import Unfreezing
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config

# The head and the last layer learn first, then the layer before it, then the embedding.
WAITS = Unfreezing((("layers/*[1:2]", 4), ("layers/*", 9), ("embedding", 13), ("norm", 4)))
STARTS = {("up", 0): 9, ("up", 1): 4, ("bias", 0): 9, ("bias", 1): 4, ("table", None): 13,
          ("scale", None): 4, ("head", None): 0}  # fmt: skip
STEPS, RATE, DECAY, CLIP = 20, 1e-2, 0.3, 2.0
SCHEDULE = optax.cosine_decay_schedule(RATE, STEPS)


def ours(
    settings: Optimizer, join: Any = chain, steps: int = STEPS, layers: Any = None,
    placed: Any = lambda tree: tree,
):  # fmt: skip
    """Parameters and the optimizer's state after each step, as a program takes them."""
    optimizer = make_optimizer(settings, SCHEDULE, join, unfreezing=WAITS)
    params = placed(tree_of(0))

    @jax.jit
    def move(params, state, grads, step, more):
        grads = WAITS.mask_gradients(grads, step, layers)
        updates, state = optimizer.update(grads, state, params, step=step, layers=layers, **more)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for step in range(steps):
        more = more_for(settings.name, step)
        params, state = move(params, state, placed(tree_of(step + 1)), jnp.int32(step), more)
        yield arrays(params), state


def more_for(rule: str, step: int) -> dict[str, Any]:
    """What a rule is given beside gradients."""
    return {"curvature": (jnp.array(True), tree_of(step + 100))} if "sophia" in rule else {}


def layers_of(tree: Any) -> dict[tuple[str, int | None], np.ndarray]:
    found = arrays(tree)
    whole = {(name, None): x for name, x in found.items() if name not in NESTED}
    return whole | {(n, i): found[n][i] for n, i in itertools.product(NESTED, range(2))}


@pytest.mark.parametrize("kind", ["adamw", pytest.param("sgd with l2", marks=pytest.mark.slow)])
def test_twenty_steps_are_torchs_with_requires_grad_false_until_each_step(kind):
    """Clipping by the norm of what learns, decay, moments, debiasing; the schedule is the run's."""
    torch = pytest.importorskip("torch")
    params = {
        key: torch.nn.Parameter(torch.tensor(x), requires_grad=False)
        for key, x in layers_of(tree_of(0)).items()
    }
    shared = {"learning_rate": RATE, "clip_norm": CLIP}
    if kind == "adamw":
        settings = Optimizer(rule=AdamW(), weight_decay=DECAY, **shared)
        decays = {key: 0.0 if key[0] in ("scale", "bias") else DECAY for key in params}
        theirs: Any = torch.optim.AdamW(
            [{"params": [p], "weight_decay": decays[key]} for key, p in params.items()],
            lr=RATE, betas=(0.9, 0.95),
        )  # fmt: skip
    else:
        settings = Optimizer(rule=SGD(momentum=0.9), weight_decay=0.0, l2=0.2, **shared)
        theirs = torch.optim.SGD(params.values(), lr=RATE, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, STEPS)
    first = layers_of(tree_of(0))
    for step, (found, _) in enumerate(ours(settings)):
        grads = layers_of(tree_of(step + 1))
        for key, p in params.items():
            p.requires_grad = step >= STARTS[key]
            if p.requires_grad:
                is_matrix = key[0] not in ("scale", "bias")
                penalty = 0.2 * p.detach() if kind != "adamw" and is_matrix else 0.0
                p.grad = torch.tensor(grads[key]) + penalty
        torch.nn.utils.clip_grad_norm_(list(params.values()), CLIP)
        theirs.step()
        schedule.step()
        for (name, layer), p in params.items():
            mine = found[name] if layer is None else found[name][layer]
            if step < STARTS[name, layer]:
                np.testing.assert_array_equal(mine, first[name, layer])
            np.testing.assert_allclose(mine, p.detach().numpy(), rtol=2e-5, atol=2e-6)


# A rule of each kind of state, and one that scales a whole layer's step.
LATE = [name for name in (*KINDS, "lamb") if not rules()[name].averages]


@pytest.mark.slow
@pytest.mark.parametrize("name", LATE)
def test_what_begins_later_begins_as_if_it_were_the_first_step(name):
    """Whatever a rule keeps and counts: the last steps equal a run that begins there."""
    settings = Optimizer(
        rule=rules()[name](), learning_rate=RATE, weight_decay=DECAY, clip_norm=None
    )
    found = [params for params, _ in ours(settings, steps=8)]
    late: Any = make_optimizer(settings, lambda step: SCHEDULE(step + 4))
    params = tree_of(0)
    state, update = late.init(params), jax.jit(late.update)
    for step in range(4, 8):
        updates, state = update(tree_of(step + 1), state, params, **more_for(name, step))
        params = optax.apply_updates(params, updates)
        for key in ("up", "bias"):
            np.testing.assert_allclose(
                found[step][key][1], arrays(params)[key][1], rtol=1e-5, atol=1e-6
            )
        np.testing.assert_allclose(found[step]["scale"], arrays(params)["scale"], rtol=1e-5)


KEPT = Optimizer(learning_rate=RATE, weight_decay=DECAY, clip_norm=CLIP, l1=0.1,
                 average_decay=0.9, moments="bfloat16")  # fmt: skip


@functools.cache
def on_one_device() -> list[dict[str, np.ndarray]]:
    return [params for params, _ in ours(KEPT, steps=8)]


@pytest.mark.slow
def test_a_layer_at_a_time_waits_as_all_do():
    """As a state in the memory of hosts is updated; one in files is so too."""
    for found, expected in zip(ours(KEPT, stream_update, 8), on_one_device(), strict=True):
        assert_same(found[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"pipe": 2, "fsdp": 2}], ids=str)
def test_on_a_mesh_it_is_that_of_one_device(sizes):
    """In a pipeline the layers stand in another order."""
    layout = make_layout(**sizes, tensor=2)
    order = (1, 0) if "pipe" in sizes else None

    def placed(tree: Any) -> Any:
        if order is not None:
            stacked = {"layers": jax.tree.map(lambda x: x[::-1], tree["layers"])}
            tree = nnx.merge_state(tree, nnx.State(stacked))
        return jax.device_put(tree, shardings(tree, layout.moment, layout))

    with layout.active():
        run = ours(KEPT, steps=8, layers=order, placed=placed)
        for (found, _), expected in zip(run, on_one_device(), strict=True):
            if order is not None:
                found = found | {name: found[name][::-1] for name in NESTED}
            assert_same(found, expected)


RUNS = {
    "pipeline": ("Mesh.pipe=2", "Mesh.fsdp=1", "Pipeline.schedule='zero_bubble'"),
    "zero 2, microbatches": ("Sharding.zero=2", "Train.accumulation=2"),
    "in host memory": ("Offload.optimizer_state='host'", "Offload.parameters='host'"),
    "zero 1, in files": ("Sharding.zero=1", "Offload.optimizer_state='disk'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_runs_wait_alike_whatever_holds_their_state_and_go_on_bit_for_bit(
    name, tiny_config, tmp_path
):
    alone = waited(tiny_config)
    config = config_of(tiny_config, *RUNS[name])
    for steps in (3, 6):  # past the first layer that begins, and before the second
        trainer = Trainer(config, tmp_path / "run")
        trainer.train(steps - trainer.steps_done)
        trainer.close()
    whole = Trainer(config)
    whole.train()
    for key, value in whole.weights().items():
        np.testing.assert_array_equal(trainer.weights()[key], value, err_msg=key)
        if "key_bias" not in key:  # whose gradient is rounding errors alone
            np.testing.assert_allclose(value, alone[key], atol=2e-4, err_msg=key)


def config_of(tiny_config, *bindings):
    waits = {"layers/*[1:2]": 2, "layers/*": 4, "embedding": 1}
    return load_config(
        tiny_config,
        [f"Finetune.unfreeze={waits!r}", "Train.steps=6", "Schedule.name='constant'",
         "Optimizer.l2=0.01", "Train.save_every=1", *bindings],
    )  # fmt: skip


def first_moves(name: str) -> list[int]:
    """After how many steps a parameter, or each of its two layers, has not moved for the last
    time."""
    if name.startswith("layers/"):
        return [4, 2]
    return [1 if name == "token_embedding" else 0]


@functools.cache
def waited(tiny_config) -> dict[str, np.ndarray]:
    """The weights of a run whose parameters move from their steps on."""
    trainer = Trainer(config_of(tiny_config))
    first = trainer.weights()
    for done in range(1, 7):
        trainer.train(1)
        for name, value in trainer.weights().items():
            starts = first_moves(name)
            pairs = zip(value, first[name], strict=True) if len(starts) == 2 else [
                (value, first[name])]  # fmt: skip
            for start, (now, before) in zip(starts, pairs, strict=True):
                assert np.array_equal(now, before) == (done <= start), (name, done)
    return trainer.weights()


def test_a_table_says_from_which_step_on():
    program = compose(
        config := load_config(
            "gpt_quickstart",
            ["Mesh.fsdp=1", "Mesh.tensor=1", "TextData.source='synthetic'", "Train.steps=600",
             "Finetune.freeze=('position_embedding',)",
             "Finetune.unfreeze={'layers/up[0:2]': 500, 'layers/up*': 100, 'norm': 50}"],
        ),
        abstract_layout(config, 1),
    )  # fmt: skip
    table = parameter_table(program.abstract_state(), program.setup.unfreezing)
    said = dict(zip(table.columns[0].cells, table.columns[-1].cells, strict=True))
    assert said["layers/up"] == "from step 500 (layers 0 to 1), from step 100"
    assert said["layers/up_bias"] == "from step 100"
    assert said["layers/mlp_norm_scale"] == "from step 50"
    assert said["layers/out"] == "yes"
    assert said["position_embedding"] == "frozen"


@pytest.mark.parametrize(
    ("bindings", "sentence"),
    [
        (["Finetune.unfreeze={'layer/*': 5}"],
         "no trained parameter has the name or role 'layer/*'"),
        (["Finetune.unfreeze={'layers/*[7:]': 5}"], "matches no layer of these parameters"),
        (["Finetune.unfreeze={'layers/*': -1}"], "'layers/*' has -1; use 0 or more steps"),
        (["Finetune.unfreeze={'*': 5}"], "leaves no parameter to train at the first"),
        (["Finetune.unfreeze={'layers/*': 600}"],
         "'layers/*' starts after 600 steps, but the run ends after Train.steps=600; use at most "
         "599"),
        (["Finetune.unfreeze={'layers/*': 5}", "Optimizer.name='schedule_free'"],
         "it averages the iterates of all steps"),
        (["Finetune.unfreeze={'layers/*': 5}", "Exchange.method='gossip'", "Mesh.data=8"],
         "or Exchange.method='synchronous'"),
        (["Finetune.unfreeze={'embedding': 5}", "Finetune.freeze=('token_embedding',)"],
         "no trained parameter has the name or role 'embedding'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_wait_so_is_refused(bindings, sentence):
    def checked() -> None:
        config = load_config("gpt_quickstart", ["Train.steps=600", *bindings])
        preflight.check(config, device_count=8, platform="cpu", reads_data=False)

    with pytest.raises(UserError) as refused:
        checked()
    assert sentence in str(refused.value)
