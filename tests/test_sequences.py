"""Sequences of vectors: recurrent nets equal PyTorch's, meshes one device; padding, files, runs."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from conftest import make_layout, make_step
from parity import assert_equal, evaluate
from test_text_classification import TOLD, WAYS, texts

from jaxtrain import Trainer, load_config
from jaxtrain.__main__ import main
from jaxtrain.analysis.verify.verify import verify
from jaxtrain.config.errors import UserError
from jaxtrain.data.pairs.classed import LabelledText
from jaxtrain.data.vectors.sequences import SequenceData
from jaxtrain.models.recurrent.rnn import GRU, LSTM, RNN
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.weights.family import Name
from jaxtrain.training.preflight.preflight import check

SHAPES = {
    "rnn": RNN(features=5, num_layers=2, embed_dim=16, num_classes=4, context_length=16, **WAYS),
    "gru": GRU(features=12, num_layers=2, embed_dim=14, num_classes=3, context_length=16, **WAYS),
    "lstm": LSTM(features=3, num_layers=1, embed_dim=9, num_classes=5, context_length=16, **TOLD),
    "gru_of_numbers": GRU(features=1, num_layers=1, embed_dim=7, num_classes=2,
                          context_length=16, **TOLD),
}  # fmt: skip


def sequences(sizes, rows: int, length: int = 12):
    """Random vectors of all lengths; every place has a label."""
    rng = np.random.default_rng(0)
    batch = texts(rows, classes=2, vocab_size=8, length=length)
    mask = batch.segment_ids.astype(np.float32)
    x = rng.normal(size=(*mask.shape, sizes.features)).astype(np.float32)
    labels = rng.integers(0, sizes.num_classes, mask.shape).astype(np.int32)
    return dataclasses.replace(batch, inputs=x * mask[..., None], targets=labels, loss_mask=mask)


def torch_pair(sizes):
    """torch.nn's layers between two linear ones, whose padding their packed sequences leave out."""
    from against_transformers import Pair, draw, torch  # noqa: PLC0415

    kind, both = type(sizes).__name__, sizes.bidirectional

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            D = sizes.embed_dim
            self.map = torch.nn.Linear(sizes.features, D, bias=False)
            self.layers = vars(torch.nn)[kind](
                D, D // (1 + both), sizes.num_layers, batch_first=True, bidirectional=both
            )
            self.head = torch.nn.Linear(D, sizes.num_classes, bias=False)

        def forward(self, x, lengths):
            packed = torch.nn.utils.rnn.pack_padded_sequence(
                self.map(x), lengths, batch_first=True, enforce_sorted=False
            )
            h, _ = torch.nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0], batch_first=True)
            return self.head(h)

    class OfSequences(Pair):
        def names(self):
            found = [Name("map.weight", "token_embedding", "FD->DF")]
            found.append(Name("head.weight", "output", "CD->CD"))
            ways = {"": "forward_", "_reverse": "backward_"} if both else {"": ""}
            bias = {"gates_bias": "bias_ih"}
            if kind != "LSTM":
                bias = {"input_bias": "bias_ih", "recurrent_bias": "bias_hh"}
            for end, way in ways.items():
                for ours, theirs in (("input", "weight_ih"), ("recurrent", "weight_hh")):
                    there = f"layers.{theirs}_l{{L}}{end}"
                    found.append(Name(there, f"layers/{way}{ours}", "LDG->GD"))
                for ours, theirs in bias.items():
                    there = f"layers.{theirs}_l{{L}}{end}"
                    found.append(Name(there, f"layers/{way}{ours}", "LG->G"))
            return tuple(found)

        def ours(self, tensors):
            """Of an LSTM, ours has one bias where theirs has two: the other stays at zero."""
            twice = kind == "LSTM"
            return super().ours({n: x for n, x in tensors.items() if not twice or "_hh_l" not in n
                                 or "weight" in n})  # fmt: skip

        def logits(self, batch):
            lengths = torch.full((len(batch.inputs),), batch.inputs.shape[1])
            return self.theirs(torch.tensor(batch.inputs), lengths)

        def loss(self, batch):
            lengths = torch.tensor(batch.segment_ids.sum(1))
            logits = self.theirs(torch.tensor(batch.inputs), lengths)
            mask = torch.tensor(batch.loss_mask)[:, : logits.shape[1]].bool()
            targets = torch.tensor(batch.targets).long()[:, : logits.shape[1]]
            return torch.nn.functional.cross_entropy(logits[mask], targets[mask])

    made = draw(Theirs(), spread=0.4)
    if kind == "LSTM":
        for name, value in made.named_parameters():
            if "bias_hh" in name:
                value.data.zero_()
                value.requires_grad_(False)
    return OfSequences(sizes, made, "none")


