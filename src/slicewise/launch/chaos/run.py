"""One schedule: a supervised job in a folder of its own, under faults, and what was wrong with it afterwards."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slicewise.config import LoadedConfig, resolve_degrees
from slicewise.errors import ExitCode, UserError
from slicewise.launch import job
from slicewise.launch.attempt import DONE_GRACE_S
from slicewise.launch.chaos import check
from slicewise.launch.chaos.schedule import Schedule
from slicewise.launch.guardian import Guardian
from slicewise.launch.job_folder import JobFolder, JobSpec
from slicewise.launch.policy import Budgets, Watch
from slicewise.launch.processes import KILL_WAIT_S
from slicewise.launch.targets.local import ClusterShape
from slicewise.train.goodput import Account, account, read
from slicewise.train.injection import FAULTS, FIRED

MARK = "SLICEWISE_CHAOS"  # environment of every process of a schedule, by which those that are left are found
POLL_S = 0.02
HOLD_S = 1.0  # so long a stopped supervisor stays stopped: nothing watches over it, as over a frozen machine
LEAVE_S = 10.0  # for the processes of a job to go after their supervisor
COMMAND = ("-m", "slicewise", "train", "{config}")


@dataclass(frozen=True)
class Setup:
    """What all schedules share. ``folder``: where they run, a folder each."""

    loaded: LoadedConfig
    shape: ClusterShape
    folder: Path
    watch: Watch

    def run_directory(self, name: str) -> Path:
        return self.folder / name / self.loaded.config.run.run_name


@dataclass(frozen=True)
class Outcome:
    schedule: Schedule
    wall_s: float
    attempts: int
    fired: tuple[Mapping[str, Any], ...]
    violations: tuple[str, ...]
    account: Account | None
    folder: Path = field(repr=False, default=Path())


def prepare(loaded: LoadedConfig, shape: ClusterShape, watch: Watch) -> Setup:
    """Raises UserError for a config that cannot be judged, or whose layout does not fit the cluster."""
    config = loaded.config
    per_slice = shape.hosts_per_slice * shape.devices_per_host
    resolve_degrees(config, num_slices=shape.slices, devices_per_slice=per_slice)
    if "://" in config.directory:
        raise UserError(f"output_directory: chaos runs on this machine's disks, not in {config.directory}.")
    if not config.checkpoint.checkpoint_every:
        raise UserError(
            "checkpoint_every = 0: without checkpoints there is nothing to resume from; set it above 0."
        )
    if config.checkpoint.resume == "never":
        raise UserError("resume = never: a run under faults resumes; use resume=auto.")
    folder = Path(config.directory + "-chaos").absolute()
    return Setup(loaded, shape, folder, watch)


def undisturbed(setup: Setup) -> tuple[check.Result, float]:
    """What the run comes to without faults, and the seconds that takes. Raises UserError when it fails."""
    shutil.rmtree(setup.run_directory("undisturbed").parent, ignore_errors=True)
    outcome = start(setup, "undisturbed", Schedule(0, ()), starts=1)
    if outcome.violations:
        log = setup.folder / "undisturbed" / "supervisor.log"
        raise UserError(f"the run fails without any fault: {outcome.violations[0]}; see {log}.")
    return check.result(setup.run_directory("undisturbed"), setup.loaded.config.run.steps), outcome.wall_s


def disturbed(setup: Setup, schedule: Schedule, expected: check.Result, usual_s: float) -> Outcome:
    """The run under the faults of ``schedule``. Its folder is gone afterwards unless something was wrong."""
    name = f"seed-{schedule.seed}"
    shutil.rmtree(setup.folder / name, ignore_errors=True)
    faults = len(schedule.faults)
    waits_s = max(setup.watch.start_timeout_s, setup.watch.stall_timeout_s, DONE_GRACE_S)
    each_s = waits_s + setup.watch.failure_grace_s + KILL_WAIT_S + 2.0**faults
    limit_s = (faults + 1) * 3 * usual_s + faults * each_s
    outcome = start(setup, name, schedule, starts=faults + 1, limit_s=limit_s)
    run, steps = setup.run_directory(name), setup.loaded.config.run.steps
    found = list(outcome.violations)
    if not found:
        found += check.differences(run, steps, expected) + check.unfinished(run)
    with contextlib.suppress(UserError):
        found += check.unsaved_restores(read(run))
    if outcome.account:
        found += check.overlong(outcome.account, setup.watch)
    if not found:
        shutil.rmtree(setup.folder / name)
    return Outcome(
        schedule, outcome.wall_s, outcome.attempts, outcome.fired, tuple(found), outcome.account, run
    )


def _spec(setup: Setup, run: Path, watch: Watch) -> JobSpec:
    return JobSpec(
        name="chaos",
        submission=job.new_submission(),
        target="local",
        command=COMMAND,
        config=job.config_text(setup.loaded, str(run)),
        slices=setup.shape.slices,
        hosts_per_slice=setup.shape.hosts_per_slice,
        cpu_devices=setup.shape.devices_per_host,
        budgets=Budgets(failures=20, preemptions=20),
        watch=watch,
        working_directory=str(Path.cwd()),
    )


def start(
    setup: Setup, name: str, schedule: Schedule, *, starts: int, limit_s: float | None = None
) -> Outcome:
    """Starts the job in the folder ``name``, and again where its supervisor died or was asked to stop.

    What is wrong, apart from what the run came to, is among the violations of the outcome.
    """
    run, begun_s = setup.run_directory(name), time.monotonic()
    folder = JobFolder(job.folder_of(str(run)))
    watch = setup.watch if schedule.faults else Watch()  # it may have everything to compile
    folder.submit(_spec(setup, run, watch))
    token = secrets.token_hex(8)
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(setup.folder / "compiled"),
        **os.environ,
        MARK: token,
        FAULTS: json.dumps([fault.to_json() for fault in schedule.faults]),
    }
    violations: list[str] = []
    guardian = Guardian()
    try:
        with (setup.folder / name / "supervisor.log").open("ab") as log:
            for _ in range(starts):
                command = [sys.executable, "-m", "slicewise.launch.supervisor", folder.root]
                supervisor = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                                              stderr=log, process_group=guardian.group_id)  # fmt: skip
                left_s = None if limit_s is None else begun_s + limit_s - time.monotonic()
                code = _wait(supervisor, left_s)
                if code is None:
                    violations.append(f"not over after {limit_s:.0f} s")
                    break
                violations += _left(token)
                if code == ExitCode.DONE or violations:
                    break
                if code >= 0 and code not in (ExitCode.PREEMPTED, 128 + signal.SIGTERM):
                    why = (
                        ending.why
                        if (ending := folder.result(folder.spec().submission))
                        else "no reason given"
                    )
                    violations.append(f"ended with code {code}: {why}")
                    break
            else:
                violations.append(f"ended with code {code} after every fault had happened")
    finally:
        guardian.close(KILL_WAIT_S)
        _left(token)
    claim = folder.current()
    with contextlib.suppress(UserError):
        counted = account(read(run))
        return Outcome(schedule, time.monotonic() - begun_s, claim.attempt if claim else 0, _fired(run),
                       tuple(violations), counted)  # fmt: skip
    return Outcome(schedule, time.monotonic() - begun_s, 0, _fired(run), tuple(violations), None)


def _wait(supervisor: subprocess.Popen, left_s: float | None) -> int | None:
    """The exit code; None when it is not over after ``left_s``, and killed. One that is stopped is continued."""
    end_s = None if left_s is None else time.monotonic() + left_s
    stopped_s: float | None = None
    while (code := supervisor.poll()) is None:
        now_s = time.monotonic()
        if end_s is not None and now_s > end_s:
            supervisor.kill()
            supervisor.wait()
            return None
        is_stopped = _state(supervisor.pid) == "T"
        stopped_s = (stopped_s or now_s) if is_stopped else None
        if stopped_s is not None and now_s - stopped_s > HOLD_S:
            supervisor.send_signal(signal.SIGCONT)
        time.sleep(POLL_S)
    return code


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _left(token: str) -> list[str]:
    """The processes of a schedule that are there LEAVE_S after their supervisor; they are killed."""
    end_s = time.monotonic() + LEAVE_S
    while (left := _marked(token)) and time.monotonic() < end_s:
        time.sleep(POLL_S)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{len(left)} processes were left"] if left else []


def _marked(token: str) -> list[int]:
    mark = f"{MARK}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _fired(run: Path) -> tuple[Mapping[str, Any], ...]:
    with contextlib.suppress(OSError, ValueError):
        return tuple(map(json.loads, (run / FIRED).read_text().splitlines()))
    return ()
