"""Frozen parameters have no gradient and no optimizer state; the others train as if all did."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import lower_step, make_layout, make_step, text_batch
from parity import TOLERANCE, evaluate

from jaxtrain.analysis.planning.textbook.state_bytes import argument_bytes
from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.parallel.sharding import by_name
from jaxtrain.run.show.report import parameter_table, shard_bytes
from jaxtrain.run.trainer import Trainer
from jaxtrain.training import layouts
from jaxtrain.training.compose import compose as program_of
from jaxtrain.training.finetune.finetune import Finetune, tuning_of
from jaxtrain.training.flops import flops_per_step
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config

BATCH = text_batch(rows=16, length=16, vocab_size=48)
MODEL = Llama(
    vocab_size=64, num_layers=4, embed_dim=32, num_heads=8, num_kv_heads=2, mlp_dim=48,
    context_length=16, tie_embeddings=False,
)  # fmt: skip
FREEZE = ("layers/query", "layers/*norm_scale", "token_embedding", "layers/down")
FROZEN = {
    "layers/query", "layers/attention_norm_scale", "layers/mlp_norm_scale", "token_embedding",
    "layers/down",
}  # fmt: skip


@functools.cache
def of_all_trained() -> dict[str, Any]:
    """The first step of the model on one device, all its parameters trained."""
    return evaluate(make_step(MODEL, make_layout()), BATCH)


MESHES = {
    "zero 0": ({"data": 2, "fsdp": 4, "zero": 0}, {}),
    "zero 1": ({"fsdp": 8, "zero": 1}, {}),
    "zero 2, microbatches": ({"fsdp": 4, "tensor": 2, "zero": 2}, {"accumulation": 2}),
    "zero 3": ({"fsdp": 4, "tensor": 2}, {}),
    "1f1b": ({"pipe": 2, "fsdp": 2, "tensor": 2}, {"pipeline": Pipeline(microbatches=4)}),
    "interleaved, zero 2": (
        {"pipe": 2, "data": 2, "fsdp": 2, "zero": 2},
        {"pipeline": Pipeline(schedule="interleaved", virtual_stages=2, microbatches=4)},
    ),
    "zero bubble, residuals": (
        {"pipe": 4, "fsdp": 2},
        {"pipeline": Pipeline(schedule="zero_bubble", microbatches=2, backward="residuals")},
    ),
}  # fmt: skip


QUICK = ("zero 2, microbatches", "zero bubble, residuals")


# Two programs; a run with frozen weights is PyTorch's in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MESHES]
)
def test_gradients_of_the_rest_are_those_of_a_model_that_trains_whole(name):
    sizes, changes = MESHES[name]
    tuning = tuning_of(Finetune(freeze=FREEZE), MODEL.build)
    program = make_step(MODEL, make_layout(**sizes), tuning=tuning, **changes)
    found, expected = evaluate(program, BATCH), of_all_trained()
    assert found["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE)
    wanted = by_name(expected["gradients"])
    gradients = by_name(found["gradients"])
    assert set(gradients) == set(wanted) - FROZEN
    for parameter, gradient in gradients.items():
        np.testing.assert_allclose(
            gradient.get_value(), wanted[parameter].get_value(), rtol=0, atol=TOLERANCE
        )
    assert found["compilations"] == 1


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 4, "zero": 1}])
def test_bytes_of_the_state_are_the_compiled_steps_arguments(sizes, tiny_config):
    zero = sizes.get("zero", 3)
    mesh = [f"Mesh.{axis}={sizes.get(axis, 1)}" for axis in ("data", "fsdp", "tensor")]
    freeze = "Finetune.freeze=('layers/*',)"
    config = load_config(tiny_config, [*mesh, f"Sharding.zero={zero}", freeze])
    program = program_of(config, layouts.layout(config))
    batch = config.train.data.abstract_batch(config.train.global_batch_size)
    stats: Any = lower_step(program, batch).compile().memory_analysis()
    planned = argument_bytes(config, program.setup.layout)
    assert planned.total == stats.argument_size_in_bytes
    weights = [v.get_value() for part in program.abstract_state().weights
               for v in by_name(part).values()]  # fmt: skip
    assert planned.params == sum(map(shard_bytes, weights))
    # Two moments and a count of what is trained: embeddings and the last norm.
    trained = {n: v.get_value() for n, v in by_name(program.abstract_state().params).items()}
    assert not any(name.startswith("layers/") for name in trained)
    by_hand = 0
    for value in trained.values():
        spec = program.setup.layout.sharding_of(value.sharding.spec).shard_shape(value.shape)
        share = np.prod(spec) if zero == 3 else value.size // (1 if value.ndim == 1 else 4)
        by_hand += 2 * 4 * int(share)
    assert by_hand <= planned.optimizer <= by_hand + 64


def test_a_training_run_equals_pytorch_with_requires_grad_false(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
            tie_word_embeddings=False, attn_implementation="eager",
        )
    )  # fmt: skip
    theirs.save_pretrained(tmp_path / "theirs")
    trainer = Trainer.from_huggingface(
        tmp_path / "theirs",
        bindings=[
            "Mesh.fsdp=4", "Mesh.tensor=2", "Precision.compute='float32'",
            "TextData.sequence_length=16", "Train.global_batch_size=8", "Optimizer.clip_norm=None",
            "Optimizer.weight_decay=0.0", "Optimizer.learning_rate=1e-3", "Train.steps=4",
            "Schedule.name='constant'", "Schedule.warmup_steps=0",
            "Finetune.freeze=('layers/*', 'token_embedding')",
        ],
    )  # fmt: skip
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad = name in ("model.norm.weight", "lm_head.weight")
    rule: Any = trainer.config.optimizer.rule
    optimizer = torch.optim.AdamW(
        [p for p in theirs.parameters() if p.requires_grad],
        lr=1e-3, betas=(rule.b1, rule.b2), eps=rule.epsilon, weight_decay=0.0,
    )  # fmt: skip
    before = {name: value.detach().clone() for name, value in theirs.state_dict().items()}
    for seed in range(4):
        tokens = np.random.default_rng(seed).integers(0, 64, (8, 17)).astype(np.int32)
        batch = Batch(
            tokens[:, :-1],
            tokens[:, 1:],
            np.ones((8, 16), np.float32),
            np.ones((8, 16), np.int32),
            np.tile(np.arange(16, dtype=np.int32), (8, 1)),
        )
        ours = trainer.step(batch)
        logits = theirs(torch.tensor(tokens[:, :-1])).logits
        wanted = torch.tensor(tokens[:, 1:], dtype=torch.long)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(ours["loss"]) == pytest.approx(float(loss), abs=1e-4)
    trainer.export_huggingface(tmp_path / "ours")
    ours = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    for name, value in theirs.state_dict().items():
        trained = name in ("model.norm.weight", "lm_head.weight")
        assert torch.equal(value, before[name]) != trained
        if trained:
            np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-5)
        else:
            assert torch.equal(ours[name], value)


@pytest.fixture(scope="module")
def frozen_run(tiny_config, tmp_path_factory) -> tuple[Path, Trainer]:
    """A run of 4 steps with frozen layers, restarted after 2."""
    folder = tmp_path_factory.mktemp("frozen")
    for _ in range(2):
        trainer = Trainer(_config(tiny_config, 4), folder / "run")
        trainer.train(2)
        trainer.close()
    return folder / "run", trainer


def _config(tiny_config, steps: int, *bindings: str):
    freeze = "Finetune.freeze=('layers/u*', 'token_embedding')"
    # The run is stopped while the one layer waits and the other has begun.
    unfreeze = "Finetune.unfreeze={'layers/*[0:1]': 3, 'layers/*[1:2]': 1}"
    return load_config(
        tiny_config, [f"Train.steps={steps}", "Schedule.decay_steps=4", freeze, unfreeze, *bindings]
    )


# Three runs; tests/test_train.py resumes a run in the fast part.
@pytest.mark.slow
def test_a_restarted_run_is_the_run_never_stopped_bit_for_bit(frozen_run, tiny_config):
    _, restarted = frozen_run
    never_stopped = Trainer(_config(tiny_config, 4))
    first = never_stopped.weights()
    never_stopped.train()
    found, expected = restarted.weights(), never_stopped.weights()
    assert set(found) == set(expected) == set(first)
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name])
        is_frozen = name.startswith("layers/u") or name == "token_embedding"
        assert np.array_equal(value, first[name]) == is_frozen, name


# One more run; tests/test_finetune_fresh.py starts from another in the fast part.
@pytest.mark.slow
def test_another_run_starts_from_it_with_all_its_parameters(frozen_run, tiny_config):
    folder, trainer = frozen_run
    config = load_config(tiny_config, [f"Train.start_from={str(folder)!r}", "Mesh.tensor=1"])
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, fsdp=4))
    started = Trainer(config)
    assert not by_name(started.state.frozen)
    for name, value in started.weights().items():
        np.testing.assert_array_equal(value, trainer.weights()[name])


# Two runs; one with frozen weights is PyTorch's in the fast part.
@pytest.mark.slow
def test_weights_are_set_trained_or_not_and_the_table_tells_which(frozen_run):
    _, trainer = frozen_run
    weights = {name: value + 1 for name, value in trainer.weights().items()}
    trainer.set_weights(weights)
    for name, value in trainer.weights().items():
        np.testing.assert_array_equal(value, weights[name])
    column = parameter_table(trainer.state).columns[-1]
    said = dict(zip(by_name(trainer.state.params) | by_name(trainer.state.frozen), column.cells,
                    strict=True))  # fmt: skip
    assert {name for name, word in said.items() if word == "frozen"} == set(
        by_name(trainer.state.frozen)
    )


@pytest.mark.parametrize(
    ("binding", "said"),
    [
        ("Finetune.freeze=('layer/up',)", "did you mean 'layers/up'"),
        ("Finetune.freeze=('*',)", "none is left to train"),
    ],
)
def test_what_cannot_be_trained_so_is_refused(binding, said, tiny_config):
    config = load_config(tiny_config, [binding])
    with pytest.raises(UserError, match=said):
        preflight.check(config, device_count=8, platform="cpu")


def test_replicas_with_parameters_of_their_own_are_refused(tiny_config):
    config = load_config(tiny_config, ["Finetune.freeze=('layers/*',)", "Exchange.method='gossip'"])
    with pytest.raises(UserError, match=r"Exchange\.method='synchronous'"):
        preflight.check(config, device_count=8, platform="cpu")


def test_a_frozen_weight_needs_no_gradient_and_so_a_third_less_of_its_products(tiny_config):
    def flops(*bindings: str) -> float:
        return flops_per_step(load_config(tiny_config, bindings))

    # 8 rows of 32 tokens; `up` has 32 x 128 weights in each of 2 layers.
    less = flops() - flops("Finetune.freeze=('layers/up',)")
    assert less == pytest.approx(2 * 8 * 32 * (2 * 32 * 128))
    # The tied embedding makes logits; positions are only looked up.
    less = flops() - flops("Finetune.freeze=('token_embedding', 'position_embedding')")
    assert less == pytest.approx(2 * 8 * 32 * (256 * 32))
