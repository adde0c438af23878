"""Sizes that no axis of the mesh divides: losses and gradients of one device, and what is whole."""

import csv
import dataclasses
import shlex
from pathlib import Path

import numpy as np
import pytest
from conftest import lower_step, make_layout, make_step, needs_libtpu, text_batch
from parity import assert_equal, evaluate
from test_planning_traffic import LLAMA, LLAMA8, audited, faults
from test_planning_traffic import config_of as traffic_of

from jaxtrain import Trainer
from jaxtrain.analysis.planning.machines.targets import parse_target, tpu_devices
from jaxtrain.analysis.planning.plan import plan
from jaxtrain.analysis.planning.search.search import search
from jaxtrain.analysis.planning.textbook.memory import memory
from jaxtrain.analysis.planning.timing.timing import step_time
from jaxtrain.analysis.verify import verify as verification
from jaxtrain.analysis.verify.proofs import claims
from jaxtrain.analysis.verify.shrink import shrink
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.parallel.sharding import Sharding
from jaxtrain.training.compose import compose as program_of
from jaxtrain.training.layouts import abstract_layout, layout, notes
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.preflight.preflight import check
from jaxtrain.training.settings import load_config

PUBLISHED = Path(__file__).parents[1] / "benchmarks" / "published_runs.csv"
BATCH = text_batch(rows=12, length=16, vocab_size=48)
MODEL = GPT(vocab_size=64, num_layers=4, embed_dim=32, num_heads=4, context_length=16)


def config_of(model: GPT = MODEL, zero: int = 3, *bindings: str, **sizes: int):
    """The quickstart with this model on a mesh of these sizes."""
    mesh = {"fsdp": 1, "tensor": 1, **sizes}
    config = load_config(
        "gpt_quickstart",
        [f"Sharding.zero = {zero}", *(f"Mesh.{axis} = {n}" for axis, n in mesh.items()), *bindings],
    )
    return dataclasses.replace(config, train=dataclasses.replace(config.train, model=model))


def compiled_for_tpus(config, **whole):
    """What moves in the step compiled for eight v5e, beside the textbook's list."""
    over = layout(config, tpu_devices("v5e:2x4"))
    assert all(getattr(over, name) == axes for name, axes in whole.items())
    batch = config.train.data.abstract_batch(config.train.global_batch_size)
    step = lower_step(program_of(config, over), batch)
    text = step.compile({"exec_time_optimization_effort": -1.0}).as_text()
    return audited(config, text, dict(over.mesh.shape))


@pytest.fixture(scope="module")
def one_device():
    return evaluate(make_step(MODEL, make_layout()), BATCH)


# -- fsdp, over a divisor of its devices; tables whole on every stage ------------------------------


@pytest.mark.slow
def test_six_devices_of_fsdp_share_what_two_of_them_divide(devices, one_device):
    config = config_of(zero=1, fsdp=6)
    shared = layout(config, devices[:6])
    assert (shared.mesh.shape["data"], shared.mesh.shape["fsdp"]) == (3, 2)
    assert_equal(evaluate(make_step(MODEL, shared), BATCH, one_device), one_device)
    (note,) = notes(config, shared)
    assert "Mesh.fsdp=6" in note
    assert "2 parts, each on 3 devices" in note


@pytest.mark.slow
def test_three_stages_of_a_table_that_three_do_not_divide(devices, one_device):
    config = config_of(zero=1, pipe=3, fsdp=2)
    whole = layout(config, devices[:6])
    assert whole.unstaged == {"vocab_embed"}
    program = make_step(MODEL, whole, pipeline=Pipeline(microbatches=3))
    state = program.create(seed=0)
    table = state.params["token_embedding"].get_value()
    assert table.sharding.shard_shape(table.shape) == (64, 32)
    assert_equal(evaluate(program, BATCH), one_device)
    assert "GPT.embed_dim does not divide over the stages" in notes(config, whole)[0]


# -- a vocabulary, padded while it is computed with -----------------------------------------------

ODD = {
    "gpt": dataclasses.replace(MODEL, vocab_size=51),
    "llama": Llama(
        vocab_size=51, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48,
        context_length=16,
    ),
    "bert": BERT(
        vocab_size=51, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=48, context_length=16
    ),
}  # fmt: skip
SMOOTH = Loss(z_weight=0.1, label_smoothing=0.1)


