"""Our first choice against hand-tuned configurations: same model, chips, sequence length and global batch.

    python benchmarks/experts.py [--configs FILE] [--top 20]

Prints, for each configuration, the predicted time of the expert's layout and of ours, and where the
expert's mesh stands in our ranking. Configurations that do not state their model or slice are listed as
skipped.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rows
from slicewise.catalog import chips
from slicewise.catalog.slices import Cluster, Slice
from slicewise.costs.device import device_of
from slicewise.costs.layout import Degrees, Layout, Recipe
from slicewise.costs.memory import device_total, memory_bytes
from slicewise.costs.step import estimate
from slicewise.errors import UserError
from slicewise.plan.explain import deciding, trade
from slicewise.plan.rules import Setting
from slicewise.plan.search import Candidate, Workload, search

DEFAULT = Path(__file__).parent / "data" / "expert_configs.jsonl"
USUAL_SLICE = {"v6e": "16x16", "v5p": "4x4x4", "tpu7x": "4x4x4", "v5e": "16x16", "v4": "4x4x4"}


@dataclass(frozen=True)
class Expert:
    id: str
    workload: Workload
    cluster: Cluster
    layout: Layout
    recipe: Recipe


def expert(config: dict[str, Any]) -> Expert | str:
    """The configuration in our terms, or why it cannot be priced."""
    m = overridden(config["model"] or {})
    if not m.get("layers") or not m.get("d_model"):
        return "model dims not stated"
    m = {"decoder_block": "", "gated_mlp": False, "tied_embeddings": True, **m}
    chip = chips.load(config["chip"])
    topology = (config["topology"] or USUAL_SLICE[config["chip"]]).split(" ")[0]
    asked = config["parallelism"]
    slice_ = Slice(chip, tuple(map(int, topology.split("x"))))
    filled_dcn = 2 if -1 in asked["dcn"].values() else 1  # an axis that fills the slices asks for several
    slices = config["num_slices"] or max(filled_dcn, _product(asked["dcn"]))
    cluster = Cluster(slice_, slices)
    ici = filled(asked["ici"], slice_.devices, "fsdp")
    dcn = filled(asked["dcn"], slices, "data")
    if ici is None or dcn is None:
        return "its axes do not multiply to its devices"
    batch = config["per_device_batch"] * cluster.devices
    if batch != int(batch) or batch < 1:
        return "its global batch is not whole"
    try:
        recipe = rows.recipe_of({**config, "notes": config["notes"] or ""})
        shape = rows.shape_of(m)
    except UserError as e:
        return str(e)
    layout = Layout(ici, dcn, int(batch))
    memory = memory_bytes(shape, layout, recipe, config["seq_len"])
    state = float(memory["weights"] + memory["optimizer"])
    if not config["num_slices"] and state > device_of(chip).hbm_bytes:
        return (
            f"its slices are not stated and {slices} cannot hold its state ({state / 2**30:.0f} GiB a device)"
        )
    return Expert(
        config["id"], Workload(shape, config["seq_len"], int(batch)), cluster,
        layout, recipe,
    )  # fmt: skip


def overridden(m: dict[str, Any]) -> dict[str, Any]:
    """A model given as MaxText overrides of its Mixtral, with the dims under their plain names."""
    o = m.get("overrides")
    if not o:
        return m
    names = {
        "layers": "base_num_decoder_layers", "d_model": "base_emb_dim", "d_ff": "base_mlp_dim",
        "heads": "base_num_query_heads", "kv_heads": "base_num_kv_heads", "head_dim": "head_dim",
        "vocab": "vocab_size",
    }  # fmt: skip
    moe = {
        "num_experts": o["num_experts"], "top_k": o["num_experts_per_tok"], "moe_d_ff": o["base_mlp_dim"],
        "shared_experts": 0, "first_dense_layers": 0,
    }  # fmt: skip
    dims = {name: o[key] for name, key in names.items()}
    return {"name": m["name"], **dims, "gated_mlp": True, "tied_embeddings": False, "moe": moe}


def _product(axes: dict[str, int]) -> int:
    product = 1
    for degree in axes.values():
        product *= abs(degree)
    return product


def filled(axes: dict[str, int], size: int, default: str) -> Degrees | None:
    """MaxText's rule: one axis may be -1 and fills what the others leave; ``default`` is -1 unless given."""
    axes = {default: -1, **axes} if -1 not in axes.values() and _product(axes) != size else dict(axes)
    rest = 1
    for degree in axes.values():
        rest *= degree if degree != -1 else 1
    if rest == 0 or size % rest:
        return None
    open_ = [axis for axis, degree in axes.items() if degree == -1]
    for k, axis in enumerate(open_):
        axes[axis] = size // rest if k == 0 else 1
    return rows.degrees(axes) if _product(axes) == size else None


