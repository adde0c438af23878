"""Activation bytes equal what PyTorch keeps of the same layer, and the paper's figures."""

import contextlib
import math

import pytest

from jaxtrain import load_config
from jaxtrain.analysis.planning.textbook import formulas, profile
from jaxtrain.analysis.planning.textbook.profile import layer_profile, layer_stash
from jaxtrain.training.layouts import abstract_layout

B, T, D, N, K, F = 3, 16, 96, 4, 2, 80
H = D // N


def kept(layer) -> int:
    """Bytes that autograd keeps of layer(x), weights and numbers a token aside."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    x = torch.randn(B, T, D, dtype=torch.bfloat16, requires_grad=True)
    held, weights = {}, set()

    def weight(*shape):
        made = torch.nn.Parameter(torch.randn(*shape, dtype=torch.bfloat16))
        weights.add(made.untyped_storage().data_ptr())
        return made

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Means and inverse deviations of norms: the formulas leave them out.
        if storage.data_ptr() not in weights and tensor.numel() > T * B:
            held[storage.data_ptr()] = storage  # alive, or another would take its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = layer(torch, weight, x * 1)
    assert alive.shape == x.shape
    return sum(storage.nbytes() for storage in held.values())


def gpt(attend, dropout):
    """A GPT layer of plain PyTorch calls; `attend` is softmax or flash, dropout a probability."""

    def layer(torch, weight, x):
        nn = torch.nn.functional
        h = nn.layer_norm(x, (D,), weight(D), weight(D))
        qkv = nn.linear(h, weight(3 * D, D)).view(B, T, 3, N, H)
        q, k, v = (qkv[:, :, i].permute(0, 2, 1, 3) for i in range(3))
        a = attend(torch, q, k, v, dropout).permute(0, 2, 1, 3).reshape(B, T, D)
        x = x + drop(torch, nn.linear(a, weight(D, D)), dropout)
        h = nn.layer_norm(x, (D,), weight(D), weight(D))
        h = nn.gelu(nn.linear(h, weight(4 * D, D)))
        return x + drop(torch, nn.linear(h, weight(D, 4 * D)), dropout)

    return layer


def drop(torch, x, probability):
    # Not functional.dropout: on a CPU its mask has the dtype of x.
    return torch.native_dropout(x, probability, True)[0] if probability else x


def plain(torch, q, k, v, dropout):
    scores = torch.softmax(q @ k.transpose(-1, -2) * H**-0.5, -1)
    return drop(torch, scores, dropout) @ v


def flash(torch, q, k, v, dropout):
    assert dropout == 0
    # Heads innermost in memory, as the next product wants the result, which lies as q does.
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def llama(attend):
    def layer(torch, weight, x):
        nn = torch.nn.functional

        class Norm(torch.autograd.Function):
            """Keeps its input alone."""

            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return nn.rms_norm(x, (D,))

            @staticmethod
            def backward(ctx, gradient):
                raise AssertionError("only what is kept is looked at")

        h = Norm.apply(x)
        q = nn.linear(h, weight(D, D)).view(B, T, N, H).permute(0, 2, 1, 3)
        k, v = (
            nn.linear(h, weight(K * H, D)).view(B, T, K, H).permute(0, 2, 1, 3) for _ in range(2)
        )
        a = attend(torch, q, k, v).permute(0, 2, 1, 3).reshape(B, T, D)
        x = x + nn.linear(a, weight(D, D))
        h = Norm.apply(x)
        product = nn.silu(nn.linear(h, weight(F, D))) * nn.linear(h, weight(F, D))
        return x + nn.linear(product, weight(D, F))

    return layer


def grouped(torch, q, k, v):
    """Query heads of a group as more queries, so that no key is repeated."""
    q = q.reshape(B, K, N // K * T, H)
    scores = torch.softmax(q @ k.transpose(-1, -2) * H**-0.5, -1)
    return (scores @ v).reshape(B, N, T, H)


def test_a_gpt_layer_keeps_what_korthikanti_says():
    assert kept(gpt(plain, dropout=0.1)) == formulas.gpt_layer(B, T, D, N)
    assert formulas.gpt_layer(B, T, D, N) == B * T * D * (34 + 5 * N * T / D)


def test_a_gpt_layer_without_dropout():
    assert kept(gpt(plain, dropout=0)) == formulas.gpt_layer_without_dropout(B, T, D, N)


def test_a_gpt_layer_with_a_flash_kernel():
    assert kept(gpt(flash, dropout=0)) == formulas.gpt_layer_flash(B, T, D, N)


def test_a_llama_layer():
    assert kept(llama(grouped)) == formulas.llama_layer(B, T, D, N, K, F)
    lighter = formulas.llama_layer_flash(B, T, D, N, K, F)
    saved = formulas.llama_layer(B, T, D, N, K, F) - lighter
    assert saved == 2 * B * N * T * T - 4 * B * N * T


def test_tensor_parallel_devices_together_hold_the_rest_once():
    """Whole on each of t: 10 B T D of a GPT with dropout, 8 without, 8 of a Llama (in bytes)."""
    layers = (
        (10, formulas.gpt_layer),
        (8, formulas.gpt_layer_without_dropout),
        (8, formulas.gpt_layer_flash),
    )
    for whole, layer in layers:
        for t in (2, 4):
            together = t * layer(B, T, D, N, tensor=t)
            assert together - layer(B, T, D, N) == (t - 1) * whole * B * T * D
    llamas = (formulas.llama_layer, formulas.llama_layer_flash)
    for layer in llamas:
        together = 4 * layer(B, T, D, N, K, F, tensor=4)
        assert together - layer(B, T, D, N, K, F) == 3 * 8 * B * T * D


def test_sequence_parallel_devices_hold_everything_once():
    assert 4 * formulas.gpt_layer_sequence(B, T, D, N, tensor=4) == formulas.gpt_layer(B, T, D, N)
    sizes = (B, T, D, N, K, F)
    split = formulas.llama_layer_flash_sequence(*sizes, tensor=4)
    assert 4 * split == formulas.llama_layer_flash(*sizes)


def test_gpt3s_scores_are_most_of_its_activations():
    """5 a s / h is 80 for GPT-3 and 64 for the 530B model (arXiv 2205.05198, section 5), so
    selective recomputation saves 70 and 65 percent."""
    for N, D, ratio, saved in ((96, 12288, 80, 0.70), (128, 20480, 64, 0.65)):
        whole = formulas.gpt_layer(1, 2048, D, N)
        selective = formulas.gpt_layer_selective(1, 2048, D, N)
        assert formulas.scores(1, 2048, N) / (2048 * D) == ratio
        assert 1 - selective / whole == pytest.approx(saved, abs=0.01)
        assert formulas.layer_full_remat(1, 2048, D) == selective / 17
        # With sequence parallelism every part of it is split (table 2).
        both = formulas.gpt_layer_selective_sequence(1, 2048, D, tensor=8)
        rest = formulas.gpt_layer_sequence(1, 2048, D, N, tensor=8)
        assert both == rest - formulas.scores(1, 2048, N, tensor=8) == selective / 8


def test_logits():
    assert formulas.logits(2, 16, 1000) == 4 * 2 * 16 * 1000
    assert formulas.logits(2, 16, 1000, tensor=8, element_bytes=2) == 2 * 2 * 16 * 125
    # A Llama 8B's, of one row: as much as the layer inputs of 32 layers twice over.
    row = formulas.logits(1, 8192, 128256)
    assert row == pytest.approx(3.9 * 2**30, rel=0.01)
    assert math.isclose(row / (32 * formulas.layer_full_remat(1, 8192, 4096)), 1.957, rel_tol=1e-3)


def test_a_layer_s_products_are_those_of_its_experts_too():
    """For one row of T tokens, each at k experts with room for a quarter more: gate, up and what
    goes in and comes out, beside attention's products."""
    sources = ["SOURCE = 'x'", "TOKENIZER = 'x'", "TextData.separate_documents = False"]
    config = load_config("mixtral_8x7b", ["Mesh.fsdp = 8", "Mesh.expert = 8", *sources])
    model, length = config.train.model, config.train.data.sequence_length
    found = layer_profile(config, abstract_layout(config, 64), "tpu").products
    places = 1.25 * model.experts_per_token * length
    experts = 2 * places * (2 * model.mlp_dim + model.embed_dim)
    kv = model.num_kv_heads * model.embed_dim // model.num_heads
    heads = 2 * length * (2 * model.embed_dim + 2 * kv)
    assert experts + heads <= found <= 1.3 * (experts + heads)


