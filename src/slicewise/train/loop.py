"""The training run of one process: restore, step, measure, save, evaluate."""

import contextlib
import dataclasses
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import slicewise
from slicewise.checkpoint.manifest import complete_steps
from slicewise.config import RunConfig
from slicewise.costs.flops import model_flops
from slicewise.costs.shapes import model_shape
from slicewise.data.loader import BatchLoader
from slicewise.errors import UserError
from slicewise.parallel import cluster
from slicewise.parallel.mesh import build_mesh
from slicewise.train import choices, runtime
from slicewise.train.batches import held_out, local_rows, to_global
from slicewise.train.metrics import MetricWriter, make_directory, peak_flops_per_s
from slicewise.train.progress import Sink, reporter
from slicewise.train.step import TrainState, TrainStep, build_train_step


def train(config: RunConfig) -> None:
    """Runs ``config`` to its last step on the devices of this job, from the newest checkpoint when resuming."""
    _check(config)
    runtime.start()
    mesh = build_mesh(config, cluster.found())
    step = build_train_step(config, mesh)
    choices.check_same_settings(config, step.spec, mesh)
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(reporter())
        stack.enter_context(jax.set_mesh(mesh))
        _Run(config, step, report, stack).run()
    runtime.stop()


def _check(config: RunConfig) -> None:
    """Raises UserError for what would otherwise come to light only after training."""
    data, metrics = config.data, config.metrics
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

    def __init__(self, config: RunConfig, step: TrainStep, report: Sink, stack: contextlib.ExitStack):
        self.config, self.step, self.report, self.stack = config, step, report, stack
        self.is_first = jax.process_index() == 0
        self.rows = local_rows(step)
        self.store: Any = None
        self.start = 0
        directory = f"{config.directory}/checkpoints"
        if config.checkpoint.resume == "never":
            self._refuse_existing(directory)
        if self.is_first:
            make_directory(config.local_directory)  # what cannot be written is to show before compiling
        # With checkpoint_every = 0 an older checkpoint is resumed all the same; several processes must agree on it.
        if config.checkpoint.checkpoint_every or jax.process_count() > 1 or complete_steps(directory):
            self._open_store(directory)

    def _refuse_existing(self, checkpoints: str) -> None:
        metrics = self.config.local_directory / "metrics.jsonl"
        if complete_steps(checkpoints) or (self.is_first and metrics.exists()):
            raise UserError(
                f"{self.config.directory} exists and resume = never;"
                " choose another run_name, delete that directory, or use resume=auto."
            )

    def _open_store(self, directory: str) -> None:
        from slicewise.checkpoint.store import CheckpointStore  # imports take a second: only where it is used

        self.store = CheckpointStore(directory, keep=self.config.checkpoint.checkpoint_keep)
        self.stack.callback(self.store.close)
        self.start = self.store.latest() or 0

    def run(self) -> None:
        steps = self.config.run.steps
        if self.start < steps:
            state = self._train()
        else:
            self._say(f"{self.config.directory} is complete: {self.start} steps are done, steps = {steps}.")
            state, _ = self._restore()
        if self.config.evaluation.eval_batches:
            loss = self._evaluate(state)
            self._say(f"held-out loss {loss:.4f} nats/token, perplexity {math.exp(loss):.2f}")
        if self.config.checkpoint.checkpoint_every:
            self.store.wait()
            self._say(f"checkpoint {self.config.directory}/checkpoints/{max(steps, self.start)}")

    def _train(self) -> TrainState:
        """Steps ``start`` + 1 to the last. Compiling, opening the data and opening the logs go on side by side."""
        config = self.config
        state, data_state = None, None
        if self.start:
            self.report({"event": "phase", "name": "restore"})
            state, data_state = self._restore()  # before compiling: a checkpoint may be refused
        with ThreadPoolExecutor(3) as background:
            loading = background.submit(self._open_loader, data_state)
            initialising = None if state else background.submit(self._compile_init)
            writing = background.submit(self._open_writer) if self.is_first else None
            self.report({"event": "phase", "name": "compile"})
            update = self._compile_update()
            loader = loading.result()
            self.stack.callback(loader.close)
            cluster.wait_for_all("compiled")
            if initialising:
                state = initialising.result()()
            writer = writing.result() if writing else None
        assert state is not None
        if writer:
            self.stack.callback(writer.close)
        meter = _Meter(self.config, self.step, self.report, writer)
        self._say(self._describe())
        for note in choices.notes(config, self.step.spec, self.step.mesh):
            self._say(note)
        for number in range(self.start + 1, config.run.steps + 1):
            self._profile(number, state)
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                batch = to_global(self.step, self.rows, next(loader))
                if self.step.calibrate is not None and self._calibrates_at(number):
                    state = dataclasses.replace(state, ranges=self.step.calibrate(state, batch))
                state, metrics = update(state, batch)
            saves, evaluates = self._saves_at(number), self._evaluates_at(number)
            meter.finished(number, metrics, read_now=saves or evaluates or number == config.run.steps)
            if saves:
                self._save(number, state, loader)
            if evaluates:
                loss = self._evaluate(state)
                self._say(f"step {number}: held-out loss {loss:.4f} nats/token")
                if writer:
                    writer.write(number, {"held_out_loss": loss})
            if saves or evaluates or number == self.start + 1:
                self._check_logits(number, state, batch)
            if saves or evaluates:
                meter.restart_clock()
        self._profile(config.run.steps + 1, state)
        return state

    def _check_logits(self, number: int, state: TrainState, batch: dict) -> None:
        """Warns when the estimate that attention relies on is too low for the batch of this step."""
        if self.step.logits_above is None:
            return
        above, estimate = (
            float(self.step.logits_above(state.params, batch)),
            self.config.model.use_max_logits_estimate,
        )
        if above:
            self._say(
                f"warning: after step {number} {above:,.0f} attention logits exceed use_max_logits_estimate ="
                f" {estimate}; raise it, or set it to 0."
            )

    def _compile_update(self) -> Any:
        """The step, compiled here or from the file that the config names."""
        if path := self.config.compiler.executable:
            from slicewise.train import executable

            return executable.load(path, self.step)
        lowered = self.step.update.lower(self.step.abstract_state, self.step.abstract_batch)
        if expected := choices.expected_kernels(self.config, self.step.spec, self.step.mesh):
            choices.check_kernels(expected, lowered.as_text())
        return lowered.compile()

    def _compile_init(self) -> jax.stages.Compiled:
        with jax.set_mesh(self.step.mesh):  # which belongs to a thread
            return self.step.init.lower().compile()

    def _open_writer(self) -> MetricWriter:
        metrics = self.config.metrics
        return MetricWriter(
            self.config.local_directory, from_step=self.start, tensorboard=metrics.tensorboard
        )

    def _open_loader(self, data_state: np.ndarray | None) -> BatchLoader:
        state = None if data_state is None else data_state[self.rows]
        return BatchLoader(self.config, self.rows, state=state, vocab_size=self.step.spec.vocab)

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
        every = self.config.checkpoint.checkpoint_every
        return bool(every) and (number % every == 0 or number == self.config.run.steps)

    def _calibrates_at(self, number: int) -> bool:
        return (number - 1) % self.config.model.quantization_calibrate_every == 0

    def _evaluates_at(self, number: int) -> bool:
        """During the run; the evaluation at its end is not counted here."""
        evaluation = self.config.evaluation
        is_on = bool(evaluation.eval_every and evaluation.eval_batches)
        return is_on and number % evaluation.eval_every == 0 and number < self.config.run.steps

    def _save(self, number: int, state: TrainState, loader: BatchLoader) -> None:
        data_state = np.zeros((self.config.data.global_batch_size, 2), np.int64)
        data_state[self.rows] = loader.state
        if jax.process_count() > 1:  # rows held by several processes have equal states, absent ones are zero
            data_state = multihost_utils.process_allgather(data_state).max(axis=0)
        metadata = {
            "config": self.config.model_dump(),
            "slicewise": slicewise.__version__,
            "compiler_options": self.step.compiler_options,
        }
        self.store.save(number, state, data_state=data_state, metadata=metadata)

    def _restore(self) -> tuple[TrainState, np.ndarray]:
        restored = self.store.restore(self.start, self.step.abstract_state)
        saved, rows = len(restored.data_state), self.config.data.global_batch_size
        if saved != rows:
            raise UserError(
                f"checkpoint {self.config.directory}/checkpoints/{self.start} was made with global_batch_size ="
                f" {saved}, the config says {rows}; keep it, or start another run_name."
            )
        return restored.state, restored.data_state

    def _evaluate(self, state: TrainState) -> float:
        """Mean held-out loss in nats a token."""
        self.report({"event": "phase", "name": "evaluate"})
        return mean_loss(self.config, self.step, state.params)

    def _profile(self, number: int, state: TrainState) -> None:
        """Opens the profiling window before step ``number``, or closes it; steps before a resume are not in it."""
        asked = max(self.config.metrics.profile_from, 1)
        first = max(asked, self.start + 1)
        end = min(asked + self.config.metrics.profile_steps, self.config.run.steps + 1)
        if first >= end or number not in (first, end):
            return
        jax.block_until_ready(state)  # no step is half inside the window
        if number == first:
            jax.profiler.start_trace(str(self.config.local_directory / "profile"))
        else:
            jax.profiler.stop_trace()


