"""The compatibility table: its rows, every pair of features, and combinations on one device."""

import re
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import text_batch
from feature_examples import (
    BASE,
    DEVICES,
    EXAMPLES,
    TOGETHER,
    Bindings,
    allowed_pairs,
    combinations,
    config_of,
    errors,
    held,
    merge,
    pairs,
    pairs_of,
    rejected,
)

from jaxtrain.analysis import feature_matrix
from jaxtrain.config.errors import UserError
from jaxtrain.training import layouts
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.compose import compose
from jaxtrain.training.layouts import with_filling_rows
from jaxtrain.training.preflight.compatibility import FEATURES, check_compatibility
from jaxtrain.training.preflight.run_context import RunContext, conflicts
from jaxtrain.training.settings import Config

Found = dict[tuple[str, str], list[str]]


def context_of(*names: str) -> RunContext:
    bindings = merge(*names)
    assert bindings is not None
    return RunContext(config_of(bindings), DEVICES, "cpu")


# -- rows ------------------------------------------------------------------------------------------


def test_every_property_is_needed_by_one_row_and_taken_by_another():
    needed = {name for feature in FEATURES for name in feature.needs}
    taken = {name for feature in FEATURES for name in feature.takes}
    assert needed == taken
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


def test_every_conflict_has_a_reason():
    for conflict in conflicts(list(FEATURES)):
        need = conflict.needing.needs[conflict.property]
        assert need or conflict.taking.takes[conflict.property], conflict


def test_every_row_is_on_in_an_example():
    seen = set()
    for name in EXAMPLES:
        context = context_of(name)
        seen |= {feature.name for feature in FEATURES if feature.written(context)}
    assert "encoder-decoder pipeline" not in seen
    seen |= {feature.name for feature in FEATURES if feature.written(context_of("t5", "pipe"))}
    # Its teacher is a folder of weights (test_distillation.py), and every objective of text has
    # logits (test_optimizer_sophia.py).
    others = {"distillation", "objective without logits"}
    assert {feature.name for feature in FEATURES} - seen == others


def test_the_page_is_what_the_table_says():
    page = Path(__file__).parent.parent / "docs" / "feature_matrix.md"
    assert feature_matrix.page() == page.read_text(), "run: make docs"


# -- pairs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> Found:
    """What is wrong with every pair of examples."""
    return {(a, b): errors(bindings) for a, b, bindings in pairs()}


def test_all_pairs_are_rejected_or_accepted_as_listed(found):
    assert len(found) > 2000
    assert {pair for pair, messages in found.items() if messages} == rejected()


def test_each_pair_of_the_table_is_rejected_with_both_ways_out(found):
    """Applied, each way out that is a binding ends the conflict."""
    applied = 0
    for first, second in found:
        try:
            context = context_of(first, second)
        except UserError:  # two settings of one section
            assert found[first, second]
            continue
        for message in check_compatibility(context):
            assert message in found[first, second]
            ways = message.rpartition("; use ")[2].split(" or ")
            assert len(ways) == 2, message
            for way in ways:
                bindings = dict(_bindings(way))
                if not bindings:
                    continue
                changed = {**BASE, **(merge(first, second) or {}), **bindings}
                if changed["Train.model"] != "@GPT()":
                    changed = {k: v for k, v in changed.items() if k.split(".")[0] != "GPT"}
                again = RunContext(config_of({**BASE, **changed}), DEVICES, "cpu")
                pair = message.partition(":")[0]
                assert not any(m.startswith(f"{pair}:") for m in check_compatibility(again)), way
                applied += 1
    assert applied > 400


def _bindings(way: str) -> Iterator[tuple[str, str]]:
    for part in way.split(" and "):
        match = re.fullmatch(
            r"(\w+\.\w+)=('\w*'|[\w.]+|\(\)|\{\})(, which .*| \(dropless\))?", part
        )
        if match is not None:
            yield match[1], match[2]


