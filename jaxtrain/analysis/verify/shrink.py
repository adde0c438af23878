"""Shrink a configuration to eight simulated devices: small sizes, otherwise the same settings."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.analysis.verify.meshes import DEVICES, MeshSizes, choose_meshes
from jaxtrain.data.classed_rows import ClassedRows
from jaxtrain.data.images.source import ImageData
from jaxtrain.data.pairs.classed import ClassedText
from jaxtrain.data.pairs.source import PairData
from jaxtrain.data.text.source import TextData, text_of
from jaxtrain.data.vectors.sequences import SequenceData
from jaxtrain.data.vectors.source import VectorData
from jaxtrain.models.model import (
    AttentionFacts,
    ImageModel,
    TokenModel,
    VectorModel,
    features_of,
    reads_images,
    reads_pairs,
    reads_tokens,
    reads_vectors,
)
from jaxtrain.nn.attention.kernel_registry import KERNELS
from jaxtrain.nn.attention.patterns import Pattern
from jaxtrain.parallel.mesh import MESH_AXES, Mesh
from jaxtrain.parallel.sharding import Layout, Sharding
from jaxtrain.training import layouts
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.objectives.distillation import Distillation
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.objectives.tokens import reserved_tokens
from jaxtrain.training.optimizers.groups import part_of
from jaxtrain.training.optimizers.optimizer import Optimizer
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.settings import Config, Train

# Every dimension is a multiple of the device count, so that any axes can shard any dimension.
UNIT = DEVICES
VOCABULARY, HEAD_DIM, SEQUENCE, MAX_CHUNKS, MAX_GROUP, MAX_EXPERTS = 64, 8, 32, 4, 8, 4
CLASSES = 16
# The smallest published depth with the same stem, block type and number of stages.
DEPTHS = {34: 18, 56: 20, 32: 20, 101: 50, 152: 50, 13: 11, 16: 11, 19: 11}


@dataclasses.dataclass(frozen=True)
class Change:
    """Changed setting of a shrunk configuration.

    Attributes:
      setting: the gin name.
      own: the user's value.
      small: the value in the verification.
    """

    setting: str
    own: Any
    small: Any


@dataclasses.dataclass(frozen=True)
class Small:
    """Shrunk configuration and the meshes of its verification.

    Attributes:
      own: the user's configuration.
      config: the shrunk configuration, for one device.
      meshes: sizes of all axes of each mesh, at most 8 devices each; never empty.
      pairs_left_out: pairs of axes that the user's mesh combines but none of `meshes` does.
      pipeline: the shrunk pipeline settings, for meshes with pipeline stages.
    """

    own: Config
    config: Config
    meshes: tuple[MeshSizes, ...]
    pairs_left_out: tuple[tuple[str, str], ...]
    pipeline: Pipeline

    def on(self, sizes: MeshSizes) -> Config:
        """Return the shrunk configuration on a mesh, without settings of axes that it lacks."""
        config, own = self.config, self.own
        return dataclasses.replace(
            config,
            mesh=Mesh(**sizes, dcn=_dcn(own.mesh, sizes)),
            sharding=_sharding(own.sharding, sizes["tensor"]),
            pipeline=self.pipeline if sizes["pipe"] > 1 else Pipeline(),
            exchange=own.exchange if sizes["data"] > 1 else Exchange(),
        )

    def changes(self) -> list[Change]:
        """Return the settings that differ, except the mesh, in the order of the configuration."""
        shown = dataclasses.replace(
            self.config,
            mesh=dataclasses.replace(self.own.mesh, dcn=_dcn(self.own.mesh, {})),
            sharding=_sharding(self.own.sharding, max(mesh["tensor"] for mesh in self.meshes)),
            exchange=self.own.exchange,
            pipeline=self.pipeline,
        )
        return list(_differences(self.own, shown))


def shrink(own: Config) -> Small:
    """Shrink a configuration; see docs/verify.md for the rules."""
    sizes = {axis: _size(own.mesh, axis) for axis in MESH_AXES}
    layout = _layout(own, sizes)
    meshes, left_out = choose_meshes(
        sizes,
        tensor=_smallest_tensor(own.sharding),
        pipe=3 if layout.unstaged else 2,
    )
    if not math.isinf(sizes["fsdp"]) and layout.mesh.shape["fsdp"] != sizes["fsdp"]:
        meshes.append(dict.fromkeys(MESH_AXES, 1) | {"fsdp": 6})  # every size is divisible by 2
    most = {axis: max(mesh[axis] for mesh in meshes) for axis in MESH_AXES}
    pipeline = _pipeline(own.pipeline, sizes["pipe"], most["pipe"])
    accumulation = min(own.train.accumulation, 2)
    parts = [
        _batch_devices(own, mesh)
        * accumulation
        * (pipeline.microbatches if mesh["pipe"] > 1 else 1)
        for mesh in meshes
    ]
    # At least two microbatches of two rows; enough images for a well-conditioned batch norm.
    model = own.train.model
    rows = math.lcm(4 if reads_tokens(model) or reads_pairs(model) else 32, *parts)
    # The noise scale needs several microbatches, which not every proof has.
    train = dataclasses.replace(
        own.train, global_batch_size=rows, accumulation=accumulation, noise_scale_every=0
    )
    # Proofs compare arrays of the state; offloading to disk would not change the values.
    offload = own.offload
    if offload.optimizer_state == "disk":
        offload = dataclasses.replace(offload, optimizer_state="none")
    config = dataclasses.replace(
        own,
        train=train,
        offload=offload,
        # Proofs compare gradients of the first step; parameters that are still frozen have none.
        finetune=dataclasses.replace(own.finetune, unfreeze={}),
        optimizer=_optimizer(own.optimizer),
        mesh=Mesh(fsdp=1),
        sharding=_sharding(own.sharding, 1),
        pipeline=Pipeline(),
        exchange=Exchange(),
        precision=dataclasses.replace(
            own.precision,
            params="float32",
            compute="float32",
            gradients="float32",
            matmul="compute",
        ),
    )
    if reads_tokens(model):
        config = _text(config, own, model, sizes, most, pipeline.virtual_stages)
    elif reads_pairs(model):
        config = _pairs(config, own, model, sizes, most, pipeline.virtual_stages)
    elif reads_images(model):
        config = _images(config, own, model, sizes, most, pipeline.virtual_stages)
    elif reads_vectors(model):
        config = _vectors(config, own, model)
    return Small(own, config, tuple(meshes), tuple(left_out), pipeline)


def _optimizer(own: Optimizer) -> Optimizer:
    """Remove learning rates of individual layers, which the small model may lack."""
    whole = {name: x for name, x in own.learning_rates.items() if part_of(name).is_whole}
    return dataclasses.replace(own, learning_rates=whole)


def _size(mesh: Mesh, axis: str) -> float:
    size = getattr(mesh, axis)
    return math.inf if size == -1 else size


def _layout(own: Config, sizes: dict[str, float]) -> Layout:
    """Return the user's layout; axes that depend on the number of devices have size 1."""
    known = {axis: 1 if math.isinf(size) else int(size) for axis, size in sizes.items()}
    mesh = Mesh(**known, dcn=own.mesh.dcn if known == sizes else {})
    config = dataclasses.replace(own, mesh=mesh)
    return layouts.abstract_layout(config, math.prod(known.values()))


