"""The order in which the backward pass makes gradients, where the compiler's own leaves a sum nothing to hide behind.

Left alone it makes the gradients of all weights of a layer last, and the largest ones at the very end: the sum of the
last one over the devices then has no work beside it, and each round of the loop over layers waits for it.
"""

import dataclasses
from typing import Any

import jax

from slicewise.model.lora import Adapted, Packed
from slicewise.model.params import Layers

MATRICES = ("w_gate", "w_up", "w_down")


def behind_mlp[T](values: T, w: Layers) -> tuple[T, Layers]:
    """Both as they are. In the backward pass what needs the gradients of ``values``, a tuple of arrays, waits for those
    of the MLP of ``w``, or of its experts; between the two, their sums run beside the attention.

    Frozen matrices have no gradients, and so nothing is ordered. Nor is it where gradients are summed over copies of
    the weights too, as between slices: those sums the compiler lays beside the next round by itself.
    """
    if dict(jax.sharding.get_abstract_mesh().shape).get("data", 1) > 1:
        return values, w
    mlp: Any = w if w.moe is None else w.moe
    found = {name: matrix for name in MATRICES if (matrix := getattr(mlp, name)) is not None}
    if any(isinstance(matrix, Adapted | Packed) for matrix in found.values()):
        return values, w
    values, found = _tied(values, found)
    if w.moe is None:
        return values, dataclasses.replace(w, **found)
    return values, dataclasses.replace(w, moe=dataclasses.replace(w.moe, **found))


@jax.custom_vjp
def _tied(values: Any, weights: Any) -> tuple[Any, Any]:
    return values, weights


def _forward(values: Any, weights: Any) -> tuple:
    return (values, weights), None


def _backward(_: None, grads: tuple) -> tuple:
    return jax.lax.optimization_barrier(grads)


_tied.defvjp(_forward, _backward)
