"""What is not taken as it was written: with one obvious meaning it has that, and a line says so."""

import io

import pytest
from rich.console import Console

from jaxtrain.config.errors import UserError
from jaxtrain.run.show.progress import print_lines
from jaxtrain.training.settings import load_config


@pytest.mark.parametrize(
    ("bindings", "taken"),
    [
        (["Loss.chunk_size = 100"], 64),
        (["Loss.chunk_size = 9999"], 128),
        (["Loss.chunk_size = 100", "TextData.sequence_length = 250"], 50),
        (["Loss.chunk_size = 100", "Mesh.context = 2", "TextData.sequence_length = 90"], 90),
        (["Loss.chunk_size = 50", "Mesh.context = 2", "TextData.sequence_length = 90"], 30),
    ],
)
def test_a_chunk_that_does_not_divide_the_sequence_is_the_nearest_below(bindings, taken):
    config = load_config("gpt_quickstart", bindings)
    assert config.loss.chunk_size == taken
    [note] = config.notes
    written = bindings[0].replace(" ", "")
    assert note.startswith(f"{written} does not divide a sequence of ")
    assert f"using {taken}, the next smaller value" in note
    assert ("Mesh.context=2" in note) == (len(bindings) == 3)


@pytest.mark.parametrize(
    "bindings",
    [
        [],
        ["Loss.chunk_size = 64"],
        ["Loss.chunk_size = 128"],
        # Nothing below it fits: preflight has the word.
        ["Loss.chunk_size = 2", "Mesh.context = 4"],
    ],
)
def test_what_is_taken_as_written_has_no_note(bindings):
    config = load_config("gpt_quickstart", bindings)
    assert config.notes == ()
    chunk = [int(one.split()[-1]) for one in bindings if "chunk" in one]
    assert config.loss.chunk_size == (chunk[0] if chunk else None)


def test_what_was_taken_is_what_is_saved(tmp_path):
    config = load_config("gpt_quickstart", ["Loss.chunk_size = 100"])
    again = tmp_path / "config.gin"
    again.write_text(config.operative())
    assert load_config(again) == config
    assert load_config(again).notes == ()


def test_notes_are_printed_as_they_are():
    out = io.StringIO()
    print_lines(Console(file=out, width=40), "Name.field=[bold] " + 60 * "x", "another")
    assert out.getvalue() == "Name.field=[bold] " + 60 * "x" + "\nanother\n"


@pytest.mark.parametrize(
    ("binding", "quoted", "value"),
    [
        ("TextData.source=/data/x.txt", "TextData.source = '/data/x.txt'", "/data/x.txt"),
        ("TextData.source = my text.txt", "TextData.source = 'my text.txt'", "my text.txt"),
        ("TextData.source=tfds:lm1b", "TextData.source = 'tfds:lm1b'", "tfds:lm1b"),
        ("Optimizer.name=sgd", "Optimizer.name = 'sgd'", "sgd"),
        ("Schedule.name=linear", "Schedule.name = 'linear'", "linear"),
        ("Remat.policy=none", "Remat.policy = 'none'", "none"),
    ],
)
def test_text_of_the_command_line_needs_no_quotes(binding, quoted, value):
    config = load_config("gpt_quickstart", [binding])
    section, field = quoted.split(" = ")[0].split(".")
    settings = config.train.data if section == "TextData" else getattr(config, section.lower())
    assert getattr(settings, field) == value
    assert config.notes == (f"-b {binding!r} is taken as text: {quoted}",)
    assert load_config("gpt_quickstart", [quoted]) == config


LLAMA = ["Train.model=@Llama()", "Llama.vocab_size=256", "Llama.num_layers=2", "Llama.embed_dim=32",
         "Llama.num_heads=4", "Llama.num_kv_heads=4", "Llama.mlp_dim=64"]  # fmt: skip


def test_what_an_override_leaves_unread_is_left_out_with_a_line(tmp_path):
    file = tmp_path / "run.gin"
    file.write_text(
        "SOURCE = 'embedded'\nTextData.source = %SOURCE\nTrain.model = @GPT()\n"
        "GPT.num_layers = 2\nGPT.num_heads = 6\nTrain.data = @TextData()\nTrain.steps = 1\n"
        "Train.global_batch_size = 8\n"
    )
    config = load_config(file, ["TextData.source='synthetic'"])
    assert config.notes == (
        "SOURCE: left out, since with the bindings of the command line nothing refers to %SOURCE",
    )
    assert config.train.data.source == "synthetic"
    config = load_config(file, LLAMA)
    assert config.notes == (
        "GPT.num_layers, GPT.num_heads: left out, since with the bindings of the command line "
        "nothing uses GPT",
    )
    again = tmp_path / "again.gin"
    again.write_text(config.operative())
    assert load_config(again).notes == ()


def test_what_a_file_overrides_of_its_base_is_left_out_with_a_line(tmp_path):
    (tmp_path / "base.gin").write_text(
        "WIDTH = 64\nTrain.model = @GPT()\nGPT.num_layers = 2\nGPT.embed_dim = %WIDTH\n"
        "Train.data = @TextData()\nTextData.source = 'synthetic'\nTrain.steps = 1\n"
        "Train.global_batch_size = 8\n"
    )
    file = tmp_path / "run.gin"
    own = "include 'base.gin'\n" + "\n".join(LLAMA).replace("=", " = ")
    file.write_text(own + "\nTrain.data = @ChatData()\nChatData.source = 'talks.jsonl'\n")
    config = load_config(file)
    by = f"left out, since with {file} nothing"
    assert config.notes == (
        f"GPT.num_layers, GPT.embed_dim: {by} uses GPT",
        f"TextData.source: {by} uses TextData",
        f"WIDTH: {by} refers to %WIDTH",
    )
    assert config.train.data.source == "talks.jsonl"
    # The command line overrides the file, which overrides the base.
    config = load_config(file, ["Train.data=@SpanData()", "SpanData.text=@TextData()"])
    assert f"TextData.source: {by} uses TextData" not in config.notes
    notes = "\n".join(config.notes)
    assert "ChatData.source: left out, since with the bindings of the command line nothing" in notes
    assert config.train.data.text.source == "synthetic"
    # What the file sets itself is no leftover of its base.
    file.write_text(own + "\nGPT.num_layers = 3\n")
    with pytest.raises(UserError, match="GPT.num_layers is set, but nothing in this"):
        load_config(file)


def test_what_nothing_could_read_stays_refused(tmp_path):
    file = tmp_path / "run.gin"
    file.write_text(
        "Train.model = @GPT()\nGPT.num_layers = 2\nTrain.data = @TextData()\nTrain.steps = 1\n"
        "Train.global_batch_size = 8\n"
    )
    # A binding of the command line is nobody's oversight.
    with pytest.raises(UserError, match="-b 'GPT.num_layers=3': GPT.num_layers is set, but"):
        load_config(file, [*LLAMA, "GPT.num_layers=3"])
    # Nor is one of the file that nothing read before.
    with file.open("a") as more:
        more.write("ResNet.width = 8\nUNREAD = 1\n")
    with pytest.raises(UserError) as caught:
        load_config(file, LLAMA)
    said = str(caught.value).splitlines()
    assert [line.split(": ")[1].split(" ")[0] for line in said] == ["ResNet.width", "UNREAD"]
