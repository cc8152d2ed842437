"""Steps that go wrong: one text of the corpus poisons the loss of the batch that holds it."""

import math
import shutil

import jax
import jax.numpy as jnp
import pytest

from slicewise.config import load_config
from slicewise.data.loader import BatchLoader
from slicewise.errors import ExitCode, UserError
from slicewise.train import anomalies, step
from slicewise.train.anomalies import MAX_ROLLBACKS, MAX_SKIPPED, RECENT, Bad, Judge

PLAIN = "The quick brown fox jumps over the lazy dog, and the dog does not mind. "


def faults(*overrides):
    return load_config(None, list(overrides)).config.faults


def results(*losses, norm=1.0):
    return [{"loss": loss, "gradient_norm": norm} for loss in losses]


def fill(judge, losses, first=1):
    """The bad steps that it finds, each step looked at when the next one is under way."""
    found = []
    for number, metrics in enumerate(results(*losses), first):
        judge.add(number, metrics)
        while bad := judge.bad(now=False):
            found.append(bad)
    while bad := judge.bad(now=True):
        found.append(bad)
    return found


# ---------------------------------------------------------------- judging


def test_a_number_that_is_none_is_found_one_step_late_or_at_once():
    judge = Judge(faults("on_bad_step=rollback"))
    one, two = results(1.0, math.nan)
    judge.add(1, one)
    judge.add(2, two)
    assert judge.bad(now=False) is None
    assert judge.bad(now=True) == Bad(2, "loss is nan")
    judge.add(3, results(1.0, norm=math.inf)[0])
    assert judge.bad(now=True) == Bad(3, "gradient_norm is inf")


def test_a_spike_is_measured_against_the_median_of_good_losses():
    judge = Judge(faults("loss_spike_ratio=2"))
    assert fill(judge, [9.0, *[2.0] * (RECENT - 2)]) == [], "too few to judge by"
    (bad,) = fill(judge, [2.0, 3.9, 4.1, 3.9], first=RECENT)
    assert (bad.step, bad.what) == (RECENT + 2, "loss is 4.1, 2.05 times the median of before")


def test_a_judge_of_a_resumed_run_judges_as_if_there_had_been_no_break():
    losses = [2.0 + 0.1 * (i % 3) for i in range(40)] + [9.0, 2.0, 9.0]
    whole = Judge(faults("loss_spike_ratio=2"))
    expected = fill(whole, losses)
    first = Judge(faults("loss_spike_ratio=2"))
    fill(first, losses[:30])
    second = Judge(faults("loss_spike_ratio=2"), first.recent)
    assert fill(second, losses[30:], first=31) == expected
    assert len(expected) == 2


def test_without_a_policy_nothing_is_waited_for():
    judge = Judge(faults())
    judge.add(1, {"loss": object(), "gradient_norm": object()})
    assert judge.bad(now=True) is None
    assert judge.recent == []


def test_too_many_skipped_in_a_row_and_too_many_rollbacks_stop_the_run():
    judge = Judge(faults("on_bad_step=skip"))
    for number in range(MAX_SKIPPED - 1):
        judge.skips(Bad(number, "loss is nan"))
    with pytest.raises(UserError, match=rf"loss is nan at step 9.* last of {MAX_SKIPPED} in a row"):
        judge.skips(Bad(9, "loss is nan"))
    judge = Judge(faults("on_bad_step=rollback"))
    for _ in range(2):
        for _ in range(MAX_ROLLBACKS):
            judge.rolls_back(Bad(7, "loss is nan"), ())
        judge.rolls_back(Bad(8, "loss is nan"), ())
        judge = Judge(faults("on_bad_step=rollback"))
    for _ in range(MAX_ROLLBACKS):
        judge.rolls_back(Bad(7, "loss is nan"), ())
    with pytest.raises(UserError, match=r"Going back 3 times did not help") as caught:
        judge.rolls_back(Bad(6, "loss is nan"), ())
    assert caught.value.code == ExitCode.USER


