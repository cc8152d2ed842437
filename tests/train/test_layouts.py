"""Every layout computes what one device does: dense models, mixtures of experts, latent attention."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slicewise.catalog.model import Experts, LatentAttention, ModelSpec
from slicewise.config import RunConfig, load_config
from slicewise.kernels.attention.api import Kernel
from slicewise.model import transformer
from slicewise.parallel import context
from slicewise.parallel.cluster import SliceDevices, by_slice
from slicewise.parallel.expert import Dispatch
from slicewise.parallel.mesh import build_mesh
from slicewise.parallel.rules import partition
from slicewise.train import choices
from slicewise.train.accumulate import accumulated
from slicewise.train.objective import Weights, counts, objective

pytestmark = pytest.mark.slow

# Of float32 sums in another order: relative to the loss, and to the largest entry of each gradient.
LOSS_RTOL, GRADIENT_RTOL = 1e-6, 1e-5

DENSE = ModelSpec(
    name="dense", source="test", layers=4, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=64, vocab=96,
    sliding_window=6, global_every=2, attention_sinks=True, attention_softcap=3.0, position="learned", max_context=16,
)  # fmt: skip
MOE = ModelSpec(
    name="moe", source="test", layers=2, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=64, vocab=96,
    experts=Experts(experts=8, per_token=2, d_ff=16),
)  # fmt: skip
MLA = ModelSpec(
    name="mla", source="test", layers=3, d_model=32, heads=4, kv_heads=4, head_dim=12, d_ff=64, vocab=96,
    latent_attention=LatentAttention(
        kv_lora_rank=16, q_lora_rank=24, nope_head_dim=8, rope_head_dim=4, v_head_dim=8
    ),
    experts=Experts(
        experts=8, per_token=3, d_ff=16, shared_d_ff=16, first_dense_layers=1, score="sigmoid", score_scale=2.5,
        groups=4, groups_per_token=2, balancing_bias=True,
    ),
    prediction_layers=1,
)  # fmt: skip
LATENT = ModelSpec(
    name="latent", source="test", layers=1, d_model=32, heads=4, kv_heads=4, head_dim=12, d_ff=64, vocab=96,
    latent_attention=LatentAttention(kv_lora_rank=16, nope_head_dim=8, rope_head_dim=4, v_head_dim=8),
    prediction_layers=1,
)  # fmt: skip
BATCH = ("packed", "rows")
RING = {"context_strategy": "ring"}
DROPLESS, TIGHT, CAPACITY = Dispatch(), Dispatch("dropless", 0.5), Dispatch("capacity", 1.0)

TABLE = [  # model, dispatch, slices, degrees over ICI and DCN, microbatches, other keys and what the batch is like
    (MOE, DROPLESS, 1, {"expert": 8}, {}, 1, {}),
    (MOE, TIGHT, 1, {"fsdp": 2, "expert": 4}, {}, 2, {}),
    (MOE, CAPACITY, 1, {"data": 2, "expert": 2, "tensor": 2}, {}, 1, {}),
    (MLA, TIGHT, 2, {"expert": 2, "tensor": 2}, {"fsdp": 2}, 2, {}),
    # Four rows on eight devices: each gets less than one.
    (DENSE, DROPLESS, 2, {"fsdp": 2, "context": 2}, {"context": 2}, 1, {"rows": 4}),
    (DENSE, DROPLESS, 1, {"data": 2, "context": 2, "tensor": 2}, {}, 2, RING | {"rows": 4, "packed": False}),
    (MOE, TIGHT, 1, {"context": 2, "expert": 4}, {}, 1, {"context_strategy": "ulysses"}),
    (LATENT, DROPLESS, 1, {"fsdp": 2, "context": 4}, {}, 1, {"rows": 4}),
    (DENSE, DROPLESS, 1, {"pipeline": 4}, {}, 1, {}),
    (DENSE, DROPLESS, 1, {"pipeline": 2}, {}, 1, {"pipeline_repeats": 2, "pipeline_microbatches": 4}),
    (DENSE, DROPLESS, 2, {"data": 2, "fsdp": 2}, {"pipeline": 2}, 2, {"pipeline_gather": "microbatch"}),
    (MOE, CAPACITY, 1, {"pipeline": 2, "tensor": 2}, {}, 1, {}),
    (MLA, TIGHT, 1, {"pipeline": 2, "fsdp": 2, "expert": 2}, {}, 1, {}),
]


def label(row):
    spec, dispatch, _, ici, dcn, steps, keys = row
    axes = [f"{n}{k}" for k, n in ici.items()] + [f"dcn{n}{k}" for k, n in dcn.items()]
    others = [f"{key.rpartition('_')[2]}-{value}" for key, value in keys.items() if key not in BATCH]
    return "-".join([spec.name, dispatch.kind, *axes, *(["accumulated"] if steps > 1 else []), *others])


def batch_of(spec, packed, rows):
    """Packed rows with joints and padding, or each of one document."""
    rng = np.random.default_rng(0)
    B, T = rows, 16
    segments = np.sort(rng.integers(1, 4, (B, T)), axis=1)
    segments[3:, 13:] = 0
    starts = np.concatenate([np.ones((B, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    positions = np.arange(T) - np.maximum.accumulate(np.where(starts, np.arange(T), 0), axis=1)
    tokens, targets = rng.integers(0, spec.vocab, (2, B, T))
    ends = np.concatenate([starts[:, 1:], np.ones((B, 1), bool)], axis=1)
    targets[ends | (segments == 0)] = -1
    if not packed:
        segments, positions = np.ones((B, T)), np.tile(np.arange(T), (B, 1))
    return {"tokens": tokens, "targets": targets, "segment_ids": segments, "positions": positions}


@functools.cache
def weights_of(spec):
    """Made on one device, once for all layouts: tests/train/test_step.py has runs that make theirs in place."""
    with jax.set_mesh(build_mesh(RunConfig(), by_slice(jax.devices()[:1]))):
        return jax.device_get(jax.jit(lambda: transformer.init(spec, jax.random.key(0)))())


def placed(spec, mesh):
    """Those weights, sharded as ``init`` does it on this mesh, which is in force."""
    made = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    return jax.tree.map(
        lambda x, leaf: jax.device_put(x, jax.NamedSharding(mesh, leaf.sharding.spec)), weights_of(spec), made
    )


def compiled(spec, dispatch, slices, ici, dcn, steps, more):
    """(the mesh, the compiled function of (params, batch) to ((objective, terms), gradients))."""
    degrees = {f"{net}_{axis}_parallelism": 1 for net in ("ici", "dcn") for axis in ("data", "fsdp")}
    for network, asked in (("ici", ici), ("dcn", dcn)):
        degrees |= {f"{network}_{axis}_parallelism": degree for axis, degree in asked.items()}
    keys = {key: value for key, value in more.items() if key not in BATCH}
    keys = degrees | keys | {"gradient_accumulation_steps": steps}
    config = load_config(None, [f"{key}={value}" for key, value in keys.items()]).config
    count = slices * int(np.prod(list(ici.values())))
    array = np.empty(count, dtype=object)
    array[:] = jax.devices()[:count]
    mesh = build_mesh(config, SliceDevices(array.reshape(slices, -1)))
    pipeline = choices.pipeline(config, spec, mesh)
    weights = Weights(z_loss=1e-3, prediction=0.3, balance=0.01)
    strategy = config.parallelism.context_strategy
    kernel = Kernel("reference", strategy=strategy)
    order = context.order(16, mesh.shape["context"], strategy)
    order = slice(None) if order is None else order

    def differentiate(params, batch):
        def one(params, part):
            whole = counts(batch)
            how = {"dtype": jnp.float32, "dispatch": dispatch, "kernel": kernel, "pipeline": pipeline}
            return objective(params, spec, part, whole, weights, **how)

        return accumulated(jax.value_and_grad(one, has_aux=True), params, batch, steps)

    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, partition("batch", "sequence"))
        rows = batch_of(spec, more.get("packed", True), more.get("rows", 16))
        batch = {k: jax.device_put(v.astype(np.int32)[:, order], sharding) for k, v in rows.items()}
        params = placed(spec, mesh)
        program = jax.jit(differentiate).lower(params, batch).compile()
    return program, params, batch


@pytest.fixture(scope="module")
def alone():
    """The results of one device, by model, by whether choices are dropped, and by what the batch is like."""
    found = {}

    def result(spec, dispatch, *, packed=True, rows=16):
        key = (spec.name, dispatch.kind, packed, rows)
        if key not in found:
            batch = {"packed": packed, "rows": rows}
            program, params, batch = compiled(spec, dispatch, 1, {"fsdp": 1}, {}, 1, batch)
            found[key] = program(params, batch)
        return found[key]

    return result


@pytest.mark.parametrize("row", TABLE, ids=label)
def test_every_layout_gives_the_loss_and_every_gradient_of_one_device(alone, row, capfd):
    spec, dispatch, _, ici, _, _, more = row
    like = {key: value for key, value in more.items() if key in BATCH}
    (one_total, one_terms), one_gradients = alone(spec, dispatch, **like)
    program, params, batch = compiled(*row)
    (total, terms), gradients = program(params, batch)
    np.testing.assert_allclose(total, one_total, rtol=LOSS_RTOL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=LOSS_RTOL), terms, one_terms)
    ours, wanted = transformer.leaves(gradients), transformer.leaves(one_gradients)
    for name in wanted:
        scale = np.abs(wanted[name]).max()
        assert scale > 0 or name.endswith("balance_bias"), name
        np.testing.assert_allclose(ours[name], wanted[name], atol=GRADIENT_RTOL * scale, rtol=0, err_msg=name)
    axes = re.findall(r"all-to-all\(.*?replica_groups=mesh\[[^\]]*\] \{([^}]*)\}", program.as_text())
    ulysses = more.get("context_strategy") == "ulysses"
    exchanged = ["'expert'"] * ("expert" in ici) + ["'context'"] * ulysses
    assert sorted(set(axes)) == sorted(exchanged)
    assert "rematerialization" not in capfd.readouterr().err.lower()
