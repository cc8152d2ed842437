"""Every layout computes what one device does: dense models, mixtures of experts, latent attention, adapters.

The table is made in tests/helpers/layout_table.py: each axis alone and each pairing with each model.
"""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layout_table import MODELS, ROWS, TOKENS, Row, covering_table, every_row, full_table, pairings
from slicewise.catalog import model as models
from slicewise.catalog import slices
from slicewise.config import RunConfig, load_config
from slicewise.costs.adapters import Lora
from slicewise.costs.layout import AXES
from slicewise.costs.shapes import model_shape
from slicewise.errors import UserError
from slicewise.kernels.attention.api import Kernel
from slicewise.model import transformer
from slicewise.model.lora import Adapter, adapted, adapters, freeze, merged_params
from slicewise.model.params import mapped
from slicewise.parallel import context, rules
from slicewise.parallel.cluster import SliceDevices, by_slice
from slicewise.parallel.expert import Dispatch
from slicewise.parallel.mesh import build_mesh
from slicewise.parallel.rules import partition
from slicewise.plan.search import Workload, search
from slicewise.train import choices, step
from slicewise.train.accumulate import accumulated
from slicewise.train.objective import Weights, counts, objective

pytestmark = pytest.mark.slow

# Of float32 sums in another order: relative to the loss, and to the largest entry of each gradient.
LOSS_RTOL, GRADIENT_RTOL = 1e-6, 1e-5
BATCHES = ("packed", "whole")
LORA = Lora(4, base_dtype="int8")
DENSE, MOE, *_ = MODELS
ADAPTED = (  # of adapters on weights that are frozen in 8 bits
    Row(MOE, ("fsdp", "expert"), dispatch="capacity"),
    Row(DENSE, ("fsdp", "tensor", "pipeline"), schedule="circular", gather="step"),
    Row(MOE, ("fsdp", "expert", "pipeline"), "", "gpipe", "microbatch", "capacity", steps=2),
)


def pytest_generate_tests(metafunc):
    if "row" in metafunc.fixturenames:
        rows = full_table() if metafunc.config.getoption("every_layout") else covering_table()
        metafunc.parametrize("row", rows, ids=lambda row: row.name)


def batch_of(spec, like):
    """Packed rows with joints and padding, or each of one whole document."""
    rng = np.random.default_rng(0)
    B, T = ROWS, TOKENS
    segments = np.sort(rng.integers(1, 4, (B, T)), axis=1)
    segments[3:, 13:] = 0
    starts = np.concatenate([np.ones((B, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    positions = np.arange(T) - np.maximum.accumulate(np.where(starts, np.arange(T), 0), axis=1)
    tokens, targets = rng.integers(0, spec.vocab, (2, B, T))
    ends = np.concatenate([starts[:, 1:], np.ones((B, 1), bool)], axis=1)
    targets[ends | (segments == 0)] = -1
    if like == "whole":
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


def by_name(trained):
    if not isinstance(trained, dict):
        return transformer.leaves(trained)
    pairs = ((f"{name}.lora_{x}", getattr(pair, f"lora_{x}")) for name, pair in trained.items() for x in "ab")
    return dict(pairs)


def placed(spec, mesh, is_tuned):
    """(what is trained, what is frozen or None), sharded as a step does it on this mesh, which is in force."""

    def made():
        layout = transformer.weights(spec)
        params, named = transformer.init(spec, jax.random.key(0)), transformer.leaves(layout)
        if not is_tuned:
            return params, None
        frozen = mapped(lambda name, x: freeze(name, named[name], x, LORA), params)
        return transformer.start(adapters(layout, LORA), jax.random.key(0)), frozen

    return jax.tree.map(
        lambda x, leaf: jax.device_put(x, jax.NamedSharding(mesh, leaf.sharding.spec)),
        tuned(spec)[:2] if is_tuned else (weights_of(spec), None),
        jax.eval_shape(made),
    )


def config_and_mesh(row):
    config = load_config(None, [f"{key}={value}" for key, value in row.keys.items()]).config
    ici, dcn = row.degrees
    num_slices = int(np.prod([*dcn.values()], dtype=int))
    array = np.empty(num_slices * int(np.prod([*ici.values()])), dtype=object)
    array[:] = jax.devices()[: array.size]
    return config, build_mesh(config, SliceDevices(array.reshape(num_slices, -1)))


def compiled(row, is_tuned=False):
    """(the compiled function of (trained, frozen, batch) to ((objective, terms), gradients), what is trained, what is
    frozen, batches by what they are like)."""
    spec, (config, mesh) = row.spec, config_and_mesh(row)
    keys = config.parallelism
    rules.check(spec, ROWS, dict(mesh.shape))
    context.check(spec, TOKENS, keys.context_strategy, config.model.moe_dispatch, dict(mesh.shape))
    pipeline = choices.pipeline(config, spec, mesh)
    dispatch = Dispatch(config.model.moe_dispatch, config.model.capacity_factor)
    weights = Weights(z_loss=1e-3, prediction=0.3, balance=0.01)
    kernel = Kernel("reference", strategy=keys.context_strategy)
    order = context.order(TOKENS, mesh.shape["context"], keys.context_strategy)
    order = slice(None) if order is None else order

    def differentiate(trained, frozen, batch):
        def one(trained, part):
            params = adapted(frozen, trained, LORA) if is_tuned else trained
            how = {"dtype": jnp.float32, "dispatch": dispatch, "kernel": kernel, "pipeline": pipeline}
            return objective(params, spec, part, counts(batch), weights, is_frozen=is_tuned, **how)

        return accumulated(jax.value_and_grad(one, has_aux=True), trained, batch, row.steps)

    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, partition("batch", "sequence"))
        (trained, frozen), batches = placed(spec, mesh, is_tuned), {}
        for like in BATCHES:
            rows = {k: v.astype(np.int32)[:, order] for k, v in batch_of(spec, like).items()}
            batches[like] = jax.device_put(rows, sharding)
        program = jax.jit(differentiate).lower(trained, frozen, batches["packed"]).compile()
    return program, trained, frozen, batches


@functools.cache
def alone(spec, drops):
    """A step of one device; a capacity drops choices."""
    return compiled(Row(spec, (), dispatch="capacity" if drops else "dropless" if spec.experts else ""))


@functools.cache
def of_one_device(spec, drops, is_tuned):
    """Its results by what the batch is like; those of adapters from their gradients as plain weights."""
    program, params, _, batches = alone(spec, drops)
    if not is_tuned:
        return {like: program(params, None, batch) for like, batch in batches.items()}
    trained, _, merged = tuned(spec)
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), merged, params)
    found = {}
    for like, batch in batches.items():
        objective, gradients = program(params, None, batch)
        found[like] = objective, of_adapters(transformer.leaves(gradients), trained)
    return found


def check_as_one_device(row, is_tuned=False):
    """The text of the program, whose results are those of one device."""
    program, trained, frozen, batches = compiled(row, is_tuned)
    expected = of_one_device(row.spec, row.dispatch == "capacity", is_tuned)
    for like, ((one_total, one_terms), one_gradients) in expected.items():
        (total, terms), gradients = program(trained, frozen, batches[like])
        np.testing.assert_allclose(total, one_total, rtol=LOSS_RTOL)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=LOSS_RTOL), terms, one_terms)
        ours, wanted = by_name(gradients), by_name(one_gradients)
        assert ours.keys() == wanted.keys()
        for name in wanted:
            scale = np.abs(wanted[name]).max()
            assert scale > 0 or name.endswith("balance_bias"), name
            np.testing.assert_allclose(
                ours[name], wanted[name], atol=GRADIENT_RTOL * scale, rtol=0, err_msg=name
            )
    return program.as_text()


