"""Half an hour on one GPU: what is worth most first, each result written as soon as it is known.

    python -m benchmarks.gpu_half_hour --minutes 28 [--out gpu_half_hour] [--against FILE]

The rows are those of `gpu_vs_torch`, before them whether every format and kernel computes what a
CPU does (`gpu_formats`), after them a profiled start and a real run that is killed (`gpu_run`).
Each row has its share of the time; one that fails, runs out of memory or of time costs the others
nothing. OUT/rows.jsonl has a line a row: started again, the command does what is not there yet, and
what ran out of time. Compiled programs are kept in OUT/cache, and nothing is timed before two calls
that are not. OUT/half_hour.md is made anew after every row; with the rows.jsonl of an earlier half
hour after `--against`, differences stand beside. `--tiny` has every row in tiny sizes on a CPU.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import gpu_formats, gpu_run, gpu_vs_torch, side_by_side
from benchmarks.gpu_rows import TRAIN

FILE = "rows.jsonl"
# Of PyTorch's settings those that were the best on Hopper in others' hands come first.
PEERS = ("compile, cuDNN", "compile, flash")
OUT_OF_TIME = "out of time"
SHOWN = 20  # operations of a profile


@dataclasses.dataclass(frozen=True)
class Options:
    """What rows are given.

    Attributes:
      out: the folder of results.
      tiny: tiny sizes on a CPU.
      seconds: of timing a side.
      peers: settings of PyTorch.
      ours: our settings beside the first; None: all of a row.
    """

    out: Path
    tiny: bool
    seconds: float
    peers: Sequence[str] = PEERS
    ours: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the half hour.

    Attributes:
      minutes: what it may take.
      run: options, seconds -> its result; {"error": ...} where there is none.
    """

    minutes: float
    run: Callable[[Options, float], dict[str, Any]]


def _formats(options: Options, seconds: float) -> dict[str, Any]:
    return gpu_formats.compare(tiny=options.tiny, seconds=seconds)


def _versus(name: str) -> Callable[[Options, float], dict[str, Any]]:
    """A row of `gpu_vs_torch`."""

    def run(options: Options, seconds: float) -> dict[str, Any]:
        asked = argparse.Namespace(
            compute="bfloat16", tiny=options.tiny, seconds=options.seconds, repeats=1,
            peers=list(options.peers), ours=options.ours,
        )  # fmt: skip
        of = gpu_vs_torch.train_row if name in TRAIN else gpu_vs_torch.cells_row
        return of(name, asked, time.monotonic() + seconds)

    return run


def _profile(options: Options, seconds: float) -> dict[str, Any]:
    """What takes longest in a step of GPT-2 124M, with its share of the roofline."""
    run = options.out / "profiled"
    shutil.rmtree(run, ignore_errors=True)
    row = TRAIN["gpt2_124m"].made_tiny() if options.tiny else TRAIN["gpt2_124m"]
    words = [sys.executable, "-m", "jaxtrain", "train", row.config, "--profile"]
    bindings = [*row.gin("bfloat16", next(iter(row.ours))), "Train.steps = 8"]
    for binding in bindings:
        words += ["-b", binding]
    environment = {**os.environ, **({"JAX_PLATFORMS": "cpu"} if options.tiny else {})}
    done = subprocess.run(
        [*words, "--workdir", str(run)], capture_output=True, text=True, timeout=seconds,
        cwd=side_by_side.ROOT, env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"error": gpu_vs_torch.why_it_failed(done.stdout + done.stderr, done.returncode)}
    found = json.loads((run / "profile" / "operations.json").read_text())
    return {"step_seconds": found["step_seconds"], "operations": found["operations"][:SHOWN]}


def _real_run(options: Options, seconds: float) -> dict[str, Any]:
    # Two starts and two ends are on top of the training.
    return gpu_run.measure(tiny=options.tiny, seconds=max(20.0, 0.6 * seconds))


