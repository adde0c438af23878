"""Large text becomes a store in the cache folder by itself: the same data, made once."""

import dataclasses
import gzip
import subprocess
import sys

import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores import tokenizing
from jaxtrain.data.token_arrays import Verified
from jaxtrain.run import feed
from jaxtrain.run.feed import with_stores


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A text over the limit, one under it, and an empty cache folder."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(feed, "LARGE_BYTES", 5000)
    monkeypatch.setattr(tokenizing, "JOB_CHARACTERS", 1000)
    monkeypatch.setattr(feed, "_REPORT_SECONDS", 0.0)
    (tmp_path / "large.txt").write_text("".join(f"line {n}\n" for n in range(1000)))
    (tmp_path / "small.txt").write_text("".join(f"line {n}\n" for n in range(200)))
    return tmp_path


def test_the_store_is_made_once_and_is_the_text(large):
    data = TextData(source=str(large / "large.txt"), sequence_length=16)
    said = []
    stored = with_stores(data, said.append)
    assert "is large (8,890 bytes): its tokens are cached in " in said[0]
    assert f"{large / 'cache'}" in said[0]
    assert any("% tokenized, " in line for line in said[1:])
    found, expected = stored.open(seed=0), data.open(seed=0)
    assert isinstance(found.train.tokens, Verified)
    assert found.digest == expected.digest
    said.clear()
    assert with_stores(data, said.append) == stored
    assert said == [f"TextData.source = {data.source!r}: its tokens are in {stored.source}"]
    assert with_stores(stored, said.append) == stored
    for changed in ({"heldout_fraction": 0.1}, {"text_field": "body"}):
        other = with_stores(dataclasses.replace(data, **changed), said.append)
        assert other.source != stored.source
    (large / "large.txt").write_text("changed\n" * 1000)
    assert with_stores(data, said.append).source != stored.source


def test_of_packed_text_no_share_is_told(large, monkeypatch):
    packed = large / "large.txt.gz"
    packed.write_bytes(gzip.compress((large / "large.txt").read_bytes()))
    monkeypatch.setattr(feed, "LARGE_BYTES", 500)
    said = []
    with_stores(TextData(source=str(packed), sequence_length=16), said.append)
    assert packed.stat().st_size < 5000
    assert said[-1].endswith(": 8,890 characters tokenized, 8,892 tokens")


def test_other_data_stay_as_they_are(large):
    said = []
    for data in (
        TextData(),
        TextData(source="synthetic"),
        TextData(source=str(large / "small.txt")),
        object(),
    ):
        assert with_stores(data, said.append) is data
    assert said == []


def test_of_a_mixture_the_large_sources_are_kept(large):
    sources = {name: str(large / f"{name}.txt") for name in ("large", "small")}
    data = Mixture(sources=sources, data=TextData(sequence_length=16))
    stored = with_stores(data, lambda line: None)
    assert stored.sources["small"] == sources["small"]
    assert stored.sources["large"] != sources["large"]
    assert stored.open(seed=0).digest == data.open(seed=0).digest


def test_of_two_processes_one_makes_it_and_the_other_waits(large):
    code = """
import sys
from jaxtrain.config import files
from jaxtrain.run import feed
from jaxtrain.data.text.stores import tokenizing
from jaxtrain.data.text.source import TextData
feed.LARGE_BYTES, tokenizing.JOB_CHARACTERS = 5000, 1000
files._WAIT_SECONDS = 0.01
text = TextData(source=sys.argv[1], sequence_length=16)
data = feed.with_stores(text, lambda line: None)
print(data.open(seed=0).digest)
"""
    words = [sys.executable, "-c", code, str(large / "large.txt")]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [one.communicate()[0] for one in started]
    assert [one.returncode for one in started] == [0, 0]
    expected = TextData(source=str(large / "large.txt"), sequence_length=16).open(seed=0).digest
    assert told == [f"{expected}\n"] * 2
    assert len(list((large / "cache" / "stores").iterdir())) == 1


def test_a_cache_folder_that_cannot_be_written_is_named(large, monkeypatch):
    (large / "file").write_text("")
    monkeypatch.setenv("JAXTRAIN_CACHE", str(large / "file"))
    data = TextData(source=str(large / "large.txt"), sequence_length=16)
    with pytest.raises(UserError, match="the cache folder .*; set JAXTRAIN_CACHE to another"):
        with_stores(data, lambda line: None)
