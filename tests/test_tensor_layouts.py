"""Tensor parallelism in every layout equals one device, and holds and moves what the papers say."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lower_step, make_layout, make_step, needs_libtpu
from flax import nnx
from parity import assert_equal, evaluate
from test_step import BATCH, MODELS, one_device

from jaxtrain.analysis.planning.compiled.collectives import collectives
from jaxtrain.analysis.planning.machines.targets import tpu_devices
from jaxtrain.config.errors import UserError
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.matmul.contract import contract
from jaxtrain.nn.transformer.decoder import Decoder
from jaxtrain.parallel import dividing
from jaxtrain.parallel.axis_rules import factor_tensor
from jaxtrain.parallel.mesh import Mesh, make_mesh
from jaxtrain.parallel.sharding import Layout, Sharding, is_variable, logical_axes
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.generation.generate import generate
from jaxtrain.training.layouts import abstract_layout, shapes_of
from jaxtrain.training.preflight.preflight import check
from jaxtrain.training.settings import load_config

GRIDS = {
    "2d": (Sharding(tensor_layout="2d"), {"tensor": 4, "data": 2}),
    "2d_fsdp": (Sharding(tensor_layout="2d"), {"tensor": 4, "fsdp": 2}),
    "2d_zero2": (Sharding(tensor_layout="2d", zero=2), {"tensor": 4, "fsdp": 2}),
    "2.5d": (Sharding(tensor_layout="2.5d", tensor_depth=2), {"tensor": 8}),
    "3d": (Sharding(tensor_layout="3d"), {"tensor": 8}),
}
Q, DEPTH = 2, {"2d": 1, "2.5d": 2}


def grid(name: str, model=None, devices=None) -> Layout:
    """The layout of GRIDS on simulated devices, or on these."""
    sharding, sizes = GRIDS[name]
    devices = jax.devices()[: math.prod(sizes.values())] if devices is None else devices
    mesh = make_mesh(
        Mesh(**{"fsdp": 1, **sizes}), devices,
        tensor_layout=sharding.tensor_layout, tensor_depth=sharding.tensor_depth,
    )  # fmt: skip
    return Layout.of(
        mesh, sharding, None if model is None else MODELS[model].attention.num_kv_heads
    )


CASES = [
    ("gpt", "2d"), ("gpt", "2d_zero2"), ("gpt", "3d"),
    ("llama", "2d_fsdp"), ("llama", "2.5d"), ("llama", "3d"),
]  # fmt: skip


@pytest.mark.slow_cases("gpt-2d", "gpt-2d_zero2", "gpt-3d", "llama-2.5d", "llama-2d_fsdp")
@pytest.mark.parametrize(("model", "name"), CASES)
def test_loss_and_gradients_equal_one_device(model, name, capfd):
    expected = one_device(model)
    capfd.readouterr()
    found = evaluate(make_step(MODELS[model], grid(name, model)), BATCH)
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err
    assert_equal(found, expected)


# -- bytes per device ---------------------------------------------------------------------------


def parts(axes: tuple[str, ...], name: str) -> int:
    """Into how many parts a parameter is cut: matrices q^2 (q^3 in a cube), biases q, norms 1."""
    split = [axis for axis in axes if axis not in ("layers", "qkv", "head_dim", "vector")]
    per_matrix = Q**3 if name == "3d" else Q**2
    return {0: 1, 1: Q, 2: per_matrix}[len(split)]


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("name", ["2d", "2.5d", "3d"])
def test_parameters_and_moments_take_what_the_papers_say(model, name):
    state = make_step(MODELS[model], grid(name, model)).abstract_state()
    matrices = 0
    for tree, copies in ((state.params, 1), (state.opt_state, 2)):
        variables = [v for v in jax.tree.leaves(tree, is_leaf=is_variable) if is_variable(v)]
        assert len(variables) == copies * len(jax.tree.leaves(state.params))
        for variable in variables:
            value, axes = variable.get_value(), logical_axes(variable)
            held = math.prod(value.sharding.shard_shape(value.shape))
            assert held * parts(axes, name) == value.size, axes
            matrices += parts(axes, name) in (Q**2, Q**3)
    assert matrices == 3 * {"gpt": 6, "llama": 9}[model]


@pytest.mark.slow
def test_arguments_of_the_compiled_step_are_those_bytes():
    program = make_step(MODELS["gpt"], grid("3d"))
    state = program.abstract_state()
    held = sum(
        v.get_value().size // parts(logical_axes(v), "3d")
        for v in jax.tree.leaves((state.params, state.opt_state), is_leaf=is_variable)
        if is_variable(v)
    )
    scalars = 4 * (1 + 2 + 2)  # step, loss_scale, and optax's two counts
    batch = 5 * BATCH.inputs.size * 4 // Q**2
    compiled = lower_step(program, BATCH).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 4 * held + scalars + batch


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("name", ["2d", "2.5d", "3d"])
def test_activations_take_what_the_papers_say(model, name, monkeypatch):
    """Residual stream, queries and the MLP's inside: /q^2, /(d q^2) and /q^3 of each replica."""
    held = {}

    def note(what, x):
        shard = jax.typeof(x).sharding.shard_shape(x.shape)
        held[what] = math.prod(x.shape) // math.prod(shard)

    def spy(owner, attribute, what, number, equation=None):
        original = getattr(owner, attribute)

        def noted(*args, **kwargs):
            if equation in (None, args[1]):
                note(what, args[number])
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, noted)

    spy(Decoder, "run_layer", "residual", 2)
    spy(Decoder, "finish", "last", 1)
    spy(Execution, "attention", "queries", 1)
    spy(Execution, "contract", "mlp", 2, "BTF,FD->BTD")
    program = make_step(MODELS[model], grid(name, model))
    program.setup.no_sums(program.abstract_state(), BATCH)
    replicas = 2 if name == "2d" else 1
    devices = Q**3 if name == "3d" else DEPTH[name] * Q**2
    assert held == dict.fromkeys(("residual", "last", "queries", "mlp"), replicas * devices)


