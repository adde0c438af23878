"""A run, its plan, its profile and its proof compile one function with one set of XLA's options."""

import jax
import pytest
from conftest import needs_libtpu

from jaxtrain import Trainer, load_config, plan
from jaxtrain.analysis.planning.compiled.compiled import (
    compile_step,
    lower,
    options_of,
    target_layout,
)
from jaxtrain.analysis.planning.machines.targets import native_stderr_kept, parse_target
from jaxtrain.analysis.profiling.recorder import Recorder
from jaxtrain.analysis.verify.runs import MeshRun
from jaxtrain.config.errors import UserError
from jaxtrain.parallel.compilation import xla_options
from jaxtrain.run.show.progress import quiet
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.compose import compose

ONE = ["Mesh.data = 1", "Mesh.fsdp = 1", "Mesh.tensor = 1"]
BINDINGS = {
    "zero3": ["Mesh.fsdp = 4", "Mesh.tensor = 2", "Train.steps = 600"],
    "accumulated": ["Mesh.fsdp = 8", "Train.accumulation = 2", "Train.global_batch_size = 16"],
    "stages": ["Mesh.fsdp = 4", "Mesh.pipe = 2", "Pipeline.microbatches = 2"],
    "replicas": ["Mesh.data = 8", "Exchange.method = 'int8'"],
}


@pytest.fixture(params=BINDINGS)
def config(request, tiny_config):
    return load_config(tiny_config, bindings=ONE + BINDINGS[request.param])


@pytest.mark.slow_cases("accumulated", "replicas")
def test_a_plan_lowers_what_a_run_lowers(config):
    trainer = Trainer(config)
    layout = target_layout(config, parse_target("cpu:8"))
    options = options_of(config, layout)
    assert lower(config, layout, options).as_text() == trainer.lower().as_text()
    assert options == trainer._step.options
    assert options == xla_options("cpu", config.train.steps)


@pytest.mark.slow_cases("accumulated", "replicas", "stages")
def test_a_proof_takes_the_step_of_a_run(config):
    trainer, proof = Trainer(config), MeshRun(config)
    assert proof.train_step.options == trainer._step.options
    # But for the gradients, which its optimizer keeps besides.
    optimizer = compose(config, proof.layout).setup.optimizer
    training = proof.training.rebuild(optimizer=optimizer)
    with proof.layout.active():
        text = CompiledStep(training).lower(trainer.abstract_batch()).as_text()
    assert text == trainer.lower().as_text()


def test_a_profile_names_the_operations_of_the_step_that_a_run_takes(tiny_config, tmp_path):
    config = load_config(tiny_config, bindings=ONE + BINDINGS["zero3"])
    trainer = Trainer(config)
    lowered = trainer.lower()
    recorder = Recorder(tmp_path, quiet(), "float32", done=0, last=6)
    assert recorder.compile(lowered).as_text() == lowered.compile().as_text()
    recorder.close()


@needs_libtpu
def test_the_options_of_a_run_on_tpus_are_those_of_its_plan(tiny_config, tmp_path, monkeypatch):
    """Of a chip whose runs have options of their own, and of a run long enough for all of them."""
    config = load_config(tiny_config, bindings=[*ONE, "Mesh.fsdp = 4", "Train.steps = 10000"])
    target = parse_target("v5p:2x2x1")
    with native_stderr_kept():
        layout = target_layout(config, target)
    options = options_of(config, layout)
    assert options == xla_options("tpu", 10_000, layout.mesh.devices.flat[0].device_kind)
    assert {"xla_tpu_scoped_vmem_limit_kib"} < options.keys()
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    given, jit = [], jax.jit

    def watched(self, more=None):
        given.append((self.as_text(), more))
        raise InterruptedError

    def recorded(function, **options):
        if "donate_argnums" in options:  # the step
            given.append(options["compiler_options"])
        return jit(function, **options)

    text = lower(config, layout, options).as_text()
    monkeypatch.setattr(jax, "jit", recorded)
    monkeypatch.setattr(jax.stages.Lowered, "compile", watched)
    for thorough in (True, False):
        with pytest.raises(InterruptedError):
            compile_step(config, layout, target, thorough=thorough)
    quick = {"exec_time_optimization_effort": -1.0}
    assert given == [options, (text, {}), options, (text, quick)]


def test_a_plan_that_compiles_nothing_cannot_be_thorough(tiny_config):
    with pytest.raises(UserError, match="--thorough with --no-compile"):
        plan(load_config(tiny_config), target="cpu:8", compile=False, thorough=True)
