"""What a whole run of the suite reports: durations, compiles, skips and what had no time left.

Options of pytest (tests/conftest.py loads this plugin):
  --report FILE           write tests, seconds and compiles by file and by test function as JSON
  --strict-skips          fail if a test is skipped for a reason that is not in ALLOWED_SKIPS
  --until SECONDS         start no test that would end after this time (seconds since 1970), by the
                          durations that `make durations` recorded
  --first N               start with the N-th file (modulo their number): what had no time left
                          this time comes first the next time
  --resting               run what rests without this option, and nothing else

A run of the whole suite takes turns, N from --first or else the number of commits. Of the slow
cases of a test function every fourth runs, so that after four turns each has run. Of the tests of a
marker `rotated(group)`, which take longest, one runs, the N-th of its group modulo their
number. Where the command names a file or a test, all of it runs.
"""

import csv
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import jax
import pytest

# Reasons why a test may be skipped where all peers are installed: what a machine or its kernel
# lacks. A package that a registry has is none: it is installed by the extras `dev` and `proof`.
ALLOWED_SKIPS = (
    r"root may read everything",
    r"no right to mount a small file system",
    r"this machine has an accelerator",
    r"glibc|Linux",  # other systems
    r"^\w+ is not installed$",  # a program of the system
)
NO_TIME = "no time left in this run"
# The slow cases of a test function run in so many turns; those that take fewer seconds in one.
TURNS = 4
_WORTH_TURNS = 5.0
DURATIONS = Path(__file__).with_name("durations.csv")
_STARTED = pytest.StashKey[bool]()
_RESTING = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options above."""
    group = parser.getgroup("reporting")
    group.addoption("--report", type=Path)
    group.addoption("--strict-skips", action="store_true")
    group.addoption("--until", type=float)
    group.addoption("--first", type=int, default=0)
    group.addoption("--resting", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    """Count compiles where tests run, and gather reports where they arrive."""
    config.pluginmanager.register(_Compiles(), "jaxtrain-compiles")
    if not hasattr(config, "workerinput"):  # the controller of several processes, or the only one
        config.pluginmanager.register(_Reports(config), "jaxtrain-reports")
    if config.option.until:
        config.pluginmanager.register(_Until(config.option.until), "jaxtrain-until")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests whose turn it is not. Files that take longest first, since one begun
    last keeps a single worker; then --first.

    (xdist keeps the order with --no-loadscope-reorder.)
    """
    recorded, seconds = read_durations(), Counter()
    named = any(".py" in argument for argument in config.args) or config.getoption("lf", False)
    if not named:
        resting = set(find_resting(items, config.option.first or _count_commits(), recorded))
        counts = Counter(item.path.name for item in resting)
        if config.option.resting:  # they rest no longer: added to another run's there are none
            counts = Counter({file: -count for file, count in counts.items()})
            resting = set(items) - resting
        config.stash[_RESTING] = dict(counts)
        if hasattr(config, "workeroutput"):
            config.workeroutput["resting"] = dict(counts)
        config.hook.pytest_deselected(items=[item for item in items if item in resting])
        items[:] = [item for item in items if item not in resting]
    for item in items:
        seconds[item.path] += _recorded_seconds(item, recorded, 1.0)
    files = sorted(seconds, key=lambda file: -seconds[file])
    if files:
        start = config.option.first % len(files)
        place = {file: at for at, file in enumerate([*files[start:], *files[:start]])}
        items.sort(key=lambda item: place[item.path])


def find_resting(
    items: list[pytest.Item], turn: int, recorded: dict[tuple[str, str], float]
) -> list[pytest.Item]:
    """Return the tests whose turn it is not: rotated ones, and slow cases of a test function.

    Args:
      items: in an order that does not depend on the turn.
      turn: number of this run.
      recorded: see `read_durations`; a function whose slow cases take less than five seconds
        together has no turns.
    """
    groups: dict[str, list[pytest.Item]] = {}  # rotated group, or test function
    for item in items:
        if marker := item.get_closest_marker("rotated"):
            groups.setdefault(marker.args[0], []).append(item)
        elif item.get_closest_marker("slow") and "[" in item.nodeid:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    resting = []
    for name, group in groups.items():
        turns = len(group)
        if "::" in name:
            together = sum(_recorded_seconds(item, recorded, 60.0) for item in group)
            turns = 1 if together < _WORTH_TURNS else min(TURNS, len(group))
        group.sort(key=lambda item: item.nodeid)
        resting += [item for at, item in enumerate(group) if at % turns != turn % turns]
    return resting


def _count_commits() -> int:
    """Return the number of commits; of a folder without git, the day of the year."""
    done = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=DURATIONS.parent, capture_output=True, text=True
    )
    return int(done.stdout) if done.returncode == 0 else time.localtime().tm_yday


