"""On simulated devices no collective runs at the same time as a conditional's.

Both would wait for other devices, in threads of one pool, and with none left neither would end.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lower_step, make_layout, text_batch
from feature_examples import config_of, merge

from jaxtrain.analysis.planning.compiled.hlo import Computation, Module, parse
from jaxtrain.parallel.ordering import run_after, run_between
from jaxtrain.training import layouts
from jaxtrain.training.compose import compose

_COLLECTIVES = {
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "all-reduce-start", "all-gather-start", "collective-permute-start",
}  # fmt: skip


def unordered(text: str) -> list[tuple[str, str]]:
    """Pairs of a conditional with collectives and a collective, neither of which waits for the
    other's result.
    """
    module = parse(text)
    return [
        pair
        for computation in module.computations.values()
        for pair in _unordered_in(module, computation)
    ]


def _unordered_in(module: Module, computation: Computation) -> list[tuple[str, str]]:
    communicates = functools.cache(
        lambda name: any(
            one.opcode in _COLLECTIVES or any(map(communicates, one.called))
            for one in module.computations[name].instructions.values()
        )
    )
    every = computation.instructions
    needs: dict[str, set[str]] = {}  # in the order of the text, which is that of execution
    for name, one in every.items():
        needs[name] = {name}.union(*(needs[operand] for operand in one.operands))
    found = [
        name
        for name, one in every.items()
        if one.opcode in _COLLECTIVES or any(map(communicates, one.called))
    ]
    branches = [name for name in found if every[name].opcode == "conditional"]
    return [
        (branch, other)
        for branch in branches
        for other in found
        if branch not in needs[other] and other not in needs[branch]
    ]


# One branch runs the same code.
@pytest.mark.slow_cases(
    "sophia_g",
    "soap",
)
@pytest.mark.parametrize("name", ["streaming+tensor", "sophia_g", "soap"])
def test_a_branch_s_collectives_are_in_order_with_all_others(name):
    config = config_of(merge(*name.split("+")))
    layout = layouts.layout(config, jax.devices())
    batch = text_batch(rows=config.train.global_batch_size, length=64, vocab_size=256)
    text = lower_step(compose(config, layout), batch).compile().as_text()
    assert " conditional(" in text
    assert unordered(text) == []


@pytest.mark.parametrize("value", [1.0, np.nan, np.inf, 0.0])
def test_waiting_changes_no_value(value):
    layout = make_layout(data=2, fsdp=2)
    tree = {"weights": np.array([[1.0, -0.0], [np.nan, np.inf]], np.float32), "count": np.int32(3)}
    with layout.active():
        results = {"loss": jnp.full(4, value), "steps": jnp.int32(7)}
        found = jax.jit(run_after)(results, tree)
    jax.tree.map(np.testing.assert_array_equal, found, tree)


def test_what_is_run_between_waits_and_is_waited_for():
    """A sum over devices in a branch, between two others that need none of its results."""
    layout = make_layout(data=8)

    def total(x):
        spec = jax.P("data")
        return jax.shard_map(lambda x: jax.lax.psum(x, "data"), in_specs=spec, out_specs=jax.P())(x)

    def branch(x, due):
        return jax.lax.cond(due, lambda x: total(x + 1), lambda x: total(x - 1), x)

    def independent(x, due):
        return total(x), branch(jnp.sqrt(x), due), total(x * 2)

    def in_order(x, due):
        (x, first), found = run_between(branch, (x, total(x)), jnp.sqrt(x), due)
        return first, found, total(x * 2)

    x = jax.device_put(np.arange(8.0, dtype=np.float32), layout.sharding_of(jax.P("data")))
    with layout.active():
        texts = [jax.jit(f).lower(x, True).compile().as_text() for f in (independent, in_order)]
        both = [jax.jit(f)(x, True) for f in (independent, in_order)]
    assert unordered(texts[0])
    assert unordered(texts[1]) == []
    jax.tree.map(np.testing.assert_array_equal, *both)