def _dcn(own: Mesh, sizes: MeshSizes) -> dict[str, int]:
    """Return two slices for each axis with several slices that the small mesh has too."""
    return {axis: 2 for axis, n in own.dcn.items() if n > 1 and sizes.get(axis, 2) > 1}


def _smallest_tensor(own: Sharding) -> int:
    """Return the smallest size above 1 of the tensor axis that its layout allows."""
    return {"1d": 2, "2d": 4, "2.5d": 4 * min(own.tensor_depth, 2), "3d": 8}[own.tensor_layout]


def _sharding(own: Sharding, tensor: int) -> Sharding:
    if tensor == 1:
        return dataclasses.replace(
            own,
            sequence_parallel=False,
            collective_matmul=False,
            tensor_layout="1d",
            tensor_depth=1,
        )
    return dataclasses.replace(own, tensor_depth=min(own.tensor_depth, 2))


def _batch_devices(own: Config, mesh: MeshSizes) -> int:
    """Return the number of devices over which the mesh shards the batch."""
    config = dataclasses.replace(
        own, mesh=Mesh(**mesh, dcn={}), sharding=_sharding(own.sharding, mesh["tensor"])
    )
    return layouts.abstract_layout(config, math.prod(mesh.values())).batch_devices()


def _pipeline(own: Pipeline, own_ranks: float, ranks: int) -> Pipeline:
    """Shrink the microbatch count: below, a multiple of, or above the ranks, like the user's."""
    if ranks == 1:
        return own
    count, of = own.microbatches, ranks if math.isinf(own_ranks) else int(own_ranks)
    if count < of:
        small = min(count, ranks)
    elif count % of:
        small = ranks + 1
    else:
        small = min(count // of, 2) * ranks
    return dataclasses.replace(own, microbatches=small)


# -- models and data ------------------------------------------------------------------------------


def _text(
    config: Config,
    own: Config,
    model: TokenModel,
    sizes: dict[str, float],
    most: MeshSizes,
    virtual_stages: int,
) -> Config:
    data = own.train.data
    length = data.abstract_batch(1).inputs.shape[1]

    def small(model: TokenModel) -> TokenModel:
        return _of_tokens(own, model, length, sizes, most, virtual_stages)

    objective = own.train.objective
    if isinstance(objective, Distillation):
        objective = objective.with_teacher_of(small(objective.sizes))
    else:
        objective = None
    own_model, model = model, small(model)
    vocabulary = model.vocab_size
    separate = data.abstract_batch(1).segment_ids is not None
    tokens = vocabulary - reserved_tokens(own_model)
    text: Any = TextData(
        source="synthetic",
        synthetic_vocab_size=tokens,
        sequence_length=SEQUENCE,
        separate_documents=separate,
    )
    own_text = text_of(data)
    if isinstance(data, ClassedText):
        text = dataclasses.replace(
            data, source="synthetic", synthetic_vocab_size=tokens, sequence_length=SEQUENCE
        )
    elif isinstance(data, SequenceData):
        text = dataclasses.replace(
            data, source="synthetic", heldout_source=None, sequence_length=SEQUENCE
        )
    elif own_text is not None:
        text = dataclasses.replace(
            own_text,
            source="synthetic",
            synthetic_vocab_size=tokens,
            sequence_length=SEQUENCE,
            heldout_split=None,
            # Random tokens have no documents to pad.
            packing="stream" if own_text.packing == "padded" else own_text.packing,
            lengths=(),
            fill_in_middle=None,
        )
    named = KERNELS.get(own.attention.kernel)
    # The claim about the kernel reports that it cannot run here.
    elsewhere = named is not None and named.only_on is not None
    kernel = "xla" if elsewhere else own.attention.kernel
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, model=model, data=text, objective=objective),
        attention=dataclasses.replace(own.attention, kernel=kernel),
        scan=dataclasses.replace(own.scan, layers_per_iteration=_block(own)),
        loss=dataclasses.replace(own.loss, chunk_size=_chunk(own.loss, length)),
    )