ROWS: dict[str, Row] = {
    "formats": Row(3, _formats),
    "ceilings": Row(1.5, _versus("ceilings")),
    "gpt2_124m": Row(8, _versus("gpt2_124m")),
    "llama_1b": Row(6, _versus("llama_1b")),
    "llama_3b": Row(4, _versus("llama_3b")),
    "llama_8b": Row(5, _versus("llama_8b")),
    "eight_bits": Row(3, _versus("eight_bits")),
    "resnet50": Row(5, _versus("resnet50")),
    "profile": Row(2, _profile),
    "attention": Row(4, _versus("attention")),
    "remat": Row(4, _versus("remat")),
    "loss_head": Row(2, _versus("loss_head")),
    "real_run": Row(10, _real_run),
    "mixtral": Row(4, _versus("mixtral")),
    "gpt2_1558m": Row(6, _versus("gpt2_1558m")),
    "loader": Row(3, _versus("loader")),
}


# -- one after the other ---------------------------------------------------------------------------


def read(file: Path) -> dict[str, dict[str, Any]]:
    """The results in a file, by row: of each the last; a line that was cut is none."""
    if not file.exists():
        return {}
    found = {}
    for line in file.read_text().splitlines():
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "row" in result:
            found[result["row"]] = result
    return found


def is_done(result: Mapping[str, Any]) -> bool:
    """Whether a row need not be done again: all of it had its time, whatever came of it."""
    sides = result.get("sides", {}).values()
    return not any(one.get("error") == OUT_OF_TIME for one in (result, *sides))


def do(
    rows: Mapping[str, Row],
    options: Options,
    *,
    seconds: float,
    after: Callable[[dict[str, dict[str, Any]]], None] = lambda results: None,
) -> dict[str, dict[str, Any]]:
    """Does what is not done yet, in order, as long as there is time.

    Args:
      rows: by name.
      options: what they are given.
      seconds: of all of them together.
      after: called with all results after each row.

    Returns:
      All results, those of earlier starts too.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / FILE
    results = read(file)
    deadline = time.monotonic() + seconds
    with file.open("a") as stream:
        if not results:
            stream.write(json.dumps(circumstances()) + "\n")
        for name, row in rows.items():
            if name in results and is_done(results[name]):
                continue
            left = min(60 * row.minutes, deadline - time.monotonic())
            if left < 10:
                break
            begin = time.monotonic()
            try:
                result = row.run(options, left)
            except subprocess.TimeoutExpired:
                result = {"error": OUT_OF_TIME}
            except Exception as error:  # noqa: BLE001 - the next row is worth its time all the same
                said = (str(error).strip() or type(error).__name__).splitlines()[0]
                result = {"error": said[:300]}
            took = time.monotonic() - begin
            results[name] = {"row": name, "took_seconds": round(took, 1), **result}
            stream.write(json.dumps(results[name]) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
            after(results)
    return results


def circumstances() -> dict[str, Any]:
    """Date, machine, versions, and what the GPU says of itself."""
    found = side_by_side.circumstances(["jax", "jaxlib", "flax", "torch", "numpy"])
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,memory.total"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        found["gpu"] = said.stdout.strip()
    except OSError:
        found["gpu"] = "no nvidia-smi"
    return found


# -- what is written -------------------------------------------------------------------------------


def figures(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row, by name: what two half hours are compared by."""
    found: dict[str, float] = {}
    for name, side in result.get("sides", {}).items():
        if "per_second" in side:
            found[f"{name}, {result.get('unit', '')} a second"] = side["per_second"]
        for key in ("mfu", "peak_bytes"):
            if side.get(key) is not None:
                found[f"{name}, {key}"] = side[key]
        planned = side.get("planned") or {}
        if planned.get("seconds") and side.get("seconds"):
            measured = float(np.median(side["seconds"]))
            found[f"{name}, planned / measured seconds"] = planned["seconds"] / measured
        before = planned.get("before") or {}
        if before and side.get("seconds"):
            measured = float(np.median(side["seconds"]))
            found[f"{name}, scheduled / measured seconds"] = before["seconds"] / measured
        if before and side.get("peak_bytes"):
            found[f"{name}, scheduled / measured bytes"] = before["bytes"] / side["peak_bytes"]
        if planned.get("bytes") and side.get("peak_bytes"):
            found[f"{name}, planned / measured bytes"] = planned["bytes"] / side["peak_bytes"]
        for cell in side.get("cells", []):
            if cell["seconds"]:
                took = float(np.median(cell["seconds"]))
                what = f"{name} {cell['setting']}: {cell['case']}".replace("  ", " ")
                if cell["work"]:
                    found[f"{what}, {cell['unit']}"] = cell["work"] / took
                else:
                    found[f"{what}, seconds"] = took
    if result.get("sides") and (ratio := gpu_vs_torch.ratio(dict(result))):
        found["best of torch / best of ours"] = ratio
    for name, one in result.get("settings", {}).items():
        if "apart" in one:
            found[f"{name}, loss apart"] = one["apart"]
    numbers = ("step_seconds", "tokens_per_second", "mfu", "goodput", "last_loss", "steps")
    return found | {
        name: result[name] for name in numbers if isinstance(result.get(name), int | float)
    }


