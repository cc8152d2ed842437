"""The command line: parses, dispatches, prints. Each verb imports what it needs when it runs."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from slicewise import __version__
from slicewise.cli import (
    bench,
    chaos,
    compile,
    emulator,
    flags,
    goodput,
    job,
    plan,
    plan_more,
    qr,
    roofline,
    run,
    train,
    tune,
)
from slicewise.cli.verbs import Parser, Verbs
from slicewise.errors import ExitCode, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code of errors.ExitCode."""
    arguments = _parse(_joined(sys.argv[1:] if argv is None else argv))
    try:
        return arguments.verb(arguments) or ExitCode.DONE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except Exception as error:
        return _fail(error, arguments.debug)


def _joined(argv: Sequence[str]) -> list[str]:
    """``argv`` with a verb of two words, such as 'plan serve', as one item."""
    first = " ".join(argv[:2])
    return [first, *argv[2:]] if first in (*plan_more.NAMES, *bench.NAMES) else list(argv)


def _fail(error: Exception, debug: bool) -> int:
    """Says what went wrong in a line or two. A rank leaves at once: peers must not wait for it at a barrier."""
    code = error.code if isinstance(error, UserError) else ExitCode.INTERNAL
    if isinstance(error, UserError):
        message = str(error)
    elif isinstance(error, OSError) and error.strerror:
        message = f"{error.filename or 'input or output'}: {error.strerror}."
    else:
        text = str(error).strip().split("\n")[0]
        message = f"internal error, {type(error).__name__}: {text} (--debug shows the traceback)"
    if debug:
        traceback.print_exception(error)
    from slicewise.train.progress import emit

    if not emit({"event": "error", "code": int(code), "message": message}):
        print(f"slicewise: {message}", file=sys.stderr)
    if (jax := sys.modules.get("jax")) and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """key=value overrides may stand anywhere, also behind options, where argparse leaves them over."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="slicewise",
        description="Plan, prove, run and keep alive LLM training over accelerator slices.",
        epilog="'slicewise VERB --help' explains a verb. Exit codes: 0 done, 1 internal, 2 wrong input.",
    )
    parser.add_argument("--version", action="version", version=f"slicewise {__version__}")
    parser.set_defaults(debug=False)
    verbs = Verbs(parser.add_subparsers(required=True, metavar="VERB"))
    train.register(verbs)
    plan.register(verbs)
    compile.register(verbs)
    tune.register(verbs)
    plan_more.register(verbs)
    roofline.register(verbs)
    bench.register(verbs)
    flags.register(verbs)
    emulator.register(verbs)
    job.register(verbs)
    goodput.register(verbs)
    chaos.register(verbs)
    qr.register(verbs)
    run.register(verbs)
    return parser
