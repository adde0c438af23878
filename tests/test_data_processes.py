"""The same batches by 2 and 4 processes on loopback as by one, of every kind of source."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from itertools import islice

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.data.images.source import ImageData
from jaxtrain.data.images.transform import Augment
from jaxtrain.data.loader import batches, process_rows
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.text.fill_in_middle import FillInMiddle
from jaxtrain.data.text.source import TextData

ROWS, STEPS = 8, 3
SENTINELS = {"prefix": "\x01", "suffix": "\x02", "middle": "\x03"}


def sources(folder):
    """Each kind of data that draws from the place of a row or of a batch."""
    text = {"source": str(folder), "sequence_length": 32}
    kinds = {
        "stream": TextData(**text),
        "best fit": TextData(**text, packing="best_fit"),
        "padded": TextData(**text, packing="padded", lengths=(8, 16)),
        "middle": TextData(**text, fill_in_middle=FillInMiddle(**SENTINELS)),
        "mixture": Mixture(
            data=TextData(sequence_length=32),
            sources={"one": str(folder), "other": str(folder)},
            weights={"one": 0.3, "other": 0.7},
            stages={2: {"one": 0.5, "other": 0.5}, 9: {"one": 0.1, "other": 0.9}},
            interpolation="linear",
        ),
    }
    images = {"source": "synthetic", "image_size": 6, "crop": "pad", "flip": True}
    augment = Augment(mixup=0.3, cutmix=1.0, brightness=0.2)
    kinds["images"] = ImageData(**images, augment=augment)
    kinds["images of workers"] = ImageData(**images, augment=augment, workers=1)
    return kinds


def row_digests(folder, rows):
    """kind -> step -> row -> sha256 of all that stands in it."""
    found = {}
    for kind, data in sources(folder).items():
        opened = data.open(seed=0)
        stream = batches(
            opened.train, global_batch_size=ROWS, seed=7, start=5, rows=rows,
            order=opened.mixing or opened.by_length, workers=opened.workers,
        )  # fmt: skip
        found[kind] = []
        for batch in islice(stream, STEPS):
            leaves = [leaf for leaf in jax.tree.leaves(batch) if leaf is not None]
            found[kind].append(
                {
                    str(row): hashlib.sha256(
                        b"".join(np.ascontiguousarray(leaf[place]).tobytes() for leaf in leaves)
                    ).hexdigest()
                    for place, row in enumerate(rows.tolist())
                }
            )
        stream.close()
    return found


def one_of_several():
    """A process of a run that has 4 devices in all: prints its rows."""
    port, number, count, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=count, process_id=number)
    mesh = jax.make_mesh((4,), ("data",))
    rows = process_rows(NamedSharding(mesh, P("data")), ROWS)
    assert len(rows) == ROWS // count
    print("DIGESTS", json.dumps(row_digests(folder, rows)))  # noqa: T201


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_batches_are_those_of_one_process(count, tmp_path):
    rng = np.random.default_rng(0)
    for number in range(40):
        text = " ".join(rng.choice(["tea", "and", "cake"], rng.integers(1, 40)))
        (tmp_path / f"{number}.txt").write_text(text)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, port, str(number), str(count), str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for number in range(count)
    ]  # fmt: skip
    expected = row_digests(tmp_path, np.arange(ROWS))
    assert len({digest for steps in expected.values() for one in steps for digest in one}) > 1
    seen = set()
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
            line = next(line for line in output.splitlines() if line.startswith("DIGESTS "))
            for kind, steps in json.loads(line.removeprefix("DIGESTS ")).items():
                for step, rows in enumerate(steps):
                    seen |= {(kind, step, row) for row in rows}
                    for row, digest in rows.items():
                        assert digest == expected[kind][step][row], (kind, step, row)
    finally:
        for process in processes:
            process.kill()
    assert len(seen) == len(expected) * STEPS * ROWS
    assert expected["images"] == expected["images of workers"]


if __name__ == "__main__":
    one_of_several()
