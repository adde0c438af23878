"""What the settings of every model say of themselves, held against the module that they build."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
from conftest import make_layout
from flax import nnx

import jaxtrain.models
from jaxtrain.analysis.bindings import models
from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable
from jaxtrain.models.model import (
    ImageModel,
    Model,
    TokenModel,
    VectorModel,
    reads_tokens,
)
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.kv_cache import empty_cache
from jaxtrain.nn.parameters import normal, param, role_of, stack
from jaxtrain.nn.transformer.language_model import Transformer, hidden_states
from jaxtrain.parallel.sharding import is_variable, logical_axes
from jaxtrain.training.settings import load_config

# Small, and so that no two sizes are equal by chance.
SMALL = {
    "vocab_size": 40, "num_layers": 3, "embed_dim": 48, "num_heads": 6, "num_kv_heads": 2,
    "mlp_dim": 20, "num_experts": 5, "experts_per_token": 2, "context_length": 12,
    "sliding_window": 7, "depth": 20, "num_classes": 11, "widths": (13, 24, 9),
}  # fmt: skip


def small(cls: type) -> Any:
    known = {field.name for field in dataclasses.fields(cls)}
    groups = {"dense_layers": 1, "expert_groups": 1, "groups_per_token": 1}
    own = {"VGG": {"depth": 11}, "Mamba2": {"head_dim": 16}, "DeepSeek": groups}
    sizes = SMALL | own.get(cls.__name__, {})
    return cls(**{name: size for name, size in sizes.items() if name in known})


MODELS = {cls.__name__: small(cls) for cls in models()}
KINDS = {
    "tokens": TokenModel, "pairs": TokenModel, "images": ImageModel, "vectors": VectorModel
}  # fmt: skip
TEXT = [name for name, model in MODELS.items() if reads_tokens(model)]


def built(model: Model) -> Any:
    return nnx.eval_shape(lambda: model.build(jax.random.key(0)))


def sizes_of(model: Model) -> dict[str, set[int]]:
    """Logical axis -> the sizes that the model's parameters have along it."""
    found: dict[str, set[int]] = {}
    state = nnx.state(built(model), nnx.Param)
    for variable in jax.tree.leaves(state, is_leaf=is_variable):
        for axis, size in zip(logical_axes(variable), variable.get_value().shape, strict=True):
            found.setdefault(axis, set()).add(size)
    return found


def test_the_sizes_of_every_model_are_found_by_name():
    from jaxtrain.models import GPT, LSTM, Llama, Mixtral, ResNet  # noqa: PLC0415

    assert {GPT, Llama, LSTM, Mixtral, ResNet} <= set(models())
    for cls in (*models(), Model, TokenModel, ImageModel, VectorModel):
        assert vars(jaxtrain.models)["__getattr__"](cls.__name__) is cls
    for name in ("Block", "Convolution", "LSTMModel", "Lama", "UserError", "llama"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            jaxtrain.models.__getattr__(name)


def test_modules_of_the_package_are_still_found():
    code = "from jaxtrain.models import transformers; from jaxtrain.models.model import Model"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", MODELS)
def test_the_facts_are_those_of_the_parameters(name):
    model, sizes = MODELS[name], sizes_of(MODELS[name])
    assert isinstance(model, KINDS[model.inputs])
    assert sizes.get("layers", {None}) == {model.layers}
    facts = model.attention
    assert (facts is not None) == ("heads" in sizes)
    if facts is not None:
        assert sizes["heads"] == {facts.num_heads}
        assert sizes.get("kv_heads", sizes["heads"]) == {facts.num_kv_heads}
        of_kernels = {facts.key_dim, facts.value_dim}
        if "latent" in sizes:  # which keys and values are made of by one weight, side by side
            assert of_kernels < sizes["head_dim"]
            assert of_kernels == {max(model.plain_dim + model.rotary_dim, model.value_dim)}
        else:
            assert sizes["head_dim"] == of_kernels == {facts.key_dim}
    assert sizes.get("experts", {None}) == {model.experts and model.experts.count}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_say_what_they_are_for(name):
    state = nnx.state(built(MODELS[name]), nnx.Param)
    roles: dict[str | None, set[str]] = {}
    for path, variable in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_variable):
        written = jax.tree_util.keystr(path, simple=True, separator="/")
        roles.setdefault(role_of(variable), set()).add(written)
    # By the names that these models have; elsewhere in the package no name means anything.
    everything = set().union(*roles.values())
    normed = {n for n in everything if "norm" in n or n.endswith("scale")}
    normed |= {n for n in everything if n.removesuffix("bias") + "scale" in normed}
    assert roles.get("norm", set()) == normed
    assert roles.get("router", set()) == {n for n in everything if n.endswith("/router")}
    places = {"position_embedding", "source_distances", "target_distances"}
    assert roles.get("position", set()) == everything & places
    tables = {"token_embedding", "source_embedding", "target_embedding"}
    assert roles.get("embedding", set()) == everything & tables
    assert roles.get("output", set()) == everything & {"output", "head", "head/weight"}
    assert roles.keys() & {"embedding", "output"}


def test_a_role_is_kept_in_a_stack_and_a_wrong_one_refused():
    def make(key):  # noqa: ANN001, ANN202
        return param(key, (2,), ("vector",), normal(1.0), role="norm")

    stacked = stack(make, 3, jax.random.key(0))
    assert (role_of(stacked), logical_axes(stacked)) == ("norm", ("layers", "vector"))
    with pytest.raises(ValueError, match="unknown role 'ouput'.*'output'"):
        param(jax.random.key(0), (2,), ("vector",), normal(1.0), role="ouput")


