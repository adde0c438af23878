"""From the command to the first step: seconds of each quickstart config, cold and warm, by part.

    python -m benchmarks.first_step [--configs gpt_quickstart ...] [--rounds 1] [--json FILE]

Each figure is a process of its own: `jaxtrain train CONFIG` to the end of its first step, with no
program compiled before (cold) and with those of the process before (warm); on one device, but for
`gpt_quickstart`, which simulates eight. Its parts are imports; tracing and lowering; compiling, or
reading compiled programs; the first batch. PyTorch's is a process that imports it, builds the model
of `cpu_rows` for the config with our weights, and takes one eager step: the sizes of the row, not
those of the config.
"""

import argparse
import collections
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import side_by_side
from benchmarks.cpu_rows import ROWS

CONFIGS = (
    "gpt_quickstart", "gemma_quickstart", "mixtral_tiny", "deepseek_tiny", "bert_tiny", "t5_tiny",
    "transformer_addition", "mamba_quickstart", "rnn_quickstart", "gru_quickstart",
    "lstm_quickstart", "mlp_digits", "autoencoder_mnist5k", "lenet_mnist5k", "alexnet_mnist5k",
    "vgg11_mnist5k", "googlenet_mnist5k", "resnet_digits", "resnet_mnist5k", "vit_digits",
)  # fmt: skip
# Their meshes have eight devices, and `train` simulates those of `gpt_quickstart` alone.
ON_ONE_DEVICE = ("mixtral_tiny", "deepseek_tiny", "lstm_quickstart")
PARTS = ("import", "trace", "compile", "first batch", "other")
# The clock at which a child was started, as `time.time` has it.
STARTED = "BENCHMARK_STARTED"
_TRACES = ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module")
_COMPILES = ("/jax/core/compile/backend_compile_duration",)


def length_of_union(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that are inside at least one span (begin, end)."""
    total, reached = 0.0, -np.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return float(total)


# -- the children ----------------------------------------------------------------------------------


def take_first_step(config: str, workdir: str) -> None:
    """Run `jaxtrain train` up to the end of its first step, print its seconds, and exit."""
    spans: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)

    import jax  # noqa: PLC0415 - imports are timed

    def listen(event: str, seconds: float, **_: Any) -> None:
        now = time.time()
        for part, names in (("trace", _TRACES), ("compile", _COMPILES)):
            if event.startswith(names):
                spans[part].append((now - seconds, now))

    jax.monitoring.register_event_duration_secs_listener(listen)

    from jaxtrain import cli  # noqa: PLC0415
    from jaxtrain.run import commands  # noqa: F401, PLC0415 - what `train` imports
    from jaxtrain.run.phases import Phases
    from jaxtrain.training.compiled_step import Stepper  # noqa: PLC0415

    imported, all_phases = time.time(), []
    init, step = Phases.__init__, Stepper.step_and_check

    @functools.wraps(init)
    def remember(self: Phases, *arguments: Any) -> None:
        init(self, *arguments)
        all_phases.append(self)

    @functools.wraps(step)
    def report(self: Stepper, *arguments: Any) -> Any:
        jax.block_until_ready(step(self, *arguments))
        end, began = time.time(), float(os.environ[STARTED])
        found = {
            "total": end - began,
            "import": imported - began,
            "trace": length_of_union(spans["trace"]),
            "compile": length_of_union(spans["compile"]),
            "first batch": sum(phases.seconds.get("data", 0.0) for phases in all_phases),
        }
        found["other"] = found["total"] - sum(found[part] for part in PARTS[:-1])
        print(json.dumps(found), file=sys.stderr, flush=True)  # noqa: T201
        os._exit(0)

    Phases.__init__, Stepper.step_and_check = remember, report  # type: ignore[method-assign]
    mesh = ["Mesh.data=1", "Mesh.fsdp=-1", "Mesh.expert=1"] if config in ON_ONE_DEVICE else []
    bindings = [word for binding in mesh for word in ("-b", binding)]
    cli.main(["train", config, "--workdir", workdir, *bindings])


def take_first_step_in_torch(row: str, folder: str) -> None:
    """Import PyTorch, build a row's model, take one eager step, and print the seconds."""
    from benchmarks.cpu_vs_torch import theirs  # noqa: PLC0415

    runner = theirs(ROWS[row], folder)
    runner.loss(runner.step(0))
    found = {"total": time.time() - float(os.environ[STARTED])}
    print(json.dumps(found), file=sys.stderr, flush=True)  # noqa: T201


def save_weights(row: str, folder: str) -> None:
    """Write the weights that PyTorch's side reads."""
    from benchmarks.cpu_vs_torch import ours  # noqa: PLC0415

    save = ours(ROWS[row]).save
    assert save is not None, "our side has the weights"
    save(folder)


CHILDREN: Mapping[str, Callable[[str, str], None]] = {
    "jaxtrain": take_first_step, "torch": take_first_step_in_torch, "weights": save_weights,
}  # fmt: skip


def run(child: str, *words: str, **environment: str) -> dict[str, float]:
    """What a child reports in the last line of its stderr.

    Raises:
      RuntimeError: it ended otherwise.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_step", "--child", child, *words],
        env={**os.environ, STARTED: str(time.time()), **environment},
        cwd=side_by_side.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stderr.strip().splitlines()
    if child == "weights" and done.returncode == 0:
        return {}
    if done.returncode or not lines or not lines[-1].startswith("{"):
        raise RuntimeError(f"{child} {' '.join(words)} ended: {done.stderr[-2000:]}")
    return json.loads(lines[-1])


# -- the table -------------------------------------------------------------------------------------


def measure(config: str, rounds: int) -> dict[str, Any]:
    """Rounds of one config, cold, warm and PyTorch's, each the seconds of its parts."""
    found: dict[str, Any] = {"config": config, "cold": [], "warm": [], "torch": []}
    row = next((name for name, one in ROWS.items() if one.config == config), None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if row is not None:
            run("weights", row, name)
        for number in range(rounds):
            cache = {"JAXTRAIN_CACHE": str(folder / f"cache{number}")}
            for kind in ("cold", "warm"):
                workdir = str(folder / f"{kind}{number}")
                found[kind].append(run("jaxtrain", config, workdir, **cache))
            if row is not None:
                found["torch"].append(run("torch", row, name))
    return found


def make_table(results: Iterable[Mapping[str, Any]]) -> Table:
    """One line a config: seconds, the median of the rounds."""
    out = Table("config", "cold", "warm", *(f"{part}: cold, warm" for part in PARTS), "PyTorch")

    def median(rounds: list[dict[str, float]], part: str) -> str:
        return f"{np.median([one[part] for one in rounds]):.1f}" if rounds else ""

    for one in results:
        cells = [f"{median(one['cold'], part)}, {median(one['warm'], part)}" for part in PARTS]
        totals = (median(one[kind], "total") for kind in ("cold", "warm"))
        out.add_row(one["config"], *totals, *cells, median(one["torch"], "total"))
    return out


def main() -> None:
    """Reads the command line, measures and prints; the hidden option is for the children."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=CONFIGS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, *words = options.child
        CHILDREN[kind](*words)
        return
    results = []
    for config in options.configs:
        results.append(measure(config, options.rounds))
        if options.json:
            options.json.write_text(json.dumps(results))
    Console(width=140).print(make_table(results))


if __name__ == "__main__":
    main()
