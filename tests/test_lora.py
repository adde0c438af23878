"""Adapters of low rank: the formula's gradients on every mesh, PyTorch's training, PEFT's files."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lower_step, make_layout, make_step, text_batch
from parity import TOLERANCE, evaluate

from jaxtrain.analysis.planning.textbook.state_bytes import argument_bytes
from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.parallel.sharding import by_name
from jaxtrain.run.huggingface.adapters import read_adapter
from jaxtrain.run.trainer import Trainer
from jaxtrain.run.weights import merge_adapters
from jaxtrain.training import layouts
from jaxtrain.training.compose import compose as program_of
from jaxtrain.training.finetune.finetune import Finetune, tuning_of
from jaxtrain.training.finetune.lora import UP, LoRA
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config
from jaxtrain.training.step import train_all

BATCH = text_batch(rows=16, length=16, vocab_size=48)
MODELS = {
    "llama": Llama(
        vocab_size=64, num_layers=4, embed_dim=32, num_heads=8, num_kv_heads=2, mlp_dim=48,
        context_length=16,
    ),
    "gpt": GPT(vocab_size=64, num_layers=4, embed_dim=32, num_heads=8, context_length=16),
}  # fmt: skip


class Begun(LoRA):
    """LoRA whose B is drawn like everything else: with B zero A has no gradient."""

    def draw(self, shapes, key):  # noqa: ANN001, ANN201
        found = super().draw(shapes, key)

        def one(path, variable):  # noqa: ANN001, ANN202
            if jax.tree_util.keystr(path, simple=True, separator="/").endswith(UP):
                shape = variable.get_value().shape
                return variable.replace(0.1 * jax.random.normal(jax.random.key(1), shape))
            return variable

        is_leaf = lambda x: hasattr(x, "get_value")  # noqa: E731
        return jax.tree_util.tree_map_with_path(one, found, is_leaf=is_leaf)


def tuning(model: str) -> LoRA:
    made = tuning_of(Finetune(lora_rank=4, lora_alpha=6.0), MODELS[model].build)
    assert isinstance(made, LoRA)
    return Begun(**vars(made))


@functools.cache
def by_the_formula(model: str) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of A and B out of those of the whole merged weights W + s A B: with dW
    the gradient of W, dA = s dW B^T and dB = s A^T dW."""
    lora, layout = tuning(model), make_layout()
    program = make_step(MODELS[model], layout, tuning=lora)
    state = program.create(seed=0)
    whole = train_all(program.setup)
    before = whole.create(0, merge_adapters(program.setup, state))
    with layout.active():
        gradients, metrics, _ = jax.jit(whole.setup.gradients)(before, BATCH)
    of_weights = {n: np.asarray(v.get_value()) for n, v in by_name(gradients).items()}
    parts = {n: np.asarray(v.get_value()) for n, v in by_name(state.params).items()}
    found = {}
    for name in lora.targets:
        dW, A, B = of_weights[name], parts[f"{name}/lora_a"], parts[f"{name}/lora_b"]  # noqa: N806
        # As matrices [L, in, out]: A's leading dimensions are those that are summed over.
        L, R = A.shape[0], A.shape[-1]  # noqa: N806
        fan_in = A[0, ..., 0].size
        place = B.shape.index(R, 1)
        inside = range(place, place + A.ndim - 2)
        flat = np.moveaxis(dW, list(inside), range(1, A.ndim - 1)).reshape(L, fan_in, -1)
        up = np.moveaxis(B, place, 1).reshape(L, R, -1)
        down = lora.scale * np.einsum("lio,lro->lir", flat, up)
        found[f"{name}/lora_a"] = down.reshape(A.shape)
        made = lora.scale * np.einsum("lir,lio->lro", A.reshape(L, fan_in, R), flat)
        rest = [n for i, n in enumerate(B.shape) if i not in (0, place)]
        found[f"{name}/lora_b"] = np.moveaxis(made.reshape(L, R, *rest), 1, place)
    return float(metrics["loss"]), found


MESHES = {
    "zero 2, microbatches": ("llama", {"fsdp": 4, "tensor": 2, "zero": 2}, {"accumulation": 2}),
    "sequence": (
        "gpt", {"fsdp": 2, "tensor": 2, "context": 2, "sequence_parallel": True}, {},
    ),
    "zero bubble, residuals": (
        "llama", {"pipe": 4, "fsdp": 2},
        {"pipeline": Pipeline(schedule="zero_bubble", microbatches=2, backward="residuals")},
    ),
}  # fmt: skip


