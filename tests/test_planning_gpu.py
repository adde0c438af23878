"""Plans by a GPU's own compiler, with no GPU: what moves has its reason, and memory its verdict."""

import pytest

from jaxtrain import load_config
from jaxtrain.analysis.planning.plan import plan

SEQUENCE = ("Mesh.tensor=4", "Mesh.data=2", "Sharding.sequence_parallel=True")


@pytest.mark.cuda_compile
@pytest.mark.parametrize(
    ("name", "target", "bindings"),
    [
        ("gpt2_124m", "h200:1x8", ("Mesh.data=8",)),
        ("gpt2_124m", "h100:2x8", ("Mesh.data=2", "Mesh.fsdp=8")),
        ("gpt2_124m", "h100:1x8", (*SEQUENCE, "GPT.vocab_size=50304")),
        ("mixtral_8x7b", "h100:8x8", ()),
        ("bert_tiny", "h100:1x8", ("Mesh.data=8",)),
    ],
)
def test_what_a_gpus_program_moves_has_its_reasons(name, target, bindings):
    data = [] if name == "bert_tiny" else ["SOURCE='x'", "TOKENIZER='x'"]
    found = plan(load_config(name, [*data, *bindings]), target)
    assert found.compiled is not None
    assert [row for row in found.rows if not row.explained] == []


@pytest.mark.cuda_compile
def test_experts_that_take_all_who_come_cost_each_token_its_own():
    """XLA's own products of theirs cost eight times as much: a copy of all rows for each expert."""
    sizes = {"num_layers": 2, "embed_dim": 1024, "mlp_dim": 3584, "num_heads": 8}
    words = [f"Mixtral.{name}={size}" for name, size in sizes.items()]
    words += ["Mixtral.capacity_factor=None", "Mesh.expert=1", "Train.global_batch_size=8"]
    words += ["Train.accumulation=1", "SOURCE='x'", "TOKENIZER='x'"]
    found = plan(load_config("mixtral_8x7b", words), "h100:1x8")
    assert found.compiled is not None
    text = found.compiled.text
    assert text.count("grouped_rows/pallas_call") >= 9  # forward, done again, and for their inputs
    assert text.count("grouped_weights/pallas_call") >= 3
    assert "[8,16384,1024]" not in text
    assert "[8,16384,3584]" not in text
    assert 0.8 < found.time.compute / found.time.estimate.compute < 1.25


@pytest.mark.cuda_compile
def test_a_product_without_tiles_is_left_to_cublas_and_said():
    found = plan(load_config("t5_tiny", ["Mesh.fsdp=8"]), "h100:1x8")
    assert found.compiled is not None
    assert any("xla_gpu_enable_triton_gemm=false" in words for words in found.compiled.warnings)
    assert any("cannot choose the tiles" in words for words in found.advice)


@pytest.mark.cuda_compile
def test_what_compiles_and_has_no_room_is_told_apart_from_what_does_not_compile():
    large = ("Train.global_batch_size=4096", "Train.accumulation=1", "Remat.policy='none'")
    config = load_config("gpt2_124m", ["SOURCE='x'", "TOKENIZER='x'", "Mesh.data=8", *large])
    found = plan(config, "h100:1x8")
    assert found.compiled is not None
    assert found.compiled.error is None
    assert found.compiled.temp_bytes > 80 * 2**30
    assert found.verdict == "compiles, but would run out of memory"
    assert {fix.fits for fix in found.fixes} == {True}
