"""The verbs that start a command on every worker: run, preflight."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from slicewise.cli.verbs import Verbs
from slicewise.errors import UserError

if TYPE_CHECKING:
    from slicewise.launch.runner.run import Options


def register(verbs: Verbs) -> None:
    sub = verbs.add("run", _run, "run a command on every worker of a target, with the working tree")
    _common(sub)
    sub.add_argument("--show", default="0", metavar="all|N", help="whose output is shown (default: worker 0)")
    sub.add_argument(
        "--preflight", action="store_true", help="check all workers first; see slicewise preflight"
    )
    sub.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="program and its arguments"
    )

    sub = verbs.add("preflight", _preflight, "check every worker of a target, and time an all-reduce")
    _common(sub)


def _common(sub: argparse.ArgumentParser) -> None:
    on = "an inventory file, emulator:NAME or qr:NAME"
    sub.add_argument("--on", required=True, metavar="TARGET", help=on)
    sub.add_argument(
        "--env", action="append", default=[], metavar="KEY[=VALUE]", help="variable for the command"
    )
    sub.add_argument(
        "--no-ship", action="store_true", help="leave the working tree here; start in the home directory"
    )
    sub.add_argument(
        "--name", metavar="NAME", help="of the tree on the workers (default: that of the folder)"
    )
    sub.add_argument(
        "--python", default="python3", metavar="PROGRAM", help="Python on the workers (default python3)"
    )
    sub.add_argument("--logs", type=Path, default=Path("slicewise-logs"), metavar="DIR", help="where logs go")
    sub.add_argument("--chip", metavar="CHIP", help="preflight: the chip that every device should be")
    sub.add_argument(
        "--devices", type=int, metavar="N", help="preflight: devices that every worker should have"
    )
    sub.add_argument("--checkpoint", metavar="PATH", help="preflight: a folder that all workers should share")
    free = "preflight: free disk that every worker should have, in GB (default 5)"
    sub.add_argument("--min-free", type=float, default=5.0, metavar="GB", help=free)


def _options(arguments: argparse.Namespace, command: list[str], preflight: bool) -> "Options":
    try:
        import asyncssh  # noqa: F401
    except ImportError:
        raise UserError("workers are reached with asyncssh; run: pip install 'slicewise[ssh]'") from None
    from slicewise.launch.preflight import Expectations
    from slicewise.launch.runner.run import Options, parse_environment

    expectations = Expectations(
        arguments.chip, arguments.devices, arguments.checkpoint, arguments.min_free * 1e9, arguments.python
    )
    return Options(
        target=arguments.on,
        command=command,
        show=getattr(arguments, "show", "0"),
        environment=parse_environment(arguments.env),
        tree=None if arguments.no_ship else Path.cwd(),
        name=arguments.name,
        python=arguments.python,
        logs=arguments.logs,
        preflight=expectations if preflight else None,
    )


def _start(options: "Options") -> int:
    from slicewise.launch.runner.run import run
    from slicewise.report.console import console

    return run(options, console())


def _run(arguments: argparse.Namespace) -> int:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise UserError("no command: expected slicewise run --on TARGET -- PROGRAM ARGUMENTS.")
    return _start(_options(arguments, command, arguments.preflight))


def _preflight(arguments: argparse.Namespace) -> int:
    return _start(_options(arguments, [], True))