# -- traffic ------------------------------------------------------------------------------------

WAYS = {
    # equation, weight's axes, activation's axes, result's axes
    "into": ("BTD,DF->BTF", ("embed", "mlp"), ("batch", "length", "embed"), None),
    "out_of": (
        "BTF,FD->BTD", ("mlp", "embed"), ("inner_batch", "length", "mlp"),
        ("batch", "residual_length", "embed"),
    ),
}  # fmt: skip
B, T, D, F = 64, 128, 1024, 2048


def moved(layout: Layout, way: str, *, backward: bool) -> list[tuple[str, str, int]]:
    """Kind, axis and elements of every array that a product with a weight moves, on TPUs."""
    equation, axes, x_axes, out = WAYS[way]
    sizes = {"batch": B, "inner_batch": B, "length": T, "embed": D, "mlp": F}

    def argument(names, spec):
        shape = tuple(sizes[name] for name in names)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=layout.sharding_of(spec(names)))

    def forward(x, weight):
        return contract(equation, x, nnx.Param(weight, axes=axes), out)

    def both(x, weight):
        y, transpose = jax.vjp(forward, x, weight)
        return transpose(y)

    with layout.active():
        run = jax.jit(both if backward else forward)
        lowered = run.lower(argument(x_axes, layout.activation), argument(axes, layout.parameter))
        text = lowered.compile().as_text()
    found = collectives(text, layout.mesh)
    return sorted((one.kind, one.axis, math.prod(one.shape)) for one in found)


