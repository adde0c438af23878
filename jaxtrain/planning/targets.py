"""Compile-only devices of machines that are not there: TPU slices by their chip grid."""

import contextlib
import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator

import jax
from jax.experimental import topologies

from jaxtrain.errors import UserError, did_you_mean

# Slices that exist, by chip (cloud.google.com/tpu/docs: v5e, v6e, v5p). v5p grids beyond these have
# three multiples of 4 in ascending order, at most 16x16x24.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
TPU_GRIDS = {
    "v5e": _FLAT,
    "v6e": _FLAT,
    "v5p": (
        "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16",
        "16x16x16", "16x16x24",
    ),
}  # fmt: skip
_TARGET = re.compile(r"(\w+):(\d+(?:x\d+)+)")


@dataclasses.dataclass(frozen=True)
class TPUTarget:
    """A TPU slice.

    Attributes:
      chip: "v5e", "v5p" or "v6e".
      grid: chips along each direction, "2x4".
    """

    chip: str
    grid: str

    @property
    def name(self) -> str:
        """As it is written after --target."""
        return f"{self.chip}:{self.grid}"


def parse_tpu(target: str) -> TPUTarget:
    """The slice that a target such as "v5e:2x4" names.

    Raises:
      UserError: it is not written so, the chip is unknown, or it has no such slice.
    """
    match = _TARGET.fullmatch(target)
    if match is None:
        raise UserError(f"target {target!r} is not written as CHIP:GRID, for example 'v5e:2x4'")
    chip, grid = match.groups()
    if chip not in TPU_GRIDS:
        raise UserError(f"target {target!r}: no TPU {chip!r}{did_you_mean(chip, TPU_GRIDS)}")
    if grid in TPU_GRIDS[chip] or (chip == "v5p" and _is_v5p_grid(grid)):
        return TPUTarget(chip, grid)
    raise UserError(
        f"target {target!r}: {chip} has no slice of {grid} chips; the nearest is "
        f"'{chip}:{_nearest_grid(chip, grid)}' (there are {', '.join(TPU_GRIDS[chip])})"
    )


def tpu_devices(target: str) -> list[jax.Device]:
    """Compile-only devices of a TPU slice: `jax.make_mesh` and `jit(...).lower().compile()` take
    them, nothing runs on them.

    Raises:
      UserError: there is no such slice, or libtpu is not installed.
    """
    found = parse_tpu(target)
    # One chip: libtpu otherwise assumes hosts of 2x2 chips.
    extra = {"chips_per_host_bounds": (1, 1, 1)} if found.grid == "1x1" else {}
    # Not the metadata server of a cloud machine: it is not asked about hardware that is not there.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Nor the lock that gives a machine's chips to one process: two may compile at one time.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    with _native_stderr_kept() as noise:
        try:
            description = topologies.get_topology_desc(
                platform="tpu", topology_name=found.name, **extra
            )
        except RuntimeError as error:
            if "not installed" in str(error):
                raise UserError(
                    f"target {target!r} is compiled by libtpu, which is not installed; "
                    "pip install 'jaxtrain[tpu]'"
                ) from error
            said = f"{error} {noise()}".strip()
            raise UserError(f"target {target!r}: libtpu refuses it: {said}") from error
    return list(description.devices)


def _is_v5p_grid(grid: str) -> bool:
    sizes = [int(size) for size in grid.split("x")]
    largest = (16, 16, 24)
    return (
        len(sizes) == 3
        and sizes == sorted(sizes)
        and all(size % 4 == 0 for size in sizes)
        and all(size <= most for size, most in zip(sizes, largest, strict=True))
    )


def _nearest_grid(chip: str, grid: str) -> str:
    """The slice with about as many chips."""
    wanted = _chips(grid)
    return min(TPU_GRIDS[chip], key=lambda known: (abs(_chips(known) - wanted), known))


def _chips(grid: str) -> int:
    product = 1
    for size in grid.split("x"):
        product *= int(size)
    return product


@contextlib.contextmanager
def _native_stderr_kept() -> Iterator:
    """Keeps what libraries write to the stderr of the process; the yielded function reads it.

    libtpu complains there, past Python, that it runs on no TPU.
    """
    with tempfile.TemporaryFile() as kept:
        saved = os.dup(2)
        os.dup2(kept.fileno(), 2)

        def read() -> str:
            kept.seek(0)
            return kept.read().decode(errors="replace")

        try:
            yield read
        finally:
            os.dup2(saved, 2)
            os.close(saved)
