"""What the headers of small configs promise, mean and spread over five seeds: a sixth trains."""

import json
import re
import subprocess
import sys

import pytest
from conftest import optimized_environment

from jaxtrain.config.shipped import configs_folder

SEEDS = 5  # that the headers' figures are from: 0 to 4
# "Expected: 97.8 ± 0.8 % of ... (5 seeds: 96.9 to 98.9)", "Expected: ... 2.21 ± 0.02 nats ..."
PROMISE = re.compile(r"([\d.]+) ± ([\d.]+) .*?\(5 seeds: ([\d.]+) to ([\d.]+)\)", re.S)
# Config -> what is promised, as its header writes it, and the devices that it is run on.
PROMISED = {
    "mixtral_tiny": (lambda values: values["eval_loss"], 8),
    "resnet_digits": (lambda values: 100 * values["eval_accuracy"], 1),
    "resnet_mnist5k": (lambda values: 100 * values["eval_accuracy"], 1),
}


def promise(name: str) -> list[float]:
    """Mean, standard deviation, least and most over seeds, as the header says them."""
    lines = (configs_folder() / f"{name}.gin").read_text(encoding="utf-8").splitlines()
    header = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    found = PROMISE.search(header)
    assert found is not None, f"{name}: its header has no '... ± ... (5 seeds: ... to ...)'"
    return [float(number) for number in found.groups()]


@pytest.mark.parametrize("name", PROMISED)
def test_a_header_gives_mean_and_spread_of_what_its_seeds_had(name):
    mean, deviation, least, most = promise(name)
    assert least <= mean <= most
    # The deviation of five numbers in a range is 0.35 to 0.55 of it, but for rounding.
    assert 0.3 * (most - least) <= deviation <= 0.6 * (most - least)


# With one seed: five take half an hour, and those the header's figures are from show less.
TRAIN = """
import json, sys
import jax
from jaxtrain import Trainer, load_config
from jaxtrain.parallel.devices import offer_cpu_devices

name, seed, count, *prompts = sys.argv[1:]
offer_cpu_devices(int(count))
jax.config.update("jax_platforms", "cpu")
bindings = ["Mesh.simulated_devices = 0", *([f"Train.seed = {seed}"] if seed else [])]
trainer = Trainer(load_config(name, bindings), devices=jax.devices()[:int(count)])
values = trainer.train()
told = [trainer.generate(prompt, temperature=0.0) for prompt in prompts]
print(json.dumps([values, told]))
"""


def train(name: str, seed: str, devices: int, *prompts: str) -> tuple[dict, list[str]]:
    """Its last evaluation, and what it answers to prompts; with its own seed if that is empty."""
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, name, seed, str(devices), *prompts],
        env=optimized_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.rotated("promises")
@pytest.mark.parametrize("name", PROMISED)
def test_another_seed_keeps_the_promise(name):
    """A run is within three deviations of the mean, which is itself that of five runs only."""
    mean, deviation, _, _ = promise(name)
    value, count = PROMISED[name]
    found = value(train(name, str(SEEDS), count)[0])
    assert abs(found - mean) <= 3 * deviation * (1 + 1 / SEEDS) ** 0.5


@pytest.mark.slow
@pytest.mark.rotated("promises")
def test_addition_is_learned_within_1800_steps():
    """Every held-out sum, none of which was trained on, as greedy decoding tells it."""
    values, told = train("transformer_addition", "", 1, "123+456")
    assert values["eval_exact_match"] == 1.0
    assert told == ["0579"]