def failures(result: Mapping[str, Any]) -> list[str]:
    """What went wrong in a row, a sentence each."""
    found = [result["error"]] if "error" in result else []
    found += result.get("wrong", [])
    for kind in ("sides", "settings"):
        for name, one in result.get(kind, {}).items():
            if "error" in one:
                found.append(f"{name}: {one['error']}")
    return found


def markdown(
    results: Mapping[str, Mapping[str, Any]], earlier: Mapping[str, Mapping[str, Any]]
) -> str:
    """Every row's numbers, those of an earlier half hour beside, and what went wrong."""
    beside = " earlier | now / earlier |" if earlier else ""
    lines = [f"| row | figure | now |{beside}", "|---|---|---|" + ("---|---|" if earlier else "")]
    for name, result in results.items():
        before = figures(earlier.get(name, {}))
        for what, value in figures(result).items():
            line = f"| {name} | {what} | {value:.5g} |"
            if earlier:
                old = before.get(what)
                line += f" {old:.5g} | {value / old:.2f} |" if old else "  |  |"
            lines.append(line)
    for name, result in results.items():
        lines += [f"| {name} | {words} |  |" + ("  |  |" if earlier else "")
                  for words in failures(result)]  # fmt: skip
    longest = results.get("profile", {}).get("operations", [])
    if longest:
        lines += ["", "| operation | in | share of the step | of the roofline | bound |",
                  "|---|---|---|---|---|"]  # fmt: skip
    for one in longest:
        reached = "" if one["roofline"] is None else f"{one['roofline']:.0%}"
        lines.append(
            f"| {one['operation'] or one['name']} | {one['scope']}, {one['pass']} | "
            f"{one['share']:.1%} | {reached} | {one['bound'] or ''} |"
        )
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=28.0, help="of this start")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing a side")
    parser.add_argument("--out", type=Path, default=Path("gpu_half_hour"))
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--peers", nargs="*", default=PEERS, help="settings of PyTorch")
    parser.add_argument("--ours", nargs="*", help="settings of ours beside the first (all)")
    parser.add_argument("--against", type=Path, help="rows.jsonl of an earlier half hour")
    parser.add_argument("--tiny", action="store_true", help="every row in tiny sizes on a CPU")
    options = parser.parse_args(words)
    cache = options.out.resolve() / "cache"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "jax"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "torch"))
    earlier = read(options.against) if options.against else {}

    def write(results: dict[str, dict[str, Any]]) -> None:
        (options.out / "half_hour.md").write_text(markdown(results, earlier))

    given = Options(
        options.out, options.tiny, options.seconds, options.peers, options.ours
    )  # fmt: skip
    asked = {name: ROWS[name] for name in options.rows}
    results = do(asked, given, seconds=60 * options.minutes, after=write)
    write(results)
    sys.stdout.write((options.out / "half_hour.md").read_text())
    left = [name for name in asked if name not in results or not is_done(results[name])]
    if left:
        words = f"Not done yet: {', '.join(left)}; the same command goes on with them."
        sys.stdout.write(f"{words}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
