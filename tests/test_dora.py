"""DoRA: ten steps and its files are peft's, and a step on a mesh is one device's."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from conftest import make_layout, make_step, text_batch
from parity import assert_equal, evaluate
from test_lora import MODELS, Begun

from jaxtrain.config.errors import UserError
from jaxtrain.run.trainer import Trainer
from jaxtrain.run.weights import merge_adapters
from jaxtrain.training.finetune.finetune import Finetune, tuning_of
from jaxtrain.training.optimizers.rules.elementwise import AdamW
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.settings import load_config
from jaxtrain.training.step import train_all

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

STEPS, RATE, LENGTH, ROWS = 10, 3e-3, 16, 4
TOKENS = np.random.default_rng(0).integers(0, 64, (ROWS, LENGTH + 1))
TARGETS = {
    "llama": (["q_proj", "o_proj", "down_proj"], "'layers/query', 'layers/out', 'layers/down'"),
    "gpt2": (["c_attn", "c_fc"], "'layers/qkv', 'layers/up'"),
}


def peer(kind: str, folder: Any, *, use_dora: bool = True) -> Any:
    """A model of transformers with drawn adapters of peft's, both saved."""
    torch.manual_seed(0)
    if kind == "llama":
        sizes: Any = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        )  # fmt: skip
    else:
        sizes = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(sizes)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(3.0)
    model.save_pretrained(folder / "base")
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=4, lora_alpha=6, target_modules=TARGETS[kind][0], use_dora=use_dora,
            init_lora_weights=False,
        ),
    )  # fmt: skip
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "magnitude" in name:
                value.mul_(1 + 0.1 * torch.rand_like(value))
    adapted.save_pretrained(folder / "adapter")
    return adapted


def trainer_of(kind: str, folder: Any, *bindings: str) -> Trainer:
    config = load_config(
        f"hf:{folder / 'base'}",
        [
            "TextData.source = 'synthetic'",
            f"TextData.sequence_length = {LENGTH}",
            f"Train.global_batch_size = {ROWS}",
            f"Train.steps = {STEPS}",
            "Precision.compute = 'float32'",
            f"Optimizer.learning_rate = {RATE}",
            "Optimizer.weight_decay = 0.0",
            "Optimizer.clip_norm = None",
            "Schedule.name = 'constant'",
            "Schedule.warmup_steps = 0",
            "Mesh.fsdp = 1",
            "Finetune.lora_rank = 4",
            "Finetune.lora_alpha = 6.0",
            "Finetune.lora_magnitudes = True",
            f"Finetune.lora_targets = ({TARGETS[kind][1]})",
            f"Finetune.adapter = {str(folder / 'adapter')!r}",
            *bindings,
        ],
    )
    return Trainer(config, devices=jax.devices()[:1])


# The cases that are left run the same code.
@pytest.mark.slow_cases("gpt2")
@pytest.mark.parametrize("kind", TARGETS)
def test_peft_s_files_go_in_and_out_and_ten_steps_are_peft_s(kind, tmp_path):
    theirs = peer(kind, tmp_path)
    ours = trainer_of(kind, tmp_path)
    inputs, targets = torch.tensor(TOKENS[:, :-1]), torch.tensor(TOKENS[:, 1:])
    with torch.no_grad():
        expected = theirs(inputs).logits
        with theirs.disable_adapter():
            assert (theirs(inputs).logits - expected).abs().max() > 0.1
    np.testing.assert_allclose(ours.logits(TOKENS[:, :-1]), expected, rtol=0, atol=2e-4)
    ours.export_adapter(tmp_path / "ours")
    said = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert said["use_dora"] is True
    from safetensors.torch import load_file  # noqa: PLC0415

    before, after = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "ours")
    )
    assert before.keys() == after.keys()
    assert any("magnitude" in name for name in before)
    for name, value in before.items():
        assert torch.equal(value, after[name]), name

    rule = AdamW()
    optimizer = torch.optim.AdamW(
        [value for value in theirs.parameters() if value.requires_grad],
        RATE, (rule.b1, rule.b2), rule.epsilon, weight_decay=0.0,
    )  # fmt: skip
    batch = text_batch(rows=ROWS, length=LENGTH, vocab_size=64)
    ones = np.ones((ROWS, LENGTH), np.int32)
    batch = type(batch)(
        TOKENS[:, :-1].astype(np.int32), TOKENS[:, 1:].astype(np.int32), ones.astype(np.float32),
        ones, np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
    )  # fmt: skip
    found, wanted = [], []
    for _ in range(STEPS):
        found.append(float(ours.step(batch)["loss"]))
        optimizer.zero_grad()
        logits = theirs(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    np.testing.assert_allclose(found, wanted, rtol=5e-5)
    assert wanted[-1] < 0.9 * wanted[0]


def program_on(layout, **changes):
    made = tuning_of(Finetune(lora_rank=4, lora_magnitudes=True), MODELS["gpt"].build)
    return make_step(MODELS["gpt"], layout, tuning=Begun(**vars(made)), **changes)


BATCH = text_batch(rows=8, length=16, vocab_size=48)


@pytest.fixture(scope="module")
def one_device():
    return evaluate(program_on(make_layout()), BATCH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"fsdp": 2, "tensor": 2, "zero": 2}, {}),
        pytest.param(
            {"pipe": 2, "fsdp": 2},
            {"pipeline": Pipeline(microbatches=2)},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fsdp_tensor_zero_2", "pipe"],
)
def test_a_step_on_a_mesh_equals_one_device(one_device, layout, changes):
    found = evaluate(program_on(make_layout(**layout), **changes), BATCH)
    # Magnitudes are sums, which other meshes add up in another order; the weights that they are of
    # are drawn in one pass with them, and rounded as it goes.
    parts = "initial", "frozen"
    for name in parts:
        for value, expected in zip(
            *map(jax.tree.leaves, (found[name], one_device[name])), strict=True
        ):
            np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_equal(found | {name: one_device[name] for name in parts}, one_device)


def test_a_run_begins_as_the_model_was_and_merges_into_what_it_says():
    program = make_step(
        MODELS["llama"],
        make_layout(),
        tuning=tuning_of(Finetune(lora_rank=4, lora_magnitudes=True), MODELS["llama"].build),
    )
    state = program.create(0)
    whole = train_all(program.setup).create(0)
    with program.setup.layout.active():
        before = jax.tree.leaves(merge_adapters(program.setup, state))
    for value, expected in zip(before, jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7)


def test_magnitudes_without_adapters_or_beside_quantized_weights_are_refused():
    with pytest.raises(UserError, match="lora_magnitudes=True with Finetune.lora_rank=None"):
        Finetune(lora_magnitudes=True)
    with pytest.raises(UserError, match="lora_magnitudes=True with Finetune.quantize_bits='int8'"):
        Finetune(lora_rank=4, lora_magnitudes=True, quantize_bits="int8")