@pytest.mark.parametrize(
    "name", [n if n in ("gru", "lstm") else pytest.param(n, marks=pytest.mark.slow) for n in SHAPES]
)
def test_logits_and_every_gradient_equal_pytorch(name):
    torch_pair(SHAPES[name]).compare(sequences(SHAPES[name], rows=5))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rnn", "gru", "lstm"])
def test_thirty_steps_have_the_losses_of_pytorch(name):
    sizes = dataclasses.replace(SHAPES[name], embed_dim=32)
    torch_pair(sizes).train([sequences(sizes, rows=5)])


@pytest.mark.slow
def test_a_vector_of_one_one_is_a_token():
    """One-hot vectors through a map are tokens through a table of the same numbers."""
    of_tokens = GRU(vocab_size=6, num_layers=1, embed_dim=8, context_length=16, **TOLD)
    of_vectors = dataclasses.replace(of_tokens, vocab_size=GRU.vocab_size, features=6)
    tokens = texts(4, classes=2, vocab_size=6)
    vectors = dataclasses.replace(tokens, inputs=np.eye(6, dtype=np.float32)[tokens.inputs])
    programs = [make_step(sizes, make_layout()) for sizes in (of_tokens, of_vectors)]
    state = programs[0].create(0)
    found = []
    for program, batch in zip(programs, (tokens, vectors), strict=True):
        run = jax.jit(
            lambda s, b, p=program: p.setup.objective.logits(
                p.setup.model(s), {}, b, p.setup.execution
            )
        )
        with program.setup.layout.active():
            found.append(np.asarray(run(state, batch)))
    told = tokens.segment_ids > 0
    np.testing.assert_allclose(found[1][told], found[0][told], atol=1e-5)


EVEN = dataclasses.replace(SHAPES["gru"], embed_dim=16)
OF_NUMBERS = dataclasses.replace(SHAPES["gru_of_numbers"], embed_dim=16)
MESHES = [
    (OF_NUMBERS, {"data": 2, "fsdp": 2, "zero": 3}),
    (EVEN, {"fsdp": 4, "data": 2, "zero": 1}),
    (EVEN, {"pipe": 2, "fsdp": 2, "zero": 2}),
    (BERT(features=4, num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32, context_length=16,
          num_classes=3, **TOLD), {"context": 2, "tensor": 2, "fsdp": 2, "zero": 1}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [MESHES[0], *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in MESHES[1:])],
)
def test_every_mesh_computes_the_same(sizes, layout):
    batch = sequences(sizes, rows=16)
    expected = evaluate(make_step(sizes, make_layout()), batch)
    program = make_step(sizes, make_layout(**layout))
    assert_equal(evaluate(program, batch, expected), expected)


# -- data, runs, predictions -----------------------------------------------------------------------

TS = """# of the archive's form
@problemName Little
@timeStamps false
@univariate false
@classLabel true up down
@data
1,2,3:0,1,0:up
3,2:1,0:down
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A .npz of numbers that rise or fall, of several lengths, and a .ts file."""
    folder, rng = tmp_path_factory.mktemp("sequences"), np.random.default_rng(0)
    x, y = np.zeros((60, 8, 2)), np.arange(60) % 2
    lengths = rng.integers(3, 9, 60)
    for row, length in enumerate(lengths):
        x[row, :length, 0] = np.arange(length) * (1 - 2 * y[row]) + rng.normal(0, 0.1, length)
        x[row, :length, 1] = rng.normal(5, 2, length)
    np.savez(folder / "made.npz", x=x, y=y, lengths=lengths)
    (folder / "little.ts").write_text(TS)
    return folder, x, y, lengths


