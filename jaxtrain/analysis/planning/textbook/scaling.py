"""Scaling laws: compute-optimal model size, tokens and training time of language models.

Letters: N parameters, D tokens, C training FLOPs. Source, unless another is named: Hoffmann et al.
2022, "Training Compute-Optimal Large Language Models" (Chinchilla, arXiv 2203.15556).
"""

import dataclasses

# Approaches 1 and 2 (section 3.1 and 3.2, table 2): N and D grow alike, with the square root of C;
# the models of table 3 see about 20 tokens per parameter.
TOKENS_PER_PARAMETER = 20.0
FLOPS_PER_PARAMETER_AND_TOKEN = 6.0
SECONDS_PER_DAY = 86400.0


@dataclasses.dataclass(frozen=True)
class Fit:
    """A parametric loss L(N, D) = E + A / N^alpha + B / D^beta, in nats per token.

    Attributes:
      name: its name.
      source: where the constants were published.
      E: the loss that no model and no data can undercut: the entropy of the text.
      A, alpha: what a model of finite size loses.
      B, beta: what finite data loses.
    """

    name: str
    source: str
    E: float
    A: float
    B: float
    alpha: float
    beta: float


# Approach 3 (section 3.3 and appendix D.3), the constants rounded as printed. They give N the
# exponent 0.45, those behind the paper's own table 0.46: there models come out somewhat larger.
CHINCHILLA = Fit("approach 3", "arXiv 2203.15556", E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
# The same data fitted again by Besiroglu et al. 2024, who find the constants above off and these in
# agreement with approaches 1 and 2.
REPLICATION = Fit(
    "replication", "arXiv 2404.10102", E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658
)


@dataclasses.dataclass(frozen=True)
class Optimum:
    """What to spend a budget on.

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
    """C = 6 N D: two FLOPs per parameter and token forward and four backward (arXiv 2001.08361,
    section 2.1); attention's products with keys and values are left out."""
    return FLOPS_PER_PARAMETER_AND_TOKEN * params * tokens


def predicted_loss(params: float, tokens: float, fit: Fit = CHINCHILLA) -> float:
    """L(N, D) in nats per token, on the text and with the tokenizer of the fit."""
    return fit.E + fit.A / params**fit.alpha + fit.B / tokens**fit.beta


def optimum_by_ratio(compute: float, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> Optimum:
    """Approaches 1 and 2: N = sqrt(C / (6 r)), D = r N with r tokens per parameter."""
    params = (compute / FLOPS_PER_PARAMETER_AND_TOKEN / tokens_per_parameter) ** 0.5
    return Optimum(params, tokens_per_parameter * params)


def optimum_of_fit(compute: float, fit: Fit = CHINCHILLA) -> Optimum:
    """Approach 3: the least L(N, D) with 6 N D = C, in closed form (equation 4).

    N = G (C / 6)^a and D = (C / 6)^b / G, where a = beta / (alpha + beta), b = alpha / (alpha +
    beta) and G = (alpha A / (beta B))^(1 / (alpha + beta)).
    """
    both = fit.alpha + fit.beta
    scale = (fit.alpha * fit.A / (fit.beta * fit.B)) ** (1 / both)
    products = compute / FLOPS_PER_PARAMETER_AND_TOKEN
    return Optimum(scale * products ** (fit.beta / both), products ** (fit.alpha / both) / scale)


def tokens_for(params: float, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> float:
    """Tokens that a model of N parameters wants by approaches 1 and 2: about 20 N."""
    return tokens_per_parameter * params


def tokens_for_of_fit(params: float, fit: Fit = CHINCHILLA) -> float:
    """Tokens at which N parameters are approach 3's optimum: where one more FLOP lowers the loss as
    much in N as in D, alpha A / N^alpha = beta B / D^beta."""
    return (fit.beta * fit.B / (fit.alpha * fit.A) * params**fit.alpha) ** (1 / fit.beta)


def days(compute: float, *, devices: int, peak_flops: float, mfu: float) -> float:
    """Days that C FLOPs take.

    Args:
      compute: C.
      devices: how many work on it.
      peak_flops: FLOP/s of one device.
      mfu: the part of that which becomes training FLOPs (arXiv 2204.02311, section 4.1).
    """
    return compute / (devices * peak_flops * mfu) / SECONDS_PER_DAY


def device_hours(compute: float, *, peak_flops: float, mfu: float) -> float:
    """Hours of one device that C FLOPs take; arguments as in `days`."""
    return 24 * days(compute, devices=1, peak_flops=peak_flops, mfu=mfu)
