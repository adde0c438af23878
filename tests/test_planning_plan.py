"""`jaxtrain plan` from end to end: the object, its JSON, tables, picture and command."""

import dataclasses
import functools
import json

import jax
import pytest
from conftest import needs_libtpu

from jaxtrain import Trainer, load_config, plan
from jaxtrain.__main__ import main
from jaxtrain.analysis.planning import plan as plans
from jaxtrain.analysis.planning.compiled.compiled import Compiled
from jaxtrain.analysis.planning.machines.targets import parse_target, target_devices
from jaxtrain.analysis.planning.search.candidates import COMPILED
from jaxtrain.analysis.planning.timing.efficiency_factors import efficiency_of
from jaxtrain.config.errors import NoCompilerError, UserError
from jaxtrain.parallel.chips import CHIPS

# The keys that the contract promises.
KEYS = {
    "target", "devices", "mesh", "fits", "hbm_bytes", "memory", "collectives", "flops_per_device",
    "step_seconds", "mfu", "compile_seconds", "advice",
}  # fmt: skip
MEMORY_KEYS = {
    "params", "optimizer", "gradients", "activations", "total", "arguments", "temporaries",
}  # fmt: skip
TPU_MODEL = """
Train.model = @Llama()
Train.data = @TextData()
Train.steps = 8
Train.global_batch_size = 16
Llama.vocab_size = 1024
Llama.num_layers = 2
Llama.embed_dim = 512
Llama.num_heads = 4
Llama.num_kv_heads = 4
Llama.mlp_dim = 1024
Llama.context_length = 256
TextData.source = 'synthetic'
TextData.sequence_length = 256
Precision.compute = 'bfloat16'
Attention.kernel = 'tpu'
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """One cache for the file: a test sees what an earlier one compiled, never a user's."""
    folder = tmp_path_factory.getbasetemp() / "plan_cache"
    monkeypatch.setenv("JAXTRAIN_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("plan") / "llama.gin"
    file.write_text(TPU_MODEL)
    return file


@pytest.mark.parametrize(
    ("axis", "more"),
    [
        ("tensor", ()),
        ("pipe", ("Pipeline.microbatches = 4",)),
        ("data", ("Exchange.method = 'local_sgd'", "Exchange.period = 4")),
    ],
)
def test_an_axis_of_minus_one_is_planned_as_what_is_left(axis, more):
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "Train.global_batch_size": 16}
    found = []
    for size in (4, -1):
        lines = [
            f"{name if '.' in name else f'Mesh.{name}'} = {value}"
            for name, value in {**sizes, axis: size}.items()
        ]
        report = plan(load_config("gpt_quickstart", [*lines, *more]), "h100:1x4", compile=False)
        found.append(report.to_json())
    assert found[0] == found[1]


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("search", [False, True])
def test_where_no_compiler_is_installed_the_plan_is_an_estimate_that_says_so(search):
    """No plugin of JAX's compiles for AMD's GPUs, so that this is the same on every machine."""
    config = load_config("gpt_quickstart", ["Mesh.tensor = 1", "Mesh.fsdp = -1"])
    found = plan(config, "mi300x:1x8", search=search)
    closed = plan(config, "mi300x:1x8", search=search, compile=False)
    why = (
        "nothing was compiled: target 'mi300x:1x8': no compiler for it comes with JAX's CUDA plugin"
    )
    assert found.to_json() == closed.to_json() | {"advice": [why, *closed.advice]}
    assert found.to_json()["estimate"]
    assert why in " ".join(found.table().split())
    with pytest.raises(NoCompilerError, match="no compiler for it"):
        plan(config, "mi300x:1x8", thorough=True)


# tests/test_compiled_step.py compares what a plan and a run lower in the fast part.
@pytest.mark.slow
def test_a_plan_for_cpus_is_the_executable_that_a_run_has(tiny_config):
    config = load_config(tiny_config)
    report = plan(config, target="cpu:8")
    stats = Trainer(config).lower().compile().memory_analysis()
    assert report.compiled is not None
    assert report.compiled.argument_bytes == stats.argument_size_in_bytes
    assert report.compiled.temp_bytes == stats.temp_size_in_bytes
    # Closed forms: arguments to the byte.
    assert report.estimate.arguments.total == stats.argument_size_in_bytes
    found = report.to_json()
    assert set(found) >= KEYS
    assert set(found["memory"]) >= MEMORY_KEYS
    memory = found["memory"]
    assert memory["arguments"] == stats.argument_size_in_bytes
    assert memory["gradients"] + memory["activations"] == memory["temporaries"]
    assert found["mesh"] == {
        "pipe": 1, "data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2
    }  # fmt: skip
    # Nothing is known of a CPU's speed and room, and nothing is made up.
    assert found["fits"]
    assert found["hbm_bytes"] is None
    assert found["step_seconds"] is None
    assert "the peak FLOP/s of cpu are not known" in report.table()
    json.dumps(found)


