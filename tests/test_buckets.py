"""gs:// paths, data, locks and staging: the real gcsfs talks to a stand-in of a bucket."""

import concurrent.futures
import contextlib
import dataclasses
import json
import sys
import threading
import time

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from etils import epath
from gcs_stand_in import serving
from PIL import Image
from test_data_tfds import FIXTURES, PREPARE, TEXTS, data_dir, documents  # noqa: F401 - fixtures

from jaxtrain.__main__ import main
from jaxtrain.config import buckets
from jaxtrain.config.buckets import BucketAccessError, BucketError, to_path
from jaxtrain.config.errors import UserError
from jaxtrain.data.images.source import ImageData
from jaxtrain.data.source import existing_path
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores import prepare as transfer
from jaxtrain.data.text.stores.prepare import prepare
from jaxtrain.run.attempts import lock, records
from jaxtrain.run.attempts.folder import RunFolder
from jaxtrain.run.attempts.lock import RunLock, Superseded
from jaxtrain.run.attempts.records import Claim
from jaxtrain.run.attempts.supervise import Supervision, supervise
from jaxtrain.run.cluster.authentication import RunToken
from jaxtrain.run.feed import with_stores

pytest.importorskip("gcsfs", reason="pip install 'jaxtrain[gcs]'")


@pytest.fixture(scope="module")
def gcs():
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def _fresh(gcs):
    """An empty bucket `box`, where everything is permitted."""
    gcs.buckets["box"] = {}
    gcs.requests.clear()
    yield
    gcs.refuse = lambda *_: None
    beating = [thread for thread in threading.enumerate() if thread.name == "lock's beat"]
    assert beating == []  # one that is left writes into the next test's bucket


# -- paths ----------------------------------------------------------------------------------------


def test_a_path_in_a_bucket_does_what_one_on_a_disk_does(tmp_path):
    def story(root):
        (root / "a").mkdir(parents=True, exist_ok=True)
        (root / "a" / "x.txt").write_bytes(b"one")
        (root / "a" / "b").mkdir(parents=True, exist_ok=True)
        (root / "a" / "b" / "y").write_bytes(b"")
        (root / "a" / "x.txt").write_bytes(b"two\n\n--\n")
        (root / "gone").unlink(missing_ok=True)
        yield [path.name for path in sorted((root / "a").iterdir())]
        for path in (root, root / "a", root / "a" / "x.txt", root / "a" / "b" / "y", root / "a/x"):
            yield path.exists(), path.is_dir(), path.is_file(), path.is_symlink()
        x = root / "a" / "x.txt"
        yield x.read_bytes(), x.read_text(), x.name, x.stem, x.suffix, x.parent == root / "a"
        yield x.relative_to(root).as_posix(), str(x).removeprefix(str(root))
        x.unlink()
        yield x.exists(), [path.name for path in (root / "a").iterdir()]
        for mistake in (x.unlink, x.read_bytes, lambda: list((root / "no").iterdir())):
            with pytest.raises(FileNotFoundError):
                mistake()

    assert list(story(to_path("gs://box/run"))) == list(story(tmp_path))


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("gs://box", "gs://box"),
        ("gs://box/", "gs://box"),
        ("gs:/box/run", "gs://box/run"),  # what pathlib makes of it
        ("gs://box//run/./x/", "gs://box/run/x"),
    ],
)
def test_an_address_has_one_form(name, address):
    assert str(to_path(name)) == address
    assert to_path(to_path(name)) == to_path(address)


@pytest.mark.parametrize(
    "name", ["gs://", "gs://box/../c", "gs://../b", "gs://me:secret@b/x", "gs://box/*"]
)
def test_an_address_that_is_none_is_refused(name):
    with pytest.raises(UserError, match="write gs://BUCKET/FOLDER") as refused:
        to_path(name)
    assert "secret" not in str(refused.value)


def test_other_storages_are_refused():
    with pytest.raises(UserError, match="only gs:// URLs and local paths are supported"):
        to_path("s3://bucket/run")


