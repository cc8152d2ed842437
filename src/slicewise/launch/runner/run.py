"""``slicewise run``: ship, start everywhere, watch, and say what failed first."""

import asyncio
import contextlib
import hashlib
import os
import re
import resource
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slicewise.costs.units import counted
from slicewise.errors import ExitCode, UserError, cannot_write
from slicewise.launch.environment import coordinator_port, place_environment
from slicewise.launch.preflight import Expectations, check
from slicewise.launch.runner.course import Course
from slicewise.launch.runner.display import Display
from slicewise.launch.runner.fleet import Fleet, Start, Timing
from slicewise.launch.runner.link import HostKeys
from slicewise.launch.runner.members import Member, elapsed, exit_code, verdict
from slicewise.launch.runner.tree import Tree, read_tree
from slicewise.launch.workers import Worker, workers_of

if TYPE_CHECKING:
    from rich.console import Console

ROOT = "~/.slicewise"  # on workers
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Options:
    """What the command line says. ``command`` may be empty: then only ``preflight`` runs."""

    target: str
    command: Sequence[str]
    show: str = "0"
    environment: Mapping[str, str] = field(default_factory=dict)
    tree: Path | None = None  # None ships nothing, and the command starts in the home directory
    name: str | None = None
    python: str = "python3"
    logs: Path = Path("slicewise-logs")
    root: str = ROOT
    preflight: Expectations | None = None
    timing: Timing = field(default_factory=Timing)