@needs_libtpu
def test_a_product_on_a_grid_is_two_collectives_and_four_more_backward():
    """What a device puts in: gathers its own part, reduce-scatters the whole of its sum.

    SUMMA's broadcasts are gathers. Only [B, T, D] and the weight move, never [B, T, F].
    """
    sharding, _ = GRIDS["2d"]
    mesh = make_mesh(Mesh(fsdp=1, tensor=4), tpu_devices("v5e:2x2"), tensor_layout="2d")
    layout = Layout.of(mesh, sharding)
    x, weight = ("all-gather", "tensor", B * T * D // Q**2), ("all-gather", "row", D * F // Q**2)
    sum_x = ("reduce-scatter", "tensor", B * T * D // Q)
    sum_weight = ("reduce-scatter", "row", D * F // Q)
    assert moved(layout, "into", backward=False) == sorted([x, weight])
    assert moved(layout, "into", backward=True) == sorted([x, weight, sum_x, sum_weight])
    assert moved(layout, "out_of", backward=False) == sorted([weight, sum_x])
    assert moved(layout, "out_of", backward=True) == sorted([weight, sum_x, x, sum_weight])


@pytest.mark.slow_cases("out_of")
@needs_libtpu
@pytest.mark.parametrize("way", WAYS)
def test_a_product_in_a_cube_is_two_gathers_and_a_reduce_scatter(way):
    mesh = make_mesh(Mesh(fsdp=1, tensor=8), tpu_devices("v5e:2x4"), tensor_layout="3d")
    layout = Layout.of(mesh, GRIDS["3d"][0])
    entering, leaving = ("row", "tensor") if way == "into" else ("tensor", "row")
    width_in, width_out = (D, F) if way == "into" else (F, D)
    forward = [
        ("all-gather", entering, B * T * width_in // Q**3),
        ("all-gather", "depth", D * F // Q**3),
        ("reduce-scatter", leaving, B * T * width_out // Q**2),
    ]
    backward = [
        ("all-gather", leaving, B * T * width_out // Q**3),
        ("reduce-scatter", entering, B * T * width_in // Q**2),
        ("reduce-scatter", "depth", D * F // Q**2),
    ]
    assert moved(layout, way, backward=False) == sorted(forward)
    assert moved(layout, way, backward=True) == sorted(forward + backward)


# -- fewer key-value heads than devices ----------------------------------------------------------

GQA = {
    "tensor8": {"tensor": 8},
    "tensor4": {"tensor": 4, "fsdp": 2, "sequence_parallel": True},
}


def gqa(sequence_parallel: bool = False, **sizes: int) -> Layout:
    mesh = make_mesh(Mesh(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])
    return Layout.of(mesh, Sharding(sequence_parallel=sequence_parallel), num_kv_heads=2)


@pytest.mark.slow_cases("tensor8")
@pytest.mark.parametrize("sizes", GQA.values(), ids=GQA)
def test_fewer_key_value_heads_than_devices(sizes):
    layout = gqa(**sizes)
    found = evaluate(make_step(MODELS["llama"], layout), BATCH)
    assert_equal(found, one_device("llama"))


def test_weights_of_key_value_heads_are_whole_only_where_they_must_be():
    assert gqa(tensor=2).whole == frozenset()
    axes = ("embed", "kv_heads", "head_dim")
    layout = gqa(tensor=4, fsdp=2)
    assert layout.parameter(axes) == layout.moment(axes)
    assert layout.parameter(axes)[:2] == ("fsdp", None)
    assert layout.weight(axes) == jax.P(None, None, None)
    # Keys and values themselves, of as many heads as devices, are split.
    assert layout.activation(("kv_heads",)) == jax.P("tensor")
    state = make_step(MODELS["llama"], layout).abstract_state()
    key = state.params["layers"]["key"].get_value()
    assert key.sharding.shard_shape(key.shape) == (2, 16, 2, 4)
    cube = Layout.of(grid("3d").mesh, GRIDS["3d"][0], num_kv_heads=1)
    assert cube.whole == {"kv_heads"}
    assert cube.parameter(axes) == jax.P(("tensor", "depth"), None, None)


def test_a_vocabulary_that_does_not_divide_is_replicated_but_on_a_grid():
    """Other sizes are left to the check that rejects them."""
    uneven = dataclasses.replace(MODELS["llama"], vocab_size=66, mlp_dim=50)
    shapes = shapes_of(uneven)
    found = {one.axis for one in dividing.uneven(make_layout(tensor=4), shapes)}
    assert found >= {"vocab", "mlp"}
    assert dividing.replicate_uneven(make_layout(tensor=4), shapes).whole == {"vocab"}
    assert dividing.replicate_uneven(make_layout(tensor=2), shapes).whole == frozenset()
    vocabulary = dataclasses.replace(MODELS["llama"], vocab_size=65)
    assert list(dividing.uneven(grid("2d"), shapes_of(vocabulary)))
    assert dividing.replicate_uneven(grid("2d"), shapes_of(vocabulary)).whole == frozenset()


def test_each_device_computes_the_one_key_value_head_that_it_needs():
    layout = gqa(tensor=8)
    heads = []
    original = Execution.attention

    def noted(self, q, k, v, mask):
        heads.append((k.shape[2], jax.typeof(k).sharding.shard_shape(k.shape)[2]))
        return original(self, q, k, v, mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Execution, "attention", noted)
        program = make_step(MODELS["llama"], layout)
        program.setup.no_sums(program.abstract_state(), BATCH)
    assert set(heads) == {(8, 1)}


# tests/test_generate.py generates on meshes in the fast part.
@pytest.mark.slow_cases("gqa")
@pytest.mark.parametrize("name", ["gqa", pytest.param("3d", marks=pytest.mark.slow)])
def test_generation_equals_one_device(name):
    def drawn(layout):
        program = make_step(MODELS["llama"], layout)
        state = program.create(seed=3)
        return generate(
            program.setup, MODELS["llama"], state, [[5, 9, 2]], max_new_tokens=8,
            sampling=Sampling(temperature=0.0), seed=0,
        )[0].tokens  # fmt: skip

    layout = gqa(tensor=8) if name == "gqa" else grid("3d", "llama")
    np.testing.assert_array_equal(drawn(layout), drawn(make_layout()))


# -- rejections -----------------------------------------------------------------------------------

RUN = ["Mesh.data = 1", "Mesh.fsdp = 1", "GPT.vocab_size = 256", "Train.global_batch_size = 16"]


def refused(*bindings: str, devices: int = 8, name: str = "gpt_quickstart") -> str:
    with pytest.raises(UserError) as caught:
        check(load_config(name, [*RUN, *bindings]), device_count=devices, platform="cpu")
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "bindings", "devices", "words"),
    [
        ("2d", ["Mesh.tensor = 8"], 8, ["Mesh.tensor=8 is not a square q^2", "are 4 and 9"]),
        ("3d", ["Mesh.tensor = 4"], 4, ["Mesh.tensor=4 is not a cube q^3", "nearest are 1 and 8"]),
        ("2.5d", ["Mesh.tensor = 4", "Sharding.tensor_depth = 2"], 4,
         ["Mesh.tensor=4 is not tensor_depth q^2", "with Sharding.tensor_depth=2",
          "nearest are 2 and 8"]),
        ("2d", ["Mesh.tensor = 1"], 1, ["'2d' with Mesh.tensor=1: it arranges the ranks"]),
        ("2d", ["Mesh.tensor = 4", "Sharding.tensor_depth = 2"], 4,
         ["Sharding.tensor_depth=2 has no effect with Sharding.tensor_layout='2d'"]),
        ("2d", ["Mesh.tensor = 4", "Sharding.sequence_parallel = True"], 4,
         ["Sharding.tensor_layout='2d' with Sharding.sequence_parallel=True: it already splits"]),
        ("2d", ["Mesh.tensor = 4", "Mesh.context = 2"], 8,
         ["with Mesh.context=2: ", "use Mesh.context=1 or Sharding.tensor_layout='1d'"]),
        ("2d", ["Mesh.tensor = 4", "Mesh.pipe = 2"], 8, ["with Mesh.pipe=2: "]),
        ("2d", ["Mesh.tensor = 4", "GPT.vocab_size = 257"], 4,
         ["GPT.vocab_size=257 does not divide over q=2", "nearest multiple is 256",
          "Sharding.tensor_layout='2d', Mesh.tensor=4"]),
        ("3d", ["Mesh.tensor = 8", "Train.global_batch_size = 10"], 8,
         ["Train.global_batch_size=10", "over the 4 devices"]),
    ],
)  # fmt: skip
def test_what_forms_no_grid_is_refused_with_the_nearest_choice(layout, bindings, devices, words):
    message = refused(f"Sharding.tensor_layout = '{layout}'", *bindings, devices=devices)
    assert [word for word in words if word not in message] == []


def test_a_mixture_of_experts_has_no_grid():
    mesh = ["Mesh.expert = 1", "Mesh.fsdp = 2", "Mesh.tensor = 4"]
    config = load_config("mixtral_tiny", ["Sharding.tensor_layout = '2d'", *mesh])
    with pytest.raises(UserError, match="no table for a mixture of experts"):
        check(config, device_count=8, platform="cpu")


def test_what_fits_passes():
    bindings = [*RUN, "Sharding.tensor_layout = '2.5d'", "Sharding.tensor_depth = 2"]
    config = load_config("gpt_quickstart", [*bindings, "Mesh.tensor = 8"])
    check(config, device_count=8, platform="cpu")
    shape = abstract_layout(config, 8).mesh.shape
    assert (shape["depth"], shape["row"], shape["tensor"]) == (2, 2, 2)
    assert factor_tensor("3d", 27, 1) == {"depth": 3, "row": 3, "tensor": 3}
    assert factor_tensor("2.5d", 18, 2) == {"depth": 2, "row": 3, "tensor": 3}
