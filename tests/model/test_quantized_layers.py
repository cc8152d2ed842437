"""Gradients of a whole layer in 8 bits point the way of bfloat16, routed experts and calibrated scales included."""

import argparse
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.model import params, transformer
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.expert import Dispatch
from slicewise.parallel.mesh import build_mesh
from slicewise.train import choices
from slicewise.train.objective import Weights, counts, objective
from slicewise.train.step import build_train_step

DENSE = """
name = "two-layers"
source = "this test"
layers = 2
d_model = 64
heads = 4
kv_heads = 2
head_dim = 16
d_ff = 128
vocab = 258
"""
ONE_LAYER = DENSE.replace("layers = 2", "layers = 1")
EXPERTS = """
[experts]
experts = 4
per_token = 2
d_ff = 64
"""


ROWS, TOKENS = 32, 128  # enough that gradients have a direction, which noise has not


@functools.cache
def batch():
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(text) - TOKENS - 1, ROWS)
    rows = np.stack([text[start : start + TOKENS + 1] for start in starts])
    ones = np.ones((ROWS, TOKENS), np.int32)
    index = np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1))
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "segment_ids": ones, "positions": index}


def step_of(folder, model, *overrides):
    path = folder / "model.toml"
    path.write_text(model)
    given = [f"model={path}", f"global_batch_size={ROWS}", f"sequence_length={TOKENS}", *overrides]
    config = load_config(None, given).config
    devices = 4 if any("parallelism" in o for o in overrides) else 1
    return config, build_train_step(config, build_mesh(config, by_slice(jax.devices()[:devices])))


def gradients(folder, model, *overrides):
    """(of every weight of the layer by name, in float64; ranges of its 8-bit products)"""
    config, step = step_of(folder, model, *overrides)
    dispatch = Dispatch(config.model.moe_dispatch, config.model.capacity_factor)
    with jax.set_mesh(step.mesh):
        on_mesh = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), batch(), step.abstract_batch)
        state, ranges = step.init(), None
        if step.calibrate:
            ranges = step.calibrate(state, on_mesh)
        how = {"dtype": jnp.bfloat16, "dispatch": dispatch, "ranges": ranges}
        how |= choices.kernels(config, step.spec, step.mesh)

        def loss(params):
            return objective(params, step.spec, on_mesh, counts(on_mesh), Weights(), **how)[0]

        found = params.leaves(jax.jit(jax.grad(loss))(state.params))
    return {n: np.asarray(g, np.float64) for n, g in found.items() if n.startswith("layers.")}, ranges


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """By model, in bfloat16."""
    return functools.cache(lambda model: gradients(tmp_path_factory.mktemp("right"), model)[0])


@pytest.mark.parametrize(
    ("model", "overrides", "least"),
    [
        # Of a layer by itself: through more of them what rounding does to their weights adds up, whatever the scales.
        (ONE_LAYER, ["quantization=fp8", "quantization_calibrate_every=5"], 0.995),
        (DENSE + EXPERTS, ["quantization=fp8"], 0.995),
        (
            DENSE + EXPERTS,
            ["quantization=int8", "quantization_scaling=axis", "ici_expert_parallelism=2"],
            0.995,
        ),
        (
            DENSE + EXPERTS,
            ["quantization=fp8", "ici_context_parallelism=2", "context_strategy=ulysses"],
            0.995,
        ),
    ],
    ids=[
        "calibrated",
        "experts",
        "expert parallelism",
        "context parallelism",
    ],
)
def test_gradients_of_a_layer_point_the_way_of_bfloat16(model, overrides, least, right, tmp_path):
    got, ranges = gradients(tmp_path, model, *overrides)
    wanted = right(model)
    assert got.keys() == wanted.keys()
    for layer in range(1 if model == ONE_LAYER else 2):
        whole = [np.concatenate([g[n][layer].ravel() for n in sorted(wanted)]) for g in (got, wanted)]
        assert cosine(*whole) >= least
    for name in ("w_gate", "w_up", "w_down"):
        name = f"layers.{'moe.' if 'experts' in model else ''}{name}"
        assert cosine(got[name].ravel(), wanted[name].ravel()) >= 0.99
        assert (got[name] != wanted[name]).any()  # in 8 bits, and not as before
    if ranges:
        assert ranges.keys() == {f"layers.{n}" for n in ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (DENSE, "ici_fsdp_parallelism=4"),
        (DENSE, "ici_context_parallelism=2"),
        (DENSE + EXPERTS, "ici_fsdp_parallelism=4"),
        (DENSE + EXPERTS, "ici_expert_parallelism=2"),
    ],
    ids=["dense", "context", "experts", "expert"],
)
def test_within_the_layers_no_device_waits_for_the_largest_value_of_another(model, layout, tmp_path):
    _, step = step_of(tmp_path, model, "quantization=int8", layout)
    with jax.set_mesh(step.mesh):
        text = step.update.lower(step.abstract_state, step.abstract_batch).compile().as_text()
    maxima = re.findall(r"%(\S+) \(.*\{\n(?:  .*\n)*  ROOT .* maximum\(", text)
    found = [
        line
        for name in maxima
        for line in re.findall(rf".* all-reduce\(.*to_apply=%{re.escape(name)},.*", text)
    ]
    assert found  # that of all weights, before the layers
    assert not [line for line in found if "while/body" in line and re.search(r" = \(?b?f\d+\[[1,]*\]", line)]


