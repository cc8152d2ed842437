"""Waiting for a queued resource: every change of state is reported, and an end that is none says why."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from slicewise.errors import ExitCode, UserError
from slicewise.launch.queued_resources.calls import Client, get, nodes

POLL_S, EMULATOR_POLL_S = 5.0, 0.05
DEAD = ("FAILED", "SUSPENDING", "SUSPENDED")


@dataclass(frozen=True)
class Progress:
    """``state`` since ``in_state_s``, ``elapsed_s`` after the wait began."""

    name: str
    state: str
    in_state_s: float
    elapsed_s: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.state} for {seconds(self.in_state_s)}, waiting for {seconds(self.elapsed_s)}"
        )


def seconds(value_s: float) -> str:
    """1 h 02 min, 3 min 05 s or 4 s."""
    whole = int(value_s)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def wait(
    client: Client,
    name: str,
    *,
    until: str = "ACTIVE",
    timeout_s: float | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Any:
    """Returns the queued resource in the state ``until``; ``report`` is called at every look.

    Raises UserError: NO_SLICES with the API's reason where it FAILED or was SUSPENDED, TIMEOUT after
    ``timeout_s``, NOT_FOUND where it was deleted meanwhile.
    """
    started_s = changed_s = time.monotonic()
    last = ""
    while True:
        qr = get(client, name)
        state, now_s = qr.state.state.name, time.monotonic()
        if state != last:
            last, changed_s = state, now_s
        report(Progress(name, state, now_s - changed_s, now_s - started_s))
        if state == until:
            return qr
        if state in ("FAILED", "SUSPENDED") or (state == "DELETING" and until != "DELETING"):
            raise UserError(advice(qr) or f"{name} is DELETING.", code=ExitCode.NO_SLICES)
        if timeout_s is not None and now_s - started_s >= timeout_s:
            raise UserError(
                f"{name} is still {state} after {seconds(now_s - started_s)}. It stays in the queue: 'slicewise qr"
                f" wait {name}' goes on waiting, 'slicewise qr delete {name} --force' gives it up.",
                code=ExitCode.TIMEOUT,
            )
        time.sleep(_poll_s(client))


def wait_until_ready(
    client: Client,
    name: str,
    *,
    timeout_s: float | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> list[Any]:
    """Returns the nodes once it is ACTIVE and every one of its slices READY, which takes longer than ACTIVE
    after a reset or while slices are replaced. Raises as `wait` does."""
    started_s = changed_s = time.monotonic()
    last = ""

    def before(progress: Progress) -> None:
        if progress.state != "ACTIVE":  # of which more is said below
            report(replace(progress, elapsed_s=time.monotonic() - started_s))

    while True:
        left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - started_s))
        qr = wait(client, name, timeout_s=left_s, report=before)
        found = nodes(client, name)
        now_s = time.monotonic()
        waited_s = now_s - started_s
        if len(found) == len(qr.tpu.node_spec) and all(node.state.name == "READY" for node in found):
            report(Progress(name, "ACTIVE", 0.0, waited_s))
            return found
        if (state := f"ACTIVE, {_unready(found)}") != last:
            last, changed_s = state, now_s
        report(Progress(name, state, now_s - changed_s, waited_s))
        if timeout_s is not None and waited_s >= timeout_s:
            raise UserError(
                f"{name} is ACTIVE but after {seconds(waited_s)} {_unready(found)}: 'slicewise qr describe"
                f" {name}' shows which.",
                code=ExitCode.TIMEOUT,
            )
        time.sleep(_poll_s(client))


def _unready(found: list[Any]) -> str:
    others = [node.state.name for node in found if node.state.name != "READY"]
    return f"{len(others)} of {len(found)} slices {', '.join(sorted(set(others)))}"


def wait_until_gone(
    client: Client,
    name: str,
    *,
    timeout_s: float | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Returns once it has been deleted. Raises UserError, TIMEOUT after ``timeout_s``."""
    started_s = time.monotonic()
    while True:
        try:
            state = get(client, name).state.state.name
        except UserError as error:
            if error.code == ExitCode.NOT_FOUND:
                return
            raise
        waited_s = time.monotonic() - started_s
        report(Progress(name, state, waited_s, waited_s))
        if timeout_s is not None and waited_s >= timeout_s:
            raise UserError(f"{name} is still {state} after {seconds(waited_s)}.", code=ExitCode.TIMEOUT)
        time.sleep(_poll_s(client))


def _poll_s(client: Client) -> float:
    return EMULATOR_POLL_S if client.target.endpoint else POLL_S


def advice(qr: Any) -> str | None:
    """For a queued resource that will get no slices: why, in the API's words, and what to do; else None."""
    name, state = qr.name.rsplit("/", 1)[1], qr.state.state.name
    again = f"'slicewise qr delete {name}', then create it again; until then it counts against the quota."
    if state == "FAILED":
        error = qr.state.failed_data.error
        reason = error.message or "the API gives no reason"
        return f"{name} FAILED: {reason}\nMend that and {again}"
    if state in ("SUSPENDING", "SUSPENDED"):
        by = qr.state.state_initiator.name
        who = {
            "SERVICE": "by the service: its slices were preempted or taken for maintenance",
            "USER": "by a user: a slice of it was stopped or deleted",
        }.get(by, "and the API does not say by whom")
        return f"{name} is {state} {who}. It gets no slices any more.\n{again[0].upper()}{again[1:]}"
    return None