def test_every_layout_gives_the_loss_and_every_gradient_of_one_device(row, capfd):
    program = check_as_one_device(row)
    axes = re.findall(r"all-to-all\(.*?replica_groups=mesh\[[^\]]*\] \{([^}]*)\}", program)
    exchanged = ["'expert'"] * ("expert" in row.axes) + ["'context'"] * (row.strategy == "ulysses")
    assert sorted(set(axes)) == sorted(exchanged)
    assert "rematerialization" not in capfd.readouterr().err.lower()


@pytest.mark.parametrize("adapted_row", ADAPTED, ids=lambda row: row.name)
def test_adapters_over_any_layout_have_the_gradients_of_one_device(adapted_row, capfd):
    check_as_one_device(adapted_row, is_tuned=True)
    assert "rematerialization" not in capfd.readouterr().err.lower()


def test_a_stage_that_gathers_by_microbatch_never_has_all_of_its_layers_whole():
    row = Row(DENSE, ("fsdp", "pipeline"), schedule="gpipe", gather="microbatch", across="pipeline")
    whole = re.compile(r"\[2,(1,)?32,64\]")
    assert not whole.search(compiled(row)[0].as_text())
    assert whole.search(compiled(replace(row, gather="step"))[0].as_text())


def test_the_table_has_each_axis_alone_and_each_pairing_with_each_model():
    for family in {row.family for row in every_row(1)}:
        rows = [row for row in covering_table() if row.family == family]
        legal = {row.axes for row in every_row(2) if row.family == family and not row.refusal}
        assert {axes for axes in legal if len(axes) == 1} <= {row.axes for row in rows}
        assert {tuple(sorted(axes)) for axes in legal} == pairings(row.axes for row in rows)


@pytest.mark.parametrize(
    ("name", "place", "slices_", "sequences", "tokens"),
    [
        ("llama3-70b", "v5p-128", 2, 512, 8192),
        ("llama3-8b", "v5e-256", 1, 16, 131072),
        ("mixtral-8x7b", "v5e-256", 2, 512, 4096),
        ("deepseek-v3", "v5p-512", 4, 2048, 4096),
    ],
)
def test_every_pairing_that_the_planner_recommends_is_in_the_table(name, place, slices_, sequences, tokens):
    shape = model_shape(models.load(name))
    found = search(Workload(shape, tokens, sequences), slices.cluster(place, slices_), top=1000)
    layouts = [candidate.layout for candidate in found.ranked]
    layouts += [family.best.layout for family in found.families]
    recommended = pairings(tuple(a for a in AXES if layout.total(a) > 1) for layout in layouts)
    tested = [row for row in covering_table() if bool(row.spec.experts) >= bool(shape.routed_parameters)]
    assert recommended <= pairings(row.axes for row in tested)


def test_training_refuses_what_the_planner_refuses_in_the_same_words(monkeypatch):
    refused = {(row.spec.name, row.axes, row.refusal): row for row in every_row(2) if row.refusal}
    assert refused
    for row in refused.values():
        monkeypatch.setattr(step, "load_spec", lambda _, spec=row.spec: spec)
        with pytest.raises(UserError) as error:
            step.build_train_step(*config_and_mesh(row))
        assert str(error.value) == row.refusal, row.name