def compare(e: Expert, top: int) -> dict[str, Any]:
    theirs = estimate(e.workload.shape, e.cluster, e.layout, e.recipe, e.workload.seq)
    result = search(
        e.workload, e.cluster, recipe=e.recipe, precisions=(e.recipe.precision,), top=top, families=False
    )
    first = result.ranked[0]
    mesh = (e.layout.ici, e.layout.dcn)
    priced = Candidate(e.cluster, e.layout, e.recipe, theirs)
    setting = Setting(e.workload.shape, e.cluster, e.workload.seq, e.workload.tokens)
    rank = next((k + 1 for k, c in enumerate(result.ranked) if (c.layout.ici, c.layout.dcn) == mesh), None)
    memory = memory_bytes(e.workload.shape, e.layout, e.recipe, e.workload.seq)
    return {
        "theirs_s": theirs.step_time_s,
        "ours_s": first.estimate.step_time_s,
        "rank": rank,
        "ours": first,
        "reason": deciding(setting, priced, first) or trade(setting, priced, first),
        "fill": float(device_total(memory)) / theirs.hbm_limit_bytes,
    }


def text(degrees: Degrees) -> str:
    names = ("data", "fsdp", "tensor", "context", "expert", "pipeline")
    return "x".join(f"{a}{getattr(degrees, a)}" for a in names if getattr(degrees, a) > 1) or "1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=Path, default=DEFAULT)
    parser.add_argument("--top", type=int, default=20)
    args = parser.parse_args()
    started = time.perf_counter()
    compared = []
    skipped = []
    for config in rows.load(args.configs):
        name = config.get("id") or "?"
        try:
            e = expert(config)
        except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
            e = f"{type(error).__name__} {error}"
        if isinstance(e, str):
            skipped.append((name, e))
            continue
        try:
            r = compare(e, args.top)
        except UserError as error:
            skipped.append((e.id, str(error)))
            continue
        compared.append((e.id, r))
        ours = r["ours"]
        print(
            f"{e.id[:52]:53s} {text(e.layout.ici):22s} {text(e.layout.dcn):8s} {r['theirs_s']:8.3f} "
            f"fill {r['fill']:4.0%} | {r['ours_s']:8.3f} {text(ours.layout.ici):28s} "
            f"{text(ours.layout.dcn):8s} "
            f"x{ours.layout.accumulation_steps * ours.layout.pipeline_microbatches} "
            f"{ours.recipe.remat.name[:28]:28s}"
            f" rank {r['rank'] or '-'}"
        )
    slower = sum(r["ours_s"] > r["theirs_s"] * (1 + 1e-9) for _, r in compared)
    found = sum(r["rank"] is not None for _, r in compared)
    print(f"\n{len(compared)} compared, {len(skipped)} skipped in {time.perf_counter() - started:.0f} s")
    print(f"our choice predicted slower than the expert's: {slower}")
    print(f"expert's mesh in our top {args.top}: {found} ({found / max(1, len(compared)):.0%})")
    for name, r in compared:
        if r["rank"] is None:
            print(f"  outside the top {args.top}: {name}: {r['reason'].text}")
    for name, why in skipped:
        print(f"  skipped {name}: {why}")


if __name__ == "__main__":
    main()
