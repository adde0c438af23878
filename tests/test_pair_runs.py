"""Runs of encoder-decoders: trained, evaluated, planned, verified, rejected with a reason."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from jaxtrain import Trainer, load_config, plan
from jaxtrain.__main__ import main
from jaxtrain.analysis.verify import sample
from jaxtrain.analysis.verify.shrink import shrink
from jaxtrain.config.errors import UserError
from jaxtrain.data.pairs.source import pair
from jaxtrain.data.vectors.source import VectorData
from jaxtrain.models.feed_forward.mlp import MLP
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.training.preflight.preflight import check

TINY = [
    "Train.steps = 4", "Train.global_batch_size = 16", "Train.log_every = 1",
    "Train.eval_every = 4", "Train.eval_batches = 2", "Train.save_every = 0",
    "PairData.addition_pairs = 400", "Precision.compute = 'float32'",
]  # fmt: skip
TRANSFORMER = [
    "Transformer.num_layers = 2", "Transformer.embed_dim = 32", "Transformer.num_heads = 4",
    "Transformer.mlp_dim = 64",
]  # fmt: skip
T5 = [
    "Train.model = @T5()", "T5.vocab_size = 256", "T5.num_layers = 2", "T5.embed_dim = 32",
    "T5.num_heads = 4", "T5.head_dim = 8", "T5.mlp_dim = 64", "T5.context_length = 16",
    "T5.buckets = 8", "T5.distance = 9",
]  # fmt: skip
SEQ2SEQ = [
    "Train.model = @Seq2Seq()", "Seq2Seq.num_layers = 2", "Seq2Seq.embed_dim = 32",
    "Seq2Seq.context_length = 16", "Seq2Seq.bidirectional = True",
]  # fmt: skip
MODELS = {"transformer": TRANSFORMER, "t5": T5, "seq2seq": SEQ2SEQ}
MESHES = {
    "transformer": ["Mesh.fsdp = 2", "Mesh.tensor = 2", "Mesh.data = 2"],
    "t5": ["Mesh.fsdp = 1", "Mesh.tensor = 2"],
    "seq2seq": ["Mesh.fsdp = 2"],
}


def config_of(name, *more):
    return load_config("transformer_addition", [*TINY, *MODELS[name], *MESHES[name], *more])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trained for some steps when it is first asked for: the Transformer in a folder and on all
    devices, the others on two."""

    class Runs(dict):
        def __missing__(self, name):
            if name == "transformer":
                trainer = Trainer(config_of(name), tmp_path_factory.mktemp(name))
            else:
                trainer = Trainer(config_of(name), devices=jax.devices()[:2])
            trainer.train()
            self[name] = trainer
            return trainer

    return Runs()


@pytest.mark.slow_cases("t5", "seq2seq")
@pytest.mark.parametrize("name", MODELS)
def test_a_run_learns_and_tells_of_exact_matches(runs, name):
    trainer = runs[name]
    lines = [line for line in trainer.history if "loss" in line]
    assert {"exact_match", "accuracy", "pairs_per_second"} <= lines[0].keys()
    assert lines[3]["loss"] < lines[0]["loss"]
    found = trainer.evaluate()
    assert found.keys() == {"eval_loss", "eval_accuracy", "eval_exact_match", "eval_perplexity"}
    assert found["eval_perplexity"] == pytest.approx(math.exp(found["eval_loss"]))


def told_whole(trainer, source: list[int], count: int) -> list[int]:
    """What greedy decoding tells without a cache: all of the target so far, again and again."""
    tokens, room = [0], (10, count + 1)
    for _ in range(count):
        row = pair(np.array(source), np.array([*tokens[1:], 0]), room, 0)
        batch = jax.tree.map(lambda x: x[None], row)
        tokens.append(int(trainer.logits(batch)[0, len(tokens) - 1].argmax()))
    return tokens[1:]


@pytest.mark.slow_cases("seq2seq", "t5")
@pytest.mark.parametrize("name", MODELS)
def test_cached_decoding_tells_what_uncached_does(runs, name):
    trainer, sources = runs[name], [list(b"123+456"), list(b"1"), list(b"9+9")]
    greedy = Sampling(temperature=0.0)
    answers = trainer.answers(sources, max_new_tokens=6, sampling=greedy)
    for source, answer in zip(sources, answers, strict=True):
        expected = told_whole(trainer, source, 6)
        if 0 in expected:
            expected = expected[: expected.index(0)]
        assert answer.tokens == expected
        assert answer.ended == ("length" if len(expected) == 6 else "end")
    # What stands beside a source, and how many are told of at once, changes nothing.
    alone = trainer.answers(sources[1:2], max_new_tokens=6, sampling=greedy)[0]
    assert alone.tokens == answers[1].tokens
    np.testing.assert_allclose(alone.log_probabilities, answers[1].log_probabilities, atol=1e-5)


