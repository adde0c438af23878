"""Every reader of other people's files, each with a small valid file: what `make fuzz` mutates."""

import functools
import gzip
import io
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from hostile import Reader
from hostile_models import (
    CHAT,
    FAMILIES,
    JINJA,
    JINJA_WORDS,
    TEXT,
    data_class,
    files,
    lines,
    make_adapter,
    make_gguf,
    make_model,
    make_tokenizer,
    model_files,
    of,
    open_data,
    read_adapter,
    read_model,
    read_template,
    read_tokenizer,
)

# -- text ------------------------------------------------------------------------------------------

DOCUMENTS = [{"text": f"document {n}\n{TEXT[: 40 + n]}", "n": n} for n in range(30)]
TALKS = [
    {"messages": [{"role": "user", "content": f"What is {n}?"},
                  {"role": "assistant", "content": f"{n} is a number."}]} for n in range(12)
]  # fmt: skip


def _make_store(folder: Path) -> None:
    from jaxtrain.data.text.stores.prepare import prepare

    (folder / "text").mkdir()
    for n in range(30):
        (folder / "text" / f"{n:02}.txt").write_text(TEXT[: 50 + n])
    data = data_class("TextData")(source=str(folder / "text"), sequence_length=8)
    prepare(data, folder / "store", workers=1, progress=lambda characters, tokens: None)


def _parquet(records: list[dict[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), stream)
    return stream.getvalue()


def _arrow(records: list[dict[str, Any]], metadata: dict[bytes, bytes] | None = None) -> bytes:
    import pyarrow

    table = pyarrow.Table.from_pylist(records).replace_schema_metadata(metadata)
    stream = io.BytesIO()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def _zst(content: bytes) -> bytes:
    import pyarrow

    stream = io.BytesIO()
    with pyarrow.CompressedOutputStream(pyarrow.PythonFile(stream, mode="w"), "zstd") as packed:
        packed.write(content)
        packed.flush()
        return stream.getvalue() if stream.closed else bytes(stream.getbuffer())


def _make_saved(folder: Path) -> None:
    """A folder of `datasets.save_to_disk`."""
    for split in ("train", "validation"):
        files({
            f"saved/{split}/data-00000-of-00001.arrow": _arrow(DOCUMENTS),
            f"saved/{split}/state.json": json.dumps(
                {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}).encode(),
            f"saved/{split}/dataset_info.json": b'{"features": {}}',
        }, folder)  # fmt: skip
    (folder / "saved/dataset_dict.json").write_text('{"splits": ["train", "validation"]}')


def _megatron() -> dict[str, bytes]:
    tokens = np.arange(600, dtype="<u2") % 250
    sizes = np.full(20, 30, "<i4")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, 8) + struct.pack("<QQ", 20, 21)
    index += sizes.tobytes() + (np.arange(20, dtype="<i8") * 60).tobytes()
    index += np.arange(21, dtype="<i8").tobytes()
    return {"tokens.bin": tokens.tobytes(), "tokens.idx": index}


def _llm_c() -> dict[str, bytes]:
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, 600
    return {"tokens.bin": head.tobytes() + (np.arange(600, dtype="<u2") % 250).tobytes()}


# -- images and vectors ----------------------------------------------------------------------------


def _image(kind: str, number: int) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    pixels = np.full((8, 8), number * 20 % 256, np.uint8)
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def _make_images(folder: Path) -> None:
    for number in range(8):
        kind = ("PNG", "JPEG")[number % 4 < 2]
        files({f"images/{'ab'[number % 2]}/{number}.{kind.lower()}": _image(kind, number)}, folder)


IMAGES: dict[str, Any] = {"num_classes": 2, "heldout_fraction": 0.25}


