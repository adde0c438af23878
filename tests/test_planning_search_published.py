"""The search against the best published layouts: by the same model no more than a tenth slower."""

import csv
import shlex

import pytest

from benchmarks.predictions import FILE
from jaxtrain import load_config
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.analysis.planning.search import price, search

ROWS = {row["id"]: row for row in csv.DictReader(FILE.open(newline=""))}


def published(name, target=None, more=()):
    """A published run: its configuration and its machine, or as much more of either."""
    config, *words = shlex.split(ROWS[name]["bindings"])
    bindings = [word for flag, word in zip(words, words[1:], strict=False) if flag == "-b"]
    machine = target or words[words.index("--target") + 1]
    return load_config(config, [*bindings, *more]), parse_target(machine)


@pytest.mark.parametrize(
    ("name", "target", "more"),
    [
        # NeMo: TP4 PP4 CP2, interleaved by 5.
        pytest.param("h100-nemo-70b-64", None, [], id="70B on 64 H100"),
        pytest.param("h100-mt-l2-70b-64", None, [], id="Llama 2 70B on 64 H100",
                     marks=pytest.mark.slow),
        pytest.param("h100-mcore-mix8x7-64", None, [], id="Mixtral 8x7B on 64 H100",
                     marks=pytest.mark.slow),
        # AXLearn's, of 512 chips, on half of them with half of the batch.
        pytest.param("v5p-fuji70b-512", "v5p:4x8x8",
                     ["Mesh.fsdp=256", "Train.global_batch_size=512"],
                     id="70B on 256 v5p", marks=pytest.mark.slow),
        # NeMo's of 128 GPUs, eight times, in bfloat16.
        pytest.param("b200-nemo-405b-128-fp8", "b200:128x8",
                     ["Mesh.fsdp=16", "Train.global_batch_size=512", "Precision.matmul='compute'"],
                     id="405B on 1,024 B200", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_is_found_is_at_most_a_tenth_slower_than_what_was_published(name, target, more):
    config, machine = published(name, target, more)
    found = search(config, machine)
    assert all(one.price.fits for one in found.candidates)
    best = min(one.price.seconds for one in found.candidates)
    assert best <= 1.1 * price(config, machine).seconds