@pytest.mark.parametrize("name", ["../out.txt", "a/../../out.txt", "a//b.txt", "./c.txt"])
def test_names_that_lead_out_are_refused_wherever_they_are_listed(gcs, name):
    gcs.put("box", f"text/{name}", b"text")
    with pytest.raises(UserError, match="holds an object called"):
        to_path("gs://box/text").list_objects()
    with pytest.raises(UserError, match="holds an object called"):
        TextData(source="gs://box/text").open(seed=0)


def test_what_epath_lacks(gcs):
    """Why bucket paths are not `etils.epath.Path`: each line is a promise of ours."""
    for name in ("run/a.txt", "run/b~", "run/../out.txt"):
        gcs.put("box", name, b"text")
    (ours := to_path("gs://box/run/a.txt")).exists()  # opens gcsfs, without TensorFlow
    root = epath.Path("gs://box/run")
    # Leaves out b~, and goes out of the folder.
    assert [str(path) for path in root.iterdir()] == ["gs://box/run/..", "gs://box/run/a.txt"]
    with pytest.raises(ValueError, match="mode='x' is not one of"):  # so there is no lock
        (root / "lock").open("xb")
    with contextlib.suppress(InterruptedError), (root / "half").open("wb") as stream:
        stream.write(b"hal")
        raise InterruptedError
    assert gcs.read("box", "run/half") == b"hal"

    def count_requests(call):
        gcs.requests.clear()
        call()
        return len(gcs.requests)

    assert count_requests(ours.read_bytes) == 1 < count_requests((root / "a.txt").read_bytes)
    # Without the content, which epath reads and writes again.
    assert count_requests(lambda: ours.copy_to(to_path("gs://box/run/c"))) == 1
    assert count_requests(lambda: (root / "a.txt").copy(root / "d")) > 4
    gcs.refuse = lambda *_: 401
    with pytest.raises(Exception, match="401") as raised:
        (root / "a.txt").read_bytes()
    assert not isinstance(raised.value, OSError)
    with pytest.raises(BucketAccessError):
        ours.read_bytes()


# -- data -----------------------------------------------------------------------------------------


def test_text_from_a_bucket_is_the_text_on_a_disk(gcs, tmp_path):
    texts = {
        "b/two.txt": "second\n" * 40,
        "a.txt": "first\n" * 40,
        "B.md": "third, grün\n" * 40,
        ".hidden/x.txt": "no",
        "picture.bin": "no",
    }
    for name, text in texts.items():
        file = tmp_path / "corpus" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        gcs.put("box", f"corpus/{name}", text.encode())
    gcs.put("box", "corpus/empty/", b"")  # what some tools leave for a folder
    settings = {"sequence_length": 8, "heldout_fraction": 0.4}
    for source in ("corpus", "corpus/a.txt"):
        here = TextData(source=str(tmp_path / source), **settings).open(seed=0)
        there = TextData(source=f"gs://box/{source}", **settings).open(seed=0)
        assert here.digest == there.digest
        assert here.facts["documents"] == there.facts["documents"]


