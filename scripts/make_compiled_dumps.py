"""Makes tests/compile/dumps: what the compiler leaves of steps, so that tests need no compiler.

    python scripts/make_compiled_dumps.py [name ...]

Needs the extra 'compile' and 10 to 30 CPU seconds each. Paths of this machine and the bodies of kernels, which nothing
reads, are taken out; of the steps of dumps/layouts, one for each family of layouts, all but the instructions.
"""

import argparse
import gzip
import json
import os
import re
import sysconfig
import tempfile
from pathlib import Path

import slicewise
from slicewise.catalog import slices
from slicewise.compile.compiler import Compiled, Request, compile_request
from slicewise.config import load_config

FOLDER = Path(__file__).parents[1] / "tests" / "compile" / "dumps"
LIMIT_BYTES = 85_000
SHORT_LINES = 8
TINY = ("model=demo-tiny", "sequence_length=256", "gradient_clip_norm=0")
# name -> slice, slices, program, overrides
STEPS = {
    "tiny_v5e": (
        "v5e:2x2", 1, "update",
        (*TINY, "global_batch_size=8", "ici_tensor_parallelism=2", "remat_policy=save_qkv_proj"),
    ),
    "tiny_v5p_two_slices": (
        "v5p:2x2x1", 2, "update",
        (*TINY, "global_batch_size=16", "remat_policy=qkv_proj_offloaded"),
    ),
    "tiny_v5e_decode": ("v5e:2x2", 1, "decode", (*TINY, "global_batch_size=8")),
    "too_large_v5e": (
        "v5e:2x2", 1, "update",
        ("model=llama3-8b", "sequence_length=8192", "gradient_clip_norm=0", "global_batch_size=8", "remat_policy=full"),
    ),
}  # fmt: skip

LLAMA = ("model=llama3-8b", "sequence_length=4096", "remat_policy=full")
LONG = (
    *LLAMA,
    "sequence_length=32768",
    "global_batch_size=4",
    "ici_fsdp_parallelism=4",
    "ici_context_parallelism=4",
)
# name -> slice, slices, program, overrides
LAYOUTS = {
    "data": ("v5p:2x2x1", 1, "update", ("model=qwen3-0.6b", "sequence_length=4096", "global_batch_size=8",
                                        "ici_fsdp_parallelism=1", "ici_data_parallelism=4")),
    "fsdp": ("v5p:2x2x4", 1, "update", (*LLAMA, "global_batch_size=16")),
    "tensor": ("v5p:2x2x1", 1, "update", (*LLAMA, "global_batch_size=1", "ici_fsdp_parallelism=1",
                                          "ici_tensor_parallelism=4")),
    "fsdp_tensor": ("v5p:2x2x4", 1, "update", (*LLAMA, "global_batch_size=16", "ici_tensor_parallelism=4")),
    "dcn_data": ("v5p:2x2x4", 2, "update", (*LLAMA, "global_batch_size=32")),
    "dcn_fsdp": ("v5p:2x2x4", 2, "update", (*LLAMA, "global_batch_size=32", "dcn_data_parallelism=1",
                                            "dcn_fsdp_parallelism=2")),
    "context_gathered": ("v5p:2x2x4", 1, "update", LONG),
    "context_ring": ("v5p:2x2x4", 1, "update", (*LONG, "context_strategy=ring")),
    "context_ulysses": ("v5p:2x2x4", 1, "update", (*LONG, "context_strategy=ulysses")),
    "experts": ("v5p:2x2x4", 1, "update", ("model=mixtral-8x7b", "sequence_length=4096", "global_batch_size=16",
                                           "remat_policy=full", "ici_expert_parallelism=8",
                                           "moe_dispatch=capacity")),
    "pipeline": ("v5p:2x2x4", 1, "update", (*LLAMA, "global_batch_size=128", "ici_pipeline_parallelism=4")),
}  # fmt: skip


def main() -> None:
    all_ = STEPS | LAYOUTS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(all_)} (default: all)")
    for name in parser.parse_args().names or all_:
        folder = FOLDER / "layouts" / name if name in LAYOUTS else FOLDER / name
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache  # compiled anew, whatever is kept
            one, count, program, overrides = all_[name]
            asked = {"slice": one, "slices": count, "program": program, "overrides": list(overrides)}
            config, cluster = load_config(None, overrides).config, slices.cluster(one, count)
            keep(compile_request(Request(config, cluster, program)), folder, whole=name in STEPS)
        (folder / "request.json").write_text(json.dumps(asked) + "\n")
        print(name, {p.name: p.stat().st_size for p in sorted(folder.iterdir())}, flush=True)


def keep(compiled: Compiled, folder: Path, *, whole: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "facts.json").write_text(json.dumps(compiled.facts) + "\n")
    for name in ("scheduled.hlo", "buffers.txt", "live_ranges.txt")[: None if whole else 1]:
        text = stripped(compiled.text(name))
        data = gzip.compress((text if whole else bare(text)).encode(), 9, mtime=0)
        assert len(data) < LIMIT_BYTES, (folder.name, name, len(data))
        (folder / f"{name}.gz").write_bytes(data)


def stripped(text: str) -> str:
    """``text`` without this machine's paths, the bodies of kernels, and settings of the compiler that say nothing."""
    text = text.replace(str(Path(slicewise.__file__).parents[1]), "/src")
    text = text.replace(sysconfig.get_paths()["purelib"], "/site-packages")
    text = text.replace(sysconfig.get_paths()["stdlib"], "/python")
    text = re.sub(r'"body":"[^"]*"', '"body":""', text)
    text = re.sub(r'"aliasing_operands":\{"lists":\[[^\[\]]*(\[[^\[\]]*\][^\[\]]*)*\]\},?', "", text)
    text = re.sub(
        r',?"(flag_configs|scoped_memory_configs|used_scoped_memory_configs)":\[[^\[\]]*\]', "", text
    )
    return re.sub(r" end_line=\d+ column=\d+ end_column=\d+", "", text)


def bare(text: str) -> str:
    """``text`` without where instructions come from, how arrays lie in memory, the compiler's notes to itself, and what
    is computed within fusions that are no collective; short ones stay, for they count the rounds of loops."""
    head, body = text[: text.index("\n")], text[re.search(r"^(ENTRY )?%", text, re.M).start() :]
    computing = set(re.findall(r"kind=k(?!Custom)\w+, calls=%([\w.\-]+)", body))
    kept = []
    for computation in body.split("\n\n"):
        name = computation.removeprefix("ENTRY ").partition(" ")[0].removeprefix("%")
        if name not in computing or computation.count("\n") < SHORT_LINES:
            kept.append(computation)
    body = re.sub(r", (metadata|backend_config)=\{.*\}$", "", "\n\n".join(kept), flags=re.M)
    body = re.sub(r"\]\{[\d,]*(:[^{}]*)?\}", "]", body)
    return head + "\n\n" + body.replace(', frontend_attributes={is_spmd_generated="true"}', "")


if __name__ == "__main__":
    main()
