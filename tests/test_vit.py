"""ViT equals the transformers library's, and on a mesh one device."""

import dataclasses
import functools

import numpy as np
import pytest
from against_torch import Twin, assert_same_step, step_on
from tiny_models import count_parameters

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.transformers.vit import ViT
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.pipeline.schedules import Pipeline


def images(sizes: ViT, *, rows: int = 8) -> Batch:
    rng = np.random.default_rng(2)
    shape = (rows, sizes.image_size, sizes.image_size, sizes.channels)
    labels = rng.integers(0, sizes.num_classes, rows).astype(np.int32)
    mask = (np.arange(rows) % 4 > 0).astype(np.float32)
    return Batch(rng.normal(size=shape).astype(np.float32), labels, mask)


def twin(sizes: ViT) -> Twin:
    """With the values of a random ViTForImageClassification."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=sizes.embed_dim, num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads, intermediate_size=sizes.mlp_dim, hidden_act="gelu",
        layer_norm_eps=sizes.norm_eps, image_size=sizes.image_size, patch_size=sizes.patch_size,
        num_channels=sizes.channels, num_labels=sizes.num_classes, qkv_bias=True,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    inner = transformers.ViTForImageClassification(config)
    for value in inner.parameters():  # biases away from 0, where errors would not show
        torch.nn.init.normal_(value, std=0.2)

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x).logits

    return Stacked(sizes, Network(), ours=lambda name: name)


QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
OUT, UP, DOWN = "attention.o_proj", "mlp.fc1", "mlp.fc2"


class Stacked(Twin):
    """Their layers, one under another, are ours on a leading dimension."""

    def taken(self, named):
        of = {n.removeprefix("inner."): np.array(v.detach()) for n, v in named if v is not None}
        if not of:
            return {}
        sizes, found = self.sizes, {}
        D, N, H = sizes.embed_dim, sizes.num_heads, sizes.embed_dim // sizes.num_heads

        def layers(part, kind):
            names = [n for n in of if ".layer" in n and n.endswith(f"{part}.{kind}")]
            assert len(names) == sizes.num_layers, (part, kind, list(of))
            return np.stack([of[n] for n in names])

        def pick(part):
            (name,) = [n for n in of if n.endswith(part)]
            return of[name]

        kernel = pick("patch_embeddings.projection.weight")  # [D, C, S, S]
        found["patches"] = kernel.transpose(2, 3, 1, 0).reshape(-1, D)
        found["patches_bias"] = pick("patch_embeddings.projection.bias")
        found["class_token"] = pick("cls_token")[0, 0]
        found["position_embedding"] = pick("position_embeddings")[0]
        qkv = [layers(part, "weight") for part in QKV]
        found["layers/qkv"] = np.stack([w.transpose(0, 2, 1).reshape(-1, D, N, H) for w in qkv], 1)
        found["layers/qkv_bias"] = np.stack(
            [layers(part, "bias").reshape(-1, N, H) for part in QKV], 1
        )
        for ours, theirs, shape in (
            ("out", OUT, (-1, N, H, D)), ("up", UP, (-1, D, sizes.mlp_dim)),
            ("down", DOWN, (-1, sizes.mlp_dim, D)),
        ):  # fmt: skip
            found[f"layers/{ours}"] = layers(theirs, "weight").transpose(0, 2, 1).reshape(shape)
            found[f"layers/{ours}_bias"] = layers(theirs, "bias")
        for ours, theirs in (("attention", "before"), ("mlp", "after")):
            for kind, name in (("weight", "scale"), ("bias", "bias")):
                found[f"layers/{ours}_norm_{name}"] = layers(f"layernorm_{theirs}", kind)
        found["norm_scale"] = pick("vit.layernorm.weight")
        found["norm_bias"] = pick("vit.layernorm.bias")
        found["head/weight"] = pick("classifier.weight").T
        found["head/bias"] = pick("classifier.bias")
        return found


SHAPES = {
    "small": ViT(num_classes=10, channels=3, image_size=16, patch_size=4, num_layers=2,
                 embed_dim=32, num_heads=4, mlp_dim=64),
    "odd": ViT(num_classes=3, channels=1, image_size=15, patch_size=5, num_layers=3,
               embed_dim=18, num_heads=3, mlp_dim=20),
    "one_patch": ViT(num_classes=7, channels=3, image_size=8, patch_size=8, num_layers=1,
                     embed_dim=16, num_heads=2, mlp_dim=24),
}  # fmt: skip


# The cases that are left run the same code.
@pytest.mark.slow_cases("small", "one_patch")
@pytest.mark.parametrize("name", SHAPES)
def test_outputs_and_every_gradient_equal_transformers(name):
    torch = pytest.importorskip("torch")
    sizes = SHAPES[name]
    batch, pair = images(sizes), twin(sizes)
    counted = np.flatnonzero(batch.loss_mask)
    targets = torch.tensor(batch.targets[counted]).long()
    pair.compare(
        batch,
        torch.tensor(batch.inputs.transpose(0, 3, 1, 2)),
        lambda x: torch.nn.functional.cross_entropy(x[counted], targets),
    )


@pytest.mark.slow
def test_thirty_steps_have_the_losses_of_transformers():
    torch = pytest.importorskip("torch")
    sizes = ViT(num_classes=4, channels=2, image_size=14, patch_size=7, num_layers=2,
                embed_dim=15, num_heads=3, mlp_dim=22)  # fmt: skip
    batch = images(sizes)
    counted = np.flatnonzero(batch.loss_mask)
    targets = torch.tensor(batch.targets[counted]).long()
    twin(sizes).train(
        batch,
        torch.tensor(batch.inputs.transpose(0, 3, 1, 2)),
        lambda x: torch.nn.functional.cross_entropy(x[counted], targets),
        rate=0.02,
        falls=0.3,
    )


def test_flops_and_parameters_are_the_published_ones():
    """86,567,656 parameters and 17.56 giga multiply-adds, as torchvision lists of vit_b_16."""
    sizes = ViT()
    assert count_parameters(sizes) == 86_567_656
    assert sizes.flops((224, 224, 3)) / 6e9 == pytest.approx(17.56, abs=0.02)


# -- meshes ----------------------------------------------------------------------------------------


ON_MESH = ViT(num_classes=16, channels=1, image_size=8, patch_size=4, num_layers=2, embed_dim=32,
              num_heads=4, mlp_dim=64)  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    return step_on(ON_MESH, images(ON_MESH))


# Compiles two steps; test_parity_matrix.py has a transformer's mesh in the fast part.
@pytest.mark.slow
def test_a_mesh_computes_the_same(alone):
    found = step_on(ON_MESH, images(ON_MESH), data=2, fsdp=2, tensor=2, zero=2)
    assert_same_step(found, alone)


def mixed() -> Batch:
    """Images with two labels each, as of CutMix; one that does not count is no number."""
    batch = images(ON_MESH)
    inputs, part = batch.inputs.copy(), np.linspace(0.1, 0.9, 8, dtype=np.float32)
    inputs[4, 0, 0] = np.nan
    assert batch.loss_mask[4] == 0
    labels = np.stack([batch.targets, (batch.targets * 7 + 3) % ON_MESH.num_classes], -1)
    mask = batch.loss_mask[:, None] * np.stack([part, 1 - part], -1)
    return Batch(inputs, labels.astype(np.int32), mask)


SMOOTHED = Loss(label_smoothing=0.1, z_weight=1e-3)


@functools.cache
def mixed_alone(layers: int):
    sizes = dataclasses.replace(ON_MESH, num_layers=layers)
    return sizes, step_on(sizes, mixed(), changes={"loss": SMOOTHED})


PIPELINES = {
    "uneven_zero_bubble_residuals": (
        3, {"pipe": 2, "tensor": 2, "data": 2, "accumulation": 2},
        {"schedule": "zero_bubble", "microbatches": 2, "backward": "residuals"},
    ),
    "dualpipe_v": (
        4, {"pipe": 2, "fsdp": 2}, {"schedule": "dualpipe_v", "virtual_stages": 2,
                                    "microbatches": 4},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", PIPELINES)
def test_schedules_compute_the_same_of_mixed_labels(case):
    """Whose first and last stages lie on other ranks, on one rank, and are of other lengths."""
    layers, layout, pipeline = PIPELINES[case]
    sizes, expected = mixed_alone(layers)
    changes = {"loss": SMOOTHED, "pipeline": Pipeline(**pipeline)}
    assert_same_step(step_on(sizes, mixed(), changes=changes, **layout), expected)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"patch_size": 15}, "ViT.image_size=224 does not divide by ViT.patch_size=15"),
        ({"num_heads": 7}, "ViT.embed_dim=768 does not divide by ViT.num_heads=7"),
        ({}, "ViT.image_size=224, but the images have 28 x 28 pixels; set ViT.image_size=28"),
    ],
)
def test_refusals(changes, sentence):
    with pytest.raises(UserError) as refusal:
        ViT(**changes).flops((28, 28, 1))
    assert sentence in str(refusal.value)
