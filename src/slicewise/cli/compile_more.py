"""What slicewise compile does besides reporting: search, fix, check, keep the executable."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from slicewise.cli import hardware, quantities
from slicewise.errors import ExitCode, UserError, cannot_write, write_whole

if TYPE_CHECKING:
    from slicewise.catalog.slices import Cluster
    from slicewise.compile.analysis import CompiledStep
    from slicewise.compile.check import Stored
    from slicewise.compile.compiler import Request
    from slicewise.compile.fix import Fix
    from slicewise.config import LoadedConfig, RunConfig
    from slicewise.plan.run_config import Value


def takes_options(parser: argparse.ArgumentParser) -> None:
    more = parser.add_argument_group("what else")
    more.add_argument("--fix", action="store_true", help="when it does not fit: find a change that does")
    more.add_argument(
        "--search", action="store_true", help="compile the planner's best layouts too, and rank"
    )
    more.add_argument("--top", default="12", metavar="N", help="layouts of a search (default 12)")
    more.add_argument("--minutes", default="20", metavar="M", help="of a search (default 20)")
    more.add_argument("--write", metavar="RUN.toml", help="write the layout that a search found")
    check = "fail where it is slower or larger than the result stored there; store it where none is"
    more.add_argument("--check", metavar="RESULT.json", help=check)
    serialize = "compile to machine code and write it, for the key 'executable' of a run"
    more.add_argument("--serialize", metavar="FILE", help=serialize)


FILES = ("trace", "html", "check", "serialize", "write")


def check_options(arguments: argparse.Namespace) -> None:
    """Refuses options that do not go together, and files that could not be written, before anything is compiled."""
    given = {n for n in FILES if getattr(arguments, n) is not None} | {
        n for n in ("fix", "search") if getattr(arguments, n)
    }
    alone = given & {"trace", "html", "check", "serialize", "fix"}
    if "search" in given and alone:
        raise UserError(
            f"--{min(alone)} does not go with --search, which compiles many layouts; leave one out."
        )
    if "search" in given and arguments.depth == "full":
        raise UserError("--depth full does not go with --search, which compiles schedules; leave one out.")
    if "serialize" in given and arguments.depth == "schedule":
        raise UserError(
            "--depth schedule does not go with --serialize, which writes machine code; leave one out."
        )
    if "write" in given and "search" not in given:
        raise UserError("--write writes what --search finds; add --search.")
    if {"fix", "check"} <= given:
        raise UserError("--fix does not go with --check; leave one out.")
    if arguments.program != "update" and given & {"fix", "search", "serialize"}:
        name = min(given & {"fix", "search", "serialize"})
        raise UserError(f"--{name} is for --program update, the training step.")
    if arguments.program == "restore" and given & set(FILES):
        raise UserError(
            f"--{min(given & set(FILES))} is for what is compiled, and a restore is not; leave it out."
        )
    for name in sorted(given & set(FILES)):
        check_writable(name, getattr(arguments, name))


def check_writable(name: str, path: str) -> None:
    folder = Path(path).absolute().parent
    try:
        is_file = bool(path) and not (Path(path).exists() and Path(path).is_dir())
        while name == "trace" and not folder.exists():  # that one makes its folders
            folder = folder.parent
    except OSError as error:  # such as a name that is too long
        raise cannot_write(f"--{name} {path}", error) from error
    if not is_file:
        raise UserError(f"--{name} '{path}': expected the path of a file.")
    if not folder.is_dir():
        raise UserError(f"--{name} {path}: there is no folder {folder}; make it.")
    if not os.access(folder, os.W_OK):
        raise UserError(
            f"--{name} {path} cannot be written: no permission in {folder}.", code=ExitCode.INTERNAL
        )
    if name == "write" and Path(path).exists():
        from slicewise.config import load_config

        load_config(path)  # what is no config cannot take the layout either


def search(
    arguments: argparse.Namespace,
    loaded: "LoadedConfig",
    cluster: "Cluster",
    timeout_s: float,
    limit: float | None,
) -> int:
    """Ranks layouts by what the compiler makes of them; 2 when none fits."""
    from rich.console import Console

    from slicewise.compile.search import search_compiled
    from slicewise.report import trials

    out = Console()
    top = quantities.whole(arguments.top, "--top")
    seconds = quantities.minutes(arguments.minutes, "--minutes")
    with trials.progress(Console(file=sys.stderr)) as advance:
        found = search_compiled(
            loaded.config, cluster, top=top, seconds=seconds, progress=advance,
            timeout_s=timeout_s, memory_limit_bytes=limit,
        )  # fmt: skip
    if arguments.json:
        print(trials.document(found))
    else:
        trials.show(out, found)
    if found.best is None:
        return ExitCode.USER
    if arguments.write:
        name, changed = found.best.name, found.best.changed
        said = write_found(arguments.write, loaded, changed, name, f"Found by the compiler: {name}.")
        print(said, file=beside(arguments))
    return ExitCode.DONE


def beside(arguments: argparse.Namespace) -> TextIO:
    """Where a line goes that is no part of the report: standard output holds JSON alone."""
    return sys.stderr if arguments.json else sys.stdout


def write_found(
    path: str, loaded: "LoadedConfig", changed: "Mapping[str, Value]", name: str, note: str
) -> str:
    """A new file holds the config that was given, with what was found, and begins with ``note``; one that exists takes
    what was found alone. Returns a line that says so, with the ``name`` of what was found."""
    from slicewise.plan.write import write_config

    values = changed if Path(path).exists() else given_values(loaded) | dict(changed)
    written = write_config(path, values, note=note)
    return f"{path}: {name}{written.note}"


def given_values(loaded: "LoadedConfig") -> "dict[str, Value]":
    """The keys that a file or the command line set."""
    values = {k: v for section in loaded.config.model_dump().values() for k, v in section.items()}
    return {
        k: values[k] for k, origin in loaded.origins.items() if origin != "default" and values[k] is not None
    }


def restore(arguments: argparse.Namespace, config: "RunConfig", cluster: "Cluster", timeout_s: float) -> int:
    """Says which part of each array a device holds and what each host has to read."""
    from slicewise.compile.compiler import Request
    from slicewise.compile.state_layout import state_layout
    from slicewise.report import state_layout as report

    found = state_layout(Request(config, cluster, "restore"), timeout_s=timeout_s)
    hardware.show(arguments, lambda: report.document(found), lambda out: report.show(out, found))
    return ExitCode.DONE


def fix(
    arguments: argparse.Namespace,
    config: "RunConfig",
    cluster: "Cluster",
    timeout_s: float,
    limit: float | None,
) -> int:
    """Finds a change that fits and prints it; 2 when there is none."""
    from slicewise.compile.fix import fixed
    from slicewise.costs.units import duration
    from slicewise.report import trials

    def tried(one: "Fix") -> None:
        what = trials.memory(one.step) if one.step else one.problem
        print(f"  {' '.join(one.overrides)}: {what}", file=sys.stderr)

    found = fixed(config, cluster, tried=tried, timeout_s=timeout_s, memory_limit_bytes=limit)
    if found is None or found.step is None:
        raise UserError("no single change makes it fit; take more chips, a larger slice or a smaller batch.")
    took, planned = duration(found.step.estimate.step_time_s), duration(found.planned_s)
    said = f"{trials.memory(found.step)}, {took} a step (the plan said {planned})."
    print(f"\n{' '.join(found.overrides)} makes it fit: {said}", file=beside(arguments))
    return ExitCode.DONE


def stored(arguments: argparse.Namespace, request: "Request") -> "Stored | None":
    """What ``--check`` compares with: read before minutes go into compiling."""
    from slicewise.compile.check import read

    return read(arguments.check, request) if arguments.check else None


def check(arguments: argparse.Namespace, step: "CompiledStep", before: "Stored | None") -> int:
    """Compares with the stored result, or stores this one; 2 when it got worse or does not fit."""
    from slicewise.compile.check import problems, write

    if found := problems(step, before):
        for problem in found:
            print(f"check: {problem}", file=sys.stderr)
        return ExitCode.USER
    if before is None:
        write(arguments.check, step)
        print(f"check: {arguments.check} holds this result from now on.", file=beside(arguments))
    else:
        print(f"check: as good as {arguments.check}.", file=beside(arguments))
    return ExitCode.DONE


def save_executable(step: "CompiledStep", path: str) -> str:
    """Copies the machine code to ``path``."""
    from slicewise.compile.compiler import EXECUTABLE, cache_directory

    if not step.fits:
        return f"{path}: not written, for it does not fit"
    kept = cache_directory() / step.request.key
    try:
        code = (kept / EXECUTABLE).read_bytes()
    except OSError as e:
        what = f"the executable that is kept in {kept} cannot be read: {e.strerror}; delete that folder and ask again."
        raise UserError(what, code=ExitCode.INTERNAL) from e
    write_whole(path, code, f"--serialize {path}")
    return f"{path}: the executable"