# test_dora.py has adapters on a mesh in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_gradients_are_the_formulas_on_every_mesh(name):
    model, sizes, changes = MESHES[name]
    loss, expected = by_the_formula(model)
    program = make_step(MODELS[model], make_layout(**sizes), tuning=tuning(model), **changes)
    found = evaluate(program, BATCH)
    assert found["loss"] == pytest.approx(loss, abs=5 * TOLERANCE)
    gradients = by_name(found["gradients"])
    assert set(gradients) == set(expected)
    for parameter, gradient in gradients.items():
        np.testing.assert_allclose(
            gradient.get_value(), expected[parameter], rtol=0, atol=TOLERANCE, err_msg=parameter
        )
    assert found["compilations"] == 1


@pytest.mark.slow
def test_heads_that_do_not_divide_have_adapters_too():
    _, expected = by_the_formula("llama")
    layout = dataclasses.replace(make_layout(tensor=8), whole=frozenset({"kv_heads"}))
    found = evaluate(make_step(MODELS["llama"], layout, tuning=tuning("llama")), BATCH)
    for parameter, gradient in by_name(found["gradients"]).items():
        np.testing.assert_allclose(
            gradient.get_value(), expected[parameter], rtol=0, atol=TOLERANCE, err_msg=parameter
        )


# -- PyTorch and PEFT ------------------------------------------------------------------------------

BINDINGS = [
    "Mesh.fsdp=4", "Mesh.tensor=2", "Precision.compute='float32'", "TextData.sequence_length=16",
    "Train.global_batch_size=8", "Optimizer.clip_norm=None", "Optimizer.weight_decay=0.0",
    "Optimizer.learning_rate=1e-2", "Train.steps=10", "Schedule.name='constant'",
    "Schedule.warmup_steps=0", "Finetune.lora_rank=4", "Finetune.lora_alpha=6.0",
    "Finetune.lora_scale='sqrt_rank'",
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """A random Llama of transformers."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("theirs") / "llama"
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ours(theirs) -> Trainer:
    """A run with adapters of it, over fsdp and tensor."""
    return Trainer.from_huggingface(theirs, bindings=BINDINGS)


def adapter_tensors(folder: Path) -> dict[str, Any]:
    safetensors = pytest.importorskip("safetensors.torch")
    return safetensors.load_file(folder / "adapter_model.safetensors")


def test_ten_steps_equal_the_formula_in_pytorch(theirs, ours, tmp_path):
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    ours.export_adapter(tmp_path / "first")
    first = adapter_tensors(tmp_path / "first")
    model: Any = transformers.LlamaForCausalLM.from_pretrained(theirs, attn_implementation="eager")
    model.requires_grad_(False)
    trained = {name: torch.nn.Parameter(value.clone()) for name, value in first.items()}
    for name in {name.rpartition(".lora_")[0] for name in first}:
        A, B = (trained[f"{name}.lora_{one}.weight"] for one in "AB")  # noqa: N806
        module = model.get_submodule(name.removeprefix("base_model.model."))

        def hook(_, inputs, output, A=A, B=B):  # noqa: ANN001, ANN202, N803
            return output + 6.0 / 4**0.5 * (inputs[0] @ A.T) @ B.T

        module.register_forward_hook(hook)
    assert len(first) == 2 * 7 * 2
    rule: Any = ours.config.optimizer.rule
    optimizer = torch.optim.AdamW(
        trained.values(), lr=1e-2, betas=(rule.b1, rule.b2), eps=rule.epsilon, weight_decay=0.0
    )
    for seed in range(10):
        tokens = np.random.default_rng(seed).integers(0, 64, (8, 17)).astype(np.int32)
        ones = np.ones((8, 16), np.float32)
        places = np.tile(np.arange(16, dtype=np.int32), (8, 1))
        found = ours.step(Batch(tokens[:, :-1], tokens[:, 1:], ones, ones.astype(np.int32), places))
        logits = model(torch.tensor(tokens[:, :-1])).logits
        wanted = torch.tensor(tokens[:, 1:], dtype=torch.long)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(found["loss"]) == pytest.approx(float(loss.detach()), abs=2e-5)
    ours.export_adapter(tmp_path / "last")
    for name, value in adapter_tensors(tmp_path / "last").items():
        assert not torch.equal(value, first[name])
        np.testing.assert_allclose(value, trained[name].detach(), rtol=0, atol=1e-4, err_msg=name)


# Two models; ten steps of adapters are in the fast part.
@pytest.mark.slow
def test_the_merged_model_says_what_the_adapted_one_says(ours, tmp_path):
    """Through transformers: its logits of the exported, merged weights."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    rng, weights = np.random.default_rng(1), ours.weights()
    drawn = {n: rng.normal(0, 0.1, x.shape) for n, x in weights.items() if n.endswith("lora_b")}
    ours.set_weights(weights | {n: x.astype(np.float32) for n, x in drawn.items()})
    found = ours.export_huggingface(tmp_path / "merged")
    assert found.passed
    tokens = np.random.default_rng(0).integers(0, 64, (2, 12))
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits
    np.testing.assert_allclose(ours.logits(tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_of_peft_go_in_and_out_unchanged(kind, theirs, tmp_path):
    peft = pytest.importorskip("peft")
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    base = theirs
    if kind == "gpt2":
        base = tmp_path / "gpt2"
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        transformers.GPT2LMHeadModel(config).save_pretrained(base)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base)
    modules = ["q_proj", "o_proj", "down_proj"] if kind == "llama" else ["c_attn", "c_fc"]
    targets = "'layers/query', 'layers/out', 'layers/down'"
    if kind == "gpt2":
        targets = "'layers/qkv', 'layers/up'"
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=4, lora_alpha=6, use_rslora=True, target_modules=modules, init_lora_weights=False
        ),
    )
    adapted.save_pretrained(tmp_path / "theirs")
    trainer = Trainer.from_huggingface(
        base,
        bindings=[
            *BINDINGS,
            f"Finetune.lora_targets=({targets})",
            f"Finetune.adapter={str(tmp_path / 'theirs')!r}",
        ],
    )
    tokens = np.random.default_rng(0).integers(0, 64, (2, 12))
    with torch.no_grad():
        expected = adapted.eval()(torch.tensor(tokens)).logits
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)(torch.tensor(tokens)).logits
    np.testing.assert_allclose(trainer.logits(tokens), expected, rtol=0, atol=1e-4)
    assert np.abs(plain - expected).max() > 0.01
    trainer.export_adapter(tmp_path / "ours")
    before, after = (adapter_tensors(tmp_path / name) for name in ("theirs", "ours"))
    assert set(before) == set(after)
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    again = transformers.AutoModelForCausalLM.from_pretrained(base)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "ours")
    with torch.no_grad():
        np.testing.assert_allclose(
            again.eval()(torch.tensor(tokens)).logits, expected, rtol=0, atol=1e-6
        )


