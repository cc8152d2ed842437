"""Models over several axes, mixtures of experts among them, compute what one device does."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slicewise.catalog.model import Experts, LatentAttention, ModelSpec
from slicewise.config import load_config
from slicewise.model import transformer
from slicewise.parallel.cluster import SliceDevices
from slicewise.parallel.expert import Dispatch
from slicewise.parallel.mesh import build_mesh
from slicewise.parallel.rules import partition
from slicewise.train import choices
from slicewise.train.accumulate import accumulated
from slicewise.train.objective import Weights, counts, objective

# Of float32 sums in another order: relative to the loss, and to the largest entry of each gradient.
LOSS_RTOL, GRADIENT_RTOL = 1e-6, 1e-5

DENSE = ModelSpec(
    name="dense", source="test", layers=4, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=64, vocab=96,
    sliding_window=5, global_every=2,
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
DROPLESS, TIGHT, CAPACITY = Dispatch(), Dispatch("dropless", 0.5), Dispatch("capacity", 1.0)

TABLE = [  # model, dispatch, slices, degrees over ICI and DCN, microbatches, other keys
    (MOE, DROPLESS, 1, {"expert": 8}, {}, 1, {}),
    (MOE, TIGHT, 1, {"fsdp": 2, "expert": 4}, {}, 2, {}),
    (MOE, CAPACITY, 1, {"data": 2, "expert": 2, "tensor": 2}, {}, 1, {}),
    (MLA, TIGHT, 2, {"expert": 2, "tensor": 2}, {"fsdp": 2}, 2, {}),
    (DENSE, DROPLESS, 1, {"pipeline": 4}, {}, 1, {}),
    (DENSE, DROPLESS, 1, {"pipeline": 2}, {}, 1, {"pipeline_repeats": 2, "pipeline_microbatches": 4}),
    (DENSE, DROPLESS, 2, {"data": 2, "fsdp": 2}, {"pipeline": 2}, 2, {"pipeline_gather": "microbatch"}),
    (MOE, CAPACITY, 1, {"pipeline": 2, "tensor": 2}, {}, 1, {}),
    (MLA, TIGHT, 1, {"pipeline": 2, "fsdp": 2, "expert": 2}, {}, 1, {}),
]


def label(row):
    spec, dispatch, _, ici, dcn, steps, keys = row
    axes = [f"{n}{k}" for k, n in ici.items()] + [f"dcn{n}{k}" for k, n in dcn.items()]
    others = [f"{key.rpartition('_')[2]}-{value}" for key, value in keys.items()]
    return "-".join([spec.name, dispatch.kind, *axes, *(["accumulated"] if steps > 1 else []), *others])


def batch_of(spec):
    """Packed rows with joints and padding."""
    rng = np.random.default_rng(0)
    B, T = 16, 16
    segments = np.sort(rng.integers(1, 4, (B, T)), axis=1)
    segments[3:, 13:] = 0
    starts = np.concatenate([np.ones((B, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    positions = np.arange(T) - np.maximum.accumulate(np.where(starts, np.arange(T), 0), axis=1)
    tokens, targets = rng.integers(0, spec.vocab, (2, B, T))
    ends = np.concatenate([starts[:, 1:], np.ones((B, 1), bool)], axis=1)
    targets[ends | (segments == 0)] = -1
    return {"tokens": tokens, "targets": targets, "segment_ids": segments, "positions": positions}


def compiled(spec, dispatch, slices, ici, dcn, steps, keys):
    """(the mesh, the compiled function of (params, batch) to ((objective, terms), gradients))."""
    degrees = {f"{net}_{axis}_parallelism": 1 for net in ("ici", "dcn") for axis in ("data", "fsdp")}
    for network, asked in (("ici", ici), ("dcn", dcn)):
        degrees |= {f"{network}_{axis}_parallelism": degree for axis, degree in asked.items()}
    keys = degrees | keys | {"gradient_accumulation_steps": steps}
    config = load_config(None, [f"{key}={value}" for key, value in keys.items()]).config
    count = slices * int(np.prod(list(ici.values())))
    array = np.empty(count, dtype=object)
    array[:] = jax.devices()[:count]
    mesh = build_mesh(config, SliceDevices(array.reshape(slices, -1)))
    pipeline = choices.pipeline(config, spec, mesh)
    weights = Weights(z_loss=1e-3, prediction=0.3, balance=0.01)

    def differentiate(params, batch):
        def one(params, part):
            whole = counts(batch)
            how = {"dtype": jnp.float32, "dispatch": dispatch, "pipeline": pipeline}
            return objective(params, spec, part, whole, weights, **how)

        return accumulated(jax.value_and_grad(one, has_aux=True), params, batch, steps)

    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, partition("batch", "sequence"))
        batch = {k: jax.device_put(v.astype(np.int32), sharding) for k, v in batch_of(spec).items()}
        params = jax.jit(lambda: transformer.init(spec, jax.random.key(0)))()
        program = jax.jit(differentiate).lower(params, batch).compile()
    return program, params, batch


@pytest.fixture(scope="module")
def alone():
    """The results of one device, by model and by whether choices are dropped."""
    found = {}

    def result(spec, dispatch):
        key = (spec.name, dispatch.kind)
        if key not in found:
            program, params, batch = compiled(spec, dispatch, 1, {"fsdp": 1}, {}, 1, {})
            found[key] = program(params, batch)
        return found[key]

    return result


@pytest.mark.parametrize("row", TABLE, ids=label)
def test_every_layout_gives_the_loss_and_every_gradient_of_one_device(alone, row, capfd):
    spec, dispatch, *_ = row
    (one_total, one_terms), one_gradients = alone(spec, dispatch)
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
    assert set(axes) == ({"'expert'"} if "expert" in row[3] else set())
    assert "rematerialization" not in capfd.readouterr().err.lower()
