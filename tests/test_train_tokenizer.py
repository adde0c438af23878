"""`jaxtrain tokenizer`: a tokenizer.json that the library, transformers and a run read alike."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxtrain.cli import main
from jaxtrain.data.text.source import TextData
from jaxtrain.run.commands.data import END

TEXT = "".join(f"line {number} of the text, and the cat sat on it\n" for number in range(400))


@pytest.fixture
def corpus(tmp_path):
    """One document to train on a part of."""
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def test_the_tokens_are_those_that_the_library_learns_of_the_training_part(
    corpus, tmp_path, capsys
):
    out = tmp_path / "tokenizer"
    assert main(["tokenizer", str(corpus), "--out", str(out), "--vocab-size", "300"]) == 0
    told = capsys.readouterr().out
    file = out / "tokenizer.json"
    assert "300 tokens learned from" in told
    assert f"-b 'TextData.tokenizer=\"{file}\"'" in told
    found = tokenizers.Tokenizer.from_file(str(file))
    # By hand: of one document the last 5 % from a line on are held out.
    place = TEXT.find("\n", int(len(TEXT) * 0.95)) + 1
    expected = tokenizers.Tokenizer(models.BPE())
    expected.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected.decoder = decoders.ByteLevel()
    expected.train_from_iterator(
        [TEXT[:place]],
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=[END], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    assert found.get_vocab() == expected.get_vocab()
    assert found.decode(found.encode("Grüße 你好\n").ids) == "Grüße 你好\n"


def test_a_run_reads_it_and_transformers_names_the_same_end(corpus, tmp_path):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "tokenizer"
    assert main(["tokenizer", str(corpus), "--out", str(out), "--vocab-size", "290"]) == 0
    data = TextData(source=str(corpus), tokenizer=str(out / "tokenizer.json"), sequence_length=8)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    ours = data.open_tokenizer()
    assert ours.end_of_text == theirs.eos_token_id
    assert ours.encode(TEXT[:200]) == theirs(TEXT[:200]).input_ids
    assert data.vocab_size == len(theirs) == 290
    assert len(data.open(seed=0).train) > 0


def test_what_cannot_be_trained_is_an_error(corpus, tmp_path, capsys):
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    new = str(tmp_path / "new")
    for words, said in (
        ([str(corpus), "--out", new, "--vocab-size", "256"], "--vocab-size 256: use at least 257"),
        ([str(corpus), "--out", str(tmp_path / "full")], "is there already; name a folder"),
        ([str(blank), "--out", new], "the text is empty, so there is nothing to train on"),
        (["synthetic", "--out", new], "name text on this machine's disks"),
        (["resnet_digits", "--out", new], "tokenizer resnet_digits: its data are ImageData"),
    ):
        assert main(["tokenizer", *words]) == 2
        assert said in capsys.readouterr().err