# A TPU program; tests/test_planning_traffic.py explains another's in the fast part.
@pytest.mark.slow
@needs_libtpu
def test_a_plan_for_tpus_explains_all_traffic_and_comes_from_the_cache_again(llama_file, tmp_path):
    config = load_config(llama_file)
    first = plan(config, target="v5e:2x4")
    assert first.compiled is not None
    assert not first.compiled.cached
    assert first.rows
    assert all(row.explained for row in first.rows)
    # ZeRO 3: a layer's weights are gathered twice and its gradients reduce-scattered once.
    model = config.train.model
    layer = 3 * model.embed_dim * model.mlp_dim + 4 * model.embed_dim**2
    scattered = sum(row.bytes for row in first.rows if row.kind == "reduce-scatter")
    gathered = sum(row.bytes for row in first.rows if row.kind == "all-gather")
    tables = 2 * model.vocab_size * model.embed_dim
    assert scattered == 2 * (model.num_layers * layer + tables)
    assert gathered == 2 * (2 * model.num_layers * layer + tables) // 8
    assert first.fits
    assert first.buffers
    # The schedule counts: all that its collectives take is waited for or hidden, attention's
    # kernels take 3.5 forward passes of half of the scores at their share of the peak.
    time, closed = first.time, plan(config, target="v5e:2x4", compile=False).time
    assert time.exposed + time.hidden == pytest.approx(sum(time.by_axis.values()))
    rows, length = config.train.global_batch_size / 8, model.context_length
    scores = 3.5 * 2 * rows * model.num_layers * length**2 * model.embed_dim
    assert time.kernels == pytest.approx(
        scores / 197e12 / efficiency_of(parse_target("v5e:2x4")).scores
    )
    assert time.compute > time.kernels + 6 * rows * length * model.num_layers * layer / 197e12
    # Beside it stand the closed forms.
    assert time.estimate.compute == closed.compute
    assert closed.estimate is None
    told = first.to_json()
    assert told["step_seconds"] == time.seconds == time.compute + time.exposed
    assert told["time"]["source"] == "schedule"
    assert told["time"]["closed_form"]["step_seconds"] == time.estimate.seconds != time.seconds
    again = plan(config, target="v5e:2x4")
    assert again.compiled is not None
    assert again.compiled.cached
    assert again.to_json()["memory"] == first.to_json()["memory"]
    assert again.to_json()["collectives"] == first.to_json()["collectives"]
    assert again.time == first.time
    first.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    table = first.table()
    assert "FITS" in table
    assert "by the schedule" in table
    assert "closed forms" in table
    assert "are attention kernels" in table
    share = efficiency_of(parse_target("v5e:2x4")).products
    assert f"Assumed: {share:.0%} of 197 TFLOP/s (bfloat16) in matmuls" in table


@pytest.mark.parametrize(
    ("target", "temporaries", "live", "verdict"),
    [
        ("h100:1x4", 2**40, None, "compiles, but would run out of memory: 1.0 TiB of 74.4 GiB"),
        ("h100:1x4", 2**20, None, "fits: 2.0 MiB of 74.4 GiB"),
        # Its compiler would have rejected it.
        ("v5e:2x2", 2**40, 2**30, "fits: 1.0 GiB live of 15.8 GiB"),
        ("v5e:2x2", 2**30, 2**20, "fits: 1.0 GiB of 15.8 GiB"),
    ],
)
def test_a_program_that_compiles_is_never_said_not_to_fit(
    llama_file, target, temporaries, live, verdict
):
    config = load_config(llama_file, ["Attention.kernel='auto'"])
    estimate = plan(config, target=target, compile=False)
    compiled = Compiled(
        argument_bytes=2**20, temp_bytes=temporaries, live_bytes=live, unaliased_bytes=0,
        host_bytes=0, error=None, text="", warnings=(), seconds=1.0,
    )  # fmt: skip
    report = dataclasses.replace(estimate, compiled=compiled)
    words, needs = verdict.split(": ")
    assert report.verdict == words
    assert f"{words.upper()}: {needs} a device" in report.table()
    assert ("XLA for GPUs does not reject" in report.table()) == (not report.fits)


