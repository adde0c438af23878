"""Attention kernels equal the reference, the reference equals PyTorch, the rest is rejected."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout

from jaxtrain.analysis.planning.machines.targets import tpu_devices
from jaxtrain.config.errors import UserError
from jaxtrain.nn.attention import flash
from jaxtrain.nn.attention.attention import attention, by_device
from jaxtrain.nn.attention.context import KEYS, QUERIES, SEGMENTS
from jaxtrain.nn.attention.kernel_registry import KERNELS
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.parallel.mesh import Mesh, make_mesh
from jaxtrain.parallel.sharding import Layout

B, H = 2, 16
# name: causal, window, documents, query heads, kv heads
CASES = {
    "full": (False, None, False, 4, 4),
    "causal": (True, None, False, 4, 4),
    "causal-grouped": (True, None, False, 4, 2),
    "one-kv-head": (True, None, False, 4, 1),
    "window": (True, 5, False, 4, 2),
    "window-both-ways": (False, 5, False, 4, 2),
    "documents": (True, None, True, 4, 2),
    "documents-not-causal": (False, None, True, 4, 4),
    "everything": (True, 7, True, 4, 2),
}


def inputs(T: int, N: int, K: int, *, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Queries, keys, values and what the output is weighed with to make a scalar."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)
    return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)


def documents(T: int) -> np.ndarray:
    """Segment ids of rows that are cut at different places; the second row ends in padding."""
    ids = np.ones((B, T), np.int32)
    ids[0, T // 3 :] = 2
    ids[1, T // 2 :] = 2
    ids[1, -T // 5 :] = 0
    return ids


def make_mask(name: str, T: int) -> Mask:
    causal, window, packed, _, _ = CASES[name]
    ids = jnp.asarray(documents(T)) if packed else None
    return Mask(causal=causal, window=window, segment_ids_BT=ids, segment_ids_BS=ids)


def seen(name: str, T: int) -> np.ndarray:
    """What the settings mean, one pair of places at a time: booleans [B, T, T]."""
    causal, window, packed, _, _ = CASES[name]
    ids, out = documents(T), np.zeros((B, T, T), bool)
    for b in range(B):
        for t in range(T):
            for s in range(T):
                out[b, t, s] = (
                    (not causal or s <= t)
                    and (window is None or t - s < window)
                    and (not packed or ids[b, t] == ids[b, s])
                )
    return out


def value_and_grads(run, q, k, v, weights):  # noqa: ANN001, ANN201
    """The output, and the gradients of its weighted sum."""

    def loss(q, k, v):  # noqa: ANN001, ANN202
        out = run(q, k, v)
        return (out * weights).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *grads


def assert_equal(found, expected, *, atol: float = 1e-5) -> None:  # noqa: ANN001
    for name, a, b in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol, err_msg=name)


@functools.cache
def reference(name: str, T: int) -> tuple[jax.Array, ...]:
    """Output and gradients of the reference for inputs(T) of a case."""
    *_, N, K = CASES[name]
    return value_and_grads(
        lambda q, k, v: attention(q, k, v, make_mask(name, T), kernel="reference"),
        *inputs(T, N, K),
    )


@pytest.mark.parametrize("name", CASES)
def test_reference_equals_torch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    T, (*_, N, K) = 20, CASES[name]
    *qkv, weights = inputs(T, N, K)
    q, k, v = leaves = [torch.tensor(x, requires_grad=True) for x in qkv]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=torch.tensor(seen(name, T))[:, None],
        enable_gqa=True,
    ).transpose(1, 2)
    (out * torch.tensor(weights)).sum().backward()
    assert_equal(reference(name, T), [out.detach().numpy(), *(x.grad.numpy() for x in leaves)])


@pytest.mark.parametrize("name", CASES)
def test_xla_equals_reference(name: str) -> None:
    T, (*_, N, K) = 20, CASES[name]
    mask = make_mask(name, T)
    found = value_and_grads(
        lambda q, k, v: attention(q, k, v, mask, kernel="xla"), *inputs(T, N, K)
    )
    assert_equal(found, reference(name, T))


# 384 keys are three tiles of 128: some fully seen, some partly, some skipped.
@pytest.mark.slow_cases("full", "causal-grouped")
@pytest.mark.parametrize("name", ["full", "causal-grouped", "window-both-ways", "everything"])
def test_tpu_kernel_equals_reference(name: str) -> None:
    T = 384
    causal, window, packed, N, K = CASES[name]
    mask, arrays = make_mask(name, T), inputs(T, N // 2, max(K // 2, 1))
    mask = dataclasses.replace(mask, window=window and 20 * window)
    found = value_and_grads(lambda q, k, v: flash.tpu(q, k, v, mask, interpret=True), *arrays)
    expected = value_and_grads(lambda q, k, v: attention(q, k, v, mask), *arrays)
    assert_equal(found, expected)


@pytest.mark.parametrize("shape", [(1024, 1024), (512, 1536)])
@pytest.mark.parametrize("sides", [None, (255, 0), (300, None), (1000, 0)])
def test_masks_with_blocks_computed_once_are_jaxs_own(sides, shape):
    """Block by block, hidden ones first and last, the diagonal among them."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    causal, local = flash._band_masks()
    ours = causal(shape) if sides is None else local(shape, sides, offset=0)
    plain = splash.CausalMask(shape) if sides is None else splash.LocalMask(shape, sides, offset=0)
    kinds = set()
    for q in reversed(range(0, shape[0], 256)):
        for k in reversed(range(0, shape[1], 256)):
            places = slice(q, q + 256), slice(k, k + 256)
            np.testing.assert_array_equal(ours[places], plain[places])
            kinds.add((bool(plain[places].any()), bool(plain[places].all())))
    assert len(kinds) > 1


