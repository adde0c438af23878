"""Writes tests/durations.csv from the reports of the fast and the slow part (`make durations`).

Prints the 40 files that take longest, with the programs that they compile.
"""

import csv
import json
import sys
from pathlib import Path

COLUMNS = ("file", "test", "part", "tests", "seconds", "compiles")


def rows_of(report: dict, part: str) -> list[dict]:
    """Return one row for every test function of a report, in order of names."""
    rows = [
        {
            "file": test["file"],
            "test": test["test"],
            "part": part,
            "tests": test.get("tests", 0),
            "seconds": round(test.get("seconds", 0.0), 1),
            "compiles": test.get("compiles", 0),
        }
        for test in report["tests"]
        if test.get("tests", 0)
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


def main(fast: str, slow: str) -> None:
    """Write the table of both reports next to this file."""
    reports = {"fast": fast, "slow": slow}
    rows = [
        row
        for part, path in reports.items()
        for row in rows_of(json.loads(Path(path).read_text()), part)
    ]
    with Path(__file__).with_name("durations.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    sys.stdout.write("\n".join(longest_files(rows, 40)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