def _of_tokens(
    own: Config,
    model: TokenModel,
    length: int,
    sizes: dict[str, float],
    most: MeshSizes,
    virtual_stages: int,
) -> TokenModel:
    """Shrink the width, depth and context length of a token model or teacher.

    `length` is the user's sequence length.
    """
    data, fields = own.train.data, vars(model)
    shorter = SEQUENCE / length
    layers = _layers(own, model.layers, sizes, most, virtual_stages)
    vocabulary = VOCABULARY - ("vocab" in _layout(own, sizes).whole)
    small = {"vocab_size": vocabulary, "num_layers": layers, "embed_dim": 2 * UNIT}
    if model.attention is not None:
        small |= _heads(own, model.attention, sizes, most)
        small["embed_dim"] = HEAD_DIM * small["num_heads"]
    if "mlp_dim" in fields:
        ratio = fields["mlp_dim"] / model.embed_dim
        small["mlp_dim"] = max(round(ratio * small["embed_dim"] / UNIT), 1) * UNIT
    if model.experts is not None:
        few = min(model.experts.count, MAX_EXPERTS)
        small["num_experts"] = math.ceil(few / most["expert"]) * most["expert"]
        small["experts_per_token"] = min(model.experts.per_token, small["num_experts"])
        small |= _routes(fields, small)
    if "key_value_rank" in fields:
        small |= _latents(fields, layers)
    if features_of(model) is not None:
        del small["vocab_size"]
    if isinstance(data, ClassedRows):
        small["num_classes"] = VOCABULARY  # random labels are drawn like tokens
    small["context_length"] = SEQUENCE * (2 if model.context_length > length else 1)
    for name in ("sliding_window", "rope_original_context_length"):
        if fields.get(name) is not None:
            small[name] = max(round(fields[name] * shorter), 2)
    if fields.get("attention_pattern") is not None:
        small |= _pattern(fields["attention_pattern"], shorter, small)
    if "global_every" in fields:  # keep layers of both kinds
        small["global_every"] = min(fields["global_every"], layers)
    return dataclasses.replace(model, **{n: x for n, x in small.items() if n in fields})


