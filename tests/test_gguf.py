"""GGUF: blocks dequantize, a Llama's file equals its folder, and bad files are rejected."""

import json
import re
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from gguf_files import interleaved

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.weights.family import family_for, their_shapes
from jaxtrain.models.weights.formats.gguf import GgufFile
from jaxtrain.run.huggingface.parameters import read_parameters, shapes_of
from jaxtrain.training import layouts
from jaxtrain.training.compose import compose
from jaxtrain.training.settings import load_config

SIZES = Llama(
    vocab_size=300, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64,
    context_length=48, rope_theta=1e5, norm_eps=1e-5, tie_embeddings=True,
)  # fmt: skip
F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8


# -- a writer, as the format is described -----------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(given: object) -> bytes:
    match given:
        case bool():
            return struct.pack("<I?", 7, given)
        case int():
            return struct.pack("<II", 4, given)
        case float():
            return struct.pack("<If", 6, given)
        case str():
            return struct.pack("<I", 8) + text(given)
        case [str(), *_]:
            body = b"".join(map(text, given))
            return struct.pack("<IIQ", 9, 8, len(given)) + body
        case list():
            return struct.pack(f"<IIQ{len(given)}i", 9, 5, len(given), *given)
    raise AssertionError(given)


def gguf(said: dict, tensors: dict[str, tuple[tuple[int, ...], int, bytes]]) -> bytes:
    """A file: what it says, and of each tensor its shape, its kind and its bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(said))
    head += b"".join(text(key) + value(one) for key, one in said.items())
    body = b""
    for name, (shape, kind, content) in tensors.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += text(name) + sizes + struct.pack("<IQ", kind, len(body))
        body += content + b"\0" * (-len(content) % 32)
    return head + b"\0" * (-len(head) % 32) + body


# -- numbers ----------------------------------------------------------------------------------


def test_blocks_give_back_the_numbers_that_they_stand_for(tmp_path):
    half = np.float16
    eights = half(0.5).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    # Byte k holds number k below and number k + 16 above: k and 15 - k.
    nibbles = bytes(k | (15 - k) << 4 for k in range(16))
    up_and_down = np.concatenate([np.arange(16.0), np.arange(15.0, -1.0, -1.0)])
    expected = {
        "eights": 0.5 * np.arange(-16.0, 16.0),
        "fours": 0.25 * (up_and_down - 8),
        "with_least": 2.0 * up_and_down - 3.0,
        "halves": np.array([1.5, -2.0]),
        "brains": np.array([1.0, 3.0]),
        "floats": np.array([[0.1, 0.2], [0.3, 0.4]], np.float32),
    }
    tensors = {
        "eights": ((32,), Q8_0, eights),
        "fours": ((32,), Q4_0, half(0.25).tobytes() + nibbles),
        "with_least": ((32,), Q4_1, half(2.0).tobytes() + half(-3.0).tobytes() + nibbles),
        "halves": ((2,), F16, np.array([1.5, -2.0], half).tobytes()),
        "brains": ((2,), 30, np.array([1.0, 3.0], jnp.bfloat16).tobytes()),
        "floats": ((2, 2), F32, expected["floats"].tobytes()),
    }
    (tmp_path / "a.gguf").write_bytes(gguf({"general.architecture": "llama"}, tensors))
    file = GgufFile(tmp_path / "a.gguf")
    for name, tensor in file._read[1].items():
        assert tensor.open().dtype == np.float32
        np.testing.assert_array_equal(tensor.open(), expected[name].astype(np.float32))


SAID = {
    "general.architecture": "llama", "llama.vocab_size": 300, "llama.block_count": 2,
    "llama.embedding_length": 32, "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2, "llama.rope.dimension_count": 8,
    "llama.feed_forward_length": 64, "llama.context_length": 48, "llama.rope.freq_base": 1e5,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


# -- a whole model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.pre_tokenizer = words  # so that it learns digits together, which are then kept separate
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=SIZES.vocab_size,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = ["the cat sat on the mat in 2024, and then the other cat sat there too"] * 9
    found.train_from_iterator(lines, trainer)
    found.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, words])
    return found


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    """By the names of a Hugging Face folder."""
    family, _ = family_for(SIZES, "llama")
    shapes = {
        "token_embedding": (300, 32), "norm_scale": (32,),
        "layers/attention_norm_scale": (2, 32), "layers/mlp_norm_scale": (2, 32),
        "layers/query": (2, 32, 4, 8), "layers/key": (2, 32, 2, 8), "layers/value": (2, 32, 2, 8),
        "layers/out": (2, 4, 8, 32), "layers/gate": (2, 32, 64), "layers/up": (2, 32, 64),
        "layers/down": (2, 64, 32),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    there = their_shapes(family.names(SIZES), shapes)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in there.items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory, tokenizer, tensors) -> Path:
    vocab = tokenizer.get_vocab()
    names = sorted(vocab, key=vocab.get)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    said = {
        **SAID, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [3 if name[:2] == "<|" else 1 for name in names],
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    return write_file(tmp_path_factory.mktemp("published") / "tiny.gguf", said, tensors)


def write_file(path: Path, said: dict, tensors: dict[str, np.ndarray]) -> Path:
    """A whole model's file; its tensors by the names of a Hugging Face folder."""
    parts = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.up_proj": "ffn_up",
        "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    ends = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    rows = {}
    for name, content in tensors.items():
        if name in ends:
            called = ends[name]
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            called = f"blk.{layer}.{parts[part]}.weight"
            heads = {"attn_q": 4, "attn_k": 2}.get(parts[part])
            content = content if heads is None else interleaved(content, heads)
        rows[called] = (content.shape, F32, content.tobytes())
    path.write_bytes(gguf(said, rows))
    return path