@pytest.mark.parametrize("scaling", ["tensor", "axis", "tile"])
def test_a_fixed_range_is_the_same_in_every_layout(scaling, tmp_path):
    how = ["quantization=int8", "quantization_fixed_range=2", f"quantization_scaling={scaling}"]
    alone, _ = gradients(tmp_path, ONE_LAYER, *how)
    divided, _ = gradients(tmp_path, ONE_LAYER, *how, "ici_fsdp_parallelism=4")
    for name, right in alone.items():
        assert cosine(divided[name].ravel(), right.ravel()) >= 0.999, name


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (ONE_LAYER.replace("kv_heads = 2", "kv_heads = 1"), ["ici_fsdp_parallelism=4"]),
        (ONE_LAYER, ["global_batch_size=1", "ici_context_parallelism=4"]),
    ],
    ids=["head", "row"],
)
@pytest.mark.parametrize("scaling", ["tensor", "axis"])
def test_one_head_of_keys_or_one_row_is_no_other_case(model, overrides, scaling, tmp_path):
    _, step = step_of(tmp_path, model, "quantization=int8", f"quantization_scaling={scaling}", *overrides)
    with jax.set_mesh(step.mesh):
        jax.eval_shape(step.update, step.abstract_state, step.abstract_batch)


WIDE = """
name = "wide-layer"
source = "this test"
layers = 1
d_model = 256
heads = 4
kv_heads = 2
head_dim = 64
d_ff = 512
vocab = 258
"""
SEEDS = 5


def wide_gradients(folder, *overrides):
    """By seed of the weights: those of every matrix of one wide layer."""
    _, step = step_of(folder, WIDE, *overrides)
    config = load_config(None, [f"model={folder / 'model.toml'}", *overrides]).config
    with jax.set_mesh(step.mesh):
        how = {"dtype": jnp.bfloat16} | choices.kernels(config, step.spec, step.mesh)
        few = {name: rows[:8] for name, rows in batch().items()}

        @jax.jit
        def of_seed(seed):
            weights = transformer.start(step.layout, jax.random.key(seed))
            return jax.grad(lambda p: objective(p, step.spec, few, counts(few), Weights(), **how)[0])(weights)

        found = [params.leaves(of_seed(seed)) for seed in range(SEEDS)]
    return [
        {n: np.asarray(g, np.float64).ravel() for n, g in one.items() if "layers.w" in n} for one in found
    ]


def test_over_seeds_a_layer_with_heads_of_usual_width_points_the_way_of_bfloat16(tmp_path):
    """What one seed says of a narrow layer is chance: over eight of them a matrix of it lay between 0.984 and 0.998."""
    got, wanted = wide_gradients(tmp_path, "quantization=fp8"), wide_gradients(tmp_path)
    pairs = list(zip(got, wanted, strict=True))
    assert np.median([cosine(*(np.concatenate(list(g.values())) for g in pair)) for pair in pairs]) >= 0.995
    for matrix in wanted[0]:
        # Queries and keys reach the loss by a softmax alone, which tells them least.
        least = 0.992 if matrix in ("layers.wq", "layers.wk") else 0.995
        assert np.median([cosine(a[matrix], b[matrix]) for a, b in pairs]) >= least, matrix


def test_a_calibration_finds_the_largest_weights(tmp_path):
    _, step = step_of(tmp_path, DENSE, "quantization=int8", "quantization_calibrate_every=5")
    with jax.set_mesh(step.mesh):
        state = step.init()
        assert not any(np.asarray(r).any() for r in state.ranges.values())
        ranges = step.calibrate(state, batch())
    for layer in range(2):
        largest = float(jnp.abs(state.params.layers.wq[layer].astype(jnp.bfloat16)).max())
        assert float(ranges["layers.wq"][layer, 1]) == pytest.approx(largest)


@pytest.mark.parametrize("other", ["quantization_fixed_range=8", "quantization_scaling=axis"])
def test_a_calibrated_scale_is_one_for_a_tensor(other, tmp_path):
    with pytest.raises(UserError, match="quantization_calibrate_every does not go with"):
        step_of(tmp_path, DENSE, "quantization=fp8", "quantization_calibrate_every=5", other)
