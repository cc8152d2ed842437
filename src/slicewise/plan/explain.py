"""Why a plan is what it is: for the winner and for each rejected family the inequality that decided."""

from dataclasses import dataclass, replace

from slicewise.costs.step import StepEstimate
from slicewise.costs.units import duration
from slicewise.plan import rules
from slicewise.plan.rules import Inequality, Setting
from slicewise.plan.search import Candidate, Family, SearchResult

NEGLIGIBLE = 1e-4  # of a step: what layouts differ by less does not separate them
PARTS = {  # of the step that an axis costs, by the rule that judges the axis
    "fsdp": ("exposed fsdp", "exposed data"),
    "fsdp+tensor": ("exposed fsdp", "exposed data"),
    "tensor": ("exposed tensor",),
    "context": ("exposed context",),
    "expert": ("exposed expert",),
    "dcn data": ("exposed dcn data",),
    "dcn fsdp": ("exposed dcn fsdp",),
    "pipeline": ("exposed pipeline", "exposed dcn pipeline", "pipeline bubble"),
}


@dataclass(frozen=True)
class Verdict:
    """One family of layouts: the axes it uses, how it did, and what decided."""

    axes: tuple[str, ...]
    step_time_s: float | None  # of its best layout; None when nothing fits
    behind: float | None  # how much slower than the winner, as a share
    decided: Inequality
    text: str


@dataclass(frozen=True)
class Explanation:
    winner: tuple[Inequality, ...]  # of the axes it uses, and its memory
    winner_text: str
    rejected: tuple[Verdict, ...]
    multislice: tuple[str, ...]  # rules between slices, none for a single slice
    table: str | None  # the row of the Ironwood table, on TPU7x


def explain(result: SearchResult, *, families: int = 12) -> Explanation:
    """The reasons behind ``result``; at most ``families`` rejected families, the nearest first."""
    w = result.workload
    s = Setting(w.shape, result.cluster, w.seq, w.tokens)
    best = result.ranked[0]
    held = rules.memory(best.estimate.hbm_total_bytes, s, "it")
    used = axes_of(best)
    others = [f for f in result.families if f.axes != used]
    near = [f for f in others if f.fitting][:families]
    full = [f for f in others if not f.fitting and len(f.axes) <= 2]
    return Explanation(
        (*rules.of_layout(s, best.layout), held),
        _winner_text(best),
        tuple(verdict(s, f, best) for f in [*near, *full]),
        multislice(s, result),
        _table_row(s),
    )


def axes_of(candidate: Candidate) -> tuple[str, ...]:
    """The axes of degree above 1, in the order families name them."""
    i, d = candidate.layout.ici, candidate.layout.dcn
    names = ("tensor", "context", "expert", "pipeline", "fsdp", "data")
    inside = [a for a in names if getattr(i, a) > 1]
    return (*inside, *(f"dcn {a}" for a in ("pipeline", "fsdp", "data") if getattr(d, a) > 1))


def verdict(s: Setting, family: Family, best: Candidate) -> Verdict:
    """What decided against ``family``: memory, or the inequality of its axis that costs most."""
    e, winner = family.best.estimate, best.estimate
    name = " + ".join(family.axes) or "one device"
    if not family.fitting:
        lack = rules.memory(e.hbm_total_bytes, s, f"{name} at its smallest")
        return Verdict(family.axes, None, None, lack, f"{name}: {lack.text}.")
    behind = e.step_time_s / winner.step_time_s - 1
    decided = deciding(s, family.best, best) or trade(s, family.best, best)
    return Verdict(family.axes, e.step_time_s, behind, decided, f"{name}: {behind:+.1%}; {decided.text}.")


def trade(s: Setting, candidate: Candidate, best: Candidate) -> Inequality:
    """What the layout loses against the first choice must not exceed what it saves."""
    change = _changes(candidate, best)
    lost = sum(v for v in change.values() if v > 0)
    saved = -sum(v for v in change.values() if v < 0)
    nothing = NEGLIGIBLE * best.estimate.step_time_s
    if max(lost, saved) <= nothing:
        return Inequality(
            "trade", lost, saved, "<=", "every part of the step takes as long; it is no simpler"
        )
    worst = max(change, key=lambda k: (change[k], k))
    why = next((f": {q.text}" for q in _broken(s, candidate) if worst in PARTS[q.rule]), "")
    mine, theirs = (parts(c.estimate).get(worst, 0.0) for c in (candidate, best))
    text = (
        f"it loses {duration(lost)} (most by {worst}, {duration(mine)} against {duration(theirs)}{why})"
        f" and saves {duration(saved) if saved > nothing else 'nothing'}"
    )
    if candidate.recipe.remat != best.recipe.remat:
        text += f"; memory leaves it remat {candidate.recipe.remat.name} instead of {best.recipe.remat.name}"
    return Inequality("trade", lost, saved, "<=", text)


