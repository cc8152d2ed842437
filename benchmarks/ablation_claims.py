"""Published claims about TPU7x (the guide to its performance), held against the lines of compile_ablation.py."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slicewise.compile.kernels import KernelCompiler, call_seconds
from slicewise.errors import UserError
from slicewise.kernels.attention import tiles

Line = Mapping[str, Any]
ESTIMATE = "kernel of attention, with and without the max-logits estimate"
SHORT, LONG = "llama3-8b on 1 x tpu7x:4x4x4", "llama3-8b of 128k tokens on 1 x tpu7x:4x4x4"


@dataclass(frozen=True)
class Claim:
    text: str
    found: str
    holds: bool | None  # None: not compiled


def show(tables: Mapping[str, Mapping[str, Line]], kept: Mapping[str, Any]) -> None:
    print("\nClaims about TPU7x")
    for claim in claims(tables.get(SHORT, {}), tables.get(LONG, {}), kept.get(ESTIMATE)):
        verdict = {True: "confirmed", False: "refuted", None: "open"}[claim.holds]
        print(f"  {verdict:9s}  {claim.text}: {claim.found}")


def claims(short: Mapping[str, Line], long: Mapping[str, Line], estimate: Line | None) -> Iterator[Claim]:
    yield _ratio("FP8 takes about 1 / 1.3 of the time of BF16", short, "bare", "fp8", 1.15, 1.5)
    yield _ratio(
        "a larger scoped VMEM, for larger tiles of attention, saves time", short, "bare", "larger VMEM", 1.0
    )
    yield _ratio("collectives on the SparseCores save time", short, "no sparsecore", "bare", 1.0)
    yield _ratio("at 8k tokens minimal remat is faster than full", short, "remat full", "remat minimal", 1.0)
    yield _long(long)
    text = "a max-logits estimate makes attention faster"
    if estimate is None or "refused" in estimate:
        yield Claim(text, "not compiled", None)
    else:
        ratio = estimate["without_s"] / estimate["with_s"]
        found = f"the forward kernel takes 1 / {ratio:.2f} of the time, by its bundles; products are the same"
        yield Claim(text, found, ratio > 1)


def _ratio(
    text: str, lines: Mapping[str, Line], slow: str, fast: str, least: float, most: float = 100.0
) -> Claim:
    if not all("step_time_s" in lines.get(name, {}) for name in (slow, fast)):
        return Claim(text, "not compiled", None)
    ratio = lines[slow]["step_time_s"] / lines[fast]["step_time_s"]
    fits = lines[fast]["fits"]
    found = f"{lines[slow]['step_time_s']:.3f} s against {lines[fast]['step_time_s']:.3f} s, a factor of {ratio:.2f}"
    return Claim(text, found + ("" if fits else ", and does not fit"), fits and least < ratio < most)


def _long(lines: Mapping[str, Line]) -> Claim:
    text = "at 128k tokens only full remat fits"
    full, minimal = lines.get("bare"), lines.get("remat minimal")
    if not full or not minimal:
        return Claim(text, "not compiled", None)
    found = [f"{name} {_memory(line)}" for name, line in (("full", full), ("minimal", minimal))]
    return Claim(text, ", ".join(found), bool(full.get("fits")) and not minimal.get("fits"))


def _memory(line: Line) -> str:
    return line["refused"] if "refused" in line else f"needs {line['hbm_bytes'] / 2**30:.0f} GiB"


def estimate() -> dict[str, Any]:
    """Seconds of a call of the forward kernel at 8192 tokens, by its bundles."""
    key = tiles.key("tpu7x", 8192, 128, 128)
    values = tiles.values(tiles.chosen(key))
    found = {}
    try:
        with KernelCompiler("tpu7x") as compiler:
            for name, max_logit in (("without_s", None), ("with_s", 30.0)):
                compiled = compiler.compile(key, values, "forward", max_logit=max_logit)
                if compiled.regions is None:
                    return {"refused": compiled.problem}
                found[name] = call_seconds(key, values, "forward", compiled.regions)
    except UserError as e:
        return {"refused": str(e).splitlines()[0]}
    return found
