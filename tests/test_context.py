"""Ring attention and Ulysses equal one device, move what the formulas say, and hold no T x T."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.attention import ring as ring_module
from jaxtrain.nn.attention.attention import attention
from jaxtrain.nn.attention.context import KEYS, QUERIES, SEGMENTS, along_context, run_of, work
from jaxtrain.nn.attention.mask import Mask

B, T, N, H = 2, 32, 8, 16
# name: causal, window, documents, kv heads
CASES = {
    "causal": (True, None, False, 8),
    "full": (False, None, False, 8),
    "grouped": (True, None, False, 2),
    "window": (True, 6, False, 8),
    "window-both-ways": (False, 6, False, 4),
    "documents": (True, None, True, 8),
    "documents-not-causal": (False, None, True, 8),
    "everything": (True, 9, True, 2),
}


def zigzag(x: np.ndarray, c: int) -> np.ndarray:
    """Rank after rank, each with its early run and its late run."""
    runs = np.split(x, 2 * c, axis=1)
    return np.concatenate([runs[i] for rank in range(c) for i in (rank, 2 * c - 1 - rank)], axis=1)


def back(x: np.ndarray, c: int) -> np.ndarray:
    order = zigzag(np.arange(x.shape[1])[None], c)[0]
    return np.asarray(x)[:, np.argsort(order)]


@functools.cache
def inputs(K: int) -> tuple[np.ndarray, ...]:
    """Queries, keys, values and the weights that make a scalar of the output."""
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)
    return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)


def documents() -> np.ndarray:
    ids = np.ones((B, T), np.int32)
    ids[0, 10:], ids[1, 17:], ids[1, 25:] = 2, 2, 0
    return ids


def value_and_grads(q, k, v, weights, ids_T, ids_S, *, case="causal", **options):  # noqa: ANN001, ANN201
    causal, window, _, _ = CASES[case]
    mask = Mask(causal=causal, window=window, segment_ids_BT=ids_T, segment_ids_BS=ids_S)

    def loss(q, k, v):  # noqa: ANN001, ANN202
        out = attention(q, k, v, mask, **options)
        return (out * weights).astype(jnp.float32).sum(), out

    (_, out), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return out, *grads


def arguments(case: str) -> list[np.ndarray | None]:
    _, _, packed, K = CASES[case]
    ids = documents() if packed else None
    return [*inputs(K), ids, ids]


@functools.cache
def reference(case: str) -> list[np.ndarray]:
    found = jax.jit(functools.partial(value_and_grads, case=case))(*arguments(case))
    return [np.asarray(x) for x in found]


AXES = (QUERIES, KEYS, KEYS, QUERIES, SEGMENTS, SEGMENTS)


def on_mesh(layout, arrays, method, **options):  # noqa: ANN001, ANN201
    """Output and gradients with sequences split, all in the order of the text."""
    c = layout.mesh.shape["context"]
    order, undo = (zigzag, back) if method == "ring" else (lambda x, c: x, lambda x, c: x)
    with layout.active():
        placed = [
            None
            if x is None
            else jax.device_put(order(x, c), layout.sharding_of(layout.activation(axes)))
            for x, axes in zip(arrays, AXES, strict=True)
        ]
        run = functools.partial(value_and_grads, context_parallel=method, **options)
        return [undo(np.asarray(x), c) for x in jax.jit(run)(*placed)]


def assert_close(found, expected, *, atol: float = 5e-6) -> None:  # noqa: ANN001
    for name, a, b in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=name)


# -- attention equals one device ------------------------------------------------------------------

MESHES = {2: {"context": 2, "data": 2}, 4: {"context": 4, "tensor": 2}, 8: {"context": 8}}


@pytest.mark.slow_cases(
    "grouped-4-ring",
    "window-both-ways-4-ulysses",
    "causal-4-ring",
    "everything-8-ring",
    "causal-8-ring",
    "causal-8-ulysses",
    "documents-4-ring",
    "everything-2-ulysses",
    "everything-8-ulysses",
    "window-both-ways-2-ring",
    "window-both-ways-2-ulysses",
    "window-both-ways-4-ring",
    "causal-4-ulysses",
    "full-4-ring",
    "full-4-ulysses",
    "grouped-4-ulysses",
    "window-4-ring",
    "documents-not-causal-4-ulysses",
    "everything-2-ring",
)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("case", "c"),
    [(case, 4) for case in CASES]
    + [("everything", 2), ("window-both-ways", 2), ("causal", 8), ("everything", 8)],
)
def test_attention_equals_one_device(case: str, c: int, method: str) -> None:
    found = on_mesh(make_layout(**MESHES[c]), arguments(case), method, case=case)
    assert_close(found, reference(case))


@pytest.mark.parametrize("case", ["everything", "full"])
def test_runs_longer_than_a_chunk_of_queries_change_nothing(case, monkeypatch):
    monkeypatch.setattr(ring_module, "QUERY_CHUNK", 3)  # runs of 8 in chunks of 2
    found = on_mesh(make_layout(context=2), arguments(case), "ring", case=case)
    assert_close(found, reference(case))


@pytest.mark.slow_cases("causal-2", "full-2")
@pytest.mark.parametrize("c", [2, 4])
@pytest.mark.parametrize("causal", ["causal", "full"])
def test_a_rank_whose_queries_see_nothing_gives_zeros_and_no_gradient(c: int, causal: str) -> None:
    """The other ranks' numbers are as if its queries were not there; nothing is NaN."""
    rank, r = 1, T // (2 * c)
    alone = np.zeros(T, bool)
    for run in (rank, 2 * c - 1 - rank):
        alone[run * r : (run + 1) * r] = True
    q, k, v, weights = inputs(8)
    keys = documents()
    queries = np.where(alone, -1, keys).astype(np.int32)
    found = on_mesh(make_layout(context=c), [q, k, v, weights, queries, keys], "ring", case=causal)
    assert (found[0][:, alone] == 0).all()
    assert (found[1][:, alone] == 0).all()
    # Rows that see nothing take no part in the reference's scalar either.
    weights = np.where(alone[:, None, None], 0, weights)
    expected = jax.jit(functools.partial(value_and_grads, case=causal))(
        q, k, v, weights, queries, keys
    )
    expected = [np.array(x) for x in expected]
    expected[0][:, alone] = 0
    assert_close(found, expected)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_bfloat16_is_no_further_from_float32_than_one_device_is(method: str) -> None:
    half = [jnp.asarray(x, jnp.bfloat16) for x in inputs(4)]
    exact = [np.asarray(x, np.float32) for x in half]
    truth = jax.jit(value_and_grads)(*exact, None, None)
    one = jax.jit(functools.partial(value_and_grads, kernel="xla"))(*half, None, None)
    found = on_mesh(
        make_layout(context=4), [*(np.asarray(x) for x in half), None, None], method, kernel="xla"
    )
    for a, b, t in zip(found, one, truth, strict=True):
        assert a.dtype == jnp.bfloat16
        apart = np.abs(np.asarray(a, np.float32) - t).max()
        assert apart < 1.5 * np.abs(np.asarray(b, np.float32) - t).max()


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_attention_inside_a_pipeline_stage_equals_one_device(method: str) -> None:
    layout = make_layout(pipe=2, context=2, tensor=2)
    order = zigzag if method == "ring" else lambda x, c: x
    arrays = [order(x, 2) for x in arguments("everything")]
    specs = [layout.activation(axes) for axes in AXES]

    def stage(*arrays):  # noqa: ANN002, ANN202
        with layout.enter_manual("pipe"):
            return value_and_grads(*arrays, case="everything", context_parallel=method)

    with layout.active():
        placed = [
            jax.device_put(x, layout.sharding_of(s)) for x, s in zip(arrays, specs, strict=True)
        ]
        # Specs of a partly manual region name its manual axes alone; the rest stays as it is.
        run = jax.shard_map(
            stage, in_specs=P(), out_specs=P(), axis_names={"pipe"}, check_vma=False
        )
        found = [np.asarray(x) for x in jax.jit(run)(*placed)]
    found = [back(x, 2) for x in found] if method == "ring" else found
    assert_close(found, reference("everything"))


