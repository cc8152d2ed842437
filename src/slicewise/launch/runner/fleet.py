"""All workers of a run: connected, given the working tree, told to start, heard, and cut off."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from slicewise.errors import ExitCode, UserError
from slicewise.launch.environment import STALE
from slicewise.launch.runner import link as links
from slicewise.launch.runner.agent_wire import STAMP
from slicewise.launch.runner.link import DENIED, HostKeys, Identities, LinkError
from slicewise.launch.runner.members import NOT_EXECUTABLE, NOT_FOUND, Member, State, names
from slicewise.launch.runner.tree import Tree
from slicewise.launch.workers import Worker

HANDSHAKES = (
    128  # at once: each takes milliseconds of processor time, and must not time out behind the others
)
SHIPMENTS = 16  # at once: each holds a few megabytes
CONNECT_S = 60.0  # for all tries to reach one worker
RETRY_S = 1.0
ANSWER_S = 300.0  # for a host to look through or write files


@dataclass(frozen=True)
class Timing:
    """Both sides send a heartbeat every ``heartbeat_s`` and give the other up after ``silence_s`` without one."""

    heartbeat_s: float = 3.0
    silence_s: float = 20.0
    orphan_grace_s: float = 5.0  # between SIGTERM and SIGKILL where the runner is gone
    failure_grace_s: float = 10.0  # for the others after a failure, to say what they have to say
    stop_grace_s: float = 30.0  # between SIGTERM and SIGKILL after Ctrl-C
    connect_s: float = CONNECT_S


class Listener(Protocol):
    """Hears what the command of a step does, in the event loop."""

    def on_output(self, member: Member, there_s: float, data: bytes) -> None: ...
    def on_event(self, member: Member, there_s: float, data: bytes) -> None: ...
    def on_change(self, member: Member) -> None: ...


@dataclass(frozen=True)
class Start:
    """One command for every worker. ``step`` can be started once in a run."""

    step: str
    arguments: Sequence[str]
    directory: str
    environment: Callable[[Member], Mapping[str, str]]
    files: Mapping[str, str] = field(default_factory=dict)  # into the run's folder, as PLACE-NAME


class Fleet:
    """An async context manager: on leaving it every link is cut, and agents end what still runs."""

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        run_id: str,
        root: str,
        python: str,
        host_keys: HostKeys,
        timing: Timing,
    ):
        """Raises UserError for what is no program's name in ``python``."""
        self.members = [Member(worker, index) for index, worker in enumerate(workers)]
        self.run_id, self.root, self.timing = run_id, root, timing
        self.listener: Listener | None = None
        self._host_keys, self._identities = host_keys, Identities()
        self._boot, self._agent = links.boot_command(python), links.agent_source()
        self._heart: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._heart = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._heart is not None
        self._heart.cancel()
        for member in self.members:
            if member.link:
                member.link.abort()
        await asyncio.sleep(0)  # for the transports to close

    async def connect(self) -> None:
        """Raises UserError, with every worker that cannot be reached and why; nothing has been started then."""
        gate = asyncio.Semaphore(HANDSHAKES)
        problems = await asyncio.gather(*(self._connect(member, gate) for member in self.members))
        denied = any(problem and problem.startswith(DENIED) for problem in problems)
        code = ExitCode.DENIED if denied else ExitCode.UNAVAILABLE
        self._raise_if(zip(self.members, problems, strict=True), "cannot be reached", code)

    async def _connect(self, member: Member, gate: asyncio.Semaphore) -> str | None:
        deadline_s = None
        while True:
            try:
                async with gate:
                    deadline_s = deadline_s or time.monotonic() + self.timing.connect_s
                    await self._open(member)
                return None
            except LinkError as error:
                if member.link:
                    member.link.abort()
                if error.final or time.monotonic() + RETRY_S > (deadline_s or 0.0):
                    return str(error)
            await asyncio.sleep(RETRY_S)

    async def _open(self, member: Member) -> None:
        member.link = await links.open_link(
            member.worker,
            host_keys=self._host_keys,
            identities=self._identities,
            boot=self._boot,
            agent=self._agent,
            on_frame=lambda kind, payload: self._on_frame(member, kind, payload),
            on_lost=lambda reason: self._on_lost(member, reason),
        )
        silence_s = self.timing.silence_s
        hello = {"root": self.root, "run": self.run_id, "silence_s": silence_s}
        answer = await self._ask(member, b"H", hello)
        member.host, member.root, member.python = tuple(answer["host"]), answer["root"], answer["python"]
        member.state = State.READY
        member.link.send(b"P", time.time())

    async def _ask(self, member: Member, kind: bytes, payload: Any) -> Any:
        """The next answer of an agent. Raises LinkError."""
        assert member.link is not None
        if member.link.closed:
            raise LinkError(member.problem or "the connection was closed")
        member.reply = asyncio.get_running_loop().create_future()
        member.link.send(kind, payload)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await member.reply
        except TimeoutError as error:
            raise LinkError(f"no answer within {ANSWER_S:g} s") from error
        finally:
            member.reply = None

    def _raise_if(self, problems: Iterable[tuple[Member, str | None]], what: str, code: ExitCode) -> None:
        groups: dict[str, list[Member]] = {}
        for member, problem in problems:
            if problem:
                groups.setdefault(problem, []).append(member)
        if groups:
            lines = [
                f"{names(group)} ({group[0].worker.host}) {what}: {why}." for why, group in groups.items()
            ]
            raise UserError("\n".join([*lines[:8], "Nothing was started."]), code=code)

    # ---------------------------------------------------------------- files

    async def ship(self, tree: Tree, name: str) -> tuple[int, int, int]:
        """Bring every host's copy of the tree up to date, once a host; (hosts, files sent in all, bytes sent in all).

        Raises UserError when a host cannot take it.
        """
        first = {member.host: member for member in reversed(self.members)}
        gate = asyncio.Semaphore(SHIPMENTS)
        packed: dict[tuple[str, ...], list[bytes]] = {}
        tasks: list[Awaitable[Any]] = [
            self._ship(member, tree, name, gate, packed) for member in first.values()
        ]
        sent = await asyncio.gather(*tasks)
        self._raise_if(
            zip(first.values(), (s if isinstance(s, str) else None for s in sent), strict=True),
            "cannot take the working tree",
            ExitCode.INTERNAL,
        )
        counts = [s for s in sent if not isinstance(s, str)]
        return len(first), sum(files for files, _ in counts), sum(size for _, size in counts)

    async def _ship(
        self,
        member: Member,
        tree: Tree,
        name: str,
        gate: asyncio.Semaphore,
        packed: dict[tuple[str, ...], list[bytes]],
    ) -> tuple[int, int] | str:
        order: dict[str, Any] = {"tree": name, "digest": tree.digest, "entries": None}
        try:
            async with gate:
                if await self._ask(member, b"T", order) is None:
                    return 0, 0
                order["entries"] = tree.entries
                lacking = tuple(await self._ask(member, b"T", order) or ())
                if lacking not in packed:  # most hosts lack the same files
                    packed.clear()
                    packed[lacking] = list(tree.batches(lacking))
                assert member.link is not None
                for batch in packed[lacking]:
                    member.link.send(b"F", batch)
                    await member.link.drained()
                await self._ask(member, b"D", order)
        except LinkError as error:
            return str(error)
        return len(lacking), sum(map(len, packed.get(lacking, ())))

    # ---------------------------------------------------------------- a command

    def start(self, start: Start, listener: Listener) -> None:
        """On all workers at once: one frame each, which nothing waits for and nothing sends again.

        Raises UserError, and starts nothing, when a worker has been lost since it was connected.
        """
        self._raise_if(
            (
                (m, m.problem or "the connection was closed")
                for m in self.members
                if m.link is None or m.link.closed
            ),
            "was lost",
            ExitCode.UNAVAILABLE,
        )
        self.listener = listener
        for member in self.members:
            assert member.link is not None
            order = {
                "step": start.step,
                "place": f"{member.worker.slice_index}-{member.worker.worker_index}",
                "arguments": list(start.arguments),
                "directory": start.directory,
                "environment": dict(start.environment(member)),
                "unset": STALE,
                "files": dict(start.files),
                "orphan_grace_s": self.timing.orphan_grace_s,
            }
            member.restart()
            member.state = State.RUNNING
            member.link.send(b"S", order)

    def signal(self, number: int) -> None:
        """To every process of the command on every worker; 0 kills."""
        for member in self.members:
            if member.link and not member.ended:
                member.link.send(b"K", number)

    def _on_frame(self, member: Member, kind: bytes, payload: bytes) -> None:
        if kind in (b"o", b"v"):
            (there_s,) = STAMP.unpack_from(payload)
            if self.listener:
                hear = self.listener.on_output if kind == b"o" else self.listener.on_event
                hear(member, there_s, payload[STAMP.size :])
            return
        what = json.loads(payload)
        if kind == b"p":
            member.unanswered = 0
            member.clock.exchanged(what[0], what[1], time.time())
        elif kind == b"x":
            self._on_end(member, what)
        elif kind == b"e":
            if member.reply:
                if not member.reply.done():
                    member.reply.set_exception(LinkError(what["message"], final=True))
            elif not member.ended:
                self._cannot_start(member, what["message"], ExitCode.INTERNAL)
        elif member.reply and not member.reply.done():
            member.reply.set_result(what)

    def _on_end(self, member: Member, what: Mapping[str, Any]) -> None:
        if "error" in what:
            hint = " (for a line of shell, run it as -- bash -c 'LINE')" if " " in what["path"] else ""
            code = NOT_FOUND if what["error"].startswith("No such file") else NOT_EXECUTABLE
            self._cannot_start(member, f"{what['path']}: {what['error']}{hint}", code)
            return
        member.end(what["status"])
        member.ended_there_s, member.left = what["time"], what["left"]
        if not member.ended:
            member.state = State.FAILED if member.code else State.DONE
            self._changed(member)

    def _cannot_start(self, member: Member, why: str, code: int) -> None:
        member.problem, member.code, member.state, member.lost_s = why, code, State.FAILED, time.time()
        self._changed(member)

    def _on_lost(self, member: Member, reason: str) -> None:
        if member.reply and not member.reply.done():
            member.reply.set_exception(LinkError(reason))
        elif member.state == State.READY:
            member.state, member.problem, member.lost_s = State.LOST, reason, time.time()
        elif member.state == State.RUNNING:
            member.state, member.problem, member.lost_s = State.LOST, reason, time.time()
            self._changed(member)

    def _changed(self, member: Member) -> None:
        if self.listener:
            self.listener.on_change(member)

    async def _beat(self) -> None:
        """Answers are counted, not timed: after a suspended laptop wakes, what was sent is still to be read."""
        allowed = max(2, round(self.timing.silence_s / self.timing.heartbeat_s))
        while True:
            await asyncio.sleep(self.timing.heartbeat_s)
            for member in self.members:
                if member.link is None or member.link.closed:
                    continue
                if member.unanswered >= allowed:
                    member.link.abort()
                    self._on_lost(member, f"no word from it for {self.timing.silence_s:g} s")
                    continue
                member.unanswered += 1
                member.link.send(b"P", time.time())
