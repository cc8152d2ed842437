"""Splash attention, tokamax's TPU kernel that skips masked blocks, over the batch and heads axes of the mesh."""

from typing import TYPE_CHECKING, Any

import jax

from slicewise.kernels.attention import tiles
from slicewise.parallel.rules import partition

if TYPE_CHECKING:
    from slicewise.kernels.attention.api import Kernel


def attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKV: jax.Array,
    segments_BT: jax.Array,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    kernel: "Kernel",
    residual_name: str,
) -> jax.Array:
    """Causal self-attention of tokens in order within ``segments_BT``; T is a multiple of 128.

    The context and the log-sum-exp, all that the backward kernel needs besides q, k and v, carry ``residual_name``.
    Returns the context [B, T, N, V].
    """
    by_head = partition("batch", "sequence", "heads", "head_dim")
    by_kv_head = partition("batch", "sequence", "kv_heads", "head_dim")

    def on_device(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, segments_BT: jax.Array) -> Any:
        attend = _kernel(q_BTNH.shape[1], window, q_BTNH.shape[3], softcap, kernel, residual_name)
        q, k, v = (x.swapaxes(1, 2) for x in (q_BTNH * scale, k_BTKH, v_BTKV))
        return jax.vmap(attend)(q, k, v, segments_BT).swapaxes(1, 2)

    sharded = jax.shard_map(
        on_device,
        in_specs=(by_head, by_kv_head, by_kv_head, partition("batch", "sequence")),
        out_specs=by_head,
        check_vma=False,  # a kernel call does not say over which axes its result varies
    )
    return sharded(q_BTNH, k_BTKH, v_BTKV, segments_BT)


def _kernel(
    T: int, window: int | None, head_dim: int, softcap: float | None, kernel: "Kernel", residual_name: str
) -> Any:
    """The function (q_NTH, k_KTH, v_KTV, segments_T) -> context_NTV of one row."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    tile = tiles.tiles(kernel.chip, T, head_dim)
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

    def row(q_NTH: jax.Array, k_KTH: jax.Array, v_KTV: jax.Array, segments_T: jax.Array) -> jax.Array:
        return attend(q_NTH, k_KTH, v_KTV, splash.SegmentIds(segments_T, segments_T))

    return row
