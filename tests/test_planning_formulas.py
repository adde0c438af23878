"""The closed forms agree with each other and with numbers worked out by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.analysis.planning.plan import plan
from jaxtrain.analysis.planning.textbook import formulas
from jaxtrain.analysis.planning.textbook.formulas import Traffic, wire_bytes
from jaxtrain.analysis.planning.textbook.sizes import gpt_parameters
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.nn.kv_cache import empty_cache
from jaxtrain.training.settings import load_config


def sent(traffic, devices):
    return sum(one.count * wire_bytes(one.kind, one.bytes, devices) for one in traffic)


def test_an_all_reduce_sends_twice_the_data_less_one_share():
    assert wire_bytes("all-reduce", 800, 8) == 2 * 700
    assert wire_bytes("all-reduce", 800, 1) == 0


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_reduce_scatter_and_a_gather_send_as_much_as_an_all_reduce(devices):
    whole = 4096
    pair = wire_bytes("reduce-scatter", whole, devices) + wire_bytes(
        "all-gather", whole // devices, devices
    )
    assert pair == wire_bytes("all-reduce", whole, devices)


def test_zero2_sends_as_much_as_data_parallelism_and_zero3_half_as_much_again():
    """arXiv 1910.02054, section 7."""
    data = sent([formulas.data_parallel(4096, element_bytes=4)], 8)
    zero2 = formulas.zero2_weight(4096, devices=8, element_bytes=4, master_bytes=4)
    zero3 = formulas.zero3_weight(4096, devices=8, element_bytes=4)
    assert sent(zero2, 8) == data
    assert sent(zero3, 8) == 1.5 * data


def test_sequence_parallelism_sends_as_much_as_tensor_parallelism():
    """arXiv 2205.05198, section 4.2.2."""
    tensor = formulas.tensor_layer(2, 64, 128, element_bytes=2)
    sequence = formulas.sequence_layer(2, 64, 128, devices=8, element_bytes=2)
    assert tensor == Traffic("all-reduce", 4, 2 * 64 * 128 * 2)
    assert sent(sequence, 8) == sent([tensor], 8)


def test_ulysses_sends_less_than_the_ring_where_heads_are_many():
    """Per device 4 N H T (k-1)/k against 2 (k-1) K H T: arXiv 2309.14509, section 3.2."""
    ring = sent([formulas.ring_attention(1, 64, 8, 16, devices=8, element_bytes=2)], 8)
    ulysses = sent(formulas.ulysses(1, 64, 8, 8, 16, element_bytes=2), 8)
    one_array = 64 * 8 * 16 * 2
    assert ring == 14 * one_array
    assert ulysses == 4 * one_array * 7 / 8


def test_pipeline_and_experts():
    assert formulas.pipeline_boundary(2, 64, 128, element_bytes=2) == Traffic(
        "collective-permute", 2, 2 * 64 * 128 * 2
    )
    assert formulas.expert_layer(96, 128, element_bytes=2) == Traffic("all-to-all", 4, 96 * 128 * 2)


@pytest.mark.parametrize("model", [GPT(), Llama(), Mixtral()], ids=lambda m: type(m).__name__)
def test_a_cache_of_keys_and_values_is_as_large_as_generations(model):
    B, T, heads = 3, 640, model.attention
    make = functools.partial(
        empty_cache, model.cached, layers=model.layers, rows=B, room=T, dtype=jnp.dtype("bfloat16")
    )
    held = sum(array.size * 2 for array in jax.eval_shape(make).layers)
    K, H = heads.num_kv_heads, heads.key_dim
    assert formulas.kv_cache(B, T, model.num_layers, K, H, element_bytes=2) == held


@pytest.mark.parametrize(
    ("schedule", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zero_bubble", 1)]
)
def test_a_plan_counts_a_pipelines_permutes_by_ticks_in_which_something_crosses(schedule, stages):
    """docs/formulas.md: v m + p - 2 each way, each of the boundary's bytes."""
    p, m, v = 4, 8, stages
    sizes = ["Mesh.pipe = 4", "Mesh.data = 2", "Train.global_batch_size = 16"]
    table = [f"Pipeline.schedule = {schedule!r}", f"Pipeline.virtual_stages = {v}"]
    more = [f"Pipeline.microbatches = {m}", "Train.accumulation = 1"]
    planned = plan(load_config("gpt2_124m", sizes + table + more), "v5e:2x4", compile=False)
    rows = {row.cause: row for row in planned.rows if row.cause.startswith("pipeline boundary")}
    one = formulas.pipeline_boundary(1, 1024, 768, element_bytes=2).bytes
    for way in ("forward", "backward"):
        row = rows[f"pipeline boundary, {way}"]
        assert (row.count, row.bytes) == (v * m + p - 2, (v * m + p - 2) * one)


@pytest.mark.parametrize(
    ("rows", "accumulation", "bytes_each"), [(1, 1, 2), (1, 2, 4), (4, 1, 0), (4, 2, 4)]
)
def test_a_plans_gradients_are_those_of_the_page(rows, accumulation, bytes_each):
    """docs/formulas.md: 2 P at the end of a backward pass, none at the head; or sums of 4 P, to
    which each layer's are added.

    Args:
      rows: of a microbatch on a device: with one the gradients take more than the logits.
      accumulation: microbatches.
      bytes_each: of a parameter.
    """
    bindings = [
        "Mesh.fsdp = 8", "Mesh.data = 1", "Sharding.zero = 1",
        f"Train.global_batch_size = {8 * rows * accumulation}",
        f"Train.accumulation = {accumulation}",
    ]  # fmt: skip
    planned = plan(load_config("gpt2_124m", bindings), "v5e:2x4", compile=False)
    P = gpt_parameters(V=50304, L=12, D=768, C=1024)
    assert planned.to_json()["memory"]["gradients"] == bytes_each * P


@pytest.mark.parametrize(
    ("bindings", "arrays", "words"),
    [
        (["Exchange.method = 'diloco'", "Exchange.period = 50"], 1, ", every 50 steps"),
        (["Exchange.method = 'local_sgd'", "Exchange.period = 10"], 3, ", every 10 steps"),
        (["Exchange.method = 'local_sgd'", "Exchange.period = 1"], 3, " and moments"),
    ],
)
def test_a_plan_says_what_is_not_sent_at_every_step(bindings, arrays, words):
    """4 P of parameters (arXiv 2311.08105), of local SGD two moments too, once in H steps."""
    sizes = ["Mesh.data = 8", "Train.global_batch_size = 8", "Train.accumulation = 1"]
    planned = plan(load_config("gpt2_124m", sizes + bindings), "v5e:2x4", compile=False)
    rows = [row for row in planned.rows if row.axis == "data"]
    assert sum(row.bytes for row in rows) == 4 * arrays * gpt_parameters(
        V=50304, L=12, D=768, C=1024
    )
    assert {row.cause.endswith(words) for row in rows} == {True}
