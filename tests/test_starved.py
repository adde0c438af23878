"""A run that waited for its data says for which, and what helps."""

import dataclasses
import os
import re

import pytest

from jaxtrain.cli import main
from jaxtrain.config.registry import CONFIGURABLES
from jaxtrain.config.values import settings_of
from jaxtrain.data.images.source import ImageData
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.source import Dataset
from jaxtrain.data.text.source import TextData
from jaxtrain.data.vectors.source import VectorData
from jaxtrain.run.attempts.goodput import Account
from jaxtrain.run.commands.train import advise_on_waiting
from jaxtrain.training.settings import load_config

DATASET = Dataset([], [], "", {"source": "birds"}, None, "images")


def said(data, *, waited, dataset=DATASET, worked=90.0):
    # Of two attempts; what is not a step's time does not count.
    account = Account(({"data": waited, "step": worked - 10, "compile": 900.0}, {"step": 10.0}))
    return advise_on_waiting(account, data, dataset)


def test_a_twentieth_is_where_it_is_worth_a_word():
    assert said(TextData(), waited=4.7) is None  # of 94.7: 4.96 %
    assert said(TextData(), waited=10.0) == (
        "Steps waited for batches of TextData.source = 'birds' 10% of their time: give the process "
        "more cores"
    )


def test_no_advice_is_given_on_less_than_half_a_minute_of_steps():
    assert said(TextData(), waited=500.0, worked=29.9) is None
    assert said(TextData(), waited=500.0, worked=30.0) is not None


def test_only_what_is_read_while_training_is_brought_to_a_local_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    text = tmp_path / "text.txt"
    text.write_text("some words to read\n" * 99)
    store = str(tmp_path / "store")
    assert main(["prepare", str(text), "--tokenizer", "byte", "--out", store]) == 0
    from_disk = "copy the data to a local disk"
    mixed = {"sources": {"a": str(text), "b": store}, "data": TextData()}
    for data in (TextData(source=store), Mixture(**mixed), ImageData(source="birds", workers=1)):
        assert from_disk in said(data, waited=90.0)
    in_memory = TextData(source=str(text)), ImageData(workers=1), VectorData(source="digits")
    for data in in_memory:
        assert from_disk not in said(data, waited=90.0)


def test_advice_names_only_settings_that_exist():
    load_config("gpt_quickstart")  # registers every source
    required = {"source": "x", "text": TextData(), "sources": {"a": "embedded"}, "data": TextData()}
    sources = [cls for cls in CONFIGURABLES.values() if hasattr(cls, "abstract_batch")]
    assert {"TextData", "Mixture", "SpanData", "ImageData"} <= {cls.__name__ for cls in sources}
    for cls in sources:
        if not cls.__module__.startswith("jaxtrain."):
            continue
        needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING
                  and f.default_factory is dataclasses.MISSING]  # fmt: skip
        told = said(cls(**{name: required.get(name, 2) for name in needed}), waited=90.0)
        for section, setting in re.findall(r"\b([A-Z]\w+)\.(\w+)", told):
            assert setting in settings_of(CONFIGURABLES[section]), told


@pytest.mark.parametrize("source", ["embedded", "synthetic"])
def test_what_no_file_has_is_brought_to_no_disk(source):
    made = Dataset([], [], "", {"source": source}, None, "tokens")
    told = said(TextData(source=source), waited=90.0, dataset=made)
    assert told.endswith(f"'{source}' 50% of their time: give the process more cores")


@pytest.mark.parametrize("workers", [0, 1])
def test_images_are_decoded_by_more_workers(workers, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    told = said(ImageData(workers=workers), waited=90.0)
    assert f"50% of their time: set ImageData.workers (now {workers}; this machine has 16" in told
    assert "set ImageData.workers" not in said(ImageData(workers=16), waited=90.0)


def test_a_source_without_a_name_is_called_by_its_class():
    nameless = Dataset([], [], "", {}, None, "tokens")
    assert "batches of @TextData() 50%" in said(TextData(), waited=90.0, dataset=nameless)
