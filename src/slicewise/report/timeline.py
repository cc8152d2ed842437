"""The predicted timeline of a compiled step: tracks and nested slices, and as a Chrome trace that Perfetto opens."""

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slicewise.compile.places import origin
from slicewise.compile.schedule import COPY, CORE, DCN, FROM_HOST, SHARED, SPARSECORE, TO_HOST, Span
from slicewise.errors import UserError, cannot_write, write_whole
from slicewise.report import xplane

if TYPE_CHECKING:
    from slicewise.compile.analysis import CompiledStep

# Names that xprof gives to the lines of a TPU, as far as it has them.
STEPS, MODULES, OPS = "Steps", "XLA Modules", "XLA Ops"
LAYERS = "Layers"
NAMES = {
    CORE: OPS,
    DCN: "DCN",
    TO_HOST: "Host link, out",
    FROM_HOST: "Host link, in",
    SPARSECORE: "SparseCore",
    COPY: "Copies between memories",
}
SUFFIXES = (".json", ".json.gz", ".xplane.pb")
LOOPS = "loops"
ALIKE = "like the one before"  # ends the name of the rounds that are not shown one by one
SHORT = 0.003  # share of a round below which work does not interrupt what is around it


@dataclass(frozen=True)
class Slice:
    """A named stretch of a track, in whole nanoseconds, so that slices inside it stay inside."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    details: Mapping[str, str | float] = field(default_factory=dict)
    holds_others: bool = False


def track_name(resource: str) -> str:
    """How a track is called: 'x+' is a direction of an axis of the torus."""
    return NAMES.get(resource) or f"ICI {resource}"


def resources(step: "CompiledStep") -> list[str]:
    """What works beside the core, from top to bottom: links, networks, other units, copies."""
    used = {s.track for s in step.replay.spans} - {CORE, LOOPS}
    links = sorted(used - NAMES.keys())
    return [*links, *(r for r in (DCN, TO_HOST, FROM_HOST, SPARSECORE, COPY) if r in used)]


def tracks(step: "CompiledStep") -> list[str]:
    """Names of all tracks from top to bottom."""
    names = [STEPS, MODULES, LAYERS, OPS]
    found = {s.track for s in slices(step)}
    for name in map(track_name, resources(step)):
        lanes = sorted((t for t in found if t.startswith(f"{name} (")), key=lambda t: (len(t), t))
        names += [name, *lanes]
    return names


def slices(step: "CompiledStep") -> list[Slice]:
    """Everything on the tracks. Of a loop the first rounds are shown one by one, the others as one slice."""
    end_ns = _ns(step.replay.seconds)
    program = step.request.program
    found = [Slice(STEPS, "1", 0, end_ns), Slice(MODULES, f"jit_{program}", 0, end_ns)]
    found += _Nest(step).slices()
    shared: dict[str, list[Slice]] = {}
    for span in step.replay.spans:
        if span.track in SHARED:
            shared.setdefault(span.track, []).append(_of_span(step, span))
        elif span.track != LOOPS:
            found.append(_of_span(step, span))
    for mine in shared.values():
        found += _in_lanes(mine)
    return found


def _in_lanes(mine: Sequence[Slice]) -> Iterator[Slice]:
    """Transfers that share a link side by side: those beyond the first on tracks such as 'Host link, out (2)'."""
    free_ns: list[int] = []
    for s in sorted(mine, key=lambda s: s.start_ns):
        lane = next((k for k, until in enumerate(free_ns) if until <= s.start_ns), len(free_ns))
        free_ns[lane : lane + 1] = [s.end_ns]
        yield s if lane == 0 else replace(s, track=f"{s.track} ({lane + 1})")


def _of_span(step: "CompiledStep", span: Span) -> Slice:
    op_name, source = origin(step.module, span.instruction)
    work = span.work
    name = f"wait for {work.label}" if work.kind == "wait" else span.instruction.name
    details: dict[str, str | float] = {"kind": work.kind}
    if work.kind == "wait":
        details["ends with"] = span.instruction.name
    if work.label and work.kind != "wait":
        details["over"] = work.label
    if work.flops:
        details["flops"] = work.flops
    if work.bytes_:
        details["bytes_accessed"] = work.bytes_
    details |= {k: v for k, v in (("tf_op", op_name), ("source", source)) if v}
    if work.kind not in ("wait", "collective", "copy", "host copy"):
        details["time from"] = "compiler" if work.estimated else "fitted rates"
    return Slice(track_name(span.track), name, _ns(span.start_s), _end_ns(span), details)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _end_ns(span: Span) -> int:
    return _ns(span.start_s + span.seconds)


class _Nest:
    """The track of layers: loops, their rounds, and within a round the parts of the model."""

    def __init__(self, step: "CompiledStep"):
        self.places = step.places
        self.spans = sorted(
            (s for s in step.replay.spans if s.track in (CORE, LOOPS)), key=lambda s: (s.start_s, s.depth)
        )

    def slices(self) -> list[Slice]:
        return list(self._level(self.spans, 0))

    def _level(self, spans: Sequence[Span], depth: int) -> Iterator[Slice]:
        """Slices of the spans at ``depth`` and below, all of one round."""
        plain: list[Span] = []
        position = 0
        while position < len(spans):
            span = spans[position]
            position += 1
            if span.track == LOOPS and span.depth == depth:
                yield from self._parts(plain)
                plain = []
                end_s = span.start_s + span.seconds
                inside = [s for s in spans[position:] if s.depth > depth and s.start_s < end_s]
                yield from self._loop(span, inside)
                position += len(inside)
            else:
                plain.append(span)
        yield from self._parts(plain)

    def _parts(self, spans: Sequence[Span]) -> Iterator[Slice]:
        """One slice for what belongs together and follows at once."""
        groups: list[tuple[str, list[Span]]] = []
        short_s = SHORT * sum(s.seconds for s in spans)
        for label, run in groupby(spans, self._label):
            mine = list(run)
            is_short = sum(s.seconds for s in mine) < short_s
            if groups and (not label or is_short or label == groups[-1][0]):
                groups[-1][1].extend(mine)
            else:
                groups.append((label, mine))
        for label, mine in groups:
            yield Slice(LAYERS, label or "other", _ns(mine[0].start_s), max(map(_end_ns, mine)))

    def _loop(self, loop: Span, inside: Sequence[Span]) -> Iterator[Slice]:
        rounds = int(loop.work.label.split()[0])
        name = self._name(loop, inside)
        end_ns = _end_ns(loop)
        yield Slice(
            LAYERS, f"{name} x {rounds}", _ns(loop.start_s), end_ns, {"loop": loop.instruction.name}, True
        )
        recorded = _rounds(inside, loop.depth + 1)
        starts = [_ns(loop.start_s)] + [_ns(r[0].start_s) for r in recorded[1:]]
        ends = [*starts[1:], min(end_ns, max(map(_end_ns, recorded[-1])))] if recorded else []
        if len(recorded) == rounds:
            ends[-1:] = [end_ns] if recorded else []
        for number, (mine, start, end) in enumerate(zip(recorded, starts, ends, strict=False), 1):
            if rounds > 1:
                yield Slice(LAYERS, f"{name} {number} of {rounds}", start, end, {}, True)
            yield from self._level(mine, loop.depth + 1)
        if recorded and rounds > len(recorded) and end_ns > ends[-1]:
            first = len(recorded) + 1
            numbers = f"{first} to {rounds}" if first < rounds else f"{rounds}"
            yield Slice(LAYERS, f"{name} {numbers}, {ALIKE}", ends[-1], end_ns)

    def _label(self, span: Span) -> str:
        """Pass and part; empty for a wait or transfer, which goes on with what is before it."""
        if span.work.kind in ("wait", "collective", "host copy"):
            return ""
        part, of_pass = self.places[span.instruction.name]
        return part if part == "optimizer" else f"{of_pass} {part}"

    def _name(self, loop: Span, inside: Sequence[Span]) -> str:
        """Pass and part with most time in a loop; over several parts of the model it is one of layers."""
        seconds: dict[tuple[str, str], float] = {}
        for s in inside:
            if s.track == CORE and s.work.kind != "wait":
                place = self.places[s.instruction.name]
                seconds[place] = seconds.get(place, 0.0) + s.seconds
        if not seconds:
            return "loop"
        total, (part, of_pass) = sum(seconds.values()), max(seconds, key=lambda place: seconds[place])
        alone = sum(s for (name, _), s in seconds.items() if name == part) > 0.9 * total
        if part == "optimizer":
            return part
        return f"{'backward' if of_pass == 'recomputed' else of_pass} {part if alone else 'layers'}"


def _rounds(inside: Sequence[Span], depth: int) -> list[list[Span]]:
    """Spans of a loop by round: one begins where an instruction of the body comes again."""
    rounds: list[list[Span]] = []
    seen: set[str] = set()
    for span in inside:
        name = span.instruction.name
        if not rounds or (span.depth == depth and name in seen):
            rounds.append([])
            seen = set()
        if span.depth == depth:
            seen.add(name)
        rounds[-1].append(span)
    return rounds


def memory_over_time(step: "CompiledStep") -> list[tuple[float, float]]:
    """(seconds, bytes of HBM) wherever it changes; bodies of loops once, at their first round."""
    starts: dict[str, float] = {}
    for span in step.replay.spans:
        if span.track == CORE:
            starts.setdefault(span.instruction.name, span.start_s)
    points: list[tuple[float, float]] = []
    now_s = 0.0
    for name, held in step.memory.over_schedule:
        now_s = max(now_s, starts.get(name, now_s))
        if not points or points[-1][1] != held:
            points.append((now_s, held))
    return points


# --- files -----------------------------------------------------------------------------------------------------------


def chrome(step: "CompiledStep") -> dict[str, Any]:
    """The trace event format: complete events ('X') in microseconds on one process, a counter for the memory."""
    rows = {name: k for k, name in enumerate(tracks(step), 1)}
    cluster = step.request.cluster
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:TPU:0 (predicted)"}}
    ]
    for name, row in rows.items():
        for key, value in (("name", {"name": name}), ("sort_index", {"sort_index": row})):
            events.append({"ph": "M", "pid": 1, "tid": row, "name": f"thread_{key}", "args": value})
    for s in slices(step):
        events.append({
            "ph": "X", "pid": 1, "tid": rows[s.track], "name": s.name, "cat": s.track,
            "ts": s.start_ns / 1e3, "dur": (s.end_ns - s.start_ns) / 1e3, "args": dict(s.details),
        })  # fmt: skip
    for seconds, held in memory_over_time(step):
        args = {"GiB": held / 2**30}
        events.append({"ph": "C", "pid": 1, "name": "device memory", "ts": _ns(seconds) / 1e3, "args": args})
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "predicted by": "slicewise compile",
            "chip": cluster.chip.name,
            "topology": cluster.slice.name,
            "slices": cluster.num_slices,
            "depth": step.request.depth,
        },
        "traceEvents": events,
    }


def write(step: "CompiledStep", path: str) -> str:
    """Writes the timeline and says where: a Chrome trace as .json or .json.gz for Perfetto, .xplane.pb for xprof.

    Raises UserError for another suffix, or when the file cannot be written.
    """
    target = check_path(path)
    if path.endswith(".xplane.pb"):
        data = xplane.encode("/device:TPU:0", tracks(step), slices(step))
    else:
        data = json.dumps(chrome(step), allow_nan=False).encode()
        data = gzip.compress(data, 6, mtime=0) if path.endswith(".gz") else data
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise cannot_write(f"--trace {path}", e) from e
    write_whole(target, data, f"--trace {path}")
    return path


def check_path(path: str) -> Path:
    """Raises UserError for a suffix that is none of SUFFIXES: asked before anything is compiled."""
    if not path.endswith(SUFFIXES) or re.fullmatch(r"(.*/)?\.[\w.]*", path):
        raise UserError(f"--trace {path}: expected a name that ends with {', '.join(SUFFIXES)}.")
    return Path(path)
