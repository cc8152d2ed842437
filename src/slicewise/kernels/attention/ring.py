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
        partial(_chunked_forward, softcap=how.softcap, most=how.block),
        partial(_chunked_backward, softcap=how.softcap, most=how.block),
        1,
    )
    sinks_KG = grouped_sinks(sinks, q.shape[2], k.shape[2])
    found = _ring(part, how.residual_name, grouped(q, k.shape[2]), k, v, sinks_KG, rows, how.window)
    return found.reshape(*q.shape[:3], v.shape[3])


def _chunked_forward(
    q: Any,
    k: Any,
    v: Any,
    rows: Any,
    columns: Any,
    window: Any,
    distance: Any,
    *,
    softcap: float | None,
    most: int,
) -> tuple:
    none = jnp.full(q.shape[2:4], -jnp.inf)
    return chunked.forward(q, k, v, none, rows, columns, window, softcap, jnp.dtype(jnp.float32), most)


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
    most: int,
) -> tuple:
    return chunked.backward(q, k, v, grad, normaliser, delta, rows, columns, window, softcap, most)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(
    part: Part, residual_name: str, q: Any, k: Any, v: Any, sinks: Any, rows: Any, window: Any
) -> jax.Array:
    """``sinks`` is shaped to be added to a normaliser."""
    return _forward(part, residual_name, q, k, v, sinks, rows, window)[0]


def _forward(
    part: Part, residual_name: str, q: Any, k: Any, v: Any, sinks: Any, rows: Any, window: Any
) -> tuple:
    place = _Place.of(q, part.token_dim)
    cut, put = place.cut, place.put

    def meet(at_query: Any, keys: tuple, at_key: Any, distance: Any) -> tuple:
        """The context with its normaliser, float32, of the queries and the keys of two chunks."""
        (k, v), columns = keys
        k, v = cut((k, v), at_key)
        columns = cut(columns, at_key, 1)
        found = part.forward(cut(q, at_query), k, v, cut(rows, at_query, 1), columns, window, distance)
        return found[0].astype(jnp.float32), found[1]

    def round_(found: tuple, keys: tuple, number: Any) -> tuple:
        """``found``, the context with its normaliser of all queries, with these keys joined in."""
        for at_query, at_key, distance in place.pairs(number):
            more = meet(at_query, keys, at_key, distance)
            found = put(found, at_query, _joined(cut(found, at_query), more))
        return found

    keys = ((k, v), rows)
    visiting = _passed_on(keys)
    early, late, more = (meet(at, keys, to, distance) for at, to, distance in place.pairs_alone())
    found = jax.tree.map(lambda *chunks: jnp.concatenate(chunks, part.token_dim), early, _joined(late, more))

    def body(carry: tuple, number: jax.Array) -> tuple:
        found, keys = carry
        following = _passed_on(keys)  # beside the round, which does not need it
        return (round_(found, keys, number), following), None

    found, visiting = _repeated(body, (found, visiting), place)
    context, normaliser = round_(found, visiting, place.ways - 1)
    whole = jnp.logaddexp(normaliser, sinks.astype(jnp.float32))
    context = (context * jnp.exp(normaliser - whole)[..., None]).astype(v.dtype)
    context, whole = (checkpoint_name(x, residual_name) for x in (context, whole))
    return context, (q, k, v, sinks, rows, window, context, whole)