def _pairs(
    config: Config,
    own: Config,
    model: TokenModel,
    sizes: dict[str, float],
    most: MeshSizes,
    virtual_stages: int,
) -> Config:
    """Shrink an encoder-decoder model; the data are random pairs with padding."""
    fields, layers = vars(model), _layers(own, model.layers, sizes, most, virtual_stages)
    vocabulary = VOCABULARY - ("vocab" in _layout(own, sizes).whole)
    small = {"vocab_size": vocabulary, "num_layers": layers, "embed_dim": 2 * UNIT}
    if model.attention is not None:
        heads = _heads(own, model.attention, sizes, most)["num_heads"]
        small |= {"num_heads": heads, "head_dim": HEAD_DIM, "embed_dim": HEAD_DIM * heads}
        ratio = fields["mlp_dim"] / model.embed_dim
        small["mlp_dim"] = max(round(ratio * small["embed_dim"] / UNIT), 1) * UNIT
    small["context_length"] = SEQUENCE
    small = {name: value for name, value in small.items() if name in fields}
    pairs = PairData(
        source="synthetic",
        synthetic_vocab_size=vocabulary,
        source_length=SEQUENCE,
        target_length=SEQUENCE // 2,
    )
    train = dataclasses.replace(config.train, model=dataclasses.replace(model, **small), data=pairs)
    named = KERNELS.get(own.attention.kernel)
    elsewhere = named is not None and named.only_on is not None
    kernel = "xla" if elsewhere else own.attention.kernel
    return dataclasses.replace(
        config,
        train=train,
        attention=dataclasses.replace(own.attention, kernel=kernel),
        scan=dataclasses.replace(own.scan, layers_per_iteration=_block(own)),
    )


def _block(own: Config) -> int:
    """Return the number of layers in one iteration of the scan."""
    return min(own.scan.layers_per_iteration, 2)


def _layers(
    own: Config, layers: int, sizes: dict[str, float], most: MeshSizes, virtual_stages: int
) -> int:
    """Return a number of layers: two per stage if that is cheap, uneven if the user's is uneven."""
    block, own_ranks = _block(own), sizes["pipe"]
    if most["pipe"] == 1:
        return layers if layers == 1 else max(2 * block, 2)
    stages = most["pipe"] * virtual_stages
    small = stages * (2 if stages <= 4 or block == 2 else 1)
    own_stages = stages if math.isinf(own_ranks) else int(own_ranks) * virtual_stages
    if layers % own_stages and block < 2:
        small = max(small - 1, stages + 1)
    return small


