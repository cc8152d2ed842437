"""slicewise chaos: a run under faults on purpose, held to what it comes to without them."""

import argparse
import sys
from typing import TYPE_CHECKING

from slicewise.cli import hardware, quantities
from slicewise.cli.verbs import Verbs
from slicewise.errors import ExitCode, UserError

if TYPE_CHECKING:
    from slicewise.launch.chaos.run import Outcome


def register(verbs: Verbs) -> None:
    sub = verbs.add(
        "chaos", _chaos, "train on an emulated cluster under faults, and check that nothing is lost"
    )
    sub.add_argument("config", nargs="?", metavar="RUN.toml", help="config file (default: all defaults)")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="replace a key of the config")
    shape = "slices x hosts per slice x devices per host (default 2x1x1)"
    sub.add_argument("--local", default="2x1x1", metavar="SxHxD", help=shape)
    kinds = "of kill, stop, exception, terminate, corrupt, disk-full (default: all)"
    sub.add_argument("--faults", metavar="A,B", help=kinds)
    sub.add_argument("--seed", default="0", metavar="N", help="of the first schedule (default 0)")
    sub.add_argument("--schedules", default="1", metavar="K", help="with seeds N, N + 1, ... (default 1)")
    start = "most time without a sign of life before the first step (default 30s)"
    sub.add_argument("--start-timeout", default="30s", metavar="T", help=start)
    stall = "most time without progress after it (default 8s)"
    sub.add_argument("--stall-timeout", default="8s", metavar="T", help=stall)
    hardware.takes_json(sub)


def _chaos(arguments: argparse.Namespace) -> int:
    from slicewise.cli.train import load
    from slicewise.launch.chaos import run, schedule, table
    from slicewise.launch.policy import Watch
    from slicewise.launch.targets.local import parse_shape

    kinds = schedule.parse_kinds(arguments.faults) if arguments.faults is not None else schedule.KINDS
    seed, count = _seed(arguments.seed), quantities.whole(arguments.schedules, "--schedules")
    watch = Watch(
        start_timeout_s=quantities.seconds(arguments.start_timeout, "--start-timeout"),
        stall_timeout_s=quantities.seconds(arguments.stall_timeout, "--stall-timeout"),
        failure_grace_s=0.5,
    )
    setup = run.prepare(load(arguments), parse_shape(arguments.local), watch)
    config = setup.loaded.config
    steps, every = config.run.steps, config.checkpoint.checkpoint_every
    expected, usual_s = run.undisturbed(setup)
    print(f"undisturbed: {steps} steps in {usual_s:.1f} s", file=sys.stderr)
    outcomes: list[Outcome] = []
    for number in range(seed, seed + count):
        made = schedule.make(number, kinds, setup.shape, steps=steps, every=every)
        outcomes.append(run.disturbed(setup, made, expected, usual_s))
        print(table.line(outcomes[-1]), file=sys.stderr, flush=True)
    hardware.show(arguments, lambda: table.document(outcomes), lambda out: table.text(out, outcomes))
    return ExitCode.INTERNAL if any(outcome.violations for outcome in outcomes) else ExitCode.DONE


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"--seed {text}: expected a whole number, 0 or more.")
    return int(text)
