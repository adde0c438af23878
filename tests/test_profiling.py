"""The profile of a run: its trace, what its tables name, and FLOPs that equal the closed form."""

import dataclasses
import io
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxtrain import Trainer, load_config
from jaxtrain.__main__ import main
from jaxtrain.analysis.planning.compiled.costs import costs, readers
from jaxtrain.analysis.planning.compiled.hlo import parse
from jaxtrain.analysis.planning.textbook.flops import count_flops
from jaxtrain.analysis.profiling.events import (
    Run,
    divide_time,
    newest_trace,
    operation_times,
    until_done,
)
from jaxtrain.analysis.profiling.operations import Ceilings, ceilings, origin_of
from jaxtrain.analysis.profiling.recorder import Recorder
from jaxtrain.config.errors import UserError

BINDINGS = ["Train.steps = 8", "Train.eval_every = 4", "Attention.kernel = 'reference'"]


class Compilations(logging.Handler):
    """The programs that are compiled while it listens."""

    def __init__(self) -> None:
        super().__init__()
        self.of_step = 0

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        self.of_step += "Finished XLA compilation" in message and "train_step" in message


@pytest.fixture(scope="module")
def resumed(tiny_config, tmp_path_factory):
    """A run of 2 steps that goes on with `train --profile` to step 8, evaluating after step 4 and
    in the midst of what is profiled."""
    workdir = tmp_path_factory.mktemp("profiled")
    trainer = Trainer(load_config(tiny_config, BINDINGS), workdir)
    trainer.train(steps=2)
    trainer.close()
    compilations, out = Compilations(), io.StringIO()
    logger = logging.getLogger("jax")
    logger.addHandler(compilations)
    bindings = [word for binding in BINDINGS for word in ("-b", binding)]
    with pytest.MonkeyPatch.context() as patch, jax.log_compiles():
        patch.setattr("sys.stdout", out)
        command = ["train", str(tiny_config), "--workdir", str(workdir), "--profile", *bindings]
        assert main(command) == 0
    logger.removeHandler(compilations)
    found = json.loads((workdir / "profile" / "operations.json").read_text())
    return workdir, out.getvalue(), found, compilations.of_step


@pytest.mark.slow
def test_a_resumed_start_is_traced_from_its_third_to_its_sixth_step(resumed):
    workdir, out, found, _ = resumed
    assert found["steps"] == [5, 8]
    assert "Steps 5 to 8" in out
    data = jax.profiler.ProfileData.from_file(str(newest_trace(workdir / "profile")))
    steps = {
        dict(event.stats)["step_num"]
        for plane in data.planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    }
    assert steps == {5, 6, 7, 8}
    assert list((workdir / "profile").glob("plugins/profile/*/*.trace.json.gz"))


# Profiles a run; tests/test_train.py compiles once in the fast part.
@pytest.mark.slow
def test_the_step_is_compiled_once(resumed):
    assert resumed[3] == 1


# Reads the same profile.
@pytest.mark.slow
def test_the_tables_name_the_layers(resumed):
    _, out, found, _ = resumed
    layers = {(layer["scope"], layer["pass"]) for layer in found["layers"]}
    assert {
        ("attention", "forward"), ("attention", "backward"), ("attention/norm", "forward"),
        ("mlp", "forward"), ("mlp", "backward"), ("loss", "forward"), ("embedding", "forward"),
        ("optimizer", "update"),
    } <= layers  # fmt: skip
    for words in ("attention", "mlp", "optimizer", "of roofline", "measured here"):
        assert words in out


# Reads the same profile.
@pytest.mark.slow
def test_shares_add_up_to_the_step_at_most(resumed):
    _, _, found, _ = resumed
    operations, layers = found["operations"], found["layers"]
    total = sum(one["share"] for one in operations)
    assert 0 < total <= 1 + 1e-9
    assert sum(one["share"] for one in layers) == pytest.approx(total)
    assert found["elsewhere"] == pytest.approx(1 - total)
    assert all(one["seconds"] > 0 and one["runs"] > 0 for one in layers)


# Reads the same profile.
@pytest.mark.slow
def test_flops_of_the_products_are_those_of_the_closed_form(resumed, tiny_config):
    """6 N a token, and attention in full: 12 L T D; of 8 devices each does its part."""
    _, _, found, _ = resumed
    config = load_config(tiny_config)
    model, length = config.train.model, config.train.data.sequence_length
    a_token = model.flops_per_token(length)
    a_token += 6 * model.num_layers * length * model.embed_dim  # what a causal mask hides
    expected = a_token * length * config.train.global_batch_size / 8
    assert sum(one["flops"] for one in found["operations"]) == expected
    by_layer = {(one["scope"], one["pass"]): one["flops"] for one in found["layers"]}
    mlp = 2 * 8 * model.embed_dim**2 * model.num_layers * length * 8 / 8
    assert by_layer["mlp", "forward"] == mlp
    assert by_layer["mlp", "backward"] == 2 * mlp


