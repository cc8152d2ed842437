"""Ring attention (Liu et al., 2023), cut as parallel/context.py says: keys and values pass from device to device.

Device i of n holds chunks i and 2n - 1 - i of a row, here early and late. In each round it has the keys of one device,
at first its own. Its late queries see all of the visitor's early chunk. Besides, its early queries see all of that
chunk where the visitor comes before it, and its late queries see all of the visitor's late chunk where it comes after:
two whole pairs of chunks in each round on every device. With its own keys the second pair is that of each chunk with
itself, which the causal mask halves. Partial results are joined by their normalisers (the logarithms of what a softmax
divides by), in float32; no device ever holds the keys of more than two.

Dims in names: L tokens of a chunk; what else an array has is up to the part that computes pairs, with its heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from slicewise.kernels.attention import chunked
from slicewise.kernels.attention.device import grouped, grouped_sinks
from slicewise.parallel.context import AXIS

if TYPE_CHECKING:
    from slicewise.kernels.attention.divided import How

Pair = tuple[Any, Any]  # what belongs to an early and to a late chunk


@dataclass(frozen=True)
class Part:
    """How one chunk of queries meets one chunk of keys. Arrays are as the part wants them, chunks of tokens apart.

    ``forward(q, k, v, rows, columns, window, distance)`` gives the context and, in float32, its normaliser;
    ``backward(q, k, v, grad, normaliser, delta, rows, columns, window, distance)`` the gradients of q, k and v.
    ``rows`` and ``columns`` are positions and segments, ``distance`` how many tokens the chunks start apart, None for a
    chunk with itself. ``token_dim`` is that of q, k and v, ``window`` None where the part knows it.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    token_dim: int


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: Any, rows: Any, how: "How", schedule: None
) -> jax.Array:
    """On one device, inside a shard_map; ``q`` is scaled already. Returns the context [B, T, N, V]."""
    if how.kernel.name == "splash":
        from slicewise.kernels.attention import splash

        part = splash.ring_part(q, v, how)
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        sinks = jnp.full(q.shape[1], -jnp.inf) if sinks is None else sinks
        return _ring(part, how.residual_name, q, k, v, sinks[:, None], rows, None).swapaxes(1, 2)
    part = Part(
        partial(_chunked_forward, softcap=how.softcap), partial(_chunked_backward, softcap=how.softcap), 1
    )
    sinks_KG = grouped_sinks(sinks, q.shape[2], k.shape[2])
    found = _ring(part, how.residual_name, grouped(q, k.shape[2]), k, v, sinks_KG, rows, how.window)
    return found.reshape(*q.shape[:3], v.shape[3])


def _chunked_forward(
    q: Any, k: Any, v: Any, rows: Any, columns: Any, window: Any, distance: Any, *, softcap: float | None
) -> tuple:
    none = jnp.full(q.shape[2:4], -jnp.inf)
    return chunked.forward(q, k, v, none, rows, columns, window, softcap, jnp.dtype(jnp.float32))


def _chunked_backward(
    q: Any,
    k: Any,
    v: Any,
    grad: Any,
    normaliser: Any,
    delta: Any,
    rows: Any,
    columns: Any,
    window: Any,
    distance: Any,
    *,
    softcap: float | None,
) -> tuple:
    return chunked.backward(q, k, v, grad, normaliser, delta, rows, columns, window, softcap)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(
    part: Part, residual_name: str, q: Any, k: Any, v: Any, sinks: Any, rows: Any, window: Any
) -> jax.Array:
    """``sinks`` is shaped to be added to a normaliser."""
    return _forward(part, residual_name, q, k, v, sinks, rows, window)[0]


def _forward(
    part: Part, residual_name: str, q: Any, k: Any, v: Any, sinks: Any, rows: Any, window: Any
) -> tuple:
    place = _Place.of(q.shape[part.token_dim])
    where = _halves(rows, 1)
    queries = _paired(_halves(q, part.token_dim), where)
    keys = _paired(_halves((k, v), part.token_dim), where)

    def meet(row: tuple, key: tuple, distance: Any) -> tuple:
        (q, rows), ((k, v), columns) = row, key
        context, normaliser = part.forward(q, k, v, rows, columns, window, distance)
        return context.astype(jnp.float32), normaliser

    def round_(found: Pair, keys: Pair, number: Any) -> Pair:
        """``found``, a context with its normaliser for each chunk of queries, with these keys joined in."""
        early, late = found
        visitor = place.visitor(number)
        late = _joined(late, meet(queries[1], keys[0], place.late_to_early(visitor)))
        before = visitor < place.here
        more = meet(_either(before, queries), _either(before, keys), place.like_to_like(visitor))
        joined = _joined(_either(before, (early, late)), more)
        return _either(before, (joined, early)), _either(before, (late, joined))

    visiting = _passed_on(keys)
    early, late = (meet(queries[i], keys[i], None) for i in (0, 1))
    late = _joined(late, meet(queries[1], keys[0], place.late_to_early(place.here)))

    def body(carry: tuple, number: jax.Array) -> tuple:
        found, keys = carry
        following = _passed_on(keys)  # beside the round, which does not need it
        return (round_(found, keys, number), following), None

    found, visiting = _repeated(body, ((early, late), visiting), place)
    found = round_(found, visiting, place.ways - 1)
    context, normaliser = (jnp.concatenate(pair, part.token_dim) for pair in zip(*found, strict=True))
    whole = jnp.logaddexp(normaliser, sinks.astype(jnp.float32))
    context = (context * jnp.exp(normaliser - whole)[..., None]).astype(v.dtype)
    context, whole = (checkpoint_name(x, residual_name) for x in (context, whole))
    return context, (q, k, v, sinks, rows, window, context, whole)


