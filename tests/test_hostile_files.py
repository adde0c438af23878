"""Damaged and malicious files that once ended in a traceback, an abort, a hang or gigabytes."""

import ast
import functools
import io
import json
import os
import re
import struct
import zipfile
from pathlib import Path

import hostile
import hostile_readers
import numpy as np
import pytest

from jaxtrain.cli import main
from jaxtrain.config import untrusted
from jaxtrain.config.errors import UserError
from jaxtrain.data.text.chat.chat_template import ChatTemplate, TemplateError
from jaxtrain.data.tokenization.file_tokenizer import FileTokenizer

PACKAGE = Path(__file__).parent.parent / "jaxtrain"
READERS = hostile_readers.readers()


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """Gives a folder with a reader's valid files, made once."""

    @functools.cache
    def made(name):
        folder = tmp_path_factory.mktemp("valid")
        READERS[name].make(folder)
        return folder

    return made


# -- edits -----------------------------------------------------------------------------------------


def put(*path_and_value):
    """Replaces a value of a JSON file."""
    *path, last, value = path_and_value

    def edit(content):
        tree = json.loads(content)
        inner = functools.reduce(lambda one, key: one[key], path, tree)
        inner[last] = value
        return json.dumps(tree).encode()

    return edit


def header(name, **values):
    """Replaces values of a tensor in a safetensors file; `name` None takes the first."""

    def edit(content):
        size = int.from_bytes(content[:8], "little")
        tree = json.loads(content[8 : 8 + size])
        first = name or next(key for key in tree if key != "__metadata__")
        text = json.dumps({**tree, first: {**tree[first], **values}}).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return edit


def whole(content):
    return lambda _: content


def replaced(old, new):
    def edit(content):
        assert old in content
        return content.replace(old, new, 1)

    return edit


def claims_long_data(content):
    """A PNG whose data claim 2 GB."""
    at = content.index(b"IDAT")
    return content[: at - 4] + b"\x7f\xff\xff\xff" + content[at:]


