"""A run's second start compiles nothing and computes the same; XLA's options by platform."""

import contextlib
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from cluster import start_processes

from jaxtrain.parallel import compilation
from jaxtrain.parallel.chips import CHIPS
from jaxtrain.parallel.compilation import options_of_run, with_known_options, xla_options

START = """
import collections, json, sys
import jax
seen = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: seen.update([name.split("/")[-1]]))
jax.config.update("jax_platforms", "cpu")
from jaxtrain.__main__ import main
status = main(sys.argv[1:])
print(json.dumps({"status": status, "folder": jax.config.jax_compilation_cache_dir, **seen}))
"""


def run(arguments, **environment):
    """What a process of its own counted while it ran one command."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", START, *map(str, arguments)],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def first(tiny_config, tmp_path_factory):
    """A cache's folder, and what the run that filled it counted."""
    folder = tmp_path_factory.mktemp("first")
    return folder, train(tiny_config, folder / "run", JAXTRAIN_CACHE=str(folder / "cache"))


def train(config, workdir, **environment):
    tiny = ["Train.steps = 2", "Mesh.data = 1", "Mesh.fsdp = 1", "Mesh.tensor = 1"]
    words = [word for binding in tiny for word in ("-b", binding)]
    return run(["train", config, "--workdir", workdir, *words], **environment)


def losses(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines for name in ("loss", "eval_loss") if name in line]


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_computes_the_same(first, tiny_config, tmp_path):
    folder, counted = first
    assert counted["status"] == 0
    assert counted["cache_misses"] >= 3  # at least: initialization, step, evaluation
    assert counted["folder"].startswith(str(folder / "cache" / "compiled"))
    again = train(tiny_config, tmp_path / "run", JAXTRAIN_CACHE=str(folder / "cache"))
    assert again["compile_requests_use_cache"] == again["cache_hits"]
    assert "cache_misses" not in again
    assert losses(tmp_path / "run") == losses(folder / "run")
    assert len(losses(tmp_path / "run")) >= 3


@pytest.mark.slow
def test_in_a_second_start_and_a_resume_of_two_processes_the_first_compiles_nothing(
    tiny_config, tmp_path
):
    bindings = ["Mesh.data = 2", "Mesh.fsdp = 1", "Mesh.tensor = 1", "Train.save_every = 1"]

    def start(name, workdir, steps):
        words = ["train", str(tiny_config), "--workdir", str(tmp_path / workdir)]
        for one in (*bindings, f"Train.steps = {steps}"):
            words += ["-b", one]
        words += ["--num-processes", "2", "--process-id", "{PROCESS}"]
        words += ["--coordinator", "{COORDINATOR}"]
        program = "import os, sys\n"
        program += f"sys.argv[1:] = [word.format(**os.environ) for word in {words!r}]\n" + START
        cache = {"JAXTRAIN_CACHE": str(tmp_path / "cache")}
        with start_processes(2, program, folder=tmp_path / name, environment=cache) as processes:
            assert [process.end() for process in processes] == [0, 0], processes[0].log()
            return [json.loads(process.log().splitlines()[-1]) for process in processes]

    assert start("logs first", "run", 2)[0]["cache_misses"] >= 3
    start("logs resumed", "run", 4)
    for name, workdir, steps in (("logs second", "again", 2), ("logs resumed again", "again", 4)):
        # On CPUs JAX's key contains the process's topology, and only process 0 writes: the others
        # compile again.
        counted = start(name, workdir, steps)[0]
        assert counted["status"] == 0
        assert counted["compile_requests_use_cache"] == counted["cache_hits"] > 3, name
        assert "cache_misses" not in counted, name


