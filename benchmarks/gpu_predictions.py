"""What `plan` says of the train rows of the half hour, written down before a GPU has run them.

    python -m benchmarks.gpu_predictions [--targets h100:1x1 h200:1x1] [--rows gpt2_124m ...]

Every row is compiled for the GPU in each setting of ours, without one. Seconds by the program's
schedule and by closed forms, and bytes, go into gpu_predictions.csv, where `gpu_half_hour` finds
what to put beside its measurements. Needs the CUDA plugin (`pip install 'jaxtrain[cuda13]'`).
"""

import argparse
import csv
import datetime
import sys
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu_rows import TRAIN
from jaxtrain.analysis.planning.plan import plan
from jaxtrain.training.settings import load_config

FILE = Path(__file__).parent / "gpu_predictions.csv"
KEY = ("row", "setting", "chip")
COLUMNS = (
    *KEY, "seconds", "closed_form_seconds", "gib", "mfu", "attention", "verdict", "jax", "date"
)  # fmt: skip


def predicted(row: str, setting: str, chip: str, file: Path = FILE) -> dict[str, float] | None:
    """Seconds by the schedule and bytes of a row in a setting; None where none were written."""
    found = read(file).get((row, setting, chip))
    if found is None:
        return None
    return {"seconds": float(found["seconds"]), "bytes": float(found["gib"]) * 2**30}


def read(file: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """The lines of the file by row, setting and chip."""
    if not file.exists():
        return {}
    with file.open(newline="") as stream:
        return {tuple(line[key] for key in KEY): line for line in csv.DictReader(stream)}


def predict(row: str, setting: str, target: str) -> dict[str, Any]:
    """A line of the file, by the GPU's own compiler."""
    of = TRAIN[row]
    found = plan(load_config(of.config, of.gin("bfloat16", setting)), target)
    if found.compiled is None:
        raise SystemExit(f"nothing was compiled: {found.no_compiler}")
    closed = found.time.estimate
    assert closed is not None
    return {
        "row": row,
        "setting": setting,
        "chip": found.target.chip.name,
        "seconds": f"{found.time.seconds:.4g}",
        "closed_form_seconds": f"{closed.seconds:.4g}",
        "gib": f"{found.total / 2**30:.1f}",
        "mfu": f"{found.time.mfu:.3f}",
        "attention": found.attention.kernel if found.attention else "",
        "verdict": found.verdict,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    """Compiles what is requested; the file's other lines stay."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--targets", nargs="+", default=["h100:1x1", "h200:1x1"])
    parser.add_argument("--rows", nargs="+", choices=list(TRAIN), default=list(TRAIN))
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args()
    for row in options.rows:
        for setting in TRAIN[row].ours:
            for target in options.targets:
                line = predict(row, setting, target)
                lines = read(options.file) | {tuple(line[key] for key in KEY): line}
                with options.file.open("w", newline="") as stream:
                    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(lines.values())
                sys.stdout.write(", ".join(str(value) for value in line.values()) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