def test_a_file_gives_the_parameters_that_its_folder_would(file, tensors):
    config = load_config(f"hf:{file}", ["Mesh.fsdp=4", "Mesh.pipe=2"])
    assert config.train.model == SIZES
    program = compose(config, layouts.layout(config)).setup
    params = read_parameters(GgufFile(file), program, SIZES)
    family, _ = family_for(SIZES, "llama")
    assert shapes_of(program)["layers/query"] == (2, 32, 4, 8)
    for name in family.names(SIZES):
        part, _, leaf = name.ours.rpartition("/")
        ours = np.asarray((params[part] if part else params)[leaf].get_value())
        for place, there in name.tensors(ours.shape):
            assert np.array_equal(name.to_theirs(ours[place]), tensors[there]), there


def test_the_tokenizer_gives_the_same_ids(file, tokenizer):
    carried = GgufFile(file).extra_files()
    found = tokenizers.Tokenizer.from_str(carried["tokenizer.json"].decode())
    for line in ("the cat sat on 2024 mats", "<|im_end|>and é then", "  too\n\nmany  "):
        assert found.encode(line).ids == tokenizer.encode(line).ids
        assert found.decode(found.encode(line).ids, skip_special_tokens=False) == line
    settings = json.loads(carried["tokenizer_config.json"])
    assert settings["chat_template"] == "{{ messages }}"
    assert settings["eos_token"] == "<|im_end|>"


# Writes a model and generates; what is read is compared in the fast part.
@pytest.mark.slow
def test_an_imported_file_is_a_run_with_its_tokenizer(file, tmp_path, capsys):
    workdir, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("the cat sat there\n" * 200)
    words = [
        "import-hf", str(file), "--workdir", str(workdir), "-b", f"TextData.source='{text}'",
        "-b", "TextData.sequence_length=16", "-b", "Train.eval_batches=1",
    ]  # fmt: skip
    assert main(words) == 0
    said = capsys.readouterr()
    assert "Parity: the largest difference of a logit" in said.out
    assert "It has no tokenizer" not in said.out
    assert "Converting" not in said.err
    data = load_config(workdir / "config.gin").train.data
    assert data.tokenizer == str(workdir / "huggingface" / "tokenizer.json")
    assert main(["eval", "--workdir", str(workdir)]) == 0


def test_an_import_that_names_no_text_reads_the_embedded_one_with_its_tokenizer(
    file, tmp_path, capsys
):
    workdir = tmp_path / "run"
    assert main(["import-hf", str(file), "--workdir", str(workdir)]) == 0
    assert "It has no tokenizer" not in capsys.readouterr().out
    data = load_config(workdir / "config.gin").train.data
    assert data.source == "embedded"
    assert data.tokenizer == str(workdir / "huggingface" / "tokenizer.json")


# -- what is rejected --------------------------------------------------------------------------

ONE = {"x": ((2,), F32, b"\0" * 8)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GGUX" + b"\0" * 40, "it does not begin like version 2 or 3"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "it does not begin like version 2 or 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), f"a count of {1 << 60}"),
        (gguf({}, ONE)[:40], "requires a buffer of"),
        (gguf({}, ONE)[:-32], "x ends after the file"),
        (
            gguf({}, {"x": ((2,), 99, b"")}),
            "x is quantized in an unsupported format (type 99)",
        ),
        (gguf({}, {"x": ((33,), Q8_0, b"\0" * 68)}), "x is [33]"),
        (gguf({"general.alignment": 0}, ONE), "an alignment of 0"),
        (gguf({"a": "b", "A": "c"}, ONE).replace(text("A"), text("a")), "it has the key a twice"),
        (
            gguf({}, {**ONE, "y": ((2,), F32, b"\0" * 8)}).replace(text("y"), text("x")),
            "it has two tensors of one name",
        ),
        (
            gguf({"a": "b"}, {}).replace(struct.pack("<I", 8) + text("b"), b"\x63\0\0\0"),
            "of kind 99",
        ),
    ],
)
def test_a_bad_file_is_refused(tmp_path, content, said):
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        _ = GgufFile(file).family_and_model
    assert f"{file} is not a supported GGUF file (" in str(raised.value)


def test_another_architecture_is_refused(tmp_path):
    file = tmp_path / "other.gguf"
    file.write_bytes(gguf({"general.architecture": "mamba"}, {}))
    with pytest.raises(
        UserError, match="GGUF files of 'llama' are supported, not those of 'mamba'"
    ):
        _ = GgufFile(file).family_and_model


def test_a_file_without_a_tokenizer_is_reported(tensors, tmp_path, capsys):
    file = write_file(tmp_path / "bare.gguf", SAID, tensors)
    assert main(["import-hf", str(file), "--workdir", str(tmp_path / "run")]) == 0
    assert "It has no tokenizer" in capsys.readouterr().out


def test_another_tokenizer_does_not_come_along(tmp_path):
    file = tmp_path / "spm.gguf"
    file.write_bytes(gguf({**SAID, "tokenizer.ggml.model": "llama"}, ONE))
    assert GgufFile(file).extra_files().keys() == {"config.json"}
