"""Rotary embeddings (RoPE): frequencies, linear, YaRN and other scalings.

Letters: H head_dim.
"""

import dataclasses
import functools
import math
from typing import Literal, Protocol

import jax
import jax.numpy as jnp

RopeType = Literal["llama3", "yarn", "linear"]


class Rotations(Protocol):
    """Protocol of rotary position embeddings.

    Attributes:
      scale: further factor of queries and keys.
    """

    @property
    def scale(self) -> float: ...

    def frequencies(self, head_dim: int) -> jax.Array:
        """Radians per position for each pair of a head's dimensions, float32 [H/2]."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions (arXiv 2104.09864), with Llama 3.1's scaling of long wavelengths.

    Attributes:
      theta: base of the frequencies, by default the paper's.
      scaling: factor by which frequencies with a wavelength over original_context_length are
        slowed; with 1 the three settings below have no effect.
      low_frequency_factor, high_frequency_factor: wavelengths longer than original_context_length /
        low are slowed in full, shorter than / high not at all.
      original_context_length: the context that scaling extends, in tokens.
    """

    theta: float = 10000.0
    scaling: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_length: int = 8192

    @property
    def scale(self) -> float:
        """No further factor."""
        return 1.0

    def frequencies(self, head_dim: int) -> jax.Array:
        """Radians per position for each pair of a head's dimensions, float32 [H/2]."""
        half = head_dim // 2
        plain = self.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        # The number of turns in the original context determines how much scaling applies.
        turns = self.original_context_length * plain / (2 * math.pi)
        kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return kept * plain + (1.0 - kept) * plain / self.scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): all frequencies are scaled
    alike.

    Attributes:
      theta: base of the frequencies.
      scaling: by how much they are slowed.
    """

    theta: float
    scaling: float

    @property
    def scale(self) -> float:
        """No further factor."""
        return 1.0

    def frequencies(self, head_dim: int) -> jax.Array:
        """Radians per position for each pair of a head's dimensions, float32 [H/2]."""
        half = head_dim // 2
        return self.theta ** (-jnp.arange(half, dtype=jnp.float32) / half) / self.scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3): low frequencies are scaled, high ones
    not.

    Between them the scaling is a linear ramp over pairs; a factor on queries and
    keys compensates for the longer context's flatter attention.

    Attributes:
      theta: base of the frequencies.
      scaling: by how much slow pairs are slowed: the new context over the original one.
      low_frequency_factor: pairs of fewer turns in the original context are slowed in full
        (alpha, or beta_slow; 1 there).
      high_frequency_factor: those of more not at all (beta, or beta_fast; 32 there).
      original_context_length: the context that scaling extends, in tokens.
      whole_pairs: whether the ramp's ends are rounded to whole pairs, as in the authors'
        code, or from an interpolated value (GPT-OSS).
    """

    theta: float
    scaling: float
    original_context_length: int
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 32.0
    whole_pairs: bool = True

    @property
    def scale(self) -> float:
        """0.1 ln s + 1, the root of the paper's 1 / t: it multiplies both queries and keys."""
        return 0.1 * math.log(self.scaling) + 1

    def frequencies(self, head_dim: int) -> jax.Array:
        """Radians per position for each pair of a head's dimensions, float32 [H/2]."""
        half = head_dim // 2
        pairs = jnp.arange(half, dtype=jnp.float32)
        plain = self.theta ** (-pairs / half)
        first = self._pair(self.high_frequency_factor, half)
        last = self._pair(self.low_frequency_factor, half)
        if self.whole_pairs:
            first, last = math.floor(first), math.ceil(last)
        # Clipped to the head, as in the authors' code.
        first, last = max(first, 0), min(last, head_dim - 1)
        slowed = jnp.clip((pairs - first) / max(last - first, 1e-3), 0.0, 1.0)
        return (1.0 - slowed) * plain + slowed * plain / self.scaling

    def _pair(self, turns: float, half: int) -> float:
        """Return the (fractional) pair that makes `turns` turns in the original context."""
        wavelength = self.original_context_length / (turns * 2 * math.pi)
        return half * math.log(wavelength) / math.log(self.theta)


class RopeSettings(Protocol):
    """The settings of rotary embeddings, each documented at `models.transformers.llama.Llama`."""

    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_type(self) -> RopeType: ...
    @property
    def rope_scaling(self) -> float: ...
    @property
    def rope_low_frequency_factor(self) -> float: ...
    @property
    def rope_high_frequency_factor(self) -> float: ...
    @property
    def rope_original_context_length(self) -> int: ...


def rope(sizes: RopeSettings, *, whole_pairs: bool = True) -> Rotations:
    """Return the rotary embeddings of these settings; `whole_pairs` as in `Yarn`."""
    if sizes.rope_type == "linear":
        return Linear(theta=sizes.rope_theta, scaling=sizes.rope_scaling)
    kind = functools.partial(Yarn, whole_pairs=whole_pairs) if sizes.rope_type == "yarn" else Rotary
    return kind(
        theta=sizes.rope_theta,
        scaling=sizes.rope_scaling,
        low_frequency_factor=sizes.rope_low_frequency_factor,
        high_frequency_factor=sizes.rope_high_frequency_factor,
        original_context_length=sizes.rope_original_context_length,
    )
