"""Options on and off by the TPU compiler: step time, memory and hidden communication of real steps, chip by chip.

    python benchmarks/compile_ablation.py [--only TEXT] [--compile] [--most N] [--again]

Prints a table for each step (model, chip, slice): one line for the step with no group of compiler flags (bare), one for
each option that is put on, off or changed, one for the default flags of the chip, and the best; then what became of
published claims. Results are kept in
benchmarks/data/ablation.json, so that it prints again in seconds; --compile fills in what is not there (ten CPU seconds
a line, more on TPU7x).

could: of the communication, what a schedule of this program could hide, by what depends on what; hidden: what this one
does hide of that; exposed: what the step waits for, also where nothing could hide it. Lines without the two were
compiled before these were known.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ablation_claims
from slicewise.catalog import chips, flags, slices
from slicewise.compile import schedule
from slicewise.compile.analysis import CompiledStep, analyse
from slicewise.compile.compiler import Request, compile_request
from slicewise.config import load_config
from slicewise.errors import UserError

KEPT = Path(__file__).parent / "data" / "ablation.json"
NOISE = 0.005  # of a step time: less decides nothing
MOST_EXPOSED = 4  # collectives named
LEAST_HIDDEN = 0.9
WHY_NOT: dict[tuple[str, str], str] = {}  # (chip, set of flags) -> why a faster set is no default
WHY_EXPOSED = {  # chip -> why the compiler leaves collectives synchronous
    "v4": "of all-reduces the compiler makes no asynchronous form there, and refuses to fuse them with compute",
}
NO_SPARSECORE = [
    "xla_tpu_enable_sparse_core_collective_offload_all_gather=false",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=false",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce=false",
]


@dataclass(frozen=True)
class Step:
    """A training step, and the options that are tried on it."""

    model: str
    slice: str
    overrides: tuple[str, ...]
    num_slices: int = 1
    only: tuple[str, ...] = ()  # options; all those for the chip where empty

    @property
    def name(self) -> str:
        seq = next(o.split("=")[1] for o in self.overrides if o.startswith("sequence_length"))
        length = "" if seq == "8192" else f" of {int(seq) // 1024}k tokens"
        return f"{self.model}{length} on {self.num_slices} x {self.slice}"

    @property
    def chip(self) -> str:
        return self.slice.partition(":")[0]


def _step(
    model: str, slice_: str, batch: int, remat: str, *more: str, seq: int = 8192, num_slices: int = 1,
    only: tuple[str, ...] = (),
) -> Step:  # fmt: skip
    given = (
        f"model={model}",
        f"sequence_length={seq}",
        f"global_batch_size={batch}",
        f"remat_policy={remat}",
    )
    return Step(model, slice_, (*given, *more), num_slices, only)


TWO = "default, two layers a round"
HOST = "layer inputs on the host"
LONG = ("default flags", "remat minimal", "remat save_qkv_proj", "larger VMEM", "fp8")
LARGE = (
    "sparsecore, all three", "default flags", "no sparsecore", "fp8", "fp8, default flags", "int8",
    "int8, default flags", "larger VMEM", "scheduler", "layer-scheduler", "sparsecore-multi-axis", "remat minimal", TWO,
)  # fmt: skip
STEPS = (
    _step("llama3-8b", "v5p:4x4x4", 128, "save_qkv_proj"),
    _step("llama3-8b", "tpu7x:4x4x4", 256, "save_qkv_proj"),
    _step("llama3-8b", "v6e:16x16", 512, "full"),
    _step("llama3-8b", "v5e:16x16", 256, "full"),
    _step("llama3-8b", "v4:4x4x4", 64, "full"),
    _step("llama3-8b", "tpu7x:4x4x4", 128, "full", seq=131072, only=LONG),
    _step("llama3-70b", "v5p:8x8x8", 512, "full", only=LARGE),
    _step("llama3-70b", "v6e:16x16", 256, "full", only=LARGE),
    _step("mixtral-8x7b", "v5p:4x4x4", 128, "full", only=LARGE),
    _step("mixtral-8x7b", "v6e:16x16", 256, "full", only=LARGE),
    _step("llama3-70b", "tpu7x:4x4x8", 512, "save_qkv_proj", only=LARGE),
    _step("mixtral-8x7b", "tpu7x:4x4x4", 256, "full", only=LARGE),
    _step(
        "llama3-8b", "v5p:4x4x4", 256, "save_qkv_proj", num_slices=2, only=("dcn-overlap", "default flags")
    ),
)


@dataclass(frozen=True)
class Result:
    """What the compiler made of a step with one option; times in seconds, bytes of a device."""

    step_time_s: float
    hbm_bytes: float
    fits: bool
    mfu: float
    communication_s: float
    exposed_s: float
    hideable_s: float  # of the communication, what a schedule could hide (slicewise.compile.hiding)
    hidden_share: float | None  # of that
    exposed: tuple[tuple[str, float], ...]  # what the core waits for, and its seconds, the longest first
    host_s: float  # copies to the host and back, and how long the core waits for them
    host_exposed_s: float
    cpu_s: float
    libtpu: str


def options(step: Step) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, overrides) of each option for the step's chip, over those of bare."""
    found = {name: given for name, given in _options(step)}
    for name, given in found.items():
        if not step.only or name in step.only:
            yield (
                name,
                given if any(o.startswith("compiler_flags") for o in given) else (*bare(step.chip), *given),
            )