@pytest.mark.parametrize(
    ("steps", "words"),
    [(2, "2 are left of Train.steps=9; use Train.steps=13 or more"), (0, "0 are left")],
)
def test_too_few_steps_are_refused(steps, words, tmp_path):
    with pytest.raises(UserError, match=words):
        Recorder(tmp_path, Console(), "float32", done=9 - steps, last=9)


def test_fewer_steps_are_said(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    recorder = Recorder(tmp_path, console, "float32", done=10, last=14)
    assert (
        "4 steps are left, so steps 13 to 14 are profiled instead of 4" in console.file.getvalue()
    )
    assert [step for step in range(10, 15) if recorder.turns_at(step)] == [12]


def test_profiling_wants_a_folder():
    with pytest.raises(UserError, match="give Trainer a workdir"):
        Recorder(None, Console(), "float32", done=0, last=100)


def test_a_run_that_stops_among_the_steps_leaves_no_trace_running(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    recorder = Recorder(tmp_path, console, "float32", done=0, last=9)
    recorder.turn(0.0)
    recorder.close()
    recorder.close()
    assert "skipped" in console.file.getvalue()
    assert not any(recorder.turns_at(step) for step in range(10))
    jax.profiler.start_trace(tmp_path)  # rejects while another goes on
    jax.profiler.stop_trace()


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("jit(f)/jvp()/while/body/closed_call/mlp/norm/mul", ("mlp/norm", "forward", "mul")),
        (
            "jit(f)/transpose(jvp())/while/body/closed_call/attention/RD,PDNH->PRNH/dot_general",
            ("attention", "backward", "RD,PDNH->PRNH dot_general"),
        ),
        ("jit(f)/jvp()/while/body/eval_jaxpr/mlp/mul", ("mlp", "forward", "mul")),
        ("jit(f)/transpose(jvp(loss))/mul", ("loss", "backward", "mul")),
        (
            "jit(f)/transpose(jvp())/while/body/checkpoint/rematted_computation/mlp/tanh",
            ("mlp", "recomputed", "tanh"),
        ),
        ("jit(f)/optimizer/jit(norm)/mul", ("optimizer", "update", "mul")),
        ("jit(f)/jvp()/while/body/dynamic_slice", ("loop", "forward", "dynamic_slice")),
        ("jit(f)/jvp()/mlp/mul;jit(f)/jvp()/loss/exp", ("mlp", "forward", "mul")),
        ("", ("other", "forward", "")),
    ],
)  # fmt: skip
def test_paths_of_operations_are_places_in_the_model(path, place):
    assert dataclasses.astuple(origin_of(path)) == place


