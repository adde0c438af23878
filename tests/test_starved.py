"""A run that waited for its data says for which, and what helps."""

import os

import pytest

from jaxtrain.data.images.source import ImageData
from jaxtrain.data.source import Dataset
from jaxtrain.data.text.source import TextData
from jaxtrain.run.attempts.goodput import Account
from jaxtrain.run.starved import starved

DATASET = Dataset([], [], "", {"source": "birds"}, None, "images")


def said(data, *, waited, dataset=DATASET):
    # Of two attempts; what is not a step's time does not count.
    account = Account(({"data": waited, "step": 50.0, "compile": 900.0}, {"step": 40.0}))
    return starved(account, data, dataset)


def test_a_twentieth_is_where_it_is_worth_a_word():
    assert said(TextData(), waited=4.7) is None  # of 94.7: 4.96 %
    assert said(TextData(), waited=10.0) == (
        "Steps waited for batches of TextData.source = 'birds' 10% of their time: bring it to a "
        "local disk, or give the process more cores"
    )


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
