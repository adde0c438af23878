"""Seq2Seq equals PyTorch's GRUs, with and without attention, and on a mesh one device."""

import dataclasses
import itertools
import types

import jax
import numpy as np
import pytest
from against_transformers import draw, torch
from conftest import make_layout, make_step
from pairs import SequencePair, pairs
from parity import assert_equal, evaluate

from jaxtrain.config.errors import UserError
from jaxtrain.data.pairs.source import pair
from jaxtrain.models.recurrent.seq2seq import Seq2Seq
from jaxtrain.models.weights.family import Name
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.remat import POLICIES
from jaxtrain.run.generation.beams import BeamSearch
from jaxtrain.run.generation.targets import targets
from jaxtrain.training.objectives.losses import Loss

SHAPES = {
    "attends": Seq2Seq(vocab_size=64, num_layers=2, embed_dim=32, context_length=16,
                       bidirectional=True),
    "last_state": Seq2Seq(vocab_size=61, num_layers=3, embed_dim=11, context_length=16,
                          attends=False),
    "odd": Seq2Seq(vocab_size=23, num_layers=1, embed_dim=9, context_length=16),
}  # fmt: skip


class Theirs(torch.nn.Module):
    """torch.nn.GRU twice, the second from the first's last states, and Luong's attention."""

    def __init__(self, sizes: Seq2Seq) -> None:
        super().__init__()
        nn, V, D = torch.nn, sizes.vocab_size, sizes.embed_dim
        self.source, self.target = nn.Embedding(V, D), nn.Embedding(V, D)
        both = sizes.bidirectional
        self.encoder = nn.GRU(
            D, D // (1 + both), sizes.num_layers, batch_first=True, bidirectional=both
        )
        self.decoder = nn.GRU(D, D, sizes.num_layers, batch_first=True)
        self.attends = sizes.attends
        if sizes.attends:
            self.score = nn.Linear(D, D, bias=False)
            self.combine = nn.Linear(2 * D, D, bias=False)
        self.output = nn.Linear(D, V)

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            self.source(input_ids), attention_mask.sum(1), batch_first=True, enforce_sorted=False
        )
        states, last = self.encoder(packed)
        states, _ = torch.nn.utils.rnn.pad_packed_sequence(states, batch_first=True)
        if self.encoder.bidirectional:
            last = torch.cat([last[::2], last[1::2]], -1)
        h, _ = self.decoder(self.target(decoder_input_ids), last)
        if self.attends:
            scores = self.score(h) @ states.mT
            scores = scores.masked_fill(attention_mask[:, None] == 0, -torch.inf)
            context = scores.softmax(-1) @ states
            h = torch.tanh(self.combine(torch.cat([context, h], -1)))
        return types.SimpleNamespace(logits=self.output(h))


class TorchPair(SequencePair):
    """With PyTorch's names."""

    def ours(self, tensors):
        apart = dict(tensors)
        if self.sizes.attends:
            both = apart.pop("combine.weight")
            apart["context.weight"], apart["state.weight"] = both.chunk(2, dim=1)
        return super().ours(apart)

    def names(self):
        found = [
            Name("source.weight", "source_embedding", "VD->VD"),
            Name("target.weight", "target_embedding", "VD->VD"),
            Name("output.weight", "output", "VD->VD"),
            Name("output.bias", "bias", "V->V"),
        ]
        ways = {"encoder": {"": ""}, "decoder": {"": ""}}
        if self.sizes.bidirectional:
            ways["encoder"] = {"": "forward_", "_reverse": "backward_"}
        for stack, end, way in ((s, *one) for s, some in ways.items() for one in some.items()):
            for theirs, ours in (("ih", "input"), ("hh", "recurrent")):
                at, there = f"{stack}_layers/{way}{ours}", f"{theirs}_l{{L}}{end}"
                found.append(Name(f"{stack}.weight_{there}", at, "LDG->GD"))
                found.append(Name(f"{stack}.bias_{there}", f"{at}_bias", "LG->G"))
        if self.sizes.attends:
            found += [
                Name(f"{part}.weight", f"attention_{part}", "DE->ED")
                for part in ("score", "context", "state")
            ]
        return tuple(found)


def torch_pair(sizes: Seq2Seq) -> TorchPair:
    return TorchPair(sizes, draw(Theirs(sizes), spread=0.4), "none")


# The cases that are left run the same code.
@pytest.mark.slow_cases("last_state", "attends")
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_gradient_equal_pytorch(name):
    sizes = SHAPES[name]
    batch = pairs(rows=4, source=13, target=9, vocab_size=sizes.vocab_size)
    torch_pair(sizes).compare(batch)


@pytest.mark.slow
def test_thirty_steps_have_the_losses_of_pytorch():
    sizes = dataclasses.replace(SHAPES["odd"], embed_dim=16)
    torch_pair(sizes).train([pairs(rows=4, source=13, target=9, vocab_size=sizes.vocab_size)])


