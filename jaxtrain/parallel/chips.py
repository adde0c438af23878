"""Chip specifications of TPUs and GPUs: peak FLOPs, memory and bandwidths, with their sources."""

import dataclasses
from typing import Literal

_GIB = 2**30
_PCIE4 = 16 * 16e9 * 128 / 130 / 8

# The part of a GPU's memory that a run takes unless `Train.gpu_memory_fraction` or the environment
# says otherwise. JAX's own default of 0.75 (docs.jax.dev, "GPU memory allocation") leaves room for
# other programs. The rest holds what is not in JAX's pool: CUDA's context (1.5 GiB on an A100, by
# BLOOM's chronicles), NCCL's buffers and the libraries' workspaces. It does not grow with the
# memory: NVIDIA's recipes for JAX (dgxc-benchmarking) leave 6% of 80 GB, which are 4.7 GiB, and
# JAX-Toolbox's for any GPU 10%.
GPU_MEMORY_FRACTION = 0.9
MOST_OF_A_GPU = 0.94
_OUTSIDE_THE_POOL = 4.7 * _GIB


def gpu_memory_fraction(memory: float) -> float:
    """Return the fraction that programs get of a GPU's memory (bytes): 0.9, of 80 GB or more 0.94.

    Between these sizes 4.7 GiB are left.
    """
    return min(max(1 - _OUTSIDE_THE_POOL / memory, GPU_MEMORY_FRACTION), MOST_OF_A_GPU)


@dataclasses.dataclass(frozen=True)
class Processor:
    """GPU properties, besides memory, that XLA's kernel and fusion decisions depend on.

    Attributes:
      compute_capability: (major, minor).
      accelerated: its tensor cores have architecture-specific instructions ("sm_90a").
      cores: streaming multiprocessors.
      fpus_per_core: float32 units of one.
      threads_per_core: of one, at once.
      shared_bytes_per_core, shared_bytes_per_block: shared memory of one, and what a block may
        opt into.
      l2_bytes: cache that all share.
      clock_ghz: boost clock.
    """

    compute_capability: tuple[int, int]
    accelerated: bool
    cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    l2_bytes: int
    clock_ghz: float


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices of a TPU.

    Attributes:
      grids: chips along each direction.
      most_chips: chips of the largest slice, where all slices of whole cubes of 4x4x4 exist
        in addition to the grids: three multiples of 4 in ascending order; else None.
      compiler_s_name: libtpu's name of the chip, if different.
    """

    grids: tuple[str, ...]
    most_chips: int | None = None
    compiler_s_name: str | None = None


# Assumed, not from a data sheet: about an NVMe SSD with PCIe 4.0 for each device. Samsung's PM9A3
# was announced with 6.5 GB/s read and 3.5 written (heise.de/-4720224), 4.6 for as much of each. No
# figure of a chip: `plan --disk` replaces it.
DISK_BANDWIDTH = 5e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Specification of one JAX device of a chip; None where it is not known or does not apply.

    Attributes:
      name: as in a target, "v5e", "h100".
      kind: which compiler and which network it has.
      device_kinds: values of `jax.Device.device_kind`; the first is used for plans.
      bf16_flops: peak FLOP/s of dense bfloat16 matmuls.
      float32_flops: peak FLOP/s of float32 matmuls as JAX does them by default: one pass of
        bfloat16 on TPUs, TF32 on GPUs.
      float8_flops: peak FLOP/s of dense float8 matmuls; None without units for them.
      int8_flops: peak operations/s of dense int8 matmuls; None where they are not known to
        be faster than those of bfloat16.
      memory_bytes: all memory of a GPU, in bytes; None for other devices.
      hbm_bytes: memory that the programs on one device may fill, in bytes; None: on a GPU
        `gpu_memory_fraction` of all, elsewhere unlimited.
      hbm_bandwidth: bytes/s between the device and its memory.
      link_bandwidth: bytes/s that a device sends to one neighbor in one direction: an ICI link, or
        all of a GPU's NVLinks together, since the switch leads them to any one GPU; its PCIe slot
        where it has none.
      links: axes of the torus of ICI links, each with two neighbors; 1 for a switch.
      dcn_bandwidth: bytes/s per device in one direction between slices or hosts; None for chips
        of machines without such a network.
      host_bandwidth: bytes/s between a device's memory and its host's, each way.
      disk_bandwidth: bytes/s per device of its host's disks, reads and writes together.
      devices: JAX devices of one chip.
      watts: its power limit; None where none is published.
      most_together: most GPUs behind one switch, or on one host's PCIe.
      slices: of a TPU.
      processor: of a GPU.
      also_called: other names of it, for suggestions.
    """

    name: str
    kind: Literal["tpu", "gpu", "cpu"]
    device_kinds: tuple[str, ...]
    bf16_flops: float | None
    float32_flops: float | None
    float8_flops: float | None
    int8_flops: float | None
    hbm_bandwidth: float | None
    link_bandwidth: float | None
    links: int
    dcn_bandwidth: float | None
    memory_bytes: int | None = None
    hbm_bytes: int | None = None
    host_bandwidth: float | None = None
    disk_bandwidth: float = DISK_BANDWIDTH
    devices: int = 1
    watts: float | None = None
    most_together: int = 8
    slices: Slices | None = None
    processor: Processor | None = None
    also_called: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.hbm_bytes is None and self.memory_bytes is not None:
            usable = self.memory_bytes * gpu_memory_fraction(self.memory_bytes)
            object.__setattr__(self, "hbm_bytes", int(usable))

    def narrow_flops(self, matmul: str) -> float | None:
        """Peak FLOP/s of 8-bit matmuls, by `Precision.matmul`; None if not supported."""
        return {"float8": self.float8_flops, "int8": self.int8_flops}.get(matmul)