def test_draws_are_of_the_seed_and_the_number_of_the_source(runs):
    trainer, sources = runs["transformer"], [list(b"1+1")] * 3
    one = [a.tokens for a in trainer.answers(sources, max_new_tokens=6, seed=3)]
    apart = [a.tokens for a in trainer.answers(sources, max_new_tokens=6, seed=3, batch_size=1)]
    assert one == apart
    assert one[0] != one[1]


def test_generate_prints_the_target_alone(runs, capsys):
    trainer = runs["transformer"]
    arguments = ["generate", "--workdir", str(trainer.workdir), "--prompt", "123+456",
                 "--max-new-tokens", "6"]  # fmt: skip
    assert main([*arguments, "--temperature", "0"]) == 0
    expected = trainer.generate("123+456", temperature=0.0, max_new_tokens=6)
    assert capsys.readouterr().out == expected + "\n"
    assert main([*arguments, "--beams", "2", "--stop", "x"]) == 2
    assert "--beams 2: a beam ends at the end-of-text token" in capsys.readouterr().err


def test_a_stop_string_ends_a_target_before_it(runs):
    trainer, drawn = runs["transformer"], Sampling(temperature=1.0)
    sources = ["1+1", "22+9"]
    whole = trainer.answers(sources, sampling=drawn, max_new_tokens=16, seed=5)
    text = whole[0].text
    stop = next(one for one in text[2:] if one.isascii() and one.isprintable())
    pieces = []
    found = trainer.answers(
        sources, sampling=drawn, max_new_tokens=16, seed=5, stop=[stop], show=pieces.append
    )
    assert (found[0].text, found[0].ended) == (text[: text.find(stop)], "stop")
    assert found[0].tokens == whole[0].tokens[: len(found[0].tokens)]
    assert "".join(pieces) == found[0].text
    assert found[1].text == whole[1].text.split(stop)[0]
    with pytest.raises(UserError, match="--stop is empty"):
        trainer.answers(sources, stop=[""])


@pytest.mark.slow
def test_a_plan_knows_the_step(tmp_path):
    file = tmp_path / "plan.json"
    made = plan(config_of("transformer", "Mesh.simulated_devices = 8"), target="cpu:8")
    file.write_text(json.dumps(made.to_json()))
    found = json.loads(file.read_text())
    assert found["fits"]
    config = config_of("transformer")
    flops = config.train.model.flops((8, 8)) * 16 / 8
    assert found["flops_per_device"] == pytest.approx(flops, rel=0.5)
    assert found["collectives"]


PIPE = ["Mesh.pipe = 2", "Mesh.fsdp = 2", "Mesh.tensor = 2", "Mesh.data = 1",
        "Pipeline.microbatches = 4"]  # fmt: skip


@pytest.mark.slow
def test_a_plan_knows_a_pipeline():
    """What was read of sources crosses in every tick of a way but the last, targets once a
    microbatch; sources and targets have 8 places each."""
    found = plan(config_of("t5", *PIPE, "Mesh.simulated_devices = 8"), target="cpu:8").to_json()
    assert found["fits"]
    (sent,) = [one for one in found["collectives"] if one["kind"] == "collective-permute"]
    p, m, rows = 2, 4, 16 // 4 // 2
    ticks = 2 * ((2 * m + p - 2) + m * (p - 1))
    assert sent == {
        "kind": "collective-permute", "axis": "pipe", "count": ticks,
        "bytes": ticks * 4 * rows * 8 * 32,
    }  # fmt: skip


@pytest.mark.slow
def test_a_pipelines_run_goes_on_without_one(tmp_path):
    """And what that has saved is evaluated, and tells of sources, in a pipeline."""
    more = ["Train.save_every = 2", "Mesh.tensor = 1", "Mesh.data = 1", "Mesh.fsdp = 1"]
    more += ["T5.num_layers = 3"]
    staged = config_of("t5", *more, "Mesh.pipe = 2", "Pipeline.microbatches = 2")
    alone = Trainer(config_of("t5", *more), devices=jax.devices()[:1])
    alone.train()
    Trainer(staged, tmp_path, devices=jax.devices()[:2]).train(steps=2)
    then = Trainer(config_of("t5", *more), tmp_path, devices=jax.devices()[:1])
    assert then.steps_done == 2
    then.train()
    losses, expected = (
        [line["loss"] for line in trainer.history if "loss" in line] for trainer in (then, alone)
    )
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    back = Trainer(staged, tmp_path, devices=jax.devices()[:2], read_only=True)
    found = back.evaluate()
    for key, value in then.evaluate().items():
        assert found[key] == pytest.approx(value, rel=1e-5), key
    sources, greedy = [list(b"123+456"), list(b"1")], Sampling(temperature=0.0)
    one, other = (
        [answer.tokens for answer in t.answers(sources, max_new_tokens=6, sampling=greedy)]
        for t in (then, back)
    )
    assert one == other