# The window that the kernel has not is rejected before it is called.
@pytest.mark.parametrize("name", ["full", "causal", "causal-grouped", "documents"])
def test_triton_kernel_equals_reference(name: str) -> None:
    T = 256
    *_, N, K = CASES[name]
    mask, arrays = make_mask(name, T), inputs(T, N // 2, max(K // 2, 1))
    found = value_and_grads(lambda q, k, v: flash.triton(q, k, v, mask, interpret=True), *arrays)
    expected = value_and_grads(lambda q, k, v: attention(q, k, v, mask), *arrays)
    assert_equal(found, expected)


# The cases that are left run the same code.
@pytest.mark.slow_cases("1-reference", "1-xla", "1-blocked", "1-triton", "1-tpu")
@pytest.mark.parametrize("kernel", ["reference", "xla", "blocked", "triton", "tpu"])
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"fsdp": 1}], ids=["4", "1"])
def test_kernels_on_a_mesh_equal_the_reference_without(kernel: str, sizes: dict) -> None:
    T = 128 if kernel in ("triton", "tpu") else 20
    arrays = inputs(T, 4, 2)
    mask = make_mask("documents" if kernel == "triton" else "everything", T)
    expected = value_and_grads(lambda q, k, v: attention(q, k, v, mask), *arrays)
    layout = make_layout(**sizes)
    run = functools.partial(attention, kernel=kernel)
    if kernel in ("triton", "tpu"):
        run = functools.partial(by_device, KERNELS[kernel].interpreted, of_one_too=True)

    def put(x: np.ndarray, axes: tuple[str, ...]) -> jax.Array:
        return jax.device_put(x, layout.sharding_of(layout.activation(axes)))

    ids = put(documents(T), SEGMENTS)
    mask = dataclasses.replace(mask, segment_ids_BT=ids, segment_ids_BS=ids)
    placed = [put(x, a) for x, a in zip(arrays, (QUERIES, KEYS, KEYS, QUERIES), strict=True)]
    with layout.active():
        found = value_and_grads(lambda q, k, v: run(q, k, v, mask), *placed)
    assert_equal(found, expected)
    assert found[0].sharding.spec == layout.activation(QUERIES)
    assert found[2].sharding.spec == layout.activation(KEYS)


