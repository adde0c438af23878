"""The Transformer equals torch.nn.Transformer; it and T5 equal one device on every mesh."""

import dataclasses
import functools
import itertools
import math
import types

import jax
import numpy as np
import pytest
from against_transformers import draw, torch
from conftest import make_layout, make_step
from pairs import Given, SequencePair, pairs
from parity import assert_equal, evaluate

from jaxtrain.config.errors import UserError
from jaxtrain.data.pairs.source import PairData, pair
from jaxtrain.models.recurrent.seq2seq import Seq2Seq
from jaxtrain.models.transformers.t5 import T5
from jaxtrain.models.transformers.transformer import Transformer
from jaxtrain.models.weights.family import Name
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.remat import POLICIES
from jaxtrain.nn.transformer.encoder_decoder import AROUND, DECODER, ENCODER
from jaxtrain.nn.transformer.positional_embedding import Sinusoidal
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.generation.targets import targets
from jaxtrain.training.pipeline.schedules import Pipeline

SHAPES = {
    "post_sinusoidal": Transformer(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4,
                                   mlp_dim=64, context_length=16, dropout=0.3),
    "pre_learned_odd": Transformer(vocab_size=61, num_layers=2, embed_dim=21, num_heads=3,
                                   mlp_dim=20, context_length=17, positions="learned",
                                   norms="pre", norm_eps=1e-6, dropout=0.1),
    "pre_one_head": Transformer(vocab_size=23, num_layers=1, embed_dim=8, num_heads=1, mlp_dim=5,
                                context_length=16, norms="pre"),
}  # fmt: skip


class Theirs(torch.nn.Module):
    """An embedding with places, the two stacks of torch.nn.Transformer, logits by the embedding."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        D, pre, nn = sizes.embed_dim, sizes.norms == "pre", torch.nn
        settings = {
            "d_model": D, "nhead": sizes.num_heads, "dim_feedforward": sizes.mlp_dim,
            "dropout": 0.0, "norm_first": pre, "batch_first": True,
            "layer_norm_eps": sizes.norm_eps,
        }  # fmt: skip

        def norm():
            return nn.LayerNorm(D, sizes.norm_eps) if pre else None

        self.embedding = nn.Embedding(sizes.vocab_size, D)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**settings), sizes.num_layers, norm(),
            enable_nested_tensor=False,
        )  # fmt: skip
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(**settings), sizes.num_layers, norm()
        )
        self.learned = sizes.positions == "learned"
        if self.learned:
            self.source_positions = nn.Embedding(sizes.context_length, D)
            self.target_positions = nn.Embedding(sizes.context_length, D)
        else:
            place, column = np.meshgrid(np.arange(64), np.arange(D), indexing="ij")
            angle = place / 10_000 ** (column // 2 * 2 / D)
            told = np.where(column % 2, np.cos(angle), np.sin(angle))
            self.told = torch.tensor(told, dtype=torch.float32)

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        length = decoder_input_ids.shape[1]
        hidden = torch.ones((length, length), dtype=torch.bool).triu(1)
        padding = attention_mask == 0
        scale = math.sqrt(self.embedding.embedding_dim)
        sides = []
        for name, tokens in (("source", input_ids), ("target", decoder_input_ids)):
            length = tokens.shape[1]
            table = getattr(self, f"{name}_positions").weight if self.learned else self.told
            drop = getattr(self, f"{name}_dropout", lambda x: x)
            sides.append(drop(self.embedding(tokens) * scale + table[:length]))
        memory = self.encoder(sides[0], src_key_padding_mask=padding)
        hidden_states = self.decoder(
            sides[1], memory, tgt_mask=hidden, memory_key_padding_mask=padding
        )
        return types.SimpleNamespace(logits=hidden_states @ self.embedding.weight.T)


class TorchPair(SequencePair):
    """With PyTorch's names."""

    def ours(self, tensors):
        apart = {}
        for name, value in tensors.items():
            if ".in_proj_" in name:
                for part, piece in zip(("q", "k", "v"), value.chunk(3), strict=True):
                    apart[name.replace("in_proj_", f"{part}.")] = piece
            else:
                apart[name] = value
        return super().ours(apart)

    def names(self):
        found = [Name("embedding.weight", "token_embedding", "VD->VD")]
        for stack, parts in (
            ("encoder", {"self_attn": "", "norm1": "attention_norm", "norm2": "mlp_norm"}),
            ("decoder", {"self_attn": "", "multihead_attn": "cross_", "norm1": "attention_norm",
                         "norm2": "cross_norm", "norm3": "mlp_norm"}),
        ):  # fmt: skip
            theirs, ours = f"{stack}.layers.{{L}}", f"{stack}_layers"
            for part, own in parts.items():
                there = f"{theirs}.{part}"
                if part.startswith("norm"):
                    found.append(Name(f"{there}.weight", f"{ours}/{own}_scale", "LD->D"))
                    found.append(Name(f"{there}.bias", f"{ours}/{own}_bias", "LD->D"))
                    continue
                for short, name in (("q", "query"), ("k", "key"), ("v", "value")):
                    at = f"{ours}/{own}{name}"
                    found.append(Name(f"{there}.{short}.weight", at, "LDNH->(NH)D"))
                    found.append(Name(f"{there}.{short}.bias", f"{at}_bias", "LNH->(NH)"))
                found.append(Name(f"{there}.out_proj.weight", f"{ours}/{own}out", "LNHD->D(NH)"))
                found.append(Name(f"{there}.out_proj.bias", f"{ours}/{own}out_bias", "LD->D"))
            for number, name, form in ((1, "up", "LDF->FD"), (2, "down", "LFD->DF")):
                at, of = f"{theirs}.linear{number}", f"{ours}/{name}"
                found.append(Name(f"{at}.weight", of, form))
                found.append(Name(f"{at}.bias", f"{of}_bias", f"L{form[-2]}->{form[-2]}"))
            if self.sizes.norms == "pre":
                found.append(Name(f"{stack}.norm.weight", f"{stack}_norm_scale", "D->D"))
                found.append(Name(f"{stack}.norm.bias", f"{stack}_norm_bias", "D->D"))
        if self.sizes.positions == "learned":
            found += [Name(f"{side}_positions.weight", f"{side}_embedding", "PD->PD")
                      for side in ("source", "target")]  # fmt: skip
        return tuple(found)


