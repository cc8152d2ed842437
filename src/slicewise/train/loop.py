"""The training run of one process: restore, step, measure, save, evaluate."""

import contextlib
import dataclasses
import gc
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from slicewise.checkpoint.manifest import complete_steps
from slicewise.config import RunConfig, check_effects, resolve_degrees
from slicewise.costs.shapes import model_shape
from slicewise.errors import ExitCode, UserError
from slicewise.interop.huggingface import load_spec
from slicewise.parallel import cluster
from slicewise.parallel.cluster import SliceDevices
from slicewise.parallel.mesh import build_mesh
from slicewise.train import anomalies, choices, elastic, host_memory, initial, programs, runtime
from slicewise.train.agreement import STOP, Agreement
from slicewise.train.batches import held_out_loss, local_rows, to_global
from slicewise.train.corruption import Checks
from slicewise.train.elastic import Fitted
from slicewise.train.faults import explained
from slicewise.train.goodput_export import exporter
from slicewise.train.goodput_log import Ledger, now_us
from slicewise.train.meter import Meter
from slicewise.train.metrics import MetricWriter, make_directory
from slicewise.train.preemption import Preemption
from slicewise.train.profiling import Profiler
from slicewise.train.progress import Sink, reporter
from slicewise.train.sole import sole
from slicewise.train.step import TrainState, TrainStep, build_train_step
from slicewise.train.turns import Turns


def train(config: RunConfig, preemption: Preemption | None = None) -> ExitCode:
    """Runs ``config`` to its last step on the devices of this job, from the newest checkpoint when resuming.

    DONE, or PREEMPTED when it was asked to stop, by way of ``preemption``, and has saved what there was to save.
    """
    _check(config)
    with contextlib.ExitStack() as held, Ledger(config.local_directory) as ledger:
        ledger.now("join")
        runtime.start()
        if jax.process_index() == 0:  # before anything is written there
            held.enter_context(sole(config.local_directory))
        if config.metrics.goodput_logger and jax.process_index() == 0:
            ledger.attach(exporter(config))
        ledger.joined(jax.process_index() == 0)
        with contextlib.ExitStack() as stack:
            report = stack.enter_context(reporter())
            agreement = _agreement(config, preemption or Preemption(), report)
            stack.callback(agreement.close)
            slices = cluster.found()
            fitted = elastic.fit(
                config, num_slices=slices.num_slices, devices_per_slice=slices.devices_per_slice
            )
            _check_effects(fitted, slices)
            mesh = build_mesh(fitted.config, slices)
            step = build_train_step(fitted.config, mesh)
            host_memory.check(fitted.config, step)
            stack.enter_context(jax.set_mesh(mesh))
            run = _Run(fitted, step, slices, report, stack, agreement, ledger)
            try:
                choices.check_same_settings(fitted.config, step.spec, mesh)
                code = run.run()
            except (RuntimeError, MemoryError) as error:
                raise explained(error, config, has_stepped=agreement.begun > 1) from error
        runtime.stop()
        ledger.is_complete = code == ExitCode.DONE
    return code


def _agreement(config: RunConfig, preemption: Preemption, report: Sink) -> Agreement:
    """How this process and the others find a common step, also for a preemption if the run can save."""
    agreement = Agreement(
        cluster.coordination_client(), jax.process_index(), jax.process_count(), preemption.heard
    )
    if config.checkpoint.checkpoint_every:
        preemption.attach(agreement, config.faults.stop_grace_s, report)
    else:
        preemption.close()  # SIGTERM ends it at once
    return agreement


def _check_effects(fitted: Fitted, slices: SliceDevices) -> None:
    """Raises UserError for keys without an effect on the model and the devices."""
    degrees = resolve_degrees(
        fitted.config, num_slices=slices.num_slices, devices_per_slice=slices.devices_per_slice
    )
    shape = model_shape(load_spec(fitted.config.model.model))
    check_effects(fitted.config, shape, degrees, fitted.all_slices)


def _check(config: RunConfig) -> None:
    """Raises UserError for what would otherwise come to light only after training."""
    data, metrics, kept = config.data, config.metrics, config.checkpoint
    anomalies.check(config)
    if kept.checkpoint_interval_s and kept.failures_per_day:
        raise UserError(
            "checkpoint_interval_s and failures_per_day both give an interval: set one of them to 0."
        )
    if config.evaluation.eval_batches and not data.held_out_fraction and data.dataset != "synthetic":
        raise UserError(
            "held_out_fraction = 0 leaves nothing to evaluate on; set it above 0, or eval_batches=0."
        )
    if metrics.profile_steps and metrics.profile_from > config.run.steps:
        raise UserError(
            f"profile_from = {metrics.profile_from} is beyond the last step, {config.run.steps};"
            " lower it, or set profile_steps=0."
        )


