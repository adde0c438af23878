"""sweep: the grid, what is trained and what is not again, a stop, and what is shown."""

import json
import os
import signal
import sys
import threading
import time

import pytest
from PIL import Image

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.run.commands.sweep import grid

RATES = "Optimizer.learning_rate = [1e-3, 3e-3]"


def test_the_grid_is_every_combination_in_its_own_folder(tiny_config, tmp_path):
    bindings = ["Train.steps = 3", RATES, "Train.model = [@GPT(), @Llama()]", "Llama.mlp_dim = 64"]
    with pytest.raises(UserError, match=r"Llama.mlp_dim"):  # nobody reads it beside @GPT()
        grid(str(tiny_config), bindings, tmp_path)
    bindings = [RATES, "Train.steps = 3", "Train.seed = [0,1]", 'Optimizer.name = ["adamw"]']
    points = grid(str(tiny_config), bindings, tmp_path)
    assert [(p.config.optimizer.learning_rate, p.config.train.seed) for p in points] == [
        (1e-3, 0), (1e-3, 1), (3e-3, 0), (3e-3, 1),
    ]  # fmt: skip
    assert points[1].folder == tmp_path / "learning_rate=1e-3,seed=1,name=_adamw"
    assert len({point.folder for point in points}) == 4
    assert {point.config.train.steps for point in points} == {3}


def test_lists_are_cut_at_their_own_commas_alone(tiny_config, tmp_path):
    text = "TextData.source = ['a, b', \"c,d\"]"
    points = grid(str(tiny_config), [text, "Mesh.dcn = [{}, {'data': 1, 'fsdp': 1}]"], tmp_path)
    assert [point.config.train.data.source for point in points[::2]] == ["a, b", "c,d"]
    assert points[1].config.mesh.dcn == {"data": 1, "fsdp": 1}
    whole = grid(str(tiny_config), ["GPT.num_layers = [1]", "TextData.source = ['x']"], tmp_path)
    assert whole[0].folder.name == "num_layers=1,source=_x"


@pytest.mark.parametrize(
    ("bindings", "told"),
    [
        (["Train.steps = 3"], "no binding has a list of values; write for example"),
        (["Train.seed = []"], "-b 'Train.seed = []': the list is empty; write Train.seed = [A, B]"),
        (["Train.sed = [1, 2]"], "did you mean 'seed'?"),
        (["Optimizer.learning_rate = [1e-3, 0.001]"], "0.001 is the same value as 1e-3; name each"),
        (["Train.model = [@GPT(), @GPT()]"], "@GPT() is the same value as @GPT(); name each once"),
        (["Train.seed = [1, 'x']"], "Train.seed"),
    ],
)
def test_mistakes_are_refused_before_anything_is_trained(
    bindings, told, tiny_config, tmp_path, capsys
):
    words = [word for binding in bindings for word in ("-b", binding)]
    assert main(["sweep", str(tiny_config), *words, "--workdir", str(tmp_path / "new")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_file_in_the_folders_place_is_refused(tiny_config, capsys):
    words = ["sweep", str(tiny_config), "-b", "Train.steps = [1, 2]", "--workdir"]
    assert main([*words, str(tiny_config)]) == 2
    assert f"jaxtrain: --workdir {tiny_config}: Not a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_trains_each_once_and_shows_them(tiny_config, tmp_path, capsys, monkeypatch):
    mesh = [word for axis in ("data", "fsdp", "tensor") for word in ("-b", f"Mesh.{axis} = 1")]
    words = ["sweep", str(tiny_config), *mesh, "-b", "Train.steps = 2", "--workdir", str(tmp_path)]
    # The last one diverges: the others are trained all the same, and it is tried again.
    rates = "Optimizer.learning_rate = [1e-3, 1e-1, 1e30]"
    assert main([*words, "-b", rates, "-b", "Train.eval_every = 1"]) == 1
    out = capsys.readouterr().out
    rows = {row[1].strip(): row[2:] for line in out.splitlines() if len(row := line.split("│")) > 5}
    told = {rate: (row[0].strip(), row[3].strip()) for rate, row in rows.items()}
    assert told["1e-3"] == ("2", "best") or told["1e-1"] == ("2", "best")
    assert told["1e30"][1] == "failed"
    for rate in ("1e-3", "1e-1"):
        run = tmp_path / f"learning_rate={rate}"
        assert json.loads((run / "exit.json").read_text())["status"] == "done"
        assert "step 2/2" in (tmp_path / f"learning_rate={rate}.log").read_text()
    with Image.open(tmp_path / "sweep.png") as image:
        image.load()
    (tmp_path / "sweep.png").unlink()

    monkeypatch.setattr("jaxtrain.run.commands.sweep.Child", None)  # nothing is trained again
    good = ["-b", "Optimizer.learning_rate = [1e-3, 1e-1]", "-b", "Train.eval_every = 1"]
    assert main([*words, *good]) == 0
    assert capsys.readouterr().out.count("trained already") == 2
    assert (tmp_path / "sweep.png").exists()
    assert main([*words, *good, "-b", "Train.seed = 3"]) == 2
    assert "was trained with Train.seed = 0, and this sweep has Train.seed = 3" in (
        capsys.readouterr().err
    )


def test_a_signal_stops_the_run_and_the_sweep(tiny_config, tmp_path, capsys, monkeypatch):
    train = tmp_path / "train"
    train.write_text("#!/bin/sh\ntrap 'exit 75' TERM\ntouch ready\nwhile :; do sleep 0.02; done\n")
    train.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(train))
    monkeypatch.chdir(tmp_path)

    def stop():
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert main(["sweep", str(tiny_config), "-b", RATES, "--workdir", str(tmp_path / "s")]) == 75
    thread.join()
    out = capsys.readouterr().out
    assert "learning_rate=1e-3 (1 of 2): stopped; run the same command again to resume" in out
    assert "2 of 2" not in out