LONG = ("Attention.kernel='blocked'", "TextData.sequence_length=1024", "Train.global_batch_size=2",
        "Mesh.data=1", "Mesh.fsdp=2", "Mesh.tensor=1", "Pipeline.backward='recompute'")  # fmt: skip
OF_LONG = {
    "deepseek_tiny": ("DeepSeek.context_length=1024", "Mesh.expert=1"),  # keys wider than values
    "gpt_quickstart": ("GPT.context_length=1024", "TextData.separate_documents=True"),
    "gpt_oss_20b": ("GPTOSS.num_layers=2", "TextData.source='synthetic'",  # sinks, windows
                    "TextData.tokenizer='byte'", "Mesh.expert=1"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "elementwise", "dots", "full", "full, attention saved"])
@pytest.mark.parametrize("name", OF_LONG)
def test_attention_as_one_block_saves_the_bytes_of_its_blocks(name, policy, monkeypatch):
    """16 blocks and several tiles are traced as one, sooner, by the same residuals."""
    policy, _, saved = policy.partition(", ")
    remat = [f"Remat.policy={policy!r}", f"Remat.save={('attention',) if saved else ()}"]
    config = load_config(name, [*LONG, *OF_LONG[name], *remat])
    layout = abstract_layout(config, 2)

    def measure():
        for cache in (profile._residuals_of, profile._stash):
            cache.cache_clear()
        return layer_profile(config, layout, "cpu"), layer_stash(config, layout, "cpu")

    found = measure()
    monkeypatch.setattr(profile, "trace_as_one_block", contextlib.nullcontext)
    assert measure() == found