def _options(step: Step) -> Iterator[tuple[str, tuple[str, ...]]]:
    chip = chips.load(step.chip)
    base = load_config(None, step.overrides).config
    defaults = flags.defaults(chip.name, num_slices=step.num_slices)
    for group in flags.groups().values():
        if chip.name in group.chips and (group.name != "dcn-overlap" or step.num_slices > 1):
            yield group.name, (_flags(chip.name, group.name),)
    if chip.name in ("v5p", "v6e"):
        every = [f"sparsecore-{op}" for op in ("all-gather", "reduce-scatter", "all-reduce")]
        yield "sparsecore, all three", (_flags(chip.name, *every),)
    if defaults:
        yield "default flags", (_flags(chip.name, *defaults),)
    if chip.name == "tpu7x":
        yield "no sparsecore", (f"{_flags(chip.name)},{','.join(NO_SPARSECORE)}",)
    for name, rate in (("int8", chip.int8_flops_per_s), ("fp8", chip.fp8_flops_per_s)):
        if rate and rate > chip.bf16_flops_per_s:
            yield name, (f"quantization={name}",)
            if defaults:
                yield f"{name}, default flags", (f"quantization={name}", _flags(chip.name, *defaults))
    if limit := {"v5e": 65536, "v5p": 65536, "v6e": 98304, "tpu7x": 61440}.get(chip.name):
        yield "larger VMEM", (f"scoped_vmem_limit_kib={limit}",)
    for policy in ("full", "save_qkv_proj", "minimal", "minimal_with_context"):
        if policy != base.model.remat_policy:
            yield f"remat {policy}", (f"remat_policy={policy}",)
    on_host = ("remat_policy=custom", 'remat_tensors={decoder_layer_input = "offload"}')
    yield HOST, on_host
    if defaults:
        beside = flags.defaults(chip.name, offloads=True)
        yield f"{HOST}, default flags", (*on_host, _flags(chip.name, *beside))
        if beside != defaults:
            yield f"{HOST}, flags of other steps", (*on_host, _flags(chip.name, *defaults))
    yield "max-logits estimate", ("use_max_logits_estimate=30",)
    yield TWO, ("layers_per_round=2", _flags(chip.name, *defaults))


def _flags(chip: str, *on: str) -> str:
    """The override that puts on these groups, and no other."""
    unasked = {*flags.defaults(chip), *flags.defaults(chip, offloads=True)}
    off = [f"no-{name}" for name in flags.groups() if name in unasked and name not in on]
    return f"compiler_flags={','.join([*on, *off])}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument("--compile", action="store_true", help="compile the lines that are not kept yet")
    parser.add_argument("--most", type=int, default=10**6, help="lines to compile in this call")
    parser.add_argument("--options", default="", metavar="A;B", help="compile only these")
    parser.add_argument("--again", action="store_true", help="also those that are kept")
    arguments = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    chosen = [step for step in STEPS if arguments.only in step.name]
    if arguments.compile:
        wanted = tuple(filter(None, arguments.options.split(";")))
        fill(kept, chosen, wanted, arguments.most, again=arguments.again)
        if ablation_claims.ESTIMATE not in kept and not arguments.only:
            kept[ablation_claims.ESTIMATE] = ablation_claims.estimate()
            KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    tables = {step: results(step, kept) for step in chosen}
    for step, found in tables.items():
        show(step, found)
    if not arguments.only:
        ablation_claims.show({step.name: found for step, found in tables.items()}, kept)


def fill(kept: dict[str, Any], steps: list[Step], wanted: tuple[str, ...], most: int, *, again: bool) -> None:
    """Compiles up to ``most`` lines that ``kept`` has not, and keeps each at once; all options, or ``wanted`` ones."""
    for step in steps:
        for name, given in [("bare", bare(step.chip)), *options(step)]:
            key = digest(step, given)
            if (key in kept and not again) or (wanted and name not in wanted):
                continue
            if most == 0:
                return
            most -= 1
            kept[key] = {"step": step.name, "option": name} | compiled(step, given)
            KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
            print(f"{step.name}, {name}: {kept[key]}", file=sys.stderr)


