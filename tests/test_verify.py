"""`jaxtrain verify` proves what holds, fails what is broken, and keeps every choice it shrinks."""

import dataclasses
import itertools
import json
import math

import html_pages
import jax
import pytest

import jaxtrain.training.setup
from jaxtrain.__main__ import main
from jaxtrain.analysis.verify import verify as verification
from jaxtrain.analysis.verify.meshes import choose_meshes
from jaxtrain.analysis.verify.proofs import claims
from jaxtrain.analysis.verify.shrink import shrink
from jaxtrain.config.shipped import configs_folder
from jaxtrain.nn.attention.kernel_registry import KERNELS
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.run.checkpoint import metadata, saved
from jaxtrain.training.objectives.language_modeling import NextToken
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config
from jaxtrain.training.setup import Setup

SMALL = ["-b", "Mesh.fsdp = 2", "-b", "Mesh.tensor = 1", "-b", "Mesh.data = 1"]
SHIPPED = sorted(path.stem for path in configs_folder().glob("*.gin"))
COLUMNS = ["proof", "measured", "limit", "verdict", "seconds", "what", "(figures)"]
OF_TEXT = [
    "initial", "mesh", "precision", "accumulation", "packing", "isolation", "resume", "kernel",
    "execution",
]  # fmt: skip
OF_IMAGES = ["initial", "mesh", "precision", "accumulation", "resume"]


@pytest.fixture
def prove(monkeypatch, tmp_path, capsys):
    """Runs the command, or only these proofs of it: its status, its verdicts, and its JSON."""

    def run(config, *arguments, only=None):
        if only is not None:
            monkeypatch.setattr(
                verification, "claims", lambda bench: (c for c in claims(bench) if c.proof in only)
            )
        file = tmp_path / "verify.json"
        status = main(["verify", str(config), *arguments, "--json", str(file)])
        written = json.loads(file.read_text())
        return status, {p["proof"]: p["verdict"] for p in written["proofs"]}, written

    run.capsys = capsys
    return run


# -- what holds -----------------------------------------------------------------------------------


def test_a_config_is_proved_and_the_table_says_how(prove, tmp_path):
    page = tmp_path / "verify.html"
    status, verdicts, written = prove("gpt_quickstart", "--html", str(page))
    out = prove.capsys.readouterr().out
    proofs = [name for name in OF_TEXT if name != "precision"]  # its own is float32
    assert status == 0
    assert verdicts == dict.fromkeys(proofs, "proved")
    assert "shrunk: GPT.embed_dim = 128 -> 16" in out
    assert "mesh: fsdp=4 x tensor=2" in out
    assert "\x1b[" not in out  # plain where it is no terminal
    lines = [line.split() for line in out.splitlines()]
    assert COLUMNS in lines
    printed = {line[0]: line[3] for line in lines if line[0] in proofs}
    assert printed == verdicts
    assert set(written) == {
        "config", "passed", "seconds", "meshes", "pairs_left_out", "shrunk", "proofs",
    }  # fmt: skip
    assert written["config"] == "gpt_quickstart"
    assert written["passed"] is True
    assert written["meshes"] == [
        {"pipe": 1, "data": 1, "fsdp": 4, "expert": 1, "context": 1, "tensor": 2}
    ]
    for proof in written["proofs"]:
        assert set(proof) == {
            "proof", "what", "measured", "limit", "verdict", "seconds", "detail",
        }  # fmt: skip
        assert 0 <= proof["measured"] <= proof["limit"]
    shown = html_pages.read(page)
    assert [text for text in shown.texts("td") if text in verdicts] == proofs
    assert shown.texts("td").count("proved") == len(proofs)
    assert {written["seconds"], float(len(proofs))} <= shown.values().keys()
    entries = shown.texts("li")
    assert "shrunk: GPT.embed_dim = 128 -> 16" in entries
    assert "mesh: fsdp=4 x tensor=2" in entries
    cells = set(shown.texts("td"))
    for proof in written["proofs"]:
        assert {f"{proof['what']} ({proof['detail']})", f"{proof['measured']:.2g}"} <= cells


