"""Scaling laws: compute-optimal model size, tokens and training time of language models.

Letters: N parameters, D tokens, C training FLOPs. Source, unless another is named: Hoffmann et al.
2022, "Training Compute-Optimal Large Language Models" (Chinchilla, arXiv 2203.15556).
"""

import dataclasses

# Approaches 1 and 2 (section 3.1 and 3.2, table 2): N and D both grow with the square root of C;
# the models of table 3 are trained on about 20 tokens per parameter.
TOKENS_PER_PARAMETER = 20.0
FLOPS_PER_PARAMETER_AND_TOKEN = 6.0
SECONDS_PER_DAY = 86400.0


@dataclasses.dataclass(frozen=True)
class Fit:
    """A parametric loss L(N, D) = E + A / N^alpha + B / D^beta, in nats per token.

    Attributes:
      name: its name.
      source: where the constants were published.
      E: the irreducible loss: the entropy of the text.
      A, alpha: loss from the finite model size.
      B, beta: loss from finite data.
    """

    name: str
    source: str
    E: float
    A: float
    B: float
    alpha: float
    beta: float


# Approach 3 (section 3.3 and appendix D.3), with constants rounded as printed. They give N the
# exponent 0.45, and the paper's own table 0.46, whose models are somewhat larger.
CHINCHILLA = Fit("approach 3", "arXiv 2203.15556", E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
# Refit of the same data by Besiroglu et al. 2024, who find the constants above off and these in
# agreement with approaches 1 and 2.
REPLICATION = Fit(
    "replication", "arXiv 2404.10102", E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658
)


@dataclasses.dataclass(frozen=True)
class Optimum:
    """A compute-optimal allocation.

    Attributes:
      params: N.
      tokens: D.
    """

    params: float
    tokens: float

    @property
    def tokens_per_parameter(self) -> float:
        """D / N."""
        return self.tokens / self.params


def training_flops(params: float, tokens: float) -> float:
    """Return C = 6 N D: two FLOPs per parameter and token forward and four backward (arXiv
    2001.08361, section 2.1), without attention's matmuls with keys and values."""
    return FLOPS_PER_PARAMETER_AND_TOKEN * params * tokens


def predicted_loss(params: float, tokens: float, fit: Fit = CHINCHILLA) -> float:
    """Return L(N, D) in nats per token, on the text and with the tokenizer of the fit."""
    return fit.E + fit.A / params**fit.alpha + fit.B / tokens**fit.beta


def optimum_by_ratio(compute: float, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> Optimum:
    """Return the optimum of approaches 1 and 2: N = sqrt(C / (6 r)), D = r N with r
    tokens/parameter."""
    params = (compute / FLOPS_PER_PARAMETER_AND_TOKEN / tokens_per_parameter) ** 0.5
    return Optimum(params, tokens_per_parameter * params)


def optimum_of_fit(compute: float, fit: Fit = CHINCHILLA) -> Optimum:
    """Return the optimum of approach 3: the minimal L(N, D) with 6 N D = C (equation 4).

    N = G (C / 6)^a and D = (C / 6)^b / G, where a = beta / (alpha + beta), b = alpha / (alpha +
    beta) and G = (alpha A / (beta B))^(1 / (alpha + beta)).
    """
    both = fit.alpha + fit.beta
    scale = (fit.alpha * fit.A / (fit.beta * fit.B)) ** (1 / both)
    products = compute / FLOPS_PER_PARAMETER_AND_TOKEN
    return Optimum(scale * products ** (fit.beta / both), products ** (fit.alpha / both) / scale)


def tokens_for(params: float, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> float:
    """Return the optimal tokens for a model of N parameters by approaches 1 and 2: about 20 N."""
    return tokens_per_parameter * params


def tokens_for_of_fit(params: float, fit: Fit = CHINCHILLA) -> float:
    """Return the tokens for which N parameters are approach 3's optimum: one more FLOP in N lowers
    the loss as much as in D, alpha A / N^alpha = beta B / D^beta."""
    return (fit.beta * fit.B / (fit.alpha * fit.A) * params**fit.alpha) ** (1 / fit.beta)


def days(compute: float, *, devices: int, peak_flops: float, mfu: float) -> float:
    """Return the training days for C FLOPs.

    Args:
      compute: C.
      devices: number of devices.
      peak_flops: peak FLOP/s of one device.
      mfu: fraction of the peak used for training FLOPs (arXiv 2204.02311, section 4.1).
    """
    return compute / (devices * peak_flops * mfu) / SECONDS_PER_DAY


def device_hours(compute: float, *, peak_flops: float, mfu: float) -> float:
    """Return the device-hours for C FLOPs; arguments as in `days`."""
    return 24 * days(compute, devices=1, peak_flops=peak_flops, mfu=mfu)
