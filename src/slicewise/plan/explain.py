"""Why a plan is what it is: for the winner and for each rejected family the inequality that decided."""

from dataclasses import dataclass

from slicewise.costs.step import StepEstimate
from slicewise.plan import rules
from slicewise.plan.rules import Inequality, Setting
from slicewise.plan.search import Candidate, Family, SearchResult


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
    decided = deciding(s, family.best) or trade(family.best, best)
    return Verdict(family.axes, e.step_time_s, behind, decided, f"{name}: {behind:+.1%}; {decided.text}.")


def trade(candidate: Candidate, best: Candidate) -> Inequality:
    """Where no threshold is broken: what the layout loses against the first choice must not exceed what it
    saves."""
    mine, theirs = parts(candidate.estimate), parts(best.estimate)
    change = {k: mine.get(k, 0.0) - theirs.get(k, 0.0) for k in {*mine, *theirs}}
    lost = sum(v for v in change.values() if v > 0)
    saved = -sum(v for v in change.values() if v < 0)
    worst = max(change, key=lambda k: (change[k], k))
    text = (
        f"it loses {lost:.3g} s (most by {worst}, {mine[worst]:.3g} s against {theirs.get(worst, 0.0):.3g} s)"
    )
    text += f" and saves {saved:.3g} s"
    if candidate.recipe.remat != best.recipe.remat:
        text += f"; memory leaves it remat {candidate.recipe.remat.name} instead of {best.recipe.remat.name}"
    return Inequality("trade", lost, saved, "<=", text)


def deciding(s: Setting, candidate: Candidate) -> Inequality | None:
    """The broken inequality of the axis with most exposed time, else the first broken one."""
    exposed = candidate.estimate.exposed_s
    broken = [q for q in rules.of_layout(s, candidate.layout) if not q.holds]
    broken.sort(key=lambda q: -exposed.get(q.rule.removesuffix("+tensor"), 0.0))
    return broken[0] if broken else None


def parts(e: StepEstimate) -> dict[str, float]:
    """Every part of the step in seconds."""
    return {**e.compute_s, **{f"exposed {k}": v for k, v in e.exposed_s.items()}, **e.other_s}


def multislice(s: Setting, result: SearchResult) -> tuple[str, ...]:
    """The rules for axes between slices, with their numbers."""
    n = s.cluster.num_slices
    if n == 1:
        return ()
    data = rules.dcn_data(s)
    replica = any(f.fitting for f in result.families if "dcn fsdp" not in f.axes)
    order = rules.multislice_order(s, replica)
    lines = [f"{data.text}: {'enough' if data.holds else 'not enough'}."]
    if replica:
        lines.append(
            "A replica a slice fits, so weights are not sharded over DCN (FSDP there only when memory asks)."
        )
    else:
        lines.append("No replica fits a slice, so weights are sharded over DCN.")
    depths = rules.dcn_pipeline_depths(n, s.shape.layer_count)
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
        f"{name}: {e.step_time_s:.3g} s a step, {e.mfu:.1%} of peak; largest part {e.decided_by};"
        f" {hidden:.3g} s of communication runs behind compute and {exposed:.3g} s does not."
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