# -- the order of the tokens, and who computes what -----------------------------------------------


def test_tokens_are_laid_out_in_zigzag_order_without_communication() -> None:
    x = np.arange(B * T, dtype=np.int32).reshape(B, T)
    layout = make_layout(context=4, data=2)
    for method, expected in (("ring", zigzag(x, 4)), ("ulysses", x)):
        with layout.active():
            placed = jax.device_put(x, layout.sharding_of(P("data")))
            run = jax.jit(functools.partial(along_context, method=method)).lower(placed).compile()
            found = run(placed)
        np.testing.assert_array_equal(found, expected)
        assert found.sharding.spec == P("data", "context")
        assert not collectives(run.as_text())


def test_one_device_keeps_the_order_and_the_kernels() -> None:
    x = np.arange(6, dtype=np.int32)[None]
    with make_layout(data=1).active():
        np.testing.assert_array_equal(along_context(x, "ring"), x)
        plain = jax.make_jaxpr(value_and_grads)(*arguments("causal"))
    assert "ppermute" not in str(plain)
    assert "shard_map" not in str(plain)


@pytest.mark.parametrize("c", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("causal", "window"),
    [(True, None), (False, None), (True, 1), (True, 4), (True, 11), (False, 5)],
)
def test_every_visible_block_is_computed_once_and_ranks_do_equal_work(c, causal, window) -> None:
    r = 4
    place = np.arange(2 * c * r)
    distance = place[:, None] - place[None, :]
    seen = np.ones(distance.shape, bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    blocks = seen.reshape(2 * c, r, 2 * c, r)
    some, every = blocks.any((1, 3)), blocks.all((1, 3))
    count = np.zeros((2 * c, 2 * c), int)
    steps = work(c, r, causal=causal, window=window)
    for step, products in enumerate(steps):
        for product in products:
            # One product is one block of r x r on every rank: equal work by construction.
            assert len(product.query_slots) == len(product.key_slots) == c
            for rank in range(c):
                query = run_of(rank, product.query_slots[rank], c)
                key = run_of((rank - step) % c, product.key_slots[rank], c)
                count[query, key] += 1
                assert every[query, key] or not product.whole
    assert (count[some] == 1).all()
    assert (count <= 1).all()
    if window is None:
        # Nothing invisible is computed: 2c+1 blocks a rank for causal attention, 4c for full.
        assert (count == some).all()
        assert [len(products) for products in steps] == [3, *[2] * (c - 1)] if causal else [4] * c
    elif causal and window <= r + 1 and c > 3:
        # The own run, its neighbour from one side and from the other: independent of c.
        assert sum(len(products) for products in steps) <= 5


# -- what moves, and what is held -----------------------------------------------------------------

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def collectives(text: str) -> dict[tuple[str, str], int]:
    """How often each kind of collective with each result type stands in a compiled program."""
    found = re.findall(rf"(?m)= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
    return collections.Counter((kind, re.sub(r"\{[^}]*\}", "", shape)) for shape, kind in found)


def ppermutes(jaxpr: str) -> dict[str, int]:
    return collections.Counter(re.findall(r":(\w+\[[\d,]*\])\S* = ppermute\[", jaxpr))


def abstract(layout, dtype, K, length=T):  # noqa: ANN001, ANN201
    """Shapes of one attention's arguments, with documents."""
    shapes = (B, length, N, H), (B, length, K, H), (B, length, K, H), (B, length, N, H)
    shapes = [(shape, dtype) for shape in shapes] + [((B, length), jnp.int32)] * 2
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding_of(layout.activation(axes)))
        for (shape, dtype), axes in zip(shapes, AXES, strict=True)
    ]


