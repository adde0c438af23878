"""Writes tests/durations.csv from the reports of the fast and the slow part (`make durations`).

Prints the 40 files that take longest, with the programs that they compile.
"""

import csv
import json
import sys
from pathlib import Path

COLUMNS = ("file", "test", "part", "tests", "seconds", "compiles")
_NOTHING = {"tests": 0, "seconds": 0.0, "compiles": 0}


def rows_of(reports: list[dict], part: str) -> list[dict]:
    """Return one row for every test function of the reports, in order of names."""
    found: dict[tuple[str, str], dict] = {}
    for test in (test for report in reports for test in report["tests"]):
        row = found.setdefault((test["file"], test["test"]), test | _NOTHING)
        for name in _NOTHING:
            row[name] += test.get(name, 0)
    rows = [
        {
            "file": test["file"],
            "test": test["test"],
            "part": part,
            "tests": test["tests"],
            "seconds": round(test["seconds"], 1),
            "compiles": test["compiles"],
        }
        for test in found.values()
        if test["tests"]
    ]
    return sorted(rows, key=lambda row: (row["file"], row["test"]))


def longest_files(rows: list[dict], count: int) -> list[str]:
    """Return a table of the files that take longest: seconds, tests, compiles."""
    files: dict[str, dict[str, float]] = {}
    for row in rows:
        found = files.setdefault(row["file"], dict.fromkeys(("seconds", "tests", "compiles"), 0))
        for name in found:
            found[name] += row[name]
    ordered = sorted(files.items(), key=lambda item: -item[1]["seconds"])[:count]
    lines = [f"{'file':45}{'seconds':>9}{'tests':>7}{'compiles':>10}"]
    for file, found in ordered:
        figures = f"{found['seconds']:>9.0f}{found['tests']:>7.0f}{found['compiles']:>10.0f}"
        lines.append(f"{file:45}{figures}")
    return lines


def main(fast: str, *slow: str) -> None:
    """Write the table of these reports next to this file."""
    reports = [json.loads(Path(path).read_text()) for path in (fast, *slow)]
    rows = rows_of(reports[:1], "fast") + rows_of(reports[1:], "slow")
    with Path(__file__).with_name("durations.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    sys.stdout.write("\n".join(longest_files(rows, 40)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