def test_flops_are_six_a_parameter_and_token_and_the_scores():
    """By hand, of a model whose every product is counted."""
    sizes, S, T, D = Seq2Seq(vocab_size=50, num_layers=2, embed_dim=8), 5, 3, 8
    layer = 3 * D * (D + D)
    attention = 3 * D * D + 2 * S * D
    products = S * 2 * layer + T * (2 * layer + attention + 50 * D)
    assert sizes.flops((S, T)) == 6 * products
    both = dataclasses.replace(sizes, bidirectional=True)
    assert both.flops((S, T)) == 6 * (products - S * 2 * 3 * D * D // 2)


# -- meshes, and what must not matter -------------------------------------------------------------


@pytest.fixture(scope="module")
def one_device():
    batch = pairs(rows=16, source=12, target=8, vocab_size=64)
    return batch, evaluate(make_step(SHAPES["attends"], make_layout()), batch)


@pytest.mark.slow
def test_a_mesh_computes_the_same(one_device):
    batch, expected = one_device
    changes = {"accumulation": 2, "execution": Execution(remat=POLICIES["full"])}
    program = make_step(SHAPES["attends"], make_layout(data=2, fsdp=4), **changes)
    assert_equal(evaluate(program, batch, expected), expected)


def test_padding_and_what_follows_change_no_logit():
    """Of a pair whose rows are longer, and of targets whose later tokens are others."""
    program = make_step(SHAPES["attends"], make_layout())
    rng = np.random.default_rng(0)
    source, target = rng.integers(1, 64, 7), rng.integers(1, 64, 5)
    later = np.concatenate([target[:3], [1, 2]])
    other = np.concatenate([[(source[0] + 1) % 64], source[1:]])
    state, objective = program.create(0), program.setup.objective
    told = jax.jit(
        lambda s, b: objective.logits(program.setup.model(s), {}, b, program.setup.execution)
    )

    def logits(lengths, *some):
        rows = [pair(*one, lengths, 0) for one in some]
        with program.setup.layout.active():
            return np.asarray(told(state, jax.tree.map(lambda *x: np.stack(x), *rows)))

    short, of_later, of_other = logits((7, 5), (source, target), (source, later), (other, target))
    longer = logits((12, 9), (source, target))[0]
    np.testing.assert_allclose(longer[:5], short, atol=1e-5)
    np.testing.assert_allclose(of_later[:4], short[:4], atol=1e-5)
    assert np.abs(of_other - short).max() > 1e-3


# Scores every target; tests/test_generate_targets.py has searches.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["attends", "last_state"])
def test_a_search_that_is_wide_enough_finds_the_likeliest_of_all_targets(name):
    """Beams of several sources, each with its own states; all 6^3 targets are told whole."""
    V, new, begin, end = 6, 3, 1, 2
    sizes = dataclasses.replace(SHAPES[name], vocab_size=V)
    program = make_step(sizes, make_layout(data=2))
    state = program.create(3)
    state = dataclasses.replace(state, params=jax.tree.map(lambda x: 2 * x, state.params))
    sources = [[5, 3, 4, 4], [1], [4, 5]]
    found = targets(
        program.setup, sizes, state, sources, begin=begin, ends=[end], max_new_tokens=new,
        sampling=BeamSearch(beams=V * V, early_stopping="never"), seed=0, batch_size=3,
    )  # fmt: skip
    every = np.array(list(itertools.product(range(V), repeat=new)))
    told = jax.jit(
        lambda s, b: program.setup.objective.logits(
            program.setup.model(s), {}, b, program.setup.execution
        )
    )
    answers = []
    for source, answer in zip(sources, found, strict=True):
        rows = [pair(np.array(source), target, (4, new + 1), begin) for target in every]
        batch = jax.tree.map(lambda *x: np.stack(x), *rows)
        with program.setup.layout.active():
            logits = told(state, jax.device_put(batch, program.setup.batch_shardings(batch)))
        each = jax.nn.log_softmax(np.asarray(logits[:, :new], np.float32))
        each = np.take_along_axis(np.asarray(each), every[:, :, None], 2)[..., 0]
        lengths = np.where((every == end).any(1), (every == end).argmax(1) + 1, new)
        scores = np.where(np.arange(new) < lengths[:, None], each, 0).sum(1) / lengths
        best = every[scores.argmax()][: lengths[scores.argmax()]].tolist()
        assert answer.tokens == [token for token in best if token != end]
        answers.append(best)
    assert len({tuple(best) for best in answers}) > 1


def test_rows_of_several_pairs_are_refused():
    """The decoder would resume from the last source's states in all of them."""
    program = make_step(SHAPES["attends"], make_layout())
    batch = pairs(rows=4, source=6, target=4, vocab_size=64)
    twice = dataclasses.replace(batch, source_segment_ids=2 * batch.source_segment_ids)
    refusals = program.setup.objective.validate(
        twice, SHAPES["attends"], Loss(), program.setup.layout
    )
    assert any("Seq2Seq reads one pair a row" in sentence for sentence in refusals)
    assert not list(
        program.setup.objective.validate(batch, SHAPES["attends"], Loss(), program.setup.layout)
    )


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="Seq2Seq.embed_dim=0"):
        Seq2Seq(embed_dim=0)
    with pytest.raises(UserError, match=r"embed_dim=9 with Seq2Seq.bidirectional=True.*use 10"):
        Seq2Seq(embed_dim=9, bidirectional=True)