def test_records_and_patterns_in_a_bucket_are_those_of_a_disk(gcs, tmp_path):
    texts = [f"text {number}\n" for number in range(20)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text('text\n"' + '"\n"'.join(texts) + '"\n')
    for file in tmp_path.iterdir():
        gcs.put("box", f"corpus/{file.name}", file.read_bytes())
    for pattern in ("", "/*", "/b.*"):
        here = TextData(source=f"{tmp_path}{pattern}", sequence_length=8).open(seed=0)
        there = TextData(source=f"gs://box/corpus{pattern}", sequence_length=8).open(seed=0)
        assert here.digest == there.digest
    assert here.facts["documents"] == 20


def test_a_store_in_a_bucket_is_fetched_once_in_ranges(gcs, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(transfer, "_RANGE_BYTES", 1000)
    (tmp_path / "text.txt").write_text("".join(f"line {number}\n" for number in range(900)))
    text = TextData(source=str(tmp_path / "text.txt"), sequence_length=8)
    prepare(text, tmp_path / "store", workers=1, progress=lambda characters, tokens: None)
    for file in (tmp_path / "store").iterdir():
        gcs.put("box", f"stores/one/{file.name}", file.read_bytes())
    there = TextData(source="gs://box/stores/one", sequence_length=8)
    whole = transfer.BucketPath.read_range
    asked = []

    def read_range(path, begin, end):
        asked.append((path.name, begin))
        if len(asked) == 4:
            raise BucketError("gone")
        return whole(path, begin, end)

    monkeypatch.setattr(transfer.BucketPath, "read_range", read_range)
    with pytest.raises(BucketError, match="gone"):
        with_stores(there, lambda line: None)
    said = []
    stored = with_stores(there, said.append)  # goes on where it was
    assert asked[3] == asked[4]
    assert len(asked) == len(set(asked)) + 1
    assert f"fetched to {tmp_path / 'cache'}" in said[0]
    asked.clear()
    assert with_stores(there, said.append) == stored
    assert asked == []
    assert len(said) == 1
    expected = text.open(seed=0).digest
    assert stored.open(seed=0).digest == there.open(seed=0).digest == expected


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {number}\n" for number in range(900)))
    return file


def test_a_store_is_made_in_a_bucket_and_goes_on_where_it_was(
    gcs, text_file, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    words = ["prepare", str(text_file), "--out", "gs://box/stores/two"]
    gcs.refuse = lambda method, _, name: 403 if method == "POST" else None
    assert main(words) == 2  # before anything is made
    assert "role Storage Object User" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
    gcs.refuse = lambda method, _, name: 403 if method == "POST" and "train.o" in name else None
    assert main(words) == 2
    assert "role Storage Object User" in capsys.readouterr().err
    assert gcs.names("box") == ["stores/two/train.tokens"]  # no store yet
    gcs.refuse = lambda *_: None
    gcs.requests.clear()
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "bytes in gs://box/stores/two" in told
    assert "-b 'TextData.source=\"gs://box/stores/two\"'" in told
    assert all("train.tokens" not in name for method, _, name in gcs.requests if method == "POST")
    text = TextData(source=str(text_file), sequence_length=8)
    there = TextData(source="gs://box/stores/two", sequence_length=8)
    assert there.open(seed=0).digest == text.open(seed=0).digest
    assert main(words) == 2
    assert "there is a store in it already" in capsys.readouterr().err
    gcs.put("box", "other/a.txt", b"text")
    assert main([*words[:-1], "gs://box/other"]) == 2
    assert "other objects in it, such as a.txt" in capsys.readouterr().err


# The cases that are left run the same code.
@pytest.mark.slow_cases("stream", "padded")
@pytest.mark.parametrize("packing", ["stream", "best_fit", "padded"])
def test_of_a_large_store_each_row_is_one_read(gcs, text_file, tmp_path, monkeypatch, packing):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(transfer, "WHOLE_BYTES", 1000)
    lines = [json.dumps({"text": line}) for line in text_file.read_text().split("\n")]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    # Documents that fill a row alone, but in a stream.
    text = TextData(source=str(tmp_path / "lines.jsonl"), sequence_length=8, packing=packing)
    prepare(text, tmp_path / "store", workers=1, progress=lambda characters, tokens: None)
    for file in (tmp_path / "store").iterdir():
        gcs.put("box", f"stores/large/{file.name}", file.read_bytes())
    there = dataclasses.replace(text, source="gs://box/stores/large")
    said = []
    assert with_stores(there, said.append) == there
    assert f"tokens ({10 * 7 + 90 * 8 + 800 * 9:,} bytes) stay in the bucket" in said[0]
    opened, expected = there.open(seed=0), text.open(seed=0)
    assert opened.digest == expected.digest
    asked = lambda: [name for *_, name in gcs.requests if name.endswith(".tokens")]  # noqa: E731
    gcs.requests.clear()
    rows = np.array([3, 400, 0, len(expected.train) - 1])
    if packing == "padded":
        rows = rows[:3]
    for _ in range(2):  # the second time they are still there
        found = opened.train.examples(rows)
        jax.tree.map(np.testing.assert_array_equal, found, expected.train.examples(rows))
        assert len(asked()) == len(rows)
    name = "stores/large/train.tokens"
    gcs.put("box", name, gcs.read("box", name)[:-10])
    with pytest.raises(UserError, match="train.tokens was changed: it ends within its tokens"):
        opened.train.tokens[-20:]
    with pytest.raises(UserError, match="train.tokens was changed after it was prepared"):
        there.open(seed=0)


def test_a_tokenizer_from_a_bucket_is_that_of_the_file(gcs, tmp_path):
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
    made.save(str(tmp_path / "t.json"))
    gcs.put("box", "t.json", (tmp_path / "t.json").read_bytes())
    here = TextData(tokenizer=str(tmp_path / "t.json")).open_tokenizer()
    assert TextData(tokenizer="gs://box/t.json").open_tokenizer().digest == here.digest


def test_images_from_a_bucket_are_those_on_a_disk(gcs, tmp_path):
    for number in range(16):
        file = tmp_path / "images" / ("bee", "ant")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), number * 15).save(file)
        name = file.relative_to(tmp_path).as_posix()
        gcs.put("box", name, file.read_bytes())
    settings = {"image_size": 4, "num_classes": 2, "heldout_fraction": 0.5}
    here = ImageData(source=str(tmp_path / "images"), **settings).open(seed=0)
    there = ImageData(source="gs://box/images", **settings).open(seed=0)
    assert here.digest == there.digest
    for index in range(len(here.train)):
        mine, its = (found.train.example(index, None) for found in (here, there))
        np.testing.assert_array_equal(mine.inputs, its.inputs)
        assert mine.targets == its.targets
    listings = [name for _, _, name in gcs.requests if not name.endswith(".png")]
    # Seven as it is, and one more where a request is sent again: none for each image.
    assert len(listings) < 16, "one listing has the names and the sizes"


def test_a_prepared_tfds_is_read_from_a_bucket(gcs, data_dir, tmp_path):  # noqa: F811
    for file in to_path(data_dir).rglob("*"):
        if file.is_file():
            gcs.put("box", f"tfds/{file.relative_to(data_dir).as_posix()}", file.read_bytes())
    settings = {"source": "tfds:tiny_text", "sequence_length": 8, "heldout_fraction": 0.25}
    here = TextData(data_dir=data_dir, **settings).open(seed=0)
    there = TextData(data_dir="gs://box/tfds", **settings).open(seed=0)
    assert here.digest == there.digest
    assert documents(there.train)


# -- what is rejected ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "status", "sentence"),
    [
        ("gs://nowhere/x", None, r"TextData.source = gs://nowhere/x: there is no bucket 'nowhere'"),
        (
            "gs://box/corpsu",
            None,
            r"'gs://box/corpsu': the bucket has no such .*'gs://box/corpus'\?",
        ),
        ("gs://box/x", 403, "TextData.source = gs://box/x: the bucket 'box' does not permit it"),
        ("gs://box/x", 401, "gcloud auth application-default login"),
        ("s3://box/x", None, r"TextData.source = 's3://box/x': .*only gs:// URLs"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused_in_a_sentence(gcs, source, status, sentence):
    gcs.put("box", "corpus/a.txt", b"text")
    gcs.refuse = lambda *_: status
    with pytest.raises(UserError, match=sentence) as refused:
        existing_path("TextData.source", source)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [(403, "does not permit it"), (None, "there is no bucket 'nowhere'")],
)
@pytest.mark.parametrize(
    "command",
    [
        ["train", "gpt_quickstart"],
        ["eval"],
        ["inspect"],
        ["generate", "--prompt", "x"],
        ["supervise", "--", "train", "gpt_quickstart"],
    ],
    ids=lambda command: command[0],
)
def test_a_run_in_a_bucket_that_cannot_be_is_refused(gcs, command, status, sentence, capsys):
    gcs.refuse = lambda *_: status
    bucket = "nowhere" if status is None else "box"
    assert main([*command, "--workdir", f"gs://{bucket}/run"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"jaxtrain: --workdir gs://{bucket}/run: ")
    assert sentence in told
    assert len(told.splitlines()) == 1


def test_a_run_that_is_not_there_is_refused_with_the_nearest_that_is(gcs, capsys):
    gcs.put("box", "runs/first/config.gin", b"")
    assert main(["eval", "--workdir", "gs://box/runs/frist"]) == 2
    assert "did you mean 'gs://box/runs/first'?" in capsys.readouterr().err


def test_a_bucket_that_may_be_read_but_not_written_is_refused_before_anything_begins(gcs, capsys):
    gcs.refuse = lambda method, *_: 403 if method != "GET" else None
    assert main(["train", "gpt_quickstart", "--workdir", "gs://box/run"]) == 2
    assert "Storage Object User" in capsys.readouterr().err
    assert gcs.names("box") == []


def test_without_the_extra_a_bucket_is_refused_and_the_doctor_says_how_to_get_it(
    monkeypatch, capsys
):
    buckets._files.cache_clear()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert main(["eval", "--workdir", "gs://box/run"]) == 2
    assert "pip install 'jaxtrain[gcs]'" in capsys.readouterr().err
    buckets._files.cache_clear()


def test_a_bucket_that_is_away_is_no_mistake_of_the_users(gcs):
    gcs.refuse = lambda *_: 418  # nothing that is asked again
    with pytest.raises(BucketError, match="did not answer"):
        buckets.require("--workdir", to_path("gs://box/run"))


# -- locks ----------------------------------------------------------------------------------------


def wait_for(seen) -> None:
    """Looks until it is so; what never comes fails."""
    until = time.monotonic() + 120
    while not seen():
        assert time.monotonic() < until


def claim(host: str, machine: str = "another machine") -> Claim:
    return Claim(
        host=host, machine=machine, pid=1, process_start="", token=host, beat_seconds=0.05,
        started=0.0,
    )  # fmt: skip


def test_of_many_who_take_an_attempt_at_once_one_has_it():
    workdir = to_path("gs://box/run")
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        won = list(threads.map(lambda n: records.take(workdir, 1, claim(f"host{n}")), range(16)))
    assert sum(won) == 1
    assert Claim.read(workdir / "attempts" / "1.json").host == f"host{won.index(True)}"


def test_the_lock_in_a_bucket_shows_itself_and_is_given_back(gcs):
    with RunLock.acquire("gs://box/run", beat_seconds=0.02) as held:
        assert held.attempt == 1
        with pytest.raises(
            UserError, match="--workdir gs://box/run: attempt 1, process .* is writ"
        ):
            RunLock.acquire("gs://box/run")
        first = lock._beat(held.workdir, 1)
        wait_for(lambda: lock._beat(held.workdir, 1) != first)
    assert gcs.names("box") == ["run/attempts/1.json"]
    with RunLock.acquire("gs://box/run") as next_one:
        assert next_one.attempt == 2


def test_a_holder_elsewhere_that_stands_still_is_followed_and_fenced(gcs):
    workdir = to_path("gs://box/run")
    assert records.take(workdir, 1, claim("elsewhere"))
    frozen = RunLock(workdir, 1)
    frozen.check()
    said = []
    with RunLock.acquire(workdir, beat_seconds=0.02, report=said.append) as mine:
        assert mine.attempt == 2
        assert "attempt 1, process 1 on elsewhere, sent no heartbeat" in said[0]
        with pytest.raises(Superseded, match="attempt 2 took it over"):
            frozen.check()
        # What the frozen one wrote into lock.json as it woke is put right by the next beat.
        gcs.put("box", "run/lock.json", json.dumps({"attempt": 1}).encode())
        wait_for(lambda: records.attempt_in(records.read(workdir / "lock.json")) == 2)
        assert records.newest_attempt(workdir) == 2


# -- staging --------------------------------------------------------------------------------------


def test_what_changed_is_pushed_and_nothing_else(gcs):
    gcs.put("box", "run/metrics.jsonl", b"1\n")
    folder = RunFolder(to_path("gs://box/run"), pull=["metrics.jsonl", "goodput.json"])
    with (folder.local / "metrics.jsonl").open("a") as file:
        gcs.requests.clear()
        folder.push()
        assert gcs.requests == []
        file.write("2\n")
        file.flush()
        (folder.local / "tensorboard").mkdir()
        (folder.local / "tensorboard" / "events").write_bytes(b"e")
        (folder.local / ".half.tmp").write_bytes(b"half")
        folder.push()
    assert gcs.names("box") == ["run/metrics.jsonl", "run/tensorboard/events"]
    assert gcs.read("box", "run/metrics.jsonl") == b"1\n2\n"
    (folder.local / "loss.png").write_bytes(b"png")
    gcs.requests.clear()
    folder.close()
    assert [method for method, *_ in gcs.requests] == ["POST"]
    assert "run/loss.png" in gcs.names("box")
    assert not folder.local.exists()


def test_what_cannot_be_pushed_stays_on_this_machine_and_people_are_told(gcs):
    told = []
    folder = RunFolder(to_path("gs://box/run"), report=told.append)
    (folder.local / "metrics.jsonl").write_text("1\n")
    gcs.refuse = lambda *_: 403
    with pytest.raises(BucketAccessError):
        folder.push()
    folder.close()
    assert str(folder.local) in told[-1]
    assert (folder.local / "metrics.jsonl").read_text() == "1\n"


def test_an_attempt_that_was_superseded_pushes_nothing(gcs):
    def superseded():
        raise Superseded(to_path("gs://box/run"), 1, 2)

    folder = RunFolder(to_path("gs://box/run"), may_write=superseded)
    (folder.local / "metrics.jsonl").write_text("old\n")
    with pytest.raises(Superseded):
        folder.push()
    assert gcs.names("box") == []


def test_an_attempt_that_the_bucket_is_slow_to_show_is_still_ours(gcs):
    asked = []

    def not_at_first(method, _bucket, name):
        if method == "GET" and name.endswith("attempts/1.json"):
            asked.append(name)
            return 404 if len(asked) == 1 else None
        return None

    gcs.refuse = not_at_first
    held = RunLock.acquire("gs://box/run")
    assert (held.attempt, len(asked) > 1) == (1, True)
    held.release()


# -- supervisor -----------------------------------------------------------------------------------

COMMAND = """
import json, os, sys
from jaxtrain.run.attempts.lock import RunLock
from jaxtrain.run.attempts.records import write_exit
lock = RunLock.acquire("gs://box/run", report=print)
step = 10 * lock.attempt
(lock.workdir / "checkpoints" / str(step) / "manifest.json").write_bytes(b"{}")
if lock.attempt < 3:
    os._exit(9)
write_exit(lock.workdir, status="done", reason="", step=step, attempt=lock.attempt)
lock.release()
"""


# Starts Python; each request is in the fast part.
@pytest.mark.slow
def test_a_supervisor_follows_a_run_in_a_bucket(gcs):
    said = []
    settings = Supervision(max_restarts_without_progress=1, backoff_seconds=0.0)
    command = [sys.executable, "-c", COMMAND]
    assert supervise(command, "gs://box/run", settings=settings, report=said.append) == 0
    assert [line.partition(";")[0] for line in said] == [
        "attempt 1: ended with status 9 (newest checkpoint: step 10)",
        "attempt 2: ended with status 9 (newest checkpoint: step 20)",
    ]
    first = json.loads(gcs.read("box", "run/attempts/1.json"))
    assert (first["status"], first["step_before"], first["step_after"]) == (9, None, 10)
    assert json.loads(gcs.read("box", "run/exit.json"))["status"] == "done"


def test_a_run_in_a_bucket_keeps_its_token_there(gcs):
    file = to_path("gs://box/run/attempts/token")
    assert RunToken({}, file).find() is None
    made = RunToken({}, file).make()
    assert RunToken({}, file).find() == RunToken({}, file).make() == made
    assert gcs.names("box") == ["run/attempts/token"]
    gcs.refuse = lambda *_: 403
    with pytest.raises(BucketAccessError):
        RunToken({}, file).find()
