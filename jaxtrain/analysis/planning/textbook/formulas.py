"""Closed forms of memory and communication from the literature, with sources.

Payloads are the bytes of one device's operand of the collective; wire bytes are what that device
then sends. Letters: k devices along the axis, B the batch that a device computes, T its sequence
length, D embed, L layers, N query heads, K kv heads, H head_dim.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes of the training state on one device.

    Attributes:
      params: the master parameters.
      gradients: their gradients during accumulation.
      optimizer: the moments.
    """

    params: int
    gradients: int
    optimizer: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind.

    Attributes:
      kind: XLA's name of the collective.
      count: number of arrays.
      bytes: payload bytes of one array.
    """

    kind: str
    count: int
    bytes: int


def zero_bytes(
    sharded: int,
    whole: int,
    *,
    stage: int,
    devices: int,
    param_bytes: int = 4,
    gradient_bytes: int = 4,
    moment_bytes: int = 4,
    moments: int = 2,
) -> StateBytes:
    """Return the bytes of ZeRO's table (arXiv 1910.02054, figure 1): stage 1 divides the optimizer
    state by the devices, 2 also the gradients, 3 also the parameters.

    With float32 Adam that is 4 P + 4 P + 8 P; with moments in bfloat16, 4 P + 4 P + 4 P.

    Args:
      sharded: elements of sharded parameters.
      whole: elements that every device holds (norm scales, biases).
      stage: 0 to 3.
      devices: devices along fsdp.
      param_bytes: bytes per parameter.
      gradient_bytes: bytes per gradient element.
      moment_bytes: bytes per moment element.
      moments: 2 for Adam, 1 for Lion or SGD with momentum.
    """
    assert sharded % devices == 0, "a split dimension divides over its devices"

    def bytes_from(from_stage: int) -> int:
        return whole + (sharded // devices if stage >= from_stage else sharded)

    return StateBytes(
        params=bytes_from(3) * param_bytes,
        gradients=bytes_from(2) * gradient_bytes,
        optimizer=bytes_from(1) * moment_bytes * moments,
    )


def wire_bytes(kind: str, payload: int, devices: int) -> float:
    """Return the bytes that one device sends for a collective by the ring (or direct) algorithm.

    All-reduce 2 n (k-1)/k (arXiv 1810.11112, section 2), reduce-scatter n (k-1)/k, all-gather of
    shards of n: n (k-1), all-to-all n (k-1)/k, a permute n.
    """
    share = (devices - 1) / devices
    factor = {
        "all-reduce": 2 * share,
        "reduce-scatter": share,
        "all-gather": devices - 1,
        "all-to-all": share,
        "ragged-all-to-all": share,
        "collective-permute": 1,
        "collective-broadcast": 1,
    }
    return factor[kind] * payload


def data_parallel(elements: int, *, element_bytes: int) -> Traffic:
    """Return the all-reduce of every gradient once per step: 2 N (k-1)/k on the wire."""
    return Traffic("all-reduce", 1, elements * element_bytes)


def zero3_weight(elements: int, *, devices: int, element_bytes: int) -> list[Traffic]:
    """Return the traffic of a layer's weight in ZeRO 3: an all-gather for the forward and again for
    the backward pass, and a reduce-scatter of its gradient (arXiv 1910.02054, section 7: 1.5 times
    the traffic of data parallelism)."""
    return [
        Traffic("all-gather", 2, elements // devices * element_bytes),
        Traffic("reduce-scatter", 1, elements * element_bytes),
    ]


def zero2_weight(
    elements: int, *, devices: int, element_bytes: int, master_bytes: int
) -> list[Traffic]:
    """Return the traffic of a weight in ZeRO 2: one reduce-scatter of the gradient, one all-gather
    of the updated master parameter."""
    return [
        Traffic("all-gather", 1, elements // devices * master_bytes),
        Traffic("reduce-scatter", 1, elements * element_bytes),
    ]


def tensor_layer(B: int, T: int, D: int, *, element_bytes: int) -> Traffic:
    """Return Megatron's f and g of attention and mlp: 2 all-reduces of [B, T, D] forward and 2
    backward (arXiv 1909.08053, section 3)."""
    return Traffic("all-reduce", 4, B * T * D * element_bytes)


def sequence_layer(B: int, T: int, D: int, *, devices: int, element_bytes: int) -> list[Traffic]:
    """Return each of `tensor_layer`'s all-reduces as a reduce-scatter and an all-gather, with the
    same total wire bytes (arXiv 2205.05198, section 4.2.2)."""
    whole = B * T * D * element_bytes
    return [
        Traffic("all-gather", 4, whole // devices),
        Traffic("reduce-scatter", 4, whole),
    ]


def sequence_ring_layer(B: int, T: int, D: int, *, devices: int, element_bytes: int) -> Traffic:
    """Return `sequence_layer` as a collective matmul: t - 1 permutes of a shard for each gather or
    scatter (doi 10.1145/3567955.3567959). 4 forward; backward the gradients of inputs and sums, and
    the inputs again, of which a device saves its own shard."""
    part = B * T * D * element_bytes // devices
    return Traffic("collective-permute", 10 * (devices - 1), part)


def pipeline_boundary(B: int, T: int, D: int, *, element_bytes: int) -> Traffic:
    """Return the traffic of a microbatch [B, T, D] over a boundary of stages, forward, and of its
    gradient backward (arXiv 1811.06965)."""
    return Traffic("collective-permute", 2, B * T * D * element_bytes)


def ring_attention(B: int, T: int, K: int, H: int, *, devices: int, element_bytes: int) -> Traffic:
    """Return one pass of keys and values around the ring: k - 1 steps, each of K and of V
    (arXiv 2310.01889); T is a device's shard of the sequence."""
    return Traffic("collective-permute", 2 * (devices - 1), B * T * K * H * element_bytes)


