"""A job under Slurm: one batch job over the nodes of all slices, one agent a node.

The batch script starts the gang again in the same allocation after a failure, and has Slurm requeue the job where the
allocation itself is at its end; Slurm requeues by itself when it loses a node or preempts the job.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slicewise.errors import ExitCode, UserError
from slicewise.launch.job_folder import JobSpec

COMMAND_TIMEOUT_S = 60
FIRST_PORT, PORTS = 61440, 4096  # of JAX's coordinator, by job id, as JAX itself chooses under Slurm
TASK_WAIT_S = 120  # for the other tasks of a gang after the first has ended
# states of "scontrol show job" (man squeue, JOB STATE CODES) that are an end
ENDS = {
    "COMPLETED": "completed",
    "FAILED": "failed",
    "TIMEOUT": "failed",
    "OUT_OF_MEMORY": "failed",
    "BOOT_FAIL": "failed",
    "DEADLINE": "failed",
    "NODE_FAIL": "failed",
    "CANCELLED": "failed",
}


@dataclass(frozen=True)
class Allocation:
    """``options`` go to sbatch as they are: ("partition=tpu", "time=12:00:00")."""

    options: tuple[str, ...] = ()
    python: str = "python3"

    def __post_init__(self) -> None:
        """Raises UserError for an option that is malformed, or that the script decides."""
        for option in self.options:
            name = option.partition("=")[0]
            if not re.fullmatch(r"[a-z][a-z-]*(=[^\n]*)?", option):
                raise UserError(f"--sbatch {option!r}: expected an option of sbatch, such as partition=tpu.")
            if name in _DECIDED:
                raise UserError(f"--sbatch {option}: {name} is decided by the job; leave it out.")


_DECIDED = {"job-name", "nodes", "ntasks", "ntasks-per-node", "requeue", "no-requeue", "open-mode", "output"}
_DECIDED |= {"error", "signal", "wrap"}
# what the commands say (slurm_errno.c, fetch_config.c and the munge plugin) where no controller can be asked
_UNREACHABLE = (
    "Unable to contact slurm controller",
    "Could not establish a configuration source",
    "Socket timed out on send/recv operation",
    "Zero Bytes were transmitted or received",
    "Munge encode failed",
)


def script(spec: JobSpec, root: str, allocation: Allocation, log: str) -> str:
    """The batch script. ``log``: where Slurm writes its output, a path that all nodes see."""
    agent = _command([allocation.python, "-m", "slicewise.launch.agent", "--on", "slurm"], root, spec)
    grace_s = int(spec.watch.stop_grace_s)
    options = [
        f"job-name={spec.name}",
        f"nodes={spec.workers}",
        f"ntasks={spec.workers}",
        "ntasks-per-node=1",
        "requeue",
        "open-mode=append",
        f"signal=TERM@{grace_s + 30}",
        f"output={log}",
        *allocation.options,
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in options), "set -u"]
    lines += [
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "# names of nodes need not resolve, so their addresses are taken",
        "address=$(scontrol show node --oneliner \"$first\" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')",
        f'export SLICEWISE_COORDINATOR="${{address:-$first}}:$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"',
        "for try in $(seq 0 999); do",
        "  export SLICEWISE_RESTART=$((${SLURM_RESTART_COUNT:-0} * 1000 + try))",
        f"  srun --kill-on-bad-exit=0 --wait={TASK_WAIT_S} {agent}",
        f"  read -r what code < <({agent} --conclude)",
        '  case "$what" in',
        '    again) sleep "$code" ;;',
        '    requeue) scontrol requeue "$SLURM_JOB_ID" && sleep 60; exit 1 ;;',
        '    end) exit "$code" ;;',
        "    *) exit 1 ;;",
        "  esac",
        "done",
    ]
    return "\n".join(lines) + "\n"


def _command(words: Sequence[str], root: str, spec: JobSpec) -> str:
    return " ".join(map(shlex.quote, [*words, "--job", root, "--submission", spec.submission]))


def submit(text: str) -> str:
    """Hands the script to sbatch; the job's id. Raises UserError with what Slurm said."""
    found = _run(["sbatch", "--parsable"], text)
    identifier = found.strip().partition(";")[0]
    if not identifier.isdecimal():
        raise UserError(
            f"sbatch answered {found.strip()[:200]!r} instead of a job id.", code=ExitCode.INTERNAL
        )
    return identifier


def state(platform: Mapping[str, Any]) -> str:
    """completed, failed, gone (Slurm forgets what has ended), or Slurm's own state in lower case."""
    try:
        shown = _run(["scontrol", "show", "job", "--oneliner", _id(platform)])
    except UserError as error:
        if "Invalid job id" in str(error):
            return "gone"
        raise
    match = re.search(r"\bJobState=(\w+)", shown)
    restarts = re.search(r"\bRestarts=(\d+)", shown)
    word = match[1] if match else "UNKNOWN"
    text = ENDS.get(word, word.lower())
    return f"{text} after {restarts[1]} requeues" if restarts and restarts[1] != "0" else text


def cancel(platform: Mapping[str, Any]) -> None:
    """SIGTERM, and what Slurm's KillWait allows for saving."""
    _run(["scancel", _id(platform)])


def _id(platform: Mapping[str, Any]) -> str:
    identifier = str(platform.get("id", ""))
    assert identifier.isdecimal(), identifier
    return identifier


def _run(command: Sequence[str], text: str = "") -> str:
    if shutil.which(command[0]) is None:
        raise UserError(
            f"{command[0]} is not installed here: submit from a machine that has Slurm's commands.",
            code=ExitCode.INTERNAL,
        )
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{command[0]} did not answer within {COMMAND_TIMEOUT_S} s: is the controller running?",
            code=ExitCode.UNAVAILABLE,
        ) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().removeprefix(f"{command[0]}: ")
        shown = f"{command[0]}: {' '.join(said.split())[:300]}"
        if any(words in said for words in _UNREACHABLE):
            raise UserError(
                f"{shown}\nSlurm's controller does not answer this machine: try again once it does.",
                code=ExitCode.UNAVAILABLE,
            )
        raise UserError(shown)
    return done.stdout
