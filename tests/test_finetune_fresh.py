"""New parts of a model are drawn as ever, the others come from where the run starts."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.family import family_for, their_shapes
from jaxtrain.models.weights.formats.safetensors import write
from jaxtrain.run.huggingface.parameters import shapes_of
from jaxtrain.run.trainer import Trainer
from jaxtrain.training import layouts
from jaxtrain.training.compose import compose
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config


@pytest.fixture(scope="module")
def source(tiny_config, tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """A run of one step, and its weights."""
    folder = tmp_path_factory.mktemp("fresh") / "run"
    trainer = Trainer(load_config(tiny_config, ["Train.steps=1", "Train.seed=5"]), folder)
    trainer.train()
    trainer.close()
    return folder, trainer.weights()


# The same random numbers; what makes them normal is fused otherwise: units of the last place.
ROUNDING = 2**-22

MESHES = {
    "tensor": [],
    "pipe": ["Mesh.pipe=2", "Mesh.data=1", "Pipeline.microbatches=2"],
}


@pytest.mark.slow_cases("tensor")
@pytest.mark.parametrize("mesh", MESHES)
def test_named_parts_are_drawn_and_the_others_are_the_runs(mesh, source, tiny_config):
    folder, weights = source
    # Positions for twice the length, which the source does not have, and a matrix of the layers.
    own = ["GPT.context_length=64", *MESHES[mesh]]
    start = [f"Train.start_from={str(folder)!r}"]
    fresh = ["Finetune.reinitialize=('position_embedding', 'layers/u?')"]
    found = Trainer(load_config(tiny_config, [*own, *start, *fresh])).weights()
    drawn = Trainer(load_config(tiny_config, own)).weights()
    for name, value in found.items():
        if name in ("position_embedding", "layers/up"):
            np.testing.assert_allclose(value, drawn[name], rtol=2 * ROUNDING)
        else:
            np.testing.assert_array_equal(value, weights[name])
    assert found["position_embedding"].shape[0] == 64
    assert not np.array_equal(drawn["layers/up"], weights["layers/up"])


def test_what_is_missing_and_not_named_is_refused(source, tiny_config):
    start = [f"Train.start_from={str(source[0])!r}", "Finetune.reinitialize=('layers/up',)"]
    with pytest.raises(UserError, match=r"GPT\.context_length = 32 when it was written"):
        Trainer(load_config(tiny_config, ["GPT.context_length=64", *start]))


def test_a_hugging_face_folder_may_lack_them_or_hold_others(tiny_config, tmp_path):
    config = load_config(tiny_config)
    model = config.train.model
    family, said = family_for(model, None)
    content = {**said, "architectures": [family.architecture], "model_type": family.model_type}
    (tmp_path / "config.json").write_text(json.dumps(content))
    program = compose(config, layouts.layout(config)).setup
    lines = [line for line in family.names(model) if line.ours != "layers/down"]
    shapes = their_shapes(lines, shapes_of(program))
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    write(tmp_path / "model.safetensors", shapes, "F32", values.values())
    start = [f"Train.start_from={str(tmp_path)!r}", "GPT.vocab_size=320"]
    fresh = ["Finetune.reinitialize=('token_embedding', 'layers/down')"]
    found = Trainer(load_config(tiny_config, [*start, *fresh])).weights()
    drawn = Trainer(load_config(tiny_config, ["GPT.vocab_size=320"])).weights()
    for name in ("token_embedding", "layers/down"):
        np.testing.assert_allclose(found[name], drawn[name], rtol=2 * ROUNDING)
    np.testing.assert_array_equal(found["position_embedding"], values["transformer.wpe.weight"])
    with pytest.raises(UserError, match=r"mlp\.c_proj\.weight \[128, 32\] is missing"):
        Trainer(load_config(tiny_config, [*start, "Finetune.reinitialize=('token_embedding',)"]))


@pytest.mark.parametrize(
    ("bindings", "said"),
    [
        (["Finetune.reinitialize=('output',)", "Train.start_from='there'"], "matches no parameter"),
        (["Finetune.reinitialize=('layers/up',)"], r"use Finetune\.reinitialize=\(\)"),
    ],
)
def test_what_cannot_be_new_is_refused(bindings, said, tiny_config):
    with pytest.raises(UserError, match=said):
        preflight.check(load_config(tiny_config, bindings), device_count=8, platform="cpu")
