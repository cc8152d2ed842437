"""Training inside the test process, on as many of its eight devices as a test asks for."""

import json
import shutil
import time

import jax
import pytest

from slicewise.config import load_config
from slicewise.parallel import cluster
from slicewise.train.loop import train

TINY = [
    "model=demo-tiny",
    "compute_dtype=float32",
    "sequence_length=32",
    "global_batch_size=4",
    "dataset=text",
    "steps=8",
    "checkpoint_every=3",
    "eval_batches=0",
    "tensorboard=false",
]
PRAISE = "The quick brown fox jumps over the lazy dog, and the dog does not mind. "


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of small text files."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"{i}: " + PRAISE * (3 + i))
    return folder


class Trainer:
    """Runs in one folder, inside this process."""

    def __init__(self, patch, folder, corpus):
        self._patch, self.folder, self.corpus = patch, folder, str(corpus)
        patch.setattr(cluster, "initialize", lambda: None)
        patch.setenv("JAX_COMPILATION_CACHE_DIR", "as JAX is configured already")
        self.use_devices(1)

    def use_devices(self, count):
        devices = cluster.by_slice(jax.devices()[:count])
        self._patch.setattr(cluster, "found", lambda: devices)

    def overrides(self, *more):
        return [*TINY, f"dataset_path={self.corpus}", f"output_directory={self.folder}", *more]

    def train(self, *overrides):
        """The records of metrics.jsonl afterwards."""
        train(load_config(None, self.overrides(*overrides)).config)
        return self.records()

    def records(self, run="run"):
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def checkpoints(self, run="run"):
        folder = self.folder / run / "checkpoints"
        return sorted(int(path.name) for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def trainer(monkeypatch, tmp_path, corpus, programs_of_tests):
    return Trainer(monkeypatch, tmp_path, corpus)


@pytest.fixture(scope="session")
def _finished(tmp_path_factory, corpus, programs_of_tests):
    with pytest.MonkeyPatch.context() as patch:
        trainer = Trainer(patch, tmp_path_factory.mktemp("finished"), corpus)
        trainer.train()
        return trainer.folder / "run"


@pytest.fixture
def finished(trainer, _finished):
    """What ``trainer.train()`` gives, with the run in the trainer's folder: a copy of one that all tests share."""
    shutil.copytree(_finished, trainer.folder / "run")
    return trainer.records()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus, programs_of_tests):
    """A trainer with one finished run: its folder is a checkpoint for verbs that read one."""
    with pytest.MonkeyPatch.context() as patch:
        trainer = Trainer(patch, tmp_path_factory.mktemp("trained"), corpus)
        trainer.train("steps=60", "checkpoint_every=60", "learning_rate=1e-2", "held_out_fraction=0.2")
        yield trainer


@pytest.fixture
def events():
    """Reads the TensorBoard event files of a run's folder."""
    return _read_events


def _read_events(folder):
    """(step, {tag: value}) or (step, "start") of every event of every file, in the order of the files."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import masked_crc32c

    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            record, check = data[at + 12 : at + 12 + size], data[at + 12 + size : at + 16 + size]
            assert int.from_bytes(check, "little") == masked_crc32c(record)
            event = Event.FromString(record)
            if event.session_log.status == SessionLog.START:
                found.append((event.step, "start"))
            elif event.summary.value:
                assert abs(event.wall_time - time.time()) < 3600
                found.append((event.step, {v.tag: v.simple_value for v in event.summary.value}))
            at += 16 + size
        assert at == len(data), "the last record is whole"
    return found
