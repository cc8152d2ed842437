"""An emulated cluster on this machine: one process a host, CPU devices in each, slices by process id.

Every process runs the same command; how it finds its peers comes from the environment (child_environment).
"""

import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from slicewise.errors import ExitCode, UserError
from slicewise.launch import elastic
from slicewise.launch.attempt import FAILURE_GRACE_S, STOP_GRACE_S, Attempt, Supervision
from slicewise.launch.environment import without_cluster
from slicewise.launch.job_folder import Claim, Ending, JobFolder, JobSpec
from slicewise.launch.policy import Fault, Watch, fault_of
from slicewise.launch.processes import Command, Gang
from slicewise.launch.watchdog import Watchdog
from slicewise.launch.worker_files import WorkerFiles
from slicewise.train.elastic import ALL_SLICES
from slicewise.train.goodput_log import LaunchLog
from slicewise.train.progress import ProgressDisplay
from slicewise.train.sole import sole

MAX_PROCESSES = 64
MAX_DEVICES = 1024  # of all processes; each is a few threads and its own copy of replicated arrays

# XLA's default gives up after 40 s within a process; on a loaded machine one rank may compile that much later
# than another, and a rank that waits for a dead one is ended by us long before
COLLECTIVE_TIMEOUT_S = 300
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_TIMEOUT_FLAGS = (
    "--xla_cpu_collective_timeout_seconds",
    "--xla_cpu_collective_call_terminate_timeout_seconds",
)

# Of the pool in which XLA runs a CPU device (its size is $NPROC). A collective holds a thread until its peers come,
# collectives of different groups of devices run in any order, and a pool full of waiting ones never moves again.
THREADS_PER_DEVICE = 8


@dataclass(frozen=True)
class ClusterShape:
    slices: int
    hosts_per_slice: int
    devices_per_host: int

    @property
    def processes(self) -> int:
        return self.slices * self.hosts_per_slice

    def place(self, process_id: int) -> tuple[int, int]:
        """Slice and host of a process: id = slice * hosts_per_slice + host."""
        return divmod(process_id, self.hosts_per_slice)


def parse_shape(text: str) -> ClusterShape:
    """``"2x2x4"``: slices, hosts a slice, devices a host. Raises UserError."""
    match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})x([0-9]{1,6})", text.strip())
    shape = ClusterShape(*map(int, match.groups())) if match else None
    if shape is None or min(shape.slices, shape.hosts_per_slice, shape.devices_per_host) < 1:
        raise UserError(
            f"--local {text!r} is not a cluster: expected SLICESxHOSTSxDEVICES, each at least 1, "
            "such as 2x2x4 for 2 slices of 2 hosts with 4 devices each."
        )
    devices = shape.processes * shape.devices_per_host
    if shape.processes > MAX_PROCESSES or devices > MAX_DEVICES:
        raise UserError(
            f"--local {text} is {shape.processes} processes with {devices} devices in all; one machine "
            f"emulates at most {MAX_PROCESSES} and {MAX_DEVICES}. Use a smaller shape."
        )
    return shape


