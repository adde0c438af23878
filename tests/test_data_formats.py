"""Text in the formats that people have: a document a record, bad ones named by their place."""

import csv
import dataclasses
import gzip
import io
import json
import re
import sys

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.json
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from tensorflow_datasets.proto import tf_example_generated_pb2 as protos

from jaxtrain.config.errors import UserError
from jaxtrain.data.source import is_store
from jaxtrain.data.text.formats import columnar
from jaxtrain.data.text.formats.saved_datasets import INFO_KEYS, STATE_KEYS
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores.prepare import prepare

TEXTS = [f'record {number}: "tea", \u2028\r\nand cake\n' for number in range(20)]


def documents(source, **settings):
    """The documents in their order, and the facts."""
    opened = TextData(source=str(source), sequence_length=2, **settings).open(seed=0)
    parts = [bytes(split.tokens).decode() for split in (opened.train, opened.heldout)]
    return [text for part in parts for text in part.split("\0")[:-1]], opened.facts


def refusal(source, **settings):
    with pytest.raises(UserError) as caught:
        documents(source, **settings)
    return str(caught.value)


def rows(texts, field="text"):
    return pa.table({"id": range(len(texts)), field: texts})


def write_lines(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))


def write_csv(path, texts, field="text"):
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerows([["id", field], *([number, text] for number, text in enumerate(texts))])


def write_parquet(path, texts, field="text"):
    pyarrow.parquet.write_table(rows(texts, field), path, row_group_size=7)


def write_stream(path, texts, field="text"):
    """As `datasets` writes it."""
    table = rows(texts, field)
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=6)


def write_arrow(path, texts, field="text"):
    table = rows(texts, field)
    with pyarrow.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=6)


def example(features):
    """A tf.train.Example by TensorFlow's own schema."""
    made = protos.Example()
    for name, value in features.items():
        feature = made.features.feature[name]
        kind = feature.bytes_list if isinstance(value[0], bytes) else feature.int64_list
        kind.value.extend(value)
    made.features.feature["score"].float_list.value.extend([0.5, 2.5])
    return made.SerializeToString()