# Of a model that another case has on another mesh: what does not compute on one device alone.
ON_MESH = ("initial", "mesh", "precision", "resume", "exchange")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "bindings", "only"),
    [
        ("mixtral_8x7b", [], None),
        ("lstm_quickstart", [], None),
        ("gpt2_124m", ["Sharding.zero = 2", "Mesh.fsdp = 2", "Mesh.context = 2"], None),
        (
            "llama_8b",
            ["Attention.kernel = 'tpu'", "Llama.sliding_window = 1024",
             "Precision.matmul = 'int8'", "Mesh.tensor = 8"],
            None,
        ),
        (
            "llama_8b",
            ["Mesh.pipe = 4", "Mesh.tensor = 8", "Mesh.context = 2", "Train.accumulation = 1",
             "Pipeline.microbatches = 8", "Pipeline.schedule = 'interleaved'",
             "Pipeline.virtual_stages = 2", "Attention.context_parallel = 'ulysses'"],
            (*ON_MESH, "packing", "isolation"),
        ),
        (
            "gpt_quickstart",
            ["Mesh.data = 2", "Exchange.method = 'diloco'", "Exchange.period = 2",
             "Mesh.tensor = 4", "Sharding.tensor_layout = '2d'"],
            ON_MESH,
        ),
    ],
    ids=["experts", "recurrent", "rows_of_one_text", "kernel_window_int8", "pipe",
         "2d_replicas"],
)  # fmt: skip
def test_every_kind_of_config_is_proved(prove, config, bindings, only):
    words = [word for binding in bindings for word in ("-b", binding)]
    status, verdicts, _ = prove(config, *words, only=only)
    assert (status, set(verdicts.values()) - {"not checked"}) == (0, {"proved"})
    packed = config != "gpt2_124m"  # its rows are one text
    assert [name for name, verdict in verdicts.items() if verdict == "not checked"] == (
        [] if packed else ["packing", "isolation"]
    )
    assert {"initial", "mesh", "resume"} <= set(verdicts)
    assert ("exchange" in verdicts) == any("Exchange" in binding for binding in bindings)


@pytest.mark.slow
def test_a_cnn_is_proved_with_its_statistics(prove):
    status, verdicts, written = prove("resnet50_imagenet", "-b", "ResNet.depth = 18")
    assert (status, verdicts) == (0, dict.fromkeys(OF_IMAGES, "proved"))
    (mesh,) = [proof for proof in written["proofs"] if proof["proof"] == "mesh"]
    assert "statistics" in mesh["detail"]


@pytest.mark.slow
def test_a_pipeline_of_patches_is_proved(prove):
    """Six layers on four stages; float32, of which there is no `precision`."""
    bindings = ["Mesh.pipe = 2", "Mesh.fsdp = 4", "Pipeline.microbatches = 4",
                "Pipeline.schedule = 'interleaved'", "Pipeline.virtual_stages = 2",
                "ViT.num_layers = 6"]  # fmt: skip
    words = [word for binding in bindings for word in ("-b", binding)]
    status, verdicts, written = prove("vit_digits", *words)
    expected = [name for name in OF_IMAGES if name != "precision"]
    assert (status, verdicts) == (0, dict.fromkeys(expected, "proved"))
    (mesh,) = written["meshes"]
    assert mesh["pipe"] == 2


# -- what is broken -------------------------------------------------------------------------------


def test_a_gradient_that_is_reduced_twice_fails_the_mesh(prove, tiny_config, monkeypatch):
    right = Setup.gradients

    def twice(setup, state, batch, counts=None):
        grads, metrics, statistics = right(setup, state, batch, counts)
        factor = 2.0 if setup.layout.mesh.size > 1 else 1.0
        return jax.tree.map(lambda g: g * factor, grads), metrics, statistics

    monkeypatch.setattr(Setup, "gradients", twice)
    status, verdicts, written = prove(tiny_config, *SMALL, only=["initial", "mesh"])
    assert status == 1
    assert verdicts == {"initial": "proved", "mesh": "FAILED"}
    assert written["passed"] is False
    assert written["proofs"][1]["measured"] == pytest.approx(1.0)
    assert "1 FAILED" in prove.capsys.readouterr().out


def test_a_mean_of_microbatch_means_fails_accumulation(prove, tiny_config, monkeypatch):
    """Every microbatch weighing the same, however many of its targets count."""
    split = jaxtrain.training.setup.split_microbatches

    def equal_weights(batch, count):
        micros = split(batch, count)
        mean = micros.loss_mask.sum() / count
        each = micros.loss_mask.sum((1, 2), keepdims=True)
        return dataclasses.replace(micros, loss_mask=micros.loss_mask * mean / each)

    monkeypatch.setattr(jaxtrain.training.setup, "split_microbatches", equal_weights)
    status, verdicts, _ = prove(tiny_config, *SMALL, only=["accumulation"])
    assert (status, verdicts) == (1, {"accumulation": "FAILED"})


