"""What a step minimises: cross-entropy of the next token, and what prediction layers and experts add to it."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from slicewise.catalog.model import ModelSpec
from slicewise.config import ContextStrategy
from slicewise.kernels.attention.api import REFERENCE, Kernel, Tokens
from slicewise.model import transformer
from slicewise.model.loss import Loss, summed_loss
from slicewise.parallel.context import ahead

Batch = dict[str, jax.Array]


@dataclass(frozen=True)
class Weights:
    """Of the terms beside the cross-entropy."""

    z_loss: float = 0.0  # of the squared log-normaliser
    prediction: float = 0.0  # of the mean over prediction layers of their cross-entropies
    balance: float = 0.0  # of each sparse layer's balance loss


@dataclass(frozen=True)
class Counts:
    """Tokens of a whole batch, whose parts are divided by them: those that are predicted, and all but padding."""

    predicted: Any
    real: Any


def counts(batch: Batch) -> Counts:
    predicted, real = (batch["targets"] >= 0).sum(), (batch["segment_ids"] > 0).sum()
    return Counts(jnp.maximum(predicted, 1), jnp.maximum(real, 1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Terms:
    """Parts of means over the batch: those of its microbatches add up. None where the model has no such thing."""

    loss: Any  # of the next token, with its z-loss, in nats a token
    prediction_loss: Any
    balance_loss: Any  # mean of the sparse layers; 1 is even use
    share_LE: Any  # of all choices, that of each expert

    def metrics(self) -> dict[str, jax.Array]:
        """What a record of the step shows."""
        named = {name: getattr(self, name) for name in ("loss", "prediction_loss", "balance_loss")}
        return {name: value for name, value in named.items() if value is not None}


def objective(
    params: transformer.Params,
    spec: ModelSpec,
    part: Batch,
    whole: Counts,
    weights: Weights,
    *,
    kernel: Kernel = REFERENCE,
    is_frozen: bool = False,
    **how: Any,
) -> tuple[jax.Array, Terms]:
    """What ``part`` of the batch that ``whole`` counts adds to the objective, and its terms.

    With ``is_frozen`` the output matrix has no gradient. ``kernel`` and ``how`` go to transformer.states.
    """
    where = Tokens(part["positions"], part["segment_ids"])
    predict = bool(spec.prediction_layers and weights.prediction)
    states = transformer.states(params, spec, part["tokens"], where, predict=predict, kernel=kernel, **how)
    matrix = transformer.output_matrix(params)

    def cross_entropy(x_BTD: jax.Array, targets_BT: jax.Array, z_loss_weight: float) -> jax.Array:
        loss = Loss(spec.vocab, spec.tied_embeddings, spec.logits_softcap, z_loss_weight, is_frozen=is_frozen)
        return summed_loss(x_BTD, matrix, targets_BT, loss) / whole.predicted

    total = loss = cross_entropy(states.x_BTD, part["targets"], weights.z_loss)
    prediction_loss = balance_loss = share_LE = None
    if predict:
        losses = [
            cross_entropy(x_BTD, targets_ahead(part, depth, kernel.strategy), 0.0)
            for depth, x_BTD in enumerate(states.predicted, 1)
        ]
        prediction_loss = sum(losses) / len(losses)
        total = total + weights.prediction * prediction_loss
    if states.usage is not None:
        assert spec.experts is not None
        loss_L = states.usage.loss / whole.real
        total = total + weights.balance * loss_L.sum()
        balance_loss, share_LE = (
            loss_L.mean(),
            states.usage.choices_E / (whole.real * spec.experts.per_token),
        )
    return total, Terms(loss, prediction_loss, balance_loss, share_LE)


def targets_ahead(part: Batch, by: int, strategy: ContextStrategy = "all_gather") -> jax.Array:
    """The targets of a prediction layer: those ``by`` tokens later in the same document, else -1."""
    segments_BT = part["segment_ids"]
    later_BT = ahead(part["targets"], by, -1, strategy)
    same_BT = ahead(segments_BT, by, 0, strategy) == segments_BT
    return jnp.where(same_BT, later_BT, -1)
