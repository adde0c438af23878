"""The predicted time of a step: its FLOPs, its links, and how the pieces add up."""

import collections
import dataclasses
import itertools
import math

import numpy as np
import pytest
from conftest import needs_libtpu
from jax.experimental import mesh_utils
from test_planning_memory import TINY_GPT, T, config_of

from jaxtrain.analysis.planning.machines import links
from jaxtrain.analysis.planning.machines.targets import parse_target, tpu_devices
from jaxtrain.analysis.planning.plan import plan
from jaxtrain.analysis.planning.search.search import price
from jaxtrain.analysis.planning.textbook.facts import Expected
from jaxtrain.analysis.planning.textbook.memory import memory
from jaxtrain.analysis.planning.timing.efficiency_factors import (
    attention_speed,
    efficiency_of,
    error_bar,
    family_of,
    quantization,
    scores_share,
    waves,
)
from jaxtrain.analysis.planning.timing.executed import activation_bytes, executed_flops, row_flops
from jaxtrain.analysis.planning.timing.timeline import simulate
from jaxtrain.analysis.planning.timing.timing import pieces, slow_axes, step_time
from jaxtrain.nn.attention.attention import Attention
from jaxtrain.nn.precision import Precision
from jaxtrain.nn.remat import Remat
from jaxtrain.parallel.mesh import Mesh
from jaxtrain.parallel.sharding import Sharding
from jaxtrain.training.layouts import abstract_layout, resolve_config
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.offload import Offload
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.pipeline.timetables import make_schedule
from jaxtrain.training.settings import load_config

V5E, CPU = parse_target("v5e:2x4"), parse_target("cpu:8")
ROWS, MIB = 8, 2**20
BFLOAT16 = Precision(compute="bfloat16")


def config(mesh: dict, **sections):
    return config_of(TINY_GPT, mesh, rows=ROWS, **{"precision": BFLOAT16, **sections})


def closed_form_row() -> int:
    """6 N a token, and attention with the whole square of scores: 12 L T D a token, where the
    model's own figure has half of it."""
    layers, width, vocabulary = TINY_GPT.num_layers, TINY_GPT.embed_dim, TINY_GPT.vocab_size
    parameters = layers * 12 * width**2 + vocabulary * width
    return T * (6 * parameters + 12 * layers * T * width)


def moved(kind: str, axis: str, count: int, size: int) -> Expected:
    return Expected(kind, axis, count, size, "a cause", "")


# -- FLOPs -----------------------------------------------------------------------------------------


def test_a_row_costs_the_closed_form():
    found = row_flops(config({"fsdp": 8}))
    assert found.executed == closed_form_row()
    assert found.scores == 12 * TINY_GPT.num_layers * T * TINY_GPT.embed_dim * T


def test_recomputation_and_masks_that_kernels_skip():
    """Full remat makes qkv, out and up again, and the scores: 2 (3 + 1 + 4) D^2 + 4 T D."""
    layers, width = TINY_GPT.num_layers, TINY_GPT.embed_dim
    again = layers * T * (2 * 8 * width**2 + 4 * T * width)
    full = row_flops(config({"fsdp": 8}, remat=Remat(policy="full")))
    assert full.executed == closed_form_row() + again
    layout = abstract_layout(config({"fsdp": 8}), 8)
    plain = executed_flops(config({"fsdp": 8}), layout)
    skipping = executed_flops(config({"fsdp": 8}, attention=Attention(kernel="tpu")), layout)
    assert plain == closed_form_row() * ROWS / 8
    assert plain - skipping == 6 * layers * T * width * T * ROWS / 8


def test_nothing_is_assumed_of_the_scores_of_a_model_without_attention():
    for name, has_scores in (("gpt_quickstart", True), ("resnet_cifar10", False)):
        one = load_config(name, ["Mesh.data=1", "Mesh.fsdp=8", "Mesh.tensor=1"])
        took = step_time(one, abstract_layout(one, 8), parse_target("h100:1x8"), [], update_bytes=0)
        assert any("attention scores" in words for words in took.assumptions) == has_scores


