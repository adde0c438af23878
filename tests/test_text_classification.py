"""Classes of texts and tokens: BERT as transformers', recurrent nets of both ways as PyTorch's."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_torch import GRADIENTS, OUTPUTS, filled, name_of
from conftest import make_layout, make_step, predicted
from flax import nnx
from parity import assert_equal, evaluate

from jaxtrain import Trainer, load_config
from jaxtrain.__main__ import main
from jaxtrain.analysis.verify.shrink import shrink
from jaxtrain.config.errors import UserError
from jaxtrain.data.pairs.classed import LabelledText
from jaxtrain.data.text.source import TextData
from jaxtrain.models.recurrent.rnn import GRU, LSTM, RNN
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.weights.family import family_of
from jaxtrain.training.preflight.preflight import check
from jaxtrain.training.state import TrainState

TOLD = {"objective": "token_classification"}


def texts(rows: int, *, classes: int, vocab_size: int, place: str = "first", length: int = 12):
    """Random texts of all lengths with random labels."""
    data = LabelledText(
        num_classes=classes, synthetic_vocab_size=vocab_size, sequence_length=length, pooling=place
    )
    opened = data.open(seed=0).train
    return jax.tree.map(lambda *x: np.stack(x), *(opened.example(n, None) for n in range(rows)))


# -- BERT ------------------------------------------------------------------------------------------

BERTS = {
    "small": BERT(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64,
                  context_length=16, num_classes=3, **TOLD),
    "odd": BERT(vocab_size=61, num_layers=1, embed_dim=18, num_heads=3, mlp_dim=20,
                context_length=17, num_classes=5, **TOLD),
    "two": BERT(vocab_size=23, num_layers=1, embed_dim=8, num_heads=1, mlp_dim=5,
                context_length=16, num_classes=2, token_types=1, **TOLD),
}  # fmt: skip


def bert_pair(sizes: BERT):
    from against_transformers import Pair, draw, torch, transformers  # noqa: PLC0415

    class OfSentences(Pair):
        def names(self):
            content = {"architectures": ["BertForSequenceClassification"]}
            return family_of(content, where="").names(self.sizes)

        def given(self, batch):
            return {
                "input_ids": torch.tensor(batch.inputs).long(),
                "attention_mask": torch.tensor(batch.segment_ids).long(),
            }

        def logits(self, batch):
            """The head at every place of whole rows."""
            ids = self.given(dataclasses.replace(batch, segment_ids=np.ones_like(batch.inputs)))
            hidden = self.theirs.bert(**ids).last_hidden_state
            return self.theirs.classifier(torch.tanh(self.theirs.bert.pooler.dense(hidden)))

        def loss(self, batch):
            """Their own forward pass, of the first token."""
            logits = self.theirs(**self.given(batch)).logits
            labels = torch.tensor(batch.targets[:, 0]).long()
            return torch.nn.functional.cross_entropy(logits, labels)

    config = transformers.BertConfig(
        vocab_size=sizes.vocab_size, hidden_size=sizes.embed_dim, num_labels=sizes.num_classes,
        num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads,
        intermediate_size=sizes.mlp_dim, max_position_embeddings=sizes.context_length,
        type_vocab_size=sizes.token_types, layer_norm_eps=sizes.norm_eps, pad_token_id=None,
        attn_implementation="eager",
    )  # fmt: skip
    made = draw(transformers.BertForSequenceClassification(config))
    with torch.no_grad():  # of few numbers: logits in which an error shows
        made.classifier.weight *= 4
    return OfSentences(sizes, made, "bert")


# The cases that are left run the same code.
@pytest.mark.slow_cases("small", "two")
@pytest.mark.parametrize("name", BERTS)
def test_bert_tells_sentences_as_transformers_does(name):
    sizes = BERTS[name]
    bert_pair(sizes).compare(texts(5, classes=sizes.num_classes, vocab_size=sizes.vocab_size))


@pytest.mark.slow
def test_every_mesh_tells_the_same():
    sizes = BERTS["small"]
    batch = texts(16, classes=3, vocab_size=64)
    one = evaluate(make_step(sizes, make_layout()), batch)
    for layout in ({"data": 2, "fsdp": 2, "tensor": 2}, {"context": 2, "tensor": 2, "zero": 1}):
        program = make_step(sizes, make_layout(**layout))
        assert_equal(evaluate(program, batch, one), one)


# -- recurrent nets of both ways -------------------------------------------------------------------

WAYS = {**TOLD, "bidirectional": True}
RECURRENT = {
    "rnn": RNN(vocab_size=64, num_layers=2, embed_dim=16, num_classes=5, **WAYS),
    "gru": GRU(vocab_size=61, num_layers=2, embed_dim=14, num_classes=3, **WAYS),
    "lstm": LSTM(vocab_size=23, num_layers=3, embed_dim=6, num_classes=2, **WAYS),
    "lstm_one_way": LSTM(vocab_size=23, num_layers=2, embed_dim=9, num_classes=4, **TOLD),
    "gru_one_way": GRU(vocab_size=23, num_layers=1, embed_dim=5, num_classes=2, **TOLD),
}  # fmt: skip


def torch_twin(torch, sizes):
    """Their table, network and head, and a function to our paths of what it takes of each."""
    torch.manual_seed(0)
    kind, both = type(sizes).__name__, sizes.bidirectional
    D = sizes.embed_dim
    table = torch.nn.Embedding(sizes.vocab_size, D)
    layers = vars(torch.nn)[kind](
        D, D // (1 + both), sizes.num_layers, batch_first=True, bidirectional=both
    )
    head = torch.nn.Linear(D, sizes.num_classes, bias=False)
    own = dict(layers.named_parameters())
    if kind == "LSTM":  # ours has one bias where theirs has two
        with torch.no_grad():
            for name, value in own.items():
                if "bias_hh" in name:
                    value.zero_()

    def paths(of):
        found = {"token_embedding": of(table.weight), "output": of(head.weight)}
        names = {"input": "weight_ih", "recurrent": "weight_hh"}
        if kind == "LSTM":
            names |= {"gates_bias": "bias_ih"}
        else:
            names |= {"input_bias": "bias_ih", "recurrent_bias": "bias_hh"}
        for prefix, suffix in {"forward_": "", "backward_": "_reverse"}.items():
            if both or not suffix:
                for ours, theirs in names.items():
                    values = [of(own[f"{theirs}_l{i}{suffix}"]).T for i in range(sizes.num_layers)]
                    found[f"layers/{prefix if both else ''}{ours}"] = np.stack(values)
        return found

    return (table, layers, head), paths


# The cases that are left run the same code.
@pytest.mark.slow_cases("rnn", "lstm_one_way", "gru")
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_nets_label_tokens_as_pytorch_does(name):
    """Of texts of all lengths, each alone through theirs; every token's label counts (tagging), so
    that of the last one (many to one) does too."""
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    sizes = RECURRENT[name]
    batch, rng = texts(6, classes=2, vocab_size=sizes.vocab_size), np.random.default_rng(0)
    labels = rng.integers(0, sizes.num_classes, batch.inputs.shape).astype(np.int32)
    every = batch.segment_ids.astype(np.float32)
    batch = dataclasses.replace(batch, targets=labels, loss_mask=every)
    (table, layers, head), paths = torch_twin(torch, sizes)
    values = paths(lambda value: np.array(value.detach()))
    shapes = nnx.eval_shape(lambda: sizes.build(jax.random.key(0)))
    params = filled(nnx.state(shapes, nnx.Param), values)
    state = TrainState(jnp.int32(0), params, (), nnx.State({}), jnp.array([1.0, 0.0]))
    program = make_step(sizes, make_layout(fsdp=1))
    with program.setup.layout.active():
        found, metrics, _ = jax.jit(program.setup.gradients)(state, batch)
    total, right = 0.0, 0
    for row, length in enumerate(batch.segment_ids.sum(1)):
        logits = head(layers(table(torch.tensor(batch.inputs[row : row + 1, :length]).long()))[0])
        told = torch.tensor(labels[row, :length]).long()
        total = total + torch.nn.functional.cross_entropy(logits[0], told, reduction="sum")
        right += int((logits[0].argmax(-1) == told).sum())
    mean = total / float(every.sum())
    mean.backward()
    np.testing.assert_allclose(metrics["loss"], float(mean.detach()), rtol=OUTPUTS)
    np.testing.assert_allclose(metrics["accuracy"], right / every.sum(), rtol=1e-6)
    expected = paths(lambda value: np.array(value.grad))
    for path, variable in nnx.to_flat_state(found):
        value = expected.pop(name_of(path))
        off = np.linalg.norm(np.asarray(variable.get_value()) - value)
        assert off <= GRADIENTS * np.linalg.norm(value), path
    assert not expected


# -- data, runs, predictions -----------------------------------------------------------------------

WORDS = {"fruit": ["apple", "lime", "plum"], "tool": ["saw", "axe", "drill"]}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A file of lists of words, each of one kind."""
    folder, rng = tmp_path_factory.mktemp("labelled"), np.random.default_rng(0)
    kinds = ["tool", "fruit"] * 60
    lines = [{"text": " ".join(rng.choice(WORDS[kind], 3)), "label": kind} for kind in kinds]
    file = folder / "words.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file, lines