def _recorded_seconds(
    item: pytest.Item, recorded: dict[tuple[str, str], float], otherwise: float
) -> float:
    """Return the seconds recorded of a test itself, or else of a case of its function."""
    file, name = item.path.name, item.nodeid.partition("::")[2]
    of_function = recorded.get((file, name.partition("[")[0]), otherwise)
    return recorded.get((file, name), of_function)


class _Compiles:
    """Adds the number of programs that XLA compiled during a test to its report."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, seconds: float, **_: object) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        report.user_properties = [("compiles", self.count)]
        self.count = 0
        return report


def read_durations(path: Path = DURATIONS) -> dict[tuple[str, str], float]:
    """Return (file, test function or rotated test) -> recorded seconds of a case, on average."""
    with path.open() as file:
        return {
            (row["file"], row["test"]): float(row["seconds"]) / max(1, int(row["tests"]))
            for row in csv.DictReader(file)
        }


class _Until:
    """Skips each test that would not end in time, at the speed that this machine has shown."""

    def __init__(self, until: float) -> None:
        self.until, self.recorded = until, read_durations()
        self.expected = self.taken = 0.0  # seconds of the tests so far

    def _expect(self, item: pytest.Item) -> float:
        # A test without a record is new: a minute is as long as most take.
        return _recorded_seconds(item, self.recorded, 60.0)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        start = time.time()
        result = yield
        if item.stash.get(_STARTED, False):
            self.expected += self._expect(item)
            self.taken += time.time() - start
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        slowness = max(1.0, self.taken / self.expected) if self.expected > 30 else 1.0
        if time.time() + slowness * self._expect(item) > self.until:
            pytest.skip(NO_TIME)
        item.stash[_STARTED] = True


class _Reports:
    """Gathers what every test reported; prints skips and what had no time; writes --report."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.files: dict[str, Counter] = {}
        self.tests: dict[tuple[str, str], Counter] = {}
        self.skips: Counter[str] = Counter()
        self.left: set[str] = set()
        self.rotated: list[str] = []
        self.resting: dict[str, int] = {}

    def _skip(self, report: pytest.TestReport | pytest.CollectReport, found: Counter) -> None:
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason == NO_TIME:
            self.left.add(Path(report.nodeid.split("::")[0]).name)
            found["not run"] += 1
        else:
            self.skips[reason] += 1
            found["skipped"] += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = Path(report.nodeid.partition("::")[0]).name
        found = self.files.setdefault(file, Counter())
        name = report.nodeid.partition("::")[2]
        if "rotated" not in report.keywords:  # each of which has a record of its own
            name = name.partition("[")[0]
        test = self.tests.setdefault((file, name), Counter())
        compiles = dict(report.user_properties).get("compiles", 0)
        for counter in (found, test):
            counter["seconds"] += report.duration
            counter["compiles"] += compiles
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skip(report, found)
        elif report.failed:
            found["failed"] += 1
        elif report.when == "call":
            found["passed"] += 1
            test["tests"] += 1
        if report.when == "call" and "rotated" in report.keywords:
            self.rotated.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skip(report, self.files.setdefault(Path(report.nodeid).name, Counter()))

    @pytest.hookimpl(optionalhook=True)  # of xdist, whose workers collect: each the same
    def pytest_testnodedown(self, node) -> None:
        self.resting = getattr(node, "workeroutput", {}).get("resting", self.resting)

    def forbidden(self) -> list[str]:
        """Return the reasons that no list allows; PyTorch's peers are for Python 3.11 alone."""
        if not self.config.option.strict_skips or sys.version_info >= (3, 12):
            return []
        return [
            reason
            for reason in sorted(self.skips)
            if not any(re.search(pattern, reason) for pattern in ALLOWED_SKIPS)
        ]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.forbidden():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self.resting = self.config.stash.get(_RESTING, self.resting)
        for file, count in self.resting.items():
            self.files.setdefault(file, Counter())["resting"] += count
        if self.config.option.report:
            functions = [
                {"file": file, "test": name, **found} for (file, name), found in self.tests.items()
            ]
            self.config.option.report.write_text(
                json.dumps({"files": self.files, "tests": functions}, indent=1)
            )

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.skips:
            terminalreporter.section("skipped")
            for reason, count in self.skips.most_common():
                terminalreporter.write_line(f"{count:4} {reason}")
        if self.rotated:
            terminalreporter.section("run in turn, one of a group at each number of commits")
            terminalreporter.write_line("\n".join(sorted(self.rotated)))
        if self.resting and not self.config.option.resting:
            terminalreporter.section("resting until their turn (--resting runs them)")
            terminalreporter.write_line(
                " ".join(f"{file} {count}" for file, count in sorted(self.resting.items()))
            )
        if self.left:
            terminalreporter.section("no time left for the tests of")
            terminalreporter.write_line(" ".join(sorted(self.left)))
        for reason in self.forbidden():
            terminalreporter.write_line(f"FAILED: a test may not be skipped for: {reason}")
