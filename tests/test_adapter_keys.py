"""Every key of an adapter_config.json is read, irrelevant or rejected: held against PEFT."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.config.key_table import Only
from jaxtrain.run.huggingface.adapters import KEYS, read_adapter
from jaxtrain.run.trainer import Trainer

torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
transformers = pytest.importorskip("transformers", reason="transformers is the peer")
peft = pytest.importorskip("peft", reason="PEFT is the peer")

BINDINGS = [
    "Mesh.fsdp = 8", "Precision.compute = 'float32'", "Finetune.lora_rank = 4",
    "Finetune.lora_alpha = 6",
    "Finetune.lora_targets = ('layers/query', 'layers/down')",
]  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for value in made.parameters():
            value.normal_(1.0 if value.ndim == 1 else 0.0, 0.2)
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ours(base) -> Trainer:
    return Trainer.from_huggingface(base, bindings=BINDINGS)


def written(base: Path, folder: Path, **changes: Any) -> Path:
    """An adapter of PEFT's with values drawn, and these keys in its file."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, config).save_pretrained(folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def logits_of_peft(base: Path, folder: Path) -> np.ndarray:
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(model, folder).eval()
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def test_every_key_that_peft_knows_is_in_the_table():
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert not fields - KEYS.keys()
    saved = {key: value for key, value in peft.LoraConfig().to_dict().items() if key in KEYS}
    for key, entry in KEYS.items():
        if isinstance(entry, Only) and key in saved:
            assert saved[key] in entry.allowed, key


@pytest.mark.parametrize("way", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_a_way_of_initialization_that_is_read_leaves_base_weights_alone_in_peft(
    way, base, ours, tmp_path
):
    plain = logits_of_peft(base, written(base, tmp_path / "plain"))
    other = written(base, tmp_path / "other", init_lora_weights=way)
    np.testing.assert_allclose(logits_of_peft(base, other), plain, rtol=0, atol=1e-5)
    read_adapter(str(other), ours.config, ours.program.setup)


@pytest.mark.parametrize("way", ["pissa", "pissa_niter_4", "olora"])
def test_a_way_that_changes_base_weights_in_peft_is_rejected(way, base, ours, tmp_path):
    plain = logits_of_peft(base, written(base, tmp_path / "plain"))
    other = written(base, tmp_path / "other", init_lora_weights=way)
    assert np.abs(logits_of_peft(base, other) - plain).max() > 0.01
    with pytest.raises(UserError, match=f"init_lora_weights = '{way}'; it must be True or False"):
        read_adapter(str(other), ours.config, ours.program.setup)


def test_a_plain_adapter_answers_as_in_peft(base, tmp_path):
    folder = written(base, tmp_path / "plain")
    bindings = [*BINDINGS, f"Finetune.adapter={str(folder)!r}"]
    found = Trainer.from_huggingface(base, bindings=bindings).logits(TOKENS)
    np.testing.assert_allclose(found, logits_of_peft(base, folder), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init_lora_weights": "corda"}, "init_lora_weights = 'corda'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights = 'loftq'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights = 'lora_ga'"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication = [[0, 2], [1, 2]]"),
        ({"alora_invocation_tokens": [3, 4]}, "alora_invocation_tokens = [3, 4]; it must be None"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern = {'q_proj': 2}"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern = {'q_proj': 2}"),
        ({"layers_to_transform": [0]}, "layers_to_transform = [0]"),
        ({"layers_to_transform": 0}, "layers_to_transform = 0"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices = [5]"),
        ({"target_parameters": ["experts"]}, "target_parameters = ['experts']"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head']"),
        ({"lora_bias": True}, "lora_bias = True; it must be False"),
        ({"bias": "all"}, "bias = 'all'; it must be 'none'"),
        ({"use_qalora": True}, "use_qalora = True; it must be False"),
        ({"use_dora": True}, "use_dora is True; use Finetune.lora_magnitudes=True"),
        ({"use_rslora": True}, "use Finetune.lora_alpha=6 and Finetune.lora_scale='sqrt_rank'"),
        ({"lora_dropuot": 0.1}, "lora_dropuot = 0.1 is an unknown key (the nearest "),
    ],
)
def test_what_is_not_done_here_is_rejected_by_name(changes, said, base, ours, tmp_path):
    folder = written(base, tmp_path / "adapter", **changes)
    with pytest.raises(UserError) as error:
        read_adapter(str(folder), ours.config, ours.program.setup)
    assert said in str(error.value)
