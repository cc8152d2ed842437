"""The one matrix product of the model: activations times weight, with the backward products spelled out.

Spelled out because the compiler meets each product with its operands in storage order (automatic transposition gives
the weight gradient transposed, which costs a relayout on every backend), and because each one says where its result
lives on the mesh.
"""

import functools

import jax
from jax.sharding import PartitionSpec

from slicewise.model import quantization
from slicewise.model.lora import Adapted
from slicewise.model.quantization import Stored
from slicewise.parallel.rules import unscattered


def linear(
    x: jax.Array, weight: jax.Array | Stored | Adapted, out_sharding: PartitionSpec, *, contract: int = 1
) -> jax.Array:
    """Contracts the last ``contract`` dims of ``x`` [*lead, *C] with the first of ``weight`` [*C, *O].

    Returns [*lead, *O] with ``out_sharding``. Where both are sharded along C the partial sums are all-reduced, or
    scattered over the lead dims that ``out_sharding`` divides by the same axis.
    A Stored weight is multiplied in 8 bits. An Adapted one has no gradient, but those of its adapter.
    """
    if isinstance(weight, Adapted):
        return _adapted(x, weight, tuple(out_sharding), contract)
    if isinstance(weight, Stored):
        return quantization.linear(x, weight, out_sharding, contract)
    return _linear(x, weight, tuple(out_sharding), contract, False)


def _adapted(x: jax.Array, weight: Adapted, out_sharding: tuple, contract: int) -> jax.Array:
    base, adapter = weight.base, weight.adapter
    if isinstance(base, Stored):
        out = quantization.linear(x, base, PartitionSpec(*out_sharding), contract)
    else:
        out = _linear(x, base, out_sharding, contract, True)
    if adapter is None:
        return out
    lead = x.ndim - contract
    # What lies between the two has the tokens of the result: partial sums are scattered while they are narrow.
    between = _linear(x, adapter.lora_a, (*out_sharding[:lead], None), contract, False)
    return out + weight.scale * _linear(between, adapter.lora_b, out_sharding, 1, False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _linear(
    x: jax.Array, weight: jax.Array, out_sharding: tuple, contract: int, is_frozen: bool
) -> jax.Array:
    lead = x.ndim - contract
    dims = ((tuple(range(lead, x.ndim)), tuple(range(contract))), ((), ()))
    return jax.lax.dot_general(x, weight, dims, out_sharding=PartitionSpec(*out_sharding))


def _forward(x: jax.Array, weight: jax.Array, out_sharding: tuple, contract: int, is_frozen: bool) -> tuple:
    return _linear(x, weight, out_sharding, contract, is_frozen), (x, weight)


def _backward(out_sharding: tuple, contract: int, is_frozen: bool, saved: tuple, grad: jax.Array) -> tuple:
    x, weight = saved
    lead = x.ndim - contract
    grad = unscattered(grad, x, lead)
    over_out = ((tuple(range(lead, grad.ndim)), tuple(range(contract, weight.ndim))), ((), ()))
    over_lead = ((tuple(range(lead)), tuple(range(lead))), ((), ()))
    d_x = jax.lax.dot_general(grad, weight, over_out, out_sharding=jax.typeof(x).sharding.spec)
    if is_frozen:
        return d_x, None
    return d_x, jax.lax.dot_general(x, grad, over_lead, out_sharding=jax.typeof(weight).sharding.spec)


_linear.defvjp(_forward, _backward)
