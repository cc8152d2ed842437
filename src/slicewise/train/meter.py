"""The times and records of steps, read while the next step is already under way."""

import time

import jax

from slicewise.config import RunConfig
from slicewise.costs.adapters import with_adapters
from slicewise.costs.flops import model_flops
from slicewise.costs.shapes import model_shape
from slicewise.train import anomalies
from slicewise.train.metrics import MetricWriter, peak_flops_per_s
from slicewise.train.progress import Sink
from slicewise.train.step import TrainStep

PROGRESS_INTERVAL_S = 5.0  # between two signs of life where log_every makes records rare


class Meter:
    """Times steps, turns their results into records and events, and stops a run whose loss is no number.

    A result that is not ready is read one step late, when the next step is already under way, except before a
    save or an evaluation. Steps that are read together share the time equally.
    """

    def __init__(self, config: RunConfig, step: TrainStep, report: Sink, writer: MetricWriter | None):
        self.config, self.report, self.writer = config, report, writer
        self.tokens = config.data.global_batch_size * config.data.sequence_length
        shape = with_adapters(model_shape(step.spec), step.lora)
        flops = model_flops(shape, self.tokens, config.data.sequence_length)
        self.flops_per_device = flops / step.mesh.devices.size
        self.peak = peak_flops_per_s(step.mesh)
        self.pending: list[tuple[int, dict]] = []
        self.last_s = self.reported_s = time.perf_counter()

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

    def is_busy(self) -> bool:
        """Whether the devices still work on the last step that was begun."""
        return bool(self.pending) and not self.pending[-1][1]["loss"].is_ready()

    def rewind(self, step: int) -> None:
        """The steps after ``step`` are taken again."""
        self.pending.clear()
        if self.writer:
            self.writer.rewind(step)
        self.restart_clock()

    def restart_clock(self) -> None:
        """After a save or an evaluation, whose time is not the next step's."""
        self.last_s = time.perf_counter()

    def _record(self, number: int, values: dict[str, float], step_time_s: float) -> None:
        if (what := anomalies.not_finite(values)) and self.config.faults.on_bad_step == "stop":
            raise anomalies.stopped(anomalies.Bad(number, what))
        rate = self.flops_per_device / step_time_s
        values |= {
            "step_time_s": step_time_s,
            "tokens_per_s": self.tokens / step_time_s,
            "tflops_per_s_per_device": rate / 1e12,
            "mfu": rate / self.peak,
        }
        now_s = time.perf_counter()
        if number % self.config.metrics.log_every == 0 or number == self.config.run.steps:
            self.reported_s = now_s
            self.report({"event": "step", "step": number, "steps": self.config.run.steps, **values})
            if self.writer:
                self.writer.write(number, values)
        elif now_s - self.reported_s > PROGRESS_INTERVAL_S:
            self.reported_s = now_s
            self.report({"event": "progress", "step": number})