def _heads(
    own: Config, attention: AttentionFacts, sizes: dict[str, float], most: MeshSizes
) -> dict[str, int]:
    """Return head counts with the user's group size (GQA) and divisibility by the tensor axis."""
    tensor = most["tensor"]
    group = min(attention.num_heads // attention.num_kv_heads, MAX_GROUP)
    own_tensor = tensor if math.isinf(sizes["tensor"]) else int(sizes["tensor"])
    if tensor == 1:
        kv_heads = min(attention.num_kv_heads, 2)
    elif attention.num_kv_heads % own_tensor == 0:
        kv_heads = tensor
    else:
        kv_heads = max(tensor * attention.num_kv_heads // own_tensor, 1)
    parts = tensor
    if own.attention.context_parallel == "ulysses":
        parts *= most["context"]
    while kv_heads * group % parts:
        if kv_heads < tensor:
            group *= 2
        else:
            kv_heads *= 2
    return {"num_heads": kv_heads * group, "num_kv_heads": kv_heads}


def _pattern(pattern: Pattern, shorter: float, small: Mapping[str, Any]) -> dict[str, Any]:
    """Rescale an attention pattern, and multiply the heads by its number of kinds of heads."""
    short = pattern.rescale(shorter)
    times = short.kinds_of_heads
    widened = {name: small[name] * times for name in ("num_heads", "num_kv_heads", "embed_dim")}
    return {"attention_pattern": short, **widened}


def _latents(fields: Mapping[str, Any], layers: int) -> dict[str, int | None]:
    """Shrink the sizes of multi-head latent attention (DeepSeek); keep at most one dense layer."""
    dense = min(fields["dense_layers"], 1)
    return {
        "num_layers": layers + dense,
        "dense_layers": dense,
        "query_rank": None if fields["query_rank"] is None else UNIT,
        "key_value_rank": UNIT,
        "plain_dim": HEAD_DIM - HEAD_DIM // 2,
        "rotary_dim": HEAD_DIM // 2,
        "value_dim": HEAD_DIM,
        "expert_mlp_dim": UNIT,
    }


def _routes(fields: Mapping[str, Any], small: Mapping[str, int]) -> dict[str, int]:
    """Shrink group-limited expert routing to groups of at least two experts."""
    if fields.get("expert_groups", 1) == 1:
        return {}
    count = small["num_experts"]
    most_groups = min(fields["expert_groups"], count // 2)
    groups = max(n for n in range(1, most_groups + 1) if count % n == 0)
    own = max(groups * fields["groups_per_token"] // fields["expert_groups"], 1)
    most = own * count // groups
    return {
        "expert_groups": groups,
        "groups_per_token": own,
        "experts_per_token": min(small["experts_per_token"], most),
    }


def _chunk(own: Loss, length: int) -> int | None:
    if own.chunk_size is None:
        return None
    chunks = max(length // own.chunk_size, 1)
    return SEQUENCE // (chunks if chunks <= 2 else MAX_CHUNKS)


def _images(
    config: Config,
    own: Config,
    model: ImageModel,
    sizes: dict[str, float],
    most: MeshSizes,
    virtual_stages: int,
) -> Config:
    data: Any = own.train.data
    fields = vars(model)
    classes = min(model.num_classes, CLASSES)
    small: dict[str, Any] = {"num_classes": classes}
    if "depth" in fields:
        small["depth"] = DEPTHS.get(fields["depth"], fields["depth"])
    if "width" in fields:
        small["width"] = UNIT
    if "head_width" in fields:
        small["head_width"] = 2 * UNIT
    if model.attention is not None:
        heads = max(most["tensor"], 2)
        small |= {"num_heads": heads, "embed_dim": HEAD_DIM * heads}
        small |= {"mlp_dim": 4 * UNIT, "image_size": 2 * fields["patch_size"]}
    if model.layers is not None:
        small["num_layers"] = _layers(own, model.layers, sizes, most, virtual_stages)
    changed = dataclasses.replace(model, **{n: v for n, v in small.items() if n in fields})
    pixels = data.abstract_batch(1).inputs.shape[1]
    values = {
        "source": "synthetic",
        "image_size": min(pixels, changed.least_pixels),
        "num_classes": min(data.num_classes, classes),
        "heldout_split": None,
    }
    if isinstance(data, ImageData):
        # Proofs compare individual rows, which Mixup or CutMix would combine.
        images = dataclasses.replace(data, **values, augment=None, workers=0)
    else:
        images = ImageData(**values, channels=data.abstract_batch(1).inputs.shape[-1])
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, model=changed, data=images),
        scan=dataclasses.replace(own.scan, layers_per_iteration=_block(own)),
    )


def _vectors(config: Config, own: Config, model: VectorModel) -> Config:
    """Shrink the widths of a vector model, except small ones not divisible by UNIT (3, 10)."""
    fields: dict[str, Any] = vars(model)
    small: Any = model
    if "widths" in fields:
        widths = tuple(w if w % UNIT and w < CLASSES else min(w, CLASSES) for w in fields["widths"])
        small = dataclasses.replace(small, widths=widths)
    if np.issubdtype(own.train.data.abstract_batch(1).targets.dtype, np.integer):
        outputs: dict[str, Any] = {"num_classes": max(small.outputs, 2)}
    else:
        outputs = {"num_classes": None, "num_targets": small.outputs}
    vectors = VectorData(features=small.features, **outputs)
    return dataclasses.replace(
        config, train=dataclasses.replace(config.train, model=small, data=vectors)
    )


# -- changed settings ------------------------------------------------------------------------------


def _differences(own: Any, small: Any) -> Iterator[Change]:
    for field in dataclasses.fields(own):
        before, after = getattr(own, field.name), getattr(small, field.name)
        is_section = isinstance(own, Config) and field.name not in ("imports", "notes")
        if is_section or (isinstance(own, Train) and field.name in ("model", "data")):
            if type(before) is type(after):
                yield from _differences(before, after)
            else:
                names = (f"@{type(value).__name__}()" for value in (before, after))
                yield Change(f"Train.{field.name}", *names)
        elif before != after:
            yield Change(f"{type(own).__name__}.{field.name}", before, after)