def bomb(_):
    """1 GB of zeros under the name x in 1 MB."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, count in (("x", 1 << 27), ("y", 1)):
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array_header_1_0(
                    member, {"descr": "<f8", "fortran_order": False, "shape": (count,)}
                )
                for _ in range(-(-count * 8 // (1 << 24))):
                    member.write(bytes(min(count * 8, 1 << 24)))
    return stream.getvalue()


def claims_more(_):
    """An array whose header says 2**50 numbers."""
    stream, member = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(
        member, {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)}
    )
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x.npy", member.getvalue() + bytes(80))
        archive.writestr("y.npy", member.getvalue())
    return stream.getvalue()


DEEP = b"[" * 100_000
TOKENIZER, CONFIG = "tokenizer.json", "config.json"
# Reader, file, edit, what the message says.
CASES = [
    ("tokenizer.json bpe", TOKENIZER, whole(DEEP), "is not a Hugging Face tokenizer.json"),
    ("tokenizer.json bpe", TOKENIZER, put("model", "type", "BPE2"), "tokenizers library cannot"),
    ("tokenizer.json bpe", TOKENIZER, put("normalizer", {"type": "New"}), "pip install -U tok"),
    ("tokenizer.json bpe", TOKENIZER, put("model", "merges", [["no", "such"]]), "out of vocabul"),
    ("tokenizer.json wordlevel", TOKENIZER, put("model", "vocab", "far", 2**31),
     "its largest id is 2,147,483,648; at most 4,194,303"),
    ("tokenizer.json wordlevel", TOKENIZER, put("model", "vocab", "far", 2**40), "expected u32"),
    ("tokenizer.json wordlevel", TOKENIZER, put("model", "unk_token", "gone"), "Missing \\[UNK\\]"),
    ("tokenizer_config.json", "tokenizer_config.json", put("chat_template", "{% for %}"),
     "is not a Jinja template"),
    ("tokenizer_config.json", "tokenizer_config.json", whole(b"{" * 100_000), "is not JSON"),
    ("model llama", CONFIG, put("num_hidden_layers", 10**9), "it must be at most 10,000"),
    ("model llama", CONFIG, put("vocab_size", 2**40), "it must be at most"),
    ("model llama", CONFIG, put("hidden_size", 10**400), "a number of 401 digits"),
    ("model llama", CONFIG, put("architectures", 0.5), "the architecture model_type|use a list"),
    ("model llama", CONFIG, put("architectures", [{"x": 1}]), "use a list of names"),
    ("model llama", CONFIG, put("rope_theta", "a" * 100_000), "it must be a number"),
    ("model llama", CONFIG, put("quantization_config", 3), "quantization_config"),
    ("model llama", CONFIG, whole(b'{"a": ' + DEEP + b"}"), "nested more than 64 levels deep"),
    ("model llama", CONFIG, put("model_type", "\ud800"), "an unpaired surrogate"),
    ("model gemma3_text", CONFIG, put("layer_types", 7), "layer_types is not a list"),
    ("model llama", "model.safetensors.index.json", put("weight_map", "x", "../x.safetensors"),
     "is not a safetensors file in its folder"),
    ("model llama", "model-1.safetensors", header(None, shape=[10**30] * 60), "no offsets"),
    ("model llama", "model-1.safetensors", header(None, shape=[1] * 10_000), "10000 dimensions"),
    ("model llama", "model-1.safetensors", whole(struct.pack("<Q", 10**6) + DEEP * 10), "nested"),
    ("gguf", "model.gguf", whole(b"GGUF" + struct.pack("<IQQ", 3, 2**62, 2)), "a count of"),
    ("adapter", "adapter_config.json", whole(DEEP), "is not JSON"),
    ("adapter", "adapter_config.json", put("r", {"x": []}), "which is not a positive number"),
    ("saved dataset", "saved/dataset_dict.json", put("splits", [{}, []]), "is damaged"),
    ("saved dataset", "saved/dataset_dict.json", put("splits", 7), "is damaged"),
    ("image folder", "images/a/2.png", replaced(b"\rIHDR", b"\tIHDR"),
     "is not a readable PNG or JPEG file: Truncated IHDR"),
    ("model mixtral", CONFIG, put("head_dim", [0] * 5000), "head_dim = \\[0, 0, .*\\.\\.\\."),
    ("saved images", "saved/state.json", put("_data_files", []), "is damaged"),
    ("saved images", "saved/state.json", put("_data_files", 0, "filename", "a" * 5000), "too long"),
    ("megatron tokens", "tokens.idx", lambda c: c[:18] + struct.pack("<Q", 2**63) + c[26:],
     "bytes are not those of its"),
    ("token store", "store/store.json", put("parts", "train", "tokens", 2**70), "is damaged"),
    ("token store", "store/store.json", put("dtype", "object"), "store.json is damaged"),
    ("token store", "store/store.json", put("facts", []), "store.json is damaged"),
    ("tagged.jsonl", "a.jsonl", replaced(b'"one"', b'"\\ud800"'), "is not UTF-8 text"),
    ("vectors.npz", "a.npz", bomb, "more than 200 times as many"),
    ("vectors.npz", "a.npz", claims_more, "which are no \\[1125899906842624\\]"),
    ("vectors.npz", "a.npz", whole(b"PK\x05\x06" + bytes(18)), "no array 'x'"),
    ("sequences.npz", "a.npz", bomb, "more than 200 times as many"),
    ("vectors.csv", "a.csv", whole(b"\n"), "no rows of numbers"),
    ("sequences.ts", "a.ts", replaced(b"@data\n", b"@data\nb\n"), "a class and no values"),
    ("model mixtral", CONFIG, put("num_local_experts", 2**31), "it must be at most 10,000"),
    ("image folder", "images/a/2.png", claims_long_data, "is not a readable PNG or JPEG file"),
    ("saved images", "saved/state.json", put("_data_files", [0] * 2000), "and 1,980 more"),
    ("config.gin", "run.gin", replaced(b"base.gin", b"b" * 5000), "include 'bbb"),
    ("config.gin", "run.gin", replaced(b"20", bytes(5000)), "x00"),
    ("config.gin", "run.gin", replaced(b"20", b"(" * 5000), "nested too deep"),
    ("checkpoint", "checkpoints/1/manifest.json", whole(b'{"manifest": ' + DEEP), "nested|JSON"),
    ("run folder", "tracker_track.json", put("done", [1]), "is damaged; remove it"),
    ("run folder", "goodput.json", whole(DEEP), "not a goodput file"),
    ("tasks.jsonl", "task.jsonl", whole(DEEP), "nested more than 64 levels deep"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file", "edit", "said"), CASES)
def test_a_hostile_file_is_refused_in_a_sentence(
    name, file, edit, said, valid, tmp_path, monkeypatch
):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    reader, source, folder = READERS[name], valid(name), tmp_path / "case"
    hostile.copy(source, folder)
    assert hostile.attempt(reader.read, folder) == hostile.Outcome("read")
    hostile.copy(source, folder)
    (folder / file).write_bytes(edit((source / file).read_bytes()))
    with hostile.little_memory():
        outcome = hostile.attempt(reader.read, folder)
    assert outcome.kind == "refused", outcome.told
    assert re.search(said, outcome.told), outcome.told
    assert len(outcome.told) < 4000


def test_damaged_arrow_offsets_do_not_abort_the_process(valid, tmp_path):
    """pyarrow's scalars trust a column's offsets: C++ ended the whole process."""
    content = valid("text.arrow").joinpath("a.arrow").read_bytes()
    first = np.array([len(one["text"].encode()) for one in hostile_readers.DOCUMENTS[:2]])
    offsets = np.concatenate([[0], np.cumsum(first)]).astype("<i4").tobytes()
    assert content.count(offsets) == 1
    at = content.index(offsets) + 8
    (tmp_path / "a.arrow").write_bytes(content[:at] + b"\xff\xff\xff\x80" + content[at + 4 :])
    outcome = hostile.attempt(READERS["text.arrow"].read, tmp_path)
    assert outcome.kind == "refused"
    assert "is not a complete Arrow file (In column 0: Invalid: Offset invariant" in outcome.told


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("tokenizer.json bpe", "tokenizer.json"),
        ("chat_template.jinja", "chat_template.jinja"),
        ("tokenizer_config.json", "tokenizer_config.json"),
        ("model llama", "model-1.safetensors"),
        ("model llama", "generation_config.json"),
        ("adapter", "adapter_config.json"),
        ("tasks.jsonl", "task.jsonl"),
        ("vectors.npz", "a.npz"),
    ],
)
def test_what_is_no_file_is_refused_and_never_waited_for(name, file, kind, valid, tmp_path):
    folder = tmp_path / "case"
    hostile.copy(valid(name), folder)
    assert hostile.attempt(READERS[name].read, folder) == hostile.Outcome("read")  # imports
    (folder / file).unlink()
    if kind == "fifo":
        os.mkfifo(folder / file)
    elif kind == "folder":
        (folder / file).mkdir()
    else:
        (folder / file).symlink_to("/dev/zero")
    with hostile.little_memory():
        outcome = hostile.attempt(READERS[name].read, folder)
    assert outcome.kind == "refused", outcome.told


# -- chat templates --------------------------------------------------------------------------------

DOUBLE = "{{% set n = namespace(x={0}) %}}{{% for a in range(99) %}}{{% set n.x = n.x {1} n.x %}}"
GREEDY = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "1,000,000 s",
    DOUBLE.format("'x'", "~") + "{% endfor %}": "",
    DOUBLE.format("[1]", "+") + "{% endfor %}": "",
    "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "f(" * 40 + "'x'" + ")" * 40 + " }}": "",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ 'x' * 10**10 }}": "a text or list of 10,000,000,000",
    "{{ 'x' | center(10**10) }}": "it calls do_center with 10000000000",
    "{{ 'x'.ljust(10**10) }}": "it calls ljust with 10000000000",
    "{{ '%99999999999d' % 1 }}": "it formats with '%99999999999d'",
    "{{ '{:>99999999999}'.format(1) }}": "it formats with",
    "{{ messages | tojson(indent=10**9) }}": "it calls tojson with 1000000000",
    "{{ 9 ** 9999999 }}": "a power that is too large",
    "{{ range(10**10) | list }}": "10000000000",
    "{{ ('z' * 9999).replace('', 'y' * 9999) }}": "a text or list",
}


@pytest.mark.parametrize("source", GREEDY)
def test_a_template_that_asks_for_too_much_is_stopped(source):
    template = ChatTemplate(source, "the template").validate()
    with hostile.little_memory(), pytest.raises(TemplateError, match=GREEDY[source]):
        template.text([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{ (" + "(" * 5000, "{{ " + "[" * 300 + "]" * 300 + " }}",
     "{% for a in b %}" * 30 + "{% endfor %}" * 30, "{% if a %}" * 200 + "{% endif %}" * 200,
     "{{ a }}" * 100_000],
)  # fmt: skip
def test_a_template_that_cannot_be_compiled_is_refused(source):
    with pytest.raises(UserError, match="the template"):
        ChatTemplate(source, "the template").validate()


def test_bounds_leave_templates_as_jinja_renders_them():
    """Against jinja2 without any bounds."""
    import jinja2

    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages if m.content %}{% set ns.n = ns.n + 1 %}"
        "{{ m.role ~ ': ' ~ m['content'] | trim ~ none ~ 1.5 }}{% if not loop.last %}, {% endif %}"
        "{% endfor %}{% macro f(x, y=2) %}<{{ x * y }}>{% endmacro %}{{ f('ab') + f(3, y=4) }}"
        "{% set z %}{{ ns.n }}{% endset %}{{ z | upper }}{{ {'a': [1, 2]} | tojson }}"
        "{{ '%s-%03d' % ('a', 7) }}{{ ['a', 'b'] | join(', ') }}{{ undefined_name }}"
        "{% filter upper %}abc{% endfilter %}{{ 'a-b'.replace('-', '+') }}{{ 2 ** 10 % 7 }}"
    )
    messages = [{"role": "user", "content": " Hi "}, {"role": "a", "content": "Bye\n"}]
    theirs = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    ours = ChatTemplate(source, "the template").text(messages)
    assert ours == theirs.render(messages=messages)
    assert "<abab><12>" in ours


# -- the shared mechanism --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 65 + b"]" * 65, "nested more than 64 levels deep"),
        (b"[" + b"1" * 39 + b"]", "a number of 39 digits"),
        (b"[" + b"[]," * 6_000_000 + b"1]", "more than 5,000,000 values"),
        (b'"' + b"a" * (65 << 20) + b'"', "at most 67,108,864 are read"),
        (b"\xff\xfe[\x00]\x00", "can't decode byte 0xff"),
    ],
    ids=["depth", "digits", "values", "bytes", "encoding"],
)
def test_json_beyond_the_limits_is_malformed(content, said):
    with hostile.little_memory(), pytest.raises(untrusted.MalformedError, match=said):
        untrusted.parse_json(content)


def test_json_within_the_limits_is_that_of_json():
    tree = {"a": [1, -2.5, None, True, "é\U0001f600"], "b": [[[{}]]], "c": 10**30}
    assert untrusted.parse_json(b"\xef\xbb\xbf" + json.dumps(tree).encode()) == tree


def test_a_message_shows_no_control_characters_and_no_endless_values():
    told = str(UserError("a \x1b[31mred\x00 \ud800 name\n" + "x" * 10**6 + "\n" * 500))
    assert told.startswith("a \\x1b[31mred\\x00 \\ud800 name\nxxx")
    assert len(told) < 3000
    assert told.endswith("lines more")


def test_the_command_line_refuses_with_2(valid, tmp_path, capfd):
    """Whatever Rust prints of its panic, ours is one line without a traceback."""
    folder = tmp_path / "case"
    hostile.copy(valid("tokenizer.json wordlevel"), folder)
    edit = put("model", "unk_token", "gone")
    (folder / TOKENIZER).write_bytes(edit((folder / TOKENIZER).read_bytes()))
    (folder / "text.txt").write_text("zebras are unknown here\n" * 9)
    words = ["prepare", str(folder / "text.txt"), "--tokenizer", str(folder / TOKENIZER)]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    told = capfd.readouterr().err
    assert "cannot use it (WordLevel error: Missing [UNK] token" in told
    assert "Traceback" not in told
    with pytest.raises(UserError):
        FileTokenizer(folder / TOKENIZER).encode("unknown word")


# -- no reader is forgotten ------------------------------------------------------------------------

# Calls that read a file's content as something, by the attribute's name and what it belongs to.
PARSERS = {
    ("json", "loads"), ("json", "load"), ("np", "load"), ("np", "fromfile"), ("np", "memmap"),
    ("np", "frombuffer"), ("tarfile", "open"), ("zipfile", "ZipFile"), ("Image", "open"),
    ("gzip", "decompress"), ("gzip", "GzipFile"), ("ast", "literal_eval"), ("pickle", "load"),
    ("pickle", "loads"), ("tokenizers", "from_str"), ("csv", "reader"),
}  # fmt: skip
# The modules that do, and the reader of the table that goes through them; or why none does.
COVERED = {
    "config/reader.py": "config.gin",
    "config/untrusted.py": "model llama",
    "data/tokenization/file_tokenizer.py": "tokenizer.json bpe",
    "data/images/saved.py": "saved images",
    "data/images/stores.py": "image folder",
    "data/images/tars.py": "image tar",
    "data/vectors/source.py": "vectors.npz",
    "data/pairs/files.py": "pairs.tsv",
    "data/text/formats/csv_lines.py": "text.csv",
    "data/text/documents.py": "text.jsonl.gz",
    "data/text/stores/store.py": "token store",
    "data/text/formats/token_files.py": "megatron tokens",
    "data/token_arrays.py": "token store",
    "models/weights/formats/float8.py": "model llama",
    "models/weights/formats/gguf.py": "gguf",
    "models/weights/formats/mxfp4.py": "model llama",
    "models/weights/formats/safetensors.py": "model llama",
}
EXCEPTIONS = {
    "config/swept.py": "a value of the command line",
    "config/values.py": "a value that gin has read",
    "data/tokenization/tokenizer.py": "bytes of a text",
    "training/preflight/elastic.py": "an argument of the supervisor",
    "training/offload/files.py": "the run's own files, written by this process",
    "run/evaluation.py": "bits of a number that other processes sent",
    "run/checkpoint/store.py": "what was just written, for a copy",
    "run/checkpoint/manifest.py": "the file that `read` has checked byte for byte",
    "run/checkpoint/local_checkpoints.py": "values that other processes of the run sent",
    "run/checkpoint/local_shards.py": "files that `check` has compared with their digests",
    "run/cluster/wire.py": "authenticated messages; test_strangers.py",
    "run/attempts/elastic.py": "what a process of this program prints",
    "run/attempts/standby.py": "a message of the supervisor, over a socket pair",
    "run/huggingface/awq.py": "config.json that `Folder.extra_files` has bounded",
    "run/huggingface/exporting.py": "files that `Folder.extra_files` has bounded",
    "analysis/planning/compiled/compiled.py": "the cache of this user's plans",
}


def parsing_modules():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = getattr(owner, "id", None) or getattr(owner, "attr", None)
                if (name, node.attr) in PARSERS or (node.attr == "from_str"):
                    found.add(path.relative_to(PACKAGE).as_posix())
    return found


def test_every_module_that_parses_foreign_content_is_fuzzed_or_explained():
    assert set(COVERED.values()) <= set(READERS)
    found = parsing_modules()
    assert found - COVERED.keys() - EXCEPTIONS.keys() == set()
    assert EXCEPTIONS.keys() - found == set(), "explained, but parses nothing any more"
