"""Attention behind one signature, with its implementations.

Positions and segments are data, so the reference and xla_chunked take tokens in any order. Splash skips blocks by
index: its queries and keys are of one and the same row, which is in order or divided as parallel/context.py says.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from slicewise.catalog import chips
from slicewise.config import ContextStrategy
from slicewise.costs.batch import check_blocks
from slicewise.errors import UserError
from slicewise.kernels.attention import chunked, divided, reference
from slicewise.kernels.attention.device import by_device, chunks
from slicewise.parallel import context
from slicewise.parallel.rules import partition, unmapped

CONTEXT = "context"  # what an implementation's backward pass reads, for checkpoint policies


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
    strategy: ContextStrategy = "all_gather"  # where the context axis divides rows
    # A float32 scalar whose gradient becomes the number of logits above max_logit, over all layers that see it.
    probe: jax.Array | None = None


REFERENCE = Kernel()


def choose(
    asked: Literal["auto", "reference", "splash", "xla_chunked"],
    mesh: Mesh,
    sequence_length: int,
    max_logit: float = 0.0,
    vmem_limit_kib: int = 0,
    strategy: ContextStrategy = "all_gather",
) -> Kernel:
    """The kernel for the devices of ``mesh``: where ``asked`` is auto, splash on TPU and else the reference.

    The devices need not be there: a mesh of a compile-only topology gives what real devices would.
    ``max_logit`` 0 is none. Raises UserError where the kernel cannot run.
    """
    device = mesh.devices.flat[0]
    on_tpu = device.platform == "tpu"
    name = asked if asked != "auto" else "splash" if on_tpu else "reference"
    ways = mesh.shape[context.AXIS]
    if name == "xla_chunked" or (ways > 1 and strategy == "ring" and name == "reference"):
        chunked.check(sequence_length)
    if name != "splash":
        chip = chip_of(device) if name == "xla_chunked" else ""
        return Kernel(name, chip, max_logit=max_logit or None, strategy=strategy)
    if not on_tpu:
        raise UserError(
            f"attention = 'splash' needs TPU devices, found {device.device_kind}; use 'reference'."
        )
    check_blocks(sequence_length, ways, strategy)
    if importlib.util.find_spec("tokamax") is None:
        raise UserError("splash attention needs tokamax; pip install 'slicewise[tpu]'.")
    return Kernel("splash", chip_of(device), vmem_limit_kib, max_logit or None, strategy=strategy)


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
    is_divided = context.ways() > 1
    assert queries is keys or not (is_divided or kernel.name == "splash"), "queries and keys are of one row"
    where = (queries.positions_BT, queries.segments_BT)
    if kernel.name == "splash":

        def attend(window: int | None) -> jax.Array:
            if is_divided:
                return divided.attention(operands, where, window, scale, softcap, kernel, CONTEXT)
            return _splash(operands, queries.segments_BT, window, scale, softcap, kernel)

        if window is None or is_global is None:
            return attend(window)
        return jax.lax.cond(is_global, lambda: attend(None), lambda: attend(window))
    furthest = _furthest(window, is_global)
    block = chunked.BLOCK
    if kernel.name == "xla_chunked":
        q, _, v, _ = operands
        block = chunked.chosen(
            chunked.key(
                kernel.chip, context.row_tokens(q.shape[1]), q.shape[3], v.shape[3], window, str(q.dtype)
            )
        )
    if is_divided:
        return divided.attention(operands, where, furthest, scale, softcap, kernel, CONTEXT, block)
    if kernel.name == "xla_chunked":
        return _chunked(operands, queries, keys, furthest, scale, softcap, block)
    mask_BTS = visible(queries, keys, None if window is None else furthest)
    q_BTNH, k_BSKH, v_BSKV, sinks_N = operands
    by_kv_head = partition("batch", "slots", "kv_heads", "head_dim")
    k_BSKH, v_BSKV = (jax.sharding.reshard(x, by_kv_head) for x in (k_BSKH, v_BSKV))
    found_BTNV = reference.attention(
        q_BTNH, k_BSKH, v_BSKV, mask_BTS, scale=scale, softcap=softcap, sinks_N=sinks_N
    )
    return checkpoint_name(found_BTNV, CONTEXT)


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
        if context.ways() > 1:
            k, columns = context.gathered((k, columns))
        B, T, N, H = q.shape
        K = k.shape[2]
        grouped = (q * scale).reshape(B, T, K, N // K, H)
        found = chunked.count_above(grouped, k, rows, columns, window, softcap, max_logit)
        return jax.lax.psum(found, axes)

    axes = unmapped()
    row = partition("batch", "sequence")
    rows, columns = ((w.positions_BT, w.segments_BT) for w in (queries, keys))
    by_head = partition("batch", "sequence", "heads", "head_dim")
    by_kv_head = partition("batch", "sequence", "kv_heads", "head_dim")
    return jax.shard_map(
        on_device,
        in_specs=(by_head, by_kv_head, (row, row), (row, row), PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names={*axes},
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

    return by_device(on_device, operands, (segments_BT,), (partition("batch", "sequence"),))


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
        return chunks(q * scale, k, v, sinks, rows, columns, window, softcap, CONTEXT, block)

    places = tuple((w.positions_BT, w.segments_BT) for w in (queries, keys))
    row = partition("batch", "sequence")
    return by_device(on_device, operands, (*places, window), ((row, row), (row, row), PartitionSpec()))


def visible(queries: Tokens, keys: Tokens, window: jax.Array | int | None) -> jax.Array:
    """Which keys each query may see: bool [B, T, S]."""
    rows, columns = ((w.positions_BT, w.segments_BT) for w in (queries, keys))
    whole = partition(
        "batch", "slots"
    )  # that tokens are divided, if only over one device, is part of their type
    return reference.visible(rows, tuple(jax.sharding.reshard(x, whole) for x in columns), window)
