"""Capped scores and attention sinks: each kernel as transformers' attention, gradients with it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout
from test_attention import documents, inputs
from test_context import back, zigzag

from jaxtrain.nn.attention import flash
from jaxtrain.nn.attention.attention import attention, by_device
from jaxtrain.nn.attention.context import HEADS, KEYS, QUERIES, SEGMENTS
from jaxtrain.nn.attention.kernel_registry import KERNELS
from jaxtrain.nn.attention.mask import Mask

N, K = 8, 4
# Scores of random inputs spread as widely as this: the cap bends them, a sink takes its part.
SOFTCAP, SINKS = 1.5, np.linspace(-1.0, 3.0, N, dtype=np.float32)
CASES = {"capped": (SOFTCAP, False), "sinks": (None, True), "both": (SOFTCAP, True)}


def mask_of(case: str, T: int) -> Mask:
    softcap, _ = CASES[case]
    ids = jnp.asarray(documents(T))
    return Mask(window=T // 3, segment_ids_BT=ids, segment_ids_BS=ids, softcap=softcap)


def found_by(run: Any, case: str, mask: Mask, arrays: Any, sinks: Any = SINKS) -> list[np.ndarray]:
    """The output, and the gradients of queries, keys, values and sinks."""
    *qkv, weights = arrays

    def loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        with_sinks = dataclasses.replace(mask, sinks_N=sinks if CASES[case][1] else None)
        out = run(q, k, v, with_sinks)
        return (out * weights).sum(), out

    made = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
    (_, out), grads = made(*qkv, sinks)
    return [np.asarray(x) for x in (out, *grads)]


@functools.cache
def expected(case: str, T: int) -> list[np.ndarray]:
    mask = mask_of(case, T)
    return found_by(functools.partial(attention, kernel="reference"), case, mask, inputs(T, N, K))


def assert_equal(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("case", "model"), [("capped", "gemma2"), ("sinks", "gpt_oss")])
def test_the_reference_equals_transformers(case: str, model: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    pytest.importorskip("transformers", reason="transformers is the peer")
    import importlib  # noqa: PLC0415

    there = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    T, H = 20, 16
    *qkv, weights = inputs(T, N, K)
    mask = mask_of(case, T)
    visible = torch.tensor(np.asarray(mask.visible(T, T)))
    leaves = [torch.tensor(x, requires_grad=True) for x in (*qkv, SINKS)]
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks, module.training = N // K, leaves[3], False
    options = {"softcap": SOFTCAP} if case == "capped" else {}
    hidden = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    out, _ = there.eager_attention_forward(
        module, *(x.transpose(1, 2) for x in leaves[:3]), hidden, scaling=H**-0.5, **options
    )
    (out * torch.tensor(weights)).sum().backward()
    wanted = [np.zeros(N, np.float32) if x.grad is None else x.grad.numpy() for x in leaves]
    assert_equal(expected(case, T), [out.detach().numpy(), *wanted])
    if case == "sinks":
        assert np.abs(wanted[3]).max() > 1.0  # a gradient in which an error shows


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        ("xla", "capped"),
        ("xla", "sinks"),
        ("blocked", "capped"),
        ("blocked", "sinks"),
        ("blocked", "both"),
        ("tpu", "both"),
    ],
)
def test_kernels_equal_the_reference(kernel: str, case: str) -> None:
    T = 128 if kernel == "tpu" else 150
    run = functools.partial(flash.tpu, interpret=True)
    if kernel != "tpu":
        run = functools.partial(attention, kernel=kernel)
    assert_equal(found_by(run, case, mask_of(case, T), inputs(T, N, K)), expected(case, T))


# The cases that are left run the same code.
@pytest.mark.slow_cases("xla", "blocked")
@pytest.mark.parametrize("kernel", ["xla", "blocked", "tpu", "ring", "ulysses"])
def test_on_a_mesh_they_equal_the_reference_without(kernel: str) -> None:
    case, T = "both", 128 if kernel == "tpu" else 16
    split = kernel in ("ring", "ulysses")
    layout = make_layout(context=2, tensor=2, fsdp=2) if split else make_layout(fsdp=2, tensor=2)
    name = "blocked" if kernel == "blocked" else "xla"
    run = functools.partial(attention, kernel=name, context_parallel="ring")
    if kernel == "tpu":
        run = functools.partial(by_device, KERNELS["tpu"].interpreted, of_one_too=True)
    if kernel == "ulysses":
        run = functools.partial(attention, kernel="xla", context_parallel="ulysses")
    order, undo = (zigzag, back) if kernel == "ring" else (lambda x, c: x, lambda x, c: x)

    def put(x: np.ndarray, axes: tuple[str, ...]) -> jax.Array:
        x = order(x, 2) if axes != HEADS else x
        return jax.device_put(x, layout.sharding_of(layout.activation(axes)))

    placed = [
        put(x, a) for x, a in zip(inputs(T, N, K), (QUERIES, KEYS, KEYS, QUERIES), strict=True)
    ]
    ids = put(documents(T), SEGMENTS)
    mask = dataclasses.replace(mask_of(case, T), segment_ids_BT=ids, segment_ids_BS=ids)
    with layout.active():
        *found, d_sinks = found_by(run, case, mask, placed, put(SINKS, HEADS))
    assert_equal([*(undo(x, 2) for x in found), d_sinks], expected(case, T))
