"""What a source leaves out is reported; files without an ending are read; one text is held out."""

import json

import numpy as np
import pytest

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.text.chat.chat import ChatData
from jaxtrain.data.text.source import TextData

WORDS = "so many words to read in one line\n"


def write(folder, **texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def opened(source, **settings):
    return TextData(source=source, sequence_length=16, **settings).open(seed=0)


def text_of(examples):
    """The bytes of rows, byte 0 ending each document."""
    tokens = examples.tokens[:]
    return bytes(np.asarray(tokens, np.uint8)).decode()


def test_text_files_without_an_ending_are_read(tmp_path):
    names = {str(49960 + number): f"{number} {WORDS}" * 3 for number in range(4)}
    cut = "é" * 5000  # whose character at byte 8,191 is cut where the file's beginning ends
    folder = write(
        tmp_path / "news", **names, wide="x" + cut, weights=b"\x80\x04\x95", zero=b"a\0b"
    )
    found = opened(folder)
    assert found.facts["documents"] == 5
    assert found.facts["files_left_out"] == 2
    assert found.facts["endings_left_out"] == "no ending and not UTF-8 text 2"
    assert "3 so many words" in text_of(found.train)
    (tmp_path / "news" / "later").write_bytes(b"a" * 9000 + b"\xff")
    with pytest.raises(UserError, match=r"later is not UTF-8 text \(byte 9000\); convert it"):
        opened(folder)


def test_a_mixture_reports_what_each_source_leaves_out(tmp_path, capsys):
    web = write(tmp_path / "web", **{f"{n}.txt": WORDS * 9 for n in range(3)}, **{"a.webp": "x"})
    code = write(tmp_path / "code", **{f"{n}.py": WORDS * 9 for n in range(3)}, **{"b.o": "x"})
    data = TextData(sequence_length=16)
    facts = Mixture(data=data, sources={"web": web, "code": code}).open(seed=0).facts
    assert (facts["files"], facts["files_left_out"]) == (6, 2)
    assert facts["endings_left_out"] == "web: .webp 1; code: .o 1"
    file = tmp_path / "mix.gin"
    file.write_text(
        "include 'gpt_quickstart.gin'\nTrain.data = @Mixture()\nMixture.data = @TextData()\n"
        f"Mixture.sources = {{'web': {web!r}, 'code': {code!r}}}\n"
    )
    assert main(["data", str(file), "--examples", "0"]) == 0
    said = capsys.readouterr().out
    assert "Left out 2 files next to the 6 that are read (web: .webp 1; code: .o 1)" in said
    assert "web: Held out the last of 3 documents, because TextData.heldout_fraction = 0.05" in said


def test_a_folder_whose_files_are_all_left_out_says_how_to_read_them(tmp_path, capsys):
    folder = write(tmp_path / "logs", **{f"{number}.log": WORDS for number in range(3)})
    for command in (
        ["data", "gpt_quickstart", "-b", f"TextData.source={folder!r}"],
        ["prepare", folder, "--tokenizer", "byte", "--out", str(tmp_path / "s")],
    ):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "(.log 3)" in said
        assert "'DIR/**', reads all files" in said
    assert opened(f"{folder}/**").facts["documents"] == 3


def test_of_a_few_documents_the_last_is_held_out_and_said(tmp_path, capsys):
    folder = write(tmp_path / "few", **{f"{n}.txt": f"{n} {WORDS}" for n in range(8)})
    found = opened(folder)
    assert (found.facts["train_documents"], found.facts["heldout_documents"]) == (7, 1)
    assert text_of(found.heldout) == f"7 {WORDS}\0"
    assert found.facts["heldout_rule"] == (
        "Held out the last of 8 documents, because TextData.heldout_fraction = 0.05 of them is "
        "less than one"
    )
    store = str(tmp_path / "store")
    assert main(["prepare", folder, "--tokenizer", "byte", "--out", store]) == 0
    of_store = opened(store)
    assert of_store.digest == found.digest
    assert of_store.facts["heldout_rule"] == found.facts["heldout_rule"]
    # Where the fraction holds one out, nothing is decided for it.
    enough = opened(folder, heldout_fraction=0.125)
    assert text_of(enough.heldout) == f"7 {WORDS}\0"
    assert "heldout_rule" not in enough.facts


def test_of_one_document_a_part_is_held_out_and_no_rule_is_said(tmp_path):
    folder = write(tmp_path / "one", **{"0.txt": WORDS * 40})
    store = str(tmp_path / "store")
    assert main(["prepare", folder, "--tokenizer", "byte", "--out", store]) == 0
    for found in (opened(folder), opened(store)):
        assert (found.facts["train_documents"], found.facts["heldout_documents"]) == (1, 1)
        assert "heldout_rule" not in found.facts
    two = opened(write(tmp_path / "two", **{f"{n}.txt": f"{n} {WORDS}" for n in range(2)}))
    assert "the last of 2 documents" in two.facts["heldout_rule"]


def test_conversations_report_files_and_hold_out_one(tmp_path):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    lines = "".join(json.dumps({"messages": talk}) + "\n" for _ in range(3))
    folder = write(tmp_path / "talks", **{"a.jsonl": lines, "notes.md": "x", "b.csv": "x"})
    facts = ChatData(source=folder, chat_template="chatml").open(seed=0).facts
    assert (facts["train_documents"], facts["heldout_documents"]) == (2, 1)
    assert facts["endings_left_out"] == ".csv 1, .md 1"
    assert facts["heldout_rule"].startswith("Held out the last of 3 records, because ChatData.")
