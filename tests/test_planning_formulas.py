"""The closed forms agree with each other and with numbers worked out by hand."""

import pytest

from jaxtrain.analysis.planning.textbook import formulas
from jaxtrain.analysis.planning.textbook.formulas import Traffic, wire_bytes


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
