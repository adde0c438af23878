"""Quantized weights for use after training.

AWQ is what a PyTorch statement of the paper has, its folder what AutoAWQ's published unpacking
reads, and runs read what they were told to hold.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from chat_model import save_model, save_tokenizer
from conftest import make_layout, make_step
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.weights.folder import Folder
from jaxtrain.models.weights.formats.awq import merge
from jaxtrain.models.weights.formats.safetensors import read_header
from jaxtrain.nn.matmul.quantized import dequantize, quantize, unpack
from jaxtrain.run.activation_aware import (
    EVERY,
    best_scales,
    clip_weight,
    read_by,
    rows_of,
    scale,
    scaling_groups,
)
from jaxtrain.run.checkpoint.manifest import CheckpointError
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.huggingface.receipt import logits_of
from jaxtrain.run.trainer import Trainer
from jaxtrain.run.weights import on_host, shard_weights
from jaxtrain.training.settings import load_config

GROUP = 16
README = Path(__file__).parent.parent / "README.md"
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 352}
SPLIT = ["-b", "Mesh.data=4", "-b", "Mesh.fsdp=2", "-b", "Precision.compute='float32'"]


def rounded_by_torch(weight_OI: torch.Tensor, group: int) -> tuple[torch.Tensor, ...]:
    """16 even steps a group, from its least number or 0 to its largest or 0: floats and codes."""
    groups = weight_OI.reshape(-1, group)
    least = groups.amin(1, keepdim=True).clamp(max=0)
    largest = groups.amax(1, keepdim=True).clamp(min=0)
    steps = ((largest - least) / 15).half().float()
    zeros = torch.round(-least / steps).clamp(0, 15)
    codes = (torch.round(groups / steps) + zeros).clamp(0, 15)
    return ((codes - zeros) * steps).reshape(weight_OI.shape), codes.reshape(weight_OI.shape)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_codes_and_floats_are_those_of_even_steps_between_a_groups_ends():
    axes = ("layers", "heads", "head_dim", "embed")  # what writes to the stream sums over two
    weight = drawn(2, 2, 32, 24) + 0.3
    weight[0, 0, :16] = np.abs(weight[0, 0, :16])  # a group of which none is negative
    weight[1, 1, 16:] = 0.0
    found = quantize(weight, axes, (1, 2), "int4", group=GROUP)
    theirs = torch.tensor(weight.transpose(0, 3, 1, 2).copy())
    floats, codes = rounded_by_torch(theirs.reshape(2 * 24, -1), GROUP)
    ours = np.asarray(unpack(found)).transpose(0, 3, 1, 2).reshape(2 * 24, -1)
    told = ~np.isnan(codes.numpy())  # of zeros alone 0 / 0
    np.testing.assert_array_equal(ours[told], codes.numpy()[told])
    made = np.asarray(dequantize(found)).transpose(0, 3, 1, 2).reshape(2 * 24, -1)
    np.testing.assert_array_equal(made[told], floats.numpy()[told])
    assert (made[~told] == 0).all()
    assert (~told).sum() == 24 * 16
    assert found.codes.nbytes == weight.size // 2


def test_scales_are_those_that_the_paper_searches_for():
    x = torch.tensor(drawn(96, 64)) * torch.tensor(np.exp(drawn(64, seed=2)))
    weight = torch.tensor(drawn(40, 64, seed=1))  # [out, in]
    size, errors, scales = x.abs().mean(0), [], []
    for step in range(20):
        s = (size ** (step / 20)).clamp(min=1e-4)
        s = s / (s.max() * s.min()).sqrt()
        made = (x / s) @ rounded_by_torch(weight * s, GROUP)[0].T
        errors.append(float((made - x @ weight.T).pow(2).mean()))
        scales.append(s)
    best = int(np.argmin(errors))
    assert 0 < best < 19  # neither end, or a search of the wrong direction would pass
    assert errors[best] < 0.9 * errors[0]
    found, alpha = best_scales(x.numpy(), weight.numpy().T.copy(), group=GROUP)
    assert float(alpha) == pytest.approx(best / 20)
    np.testing.assert_allclose(found, scales[best], rtol=1e-5)


def test_groups_are_clipped_to_the_range_that_a_statement_of_the_search_finds():
    x = torch.tensor(drawn(96, 64)) * torch.tensor(np.exp(drawn(64, seed=2)))
    weight = torch.tensor(drawn(40, 64, seed=1)) ** 3  # [out, in], with long tails
    groups = weight.reshape(40, -1, GROUP)
    parts = x.reshape(96, -1, GROUP)
    whole = torch.einsum("ngs,ogs->nog", parts, groups)
    errors, cuts = [], []
    for step in range(10):
        most = groups.abs().amax(2, keepdim=True) * (1 - step / 20)
        cuts.append(groups.clamp(-most, most))
        few = rounded_by_torch(cuts[-1].reshape(-1, GROUP), GROUP)[0].reshape(groups.shape)
        made = torch.einsum("ngs,ogs->nog", parts, few)
        errors.append((made - whole).pow(2).sum(0))
    best = torch.stack(errors).argmin(0)
    assert 0 < float(best.float().mean()) < 9
    wanted = torch.gather(torch.stack(cuts), 0, best[None, ..., None].expand(1, *groups.shape))[0]
    found, shares = clip_weight(x.numpy(), weight.numpy().T.copy(), group=GROUP)
    np.testing.assert_allclose(shares, 1 - best.numpy().T / 20, rtol=1e-6)
    np.testing.assert_allclose(found, wanted.reshape(weight.shape).numpy().T, rtol=1e-6)


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """A folder of transformers' and its model."""
    folder = tmp_path_factory.mktemp("llama")
    save_tokenizer(folder)
    return folder, save_model(folder, **SIZES)