class _Run:
    """One run in one process. ``state`` is donated to each step and replaced by its result."""

    def __init__(
        self,
        fitted: Fitted,
        step: TrainStep,
        slices: SliceDevices,
        report: Sink,
        stack: contextlib.ExitStack,
        agreement: Agreement,
        ledger: Ledger,
    ):
        self.config, self.step, self.report, self.stack = fitted.config, step, report, stack
        self.fitted, self.slices, self.agreement, self.ledger = fitted, slices, agreement, ledger
        config = fitted.config
        self.is_first = jax.process_index() == 0
        ledger.warn = self._say
        self.rows = local_rows(step)
        self.saver: Any = None
        self.judge = anomalies.Judge(config.faults)
        self.start = 0
        self.frozen_digest: str | None = None  # with LoRA
        directory = f"{config.directory}/checkpoints"
        if config.checkpoint.resume == "never":
            self._refuse_existing(directory)
        if self.is_first:
            make_directory(config.local_directory)  # what cannot be written is to show before compiling
        kept = config.checkpoint
        # With checkpoint_every = 0 an older checkpoint is resumed all the same; several processes must agree on it.
        if (
            kept.checkpoint_every
            or kept.local_checkpoint_every
            or kept.local_checkpoint_directory
            or jax.process_count() > 1
            or complete_steps(directory)
        ):
            self._open_saver()

    def _refuse_existing(self, checkpoints: str) -> None:
        metrics = self.config.local_directory / "metrics.jsonl"
        if complete_steps(checkpoints) or (self.is_first and metrics.exists()):
            raise UserError(
                f"{self.config.directory} exists and resume = never;"
                " choose another run_name, delete that directory, or use resume=auto."
            )

    def _open_saver(self) -> None:
        from slicewise.train import tiers  # imports take a second: only where they are used
        from slicewise.train.saving import Saver

        tier = tiers.opened(self.fitted.asked, self.slices, self.report)
        self.saver = Saver(self.fitted.asked, self.agreement, self._say, tier)
        self.stack.callback(self.saver.close)

    def run(self) -> ExitCode:
        steps = self.config.run.steps
        restored = self._restore()  # before compiling: a checkpoint may be refused
        self.start = restored.step if restored else 0
        if self.start < steps:
            state = self._train(restored)
            if state is None:
                return ExitCode.PREEMPTED
        else:
            self._say(f"{self.config.directory} is complete: {self.start} steps are done, steps = {steps}.")
            state = restored.state
        if self.config.evaluation.eval_batches:
            loss = self._evaluate(state)
            self._say(f"held-out loss {loss:.4f} nats/token, perplexity {math.exp(loss):.2f}")
        self.ledger.now("finish")
        if self.config.checkpoint.checkpoint_every:
            self._finish_save(state)
            self.saver.clear_local()
            self._say(f"checkpoint {self.config.directory}/checkpoints/{max(steps, self.start)}")
        return ExitCode.DONE

    def _train(self, restored: Any) -> TrainState | None:
        """Steps ``start`` + 1 to the last; None when it was asked to stop before that, and has saved.

        Compiling and opening the data go on side by side.
        """
        config = self.config
        state = restored.state if restored else None
        params = None if state else self._load_weights()
        checks = Checks(self.fitted, self.step.abstract_state, self.step.mesh, self.slices)
        writer = self._open_writer() if self.is_first else None
        if writer:
            self.stack.callback(writer.close)
        with ThreadPoolExecutor(2) as background:
            loading = background.submit(self._open_loader, restored)
            self.report({"event": "phase", "name": "compile"})
            self.ledger.now("compile")
            # First: the cache knows it by what was traced before.
            lowered = programs.lower_update(config, self.step)
            initialising = None if state else background.submit(programs.compile_start, self.step, params)
            update = programs.compile_update(config, self.step, lowered)
            kept = config.checkpoint
            if (kept.checkpoint_every or kept.local_checkpoint_every) and not restored:
                self.saver.store.prepare(self.step.abstract_state)  # a restore has compiled it already
            loader = loading.result()
            self.stack.callback(loader.close)
            cluster.wait_for_all("compiled")
            notes = host_memory.check_compiled(config, self.step, update)
            self.ledger.now("prepare")
            if initialising:
                state = programs.first_state(initialising.result(), self.step, params)
        assert state is not None
        gc.freeze()  # programs and modules stay to the end: no collection need look at them
        gc.enable()
        self._compare_data(restored, loader)
        meter = Meter(config, self.step, self.report, writer)
        profiler = Profiler(config, self.start)
        self.stack.callback(profiler.close)
        self._say(self._describe())
        for note in [*choices.notes(config, self.step.spec, self.step.mesh), *notes]:
            self._say(note)
        if loader.chat_template:
            self._say(f"chat template: {loader.chat_template}")
        self.ledger.now("step", from_step=self.start)
        number, due = self.start, self._points()
        while number < config.run.steps and STOP not in due:
            number += 1
            profiler.before(number, state)
            self.ledger.begins(number)
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                batch = to_global(self.step, self.rows, self._next(loader, meter))
                if self.step.calibrate is not None and self._calibrates_at(number):
                    state = dataclasses.replace(state, ranges=self.step.calibrate(state, batch))
                state, metrics = checks.step(number, update, state, batch)
            due = self._points() if number < config.run.steps else set()
            evaluates = self._evaluates_at(number)
            saves = self._saves_at(number) or bool(due) or (evaluates and self._keeps_best)
            locally = self.saver is not None and self.saver.is_due_locally(number, stops=STOP in due)
            if saves or locally:
                checks.before_save(number, state)
            reads = saves or locally or evaluates or number in (self.start + 1, config.run.steps)
            self.judge.add(number, metrics)
            if back := self._mend(reads, meter):
                number, state = back.step, dataclasses.replace(back.state, frozen=state.frozen)
                self.ledger.now("step", from_step=number)
                continue
            meter.finished(number, metrics, read_now=reads)
            self.ledger.stepped(number, at_once=number == self.start + 1)
            loss = self._evaluate_within(number, state, writer) if evaluates else None
            if saves or locally:
                self.ledger.now("save")
                if writer:
                    writer.flush()
                self._save(number, state, loader, loss, shared=saves, locally=locally)
            if saves or evaluates or number == self.start + 1:
                self._check_logits(number, state, batch)
            if saves or locally or evaluates:
                meter.restart_clock()
                self.ledger.now("step")
        if STOP in due:
            profiler.close()  # before the save, which has a deadline
            self._stop(number, state)
            return None
        profiler.before(config.run.steps + 1, state)
        if skipped := loader.conversations_skipped():
            length = config.data.sequence_length
            self._say(f"{skipped:,} conversations were skipped: no answer within sequence_length = {length}")
        return state

    def _load_weights(self) -> Any:
        """What a new run starts from, to train or to freeze; None for random numbers."""
        if not (self.config.checkpoint.initial_weights or self.step.lora):
            return None
        self.report({"event": "phase", "name": "load weights"})
        params = initial.load(self.config, self.step)
        self._note_base(params)
        return params

    def _next(self, loader: Turns, meter: Meter) -> Any:
        """The rows of the next step. Waiting for them is accounted for only when the devices had nothing to do."""
        since_us = now_us()
        rows = next(loader)
        if not meter.is_busy():
            self.ledger.waited(since_us)
        return rows

    def _points(self) -> set[str]:
        """Before a step: what is to be done first; a step that STOP is before is not taken."""
        if self.saver:
            self.saver.tick()
        return {point.what for point in self.agreement.begin()}

    def _mend(self, reads: bool, meter: Meter) -> Any:
        """What follows from the steps that went wrong: nothing, or the checkpoint to go on from.

        Raises UserError when the run has to stop.
        """
        faults = self.config.faults
        while bad := self.judge.bad(now=reads):
            if faults.on_bad_step == "stop":
                raise anomalies.stopped(bad)
            if faults.on_bad_step == "skip":
                self.judge.skips(bad)
                self._say(f"step {bad.step}: {bad.what}; its update is left out.")
                continue
            self.ledger.now("restore")
            restored = self.saver.roll_back(_kept(self.step.abstract_state), bad.step - faults.rollback_steps)
            self.judge.rolls_back(bad, restored.metadata.get("recent_losses", ()))
            meter.rewind(restored.step)
            self._say(
                f"step {bad.step}: {bad.what}; goes back to step {restored.step}, and on with the data behind it."
            )
            return restored
        return None

    def _stop(self, number: int, state: TrainState) -> None:
        """All was asked to stop, and the step just taken was to be saved."""
        self.report({"event": "phase", "name": "save"})
        where = self.saver.finish_stopping(_kept(state)) or f"{self.config.directory}/checkpoints"
        self._say(f"stops after step {number}: checkpoint {where}/{number}")

    def _finish_save(self, state: TrainState) -> None:
        self.report({"event": "phase", "name": "save"})
        self.saver.finish(_kept(state))

    def _compare_data(self, restored: Any, loader: Turns) -> None:
        if restored:
            from slicewise.train.saving import same_content

            for line in same_content(restored, self.config, loader.fingerprint):
                self._say(line)

    def _check_logits(self, number: int, state: TrainState, batch: dict) -> None:
        """Warns when the estimate that attention relies on is too low for the batch of this step."""
        if self.step.logits_above is None:
            return
        above, estimate = (
            float(self.step.logits_above(self.step.weights(state), batch)),
            self.config.model.use_max_logits_estimate,
        )
        if above:
            self._say(
                f"warning: after step {number} {above:,.0f} attention logits exceed use_max_logits_estimate ="
                f" {estimate}; raise it, or set it to 0."
            )

    def _note_base(self, params: Any) -> None:
        """Keeps the digest of what is frozen for the metadata of checkpoints."""
        if self.step.lora:
            self.frozen_digest = initial.digest(params)

    def _open_writer(self) -> MetricWriter:
        metrics = self.config.metrics
        return MetricWriter(
            self.config.local_directory, from_step=self.start, tensorboard=metrics.tensorboard
        )

    def _open_loader(self, restored: Any) -> Turns:
        data_state, row = (restored.data_state, restored.metadata.get("row", 0)) if restored else (None, 0)
        return Turns(self.fitted, self.rows, data_state, row, vocab_size=self.step.spec.vocab)

    def _describe(self) -> str:
        config, mesh = self.config, self.step.mesh
        shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
        where = f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind} in {jax.process_count()} processes"
        begin = f"resumes after step {self.start}" if self.start else "starts"
        tokens = config.data.global_batch_size * config.data.sequence_length
        return f"{config.directory} {begin}: {self.step.spec.name}, {tokens:,} tokens/step, {where}, {shape}"

    def _say(self, text: str) -> None:
        if self.is_first:
            self.report({"event": "text", "text": text})

    def _saves_at(self, number: int) -> bool:
        return self.saver is not None and self.saver.is_due(number)

    @property
    def _keeps_best(self) -> bool:
        kept = self.config.checkpoint
        return bool(kept.checkpoint_every and kept.checkpoint_keep_best)

    def _calibrates_at(self, number: int) -> bool:
        return (number - 1) % self.config.model.quantization_calibrate_every == 0

    def _evaluates_at(self, number: int) -> bool:
        """During the run; the evaluation at its end is not counted here."""
        evaluation = self.config.evaluation
        is_on = bool(evaluation.eval_every and evaluation.eval_batches)
        return is_on and number % evaluation.eval_every == 0 and number < self.config.run.steps

    def _save(
        self,
        number: int,
        state: TrainState,
        loader: Turns,
        loss: float | None,
        *,
        shared: bool,
        locally: bool,
    ) -> None:
        data_state = np.zeros((self.fitted.asked.data.global_batch_size, 2), np.int64)
        data_state[loader.rows] = loader.state
        metadata = {
            "compiler_options": self.step.compiler_options,
            "data": loader.fingerprint,
            "row": loader.row,
            "recent_losses": self.judge.recent,
            "held_out_loss": loss,
            "frozen": self.frozen_digest,
            "lora_alpha": self.config.lora.lora_alpha if self.step.lora else None,
        }
        self.saver.save(
            number, _kept(state), data_state=data_state, metadata=metadata, shared=shared, locally=locally
        )

    def _restore(self) -> Any:
        """The newest good checkpoint, or None."""
        if self.saver is None:
            return None
        if self.saver.newest() is not None:
            self.report({"event": "phase", "name": "restore"})
            self.ledger.now("restore")
        restored = self.saver.restore(_kept(self.step.abstract_state))
        if not restored:
            return None
        self.judge = anomalies.Judge(self.config.faults, restored.metadata.get("recent_losses", ()))
        if self.step.lora:
            frozen = initial.load(self.config, self.step)
            initial.check_base(self.config, frozen, restored.metadata)
            self._note_base(frozen)
            restored = dataclasses.replace(restored, state=dataclasses.replace(restored.state, frozen=frozen))
        return restored

    def _evaluate_within(self, number: int, state: TrainState, writer: MetricWriter | None) -> float:
        loss = self._evaluate(state)
        self._say(f"step {number}: held-out loss {loss:.4f} nats/token")
        if writer:
            writer.write(number, {"held_out_loss": loss})
        return loss

    def _evaluate(self, state: TrainState) -> float:
        """Mean held-out loss in nats a token."""
        self.report({"event": "phase", "name": "evaluate"})
        self.ledger.now("evaluate")
        return held_out_loss(self.config, self.step, self.step.weights(state))


def _kept(state: TrainState) -> TrainState:
    """What checkpoints hold of a state: all but what never changes."""
    return dataclasses.replace(state, frozen=None)
