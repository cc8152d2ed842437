"""One bit is flipped in the memory of one emulated device, and found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from slicewise.errors import ExitCode, UserError
from slicewise.train.corruption import Checksums, odd_ones_out


def flipped(x, device, bit=0):
    """``x`` with one bit of its first element changed in the copy on device number ``device`` of its sharding."""
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@pytest.fixture(scope="module")
def state():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    with jax.set_mesh(mesh):
        yield (
            {
                "w": put(jnp.arange(16, dtype=jnp.float32).reshape(4, 4), "fsdp"),
                "m": put(jnp.ones((4,), jnp.bfloat16)),
                "own": put(jnp.arange(8, dtype=jnp.int8), ("data", "fsdp")),  # in one copy
            },
            mesh,
        )


def test_a_bit_that_one_replica_holds_differently_is_found_with_its_device(state):
    state, mesh = state
    checksums = Checksums(state, mesh)
    assert checksums.differences(checksums(state)) == []
    for name, device in (("w", 5), ("m", 0)):
        wrong = state | {name: flipped(state[name], device, bit=3)}
        (found,) = checksums.differences(checksums(wrong))
        assert (found.path, [d.id for d in found.devices], found.certain) == (name, [device], True)
    assert "own" not in checksums.groups


def test_with_two_copies_both_are_named_for_there_is_no_majority():
    row = np.array([7, 8, 1, 1, 1, 2], np.uint32)
    assert odd_ones_out(row, [[0, 1]]) == ([0, 1], False)
    assert odd_ones_out(row, [[2, 3, 4, 5]]) == ([5], True)
    assert odd_ones_out(row, [[0, 1], [2, 3, 4, 5]]) == ([0, 1, 5], False)
    assert odd_ones_out(row, [[2, 3], [4]]) == ([], True)


class Corrupted:
    """The real step, of which one call returns a state with one bit flipped on one device."""

    def __init__(self, monkeypatch, call, device):
        self.call, self.device, self.calls = call, device, 0
        from slicewise.train import programs

        compile_update = programs.compile_update
        monkeypatch.setattr(programs, "compile_update", lambda *given: self._around(compile_update(*given)))

    def _around(self, update):
        def corrupted(state, batch):
            self.calls += 1
            state, metrics = update(state, batch)
            if self.calls == self.call:
                params = jax.tree.map(lambda x: x, state.params)
                leaves, tree = jax.tree.flatten(params)
                params = jax.tree.unflatten(tree, [flipped(leaves[0], self.device), *leaves[1:]])
                state = type(state)(state.step, params, state.opt_state)
            return state, metrics

        return corrupted


LAYOUT = ("ici_data_parallelism=4", "ici_fsdp_parallelism=1")


def test_a_run_stops_with_its_own_code_and_saves_nothing_that_is_corrupt(trainer, monkeypatch):
    trainer.use_devices(4)
    Corrupted(monkeypatch, call=5, device=2)
    with pytest.raises(
        UserError, match=r"after step 6: params\S* differs .* on device 2 \(slice 0, process 0\)"
    ) as e:
        trainer.train(*LAYOUT, "replica_check_every=100")  # before each checkpoint all the same
    assert e.value.code == ExitCode.CORRUPTION
    assert trainer.checkpoints() == [3]


def test_a_step_that_gives_other_bits_when_taken_again_stops_the_run(trainer, monkeypatch):
    trainer.use_devices(4)
    corrupted = Corrupted(monkeypatch, call=4, device=3)  # the second time that step 3 is taken
    with pytest.raises(UserError, match=r"step 3 was taken twice .* the state on device 3 ") as e:
        trainer.train(*LAYOUT, "replay_check_every=3", "checkpoint_every=0")
    assert e.value.code == ExitCode.CORRUPTION
    assert corrupted.calls == 4


def test_a_run_that_is_checked_is_the_same_run(trainer):
    trainer.use_devices(4)
    keys = (*LAYOUT, "steps=4", "checkpoint_every=0", "optimizer_state_memory=host")
    plain = [record["loss"] for record in trainer.train(*keys)]
    (trainer.folder / "run").rename(trainer.folder / "plain")
    checked = trainer.train(*keys, "replica_check_every=1", "replay_check_every=2")
    assert [record["loss"] for record in checked] == plain


def test_a_check_that_has_nothing_to_compare_is_refused(trainer):
    with pytest.raises(
        UserError, match="replica_check_every = 2 compares replicas, and this layout has none"
    ):
        trainer.train("replica_check_every=2")
