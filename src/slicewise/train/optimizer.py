"""AdamW with warm-up and cosine decay, gradients clipped by global norm."""

from typing import Any

import jax
import optax

from slicewise.config import RunConfig


def schedule(config: RunConfig) -> optax.Schedule:
    """Learning rate by step: linear warm-up to the peak, cosine to its final fraction at the last step."""
    peak, warmup = config.optimizer.learning_rate, config.warmup_steps
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(config.run.steps, warmup + 1),
        end_value=peak * config.optimizer.final_learning_rate_fraction,
    )


def optimizer(config: RunConfig) -> optax.GradientTransformation:
    o = config.optimizer
    clip = [optax.clip_by_global_norm(o.gradient_clip_norm)] if o.gradient_clip_norm else []
    adamw = optax.adamw(
        schedule(config), b1=o.adam_b1, b2=o.adam_b2, weight_decay=o.weight_decay, mask=_decayed
    )
    return optax.chain(*clip, adamw)


def _decayed(params: Any) -> Any:
    """Norm scales and biases are not decayed: only weights that multiply activations (a stacked vector is [L, n])."""
    paths = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), params)
    return jax.tree.map(lambda path: "norm" not in path and ".b" not in path, paths)
