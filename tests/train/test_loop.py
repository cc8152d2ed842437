import json
import math
import shutil
import sys
import warnings

import jax
import pytest

from slicewise.checkpoint.store import CheckpointStore
from slicewise.config import load_config
from slicewise.errors import ExitCode, UserError
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.train import meter
from slicewise.train.step import build_train_step

pytestmark = pytest.mark.slow

FIGURES = {
    "loss",
    "gradient_norm",
    "learning_rate",
    "step_time_s",
    "tokens_per_s",
    "tflops_per_s_per_device",
    "mfu",
}


def steps_of(records):
    return [record["step"] for record in records]


# ---------------------------------------------------------------- records


def test_every_step_has_one_record_with_every_figure(trainer):
    records = trainer.train()
    assert steps_of(records) == list(range(1, 9))
    for record in records:
        assert record.keys() == {"step", *FIGURES}
        assert all(math.isfinite(record[name]) and record[name] > 0 for name in FIGURES)
        assert record["tokens_per_s"] == pytest.approx(4 * 32 / record["step_time_s"])
    assert records[0]["loss"] == pytest.approx(math.log(258), rel=0.02)
    assert records[-1]["loss"] < records[0]["loss"]


class Result:
    """Of a step: the loss, ready from a moment of the test's clock on."""

    def __init__(self, clock, ready_s):
        self.clock, self.ready_s = clock, ready_s

    def is_ready(self):
        return self.clock.now_s >= self.ready_s

    def block_until_ready(self):
        self.clock.now_s = max(self.clock.now_s, self.ready_s)

    def __float__(self):
        self.block_until_ready()
        return 1.0


class Clock:
    now_s = 100.0

    def perf_counter(self):
        return self.now_s


@pytest.mark.parametrize(
    ("ready_s", "expected"),
    [
        ([101.0, 102.0, 103.0, 104.0], [1.0] * 4),  # each when it is handed over, as on CPU
        ([101.9, 102.9, 103.9, 104.9], [2.0, 1.0, 0.95, 0.95]),  # while the next one is under way
        ([102.0, 102.0, 104.0, 104.0], [1.0] * 4),  # two at once: neither has taken no time
    ],
)
def test_step_times_follow_the_results_whenever_these_are_ready(monkeypatch, ready_s, expected):
    clock, events = Clock(), []
    monkeypatch.setattr(meter, "time", clock)
    monkeypatch.setattr(meter, "peak_flops_per_s", lambda mesh: 1e12)
    config = load_config(None, ["model=demo-tiny", "steps=4"]).config
    step = build_train_step(config, build_mesh(config, by_slice(jax.devices()[:1])))
    timed = meter.Meter(config, step, events.append, None)
    for number in range(1, 5):
        clock.now_s += 1.0
        result = Result(clock, ready_s[number - 1])
        timed.finished(number, {"loss": result, "gradient_norm": result}, read_now=number == 4)
    assert [event["step"] for event in events] == [1, 2, 3, 4]
    assert [event["step_time_s"] for event in events] == pytest.approx(expected)


def test_log_every_thins_the_records_and_keeps_the_last(trainer):
    assert steps_of(trainer.train("log_every=3")) == [3, 6, 8]


