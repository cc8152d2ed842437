"""What must hold of a run whatever happened to it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slicewise.checkpoint.manifest import complete_steps, read_manifest
from slicewise.errors import UserError
from slicewise.launch.attempt import DONE_GRACE_S
from slicewise.launch.policy import MAX_DELAY_S, Watch
from slicewise.launch.processes import KILL_WAIT_S
from slicewise.train.goodput import Account, Stamp

TIMES = {"step_time_s", "tokens_per_s", "tflops_per_s_per_device", "mfu"}  # of a record: they differ
SLACK_S = 10.0  # above a bound: the cores are shared with everything else


@dataclass(frozen=True)
class Result:
    """What a finished run came to: each record without its times, and the digest of every array of its state."""

    records: tuple[Mapping[str, Any], ...]
    leaves: Mapping[str, str]
    data_state: Any


def result(run: Path, steps: int) -> Result:
    """Raises UserError when there is no complete, undamaged checkpoint of step ``steps``, or no record."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_text().splitlines()
        records = tuple({k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    manifest = read_manifest(str(run / "checkpoints"), steps)
    leaves = {name: f"{leaf} {leaf.digest}" for name, leaf in manifest.leaves.items()}
    return Result(records, leaves, manifest.data_state.tolist())


def differences(run: Path, steps: int, expected: Result) -> list[str]:
    """Where a run that says it is done is not the undisturbed one, bit for bit."""
    try:
        ours = result(run, steps)
    except UserError as error:
        return [f"done, but {error}"]
    found = []
    if ours.records != expected.records:
        pairs = zip(ours.records, expected.records, strict=False)
        n = next(
            (k for k, (a, b) in enumerate(pairs) if a != b), min(len(ours.records), len(expected.records))
        )
        at = expected.records[n]["step"] if n < len(expected.records) else "the end"
        found.append(f"records differ from step {at} on ({len(ours.records)} of {len(expected.records)})")
    names = [name for name in expected.leaves if ours.leaves.get(name) != expected.leaves[name]]
    if names or ours.leaves.keys() != expected.leaves.keys():
        found.append(
            f"final state differs in {len(names)} arrays, the first {names[0] if names else 'extra'}"
        )
    if ours.data_state != expected.data_state:
        found.append("the place in the data differs")
    return found


def unsaved_restores(stamps: list[Stamp]) -> list[str]:
    """Starts that resumed from a step that no start had saved."""
    saved: set[int] = {0}
    finished = 0
    found = []
    for stamp in stamps:
        finished = finished if stamp.step is None else stamp.step
        if stamp.state == "save":
            saved.add(finished)
        if stamp.from_step is not None and stamp.from_step not in saved:
            found.append(f"resumed from step {stamp.from_step}, which was never saved")
    return found


def overlong(account: Account, watch: Watch) -> list[str]:
    """What lasted longer than its bound. Training itself has none."""
    bounds = {
        "detect": max(watch.stall_timeout_s, watch.start_timeout_s),
        "stop": watch.failure_grace_s + KILL_WAIT_S,
        "delay": MAX_DELAY_S,
        "finish": max(watch.stall_timeout_s, DONE_GRACE_S),
    }
    found = []
    for segment in account.segments:
        if segment.phase in ("step", "wait"):
            continue
        bound_s = bounds.get(segment.phase, watch.start_timeout_s) + SLACK_S
        if segment.duration_us > bound_s * 1e6:
            found.append(
                f"{segment.phase} took {segment.duration_us / 1e6:.1f} s, at most {bound_s:g} expected"
            )
    return found


def unfinished(run: Path) -> list[str]:
    """What interrupted saves left in a finished run."""
    folder = run / "checkpoints"
    steps = set(map(str, complete_steps(str(folder))))
    left = sorted(path.name for path in folder.iterdir() if path.name not in steps and "." in path.name)
    return [f"left in {folder.name}: {', '.join(left)}"] if left else []
