"""Commands that write files for people: timeline, plan, verify; rejections come before the work."""

import sys

import pytest

from jaxtrain.__main__ import main


def test_timeline_prints_the_figures_and_draws_the_schedule(tmp_path, capsys):
    picture = tmp_path / "schedule.png"
    bindings = ["-b", "Mesh.pipe=4", "-b", "Pipeline.microbatches=8"]
    assert main(["timeline", "gpt2_124m", *bindings, "--png", str(picture)]) == 0
    out = capsys.readouterr().out
    # 2 (m + p - 1) ticks; (p - 1) / (m + p - 1) of them idle; 2 (p - rank) - 1 alive; three layers
    # on each stage.
    assert all(word in out for word in ("22", "27.3%", "7, 5, 3, 1", "3, 3, 3, 3"))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt2_124m", "-b", "Mesh.pipe=13"], "13 pipeline stages"),
        (["gpt2_124m", "-b", "Mesh.pipe=-1", "-b", "Mesh.data=1"], "use Mesh.pipe=4"),
        (["resnet_digits"], "no stack of layers"),
        (["transformer_addition", "-b", "Train.model=@Seq2Seq()"], "Seq2Seq() has no stack of"),
        (["gpt2_124m", "--png", "/nowhere/x.png"], "there is no folder /nowhere"),
        (["gpt2_124m", "-b", "Pipeline.schedule='1b1f'"], "'1f1b'"),
    ],
)
def test_timeline_refuses_with_the_way_out(arguments, words, capsys):
    assert main(["timeline", *arguments]) == 2
    assert words in capsys.readouterr().err


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux's /proc")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--json", "FOLDER"], "is not a file; name one, such as FOLDER/out.json"),
        (["plan", "--json", ""], "--json '' is not a file; name one, such as out.json"),
        (["plan", "--json", "/dev/null"], "is not a file"),
        (["plan", "--json", "FOLDER/" + 300 * "x"], "File name too long"),
        (["plan", "--png", "FOLDER/x.foo"], "plots are PNG files; use FOLDER/x.png"),
        (["timeline", "--png", "FOLDER"], "is not a file; name one, such as FOLDER/out.png"),
        (["verify", "--json", "FOLDER"], "is not a file"),
        pytest.param(
            ["plan", "--json", "/proc/x"],
            "in a folder that can be written",
            marks=ON_LINUX,
        ),
    ],
)
def test_output_files_are_refused_before_the_work(arguments, words, tmp_path, capsys):
    command, *option = (word.replace("FOLDER", str(tmp_path)) for word in arguments)
    # The binding would be the next error.
    assert main([command, "gpt2_124m", "-b", "Nothing.x = 1", *option]) == 2
    assert words.replace("FOLDER", str(tmp_path)) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_budget_leaves_no_other_argument_unread(tmp_path, capsys):
    file = str(tmp_path / "x.json")
    assert main(["plan", "llama_1b", "--budget", "1e21", "--json", file, "-b", "Mesh.fsdp=2"]) == 2
    error = capsys.readouterr().err
    assert "plan --budget accepts only --target; leave out CONFIG and -b and --json" in error
    assert main(["plan", "--budget", "1e17", "--price", "2"]) == 2
    assert "leave out --price" in capsys.readouterr().err
    assert main(["plan", "--budget", "1e17", "--target", "h100:1x1", "--price", "2"]) == 0
    assert "device-hours, $" in capsys.readouterr().out
