"""Images of Hugging Face's `datasets` and of its hub: rows, splits, classes, rejections."""

import io
import json

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from jaxtrain.config.errors import UserError
from jaxtrain.config.files import cache_folder
from jaxtrain.data.images import saved
from jaxtrain.data.images.source import ImageData
from jaxtrain.data.loader import batches

NAMES = ["owl", "gull", "wren"]


@pytest.fixture(autouse=True)
def _anew(tmp_path_factory, monkeypatch):
    """Files of one name are written several times here, which no run sees; an empty cache."""
    saved._map.cache_clear()
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))


def png(grey):
    file = io.BytesIO()
    Image.new("L", (5, 5), grey).save(file, "PNG")
    return file.getvalue()


def rows_of(numbers, *, names=NAMES, label=lambda n: n % 3, image=None, field="image"):
    """Image n is of grey 5n, encoded as `datasets` does."""
    rows = image or (lambda n: {"bytes": png(5 * n), "path": None})
    table = pa.table({field: [rows(n) for n in numbers], "label": [label(n) for n in numbers]})
    features = {"label": {"names": names, "_type": "ClassLabel"}} if names else {}
    said = json.dumps({"info": {"features": features}})
    return table.replace_schema_metadata({"huggingface": said})


def write(folder, numbers, *, names=NAMES, label=lambda n: n % 3, image=None, field="image"):
    """Two files, each of several batches, as `save_to_disk` writes them."""
    folder.mkdir(parents=True)
    numbers = list(numbers)
    half = len(numbers) // 2
    rows = {"image": image, "label": label, "field": field, "names": names}
    files = []
    for place, part in enumerate((numbers[:half], numbers[half:])):
        table = rows_of(part, **rows)
        name = f"data-{place:05}-of-00002.arrow"
        files.append({"filename": name})
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None}))
    (folder / "dataset_info.json").write_text("{}")


def write_parquet(folder, name, numbers, **rows):
    """As the hub holds them: a split's name in each file's."""
    folder.mkdir(exist_ok=True)
    pq.write_table(rows_of(numbers, **rows), folder / name, row_group_size=4)


def opened(source, **settings):
    settings = {"num_classes": 3, "heldout_fraction": 0.5, **settings}
    data = ImageData(source=str(source), image_size=5, mean=(0.0,), std=(1.0,), **settings)
    return data.open(seed=0)


def greys(examples):
    """(grey / 5, label) of every example."""
    found = [examples.example(index, None) for index in range(len(examples))]
    return [(round(float(one.inputs.mean()) * 51), int(one.targets)) for one in found]


def test_each_row_is_an_image_with_its_label_and_classes_have_names(tmp_path):
    write(tmp_path / "birds", range(20))
    found = opened(tmp_path / "birds")
    assert sorted(greys(found.train) + greys(found.heldout)) == [(n, n % 3) for n in range(20)]
    assert found.facts["class_names"] == "owl, gull, wren"
    assert greys(found.train) != sorted(greys(found.heldout))


def test_classes_are_those_of_the_info_file_and_a_mode_is_rejected(tmp_path):
    """What load_from_disk takes: features of dataset_info.json before those of the files."""
    write(tmp_path / "birds", range(20))
    info = tmp_path / "birds" / "dataset_info.json"
    label = {"names": ["kite", "rook", "lark"], "_type": "ClassLabel"}
    info.write_text(json.dumps({"features": {"label": label, "image": {"_type": "Image"}}}))
    assert opened(tmp_path / "birds").facts["class_names"] == "kite, rook, lark"
    info.write_text(json.dumps({"features": {"image": {"_type": "Image", "mode": "L"}}}))
    with pytest.raises(UserError, match="converts the images of 'image' to the mode 'L'"):
        opened(tmp_path / "birds")


def test_splits_are_those_that_were_saved(tmp_path):
    write(tmp_path / "train", range(12))
    write(tmp_path / "validation", range(30, 36), names=None)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    found = opened(tmp_path, heldout_split="validation")
    assert greys(found.train) == [(n, n % 3) for n in range(12)]
    assert greys(found.heldout) == [(n, n % 3) for n in range(30, 36)]
    with pytest.raises(UserError, match="ImageData.heldout_split = 'val': .* no such split"):
        opened(tmp_path, heldout_split="val")
    assert found.digest != opened(tmp_path, train_split="validation").digest


def test_images_may_be_bytes_alone_under_another_name(tmp_path):
    write(tmp_path / "a", range(8), image=lambda n: png(5 * n), field="picture", names=None)
    found = opened(tmp_path / "a", image_feature="picture", num_classes=5)
    assert sorted(greys(found.train) + greys(found.heldout)) == [(n, n % 3) for n in range(8)]
    assert found.facts["class_names"] == "0, 1, 2, 3, 4"


