"""Distillation: ten steps equal PyTorch's with a frozen teacher of another size.

The teacher lies over the mesh otherwise than the model does, stays as it is over a restart, and
goes into no export.
"""

import dataclasses

import jax
import numpy as np
import pytest
import torch
from against_torch import trained
from chat_model import save_model, save_tokenizer, talks, write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from jaxtrain.analysis.planning.textbook.state_bytes import argument_bytes
from jaxtrain.analysis.planning.timing.executed import executed_flops
from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.layouts import abstract_layout, resolve_config
from jaxtrain.training.settings import load_config

STEPS, RATE, LENGTH, TEMPERATURE, SHARE = 10, 3e-3, 128, 3.0, 0.7
TRAIN, HELDOUT = talks(16), talks(18)[16:]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model's folder and the teacher's, which is wider and deeper."""
    found = []
    for name, sizes in (("model", {}), ("teacher", {"hidden_size": 48, "num_hidden_layers": 3})):
        folder = tmp_path_factory.mktemp(name)
        save_tokenizer(folder)
        save_model(folder, seed=len(found), **sizes)
        found.append(folder)
    write_lines(found[0] / "talks.jsonl", [{"messages": talk} for talk in TRAIN])
    write_lines(found[0] / "heldout.jsonl", [{"messages": talk} for talk in HELDOUT])
    return found


def config_of(folders, *bindings):
    model, teacher = folders
    return load_config(
        f"hf:{model}",
        [
            "Train.data = @ChatData()",
            f"ChatData.source = '{model}/talks.jsonl'",
            f"ChatData.heldout_source = '{model}/heldout.jsonl'",
            f"ChatData.tokenizer = '{model}/tokenizer.json'",
            f"ChatData.sequence_length = {LENGTH}",
            "Train.objective = @Distillation()",
            f"Distillation.teacher = '{teacher}'",
            f"Distillation.temperature = {TEMPERATURE}",
            f"Distillation.share = {SHARE}",
            "Distillation.teacher_zero = 3",
            "Sharding.zero = 1",
            f"Train.steps = {STEPS}",
            "Train.global_batch_size = 8",
            "Train.log_every = 1",
            "Precision.compute = 'float32'",
            f"Optimizer.learning_rate = {RATE}",
            "Optimizer.weight_decay = 0.0",
            "Optimizer.clip_norm = None",
            "Schedule.name = 'constant'",
            "Schedule.warmup_steps = 0",
            "Mesh.fsdp = 2",
            *bindings,
        ],
    )


def theirs(folders):
    """PyTorch, one conversation at a time: loss, cross entropy and divergence of each step, and of
    what is held out at the end."""
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    model, teacher = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)

    def means(examples):
        total, count = torch.zeros(2), 0
        for talk in examples:
            made = tokenizer.apply_chat_template(
                talk, return_dict=True, return_assistant_tokens_mask=True
            )
            ids = torch.tensor([made["input_ids"]])
            told = torch.tensor(made["assistant_masks"]).bool()[1:]
            ours = model(ids).logits[0, :-1][told]
            with torch.no_grad():
                by_teacher = teacher(ids).logits[0, :-1][told]
            own = torch.nn.functional.cross_entropy(ours, ids[0, 1:][told], reduction="sum")
            both = torch.nn.functional.kl_div(
                (ours / TEMPERATURE).log_softmax(-1),
                (by_teacher / TEMPERATURE).softmax(-1),
                reduction="sum",
            )
            total, count = total + torch.stack([own, both]), count + int(told.sum())
        own, both = total / count
        return (1 - SHARE) * own + SHARE * TEMPERATURE**2 * both, own.item(), both.item()

    return trained(model, means, TRAIN, HELDOUT, steps=STEPS, rate=RATE)


@pytest.fixture(scope="module")
def run(folders, tmp_path_factory):
    """A run of ten steps, stopped after four and gone on with by another trainer."""
    workdir = tmp_path_factory.mktemp("run") / "run"
    first = Trainer(config_of(folders), workdir, devices=jax.devices()[:2])
    assert len(first.dataset.train) == 8, "all of them are one batch"
    before = first.weights()
    first.train(steps=4)
    first.close()
    second = Trainer(config_of(folders), workdir, devices=jax.devices()[:2])
    assert second.steps_done == 4
    told = second.train()
    second.close()
    return second, told, workdir, before


def test_ten_steps_are_pytorch_s_over_a_restart(folders, run):
    trainer, told, _, _ = run
    steps, heldout = theirs(folders)
    lines = [line for line in trainer.history if "loss" in line]
    names = "loss", "cross_entropy", "divergence"
    ours = np.array([[line[name] for name in names] for line in lines])
    np.testing.assert_allclose(ours, steps, rtol=5e-5)
    assert steps[-1, 2] < 0.8 * steps[0, 2]
    np.testing.assert_allclose([told[f"eval_{name}"] for name in names], heldout, rtol=5e-4)
    np.testing.assert_allclose(told["eval_perplexity"], np.exp(heldout[1]), rtol=5e-4)


def test_the_teacher_stays_as_it_is_and_lies_otherwise(run):
    trainer, _, _, before = run
    after = trainer.weights()
    theirs = [name for name in after if name.startswith("teacher/")]
    assert len(theirs) == len(after) // 2
    for name in theirs:
        np.testing.assert_array_equal(after[name], before[name])
    assert after["teacher/layers/up"].shape[0] == 3
    state = trainer.state
    assert "teacher" not in state.params
    assert "teacher" not in str(jax.tree_util.tree_structure(state.opt_state))
    of_teacher = state.frozen["teacher"]["layers"]["up"].get_value().sharding.spec
    of_model = state.params["layers"]["up"].get_value().sharding.spec
    assert "fsdp" in str(of_teacher)
    assert "fsdp" not in str(of_model)


def test_what_comes_of_it_has_no_teacher(run, tmp_path):
    trainer, _, workdir, _ = run
    assert trainer.export_huggingface(tmp_path / "exported").passed
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    own = trainer.weights()["output"]
    np.testing.assert_array_equal(student.lm_head.weight.detach().numpy(), own)
    left_out = "Distillation", "Train.objective", "Train.start_from"
    lines = trainer.config.to_gin().splitlines()
    plain = [line for line in lines if not line.startswith(left_out)]
    more = Trainer(
        load_config("\n".join(plain) + "\n", [f"Train.start_from = '{workdir}'"]),
        devices=jax.devices()[:2],
    )
    found = more.weights()
    assert not any(name.startswith("teacher") for name in found)
    np.testing.assert_array_equal(found["output"], own)


def test_a_teacher_that_does_not_fit_is_refused(folders, tmp_path):
    for bindings, reason in (
        (["Distillation.teacher = None"], "Distillation.teacher has no value"),
        (["Llama.vocab_size = 354"], "has 352 tokens, but Llama.vocab_size=354"),
        (["Mesh.fsdp = 1", "Mesh.pipe = 2"], "the stages of a pipeline hold only one"),
        (["Loss.z_weight = 0.1"], "Loss.z_weight=0.1 has no effect for Train.objective=@Distill"),
    ):
        with pytest.raises(UserError, match=reason):
            Trainer(config_of(folders, *bindings), devices=jax.devices()[:2])
    with pytest.raises(UserError, match=r"Distillation.share=1.5; use 0 to 1"):
        config_of(folders, "Distillation.share = 1.5")


def test_a_plan_counts_the_teachers_bytes_and_its_forward_pass(folders):
    config = resolve_config(config_of(folders, "Attention.kernel = 'reference'"), "cpu")
    alone = dataclasses.replace(config, train=dataclasses.replace(config.train, objective=None))
    layout = abstract_layout(config, 2)
    teacher = AutoModelForCausalLM.from_pretrained(folders[1])
    sizes = {name: value.numel() for name, value in teacher.named_parameters()}
    matrices = {name: n for name, n in sizes.items() if "norm" not in name}
    # Split over fsdp, but for norms.
    numbers = sum(matrices.values()) // 2 + sum(sizes.values()) - sum(matrices.values())
    held = [argument_bytes(one, layout).params for one in (config, alone)]
    assert held[0] - held[1] == 4 * numbers
    tokens = 8 * LENGTH
    weights = sum(matrices.values()) - matrices["model.embed_tokens.weight"]
    scores = 3 * 2 * LENGTH * 48  # layers; queries by keys, and by values; of all heads
    flops = [executed_flops(one, layout) for one in (config, alone)]
    assert flops[0] - flops[1] == 2 * tokens * (weights + scores) / 2


@pytest.mark.slow
def test_verify_proves_a_mesh_with_a_teacher(folders, capsys):
    model, teacher = folders
    bindings = ["Train.objective = @Distillation()", f"Distillation.teacher = '{teacher}'",
                "Distillation.teacher_zero = 3", "Sharding.zero = 1"]  # fmt: skip
    words = [word for one in bindings for word in ("-b", one)]
    assert main(["verify", f"hf:{model}", *words]) == 0
    told = capsys.readouterr().out
    assert "Train.objective" not in told  # it is proved with the objective itself
    lines = [line for line in told.splitlines() if line.startswith(("mesh ", "accumulation "))]
    assert len(lines) == 2
    assert all(" proved " in line for line in lines), told
