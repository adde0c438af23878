"""Random damage to every kind of foreign file: each is read, or rejected in a sentence.

`make fuzz` runs it, in about ten minutes. What it finds is kept in test_hostile_files.py.
"""

import random
import time
from pathlib import Path

import hostile
import hostile_readers
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.fuzz

READERS = hostile_readers.readers()
SECONDS = 10  # for each reader, after it has been imported


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    one = hostile.Bounded(hostile_readers.readers, tmp_path_factory.mktemp("cache"))
    yield one
    one.close()


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_within_bounds(name, bounded, tmp_path):
    reader, valid, case = READERS[name], tmp_path / "valid", tmp_path / "case"
    reader.make(hostile.fresh(valid))

    def copied() -> Path:
        hostile.copy(valid, tmp_path / "whole")
        return tmp_path / "whole"

    bounded.warm(name, copied)
    end = time.monotonic() + SECONDS

    @settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**63))
    def read(seed):
        if time.monotonic() > end:
            return
        file = hostile.write_mutated(reader, valid, case, random.Random(seed))
        bounded.warm(name, copied)
        outcome = bounded.read(name, case)
        assert outcome.kind != "failed", f"{file}: {outcome.told}\n{(case / file).read_bytes()!r}"

    read()
