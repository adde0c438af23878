"""Grouped matmul kernels (Triton without a GPU, tiles on one CPU) against XLA's ragged_dot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_experts
from conftest import make_layout
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain import load_config
from jaxtrain.analysis.planning.compiled.costs import costs
from jaxtrain.analysis.planning.compiled.hlo import parse
from jaxtrain.analysis.planning.textbook.flops import count_flops
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.matmul import grouped_kernel, grouped_tiles
from jaxtrain.nn.matmul.grouped import Grouped
from jaxtrain.nn.remat import Remat
from jaxtrain.parallel.devices import OLD_GPU
from jaxtrain.training import compose, layouts

# Rows, what is summed over, what comes of it, rows of each expert. In turn: rows that are nobody's
# and an expert without; nothing divides; one has all; there are none; experts end with tiles.
CASES = {
    "some_left": (256, 64, 128, (100, 0, 120)),
    "odd": (300, 48, 40, (1, 150, 0, 149)),
    "one_has_all": (64, 16, 16, (64, 0)),
    "none": (37, 100, 7, (0, 0, 0)),
    "whole_tiles": (512, 192, 320, (128, 256, 128)),
}


@pytest.fixture
def without_gpu(monkeypatch):
    """The kernels run as they are written, by JAX's interpreter."""
    for name in ("of_rows", "of_weights"):
        own = functools.partial(getattr(grouped_kernel, name), interpret=True)
        monkeypatch.setattr(grouped_kernel, name, own)


def value_and_gradients(by: Grouped, x, w, sizes, g) -> tuple[jax.Array, ...]:
    """Of a product, its gradients for what comes of it."""
    y, transpose = jax.vjp(lambda x, w: by(x, w, sizes), x, w)
    return y, *transpose(g)


def drawn(case: str, dtype: str) -> tuple[jax.Array, ...]:
    """Rows, weights, rows of each expert, and a gradient."""
    N, K, M, sizes = CASES[case]
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((N, K), (len(sizes), K, M), (N, M))
    x, w, g = (jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))
    return x, w, jnp.asarray(sizes, jnp.int32), g


# The cases that are left run the same code.
@pytest.mark.slow_cases("none-float32-1e-05-triton")
@pytest.mark.slow_cases(
    "some_left-float32-1e-05-tiles",
    "whole_tiles-float32-1e-05-tiles",
    "odd-bfloat16-0.01-tiles",
    "some_left-float32-1e-05-triton",
    "whole_tiles-float32-1e-05-triton",
    "odd-float32-1e-05-tiles",
    "one_has_all-float32-1e-05-triton",
    "none-float32-1e-05-tiles",
)
@pytest.mark.parametrize("kernel", ["triton", "tiles"])
@pytest.mark.parametrize(
    ("case", "dtype", "tolerance"),
    [*((case, "float32", 1e-5) for case in CASES), ("odd", "bfloat16", 1e-2)],
)
def test_the_product_and_both_gradients_are_those_of_ragged_dot(
    case, dtype, tolerance, kernel, without_gpu
):
    given = drawn(case, dtype)
    found, expected = (value_and_gradients(Grouped(kernel=k), *given) for k in (kernel, "xla"))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == dtype
        largest = max(1.0, float(jnp.abs(other).max()))
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), atol=tolerance * largest
        )
    if case != "none":
        assert all(float(jnp.abs(one).max()) > 1 for one in expected)