def write_records(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def write_array_record(path, texts, field="text"):
    write_records(path, [example({"id": [7, -1], field: [text.encode()]}) for text in texts])


WRITERS = {
    "a.jsonl": write_lines,
    "a.CSV": write_csv,
    "a.tsv": write_csv,
    "a.parquet": write_parquet,
    "stream.arrow": write_stream,
    "file.arrow": write_arrow,
    "a.array_record": write_array_record,
    "a.array_record-00000-of-00001": write_array_record,
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_record_is_one_document_alone_and_in_a_folder(name, tmp_path, monkeypatch):
    monkeypatch.setattr(columnar, "_ROWS", 3)
    (tmp_path / "corpus").mkdir()
    WRITERS[name](tmp_path / "corpus" / name, TEXTS)
    for source in (tmp_path / "corpus" / name, tmp_path / "corpus"):
        found, facts = documents(source)
        assert found == TEXTS
        assert facts["documents"] == 20
    WRITERS[name](tmp_path / name, TEXTS, field="body")
    assert documents(tmp_path / name, text_field="body")[0] == TEXTS
    assert "did you mean 'body'?" in refusal(tmp_path / name, text_field="bodi")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_are_those_that_they_hold(name, ending, tmp_path):
    plain = tmp_path / "plain" / name
    plain.parent.mkdir()
    if name == "a.txt":
        plain.write_text("\n".join(TEXTS))
    else:
        WRITERS.get(name, write_csv)(plain, TEXTS)
    content, packed = plain.read_bytes(), tmp_path / "packed" / (name + ending)
    packed.parent.mkdir()

    def compress(part):
        return gzip.compress(part) if ending == ".gz" else pa.compress(part, "zstd", asbytes=True)

    middle = len(content) // 2  # two frames, as tools that work side by side write them
    whole = compress(content[:middle]) + compress(content[middle:])
    packed.write_bytes(whole)
    assert documents(packed.parent)[0] == documents(plain)[0]
    kind = "gzip" if ending == ".gz" else "Zstandard"
    for damaged in (whole[:-6], b"no such file at all"):
        packed.write_bytes(damaged)
        assert f"{packed} is not a complete {kind} file" in refusal(packed)


def test_a_pattern_names_files_in_any_folder(tmp_path):
    for number, name in enumerate(("a/x.jsonl", "a/b/x.jsonl", "y.jsonl", "a/z.txt", ".h/x.jsonl")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_lines(tmp_path / name, [f"{number} {text}" for text in TEXTS])
    for pattern, wanted in (
        ("*.jsonl", "2"),
        ("**/*.jsonl", "012"),
        ("a/*.jsonl", "0"),
        ("a/**/x.json?", "01"),
        ("[ay]*/*.txt", "3"),
    ):
        found = "".join(documents(f"{tmp_path}/{pattern}")[0])
        assert set(re.findall(r"(\d) record", found)) == set(wanted), pattern
    assert f"none of the 4 files under {tmp_path} matches" in refusal(f"{tmp_path}/*.csv")
    assert "no such file or folder" in refusal(f"{tmp_path}/nowhere/*.csv")
    (tmp_path / "odd[1].jsonl").write_bytes((tmp_path / "y.jsonl").read_bytes())
    assert len(documents(tmp_path / "odd[1].jsonl")[0]) == 20  # a path that is there is no pattern


def saved(folder, texts):
    """As `Dataset.save_to_disk` of datasets 4 writes it, two shards in an order of their own."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-00002.arrow" for number in (1, 0)]
    for name, part in zip(names, (texts[:8], texts[8:]), strict=True):
        write_stream(folder / name, part)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_folder_that_datasets_saved_is_read_by_its_splits(tmp_path):
    saved(tmp_path / "one", TEXTS)
    assert documents(tmp_path / "one")[0] == TEXTS
    both = tmp_path / "both"
    for split, texts in (("train", TEXTS), ("validation", TEXTS[::-1])):
        saved(both / split, texts)
    (both / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    assert documents(both)[0] == TEXTS
    assert documents(both, train_split="validation")[0] == TEXTS[::-1]
    data = TextData(source=str(both), sequence_length=8, heldout_split="validation")
    opened = data.open(seed=0)
    assert [opened.facts[f"{split}_documents"] for split in ("train", "heldout")] == [20, 20]
    prepare(data, tmp_path / "store", workers=1, progress=lambda characters, tokens: None)
    store = TextData(source=str(tmp_path / "store"), sequence_length=8).open(seed=0)
    assert store.digest == opened.digest
    assert "did you mean 'validation'?" in refusal(both, heldout_split="valid")
    assert "did you mean 'train'?" in refusal(both, train_split="trian")
    assert "only a 'tfds:NAME' source" in refusal(tmp_path / "one", heldout_split="validation")
    (both / "train" / "data-00000-of-00002.arrow").unlink()
    assert "data-00000-of-00002.arrow, which is not there" in refusal(both)
    (both / "train" / "state.json").write_text("{")
    assert "state.json is not JSON" in refusal(both)


# As `datasets` 5.2 writes them: Dataset.save_to_disk and the fields of DatasetInfo.
STATE = {
    "_fingerprint": "3f1c", "_format_columns": ["text"], "_format_kwargs": {},
    "_format_type": "numpy", "_output_all_columns": False, "_split": "train",
}  # fmt: skip
INFO = {
    "description": "", "citation": "", "homepage": "", "license": "", "features": {"text": {}},
    "post_processed": None, "supervised_keys": None, "builder_name": "text",
    "dataset_name": "birds", "config_name": "default", "version": {"version_str": "0.0.0"},
    "splits": {}, "download_checksums": {}, "download_size": 1, "post_processing_size": None,
    "dataset_size": 1, "size_in_bytes": 2,
}  # fmt: skip
INDICES = {"_indices_data_files": [{"filename": "indices.arrow"}]}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("state.json", {"_indices_data_files": None}, None),
        ("state.json", INDICES, "_indices_data_files = [{'filename': 'indices.arrow'}]; it must"),
        ("state.json", {"_indexes": {"a": 1}}, "_indexes = {'a': 1}; it must be None"),
        ("state.json", {"_shuffled": True}, "_shuffled = True is an unknown key"),
        ("dataset_info.json", {"post_processed": {"a": 1}}, "post_processed = {'a': 1}; it must"),
        ("dataset_info.json", {"order": [1, 0]}, "order = [1, 0] is an unknown key"),
        ("state.json", {"_data_files": [{"filename": "data-00000-of-00002.arrow", "take": 3}]},
         "_data_files.take = 3; it must be None"),
        ("state.json", {"_data_files": 7}, "_data_files = 7; it must be an object"),
        ("dataset_info.json", {"features": 3}, None),
    ],
)  # fmt: skip
def test_every_key_of_a_saved_folder_is_read_or_rejected(tmp_path, name, changes, words):
    saved(tmp_path / "one", TEXTS)
    files = json.loads((tmp_path / "one" / "state.json").read_text())["_data_files"]
    content = {"state.json": {**STATE, "_data_files": files}, "dataset_info.json": dict(INFO)}
    content[name] |= changes
    for file, one in content.items():
        (tmp_path / "one" / file).write_text(json.dumps(one))
    if words is None:
        assert documents(tmp_path / "one")[0] == TEXTS
    else:
        assert words in refusal(tmp_path / "one")


def test_the_tables_know_every_key_of_the_installed_library(tmp_path):
    """The fields of its DatasetInfo, and what it saves of a plain and of a shuffled dataset."""
    datasets = pytest.importorskip("datasets")
    assert {field.name for field in dataclasses.fields(datasets.DatasetInfo)} <= set(INFO_KEYS)
    plain = datasets.Dataset.from_dict({"text": TEXTS})
    plain.save_to_disk(tmp_path / "plain")
    plain.shuffle(seed=1).save_to_disk(tmp_path / "shuffled")
    for folder in ("plain", "shuffled"):
        for file, table in (("state.json", STATE_KEYS), ("dataset_info.json", INFO_KEYS)):
            assert set(json.loads((tmp_path / folder / file).read_text())) <= set(table)
    assert documents(tmp_path / "plain")[0] == TEXTS
    assert documents(tmp_path / "shuffled")[0] == plain.shuffle(seed=1)["text"][:]


def test_what_the_readers_of_pyarrow_lack():
    """Why CSV and JSON lines are read by Python's csv and json: once this fails, pyarrow can."""
    bad = io.BytesIO(b"id,text\n1,good\n2\n3,x\n")
    skipped = []
    options = pyarrow.csv.ParseOptions(
        newlines_in_values=True, invalid_row_handler=lambda row: skipped.append(row) or "skip"
    )
    assert pyarrow.csv.read_csv(bad, parse_options=options)["text"].to_pylist() == ["good", "x"]
    assert [row.number for row in skipped] == [None]  # no position
    # One record that is no text, or no JSON, ends the reading of all of them.
    for line in (b'{"text": 1}', b'{"text": "a"'):
        lines = io.BytesIO(b'{"text": "good"}\n' + line + b'\n{"text": "x"}\n')
        with pytest.raises(pa.ArrowInvalid, match="JSON parse error"):
            pyarrow.json.read_json(lines)


BAD = [
    ("a.csv", b"id,text\n1,good\n2\n3,x\n", "a.csv:3: 1 fields, where the first line names 2"),
    ("a.csv", b'id,text\n1,"two\nlines"\n\n2,b,c\n3,x\n', "a.csv:5: 3 fields"),
    ("a.csv", b"id,text\n1,good\n2,\xff\n3,x\n", "a.csv:3: 'text' is not UTF-8 text"),
    ("a.parquet", ["good", None, "x"], "a.parquet: row 2: 'text' is null"),
    ("a.arrow", ["good", "x", None], "a.arrow: row 3: 'text' is null"),
    ("a.array_record", [{"text": [b"\xff"]}], "record 2: 'text' is not UTF-8 text (byte 0)"),
    ("a.array_record", [{"text": [b"a", b"b"]}], "record 2: 'text' is not a single text, but 2"),
    ("a.array_record", [{"txt": [b"a"]}], "record 2: no feature 'text'; did you mean 'txt'?"),
    ("a.array_record", b"\x0a\x50", "record 2: no tf.train.Example (Error parsing message"),
    ("a.array_record", b"\x0a\xff", "record 2: no tf.train.Example"),
]


@pytest.mark.parametrize(("name", "content", "told"), BAD)
def test_a_bad_record_is_named_or_left_out_as_asked(name, content, told, tmp_path):
    path = tmp_path / name
    if path.suffix == ".csv":
        path.write_bytes(content)
    elif path.suffix == ".array_record":
        good = example({"text": [b"good"]})
        bad = content if isinstance(content, bytes) else example(content[0])
        write_records(path, [good, bad, example({"text": [b"x"]})])
    else:
        (write_parquet if path.suffix == ".parquet" else write_stream)(path, content)
    (tmp_path / "more.txt").write_text("more words " * 30)
    message = refusal(tmp_path)
    assert "1 of 3 records cannot be used: " in message
    assert told in message
    assert "set TextData.bad_records = 1" in message
    found, facts = documents(tmp_path, bad_records=1, heldout_fraction=0.4)
    assert [text for text in found if "more" not in text][-1] == "x"
    assert facts["bad_records"] == 1
    assert told in facts["first_bad_records"]
    folder = tmp_path / "store"
    data = TextData(source=str(tmp_path), bad_records=1, heldout_fraction=0.4)
    store = prepare(data, folder, workers=1, progress=lambda characters, tokens: None)
    assert told in store.facts["first_bad_records"]


def test_files_that_are_cut_short_or_something_else_are_named(tmp_path):
    for name in ("a.parquet", "stream.arrow", "file.arrow", "a.array_record"):
        path = tmp_path / name
        WRITERS[name](path, TEXTS * 50)
        whole = path.read_bytes()
        for content in (whole[: len(whole) // 2], b"something else", b""):
            path.write_bytes(content)
            assert f"{path} is not a complete " in refusal(path)
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,good\n2,"no end\n3,x\n')
    assert f"{path} is not a complete CSV file (line 4: unexpected end of data)" in refusal(path)
    path.write_text("id,body\n1,good\n")
    assert f"TextData.text_field = 'text': {path} has no such column" in refusal(path)
    path = tmp_path / "b.parquet"
    pyarrow.parquet.write_table(pa.table({"text": [1, 2]}), path)
    assert f"in {path} it holds int64, but it must hold strings" in refusal(path)
    assert "bad_records=-1; use 0 or more" in refusal(path, bad_records=-1)


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz", "b.csv", "b.tsv"])
def test_an_empty_shard_among_others_is_named_and_nothing_is_half_written(name, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_lines(corpus / "a.jsonl", TEXTS)
    (corpus / name).write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    told = f"TextData.source: {corpus / name} is empty, without any record"
    assert told in refusal(corpus)
    assert told in refusal(str(corpus / "*.*"))
    store = tmp_path / "store"
    data = TextData(source=str(corpus))
    with pytest.raises(UserError, match="is empty, without any record"):
        prepare(data, store, workers=1, progress=lambda characters, tokens: None)
    assert not is_store(store)
    (corpus / name).unlink()
    assert documents(corpus)[1]["documents"] == len(TEXTS)


def test_a_long_field_of_a_csv_file_is_read(tmp_path):
    write_csv(tmp_path / "a.csv", ["x" * 300_000, "some words"] * 20)
    assert documents(tmp_path / "a.csv", heldout_fraction=0.1)[0][0] == "x" * 300_000


def test_without_pyarrow_one_sentence_names_the_extra(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", TEXTS)
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "run: pip install 'jaxtrain[formats]'" in refusal(tmp_path / "a.parquet")
