"""Communication graphs of gossip averaging.

In each of them every replica has as many neighbours as every other, and the mean of all stays.
"""

import math
from typing import Literal

Graph = Literal["ring", "torus", "exponential"]


def neighbours(graph: Graph, replicas: int) -> list[list[int]]:
    """For each permute of an exchange, the replica that each one sends to; none twice.

    Args:
      graph: 'ring': both next ones; 'torus': the next ones along both sides of a grid, row by row;
        'exponential': those 1, 2, 4, ... places on, below their number.
      replicas: how many there are.
    """
    everyone = range(replicas)
    if graph == "torus":
        rows, columns = sides(replicas)
        along = [
            [(r // columns + i) % rows * columns + (r % columns + j) % columns for r in everyone]
            for i, j in ((0, 1), (0, -1), (1, 0), (-1, 0))
        ]
    else:
        shifts = (1, -1) if graph == "ring" else [2**i for i in range((replicas - 1).bit_length())]
        along = [[(r + shift) % replicas for r in everyone] for shift in shifts]
    found = []
    for one in along:
        if one not in found and one != list(everyone):
            found.append(one)
    return found


def sides(replicas: int) -> tuple[int, int]:
    """Return rows and columns of the grid of `replicas` that is nearest to a square."""
    rows = max(n for n in range(1, math.isqrt(replicas) + 1) if replicas % n == 0)
    return rows, replicas // rows