@pytest.mark.parametrize("bad", ["loss", "gradient_norm"])
def test_a_bad_update_is_left_out_and_a_good_one_taken(bad):
    good = {"loss": jnp.float32(1), "gradient_norm": jnp.float32(1)}
    new, old = {"w": jnp.ones(3)}, {"w": jnp.zeros(3)}
    pick = jax.jit(anomalies.unless_bad)
    assert (pick(good, new, old)["w"] == 1).all()
    assert (pick(good | {bad: jnp.float32(jnp.nan)}, new, old)["w"] == 0).all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss_spike_ratio=0.5"], "loss_spike_ratio = 0.5: expected more than 1"),
        (["on_bad_step=skip", "loss_spike_ratio=3"], "use on_bad_step = rollback, or loss_spike_ratio = 0"),
        (["on_bad_step=skip", "optimizer_state_memory=host"], "optimizer_state_memory = device"),
        (["on_bad_step=rollback", "checkpoint_every=0"], "on_bad_step = rollback needs checkpoints"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        anomalies.check(load_config(None, overrides).config)


# ---------------------------------------------------------------- in a run


@pytest.fixture
def poisoned(trainer, tmp_path, monkeypatch):
    """Overrides of a run whose corpus holds one byte 1, in the batch of step 8, whose loss is no number."""
    corpus = tmp_path / "poisoned"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i}.txt").write_text(f"{i}: " + PLAIN + ("\x01" if i == 5 else ""))
    objective = step.objective

    def poison(params, spec, batch, *arguments, **options):
        is_bad = (batch["tokens"] == 1).any()
        return jax.tree.map(
            lambda x: jnp.where(is_bad, jnp.nan, x), objective(params, spec, batch, *arguments, **options)
        )

    monkeypatch.setattr(step, "objective", poison)
    for seed in range(200):
        overrides = [f"dataset_path={corpus}", "held_out_fraction=0", f"seed={seed}", "steps=12"]
        overrides.append("checkpoint_every=2")
        config = load_config(None, trainer.overrides(*overrides)).config
        loader = BatchLoader(config, range(4))
        at = [number for number in range(1, 20) if (next(loader)["tokens"] == 1).any()]
        loader.close()
        if at == [8]:
            return overrides, at[0]
    pytest.fail("no seed brings the text early")


def test_the_update_of_a_bad_step_is_left_out_and_the_run_goes_on(trainer, poisoned, capsys):
    overrides, bad = poisoned
    records = trainer.train(*overrides, "on_bad_step=skip")
    assert [r["step"] for r in records] == list(range(1, 13))
    assert [r["step"] for r in records if r["loss"] is None] == [bad]
    assert f"step {bad}: loss is nan; its update is left out." in capsys.readouterr().out
    assert trainer.checkpoints() == [8, 10, 12]


def test_a_run_goes_back_and_on_with_other_data_and_a_resumed_one_does_the_same(trainer, poisoned, capsys):
    overrides, bad = poisoned
    rolled = [*overrides, "on_bad_step=rollback", "rollback_steps=3"]
    records = trainer.train(*rolled)
    assert [r["step"] for r in records] == list(range(1, 13))
    assert all(math.isfinite(r["loss"]) for r in records)
    back = (bad - 3) // 2 * 2
    out = capsys.readouterr().out
    assert f"step {bad}: loss is nan; goes back to step {back}, and on with the data behind it." in out
    assert out.count("goes back") == 1
    assert trainer.checkpoints()[-1] == 12
    shutil.rmtree(trainer.folder / "run" / "checkpoints" / "12")
    assert [r["loss"] for r in trainer.train(*rolled)] == [r["loss"] for r in records]
    with pytest.raises(UserError, match=rf"loss is nan at step {bad}"):
        trainer.train(*overrides, "run_name=plain")
    plain = trainer.records("plain")
    same = [r["step"] for r, p in zip(records, plain, strict=False) if r["loss"] == p["loss"]]
    assert same == list(range(1, back + 1)), "behind it the data are others"


def test_without_a_checkpoint_so_old_the_run_stops_and_says_what_helps(trainer, poisoned):
    overrides, _ = poisoned
    with pytest.raises(
        UserError, match=r"there is no checkpoint from \d+ steps before the first to go back to"
    ):
        trainer.train(*overrides, "on_bad_step=rollback", "rollback_steps=20")