def test_worker_processes_map_the_files_for_themselves(tmp_path):
    write(tmp_path / "a", range(20))
    train = opened(tmp_path / "a").train
    one, other = (
        next(batches(train, global_batch_size=6, seed=0, workers=workers)) for workers in (0, 1)
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_rows_of_parquet_files_are_those_of_saved_ones(tmp_path, monkeypatch):
    write_parquet(tmp_path / "hub", "train-00000-of-00002.parquet", range(12))
    write_parquet(tmp_path / "hub", "train-00001-of-00002.parquet", range(12, 20))
    write_parquet(tmp_path / "hub", "test-00000-of-00001.parquet", range(20, 26))
    found = opened(tmp_path / "hub", heldout_split="test")
    assert greys(found.train) == [(n, n % 3) for n in range(20)]
    assert greys(found.heldout) == [(n, n % 3) for n in range(20, 26)]
    assert found.facts["class_names"] == "owl, gull, wren"
    monkeypatch.setattr(saved, "_unpack", None)  # it was done: the next start has them
    again = opened(tmp_path / "hub" / "*.parquet", heldout_split="test")
    assert again.digest == found.digest
    one, other = (
        next(batches(again.train, global_batch_size=6, seed=0, workers=workers))
        for workers in (0, 1)
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_what_cannot_be_read_of_parquet_files_is_refused_and_nothing_kept(tmp_path):
    hub, name = tmp_path / "hub", "train-0.parquet"

    def refused(words, **settings):
        with pytest.raises(UserError, match=words):
            opened(hub, **settings)

    write_parquet(hub, name, range(60))
    refused("train-0.parquet has no such column; did you mean 'label'", label_feature="lable")
    refused("it holds int64, but it must hold encoded images", image_feature="label")
    refused("num_classes = 4, but .* has 3 classes; set ImageData.num_classes = 3", num_classes=4)
    whole = (hub / name).read_bytes()
    (hub / name).write_bytes(whole[: len(whole) // 2])
    refused("train-0.parquet is not a complete Parquet file")
    images = pq.ParquetFile(pa.BufferReader(whole)).metadata.row_group(9).column(0)
    place = images.data_page_offset
    (hub / name).write_bytes(whole[:place] + bytes(40) + whole[place + 40 :])
    refused("train-0.parquet is not a complete Parquet file")
    write_parquet(hub, name, range(8), image=lambda n: {"bytes": None if n else png(1), "path": ""})
    with pytest.raises(UserError, match=r"train-0.parquet, row \d has no image in it"):
        greys(opened(hub, num_classes=3).train)
    (hub / "a.tar").write_bytes(b"")
    refused("holds a.tar and train-0.parquet; name files of one kind")
    kept = [path.parent for path in cache_folder("images").glob("*/rows.arrow")]
    assert len(kept) == 2  # that of the first file and of the last


def test_what_datasets_saves_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    )
    rows = {"image": [{"bytes": png(5 * n), "path": None} for n in range(9)]}
    rows["label"] = [n % 3 for n in range(9)]
    whole = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(tmp_path / "saved")
    found = opened(tmp_path / "saved", heldout_split="test")
    assert greys(found.train) == greys(found.heldout) == [(n, n % 3) for n in range(9)]
    assert found.facts["class_names"] == "owl, gull, wren"


def test_what_cannot_be_read_is_refused(tmp_path):
    def refused(words, name="birds", **settings):
        with pytest.raises(UserError, match=words):
            opened(tmp_path / name, **settings)

    write(tmp_path / "birds", range(8))
    refused("ImageData.image_feature = 'img': .* has no such column; did", image_feature="img")
    refused("ImageData.label_feature = 'lable': .*did you mean 'label'", label_feature="lable")
    refused("it holds int64, but it must hold encoded images", image_feature="label")
    refused("it holds struct.*, but it must hold integers", label_feature="image")
    refused("num_classes = 4, but .* has 3 classes; set ImageData.num_classes = 3", num_classes=4)
    refused("heldout_split = 'test': only", heldout_split="test")
    write(tmp_path / "more", range(8), names=None, label=lambda n: n)
    refused("has a label 7; set ImageData.num_classes = 8", "more")
    write(tmp_path / "null", range(8), label=lambda n: None if n == 5 else 0)
    refused("has rows without a label", "null")
    write(
        tmp_path / "path", range(8), image=lambda n: {"bytes": None if n else png(1), "path": "x"}
    )
    with pytest.raises(UserError, match=r"row \d has no image in it \(a path alone, or null\)"):
        greys(opened(tmp_path / "path").train)
    file = tmp_path / "birds" / "data-00001-of-00002.arrow"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"something else", b""):
        saved._map.cache_clear()
        file.write_bytes(content)
        refused("data-00001-of-00002.arrow is not a complete Arrow file")
