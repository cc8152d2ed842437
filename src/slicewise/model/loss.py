"""Next-token cross-entropy over logits whose vocabulary dim may be sharded."""

import jax
import jax.numpy as jnp


def token_losses(logits_BTV: jax.Array, targets_BT: jax.Array, z_loss_weight: float = 0.0) -> jax.Array:
    """Cross-entropy in nats of each token, float32 [B, T]; 0 where the target is negative (none).

    ``z_loss_weight`` adds that multiple of the squared log-normaliser (PaLM, section 5).
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    top_BT = jax.lax.stop_gradient(logits_BTV.max(-1))
    normaliser_BT = top_BT + jnp.log(jnp.exp(logits_BTV - top_BT[..., None]).sum(-1))
    # A mask over an iota, not a gather: a gather from a sharded vocabulary would need the whole of it.
    chosen_BTV = jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits_BTV.shape[-1]), 2) == targets_BT[..., None]
    target_BT = jnp.where(chosen_BTV, logits_BTV, 0.0).sum(-1)
    losses_BT = normaliser_BT - target_BT + z_loss_weight * normaliser_BT**2
    return jnp.where(targets_BT >= 0, losses_BT, 0.0)