def parse_environment(items: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE``, or ``KEY`` for the value that it has here, which then shows on no command line."""
    environment = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not _VARIABLE.fullmatch(key):
            raise UserError(f"--env {item!r}: expected NAME=VALUE, or NAME for the value it has here.")
        if not equals and key not in os.environ:
            raise UserError(f"--env {key}: it is not set here. Set it, or give a value: --env {key}=VALUE.")
        environment[key] = value if equals else os.environ[key]
    return environment


def parse_show(text: str, workers: Sequence[Worker]) -> frozenset[int] | None:
    """Indices of the workers whose output is shown; None for all. Raises UserError."""
    if text == "all":
        return None
    if not text.isdecimal() or int(text) >= len(workers):
        raise UserError(f"--show {text!r}: expected all, or a worker from 0 to {len(workers) - 1}.")
    return frozenset([int(text)])


def run(options: Options, console: "Console") -> int:
    """The exit code of the first failing worker, 128 + n after signal n to this process; see exit_code.

    Raises UserError when nothing could be started.
    """
    if options.preflight:
        options.preflight.check()
    workers = workers_of(options.target)
    shown = parse_show(options.show, workers)
    tree = read_tree(options.tree) if options.tree else None
    name = options.name or (_default_name(tree.folder) if tree else "home")
    if not _NAME.fullmatch(name):
        raise UserError(f"--name {name!r}: expected letters, digits, '.', '_' and '-', such as my-run.")
    _allow_files(len(workers))
    run_id = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)
    folder = _log_folder(options.logs, run_id)
    session = _Session(options, workers, shown, tree, name, run_id, folder, console)
    return asyncio.run(session.run())


def _default_name(folder: Path) -> str:
    """Its name, and what tells it from another folder of that name: one must not remove the files of the other."""
    path = f"{os.uname().nodename}:{folder}"
    return f"{re.sub('[^A-Za-z0-9_]', '_', folder.name)[:40]}-{hashlib.sha256(path.encode()).hexdigest()[:6]}"


def _allow_files(workers: int) -> None:
    """A connection and a log each. Raises UserError when the system does not allow as many."""
    needed = 3 * workers + 100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY, -1) and hard < needed:
        raise UserError(
            f"{workers} workers need {needed} open files, at most {hard} are allowed here. Raise 'ulimit -Hn'.",
            code=ExitCode.INTERNAL,
        )
    if soft not in (resource.RLIM_INFINITY, -1) and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _log_folder(logs: Path, run_id: str) -> Path:
    """A folder of this run. One that is made for logs is ignored by git: they are not to be shipped.

    Raises UserError.
    """
    try:
        made = not logs.exists()
        (logs / run_id).mkdir(parents=True, mode=0o700)
        if made:
            (logs / ".gitignore").write_text("*\n")
    except OSError as error:
        raise cannot_write(f"--logs {error.filename}", error) from error
    return logs / run_id


@dataclass
class _Session:
    options: Options
    workers: Sequence[Worker]
    shown: frozenset[int] | None
    tree: Tree | None
    name: str
    run_id: str
    folder: Path
    console: "Console"
    course: Course | None = None
    asked: signal.Signals | None = None

    async def run(self) -> int:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._ask, number)
        options = self.options
        fleet = Fleet(
            self.workers,
            run_id=self.run_id,
            root=options.root,
            python=options.python,
            host_keys=HostKeys(self.folder / "known_hosts", Path("~/.ssh/known_hosts").expanduser()),
            timing=options.timing,
        )
        began_s = time.monotonic()
        title = f"{options.target}, run {self.run_id}"
        broken = lambda: loop.call_soon_threadsafe(self._ask, signal.SIGHUP)  # noqa: E731
        try:
            with Display(self.console, fleet.members, title, began_s, broken) as display:
                async with fleet:
                    code, last = await self._stages(fleet, display)
        except asyncio.CancelledError:
            assert self.asked is not None
            return 128 + self.asked
        with contextlib.suppress(OSError):  # nobody may be there to read it
            for line in last:
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        return code

    def _ask(self, number: signal.Signals) -> None:
        if self.course:
            self.course.ask(number)
        elif self.asked is None:  # nothing has been started: there is nothing to save
            self.asked = number
            self._task.cancel()

    async def _stages(self, fleet: Fleet, display: Display) -> tuple[int, list[str]]:
        """Exit code, and the lines that come last."""
        began_s = time.monotonic()
        slices = 1 + max(worker.slice_index for worker in self.workers)
        where = f"{counted(len(self.workers), 'worker')} of {counted(slices, 'slice')}"
        await fleet.connect()
        display.say(f"connected to {where} in {elapsed(began_s)}, logs in {self.folder}")
        if self.tree is not None:
            began_s = time.monotonic()
            hosts, files, size = await fleet.ship(self.tree, self.name)
            display.say(
                f"working tree of {counted(len(self.tree.entries), 'file')}: sent {counted(files, 'file')}, "
                f"{size / 1e6:.2f} MB, to {counted(hosts, 'host')} in {elapsed(began_s)}"
            )
        directory = f"{{slicewise:ROOT}}/trees/{self.name}" if self.tree else "~"
        port = coordinator_port(self.workers)
        if self.options.preflight is not None:
            report = await check(fleet, self.options.preflight, self._environment(port), directory)
            (self.folder / "preflight.json").write_text(report.as_json())
            for line in report.table():
                display.say(line)
            if report.problems or not self.options.command:
                return (ExitCode.INTERNAL if report.problems else ExitCode.DONE), list(report.problems)
        return await self._command(fleet, display, directory, port)

    def _environment(self, port: int):
        def of(member: Member) -> dict[str, str]:
            return {**place_environment(self.workers, member.worker, port), **self.options.environment}

        return of

    async def _command(
        self, fleet: Fleet, display: Display, directory: str, port: int
    ) -> tuple[int, list[str]]:
        began_s = time.monotonic()
        start = Start("command", self.options.command, directory, self._environment(port))
        self.course = Course(fleet, display, self.shown, self.folder)
        fleet.start(start, self.course)
        await self.course.watch()
        code = exit_code(fleet.members, self.course.asked)
        last = verdict(fleet.members)
        if not last and code == ExitCode.DONE:
            last = [f"all {counted(len(self.workers), 'worker')} done after {elapsed(began_s)}"]
        elif self.course.asked and not last:
            last = [f"stopped by {self.course.asked.name}; no process is left on any worker"]
        return code, last
