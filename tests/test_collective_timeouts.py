"""A simulated device may wait long for another in a collective: XLA does not end the process."""

import os
import re
import subprocess
import sys

from jaxtrain.parallel import compilation

# Device 0 works for some seconds before a sum over the devices, which device 1 enters at once.
SLOW_DEVICE = """
import sys
import time

import jax
import numpy as np
from jaxtrain.parallel import compilation
from jaxtrain.parallel.devices import simulate_devices

if ours := sys.argv[2:]:  # seconds, in place of the product's hours
    compilation._COLLECTIVE_TIMEOUTS = dict.fromkeys(
        compilation._COLLECTIVE_TIMEOUTS, int(ours[0])
    )
simulate_devices(2)
mesh, spec = jax.make_mesh((2,), ("x",)), jax.P("x")


def work(index, x):
    if index == 0:
        time.sleep(float(sys.argv[1]))
    return x


def total(x):
    index = jax.lax.axis_index("x")
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.lax.psum(jax.pure_callback(work, shape, index, x), "x")


step = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=spec, out_specs=jax.P(), check_vma=False))
x = jax.device_put(np.arange(2.0, dtype=np.float32), jax.NamedSharding(mesh, spec))
print(step(x).tolist())
"""
WARNING, TERMINATION = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds",
    "--xla_cpu_collective_call_terminate_timeout_seconds",
)


def run(seconds, *ours, flags=""):
    environment = {**os.environ, "XLA_FLAGS": flags}
    command = [sys.executable, "-c", SLOW_DEVICE, str(seconds), *map(str, ours)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def flags_after(monkeypatch, flags):
    monkeypatch.setenv("XLA_FLAGS", flags)
    compilation.extend_collective_timeouts()
    return dict(re.findall(r"(--\w+)=(\S+)", os.environ["XLA_FLAGS"]))


def test_a_timeout_of_the_user_s_stays(monkeypatch):
    own = f"--xla_cpu_enable_fast_math=true {TERMINATION}=2"
    found = flags_after(monkeypatch, own)
    assert found[TERMINATION] == "2"
    assert found["--xla_cpu_enable_fast_math"] == "true"
    assert int(found[WARNING]) >= 60
    done = run(6, flags=f"{TERMINATION}=1 {WARNING}=1")
    assert done.returncode == -6, done.stderr  # SIGABRT
    assert "Termination timeout for" in done.stderr


def test_without_one_xla_waits_for_as_long_as_we_say_which_is_hours(monkeypatch):
    found = flags_after(monkeypatch, "")
    assert int(found[TERMINATION]) >= 3600
    again = flags_after(monkeypatch, os.environ["XLA_FLAGS"])
    assert again == found
    done = run(6, 1)  # a second each in place of those hours: they are in time to reach XLA
    assert done.returncode == -6, done.stderr
    assert "Termination timeout for" in done.stderr


def test_a_flag_that_this_jaxlib_does_not_have_is_left_out(monkeypatch):
    monkeypatch.setattr(compilation, "_COLLECTIVE_TIMEOUTS", {"xla_cpu_no_such_timeout": 7})
    assert flags_after(monkeypatch, "") == {}