def _make_tar(folder: Path) -> None:
    with tarfile.open(folder / "images.tar", "w") as tar:
        for number in range(8):
            label = (b"%d" % (number % 2), b'{"label": %d}' % (number % 2))
            ending = ("cls", "json")[number // 4]
            for name, content in ((f"{number:04}.png", _image("PNG", number)),
                                  (f"{number:04}.{ending}", label[number // 4])):  # fmt: skip
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


ROWS = [{"image": {"bytes": b"", "path": None}, "label": n % 2} for n in range(8)]


def _image_rows() -> list[dict[str, Any]]:
    return [{**row, "image": {"bytes": _image("PNG", n), "path": "x"}}
            for n, row in enumerate(ROWS)]  # fmt: skip


def _make_saved_images(folder: Path) -> None:
    said = {"info": {"features": {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}}}
    content = _arrow(_image_rows(), {b"huggingface": json.dumps(said).encode()})
    state = {"_data_files": [{"filename": "data.arrow"}]}
    files({"saved/data.arrow": content, "saved/state.json": json.dumps(state).encode(),
            "saved/dataset_info.json": b"{}"}, folder)  # fmt: skip


def _make_parquet_images(folder: Path) -> None:
    (folder / "images.parquet").write_bytes(_parquet(_image_rows()))


def _npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


NUMBERS = np.arange(60.0).reshape(20, 3)
NUMBERED = "a,b,c,label\n" + "".join(f"{n},{n / 2},-{n},{n % 2}\n" for n in range(20))
TS = "@problemName x\n@timeStamps false\n@classLabel true a b\n@data\n" + "".join(
    f"{n},{n + 1},{n + 2}:{'ab'[n % 2]}\n" for n in range(40)
)


# -- a run's own folder ----------------------------------------------------------------------------


def _make_gin(folder: Path) -> None:
    lines = [
        "include 'base.gin'", "STEPS = 20", "Train.steps = %STEPS",
        "Train.global_batch_size = 8", "Train.data = @TextData()",
        "TextData.source = 'embedded'", "Optimizer.name = 'adamw'", "AdamW.b1 = 0.9",
        "Schedule.warmup_steps = 5", "TextData.sequence_length = 32", "Mesh.data = -1",
        "Mesh.fsdp = 1",
    ]  # fmt: skip
    base = ["Train.model = @GPT()", "GPT.num_layers = 1", "GPT.embed_dim = 16",
            "GPT.num_heads = 2", "GPT.context_length = 32", "GPT.vocab_size = 256"]  # fmt: skip
    (folder / "run.gin").write_text("\n".join(lines) + "\n")
    (folder / "base.gin").write_text("\n".join(base) + "\n")


GIN_WORDS = (
    b"(" * 500, b"[" * 5000, b"{" * 300, b"-" * 5000, b"'" , b'"""', b"@GPT()", b"%STEPS", b"%X",
    b"include 'run.gin'\n", b"import os\n", b"import jaxtrain.nothing\n", b"\\\n", b"\x00", b"\t",
    b"1" * 5000, b"1e999", b"0x" + b"f" * 500, b"(1,) * 10**9", b"10 ** 10 ** 10", b"A = %A\n",
    b"B = [%B, %B]\n", b"Train.steps = {'a': 1}\n", b"'a' 'b'", b"a/b.c = 1\n", b"\xff\xfe",
    b"Train.model = @Train()\n", b"A1 = (%A2, %A2)\nA2 = (%A3, %A3)\n", b"lambda: 0", b"f'{1}'",
)  # fmt: skip


def _read_gin(folder: Path) -> None:
    from jaxtrain.training.settings import load_config

    load_config(str(folder / "run.gin")).to_gin()


def _make_checkpoint(folder: Path) -> None:
    import jax.numpy as jnp

    from jaxtrain.run.checkpoint.store import Checkpoints
    from jaxtrain.training.settings import Checkpoint

    checkpoints = Checkpoints(folder, Checkpoint())
    checkpoints.save(1, {"x": jnp.arange(8.0)}, {"config": "x = 1", "data": {"next_batch": 3}})
    checkpoints.close()


def _read_checkpoint(folder: Path) -> None:
    import jax

    from jaxtrain.run.checkpoint.metadata import of_checkpoint
    from jaxtrain.run.checkpoint.store import Checkpoints
    from jaxtrain.training.settings import Checkpoint

    checkpoints = Checkpoints(folder, Checkpoint(), read_only=True)
    try:
        for step in checkpoints.steps():
            checkpoints.extra(step)
            checkpoints.tree(step)
            sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            wanted = {"x": jax.ShapeDtypeStruct((8,), "float32", sharding=sharding)}
            checkpoints.restore(step, wanted)
            of_checkpoint(checkpoints, folder, step)
    finally:
        checkpoints.close()


RUN = {
    "metrics.jsonl": lines(
        {"step": n, "loss": 3.0 / n, "learning_rate": 0.1, "mfu": None, "eval_loss": 1.5}
        for n in range(1, 9)
    ),
    "exit.json": b'{"status": "done", "reason": "x", "step": 8, "attempt": 1}',
    "lock.json": b'{"attempt": 1, "host": "x"}',
    "attempts/1.json": b'{"attempt": 1, "host": "x", "machine": "m", "pid": 1, "process_start": "",'
    b' "token": "t", "beat_seconds": 5.0, "started": 1.0}',
    "goodput.json": b'{"format": 1, "attempts": [{"step": 1.0}], "points": [[1, 2.0]],'
    b' "recorded_at": 1.0}',
    "tracker_track.json": b'{"run": null, "done": 10}',
    "huggingface/receipt.json": b'{"ancestors": [{"path": "x", "step": 1, "digest": "y"}]}',
}


def _read_run(folder: Path) -> None:
    from jaxtrain.run.attempts import goodput, records
    from jaxtrain.run.checkpoint import metadata
    from jaxtrain.run.metrics import compare
    from jaxtrain.run.metrics.files import drop_lines_past, lines_of

    lines = lines_of(folder)
    if lines:
        runs = compare.open_runs([str(folder)])
        compare.table(runs)
        compare.figure(runs).png()
    records.find_unended(folder, 1)
    records.Claim.read(folder / "lock.json")
    records.newest_attempt(folder)
    metadata.of_published(folder / "huggingface")
    goodput.read_account(folder / "goodput.json")
    drop_lines_past(folder / "metrics.jsonl", 4)
    _read_tracker(folder)


def _read_tracker(folder: Path) -> None:
    from jaxtrain.run.metrics.tracking import Function, Tracking

    said: list[str] = []
    service = Function(lambda step, metrics: None)
    tracking = Tracking(lambda run: service, "track", folder, [], said.append)
    tracking.go_on()
    tracking.up_to(8)
    tracking.close()
    assert not said, said


def _read_records(folder: Path) -> None:
    from jaxtrain.run.tasks.tasks import read_task

    read_task(str(folder / "task.jsonl"))


TASK = lines({"prompt": f"{n} +", "choices": ["1", "2"], "answer": n % 2} for n in range(4))


# -- the table -------------------------------------------------------------------------------------


def readers() -> dict[str, Reader]:
    """Every reader by name."""
    text = functools.partial(open_data, "TextData", sequence_length=8)
    found = {
        f"tokenizer.json {kind}": Reader(
            functools.partial(make_tokenizer, kind), read_tokenizer, ("tokenizer.json",)
        )
        for kind in ("bpe", "wordpiece", "unigram", "wordlevel")
    }
    found |= {
        "tokenizer_config.json": Reader(
            of(CHAT), read_template, ("tokenizer_config.json", "special_tokens_map.json"),
            JINJA_WORDS,
        ),
        "chat_template.jinja": Reader(
            of({**CHAT, "chat_template.jinja": JINJA}), read_template, ("chat_template.jinja",),
            JINJA_WORDS,
        ),
    }  # fmt: skip
    found |= {
        f"model {kind}": Reader(functools.partial(make_model, kind), read_model,
                                model_files(kind))
        for kind in FAMILIES
    }  # fmt: skip
    found |= {
        "gguf": Reader(make_gguf, lambda folder: read_model(folder / "model.gguf"),
                       ("model.gguf",)),
        "adapter": Reader(make_adapter, read_adapter,
                          ("adapter_config.json", "adapter_model.safetensors")),
        "text file": Reader(of({"a.txt": TEXT.encode()}), functools.partial(text, "a.txt"),
                            ("a.txt",)),
        "text.jsonl": Reader(of({"a.jsonl": lines(DOCUMENTS)}),
                             functools.partial(text, "a.jsonl"), ("a.jsonl",)),
        "text.jsonl.gz": Reader(of({"a.jsonl.gz": gzip.compress(lines(DOCUMENTS))}),
                                functools.partial(text, "a.jsonl.gz"), ("a.jsonl.gz",)),
        "text.csv": Reader(of({"a.csv": b"n,text\n" + b"".join(
            b'%d,"line %d\nof many"\n' % (n, n) for n in range(20))}),
            functools.partial(text, "a.csv"), ("a.csv",)),
        "text.parquet": Reader(of({"a.parquet": _parquet(DOCUMENTS)}),
                               functools.partial(text, "a.parquet"), ("a.parquet",)),
        "text.arrow": Reader(of({"a.arrow": _arrow(DOCUMENTS)}),
                             functools.partial(text, "a.arrow"), ("a.arrow",)),
        "saved dataset": Reader(
            _make_saved, functools.partial(text, "saved", heldout_split="validation"),
            ("saved/dataset_dict.json", "saved/train/state.json", "saved/train/dataset_info.json",
             "saved/train/data-00000-of-00001.arrow")),
        "token store": Reader(_make_store, functools.partial(text, "store"),
                              ("store/store.json", "store/train.tokens", "store/train.offsets",
                               "store/train.crc32")),
        "megatron tokens": Reader(of(_megatron()), functools.partial(text, "tokens.bin"),
                                  ("tokens.idx", "tokens.bin")),
        "llm.c tokens": Reader(of(_llm_c()), functools.partial(text, "tokens.bin"),
                               ("tokens.bin",)),
        "chat.jsonl": Reader(of({"a.jsonl": lines(TALKS)}), functools.partial(
            open_data, "ChatData", "a.jsonl", sequence_length=64, chat_template="chatml",
            heldout_fraction=0.2), ("a.jsonl",)),
        "preferences.jsonl": Reader(of({"a.jsonl": lines(
            {"prompt": f"What is {n}?", "chosen": f"{n}", "rejected": "no"} for n in range(12))}),
            functools.partial(open_data, "PreferenceData", "a.jsonl", sequence_length=128,
                              chat_template="chatml", heldout_fraction=0.2), ("a.jsonl",)),
        "pairs.jsonl": Reader(of({"a.jsonl": lines(
            {"source": f"s{n}", "target": [f"t{n}", "u"]} for n in range(30))}),
            functools.partial(open_data, "PairData", "a.jsonl"), ("a.jsonl",)),
        "pairs.tsv": Reader(of({"a.tsv": b"source\ttarget\n" + b"".join(
            b"s%d\tt%d\n" % (n, n) for n in range(30))}),
            functools.partial(open_data, "PairData", "a.tsv"), ("a.tsv",)),
        "labelled.jsonl": Reader(of({"a.jsonl": lines(
            {"text": f"text {n}", "label": "ab"[n % 2]} for n in range(40))}),
            functools.partial(open_data, "LabelledText", "a.jsonl", num_classes=2,
                              sequence_length=16), ("a.jsonl",)),
        "tagged.conll": Reader(of({"a.conll": b"".join(
            b"word%d O\nother B-X\n\n" % n for n in range(30))}),
            functools.partial(open_data, "TaggedText", "a.conll", num_classes=2,
                              sequence_length=24),
            ("a.conll",)),
        "tagged.jsonl": Reader(of({"a.jsonl": lines(
            {"tokens": ["one", "two"], "tags": ["O", "X"]} for n in range(30))}),
            functools.partial(open_data, "TaggedText", "a.jsonl", num_classes=2,
                              sequence_length=24),
            ("a.jsonl",)),
        "image folder": Reader(_make_images, functools.partial(open_data, "ImageData", "images",
                                                               **IMAGES),
                               ("images/a/0.jpeg", "images/a/2.png")),
        "image tar": Reader(_make_tar, functools.partial(open_data, "ImageData", "images.tar",
                                                         **IMAGES), ("images.tar",)),
        "saved images": Reader(_make_saved_images, functools.partial(
            open_data, "ImageData", "saved", **IMAGES),
            ("saved/data.arrow", "saved/state.json", "saved/dataset_info.json")),
        "image parquet": Reader(_make_parquet_images, functools.partial(
            open_data, "ImageData", "images.parquet", **IMAGES), ("images.parquet",)),
        "vectors.npz": Reader(of({"a.npz": _npz(x=NUMBERS, y=np.arange(20) % 2)}),
                              functools.partial(open_data, "VectorData", "a.npz", features=3,
                                                num_classes=2), ("a.npz",)),
        "vectors.csv": Reader(of({"a.csv": NUMBERED.encode()}), functools.partial(
            open_data, "VectorData", "a.csv", features=3, num_classes=2), ("a.csv",)),
        "sequences.npz": Reader(of({"a.npz": _npz(
            x=np.ones((20, 5, 1)), y=np.arange(20) % 2, lengths=np.full(20, 4))}),
            functools.partial(open_data, "SequenceData", "a.npz", num_classes=2, sequence_length=5),
            ("a.npz",)),
        "sequences.ts": Reader(of({"a.ts": TS.encode()}), functools.partial(
            open_data, "SequenceData", "a.ts", num_classes=2, sequence_length=5), ("a.ts",)),
        "config.gin": Reader(_make_gin, _read_gin, ("run.gin", "base.gin"), GIN_WORDS),
        "checkpoint": Reader(_make_checkpoint, _read_checkpoint,
                             ("checkpoints/1/manifest.json", "checkpoints/1/extra/metadata")),
        "run folder": Reader(of(RUN), _read_run, tuple(RUN)),
        "tasks.jsonl": Reader(of({"task.jsonl": TASK}), _read_records, ("task.jsonl",)),
    }  # fmt: skip
    return found
