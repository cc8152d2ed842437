"""Splash attention, tokamax's TPU kernel that skips masked blocks."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from slicewise.kernels.attention import tiles
from slicewise.kernels.attention.ring import Part
from slicewise.kernels.attention.tiles import Tiles
from slicewise.parallel import context
from slicewise.parallel.rules import in_stage

if TYPE_CHECKING:
    from slicewise.kernels.attention.api import Kernel
    from slicewise.kernels.attention.divided import How


def attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKV: jax.Array,
    sinks_N: jax.Array | None,
    segments_BT: jax.Array,
    *,
    window: int | None,
    softcap: float | None,
    kernel: "Kernel",
    residual_name: str,
) -> jax.Array:
    """Causal self-attention of tokens in order within ``segments_BT``, on one device; T is a multiple of 128.

    ``q`` is scaled already. The context and the log-sum-exp, all that the backward kernel needs besides q, k and v,
    carry ``residual_name``. Returns the context [B, T, N, V].
    """
    tokens = q_BTNH.shape[1]
    tile = _tiles(tokens, q_BTNH, v_BTKV, window, kernel)
    attend = make(np.arange(tokens), 1, window, tile, softcap, kernel, residual_name)
    return over_rows(attend, q_BTNH, k_BTKH, v_BTKV, sinks_N, segments_BT, segments_BT)


def _tiles(tokens: int, q_BTNH: jax.Array, v_BTKV: jax.Array, window: int | None, kernel: "Kernel") -> Tiles:
    """Those for whole rows of ``tokens``, also where a device holds a part of them."""
    qk, v, dtype = q_BTNH.shape[3], v_BTKV.shape[3], str(q_BTNH.dtype)
    return tiles.chosen(tiles.key(kernel.chip, tokens, qk, v, window, kernel.vmem_limit_kib, dtype))


def over_rows(
    attend: Any,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    segments_BT: jax.Array,
    segments_BS: jax.Array,
) -> jax.Array:
    """``attend``, a kernel of make, on each row. Returns the context [B, T, N, V]."""
    q_BNTH, k_BKSH, v_BKSV = (x.swapaxes(1, 2) for x in (q_BTNH, k_BSKH, v_BSKV))
    by_row = jax.vmap(functools.partial(over_row, attend), in_axes=(0, 0, 0, None, 0, 0))
    return by_row(q_BNTH, k_BKSH, v_BKSV, sinks_N, segments_BT, segments_BS).swapaxes(1, 2)


def over_row(
    attend: Any,
    q_NTH: jax.Array,
    k_KSH: jax.Array,
    v_KSV: jax.Array,
    sinks_N: jax.Array | None,
    segments_T: jax.Array,
    segments_S: jax.Array,
) -> jax.Array:
    """``attend`` on one row: the context [N, T, V]."""
    from tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_kernel import SegmentIds

    return attend(q_NTH, k_KSH, v_KSV, SegmentIds(segments_T, segments_S), sinks_N)


def divided_schedule(
    operands: tuple, window: int | None, softcap: float | None, kernel: "Kernel", residual_name: str
) -> tuple[Any, Any]:
    """(the kernel of rows that the context axis divides, how shard_map is to divide it): queries as each device has
    them, keys in order. ``operands`` as those of divided.attention."""
    q_BTNH, _, v_BTKV, _ = operands
    ways, tokens = context.ways(), context.row_tokens(q_BTNH.shape[1])
    order_T = context.order(tokens, ways, kernel.strategy)
    assert order_T is not None
    here = tokens // ways
    if here % 256 == 0:
        here //= 2  # no tile of queries reaches over both chunks
    tile = tiles.fitted(_tiles(tokens, q_BTNH, v_BTKV, window, kernel), here, tokens)
    attend = make(order_T, ways, window, tile, softcap, kernel, residual_name)
    # Each array is that of one device behind that of the other. Its own method takes the backward pass for scheduled
    # as the forward one, and fails.
    if in_stage():  # whose code is mapped over the context axis already
        return jax.tree.map(_own, attend), jax.tree.map(lambda _: PartitionSpec(), attend)
    specs = jax.tree.map(lambda schedule: PartitionSpec(context.AXIS), attend)
    return jax.tree.map(jax.sharding.reshard, attend, specs), specs


def _own(schedule: Any) -> jax.Array:
    here = len(schedule) // context.ways()
    return jax.lax.dynamic_slice_in_dim(schedule, jax.lax.axis_index(context.AXIS) * here, here)


def make(
    order_T: np.ndarray,
    ways: int,
    window: int | None,
    tile: Tiles,
    softcap: float | None,
    kernel: "Kernel",
    residual_name: str,
) -> Any:
    """The kernel (q_NTH, k_KTH, v_KTV, segments, sinks_N) -> context_NTV for queries that stand at ``order`` of a row.

    Queries are divided over ``ways`` devices, keys are whole.
    """
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash

    config = _config(tile, softcap, kernel, residual_name)
    return splash.make_splash_mha(_mask(order_T, window), config=config, q_seq_shards=ways)


def _config(tile: Tiles, softcap: float | None, kernel: "Kernel", residual_name: str | None) -> Any:
    """What is settled before tracing."""
    from tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_kernel import SplashConfig

    return SplashConfig(
        block_q=tile.q,
        block_kv=tile.kv,
        block_kv_compute=tile.kv_compute,
        block_q_dkv=tile.q_backward,
        block_kv_dkv=tile.kv_backward,
        block_kv_dkv_compute=tile.kv_compute_backward,
        residual_checkpoint_name=residual_name,
        attn_logits_soft_cap=softcap,
        max_logit_const=kernel.max_logit,
        interpret=kernel.interpret,
    )


def _sees(queries: Any, keys: Any, *, window: int | None) -> Any:
    """Whether tokens at these places of a row see each other, window and documents aside of those before."""
    causal = queries >= keys
    return causal if window is None else causal & (queries - keys < window)


def _mask(order_T: np.ndarray, window: int | None) -> Any:
    """tokamax's mask of queries at ``order`` and of keys in order. It asks for one block after the other: those that
    are wholly visible or hidden are told from their corners, as their number grows with the square of the length."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    class Causal(masks.Mask):
        shape = (len(order_T), len(order_T))
        q_sequence = order_T.astype(np.int32)
        mask_function = staticmethod(functools.partial(_sees, window=window))

        def __getitem__(self, block: tuple) -> np.ndarray:
            rows, columns = self.q_sequence[block[0]], np.arange(*block[1].indices(self.shape[1]))
            most, least = rows.max() - columns[0], rows.min() - columns[-1]  # distances of a query to a key
            if least >= 0 and (window is None or most < window):
                return np.ones((1, 1), bool)
            if most < 0 or (window is not None and least >= window):
                return np.zeros((1, 1), bool)
            return _sees(rows[:, None], columns, window=window)

    return Causal()