# -- runs ------------------------------------------------------------------------------------------

ADAPTERS = ["Finetune.lora_rank=4", "Finetune.lora_targets=('attention',)"]


@pytest.fixture(scope="module")
def run(tiny_config, tmp_path_factory) -> tuple[Path, Trainer]:
    """A run of 4 steps with adapters, restarted after 2."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    for steps in (2, 4):
        trainer = Trainer(config_of(tiny_config, steps), folder)
        trainer.train()
        trainer.close()
    return folder, trainer


def config_of(tiny_config: Path, steps: int, *bindings: str):  # noqa: ANN201
    decay = "Schedule.decay_steps=4"
    return load_config(tiny_config, [f"Train.steps={steps}", decay, *ADAPTERS, *bindings])


@pytest.mark.slow
def test_a_restarted_run_is_the_run_never_stopped_bit_for_bit(run, tiny_config):
    never_stopped = Trainer(config_of(tiny_config, 4))
    first = never_stopped.weights()
    never_stopped.train()
    found, expected = run[1].weights(), never_stopped.weights()
    assert set(found) == set(expected)
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name])
        assert np.array_equal(value, first[name]) == ("lora" not in name), name


# The merged model is compared above without a second run.
@pytest.mark.slow
def test_another_run_starts_from_the_merged_weights_and_writes_the_same(run, tiny_config):
    folder, trainer = run
    config = load_config(tiny_config, [f"Train.start_from={str(folder)!r}"])
    started = Trainer(config)
    assert not [name for name in started.weights() if "lora" in name]
    tokens = np.random.default_rng(0).integers(0, 256, (2, 20))
    np.testing.assert_allclose(started.logits(tokens), trainer.logits(tokens), rtol=0, atol=1e-5)
    prompt = [1, 2, 3]
    assert started.generate(prompt, max_new_tokens=8, temperature=0.0) == trainer.generate(
        prompt, max_new_tokens=8, temperature=0.0
    )


def test_bytes_of_the_state_are_the_compiled_steps_arguments(tiny_config):
    config = config_of(tiny_config, 4, "Sharding.zero=2")
    program = program_of(config, layouts.layout(config))
    batch = config.train.data.abstract_batch(config.train.global_batch_size)
    stats: Any = lower_step(program, batch).compile().memory_analysis()
    planned = argument_bytes(config, program.setup.layout)
    assert planned.total == stats.argument_size_in_bytes
    # ZeRO 2: moments lie over fsdp=2 along embed, heads over tensor=2. Of qkv [32, 3, 4, 8] A is
    # [32, 4] and B [3, 4, 4, 8], of out [4, 8, 32] A is [4, 8, 4] and B [4, 32]; in 2 layers.
    numbers = 2 * (32 * 4 // 2 + 3 * 4 * 4 * 8 // 2 + 4 * 8 * 4 // 2 + 4 * 32 // 2)
    assert 2 * 4 * numbers <= planned.optimizer <= 2 * 4 * numbers + 64


@pytest.mark.parametrize(
    ("bindings", "said"),
    [
        (["Finetune.lora_rank=0"], "use at least 1"),
        (["Finetune.lora_rank=4", "Finetune.freeze=('layers/*',)"], r"use Finetune\.freeze=\(\)"),
        (["Finetune.lora_rank=4", "Finetune.lora_targets=('atention',)"], "mean 'attention'"),
        (["Finetune.lora_rank=4", "Finetune.lora_targets=('token_embedding',)"], "can have an ad"),
        (["Finetune.lora_rank=4", "Exchange.method='gossip'"], r"Exchange\.method='synchronous'"),
        (["Finetune.adapter='there'"], r"set Finetune\.lora_rank"),
    ],
)
def test_what_cannot_be_trained_so_is_refused(bindings, said, tiny_config):
    with pytest.raises(UserError, match=said):
        preflight.check(load_config(tiny_config, bindings), device_count=8, platform="cpu")


def test_experts_are_no_mlp_and_none_is_offered():
    config = load_config("mixtral_tiny", ["Finetune.lora_rank = 4"])
    with pytest.raises(UserError) as refused:
        preflight.check(config, device_count=8, platform="cpu")
    said = "Finetune.lora_targets: 'mlp' matches no weight that can have an adapter; known: "
    assert f"{said}attention, layers/" in str(refused.value)


def test_an_adapter_of_another_kind_is_refused_with_all_reasons(theirs, tmp_path, ours):
    ours.export_adapter(tmp_path / "one")
    said = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    said |= {"r": 8, "use_dora": True}
    (tmp_path / "one" / "adapter_config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match=r"lora_rank=8\n.*use_dora is True"):
        read_adapter(str(tmp_path / "one"), ours.config, ours.program.setup)
    assert jnp.isfinite(ours.program.setup.tuning.scale)


def test_an_adapter_of_other_weights_is_refused_with_the_targets_that_fit(tmp_path, theirs, ours):
    fewer = ["Finetune.lora_targets=('layers/query', 'layers/down')"]
    Trainer.from_huggingface(theirs, bindings=[*BINDINGS, *fewer]).export_adapter(tmp_path / "few")
    with pytest.raises(UserError) as refused:
        read_adapter(str(tmp_path / "few"), ours.config, ours.program.setup)
    assert str(refused.value).endswith("use Finetune.lora_targets=('layers/down', 'layers/query')")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "adapter_config.json is not JSON"),
        ("[]", "adapter_config.json is not a JSON object"),
        (json.dumps({"peft_type": "LORA", "r": "4"}), "r is '4', which is not a positive number"),
        (json.dumps({"peft_type": "LORA", "r": 0}), "r is 0, which is not a positive number"),
        (json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": None}), "lora_alpha is None"),
    ],
)
def test_a_damaged_adapter_config_is_refused(content, said, tmp_path, ours):
    ours.export_adapter(tmp_path / "one")
    (tmp_path / "one" / "adapter_config.json").write_text(content)
    with pytest.raises(UserError, match=said):
        read_adapter(str(tmp_path / "one"), ours.config, ours.program.setup)
