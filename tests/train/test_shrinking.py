"""Runs in this process that are interrupted, and go on with fewer slices of one device or with more again."""

import jax
import numpy as np
import pytest

from slicewise.checkpoint.manifest import read_manifest
from slicewise.errors import UserError
from slicewise.parallel import cluster
from slicewise.parallel.cluster import SliceDevices
from slicewise.train.elastic import ALL_SLICES
from slicewise.train.metrics import MetricWriter


class Interrupted(Exception):
    pass


@pytest.fixture
def shrinking(trainer, monkeypatch):
    """Trains on so many of two slices, as if it crashed when the record of step ``until`` was written; all losses."""
    write = MetricWriter.write

    def train(slices, *keys, until=None):
        def record(writer, number, values):
            write(writer, number, values)
            if number == until:
                raise Interrupted

        devices = np.empty((slices, 1), object)
        devices[:, 0] = jax.devices()[:slices]
        monkeypatch.setattr(cluster, "found", lambda: SliceDevices(devices))
        monkeypatch.setattr(MetricWriter, "write", record)
        monkeypatch.setenv(ALL_SLICES, "2")
        if until is None:
            return [record["loss"] for record in trainer.train(*keys)]
        with pytest.raises(Interrupted):
            trainer.train(*keys)

    return train


@pytest.fixture
def plain(shrinking, trainer):
    """The losses of a run that nothing happened to."""
    losses = shrinking(2)
    (trainer.folder / "run").rename(trainer.folder / "plain")
    return losses


def test_the_same_batch_in_more_parts_gives_the_same_losses(shrinking, plain):
    shrinking(2, "replica_check_every=1", until=4)
    shrinking(1, "replica_check_every=1", until=7)  # of a single replica
    np.testing.assert_allclose(shrinking(2, "replica_check_every=1"), plain, rtol=1e-5)


def test_smaller_batches_take_the_rows_in_turn_and_the_next_batch_goes_on_behind_them(shrinking, trainer):
    keys = ("elastic=batch", "dataset=synthetic", "steps=5", "checkpoint_every=1")
    shrinking(2, *keys, until=2)
    shrinking(1, *keys, until=5)
    directory = str(trainer.folder / "run" / "checkpoints")
    shrunk = read_manifest(directory, 4)
    assert (shrunk.metadata["row"], shrunk.data_state[:, 0].tolist()) == (2, [3, 3, 2, 2])
    assert shrunk.metadata["config"]["data"]["global_batch_size"] == 4
    shrinking(2, *keys)
    grown = read_manifest(directory, 5)
    assert (grown.metadata["row"], grown.data_state[:, 0].tolist()) == (2, [4, 4, 3, 3])


def test_local_checkpoints_come_before_older_shared_ones_and_go_when_the_run_is_done(
    shrinking, plain, trainer, capfd
):
    local = (f"local_checkpoint_directory={trainer.folder}/disk", "local_checkpoint_every=2")
    local += ("optimizer_state_memory=host",)
    shrinking(2, *local, until=5)
    assert trainer.checkpoints() == [3]
    assert sorted(p.parent.name for p in trainer.folder.glob("disk/run-*/process-0/*/index.json")) == [
        "2",
        "4",
    ]
    np.testing.assert_allclose(shrinking(1, *local), plain, rtol=1e-5)
    assert "resumes after step 4" in capfd.readouterr().out
    assert not list(trainer.folder.glob("disk/run-*/process-0"))


def test_local_checkpoints_of_a_run_that_was_deleted_are_not_those_of_its_successor(
    shrinking, trainer, capfd
):
    local = (f"local_checkpoint_directory={trainer.folder}/disk", "local_checkpoint_every=2")
    shrinking(2, *local, until=3)
    (trainer.folder / "run").rename(trainer.folder / "deleted")
    shrinking(2, *local, until=1)
    assert "resumes" not in capfd.readouterr().out


@pytest.mark.parametrize("key", ["local_checkpoint_every=2", "local_checkpoint_directory=/dev/shm"])
def test_one_key_of_local_checkpoints_without_the_other_is_refused(trainer, key):
    with pytest.raises(UserError, match="need both, or neither"):
        trainer.train(key)
