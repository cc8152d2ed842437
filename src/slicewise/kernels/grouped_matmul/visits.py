"""Which tile of rows and which group each step of the kernel's grid takes.

tokamax lists them with a histogram and repetitions, which the TPU compiler makes loops and scatters of. Nothing that
moves data runs beside a loop, so the experts' matrices were gathered behind it. Here they are sums of comparisons.
"""

from typing import Any

import jax
import jax.numpy as jnp


def metadata(
    *,
    group_sizes: jax.Array,
    m: int,
    tm: int,
    start_group: jax.Array,
    num_nonzero_groups: int,
    visit_empty_groups: bool,
) -> Any:
    """((row at which each group starts [G + 1], group [S], tile of ``tm`` rows [S]), how many of the S steps count).

    Arguments and result are those of the function that it stands for, tokamax's make_group_metadata, of which all
    groups are asked for here. S is the most there can be: a tile more for each group that starts within one.
    """
    assert m % tm == 0, (m, tm)
    del start_group
    groups = len(group_sizes)
    assert num_nonzero_groups == groups
    sizes_G = group_sizes.astype(jnp.int32)
    ends_G = jnp.cumsum(sizes_G)
    starts_G = ends_G - sizes_G
    tiles_G = jnp.where(sizes_G == 0, int(visit_empty_groups), -(-ends_G // tm) - starts_G // tm)
    # Once by the group that has its first row, and once by each that starts within it.
    is_within_G = (starts_G % tm != 0) & (sizes_G != 0)
    if visit_empty_groups:
        is_within_G = is_within_G | (sizes_G == 0)
    first_G = jnp.where(is_within_G, starts_G // tm, m // tm)
    visits_M = 1 + (first_G[None, :] == jnp.arange(m // tm)[:, None]).sum(1, dtype=jnp.int32)
    steps_S = jnp.arange(m // tm + groups - 1)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), ends_G])
    return (offsets, _owner(tiles_G, steps_S), _owner(visits_M, steps_S)), tiles_G.sum()


def _owner(counts: jax.Array, steps_S: jax.Array) -> jax.Array:
    """The index that stands at each step where each stands ``counts`` times; the last one behind all of them."""
    owner_S = (jnp.cumsum(counts)[None, :] <= steps_S[:, None]).sum(1, dtype=jnp.int32)
    return jnp.minimum(owner_S, len(counts) - 1)
