import jax
import numpy as np
import pytest

from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.parallel.cluster import SliceDevices
from slicewise.parallel.mesh import build_mesh
from slicewise.train.step import BATCH_KEYS, build_train_step

pytestmark = pytest.mark.slow

TINY = ["model=demo-tiny", "compute_dtype=float32", "global_batch_size=8", "sequence_length=32", "steps=8"]
LAYOUTS = {
    "data": (1, ["ici_data_parallelism=8", "ici_fsdp_parallelism=1"]),
    "fsdp x tensor": (1, ["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"]),
    "dcn data x ici fsdp": (2, ["dcn_data_parallelism=2", "ici_fsdp_parallelism=4"]),
    "dcn fsdp x ici tensor": (
        4,
        ["dcn_data_parallelism=1", "dcn_fsdp_parallelism=4", "ici_tensor_parallelism=2"],
    ),
    "data x tensor, accumulated, the optimiser's state shared out": (
        1,
        [
            "ici_data_parallelism=4",
            "ici_tensor_parallelism=2",
            "gradient_accumulation_steps=2",
            "shard_optimizer_over_data=true",
        ],
    ),
    "fsdp x tensor, activations and the optimiser's state on the host": (
        1,
        [
            "ici_fsdp_parallelism=4",
            "ici_tensor_parallelism=2",
            "optimizer_state_memory=host",
            "remat_policy=custom",
            'remat_tensors={decoder_layer_input="offload", qkv_proj="offload", context="device"}',
        ],
    ),
}


def devices(count, slices=1):
    array = np.empty(count, dtype=object)
    array[:] = jax.devices()[:count]
    return SliceDevices(array.reshape(slices, -1))


def batches(config, spec, count):
    """Packed rows with joints and padding, from a fixed seed."""
    rng = np.random.default_rng(0)
    B, T = config.data.global_batch_size, config.data.sequence_length
    for _ in range(count):
        tokens = rng.integers(0, spec.vocab, (B, T + 1)).astype(np.int32)
        segments = np.sort(rng.integers(1, 4, (B, T)), axis=1).astype(np.int32)
        starts = np.concatenate([np.ones((B, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
        index = np.arange(T)
        positions = (index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)).astype(np.int32)
        targets = tokens[:, 1:].copy()
        targets[:, :-1][segments[:, 1:] != segments[:, :-1]] = -1
        yield dict(zip(BATCH_KEYS, (tokens[:, :-1], targets, segments, positions), strict=True))


def losses(overrides, mesh_devices, count=8):
    config = load_config(None, [*TINY, *overrides]).config
    step = build_train_step(config, build_mesh(config, mesh_devices))
    found = []
    with jax.set_mesh(step.mesh):
        state = step.init()
        for batch in batches(config, step.spec, count):
            batch = {k: jax.device_put(v, step.abstract_batch[k].sharding) for k, v in batch.items()}
            state, metrics = step.update(state, batch)
            found.append((float(metrics["loss"]), float(metrics["gradient_norm"])))
    return np.array(found)


@pytest.fixture(scope="module")
def alone():
    return losses([], devices(1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_losses_of_one_device(alone, layout):
    slices, overrides = LAYOUTS[layout]
    np.testing.assert_allclose(losses(overrides, devices(8, slices)), alone, rtol=1e-5)


def test_training_learns_the_batch_it_sees():
    config = load_config(None, [*TINY, "learning_rate=1e-2", "warmup_steps=2", "steps=30"]).config
    step = build_train_step(config, build_mesh(config, devices(1)))
    batch = next(batches(config, step.spec, 1))
    with jax.set_mesh(step.mesh):
        state = step.init()
        seen = []
        for _ in range(30):
            state, metrics = step.update(state, batch)
            seen.append(float(metrics["loss"]))
    assert seen[0] == pytest.approx(np.log(step.spec.vocab), rel=0.05)
    assert seen[-1] < 0.6 * seen[0]
    assert int(state.step) == 30


def test_first_weights_do_not_depend_on_the_layout():
    one, many = (
        build_train_step(c, build_mesh(c, devices(n)))
        for c, n in (
            (load_config(None, [*TINY, *o]).config, n) for o, n in (([], 1), (LAYOUTS["fsdp x tensor"][1], 8))
        )
    )
    with jax.set_mesh(one.mesh):
        a = one.init()
    with jax.set_mesh(many.mesh):
        b = many.init()
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a.params, b.params)


def test_state_is_sharded_as_announced():
    config = load_config(None, [*TINY, *LAYOUTS["fsdp x tensor"][1]]).config
    step = build_train_step(config, build_mesh(config, devices(8)))
    with jax.set_mesh(step.mesh):
        state = step.init()
    jax.tree.map(lambda x, a: x.sharding == a.sharding or pytest.fail(str(a)), state, step.abstract_state)
    wq = state.params.layers.wq
    assert wq.addressable_shards[0].data.size * 8 == wq.size


def test_the_optimisers_state_is_kept_as_asked():
    kept = ["optimizer_state_dtype=int8", "optimizer_state_memory=host", "shard_optimizer_over_data=true"]
    layout = ["ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"]
    config = load_config(None, [*TINY, *layout, *kept]).config
    state = build_train_step(config, build_mesh(config, devices(8))).abstract_state
    params, moments = state.params.layers.w_up, state.opt_state.inner[1][0].nu.layers.w_up
    assert moments.codes.dtype == "int8"
    assert moments.codes.sharding.memory_kind == moments.largest.sharding.memory_kind == "pinned_host"
    whole = params.size
    assert np.prod(params.sharding.shard_shape(params.shape)) * 4 == whole
    assert np.prod(moments.codes.sharding.shard_shape(params.shape)) * 8 == whole


@pytest.mark.parametrize(
    "overrides",
    [
        ["global_batch_size=6"],
        ["gradient_accumulation_steps=3"],
        ["ici_tensor_parallelism=8", "ici_fsdp_parallelism=1"],
        ["ici_context_parallelism=4", "sequence_length=36"],
    ],
)
def test_what_does_not_divide_is_refused_before_compiling(overrides):
    config = load_config(None, [*TINY, *overrides]).config
    with pytest.raises(UserError, match="does not divide|is not a multiple|does not fall into"):
        build_train_step(config, build_mesh(config, devices(8)))


def test_sequences_longer_than_the_learned_positions_are_refused():
    config = load_config(
        None, [*TINY, "model=gpt3-175b", "sequence_length=4096", "global_batch_size=1"]
    ).config
    with pytest.raises(
        UserError, match="sequence_length = 4096 exceeds the 2048 learned positions of gpt3-175b"
    ):
        build_train_step(config, build_mesh(config, devices(1)))