@pytest.fixture(scope="module")
def trainer(peer):
    mesh = ["Mesh.fsdp = 1", "Precision.compute = 'float32'"]
    return Trainer(load_config(f"hf:{peer[0]}", mesh), devices=jax.devices()[:1])


# Every layer of two models; scaled models are in the fast part.
@pytest.mark.slow
def test_what_weights_read_is_what_their_hooks_see(peer, trainer):
    tokens = rows_of(np.random.default_rng(0).integers(0, 352, 200).tolist(), 50)
    assert tokens.shape == (4, 50)
    seen: dict[str, list[np.ndarray]] = {
        "q_proj": [],
        "o_proj": [],
        "gate_proj": [],
        "down_proj": [],
    }
    handles = [
        getattr(part, name).register_forward_pre_hook(
            lambda _, given, name=name: seen[name].append(given[0].numpy().copy())
        )
        for layer in peer[1].model.layers
        for part in (layer.self_attn, layer.mlp)
        for name in seen
        if hasattr(part, name)
    ]
    with torch.no_grad():
        peer[1](torch.tensor(tokens).long())
    for handle in handles:
        handle.remove()
    names = ["query", "out", "gate", "down"]
    found = read_by(trainer.program.setup, trainer.state, tokens, names)
    for name, theirs in zip(names, seen.values(), strict=True):
        wanted = np.stack(theirs)[:, :, ::EVERY]
        ours = found[name].reshape(wanted.shape)
        np.testing.assert_allclose(ours, wanted, atol=1e-4, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("kv_heads", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_a_scaled_model_computes_what_it_did(kv_heads):
    sizes = Llama(
        vocab_size=61, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=kv_heads, mlp_dim=48,
        context_length=16, qkv_bias=True,
    )  # fmt: skip
    of = scaling_groups(sizes)
    assert len(of) == (4 if kv_heads == 4 else 3)
    program = make_step(sizes, make_layout(fsdp=1))
    weights = on_host(program.create(0).params, None)
    rng = np.random.default_rng(0)
    weights = {name: x + 0.1 * rng.standard_normal(x.shape, np.float32)
               for name, x in weights.items()}  # fmt: skip
    before = {name: x.copy() for name, x in weights.items()}
    widths = {"query": 32, "gate": 32, "out": 32, "down": 48}
    sizes_I = {name: np.exp(drawn(width)) for name, width in widths.items()}
    seen = {one.readers[0]: drawn(2, 24, widths[one.readers[0]]) * sizes_I[one.readers[0]]
            for one in of}  # fmt: skip
    scale(weights, seen, of, group=GROUP, report=lambda _: None)
    assert not np.allclose(weights["layers/down"], before["layers/down"], rtol=0.1)
    tokens = rng.integers(0, 61, (2, 16))
    shapes = program.abstract_state().params
    was, now = (
        logits_of(program.setup, sizes, shard_weights(shapes, values, None), tokens)
        for values in (before, weights)
    )
    np.testing.assert_allclose(now, was, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def run(peer, tmp_path_factory):
    """The imported run."""
    folder = tmp_path_factory.mktemp("runs") / "float"
    assert main(["import-hf", str(peer[0]), "--workdir", str(folder), *SPLIT]) == 0
    return folder


def opened(folder: Path, *bindings: str) -> Trainer:
    one = ["Mesh.data=1", "Mesh.fsdp=1"]
    config = load_config(folder / "config.gin", [*one, *bindings])
    return Trainer(config, folder, read_only=True, devices=jax.devices()[: 4 if bindings else 1])


def by_autoawq(tensors: dict[str, torch.Tensor], stem: str) -> torch.Tensor:
    """A weight [out, in] by the unpacking that AutoAWQ's packing_utils.py documents."""
    shifts = torch.arange(0, 32, 4)
    back = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])

    def unpacked_of(name: str) -> torch.Tensor:
        packed = tensors[f"{stem}.{name}"]
        assert packed.dtype == torch.int32
        apart = torch.bitwise_right_shift(packed[:, :, None], shifts) & 15
        return apart[:, :, back].reshape(packed.shape[0], -1)

    codes, zeros, scales = unpacked_of("qweight"), unpacked_of("qzeros"), tensors[f"{stem}.scales"]
    assert scales.dtype == torch.float16
    group = codes.shape[0] // scales.shape[0]
    assert group == GROUP
    each = [one.repeat_interleave(group, 0) for one in (zeros, scales.float())]
    return ((codes - each[0]).float() * each[1]).T


@pytest.mark.slow
@pytest.mark.rotated("peers")
def test_a_run_in_four_bits_is_autoawqs_folder_and_transformers_model(run, tmp_path, capsys):
    few, out = tmp_path / "few", tmp_path / "awq"
    words = ["--out", str(few), "--group-size", str(GROUP), "--calibrate", str(README)]
    assert main(["quantize", "--workdir", str(run), *words]) == 0
    said = capsys.readouterr().out
    assert "a weight of the layers takes 5.50 bits" in said  # 4 + (16 + 8) / 16
    assert "down: scaled by" in said
    assert "down: clipped to" in said
    assert main(["export-hf", "--workdir", str(few), "--out", str(out), "--awq"]) == 0
    receipt = json.loads((out / "parity.json").read_text())
    assert receipt["passed"]
    assert receipt["compared_with"] == "itself"
    assert "this run's codes" in receipt["logits"]["against"]
    assert receipt["logits"]["largest_logit"] > 0.1
    assert receipt["logits"]["largest_difference"] < 1e-5
    told = json.loads((out / "config.json").read_text())["quantization_config"]
    assert told == {
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP,
        "zero_point": True, "modules_to_not_convert": None,
    }  # fmt: skip
    tensors = load_file(out / "model.safetensors")
    stems = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    assert len(stems) == 2 * 7
    whole = {f"{stem}.weight": by_autoawq(tensors, stem) for stem in stems}
    whole |= {name: x.float() for name, x in tensors.items() if not name.startswith(tuple(stems))}
    trainer = opened(few)
    assert main(["export-hf", "--workdir", str(few), "--out", str(tmp_path / "floats")]) == 0
    floats = load_file(tmp_path / "floats" / "model.safetensors")
    assert floats.keys() == whole.keys()
    read = Folder(out).tensors()
    assert read.keys() == floats.keys()
    for stem in stems:
        assert torch.equal(floats[f"{stem}.weight"], whole[f"{stem}.weight"]), stem
        assert np.array_equal(read[f"{stem}.weight"].open(), whole[f"{stem}.weight"].numpy()), stem
    peer = LlamaForCausalLM.from_pretrained(tmp_path / "floats").eval()
    tokens = np.random.default_rng(0).integers(0, 352, (2, 24))
    with torch.no_grad():
        theirs = peer(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(trainer.logits(tokens), theirs, atol=1e-3, rtol=1e-4)
    prompt = tokens[:1, :8].tolist()
    (answer,) = trainer.answers(prompt, sampling=Sampling(temperature=0.0), max_new_tokens=5)
    with torch.no_grad():
        made = peer.generate(torch.tensor(prompt), do_sample=False, max_new_tokens=5,
                             pad_token_id=0, eos_token_id=None)  # fmt: skip
    assert answer.tokens == made[0, 8:].tolist()
    split = opened(few, "Mesh.fsdp=2", "Mesh.tensor=2")
    np.testing.assert_allclose(split.logits(tokens), theirs, atol=1e-3, rtol=1e-4)

    config = out / "config.json"
    content = json.loads(config.read_text())
    content["quantization_config"] |= {"bits": 3, "version": "gemv"}
    config.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"(?s)bits = 3; it must be 4.*version = 'gemv'"):
        _ = Folder(out).family_and_model
    header = read_header(out / "model.safetensors")
    del header[f"{stems[0]}.scales"]
    with pytest.raises(UserError, match=r"qweight has no .*\.qzeros and .*\.scales next to it"):
        merge(header, where="there")
    with pytest.raises(UserError, match="; in AutoAWQ's layout it is"):
        merge({**header, f"{stems[0]}.scales": header[f"{stems[0]}.qweight"]}, where="there")


@pytest.mark.slow
def test_eight_bits_are_rounded_as_they_are_and_keep_what_an_import_carried(run, tmp_path, capsys):
    few = tmp_path / "few"
    assert main(["quantize", "--workdir", str(run), "--out", str(few), "--bits", "8"]) == 0
    assert "a weight of the layers takes 8." in capsys.readouterr().out
    floats, held = opened(run).weights(), opened(few)
    text = (few / "config.gin").read_text()
    assert f"TextData.tokenizer = '{few / 'huggingface' / 'tokenizer.json'}'" in text
    codes = held.weights()["layers/down/codes"]
    down = floats["layers/down"]
    step = np.abs(down).max(1, keepdims=True) / 127
    assert codes.dtype == np.int8
    np.testing.assert_array_equal(codes, np.round(down / step))
    short = ["-b", f"TextData.source='{README}'", "-b", "TextData.sequence_length=64",
             "-b", "Train.eval_batches=1"]  # fmt: skip
    losses = []
    for folder in (run, few):
        assert main(["eval", "--workdir", str(folder), *short]) == 0
        losses.append(json.loads(capsys.readouterr().out)["eval_loss"])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    with pytest.raises(UserError, match="cannot be trained; set Finetune.lora_rank"):
        Trainer(load_config(few / "config.gin"), few)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bits", "8", "--group-size", "64"], "--group-size 64 with --bits 8"),
        (["--bits", "8", "--calibrate", "x"], "--calibrate x with --bits 8"),
        ([], "blocks of 128; use --group-size 16, or --bits 8, or fewer"),
        (
            ["--group-size", "15"],
            "--group-size 15: two codes share a byte, so it must be even; the nearest even number",
        ),
        (
            ["--group-size", "0"],
            "--group-size 0: two codes share a byte, so it must be even; the nearest even number",
        ),
        (["--group-size", "16", "--calibrate", "no/where"], "--calibrate no/where"),
    ],
)
def test_what_cannot_be_quantized_is_refused(words, said, run, tmp_path, capsys):
    out = tmp_path / "few"
    assert main(["quantize", "--workdir", str(run), "--out", str(out), *words]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_a_model_without_layers_of_a_transformer_is_refused(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "few"
    few = ["-b", "Train.steps=1", "-b", "Mesh.data=8", "-b", "Mesh.fsdp=1"]
    assert main(["train", "mlp_digits", "--workdir", str(run), *few]) == 0
    for bits in ("4", "8"):
        assert main(["quantize", "--workdir", str(run), "--out", str(out), "--bits", bits]) == 2
        told = capsys.readouterr().err
        assert f"--workdir {run}: the model has no transformer layers to quantize" in told
        assert "Finetune" not in told
    assert not out.exists()


def test_a_folder_that_holds_a_run_and_floats_as_awq_are_refused(run, tmp_path, capsys):
    assert main(["quantize", "--workdir", str(run), "--out", str(run)]) == 2
    assert "there is a run already" in capsys.readouterr().err
    out = str(tmp_path / "awq")
    assert main(["export-hf", "--workdir", str(run), "--out", out, "--awq"]) == 2
    assert "quantize it first" in capsys.readouterr().err


# tests/test_full_disk.py has files that find no room in the fast part.
@pytest.mark.slow
def test_a_run_that_finds_no_room_is_not_half_there(run, tmp_path, monkeypatch, capsys):
    """A folder with an empty `checkpoints` was rejected as a run by the next try."""
    full = CheckpointError("the checkpoint of step 0 could not be written")

    def unsaved(*_, **__):
        raise full

    (tmp_path / "mine").mkdir()
    words = ["quantize", "--workdir", str(run), "--bits", "8", "--out"]
    with monkeypatch.context() as patch:
        patch.setattr("jaxtrain.run.checkpoint.store.Checkpoints.wait", unsaved)
        for out in ("new", "mine"):
            assert main([*words, str(tmp_path / out)]) == 1
            assert str(full) in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "mine" / "checkpoints").exists()
    assert main([*words, str(tmp_path / "mine")]) == 0
