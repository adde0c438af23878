"""A few steps of each kind of model through the command line, on every supported version."""

import json

import pytest

from jaxtrain.__main__ import main


def test_a_gpt_trains_resumes_and_generates(tiny_config, tmp_path, capsys):
    arguments = ["train", str(tiny_config), "--workdir", str(tmp_path)]
    assert main([*arguments, "-b", "Train.steps = 3", "-b", "Schedule.name = 'constant'"]) == 0
    assert main([*arguments, "-b", "Train.steps = 5", "-b", "Schedule.name = 'constant'"]) == 0
    assert main(["generate", "--workdir", str(tmp_path), "--prompt", "def"]) == 0
    assert capsys.readouterr().out.rstrip().splitlines()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_a_llama_trains_on_a_mesh(tiny_config, tmp_path):
    text = tiny_config.read_text().replace("@GPT()", "@Llama()").replace("GPT.", "Llama.")
    file = tmp_path / "llama.gin"
    file.write_text(
        text + "Llama.num_kv_heads = 2\nLlama.mlp_dim = 64\nSharding.zero = 2\n"
        "Sharding.sequence_parallel = True\nTrain.accumulation = 2\nRemat.policy = 'full'\n"
    )
    assert main(["train", str(file), "--workdir", str(tmp_path), "-b", "Train.steps = 4"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]


def test_a_resnet_trains(tmp_path):
    from PIL import Image

    for label, color in (("dark", 30), ("light", 220)):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(20):
            image = Image.new("L", (8, 8), color + number % 7)
            image.save(tmp_path / "images" / label / f"{number}.png")
    file = tmp_path / "run.gin"
    file.write_text(
        f"""
Train.model = @ResNet()
Train.data = @ImageData()
Train.steps = 12
Train.global_batch_size = 8
Train.log_every = 1
ResNet.depth = 20
ResNet.width = 8
ResNet.num_classes = 2
ResNet.channels = 1
ImageData.source = {str(tmp_path / "images")!r}
ImageData.num_classes = 2
Optimizer.name = 'sgd'
Optimizer.learning_rate = 0.05
Precision.compute = 'float32'
"""
    )
    assert main(["train", str(file), "--workdir", str(tmp_path / "run")]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["eval_accuracy"] >= 0.5
    assert json.loads(lines[-2])["accuracy"] == pytest.approx(1.0)