def test_a_mask_without_segments_fails_packing_and_isolation(prove, tiny_config, monkeypatch):
    monkeypatch.setattr(NextToken, "mask", lambda self, batch: Mask())
    status, verdicts, _ = prove(tiny_config, *SMALL, only=["packing", "isolation"])
    assert (status, verdicts) == (1, {"packing": "FAILED", "isolation": "FAILED"})


@pytest.mark.slow_cases("position")
@pytest.mark.parametrize("broken", ["array", "position"])
def test_a_restore_that_is_not_exact_fails_resume(prove, tiny_config, monkeypatch, broken):
    restored, describe = saved.restore, metadata.describe

    def one_array_off(*arguments):
        state = restored(*arguments)
        leaves, form = jax.tree.flatten(state)
        # The smallest of changes, in the last array but the loss scale: a parameter or a moment.
        place = max(range(len(leaves)), key=lambda i: leaves[i].size)
        leaves[place] = leaves[place] * (1 + 2**-23)
        return jax.tree.unflatten(form, leaves)

    def one_batch_back(*arguments):
        extra = describe(*arguments)
        return {**extra, "data": {**extra["data"], "next_batch": extra["data"]["next_batch"] - 1}}

    if broken == "array":
        monkeypatch.setattr(saved, "restore", one_array_off)
    else:
        monkeypatch.setattr(metadata, "describe", one_batch_back)
    status, verdicts, _ = prove(tiny_config, *SMALL, only=["initial", "resume"])
    assert (status, verdicts) == (1, {"initial": "proved", "resume": "FAILED"})


def test_a_kernel_that_is_off_fails_the_kernel_and_the_execution(prove, tiny_config, monkeypatch):
    right = KERNELS["blocked"]  # what 'auto' means here
    off = dataclasses.replace(right, run=lambda *of: right.run(*of) + 1e-2)
    monkeypatch.setitem(KERNELS, "blocked", off)
    status, verdicts, _ = prove(tiny_config, *SMALL, only=["kernel", "execution"])
    assert (status, verdicts) == (1, {"kernel": "FAILED", "execution": "FAILED"})


@pytest.mark.slow
def test_gradients_on_the_host_are_proved_beside_the_plain_mathematics(prove, tiny_config):
    """Which have no loop over the layers, and gradients go to the host one layer at a time."""
    host = ["-b", "Offload.gradients = 'host'", "-b", "Sharding.zero = 3"]
    status, verdicts, _ = prove(tiny_config, *SMALL, *host, only=["mesh", "execution"])
    assert (status, verdicts) == (0, {"mesh": "proved", "execution": "proved"})


