"""What the leader of a gang makes of the reports of an attempt."""

from collections.abc import Mapping
from dataclasses import dataclass

from slicewise.errors import ExitCode
from slicewise.launch.policy import Fault, fault_of


@dataclass(frozen=True)
class Ended:
    """How the trainer of one worker ended."""

    code: int
    ended: float  # Unix time, by the clock of the worker
    message: str = ""
    asked: bool = False  # the platform asked it to stop
    stopped: bool = False  # the leader wanted it to stop: a consequence

    @staticmethod
    def from_json(document: Mapping[str, object]) -> "Ended":
        known = {key: document[key] for key in Ended.__dataclass_fields__ if key in document}
        return Ended(**{"code": ExitCode.INTERNAL, "ended": 0.0, **known})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Verdict:
    fault: Fault
    code: int
    why: str


def judge(ended: Mapping[str, Ended], lost: list[str]) -> Verdict:
    """Why the attempt ended. ``ended``: reports by place; ``lost``: places that did not report, or began anew.

    Wrong input is what it is, whatever else happened. Else a worker that the platform took decides: whatever the
    others report is a consequence. Else the first failure in time does.
    """
    own = {place: end for place, end in ended.items() if not end.stopped}
    first = sorted(own.items(), key=lambda item: item[1].ended)
    for place, end in first:
        if end.code == ExitCode.USER:
            return Verdict(Fault.USER, end.code, f"{place}: {end.message}")
    if lost:
        return Verdict(Fault.PREEMPTION, ExitCode.PREEMPTED, f"lost {_several(lost)}")
    asked = [place for place, end in first if end.asked and end.code != ExitCode.DONE]
    if asked:
        return Verdict(Fault.PREEMPTION, ExitCode.PREEMPTED, f"the platform stopped {_several(asked)}")
    for place, end in first:
        if end.code != ExitCode.DONE:
            return Verdict(fault_of(end.code), end.code, f"{place}: {end.message}")
    if any(end.stopped for end in ended.values()):
        return Verdict(Fault.FAILURE, ExitCode.INTERNAL, "some trainers did not end after others were done")
    return Verdict(Fault.NONE, ExitCode.DONE, "")


def _several(places: list[str], limit: int = 4) -> str:
    shown = ", ".join(sorted(places)[:limit])
    return shown + (f" and {len(places) - limit} more" if len(places) > limit else "")
