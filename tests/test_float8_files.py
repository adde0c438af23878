"""Float8 files: blocks of 8 bits are the floats that PyTorch makes of them, a folder comes in."""

import json

import numpy as np
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.formats.float8 import METHOD, Float8Tensor, merge
from jaxtrain.models.weights.formats.safetensors import read_header

torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
BLOCK = [4, 8]
SETTINGS = {"quant_method": METHOD, "fmt": "e4m3", "weight_block_size": BLOCK}


def quantized(matrix):
    """Codes and scales, each block's largest number 448, and the floats that they stand for."""
    rows, columns = matrix.shape
    filled = torch.zeros(-(-rows // 4) * 4, -(-columns // 8) * 8)
    filled[:rows, :columns] = matrix
    blocks = filled.reshape(filled.shape[0] // 4, 4, -1, 8)
    scales = blocks.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(4, 0).repeat_interleave(8, 1)[:rows, :columns]
    codes = (matrix / spread).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread


@pytest.fixture
def stored(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    torch.manual_seed(0)
    codes, scales, floats = quantized(torch.randn(10, 19) * torch.logspace(-3, 3, 19))
    norm = torch.ones(3, dtype=torch.bfloat16)
    save_file({"w": codes, "w_scale_inv": scales, "n": norm}, tmp_path / "model.safetensors")
    return read_header(tmp_path / "model.safetensors"), floats.numpy()


def test_numbers_are_those_of_pytorch_and_others_stay(stored):
    header, floats = stored
    found = merge(header, SETTINGS, where="there")
    assert sorted(found) == ["n", "w"]
    assert found["n"] is header["n"]
    assert isinstance(found["w"], Float8Tensor)
    assert (found["w"].shape, found["w"].dtype) == ((10, 19), "F32")
    np.testing.assert_array_equal(found["w"].open(), floats)


def test_what_is_no_float8_in_such_blocks_is_refused(stored):
    header, _ = stored
    with pytest.raises(UserError, match=r"there: w has no w_scale_inv next to it"):
        merge({"w": header["w"]}, SETTINGS, where="there")
    with pytest.raises(UserError, match=r"w \[10, 19\] .* needs one F32 for each 8 x 8 block"):
        merge(header, {**SETTINGS, "weight_block_size": [8, 8]}, where="there")
    with pytest.raises(UserError, match=r"weight_block_size=None; use the rows and"):
        merge(header, {"quant_method": METHOD}, where="there")


@pytest.mark.slow
def test_a_deepseek_in_float8_comes_in_as_the_floats_that_it_stands_for(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is the peer")
    from rich.console import Console  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415
    from test_huggingface_models import DEEPSEEK  # noqa: PLC0415

    from jaxtrain.run.huggingface import importing, receipt  # noqa: PLC0415
    from jaxtrain.run.trainer import Trainer  # noqa: PLC0415
    from jaxtrain.run.weights import merge_adapters as with_frozen  # noqa: PLC0415
    from jaxtrain.training.settings import load_config  # noqa: PLC0415

    torch.manual_seed(0)
    there = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**DEEPSEEK)).eval()
    floats, eight, source = tmp_path / "floats", {}, tmp_path / "source"
    for folder in (floats, source):
        there.save_pretrained(folder)
    plain = load_file(source / "model.safetensors")
    for name, value in list(plain.items()):
        if name.endswith("_proj.weight") or name.endswith("_a_proj_with_mqa.weight"):
            eight[name], eight[f"{name}_scale_inv"], plain[name] = quantized(value)
        else:
            eight[name] = value
    save_file(plain, floats / "model.safetensors", {"format": "pt"})
    save_file(eight, source / "model.safetensors", {"format": "pt"})
    said = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**said, "quantization_config": SETTINGS}))

    config = load_config(f"hf:{source}", ["Mesh.fsdp=2", "Mesh.expert=4"])
    found = importing.import_run(
        config, tmp_path / "run", console=Console(quiet=True), report=print
    )
    assert found.passed
    workdir = tmp_path / "run"
    trainer = Trainer(load_config(workdir / "config.gin"), workdir, read_only=True)
    tokens = np.random.default_rng(0).integers(0, 64, (1, 24))
    there = transformers.DeepseekV3ForCausalLM.from_pretrained(floats, dtype="float32").eval()
    with torch.no_grad():
        expected = there(torch.tensor(tokens)).logits.numpy()
    program = trainer.program.setup
    params = with_frozen(program, trainer.state)
    ours = receipt.logits_of(program, trainer.config.train.model, params, tokens)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