@pytest.mark.parametrize(
    ("stride", "padding", "backward"), [(1, 1, False), (2, 1, False), (1, 1, True), (2, 1, True)]
)
def test_flops_of_a_convolution_are_those_of_the_traced_one(stride, padding, backward):
    def forward(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), [(padding, padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    def both(x, kernel):
        out, back = jax.vjp(forward, x, kernel)
        return back(jnp.ones_like(out)) if backward else out

    arguments = np.ones((2, 8, 8, 3), np.float32), np.ones((3, 3, 3, 4), np.float32)
    text = jax.jit(both).lower(*arguments).compile().as_text()
    counted = count_flops(jax.make_jaxpr(both)(*arguments)).matmul
    total = sum(cost.flops for cost in costs(parse(text)).values())
    # The forward pass of the pair is not needed, and left out by the compiler.
    assert total == (counted * 2 // 3 if backward else counted)


def test_a_slice_moves_what_it_takes_and_an_update_what_it_changes():
    def move(stack, layer, x):
        taken = jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(stack, taken * x, layer, 0)

    stack = np.ones((64, 32, 32), np.float32)
    text = jax.jit(move, donate_argnums=0).lower(stack, 3, stack[0]).compile().as_text()
    moved = sum(cost.moved_bytes for cost in costs(parse(text)).values())
    # One layer is read, multiplied and written, through memory or not: never all 64.
    assert 3 * stack[0].nbytes <= moved <= 8 * stack[0].nbytes


def test_what_is_picked_out_of_numbers_in_another_dtype_is_all_that_is_read():
    def pick(x, places):
        return jnp.take_along_axis(x.astype(jnp.float32), places[:, None], -1)

    x, places = np.ones((64, 4096), jnp.bfloat16), np.zeros(64, np.int32)
    text = jax.jit(pick).lower(x, places).compile().as_text()
    moved = sum(cost.moved_bytes for cost in costs(parse(text)).values())
    assert moved < x.nbytes / 20


def test_a_moment_is_shared_out_among_those_that_run_in_it():
    runs = [Run("a", 0e9, 4e9), Run("b", 2e9, 6e9), Run("c", 10e9, 11e9), Run("d", 3e9, 3e9)]
    assert divide_time(runs) == pytest.approx([3.0, 3.0, 1.0, 0.0])


def test_a_library_call_of_several_kernels_is_one_run(tmp_path):
    """Two calls of a product in two kernels, the second of which ran twice, and two fusions, as a
    GPU's trace has them: an event a kernel."""
    called = ["nvjet", "reduce", "reduce"]
    launched = [(2, kernel) for kernel in called] * 2 + [(3, "input_fusion")] * 2
    events = "".join(
        f"""events {{ metadata_id: {10 + number} offset_ps: {number}000000 duration_ps: 500000
            stats {{ metadata_id: 1 ref_value: {op} }}
            stats {{ metadata_id: 4 str_value: "jit_train_step" }} }}
        """
        for number, (op, _) in enumerate(launched)
    )
    names = "".join(
        f'event_metadata {{ key: {10 + number} value {{ id: {10 + number} name: "{kernel}" }} }}\n'
        for number, (_, kernel) in enumerate(launched)
    )
    stats = "".join(
        f'stat_metadata {{ key: {key} value {{ id: {key} name: "{name}" }} }}\n'
        for key, name in {1: "hlo_op", 2: "custom-call.7", 3: "fusion", 4: "hlo_module"}.items()
    )
    text = f'planes {{ name: "/device:GPU:0" {names} {stats} lines {{ {events} }} }}'
    file = tmp_path / "gpu.xplane.pb"
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))
    found = operation_times(file, "jit_train_step", {"custom-call.7": [], "fusion": []})
    assert {name: time.count for name, time in found.items()} == {"custom-call.7": 2, "fusion": 2}
    assert found["custom-call.7"].seconds == pytest.approx(6 * 0.5e-6)


def test_an_operation_is_done_when_what_reads_it_begins():
    # On two threads "a" goes on after its event; the thread that finishes it says so after "b".
    runs = [Run("a", 0.0, 1.0), Run("b", 3.0, 8.0), Run("a", 10.0, 11.0), Run("c", 11.0, 12.0)]
    found = until_done(runs, {"a": [9.0, 11.5]}, {"a": {"b"}, "b": set(), "c": set()})
    assert [run.end for run in found] == [3.0, 8.0, 11.5, 12.0]


def test_an_end_after_the_next_run_is_that_ones():
    runs = [Run("a", 0.0, 1.0), Run("a", 10.0, 11.0)]
    assert [run.end for run in until_done(runs, {"a": [12.0]}, {"a": ()})] == [1.0, 12.0]


def test_readers_are_found_behind_views_and_inside_loops():
    def loop(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].reshape(-1) * 2.0

    text = jax.jit(loop).lower(jnp.ones((8, 8)), jnp.ones((3, 8, 8))).compile().as_text()
    module = parse(text)
    found = readers(module)
    assert found.keys() == costs(module).keys()
    dot = next(name for name in found if "dot" in name or "ynn" in name)
    (reader,) = found[dot]
    assert "tanh" in module.computations[_where(module, reader)].instructions[reader].op_name


def _where(module, name):
    return next(c for c, inside in module.computations.items() if name in inside.instructions)


def test_what_caches_hold_has_the_rate_of_its_size():
    top = Ceilings(100.0, 1.0, "by hand", cached=((10, 8.0), (100, 4.0), (1000, 1.0)))
    assert [top.rate(size) for size in (1, 10, 99, 100, 5000)] == [8.0, 8.0, 8.0, 4.0, 1.0]
    # Twenty runs of 100 bytes are served by a cache, one of 2,000 by the memory.
    assert top.least_seconds(0, 2000, 20) == 500.0
    assert top.least_seconds(0, 2000, 1) == 2000.0
    assert top.bound(100_000, 2000, 20) == "arithmetic"
    assert top.bound(100_000, 2000, 1) == "memory"
    assert Ceilings(100.0, 1.0, "a chip").least_seconds(0, 2000, 20) == 2000.0


def test_the_rates_of_this_machine_fall_with_the_size(devices):
    top = ceilings(devices[0], "float32")
    sizes, rates = zip(*top.cached, strict=True)
    assert list(sizes) == sorted(sizes)
    assert list(rates) == sorted(rates, reverse=True)
    assert rates[-1] == top.bandwidth
