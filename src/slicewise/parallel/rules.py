"""The one table from logical dims of arrays to mesh axes, and the checks that a model fits a mesh."""

from collections.abc import Mapping

import jax
from jax.sharding import PartitionSpec

from slicewise.catalog.model import ModelSpec
from slicewise.errors import UserError

RULES: Mapping[str, str | tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "sequence": "context",
    "embed": ("fsdp", "expert", "context"),  # the d_model dim of weights: gathered where a layer uses them
    "latent": ("fsdp", "expert", "context"),  # the rank of latent attention in weights: as embed
    "experts": "expert",
    "expert_embed": ("fsdp", "context"),  # the d_model dim of weights that the expert axis divides by experts
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "tokens": ("context", "tensor"),  # the tokens of the residual stream: see residual
}
# dims that no axis divides
WHOLE = frozenset({"layers", "position", "slots", "activation", "head_dim", "lora"})


def partition(*dims: str) -> PartitionSpec:
    """The PartitionSpec of an array with these logical dims."""
    assert all(dim in RULES or dim in WHOLE for dim in dims), dims
    return PartitionSpec(*(RULES.get(dim) for dim in dims))


def residual(tokens: int) -> PartitionSpec:
    """Of the residual stream [B, T, D] with T = ``tokens``: divided over the tensor axis too, where it divides T.

    So a norm, a sum or a saved layer input is of a device's own tokens only; what a tensor-parallel product needs is
    gathered just before it, and its partial sums are scattered instead of reduced whole (Korthikanti et al., 2022).
    """
    mesh = jax.sharding.get_abstract_mesh().shape
    ways = mesh.get("context", 1) * mesh.get("tensor", 1)
    return partition("batch", "tokens" if tokens % ways == 0 else "sequence", "activation")


def gathered(weight: jax.Array, *dims: str) -> jax.Array:
    """``weight`` with its embed or latent dim whole on every device: the all-gather of fully sharded data parallelism.

    The transpose, in the backward pass, is the reduce-scatter of the gradient.
    """
    whole = ("activation" if dim in ("embed", "latent") else dim for dim in dims)
    return jax.sharding.reshard(weight, partition(*whole))


def unscattered(grad: jax.Array, x: jax.Array, lead: int) -> jax.Array:
    """The gradient of a product, its first ``lead`` dims laid out as those of ``x``: gathered if need be."""
    spec, ours = jax.typeof(grad).sharding.spec, jax.typeof(x).sharding.spec
    return jax.sharding.reshard(grad, PartitionSpec(*ours[:lead], *spec[lead:]))


def check(spec: ModelSpec, global_batch_size: int, degrees: Mapping[str, int]) -> None:
    """Raises UserError when ``degrees`` (mesh axis -> size) does not divide the dims that it shards."""
    tensor, expert, context = degrees["tensor"], degrees["expert"], degrees.get("context", 1)
    rows = degrees["fsdp"] * expert
    sharded = rows * context
    for count, name in _tensor_dims(spec):
        if count % tensor:
            raise UserError(
                f"tensor parallelism {tensor} does not divide {name} = {count} of {spec.name};"
                f" choose one of {_divisors(count)}."
            )
    if expert > 1 and spec.experts is None:
        raise UserError(
            f"expert parallelism {expert} needs a mixture of experts, which {spec.name} is not;"
            " use fsdp parallelism instead."
        )
    if spec.experts and spec.experts.experts % expert:
        raise UserError(
            f"expert parallelism {expert} does not divide the {spec.experts.experts} experts of {spec.name};"
            f" choose one of {_divisors(spec.experts.experts)}."
        )
    for count, name in _sharded_dims(spec):
        if count % sharded:
            named = " x ".join(["fsdp", *["expert"] * (expert > 1), *["context"] * (context > 1)])
            product = f"{named} parallelism{' =' if ' x ' in named else ''}"
            raise UserError(
                f"{product} {sharded} does not divide {name} = {count} of {spec.name};"
                " use fewer fsdp and more data or tensor parallelism."
            )
    batch = degrees["data"] * rows
    if global_batch_size % batch:
        below = global_batch_size - global_batch_size % batch
        near = f"{below} or {below + batch}" if below else f"{batch}, or context parallelism for sequences"
        axes = "data x fsdp" if expert == 1 else "data x fsdp x expert"
        raise UserError(
            f"global_batch_size = {global_batch_size} is not a multiple of {axes} parallelism = {batch};"
            f" use {near}."
        )


def _tensor_dims(spec: ModelSpec) -> list[tuple[int, str]]:
    dims = [(spec.heads, "heads"), (spec.kv_heads, "kv_heads")]
    if not spec.experts or not all(map(spec.layer_is_sparse, range(spec.layers))):
        dims.append((spec.d_ff, "d_ff"))
    if e := spec.experts:
        dims.append((e.d_ff, "experts.d_ff"))
        dims += [(e.shared_d_ff, "experts.shared_d_ff")] if e.shared_d_ff else []
    return dims


def _sharded_dims(spec: ModelSpec) -> list[tuple[int, str]]:
    dims = [(spec.d_model, "d_model")]
    if a := spec.latent_attention:
        dims.append((a.kv_lora_rank, "latent_attention.kv_lora_rank"))
        dims += [(a.q_lora_rank, "latent_attention.q_lora_rank")] if a.q_lora_rank else []
    return dims


def _divisors(count: int) -> str:
    return ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)
