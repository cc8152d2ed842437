"""When a run saves, storage that fails, and what must be the same for a resumed run."""

import errno
import os
import shutil

import pytest
from jax.errors import JaxRuntimeError

from slicewise.checkpoint import backend
from slicewise.checkpoint.manifest import read_manifest
from slicewise.config import load_config
from slicewise.errors import ExitCode, UserError
from slicewise.train import saving
from slicewise.train.faults import explained


@pytest.fixture
def storage(monkeypatch):
    """Storage that is full for as many saves as ``left`` says. Pauses between tries take no time."""
    monkeypatch.setattr(saving, "RETRY_S", 0.0)
    monkeypatch.setattr(saving, "FINAL_RETRY_S", 0.0)
    start_save = backend.Orbax.start_save

    class Storage:
        left, asked = 0, 0

    def fails(self, path, arrays, content):
        Storage.asked += 1
        if Storage.left:
            Storage.left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return start_save(self, path, arrays, content)

    monkeypatch.setattr(backend.Orbax, "start_save", fails)
    return Storage


def losses(records):
    return [(r["step"], r["loss"], r["gradient_norm"]) for r in records if "loss" in r]


def test_a_save_that_fails_is_told_and_made_anew_while_training_goes_on(trainer, storage, capsys):
    storage.left = 2
    disturbed = losses(trainer.train())
    out = capsys.readouterr().out
    shutil.move(trainer.folder / "run", trainer.folder / "disturbed")
    assert disturbed == losses(trainer.train())
    assert out.count("the checkpoint of step 3 could not be written") == 1
    assert out.count("the checkpoint of step 4 could not be written") == 1
    assert "No space left on device. Training goes on; the next try is in 0 s" in out
    assert "the checkpoint of step 5 is saved." in out
    assert trainer.checkpoints("disturbed") == [5, 6, 8]


def test_the_last_save_is_tried_a_few_times_and_then_the_run_has_failed(trainer, storage):
    storage.left = 100
    with pytest.raises(UserError, match=r"step 8 could not be written .*No space left on device") as caught:
        trainer.train("checkpoint_every=8")
    assert caught.value.code == ExitCode.INTERNAL
    assert storage.asked == saving.FINAL_TRIES
    assert len(trainer.records()) == 8
    storage.left = 2
    trainer.train("checkpoint_every=8")
    assert trainer.checkpoints() == [8]


def test_what_is_no_fault_of_the_storage_is_not_tried_again(trainer):
    (trainer.folder / "run" / "checkpoints" / "3").mkdir(parents=True)
    (trainer.folder / "run" / "checkpoints" / "3" / "mine.txt").write_text("")
    with pytest.raises(UserError, match="is no checkpoint but in the way of one"):
        trainer.train()


class Clock:
    """Half a second later at every look."""

    now_s = 0.0

    def monotonic(self):
        self.now_s += 0.5
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def test_checkpoints_by_the_clock_change_nothing_about_training(trainer, monkeypatch):
    undisturbed = losses(trainer.train())
    shutil.rmtree(trainer.folder / "run")
    monkeypatch.setattr(saving, "time", Clock())
    by_clock = trainer.train("checkpoint_interval_s=1.6", "checkpoint_keep=20")
    assert losses(by_clock) == undisturbed
    assert trainer.checkpoints()[-1] == 8
    assert 2 <= len(trainer.checkpoints()) <= 7
    assert trainer.checkpoints() != [3, 6, 8]


def test_the_interval_follows_from_the_failures_and_from_what_a_save_costs(trainer, monkeypatch):
    config = load_config(None, trainer.overrides("failures_per_day=24")).config
    saver = saving.Saver(config, None, print)
    assert saver._interval_s == saving.FIRST_INTERVAL_S
    saver._plan_next(2.0)
    saver.store.close()
    assert saver._interval_s == pytest.approx((2 * 2.0 * 3600) ** 0.5, rel=0.03)