BINDINGS = [
    "Train.model = @GRU()", "Train.data = @LabelledText()", "GRU.vocab_size = 256",
    "GRU.num_layers = 1", "GRU.embed_dim = 32", "GRU.context_length = 24",
    "GRU.objective = 'token_classification'", "GRU.bidirectional = True",
    "LabelledText.sequence_length = 24", "Train.steps = 40", "Train.global_batch_size = 16",
    "Train.save_every = 0", "Train.log_every = 20", "Mesh.fsdp = -1",
    "Optimizer.learning_rate = 1e-2", "Precision.compute = 'float32'",
]  # fmt: skip


def test_rows_are_texts_with_the_label_where_it_is_told(labelled):
    file, lines = labelled
    first = LabelledText(source=str(file), sequence_length=24, begin=2)
    last = dataclasses.replace(first, begin=None, pooling="last")
    assert first.class_names() == ["fruit", "tool"]
    for data in (first, last):
        opened = data.open(seed=0)
        assert (opened.facts["train_texts"], opened.facts["heldout_texts"]) == (108, 12)
        row, text = opened.train.example(0, None), lines[0]["text"].encode()
        tokens = [2, *text] if data is first else [*text]
        tokens = tokens[:24]
        assert row.inputs[: len(tokens)].tolist() == tokens
        place = 0 if data is first else len(tokens) - 1
        assert row.targets[place] == 1
        assert row.loss_mask.tolist() == [float(n == place) for n in range(24)]
        assert row.segment_ids.sum() == len(tokens)


