"""Draws docs/schedules.svg: the learning rate of every schedule over a run of 100 steps.

`make docs` runs it, and a test compares the curves with their formulas.
"""

import sys
from typing import get_args, get_type_hints

import numpy as np

from jaxtrain.training.optimizers.schedule import Schedule, make_schedule

STEPS, WARMUP, DECAY, FACTORS = 100, 10, 30, {50: 0.5, 75: 0.2}
COLUMNS, WIDTH, HEIGHT, GAP, TOP, COLOUR = 3, 190, 70, 24, 22, "#1b3a57"


def rates(name: str) -> np.ndarray:
    """The fraction of the peak in each step."""
    decay = DECAY if name in ("wsd", "warm_restarts") else 0
    factors = FACTORS if name == "piecewise" else {}
    settings = Schedule(name=name, warmup_steps=WARMUP, decay_steps=decay, factors=factors)
    return np.asarray(make_schedule(settings, 1.0, STEPS)(np.arange(STEPS)))


def curve(number: int, name: str) -> list[str]:
    """One schedule in its place."""
    row, column = divmod(number, COLUMNS)
    x, y = column * (WIDTH + GAP) + GAP, row * (HEIGHT + GAP + TOP) + TOP
    points = " ".join(
        f"{x + WIDTH * step / (STEPS - 1):.0f},{y + HEIGHT * (1 - rate):.0f}"
        for step, rate in enumerate(rates(name))
    )
    return [
        f'<text x="{x}" y="{y - 6}" font-size="12" fill="{COLOUR}">{name}</text>',
        f'<path d="M{x} {y}V{y + HEIGHT}H{x + WIDTH}" fill="none" stroke="{COLOUR}" '
        'stroke-opacity="0.4"/>',
        f'<polyline id="{name}" points="{points}" fill="none" stroke="{COLOUR}" '
        'stroke-width="1.5"/>',
    ]


def picture() -> str:
    """The whole picture."""
    names = get_args(get_type_hints(Schedule)["name"])
    rows = -(-len(names) // COLUMNS)
    width = COLUMNS * (WIDTH + GAP) + GAP
    height = rows * (HEIGHT + GAP + TOP)
    parts = [part for number, name in enumerate(names) for part in curve(number, name)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(picture())
