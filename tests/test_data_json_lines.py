"""JSON lines as a text source, and the files of a folder that are no text."""

import gzip
import io
import json

import pytest
from rich.console import Console

from jaxtrain.config.errors import UserError
from jaxtrain.data.text.source import TextData
from jaxtrain.run.show.report import show_facts

TEXTS = [f"record {number}: tea, \u2028 and cake\n" for number in range(20)]


def lines(texts, field="text"):
    return "".join(
        json.dumps({"id": 1, field: text}, ensure_ascii=False) + "\n" for text in texts
    ).encode()


def documents(source, **settings):
    opened = TextData(source=str(source), sequence_length=8, **settings).open(seed=0)
    parts = [bytes(split.tokens).decode() for split in (opened.train, opened.heldout)]
    return [text for part in parts for text in part.split("\0")[:-1]], opened.facts


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSONL", "a.jsonl.gz", "a.ndjson.gz"])
def test_each_record_is_one_document(tmp_path, name):
    content = b"\xef\xbb\xbf" + lines(TEXTS).replace(b"\n", b"\r\n\r\n")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for source in (tmp_path / name, tmp_path):
        found, facts = documents(source)
        assert found == TEXTS
        assert facts["documents"] == 20


def test_another_field_holds_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS, "body"))
    assert documents(tmp_path / "a.jsonl", text_field="body")[0] == TEXTS
    with pytest.raises(UserError, match="a.jsonl:1: no field 'bodi'; did you mean 'body'"):
        documents(tmp_path, text_field="bodi")


def test_records_stand_between_the_text_files_of_a_folder(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(lines(TEXTS))
    (tmp_path / "a.txt").write_text("before")
    (tmp_path / "c.txt").write_text("after")
    found, facts = documents(tmp_path, heldout_fraction=0.1)
    assert found[0] == "before"
    assert sorted(found) == sorted(["before", *TEXTS, "after"])
    assert "files_left_out" not in facts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', "no JSON (Expecting ',' delimiter, column 13)"),
        (b"plain words", "no JSON (Expecting value, column 1)"),
        (b'{"text": "\xff"}', "no UTF-8 text (byte 10)"),
        (b"[" * 200_000, "JSON that cannot be read"),
        (b'["a"]', "a list, but it must be a JSON object"),
        (b'"a"', "a string, but it must be"),
        (b'{"txt": "a"}', "no field 'text'; did you mean 'txt'?"),
        (b"{}", "no field 'text'"),
        (b'{"text": null}', "'text' is null, but it must be a string"),
        (b'{"text": 3}', "'text' is a number"),
        (b'{"text": true}', "'text' is true or false"),
        (b'{"text": {}}', "'text' is a record"),
        (b'{"text": "\\ud800"}', "'text' holds an unpaired surrogate"),
    ],
)
def test_a_line_that_is_no_record_is_named_by_file_and_line(tmp_path, line, words):
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(TEXTS[:2]) + b"\n" + line + b"\n" + lines(TEXTS[2:]))
    with pytest.raises(UserError) as caught:
        documents(file)
    assert f"1 of 21 records cannot be used: {file}:4: {words}" in str(caught.value)
    assert "TextData.text_field = 'text'" in str(caught.value)


def test_all_bad_lines_of_a_folder_are_counted_and_the_first_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS) + b"?\n" * 2)
    (tmp_path / "b.jsonl").write_bytes(b"?\n" * 4)
    with pytest.raises(UserError) as caught:
        documents(tmp_path)
    message = str(caught.value)
    assert "6 of 26 records cannot be used" in message
    for place in ("a.jsonl:21", "a.jsonl:22", "b.jsonl:1", "and 3 more"):
        assert place in message
    assert "b.jsonl:2" not in message


def test_a_damaged_gzip_file_is_named(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(lines(TEXTS))
    for content in (whole[:-20], b"no gzip", whole[:30] + b"\xff" * 20 + whole[50:]):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.jsonl\.gz is not a complete gzip file"):
            documents(file)


def test_files_that_are_no_text_are_counted_by_ending_and_said(tmp_path):
    (tmp_path / "a.txt").write_text("words " * 40)
    for name in ("b.PNG", "c.png", "d.pdf", "Makefile", ".hidden.png"):
        (tmp_path / name).write_bytes(b"\xff")
    facts = documents(tmp_path)[1]
    assert facts["files"] == 1
    assert facts["files_left_out"] == 4
    assert facts["endings_left_out"] == ".png 2, .pdf 1, no ending and not UTF-8 text 1"
    printed = io.StringIO()
    show_facts(Console(file=printed, width=40), facts, "0" * 64)
    told = printed.getvalue().splitlines()
    assert told[1] == (
        "Left out 4 files next to the 1 that are read (.png 2, .pdf 1, no ending and not UTF-8 "
        "text 1): their endings are not those of text; a pattern as the source, 'DIR/**', reads "
        "all files"
    )
    assert ".png" not in told[0]
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"the text is empty.*; Left out 4 files.*\.png 2, \.pdf 1"):
        documents(tmp_path)