def test_what_cannot_run_here_is_not_checked_and_says_why(prove, tiny_config):
    kernel = ["-b", "Attention.kernel = 'cudnn'", "-b", "TextData.separate_documents = False",
              "-b", "Precision.compute = 'bfloat16'"]  # fmt: skip
    only = ["kernel", "packing", "isolation"]
    status, verdicts, written = prove(tiny_config, *SMALL, *kernel, only=only)
    assert (status, verdicts) == (0, dict.fromkeys(only, "not checked"))
    assert "needs a GPU" in {p["proof"]: p["detail"] for p in written["proofs"]}["kernel"]
    assert "3 not checked" in prove.capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "llama_8bb"], "did you mean 'llama_8b'?"),
        (["verify", "gpt_quickstart", "-b", "Mesh.tensor = 3"], "does not divide over"),
        (["verify", "gpt_quickstart", "-b", "Train.accumulation = 3"], "the nearest multiple"),
        (["verify", "gpt_quickstart", "-b", "Pipeline.microbatches = 4"], "Mesh.pipe"),
        (["verify", "gpt_quickstart", "--json", "/nowhere/v.json"], "there is no folder /nowhere"),
    ],
)
def test_mistakes_exit_with_2_and_one_message(arguments, words, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("jaxtrain: ")
    assert words in captured.err


# -- how it is shrunk -----------------------------------------------------------------------------


def sizes_of(**axes: float) -> dict[str, float]:
    return dict.fromkeys(MESH_AXES, 1) | axes


@pytest.mark.parametrize(
    ("own", "small"),
    [
        ({}, {}),
        ({"fsdp": 64}, {"fsdp": 8}),
        ({"fsdp": math.inf}, {"fsdp": 8}),
        ({"data": 2}, {"data": 2}),  # never more than the user has
        ({"tensor": 8, "fsdp": 32}, {"fsdp": 4, "tensor": 2}),
        ({"tensor": 8, "fsdp": 2}, {"fsdp": 2, "tensor": 4}),
        ({"pipe": 4, "fsdp": 2, "tensor": 8}, {"pipe": 2, "fsdp": 2, "tensor": 2}),
        ({"pipe": 3}, {"pipe": 2}),
    ],
)
def test_a_mesh_keeps_its_axes_within_eight_devices(own, small):
    assert choose_meshes(sizes_of(**own)) == ([sizes_of(**small)], [])


@pytest.mark.parametrize("count", [4, 5, 6])
def test_many_axes_are_covered_by_few_meshes(count):
    for axes in itertools.combinations(MESH_AXES, count):
        meshes, left_out = choose_meshes(sizes_of(**dict.fromkeys(axes, 16)))
        assert len(meshes) <= 3
        assert all(math.prod(mesh.values()) == 8 for mesh in meshes)
        on = [{axis for axis, size in mesh.items() if size > 1} for mesh in meshes]
        assert set().union(*on) == set(axes)
        together = {frozenset(p) for mesh in on for p in itertools.combinations(sorted(mesh), 2)}
        every = {frozenset(pair) for pair in itertools.combinations(axes, 2)}
        assert every - together == {frozenset(pair) for pair in left_out}
        assert len(left_out) == {4: 0, 5: 2, 6: 7}[count]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_shrinks_to_one_that_runs(name):
    own = load_config(name)
    verification.validate(own)
    small = shrink(own)
    for sizes in small.meshes:
        config = small.on(sizes)
        preflight.check(config, device_count=math.prod(sizes.values()), platform="cpu")
        # Whatever selects code stays as it was.
        for section in ("sharding", "remat", "optimizer", "schedule", "exchange"):
            assert getattr(config, section) == getattr(own, section)
        assert type(config.train.model) is type(own.train.model)


def test_ratios_and_choices_of_a_model_stay():
    bindings = [
        "Llama.sliding_window = 2048",
        "Llama.tie_embeddings = True",
        "Llama.num_layers = 30",
        "Mesh.tensor = 16",
        "Mesh.pipe = 4",
        "Pipeline.microbatches = 10",
        "Train.accumulation = 1",
        "Train.global_batch_size = 640",
    ]
    own = load_config("llama_8b", bindings)
    verification.validate(own)
    small = shrink(own)
    model = small.config.train.model
    assert model.num_heads // model.num_kv_heads == 4
    assert model.num_kv_heads == 1  # fewer than tensor ranks, as 8 of 16
    assert model.sliding_window == 32 * 2048 // 8192
    assert model.tie_embeddings
    assert model.num_layers % 2 == 1  # 30 layers do not divide over 4 stages either
    assert model.mlp_dim / model.embed_dim == pytest.approx(14336 / 4096)
    (mesh,) = small.meshes
    assert (mesh["pipe"], mesh["tensor"], mesh["fsdp"]) == (2, 2, 2)
    assert small.on(mesh).pipeline.microbatches % 2 == 1  # nor 10 microbatches over 4 ranks
    changed = {change.setting: change.small for change in small.changes()}
    assert changed["Pipeline.microbatches"] == 3
    assert changed["Train.global_batch_size"] == small.config.train.global_batch_size


def test_layers_that_the_small_model_has_not_are_not_asked_for():
    rates = {"layers/*[3:4]": 0.5, "embedding": 0.1}
    own = load_config(
        "gpt_quickstart",
        [f"Optimizer.learning_rates={rates!r}", "Finetune.unfreeze={'layers/*[0:3]': 10}"],
    )
    small = shrink(own)
    assert small.config.train.model.layers < 4
    preflight.check(small.config, device_count=1, platform="cpu")
    assert small.config.optimizer.learning_rates == {"embedding": 0.1}
    shown = {change.setting for change in small.changes()}
    assert {"Optimizer.learning_rates", "Finetune.unfreeze"} <= shown