# All of a query's scores move by a key's bias alike: its gradient is zero but for rounding.
NO_GRADIENT = tuple(
    f"{stack}_layers/{part}key_bias"
    for stack, part in (("encoder", ""), ("decoder", ""), ("decoder", "cross_"))
)


def torch_pair(sizes: Transformer) -> TorchPair:
    """Dropping what we drop; but for what is inside the MLP, which the paper does not drop."""
    theirs, rate = draw(Theirs(sizes)), sizes.dropout
    theirs.source_dropout, theirs.target_dropout = Given(rate, AROUND), Given(rate, AROUND + 2)
    for first, layers in ((ENCODER, theirs.encoder.layers), (DECODER, theirs.decoder.layers)):
        for number, layer in enumerate(layers):
            names = [name for name, _ in layer.named_children() if name.startswith("dropout")]
            for place, name in enumerate(names[1:]):
                setattr(layer, name, Given(rate, first + place, layer=number))
    return TorchPair(sizes, theirs, "none")


@pytest.mark.slow_cases("pre_one_head", "pre_learned_odd")
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_gradient_equal_pytorch(name):
    sizes = SHAPES[name]
    batch = pairs(rows=4, source=13, target=9, vocab_size=sizes.vocab_size)
    torch_pair(sizes).compare(batch, same=NO_GRADIENT)


@pytest.mark.slow
def test_thirty_steps_have_the_losses_of_pytorch():
    sizes = dataclasses.replace(SHAPES["post_sinusoidal"], dropout=0.0)
    torch_pair(sizes).train([pairs(rows=4, source=13, target=9, vocab_size=sizes.vocab_size)])


