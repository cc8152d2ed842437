"""Makes tests/compile/dumps: what the compiler leaves of small steps, so that tests need no compiler.

    python scripts/make_compiled_dumps.py [name ...]

Needs the extra 'compile' and about ten CPU seconds each. Paths of this machine and the bodies of kernels, which nothing
reads, are taken out.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(STEPS)} (default: all)")
    for name in parser.parse_args().names or STEPS:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache  # compiled anew, whatever is kept
            one, count, program, overrides = STEPS[name]
            asked = {"slice": one, "slices": count, "program": program, "overrides": list(overrides)}
            config, cluster = load_config(None, overrides).config, slices.cluster(one, count)
            keep(compile_request(Request(config, cluster, program)), FOLDER / name)
        (FOLDER / name / "request.json").write_text(json.dumps(asked) + "\n")
        print(name, {p.name: p.stat().st_size for p in sorted((FOLDER / name).iterdir())})


def keep(compiled: Compiled, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "facts.json").write_text(json.dumps(compiled.facts) + "\n")
    for name in ("scheduled.hlo", "buffers.txt", "live_ranges.txt"):
        data = gzip.compress(stripped(compiled.text(name)).encode(), 9, mtime=0)
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


if __name__ == "__main__":
    main()
