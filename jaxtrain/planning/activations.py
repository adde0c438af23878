"""Bytes of activations that a layer keeps for its backward pass, in closed form.

Source, unless another is named: Korthikanti et al. 2022, "Reducing Activation Recomputation in
Large Transformer Models" (arXiv 2205.05198), section 4. Its letters are s, b, h, a, t; here B is
the batch that a device computes with, T sequence length, D embed, N query heads, K kv heads, H
head_dim, F mlp, V vocab, t devices along tensor. Activations have 2 bytes and dropout masks 1, as
there; statistics of norms (two numbers a token) are left out, as there. D = N H throughout.
"""


def gpt_layer(B: int, T: int, D: int, N: int, *, tensor: int = 1) -> float:
    """B T D (10 + 24 / t + 5 N T / (D t)); with t = 1 B T D (34 + 5 N T / D)
    (sections 4.1 and 4.2.1).

    In bytes of B T D: attention's input 2, queries and keys 4, values 2, the result 2, the dropout
    mask after it 1; the mlp's input 2, the input of its GELU 8, the result 8, its dropout mask 1;
    the inputs of two norms 4. In bytes of B N T^2: softmax 2, its dropout mask 1, what is left 2.
    Inputs, outer masks and norms (10) are whole on each device of a tensor axis.
    """
    return B * T * D * (10 + 24 / tensor) + scores(B, T, N, tensor=tensor)


def gpt_layer_sequence(B: int, T: int, D: int, N: int, *, tensor: int) -> float:
    """With sequence parallelism all of `gpt_layer` is split: B T D (34 + 5 N T / D) / t
    (section 4.2.2)."""
    return gpt_layer(B, T, D, N) / tensor


def scores(B: int, T: int, N: int, *, tensor: int = 1) -> float:
    """5 B N T^2 / t: softmax, its dropout mask, and what dropout leaves of it."""
    return 5 * B * N * T**2 / tensor


def gpt_layer_selective(B: int, T: int, D: int, N: int, *, tensor: int = 1) -> float:
    """Scores recomputed: `gpt_layer` without `scores` (section 5)."""
    return gpt_layer(B, T, D, N, tensor=tensor) - scores(B, T, N, tensor=tensor)


def layer_full_remat(B: int, T: int, D: int) -> float:
    """Everything recomputed from the layer's input: 2 B T D (table 2), of any layer."""
    return 2 * B * T * D


def gpt_layer_without_dropout(B: int, T: int, D: int, N: int, *, tensor: int = 1) -> float:
    """B T D (8 + 24 / t) + 2 B N T^2 / t: no masks, and the softmax itself goes on to the values.

    Derived from `gpt_layer`: two masks of B T D and 1 + 2 bytes of B N T^2 fall away.
    """
    return B * T * D * (8 + 24 / tensor) + softmax(B, T, N, tensor=tensor)


def softmax(B: int, T: int, N: int, *, tensor: int = 1) -> float:
    """2 B N T^2 / t: all that attention without dropout keeps of its scores."""
    return 2 * B * N * T**2 / tensor


def flash_statistics(B: int, T: int, N: int, *, tensor: int = 1) -> float:
    """4 B N T / t: the float32 logsumexp of each query, which a flash kernel (arXiv 2205.14135,
    section 3.1) keeps instead of scores; the result that it also keeps is the next product's
    input."""
    return 4 * B * N * T / tensor


def gpt_layer_flash(B: int, T: int, D: int, N: int, *, tensor: int = 1) -> float:
    """`gpt_layer_without_dropout` with a flash kernel: logsumexps instead of the softmax."""
    whole = gpt_layer_without_dropout(B, T, D, N, tensor=tensor)
    kept, instead = softmax(B, T, N, tensor=tensor), flash_statistics(B, T, N, tensor=tensor)
    return whole - kept + instead


def llama_layer_flash(B: int, T: int, D: int, N: int, K: int, F: int, *, tensor: int = 1) -> float:
    """A layer with grouped-query attention, a gated mlp, no dropout, and a flash kernel:
    B T (8 D + (4 D + 4 K H + 8 F) / t) + 4 B N T / t.

    Derived as in `gpt_layer`, in elements a token, each of 2 bytes. Whole: the inputs of two norms
    2 D, and of attention and mlp 2 D. Split: queries D, keys and values 2 K H, attention's result
    D; the input of silu F, its result F, the other factor F (the product of both needs each), the
    product F.
    """
    split = 4 * D + 4 * K * (D // N) + 8 * F
    return B * T * (8 * D + split / tensor) + flash_statistics(B, T, N, tensor=tensor)


def llama_layer(B: int, T: int, D: int, N: int, K: int, F: int, *, tensor: int = 1) -> float:
    """`llama_layer_flash` with the softmax kept instead of logsumexps."""
    whole = llama_layer_flash(B, T, D, N, K, F, tensor=tensor)
    kept, instead = softmax(B, T, N, tensor=tensor), flash_statistics(B, T, N, tensor=tensor)
    return whole + kept - instead


def llama_layer_flash_sequence(
    B: int, T: int, D: int, N: int, K: int, F: int, *, tensor: int
) -> float:
    """With sequence parallelism all of `llama_layer_flash` is split over the tensor axis."""
    return llama_layer_flash(B, T, D, N, K, F) / tensor


def logits(B: int, T: int, V: int, *, tensor: int = 1, element_bytes: int = 4) -> float:
    """e B T V / t: one array of logits; float32 has e = 4 (section 4.3).

    With a loss in chunks T is the chunk. A backward pass has their gradient, as large, beside them.
    """
    return element_bytes * B * T * V / tensor
