"""Parameter and FLOP counts of language models in closed form.

Letters: L layers, D embed, T sequence length, V vocab, C context, N query heads, K kv heads, H
head_dim, F mlp, E experts, k experts per token.
"""

from collections.abc import Iterable


def transformer_parameters(L: int, D: int) -> int:
    """Return 12 L D^2: the rule of thumb for blocks with an mlp of 4 D, without embeddings.

    Attention 4 D^2 and mlp 8 D^2 per layer (arXiv 2001.08361, table 1).
    """
    return 12 * L * D**2


def gpt_parameters(*, V: int, L: int, D: int, C: int) -> int:
    """Return the parameters of a GPT-2: 12 L D^2, biases and norms 13 D per layer, tied embeddings,
    the last norm.

    A layer's vectors: two norms of 2 D, biases of qkv 3 D, out D, up 4 D, down D.
    """
    return transformer_parameters(L, D) + 13 * L * D + (V + C) * D + 2 * D


def attention_parameters(*, D: int, N: int, K: int, H: int) -> int:
    """Return the parameters of a layer's grouped-query attention (arXiv 2305.13245): queries and
    outputs D N H each, keys and values D K H each."""
    return 2 * D * (N + K) * H


def llama_parameters(*, V: int, L: int, D: int, N: int, K: int, F: int, tied: bool = False) -> int:
    """Return the parameters of a Llama: attention, gate, up and down of D F, two norms per layer;
    two tables of V D unless they are tied, the last norm (arXiv 2302.13971)."""
    layer = attention_parameters(D=D, N=N, K=K, H=D // N) + 3 * D * F + 2 * D
    return L * layer + (1 if tied else 2) * V * D + D


def mixtral_parameters(
    *, V: int, L: int, D: int, N: int, K: int, F: int, E: int, tied: bool = False
) -> int:
    """Return the parameters of a Mixtral: a Llama with E mlps and a router of D E per layer
    (arXiv 2401.04088).

    With the k experts of a token instead of E in the mlps, these are its active parameters:
    `mixtral_active_parameters`.
    """
    dense = llama_parameters(V=V, L=L, D=D, N=N, K=K, F=F, tied=tied)
    return dense + L * ((E - 1) * 3 * D * F + D * E)


def mixtral_active_parameters(
    *, V: int, L: int, D: int, N: int, K: int, F: int, E: int, k: int, tied: bool = False
) -> int:
    """Return the active parameters of `mixtral_parameters` for one token."""
    total = mixtral_parameters(V=V, L=L, D=D, N=N, K=K, F=F, E=E, tied=tied)
    return total - L * (E - k) * 3 * D * F


def latent_attention_parameters(
    *, D: int, N: int, Q: int | None, C: int, P: int, R: int, H: int
) -> int:
    """Return the parameters of multi-head latent attention (arXiv 2405.04434, section 2.1),
    including the norms of its latents.

    Args:
      D: embed_dim.
      N: heads.
      Q: width of the query latent; None without one.
      C: width of the latent of keys and values.
      P: width of the part of a key without RoPE.
      R: width of the part with RoPE.
      H: width of a head's values.
    """
    queries = D * N * (P + R) if Q is None else Q * (D + 1 + N * (P + R))
    return queries + D * (C + R) + C + C * N * (P + H) + N * H * D


def deepseek_parameters(
    *, V: int, L: int, D: int, F: int, f: int, E: int, shared: int, dense: int, attention: int,
    biases: bool, tied: bool = False,
) -> int:  # fmt: skip
    """Return the parameters of a DeepSeek (arXiv 2405.04434, 2412.19437), without multi-token
    prediction.

    Args:
      V, L, D: as above.
      F: mlp_dim of a dense layer.
      f: mlp_dim of an expert.
      E: routed experts; for the active parameters use k per token, and add (L - dense) D (E - k)
        for the router's other rows.
      shared: shared experts, used by every token.
      dense: layers without experts.
      attention: parameters of a layer's attention.
      biases: whether each expert has one.
      tied: whether the embedding is the output matrix.
    """
    mlps = dense * 3 * D * F + (L - dense) * ((E + shared) * 3 * D * f + E * (D + biases))
    return (1 if tied else 2) * V * D + L * (attention + 2 * D) + D + mlps


def prediction_module_parameters(*, D: int, layer: int) -> int:
    """Return the parameters of a multi-token prediction module (arXiv 2412.19437, section 2.2): its
    layer, the projection of 2 D to D, three norms. It shares the model's embedding and output
    matrix.

    Args:
      D: embed_dim.
      layer: parameters of its layer.
    """
    return layer + 2 * D**2 + 3 * D


def lstm_parameters(*, V: int, L: int, D: int) -> int:
    """Return the parameters of an LSTM language model, as wide as its embedding: two matrices of D
    times 4 D and a bias of 4 D per layer, the table and the output matrix (arXiv 1409.2329)."""
    return L * (8 * D**2 + 4 * D) + 2 * V * D


def lora_parameters(rank: int, weights: Iterable[tuple[int, int]]) -> int:
    """Return rank (in + out) for each adapted weight: A of in x rank and B of rank x out (arXiv
    2106.09685, section 4.1).

    Args:
      rank: rank of the adapters.
      weights: input and output size of each weight.
    """
    return rank * sum(inside + outside for inside, outside in weights)


def attention_flops_per_token(*, L: int, D: int, T: int, causal: bool) -> int:
    """Return the training FLOPs per token of the matmuls with keys and values, D = N H.

    Two matmuls of 2 D FLOPs for each key, forward once and backward twice: 12 L D T with all T
    keys (arXiv 2204.02311, appendix B), and half of it with the T / 2 keys that a causal query
    attends to on average.
    """
    return (6 if causal else 12) * L * D * T


def flops_per_token(matmul_parameters: int, *, L: int, D: int, T: int, causal: bool) -> int:
    """Return the training FLOPs per token: 6 for each parameter in a matmul, and attention's.

    Args:
      matmul_parameters: parameters that multiply every token: the output matrix included, the
        embedding table excluded, and of the experts only the active ones.
      L, D, T, causal: as in `attention_flops_per_token`.
    """
    return 6 * matmul_parameters + attention_flops_per_token(L=L, D=D, T=T, causal=causal)