def forward(*arrays, **options):  # noqa: ANN002, ANN003, ANN201
    *qkv, _, ids_T, ids_S = arrays
    mask = Mask(segment_ids_BT=ids_T, segment_ids_BS=ids_S)
    return attention(*qkv, mask, kernel="xla", **options)


@pytest.mark.parametrize("c", [2, 4, 8])
def test_a_ring_sends_keys_and_values_c_minus_1_times(c: int) -> None:
    """Forward: c-1 times K and V. Backward: as often again, and c-1 times their gradients."""
    layout, K = make_layout(context=c), 2
    pair, ids = f"[2,{B},{T // c},{K},{H}]", f"i32[{B},{T // c}]"
    backward = functools.partial(value_and_grads, kernel="xla")
    with layout.active():
        shapes = abstract(layout, jnp.bfloat16, K)
        there = ppermutes(str(jax.make_jaxpr(forward)(*shapes)))
        both = ppermutes(str(jax.make_jaxpr(backward)(*shapes)))
    assert there == {f"bf16{pair}": c - 1, ids: c - 1}
    assert both == {f"bf16{pair}": 2 * (c - 1), ids: 2 * (c - 1), f"f32{pair}": c - 1}


@pytest.mark.parametrize("c", [4, 8])
def test_compiled_rings_move_nothing_else_and_hold_no_matrix_of_scores(c: int) -> None:
    layout, K, length = make_layout(context=c), 4, 64
    with layout.active():
        shapes = abstract(layout, jnp.float32, K, length)
        text = jax.jit(value_and_grads).lower(*shapes).compile().as_text()
    pair = f"f32[2,{B},{length // c},{K},{H}]"
    found = collectives(text)
    assert {kind for kind, _ in found} == {"collective-permute"}
    # XLA may compute the forward and the backward pass with the same keys: at least one round.
    assert 2 * (c - 1) <= found["collective-permute", pair] <= 3 * (c - 1)
    largest = max(
        math.prod(int(n) for n in dims.split(",") if n)
        for dims in re.findall(r"(?:f32|pred)\[([\d,]*)\]", text)
    )
    r, t = length // (2 * c), length // c
    assert largest <= max(B * N * r * r, 2 * B * t * N * H)
    assert largest < B * N * length * t  # what one rank's rows of all scores would be


