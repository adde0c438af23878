"""Which claim of the project each test file proves, and the table that closes `make proof`.

`python tests/claims.py REPORT...` prints the table of the reports that pytest wrote
(`--report`, tests/reporting.py).
"""

import json
import sys
from fnmatch import fnmatch
from pathlib import Path

# Claim -> names of test files without `test_` and `.py`, as patterns. The first match counts.
CLAIMS = {
    "documentation": (
        "release", "examples", "init", "*_page", "readme", "links", "site", "language", "recipes",
        "schedules_picture", "architecture",
        "notes", "claims", "smoke", "start", "cli*", "synonyms", "newcomers", "security",
    ),
    "notebooks": ("notebooks",),
    "benchmarks": ("benchmarks_*", "promised_results", "g2p"),
    "planning": ("planning_*", "profiling", "pipeline_timeline", "absent_tpus", "html_reports"),
    "traffic": (
        "traffic", "*_traffic", "torus_collectives", "tiles", "collective_matmul",
        "experts_overlap", "accumulate_local",
    ),
    "memory": (
        "memory_contract", "allocation", "data_memory", "pipeline_buffers", "offload*", "soak",
        "run_ahead", "optimizer_eight_bits",
    ),
    "parallelism": (
        "parity_matrix", "step", "pipeline*", "context*", "exchange*", "experts", "reduction",
        "mesh", "sharding", "tensor_layouts", "indivisible_layouts", "uneven", "part_of_devices",
        "model_extras*", "verify", "loss_scale_on_a_mesh", "embedding", "preflight",
    ),
    "import and export": (
        "huggingface_*", "weight*", "gguf*", "safetensors", "mxfp4", "float8_files", "quantize",
        "key_table", "*_keys", "tokenizer_*", "data_tokenizer", "chat_template", "adapter*",
    ),
    "resume and reliability": (
        "resume", "compatibility",
        "checkpoint*", "retention", "best", "manifest", "survival", "chaos", "mishaps",
        "lock", "supervise*", "watchdog", "signals", "goodput", "phases", "full_disk", "peers",
        "distributed*", "strangers", "run_token", "buckets", "bucket_runs", "launch_*",
        "train_faults", "guard*", "corruption", "fuzz*", "hostile*", "output", "attempt_*",
        "slurm*", "standby", "host_names", "collective_timeouts", "foreign_modules",
    ),
    "data": (
        "data_*", "mixture", "token_*", "kept_stores", "fill_in_middle", "best_fit",
        "padded_lengths", "show_examples", "sequences", "starved", "chat_data", "left_out",
        "class_folders",
    ),
    "numerics": ("*",),
}  # fmt: skip


def claim_of(file: str) -> str:
    """Return the claim that a test file (a path or its name) proves."""
    name = Path(file).stem.removeprefix("test_")
    return next(
        claim
        for claim, patterns in CLAIMS.items()
        if any(fnmatch(name, pattern) for pattern in patterns)
    )


def table(reports: list[dict]) -> str:
    """Return the table of claims: tests passed, failed, skipped, not run for want of time and
    resting until their turn, and their seconds."""
    columns = ("passed", "failed", "skipped", "not run", "resting", "seconds")
    rows = {claim: dict.fromkeys(columns, 0.0) for claim in CLAIMS}
    for report in reports:
        for file, found in report["files"].items():
            for column in columns:
                rows[claim_of(file)][column] += found.get(column, 0)
    rows["all"] = {name: sum(row[name] for row in rows.values()) for name in columns}
    lines = [f"{'claim':24}" + "".join(f"{name:>9}" for name in columns)]
    lines += [
        f"{claim:24}" + "".join(f"{row[name]:>9.0f}" for name in columns)
        for claim, row in rows.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table([json.loads(Path(name).read_text()) for name in sys.argv[1:]]) + "\n")