def deciding(s: Setting, candidate: Candidate, best: Candidate) -> Inequality | None:
    """The broken inequality of the axis that explains most of what ``candidate`` loses, with its seconds.

    None where no broken one explains half of it: then no single threshold decided.
    """
    change = _changes(candidate, best)
    extra = {q: sum(change.get(name, 0.0) for name in PARTS[q.rule]) for q in _broken(s, candidate)}
    q = max(extra, key=lambda q: extra[q], default=None)
    lost = sum(v for v in change.values() if v > 0)
    if q is None or extra[q] <= max(lost / 2, NEGLIGIBLE * best.estimate.step_time_s):
        return None
    mine, theirs = (sum(parts(c.estimate).get(n, 0.0) for n in PARTS[q.rule]) for c in (candidate, best))
    what = " and ".join(name for name in PARTS[q.rule] if change.get(name))
    return replace(q, text=f"{q.text}: {what}, {duration(mine)} against {duration(theirs)}")


def _broken(s: Setting, candidate: Candidate) -> list[Inequality]:
    return [q for q in rules.of_layout(s, candidate.layout) if not q.holds]


def _changes(candidate: Candidate, best: Candidate) -> dict[str, float]:
    """Seconds by part that ``candidate`` takes longer than ``best``, in the order of the parts."""
    mine, theirs = parts(candidate.estimate), parts(best.estimate)
    return {k: mine.get(k, 0.0) - theirs.get(k, 0.0) for k in dict.fromkeys((*mine, *theirs))}


def parts(e: StepEstimate) -> dict[str, float]:
    """Every part of the step in seconds."""
    return {**e.compute_s, **{f"exposed {k}": v for k, v in e.exposed_s.items()}, **e.other_s}


def multislice(s: Setting, result: SearchResult) -> tuple[str, ...]:
    """The rules for axes between slices, with their numbers."""
    n = s.cluster.num_slices
    if n == 1:
        return ()
    data = rules.dcn_data(s)
    replica = any(f.fitting for f in result.families if not {"dcn fsdp", "dcn pipeline"} & {*f.axes})
    order = rules.multislice_order(s, replica)
    lines = [f"{data.text}: {'enough' if data.holds else 'not enough'}."]
    if replica:
        lines.append(
            "A replica a slice fits, so weights are not sharded over DCN (FSDP there only when memory asks)."
        )
    else:
        lines.append("No replica fits a slice, so weights are sharded over DCN, or its layers are.")
    depths = rules.dcn_pipeline_depths(n, s.shape.staged_groups)
    tried = (
        ", ".join(f"{p} stages x {r} replicas" for p, r in depths) or "none divides the layers and the slices"
    )
    lines.append(f"Pipelines over DCN come last; depths tried: {tried}. Order: {', '.join(order)}.")
    return tuple(lines)


def _winner_text(best: Candidate) -> str:
    e = best.estimate
    name = " + ".join(axes_of(best)) or "one device"
    exposed = sum(e.exposed_s.values())
    hidden = sum(e.communication_s.values()) - exposed
    return (
        f"{name}: {duration(e.step_time_s)} a step, {e.mfu:.1%} of peak; largest part {e.decided_by};"
        f" {duration(hidden)} of communication runs behind compute and {duration(exposed)} does not."
    )


def _table_row(s: Setting) -> str | None:
    if s.cluster.chip.name != "tpu7x":
        return None
    choice, regime, why = rules.ironwood(s)
    kind = "mixture of experts" if s.sparsity > 1 else "dense"
    return (
        f"TPU7x table, {kind}, {regime}: start with {' + '.join(choice.axes)}; limited by {choice.bottleneck}"
        f" ({choice.why}); {why.text}."
    )
