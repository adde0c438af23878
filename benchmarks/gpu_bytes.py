"""The bytes that a GPU's step reads and writes, from the program that XLA compiles without a GPU.

    python -m benchmarks.gpu_bytes [--row gpt2_124m] [--target h200:1x1] [--also BINDINGS]

The rows are those of `gpu_vs_torch`, in every setting of ours. A step's operands and results are
counted once for each run of an operation (`planning.compiled.costs`), a loop's as often
as it turns. Needs the CUDA plugin (`pip install 'jaxtrain[cuda13]'`) and no device.
"""

import argparse
import time

from rich.console import Console
from rich.table import Table

from benchmarks.gpu_rows import TRAIN
from jaxtrain.analysis.planning.compiled.compiled import lower, target_layout
from jaxtrain.analysis.planning.compiled.costs import CONTAINERS, costs
from jaxtrain.analysis.planning.compiled.hlo import parse
from jaxtrain.analysis.planning.machines.targets import compiler_options, parse_target
from jaxtrain.training.settings import load_config

KINDS = ("products", "attention", "fills of loops", "the rest")


def bytes_moved(text: str) -> dict[str, int]:
    """Bytes of one run of a compiled program, by what they are moved for; see KINDS."""
    module = parse(text)
    of_one, found = costs(module), dict.fromkeys(KINDS, 0)
    waiting = [(module.entry, 1)]
    while waiting:
        name, runs = waiting.pop()
        for one in module.computations[name].instructions.values():
            if one.opcode in CONTAINERS:
                turns = module.trip_count(one) if one.opcode == "while" else 1
                if turns is None:
                    raise ValueError(f"the program does not give the trip count of {one.name}")
                waiting += [(body, runs * turns) for body in one.called]
            elif one.name in of_one:
                found[_kind(one.name, one.opcode)] += of_one[one.name].moved_bytes * runs
    return found


def _kind(name: str, opcode: str) -> str:
    if "gemm" in name or opcode == "dot":
        return "products"
    if "dot_product_attention" in name:
        return "attention"
    return "fills of loops" if "broadcast_fusion" in name else "the rest"


def main() -> None:
    """Compiles every setting and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--row", choices=list(TRAIN), default="gpt2_124m")
    parser.add_argument("--target", default="h200:1x1")
    parser.add_argument("--also", action="append", default=[], help="bindings joined by ';'")
    options = parser.parse_args()
    row, target = TRAIN[options.row], parse_target(options.target)
    settings = {name or "ours": row.gin("bfloat16", name) for name in row.ours}
    for also in options.also:
        settings[also] = [*row.gin("bfloat16"), *also.split(";")]
    table = Table(
        "GB a step", *KINDS, "together", "temporaries, GB", "compiling, s", title=row.says
    )
    for name, bindings in settings.items():
        config, begin = load_config(row.config, bindings), time.perf_counter()
        lowered = lower(config, target_layout(config, target))
        compiled = lowered.compile(compiler_options=compiler_options(target))
        seconds = time.perf_counter() - begin
        moved = bytes_moved(compiled.as_text())
        numbers = [*moved.values(), sum(moved.values())]
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        table.add_row(
            name, *(f"{n / 1e9:.0f}" for n in numbers), f"{temporaries / 1e9:.1f}", f"{seconds:.0f}"
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