# Compiles for a TPU three times; tests/test_planning_advice.py has fixes that fit by closed
# forms.
@pytest.mark.slow
@needs_libtpu
def test_what_does_not_fit_gets_fixes_that_do(llama_file):
    big = ["Mesh.fsdp = 1", "Train.global_batch_size = 2048", "Llama.num_layers = 4"]
    report = plan(load_config(llama_file, big), target="v5e:1x1")
    assert not report.fits
    assert report.to_json()["fits"] is False
    assert report.compiled is not None
    assert report.compiled.error is not None
    assert "Ran out of memory" in report.compiled.error
    assert "DOES NOT FIT" in report.table()
    # The cheapest fix, pasted, fits by the compiler's own word.
    best = report.fixes[0]
    assert best.fits
    assert best.sentence == report.advice[0]
    assert plan(load_config(llama_file, [*big, *best.bindings]), target="v5e:1x1").fits


def test_an_estimate_needs_no_compiler_and_says_what_it_is():
    # The tokenizer of this config is not here, and is not asked for.
    bindings = ["Attention.kernel = 'tpu'", "Train.global_batch_size = 8192"]
    config = load_config("llama_8b", bindings)
    report = plan(config, target="v5p:8x8x16", compile=False)
    assert report.devices == 1024
    found = report.to_json()
    assert found["estimate"]
    assert found["time"]["source"] == "closed forms"
    assert found["time"]["closed_form"]["step_seconds"] == found["step_seconds"]
    assert found["compile_seconds"] is None
    assert "closed-form ESTIMATE, nothing was compiled" in report.table()
    # Adam in float32: 4 + 8 bytes of 8.03 billion parameters over 1,024 devices; norms are whole.
    norms = 65 * 4096
    sharded = 8_030_261_248 - norms
    assert found["memory"]["params"] == 4 * (sharded // 1024 + norms)
    assert found["memory"]["optimizer"] - 2 * found["memory"]["params"] < 64
    assert 0 < found["mfu"] < CHIPS["v5p"].bf16_flops


@pytest.mark.slow_cases("True-v5e:2x2")
@pytest.mark.parametrize(("search", "target"), [(False, "v5e:2x4"), (True, "v5e:2x2")])
def test_a_mixture_is_planned_as_the_text_that_it_mixes(tiny_config, search, target):
    bindings = [
        "Train.data = @Mixture()",
        "Mixture.data = @TextData()",
        "Mixture.sources = {'code': 'src', 'web': 'pages'}",
        "Mixture.weights = {'code': 0.75, 'web': 0.25}",
        "Mixture.stages = {2: {'code': 0.5, 'web': 0.5}}",
        "TextData.source = 'embedded'",
    ]
    text, mixture = (
        plan(load_config(tiny_config, some), target=target, compile=False, search=search)
        for some in ([], bindings)
    )
    assert mixture.to_json()["memory"] == text.to_json()["memory"]


@pytest.mark.slow_cases("zero_bubble")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_a_pipeline_whose_layers_do_not_divide_is_planned(schedule):
    """12 layers on 8 stages: the longest has 2, the others are padded to that."""
    sizes = ["Mesh.data = 1", "Mesh.pipe = 8", "Train.accumulation = 1"]
    more = ["Pipeline.microbatches = 16", f"Pipeline.schedule = '{schedule}'"]
    config = load_config("gpt2_124m", [*sizes, *more])
    report = plan(config, target="v5e:2x4", compile=False)
    assert report.time.bubble is not None
    assert report.time.bubble > 0
    assert {row.axis for row in report.rows} == {"pipe"}
    waiting = report.estimate.parts["pipeline: inputs and gradients of stages"]
    # Rows of a microbatch x T x D in bfloat16; GPipe keeps all 16 microbatches' inputs.
    stream = 480 // 16 * 1024 * 768 * 2
    kept = waiting // stream
    assert kept >= 16 if schedule == "gpipe" else kept <= 16


# The test before plans a pipeline of text.
@pytest.mark.slow
def test_a_pipeline_of_patches_is_planned():
    """196 patches and the class token of ViT-B/16 cross the boundary, 8 images at a time."""
    sizes = ["Mesh.fsdp = 2", "Mesh.pipe = 2", "Pipeline.microbatches = 4"]
    images = ["ImageData.image_size = 224", "ViT.image_size = 224", "ViT.patch_size = 16"]
    wide = ["ViT.embed_dim = 768", "ViT.num_layers = 12", "ViT.num_heads = 12"]
    config = load_config("vit_digits", [*sizes, *images, *wide])
    report = plan(config, target="v5e:2x2", compile=False)
    stream = 64 // 2 // 4 * (196 + 1) * 768 * 4
    crossed = {row.cause: row.bytes for row in report.rows if "boundary" in row.cause}
    assert crossed == {
        "pipeline boundary, forward": 4 * stream, "pipeline boundary, backward": 4 * stream
    }  # fmt: skip
    # Of 1F1B's inputs 2 p - 2 wait on a rank, and the gradient that goes back next.
    waiting = report.estimate.parts["pipeline: inputs and gradients of stages"]
    assert waiting == (2 * 2 - 2 + 1) * stream
    assert report.time.bubble is not None
    assert report.time.bubble > 0


@pytest.mark.slow
def test_a_search_whose_first_layouts_do_not_compile_shows_one_that_may_run(
    llama_file, monkeypatch
):
    """Of made results: the compiler rejects all but the ninth layout, or as many as are tried."""
    tried, real, fits_from = [], plans._plan, 8

    def compiled(config, machine, effort, **more):
        found = real(config, machine, "none", **more)
        if effort == "none":
            return found
        error = None if len(tried) >= fits_from else "RESOURCE_EXHAUSTED"
        tried.append(config)
        made = Compiled(0, 2**30, None, 0, 0, error, "", (), 0.0)
        return dataclasses.replace(found, compiled=made)

    monkeypatch.setattr(plans, "_plan", compiled)
    monkeypatch.setattr(plans, "search_layouts", functools.cache(plans.search_layouts))
    config = load_config(llama_file)
    for fits_from, count in ((8, 9), (99, 4 * COMPILED)):
        tried.clear()
        found = plan(config, "v5e:2x2", search=True)
        best = found.found.candidates[0]
        assert found.fits
        assert best.fits
        assert found.config == best.config
        assert len(tried) == count
        assert (found.compiled is None) == (fits_from == 99)


AGAIN = """ENTRY main {
  %fusion.7 = f32[8]{0} fusion(%a), kind=kLoop, metadata={op_name="jvp/remat.1"}
  %fusion.7.remat = f32[8]{0} fusion(%a), kind=kLoop
  ROOT %add_fusion.3.remat2.1 = f32[8]{0} fusion(%fusion.7.remat), kind=kLoop
}"""


# Plans a whole search; test_planning_search.py has searches in the fast part.
@pytest.mark.slow
def test_a_search_goes_on_where_a_compiler_does_work_again(llama_file, monkeypatch):
    """Of made results: in the first four programs two operations are there twice."""
    tried, real = [], plans._plan

    def compiled(config, machine, effort, **more):
        found = real(config, machine, "none", **more)
        tried.append(config)
        text = AGAIN if len(tried) <= 4 else ""
        made = Compiled(0, 2**30, None, 0, 0, None, text, (), 0.0)
        return dataclasses.replace(found, compiled=made)

    monkeypatch.setattr(plans, "_plan", compiled)
    found = plan(load_config(llama_file), "v5e:2x2", search=True)
    assert len(tried) == 2 * COMPILED
    compiled_ones = found.found.candidates[: 2 * COMPILED]
    assert all(one.compiled_bytes is not None for one in compiled_ones)
    for text, count in ((AGAIN, 2), ("", 0)):
        made = dataclasses.replace(found, compiled=Compiled(0, 0, None, 0, 0, None, text, (), 0.0))
        assert made.repeated == count
        assert (
            sum("rematerializes 2 operations by itself" in words for words in made.advice)
            == count / 2
        )


@pytest.mark.parametrize("fsdp", [-1, 64])
def test_slices_are_joined_by_the_network(fsdp):
    """Sizes that are written are of all slices, 2 x 64 chips, as those that are left open."""
    bindings = ["Mesh.data = 2", "Mesh.dcn = {'data': 2}", "Train.global_batch_size = 1024"]
    bindings.append(f"Mesh.fsdp = {fsdp}")
    config = load_config("llama_8b", ["Attention.kernel = 'tpu'", *bindings])
    report = plan(config, target="v5p:4x4x4", compile=False)
    assert report.devices == 128
    links = {row.axis: row.link for row in report.rows}
    assert links["fsdp"] == "ici"
    assert {link for axis, link in links.items() if "data" in axis} == {"dcn"}


# Compiles a step; what is printed is in the fast part.
@pytest.mark.slow
def test_the_command_writes_what_it_prints(tiny_config, tmp_path, capsys):
    files = ["--json", str(tmp_path / "plan.json"), "--png", str(tmp_path / "plan.png")]
    assert main(["plan", str(tiny_config), "--target", "cpu:8", *files]) == 0
    assert "Memory of one device" in capsys.readouterr().out
    assert set(json.loads((tmp_path / "plan.json").read_text())) >= KEYS
    assert (tmp_path / "plan.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "v9z:2x2"], "no chip 'v9z'"),
        (["--target", "v5e:3x3"], "the nearest is 'v5e:2x4'"),
        (["--target", "cpu:8", "-b", "Mesh.tensor=3"], "set Mesh.tensor=4"),
        (["--target", "cpu:8", "--json", "no/such/plan.json"], "there is no folder"),
        ([], "--target is missing"),
        (["--budget", "-1"], "above 0"),
    ],
)
def test_mistakes_get_a_sentence(arguments, said, tiny_config, capsys):
    assert main(["plan", str(tiny_config), *arguments, "-b", "Mesh.data=1"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_sizes_that_do_not_divide_get_their_padding(tiny_config, capsys):
    bindings = ["-b", "GPT.num_heads=2", "-b", "Mesh.data=1", "-b", "Mesh.tensor=4"]
    assert main(["plan", str(tiny_config), "--target", "cpu:8", *bindings]) == 2
    assert 'With this padding the sizes divide: -b "GPT.num_heads = 4"' in capsys.readouterr().err


def test_what_is_whole_without_need_is_named():
    config = load_config("gpt2_124m", ["Mesh.data = 1", "Mesh.fsdp = 8", "Sharding.zero = 1"])
    advice = plan(config, target="v5e:2x4", compile=False).advice
    assert any("token_embedding" in one and "Sharding.zero = 3" in one for one in advice)


def test_a_kernel_of_another_chip_is_refused():
    config = load_config("llama_8b", ["Attention.kernel = 'cudnn'"])
    with pytest.raises(UserError, match="cudnn"):
        plan(config, target="v5p:4x4x4", compile=False)


def test_running_out_of_memory_is_explained():
    from jaxtrain.analysis.planning.advice import explain, is_out_of_memory

    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.numpy.zeros((2**46,)).block_until_ready()
    assert is_out_of_memory(error.value)
    changes = ["Mesh.data = 8", "Attention.kernel = 'xla'", "Remat.policy = 'dots'"]
    config = load_config("gpt2_124m", [*changes, "Train.accumulation = 5"])
    said = explain(config, str(error.value))
    assert said.startswith("out of memory: RESOURCE_EXHAUSTED")
    assert "By closed forms a device needs" in said
    assert "Remat.policy='full'" in said
    assert "Attention.kernel='blocked'" in said  # which makes no scores of a whole row


@needs_libtpu
def test_running_out_of_a_tpu_s_vector_memory_is_no_matter_of_the_model_s_size():
    from jaxtrain.analysis.planning.advice import explain, is_out_of_memory

    device = target_devices(parse_target("v5e:2x2"))[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    shape = jax.ShapeDtypeStruct((1024, 1024), jax.numpy.bfloat16, sharding=sharding)
    lowered = jax.jit(jax.numpy.matmul).lower(shape, shape)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        lowered.compile({"xla_tpu_scoped_vmem_limit_kib": "1"})
    assert is_out_of_memory(error.value)
    said = explain(load_config("llama_8b"), str(error.value))
    assert said.startswith("out of vector memory")
    assert "Ran out of memory in memory space vmem" in said
    assert "LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=16384" in said
    assert "fixes" not in said
