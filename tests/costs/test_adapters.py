"""The planner counts the adapters that the model makes, and what is not computed for frozen weights."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from slicewise.catalog import slices
from slicewise.catalog.model import load, names
from slicewise.config import load_config
from slicewise.costs.adapters import Lora, with_adapters
from slicewise.costs.compute import Shard
from slicewise.costs.flops import model_flops, step_flops
from slicewise.costs.layout import Degrees, Layout, Recipe
from slicewise.costs.memory import memory_bytes, peak_bytes, trained_parameters, weight_bytes
from slicewise.costs.shapes import model_shape
from slicewise.costs.step import stage_moves
from slicewise.model import lora as model
from slicewise.model import params
from slicewise.parallel.cluster import SliceDevices
from slicewise.parallel.mesh import build_mesh
from slicewise.parallel.rules import RULES
from slicewise.plan.run_config import priced
from slicewise.train.step import build_train_step

LLAMA = load("llama3-8b")
LORA = Lora(16)


def adapter_weights(spec, lora):
    return jax.tree.leaves(model.adapters(params.weights(spec), lora))


@pytest.mark.parametrize("name", [n for n in names() if load(n).position == "rope"])
@pytest.mark.parametrize("pattern", ["", "wq|latent\\.w.*_b|.*shared.w_up|w_down|wo"])
def test_the_adapters_that_are_priced_are_those_of_the_model(name, pattern):
    spec, lora = load(name), Lora(8, layers=pattern)
    made = sum(math.prod(w.shape) for w in adapter_weights(spec, lora))
    shape = with_adapters(model_shape(spec), lora)
    assert sum(layer.count * layer.adapter_parameters(1, 1) for layer in shape.layers) == made
    assert made > 0


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v2-lite"])
def test_a_device_holds_the_adapters_that_their_dims_give_it(name):
    spec, degrees = load(name), {"data": 2, "fsdp": 4, "expert": 2, "tensor": 2}
    made = 0.0
    for weight in adapter_weights(spec, LORA):
        axes = [RULES.get(dim, ()) for dim in weight.dims]
        axes = [axis for entry in axes for axis in ((entry,) if isinstance(entry, str) else entry)]
        made += math.prod(weight.shape) / math.prod(degrees.get(axis, 1) for axis in axes)
    layout = Layout(Degrees(**degrees), global_batch=16)
    assert trained_parameters(with_adapters(model_shape(spec), LORA), layout) == pytest.approx(made)


def test_without_adapters_nothing_changes():
    assert with_adapters(model_shape(LLAMA), None) is model_shape(LLAMA)


def test_a_frozen_matrix_has_two_products_instead_of_three():
    shape = model_shape(LLAMA)
    frozen = with_adapters(shape, Lora(1, layers="wq"))
    full, less = (step_flops(s, 4096, 4096, Recipe()) for s in (shape, frozen))
    for part in ("mlp", "output"):
        assert less[part].useful == pytest.approx(full[part].useful * 2 / 3)
        assert less[part].extra == full[part].extra
    assert less["attention"] == full["attention"]
    adapters = 3 * 2 * (4096 + 4096) * 32 * 4096  # forward and two backward products of rank 1 on queries
    assert less["attention projections"].useful == pytest.approx(
        full["attention projections"].useful * 2 / 3 + adapters
    )
    assert model_flops(with_adapters(shape, LORA), 4096, 4096) < 0.7 * model_flops(shape, 4096, 4096)


def test_frozen_weights_have_no_gradients_and_no_optimiser_state():
    shape, layout, recipe = model_shape(LLAMA), Layout(Degrees(fsdp=8), global_batch=8), Recipe()
    frozen = with_adapters(shape, LORA)
    full, less = (memory_bytes(s, layout, recipe, 4096) for s in (shape, frozen))
    assert weight_bytes(shape, layout, recipe) == 4 * shape.parameters / 8
    trained = trained_parameters(frozen, layout)
    assert less["weights"] == pytest.approx(2 * shape.parameters / 8 + 4 * trained)
    assert less["optimizer"] == pytest.approx(8 * trained)
    assert less["optimizer"] < 0.03 * full["optimizer"]
    assert less["activations"] == full["activations"]
    eighth = memory_bytes(with_adapters(shape, replace(LORA, base_dtype="int8")), layout, recipe, 4096)
    assert eighth["weights"] == pytest.approx(shape.parameters / 8 + 4 * trained)


@pytest.mark.parametrize(("base_dtype", "each"), [("bfloat16", 2), ("int8", 1)])
def test_a_stage_keeps_frozen_weights_as_they_are_and_gradients_of_adapters_alone(base_dtype, each):
    shape = with_adapters(model_shape(LLAMA), replace(LORA, base_dtype=base_dtype))
    stage = sum(layer.count * layer.parameters for layer in shape.layers) / 2
    adapters = sum(layer.count * layer.adapter_parameters(1, 1) for layer in shape.layers) / 2
    for fsdp, gathered in ((4, each * stage), (1, 0)):
        once = Layout(Degrees(fsdp=fsdp, pipeline=2), global_batch=32, pipeline_microbatches=8)
        kept, used = (
            peak_bytes(shape, replace(once, pipeline_gathers_once=is_once), Recipe(), 4096)
            for is_once in (True, False)
        )
        assert kept.weights - used.weights == pytest.approx(gathered + 2 * adapters)
        assert kept.gradients - used.gradients == pytest.approx(6 * adapters)


def test_a_circular_schedule_deals_frozen_weights_out_and_takes_gradients_of_adapters_back():
    layout = Layout(Degrees(pipeline=4), global_batch=64, pipeline_microbatches=8, pipeline_repeats=2)
    shape, work, recipe = model_shape(LLAMA), Shard(4096, 4096, 1, 1, 1), Recipe(as_compiled_here=True)
    frozen = with_adapters(shape, LORA)
    full, less = (stage_moves(s, work, layout)[1][0] for s in (shape, frozen))
    assert full.forward == full.backward == less.forward == 1
    assert less.whole_bytes == pytest.approx(full.whole_bytes, rel=0.01)
    assert less.backward * less.whole_bytes == pytest.approx(2 * trained_parameters(frozen, layout) * 3 / 4)
    dealt = memory_bytes(frozen, layout, recipe, 4096)["copies of weights"]
    assert dealt == pytest.approx(2 * sum(layer.count * layer.parameters for layer in shape.layers) / 4)
    assert not memory_bytes(frozen, replace(layout, pipeline_repeats=1), recipe, 4096)["copies of weights"]


@pytest.mark.parametrize(("rank", "stages"), [(0, 1), (16, 1), (16, 2)])
def test_the_state_of_a_step_has_the_bytes_that_are_planned(rank, stages):
    degrees = {"fsdp": 4 // stages, "tensor": 2, "pipeline": stages}
    keys = [f"ici_{axis}_parallelism={degree}" for axis, degree in degrees.items()]
    keys = ["model=qwen3-0.6b", f"lora_rank={rank}", *keys]
    config = load_config(None, keys).config
    array = np.empty((1, 8), dtype=object)
    array[0] = jax.devices()
    state = build_train_step(config, build_mesh(config, SliceDevices(array))).abstract_state

    def bytes_of(tree):
        shards = ((x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree))
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards)

    shape = with_adapters(model_shape(load("qwen3-0.6b")), config.adapters)
    layout = Layout(Degrees(**degrees), global_batch=16, pipeline_gathers_once=False)
    planned = memory_bytes(shape, layout, Recipe(), 256)
    assert bytes_of((state.params, state.frozen)) == pytest.approx(planned["weights"], rel=0.01)
    assert bytes_of(state.opt_state) == pytest.approx(planned["optimizer"], rel=0.01)


def test_a_config_with_adapters_is_priced_with_them():
    """Llama 3 8B trains on eight v5e chips only so, and moves no gradient of its weights."""
    keys = ["model=llama3-8b", "sequence_length=2048", "global_batch_size=8", "remat_policy=full"]
    cluster, shape = slices.cluster("v5e:2x4", 1), model_shape(LLAMA)
    full = priced(load_config(None, keys).config, shape, cluster).estimate
    tuned = priced(load_config(None, [*keys, "lora_rank=16"]).config, shape, cluster).estimate
    assert full.hbm_total_bytes > full.hbm_limit_bytes > tuned.hbm_total_bytes
    assert tuned.communication_s["fsdp"] < 0.75 * full.communication_s["fsdp"]
    assert tuned.step_time_s < 0.85 * full.step_time_s