# The test before finds no matrix of scores in the same programs.
@pytest.mark.slow
def test_memory_falls_as_the_ring_grows() -> None:
    """Temporary bytes of one attention, forward and backward, at a fixed sequence length."""

    def temporary(c: int) -> int:
        layout = make_layout(context=c)
        with layout.active():
            compiled = jax.jit(value_and_grads).lower(*abstract(layout, jnp.float32, N, 512))
        return compiled.compile().memory_analysis().temp_size_in_bytes

    two, four, eight = (temporary(c) for c in (2, 4, 8))
    assert four < 0.55 * two
    assert eight < 0.55 * four


def test_ulysses_exchanges_heads_once_there_and_once_back() -> None:
    """q, k and v together in one all-to-all; kv heads that are too few are sent repeated."""
    c, K = 4, 2
    layout = make_layout(context=c)
    run = functools.partial(forward, context_parallel="ulysses")
    with layout.active():
        text = str(jax.make_jaxpr(run)(*abstract(layout, jnp.bfloat16, K)))
        backward = functools.partial(value_and_grads, kernel="xla", context_parallel="ulysses")
        both = str(jax.make_jaxpr(backward)(*abstract(layout, jnp.bfloat16, K)))
    assert "ppermute" not in text
    sent = re.findall(r":(\w+\[[\d,]*\])\S* = all_to_all\[", text)
    t, repeated = T // c, c
    heads = (N + 2 * repeated) // c
    assert sent == [f"bf16[{B},{T},1,{heads},{H}]", f"bf16[{B},{t},{N},{H}]"]
    assert len(re.findall(r"= all_to_all\[", both)) == 4