@pytest.mark.parametrize(
    ("matmul", "products", "target", "peaks", "assumption"),
    [
        ("float8", 3, "h100:1x8", (989e12, 1979e12), "1979 TFLOP/s (float8, weights inside"),
        # The gradients of the weights are computed in bfloat16.
        ("int8", 2, "v5e:2x4", (197e12, 393e12), "393 TFLOP/s (int8, weights, not their gradients"),
    ],
)
def test_products_of_8_bits_are_those_inside_the_layers_and_take_half_the_time(
    matmul, products, target, peaks, assumption
):
    narrow = Precision(compute="bfloat16", matmul=matmul)
    row = row_flops(config({"fsdp": 8}, precision=narrow))
    inside = 2 * products * T * TINY_GPT.num_layers * 12 * TINY_GPT.embed_dim**2
    assert (row.executed, row.narrow) == (closed_form_row(), inside)
    assert row_flops(config({"fsdp": 8})).narrow == 0
    took = []
    for precision in (BFLOAT16, narrow):
        one = config({"fsdp": 8}, precision=precision, attention=Attention(kernel="reference"))
        took.append(
            step_time(one, abstract_layout(one, 8), parse_target(target), [], update_bytes=0)
        )
    share = efficiency_of(parse_target(target)).products
    last_wave = quantization(one, abstract_layout(one, 8), parse_target(target))
    saved = inside * ROWS / 8 * (1 / peaks[0] - 1 / peaks[1]) / share * last_wave
    assert took[0].compute - took[1].compute == pytest.approx(saved, rel=1e-9)
    # An MFU is a part of the peak of the fastest products.
    for time, best in zip(took, peaks, strict=True):
        assert time.mfu == pytest.approx(time.model_flops_per_device / time.seconds / best)
    assert assumption in took[1].assumptions[0]


# -- links -----------------------------------------------------------------------------------------


NO_DCN: dict[str, int] = {}


def test_a_torus_is_shared_by_the_axes_that_use_it():
    """v5e: two directions of 45 GB/s each way; both ways round each ring."""
    link = V5E.chip.link_bandwidth
    alone = {"data": 1, "fsdp": 8, "tensor": 1}
    assert links.torus_bandwidth(["fsdp"], alone, V5E, NO_DCN) == 2 * 2 * link
    both = {"data": 1, "fsdp": 4, "tensor": 2}
    assert links.torus_bandwidth(["fsdp"], both, V5E, NO_DCN) == 2 * 1 * link
    assert links.torus_bandwidth(["fsdp", "tensor"], both, V5E, NO_DCN) == 2 * 2 * link
    three = {"data": 2, "fsdp": 2, "tensor": 2}
    assert links.torus_bandwidth(["data"], three, V5E, NO_DCN) == 2 * link / 2
    # An axis that lies between slices leaves the torus to the others.
    over = {"data": 2, "fsdp": 4, "tensor": 2}
    assert links.torus_bandwidth(["fsdp"], over, V5E, {"data": 2}) == 2 * 1 * link


@needs_libtpu
@pytest.mark.parametrize(
    ("target", "sizes"),
    [
        ("v5p:4x4x8", {"fsdp": 16, "tensor": 8}),
        ("v5p:4x4x8", {"data": 4, "fsdp": 8, "tensor": 4}),
        ("v5p:4x4x8", {"fsdp": 4, "tensor": 32}),
        ("v5p:8x8x8", {"fsdp": 32, "tensor": 16}),  # half of one direction each
        ("v5p:4x4x4", {"fsdp": 32, "tensor": 2}),
        ("v5e:16x16", {"data": 16, "fsdp": 2, "tensor": 8}),
    ],
)
def test_axes_have_the_directions_of_the_torus_that_jax_gives_them(target, sizes):
    """`mesh_utils` orders the devices of a slice: along which coordinates does an axis go?"""
    devices = tpu_devices(target)
    try:
        mesh = mesh_utils.create_device_mesh(tuple(sizes.values()), devices)
    except NotImplementedError:
        mesh = mesh_utils.create_device_mesh(
            tuple(sizes.values()), devices, allow_split_physical_axes=True
        )
    shape = np.array([*parse_target(target).shape, 1, 1])[:3]  # a flat slice is one chip high
    goes = {}
    for place, (name, size) in enumerate(sizes.items()):
        group = np.moveaxis(mesh, place, 0).reshape(size, -1)[:, 0]
        goes[name] = np.array([len(set(c)) for c in zip(*(d.coords for d in group), strict=True)])
    shares = {name: (steps > 1) * np.where(steps == shape, 1, 0.5) for name, steps in goes.items()}
    expected = {name: float(share.sum()) for name, share in shares.items()}
    assert links.directions(sizes, parse_target(target)) == expected


