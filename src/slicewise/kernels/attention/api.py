"""Attention behind one signature, with its implementations.

Positions and segments are data, so the reference and xla_chunked take tokens in any order. Splash skips blocks by
index: its queries and keys are one and the same row, in order.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from slicewise.catalog import chips
from slicewise.errors import UserError
from slicewise.kernels.attention import chunked, reference
from slicewise.parallel.rules import partition

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

    name: Literal["reference", "splash", "xla_chunked"] = "reference"
    chip: str = ""  # of the catalog, or the platform; decides sizes of tiles and blocks
    vmem_limit_kib: int = 0  # that the program is compiled with; 0 = the compiler's
    max_logit: float | None = None  # splash subtracts it instead of the running maximum
    interpret: bool = False  # splash on a CPU, slowly: for tests
    # A float32 scalar whose gradient becomes the number of logits above max_logit, over all layers that see it.
    probe: jax.Array | None = None


REFERENCE = Kernel()


def choose(
    asked: Literal["auto", "reference", "splash", "xla_chunked"],
    mesh: Mesh,
    sequence_length: int,
    max_logit: float = 0.0,
    vmem_limit_kib: int = 0,
) -> Kernel:
    """The kernel for the devices of ``mesh``: where ``asked`` is auto, splash on TPU and else the reference.

    The devices need not be there: a mesh of a compile-only topology gives what real devices would.
    ``max_logit`` 0 is none. Raises UserError where the kernel cannot run.
    """
    device = mesh.devices.flat[0]
    on_tpu = device.platform == "tpu"
    name = asked if asked != "auto" else "splash" if on_tpu else "reference"
    if max_logit and asked not in ("auto", "splash"):
        raise UserError(
            f"use_max_logits_estimate = {max_logit} has no effect on attention = '{asked}'; only splash uses it."
        )
    if name == "xla_chunked":
        chunked.check(sequence_length)
    if name != "splash":
        return Kernel(name, chip_of(device) if name == "xla_chunked" else "", max_logit=max_logit or None)
    if not on_tpu:
        raise UserError(
            f"attention = 'splash' needs TPU devices, found {device.device_kind}; use 'reference'."
        )
    if sequence_length % BLOCK:
        above = sequence_length + -sequence_length % BLOCK
        raise UserError(
            f"sequence_length = {sequence_length} is not a multiple of {BLOCK}, which splash attention needs;"
            f" use {above}, or attention = 'reference'."
        )
    if importlib.util.find_spec("tokamax") is None:
        raise UserError("splash attention needs tokamax; pip install 'slicewise[tpu]'.")
    return Kernel("splash", chip_of(device), vmem_limit_kib, max_logit or None)


def chip_of(device: Any) -> str:
    """The catalog's name of a device's chip, or its platform."""
    chip = chips.of_device_kind(device.device_kind)
    return chip.name if chip else device.platform


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    queries: Tokens,
    keys: Tokens,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    is_global: jax.Array | None = None,
    kernel: Kernel = REFERENCE,
) -> jax.Array:
    """Causal attention within documents; a token sees ``window`` tokens, itself included (None = all).

    Where the traced ``is_global`` is true the window is ignored: one scan may run over layers of both kinds.
    Returns the context [B, T, N, V], which with all else that a backward pass keeps is named CONTEXT.
    """
    operands = (q_BTNH, k_BSKH, v_BSKV, sinks_N)
    context_BTNV = _attention(operands, queries, keys, kernel, window, scale, softcap, is_global)
    if kernel.probe is None:
        return context_BTNV
    assert kernel.max_logit is not None
    above = _above(
        q_BTNH, k_BSKH, queries, keys, _furthest(window, is_global), scale, softcap, kernel.max_logit
    )
    return _tapped(context_BTNV, kernel.probe, above)


def _attention(
    operands: tuple,
    queries: Tokens,
    keys: Tokens,
    kernel: Kernel,
    window: int | None,
    scale: float,
    softcap: float | None,
    is_global: jax.Array | None,
) -> jax.Array:
    if kernel.name == "splash":
        assert queries is keys, "splash takes one row as queries and keys"

        def attend(window: int | None) -> jax.Array:
            return _splash(operands, queries.segments_BT, window, scale, softcap, kernel)

        if window is None or is_global is None:
            return attend(window)
        return jax.lax.cond(is_global, lambda: attend(None), lambda: attend(window))
    furthest = _furthest(window, is_global)
    if kernel.name == "xla_chunked":
        q, _, v, _ = operands
        key = chunked.key(kernel.chip, q.shape[1], q.shape[3], v.shape[3], window, str(q.dtype))
        return _chunked(operands, queries, keys, furthest, scale, softcap, chunked.chosen(key))
    mask_BTS = visible(queries, keys, None if window is None else furthest)
    q_BTNH, k_BSKH, v_BSKV, sinks_N = operands
    context_BTNV = reference.attention(
        q_BTNH, k_BSKH, v_BSKV, mask_BTS, scale=scale, softcap=softcap, sinks_N=sinks_N
    )
    return checkpoint_name(context_BTNV, CONTEXT)


def _furthest(window: int | None, is_global: jax.Array | None) -> jax.Array:
    """The window as a number, where there is none the largest."""
    none = jnp.asarray(jnp.iinfo(jnp.int32).max)
    if window is None:
        return none
    return jnp.asarray(window, jnp.int32) if is_global is None else jnp.where(is_global, none, window)


@jax.custom_vjp
def _tapped(context: jax.Array, probe: jax.Array, above: jax.Array) -> jax.Array:
    """``context``; the gradient of ``probe`` is ``above``, whatever becomes of the context."""
    return context


_tapped.defvjp(
    lambda context, probe, above: (context, above),
    lambda above, grad: (grad, above, jnp.zeros_like(above)),
)


def _above(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    queries: Tokens,
    keys: Tokens,
    window: jax.Array,
    scale: float,
    softcap: float | None,
    max_logit: float,
) -> jax.Array:
    """How many visible logits exceed ``max_logit``: float32, of all rows and heads."""

    def on_device(q: jax.Array, k: jax.Array, rows: Any, columns: Any, window: jax.Array) -> jax.Array:
        B, T, N, H = q.shape
        K = k.shape[2]
        grouped = (q * scale).reshape(B, T, K, N // K, H)
        found = chunked.count_above(grouped, k, rows, columns, window, softcap, max_logit)
        return jax.lax.psum(found, tuple(jax.sharding.get_abstract_mesh().axis_names))

    row = partition("batch", "sequence")
    rows, columns = ((w.positions_BT, w.segments_BT) for w in (queries, keys))
    by_head = partition("batch", "sequence", "heads", "head_dim")
    by_kv_head = partition("batch", "sequence", "kv_heads", "head_dim")
    return jax.shard_map(
        on_device,
        in_specs=(by_head, by_kv_head, (row, row), (row, row), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(jax.lax.stop_gradient(q_BTNH), jax.lax.stop_gradient(k_BSKH), rows, columns, window)


def _splash(
    operands: tuple,
    segments_BT: jax.Array,
    window: int | None,
    scale: float,
    softcap: float | None,
    kernel: Kernel,
) -> jax.Array:
    from slicewise.kernels.attention import splash

    def on_device(
        q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, segments: Any
    ) -> jax.Array:
        return splash.attention(
            q * scale,
            k,
            v,
            sinks,
            segments,
            window=window,
            softcap=softcap,
            kernel=kernel,
            residual_name=CONTEXT,
        )

    return _by_device(on_device, operands, (segments_BT,), (partition("batch", "sequence"),))


def _chunked(
    operands: tuple,
    queries: Tokens,
    keys: Tokens,
    window: jax.Array,
    scale: float,
    softcap: float | None,
    block: int,
) -> jax.Array:
    def on_device(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        sinks: jax.Array | None,
        rows: Any,
        columns: Any,
        window: Any,
    ) -> jax.Array:
        B, T, N, H = q.shape
        K, V = v.shape[2:]
        sinks = jnp.full(N, -jnp.inf) if sinks is None else sinks
        q = (q * scale).reshape(B, T, K, N // K, H)
        context = chunked.attention(
            q, k, v, sinks.reshape(K, N // K), rows, columns, window, softcap, CONTEXT, block
        )
        return context.reshape(B, T, N, V)

    places = tuple((w.positions_BT, w.segments_BT) for w in (queries, keys))
    row = partition("batch", "sequence")
    return _by_device(on_device, operands, (*places, window), ((row, row), (row, row), PartitionSpec()))


def _by_device(
    on_device: Callable[..., jax.Array], operands: tuple, others: tuple, specs: tuple
) -> jax.Array:
    """``on_device`` over the batch and heads axes of the mesh: neither rows nor heads see each other."""
    by_head = partition("batch", "sequence", "heads", "head_dim")
    by_kv_head = partition("batch", "sequence", "kv_heads", "head_dim")
    return jax.shard_map(
        on_device,
        in_specs=(by_head, by_kv_head, by_kv_head, partition("heads"), *specs),
        out_specs=by_head,
        check_vma=False,  # a kernel call does not say over which axes its result varies
    )(*operands, *others)


def visible(queries: Tokens, keys: Tokens, window: jax.Array | int | None) -> jax.Array:
    """Which keys each query may see: bool [B, T, S]."""
    distance_BTS = queries.positions_BT[:, :, None] - keys.positions_BT[:, None, :]
    mask_BTS = (queries.segments_BT[:, :, None] == keys.segments_BT[:, None, :]) & (distance_BTS >= 0)
    return mask_BTS if window is None else mask_BTS & (distance_BTS < window)