# Each kind of attention and of state stays in the fast part.
# The cases that are left run the same code.
@pytest.mark.slow_cases("Gemma3")
@pytest.mark.slow_cases(
    "Llama",
    "LSTM",
    "Mixtral",
    "DeepSeek",
    "BERT",
    "Gemma",
    "Gemma2",
    "GPTOSS",
    "GRU",
    "RNN",
    "Mamba2",
)
@pytest.mark.parametrize("name", TEXT)
def test_attention_looks_where_the_facts_say(name):
    """Which inputs a hidden state of a one-layer model depends on, by its gradient."""
    facts = MODELS[name].attention
    given = Mask(causal=facts is None or facts.causal)  # of the objective, windows aside
    others = MODELS[name].num_layers - MODELS[name].layers  # which stand before the equal ones
    model = dataclasses.replace(MODELS[name], num_layers=others + 1)
    T = model.context_length
    structure, params = nnx.split(model.build(jax.random.key(0)))
    tokens, first = jnp.arange(T)[None] % model.vocab_size, Execution().of_layer(0)

    def hidden_states(shift_TD):  # noqa: ANN001, ANN202
        module = nnx.merge(structure, params)
        x_BTD = module.embed(tokens, jnp.arange(T)[None]) + shift_TD
        layer = jax.tree.map(lambda leaf: leaf[0], module.layers)
        y, _, _ = module.run_layer(layer, x_BTD, jnp.arange(T)[None], given, first)
        return y @ jnp.arange(model.embed_dim)  # the sum alone is 0 behind a layer norm

    @jax.jit
    def moved(shift_TD):  # noqa: ANN001, ANN202
        one = jax.grad(lambda shift_TD, place: hidden_states(shift_TD)[0, place])
        return jax.lax.map(lambda place: one(shift_TD, place), jnp.arange(T))

    seen_TS = jnp.abs(moved(jnp.zeros((T, model.embed_dim)))).max(-1) > 0
    mask = given if facts is None else dataclasses.replace(given, window=facts.window)
    visible = mask.visible(T, T)
    assert (seen_TS == (True if visible is None else visible[0, 0])).all()


@pytest.mark.parametrize("name", [name for name in TEXT if MODELS[name].cached])
def test_what_is_cached_is_what_the_layers_give_back(name):
    model = MODELS[name]
    tokens = jnp.zeros((2, 4), jnp.int32)

    def caches(tokens):  # noqa: ANN001, ANN202
        module: Transformer = model.build(jax.random.key(0))
        empty = empty_cache(
            model.cached, layers=model.layers, rows=2, room=9, dtype=jnp.dtype("bfloat16")
        )
        mask = Mask(query_start=empty.length)
        return empty, hidden_states(
            module, tokens, tokens, mask, Execution(kernel="reference"), empty
        )[1]

    with make_layout(fsdp=1).active():
        before, after = jax.eval_shape(caches, tokens)
    assert before.layers
    assert jax.tree.map(lambda x: (x.shape, x.dtype), before.layers) == jax.tree.map(
        lambda x: (x.shape, x.dtype), after.layers
    )
    grows = {9 in array.shape for array in before.layers}
    assert grows == {one.every_token for one in model.cached}


@pytest.mark.parametrize("name", TEXT)
def test_flops_of_a_sequence_are_those_of_its_tokens(name):
    assert MODELS[name].flops((12,)) == 12 * MODELS[name].flops_per_token(12)


def test_the_type_checker_knows_that_every_model_says_all_of_it(tmp_path):
    lines = ["from jaxtrain.models.model import ImageModel, TokenModel, VectorModel"]
    for name, model in MODELS.items():
        kind = KINDS[model.inputs].__name__
        lines += [f"from {type(model).__module__} import {name}", f"_{name}: {kind} = {name}()"]
    assert checked(tmp_path, lines) == ""
    wrong = [*lines, "class Mine(GPT):", "    cached = 3", "mine: TokenModel = Mine()"]
    assert "`Mine` is not assignable to `TokenModel`" in checked(tmp_path, wrong)


def checked(folder: Path, lines: list[str]) -> str:
    """What pyrefly has against these lines."""
    (folder / "checked.py").write_text("\n".join(lines) + "\n")
    (folder / "pyrefly.toml").write_text(
        f'project-includes = ["checked.py"]\nsearch-path = ["{Path(__file__).parent.parent}"]\n'
        f'python-interpreter-path = "{sys.executable}"\n'
    )
    pyrefly = Path(sys.executable).with_name("pyrefly")
    command = [str(pyrefly), "check", "--output-format", "min-text"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SaysLittle:
    """A model in the manner of your own first try."""

    num_layers: int = 2
    objective = "next_token"

    def build(self, key):  # noqa: ANN001, ANN202
        raise NotImplementedError


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadsImages(SaysLittle):
    """It says what every model says, and not what a model of images says besides."""

    inputs: ClassVar[str] = "images"
    settings: ClassVar[dict[str, str]] = {}
    layers = attention = experts = None
    cached = ()
    channels: ClassVar[int] = 3

    def flops(self, shape):  # noqa: ANN001, ANN202
        return 0.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "SaysLittle",
            "it takes Model, and this has no attention, cached, experts, flops, inputs, layers, "
            "settings",
        ),
        (
            "ReadsImages",
            "Train.model=@ReadsImages() has inputs='images', but no least_pixels, num_classes; "
            "models.model.ImageModel says what each of them is",
        ),
    ],
)
def test_a_model_that_says_too_little_is_told_what_is_missing(name, words):
    with pytest.raises(UserError) as refused:
        load_config("gpt_quickstart", [f"Train.model = @{name}()"])
    assert words in str(refused.value)