# Starts two processes, as the two tests above.
@pytest.mark.slow
def test_eval_loads_what_training_compiled(first):
    folder, _ = first
    found = run(["eval", "--workdir", folder / "run"], JAXTRAIN_CACHE=str(folder / "cache"))
    assert found["cache_hits"] > 0


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({"JAX_COMPILATION_CACHE_DIR": "{0}/mine"}, "{0}/mine"),
        ({"JAX_ENABLE_COMPILATION_CACHE": "false"}, None),
        ({"JAXTRAIN_CACHE": "/dev/null"}, None),  # no folder can be made there
    ],
)
def test_jax_s_settings_win_and_no_folder_is_no_failure(settings, chosen, tmp_path, monkeypatch):
    settings = {name: value.format(tmp_path) for name, value in settings.items()}
    program = (
        "import jax\nfrom jaxtrain.parallel.compilation import keep_compiled_programs\n"
        "assert keep_compiled_programs() is None\nprint(jax.config.jax_compilation_cache_dir)"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment = {**kept, "JAXTRAIN_CACHE": str(tmp_path / "unused"), **settings}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(chosen and chosen.format(tmp_path))
    assert not (tmp_path / "unused").exists()


def test_on_cpus_convolutions_are_xla_s_own_unless_a_flag_says_otherwise(monkeypatch):
    def convolved(kernel, images):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=numbers
        ).sum()

    kernel, images = jnp.ones((3, 3, 32, 32)), jnp.ones((64, 16, 16, 32))

    def by_ynnpack(**options):
        step = jax.jit(jax.grad(convolved), **options)
        return "__ynn_fusion" in step.lower(kernel, images).compile().as_text()

    monkeypatch.setenv("XLA_FLAGS", "")
    assert by_ynnpack()
    assert not by_ynnpack(compiler_options=xla_options("cpu"))
    assert xla_options("tpu") == xla_options("gpu") == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
    assert "xla_cpu_experimental_ynn_fusion_type" not in xla_options("cpu")


def test_a_flag_of_libtpu_s_own_wins_over_ours(monkeypatch):
    name = "xla_tpu_scoped_vmem_limit_kib"
    # Of the name itself: another one begins with it.
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{name}_of_others=1 --xla_other=1")
    assert name in xla_options("tpu", 10_000)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_other=1 --{name}=16384")
    assert xla_options("tpu", 10_000) == {}
    assert name not in xla_options("tpu", 10_000, "TPU v6 lite")


@pytest.mark.parametrize("chip", [chip for chip in CHIPS.values() if chip.kind == "tpu"])
def test_sparse_cores_move_what_is_sharded_where_they_do_not_by_themselves(chip):
    for kind in chip.device_kinds:
        options = xla_options("tpu", kind=kind)
        assert any("sparse_core" in name for name in options) == (chip.name in ("v5p", "v6e"))
        assert options.items() <= xla_options("tpu", 10_000, kind).items()


def test_options_that_the_compiler_does_not_have_are_named_and_left_out():
    told, ours = [], xla_options("cpu", 1000)
    assert len(ours) == 2

    def compiled(options):
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
        return dict(options)

    given = {"xla_gone": "1", **ours, "xla_also_gone": "x"}
    assert with_known_options(given, compiled, told.append) == ours
    assert told == [
        f"this version's compiler has no option {name}: compiled without it "
        "(docs/performance.md, XLA flags)"
        for name in ("xla_gone", "xla_also_gone")
    ]
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_multiheap"):  # a value of no sense
        with_known_options(
            {"xla_multiheap_size_constraint_per_heap": "many"}, compiled, told.append
        )
    assert options_of_run("cpu", "cpu", 1000, told.append) == (ours, xla_options("cpu"))
    assert len(told) == 2


@pytest.mark.parametrize("flags", ["", "--xla_backend_optimization_level=2"])
def test_what_runs_once_is_compiled_soon_unless_the_environment_chose(flags, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    given = {"xla_gone": "1", "xla_backend_optimization_level": "1"}
    monkeypatch.setattr(compilation, "_OF_ONE_RUN", {"cpu": given})
    assert compilation.run_once(lambda x, y: x + y, "cpu", 2, 3, static_argnums=1) == 5
    # A value of no sense is rejected, so the compiler is given the option.
    monkeypatch.setitem(given, "xla_backend_optimization_level", "fast")
    rejected = pytest.raises(jax.errors.JaxRuntimeError, match="optimization_level")
    with contextlib.nullcontext() if flags else rejected:
        assert compilation.run_once(lambda x, y: x + y, "cpu", 2, 3) == 5
    assert compilation.run_once(lambda x, y: x + y, "gpu", 2, 3) == 5


def test_a_tpu_s_tiles_are_larger_in_runs_that_are_worth_compiling_longer_for():
    name = "xla_tpu_scoped_vmem_limit_kib"
    short, long, trillium = (
        xla_options("tpu", steps, kind)
        for steps, kind in ((9_999, "TPU v5"), (10_000, "TPU v5"), (10_000, "TPU v6 lite"))
    )
    assert name not in short
    assert int(trillium[name]) > int(long[name]) > 32 * 1024  # KiB: the most of libtpu's own
    assert short.items() <= long.items()
    assert name not in xla_options("cpu", 10_000)