@pytest.mark.parametrize(("name", "more"), [("transformer", ()), ("t5", ()), ("t5", PIPE)], ids=str)
def test_what_verify_proves_with_is_small_and_allowed(name, more):
    small = shrink(config_of(name, *more))
    data = sample.dataset(small.config)
    for mesh in small.meshes:
        check(small.on(mesh), device_count=math.prod(mesh.values()), platform="cpu")
    batch = sample.first_batch(small.config, data)
    assert {len(leaf) for leaf in vars(batch).values() if leaf is not None} == {
        small.config.train.global_batch_size
    }
    shares = batch.loss_mask.sum(1) / batch.segment_ids.sum(1)
    assert shares.min() < 0.6 < shares.max()
    assert type(small.config.train.model) is type(config_of(name).train.model)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            ["Mesh.pipe = 2", "Mesh.fsdp = 1", "Pipeline.microbatches = 3"],
            r"Pipeline.microbatches=3 with Mesh.pipe=2: .* a multiple of 2",
        ),
        (["Mesh.context = 2", "Mesh.fsdp = 1"], r"Mesh.context=2: Transformer reads a source and"),
        (
            ["Sharding.sequence_parallel = True", "PairData.target_length = 7"],
            r"PairData.target_length=7 does not divide over Mesh.tensor=2 .*nearest is (6|8)",
        ),
        (["Loss.chunk_size = 4"], r"Loss.chunk_size=4 has no effect for Transformer"),
        (["Transformer.vocab_size = 128"], r"smaller than the tokenizer's 256.*PairData.tokenizer"),
        (["PairData.source_length = 17"], r"PairData.source_length=17.*use at most 16"),
        (["Attention.kernel = 'cudnn'"], r"cudnn"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(more, sentence):
    with pytest.raises(UserError, match=sentence):
        check(config_of("transformer", *more), device_count=8, platform="cpu")


def test_other_data_than_pairs_are_refused():
    config = config_of("transformer")
    for change, sentence in (
        ({"data": VectorData()}, r"learns from pairs, but Train.data=@VectorData\(\) gives vecto"),
        ({"model": MLP()}, r"learns from vectors, but Train.data=@PairData\(\) gives pairs"),
    ):
        other = dataclasses.replace(config, train=dataclasses.replace(config.train, **change))
        with pytest.raises(UserError, match=sentence):
            check(other, device_count=8, platform="cpu")


def test_relative_positions_choose_a_kernel_that_adds_them():
    with pytest.raises(UserError, match=r"'blocked' does not add relative positions.*'xla'"):
        check(config_of("t5", "Attention.kernel = 'blocked'"), device_count=8, platform="cpu")


def test_a_batch_of_another_form_is_refused(runs):
    trainer = runs["transformer"]
    batch = sample.first_batch(trainer.config, trainer.dataset)
    with pytest.raises(UserError, match=r"Batch.source is None; use an array"):
        trainer.step(dataclasses.replace(batch, source=None))
    with pytest.raises(UserError, match=r"Batch.source\[0, 0\] is 300; use 0 to 255"):
        trainer.step(dataclasses.replace(batch, source=np.where(
            np.arange(batch.source.shape[1]) == 0, 300, batch.source)))  # fmt: skip


def test_several_answers_are_refused_in_a_pipeline_before_it_begins(tmp_path):
    lines = [json.dumps({"source": "1+1", "target": ["2", "02"]})] * 40
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = load_config("transformer_addition", [
        *TINY, *TRANSFORMER, f"PairData.source = '{tmp_path / 'a.jsonl'}'",
        "Mesh.fsdp = 1", "Mesh.pipe = 2", "Pipeline.microbatches = 2",
    ])  # fmt: skip
    with pytest.raises(UserError, match=r"Mesh.pipe=2: a pipeline uses only the first answer"):
        Trainer(config, devices=jax.devices()[:2]).train()