def mean_loss(config: RunConfig, step: TrainStep, params: Any) -> float:
    """Mean cross-entropy in nats a token over the held-out batches of ``config``."""
    sums = [step.evaluate(params, batch) for batch in held_out(config, step, config.evaluation.eval_batches)]
    total, count = (sum(float(s[i]) for s in sums) for i in range(2))
    if not count:
        raise UserError(
            "the held-out text has no token to predict; give longer documents, or set eval_batches=0."
        )
    return total / count


class _Meter:
    """Times steps, turns their results into records and events, and stops a run whose loss is no number.

    A result that is not ready is read one step late, when the next step is already under way, except before a
    save or an evaluation. Steps that are read together share the time equally.
    """

    def __init__(self, config: RunConfig, step: TrainStep, report: Sink, writer: MetricWriter | None):
        self.config, self.report, self.writer = config, report, writer
        self.tokens = config.data.global_batch_size * config.data.sequence_length
        flops = model_flops(model_shape(step.spec), self.tokens, config.data.sequence_length)
        self.flops_per_device = flops / step.mesh.devices.size
        self.peak = peak_flops_per_s(step.mesh)
        self.pending: list[tuple[int, dict]] = []
        self.last_s = time.perf_counter()

    def finished(self, number: int, metrics: dict, *, read_now: bool) -> None:
        """Takes the results of step ``number`` and reads what it may of these and those of the step before."""
        self.pending.append((number, metrics))
        if read_now:
            jax.block_until_ready(metrics)
        read = len(self.pending) - (not metrics["loss"].is_ready())
        done = [(n, {name: float(x) for name, x in m.items()}) for n, m in self.pending[:read]]
        del self.pending[:read]
        now_s = time.perf_counter()
        for n, values in done:
            self._record(n, values, (now_s - self.last_s) / read)
        if done:
            self.last_s = now_s
        if read_now and self.writer:
            self.writer.flush()

    def restart_clock(self) -> None:
        """After a save or an evaluation, whose time is not the next step's."""
        self.last_s = time.perf_counter()

    def _record(self, number: int, values: dict[str, float], step_time_s: float) -> None:
        for name in ("loss", "gradient_norm"):  # an infinite gradient spoils weights before the loss shows it
            if not math.isfinite(values[name]):
                raise UserError(
                    f"{name} is {values[name]} at step {number}; lower learning_rate or lengthen warmup_steps."
                    " Checkpoints of earlier steps are good."
                )
        rate = self.flops_per_device / step_time_s
        values |= {
            "step_time_s": step_time_s,
            "tokens_per_s": self.tokens / step_time_s,
            "tflops_per_s_per_device": rate / 1e12,
            "mfu": rate / self.peak,
        }
        if number % self.config.metrics.log_every == 0 or number == self.config.run.steps:
            self.report({"event": "step", "step": number, "steps": self.config.run.steps, **values})
            if self.writer:
                self.writer.write(number, values)
