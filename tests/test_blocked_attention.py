"""The kernel for CPUs equals the reference on every mask and mesh, and does no hidden work."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout
from jax.sharding import PartitionSpec as P
from test_attention import CASES, H, assert_equal, documents, inputs, make_mask, value_and_grads

from jaxtrain.analysis.planning.textbook.flops import count_flops
from jaxtrain.nn.attention import blocked as blocked_module
from jaxtrain.nn.attention.attention import attention
from jaxtrain.nn.attention.context import KEYS, QUERIES, SEGMENTS
from jaxtrain.nn.attention.kernel_registry import Request, validate
from jaxtrain.nn.attention.mask import Mask

blocked = functools.partial(attention, kernel="blocked")


def long_mask(name: str, T: int) -> Mask:
    """A case's mask, its window long enough to reach into another block."""
    mask = make_mask(name, T)
    return dataclasses.replace(mask, window=mask.window and 14 * mask.window)


@functools.cache
def expected(name: str, T: int) -> tuple[jax.Array, ...]:
    *_, N, K = CASES[name]
    mask = long_mask(name, T)
    return value_and_grads(lambda q, k, v: attention(q, k, v, mask), *inputs(T, N, K))


# 20 tokens are one block; 150 are two whole blocks and a part of one.
@pytest.mark.slow_cases(
    "full-150", "causal-20", "one-kv-head-150", "window-20", "window-both-ways-150"
)
@pytest.mark.parametrize("T", [20, 150])
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name: str, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if T == 150:
        monkeypatch.setattr(blocked_module, "TILE", 1)  # one head at a time: the loop over heads
    *_, N, K = CASES[name]
    mask = long_mask(name, T)
    found = value_and_grads(lambda q, k, v: blocked(q, k, v, mask), *inputs(T, N, K))
    assert_equal(found, expected(name, T))


