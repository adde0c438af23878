"""libtpu without a TPU: no line of it in the terminal, and TPUs that are there are found."""

import os
import subprocess
import sys

import pytest
from conftest import needs_libtpu

from jaxtrain.parallel.devices import has_tpu_chips, platforms_without_libtpu

_SAID = ("JAX_PLATFORMS", "XLA_FLAGS", "TPU_")
COMMAND = "import sys; from jaxtrain.cli import main; sys.exit(main(['doctor']))"
NOTEBOOK = "from jaxtrain import use_devices; print(len(use_devices()), 'devices')"
# Beside a GPU, as far as the file system says: JAX opens libtpu, and a TPU's program is compiled.
BESIDE_GPU = """
from pathlib import Path
import jax
from jax.experimental import topologies
from jaxtrain.parallel.devices import pass_over_libtpu
pass_over_libtpu(Path.cwd())
assert not jax.config.jax_platforms
print(len(jax.devices()), "device")
found = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
layout = jax.sharding.NamedSharding(jax.sharding.Mesh(found, "x"), jax.sharding.PartitionSpec("x"))
x = jax.ShapeDtypeStruct((8, 128), "float32", sharding=layout)
jax.jit(lambda x: x.sum()).lower(x).compile()
print(len(found), found[0].device_kind)
"""


@pytest.mark.slow_cases("beside a GPU")
@needs_libtpu
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (COMMAND, "Devices: 1 cpu"),
        (NOTEBOOK, "8 devices"),
        (BESIDE_GPU, "1 device\n8 TPU v5 lite"),
    ],
    ids=["cli", "python", "beside a GPU"],
)
def test_a_process_that_opens_the_devices_writes_no_error(code, said, tmp_path):
    if platforms_without_libtpu(None, is_installed=True, plugins=()) is None:
        pytest.skip("this machine has an accelerator")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SAID)}
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    # While another process holds libtpu's lock, libtpu is silent: not here.
    own = {"JAXTRAIN_CACHE": str(tmp_path), "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=kept | own, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("file", "chosen", "plugins", "platforms"),
    [
        (None, None, (), "cpu"),
        (None, "", ("xla_cuda13",), "cpu"),
        ("accel0", None, (), None),
        ("vfio/0", None, (), None),
        ("nvidia0", None, ("xla_cuda13",), None),
        (None, "tpu,cpu", (), None),
        (None, "cuda", ("xla_cuda13",), None),
        (None, None, ("xla_rocm7",), None),
    ],
)
def test_wherever_an_accelerator_may_be_jax_looks_itself(
    file, chosen, plugins, platforms, tmp_path
):
    if file is not None:
        (tmp_path / "dev" / file).parent.mkdir(parents=True)
        (tmp_path / "dev" / file).touch()
    found = platforms_without_libtpu(chosen, is_installed=True, plugins=plugins, root=tmp_path)
    assert found == platforms
    assert has_tpu_chips(tmp_path) == (file in ("accel0", "vfio/0"))
    without = platforms_without_libtpu(chosen, is_installed=False, plugins=plugins, root=tmp_path)
    assert without is None
