"""Splash attention, tokamax's TPU kernel that skips masked blocks."""

from typing import TYPE_CHECKING, Any

import jax

from slicewise.kernels.attention import tiles
from slicewise.kernels.attention.tiles import Tiles

if TYPE_CHECKING:
    from slicewise.kernels.attention.api import Kernel


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
    key = tiles.key(
        kernel.chip,
        q_BTNH.shape[1],
        q_BTNH.shape[3],
        v_BTKV.shape[3],
        window,
        kernel.vmem_limit_kib,
        str(q_BTNH.dtype),
    )
    attend = make(q_BTNH.shape[1], window, tiles.chosen(key), softcap, kernel, residual_name)
    q_BNTH, k_BKTH, v_BKTV = (x.swapaxes(1, 2) for x in (q_BTNH, k_BTKH, v_BTKV))
    over_rows = jax.vmap(attend, in_axes=(0, 0, 0, None, 0))
    return over_rows(q_BNTH, k_BKTH, v_BKTV, sinks_N, segments_BT).swapaxes(1, 2)


def make(
    T: int, window: int | None, tile: Tiles, softcap: float | None, kernel: "Kernel", residual_name: str
) -> Any:
    """The function (q_NTH, k_KTH, v_KTV, sinks_N, segments_T) -> context_NTV of one row."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    config = splash.SplashConfig(
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
    mask = masks.CausalMask((T, T)) if window is None else masks.LocalMask((T, T), (window - 1, 0), 0)
    attend = splash.make_splash_mha_single_device(mask, config=config)

    def row(q_NTH: Any, k_KTH: Any, v_KTV: Any, sinks_N: Any, segments_T: Any) -> jax.Array:
        return attend(q_NTH, k_KTH, v_KTV, splash.SegmentIds(segments_T, segments_T), sinks_N)

    return row
