"""Masked tokens: BERT's shares, transformers' loss, and an objective known by its name alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step, text_batch
from flax import nnx
from parity import assert_equal, evaluate

from jaxtrain import Trainer, load_config
from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable
from jaxtrain.data.batch import Batch
from jaxtrain.data.loader import batches
from jaxtrain.data.text.packing import pack
from jaxtrain.models.convolutional.resnet import ResNet
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.training.objectives.language_modeling import Masked, MaskedToken, mask_tokens
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.objectives.objective import objective_named
from jaxtrain.training.objectives.tokens import token_loss
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.preflight.preflight import check

V = 50
SIZES = GPT(vocab_size=V, num_layers=2, embed_dim=16, num_heads=2, context_length=16)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of random tokens below the mask's, padding at their end."""

    length: int = 16

    def __len__(self):
        return 40

    def example(self, index, rng):
        draw = np.random.default_rng(index)
        tokens = draw.integers(0, V - 1, self.length + 1).astype(np.int32)
        place = np.arange(self.length, dtype=np.int32)
        real = place < self.length - index % 4
        return Batch(tokens[:-1], tokens[1:], real.astype(np.float32), real.astype(np.int32), place)


def masked_batch(rows: int = 8, length: int = 16) -> Batch:
    """A masked global batch of two documents a row."""
    text = text_batch(rows=rows, length=length, vocab_size=V - 1)
    made = [
        mask_tokens(jax.tree.map(lambda x, i=i: x[i], text), np.random.default_rng(i), V)
        for i in range(rows)
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *made)


def test_the_shares_are_those_of_the_paper():
    length = 200_000
    row = Rows(length).example(3, None)
    found = mask_tokens(row, np.random.default_rng(0), V)
    real, chosen = row.segment_ids != 0, found.loss_mask == 1
    assert not chosen[~real].any()
    np.testing.assert_array_equal(found.targets, row.inputs)
    np.testing.assert_array_equal(found.inputs[~chosen], row.inputs[~chosen])
    hidden = found.inputs[chosen] == V - 1
    stayed = found.inputs[chosen] == row.inputs[chosen]
    # Six standard deviations of a share of so many draws; one other token of 49 is the same.
    assert chosen.mean() == pytest.approx(0.15, abs=6 * np.sqrt(0.15 * 0.85 / length))
    wide = 6 * np.sqrt(0.25 / chosen.sum())
    assert hidden.mean() == pytest.approx(0.8, abs=wide)
    assert stayed.mean() == pytest.approx(0.1 + 0.1 / (V - 1), abs=wide)
    assert np.unique(found.inputs[chosen & (found.inputs != row.inputs)]).size == V


def test_no_padding_is_told_where_documents_are_not_kept_apart():
    documents = [np.arange(1, 5, dtype=np.uint8)]  # 4 tokens: 3 inputs of a row of 200
    text = pack(documents, 200, np.dtype(np.uint8), separate=False)
    row = text.example(0, None)
    assert row.segment_ids is None
    for seed in range(20):
        found = mask_tokens(row, np.random.default_rng(seed), V)
        assert not found.loss_mask[3:].any()
        np.testing.assert_array_equal(found.inputs[3:], 0)


def test_what_batch_k_hides_is_a_function_of_the_seed_and_k():
    def stream(seed, start):
        rows = Masked(Rows(), V)
        return batches(rows, global_batch_size=8, seed=seed, start=start, threads=0)

    def differs(a, b):
        return any((x != y).any() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))

    first = stream(0, 0)
    walked = [next(first) for _ in range(12)]  # over an epoch's end
    again = next(stream(0, 11))
    jax.tree.map(np.testing.assert_array_equal, again, walked[11])
    assert differs(next(stream(1, 11)), again)
    # The same row is masked otherwise in the next epoch, and alike in every evaluation.
    examples = Masked(Rows(), V)
    one, other = (examples.example(2, np.random.default_rng(n)) for n in range(2))
    assert differs(one, other)
    assert not differs(examples.example(2, None), examples.example(2, None))


