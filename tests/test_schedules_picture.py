"""docs/schedules.svg draws what docs/optimizers.md writes, a curve for every schedule."""

import math
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from jaxtrain.training.optimizers.schedule import Schedule

PICTURE = (Path(__file__).parent.parent / "docs" / "schedules.svg").read_text()
CURVES = dict(re.findall(r'<polyline id="(\w+)" points="([\d., ]+)"', PICTURE))
# A run of 100 steps, 10 of them warm-up; decays of 30 where they end before the run does or again.
WARMUP, STEPS, DECAY, FINAL = 10, 100, 30, 0.1


def wave(t: float) -> float:
    return FINAL + (1 - FINAL) * (1 + math.cos(math.pi * t)) / 2


AFTER = {
    "constant": lambda s, t: 1.0,
    "linear": lambda s, t: 1 - t + FINAL * t,
    "cosine": lambda s, t: wave(t),
    "polynomial": lambda s, t: FINAL + (1 - FINAL) * (1 - t) ** 2,
    "wsd": lambda s, t: 1 - 0.9 * max(0.0, (s - (STEPS - DECAY)) / DECAY),
    "inverse_sqrt": lambda s, t: max(math.sqrt(WARMUP / s), FINAL),
    "one_cycle": lambda s, t: wave(t),
    "warm_restarts": lambda s, t: wave((s - WARMUP) % (DECAY + 1) / DECAY),
    "piecewise": lambda s, t: 1.0 if s <= 50 else 0.5 if s <= 75 else 0.1,
    "exponential": lambda s, t: FINAL**t,
}


def test_every_schedule_is_drawn():
    assert set(CURVES) == set(AFTER) == set(get_args(get_type_hints(Schedule)["name"]))


@pytest.mark.parametrize("name", AFTER)
def test_a_curve_is_its_formula(name):
    points = [tuple(map(float, point.split(","))) for point in CURVES[name].split()]
    assert len(points) == STEPS
    ground = re.findall(r'<path d="M(\d+) (\d+)V(\d+)H(\d+)"', PICTURE)[list(AFTER).index(name)]
    left, top, bottom, right = map(float, ground)
    for s, (x, y) in enumerate(points, start=1):
        if s >= WARMUP:
            expected = AFTER[name](s, (s - WARMUP) / (STEPS - WARMUP))
        elif name == "one_cycle":
            rise = (1 - math.cos(math.pi * (s - 1) / (WARMUP - 1))) / 2
            expected = 1 / 25 + (1 - 1 / 25) * rise
        else:
            expected = s / WARMUP
        assert abs(y - (bottom + (top - bottom) * expected)) <= 1, s
        assert abs(x - (left + (right - left) * (s - 1) / (STEPS - 1))) <= 1
