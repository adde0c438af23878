"""What closes a whole run: the claims of its files, forbidden skips, and what had no time left."""

import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from claims import CLAIMS, claim_of, table
from reporting import find_resting, read_durations

TESTS = Path(__file__).parent
SUITE = """
import pytest

def test_passes():
    pass

def test_peer():
    pytest.importorskip("a_package_of_the_registry")

@pytest.mark.slow
@pytest.mark.parametrize("case", range(2))
def test_takes_long(case):
    assert case == 0

@pytest.mark.rotated("minutes")
@pytest.mark.parametrize("case", range(3))
def test_in_turn(case):
    assert case < 2
"""


def test_every_claim_has_files():
    names = [path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")]
    found = {claim_of(name) for name in names}
    assert found == set(CLAIMS)


def test_the_table_adds_up_by_claim():
    reports = [
        {"files": {"test_step.py": {"passed": 3, "seconds": 2.0}, "test_loss.py": {"failed": 1}}},
        {"files": {"test_step.py": {"passed": 4, "not run": 2, "resting": 1, "seconds": 5}}},
    ]
    rows = {line[:24].strip(): line[24:].split() for line in table(reports).splitlines()[1:]}
    assert rows["parallelism"] == ["7", "0", "0", "2", "1", "7"]
    assert rows["numerics"] == ["0", "1", "0", "0", "0", "0"]
    assert rows["all"] == ["7", "1", "0", "2", "1", "7"]


def test_no_test_takes_so_long_that_a_busy_machine_would_end_it():
    """Idle at most a third of the limit after which a test counts as one that hangs."""
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())
    limit = project["tool"]["pytest"]["ini_options"]["faulthandler_timeout"]
    long = {test: seconds for test, seconds in read_durations().items() if seconds > limit / 3}
    assert not long


@pytest.fixture
def run_suite(tmp_path):
    """Run pytest with the plugin on a suite of its own; returns its status, output and report."""
    (tmp_path / "test_little.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\npytest_plugins = ['reporting']\n"
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n slow: takes long\n rotated: takes minutes\n"
    )

    def run(*options: str) -> tuple[int, str, dict]:
        command = [sys.executable, "-m", "pytest", "--report", "report.json", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout, json.loads((tmp_path / "report.json").read_text())

    return run


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="peers are installed for Python 3.11")
def test_a_skipped_peer_fails_a_strict_run(run_suite):
    status, printed, report = run_suite("-k", "passes or peer")
    assert (status, report["files"]["test_little.py"]["skipped"]) == (0, 1)
    assert "1 could not import 'a_package_of_the_registry'" in printed
    status, printed, _ = run_suite("-k", "passes or peer", "--strict-skips")
    assert status == 1
    assert "FAILED: a test may not be skipped for: could not import 'a_package_of" in printed


# Starts pytest three times.
@pytest.mark.slow
def test_cases_that_rest_are_counted(run_suite):
    status, printed, report = run_suite("-m", "slow", "--first", "4")
    assert (status, report["files"]["test_little.py"]["resting"]) == (0, 1)
    assert "test_little.py 1" in printed.partition("resting until their turn")[2]
    status, _, with_workers = run_suite("-m", "slow", "--first", "4", "-n", "2")
    assert (status, with_workers["files"]["test_little.py"]["resting"]) == (0, 1)
    status, printed, report = run_suite("-m", "slow", "--first", "4", "--resting")
    assert (status, report["files"]["test_little.py"]["resting"]) == (1, -1)
    assert "1 failed" in printed
    assert "passed" not in printed
    for everything in (["test_little.py"], ["--last-failed"]):
        status, printed, _ = run_suite("-m", "slow", *everything)
        assert status == 1
        assert ("1 passed" in printed) == (everything == ["test_little.py"])


# Starts pytest twice.
@pytest.mark.slow
def test_tests_that_would_end_too_late_are_named_and_not_run(run_suite):
    late = ("test_little.py", "--until")
    status, printed, report = run_suite("-m", "slow", *late, str(time.time() + 30))
    assert status == 0  # a test without a record counts as a minute
    assert report["files"]["test_little.py"]["not run"] == 2
    assert "no time left for the tests of" in printed
    status, _, report = run_suite("-m", "slow", *late, str(time.time() + 3600))
    assert status == 1
    assert (
        report["files"]["test_little.py"]["passed"],
        report["files"]["test_little.py"]["failed"],
    ) == (1, 1)


def test_a_report_of_a_run_before_is_not_taken_for_a_folder_of_tests():
    """pytest reads its first arguments before it knows our options: a file there that exists would
    be where it looks for conftest.py, and a second `make test` would not know its own options."""
    assert "--report=" in (TESTS.parent / "Makefile").read_text()
    assert not re.search(r"--report\s", (TESTS.parent / "Makefile").read_text())


def make_item(name, **markers):
    """What the plugin asks of a test; markers by name, with their arguments."""
    path = Path(name.partition("::")[0])
    marks = {key: getattr(pytest.mark, key)(*given).mark for key, given in markers.items()}
    return SimpleNamespace(nodeid=name, path=path, get_closest_marker=marks.get)


def test_every_rotated_test_has_its_turn():
    names = ("a", "c", "d", "e")
    items = [make_item(name, rotated=["two" if name == "d" else "one"]) for name in names]
    items.insert(1, make_item("b"))
    run = [
        "".join(one.nodeid for one in items if one not in find_resting(items, turn, {}))
        for turn in (6, 7, 8, 9)
    ]
    assert run == ["abd", "bcd", "bde", "abd"]


def test_every_slow_case_runs_once_in_four_turns():
    """Of two cases each second time; a cheap function, a fast case and a single test each time."""
    slow = [f"test_a.py::test_long[{case}]" for case in range(7)]
    pair = [f"test_a.py::test_pair[{case}]" for case in range(2)]
    cheap = [f"test_a.py::test_cheap[{case}]" for case in range(2)]
    always = ["test_a.py::test_long[fast]", "test_a.py::test_one", *cheap]
    items = [make_item(name, slow=[]) for name in (*slow, *pair, *cheap, always[1])]
    items.append(make_item(always[0]))
    recorded = {("test_a.py", "test_cheap"): 2.0, ("test_a.py", "test_long"): 1.0}
    run = []
    for turn in (4, 5, 6, 7):
        resting = find_resting(items, turn, recorded)
        run.append({item.nodeid for item in items if item not in resting})
    assert all(ran >= set(always) for ran in run)
    assert sorted(name for ran in run for name in ran if name in slow) == slow
    assert [sorted(ran & set(pair)) for ran in run] == [[one] for one in (*pair, *pair)]


# Starts pytest twice.
@pytest.mark.slow
def test_of_a_rotated_group_one_test_runs_and_is_named(run_suite):
    status, printed, _ = run_suite("-k", "in_turn", "--first", "4")
    assert status == 0
    assert "1 passed, 6 deselected" in printed
    named = printed.partition("run in turn")[2]
    assert "test_in_turn[1]" in named
    assert named.count("test_in_turn") == 1
    _, printed, report = run_suite("test_little.py::test_in_turn")
    assert "1 failed, 2 passed" in printed
    # Each has a record of its own, by which `--until` starts it or not.
    assert {test["test"] for test in report["tests"]} == {f"test_in_turn[{n}]" for n in range(3)}
