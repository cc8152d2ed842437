"""Every layout computes what one device does: dense models, mixtures of experts, latent attention, adapters."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slicewise.catalog.model import Experts, LatentAttention, ModelSpec
from slicewise.config import RunConfig, load_config
from slicewise.costs.adapters import Lora
from slicewise.kernels.attention.api import Kernel
from slicewise.model import transformer
from slicewise.model.lora import Adapter, adapted, adapters, freeze, merged_params
from slicewise.model.params import mapped
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
LORA = Lora(4, base_dtype="int8")
BATCH = ("packed", "rows")
NO_KEYS = (*BATCH, "adapters")
RING, EACH, ADAPTERS = {"context_strategy": "ring"}, {"pipeline_gather": "microbatch"}, {"adapters": True}
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
    (DENSE, DROPLESS, 1, {"pipeline": 4, "context": 2}, {}, 1, {}),
    (DENSE, DROPLESS, 1, {"pipeline": 2, "context": 2, "tensor": 2}, {}, 1, RING | {"pipeline_repeats": 2}),
    (DENSE, DROPLESS, 2, {"data": 2, "fsdp": 2}, {"pipeline": 2}, 2, EACH),
    (MLA, TIGHT, 1, {"pipeline": 2, "expert": 2, "context": 2}, {}, 1, {"context_strategy": "ulysses"}),
    # Of adapters on weights that are frozen in 8 bits.
    (MOE, CAPACITY, 1, {"fsdp": 4, "expert": 2}, {}, 1, ADAPTERS),
    (DENSE, DROPLESS, 1, {"pipeline": 2, "fsdp": 2, "tensor": 2}, {}, 1, ADAPTERS | {"pipeline_repeats": 2}),
    (MOE, CAPACITY, 1, {"pipeline": 2, "fsdp": 2, "expert": 2}, {}, 2, ADAPTERS | EACH),
]


def label(row):
    spec, dispatch, _, ici, dcn, steps, keys = row
    axes = [f"{n}{k}" for k, n in ici.items()] + [f"dcn{n}{k}" for k, n in dcn.items()]
    others = [f"{key.rpartition('_')[2]}-{value}" for key, value in keys.items() if key not in NO_KEYS]
    others += ["accumulated"] * (steps > 1) + ["adapters"] * ("adapters" in keys)
    return "-".join([spec.name, dispatch.kind, *axes, *others])


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


@functools.cache
def tuned(spec):
    """(adapters as after training, the weights below them frozen, both as plain weights)."""
    layout, rng = transformer.weights(spec), np.random.default_rng(2)
    named = transformer.leaves(layout)

    def random(w):
        return (0.1 * rng.normal(size=w.shape)).astype(np.float32)

    trained = jax.tree.map(random, adapters(layout, LORA))
    with jax.set_mesh(build_mesh(RunConfig(), by_slice(jax.devices()[:1]))):

        @jax.jit
        def make(weights, trained):
            frozen = mapped(lambda name, x: freeze(name, named[name], x, LORA), weights)
            return frozen, merged_params(adapted(frozen, trained, LORA), LORA)

        return trained, *jax.device_get(make(weights_of(spec), trained))


def of_adapters(gradients, trained):
    """The gradients of adapters, where their matrices were plain weights with these ``gradients``."""

    def one(name, pair):
        rank, layers = LORA.rank, len(pair.lora_a)
        a_LIr, b_LrO = pair.lora_a.reshape(layers, -1, rank), pair.lora_b.reshape(layers, rank, -1)
        grad_LIO = LORA.scale * np.asarray(gradients[name]).reshape(layers, a_LIr.shape[1], -1)
        a, b = np.einsum("lio,lro->lir", grad_LIO, b_LrO), np.einsum("lir,lio->lro", a_LIr, grad_LIO)
        return Adapter(a.reshape(pair.lora_a.shape), b.reshape(pair.lora_b.shape))

    return {name: one(name, pair) for name, pair in trained.items()}


def placed(spec, mesh, is_tuned):
    """(what is trained, what is frozen or None), sharded as a step does it on this mesh, which is in force."""

    def made():
        params, named = (
            transformer.init(spec, jax.random.key(0)),
            transformer.leaves(transformer.weights(spec)),
        )
        if not is_tuned:
            return params, None
        frozen = mapped(lambda name, x: freeze(name, named[name], x, LORA), params)
        return transformer.start(adapters(transformer.weights(spec), LORA), jax.random.key(0)), frozen

    return jax.tree.map(
        lambda x, leaf: jax.device_put(x, jax.NamedSharding(mesh, leaf.sharding.spec)),
        tuned(spec)[:2] if is_tuned else (weights_of(spec), None),
        jax.eval_shape(made),
    )


def compiled(spec, dispatch, slices, ici, dcn, steps, more):
    """(the compiled function of (trained, frozen, batch) to ((objective, terms), gradients), its arguments)."""
    degrees = {f"{net}_{axis}_parallelism": 1 for net in ("ici", "dcn") for axis in ("data", "fsdp")}
    for network, asked in (("ici", ici), ("dcn", dcn)):
        degrees |= {f"{network}_{axis}_parallelism": degree for axis, degree in asked.items()}
    keys = {key: value for key, value in more.items() if key not in NO_KEYS}
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

    def differentiate(trained, frozen, batch):
        def one(trained, part):
            whole, params = counts(batch), trained if frozen is None else adapted(frozen, trained, LORA)
            how = {"dtype": jnp.float32, "dispatch": dispatch, "kernel": kernel, "pipeline": pipeline}
            return objective(params, spec, part, whole, weights, is_frozen=frozen is not None, **how)

        return accumulated(jax.value_and_grad(one, has_aux=True), trained, batch, steps)

    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, partition("batch", "sequence"))
        rows = batch_of(spec, more.get("packed", True), more.get("rows", 16))
        batch = {k: jax.device_put(v.astype(np.int32)[:, order], sharding) for k, v in rows.items()}
        given = (*placed(spec, mesh, "adapters" in more), batch)
        program = jax.jit(differentiate).lower(*given).compile()
    return program, given


@pytest.fixture(scope="module")
def alone():
    """The results of one device, by model, by whether choices are dropped, and by what the batch is like."""
    found = {}

    def result(spec, dispatch, *, packed=True, rows=16, adapters=False):
        key = (spec.name, dispatch.kind, packed, rows)
        if key not in found:
            batch = {"packed": packed, "rows": rows}
            program, given = compiled(spec, dispatch, 1, {"fsdp": 1}, {}, 1, batch)
            found[key] = program, given, program(*given)
        program, (params, _, batch), of_weights = found[key]
        if not adapters:
            return *of_weights[:1], transformer.leaves(of_weights[1])
        merged = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), tuned(spec)[2], params)
        objective, gradients = program(merged, None, batch)
        return objective, by_name(of_adapters(transformer.leaves(gradients), tuned(spec)[0]))

    return result


def by_name(trained):
    if not isinstance(trained, dict):
        return transformer.leaves(trained)
    pairs = ((f"{name}.lora_{x}", getattr(pair, f"lora_{x}")) for name, pair in trained.items() for x in "ab")
    return dict(pairs)


@pytest.mark.parametrize("row", TABLE, ids=label)
def test_every_layout_gives_the_loss_and_every_gradient_of_one_device(alone, row, capfd):
    spec, dispatch, _, ici, _, _, more = row
    like = {key: value for key, value in more.items() if key in NO_KEYS}
    (one_total, one_terms), wanted = alone(spec, dispatch, **like)
    program, given = compiled(*row)
    (total, terms), gradients = program(*given)
    np.testing.assert_allclose(total, one_total, rtol=LOSS_RTOL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=LOSS_RTOL), terms, one_terms)
    ours = by_name(gradients)
    assert ours.keys() == wanted.keys()
    for name in wanted:
        scale = np.abs(wanted[name]).max()
        assert scale > 0 or name.endswith("balance_bias"), name
        np.testing.assert_allclose(ours[name], wanted[name], atol=GRADIENT_RTOL * scale, rtol=0, err_msg=name)
    axes = re.findall(r"all-to-all\(.*?replica_groups=mesh\[[^\]]*\] \{([^}]*)\}", program.as_text())
    ulysses = more.get("context_strategy") == "ulysses"
    exchanged = ["'expert'"] * ("expert" in ici) + ["'context'"] * ulysses
    assert sorted(set(axes)) == sorted(exchanged)
    if spec is DENSE and more.get("pipeline_gather") == "microbatch":  # no stage has all of its layers whole
        assert not re.search(r"\[2,(1,)?32,64\]", program.as_text())
    assert "rematerialization" not in capfd.readouterr().err.lower()
