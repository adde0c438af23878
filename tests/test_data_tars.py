"""WebDataset's tar files: its own samples, read by their places; and what is rejected."""

import io
import json
import re
import tarfile

import pytest
from PIL import Image

from jaxtrain.config.errors import UserError
from jaxtrain.data.images import tars
from jaxtrain.data.images.source import ImageData


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))


def png(grey):
    file = io.BytesIO()
    Image.new("L", (5, 5), grey).save(file, "PNG")
    return file.getvalue()


def write(path, members, *, mode="w", form=tarfile.PAX_FORMAT):
    with tarfile.open(path, mode, format=form) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def samples(numbers, label=lambda n: str(n % 3).encode()):
    """Image n is of grey 5n and class n % 3."""
    for n in numbers:
        yield f"part/{n:04}.png", png(5 * n)
        yield f"part/{n:04}.cls", label(n)
        yield f"part/{n:04}.txt", b"a caption"


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "birds"
    root.mkdir()
    write(root / "train-0000.tar", samples(range(12)))
    write(root / "train-0001.tar", samples(range(12, 20)), form=tarfile.GNU_FORMAT)
    write(root / "val-0000.tar", samples(range(20, 26)))
    return root


def opened(source, **settings):
    data = ImageData(
        source=str(source), image_size=5, num_classes=3, mean=(0.0,), std=(1.0,), **settings
    )
    return data.open(seed=0)


def greys(examples):
    """(grey / 5, label) of every example."""
    found = [examples.example(index, None) for index in range(len(examples))]
    return [(round(float(one.inputs.mean()) * 51), int(one.targets)) for one in found]


def test_splits_are_by_the_names_of_files_or_by_class(folder):
    found = opened(folder, heldout_split="val")
    assert greys(found.train) == [(n, n % 3) for n in range(20)]
    assert greys(found.heldout) == [(n, n % 3) for n in range(20, 26)]
    for source in (folder, folder / "*.tar", folder.parent / "**" / "*-000?.tar"):
        found = opened(source, heldout_fraction=0.5)
        both = greys(found.train) + greys(found.heldout)
        assert sorted(both) == [(n, n % 3) for n in range(26)]
        assert 9 <= len(found.train) <= 17
    found = opened(folder / "train-0001.tar", heldout_fraction=0.5)
    assert greys(found.train)[0] == (12, 0)


def test_a_folder_that_is_named_like_a_file_is_a_folder(folder, tmp_path):
    named = folder.rename(tmp_path / "birds.tar")
    assert len(opened(named, heldout_split="val").train) == 20
    for n in range(9):  # class folders, one of which ends in .tar
        file = tmp_path / "classes" / ("a", "b.tar", "c")[n % 3] / f"{n}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(5 * n))
    found = opened(tmp_path / "classes", heldout_fraction=0.5)
    assert sorted(greys(found.train) + greys(found.heldout)) == [(n, n % 3) for n in range(9)]


def test_samples_are_those_that_webdataset_reads(folder):
    webdataset = pytest.importorskip("webdataset")
    path = str(folder / "train-0001.tar")
    theirs = [
        (Image.open(io.BytesIO(one["png"])).getpixel((0, 0)), int(one["cls"]))
        for one in webdataset.WebDataset(path, shardshuffle=False)
    ]
    images = tars.open_tars([folder / "train-0001.tar"], "label")
    ours = [images.read(index) for index in range(len(images))]
    assert [(image.getpixel((0, 0)), label) for image, label in ours] == theirs


