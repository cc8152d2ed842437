"""Rematerialisation as JAX sees it: names on activations, and a checkpoint policy from the planner's record.

What each policy keeps is one table, that of costs/remat.py: the planner prices what the step does.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from slicewise.costs.remat import TENSORS, RematPolicy, plain_name

# Gathered again in the backward pass under every policy: kept, all layers would be whole on every device.
GATHERED = "gathered_weight"
_PREFIXES = ("", "moe_", "shared_")  # see plain_name


def named(x: jax.Array, tensor: str) -> jax.Array:
    """``x`` under a name of the planner's table, for policies to keep, move to the host or recompute.

    A [B, T, D] lies in that order in memory. Left to itself the TPU compiler stacks it in one order over the layers of
    the forward pass and reads it in another, and so turns over the whole stack, by way of the host if it waits there.
    """
    assert plain_name(tensor) in TENSORS, tensor
    if x.ndim == 3:
        x = with_layout_constraint(x, Layout(major_to_minor=(0, 1, 2)))
    with jax.named_scope(tensor):  # so that a compiled program says which tensors it keeps
        return checkpoint_name(x, tensor)


def checkpoint_policy(policy: RematPolicy) -> Callable[..., Any]:
    """The policy for jax.checkpoint. Offloaded tensors go to pinned host memory and come back for the backward pass."""
    if policy.name == "none":
        return jax.checkpoint_policies.save_anything_except_these_names(GATHERED)
    saved, offloaded = _spelled(policy.saved), _spelled(policy.offloaded)
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )


def _spelled(tensors: frozenset[str]) -> list[str]:
    return [prefix + tensor for prefix in _PREFIXES for tensor in sorted(tensors)]