def little(folder, **changes):
    settings = {"source": str(folder / "little.ts"), "features": 2, "scaling": "none",
                "sequence_length": 4, "heldout_source": str(folder / "little.ts")}  # fmt: skip
    return SequenceData(**settings | changes)


def test_files_of_the_archive_become_rows_that_end_with_padding(made):
    folder, *_ = made
    last, first = little(folder, pooling="last"), little(folder)
    opened = last.open(seed=0)
    assert (len(opened.train), len(opened.heldout)) == (2, 2)
    assert opened.facts["class_names"] == "up, down"
    row = opened.train.example(1, None)
    np.testing.assert_array_equal(row.inputs, [[3, 1], [2, 0], [0, 0], [0, 0]])
    assert row.segment_ids.tolist() == [1, 1, 0, 0]
    assert (row.targets[1], row.loss_mask.tolist()) == (1, [0, 1, 0, 0])
    assert first.open(seed=0).train.example(1, None).loss_mask.tolist() == [1, 0, 0, 0]


def test_arrays_are_cut_scaled_and_split_by_class(made, tmp_path):
    folder, x, y, lengths = made
    data = SequenceData(source=str(folder / "made.npz"), features=2, sequence_length=6)
    opened = data.open(seed=0)
    held = np.isin(np.arange(60), [18, 38, 58, 19, 39, 59])  # every tenth of each class
    assert opened.facts["sequences_cut"] == (lengths > 6).sum()
    real = np.arange(8) < lengths[:, None]
    values = x[~held][real[~held]]
    expected = (x[held][1] - values.mean(0)) / values.std(0)
    row = opened.heldout.example(1, None)
    n = min(lengths[held][1], 6)
    np.testing.assert_allclose(row.inputs[:n], expected[:n], rtol=1e-5)
    np.savez(tmp_path / "tags.npz", x=x, y=np.where(real, y[:, None], -1), lengths=lengths)
    tags = dataclasses.replace(data, source=str(tmp_path / "tags.npz"), sequence_length=8)
    row = tags.open(seed=0).train.example(1, None)
    assert row.loss_mask.sum() == lengths[1]
    assert set(row.targets[row.loss_mask > 0]) == {1}


BINDINGS = [
    "Train.model = @GRU()", "Train.data = @SequenceData()", "GRU.features = 2",
    "GRU.num_layers = 1", "GRU.embed_dim = 16", "GRU.context_length = 8",
    "GRU.objective = 'token_classification'", "SequenceData.features = 2",
    "SequenceData.sequence_length = 8", "SequenceData.pooling = 'last'", "Train.steps = 30",
    "Train.global_batch_size = 16", "Train.save_every = 0", "Train.log_every = 10",
    "Mesh.fsdp = -1", "Optimizer.learning_rate = 3e-2", "Precision.compute = 'float32'",
]  # fmt: skip