def test_places_are_the_sines_and_cosines_of_the_paper():
    """PE(t, 2i) = sin(t / 10000^(2i/D)), PE(t, 2i + 1) the cosine, from any place on."""
    D, start = 6, 5
    told = Sinusoidal(dim=D).into_stream({}, jax.numpy.zeros((1, 4, D)), start)
    for place in range(4):
        for i in range(D // 2):
            angle = (start + place) / 10_000 ** (2 * i / D)
            found = np.asarray(told)[0, place, 2 * i : 2 * i + 2]
            np.testing.assert_allclose(found, [math.sin(angle), math.cos(angle)], atol=1e-6)


def test_flops_are_six_a_parameter_and_token_and_the_scores():
    """By hand, of a model whose every product is counted."""
    sizes = Transformer(vocab_size=50, num_layers=2, embed_dim=8, num_heads=2, mlp_dim=24)
    S, T, D, F = 5, 3, 8, 24
    encoder = S * (4 * D * D + 2 * D * F + 2 * S * D)
    own = T * (4 * D * D + 2 * D * F + 2 * T * D / 2)
    cross = T * 2 * D * D + S * 2 * D * D + 2 * T * S * D
    assert sizes.flops((S, T)) == 6 * (2 * (encoder + own + cross) + T * 50 * D)


# -- meshes, and what must not matter --------------------------------------------------------------

ON_MESH = {
    "transformer": SHAPES["post_sinusoidal"],
    "t5": T5(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, head_dim=8, mlp_dim=64,
             context_length=16, mlp="gated_gelu", tie_embeddings=False, scale_outputs=False,
             dropout=0.1),
}  # fmt: skip
# Five layers, and relative positions with one table; a learned table of places.
ON_MESH["t5_uneven"] = dataclasses.replace(ON_MESH["t5"], num_layers=5, mlp="relu")
ON_MESH["tied"] = dataclasses.replace(
    SHAPES["pre_learned_odd"], vocab_size=64, embed_dim=24, mlp_dim=24
)


@pytest.fixture(scope="module")
def one_device():
    batch = pairs(rows=16, source=12, target=8, vocab_size=64)
    found = functools.cache(lambda name: evaluate(make_step(ON_MESH[name], make_layout()), batch))
    return batch, found


MESHES = {
    "zero1_blocked": (
        "transformer", {"data": 2, "fsdp": 2, "tensor": 2, "zero": 1},
        {"execution": Execution("blocked")},
    ),
    "rings_zero2_accumulation_remat": (
        "t5",
        {"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True, "collective_matmul": True,
         "zero": 2},
        {"accumulation": 2, "execution": Execution(kernel="xla", remat=POLICIES["full"])},
    ),
    "pipe_of_four": (
        "t5_uneven", {"pipe": 4, "fsdp": 2, "zero": 1}, {"pipeline": Pipeline(microbatches=8)},
    ),
    "pipe_interleaved_residuals": (
        "t5_uneven", {"pipe": 2, "fsdp": 2, "tensor": 2, "zero": 2},
        {"pipeline": Pipeline(schedule="interleaved", virtual_stages=2, microbatches=2,
                              backward="residuals")},
    ),
    "pipe_tied_zero3": (
        "tied", {"pipe": 2, "data": 2, "fsdp": 2},
        {"pipeline": Pipeline(schedule="gpipe", microbatches=2), "accumulation": 2,
         "execution": Execution(remat=POLICIES["full"])},
    ),
}  # fmt: skip


def test_dropout_of_both_stacks_is_on_every_pair_of_axes():
    meshes = [{axis for axis in MESH_AXES if axis in layout} for _, layout, _ in MESHES.values()]
    for axes in itertools.combinations(("pipe", "data", "fsdp", "tensor"), 2):
        assert any(set(axes) <= mesh for mesh in meshes), axes
    assert all(sizes.dropout > 0 for sizes in ON_MESH.values())


# Compiles for a mesh with dropout; tests/test_verify.py and test_parity_matrix.py have meshes in
# the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("case", MESHES)
def test_every_mesh_computes_and_drops_the_same(case, one_device):
    (batch, expected), (name, layout, changes) = one_device, MESHES[case]
    program = make_step(ON_MESH[name], make_layout(**layout), **changes)
    alone = expected(name)
    assert_equal(evaluate(program, batch, alone), alone)


# Gradients are PyTorch's in the fast part, with padding.
@pytest.mark.slow
def test_padding_and_what_follows_change_no_logit():
    """Of a pair whose rows are longer, and of targets whose later tokens are others."""
    sizes, rng = ON_MESH["t5"], np.random.default_rng(0)
    program = make_step(sizes, make_layout())
    source, target = rng.integers(1, 64, 7), rng.integers(1, 64, 5)
    state = program.create(0)

    def logits(batch):
        with program.setup.layout.active():
            model, rows = program.setup.model(state), jax.tree.map(lambda x: x[None], batch)
            read = jax.jit(program.setup.objective.logits, static_argnums=3)
            return np.asarray(read(model, {}, rows, program.setup.execution))[0]

    short = logits(pair(source, target, (7, 5), 0))
    np.testing.assert_allclose(logits(pair(source, target, (12, 9), 0))[:5], short, atol=1e-5)
    later = np.concatenate([target[:3], [1, 2]])
    np.testing.assert_allclose(logits(pair(source, later, (7, 5), 0))[:4], short[:4], atol=1e-5)
    other = np.concatenate([source[:6], [(source[6] + 1) % 64]])
    assert np.abs(logits(pair(other, target, (7, 5), 0)) - short).max() > 1e-3


# Decodes row by row; tests/test_pair_runs.py counts exact matches of a run.
@pytest.mark.slow
def test_exact_matches_are_the_rows_all_of_whose_targets_are_told():
    """Against NumPy on the logits; the mean is over rows, in evaluation too."""
    sizes = ON_MESH["transformer"]
    program, batch = make_step(sizes, make_layout()), pairs(
        rows=6, source=6, target=4, vocab_size=64
    )  # fmt: skip
    state = program.create(0)
    with program.setup.layout.active():
        read = jax.jit(program.setup.objective.logits, static_argnums=3)
        logits = read(program.setup.model(state), {}, batch, program.setup.execution)
        told = np.asarray(logits).argmax(-1)
        # Half of the rows are told as they are; of the others the last token alone is not.
        wrong = (told + 1) % 64
        last = np.arange(4) == batch.segment_ids.sum(1, keepdims=True) - 1
        targets = np.where(last & (np.arange(6) % 2 == 1)[:, None], wrong, told).astype(np.int32)
        batch = type(batch)(**{**vars(batch), "targets": targets})
        names = ("loss", "accuracy", "exact_match", "weight", "rows")
        sums = program.setup.eval_step(state, batch, dict.fromkeys(names, jax.numpy.zeros(())))
    found = program.setup.objective.evaluation({name: float(value) for name, value in sums.items()})
    assert found["eval_exact_match"] == 0.5
    count = batch.loss_mask.sum()
    assert found["eval_accuracy"] == pytest.approx((count - 3) / count)
    assert found["eval_perplexity"] == pytest.approx(math.exp(found["eval_loss"]))


# Generates with two models; exact matches of one answer are in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "seq2seq"])
def test_of_several_answers_the_one_that_greedy_decoding_tells_is_a_match(name):
    """Token for token: each row's answers are compared with what the model writes by itself. A row
    of which nothing counts matches nothing, and the loss is the first answer's."""
    sizes = {**ON_MESH, "seq2seq": Seq2Seq(vocab_size=64, embed_dim=32, context_length=16)}[name]
    program, rows = make_step(sizes, make_layout()), pairs(
        rows=6, source=6, target=4, vocab_size=64
    )  # fmt: skip
    state = program.create(0)
    sources = [row[seen == 1] for row, seen in zip(
        rows.source, rows.source_segment_ids, strict=True)]  # fmt: skip
    greedy = [one.tokens for one in targets(
        program.setup, sizes, state, [one.tolist() for one in sources], begin=0, ends=[-1],
        max_new_tokens=4, sampling=Sampling(temperature=0.0), seed=0, batch_size=6,
    )]  # fmt: skip
    assert {len(one) for one in greedy} == {4}  # nothing ends: whole answers of the longest

    def batch_of(answers):
        made = [pair(source, np.array(told, np.int64), (6, 4), 0) for source, told in zip(
            sources, answers, strict=True)]  # fmt: skip
        return jax.tree.map(lambda *leaves: np.stack(leaves), *made)

    def other(told):
        return [*told[:3], (told[3] + 1) % 64]

    # Right are: the second answer, the first, none, the third, the third of a row that counts
    # for nothing, and an answer of which the last token alone is another.
    first, second, third = (batch_of([
        told if place == right else [] if place and right is None else other(told)
        for told, right in zip(greedy, (1, 0, None, 2, 2, None), strict=True)
    ]) for place in range(3))  # fmt: skip
    first.loss_mask[4] = 0
    bare = {"source": None, "source_segment_ids": None}
    both = tuple(dataclasses.replace(one, **bare) for one in (second, third))

    def found(batch):
        with program.setup.layout.active():
            sums = program.setup.eval_step(state, batch, program.setup.no_sums(state, batch))
        return {name: float(value) for name, value in sums.items()}

    alone, several = found(first), found(dataclasses.replace(first, answers=both))
    assert (alone["exact_match"], several["exact_match"], several["rows"]) == (1, 3, 5)
    assert several["loss"] == pytest.approx(alone["loss"])
    assert several["accuracy"] == alone["accuracy"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"embed_dim": 30, "num_heads": 4}, r"Transformer.embed_dim=30 does not divide"),
        ({"mlp_dim": 0}, r"Transformer.mlp_dim=0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        Transformer(**changes)


def test_data_of_the_tests_are_those_of_pair_data():
    """`pair` makes the batch that PairData declares."""
    data = PairData(source_length=12, target_length=8)
    found = jax.tree.map(lambda x: (x.shape, x.dtype), data.abstract_batch(16))
    made = jax.tree.map(
        lambda x: (x.shape, x.dtype), pairs(rows=16, source=12, target=8, vocab_size=64)
    )
    assert found == made