@pytest.mark.parametrize("kernel", ["triton", "tiles"])
def test_in_float8_too(kernel, without_gpu):
    given = drawn("odd", "float32")
    found, expected = (
        value_and_gradients(Grouped(float8=True, kernel=k), *given) for k in (kernel, "xla")
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    exact = value_and_gradients(Grouped(), *given)
    assert float(jnp.abs(found[0] - exact[0]).max()) > 1e-2  # it was float8


@pytest.mark.parametrize("kernel", ["triton", "tiles"])
def test_what_another_expert_has_that_is_no_number_stays_with_it(kernel, without_gpu):
    x, w, sizes, g = drawn("odd", "float32")
    x = x.at[0].set(jnp.inf)  # the first expert's only row
    of_weights = value_and_gradients(Grouped(kernel=kernel), x, w, sizes, g)[2]
    assert not np.isfinite(of_weights[0]).any()
    assert np.isfinite(of_weights[1:]).all()


visits = jax.jit(grouped_kernel.visits, static_argnums=(1, 2))


@settings(deadline=None)
@given(st.lists(st.integers(0, 201), min_size=4, max_size=4), st.sampled_from([16, 64]))
def test_every_row_is_of_one_visit_of_its_expert(cuts, rows):
    """201 rows of four experts, and those after the last's that are nobody's."""
    N, ends = 201, sorted(cuts)
    sizes = np.diff([0, *ends])
    whose = np.repeat(np.arange(5), [*sizes, N - ends[-1]])
    seen = np.zeros(N, int)
    for tile, begin, end, expert in np.asarray(visits(jnp.asarray(sizes, jnp.int32), N, rows)):
        assert 0 <= tile < -(-N // rows)
        own = np.arange(tile * rows, (tile + 1) * rows)
        own = own[(own >= begin) & (own < end)]
        seen[own] += 1
        assert (whose[own] == expert).all()
    assert (seen == 1).all()


def test_a_gpus_program_has_the_kernels_and_no_copies_of_the_rows():
    """Lowered, not compiled: that needs a GPU's compiler (`test_planning_gpu`)."""
    x, w, sizes, g = drawn("whole_tiles", "bfloat16")
    of_one = functools.partial(value_and_gradients, Grouped(kernel="triton"))
    text = jax.jit(of_one).trace(x, w, sizes, g).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "__gpu$xla.gpu.triton" in line]
    assert [grouped_kernel.OF_WEIGHTS in line for line in calls].count(True) == 1
    assert [grouped_kernel.OF_ROWS in line for line in calls].count(True) == 2
    assert "tensor<3x512x" not in text


def test_its_flops_are_those_of_ragged_dot():
    x, w, sizes, _ = drawn("odd", "float32")

    def counted(kernel):
        by = Grouped(kernel=kernel)
        step = jax.grad(lambda x, w: by(x, w, sizes).sum(), (0, 1))
        return count_flops(jax.make_jaxpr(step)(x, w))

    N, K, M, _ = CASES["odd"]
    assert counted("triton").matmul == counted("xla").matmul == 3 * 2 * N * K * M
    assert counted("triton").matmul_least == 3 * 2 * N * K * M
    # A tile more for each expert, and for the rows that are nobody's.
    visited = (3 + len(w)) * grouped_tiles.ROWS
    assert counted("tiles").matmul == 3 * 2 * visited * K * M
    assert not counted("tiles").unknown_loops


CALL = """
HloModule jit_f
ENTRY %main (v: s32[5,4], x: bf16[256,64], w: bf16[3,64,128]) -> bf16[256,128] {
  %v = s32[5,4]{1,0} parameter(0)
  %x = bf16[256,64]{1,0} parameter(1)
  %w = bf16[3,64,128]{2,1,0} parameter(2)
  ROOT %out = bf16[256,128]{1,0} custom-call(%v, %x, %w), TARGET, metadata={WHERE}
}
""".replace("TARGET", 'custom_call_target="__gpu$xla.gpu.triton"')
CALL = CALL.replace("WHERE", 'op_name="jit(f)/NAME/pallas_call"')


def test_a_programs_text_tells_what_it_costs():
    found = costs(parse(CALL.replace("NAME", grouped_kernel.OF_ROWS)))["out"]
    assert found.flops == 2 * 256 * 64 * 128
    assert found.moved_bytes == 5 * 4 * 4 + 2 * (256 * 64 + 3 * 64 * 128 + 256 * 128)
    assert costs(parse(CALL.replace("NAME", "mha_forward")))["out"].flops is None


def test_what_it_gives_is_not_taken_for_attention():
    x, w, sizes, _ = drawn("odd", "float32")
    saves = Remat(policy="full", save=("attention",)).kept.saves
    by = jax.make_jaxpr(lambda x, w: Grouped(kernel="triton")(x, w, sizes))(x, w)
    calls = [
        inner
        for one in by.eqns
        for inner in one.params.get("call_jaxpr", by).eqns
        if inner.primitive.name == "pallas_call"
    ]
    assert len(calls) == 1
    assert not saves(calls[0].primitive, **calls[0].params)
    assert saves(calls[0].primitive, **{**calls[0].params, "name": "mha_forward"})


def test_a_gpu_has_the_kernel_one_cpu_has_tiles_and_others_have_xlas(monkeypatch):
    config = load_config("mixtral_tiny", ["Mesh.fsdp=1", "Mesh.expert=1"])
    on_one = layouts.layout(config, jax.devices()[:1])
    made = {}
    for platform in ("cpu", "gpu", OLD_GPU, "tpu"):
        monkeypatch.setattr(compose, "platform_of", lambda mesh, platform=platform: platform)
        made[platform] = compose.compose(config, on_one).setup.execution.grouped.kernel
    assert made == {"cpu": "tiles", "gpu": "triton", OLD_GPU: "xla", "tpu": "xla"}
    on_two = layouts.layout(load_config("mixtral_tiny", ["Mesh.expert=1"]), jax.devices()[:2])
    monkeypatch.setattr(compose, "platform_of", lambda mesh: "cpu")
    assert compose.compose(config, on_two).setup.execution.grouped.kernel == "xla"


def test_experts_on_a_mesh_are_those_of_one_device(without_gpu):
    """Between ranks room is left for the worst case: rows that are nobody's."""
    part, own = test_experts.experts(None)
    x = jnp.concatenate([test_experts.X, test_experts.X])[:4]

    def run(kernel):
        def of(weights, x):
            given = {name: own[name].replace(value) for name, value in weights.items()}
            execution = Execution(grouped=Grouped(kernel=kernel))
            return part({"experts": given}, x, Mask(), execution, out=test_experts.OUT)[0]

        return test_experts.outcome(of, test_experts.values(own), x)

    expected = run("xla")
    with make_layout(expert=2, fsdp=2, tensor=2).active():
        found = run("triton")
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(other).max()) > 0
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))


def test_a_gpu_that_has_no_kernel_says_what_that_costs(monkeypatch):
    found = {}
    for platform in ("gpu", OLD_GPU):
        monkeypatch.setattr(layouts, "platform_of", lambda mesh, platform=platform: platform)
        for factor in (None, 1.25):
            one = [f"Mixtral.capacity_factor={factor}", "Mesh.fsdp=1", "Mesh.expert=1"]
            config = load_config("mixtral_tiny", one)
            on_one = layouts.layout(config, jax.devices()[:1])
            found[platform, factor] = layouts.notes(config, on_one)
    (note,) = found.pop((OLD_GPU, None))
    assert "Mixtral.capacity_factor=None" in note
    assert "each of the 8 experts" in note
    assert list(found.values()) == [[], [], []]
