"""What follows from the end of an attempt: start the whole gang again, or stop. Arithmetic on exit codes.

Two budgets: what the job itself did wrong is worth few tries, what the platform did to it many. Which of the two
an end was is read off exit codes and the state of workers, never off the text of an error.
"""

from dataclasses import dataclass
from enum import StrEnum

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from slicewise.config import Part
from slicewise.errors import ExitCode

MAX_DELAY_S = 60.0  # between two tries after failures


class Fault(StrEnum):
    """Why an attempt ended."""

    NONE = "done"
    USER = "user error"
    FAILURE = "failure"  # of the program or of what it found: an exception, an abort, no progress
    RESTART = "restart asked for"
    PREEMPTION = "preemption"  # the platform took, replaced or restarted a worker
    CANCELLED = "cancelled"


class Budgets(Part):
    """How often a job is started again."""

    failures: NonNegativeInt = 3
    """After failures."""
    preemptions: NonNegativeInt = 100
    """After preemptions, and restarts that a trainer asked for."""


class Watch(Part):
    """How long a trainer may make no progress, and how long it has to stop."""

    start_timeout_s: PositiveFloat = 1800.0
    """Until the first step: waiting for peers, restoring, compiling."""
    stall_timeout_s: PositiveFloat = 600.0
    """From any sign of progress to the next."""
    stop_grace_s: PositiveFloat = 60.0
    """From a request to stop until a trainer is killed."""
    replacement_wait_s: NonNegativeFloat = 300.0
    """From the loss of a slice until an elastic job goes on without it."""
    failure_grace_s: PositiveFloat = 3.0
    """From a failure until the others of its gang are killed: most can only hang or abort."""


@dataclass(frozen=True)
class Tally:
    """What has been used of the budgets."""

    failures: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Restart:
    tally: Tally
    delay_s: float


@dataclass(frozen=True)
class Stop:
    code: int  # of the job
    why: str  # empty when it is done


def fault_of(code: int) -> Fault:
    """What an exit code says by itself; negative ones are signals."""
    match code:
        case ExitCode.DONE:
            return Fault.NONE
        case ExitCode.USER:
            return Fault.USER
        case ExitCode.RESTART:
            return Fault.RESTART
        case ExitCode.PREEMPTED:
            return Fault.PREEMPTION
        case _:
            return Fault.FAILURE


def decide(fault: Fault, code: int, tally: Tally, budgets: Budgets) -> Restart | Stop:
    """What follows from an attempt that ended with ``fault`` and exit code ``code``.

    Tries after failures wait 1, 2, 4, ... s, up to a minute; the others begin at once.
    """
    match fault:
        case Fault.NONE:
            return Stop(ExitCode.DONE, "")
        case Fault.USER:
            return Stop(ExitCode.USER, "the same input would fail again")
        case Fault.CANCELLED:
            return Stop(code, "")
        case Fault.FAILURE:
            if tally.failures >= budgets.failures:
                return Stop(_failed(code), _used(budgets.failures, "failure", "--max-failures"))
            delay_s = min(MAX_DELAY_S, 2.0 ** min(tally.failures, 10))
            return Restart(Tally(tally.failures + 1, tally.preemptions), delay_s)
        case Fault.RESTART | Fault.PREEMPTION:
            if tally.preemptions >= budgets.preemptions:
                why = _used(budgets.preemptions, "preemption", "--max-preemptions")
                return Stop(ExitCode.PREEMPTED, why)
            return Restart(Tally(tally.failures, tally.preemptions + 1), 0.0)


def _failed(code: int) -> int:
    return code if code in list(ExitCode) and code != ExitCode.DONE else ExitCode.INTERNAL


def _used(budget: int, what: str, option: str) -> str:
    if budget == 0:
        return f"{option} is 0"
    return f"{budget} restarts after a {what} are used up ({option})"
