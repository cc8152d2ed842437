"""The one table from logical dims of arrays to mesh axes, and the checks that a model fits a mesh."""

from collections.abc import Mapping

import jax
from jax.sharding import PartitionSpec

from slicewise.catalog.model import ModelSpec
from slicewise.errors import UserError

RULES: Mapping[str, str | tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",  # the d_model dim of weights: gathered where a layer uses them
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}
WHOLE = frozenset({"layers", "sequence", "activation", "head_dim"})  # dims that no axis divides


def partition(*dims: str) -> PartitionSpec:
    """The PartitionSpec of an array with these logical dims."""
    assert all(dim in RULES or dim in WHOLE for dim in dims), dims
    return PartitionSpec(*(RULES.get(dim) for dim in dims))


def gathered(weight: jax.Array, *dims: str) -> jax.Array:
    """``weight`` with its embed dim whole on every device: the all-gather of fully sharded data parallelism.

    The transpose, in the backward pass, is the reduce-scatter of the gradient.
    """
    return jax.sharding.reshard(weight, partition(*("activation" if dim == "embed" else dim for dim in dims)))


def check(spec: ModelSpec, global_batch_size: int, degrees: Mapping[str, int]) -> None:
    """Raises UserError when ``degrees`` (mesh axis -> size) does not divide the dims that it shards."""
    tensor, fsdp, batch = degrees["tensor"], degrees["fsdp"], degrees["data"] * degrees["fsdp"]
    for count, name in ((spec.heads, "heads"), (spec.kv_heads, "kv_heads"), (spec.d_ff, "d_ff")):
        if count % tensor:
            raise UserError(
                f"tensor parallelism {tensor} does not divide {name} = {count} of {spec.name};"
                f" choose one of {_divisors(count)}."
            )
    if spec.d_model % fsdp:
        raise UserError(
            f"fsdp parallelism {fsdp} does not divide d_model = {spec.d_model} of {spec.name};"
            " use fewer fsdp and more data or tensor parallelism."
        )
    if global_batch_size % batch:
        below = global_batch_size - global_batch_size % batch
        near = f"{below} or {below + batch}" if below else f"{batch}"
        raise UserError(
            f"global_batch_size = {global_batch_size} is not a multiple of data x fsdp parallelism = {batch};"
            f" use {near}."
        )


def _divisors(count: int) -> str:
    return ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)
