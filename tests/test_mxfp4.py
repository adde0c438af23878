"""MXFP4: blocks of 4 bits are the floats that transformers makes of them, and a folder comes in."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.folder import Folder
from jaxtrain.models.weights.formats.mxfp4 import METHOD, Mxfp4Tensor, merge
from jaxtrain.models.weights.formats.safetensors import read_header

SHAPE = (3, 5, 2, 16)  # matrices, columns, blocks, bytes of a block


def packed(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Every byte there is, and scales that leave numbers within float16's range."""
    blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
    return blocks, rng.integers(120, 128, shape, np.uint8)


@pytest.fixture
def stored(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    save_file = pytest.importorskip("safetensors.torch").save_file
    blocks, scales = packed(np.random.default_rng(0), *SHAPE[:3])
    scales[0, 0] = 0, 252  # the smallest, and the largest whose numbers bfloat16 has
    tensors = {"w_blocks": torch.tensor(blocks), "w_scales": torch.tensor(scales)}
    save_file(tensors, tmp_path / "model.safetensors")
    return read_header(tmp_path / "model.safetensors"), tensors


def test_numbers_are_those_of_transformers(stored):
    module = pytest.importorskip("transformers.integrations.mxfp4", reason="the peer")
    header, tensors = stored
    found = merge(header, where="there")["w"]
    assert isinstance(found, Mxfp4Tensor)
    assert (found.shape, found.dtype) == ((3, 64, 5), "BF16")
    there = module.convert_moe_packed_tensors(tensors["w_blocks"], tensors["w_scales"])
    ours = found.open()
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours.astype(np.float32), there.float().numpy())


def test_what_is_no_mxfp4_is_refused(stored):
    header, _ = stored
    with pytest.raises(UserError, match=r"there: w_blocks has no w_scales next to it"):
        merge({"w_blocks": header["w_blocks"]}, where="there")
    with pytest.raises(UserError, match=r"w_blocks \[3, 5, 2\] of U8 with scales .* is not MXFP4"):
        merge({"w_blocks": header["w_scales"], "w_scales": header["w_scales"]}, where="there")


@pytest.mark.slow
def test_a_folder_of_four_bits_comes_in_and_goes_out_as_floats(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
    transformers = pytest.importorskip("transformers", reason="transformers is the peer")
    from rich.console import Console  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    from jaxtrain.run.huggingface import importing, receipt  # noqa: PLC0415
    from jaxtrain.run.trainer import Trainer  # noqa: PLC0415
    from jaxtrain.training.settings import load_config  # noqa: PLC0415

    config = transformers.GptOssConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=3,
        num_experts_per_tok=2, max_position_embeddings=24, sliding_window=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    there, source = transformers.GptOssForCausalLM(config), tmp_path / "source"
    there.save_pretrained(source)
    file, rng = source / "model.safetensors", np.random.default_rng(0)
    tensors, floats = load_file(file), {}
    module = __import__("transformers.integrations.mxfp4", fromlist=["mxfp4"])
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        E, rows, columns = tensors.pop(name).shape
        blocks, scales = (torch.tensor(x) for x in packed(rng, E, columns, rows // 32))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = module.convert_moe_packed_tensors(blocks, scales).float()
    save_file(tensors, file, {"format": "pt"})
    said = json.loads((source / "config.json").read_text())
    said["quantization_config"] = {"quant_method": METHOD, "modules_to_not_convert": []}
    (source / "config.json").write_text(json.dumps(said))
    there.load_state_dict({**there.state_dict(), **floats})

    config = load_config(f"hf:{source}", ["Mesh.fsdp=8"])
    found = importing.import_run(
        config, tmp_path / "run", console=Console(quiet=True), report=print
    )
    assert found.passed
    trainer = Trainer(
        load_config(tmp_path / "run" / "config.gin"), tmp_path / "run", read_only=True
    )
    tokens = rng.integers(0, 61, (1, 24))
    with torch.no_grad():
        expected = there.eval()(torch.tensor(tokens)).logits.numpy()
    ours = receipt.logits_of(
        trainer.program.setup, trainer.config.train.model, trainer.state.params, tokens
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert trainer.export_huggingface(tmp_path / "out").passed
    assert "quantization_config" not in Folder(tmp_path / "out").content