def ulysses(B: int, T: int, N: int, K: int, H: int, *, element_bytes: int) -> list[Traffic]:
    """Return the all-to-alls of one forward pass: queries, keys and values from sequence to heads,
    the result back; the backward pass has the same (arXiv 2309.14509). T is a device's shard."""
    bytes_per_head = B * T * H * element_bytes
    return [
        Traffic("all-to-all", 2, bytes_per_head * N),
        Traffic("all-to-all", 2, bytes_per_head * K),
    ]


def expert_layer(slots: int, D: int, *, element_bytes: int) -> Traffic:
    """Return the all-to-alls of tokens to their experts and back, forward and backward
    (arXiv 2006.16668).

    Args:
      slots: rows in a device's payload: experts x capacity (`nn.moe.dispatch.slots_per_expert`) for
        each row of its batch; or, dropless, tokens x top_k, times the devices along `expert` if, as
        here, shapes are static and all tokens might be routed to one device.
      D: embed.
      element_bytes: bytes per activation element.
    """
    return Traffic("all-to-all", 4, slots * D * element_bytes)


def gpt_layer(B: int, T: int, D: int, N: int, *, tensor: int = 1) -> float:
    """Return the activation bytes of a GPT layer, B T D (10 + 24 / t + 5 N T / (D t)); with t = 1
    B T D (34 + 5 N T / D) (sections 4.1 and 4.2.1).

    In bytes of B T D: attention's input 2, queries and keys 4, values 2, the result 2, the dropout
    mask after it 1; the mlp's input 2, the input of its GELU 8, the result 8, its dropout mask 1;
    the inputs of two norms 4. In bytes of B N T^2: softmax 2, its dropout mask 1, dropout's output
    2. Each device of a tensor axis holds all inputs, outer masks and norms (10).
    """
    return B * T * D * (10 + 24 / tensor) + scores(B, T, N, tensor=tensor)


def gpt_layer_sequence(B: int, T: int, D: int, N: int, *, tensor: int) -> float:
    """Return the bytes of `gpt_layer` with sequence parallelism, which shards everything:
    B T D (34 + 5 N T / D) / t (section 4.2.2)."""
    return gpt_layer(B, T, D, N) / tensor


def scores(B: int, T: int, N: int, *, tensor: int = 1) -> float:
    """Return 5 B N T^2 / t: bytes of the softmax, its dropout mask, and dropout's output."""
    return 5 * B * N * T**2 / tensor


def gpt_layer_selective(B: int, T: int, D: int, N: int, *, tensor: int = 1) -> float:
    """Return the bytes with recomputed scores: `gpt_layer` without `scores` (section 5)."""
    return gpt_layer(B, T, D, N, tensor=tensor) - scores(B, T, N, tensor=tensor)


