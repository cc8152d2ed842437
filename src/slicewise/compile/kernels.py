"""Kernels by themselves, compiled to machine code without a TPU: do their tiles fit VMEM, and how long do they take.

A kernel is compiled at a few tiles' size, since what runs for one tile does not depend on how many there are. The time
of a call is that of its grid: for each tile the slowest of its bundles, its products and its bytes, and a start.
"""

import contextlib
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slicewise.catalog import chips
from slicewise.compile import bundles
from slicewise.compile.compiler import COMPILER_NAMES, SETTINGS, CompileFailed
from slicewise.compile.cost import attention_rates, rates
from slicewise.costs.device import Device, device_of
from slicewise.errors import ExitCode, UserError
from slicewise.kernels.tuned import Key
from slicewise.temporary import temporary_folder

CALLS = {
    ("splash", "forward"): "splash_mha_fwd",
    ("splash", "backward"): "splash_mha_dkv",
    ("gmm", ""): "ragged_dot_gmm",
    ("gmm_t", ""): "ragged_dot_gmm",
    ("tgmm", ""): "ragged_dot_tgmm",
}
# The smallest slice of a chip that the compiler has.
ONE_CHIP = {"v5e": "1x1", "v6e": "1x1"}
LISTING = "final_bundles"
EXCEEDS = "exceeds VMEM"
ENDING_S = 5.0  # that a process which closed its output may take to end
FATAL = re.compile(r"F\d{4} ")  # a line of the compiler's log that it ends with


@dataclass(frozen=True)
class Compiled:
    """The regions of a kernel, or why it does not compile."""

    regions: bundles.Region | None
    problem: str = ""


class KernelCompiler:
    """One process that compiles kernels for one chip, one after the other; a context manager.

    Raises UserError where the chip has no compiler here.
    """

    def __init__(self, chip: str):
        if chip not in COMPILER_NAMES:
            raise UserError(
                f"no compiler here makes programs for {chip}; choose one of {', '.join(COMPILER_NAMES)}."
            )
        self.topology = f"{COMPILER_NAMES[chip]}:{ONE_CHIP.get(chip, '2x2x1')}"
        self._stack = contextlib.ExitStack()
        self.folder = self._stack.enter_context(temporary_folder("slicewise-kernels-"))
        self.process: subprocess.Popen[bytes] | None = None
        self._compiled: dict[str, Compiled] = {}  # by what was asked

    def __enter__(self) -> "KernelCompiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._stack.close()

    def compile(
        self,
        key: Key,
        values: Mapping[str, int],
        part: str,
        *,
        max_logit: float | None = None,
        timeout_s: float = 600.0,
    ) -> Compiled:
        """``key`` at a few tiles' size, once for all keys that are the same at that size.

        Raises CompileFailed where the compiler crashes, is killed or takes too long, which says nothing of ``values``.
        """
        request = {
            "key": small(key, values).model_dump(),
            "values": dict(values),
            "part": part,
            "max_logit": max_logit,
        }
        said = json.dumps(request, sort_keys=True)
        if said not in self._compiled:
            self._compiled[said] = self._compile(request, CALLS[key.kernel, part], timeout_s)
        return self._compiled[said]

    def _compile(self, request: Mapping[str, Any], call: str, timeout_s: float) -> Compiled:
        if self.process is not None and self.process.poll() is not None:
            self._stop()  # it was killed while it had nothing to do
        process = self.process or self._start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what became of it, its answer says
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        try:
            answer = self._answer(process, timeout_s)
            if answer["error"]:
                return Compiled(None, _said(answer["error"]))
            return Compiled(self._regions(call))
        finally:
            for path in self._dump.iterdir():
                path.unlink()

    @property
    def _dump(self) -> Path:
        return self.folder / "dump"

    def _start(self) -> "subprocess.Popen[bytes]":
        self._dump.mkdir(exist_ok=True)
        flags = f"--xla_jf_dump_to={self._dump} --xla_jf_dump_llo_pass_label_regex={LISTING}"
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slicewise.compile.kernel_child", self.topology],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | SETTINGS | {"LIBTPU_INIT_ARGS": flags},
                start_new_session=True,
            )
        return self.process

    def _answer(self, process: "subprocess.Popen[bytes]", timeout_s: float) -> dict[str, str]:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        line = process.stdout.readline() if ready else b""
        if line.endswith(b"\n"):
            return json.loads(line)
        if ready:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)  # before _stop ends it in a way of its own
        self._stop()
        if not ready:
            raise CompileFailed(
                f"a kernel took longer than {timeout_s:.0f} s to compile.", code=ExitCode.INTERNAL
            )
        log = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        raise CompileFailed(
            f"the compiler crashed on a kernel ({_ending(process.returncode, log)}).", code=ExitCode.INTERNAL
        )

    def _stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of a request that nobody reads
                    pipe.close()
        process.wait()

    def _regions(self, call: str) -> bundles.Region:
        deadline_s = time.monotonic() + 1.0  # the listing is written by another thread of the compiler
        while True:
            listings = [
                p for p in self._dump.glob(f"*{call}*{LISTING}.txt") if "schedule-analysis" not in p.name
            ]
            if listings or time.monotonic() > deadline_s:
                break
            time.sleep(0.05)
        if not listings:
            raise CompileFailed(f"the compiler left no listing of {call}.", code=ExitCode.INTERNAL)
        largest = max(listings, key=lambda p: p.stat().st_size)
        return bundles.parse(largest.read_text(errors="replace"))