def test_all_processes_of_devices_log_the_same_run(trainer, finished):
    trainer.use_devices(4)
    four = trainer.train("run_name=four", "ici_context_parallelism=2", "ici_tensor_parallelism=2")
    for a, b in zip(finished, four, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_a_finished_run_with_more_steps_continues_without_gap_or_repeat(trainer, finished):
    more = trainer.train("steps=12")
    assert more[:8] == finished
    assert steps_of(more) == list(range(1, 13))
    assert trainer.checkpoints() == [8, 9, 12]


def test_a_finished_run_says_so_and_changes_nothing(trainer, finished, capsys):
    assert trainer.train() == finished
    assert "run is complete: 8 steps are done, steps = 8." in capsys.readouterr().out
    assert trainer.train("steps=5") == finished
    assert trainer.checkpoints() == [3, 6, 8]


# ---------------------------------------------------------------- TensorBoard and profiles


def test_event_files_hold_the_same_figures_as_the_records(trainer, events):
    records = trainer.train("tensorboard=true", "eval_batches=1", "eval_every=4")
    shown = [(step, values) for step, values in events(trainer.folder / "run") if values != "start"]
    assert shown == [
        (r.pop("step"), {name: pytest.approx(value, rel=1e-6) for name, value in r.items()}) for r in records
    ]


def profiled_steps(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the reader's own making
        from jax.profiler import ProfileData

        (path,) = folder.glob("profile/plugins/profile/*/*.xplane.pb")
        planes = ProfileData.from_file(str(path)).planes
        events = [event for plane in planes for line in plane.lines for event in line.events]
        return sorted({dict(e.stats)["step_num"] for e in events if e.name == "train"})


def test_the_profile_holds_exactly_the_steps_asked_for(trainer):
    trainer.train("profile_from=3", "profile_steps=2")
    assert profiled_steps(trainer.folder / "run") == [3, 4]


def test_a_profile_window_that_the_end_cuts_is_written_all_the_same(trainer):
    trainer.train("profile_from=7", "profile_steps=50")
    assert profiled_steps(trainer.folder / "run") == [7, 8]


def test_a_profile_window_before_the_resumed_step_is_not_opened_again(trainer, finished):
    trainer.train("steps=12", "profile_from=2", "profile_steps=3")
    assert not (trainer.folder / "run" / "profile").exists()


def test_a_profile_window_beyond_the_run_is_refused(trainer):
    with pytest.raises(UserError, match=r"profile_from = 9 is beyond the last step, 8"):
        trainer.train("profile_from=9", "profile_steps=1")


# ---------------------------------------------------------------- checkpoints


def test_only_the_newest_checkpoints_are_kept(trainer):
    trainer.train("steps=8", "checkpoint_every=2", "checkpoint_keep=2")
    assert trainer.checkpoints() == [6, 8]


def test_a_checkpoint_holds_the_config_and_the_place_in_the_data(trainer, finished):
    with CheckpointStore(str(trainer.folder / "run" / "checkpoints"), keep=1) as store:
        metadata = store.read_metadata(8)
    assert metadata["config"]["run"]["steps"] == 8
    assert metadata["config"]["data"]["global_batch_size"] == 4
    assert metadata["slicewise"]
    manifest = trainer.folder / "run" / "checkpoints" / "8" / "manifest" / "data.json"
    state = json.loads(manifest.read_text())["data_state"]
    assert len(state) == 4
    assert all(documents + offset > 0 for documents, offset in state)


def test_without_checkpoints_none_is_written_and_a_second_run_starts_over(trainer):
    first = trainer.train("checkpoint_every=0")
    assert trainer.checkpoints() == []
    second = trainer.train("checkpoint_every=0")
    assert [r["loss"] for r in second] == [r["loss"] for r in first]


def test_an_older_checkpoint_is_resumed_also_by_a_run_that_writes_none(trainer, finished):
    more = trainer.train("steps=12", "checkpoint_every=0")
    assert more[:8] == finished
    assert steps_of(more) == list(range(1, 13))
    assert trainer.checkpoints() == [3, 6, 8]


@pytest.mark.parametrize("every", [3, 0])
def test_resume_never_refuses_an_existing_run_and_leaves_it_alone(trainer, every):
    records = trainer.train("resume=never", f"checkpoint_every={every}")
    with pytest.raises(UserError, match=r"run exists and resume = never; choose another run_name") as caught:
        trainer.train("resume=never", f"checkpoint_every={every}")
    assert caught.value.code == ExitCode.USER
    assert trainer.records() == records


def test_another_batch_size_is_refused_on_resume(trainer, finished):
    with pytest.raises(UserError, match=r"made with global_batch_size = 4, the config says 8; keep it"):
        trainer.train("steps=12", "global_batch_size=8")
    assert trainer.records() == finished


def test_another_model_is_refused_on_resume_with_the_array_that_differs(trainer, finished):
    with pytest.raises(
        UserError, match=r"params\.embed is float32\[384,64\] in the checkpoint of step 8"
    ) as caught:
        trainer.train("steps=12", "model=demo-1m")
    assert caught.value.code == ExitCode.USER
    assert trainer.records() == finished


# ---------------------------------------------------------------- evaluation and failures


def test_evaluations_during_the_run_are_recorded_beside_their_steps(trainer, capsys):
    records = trainer.train("eval_batches=2", "eval_every=3")
    held_out = [record for record in records if "held_out_loss" in record]
    assert steps_of(held_out) == [3, 6]
    assert steps_of(r for r in records if "loss" in r) == list(range(1, 9))
    assert held_out[1]["held_out_loss"] < held_out[0]["held_out_loss"] < math.log(258) * 1.02
    evaluated, saving, _ = capsys.readouterr().out.splitlines()[-3:]
    assert "held-out loss" in evaluated
    assert saving == "save ..."


def test_evaluating_changes_nothing_about_training(trainer, finished):
    watched = trainer.train("run_name=watched", "eval_batches=1", "eval_every=2")
    losses = [r["loss"] for r in trainer.records("watched") if "loss" in r]
    assert losses == [r["loss"] for r in finished]
    assert watched == finished


def test_nothing_to_evaluate_on_is_refused_before_training(trainer):
    with pytest.raises(UserError, match=r"held_out_fraction = 0 leaves nothing to evaluate on"):
        trainer.train("held_out_fraction=0", "eval_batches=1")
    assert not (trainer.folder / "run").exists()


def test_a_loss_that_is_no_number_ends_the_run_and_no_checkpoint_holds_it(trainer):
    with pytest.raises(UserError, match=r"is (nan|inf) at step \d; lower learning_rate") as caught:
        trainer.train("learning_rate=1e30", "warmup_steps=2", "checkpoint_every=1")
    assert caught.value.code == ExitCode.USER
    last = trainer.records()[-1]["step"]
    assert max(trainer.checkpoints()) <= last
    assert all(math.isfinite(r["loss"]) and math.isfinite(r["gradient_norm"]) for r in trainer.records())


def test_training_needs_no_package_of_an_extra_for_plain_text(trainer, monkeypatch):
    for package in ("tokenizers", "sentencepiece", "pyarrow", "datasets", "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)
    assert len(trainer.train("checkpoint_every=0")) == 8


def test_a_run_that_keeps_its_state_in_few_bits_on_the_host_resumes_bit_for_bit(trainer):
    kept = ["optimizer_state_dtype=int8", "optimizer_state_memory=host", "checkpoint_every=4"]
    whole = trainer.train(*kept)
    shutil.rmtree(trainer.folder / "run" / "checkpoints" / "8")
    again = trainer.train(*kept)
    assert [(r["step"], r["loss"], r["gradient_norm"]) for r in again] == [
        (r["step"], r["loss"], r["gradient_norm"]) for r in whole
    ]
