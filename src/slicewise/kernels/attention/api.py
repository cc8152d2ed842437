"""Attention behind one signature, with its implementations.

Positions and segments are data, so the reference and xla_chunked take tokens in any order. Splash skips blocks by index:
its queries and keys are one and the same row, in order.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from slicewise.catalog import chips
from slicewise.errors import UserError
from slicewise.kernels.attention import reference

CONTEXT = "context"  # what an implementation's backward pass reads, for checkpoint policies
BLOCK = 128  # splash: sequences are multiples of the lanes of a vector register


@dataclass(frozen=True)
class Tokens:
    """Where tokens stand: position within their document, and the document's number in the row (0 = padding)."""

    positions_BT: jax.Array
    segments_BT: jax.Array


jax.tree_util.register_dataclass(Tokens, data_fields=["positions_BT", "segments_BT"], meta_fields=[])


@dataclass(frozen=True)
class Kernel:
    """How attention is computed: settled before tracing, by the devices of the mesh."""

    name: Literal["reference", "splash"] = "reference"
    chip: str = ""  # of the catalog; decides the tile sizes of splash
    max_logit: float | None = None  # splash subtracts it instead of the running maximum
    interpret: bool = False  # splash on a CPU, slowly: for tests


REFERENCE = Kernel()


def choose(
    asked: Literal["auto", "reference", "splash"],
    mesh: Mesh,
    sequence_length: int,
    max_logit: float | None = None,
) -> Kernel:
    """The kernel for the devices of ``mesh``: where ``asked`` is auto, splash on TPU and else the reference.

    The devices need not be there: a mesh of a compile-only topology gives what real devices would.
    Raises UserError where splash cannot run.
    """
    device = mesh.devices.flat[0]
    on_tpu = device.platform == "tpu"
    name = asked if asked != "auto" else "splash" if on_tpu else "reference"
    if name != "splash":
        return Kernel(name)
    if not on_tpu:
        raise UserError(f"attention = 'splash' needs TPU devices, found {device.device_kind}; use 'reference'.")
    if sequence_length % BLOCK:
        above = sequence_length + -sequence_length % BLOCK
        raise UserError(
            f"sequence_length = {sequence_length} is not a multiple of {BLOCK}, which splash attention needs;"
            f" use {above}, or attention = 'reference'."
        )
    if importlib.util.find_spec("tokamax") is None:
        raise UserError("splash attention needs tokamax; pip install 'slicewise[tpu]'.")
    chip = chips.of_device_kind(device.device_kind)
    return Kernel("splash", chip.name if chip else "", max_logit)


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    queries: Tokens,
    keys: Tokens,
    *,
    window: jax.Array | int | None,
    scale: float,
    softcap: float | None = None,
    is_global: jax.Array | None = None,
    kernel: Kernel = REFERENCE,
) -> jax.Array:
    """Causal attention within documents; a token sees ``window`` tokens, itself included (None = all).

    Where the traced ``is_global`` is true the window is ignored: one scan may run over layers of both kinds.
    Returns the context [B, T, N, H].
    """
    if kernel.name == "splash":
        from slicewise.kernels.attention import splash

        assert queries is keys, "splash takes one row as queries and keys"

        def attend(window: int | None) -> Callable[[], jax.Array]:
            return lambda: splash.attention(
                q_BTNH,
                k_BSKH,
                v_BSKH,
                queries.segments_BT,
                window=window,
                scale=scale,
                softcap=softcap,
                kernel=kernel,
                residual_name=CONTEXT,
            )

        assert not isinstance(window, jax.Array)
        if window is None or is_global is None:
            return attend(window)()
        return jax.lax.cond(is_global, attend(None), attend(window))
    if window is not None and is_global is not None:
        window = jnp.where(is_global, jnp.iinfo(jnp.int32).max, window)
    mask_BTS = visible(queries, keys, window)
    context_BTNH = reference.attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale=scale, softcap=softcap)
    return checkpoint_name(context_BTNH, CONTEXT)


def visible(queries: Tokens, keys: Tokens, window: jax.Array | int | None) -> jax.Array:
    """Which keys each query may see: bool [B, T, S]."""
    distance_BTS = queries.positions_BT[:, :, None] - keys.positions_BT[:, None, :]
    mask_BTS = (queries.segments_BT[:, :, None] == keys.segments_BT[:, None, :]) & (distance_BTS >= 0)
    return mask_BTS if window is None else mask_BTS & (distance_BTS < window)
