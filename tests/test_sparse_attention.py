"""Patterns are what their papers say, 'sparse' equals their dense masks, and does no more work."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
from conftest import make_layout, make_step, text_batch
from flax import nnx
from test_attention import assert_equal, documents, inputs, value_and_grads
from tiny_models import places, some_tokens

from jaxtrain.analysis.planning.timing.executed import row_flops
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.weights.family import family_for
from jaxtrain.nn.attention.attention import attention
from jaxtrain.nn.attention.context import KEYS, QUERIES, SEGMENTS
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.attention.patterns import (
    DilatedPattern,
    FixedPattern,
    LongformerPattern,
    Pattern,
    StridedPattern,
)
from jaxtrain.nn.attention.sparse import products
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.kv_cache import empty_cache
from jaxtrain.nn.transformer import language_model
from jaxtrain.training.layouts import resolve_config, resolve_kernel
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config

B, N, K, H = 2, 4, 2, 16
PATTERNS: dict[str, Pattern] = {
    "longformer": LongformerPattern(window=5, global_tokens=2),
    "strided": StridedPattern(stride=4),
    "fixed": FixedPattern(stride=6, summary_tokens=2),
    # A length that is no multiple of its ratio, and one that is longer than the row.
    "dilated": DilatedPattern(segment_lengths=(5, 7, 64), dilated_ratios=(1, 2, 4)),
}


# -- the definitions, in the papers' sets ----------------------------------------------------------


def keys_of(pattern: Any, i: int, head: int) -> list[int]:
    """The keys of query i of one causal document; one stands as often as it counts."""
    before = range(i + 1)
    if isinstance(pattern, LongformerPattern):
        w, g = pattern.window, pattern.global_tokens
        return [j for j in before if i - j < w or j < g or i < g]
    if isinstance(pattern, StridedPattern):
        l = pattern.stride  # noqa: E741 - the paper's letter
        return sorted({*range(max(0, i - l), i + 1)} | {j for j in before if (i - j) % l == 0})
    if isinstance(pattern, FixedPattern):
        l, c = pattern.stride, pattern.summary_tokens  # noqa: E741
        own = {j for j in before if j // l == i // l}
        return sorted(own | {j for j in before if j % l in range(l - c, l)})
    found = []
    for w, r in zip(pattern.segment_lengths, pattern.dilated_ratios, strict=True):
        start = i // w * w
        chosen = range(start + head % r, start + w, r)
        found += [j for j in chosen if j <= i] if i in chosen else []
    return found


def counts_of(pattern: Pattern, T: int, ids_T: np.ndarray) -> np.ndarray:
    """How often each query counts each key, [N, T, T], in documents that follow each other."""
    counts = np.zeros((N, T, T), np.int32)
    starts = [0, *np.flatnonzero(np.diff(ids_T)) + 1, T]
    for start, end in zip(starts, starts[1:], strict=False):
        for head in range(N):
            for i in range(end - start):
                for j in keys_of(pattern, i, head):
                    counts[head, start + i, start + j] += 1
    return counts


@functools.cache
def packed_counts(name: str, T: int, packed: bool) -> np.ndarray:
    ids_BT = documents(T) if packed else np.ones((B, T), np.int32)
    return np.stack([counts_of(PATTERNS[name], T, ids_T) for ids_T in ids_BT])


def mask_of(name: str, T: int, packed: bool) -> Mask:
    ids = jnp.asarray(documents(T)) if packed else None
    return Mask(pattern=PATTERNS[name], segment_ids_BT=ids, segment_ids_BS=ids)


@pytest.mark.parametrize("name", PATTERNS)
def test_dense_masks_are_the_sets_of_the_papers(name: str) -> None:
    T = 37
    times = jax.jit(lambda mask: mask.times(T, T, N))(mask_of(name, T, True))
    assert times is not None
    expected, ids = packed_counts(name, T, True), documents(T)
    seen = np.tri(T, dtype=bool) & (ids[:, None, :, None] == ids[:, None, None, :])
    np.testing.assert_array_equal(np.where(seen, times, 0) + 0 * expected, expected)
    alone = packed_counts(name, T, False)[0]
    assert PATTERNS[name].mean_keys(T) == pytest.approx(alone.sum() / (N * T))
    assert alone.max() == (3 if name == "dilated" else 1)


def test_longnets_segments_are_mixed_by_their_softmaxes_denominators() -> None:
    """Equations 7 to 10 of arXiv 2307.02486, one segment and head at a time."""
    T, pattern = 24, PATTERNS["dilated"]
    assert isinstance(pattern, DilatedPattern)
    q, k, v, _ = (x.astype(np.float64) for x in inputs(T, N, N))
    expected = np.zeros_like(q)
    for b, head in np.ndindex(B, N):
        outs, sums = np.zeros((3, T, H)), np.zeros((3, T))
        for branch, (w, r) in enumerate(pattern.pairs):
            for start in range(0, T, w):
                at = np.arange(start + head % r, min(start + w, T), r)
                scores = q[b, at, head] @ k[b, at, head].T / math.sqrt(H)
                weights = np.exp(scores) * np.tri(len(at))
                sums[branch, at] = weights.sum(-1)
                outs[branch, at] = weights @ v[b, at, head] / weights.sum(-1, keepdims=True)
        mixed = sums / sums.sum(0)
        expected[b, :, head] = (mixed[..., None] * outs).sum(0)
    mask = Mask(pattern=pattern)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    for kernel in ("reference", "xla"):
        run = functools.partial(attention, mask=mask, kernel=kernel)
        np.testing.assert_allclose(jax.jit(run)(*arrays), expected, rtol=1e-5, atol=1e-5)


# -- the kernel -----------------------------------------------------------------------------------


@functools.cache
def dense(name: str, T: int, packed: bool, kv_heads: int = K) -> tuple[Any, ...]:
    """JAX's own attention with the dense mask of the papers' sets, and its gradients."""
    counts = packed_counts(name, T, packed)
    with np.errstate(divide="ignore"):
        bias = np.maximum(np.log(counts), -1e30).astype(np.float32)

    def run(q: Any, k: Any, v: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, bias)

    return value_and_grads(run, *inputs(T, N, kv_heads))


# Lengths that are no multiple of a block, and that are; rows of several documents, and of one.
@pytest.mark.slow_cases("strided-37-True", "dilated-37-True")
@pytest.mark.parametrize(
    ("T", "packed"), [(37, True), pytest.param(24, False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", PATTERNS)
def test_equals_its_dense_mask(name: str, T: int, packed: bool) -> None:
    mask = mask_of(name, T, packed)
    run = functools.partial(attention, mask=mask, kernel="sparse")
    found = value_and_grads(lambda q, k, v: run(q, k, v), *inputs(T, N, K))
    assert_equal(found, dense(name, T, packed))


# Every kernel with every pattern and every length, and every pattern with every length.
ROWS = [(3, False), (24, True), (37, False), (64, True)]
COVERING = [
    (name, ("sparse", "reference", "xla")[(n + m) % 3], *ROWS[m])
    for n, name in enumerate(PATTERNS)
    for m in range(len(ROWS))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernel", "T", "packed"), COVERING)
def test_every_kernel_that_takes_patterns_equals_them(
    name: str, kernel: str, T: int, packed: bool
) -> None:
    mask = mask_of(name, T, packed)
    run = functools.partial(attention, mask=mask, kernel=kernel)
    found = value_and_grads(lambda q, k, v: run(q, k, v), *inputs(T, N, K))
    assert_equal(found, dense(name, T, packed))


@pytest.mark.parametrize("kernel", ["sparse", pytest.param("reference", marks=pytest.mark.slow)])
def test_longformer_both_ways_equals_transformers(kernel: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    transformers = pytest.importorskip("transformers", reason="transformers is the peer")
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    T, G, window = 32, 2, 5
    config = transformers.LongformerConfig(
        hidden_size=N * H, num_attention_heads=N, attention_window=[2 * (window - 1)],
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    peer = LongformerSelfAttention(config, layer_id=0).eval()
    # Longformer projects what global tokens see with weights of its own; here they are the same.
    for name in ("query", "key", "value"):
        getattr(peer, f"{name}_global").load_state_dict(getattr(peer, name).state_dict())
    x = torch.randn(B, T, N * H) * 3
    is_global = (torch.arange(T) < G).expand(B, T)
    with torch.no_grad():
        expected = peer(
            x,
            attention_mask=torch.where(is_global, 10000.0, 0.0),
            is_index_masked=torch.zeros(B, T, dtype=torch.bool),
            is_index_global_attn=is_global,
            is_global_attn=True,
        )[0].numpy()
        parts = [
            getattr(peer, name)(x).view(B, T, N, H).numpy() for name in ("query", "key", "value")
        ]
    mask = Mask(causal=False, pattern=LongformerPattern(window=window, global_tokens=G))
    found = jax.jit(lambda *qkv: attention(*qkv, mask, kernel=kernel))(*parts)
    np.testing.assert_allclose(np.reshape(found, expected.shape), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        pytest.param({"fsdp": 2, "tensor": 2}, "fixed", marks=pytest.mark.slow, id="tensor"),
        pytest.param({"context": 2, "fsdp": 2}, "dilated", id="ulysses"),
    ],
)
@pytest.mark.parametrize("kernel", ["sparse", pytest.param("reference", marks=pytest.mark.slow)])
def test_on_a_mesh_equals_its_dense_mask(sizes: dict[str, int], name: str, kernel: str) -> None:
    T = 24
    if name == "dilated":  # two heads are on a device
        name = "two ratios"
        PATTERNS.setdefault(name, DilatedPattern(segment_lengths=(5, 12), dilated_ratios=(1, 2)))
    layout = make_layout(**sizes)

    def put(x: np.ndarray, axes: tuple[str, ...]) -> jax.Array:
        return jax.device_put(x, layout.sharding_of(layout.activation(axes)))

    arrays = zip(inputs(T, N, K), (QUERIES, KEYS, KEYS, QUERIES), strict=True)
    placed, ids = [put(*one) for one in arrays], put(documents(T), SEGMENTS)
    mask = Mask(pattern=PATTERNS[name], segment_ids_BT=ids, segment_ids_BS=ids)
    run = functools.partial(attention, mask=mask, kernel=kernel, context_parallel="ulysses")
    with layout.active():
        found = value_and_grads(lambda q, k, v: run(q, k, v), *placed)
    assert_equal(found, dense(name, T, True))


def test_a_pattern_for_shorter_rows_keeps_its_shares() -> None:
    """As verify shrinks one; no stride, window or length is below two tokens."""
    assert StridedPattern(stride=128).rescale(1 / 32) == StridedPattern(stride=4)
    assert StridedPattern(stride=8).rescale(1 / 32) == StridedPattern(stride=2)
    window = LongformerPattern(window=512, global_tokens=16).rescale(1 / 8).window
    assert window == 64
    fixed = FixedPattern(stride=128, summary_tokens=32).rescale(1 / 32)
    assert fixed == FixedPattern(stride=4, summary_tokens=2)
    dilated = DilatedPattern(segment_lengths=(512, 2048), dilated_ratios=(1, 2)).rescale(1 / 16)
    assert dilated == DilatedPattern(segment_lengths=(32, 128), dilated_ratios=(1, 2))


# -- a model --------------------------------------------------------------------------------------


WITH_PATTERNS: dict[str, Any] = {
    "gpt": GPT(vocab_size=61, num_layers=2, embed_dim=32, num_heads=N, context_length=24),
    "llama": Llama(vocab_size=64, num_layers=2, embed_dim=32, num_heads=N, num_kv_heads=K,
                   mlp_dim=48, context_length=24),
}  # fmt: skip


# Two models; tests/test_generate.py has caches in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [("fixed", "gpt"), *((n, "llama") for n in PATTERNS)])
def test_with_a_cache_equals_without(name: str, model: str) -> None:
    """Padding before one of the texts, as generation has it; without a cache there is none."""
    T, prompt, padding = 17, 9, 3
    sizes = dataclasses.replace(WITH_PATTERNS[model], attention_pattern=PATTERNS[name])
    structure, params = nnx.split(jax.jit(sizes.build)(jax.random.key(0)))
    params = jax.jit(lambda drawn: jax.tree.map(lambda x: x * 5, drawn))(params)
    tokens_BT = some_tokens(2, T)

    @functools.partial(jax.jit, static_argnums=0)
    def hidden(kernel: str, tokens: Any, positions: Any, mask: Mask, cache: Any = None) -> Any:
        model = nnx.merge(structure, params)
        execution = Execution(kernel=kernel)
        return language_model.hidden_states(model, tokens, positions, mask, execution, cache)[:2]

    expected, _ = hidden("sparse", tokens_BT[1:, padding:], places(1, T - padding), Mask())
    before_B1, place_S = np.array([[0], [padding]]), np.arange(T + 2)
    ids_BS = jnp.asarray(place_S >= before_B1, jnp.int32)
    cache = empty_cache(sizes.cached, layers=2, rows=2, room=T + 2, dtype=jnp.dtype("float32"))
    found, start = [], 0
    for length in (prompt, *[1] * (T - prompt)):
        here = slice(start, start + length)
        mask = Mask(query_start=cache.length, segment_ids_BT=ids_BS[:, here], segment_ids_BS=ids_BS)
        positions = np.maximum(place_S[None, here] - before_B1, 0)
        h_BTD, cache = hidden("reference", tokens_BT[:, here], positions, mask, cache)
        found.append(h_BTD)
        start += length
    found_BTD = np.concatenate(found, axis=1)
    np.testing.assert_allclose(found_BTD[1:, padding:], expected, rtol=1e-4, atol=1e-5)
    assert np.abs(np.asarray(expected)).std() > 0.1


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"tensor": 2, "context": 2}, "fixed"),
        pytest.param({"context": 2, "fsdp": 2}, "strided", marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "fsdp": 2}, "longformer", marks=pytest.mark.slow),
    ],
    ids=["tensor-ulysses", "ulysses", "tensor"],
)
def test_llama_on_a_mesh_equals_its_dense_mask_on_one_device(
    sizes: dict[str, int], name: str
) -> None:
    """Rotary positions and grouped keys, loss and gradients of packed rows."""
    model = dataclasses.replace(WITH_PATTERNS["llama"], attention_pattern=PATTERNS[name])
    batch = text_batch(rows=4, length=24, vocab_size=61)
    expected = parity.evaluate(
        make_step(model, make_layout(), execution=Execution(kernel="reference")), batch
    )
    execution = Execution(kernel="sparse", context_parallel="ulysses")
    program = make_step(model, make_layout(**sizes), execution=execution)
    parity.assert_equal(parity.evaluate(program, batch, expected), expected)


# -- how much work --------------------------------------------------------------------------------

LENGTHS = (64, 256, 1024)
# name: the pattern for rows of so many tokens, and what its FLOPs become where they are four times.
GROWING: dict[str, tuple[Any, float]] = {
    "longformer": (lambda T: LongformerPattern(window=16, global_tokens=2), 4),
    "strided": (lambda T: StridedPattern(stride=math.isqrt(T)), 8),
    "fixed": (lambda T: FixedPattern(stride=math.isqrt(T), summary_tokens=1), 8),
    "dilated": (lambda T: DilatedPattern(segment_lengths=(16, 64), dilated_ratios=(1, 4)), 4),
}
_DOT = re.compile(r"= (\w+)\[([\d,]*)\]\S* dot\(.*?lhs_contracting_dims=\{(\d+)\}")
_OPERAND = re.compile(r"dot\(\s*(?:\w+\[([\d,]*)\]\S* )?%?([\w.-]+)")


def dot_flops(text: str) -> int:
    """2 x elements x contraction, of every product in a compiled program."""
    shapes = {name: shape for name, shape in re.findall(r"%?([\w.-]+) = \w+\[([\d,]*)\]", text)}
    total = 0
    for line in text.splitlines():
        found, operand = _DOT.search(line), _OPERAND.search(line)
        if found is None or operand is None:
            continue
        left = [int(n) for n in (operand.group(1) or shapes[operand.group(2)]).split(",")]
        out = math.prod(int(n) for n in found.group(2).split(","))
        total += 2 * out * left[int(found.group(3))]
    return total


@functools.cache
def compiled(name: str, T: int, kernel: str = "sparse") -> tuple[int, int]:
    """FLOPs of the products, and bytes beside arguments and results, of a compiled forward pass."""
    mask = Mask(pattern=GROWING[name][0](T))
    q, k, v = (jax.ShapeDtypeStruct((1, T, N, 4), jnp.float32) for _ in range(3))
    run = functools.partial(attention, mask=mask, kernel=kernel)
    program = jax.jit(lambda q, k, v: run(q, k, v)).lower(q, k, v).compile()
    memory: Any = program.memory_analysis()
    return dot_flops(program.as_text()), memory.temp_size_in_bytes


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "strided")) for n in GROWING]
)
def test_compiled_work_grows_as_the_paper_says(name: str) -> None:
    pattern_of, growth = GROWING[name]
    found = [compiled(name, T) for T in LENGTHS]
    closed = [4 * N * 4 * products(pattern_of(T), T) for T in LENGTHS]
    assert [flops for flops, _ in found] == closed
    # Ends that are shorter weigh less the longer a row is.
    assert closed[2] / closed[1] == pytest.approx(growth, rel=0.15)
    assert found[2][1] / found[1][1] < growth * 1.15
    # What is seen grows so too.
    seen = [T * pattern_of(T).mean_keys(T) for T in LENGTHS]
    assert seen[2] / seen[1] == pytest.approx(growth, rel=0.15)
    # Blocks of two, of which a causal mask hides a half and more.
    assert 1 < closed[2] / (4 * N * 4 * seen[2]) < 4


def test_without_the_kernel_it_is_all_pairs() -> None:
    flops, memory = compiled("fixed", 256, "reference")
    assert flops == 4 * N * 4 * 256**2
    assert memory > 3 * compiled("fixed", 256)[1]


SMALL = [
    "GPT.num_layers = 2", "GPT.attention_pattern = @FixedPattern()", "FixedPattern.stride = 16",
    "TextData.sequence_length = 128", "Mesh.fsdp = 1", "Mesh.tensor = 1",
]  # fmt: skip


def test_plans_count_the_same() -> None:
    own = load_config("gpt_quickstart", SMALL)
    found = resolve_kernel(own, "cpu")
    assert found is not None
    assert (found.kernel, found.why) == (
        "sparse", "the one that computes only what a FixedPattern shows",
    )  # fmt: skip
    config = resolve_config(own, "cpu")
    model: Any = config.train.model
    # Forward, again before the backward pass, and two of the gradients.
    heads = 2 * model.num_heads * model.head_dim
    scores = 4 * 4 * heads * products(model.attention_pattern, 128)
    assert row_flops(config).scores == scores
    without = dataclasses.replace(model, attention_pattern=None)
    less = without.flops((128,)) - model.flops((128,))
    assert less == pytest.approx(12 * 128 * heads * (64 - model.attention_pattern.mean_keys(128)))


# -- rejections

REFUSED = {
    "ring": (
        ["Mesh.context = 2"],
        "Attention.context_parallel='ring' (Mesh.context=2) supports causal and windowed masks, "
        "not a FixedPattern; use Attention.context_parallel='ulysses'",
    ),
    "kernel": (
        ["Attention.kernel = 'blocked'"],
        "Attention.kernel='blocked' does not support patterns (here FixedPattern); the nearest "
        "kernel that can is 'sparse'",
    ),
    "no-pattern": (
        ["GPT.attention_pattern = None", "Attention.kernel = 'sparse'"],
        "Attention.kernel='sparse' computes the matmuls of a pattern, and this model has no "
        "attention_pattern; the nearest kernel that can is 'blocked'",
    ),
    "heads-of-a-device": (
        ["GPT.attention_pattern = @DilatedPattern()", "DilatedPattern.segment_lengths = (8, 16)",
         "DilatedPattern.dilated_ratios = (1, 2)", "Mesh.tensor = 4"],
        "GPT.num_heads=4 over 4 devices (Mesh.tensor, and Mesh.context with 'ulysses'): "
        "DilatedPattern has 2 kinds of heads, which a device needs a multiple of; the nearest is "
        "8, or split them over 2",
    ),
    "heads": (
        ["GPT.attention_pattern = @DilatedPattern()", "DilatedPattern.segment_lengths = (8, 16)",
         "DilatedPattern.dilated_ratios = (1, 3)"],
        "GPT.num_heads=4: DilatedPattern has 3 kinds of heads, which a device needs a multiple of; "
        "the nearest is 3",
    ),
    "no-pair-of-all": (
        ["GPT.attention_pattern = @DilatedPattern()", "DilatedPattern.segment_lengths = (8, 16)",
         "DilatedPattern.dilated_ratios = (2, 4)"],
        "DilatedPattern.dilated_ratios=(2, 4) leaves tokens that attend to nothing, not even "
        "themselves; one ratio must be 1, for example (1, 4)",
    ),
    "unequal-pairs": (
        ["GPT.attention_pattern = @DilatedPattern()", "DilatedPattern.segment_lengths = (8,)"],
        "are 1 and 5; give one ratio for each length",
    ),
    "summaries": (
        ["FixedPattern.summary_tokens = 17"],
        "FixedPattern.summary_tokens=17 are more than a block has (FixedPattern.stride=16); use "
        "at most 16",
    ),
    "stride": (["FixedPattern.stride = 0"], "FixedPattern.stride=0; use at least 1"),
}  # fmt: skip


def test_a_block_may_be_all_summaries() -> None:
    assert FixedPattern(stride=16, summary_tokens=16).summary_tokens == 16


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    bindings, sentence = REFUSED[name]
    pattern_is_other = any("attention_pattern" in one for one in bindings)
    kept = [one for one in SMALL if not (pattern_is_other and "Pattern" in one)]

    def check() -> None:
        config = load_config("gpt_quickstart", [*kept, *bindings])
        count = config.mesh.context * config.mesh.tensor
        preflight.check(config, device_count=count, platform="cpu", reads_data=False)

    with pytest.raises(UserError) as caught:
        check()
    assert sentence in str(caught.value)


@pytest.mark.parametrize("model", [GPT, Llama])
def test_no_model_of_hugging_face_has_them(model: Any) -> None:
    assert family_for(model(), None)
    with pytest.raises(UserError, match=r"with these settings is not a known"):
        family_for(model(attention_pattern=FixedPattern()), None)


def test_a_window_beside_a_pattern_is_refused() -> None:
    with pytest.raises(UserError, match=r"Llama.sliding_window=8 with Llama.attention_pattern=@Fi"):
        Llama(sliding_window=8, attention_pattern=FixedPattern())


def test_patterns_of_causal_attention_are_refused_without() -> None:
    x = jnp.zeros((1, 8, 4, 4))
    mask = Mask(causal=False, pattern=PATTERNS["strided"])
    with pytest.raises(UserError, match="has StridedPattern for causal attention only"):
        attention(x, x, x, mask, kernel="sparse")
