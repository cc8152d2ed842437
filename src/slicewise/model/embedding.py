"""The rows of an embedding table whose vocabulary the tensor axis divides."""

import jax

from slicewise.parallel.rules import partition, residual

AXIS = "tensor"


def lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """``table`` [V, D], laid out as it is stored, at ``tokens``: [B, T, D], laid out as the residual stream.

    Each device looks up the tokens of its own part of the vocabulary, and the parts are summed where the tokens belong.
    So no device holds the whole table, or the whole of its gradient.
    """
    tokens, table = partition("batch", "sequence"), partition("vocab", "embed")
    out = residual(tokens_BT.shape[1])
    is_divided = out != partition("batch", "sequence", "activation")
    embed_axes = table[1]
    axes = jax.sharding.get_abstract_mesh().axis_names

    def on_device(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        absent = tuple(axis for axis in axes if axis not in jax.typeof(table_VD).mat.varying)
        # Before the gather, so that gradients are summed over replicas when they are scattered already.
        table_VD = jax.lax.pcast(table_VD, absent, to="varying") if absent else table_VD
        own_VD = jax.lax.all_gather(table_VD, embed_axes, axis=1, tiled=True)
        ids_BT = tokens_BT - jax.lax.axis_index(AXIS) * len(own_VD)
        x_BTD = own_VD.at[ids_BT].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        if is_divided:
            return jax.lax.psum_scatter(x_BTD, AXIS, scatter_dimension=1, tiled=True)
        return jax.lax.psum(x_BTD, AXIS)

    mapped = jax.shard_map(on_device, in_specs=(table, tokens), out_specs=out)
    return mapped(jax.sharding.reshard(table_VD, table), jax.sharding.reshard(tokens_BT, tokens))
