"""Optimisers of optax behind one schedule: warm-up, cosine decay, gradients clipped by global norm."""

from typing import Any

import jax
import optax

from slicewise.config import RunConfig
from slicewise.train.moments import EMBED_DIMS, Keeping, keep

MUON_RMS = (
    0.2  # of an update, as AdamW's is, so that one learning rate serves both (Liu et al. 2025, section 2.2)
)


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


def keeping(config: RunConfig) -> Keeping:
    """How the state of the optimiser is kept."""
    o = config.optimizer
    return Keeping(o.optimizer_state_dtype, o.optimizer_state_memory, o.shard_optimizer_over_data)


def optimizer(config: RunConfig, layout: Any) -> optax.GradientTransformation:
    """The update rule for parameters with this tree of Weight.

    A factor for each weight, as muP has, would be one more link of the chain, computed from ``layout``.
    """
    o = config.optimizer
    clip = [optax.clip_by_global_norm(o.gradient_clip_norm)] if o.gradient_clip_norm else []
    return keep(optax.chain(*clip, _rule(config, layout)), layout, keeping(config))


def _rule(config: RunConfig, layout: Any) -> optax.GradientTransformation:
    o, rate = config.optimizer, schedule(config)
    match o.optimizer_type:
        case "adamw":
            return optax.adamw(rate, b1=o.adam_b1, b2=o.adam_b2, weight_decay=o.weight_decay, mask=_decayed)
        case "lion":
            return optax.lion(rate, b1=o.adam_b1, b2=o.adam_b2, weight_decay=o.weight_decay, mask=_decayed)
        case "adafactor":
            # Without momentum, and without its scaling by the size of weights: a step is as long as the rate says.
            return optax.chain(
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.add_decayed_weights(o.weight_decay, mask=_decayed),
                optax.scale_by_learning_rate(rate),
            )
        case "muon":
            return _muon(config, layout)


def _muon(config: RunConfig, layout: Any) -> optax.GradientTransformation:
    """Muon on the matrices of the layers, AdamW on the rest.

    The orthogonalisation multiplies matrices along dims that are sharded; the compiler chooses how.
    """
    o = config.optimizer
    tx = optax.contrib.muon(
        schedule(config),
        weight_decay=o.weight_decay,
        weight_decay_mask=_decayed,
        adam_b1=o.adam_b1,
        adam_b2=o.adam_b2,
        adam_weight_decay=o.weight_decay,
        muon_weight_dimension_numbers=jax.tree.map(_matrix_dims, layout),
        consistent_rms=MUON_RMS,
    )

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (gradients, state))
        return jax.sharding.auto_axes(tx.update, out_sharding=specs)(gradients, state, params)

    return optax.GradientTransformation(tx.init, update)


def _matrix_dims(weight: Any) -> optax.contrib.MuonDimensionNumbers | None:
    """Which dims of a layer's weight are its input and its output; None for one that is no such matrix."""
    batch = sum(dim in ("layers", "staged_layers", "experts") for dim in weight.dims)
    dims = tuple(range(batch, len(weight.dims)))
    if not batch or not weight.std or len(dims) < 2:
        return None
    split = len(dims) - 1 if weight.dims[-1] in EMBED_DIMS else 1
    return optax.contrib.MuonDimensionNumbers(dims[:split], dims[split:])


def _decayed(params: Any) -> Any:
    """Norm scales, biases and sinks are not: only weights that multiply activations (a stacked vector is [L, n])."""
    paths = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), params)
    plain = ("norm", ".b", ".sinks")
    return jax.tree.map(lambda path: not any(part in path for part in plain), paths)
