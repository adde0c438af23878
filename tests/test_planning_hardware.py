"""The table of chips against arithmetic on their parts, and against what libtpu says of them."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxtrain.analysis.planning.machines.targets import (
    compiler_options,
    parse_target,
    target_devices,
)
from jaxtrain.nn.matmul import eight_bit
from jaxtrain.parallel.chips import CHIPS, chip_of, gpu_memory_fraction

OF_A_GPT = {"model": "GPT", "experts": False, "recurrent": False}

# Multiply-adds per clock of one device, and the clock in Hz. TPUs: matrix units x rows x columns;
# GPUs: cores x tensor cores x multiply-adds of one (white papers).
MATRIX_UNITS = {
    "v4": (8 * 128 * 128, 1.05e9),
    "v5e": (4 * 128 * 128, 1.5e9),
    "v5p": (8 * 128 * 128, 1.75e9),
    "v6e": (4 * 256 * 256, 1.75e9),
    "7x": (4 * 256 * 256, 2.2e9),
    "a100": (108 * 4 * 256, 1.41e9),
    "a100-40": (108 * 4 * 256, 1.41e9),
    "h100": (132 * 4 * 512, 1.83e9),
    "h200": (132 * 4 * 512, 1.83e9),
    "h100-nvl": (132 * 4 * 512, 1.545e9),
    "h100-pcie": (114 * 4 * 512, 1.62e9),
    "b200": (148 * 4 * 1024, 1.85e9),
    "gb200": (152 * 4 * 1024, 2.007e9),
    "b300": (158 * 4 * 1024, 1.738e9),
    "gb300": (152 * 4 * 1024, 2.007e9),
    "mi300x": (304 * 4 * 256, 2.1e9),
    "l40s": (142 * 4 * 128, 2.52e9),
    "l4": (58 * 4 * 128, 2.04e9),
    # GeForce accumulates in float32 at half the rate of its tensor cores.
    "rtx3090": (82 * 4 * 64, 1.695e9),
    "rtx4090": (128 * 4 * 64, 2.52e9),
    "rtx5090": (170 * 4 * 64, 2.407e9),
}
ONE_HOST = (
    "h100-nvl",
    "h100-pcie",
    "l40s",
    "rtx3090",
    "rtx4090",
    "rtx5090",
)  # without a network that is known


def test_there_is_a_figure_of_everything_except_of_cpus():
    assert CHIPS.keys() == {*MATRIX_UNITS, "cpu"}
    for name, chip in CHIPS.items():
        assert chip.name == name
        figures = (
            chip.bf16_flops, chip.float32_flops, chip.hbm_bytes, chip.hbm_bandwidth,
            chip.link_bandwidth,
        )  # fmt: skip
        assert all((figure is None) == (name == "cpu") for figure in figures)
        assert (chip.dcn_bandwidth is None) == (name in (*ONE_HOST, "cpu"))


@pytest.mark.parametrize("name", MATRIX_UNITS)
def test_peak_flops_are_those_of_the_matrix_units(name):
    per_clock, clock = MATRIX_UNITS[name]
    assert CHIPS[name].bf16_flops == pytest.approx(2 * per_clock * clock, rel=5e-3)


@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if chip.kind == "gpu"])
def test_tf32_runs_at_half_the_rate(name):
    # The papers and data sheets round either figure.
    assert CHIPS[name].float32_flops == pytest.approx(CHIPS[name].bf16_flops / 2, rel=1e-2)


# Compute capability -> KiB a multiprocessor, a block: CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability".
SHARED = {
    (8, 0): (164, 163), (8, 6): (100, 99), (8, 9): (100, 99), (9, 0): (228, 227),
    (10, 0): (228, 227), (10, 3): (228, 227), (12, 0): (100, 99),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if chip.processor])
def test_shared_memory_is_that_of_the_compute_capability(name):
    of = CHIPS[name].processor
    kib = of.shared_bytes_per_core / 1024, of.shared_bytes_per_block / 1024
    assert kib == SHARED[of.compute_capability]


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("v4", 1200), ("v5e", 819), ("v5p", 2765), ("v6e", 1638), ("7x", 7380)],
)
def test_memory_s_bandwidth_of_tpus_is_the_documented_one_of_a_chip(name, gigabytes):
    """https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, whose 7x is two devices."""
    chip = CHIPS[name]
    assert chip.hbm_bandwidth * chip.devices == pytest.approx(gigabytes * 1e9, rel=1e-3)


@pytest.mark.parametrize("name", ["l4", "rtx3090", "rtx4090", "rtx5090"])
def test_memory_s_bandwidth_is_that_of_its_pins(name):
    """Pins x bits/s of one: GDDR6 at 12.5 Gb/s, GDDR6X at 19.5 and 21, GDDR7 at 28."""
    pins, rate = {
        "l4": (192, 12.5e9), "rtx3090": (384, 19.5e9), "rtx4090": (384, 21e9),
        "rtx5090": (512, 28e9),
    }[name]  # fmt: skip
    assert CHIPS[name].hbm_bandwidth == pytest.approx(pins * rate / 8, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "teraflops", "l2"),
    [
        ("a100", 19.5, 40), ("h100", 66.9, 50), ("h100-pcie", 51.2, 50), ("h100-nvl", 60.3, 50),
        ("h200", 66.9, 50), ("l4", 30.3, 48), ("l40s", 91.6, 96), ("rtx3090", 35.6, 6),
        ("rtx4090", 82.6, 72), ("rtx5090", 104.8, 96),
    ],
)  # fmt: skip
def test_a_processor_has_the_documented_peak_and_cache(name, teraflops, l2):
    """Float32 without matrix units, and MiB of L2, of the data sheets and white papers."""
    of = CHIPS[name].processor
    peak = 2 * of.cores * of.fpus_per_core * of.clock_ghz / 1e3
    assert peak == pytest.approx(teraflops, rel=3e-3)
    assert of.l2_bytes == l2 * 2**20


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("l4", 64), ("l40s", 64), ("h100-nvl", 128), ("rtx4090", 64), ("rtx5090", 128)],
)
def test_a_board_without_nvlink_has_its_slot(name, gigabytes):
    """The data sheets give both directions together, without what the coding takes."""
    assert 2 * CHIPS[name].link_bandwidth == pytest.approx(gigabytes * 1e9 * 128 / 130)


@pytest.mark.parametrize("name", MATRIX_UNITS)
@pytest.mark.parametrize("matmul", ["float8", "int8"])
def test_8_bits_run_twice_as_fast_where_training_in_them_is_not_refused(name, matmul):
    chip = CHIPS[name]
    flops = getattr(chip, f"{matmul}_flops")
    asked = {"platform": chip.kind, "device_kind": chip.device_kinds[0], **OF_A_GPT}
    if list(eight_bit.validate(matmul, **asked)):
        assert flops is None
    else:
        assert flops == pytest.approx(2 * chip.bf16_flops, rel=3e-3)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("v4", "TPU_V4"),
        ("v5e", "TPU_V5E"),
        ("v5p", "TPU_V5P"),
        ("v6e", "TPU_V6E"),
        ("7x", "TPU_7X"),
    ],
)
def test_int8_figures_of_tpus_are_those_that_jax_has(name, version):
    """Pallas has a table of its own, of one core each, 0 where there is no figure."""
    chip = pltpu.ChipVersion[version]
    cores = 2 if name in ("v4", "v5p") else 1  # of one device
    info = pltpu.get_tpu_info_for_chip(chip, 1)
    assert cores * info.int8_ops_per_second == pytest.approx(CHIPS[name].int8_flops or 0, rel=3e-3)


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("v5e", 400), ("v5p", 1200), ("v6e", 800), ("7x", 1200)]
)
def test_links_together_carry_nine_tenths_of_the_documented_bandwidth(name, gigabytes):
    """cloud.google.com/tpu/docs: "bidirectional ICI bandwidth per chip", which is of all links."""
    chip = CHIPS[name]
    devices_per_chip = 2 if name == "7x" else 1
    ends = chip.links * 2
    total = chip.link_bandwidth * ends * 2 * devices_per_chip
    assert total == pytest.approx(0.9 * gigabytes * 1e9)


def test_a_chip_reaches_its_host_over_the_documented_link():
    """jax-ml.github.io/scaling-book/tpus for TPUs; PCI Express 4.0 and 5.0 have 16 lanes of 16 and
    32 GT/s, of 130 bits 128 data; the racks' sheets give 450 GB/s to the two GPUs of a Grace."""
    lanes = {name: 16 * rate * 128 / 130 / 8 for name, rate in (("4.0", 16), ("5.0", 32))}
    of_chips = {"v4": 16, "v5e": 15, "v5p": 15, "v6e": 32, "7x": 15}
    of_chips |= dict.fromkeys(("a100", "a100-40", "l40s", "l4", "rtx3090", "rtx4090"), lanes["4.0"])
    fifth = ("h100", "h100-pcie", "h100-nvl", "h200", "b200", "b300", "rtx5090")
    of_chips |= dict.fromkeys(fifth, lanes["5.0"])
    of_chips |= dict.fromkeys(("gb200", "gb300"), 450 / 2)
    for name, gigabytes in of_chips.items():
        chip = CHIPS[name]
        assert chip.host_bandwidth is not None
        of_chip = chip.host_bandwidth * chip.devices
        assert of_chip == pytest.approx(gigabytes * 1e9, rel=0.02), name