def _ending(code: int, log: list[str]) -> str:
    """By which signal, and what the compiler said that it died of; of a program that ended by itself the last line.

    Other lines of a log, harmless ones, say nothing of a signal that came from without.
    """
    if code >= 0:
        return f"exit code {code}: {log[-1] if log else 'it printed nothing'}"
    fatal = next((line for line in log if FATAL.match(line)), "")
    name = signal.Signals(-code).name
    memory = ", as where the machine has no memory left" if name == "SIGKILL" else ""
    return f"{name}{memory}{fatal and ': '}{fatal}"


def _said(error: str) -> str:
    """The compiler's sentence, with what matters first."""
    if "vmem" in error.lower():
        return f"{EXCEEDS}: {error}"
    return error


def small(key: Key, values: Mapping[str, int]) -> Key:
    """``key`` at the size of a few tiles: every kind of tile is there once."""
    shape = dict(key.shape)
    if key.kernel == "splash":
        largest = max(values[name] for name in ("q", "kv", "q_backward", "kv_backward"))
        tokens = 2 * largest
        fits = all(tokens % values[name] == 0 for name in ("q", "kv", "q_backward", "kv_backward"))
        shape["tokens"] = min(shape["tokens"], tokens) if fits else shape["tokens"]
        shape["window"] = min(shape["window"], shape["tokens"])
    else:
        shape["rows"], shape["groups"] = min(shape["rows"], 4 * values["rows"]), 2
        for name in ("summed", "columns"):
            if shape[name] % values[name] == 0:  # else a last tile stands over, which has code of its own
                shape[name] = min(shape[name], 2 * values[name])
    return key.model_copy(update={"shape": shape})


def call_seconds(key: Key, values: Mapping[str, int], part: str, regions: bundles.Region) -> float:
    """Of one call on one device of the chip: attention of one head of one sequence, or a grouped product."""
    device = device_of(chips.load(key.chip))
    if key.kernel == "splash":
        return _splash_s(key, values, part, regions, device)
    return _grouped_s(key, values, regions, device)


def least_seconds(key: Key, values: Mapping[str, int], part: str) -> float:
    """Below what call_seconds can say, without compiling: by products, bytes and starts of steps alone."""
    nothing = bundles.Region(0, ())
    return call_seconds(key, values, part, bundles.Region(0, (nothing, nothing)))