@pytest.mark.parametrize("name", ["full", "causal-grouped", "window"])
@pytest.mark.parametrize("meshed", [False, True])
def test_cudnn_is_asked_for_the_same_mathematics(
    name: str, meshed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # JAX documents one meaning of these arguments for both implementations, so XLA's result for the
    # arguments that we give cuDNN shows that they say what our mask says.
    T, (*_, N, K) = 20, CASES[name]
    q, k, v, weights = inputs(T, N, K)
    mask, asked, original = make_mask(name, T), [], jax.nn.dot_product_attention

    def stand_in(*qkv, implementation, **settings):  # noqa: ANN002, ANN003, ANN202
        asked.append((implementation, qkv[0].shape, qkv[1].shape, sorted(settings)))
        return original(*qkv, implementation="xla", **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    if not meshed:
        found = value_and_grads(
            lambda q, k, v: by_device(flash.cudnn, q, k, v, mask), q, k, v, weights
        )
    else:
        layout = make_layout(fsdp=2, tensor=2)
        with layout.active():
            q, k, v = (
                jax.device_put(x, layout.sharding_of(layout.activation(axes)))
                for x, axes in ((q, QUERIES), (k, KEYS), (v, KEYS))
            )
            found = value_and_grads(
                lambda q, k, v: by_device(flash.cudnn, q, k, v, mask), q, k, v, weights
            )
    assert_equal(found, reference(name, T))
    parts = 2 if meshed else 1
    shapes = (B // parts, T, N // parts, H), (B // parts, T, K // parts, H)
    assert asked == [("cudnn", *shapes, ["is_causal", "local_window_size"])]


def test_float16_is_computed_on_the_cpu_by_the_reference() -> None:
    *qkv, _ = inputs(20, 4, 2)
    mask = make_mask("everything", 20)
    expected = attention(*qkv, mask)
    found = attention(*(x.astype(np.float16) for x in qkv), mask)
    assert found.dtype == jnp.float16
    # Inputs and output are rounded to 11 bits, the rest is float32.
    np.testing.assert_allclose(found, expected, atol=4 * 2.0**-11 * np.abs(qkv[2]).max())


def test_queries_that_start_in_a_cache_see_what_came_before() -> None:
    T, S, start = 3, 20, 11
    q, k, v, _ = inputs(S, 4, 2)
    mask = Mask(window=6)
    whole = attention(q, k, v, mask)
    for kernel in ("reference", "xla"):
        later = dataclasses.replace(mask, query_start=jnp.int32(start))
        part = attention(q[:, start : start + T], k, v, later, kernel=kernel)
        np.testing.assert_allclose(part, whole[:, start : start + T], atol=1e-6)


@pytest.mark.parametrize(("kernel", "reasons"), [("cudnn", 3), ("triton", 5), ("tpu", 3)])
def test_attention_refuses_while_tracing(kernel: str, reasons: int) -> None:
    *qkv, _ = inputs(20, 4, 2)
    with pytest.raises(UserError, match=f"Attention.kernel='{kernel}' .* not on 'cpu'") as error:
        jax.eval_shape(
            lambda *qkv: attention(*qkv, make_mask("everything", 20), kernel=kernel), *qkv
        )
    assert len(str(error.value).splitlines()) == reasons


@pytest.mark.slow_cases("float32")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tpu_kernel_compiles_for_tpus_that_are_not_there(dtype: str) -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the libtpu package")
    devices = tpu_devices("v5e:2x2")
    layout = Layout(make_mesh(Mesh(data=1, fsdp=2, tensor=2), devices))

    def shape(sizes: tuple[int, ...], dtype: str, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        sharding = layout.sharding_of(layout.activation(axes))
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=sharding)

    def loss(q, k, v, ids):  # noqa: ANN001, ANN202
        mask = Mask(window=300, segment_ids_BT=ids, segment_ids_BS=ids)
        return attention(q, k, v, mask, kernel="tpu").astype(jnp.float32).sum()

    keys = shape((4, 512, 4, 64), dtype, KEYS)
    with layout.active():
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(
            shape((4, 512, 8, 64), dtype, QUERIES), keys, keys, shape((4, 512), "int32", SEGMENTS)
        )
        program = lowered.compile().as_text()
    # The forward kernel, and one backward kernel each for the queries and for keys and values.
    assert program.count('custom_call_target="tpu_custom_call"') == 3
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert f" {collective}" not in program