def test_the_loss_of_equal_logits_is_that_of_bert_for_masked_lm():
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    transformers = pytest.importorskip("transformers", reason="transformers is the peer")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, initializer_range=0.5,
    )  # fmt: skip
    batch = masked_batch()
    labels = torch.tensor(np.where(batch.loss_mask == 1, batch.targets, -100), dtype=torch.long)
    with torch.no_grad():
        inputs = torch.tensor(batch.inputs, dtype=torch.long)
        theirs = transformers.BertForMaskedLM(config).eval()(inputs, labels=labels)

    class Identity:
        """Hidden states that are the logits."""

        def output_matrix(self):
            return nnx.Param(jnp.eye(V), axes=("vocab", "embed"))

        def output_bias(self):
            return None

        def logit_softcap(self):
            return None

    found = token_loss(Identity(), jnp.asarray(theirs.logits.numpy()), batch, Loss(), train=True)
    mean = found / MaskedToken().counts(batch)["weight"]
    assert theirs.loss > 3
    assert float(mean) == pytest.approx(theirs.loss.item(), rel=1e-6)


# -- through everything that knows an objective by its interface alone -----------------------------

TEXT = masked_batch(16)


def program_on(layout, **changes):
    return make_step(SIZES, layout, objective=objective_named("masked_token"), **changes)


@pytest.fixture(scope="module")
def one_device():
    return evaluate(program_on(make_layout()), TEXT)


# Compiles two steps; the same layers, not causal, are on a mesh in test_attention.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"fsdp": 2, "tensor": 2}, {"accumulation": 2, "loss": Loss(chunk_size=4)}),
        ({"context": 2, "fsdp": 2}, {}),
        ({"pipe": 2, "fsdp": 2}, {"pipeline": Pipeline(schedule="1f1b", microbatches=2)}),
    ],
    ids=["fsdp_tensor_chunks", "context", "pipe"],
)
def test_a_step_on_a_mesh_equals_one_device(one_device, layout, changes):
    program = program_on(make_layout(**layout), **changes)
    assert_equal(evaluate(program, TEXT, one_device), one_device)


def test_a_token_sees_both_sides_of_its_own_document():
    text = dataclasses.replace(TEXT, loss_mask=np.zeros_like(TEXT.loss_mask))
    text.loss_mask[0, 0] = 1

    def loss(place):
        changed = text.inputs.copy()
        changed[0, place] = (changed[0, place] + 1) % V
        batch = dataclasses.replace(text, inputs=changed)
        state = program.create(0)
        with program.setup.layout.active():
            return float(jax.jit(program.train_step)(state, batch)[1]["loss"])

    program = program_on(make_layout())
    own = np.flatnonzero(text.segment_ids[0] == 1)
    other = np.flatnonzero(text.segment_ids[0] == 2)
    assert len(own) > 1
    found = [loss(place) for place in (own[-1], other[0], other[-1])]
    assert found[0] != found[1] == found[2]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder(GPT):
    """GPT's layers, trained to tell masked tokens."""

    objective = "masked_token"

    @property
    def attention(self):
        return dataclasses.replace(super().attention, causal=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneSided(GPT):
    """GPT, which says of its attention that it is causal."""

    objective = "masked_token"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfImages(ResNet):
    """A model that reads something else."""

    objective = "masked_token"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (OneSided, r"OneSided.attention has causal=True, but OneSided.objective='masked_token'"),
        (OfImages, r"OfImages.objective='masked_token' learns from tokens, but OfImages.inputs="),
    ],
)
def test_a_model_that_cannot_be_trained_so_is_refused(tiny_config, model, words):
    config = load_config(tiny_config)
    train = dataclasses.replace(config.train, model=model())
    with pytest.raises(UserError, match=words):
        check(dataclasses.replace(config, train=train), device_count=8, platform="cpu")


def test_a_run_learns_and_evaluates_alike(tiny_config, tmp_path):
    config = load_config(tiny_config, ["Train.eval_every = 4", "Train.save_every = 4"])
    sizes = {f.name: getattr(config.train.model, f.name) for f in dataclasses.fields(GPT)}

    def with_model(vocab_size):
        model = Encoder(**{**sizes, "vocab_size": vocab_size})
        return dataclasses.replace(config, train=dataclasses.replace(config.train, model=model))

    with pytest.raises(UserError) as refusal:
        Trainer(with_model(256))
    assert str(refusal.value) == (
        "Encoder.vocab_size=256 has no slot for the mask token after the data's 256; use at "
        "least 257"
    )
    trainer = Trainer(with_model(258), tmp_path)
    first = trainer.evaluate()
    assert first.keys() == {"eval_loss", "eval_perplexity"}
    assert trainer.evaluate() == first
    assert trainer.train()["eval_loss"] < first["eval_loss"] - 0.5
    trainer.close()