@pytest.mark.parametrize(
    ("name", "nominal"),
    [("a100", 80e9), ("a100-40", 40e9), ("h100", 80e9), ("h200", 141e9), ("h100-nvl", 94e9),
     ("gb200", 186e9), ("b300", 270e9), ("gb300", 279e9), ("rtx3090", 24e9),
     ("rtx4090", 24e9), ("rtx5090", 32e9)],
)  # fmt: skip
def test_programs_on_a_gpu_get_most_of_its_memory(name, nominal):
    # A board has a little more than is written on it.
    chip = CHIPS[name]
    assert 1 <= chip.memory_bytes / nominal < 1.07
    fraction = chip.hbm_bytes / chip.memory_bytes
    assert fraction == pytest.approx(0.94 if nominal >= 80e9 else 0.9, abs=1e-9)


def test_what_is_not_for_programs_is_the_same_on_boards_of_any_size_between_47_and_78_gib():
    left = [size * (1 - gpu_memory_fraction(size)) / 2**30 for size in (47.1 * 2**30, 78 * 2**30)]
    assert left == pytest.approx([4.7, 4.7])
    assert CHIPS["v5e"].memory_bytes is None


def test_device_kinds_name_one_chip_each():
    kinds = [kind for chip in CHIPS.values() for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))
    for kind in kinds:
        assert kind in chip_of(kind).device_kinds
    assert chip_of("NVIDIA A30") is None


@pytest.mark.parametrize("target", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "7x:2x2x1"])
def test_memory_is_what_the_tpu_compiler_has_for_a_program(target):
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the libtpu package")
    found = parse_target(target)
    device = target_devices(found)[0]
    assert device.device_kind == found.chip.device_kinds[0]
    one = jax.sharding.SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((2**18, 2**18), jnp.float32, sharding=one)
    lowered = jax.jit(lambda x: x + 1).lower(x)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        lowered.compile(compiler_options(found))
    gibibytes = re.search(r"available HBM \(([\d.]+)G\)", str(error.value))
    assert round(found.chip.hbm_bytes / 2**30, 2) == float(gibibytes[1])
