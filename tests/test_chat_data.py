"""Supervised fine-tuning: ten steps on packed conversations equal transformers' on each alone.

The loss is of the assistant's tokens; bad records are named by file and line.
"""

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from against_torch import trained
from chat_model import save_model, save_tokenizer, talks, write_lines

from jaxtrain.config.errors import UserError
from jaxtrain.data.text.chat.chat import ChatData
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import load_config

STEPS, RATE, LENGTH = 10, 3e-3, 128
TALKS = talks(14)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    save_model(folder)
    write_lines(folder / "talks.jsonl", [{"messages": talk} for talk in TALKS])
    write_lines(folder / "heldout.jsonl", [{"messages": talk} for talk in talks(17)[14:]])
    return folder


def data_of(folder, **changes):
    return ChatData(
        source=str(folder / "talks.jsonl"),
        heldout_source=str(folder / "heldout.jsonl"),
        tokenizer=str(folder / "tokenizer.json"),
        sequence_length=LENGTH,
        **changes,
    )


def theirs(folder):
    """PyTorch and transformers, one conversation at a time: losses, and the weights at the end."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def means(examples):
        total, count = torch.zeros(()), 0
        for talk in examples:
            made = tokenizer.apply_chat_template(
                talk, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, told = torch.tensor([made["input_ids"]]), torch.tensor(made["assistant_masks"])
            labels = torch.where(told.bool(), ids[0], -100)[1:]
            logits = model(ids).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            count += int((labels >= 0).sum())
        return (total / count,)

    steps, (heldout,) = trained(model, means, TALKS, talks(17)[14:], steps=STEPS, rate=RATE)
    return steps[:, 0], heldout, model.lm_head.weight.detach().numpy()


def test_ten_steps_are_those_of_transformers_on_each_conversation_alone(folder):
    rows = len(data_of(folder).open(seed=0).train)
    assert rows < len(TALKS), "several conversations share a row"
    config = load_config(
        f"hf:{folder}",
        [
            "Train.data = @ChatData()",
            f"ChatData.source = '{folder}/talks.jsonl'",
            f"ChatData.heldout_source = '{folder}/heldout.jsonl'",
            f"ChatData.tokenizer = '{folder}/tokenizer.json'",
            f"ChatData.sequence_length = {LENGTH}",
            f"Train.steps = {STEPS}",
            f"Train.global_batch_size = {rows}",
            "Train.log_every = 1",
            "Precision.compute = 'float32'",
            f"Optimizer.learning_rate = {RATE}",
            "Optimizer.weight_decay = 0.0",
            "Optimizer.clip_norm = None",
            "Schedule.name = 'constant'",
            "Schedule.warmup_steps = 0",
            "Mesh.fsdp = 1",
        ],
    )
    trainer = Trainer(config, devices=jax.devices()[:1])
    told = trainer.train()
    losses, heldout, head = theirs(folder)
    ours = [line["loss"] for line in trainer.history if "loss" in line]
    np.testing.assert_allclose(ours, losses, rtol=2e-5)
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(told["eval_loss"], heldout, rtol=1e-4)
    np.testing.assert_allclose(trainer.weights()["output"], head, atol=2e-4)


def test_a_row_holds_whole_conversations_and_only_answers_count(folder):
    data = data_of(folder)
    opened = data.open(seed=0)
    tokenizer = opened.tokenizer
    batch, found = opened.train.examples(np.arange(len(opened.train))), []
    for row in range(len(batch.inputs)):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            (own,) = np.nonzero(batch.segment_ids[row] == segment)
            assert batch.positions[row, own].tolist() == list(range(len(own)))
            counted = batch.targets[row, own][batch.loss_mask[row, own] > 0]
            text = tokenizer.decode([batch.inputs[row, own[0]], *batch.targets[row, own]])
            found.append((text, tokenizer.decode(counted)))
    template = data.open_template()
    expected = [
        (template.text(talk), "".join(m["content"] + "<|im_end|>" for m in talk[1::2]))
        for talk in TALKS
    ]
    assert sorted((text, told) for text, told in found) == sorted(
        (text.removesuffix("\n") + "\n", told) for text, told in expected
    )
    assert opened.facts["answer_tokens"] == int(batch.loss_mask.sum())
    assert opened.facts["documents"] == 17
    assert opened.facts["cut_documents"] == 0


@pytest.mark.parametrize("name", ["talks.parquet", "talks.arrow"])
def test_rows_of_columns_are_the_records_of_lines(folder, tmp_path, name):
    """Also where a column has fields that a row has not, which Arrow fills with nulls."""
    records = [{"talk": talk} for talk in TALKS]
    records.insert(3, {"prompt": "What is it? ", "completion": "A row of its own."})
    names = "talk", "prompt", "completion"
    table = pa.table({name: [record.get(name) for record in records] for name in names})
    file = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(table, file, row_group_size=4)
    else:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    settings = {**vars(data_of(folder)), "heldout_source": None, "heldout_fraction": 0.2}
    of = {**settings, "source": str(tmp_path), "messages_field": "talk"}
    found = ChatData(**of).open(seed=0)
    lines = write_lines(tmp_path / "records.jsonl", records)
    assert found.digest == ChatData(**{**of, "source": str(lines)}).open(seed=0).digest
    assert found.facts["documents"] == 15
    lines.unlink()
    with pytest.raises(UserError, match=rf"{name}: row 1: no field 'messages', nor 'prompt'"):
        ChatData(**{**of, "messages_field": "messages"}).open(seed=0)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"{name} is not a complete"):
        ChatData(**of).open(seed=0)


def test_what_is_longer_than_a_row_ends_with_it(folder):
    opened = data_of(folder).open(seed=0)
    shortest = int(opened.train.document_lengths().min())
    cut = ChatData(**{**vars(data_of(folder)), "sequence_length": shortest}).open(seed=0)
    assert cut.train.document_lengths().max() == shortest + 1
    assert cut.facts["cut_documents"] > 0
    assert cut.digest != opened.digest
    with pytest.raises(UserError, match="no answer of a split begins within"):
        ChatData(**{**vars(data_of(folder)), "sequence_length": 4}).open(seed=0)


USER = {"role": "user", "content": "?"}
REPLY = {"role": "assistant", "content": "!"}
BAD = {
    "no field 'messages', nor 'prompt'; did you mean 'promt'?": {"promt": "a", "completion": "b"},
    "'messages' is empty, but it must be a list of messages": {"messages": []},
    "messages[1] has no 'content'": {"messages": [USER, {"role": "assistant", "contnt": "!"}]},
    "'messages[0].content' is a list, but it must be a string": {
        "messages": [{**USER, "content": []}]
    },
    "no message has the role 'assistant'": {"messages": [USER]},
    "'completion' is a number, but it must be a string": {"prompt": "a", "completion": 1},
    "but it must be a JSON object": ["a"],
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_record_is_named_by_file_and_line_and_may_be_left_out(folder, tmp_path, reason):
    good = {"messages": [USER, REPLY]}
    path = write_lines(tmp_path / "talks.jsonl", [good, BAD[reason], good])
    of = {**vars(data_of(folder)), "source": str(path)}
    with pytest.raises(UserError) as refused:
        ChatData(**of).open(seed=0)
    assert f"{path}:2: " in str(refused.value)
    assert reason in str(refused.value)
    assert "ChatData.bad_records = 1 to leave them out" in str(refused.value)
    assert ChatData(**{**of, "bad_records": 1}).open(seed=0).facts["train_documents"] == 2


def test_a_template_that_rewrites_an_answer_later_says_which(folder, tmp_path):
    template = tmp_path / "late.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}{% if loop.last %}!{% endif %}: {{ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    source = write_lines(tmp_path / "talks.jsonl", [{"messages": [USER, REPLY, USER, REPLY]}] * 2)
    with pytest.raises(UserError, match=r"writes messages\[1\] otherwise where others follow"):
        ChatData(source=str(source), chat_template=str(template)).open(seed=0)


def test_a_folder_and_a_part_held_out(tmp_path):
    for name in ("b", "a"):
        lines = [{"prompt": f"{name}{n}", "completion": "!"} for n in range(10)]
        write_lines(tmp_path / f"{name}.jsonl", lines)
    (tmp_path / "notes.txt").write_text("no records")
    opened = ChatData(source=str(tmp_path), heldout_fraction=0.1, sequence_length=8).open(seed=0)
    heldout = opened.heldout.examples(np.arange(len(opened.heldout)))
    texts = opened.tokenizer.decode(heldout.inputs[heldout.segment_ids > 0])
    assert sorted((texts[0:3], texts[3:6])) == [
        "a9!",
        "b9!",
    ]  # files in order, the tenth of each ten
    write_lines(tmp_path / "one.jsonl", lines[:1])
    with pytest.raises(UserError, match=r"cannot split the 1 record .*give at least 2 records"):
        ChatData(source=str(tmp_path / "one.jsonl")).open(seed=0)