# tests/test_sequences.py has a run that learns classes and predicts in the fast part.
@pytest.mark.slow
def test_a_run_learns_and_predicts_the_names_of_classes(labelled, tmp_path, capsys):
    file, _ = labelled
    config = tmp_path / "words.gin"
    config.write_text("\n".join([*BINDINGS, f"LabelledText.source = {str(file)!r}"]))
    workdir = str(tmp_path / "run")
    assert main(["train", str(config), "--workdir", workdir]) == 0
    capsys.readouterr()
    assert main(["eval", "--workdir", workdir]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval_accuracy"] == 1.0
    assert "eval_perplexity" not in found
    note = tmp_path / "note.txt"
    note.write_text("axe saw axe")
    assert main(["predict", "--workdir", workdir, "lime plum", str(note), "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("lime plum: fruit (")
    assert lines[1].startswith(f"{note}: tool (")
    for words, said in (
        ([""], "predict: a text is empty"),
        (["lime", "--top", "0"], "--top 0: name at least 1 class"),
    ):
        assert main(["predict", "--workdir", workdir, *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["generate", "--workdir", workdir, "--prompt", "a"]) == 2
    assert "keeps no state of earlier tokens" in capsys.readouterr().err


def test_probabilities_are_those_of_the_logits(labelled):
    file, _ = labelled
    data = LabelledText(source=str(file), sequence_length=24, pooling="last")
    model = GRU(vocab_size=256, num_layers=1, embed_dim=8, context_length=24, **TOLD)

    def logits(batch):
        told = np.zeros((*batch.inputs.shape, 2))
        told[..., 0] = batch.inputs * np.log(2) / ord("e")  # log 2 at an "e"
        return told

    (one,) = predicted("plum apple", model, data, logits, top=2)
    assert dict(one.classes) == pytest.approx({"fruit": 2 / 3, "tool": 1 / 3})


@pytest.mark.parametrize(
    ("model", "data", "sentence"),
    [
        (BERTS["small"], TextData(sequence_length=16), r"gives texts alone; use @LabelledText"),
        (GPT(context_length=16), LabelledText(sequence_length=16), r"gives labels; use @TextData"),
        (BERTS["two"], LabelledText(sequence_length=16, num_classes=4, synthetic_vocab_size=8),
         r"BERT.num_classes=2 is smaller than LabelledText.num_classes=4"),
    ],
)  # fmt: skip
def test_labels_and_what_is_told_belong_together(model, data, sentence):
    config = load_config("bert_tiny")
    train = dataclasses.replace(config.train, model=model, data=data)
    with pytest.raises(UserError, match=sentence):
        check(dataclasses.replace(config, train=train), device_count=8, platform="cpu")


def test_sizes_and_files_that_cannot_be_are_refused(labelled):
    file, _ = labelled
    with pytest.raises(UserError, match=r"GRU.bidirectional=True with GRU.objective='next_token'"):
        GRU(bidirectional=True)
    with pytest.raises(UserError, match=r"embed_dim=9 with RNN.bidirectional=True.*use 10"):
        RNN(embed_dim=9, bidirectional=True, **TOLD)
    with pytest.raises(UserError, match=r"num_classes = 3, but .* has 2 \(fruit, tool\)"):
        LabelledText(source=str(file), num_classes=3).open(seed=0)
    with pytest.raises(UserError, match=r"LabelledText.source.*no field 'name'"):
        LabelledText(source=str(file), label_field="name").open(seed=0)


def test_verify_shrinks_what_tells_classes():
    config = load_config("bert_tiny")
    train = dataclasses.replace(
        config.train, model=BERTS["small"], data=LabelledText(num_classes=3, sequence_length=16)
    )
    small = shrink(dataclasses.replace(config, train=train))
    assert isinstance(small.config.train.data, LabelledText)
    check(small.config, device_count=1, platform="cpu")


def test_trainer_tells_every_place(labelled):
    """Logits of a text alone are those of the text beside others and padding."""
    file, lines = labelled
    config = load_config("bert_tiny")
    data = LabelledText(source=str(file), sequence_length=24)
    model = BERT(vocab_size=256, num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16,
                 context_length=24, **TOLD)  # fmt: skip
    train = dataclasses.replace(config.train, model=model, data=data, global_batch_size=8)
    trainer = Trainer(dataclasses.replace(config, train=train))
    tokens = list(lines[0]["text"].encode())[:24]
    alone = trainer.logits([tokens])[0, 0]
    row = jax.tree.map(lambda x: x[None], data.row(tokens))
    np.testing.assert_allclose(trainer.logits(row)[0, 0], alone, atol=1e-5)