def _backward(part: Part, residual_name: str, saved: tuple, grad: jax.Array) -> tuple:
    """Gradients of keys and values go round with them, and one step further to get home."""
    q, k, v, sinks, rows, window, context, normaliser = saved
    place = _Place.of(q.shape[part.token_dim])
    delta = (context.astype(jnp.float32) * grad.astype(jnp.float32)).sum(-1)
    where = _halves(rows, 1)
    queries = _paired(_halves((q, grad, normaliser, delta), part.token_dim), where)
    keys = _paired(_halves((k, v), part.token_dim), where)

    def meet(row: tuple, key: tuple, distance: Any) -> tuple:
        (of_query, rows), ((k, v), columns) = row, key
        q, *others = of_query
        dq, *dkv = part.backward(q, k, v, *others, rows, columns, window, distance)
        return dq.astype(jnp.float32), tuple(d.astype(jnp.float32) for d in dkv)

    def late_to_early(dq: Pair, dkv: Pair, keys: Pair, visitor: Any) -> tuple[Pair, Pair]:
        more_q, more_kv = meet(queries[1], keys[0], place.late_to_early(visitor))
        return (dq[0], dq[1] + more_q), (_sum(dkv[0], more_kv), dkv[1])

    def round_(dq: Pair, dkv: Pair, keys: Pair, number: Any) -> tuple[Pair, Pair]:
        visitor = place.visitor(number)
        dq, dkv = late_to_early(dq, dkv, keys, visitor)
        before = visitor < place.here
        more = meet(_either(before, queries), _either(before, keys), place.like_to_like(visitor))
        return _given(before, dq, more[0]), _given(before, dkv, more[1])

    visiting = _passed_on(keys)
    dq, dkv = _paired(*(meet(queries[i], keys[i], None) for i in (0, 1)))
    dq, dkv = late_to_early(dq, dkv, keys, place.here)

    def body(carry: tuple, number: jax.Array) -> tuple:
        dq, dkv, keys = carry
        following = _passed_on(keys)
        dq, dkv = round_(dq, dkv, keys, number)
        return (dq, _passed_on(dkv), following), None

    start = (dq, _passed_on(dkv), visiting)
    dq, dkv, visiting = _repeated(body, start, place)
    dq, dkv = round_(dq, dkv, visiting, place.ways - 1)
    dkv = _passed_on(dkv)
    dsinks = _summed_to(-jnp.exp(sinks.astype(jnp.float32) - normaliser) * delta, sinks.shape)

    def whole(pair: Pair, like: jax.Array) -> jax.Array:
        return jnp.concatenate(pair, part.token_dim).astype(like.dtype)

    dk, dv = zip(*dkv, strict=True)
    return whole(dq, q), whole(dk, k), whole(dv, v), dsinks.astype(sinks.dtype), None, None


_ring.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _Place:
    """This device among the ``ways`` of the ring, and how far apart chunks start, in tokens."""

    ways: int
    here: jax.Array
    chunk: int

    @classmethod
    def of(cls, tokens: int) -> "_Place":
        return cls(jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS), tokens // 2)

    def visitor(self, number: Any) -> jax.Array:
        """Whose keys are here in a round."""
        return (self.here - number) % self.ways

    def late_to_early(self, visitor: jax.Array) -> jax.Array:
        return (2 * self.ways - 1 - self.here - visitor) * self.chunk

    def like_to_like(self, visitor: jax.Array) -> jax.Array:
        """From the later of two early chunks, or of two late ones, to the other."""
        return jnp.abs(self.here - visitor) * self.chunk


def _repeated(body: Callable, start: tuple, place: _Place) -> tuple:
    """The rounds between the first, which is spelled out, and the last, after which no keys pass on."""
    return jax.lax.scan(body, start, jnp.arange(1, place.ways - 1))[0] if place.ways > 2 else start


def _halves(tree: Any, dim: int) -> Pair:
    pairs = jax.tree.map(lambda x: jnp.split(x, 2, axis=dim), tree)
    early, late = (jax.tree.map(lambda x, i=i: x[i], pairs, is_leaf=_is_list) for i in (0, 1))
    return early, late


def _paired(a: Pair, b: Pair) -> tuple[Pair, Pair]:
    """What two pairs have of the early chunk, and of the late one."""
    return (a[0], b[0]), (a[1], b[1])


def _is_list(x: Any) -> bool:
    return isinstance(x, list)


def _passed_on(tree: Any) -> Any:
    n = jax.lax.axis_size(AXIS)
    pairs = [(i, (i + 1) % n) for i in range(n)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)


def _either(first: jax.Array, pair: Pair) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), *pair)


def _given(first: jax.Array, pair: Pair, more: Any) -> Pair:
    """``pair`` with ``more`` added to its first part, or else to the second."""
    early = jax.tree.map(lambda x, d: x + jnp.where(first, d, 0), pair[0], more)
    late = jax.tree.map(lambda x, d: x + jnp.where(first, 0, d), pair[1], more)
    return early, late


def _sum(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _joined(a: tuple, b: tuple) -> tuple:
    """Two contexts with their normalisers as one, in float32; of the first no normaliser may be infinite."""
    whole = jnp.logaddexp(a[1], b[1])
    context = sum(x * jnp.exp(n - whole)[..., None] for x, n in (a, b))
    return context, whole


def _summed_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum([i for i, size in enumerate(shape) if size == 1], keepdims=True)
