"""What a backward pass keeps, from few traces: what the very layout and rows keep when traced."""

import dataclasses
import math
from typing import Any

import pytest

from jaxtrain import load_config
from jaxtrain.analysis.planning.textbook import profile
from jaxtrain.analysis.planning.textbook.profile import on_platform
from jaxtrain.training.layouts import abstract_layout, resolve_config

PAIRS = [
    "Transformer.num_layers = 1", "Transformer.embed_dim = 16", "Transformer.mlp_dim = 32",
]  # fmt: skip
CONFIGS: dict[str, tuple[str, list[str]]] = {
    "lenet": ("lenet_mnist5k", []),
    "pairs": ("transformer_addition", PAIRS),
    "pairs-remat": ("transformer_addition", [*PAIRS, "Remat.policy = 'full'"]),
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "zero"),
    [("lenet", 1), pytest.param("lenet", 3, marks=SLOW), pytest.param("pairs", 2, marks=SLOW),
     ("pairs-remat", 3), pytest.param("pairs-remat", 2, marks=SLOW)],
)  # fmt: skip
def test_stages_and_rows_share_their_traces(name: str, zero: int) -> None:
    sizes, times = {"data": 2, "fsdp": 2, "tensor": 2}, 4
    config_name, bindings = CONFIGS[name]
    meshed = [f"Mesh.{axis} = {size}" for axis, size in sizes.items()]
    more = [*bindings, *meshed, f"Sharding.zero = {zero}", "Train.accumulation = 2"]
    config = resolve_config(load_config(config_name, more), "gpu")
    layout = on_platform(abstract_layout(config, math.prod(sizes.values())), "gpu", "planned")
    rows = times * layout.batch_devices()
    key: Any = profile.of_forward(config)
    shared = profile.of_weights(layout)
    assert (shared == layout) == (zero == 3)
    expected = profile.residual_bytes(dataclasses.replace(config), layout, rows)
    assert profile.residual_bytes_of_rows(key, shared, rows) == expected
    # Each row adds as much, and weights are none of it.
    fewer = profile.residual_bytes(key, shared, layout.batch_devices())[0]
    assert expected[0] == times * fewer > 0
