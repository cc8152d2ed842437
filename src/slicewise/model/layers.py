"""What the blocks of a layer share: gathered weights, norms and the dense MLP.

Dims in names: B batch, T tokens, D d_model, F d_ff.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from slicewise.catalog.model import ModelSpec
from slicewise.model.linear import linear
from slicewise.model.lora import Adapted, Adapter, Packed, adapter_dims, gathered_packed
from slicewise.model.params import Norm
from slicewise.model.quantization import Marked, Stored
from slicewise.model.remat import GATHERED, named
from slicewise.parallel.rules import gathered, partition, residual


def weights_in(dtype: jnp.dtype) -> Callable[..., Any]:
    """How a stored weight is used: cast first, so that the all-gather moves the smaller type.

    One that is Marked for 8 bits is left where it is stored: its product gathers it.
    """

    def weight(w: Any, *dims: str) -> Any:
        if isinstance(w, Adapted):
            return Adapted(weight(w.base, *dims), adapter(w.adapter, dims), w.scale)
        if isinstance(w, Packed):
            return checkpoint_name(gathered_packed(w, dims, dtype), GATHERED)
        if isinstance(w, Marked):
            return Stored(w.weight.astype(dtype), dims, w.how, w.range_2, w.limit)
        return checkpoint_name(gathered(w.astype(dtype), *dims), GATHERED)

    def adapter(pair: Adapter | None, dims: tuple[str, ...]) -> Adapter | None:
        if pair is None:
            return None
        a_dims, b_dims = adapter_dims(pair, dims)
        return Adapter(weight(pair.lora_a, *a_dims), weight(pair.lora_b, *b_dims))

    return weight


def normed(x: jax.Array, norm: Norm, spec: ModelSpec) -> jax.Array:
    """RMS or layer norm over the last dim, in float32."""
    x32 = x.astype(jnp.float32)
    if norm.bias is not None:
        x32 = x32 - x32.mean(-1, keepdims=True)
    normal = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + spec.norm_eps)
    scaled = normal * (1 + norm.scale if spec.zero_centered_norm else norm.scale)
    return apart((scaled if norm.bias is None else scaled + norm.bias).astype(x.dtype))


def apart(x: jax.Array) -> jax.Array:
    """As it is. What made ``x`` has a backward pass that is not fused into the product that its gradient comes from.

    Such a product would also make sums over tokens or heads. Where two cores share them, as on v5p, it takes up to 1.9
    times as long; elsewhere it is as fast.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return x if device is None or (device.num_cores or 1) == 1 else _apart(x)


@jax.custom_vjp
def _apart(x: jax.Array) -> jax.Array:
    return x


_apart.defvjp(lambda x: (x, None), lambda _, grad: (jax.lax.optimization_barrier(grad),))


def activate(spec: ModelSpec, gate: jax.Array | None, up: jax.Array) -> jax.Array:
    """The hidden activations of an MLP from its products with ``w_gate`` (None where it has none) and ``w_up``."""
    if spec.activation == "clamped_swiglu":
        assert gate is not None
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
    function = {
        "silu": jax.nn.silu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
        "relu": jax.nn.relu,
    }[spec.activation]
    return function(up) if gate is None else function(gate) * up


def mlp(w: Any, spec: ModelSpec, h_BTD: jax.Array, weight: Callable, prefix: str = "") -> jax.Array:
    """The dense MLP with the matrices of ``w``, Layers or Mlp, on normed tokens; ``prefix`` is of tensors' names.

    The output is laid out as the residual stream.
    """
    h_BTD = jax.sharding.reshard(h_BTD, partition("batch", "sequence", "activation"))
    by_mlp = partition("batch", "sequence", "mlp")

    def into(matrix: jax.Array, bias: jax.Array | None, name: str) -> jax.Array:
        return named(biased(linear(h_BTD, weight(matrix, "embed", "mlp"), by_mlp), bias), prefix + name)

    if w.w_gate is None:
        hidden_BTF = activate(spec, None, into(w.w_up, w.b_up, "mlpwi_0"))
    else:
        gate_BTF = into(w.w_gate, w.b_gate, "mlpwi_0")
        hidden_BTF = activate(spec, gate_BTF, into(w.w_up, w.b_up, "mlpwi_1"))
    out_BTD = linear(hidden_BTF, weight(w.w_down, "mlp", "embed"), residual(h_BTD.shape[1]))
    return named(biased(out_BTD, w.b_down), f"{prefix}mlpwo")


def biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias.astype(x.dtype)
