"""A tuned kernel by itself: what a search of its settings compiles, or runs and times."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slicewise.kernels.attention import api as attention
from slicewise.kernels.attention import chunked
from slicewise.kernels.attention.tiles import Tiles
from slicewise.kernels.grouped_matmul import api as grouped_matmul
from slicewise.kernels.grouped_matmul import mosaic
from slicewise.kernels.tuned import Key

HEADS = 2  # enough that no unit idles between rows of the grid


@dataclass(frozen=True)
class Alone:
    """A function of one device and the shapes of its operands."""

    function: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]


def alone(
    key: Key,
    values: Mapping[str, int],
    part: str = "",
    *,
    max_logit: float | None = None,
    interpret: bool = False,
) -> Alone:
    """The kernel that ``key`` names with the settings ``values``; attention with its gradients unless ``part`` is
    forward. ``max_logit`` is that of kernels.attention.api.Kernel."""
    if key.kernel == "splash":
        how = attention.Kernel("splash", key.chip, key.vmem_limit_kib, max_logit, interpret)
        return _splash(key, values, how, is_whole=part != "forward")
    if key.kernel == "xla_chunked":
        return _chunked(key, values)
    assert key.kernel in ("gmm", "gmm_t", "tgmm"), key.kernel
    return _grouped(key, values, interpret)


def _splash(key: Key, values: Mapping[str, int], how: attention.Kernel, *, is_whole: bool) -> Alone:
    from slicewise.kernels.attention import splash

    shape, dtype = key.shape, jnp.dtype(key.dtype)
    T = shape["tokens"]
    order_T, tile = np.arange(T), Tiles(**values)
    attend = splash.make(order_T, 1, shape["window"] or None, tile, None, how, attention.CONTEXT)

    def forward(q_NTH: Any, k_NTH: Any, v_NTV: Any, segments_T: Any) -> Any:
        return splash.over_row(attend, q_NTH, k_NTH, v_NTV, None, segments_T, segments_T)

    def gradients(q_NTH: Any, k_NTH: Any, v_NTV: Any, segments_T: Any) -> Any:
        out_NTV, pull = jax.vjp(lambda q, k, v: forward(q, k, v, segments_T), q_NTH, k_NTH, v_NTV)
        return out_NTV, pull(out_NTV)

    def operand(width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((HEADS, T, width), dtype)

    segments_T = jax.ShapeDtypeStruct((T,), jnp.int32)
    operands = (operand(shape["qk"]), operand(shape["qk"]), operand(shape["v"]), segments_T)
    return Alone(gradients if is_whole else forward, operands)


def _chunked(key: Key, values: Mapping[str, int]) -> Alone:
    shape, dtype = key.shape, jnp.dtype(key.dtype)
    T = shape["tokens"]

    def gradients(q_BTKGH: Any, k_BSKH: Any, v_BSKV: Any) -> Any:
        where = (jnp.arange(T)[None], jnp.ones((1, T), jnp.int32))
        sinks_KG = jnp.full(q_BTKGH.shape[2:4], -jnp.inf)
        none = jnp.asarray(shape["window"] or jnp.iinfo(jnp.int32).max)

        def attend(q: Any, k: Any, v: Any) -> jax.Array:
            return chunked.attention(
                q, k, v, sinks_KG, where, where, none, None, attention.CONTEXT, values["block"]
            )

        out, pull = jax.vjp(attend, q_BTKGH, k_BSKH, v_BSKV)
        return out, pull(out)

    def operand(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, T, *dims), dtype)

    return Alone(gradients, (operand(1, HEADS, shape["qk"]), operand(1, shape["qk"]), operand(1, shape["v"])))


def _grouped(key: Key, values: Mapping[str, int], interpret: bool) -> Alone:
    """Rows divided evenly among the groups."""
    shape, dtype = key.shape, jnp.dtype(key.dtype)
    rows, summed, columns, groups = (shape[name] for name in ("rows", "summed", "columns", "groups"))
    how = grouped_matmul.Kernel("mosaic", interpret, key.chip, key.vmem_limit_kib)
    tile = (values["rows"], values["summed"], values["columns"])
    out = jnp.float32 if dtype.itemsize == 1 else dtype

    def sizes_G() -> jax.Array:
        return jnp.full(groups, rows // groups, jnp.int32)

    def product(x: Any, w: Any) -> jax.Array:
        return mosaic.product(x, w, sizes_G(), how, out, transposed=key.kernel == "gmm_t", tile=tile)

    def gradient(x: Any, grad: Any) -> jax.Array:
        return mosaic.weight_gradient(x, grad, sizes_G(), how, out, tile=tile)

    if key.kernel == "tgmm":
        return Alone(gradient, tuple(jax.ShapeDtypeStruct((rows, n), dtype) for n in (summed, columns)))
    matrix = (columns, summed) if key.kernel == "gmm_t" else (summed, columns)
    return Alone(
        product,
        (jax.ShapeDtypeStruct((rows, summed), dtype), jax.ShapeDtypeStruct((groups, *matrix), dtype)),
    )