def _splash_s(
    key: Key, values: Mapping[str, int], part: str, regions: bundles.Region, device: Device
) -> float:
    """Blocks that are wholly seen and those that a mask crosses have code of their own; the rest runs once for each
    row of blocks."""
    suffix = "" if part == "forward" else "_backward"
    q, kv = values[f"q{suffix}"], values[f"kv{suffix}"]
    whole, crossed = blocks(key.shape["tokens"], q, kv, key.shape["window"])
    clear, masked = sorted(sorted(r.bundles for r in regions.branches)[-2:])
    around = max(0, regions.bundles - clear - masked)
    rows = math.ceil(key.shape["tokens"] / (q if part == "forward" else kv))
    clock_hz = rates()[device.name].clock_hz
    qk, v = (128 * math.ceil(key.shape[name] / 128) for name in ("qk", "v"))
    width = 2 * (qk + v) if part == "forward" else 2 * (3 * qk + 2 * v)
    product_s = q * kv * width * device.cores / device.flops_per_s
    seconds = whole * max(clear / clock_hz, product_s) + crossed * max(masked / clock_hz, product_s)
    seconds += rows * around / clock_hz + (whole + crossed) * attention_rates().grid_step_s
    return seconds / device.cores


def blocks(tokens: int, q: int, kv: int, window: int) -> tuple[int, int]:
    """(wholly visible blocks, blocks that the edge of a causal mask or of its window crosses) of one head."""
    whole = crossed = 0
    for first_q in range(0, tokens, q):
        last_q = first_q + q - 1
        for first_kv in range(0, tokens, kv):
            last_kv = first_kv + kv - 1
            seen = first_kv <= last_q and (not window or last_kv > first_q - window)
            if not seen:
                continue
            all_seen = last_kv <= first_q and (not window or first_kv > last_q - window)
            whole, crossed = whole + all_seen, crossed + (not all_seen)
    return whole, crossed


def _grouped_s(key: Key, values: Mapping[str, int], regions: bundles.Region, device: Device) -> float:
    """Tiles along the rows, and one more for each border of groups that falls into a tile."""
    shape, tile = key.shape, values
    size = 1 if "8" in key.dtype else 2
    rows = math.ceil(shape["rows"] / tile["rows"]) + shape["groups"] - 1
    summed = math.ceil(shape["summed"] / tile["summed"])
    columns = math.ceil(shape["columns"] / tile["columns"])
    steps = rows * summed * columns
    largest = max((r.bundles for r in regions.branches), default=regions.bundles)
    around = max(0, regions.bundles - sum(sorted(r.bundles for r in regions.branches)[-2:]))
    flops = 2.0 * tile["rows"] * tile["summed"] * tile["columns"]
    precision = {"int8": "int8"}.get(key.dtype, "fp8" if size == 1 else "bf16")
    # Operands of a step; a matrix that is summed in one step stays while the rows of its group pass.
    fetched = 1.0 if summed > 1 else min(1.0, shape["groups"] / rows)
    moved = size * tile["summed"] * (tile["rows"] + tile["columns"] * fetched)
    if key.kernel == "tgmm":  # operands of a step are both by rows, and the result stays while rows pass
        moved = size * tile["rows"] * (tile["summed"] + tile["columns"])
        written = 4.0 * shape["groups"] * shape["summed"] * shape["columns"] / steps
    else:
        written = 2.0 * tile["rows"] * tile["columns"] / summed
    known, cores = rates()[device.name], device.cores
    step_s = max(
        largest / known.clock_hz,
        cores * flops / device.peak_flops_per_s(precision),
        cores * (moved + written) / (device.hbm_bytes_per_s * known.hbm_efficiency),
    )
    # What begins and ends a sum, and how many steps share it.
    shared = rows / shape["groups"] if key.kernel == "tgmm" else summed
    around_s = around / known.clock_hz / shared
    return steps * (step_s + around_s + attention_rates().grid_step_s) / cores
