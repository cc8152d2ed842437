"""compile: what the TPU compiler makes of a run's programs for slices that nobody has rented."""

import argparse
from typing import TYPE_CHECKING

from slicewise.cli import compile_more, hardware, quantities
from slicewise.cli.train import load, takes_config
from slicewise.cli.verbs import Verbs
from slicewise.errors import ExitCode

if TYPE_CHECKING:
    from slicewise.compile.analysis import CompiledStep
    from slicewise.compile.beside import Comparison
    from slicewise.compile.compiler import Depth

PROGRAMS = ("update", "init", "evaluate", "prefill", "decode", "restore")


def register(verbs: Verbs) -> None:
    sub = verbs.add("compile", _compile, "compile a run for absent slices: does it fit, and how fast is it")
    takes_config(sub)
    where = sub.add_argument_group("for what")
    hardware.takes_chip(where)
    hardware.takes_slice(where)
    how = sub.add_argument_group("how")
    depths = "schedule: order, collectives and memory (default); full: also machine code and its cycles"
    how.add_argument("--depth", choices=("schedule", "full"), help=depths)
    how.add_argument("--program", choices=PROGRAMS, default="update", help="of the run (default update)")
    how.add_argument(
        "--timeout", default="1h", metavar="TIME", help="stops the compiler after it (default 1h)"
    )
    how.add_argument("--memory-limit", metavar="BYTES", help="stops the compiler when it uses more: 8GB")
    compile_more.takes_options(sub)
    sub.add_argument(
        "--trace",
        metavar="FILE",
        help="write the predicted timeline: .json, .json.gz (Perfetto), .xplane.pb (xprof)",
    )
    hardware.takes_html(sub)
    hardware.takes_json(sub)


def _compile(arguments: argparse.Namespace) -> int:
    from slicewise.compile.analysis import analyse
    from slicewise.compile.beside import beside_plan
    from slicewise.compile.compiler import Request, compile_request
    from slicewise.report import compiled as report
    from slicewise.report import timeline

    compile_more.check_options(arguments)
    if arguments.trace:
        timeline.check_path(arguments.trace)
    timeout_s = quantities.seconds(arguments.timeout, "--timeout")
    limit = (
        quantities.byte_count(arguments.memory_limit, "--memory-limit") if arguments.memory_limit else None
    )
    loaded, cluster = load(arguments), hardware.cluster(arguments)
    config = loaded.config
    if arguments.search:
        return compile_more.search(arguments, loaded, cluster, timeout_s, limit)
    if arguments.program == "restore":
        return compile_more.restore(arguments, config, cluster, timeout_s)
    depth: Depth = "full" if arguments.serialize else arguments.depth or "schedule"
    request = Request(config, cluster, arguments.program, depth, bool(arguments.serialize))
    before = compile_more.stored(arguments, request)
    step = analyse(compile_request(request, timeout_s=timeout_s, memory_limit_bytes=limit))
    comparison = beside_plan(request, step.estimate)
    hardware.show(
        arguments,
        lambda: report.document(step, comparison),
        lambda out: report.show(out, step, comparison),
        _files(arguments, step, comparison),
    )
    if arguments.check:
        return compile_more.check(arguments, step, before)
    if step.fits:
        return ExitCode.DONE
    return compile_more.fix(arguments, config, cluster, timeout_s, limit) if arguments.fix else ExitCode.USER


def _files(arguments: argparse.Namespace, step: "CompiledStep", comparison: "Comparison") -> list[str]:
    """Writes the trace and the page that were asked for, and says which."""
    written = []
    if arguments.serialize:
        written.append(compile_more.save_executable(step, arguments.serialize))
    if arguments.trace:
        from slicewise.report import timeline

        written.append(timeline.write(step, arguments.trace))
    if arguments.html:
        from slicewise.report import compiled_page

        written.append(hardware.save_html(arguments.html, compiled_page.page(step, comparison)))
    return written
