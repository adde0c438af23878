"""Names from other libraries: each leads to a setting that exists, whatever section it is under."""

import pytest

from jaxtrain.analysis.bindings import models
from jaxtrain.cli import main, parser
from jaxtrain.config import synonyms
from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import sections
from jaxtrain.config.registry import CONFIGURABLES
from jaxtrain.config.synonyms import CHOSEN, SYNONYMS
from jaxtrain.config.values import settings_of
from jaxtrain.training.optimizers.rule import rules
from jaxtrain.training.settings import Config, load_config


def refused(*bindings, base="gpt_quickstart"):
    with pytest.raises(UserError) as caught:
        load_config(base, bindings)
    return str(caught.value)


# By hand: what people type who come from transformers, nanoGPT, Lightning, torchtitan, Megatron.
TYPED = {
    "lr": "Optimizer.learning_rate",
    "Optimizer.lr": "Optimizer.learning_rate",
    "Train.lr": "Optimizer.learning_rate",
    "Train.learning_rate": "Optimizer.learning_rate",
    "optimizer.lr": "Optimizer.learning_rate",
    "learning_rate": "Optimizer.learning_rate",
    "weight_decay": "Optimizer.weight_decay",
    "Train.max_grad_norm": "Optimizer.clip_norm",
    "Train.optimizer": "Optimizer.name",
    "OPTIMIZER": "Optimizer.name",
    "epochs": "Train.steps",
    "Train.epochs": "Train.steps",
    "trainer.max_epochs": "Train.steps",
    "max_steps": "Train.steps",
    "Train.num_train_epochs": "Train.steps",
    "batch": "Train.global_batch_size",
    "batch_size": "Train.global_batch_size",
    "Train.batch_size": "Train.global_batch_size",
    "TextData.batch_size": "Train.global_batch_size",
    "Train.per_device_train_batch_size": "Train.global_batch_size",
    "gradient_accumulation_steps": "Train.accumulation",
    "Checkpoint.every": "Train.save_every",
    "Train.save_steps": "Train.save_every",
    "Checkpoint.save_every": "Train.save_every",
    "Train.logging_steps": "Train.log_every",
    "warmup_steps": "Schedule.warmup_steps",
    "Optimizer.warmup_steps": "Schedule.warmup_steps",
    "output_dir": "--workdir",
    "bf16": "Precision.compute = 'bfloat16'",
    "Train.fp16": "Precision.compute = 'float16'",
    "Train.gradient_checkpointing": "Remat.policy",
    "tp": "Mesh.tensor",
    "Mesh.tp": "Mesh.tensor",
    "Mesh.tensor_parallel_size": "Mesh.tensor",
    "dp": "Mesh.data",
    "pp": "Mesh.pipe",
    "Parallelism.pp": "Mesh.pipe",
    "d_model": "GPT.embed_dim",
    "GPT.n_embd": "GPT.embed_dim",
    "Model.hidden_size": "GPT.embed_dim",
    "model.n_embd": "GPT.embed_dim",
    "n_layer": "GPT.num_layers",
    "num_hidden_layers": "GPT.num_layers",
    "Model.num_layers": "GPT.num_layers",
    "num_layer": "GPT.num_layers",
    "n_head": "GPT.num_heads",
    "GPT.block_size": "GPT.context_length",
    "TextData.seq_len": "TextData.sequence_length",
    "Data.source": "TextData.source",
    "Dataset.path": "TextData.source",
    "Optimizer.betas": "AdamW.b1",
    "load_in_4bit": "Finetune.quantize_bits = 'nf4'",
}


@pytest.mark.parametrize("typed", TYPED)
def test_what_others_call_a_setting_leads_to_it(typed):
    assert f"did you mean {TYPED[typed]!r}" in refused(f"{typed} = 1")


def test_the_model_and_the_rule_are_those_of_the_configuration():
    assert "did you mean 'Llama.embed_dim'?" in refused(
        "Train.model = @Llama()", "Model.hidden_size = 64"
    )
    assert "did you mean 'Llama.embed_dim'?" in refused("Llama.n_embd = 64")  # as it was written
    assert "did you mean 'Lion.b1', 'Lion.b2'?" in refused("Optimizer.name = 'lion'", "betas = 1")
    assert "did you mean 'LeNet.hidden'?" in refused(
        "Train.model = @LeNet()", "LeNet.hidden_size = 8"
    )


def test_a_unit_that_differs_is_said():
    assert "(in steps: epochs x training examples / Train.global_batch_size)" in refused("epochs=3")
    assert "(over all devices and Train.accumulation)" in refused("micro_batch_size=3")


def test_an_unquoted_value_hides_nothing():
    assert "did you mean 'Optimizer.name'?" in refused("optimizer = adam")


def test_what_nobody_calls_a_setting_leads_nowhere():
    assert refused("Garten = 3").endswith("; a setting is written Section.name = value")
    assert "did you mean" not in refused("GPT.color = 3")
    # A model has no dropout because another one has.
    assert "did you mean" not in refused("GPT.dropout = 0.1")


def test_no_word_is_a_setting_of_its_own_or_listed_twice():
    words = [synonyms._plain(word) for one in SYNONYMS for word in one.words.split()]
    assert sorted(set(words)) == sorted(words)
    settings = {
        synonyms._plain(name) for cls in sections(Config).values() for name in settings_of(cls)
    }
    assert settings & set(words) == set()


@pytest.mark.parametrize("target", sorted({target for one in SYNONYMS for target in one.targets}))
def test_every_target_exists(target):
    name, _, value = target.partition(" = ")
    if name.startswith("--"):
        parser().parse_args(["train", "gpt_quickstart", name, "1"])
        return
    owner, setting = name.split(".")
    load_config("gpt_quickstart")  # registers every section
    datas = (cls for cls in CONFIGURABLES.values() if cls.__name__.endswith("Data"))
    named = {"@model": models(), "@data": datas, "@rule": rules().values()}
    assert named.keys() == CHOSEN.keys()
    classes = list(named[owner]) if owner in named else [CONFIGURABLES[owner]]
    assert any(setting in settings_of(cls) for cls in classes)
    if value:
        others = {"Finetune": "Finetune.lora_rank = 4", "Precision": "Precision.loss_scale = 2.0"}
        load_config("gpt_quickstart", [others[owner], target])


def test_sections_and_examples_exist():
    load_config("gpt_quickstart")
    names = {name for name in synonyms.SECTIONS.values() if name not in CHOSEN}
    assert names <= CONFIGURABLES.keys()
    assert set(synonyms.EXAMPLES.values()) <= CONFIGURABLES.keys()
    for section, setting in CHOSEN.values():
        assert setting in settings_of(CONFIGURABLES[section])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--lr", "3e-4"], "; write -b 'Optimizer.learning_rate=VALUE'"),
        (["--batch-size=4"], "; write -b 'Train.global_batch_size=VALUE'"),
        (["--n-embd", "64"], "; write -b 'GPT.embed_dim=VALUE'"),
        (["--output-dir", "runs/x"], "; write --workdir"),
        (["--bf16"], "; write -b \"Precision.compute = 'bfloat16'\""),
        (["Train.steps=3"], "; write -b 'Train.steps=3'"),
    ],
)
def test_options_that_are_settings_are_told_as_bindings(words, hint, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "gpt_quickstart", *words])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "unrecognized arguments: " + " ".join(words) in error
    assert hint in error
