"""How fast positions turn queries and keys: the frequencies of rotary embeddings.

Letters: H head_dim.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions (arXiv 2104.09864), with Llama 3.1's slowing of long wavelengths.

    Attributes:
      theta: base of the frequencies.
      scaling: by how much frequencies whose wavelength is longer than original_context_length are
        slowed; 1 leaves all as they are.
      low_frequency_factor, high_frequency_factor: wavelengths longer than original_context_length /
        low are slowed in full, shorter than / high not at all.
      original_context_length: the context that scaling extends, in tokens.
    """

    theta: float
    scaling: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_length: int

    def frequencies(self, head_dim: int) -> jax.Array:
        """Radians a place for each pair of a head's dimensions, float32 [H/2]."""
        half = head_dim // 2
        plain = self.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        # How many turns fit into the original context decides how much of the scaling applies.
        turns = self.original_context_length * plain / (2 * math.pi)
        kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return kept * plain + (1.0 - kept) * plain / self.scaling
