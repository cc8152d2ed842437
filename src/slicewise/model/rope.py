"""Rotary position embedding, rotate-half convention, with the usual stretches of its frequencies."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from slicewise.catalog.model import ModelSpec, RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Angular frequencies [head_dim / 2] in radians a token (Su et al. 2021), stretched by ``scaling``."""
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, head_dim, theta, scaling)


def _llama3(plain: np.ndarray, s: RopeScaling) -> np.ndarray:
    """Long wavelengths divided by the factor, short ones kept, a linear blend between (Llama 3.1)."""
    turns = s.original_context * plain / (2 * math.pi)  # full turns within the original context
    blend = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
    return (1 - blend) * plain / s.factor + blend * plain


def _yarn(plain: np.ndarray, head_dim: int, theta: float, s: RopeScaling) -> np.ndarray:
    """Interpolated below beta_slow turns, kept above beta_fast, a linear ramp over dims between (YaRN, 2023)."""

    def dim_at(turns: float) -> float:
        return head_dim * math.log(s.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(dim_at(s.beta_fast), 0), min(dim_at(s.beta_slow), head_dim - 1)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return ramp * plain / s.factor + (1 - ramp) * plain


def tables(spec: ModelSpec, positions_BT: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """(cos, sin), each float32 [B, T, H/2], for local and for global layers; H is the rotary part of a head."""
    latent = spec.latent_attention
    head_dim = latent.rope_head_dim if latent else spec.head_dim
    whole = (spec.rope_theta, spec.rope_scaling)
    local = (spec.local_rope_theta, None) if spec.local_rope_theta else whole

    def table(theta: float, scaling: RopeScaling | None) -> tuple[jax.Array, jax.Array]:
        amplitude = scaling.attention_factor if scaling else 1.0
        angles = positions_BT[..., None] * frequencies(head_dim, theta, scaling).astype(np.float32)
        return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude

    return [table(*local), table(*whole)]


def rotate(x_BTNH: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """``x`` with each pair (i, i + H/2) turned by its token's angle; computed in float32."""
    return _turned(x_BTNH, *table)


@jax.custom_vjp
def _turned(x_BTNH: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array) -> jax.Array:
    a, b = (half.astype(jnp.float32) for half in jnp.split(x_BTNH, 2, axis=-1))
    cos, sin = cos_BTH[:, :, None], sin_BTH[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


# The gradient is turned back. (Transposed automatically it would be written in float32 between.)
_turned.defvjp(
    lambda x, cos, sin: (_turned(x, cos, sin), (cos, sin)),
    lambda table, grad: (_turned(grad, table[0], -table[1]), None, None),
)
