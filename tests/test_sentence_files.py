"""Every key of sentence-transformers' files is read, irrelevant or rejected, by its own classes."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.folder import Folder
from jaxtrain.models.weights.sentences import TABLES

torch = pytest.importorskip("torch", reason="PyTorch makes the peer's embeddings")
transformers = pytest.importorskip("transformers", reason="transformers is the peer")
peer = pytest.importorskip("sentence_transformers", reason="sentence-transformers is the peer")
parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(59))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder that sentence-transformers wrote."""
    plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("saved")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=24,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(plain)
    (plain / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(str(plain / "vocab.txt")).save_pretrained(plain)
    made = peer.SentenceTransformer(str(plain), device="cpu")
    made.append(parts.Normalize())
    made.save(str(folder))
    return folder


def edited(saved: Path, folder: Path, name: str, **changes: Any) -> Folder:
    for file in saved.rglob("*.json"):
        copy = folder / file.relative_to(saved)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(file.read_bytes())
    content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps({**content, **changes}))
    return Folder(folder)


def test_what_sentence_transformers_writes_is_read(saved):
    model: Any = Folder(saved).family_and_model[1]
    assert (model.pooling, model.normalized) == ("mean", True)


def test_every_key_that_its_classes_know_is_in_the_tables():
    assert not {*parts.Pooling.config_keys} - TABLES["pooling"].keys()
    assert not {*parts.Normalize.config_keys} - TABLES["normalize"].keys()
    assert not {*parts.Transformer.config_keys} - TABLES["transformer"].keys()
    older = {f"pooling_mode_{mode}_token{'' if mode == 'cls' else 's'}" for mode in
             ("cls", "mean", "max", "mean_sqrt_len", "weightedmean")}  # fmt: skip
    assert not older - TABLES["pooling"].keys()


def test_a_word_of_pooling_is_taken_before_flags_as_there(saved, tmp_path):
    both = {"pooling_mode": "cls", "pooling_mode_mean_tokens": True}
    folder = edited(saved, tmp_path, "1_Pooling/config.json", **both)
    theirs = parts.Pooling.load(str(tmp_path), subfolder="1_Pooling")
    assert theirs.pooling_mode == "cls"
    model: Any = folder.family_and_model[1]
    assert model.pooling == "first"


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "pooling_mode = ['mean', 'm"),
        ("1_Pooling/config.json", {"layer": 3}, "layer = 3 is an unknown key"),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"},
         "module_input_name = 'token_embeddings'; it must be 'sentence_embedding'"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case = True; it must"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task = 'fil"),
        ("sentence_bert_config.json", {"query_length": 8}, "query_length = 8; it must be None"),
        ("sentence_bert_config.json", {"modality_config": {"image": {}}}, "modality_config.image"),
        ("sentence_bert_config.json", {"tokenizer_args": {"use_fast": False}}, "tokenizer_args = "),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"},
         "default_prompt_name = 'query'; it must be None (texts get no prompt prefix here)"),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "truncate_dim = 8; it must be"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "model_type = 'Spa"),
        ("config_sentence_transformers.json", {"scale": 2}, "scale = 2 is an unknown key"),
    ],
)  # fmt: skip
def test_what_is_not_done_here_is_rejected_by_name(name, changes, said, saved, tmp_path):
    folder = edited(saved, tmp_path, name, **changes)
    with pytest.raises(UserError) as error:
        _ = folder.family_and_model
    assert said in str(error.value)