def child_environment(
    base: Mapping[str, str], shape: ClusterShape, process_id: int, coordinator_port: int
) -> dict[str, str]:
    """Environment of one process: ``base`` without traces of other clusters, and its place in this one.

    Raises UserError when XLA_FLAGS names a file.
    """
    return {
        **without_cluster(base),
        "SLICEWISE_COORDINATOR": f"127.0.0.1:{coordinator_port}",
        "SLICEWISE_PROCESS_ID": str(process_id),
        "SLICEWISE_NUM_PROCESSES": str(shape.processes),
        "SLICEWISE_NUM_SLICES": str(shape.slices),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(base.get("XLA_FLAGS", ""), shape.devices_per_host),
        "NPROC": str(max(os.cpu_count() or 1, THREADS_PER_DEVICE * shape.devices_per_host)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def xla_flags(given: str, devices: int) -> str:
    """``given`` with the device count replaced, and collective timeouts added where it sets none."""
    if given.strip() and not given.strip().startswith("--"):
        raise UserError(
            f"XLA_FLAGS={given!r} names a file of flags, to which --local cannot add its own. "
            "Put the flags themselves into XLA_FLAGS."
        )
    kept = re.sub(rf"(?:^|(?<=\s)){_DEVICE_COUNT_FLAG}(?:=\S*)?(?=\s|$)", "", given).split()
    set_already = {flag.partition("=")[0] for flag in kept}
    timeouts = [f"{flag}={COLLECTIVE_TIMEOUT_S}" for flag in _TIMEOUT_FLAGS if flag not in set_already]
    return " ".join([*kept, *timeouts, f"{_DEVICE_COUNT_FLAG}={devices}"])


def run_local(
    command: Sequence[str],
    shape: ClusterShape,
    *,
    log_directory: Path | None,
    console: Console,
    run_directory: Path | None = None,
    failure_grace_s: float = FAILURE_GRACE_S,
    stop_grace_s: float = STOP_GRACE_S,
    watch: Watch | None = None,
) -> int:
    """Run ``python *command`` as every host of an emulated cluster; the exit code for this process.

    The first failure decides: its code where that is one of ExitCode, else INTERNAL (signals, aborts).
    Asked to stop before that (SIGINT, SIGTERM, SIGHUP), the processes get SIGTERM and ``stop_grace_s``;
    the code is then PREEMPTED if all ended by themselves and one said so or had not begun, DONE if all had
    finished, else 128 + the signal: steps may be lost. With ``watch``, a process that makes no progress for so long has
    failed, and all leave their stacks in their output. When this process dies, even by SIGKILL, so do all of them.

    ``log_directory`` gets slice0-host1.log and so on, with the raw output of each process; ``run_directory``
    the times of starts and ends, and is held meanwhile: two runs in it exclude each other.
    Raises UserError when the processes or their logs cannot be started, or another run holds the directory.
    """
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(sole(run_directory)) if run_directory else {}
        logs = _logs(log_directory, shape)
        log = LaunchLog(run_directory)
        commands = _commands(command, shape, {**os.environ, **held, **log.begin()}, logs)
        attempt = _run(
            commands,
            console,
            log,
            failure_grace_s=failure_grace_s,
            stop_grace_s=stop_grace_s,
            watchdog=Watchdog(watch, shape.processes) if watch else None,
        )
        code = attempt.exit_code()
        log.stamp("done" if code == ExitCode.DONE else "wait")
    return code


def _logs(log_directory: Path | None, shape: ClusterShape) -> list[Path | None]:
    """A file for each process; makes the directory."""
    if log_directory is not None:
        try:
            log_directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot create the log directory {log_directory}: {error.strerror}.", code=ExitCode.INTERNAL
            ) from error
    return [
        log_directory / f"slice{slice_id}-host{host}.log" if log_directory else None
        for slice_id, host in map(shape.place, range(shape.processes))
    ]


def run_attempt(job: JobFolder, spec: JobSpec, claim: Claim, console: Console) -> Ending | None:
    """One attempt of a job, as an emulated cluster under the eyes of a supervisor. None: another took over."""
    slices = elastic.wait_for_slices(job, spec, claim, lambda text: console.print(text, markup=False))
    if slices is None:
        return _ended_waiting(job, claim)
    shape = ClusterShape(len(slices), spec.hosts_per_slice, spec.cpu_devices)
    supervision, log = elastic.Watched(job, spec, claim, slices), LaunchLog(job.run_directory)
    places = [
        spec.place(n * spec.hosts_per_slice + host) for n in slices for host in range(spec.hosts_per_slice)
    ]
    with WorkerFiles(job, spec, claim.attempt) as files:
        logs = [files.log(place) for place in places]
        base = {**job.environment, **os.environ, **spec.environment, "SLICEWISE_ATTEMPT": str(claim.attempt)}
        base |= log.begin()
        base |= files.python_path(base.get("PYTHONPATH", ""))
        base |= {ALL_SLICES: str(spec.slices)}
        commands = _commands(files.command, shape, base, logs, files.directory, slices)
        attempt = _run(
            commands,
            console,
            log,
            failure_grace_s=spec.watch.failure_grace_s,
            stop_grace_s=spec.watch.stop_grace_s,
            watchdog=Watchdog(spec.watch, shape.processes),
            supervision=supervision,
        )
    if attempt.abandoned:
        return None
    log.stamp("done" if attempt.exit_code() == ExitCode.DONE else "wait" if supervision.lost else "delay")
    return _ending(attempt, supervision, claim)


def _ending(attempt: Attempt, supervision: elastic.Watched, claim: Claim) -> Ending:
    code = attempt.exit_code()
    stopped = attempt.asked is not None and code != ExitCode.DONE
    if supervision.lost and code not in (ExitCode.DONE, ExitCode.USER):
        fault, code, why = Fault.PREEMPTION, ExitCode.PREEMPTED, f"{elastic.several(supervision.lost)} lost"
    elif stopped and supervision.grows and not attempt.signals:
        fault, code, why = Fault.RESTART, ExitCode.RESTART, "lost slices are back"
    elif attempt.asked and stopped:
        fault, why = Fault.CANCELLED, f"asked to stop by {attempt.asked.name}"
    else:
        fault, why = fault_of(code), attempt.why()
    return Ending(fault, code, why, claim.attempt, claim.submission)


def _ended_waiting(job: JobFolder, claim: Claim) -> Ending | None:
    """No attempt was made: the job is cancelled, or another supervisor has it."""
    if not job.is_current(claim):
        return None
    code = 128 + signal.SIGTERM
    return Ending(
        Fault.CANCELLED, code, "cancelled while it waited for slices", claim.attempt, claim.submission
    )


def _run(
    commands: Sequence[Command],
    console: Console,
    log: LaunchLog,
    *,
    failure_grace_s: float,
    stop_grace_s: float,
    watchdog: Watchdog | None = None,
    supervision: Supervision | None = None,
) -> Attempt:
    with Gang() as gang:
        gang.start(commands)
        with ProgressDisplay(console) as display:
            attempt = Attempt(
                gang,
                display,
                failure_grace_s,
                stop_grace_s,
                watchdog,
                supervision,
                on_failure=lambda: log.stamp("stop"),
            )
            attempt.watch()
    attempt.print_cause()
    return attempt


def _commands(
    command: Sequence[str],
    shape: ClusterShape,
    base: Mapping[str, str],
    logs: Sequence[Path | None],
    directory: Path | None = None,
    slices: Sequence[int] | None = None,
) -> list[Command]:
    """``slices``: what the slices of the shape are called; by default their number in it."""
    port = _free_port()
    commands = []
    for process_id, log_path in enumerate(logs):
        slice_id, host = shape.place(process_id)
        slice_id = slices[slice_id] if slices else slice_id
        environment = child_environment(base, shape, process_id, port)
        environment["SLICEWISE_PLACE"] = f"s{slice_id}h{host}"
        name, prefix = f"slice {slice_id} host {host}", f"s{slice_id}h{host} | "
        arguments = [sys.executable, *command]
        commands.append(Command(name, prefix, arguments, environment, log_path, directory))
    return commands


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
