"""Runs in this process that are interrupted, and go on with fewer slices of one device or with more again."""

import jax
import numpy as np
import pytest

from slicewise.checkpoint.manifest import read_manifest
from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.parallel import cluster
from slicewise.parallel.cluster import SliceDevices
from slicewise.train import tiers
from slicewise.train.elastic import ALL_SLICES
from slicewise.train.metrics import MetricWriter

pytestmark = pytest.mark.slow


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


def test_fewer_slices_take_the_same_batch_in_more_parts_from_where_the_local_checkpoint_is(
    shrinking, trainer, capfd
):
    host = "optimizer_state_memory=host"
    plain = shrinking(2, host)
    (trainer.folder / "run").rename(trainer.folder / "plain")
    keys = (f"local_checkpoint_directory={trainer.folder}/disk", "local_checkpoint_every=2")
    keys += (host, "replica_check_every=1")
    shrinking(2, *keys, until=5)
    assert trainer.checkpoints() == [3]
    assert sorted(p.parent.name for p in trainer.folder.glob("disk/run-*/process-0/*/index.json")) == [
        "2",
        "4",
    ]
    shrinking(1, *keys, until=7)  # of a single replica
    np.testing.assert_allclose(shrinking(2, *keys), plain, rtol=1e-5)
    said = capfd.readouterr().out
    assert [step for step in (3, 4, 5, 6) if f"resumes after step {step}" in said] == [4, 6]
    assert not list(trainer.folder.glob("disk/run-*/process-0")), "they are of no use when the run is done"


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


def test_a_run_that_was_deleted_and_begun_anew_is_another_run(trainer):
    config = lambda *keys: load_config(None, trainer.overrides(*keys)).config  # noqa: E731
    first = tiers._identity(config())
    assert first == tiers._identity(config())
    assert first != tiers._identity(config("resume=never"))
    (trainer.folder / "run" / "run.id").unlink()
    assert tiers._identity(config()) not in ("", first)
    assert tiers._identity(config("output_directory=/dev/null")) == ""


@pytest.mark.parametrize("key", ["local_checkpoint_every=2", "local_checkpoint_directory=/dev/shm"])
def test_one_key_of_local_checkpoints_without_the_other_is_refused(trainer, key):
    with pytest.raises(UserError, match="need both, or neither"):
        trainer.train(key)