def test_labels_may_be_a_field_of_json(tmp_path):
    members = []
    for n in range(6):
        record = {"kind": n % 2, "label": "x"}
        members += [(f"{n}.jpg", png(5 * n)), (f"{n}.json", json.dumps(record).encode())]
    write(tmp_path / "a.tar", members)
    found = opened(tmp_path / "a.tar", label_feature="kind", heldout_fraction=0.34)
    assert sorted(greys(found.train) + greys(found.heldout)) == [(n, n % 2) for n in range(6)]
    with pytest.raises(
        UserError, match=r"6 images without a label: 0 \('x', but it must be a number .*3 m"
    ):
        opened(tmp_path / "a.tar")
    with pytest.raises(UserError, match="its .json has no field 'kin'; did you mean 'kind'"):
        opened(tmp_path / "a.tar", label_feature="kin")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("a.webp", b"x"), ("a.cls", b"0")], r"a (.webp, .cls)"),
        ([("a.cls", b"0")], r"a (.cls)"),
        ([("a.webp", b"x"), ("a.json", b'{"label": 0}')], r"a (.webp, .json)"),
        ([("a.left.png", png(1)), ("a.cls", b"0")], r"a (.left.png, .cls)"),
        ([("a.rgb.jpg", png(1))], r"a (.rgb.jpg)"),
        ([("a.jpg", png(1)), ("a.png", png(2)), ("a.cls", b"0")], r"a (.jpg, .png, .cls)"),
    ],
)
def test_a_sample_is_never_left_out_unsaid(tmp_path, members, words):
    write(tmp_path / "a.tar", [*members, *samples(range(6))])
    said = "a.tar has 1 samples without exactly one .jpg, .jpeg or .png: "
    with pytest.raises(UserError, match=re.escape(said + words)):
        opened(tmp_path / "a.tar")


def test_what_is_no_sample_is_passed_over(tmp_path):
    others = [("README.txt", b"x"), ("info.json", b"{}"), ("a.png.license", b"x")]
    write(tmp_path / "a.tar", [*others, *samples(range(6))])
    found = opened(tmp_path / "a.tar", heldout_fraction=0.5)
    assert sorted(greys(found.train) + greys(found.heldout)) == [(n, n % 3) for n in range(6)]


def test_a_file_is_passed_over_once_until_it_changes(folder, monkeypatch):
    first = opened(folder)
    read, files = tars._read, []
    monkeypatch.setattr(tars, "_read", lambda path, field: files.append(path) or read(path, field))
    again = opened(folder)
    assert not files
    assert again.digest == first.digest
    assert greys(again.train) == greys(first.train)
    write(folder / "train-0001.tar", samples(range(12, 21)))
    changed = opened(folder)
    assert [path.name for path in files] == ["train-0001.tar"]
    assert changed.digest != first.digest
    assert len(changed.train) + len(changed.heldout) == 27


def test_a_damaged_image_is_named_by_file_and_place(tmp_path):
    write(tmp_path / "a.tar", [("0.jpg", b"no image"), ("0.cls", b"0"), *samples(range(5))])
    images = tars.open_tars([tmp_path / "a.tar"], "label")
    with pytest.raises(UserError, match=r"a\.tar, byte 512 is not a readable PNG or JPEG file"):
        images.read(0)


def test_what_cannot_be_read_is_refused(folder, tmp_path):
    whole = (folder / "train-0000.tar").read_bytes()
    cut = tmp_path / "cut.tar"
    for size in (6 * 512 + 100, 6 * 512, 5 * 512 + 3):  # in a header, behind content, within it
        cut.write_bytes(whole[:size])
        with pytest.raises(
            UserError, match=r"cut.tar is not a readable tar file, or it is truncated"
        ):
            opened(cut)
    text = tmp_path / "text.tar"
    text.write_text("not a tar")
    with pytest.raises(UserError, match=r"text.tar is not a readable tar file"):
        opened(text)
    write(tmp_path / "packed.tar.gz", samples(range(3)), mode="w:gz")
    with pytest.raises(UserError, match=r"packed.tar.gz is compressed, .* decompress it to a .tar"):
        opened(tmp_path / "packed.tar.gz")
    write(tmp_path / "none.tar", [("a.txt", b"text")])
    with pytest.raises(UserError, match=r"none.tar has no member that ends in .jpg"):
        opened(tmp_path / "none.tar")
    write(tmp_path / "lacks.tar", [("a.png", png(1)), *samples(range(3))])
    with pytest.raises(UserError, match=r"1 images without a label: a \(no .cls or .json next to"):
        opened(tmp_path / "lacks.tar")
    write(tmp_path / "class.tar", samples(range(9), lambda n: b"7"))
    with pytest.raises(UserError, match="has a label 7; set ImageData.num_classes = 8"):
        opened(tmp_path / "class.tar")
    with pytest.raises(UserError, match="heldout_split = 'test' is in the names of none of the 3"):
        opened(folder, heldout_split="test")
    with pytest.raises(UserError, match=r"none of the 3 files under .* matches it"):
        opened(folder / "*.tarr")
    assert not list((tmp_path / "cache").glob("tars/*.tmp*"))