def ring_part(q_BTNH: jax.Array, v_BTKV: jax.Array, how: "How") -> Part:
    """Chunks of a ring by the kernel; q, k and v are [B, heads, L, head dim], L a multiple of 128."""
    here = q_BTNH.shape[1]
    chunk, tokens = here // 2, here * jax.lax.axis_size(context.AXIS)
    tile = tiles.fitted(_tiles(tokens, q_BTNH, v_BTKV, how.window, how.kernel), chunk, chunk)
    config = _config(tile, how.softcap, how.kernel, None)
    settings = _Ring(config, how.window, _mask(np.arange(chunk), how.window))
    return Part(functools.partial(_ring_forward, settings), functools.partial(_ring_backward, settings), 2)


@dataclass(frozen=True)
class _Ring:
    config: Any
    window: int | None
    alone: Any  # the mask of a chunk with itself

    def schedule(self, distance: Any, blocks: tuple[int, int], chunk: int, *, dkv: bool) -> tuple[Any, Any]:
        """(tokamax's MaskInfo, its function of queries and keys) for chunks that start ``distance`` tokens apart.

        Without a window such chunks see each other whole. With one the distance, which only the device knows, decides
        over blocks of queries x keys: 0 is hidden, 1 partly visible, 2 wholly.
        """
        from tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask_info import (
            MaskInfo,
            process_mask,
        )

        if distance is None:
            info, function = process_mask(self.alone, blocks, is_dkv=dkv, return_dynamic_grid=not dkv)
            return jax.tree.map(jnp.asarray, info), function
        whole = MaskInfo(None, None, None, None, None, None, None)
        if self.window is None:
            return whole, None
        rows, columns = (size * jnp.arange(chunk // size) for size in blocks)
        least = distance + rows[:, None] - (columns + blocks[1] - 1)
        most = least + sum(blocks) - 2
        seen = jnp.where(most < self.window, 2, jnp.where(least < self.window, 1, 0)).astype(jnp.int8)
        places = (jnp.arange(chunk) + distance).astype(jnp.int32)
        info = whole._replace(block_mask=(seen.T if dkv else seen).reshape(-1), q_sequence=places)
        return info, functools.partial(_sees, window=self.window)


def _ring_forward(
    ring: _Ring, q: Any, k: Any, v: Any, rows: Any, columns: Any, window: None, distance: Any
) -> tuple:
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash

    config = ring.config
    info, function = ring.schedule(distance, (config.block_q, config.block_kv), q.shape[2], dkv=False)

    def row(q: Any, k: Any, v: Any, queries: Any, keys: Any) -> tuple:
        found, more = splash._splash_attention_forward(
            info,
            q,
            k,
            v,
            splash.SegmentIds(queries, keys),
            None,
            mask_value=splash.base.DEFAULT_MASK_VALUE,
            is_mqa=False,
            config=config,
            save_residuals=True,
            mask_function=function,
            fwd_mask_sparsity=1.0,
        )
        return found, more["logsumexp"]

    context_BNLV, log2_BNL = jax.vmap(row)(q, k, v, rows[1], columns[1])
    return context_BNLV, log2_BNL / splash.LOG2E


def _ring_backward(
    ring: _Ring,
    q: Any,
    k: Any,
    v: Any,
    grad: Any,
    normaliser: Any,
    delta: Any,
    rows: Any,
    columns: Any,
    window: None,
    distance: Any,
) -> tuple:
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash

    config = ring.config
    blocks = (config.block_q_dkv, config.block_kv_dkv)
    info, function = ring.schedule(distance, blocks, q.shape[2], dkv=True)

    def row(q: Any, k: Any, v: Any, grad: Any, log2: Any, delta: Any, queries: Any, keys: Any) -> tuple:
        return splash._splash_attention_bwd_dkv(
            q,
            k,
            v,
            splash.SegmentIds(queries, keys),
            log2,
            grad,
            delta,
            bq=config.block_q_dkv,
            bkv=config.block_kv_dkv,
            bkv_compute=config.block_kv_dkv_compute,
            is_mqa=False,
            mask_info=info,
            mask_value=splash.base.DEFAULT_MASK_VALUE,
            mask_function=function,
            config=config,
            dkv_mask_sparsity=1.0,
        )

    return jax.vmap(row)(q, k, v, grad, normaliser * splash.LOG2E, delta, rows[1], columns[1])