# Slices that exist, by chip: cloud.google.com/tpu/docs, page of each version.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16",
    "16x16x16",
)  # fmt: skip
# NVIDIA's CUDA programming guide, "Compute Capabilities", and the architectures' white papers; the
# same as in xla/backends/gpu/target_config/specs of openxla/xla, which has none of GeForce and L4.
_A100 = Processor((8, 0), False, 108, 64, 2048, 164 * 1024, 163 * 1024, 40 * 2**20, 1.41)
_HOPPER = Processor((9, 0), True, 132, 128, 2048, 228 * 1024, 227 * 1024, 50 * 2**20, 1.98)
_GEFORCE_SHARED = 100 * 1024, 99 * 1024


# Sources of the TPUs, all "per chip":
# - bf16_flops, float8_flops, hbm_bandwidth: cloud.google.com/tpu/docs, page of each version.
# - int8_flops: these pages of v5e and v6e; for v5p docs.jax.dev/en/latest/pallas/tpu/hardware.html,
#   which has no int8 figure of v4 (whose page gives 275 TFLOPs for "bf16 or int8") and TPU7x.
# - hbm_bytes: what libtpu 0.0.42's compiler says a program that is too large exceeds ("exceeds
#   available HBM (15.75G)"): a chip's memory less what the runtime keeps.
# - link_bandwidth: jax-ml.github.io/scaling-book/tpus, "ICI BW/link (one-way)". The figure of TPU7x
#   is v5p's: the documentation gives both the same 1200 GB/s per chip over the same six links.
# - dcn_bandwidth: the documentation's "DCN bandwidth per chip", 50 Gb/s for v5p, 100 Gb/s for v6e
#   and TPU7x, and 6.4 Tb/s per pod of 256 for v5e; v4: scaling-book's 25 GB/s per host of 4 chips.
# - host_bandwidth: jax-ml.github.io/scaling-book/tpus, 16 GB/s each way of v4, 32 of v6e and
#   "typically" 15; that of TPU7x, which no page gives, likewise.
# A v4 or v5p chip is one device (its two cores work as one, "megacore"). A TPU7x chip is two, which
# share its figures: half of its compute, memory and links each.
#
# Sources of the GPUs, which are the SXM boards:
# - bf16_flops, float32_flops (TF32), float8_flops, int8_flops, hbm_bandwidth, link_bandwidth:
#   NVIDIA's data sheets of A100, H100, H200 and HGX/DGX B200. FLOPs given "with sparsity" are
#   halved, and so is NVLink's bandwidth, which counts both directions.
# - memory_bytes: the memory CUDA reports (xla/backends/gpu/target_config/specs of openxla/xla; for
#   H200 the "total capacity of 139.80 GiB" that PyTorch reports).
# - dcn_bandwidth: data sheets of DGX A100 (eight 200 Gb/s adapters for eight GPUs), DGX H100, H200
#   and B200 (eight of 400 Gb/s).
# - host_bandwidth: 16 lanes of PCI Express 4.0 (A100, L40S, L4, RTX 3090 and 4090) or 5.0. Grace in
#   GB200 and GB300 gives its two GPUs 450 GB/s each way together (NVLink-C2C, the racks' sheets).
# RTX 3090, 4090, 5090 and L4 have PCIe slots instead of an NVLink switch:
# - bf16_flops, float32_flops: NVIDIA's white papers "Ampere GA102", "Ada" (with L4 in its version
#   2) and "RTX Blackwell", the dense rates that accumulate in float32, as XLA's matmuls do: half
#   of those that accumulate in float16 on GeForce. L4: its data sheet, "with sparsity" halved.
# - float8_flops and int8_flops: L4's data sheet. None for GeForce, where Precision.matmul rejects
#   them.
# - hbm_bandwidth: the same papers. memory_bytes: what PyTorch reports as total capacity on Linux,
#   23.70, 23.64, 31.36 and 22.03 GiB (issues 137 of Lightning-AI/lit-llama, 104
#   of ali-vilab/VGen, 20 of TrajectoryCrafter/TrajectoryCrafter, 190 of ArcInstitute/evo2).
# - link_bandwidth: 16 lanes of PCI Express 4.0 (16 GT/s) or 5.0 (32 GT/s), of 130 bits 128 data. A
#   bridge between two 3090s (56 GB/s) is not counted.
# - dcn_bandwidth: 100 Gb/s for the eight L4 of Google Cloud's g2-standard-96
#   (docs.cloud.google.com/compute/docs/gpus).
# PCIe boards of the A100 have the SXM boards' peak. H100 PCIe and NVL: the data sheet "H100 Tensor
# Core GPU", and L40S its own, with PCIe slots likewise, without a bridge between two H100s.
# - memory_bytes: what PyTorch reports as total capacity: H100 NVL 93.00 GiB
#   (issue 56 of ali-vilab/VACE), L40S 44.42 (issue 8 of stepfun-ai/Step-Video-T2V), B300 267.69,
#   MI300X 191.98; of H100 PCIe, GB200 and GB300, and all processors, openxla/xla as above.
# GB200 and GB300: NVIDIA's data sheets of the NVL72 racks, over 72 GPUs, which one switch joins;
# B300: that of HGX B300. int8 is slower there than bfloat16. A ConnectX-7 (400 Gb/s) or, for
# B300 and GB300, a ConnectX-8 (800 Gb/s) for each GPU.
# MI300X: AMD's data sheet; its seven Infinity Fabric links of 64 GB/s each way lead to the other
# seven GPUs of a host; 400 Gb/s for each GPU of Azure's ND MI300X v5. JAX's CUDA plugin has no
# compiler for it, and Precision.matmul rejects 8 bits.
# watts: the same sheets, "max thermal design power", the most it can be set to; of v4 the most that
# was measured running (arXiv 2304.01433, table 4). Google publishes none of the later TPUs.
# v5p 16x20x28 is a whole pod of 8,960 chips; the largest slice that can be rented has 6,144 of
# them.
_ALL = (
    Chip(
        name="v4", kind="tpu", device_kinds=("TPU v4",),
        bf16_flops=275e12, float32_flops=275e12, float8_flops=None,
        int8_flops=None,
        host_bandwidth=1.6e10,
        hbm_bytes=int(30.75 * _GIB), hbm_bandwidth=1200e9,
        link_bandwidth=4.5e10, links=3, dcn_bandwidth=6.25e9, watts=192,
        slices=Slices(_CUBES, most_chips=4096),
    ),
    Chip(
        name="v5e", kind="tpu", device_kinds=("TPU v5 lite", "TPU v5e"),
        bf16_flops=197e12, float32_flops=197e12, float8_flops=None,
        int8_flops=393e12,
        host_bandwidth=1.5e10,
        hbm_bytes=int(15.75 * _GIB), hbm_bandwidth=819e9,
        link_bandwidth=4.5e10, links=2, dcn_bandwidth=3.125e9,
        slices=Slices(_FLAT),
    ),
    Chip(
        name="v5p", kind="tpu", device_kinds=("TPU v5", "TPU v5p"),
        bf16_flops=459e12, float32_flops=459e12, float8_flops=None,
        int8_flops=918e12,
        host_bandwidth=1.5e10,
        hbm_bytes=int(95.74 * _GIB), hbm_bandwidth=2765e9,
        link_bandwidth=9e10, links=3, dcn_bandwidth=6.25e9,
        slices=Slices((*_CUBES, "16x16x24", "16x20x28"), most_chips=6144),
    ),
    Chip(
        name="v6e", kind="tpu", device_kinds=("TPU v6 lite", "TPU v6e"),
        bf16_flops=918e12, float32_flops=918e12, float8_flops=None,
        int8_flops=1836e12,
        host_bandwidth=3.2e10,
        hbm_bytes=int(31.25 * _GIB), hbm_bandwidth=1638e9,
        link_bandwidth=9e10, links=2, dcn_bandwidth=12.5e9,
        slices=Slices(_FLAT), also_called=("trillium",),
    ),
    Chip(
        name="7x", kind="tpu", device_kinds=("TPU7x",),
        bf16_flops=2307e12 / 2, float32_flops=2307e12 / 2, float8_flops=4614e12 / 2,
        int8_flops=None,
        host_bandwidth=1.5e10 / 2,
        hbm_bytes=int(94.75 * _GIB), hbm_bandwidth=7380e9 / 2,
        link_bandwidth=9e10 / 2, links=3, dcn_bandwidth=12.5e9 / 2,
        devices=2, also_called=("tpu7x", "v7x", "ironwood"),
        slices=Slices(
            ("1x1x1", *_CUBES, "16x16x36"), most_chips=9216, compiler_s_name="tpu7x"
        ),
    ),
    Chip(
        name="a100", kind="gpu", device_kinds=("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        bf16_flops=312e12, float32_flops=156e12, float8_flops=None,
        int8_flops=624e12,
        host_bandwidth=_PCIE4,
        memory_bytes=85_100_068_864, hbm_bandwidth=2039e9,
        link_bandwidth=300e9, links=1, dcn_bandwidth=25e9, watts=400,
        processor=_A100, also_called=("a100-80",),
    ),
    Chip(
        name="a100-40", kind="gpu", most_together=16,
        device_kinds=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        bf16_flops=312e12, float32_flops=156e12, float8_flops=None,
        int8_flops=624e12,
        host_bandwidth=_PCIE4,
        memory_bytes=42_331_013_120, hbm_bandwidth=1555e9,
        link_bandwidth=300e9, links=1, dcn_bandwidth=25e9, watts=400,
        processor=_A100,
    ),
    Chip(
        name="h100", kind="gpu", device_kinds=("NVIDIA H100 80GB HBM3",),
        bf16_flops=989e12, float32_flops=494.5e12, float8_flops=1979e12,
        int8_flops=1979e12,
        host_bandwidth=2 * _PCIE4,
        memory_bytes=84_942_979_072, hbm_bandwidth=3350e9,
        link_bandwidth=450e9, links=1, dcn_bandwidth=50e9, watts=700,
        processor=_HOPPER,
    ),
    Chip(
        name="h100-nvl", kind="gpu", device_kinds=("NVIDIA H100 NVL",),
        bf16_flops=835e12, float32_flops=417.5e12, float8_flops=1670.5e12,
        int8_flops=1670.5e12,
        host_bandwidth=2 * _PCIE4,
        memory_bytes=int(93.00 * _GIB), hbm_bandwidth=3900e9,
        link_bandwidth=2 * _PCIE4, links=1, dcn_bandwidth=None, watts=400,
        processor=dataclasses.replace(_HOPPER, clock_ghz=1.785),
    ),
    Chip(
        name="h100-pcie", kind="gpu", device_kinds=("NVIDIA H100 PCIe",),
        bf16_flops=756e12, float32_flops=378e12, float8_flops=1513e12,
        int8_flops=1513e12,
        host_bandwidth=2 * _PCIE4,
        memory_bytes=84_942_979_072, hbm_bandwidth=2039e9,
        link_bandwidth=2 * _PCIE4, links=1, dcn_bandwidth=None, watts=350,
        processor=dataclasses.replace(_HOPPER, cores=114, clock_ghz=1.755),
    ),
    Chip(
        name="h200", kind="gpu", device_kinds=("NVIDIA H200",),
        bf16_flops=989e12, float32_flops=494.5e12, float8_flops=1979e12,
        int8_flops=1979e12,
        host_bandwidth=2 * _PCIE4,
        memory_bytes=int(139.80 * _GIB), hbm_bandwidth=4800e9,
        link_bandwidth=450e9, links=1, dcn_bandwidth=50e9, watts=700,
        processor=_HOPPER,
    ),
    Chip(
        name="b200", kind="gpu", device_kinds=("NVIDIA B200",),
        bf16_flops=2250e12, float32_flops=1125e12, float8_flops=4500e12,
        int8_flops=4500e12,
        host_bandwidth=2 * _PCIE4,
        memory_bytes=191_514_411_008, hbm_bandwidth=8000e9,
        link_bandwidth=900e9, links=1, dcn_bandwidth=50e9, watts=1000,
        processor=Processor(
            (10, 0), True, 148, 128, 2048, 228 * 1024, 227 * 1024, 132_644_864, 1.965
        ),
    ),
    Chip(
        name="gb200", kind="gpu", device_kinds=("NVIDIA GB200",),
        bf16_flops=2500e12, float32_flops=1250e12, float8_flops=5000e12,
        int8_flops=5000e12,
        host_bandwidth=2.25e11,
        memory_bytes=197_897_748_480, hbm_bandwidth=8000e9,
        link_bandwidth=900e9, links=1, dcn_bandwidth=50e9, watts=1200, most_together=72,
        processor=Processor(
            (10, 0), True, 152, 128, 2048, 228 * 1024, 227 * 1024, 135_528_448, 2.062
        ),
    ),
    Chip(
        name="b300", kind="gpu", device_kinds=("NVIDIA B300", "NVIDIA B300 SXM6 AC"),
        bf16_flops=2250e12, float32_flops=1125e12, float8_flops=4500e12,
        int8_flops=None,
        host_bandwidth=2 * _PCIE4,
        memory_bytes=int(267.69 * _GIB), hbm_bandwidth=8000e9,
        link_bandwidth=900e9, links=1, dcn_bandwidth=100e9, watts=1100,
        processor=Processor(
            (10, 3), True, 158, 128, 2048, 228 * 1024, 227 * 1024, 135_528_448, 1.965
        ),
    ),
    Chip(
        name="gb300", kind="gpu", device_kinds=("NVIDIA GB300",),
        bf16_flops=2500e12, float32_flops=1250e12, float8_flops=5000e12,
        int8_flops=None,
        host_bandwidth=2.25e11,
        memory_bytes=297_021_079_552, hbm_bandwidth=8000e9,
        link_bandwidth=900e9, links=1, dcn_bandwidth=100e9, watts=1400, most_together=72,
        processor=Processor(
            (10, 3), True, 152, 128, 2048, 228 * 1024, 227 * 1024, 135_528_448, 2.07
        ),
    ),
    Chip(
        name="mi300x", kind="gpu", device_kinds=("AMD Instinct MI300X",),
        bf16_flops=1307.4e12, float32_flops=653.7e12, float8_flops=None,
        int8_flops=None,
        host_bandwidth=2 * _PCIE4,
        memory_bytes=int(191.98 * _GIB), hbm_bandwidth=5300e9,
        link_bandwidth=448e9, links=1, dcn_bandwidth=50e9, watts=750,
    ),
    Chip(
        name="l40s", kind="gpu", device_kinds=("NVIDIA L40S",),
        bf16_flops=366.5e12, float32_flops=183e12, float8_flops=733e12,
        int8_flops=733e12,
        host_bandwidth=_PCIE4,
        memory_bytes=int(44.42 * _GIB), hbm_bandwidth=864e9,
        link_bandwidth=_PCIE4, links=1, dcn_bandwidth=None, watts=350,
        processor=Processor((8, 9), False, 142, 128, 1536, *_GEFORCE_SHARED, 96 * 2**20, 2.52),
    ),
    Chip(
        name="l4", kind="gpu", device_kinds=("NVIDIA L4",),
        bf16_flops=121e12, float32_flops=60e12, float8_flops=242.5e12,
        int8_flops=242.5e12,
        host_bandwidth=_PCIE4,
        memory_bytes=int(22.03 * _GIB), hbm_bandwidth=300e9,
        link_bandwidth=_PCIE4, links=1, dcn_bandwidth=1.5625e9, watts=72,
        processor=Processor((8, 9), False, 58, 128, 1536, *_GEFORCE_SHARED, 48 * 2**20, 2.04),
    ),
    Chip(
        name="rtx3090", kind="gpu", device_kinds=("NVIDIA GeForce RTX 3090",),
        bf16_flops=71e12, float32_flops=35.6e12, float8_flops=None,
        int8_flops=None,
        host_bandwidth=_PCIE4,
        memory_bytes=int(23.70 * _GIB), hbm_bandwidth=936e9,
        link_bandwidth=_PCIE4, links=1, dcn_bandwidth=None, watts=350,
        processor=Processor((8, 6), False, 82, 128, 1536, *_GEFORCE_SHARED, 6 * 2**20, 1.695),
        also_called=("3090",),
    ),
    Chip(
        name="rtx4090", kind="gpu", device_kinds=("NVIDIA GeForce RTX 4090",),
        bf16_flops=165.2e12, float32_flops=82.6e12, float8_flops=None,
        int8_flops=None,
        host_bandwidth=_PCIE4,
        memory_bytes=int(23.64 * _GIB), hbm_bandwidth=1008e9,
        link_bandwidth=_PCIE4, links=1, dcn_bandwidth=None, watts=450,
        processor=Processor((8, 9), False, 128, 128, 1536, *_GEFORCE_SHARED, 72 * 2**20, 2.52),
        also_called=("4090",),
    ),
    Chip(
        name="rtx5090", kind="gpu", device_kinds=("NVIDIA GeForce RTX 5090",),
        bf16_flops=209.5e12, float32_flops=104.8e12, float8_flops=None,
        int8_flops=None,
        host_bandwidth=2 * _PCIE4,
        memory_bytes=int(31.36 * _GIB), hbm_bandwidth=1792e9,
        link_bandwidth=2 * _PCIE4, links=1, dcn_bandwidth=None, watts=575,
        processor=Processor((12, 0), False, 170, 128, 1536, *_GEFORCE_SHARED, 96 * 2**20, 2.407),
        also_called=("5090",),
    ),
    Chip(
        name="cpu", kind="cpu", device_kinds=("cpu",),
        bf16_flops=None, float32_flops=None, float8_flops=None,
        int8_flops=None,
        hbm_bandwidth=None,
        link_bandwidth=None, links=1, dcn_bandwidth=None,
    ),
)  # fmt: skip
CHIPS: dict[str, Chip] = {chip.name: chip for chip in _ALL}


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip with this `jax.Device.device_kind`, or None if it is not in the table."""
    for chip in _ALL:
        if device_kind in chip.device_kinds:
            return chip
    return None


def peak_flops(device_kind: str, matmul: str = "compute") -> float | None:
    """Return the peak dense FLOP/s of one JAX device of this kind, the denominator of MFU: for
    bfloat16, or for the fastest matmuls of `Precision.matmul`; None if unknown.
    """
    chip = chip_of(device_kind)
    return None if chip is None else chip.narrow_flops(matmul) or chip.bf16_flops