def gpt_layer_selective_sequence(B: int, T: int, D: int, *, tensor: int) -> float:
    """Return the bytes with both: 34 B T D / t, for any heads and length (table 2)."""
    return 34 * B * T * D / tensor


def layer_full_remat(B: int, T: int, D: int) -> float:
    """Return 2 B T D, the layer's input, if everything is recomputed, for any layer (table 2)."""
    return 2 * B * T * D


def gpt_layer_without_dropout(B: int, T: int, D: int, N: int, *, tensor: int = 1) -> float:
    """Return B T D (8 + 24 / t) + 2 B N T^2 / t: no masks, and the values use the softmax itself.

    Derived from `gpt_layer`, without two masks of B T D and 1 + 2 bytes of B N T^2.
    """
    return B * T * D * (8 + 24 / tensor) + softmax(B, T, N, tensor=tensor)


def softmax(B: int, T: int, N: int, *, tensor: int = 1) -> float:
    """Return 2 B N T^2 / t: the score bytes that attention without dropout saves."""
    return 2 * B * N * T**2 / tensor


def flash_statistics(B: int, T: int, N: int, *, tensor: int = 1) -> float:
    """Return 4 B N T / t: the float32 logsumexp of each query, which a flash kernel saves instead
    of scores (arXiv 2205.14135, section 3.1); its output, also saved, is the next matmul's
    input."""
    return 4 * B * N * T / tensor


def gpt_layer_flash(B: int, T: int, D: int, N: int, *, tensor: int = 1) -> float:
    """Return `gpt_layer_without_dropout` with a flash kernel: logsumexps instead of the softmax."""
    whole = gpt_layer_without_dropout(B, T, D, N, tensor=tensor)
    kept, instead = softmax(B, T, N, tensor=tensor), flash_statistics(B, T, N, tensor=tensor)
    return whole - kept + instead


def llama_layer_flash(B: int, T: int, D: int, N: int, K: int, F: int, *, tensor: int = 1) -> float:
    """Return the bytes of a layer with grouped-query attention, a gated mlp, no dropout, and a
    flash kernel: B T (8 D + (4 D + 4 K H + 8 F) / t) + 4 B N T / t.

    Derived like `gpt_layer`, in elements per token, each of 2 bytes. Not sharded: the inputs of two
    norms 2 D, and of attention and mlp 2 D. Sharded: queries D, keys and values 2 K H, attention's
    output D; the input of silu F, its output F, the other factor F (their product needs both), the
    product F.
    """
    split = 4 * D + 4 * K * (D // N) + 8 * F
    return B * T * (8 * D + split / tensor) + flash_statistics(B, T, N, tensor=tensor)


def llama_layer(B: int, T: int, D: int, N: int, K: int, F: int, *, tensor: int = 1) -> float:
    """Return `llama_layer_flash` with a saved softmax instead of logsumexps."""
    whole = llama_layer_flash(B, T, D, N, K, F, tensor=tensor)
    kept, instead = softmax(B, T, N, tensor=tensor), flash_statistics(B, T, N, tensor=tensor)
    return whole + kept - instead


def llama_layer_flash_sequence(
    B: int, T: int, D: int, N: int, K: int, F: int, *, tensor: int
) -> float:
    """Return `llama_layer_flash` with sequence parallelism, which shards all of it over tensor."""
    return llama_layer_flash(B, T, D, N, K, F) / tensor


def logits(B: int, T: int, V: int, *, tensor: int = 1, element_bytes: int = 4) -> float:
    """Return e B T V / t: one array of logits; float32 has e = 4 (section 4.3).

    With a chunked loss T is the chunk. A backward pass also holds their gradient, of equal size.
    """
    return element_bytes * B * T * V / tensor


def kv_cache(B: int, T: int, L: int, K: int, H: int, *, element_bytes: int) -> int:
    """Return 2 L B T K H e: bytes of cached keys and values for B sequences of T tokens.

    K is N for multi-head attention, 1 for multi-query (arXiv 1911.02150), between them for
    grouped-query (arXiv 2305.13245), which divides the cache by N / K.
    """
    return 2 * L * B * T * K * H * element_bytes