def _backward(part: Part, residual_name: str, saved: tuple, grad: jax.Array) -> tuple:
    """Gradients of keys and values go round with them, and one step further to get home."""
    q, k, v, sinks, rows, window, context, normaliser = saved
    place = _Place.of(q, part.token_dim)
    cut, put = place.cut, place.put
    delta = (context.astype(jnp.float32) * grad.astype(jnp.float32)).sum(-1)

    def added(sums: tuple, keys: tuple, at_query: Any, at_key: Any, distance: Any) -> tuple:
        """``sums``, the gradients of q, k and v in float32, with those of two chunks."""
        (k, v), columns = keys
        k, v = cut((k, v), at_key)
        columns = cut(columns, at_key, 1)
        q_, grad_, normaliser_, delta_ = cut((q, grad, normaliser, delta), at_query)
        of_rows = cut(rows, at_query, 1)
        found = part.backward(q_, k, v, grad_, normaliser_, delta_, of_rows, columns, window, distance)
        places = (at_query, at_key, at_key)
        return tuple(put(x, at, cut(x, at) + d) for x, at, d in zip(sums, places, found, strict=True))

    def round_(sums: tuple, keys: tuple, number: Any) -> tuple:
        for at_query, at_key, distance in place.pairs(number):
            sums = added(sums, keys, at_query, at_key, distance)
        return sums

    keys = ((k, v), rows)
    visiting = _passed_on(keys)
    dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    for at_query, at_key, distance in place.pairs_alone():
        dq, dk, dv = added((dq, dk, dv), keys, at_query, at_key, distance)

    def body(carry: tuple, number: jax.Array) -> tuple:
        dq, dkv, keys = carry
        following = _passed_on(keys)
        dq, *dkv = round_((dq, *dkv), keys, number)
        return (dq, _passed_on(tuple(dkv)), following), None

    dq, dkv, visiting = _repeated(body, (dq, _passed_on((dk, dv)), visiting), place)
    dq, *dkv = round_((dq, *dkv), visiting, place.ways - 1)
    dk, dv = _passed_on(tuple(dkv))
    dsinks = _summed_to(-jnp.exp(sinks.astype(jnp.float32) - normaliser) * delta, sinks.shape)
    found = (d.astype(x.dtype) for d, x in ((dq, q), (dk, k), (dv, v), (dsinks, sinks)))
    return *found, None, None


_ring.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _Place:
    """This device among the ``ways`` of the ring, and where the late chunk of its arrays begins."""

    ways: int
    here: jax.Array
    chunk: int  # tokens
    token_dim: int

    @classmethod
    def of(cls, q: jax.Array, token_dim: int) -> "_Place":
        size, here = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
        return cls(size, here, q.shape[token_dim] // 2, token_dim)

    def pairs(self, number: Any) -> tuple[tuple[Any, Any, Any], ...]:
        """Of a round but the first: which chunks of queries and of keys meet, and how far apart they start."""
        visitor = (self.here - number) % self.ways
        late_to_early = (2 * self.ways - 1 - self.here - visitor) * self.chunk
        like = jnp.where(visitor < self.here, 0, self.chunk)
        return (self.chunk, 0, late_to_early), (like, like, jnp.abs(self.here - visitor) * self.chunk)

    def pairs_alone(self) -> tuple[tuple[int, int, Any], ...]:
        """Of the first round, with a device's own keys."""
        late = self.chunk
        return (0, 0, None), (late, late, None), (late, 0, self.pairs(0)[0][2])

    def cut(self, tree: Any, at: Any, dim: int | None = None) -> Any:
        """The chunk of each array that starts ``at``."""
        dim = self.token_dim if dim is None else dim
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at, self.chunk, dim), tree)

    def put(self, tree: Any, at: Any, chunks: Any) -> Any:
        dim = self.token_dim
        return jax.tree.map(
            lambda x, c: jax.lax.dynamic_update_slice_in_dim(x, c.astype(x.dtype), at, dim), tree, chunks
        )


def _repeated(body: Callable, start: tuple, place: _Place) -> tuple:
    """The rounds between the first, which is spelled out, and the last, after which no keys pass on."""
    return jax.lax.scan(body, start, jnp.arange(1, place.ways - 1))[0] if place.ways > 2 else start


def _passed_on(tree: Any) -> Any:
    n = jax.lax.axis_size(AXIS)
    pairs = [(i, (i + 1) % n) for i in range(n)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)


def _joined(a: tuple, b: tuple) -> tuple:
    """Two contexts with their normalisers as one, in float32; of the first no normaliser may be infinite."""
    whole = jnp.logaddexp(a[1], b[1])
    context = sum(x * jnp.exp(n - whole)[..., None] for x, n in (a, b))
    return context, whole


def _summed_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum([i for i, size in enumerate(shape) if size == 1], keepdims=True)