@pytest.mark.parametrize("heads", [2, 3, 4, 8], ids="{} heads a tile".format)
def test_tiles_of_any_size_give_the_same(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    B, T, K, G = 4, 150, 4, 2  # half a row, a part of one that does not divide, one, two
    rng = np.random.default_rng(1)
    shapes = [(B, T, K * G, H), (B, T, K, H), (B, T, K, H), (B, T, K * G, H)]
    arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
    ids = jnp.asarray(rng.integers(0, 3, (B, T)).cumsum(1) // 40, jnp.int32)
    mask = Mask(window=90, segment_ids_BT=ids, segment_ids_BS=ids)

    def found() -> tuple[jax.Array, ...]:
        return value_and_grads(lambda q, k, v: blocked(q, k, v, mask), *arrays)

    whole = value_and_grads(lambda q, k, v: attention(q, k, v, mask), *arrays)
    monkeypatch.setattr(blocked_module, "TILE", heads * G * blocked_module.BLOCK * T)
    assert_equal(found(), whole)


def test_equals_torch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    *qkv, weights = inputs(150, 4, 2)
    q, k, v = leaves = [torch.tensor(x, requires_grad=True) for x in qkv]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    (out * torch.tensor(weights)).sum().backward()
    found = value_and_grads(lambda q, k, v: blocked(q, k, v, Mask()), *qkv, weights)
    assert_equal(found, [out.detach().numpy(), *(x.grad.numpy() for x in leaves)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_as_close_to_float32_as_the_reference_is(dtype: str) -> None:
    truth = expected("everything", 150)
    *qkv, weights = inputs(150, 4, 2)
    narrow = [jnp.asarray(x, dtype) for x in qkv]
    mask = long_mask("everything", 150)
    found, reference = (
        value_and_grads(lambda q, k, v, run=run: run(q, k, v, mask), *narrow, weights)
        for run in (blocked, attention)
    )
    for a, b, t in zip(found, reference, truth, strict=True):
        assert a.dtype == dtype
        apart = np.abs(np.asarray(a, np.float32) - t).max()
        assert apart < 1.5 * np.abs(np.asarray(b, np.float32) - t).max()


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_with_no_batch_dims_saveable"])
def test_recomputation_changes_nothing(policy: str) -> None:
    mask = long_mask("everything", 150)
    saved = getattr(jax.checkpoint_policies, policy)
    run = jax.checkpoint(lambda q, k, v: blocked(q, k, v, mask), policy=saved)
    assert_equal(value_and_grads(run, *inputs(150, 4, 2)), expected("everything", 150))


def test_on_a_mesh_and_inside_a_pipeline_stage() -> None:
    layout = make_layout(pipe=2, fsdp=2, tensor=2)
    arrays = inputs(150, 4, 2)
    mask = long_mask("everything", 150)

    def put(x: np.ndarray, axes: tuple[str, ...]) -> jax.Array:
        return jax.device_put(x, layout.sharding_of(layout.activation(axes)))

    ids = put(documents(150), SEGMENTS)
    placed = [put(x, a) for x, a in zip(arrays, (QUERIES, KEYS, KEYS, QUERIES), strict=True)]

    def everything(ids, *arrays):  # noqa: ANN001, ANN002, ANN202
        own = dataclasses.replace(mask, segment_ids_BT=ids, segment_ids_BS=ids)
        return value_and_grads(lambda q, k, v: blocked(q, k, v, own), *arrays)

    def stage(*arrays):  # noqa: ANN002, ANN202
        with layout.enter_manual("pipe"):
            return everything(*arrays)

    with layout.active():
        found = everything(ids, *placed)
        assert found[0].sharding.spec == layout.activation(QUERIES)
        assert found[2].sharding.spec == layout.activation(KEYS)
        staged = jax.shard_map(
            stage, in_specs=P(), out_specs=P(), axis_names={"pipe"}, check_vma=False
        )
        in_stage = jax.jit(staged)(ids, *placed)
    assert_equal(found, expected("everything", 150))
    assert_equal([np.asarray(x) for x in in_stage], expected("everything", 150))


@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_computes_only_blocks_that_somebody_sees(name: str) -> None:
    T, (*_, N, K) = 512, CASES[name]
    mask = dataclasses.replace(make_mask(name, T), window=100 if name == "window" else None)
    q, k, v, _ = inputs(T, N, K)
    jaxpr = jax.make_jaxpr(lambda q, k, v: blocked(q, k, v, mask))(q, k, v)
    keys = {
        "full": 8 * [512],
        "causal": [64 * i for i in range(1, 9)],
        # 64 queries of the block and 99 keys before the first of them, as far as there are any.
        "window": [64, 128, *6 * [163]],
    }[name]
    # Two products of queries with keys, 2 FLOPs a pair and a feature.
    assert count_flops(jaxpr, lambda scope: False).matmul == 2 * 2 * 2 * N * 64 * sum(keys) * H


def test_no_array_holds_the_scores_of_all_pairs() -> None:
    q, k, v, weights = (jnp.asarray(np.repeat(x, 4, 0)) for x in inputs(512, 4, 4))

    def run(kernel: str):  # noqa: ANN202
        def loss(q, k, v):  # noqa: ANN001, ANN202
            return (attention(q, k, v, Mask(), kernel=kernel) * weights).sum()

        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    scores = 4 * 8 * 4 * 512 * 512
    assert run("xla") > scores
    assert run("blocked") < scores


def test_what_it_cannot_do_is_refused() -> None:
    asked = Request(
        platform="cpu", dtype="float16", causal=False, window=9, segment_ids=True, cached=False,
        head_dim=20, T=7, S=7,
    )  # fmt: skip
    assert list(validate("blocked", asked)) == []
    assert list(validate("blocked", dataclasses.replace(asked, cached=True))) == [
        "Attention.kernel='blocked' does not support queries that start in the middle of "
        "a key-value cache; the nearest kernel that can is 'reference'"
    ]