@pytest.mark.parametrize(
    ("first", "second", "start"),
    [
        ("sam", "pipe", "Optimizer.sharpness_radius=0.05 with Mesh.pipe=2: a pipeline runs"),
        ("sam", "gossip", "Optimizer.sharpness_radius=0.05 with Exchange.method='gossip': both"),
        ("sam", "sophia_g", "Optimizer.sharpness_radius=0.05 with Optimizer.name='sophia_g': its"),
        ("noise", "pipe", "Train.noise_scale_every=2 with Mesh.pipe=2: a pipeline runs"),
        ("noise", "int8", "Train.noise_scale_every=2 with Exchange.method='int8': it is"),
        ("sam", "noise", "Train.noise_scale_every=2 with Optimizer.sharpness_radius=0.05: its"),
        ("noise_alone", "tensor", "Train.noise_scale_every=2 with Train.accumulation=1: the norm"),
        ("balance", "power_sgd", "the router biases of DeepSeek with Exchange.method='power"),
        ("plateau", "gossip", "Schedule.plateau_patience=2 with Exchange.method='gossip': each"),
        ("lora_dropout", "pipe", "Finetune.lora_dropout=0.1 with Mesh.pipe=2: the dropout mask"),
        ("lora", "2d", "Finetune.lora_rank=4 with Sharding.tensor_layout='2d': adapters and"),
        ("skip", "diloco", "Guard.policy='skip' with Exchange.method='diloco': between"),
        ("params_host", "replay", "Corruption.replay_every=10 with Offload.parameters='host': "),
        ("adam8bit", "local_sgd", "Exchange.method='local_sgd' with Optimizer.name='adam8bit'"),
        ("mixtral_capacity", "context", "Mixtral.capacity_factor=1.25 with Mesh.context=2"),
        ("mixtral_dropless", "sophia_h", "Optimizer.name='sophia_h' with the dropless experts of"),
        ("schedule_free", "unfreeze", "Finetune.unfreeze={'layers/*': 2} with Optimizer.name='sch"),
        ("masters", "diloco", "Exchange.method='diloco' with Sharding.masters='sharded': replicas"),
    ],
)  # fmt: skip
def test_what_a_message_says(first, second, start, found):
    messages = found.get((first, second)) or found[second, first]
    assert any(message.startswith(start) for message in messages), messages


@pytest.mark.parametrize("name", ["plateau", "balance", "sam", "noise"])
def test_alone_none_is_rejected(name):
    bindings = merge(name)
    assert bindings is not None
    assert not errors(bindings)


# -- combinations ----------------------------------------------------------------------------------

# What says where things lie and in which order they are computed, not what.
_LAYOUT = {"Mesh", "Sharding", "Pipeline", "Offload", "Remat", "Scan", "Attention"}
# Numbers of fewer bits round otherwise where sums are split otherwise.
_ROUNDED = {
    "Precision.compute",
    "Precision.matmul",
    "Precision.gradients",
    "Finetune.quantize_bits",
}


def on_one_device(bindings: Bindings) -> tuple[dict[str, str], int]:
    """The same mathematics without a layout, and the devices for it: one for each replica."""
    noise = "Train.noise_scale_every" in bindings
    plain = {
        key: value
        for key, value in bindings.items()
        if key.split(".")[0] not in _LAYOUT and (noise or key != "Train.accumulation")
    }
    replicas = 2 if "Exchange.method" in bindings else 1
    return {**plain, "Mesh.data": str(replicas)}, replicas


def losses(config: Config, devices: int) -> np.ndarray:
    """The losses of three steps."""
    layout = layouts.layout(config, jax.devices()[:devices])
    program = compose(config, layout)
    step, found = CompiledStep(program), []
    with layout.active():
        state = program.create(0)
        for seed in range(3):
            rows = config.train.global_batch_size
            batch = text_batch(rows=rows, length=32, vocab_size=256, seed=seed)
            batch = with_filling_rows(batch, config, layout)
            batch = jax.device_put(batch, program.setup.batch_shardings(batch))
            state, metrics = step(state, batch)
            found.append(np.mean(metrics["loss"]))  # of each replica, where they differ
    return np.array(found)


def assert_equals_one_device(*names: str) -> None:
    own = merge(*names)
    assert own is not None
    bindings = {"Precision.compute": "'float32'", **own}
    plain, devices = on_one_device(bindings)
    found, expected = losses(config_of(bindings), DEVICES), losses(config_of(plain), devices)
    rounded = any(key in own for key in _ROUNDED)
    np.testing.assert_allclose(found, expected, rtol=5e-3 if rounded else 2e-5)
    assert abs(expected[0] - expected[2]) > 1e-4


def test_every_allowed_pair_is_in_a_combination():
    found = {pair for one in combinations() for pair in pairs_of(held(one))}
    assert allowed_pairs() <= found, "run: python tests/feature_examples.py"
    assert not any(errors(merge(*one) or {}) for one in combinations())


def test_what_once_failed_together_is_in_a_combination():
    for names in TOGETHER:
        assert any(set(names) <= held(one) for one in combinations()), names


@pytest.mark.slow  # two programs of many features are compiled for each
@pytest.mark.parametrize("names", combinations(), ids=",".join)
def test_a_combination_of_features_equals_one_device(names):
    assert_equals_one_device(*names)
