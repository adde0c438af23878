"""The tokenizer of a GGUF file: ids, special tokens around a text, and the ends of an answer."""

import json
import re

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

pytest.importorskip("torch", reason="PyTorch is the peer of this test")
pytest.importorskip("gguf", reason="gguf writes the files")

from gguf_files import llama, metadata, write

from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.formats.gguf import GgufFile

SPECIAL = ["<s>", "</s>", "<|turn|>", "<pad>"]
TEXTS = ("the cat sat on 2024 mats", "é <s> then<|turn|> there", "  too\n\nmany  ", "a <name> b")


@pytest.fixture(scope="module")
def peer() -> tokenizers.Tokenizer:
    """A byte-level tokenizer with four special tokens and one added token that is not special."""
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    found.train_from_iterator(["the cat sat on the mat and the other cat sat there too"], trainer)
    found.add_tokens([AddedToken("<name>", normalized=False)])
    return found


@pytest.fixture(scope="module")
def said(peer) -> dict[str, object]:
    vocab = peer.get_vocab()
    names = sorted(vocab, key=vocab.get)
    kinds = {name: 3 for name in SPECIAL} | {"<name>": 4}
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [kinds.get(name, 1) for name in names],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in
                                  json.loads(peer.to_str())["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
    }  # fmt: skip


@pytest.fixture(scope="module")
def carried(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")

    def one(said):
        model = llama(vocab_size=len(said["tokenizer.ggml.tokens"]))
        path = write(folder / f"{len(list(folder.iterdir()))}.gguf", model, metadata(model) | said)
        return {name: json.loads(text) for name, text in GgufFile(path).extra_files().items()}

    return one


def of(files) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))


def test_ids_and_texts_are_those_of_the_tokenizer_that_was_written(peer, said, carried):
    found = of(carried(said))
    for text in TEXTS:
        ids = found.encode(text).ids
        assert ids == peer.encode(text).ids
        for skipped in (True, False):
            ours, theirs = (one.decode(ids, skip_special_tokens=skipped) for one in (found, peer))
            assert ours == theirs
    # Without its kind <name> is a text like any other.
    plain = {**said, "tokenizer.ggml.token_type": None}
    assert len(of(carried(plain)).encode("<name>").ids) > 1


@pytest.mark.parametrize("around", ["", "bos", "eos", "bos eos"])
def test_tokens_around_a_text_are_those_of_a_template(peer, said, carried, around):
    names = {"bos": "<s>", "eos": "</s>"}
    flags = {f"tokenizer.ggml.add_{one}_token": one in around.split() for one in names}
    found = of(carried({**said, **flags}))
    expected = tokenizers.Tokenizer.from_str(peer.to_str())
    parts = [names["bos"] if "bos" in around else "", "$A", names["eos"] if "eos" in around else ""]
    single = " ".join(filter(None, parts))
    if around:
        expected.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} {single.replace('$A', '$B')}",
            special_tokens=[("<s>", 0), ("</s>", 1)],
        )  # fmt: skip
    for text in TEXTS:
        assert found.encode(text).ids == expected.encode(text).ids
        assert found.encode(text, text).ids == expected.encode(text, text).ids


@pytest.mark.parametrize(
    ("ids", "ends"),
    [
        ({}, 1),
        ({"eot": 2}, [1, 2]),
        ({"eot": 1, "eom": 2}, [1, 2]),
        ({"eos": None}, None),
        ({"eos": None, "eot": 2}, 2),
    ],
)
def test_every_end_of_an_answer_comes_along(said, carried, ids, ends):
    files = carried({**said, **{f"tokenizer.ggml.{k}_token_id": v for k, v in ids.items()}})
    assert files["config.json"]["eos_token_id"] == ends
    assert files["generation_config.json"].get("eos_token_id") == ends
    assert files["generation_config.json"]["bos_token_id"] == 0
    assert files["tokenizer_config.json"].get("eos_token") == (None if "eos" in ids else "</s>")
    assert files["tokenizer_config.json"]["bos_token"] == "<s>"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"merges": ["a b c"]}, "merges has 'a b c', which is not a pair of tokens"),
        ({"merges": ["th zz"]}, "merges has 'th zz', which is not a pair of tokens"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges is not a list of str"),
        ({"token_type": [1, 1]}, "token_type 2 numbers"),
        ({"eos_token_id": 4000}, "eos_token_id = 4000; it must be a whole number under"),
        ({"bos_token_id": "<s>"}, "bos_token_id = '<s>'; it must be a whole number under"),
        ({"add_bos_token": "yes"}, "add_bos_token = 'yes'; it must be true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "no bos_token_id or eos_token_id says"),
        ({"add_space_prefix": True}, "add_space_prefix is true"),
    ],
)
def test_parts_that_do_not_fit_are_rejected(said, carried, changes, words):
    with pytest.raises(UserError, match=re.escape(words)):
        carried({**said, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}})