def digest(step: Step, given: tuple[str, ...]) -> str:
    """Of the slices, the config and the flags that it comes to."""
    overrides = (*step.overrides, *given)
    asked = load_config(None, overrides).config.compiler.compiler_flags
    plain = [o for o in overrides if not o.startswith("compiler_flags")]
    said = [step.slice, step.num_slices, plain, flags.resolve(asked, step.chip)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def bare(chip: str) -> tuple[str, ...]:
    """The override that leaves out every default group of ``chip``; none where it has no such group."""
    return (_flags(chip),) if flags.defaults(chip) else ()


def compiled(step: Step, given: tuple[str, ...]) -> dict[str, Any]:
    """A Result as a dict, or why there is none."""
    try:
        config = load_config(None, [*step.overrides, *given]).config
        request = Request(config, slices.cluster(step.slice, step.num_slices))
        return asdict(result(analyse(compile_request(request))))
    except UserError as e:
        return {"refused": str(e).split(" Its log:")[0].splitlines()[0]}


def result(step: CompiledStep) -> Result:
    e = step.estimate
    return Result(
        step_time_s=e.step_time_s,
        hbm_bytes=step.memory.total_bytes,
        fits=step.fits,
        mfu=e.mfu,
        communication_s=sum(c.seconds for c in step.communication),
        exposed_s=sum(c.exposed_s for c in step.communication),
        hideable_s=step.hideable_s,
        hidden_share=step.hidden_share,
        exposed=tuple((e.text, e.seconds) for e in step.exposed[:MOST_EXPOSED]),
        host_s=step.replay.totals.communication.get(schedule.HOST, 0.0),
        host_exposed_s=step.replay.totals.exposed.get(schedule.HOST, 0.0),
        cpu_s=step.cpu_s,
        libtpu=flags.installed(),
    )


def results(step: Step, kept: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By option, 'bare' first; those that are not kept are left out."""
    named = [("bare", bare(step.chip)), *options(step)]
    return {name: kept[digest(step, given)] for name, given in named if digest(step, given) in kept}


def show(step: Step, found: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n{step.name}: {' '.join(step.overrides[1:])}")
    if "bare" not in found:
        print("  not compiled: --compile")
        return
    base = found["bare"]
    print(
        f"  {'option':46s} {'step':>9s} {'change':>8s} {'MFU':>6s} {'GiB':>7s} {'exposed':>9s} {'could':>8s}"
        f" {'hidden':>7s}"
    )
    for name, r in found.items():
        print(f"  {name:46s} {line(r, base)}")
    fitting = {n: r for n, r in found.items() if r.get("fits")}
    if fitting:
        print(f"  fastest of all: {min(fitting, key=lambda n: fitting[n]['step_time_s'])}")
        print(f"  flags: {flags_verdict(step, fitting)}")
    for text in hidden_verdict(step, found):
        print(f"  {text}")


def flags_verdict(step: Step, fitting: Mapping[str, Mapping[str, Any]]) -> str:
    """Whether the chip's default flags are the best of those tried."""
    groups = {*flags.groups(), "bare", "default flags", "sparsecore, all three", "no sparsecore"}
    tried = {n: r["step_time_s"] for n, r in fitting.items() if n in groups}
    default = "default flags" if bare(step.chip) else "bare"
    best = min(tried, key=lambda n: tried[n])
    if default not in tried:
        return "the default was not compiled"
    behind = tried[default] / tried[best] - 1
    if behind < NOISE:
        return f"the default is the best of {len(tried)} sets"
    return (
        f"the default is {behind:.1%} behind {best}; {WHY_NOT.get((step.chip, best), 'it is not explained')}"
    )


def hidden_verdict(step: Step, found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Which collectives the step waits for, with its default flags, where they are over a tenth of what could be
    hidden."""
    r = found.get("default flags" if bare(step.chip) else "bare", {})
    if r.get("hidden_share") is None or r["hidden_share"] >= LEAST_HIDDEN:
        return
    yield f"hidden: {r['hidden_share']:.0%} of what could be; the step waits for"
    for what, seconds in r.get("exposed", ()):
        yield f"  {seconds * 1e3:6.0f} ms  {what}"
    if step.chip in WHY_EXPOSED:
        yield f"  {WHY_EXPOSED[step.chip]}"
    two = found.get(TWO, {}).get("hidden_share")
    if two is not None:
        yield f"  layers_per_round = 2 hides {two:.0%}"


def line(r: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    if "refused" in r:
        return f"refused: {r['refused']}"
    change = r["step_time_s"] / base["step_time_s"] - 1 if base.get("step_time_s") else 0.0
    hidden = "       -      -"
    if r.get("hidden_share") is not None and "hideable_s" in r:
        hidden = f"{r['hideable_s']:7.3f}s {r['hidden_share']:6.0%}"
    more = "" if r["fits"] else "  does not fit"
    if r.get("host_s"):
        more += f"  copies to and from the host {r['host_s']:.3f}s, exposed {r['host_exposed_s']:.3f}s"
    return (
        f"{r['step_time_s']:8.3f}s {change:+8.1%} {r['mfu']:6.1%} {r['hbm_bytes'] / 2**30:7.2f}"
        f" {r['exposed_s']:8.3f}s {hidden}{more}"
    )


if __name__ == "__main__":
    main()