def test_a_run_learns_and_predicts_and_padding_changes_nothing(made, tmp_path, capsys):
    folder, x, y, lengths = made
    config, workdir = tmp_path / "made.gin", str(tmp_path / "run")
    config.write_text("\n".join([*BINDINGS, f"SequenceData.source = {str(folder / 'made.npz')!r}"]))
    assert main(["data", str(config), "--examples", "1"]) == 0
    assert "label 1 (1), 6 x 2 numbers" in capsys.readouterr().out
    assert main(["train", str(config), "--workdir", workdir]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["eval_accuracy"] == 1.0
    assert "vectors_per_second" in lines[0]
    np.savez(tmp_path / "some.npz", x=x[:3], lengths=lengths[:3])
    capsys.readouterr()
    assert main(["predict", "--workdir", workdir, str(tmp_path / "some.npz"), "--top", "1"]) == 0
    told = [
        line.partition(": ")[2].partition(" ")[0] for line in capsys.readouterr().out.splitlines()
    ]
    assert told == [str(label) for label in y[:3]]
    trainer = Trainer(load_config(str(config)), workdir=workdir)
    short = x[0, : lengths[0]].astype(np.float32)
    data = trainer.config.train.data
    alone = trainer.logits(short[None])[0]
    padded = jax.tree.map(lambda leaf: leaf[None], data.row(short))
    np.testing.assert_allclose(trainer.logits(padded)[0, : lengths[0]], alone, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "data", "sentence"),
    [
        (SHAPES["gru"], LabelledText(num_classes=3, sequence_length=16),
         r"GRU.features=12 reads vectors, but Train.data=@LabelledText\(\) gives tokens"),
        (SHAPES["gru"], SequenceData(features=3, num_classes=3, sequence_length=16),
         r"GRU reads vectors of 12 values, but .* have 3 values each; set GRU.features=3"),
        (GPT(context_length=16), SequenceData(sequence_length=16), r"GPT reads tokens, but .*@GRU"),
        (SHAPES["gru"], SequenceData(features=12, num_classes=4, sequence_length=16),
         r"GRU.num_classes=3 is smaller than SequenceData.num_classes=4"),
        (SHAPES["gru"], SequenceData(features=12, num_classes=3, sequence_length=17),
         r"SequenceData.sequence_length=17 is longer than GRU.context_length=16"),
    ],
)  # fmt: skip
def test_vectors_and_what_reads_them_belong_together(model, data, sentence):
    config = load_config("bert_tiny")
    train = dataclasses.replace(config.train, model=model, data=data)
    with pytest.raises(UserError, match=sentence):
        check(dataclasses.replace(config, train=train), device_count=8, platform="cpu")


def test_settings_and_files_that_cannot_be_are_refused(made, tmp_path):
    folder, x, y, lengths = made
    with pytest.raises(UserError, match=r"GRU.features=3 with GRU.objective='next_token'"):
        GRU(features=3)
    with pytest.raises(UserError, match=r"GRU.vocab_size=9 has no effect with GRU.features=3"):
        GRU(features=3, vocab_size=9, **TOLD)
    with pytest.raises(UserError, match=r"heldout_fraction = 0.3 has no effect with"):
        little(folder, heldout_fraction=0.3)
    for changes, sentence in (
        ({"features": 3}, r"SequenceData.features = 3, but .* has 2; set"),
        ({"num_classes": 3}, r"SequenceData.num_classes = 3, but .* has 2; set"),
    ):
        with pytest.raises(UserError, match=sentence):
            little(folder, **changes).open(seed=0)
    for name, text, sentence in (
        (
            "missing",
            TS.replace("3,2:", "3,?:"),
            r"line 8: could not convert .*with none missing",
        ),
        ("uneven", TS.replace("3,2:", "3,2,1:"), r"line 8 has features of 2 and of 3 numbers"),
        (
            "class",
            TS.replace(":down", ":left"),
            r"line 8 ends with 'left'; the header has up, down",
        ),
        ("header", TS.replace("@data\n", ""), r"there is no line '@data'"),
    ):
        (tmp_path / f"{name}.ts").write_text(text)
        with pytest.raises(UserError, match=sentence):
            little(folder, source=str(tmp_path / f"{name}.ts")).open(seed=0)
    np.savez(tmp_path / "long.npz", x=x, y=y, lengths=lengths + 1)
    with pytest.raises(UserError, match=r"use 60 integers from 1 to 8"):
        little(folder, source=str(tmp_path / "long.npz")).open(seed=0)


@pytest.mark.slow
def test_verify_proves_sequences():
    config = load_config("bert_tiny")
    data = SequenceData(features=12, num_classes=3, sequence_length=16)
    train = dataclasses.replace(config.train, model=SHAPES["gru"], data=data)
    report = verify(dataclasses.replace(config, train=train))
    assert not [proof for proof in report.proofs if proof.verdict == "FAILED"]
    proved = {proof.proof for proof in report.proofs if proof.verdict == "proved"}
    assert {"mesh", "packing", "isolation", "resume"} <= proved