def test_two_ways_to_choose_the_interval_are_refused(trainer):
    with pytest.raises(UserError, match="checkpoint_interval_s and failures_per_day both"):
        trainer.train("checkpoint_interval_s=30", "failures_per_day=4")


def test_the_best_by_evaluation_are_kept_and_each_evaluation_saves(trainer):
    trainer.train(
        "eval_batches=1", "eval_every=2", "checkpoint_every=8", "checkpoint_keep=1", "checkpoint_keep_best=1"
    )
    held_out = {r["step"]: r["held_out_loss"] for r in trainer.records() if "held_out_loss" in r}
    assert sorted(held_out) == [2, 4, 6]
    best = min(held_out, key=held_out.get)
    assert trainer.checkpoints() == sorted({best, 8})
    directory = str(trainer.folder / "run" / "checkpoints")
    assert read_manifest(directory, best).metadata["held_out_loss"] == held_out[best]


# ---------------------------------------------------------------- what a resumed run must have in common


def test_keys_that_decide_the_data_may_not_change(trainer):
    records = trainer.train()
    for override, message in (
        ("seed=1", r"seed was 0 up to step 8 and is 1 now: documents would be repeated"),
        ("held_out_fraction=0.5", r"held_out_fraction was 0.05 up to step 8 and is 0.5 now"),
        ("dataset=python-stdlib", r"dataset was 'text' up to step 8 and is 'python-stdlib' now"),
        ("text_field=body", r"text_field was 'text' up to step 8 and is 'body' now"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            trainer.train("steps=12", override)
        assert caught.value.code == ExitCode.USER
    assert trainer.records() == records


def test_other_text_is_refused_and_the_same_elsewhere_announced(trainer, tmp_path, capsys):
    trainer.train()
    shutil.copytree(trainer.corpus, tmp_path / "moved")
    trainer.train("steps=9", f"dataset_path={tmp_path / 'moved'}")
    assert f"dataset_path is '{tmp_path / 'moved'}' and was" in capsys.readouterr().out
    first = tmp_path / "moved" / "0.txt"
    whole = first.read_text()
    first.write_text(whole + "!")  # as many passages as before
    with pytest.raises(
        UserError, match=r"the text of the dataset changed: [\d,]+ bytes \(\w+\) up to step 9, "
    ):
        trainer.train("steps=12", f"dataset_path={tmp_path / 'moved'}")
    first.write_text(whole)
    (tmp_path / "moved" / "more.txt").write_text("more text")
    with pytest.raises(
        UserError, match=r"the dataset changed: 12 documents \(\w+\) up to step 9, 13 documents"
    ):
        trainer.train("steps=12", f"dataset_path={tmp_path / 'moved'}")


# ---------------------------------------------------------------- errors of the runtime


def test_out_of_memory_says_what_to_change_and_whose_fault_it_is():
    config = load_config(None, []).config
    error = JaxRuntimeError("RESOURCE_EXHAUSTED: Attempting to allocate 12.50G. That was not possible.")
    before = explained(error, config, has_stepped=False)
    assert before.code == ExitCode.USER
    assert "cannot give 12.50G" in str(before)
    assert "gradient_accumulation_steps (now 1), choose a remat_policy" in str(before)
    assert explained(error, config, has_stepped=True).code == ExitCode.INTERNAL


def test_a_collective_that_fails_points_at_the_other_workers():
    config = load_config(None, []).config
    error = JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:1")
    assert "another worker has ended" in str(explained(error, config, has_stepped=True))
    other = JaxRuntimeError("INVALID_ARGUMENT: shapes")
    assert explained(other, config, has_stepped=True) is other


def test_a_step_that_runs_out_of_memory_ends_the_run_with_that_advice(trainer, monkeypatch):
    from slicewise.train import programs

    def exhausted(*_):
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.")

    monkeypatch.setattr(programs, "compile_update", lambda *_: exhausted)
    with pytest.raises(UserError, match="out of memory") as caught:
        trainer.train()
    assert caught.value.code == ExitCode.USER