def test_between_slices_only_shards_are_sent():
    """An all-reduce of n over 2 slices of 8: reduced and gathered inside, 2 n 7/8 at 180 GB/s, and
    an eighth of it once across, 2 (n / 8) 1/2 at 3.125 GB/s."""
    sizes = {"data": 2, "fsdp": 8, "tensor": 1}
    inside, across = links.seconds("all-reduce", "data+fsdp", MIB, sizes, V5E, {"data": 2})
    assert inside == pytest.approx(2 * MIB * 7 / 8 / (4 * 45e9))
    assert across == pytest.approx(MIB / 8 / 3.125e9)
    assert links.seconds("all-reduce", "fsdp", MIB, sizes, V5E, {"data": 2})[1] == 0
    # A gather of a shard over fsdp that spans the slices: each chip fetches one shard from beyond.
    inside, across = links.seconds("all-gather", "fsdp", MIB, {"fsdp": 16}, V5E, {"fsdp": 2})
    assert inside == pytest.approx(7 * MIB / (4 * 45e9))
    assert across == pytest.approx(MIB / 3.125e9)


@pytest.mark.parametrize(
    ("kind", "sizes", "axis", "rate"),
    [
        ("all-reduce", {"data": 2, "fsdp": 8, "tensor": 1}, "fsdp", 450e9),  # inside a host
        ("all-reduce", {"data": 2, "fsdp": 8, "tensor": 1}, "data", 50e9),  # one GPU of each
        ("all-reduce", {"data": 1, "fsdp": 16, "tensor": 1}, "fsdp", 8 * 50e9),  # whole hosts
        ("all-to-all", {"data": 1, "fsdp": 16, "tensor": 1}, "fsdp", 50e9),
        ("all-reduce", {"data": 1, "fsdp": 4, "tensor": 4}, "fsdp", 2 * 50e9),  # every fourth GPU
        ("all-reduce", {"data": 1, "fsdp": 4, "tensor": 4}, "fsdp+tensor", 8 * 50e9),
    ],
)
def test_gpus_use_every_adapter_of_a_host_that_their_group_fills(kind, sizes, axis, rate):
    target = parse_target("h100:2x8")
    found = links.gpu_bandwidth(kind, links.names_of(axis), sizes, target)
    assert found == rate
    names = set(links.names_of(axis))
    mesh = np.arange(16).reshape(list(sizes.values()))
    group = np.moveaxis(mesh, [list(sizes).index(n) for n in names], range(len(names)))
    group = group.reshape(-1, group.size // np.prod([sizes[n] for n in names], dtype=int))[:, 0]
    hosts = collections.Counter((group // 8).tolist())
    assert links.devices_inside(names, sizes, 8) == max(hosts.values())


def test_gpus_send_to_all_by_nvlink_and_by_their_own_adapters_at_once():
    """8 of 16 parts leave the host through one adapter of 50 GB/s, 7 stay inside at 450."""
    target, sizes = parse_target("h100:2x8"), {"fsdp": 1, "expert": 16}
    assert links.seconds("all-to-all", "expert", MIB, sizes, target, NO_DCN) == (
        pytest.approx(MIB * 8 / 16 / 50e9), 0.0,
    )  # fmt: skip
    inside = links.seconds("all-to-all", "expert", MIB, {"fsdp": 2, "expert": 8}, target, NO_DCN)
    assert inside == (pytest.approx(MIB * 7 / 8 / 450e9), 0.0)
    # Half of every host: 4 of 8 parts leave.
    half = links.seconds("all-to-all", "expert", MIB, {"expert": 8, "tensor": 2}, target, NO_DCN)
    assert half[0] == pytest.approx(MIB * 4 / 8 / 50e9)


@pytest.mark.parametrize("shape", [(16,), (4, 4)])
def test_an_all_to_all_on_a_torus_takes_as_many_links_as_its_parts_cross(shape):
    """Counted chip by chip: every part goes the shorter way round each ring of the torus."""
    chips_of = list(np.ndindex(shape))
    hops = [
        sum(min((a - b) % n, (b - a) % n) for a, b, n in zip(one, other, shape, strict=True))
        for one in chips_of
        for other in chips_of
    ]
    crossed = sum(hops) * MIB / len(chips_of)  # a part is a sixteenth of a chip's payload
    ways = len(chips_of) * 2 * len(shape)
    target = parse_target("v5e:16x16" if len(shape) == 1 else "v5e:4x4")
    sizes = {"fsdp": target.devices // 16, "expert": 16}
    found, _ = links.seconds("all-to-all", "expert", MIB, sizes, target, NO_DCN)
    assert found == pytest.approx(crossed / ways / 45e9)


def test_which_axes_of_gpus_leave_their_host():
    target = parse_target("h100:2x8")
    inside = config({"data": 2, "fsdp": 8})
    assert slow_axes(inside, abstract_layout(inside, 16), target) == {"data"}
    across = config({"fsdp": 16}, accumulation=1)
    assert slow_axes(across, abstract_layout(across, 16), target) == {"fsdp"}
    one = config({"data": 2, "fsdp": 4})
    assert slow_axes(one, abstract_layout(one, 8), parse_target("h100:1x8")) == set()


def test_slices_of_tpus_are_what_the_mesh_says():
    joined = dataclasses.replace(
        config({"fsdp": 1}), mesh=Mesh(data=2, fsdp=8, dcn={"data": 2, "fsdp": 1})
    )
    assert slow_axes(joined, abstract_layout(joined, 16), V5E) == {"data"}
    plain = config({"data": 2, "fsdp": 4})
    assert slow_axes(plain, abstract_layout(plain, 8), V5E) == set()
    assert slow_axes(plain, abstract_layout(plain, 8), CPU) == set()


# -- the pieces ------------------------------------------------------------------------------------


def timed(mesh: dict, traffic: list[Expected], target=V5E, *, update: int = 0, **sections):
    one = config(mesh, **sections)
    return step_time(one, abstract_layout(one, 8), target, traffic, update_bytes=update)


def test_what_products_read_and_write():
    """qkv 4 D, out 2 D, up and down 5 D each a token and layer; tensor splits all but the stream,
    4 D of them, unless the sequence is split too. Scores that are kept are read or written by two
    products forward and four backward, by one of them again where the layer is recomputed."""
    width, layers, vocabulary = TINY_GPT.embed_dim, TINY_GPT.num_layers, TINY_GPT.vocab_size
    tokens, flash = ROWS * T, {"attention": Attention(kernel="tpu")}

    def bytes_of(elements: float, passes: float = 3) -> float:
        return tokens * (2 * passes * layers * elements * width + 12 * vocabulary)

    assert activation_bytes(config({"fsdp": 8}, **flash), pipelined=False, devices=8) == bytes_of(
        16
    )
    both = {"fsdp": 4, "tensor": 2}
    assert activation_bytes(config(both, **flash), pipelined=False, devices=8) == bytes_of(16 + 4)
    split = config(both, sharding=Sharding(sequence_parallel=True), **flash)
    assert activation_bytes(split, pipelined=False, devices=8) == bytes_of(16)
    plain = config({"fsdp": 8}, attention=Attention(kernel="reference"))
    scores = 2 * ROWS * layers * TINY_GPT.num_heads * T * T
    assert activation_bytes(plain, pipelined=False, devices=8) == bytes_of(16) + 6 * scores
    # A stage that is recomputed makes them again, both products of its forward pass.
    more = activation_bytes(plain, pipelined=True, devices=8) - bytes_of(16, passes=4)
    assert more == 8 * scores


def test_what_products_of_unlike_layers_read_and_write():
    """Three products a layer, each of an input and an output; the first has no gradient of its
    input, and weights and biases are read for all rows at once."""
    widths, rows = (64, 128, 64, 10), 24
    of_layers = [i + o for i, o in itertools.pairwise(widths)]
    numbers = 3 * sum(of_layers) - of_layers[0]
    mlp = load_config("mlp_digits", [f"Train.global_batch_size={rows}"])
    mlp = resolve_config(mlp, "tpu")
    assert activation_bytes(mlp, pipelined=False, devices=1) == 2 * rows * numbers


# The cases that are left run the same code.
@pytest.mark.slow_cases("DeepLearningExamples, MXNet on NGC")
@pytest.mark.parametrize(
    ("target", "published"),
    [("a100:1x1", (2470, 3660)), ("h100:1x1", (7000, 7000))],
    ids=["DeepLearningExamples, MXNet on NGC", "MLPerf v3.0, 8 GPUs"],
)
def test_resnet_50_is_as_fast_as_it_was_published(target, published):
    """Within twice a GPU's error bar: what it reads and writes takes longer than its products."""
    one = ("Mesh.fsdp=1", "Mesh.data=1", "Train.global_batch_size=256")
    found = plan(load_config("resnet50_imagenet", one), target, compile=False)
    speed = 256 / found.time.seconds
    assert published[0] / 1.3 < speed < published[1] * 1.3


def test_a_wave_of_tiles_that_is_not_full_takes_as_long_as_one_that_is():
    """BLOOM's first layer of an MLP on 8 of its A100s: 2048 x 14336 by 14336 x 7168 are 8 x 56
    tiles of 256 x 128, 4.15 waves of 108, which take 5; four times the rows 16.6, which take 17."""
    assert waves(2048, 7168, 14336, 1, 108) == pytest.approx(5 * 108 / 448)
    assert waves(8192, 7168, 14336, 1, 108) == pytest.approx(17 * 108 / (4 * 448))
    # Half a tile is a whole one; experts of one launch fill each other's waves.
    assert waves(256, 64, 512, 108, 108) == pytest.approx(2)
    assert waves(256, 128, 512, 108, 108) == 1.0
    assert waves(128, 256, 512, 108, 108) == 1.0  # the tile the other way round
    # 18 tiles split six ways fill all; a contraction that is too short cannot be split.
    assert waves(768, 768, 65536, 1, 108) == pytest.approx(1)
    assert waves(768, 768, 768, 1, 108) == pytest.approx(108 / 18)
    assert waves(768, 768, 1024, 1, 108) == pytest.approx(108 / 36)

    def of(rows: int, **sizes: int) -> float:
        model = dataclasses.replace(TINY_GPT, embed_dim=2048, num_heads=16, num_layers=1)
        one = config_of(model, {"fsdp": 8, **sizes}, rows=rows, precision=BFLOAT16)
        devices = 8 * math.prod(sizes.values())
        return quantization(one, abstract_layout(one, devices), parse_target("a100:2x8"))

    few, many = of(8), of(8 * 256)
    assert few > 2 * many > 2
    assert of(8 * 256, tensor=2) > many
    assert quantization(config({"fsdp": 8}), abstract_layout(config({"fsdp": 8}), 8), V5E) == 1


def test_computation_is_products_scores_memory_and_the_update():
    """v5e, attention with the whole square of scores: 3.5 forward passes of them."""
    found = timed({"fsdp": 8}, [], update=8 * MIB, attention=Attention(kernel="reference"))
    shares, scores = efficiency_of(V5E), 4 * TINY_GPT.num_layers * T * TINY_GPT.embed_dim * T
    products = (closed_form_row() - 3 * scores) / 197e12 / shares.products
    attention = 3.5 * scores / 197e12 / shares.scores
    plain = config({"fsdp": 8}, attention=Attention(kernel="reference"))
    read = activation_bytes(plain, pipelined=False, devices=8) / 8
    memory = (shares.passes * read + 2 * 8 * MIB) / (shares.memory * 819e9)
    assert found.compute == pytest.approx(products + attention + memory, rel=1e-9)
    assert found.seconds == found.compute
    assert (found.exposed, found.bubble, found.hidden) == (0, 0, 0)
    assert found.mfu == pytest.approx(found.model_flops_per_device / 197e12 / found.compute)
    assert found.model_flops_per_device == TINY_GPT.flops_per_token(T) * T
    assert found.tflops == pytest.approx(197 * found.mfu)
    assert found.error_bar == error_bar(V5E) < error_bar(parse_target("h100:1x8"))
    # Of a chip that no run is published of, and of families with few, less is known.
    h100 = parse_target("h100:1x8")
    assert error_bar(parse_target("l4:1x1")) > error_bar(h100)
    assert error_bar(h100, "mixture") > error_bar(h100, "dense")
    assert f"{error_bar(V5E):.0%}" in found.assumptions[-1]


@pytest.mark.parametrize(
    ("name", "family"),
    [("llama_1b", "dense"), ("mixtral_tiny", "mixture"), ("deepseek_tiny", "mixture"),
     ("resnet_digits", "image"), ("vit_digits", "image"), ("t5_tiny", "dense")],
)  # fmt: skip
def test_a_model_has_the_error_bar_of_its_family(name, family):
    model = load_config(name).train.model
    assert family_of(model) == family


def test_small_chunks_of_the_loss_wait_for_memory():
    """Each reads the output matrix twice in bfloat16 and adds to its gradient in float32, 12 bytes
    a number, beside 6 FLOPs a number and place; chunks as large as their products hide it."""
    matrix, shares = TINY_GPT.vocab_size * TINY_GPT.embed_dim, efficiency_of(V5E)
    for mesh, split in (({"fsdp": 8}, 1), ({"fsdp": 4, "tensor": 2}, 2)):
        rows, at_once = ROWS * split // 8, timed(mesh, [])
        for size in (4, 16):
            found = timed(mesh, [], loss=Loss(chunk_size=size))
            read = T // size * 12 * matrix / split / (819e9 * shares.memory)
            products = 6 * rows * T * matrix / split / (197e12 * shares.products)
            assert read > products
            assert found.chunks == pytest.approx(read - products)
            assert found.compute == pytest.approx(at_once.compute + read - products)
        many = {"rows": 8 * 1024, "precision": BFLOAT16, "loss": Loss(chunk_size=T)}
        assert price(config_of(TINY_GPT, mesh, **many), V5E).time.chunks == 0
    # Of each microbatch again, and in a pipeline on its last rank, for which the others wait.
    again = timed({"fsdp": 8}, [], loss=Loss(chunk_size=4), accumulation=1)
    piped = timed(
        {"fsdp": 4, "pipe": 2}, [], loss=Loss(chunk_size=4), pipeline=Pipeline(microbatches=2)
    )
    read = 12 * matrix * T / 4 / (819e9 * shares.memory)
    products = 6 * T * matrix / (197e12 * shares.products)
    assert again.chunks == pytest.approx(read - products)
    assert piped.chunks == pytest.approx(2 * again.chunks)


def test_a_kernel_that_no_generation_has_for_itself_is_slower_on_hopper():
    """arXiv 2407.08608: what leaves Hopper's own instructions unused."""
    took = {}
    for chip, kernel in (
        ("h100", "cudnn"),
        ("h100", "triton"),
        ("a100", "cudnn"),
        ("a100", "triton"),
    ):
        one = config({"fsdp": 8}, attention=Attention(kernel=kernel))
        target = parse_target(f"{chip}:1x8")
        took[chip, kernel] = step_time(one, abstract_layout(one, 8), target, [], update_bytes=0)
    h100 = parse_target("h100:1x8")
    hopper = efficiency_of(h100)
    heads = {"head_dim": TINY_GPT.embed_dim // TINY_GPT.num_heads, "keys": T / 2}
    shares = {
        "cudnn": hopper.scores * attention_speed(h100, "cudnn", **heads),
        "triton": hopper.portable * attention_speed(h100, "triton", **heads),
    }
    # Half of the scores: both skip what a causal mask hides.
    scores = 3.5 * 2 * TINY_GPT.num_layers * T * TINY_GPT.embed_dim * T / 989e12
    more = took["h100", "triton"].compute - took["h100", "cudnn"].compute
    assert more == pytest.approx(scores * (1 / shares["triton"] - 1 / shares["cudnn"]), rel=1e-6)
    assert took["a100", "triton"].compute == took["a100", "cudnn"].compute


@pytest.mark.parametrize(
    ("kernel", "head_dim", "measured"),
    [
        ("cudnn", 64, {512: 129, 2048: 286, 8192: 404, 32768: 430}),
        ("cudnn", 128, {512: 144, 2048: 357, 8192: 499, 32768: 570}),
        ("triton", 64, {2048: 123, 8192: 140}),
        ("triton", 128, {2048: 125, 8192: 146}),
    ],
)
def test_attention_is_as_fast_as_measured_on_an_h100(kernel, head_dim, measured):
    """TFLOP/s of causal attention forward and backward, 16,384 tokens a call: measured on
    2026-11-27 by `benchmarks.gpu_vs_torch` (benchmarks/history/gpu.md)."""
    h100 = parse_target("h100:1x1")
    share = scores_share(efficiency_of(h100), portable=kernel == "triton")
    for length, tflops in measured.items():
        speed = attention_speed(h100, kernel, head_dim=head_dim, keys=length / 2)
        assert 989 * share * speed == pytest.approx(tflops, rel=0.2)


def test_weights_hide_in_part_behind_computation_as_far_as_it_lasts():
    """A gather of shards of n over 8 devices sends 7 n, at 180 GB/s."""
    shard, shown = MIB, efficiency_of(V5E).shown
    seconds = 7 * shard / (4 * 45e9)
    some = timed({"fsdp": 8}, [moved("all-gather", "fsdp", 1, shard)], update=100 * MIB)
    assert some.compute > seconds
    assert some.hidden == pytest.approx((1 - shown) * seconds)
    assert some.exposed == pytest.approx(shown * seconds)
    assert some.by_axis == {"fsdp": pytest.approx(seconds)}
    many = timed({"fsdp": 8}, [moved("all-gather", "fsdp", 1000, shard)], update=100 * MIB)
    assert many.compute == some.compute
    assert many.hidden == pytest.approx((1 - shown) * some.compute)
    assert many.seconds == pytest.approx(some.compute + 1000 * seconds - many.hidden)
    assert many.mfu < some.mfu


@pytest.mark.parametrize(
    ("axis", "kind", "share"),
    [
        ("fsdp", "all-reduce", "shown"),
        ("data", "all-reduce", "shown"),
        ("data+fsdp", "all-reduce", "shown"),
        ("fsdp+context", "all-reduce", "shown"),
        ("tensor", "all-reduce", "activations"),
        ("fsdp+tensor", "all-reduce", "activations"),
        ("context", "all-to-all", None),
        ("tensor", "collective-permute", "activations"),  # around a ring as without one
        ("data", "collective-permute", "shown"),
    ],
)
def test_what_waits_for_what_is_sent(axis, kind, share):
    found = timed(
        {"data": 2, "fsdp": 2, "tensor": 2}, [moved(kind, axis, 3, MIB)], update=1000 * MIB
    )
    sent = found.by_axis[axis]
    factors = efficiency_of(V5E)
    part = {"shown": factors.shown, "activations": factors.activations, None: 1.0}[share]
    if axis == "context":
        assert sent == 0  # one device along it sends nothing
    else:
        assert sent > 0
    assert found.exposed == pytest.approx(part * sent)
    assert found.hidden == pytest.approx((1 - part) * sent if share == "shown" else 0)
    assert found.seconds == pytest.approx(found.compute + found.exposed)


def test_every_doubling_of_the_slices_waits_for_the_slowest():
    alone = config({"fsdp": 8})
    four = dataclasses.replace(alone, mesh=Mesh(data=4, fsdp=8, dcn={"data": 4}))
    plain = step_time(alone, abstract_layout(alone, 8), V5E, [], update_bytes=0)
    found = step_time(four, abstract_layout(four, 32), V5E, [], update_bytes=0)
    assert found.seconds == pytest.approx(plain.seconds / 4 * (1 + 2 * efficiency_of(V5E).slices))


@pytest.mark.parametrize(
    ("backward", "times"), [("residuals", (2, 1)), ("recompute", (3, 2))], ids=str
)
def test_the_bubble_is_the_timelines(backward, times):
    pipeline = Pipeline(schedule="1f1b", microbatches=4, backward=backward)
    found = timed(
        {"pipe": 2, "tensor": 4},
        [moved("all-reduce", "tensor", 1, MIB)],
        pipeline=pipeline,
        update=MIB,
    )
    timeline = simulate(
        make_schedule("1f1b", ranks=2, microbatches=4), backward=times[0], backward_input=times[1]
    )
    assert found.exposed > 0
    assert found.seconds == pytest.approx(found.compute + found.exposed + found.bubble)
    assert found.bubble / found.seconds == pytest.approx(timeline.bubble_fraction)
    # (p - 1) / (m + p - 1) of the time, whatever a backward costs (arXiv 2104.04473).
    assert timeline.bubble_fraction == pytest.approx(1 / 5)


def test_a_chip_without_figures_has_no_time_and_says_so():
    found = timed({"fsdp": 8}, [moved("all-gather", "fsdp", 1, MIB)], CPU)
    nothing = (found.seconds, found.compute, found.exposed, found.bubble, found.hidden, found.mfu)
    assert nothing == (None,) * 6
    assert found.flops_per_device == closed_form_row() * ROWS / 8
    assert found.assumptions == ("the peak FLOP/s of cpu are not known: no time is predicted",)


# -- the host's memory -----------------------------------------------------------------------------


def test_activations_go_to_the_host_beside_the_forward_pass_and_come_back_beside_the_backward():
    """Each layer's input, two bytes a number, whatever the microbatches; what takes longer than a
    third of the computation, and than two thirds, is waited for."""
    found = {}
    for link in (1.0, 1e3, 1e12):
        chip = dataclasses.replace(V5E.chip, host_bandwidth=link)
        one = config({"fsdp": 2}, remat=Remat(policy="offload"), accumulation=4)
        layout = abstract_layout(one, 2)
        needed = memory(one, layout, "tpu")
        assert needed.to_host == (2 * TINY_GPT.num_layers * TINY_GPT.embed_dim * T * ROWS / 2, 0)
        found[link] = step_time(
            one, layout, dataclasses.replace(V5E, chip=chip), [],
            update_bytes=0, to_host=needed.to_host,
        )  # fmt: skip
    compute, sent = found[1e12].compute, needed.to_host[0]
    assert found[1e12].exposed == 0
    assert found[1.0].exposed == pytest.approx(2 * sent - compute)
    assert found[1e3].exposed == pytest.approx(2 * sent / 1e3 - compute)


def test_a_state_on_the_host_is_read_before_it_is_updated():
    """adamw: eight bytes a parameter of moments; parameters for the copy, the sum and the rule."""
    one = config({"fsdp": 8}, offload=Offload(optimizer_state="host", parameters="host"))
    layout = abstract_layout(one, 8)
    needed = memory(one, layout, "tpu")
    plain = memory(config({"fsdp": 8}), layout, "tpu").arguments
    scalars = plain.optimizer - 2 * plain.params  # counters stay on the device
    assert needed.to_host == (0, plain.optimizer - scalars + 3 * plain.params)
    assert scalars < 100
    time = step_time(one, layout, V5E, [], update_bytes=0, to_host=needed.to_host)
    assert time.exposed == pytest.approx(needed.to_host[1] / 1.5e10)


@pytest.mark.parametrize("disk", [None, 2.5])
def test_a_state_on_disks_is_read_and_written_before_the_next_step(disk):
    """adamw's moments, as large as the parameters each, both ways."""
    one = config({"fsdp": 4}, offload=Offload(optimizer_state="disk"))
    layout, target = abstract_layout(one, 4), parse_target("v5e:2x2", disk=disk)
    needed = memory(one, layout, "tpu")
    moments = 2 * memory(config({"fsdp": 4}), layout, "tpu").arguments.params  # both of float32
    assert needed.arguments.disk == moments
    sizes = {"update_bytes": 0, "on_disk": needed.arguments.disk}
    time = step_time(one, layout, target, [], **sizes)
    assert time.exposed == pytest.approx(2 * moments / ((disk or 5) * 1e9))
    assert f"{disk or 5:g} GB/s a device from its host's disks" in time.assumptions[0]
    assert price(one, target).time.exposed > time.exposed


@pytest.mark.parametrize(
    ("remat", "passes"),
    [
        (Remat(policy="full"), 1 + 1 + 2.5),
        (Remat(policy="full", save=("attention",)), 1 + 2.5),
        (Remat(policy="full", offload=("attention",)), 1 + 2.5),
    ],
)
def test_a_kernel_whose_results_are_kept_does_not_run_again(remat, passes):
    one = config({"fsdp": 8}, remat=remat, attention=Attention(kernel="tpu"))
    found = pieces(one, abstract_layout(one, 8), V5E, [], peak=197e12, update_bytes=0)
    forward = 4 * TINY_GPT.num_layers * T * TINY_GPT.embed_dim * T / 2
    assert found.scores == pytest.approx(passes * forward / 197e12)