@pytest.mark.slow_cases("bert-mesh1-changes1")
@pytest.mark.parametrize(
    ("name", "mesh", "changes"),
    [
        ("gpt", {"fsdp": 2, "tensor": 4}, {"loss": SMOOTH}),
        ("bert", {"fsdp": 2, "tensor": 2, "zero": 2}, {"loss": Loss(chunk_size=8)}),
        pytest.param(
            "llama", {"data": 2, "tensor": 2, "zero": 1}, {"accumulation": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt", {"pipe": 2, "tensor": 2, "zero": 1}, {"pipeline": Pipeline(microbatches=2)},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_vocabulary_that_tensor_does_not_divide_equals_one_device(name, mesh, changes):
    model, plain = ODD[name], {"loss": changes.get("loss", Loss())}
    whole = dataclasses.replace(make_layout(**mesh), whole=frozenset({"vocab"}))
    expected = evaluate(make_step(model, make_layout(), **plain), BATCH)
    assert_equal(evaluate(make_step(model, whole, **changes), BATCH, expected), expected)


def test_where_sizes_divide_nothing_is_whole_and_nothing_is_said():
    config = config_of(pipe=2, fsdp=2, data=2)
    plain = abstract_layout(config, 8)
    assert dict(plain.mesh.shape) == {
        "pipe": 2, "data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 1,
    }  # fmt: skip
    assert plain.unstaged == frozenset()
    assert notes(config, plain) == []


@pytest.mark.parametrize(
    "bindings", [["Mesh.fsdp = 7"], ["Mesh.fsdp = 6", "Exchange.method = 'int8'", "Mesh.data = 2"]]
)
def test_what_would_share_nothing_and_what_has_replicas_is_refused(bindings):
    config = config_of(MODEL, 3, *bindings)
    count = config.mesh.fsdp * config.mesh.data
    with pytest.raises(UserError, match="GPT.embed_dim=32 does not divide over Mesh.fsdp"):
        check(config, device_count=count, platform="cpu", reads_data=False)


def test_padded_rows_are_in_no_weight_and_in_no_answer(devices):
    model = dataclasses.replace(MODEL, vocab_size=257, num_layers=1)
    bindings = "Train.global_batch_size = 4", "TextData.sequence_length = 16"
    config = config_of(model, 3, *bindings, "Precision.compute = 'float32'", tensor=4, fsdp=2)
    over, alone = Trainer(config), Trainer(config_of(model, 3, *bindings), devices=devices[:1])
    weights = over.weights()
    assert weights["token_embedding"].shape == (257, 32)
    # Rows of zeros would be likelier than any token of a model that dislikes all of them.
    weights["token_embedding"] = weights["token_embedding"] - 0.05
    weights["norm_bias"] = weights["norm_bias"] + 2.0
    for trainer in (over, alone):
        trainer.set_weights(weights)
    tokens = np.arange(8).reshape(1, 8)
    found, wanted = over.logits(tokens), alone.logits(tokens)
    assert found.shape == (1, 8, 257)
    assert wanted.max() < -1
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
    text = {"max_new_tokens": 6, "temperature": 1.0, "seed": 1}
    assert over.generate([65, 66], **text) == alone.generate([65, 66], **text)
    assert any("GPT.vocab_size=257 does not divide" in note for note in notes(config, over.layout))


# Compiles a step; gradients of a padded vocabulary are in the fast part.
@pytest.mark.slow
@needs_libtpu
def test_what_a_padded_vocabulary_moves_is_the_textbook_s():
    model = dataclasses.replace(LLAMA8, vocab_size=127, tie_embeddings=True)
    config = traffic_of(model, {"data": 2, "tensor": 4})
    assert faults(compiled_for_tpus(config, whole={"vocab"}), set()) == []


# -- the layouts that others publish ---------------------------------------------------------------


def published():
    """Id -> config, bindings and target of the runs of Megatron's table and of NeMo's 405B."""
    found = {}
    with PUBLISHED.open() as file:
        for row in csv.DictReader(file):
            if row["id"].startswith("h100-meg-") or row["id"] == "h100-nemo-405b-576":
                name, *words = shlex.split(row["bindings"])
                options = zip(words, words[1:], strict=False)
                bindings = [word for flag, word in options if flag == "-b"]
                found[row["id"]] = name, bindings, words[words.index("--target") + 1]
    return found


def distributed(bindings):
    """As Megatron's distributed optimizer has it: data parallelism shards the moments."""
    sizes = ["Mesh.data=1", "Mesh.fsdp=48", "Sharding.zero=1"]
    return [*(b for b in bindings if b.split("=")[0] not in str(sizes)), *sizes]


def layouts_published():
    for name, (config, bindings, target) in published().items():
        yield name, config, bindings, target
        if name.startswith("h100-meg-"):
            yield f"{name}, distributed optimizer", config, distributed(bindings), target


def test_the_published_layouts_are_accepted():
    count = 0
    for _, name, bindings, target in layouts_published():
        config = load_config(name, bindings)
        check(config, device_count=parse_target(target).devices, platform="gpu", reads_data=False)
        count += 1
    assert count == 17


def test_a_plan_says_what_is_whole_and_counts_it():
    rows = "Train.global_batch_size = 48", "TextData.sequence_length = 16"
    made = plan(config_of(MODEL, 1, *rows, fsdp=48), "h100:6x8", compile=False)
    equal = plan(config_of(MODEL, 1, *rows, fsdp=16, data=3), "h100:6x8", compile=False)
    assert (made.total, made.time.seconds) == (equal.total, equal.time.seconds)
    [said] = [s for s in made.advice if s not in equal.advice]
    assert [said] == notes(made.config, made.layout)
    assert "Mesh.fsdp=48" in said


def test_places_of_shorter_stages_are_counted():
    """Five layers on three stages take the time of six; what the model needs is five's."""

    def timed(layers):
        model = dataclasses.replace(MODEL, num_layers=layers)
        bindings = "Train.global_batch_size = 12", "TextData.sequence_length = 16"
        config = config_of(model, 1, *bindings, "Pipeline.microbatches = 4", pipe=3, fsdp=2)
        over = abstract_layout(config, 6)
        return step_time(config, over, parse_target("h100:1x6"), [], update_bytes=0)

    five, six = timed(5), timed(6)
    assert five.flops_per_device == six.flops_per_device
    assert five.compute == six.compute
    assert five.model_flops_per_device < six.model_flops_per_device


@pytest.mark.slow
@pytest.mark.rotated("searches")
def test_a_search_names_a_layout_once():
    bindings = "Train.global_batch_size = 12", "TextData.sequence_length = 16"
    found = search(config_of(MODEL, 3, *bindings), parse_target("h100:1x6"))
    assert {one.config.mesh.fsdp for one in found.candidates} <= {1, 2}
    assert any("the same as with fewer" in reason for reason in found.rejected)


def test_nemo_s_405b_on_nine_stages_is_counted_with_whole_tables():
    name, bindings, target = published()["h100-nemo-405b-576"]
    config = load_config(name, bindings)
    over = abstract_layout(config, parse_target(target).devices)
    assert over.unstaged == {"vocab_embed"}
    V, D, F, kv, layers = 128_256, 16_384, 53_248, 8 * 128, 126 // 9
    # A device has an eighth of the matrices of 14 of 126 layers, and their norms; of both tables
    # an eighth of the vocabulary and all of embed, and the last norm.
    matrices = 2 * D * D + 2 * D * kv + 3 * D * F
    parameters = layers * (matrices // 8 + 2 * D) + 2 * V * D // 8 + D
    assert memory(config, over, "gpu").arguments.params == 4 * parameters


@pytest.mark.slow
@needs_libtpu
def test_what_whole_tables_move_is_the_textbook_s():
    model = dataclasses.replace(LLAMA, embed_dim=258, num_heads=1, num_kv_heads=1, num_layers=4)
    config = traffic_of(
        model, {"pipe": 4, "data": 2}, rows=16, sharding=Sharding(zero=0),
        pipeline=Pipeline(microbatches=4),
    )  # fmt: skip
    assert faults(compiled_for_tpus(config, unstaged={"vocab_embed"}), set()) == []


def test_what_does_not_divide_is_shrunk_to_what_does_not():
    name, bindings, _ = published()["h100-nemo-405b-576"]
    small = shrink(load_config(name, bindings))
    assert {mesh["pipe"] for mesh in small.meshes} == {1, 3}
    name, bindings, _ = published()["h100-meg-70b"]
    assert shrink(load_config(name, distributed(bindings))).meshes[-1]["fsdp"] == 6
    mesh = ["Mesh.tensor = 4", "Mesh.fsdp = 2"]
    for vocabulary, small_one in ((50257, 63), (50260, 64)):
        own = load_config("gpt2_124m", [*mesh, f"GPT.vocab_size = {vocabulary}"])
        assert shrink(own).config.train.model.vocab_size == small_one


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100-nemo-405b-576", "h100-meg-70b"])
def test_published_layouts_are_proved_shrunk(name, monkeypatch):
    """In what does not compute on one device alone, which tests/test_verify.py has."""
    only = ("initial", "mesh", "precision", "resume")
    monkeypatch.setattr(
        verification, "claims", lambda bench: (c for c in claims(bench) if c.proof in only)
    )
    config, bindings, _ = published()[name]
    bindings = distributed(bindings) if name.startswith("h100-meg-") else bindings
    report = verification.verify(load_config(config, bindings))
    assert {one.verdict for one in report.proofs} == {"proved"}
    assert sum(one.proof == "mesh" for one in report.proofs) == len(report.small.meshes)
