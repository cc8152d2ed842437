"""What runs on a worker: takes files, starts one command, sends its output, and leaves no process behind.

The runner sends the files agent_wire, agent_tree and this one as one text, and a bare Python 3.8 executes it, so they
import nothing but the standard library and each other. Both sides speak in frames: one byte of kind, four of length
(big-endian), then the payload.

    runner to agent                                  agent to runner
    H  hello, JSON: see Agent.hello                  h  host, folder, Python's version; JSON
    T  a tree, JSON: see Agent.compare               t  the paths it lacks, JSON; null: none
    F  files, packed and compressed
    D  all files have come, JSON: the tree's list    f  done, JSON: number of files
    S  start, JSON: see Agent.start                  s  started, JSON: the pid
    K  a signal's number, JSON; 0 kills all          o  time (double), then output
    P  heartbeat, JSON: any number                   p  the same number and the time here, JSON
                                                     v  time (double), then bytes of events
                                                     x  ended, JSON: wait status, time, pids that stayed
                                                     e  error, JSON: message; the agent goes on

Two processes: the agent talks, and the keeper, its fork, is the parent of the command and of all that the
command leaves behind (a child subreaper). Whichever of the two dies, the other ends every process.
"""

import _signal as signal  # what signal is made of; that imports enum
import ctypes
import gc
import os
import select
import sys
import time

from slicewise.launch.runner.agent_tree import Tree, remove_folder
from slicewise.launch.runner.agent_wire import MAGIC, STAMP, Frames, dumps, frame, loads, suppress

READ_BYTES = 1 << 16
MAX_BUFFERED_BYTES = 1 << 20  # of output that the runner has not taken yet; then the command has to wait
DRAIN_S = 2.0  # for output after the last process has gone
KILL_S = 10.0  # for killed processes to go; one in an uninterruptible system call stays longer
KEPT_RUNS = 20
_SET_CHILD_SUBREAPER, _SET_DEATH_SIGNAL = 36, 1  # linux/prctl.h


def processes_below(pid):
    """Every living process that descends from ``pid``; one that is just being born or reparented may be missed."""
    found, todo = [], [pid]
    while todo:
        children = children_of(todo.pop())
        found += [child for child in children if is_alive(child)]
        todo += children
    return found


def children_of(pid):
    """From the lists that most kernels keep for each thread; elsewhere by a look at every process."""
    found: list = []
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and parent_of(name) == pid]
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def parent_of(pid):
    fields = stat_of(pid)
    return int(fields[1]) if fields else 0


def is_alive(pid):
    fields = stat_of(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X")


def stat_of(pid):
    """The fields of /proc/PID/stat from the state on, or None."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def send_signal(pids, number):
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


class Keeper:
    """Starts the command, waits for it, and ends all that descends from it."""

    def __init__(self, orders, reports, libc):
        self.orders, self.reports, self.libc = orders, reports, libc

    def run(self, start, output, events):
        """Never returns. ``orders`` gives bytes: signals to send, 0 to kill all; its end kills too."""
        self.libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            child = spawn(start, output, events, self.libc)
        except OSError as error:
            self.report({"error": error.strerror, "path": start["arguments"][0], "errno": error.errno})
            os._exit(0)
        os.close(output)
        os.close(events)
        self.report({"pid": child})
        status = self.watch(child, wake_read, start["orphan_grace_s"])
        left = self.end_all()
        self.report({"status": status[0], "time": status[1], "left": left})
        os._exit(0)

    def report(self, what):
        with suppress(OSError):
            os.write(self.reports, (dumps(what) + "\n").encode())

    def watch(self, child, wake, grace_s):
        """The wait status of ``child`` and when it ended; kills it when the agent says so or is gone."""
        deadline, ended, watched = None, None, [self.orders, wake]
        while ended is None:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = select.select(watched, [], [], timeout)[0]
            if deadline is not None and time.monotonic() >= deadline:
                send_signal(processes_below(os.getpid()), signal.SIGKILL)
                deadline = time.monotonic() + 1.0
            if wake in ready:
                os.read(wake, 4096)
                ended = self.reap(child)
            if self.orders in ready:
                orders = os.read(self.orders, 64)
                if not orders:  # the agent is gone: the command has this long to save its state
                    watched.remove(self.orders)
                    deadline = time.monotonic() + grace_s
                for number in orders or bytes([signal.SIGTERM]):
                    below = processes_below(os.getpid())
                    send_signal(below, number or signal.SIGKILL)
                    if number == signal.SIGTERM:  # one that was stopped goes on so that it can act on it
                        send_signal(below, signal.SIGCONT)
        return ended

    def reap(self, child):
        """The wait status of ``child`` and the time, when it has ended. Raises ChildProcessError with no child."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return None
            if pid == child:
                return status, time.time()

    def end_all(self):
        """Kills what is left, daemons included; pids that would not go.

        All orphans below a subreaper become its children, so when it has none, nothing is left anywhere.
        """
        deadline = time.monotonic() + KILL_S
        try:
            while time.monotonic() < deadline:
                self.reap(0)
                send_signal(processes_below(os.getpid()), signal.SIGKILL)
                time.sleep(0.01)
        except ChildProcessError:
            return []
        return processes_below(os.getpid())


def spawn(start, output, events, libc):
    """Forks and executes; raises OSError when the program cannot be executed. Returns the pid."""
    failed_read, failed_write = os.pipe()  # closed by exec
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.set_inheritable(events, True)
            os.umask(start["umask"])
            os.chdir(start["directory"])
            os.execvpe(start["arguments"][0], start["arguments"], start["environment"])
        except OSError as error:
            os.write(failed_write, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(failed_write)
    failed = os.read(failed_read, 16)
    os.close(failed_read)
    if failed:
        os.waitpid(pid, 0)
        raise OSError(int(failed), os.strerror(int(failed)))
    return pid


class Agent:
    """The talking half. Ends when the runner is gone, or silent for too long."""

    def __init__(self, umask):
        self.umask = umask  # of the user: what the command is to have
        self.libc = ctypes.CDLL(None)
        self.frames, self.outgoing = Frames(), bytearray()
        self.heard_s, self.silence_s = time.monotonic(), 60.0
        self.root = self.run_folder = ""
        self.tree: Tree
        self.report: dict | None = None
        self.keeper = 0
        self.orders: int | None = None
        self.reports: int | None = None
        self.output: int | None = None
        self.events: int | None = None
        self.report_data = b""
        self.group = 0
        self.ending_s: float | None = None

    def serve(self):
        for fd in (0, 1):
            os.set_blocking(fd, False)
        self.outgoing += MAGIC
        try:
            while self.step():
                pass
        finally:
            self.end()

    def step(self):
        """One round of reading and writing; False when the runner is gone."""
        reading = [0] + [fd for fd in (self.reports,) if fd is not None]
        if len(self.outgoing) < MAX_BUFFERED_BYTES:
            reading += [fd for fd in (self.output, self.events) if fd is not None]
        quiet_s = time.monotonic() - self.heard_s
        if quiet_s >= self.silence_s:
            return False
        wait_s = self.silence_s - quiet_s if self.ending_s is None else 0.05
        ready, writable, _ = select.select(reading, [1] if self.outgoing else [], [], wait_s)
        if writable:
            with suppress(BlockingIOError):
                del self.outgoing[: os.write(1, self.outgoing[:READ_BYTES])]
        for fd in (self.output, self.events):
            if fd in ready:
                self.read_output(fd)
        if self.reports in ready:
            self.read_reports()
        if self.ending_s is not None:
            self.finish()
        return self.read_input() if 0 in ready else True

    def send(self, kind, payload):
        self.outgoing += frame(kind, payload)

    def read_input(self):
        try:
            data = os.read(0, READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        self.heard_s = time.monotonic()
        for kind, payload in self.frames.feed(data):
            try:
                self.handle(kind, payload)
            except OSError as error:
                name = (error.filename or "") and str(error.filename) + ": "
                self.send(b"e", {"message": f"{name}{error.strerror}"})
        return True

    def handle(self, kind, payload):
        if kind == b"F":
            import zlib

            self.tree.unpack(zlib.decompress(payload))
            return
        order = loads(payload.decode())
        if kind == b"H":
            self.hello(order)
        elif kind == b"T":
            self.compare(order)
        elif kind == b"D":
            self.tree.finish(order["digest"], order["entries"])
            self.send(b"f", {"files": len(order["entries"])})
        elif kind == b"S":
            self.start(order)
        elif kind == b"K" and self.orders is not None:
            with suppress(OSError):
                os.write(self.orders, bytes([order]))
        elif kind == b"P":
            self.send(b"p", [order, time.time()])

    def hello(self, order):
        """``order``: root (a folder, ~ allowed), run, silence_s. The host is told apart by its boot and folder."""
        self.silence_s = order["silence_s"]
        self.root = os.path.realpath(os.path.expanduser(order["root"]))
        self.run_folder = os.path.join(self.root, "runs", order["run"])
        os.makedirs(self.run_folder, mode=0o700, exist_ok=True)
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        found = os.stat(self.root)
        host = [boot, self.root, found.st_dev, found.st_ino]
        self.send(b"h", {"host": host, "root": self.root, "python": "{}.{}.{}".format(*sys.version_info)})

    def compare(self, order):
        """``order``: tree (a name), digest, entries ([path, mode, digest, size] each) or None.

        Without entries the answer is null (all here) or true (send them). Writes are atomic and what is on
        disk is looked at each time, so two runs that ship into one tree need no lock.
        """
        os.makedirs(os.path.join(self.root, "trees"), mode=0o700, exist_ok=True)
        self.tree = Tree(os.path.join(self.root, "trees", order["tree"]))
        self.send(b"t", self.tree.lacks(order["digest"], order["entries"]))

    def start(self, order):
        """``order``: step, place, arguments, environment, unset, directory, files, orphan_grace_s.

        A file in the run's folder, created here and never again, makes a second start of the same step fail.
        """
        place = order["place"]
        mark = os.path.join(self.run_folder, f"{order['step']}-{place}")
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        for name, text in order["files"].items():
            path = os.path.join(self.run_folder, f"{place}-{name}")
            with open(path, "w", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
                file.write(text)
        known = {"RUN": self.run_folder, "PLACE": order["place"], "ROOT": self.root}
        order["arguments"] = [_fill(word, known) for word in order["arguments"]]
        order["directory"] = os.path.expanduser(_fill(order["directory"], known))
        os.makedirs(order["directory"], exist_ok=True)
        self.fork(order)

    def fork(self, order):
        orders_read, self.orders = os.pipe()
        self.reports, reports_write = os.pipe()
        self.output, output_write = os.pipe()
        self.events, events_write = os.pipe()
        environment = {k: v for k, v in os.environ.items() if k not in order["unset"]}
        environment.update(order["environment"])
        environment["SLICEWISE_EVENTS_FD"] = str(events_write)
        order["environment"] = environment
        order["umask"] = self.umask
        self.ending_s = self.report = None
        self.report_data = b""
        gc.freeze()  # a collection writes to every object, and what is written is shared no longer
        self.keeper = os.fork()
        if self.keeper == 0:
            try:
                os.setsid()
                null = os.open(os.devnull, os.O_RDWR)
                for fd in (0, 1, 2):  # so that the connection's end does not wait for the keeper
                    os.dup2(null, fd)
                for fd in (self.orders, self.reports, self.output, self.events):
                    os.close(fd)
                Keeper(orders_read, reports_write, self.libc).run(order, output_write, events_write)
            finally:
                os._exit(1)
        for fd in (orders_read, reports_write, output_write, events_write):
            os.close(fd)
        for fd in (self.output, self.events):
            os.set_blocking(fd, False)

    def read_output(self, fd):
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            os.close(fd)
            if fd == self.output:
                self.output = None
            else:
                self.events = None
            return False
        self.send(b"o" if fd == self.output else b"v", STAMP.pack(time.time()) + data)
        return True

    def read_reports(self):
        """What the keeper says; at its end the command has ended, and all below it."""
        assert self.reports is not None
        assert self.orders is not None
        data = os.read(self.reports, READ_BYTES)
        self.report_data += data
        if not data:
            os.close(self.reports)
            os.close(self.orders)
            self.reports = self.orders = None
            os.waitpid(self.keeper, 0)
            self.ending_s = time.monotonic() + DRAIN_S
            return
        *lines, self.report_data = self.report_data.split(b"\n")
        for line in lines:
            report = loads(line.decode())
            if "pid" in report:
                self.group = report["pid"]
                self.send(b"s", {"pid": self.group})
            else:
                self.report = report

    def finish(self):
        """Sends how the command ended, once all its output has been."""
        assert self.ending_s is not None
        if (self.output is not None or self.events is not None) and time.monotonic() < self.ending_s:
            return
        for fd in (self.output, self.events):
            if fd is not None:
                os.close(fd)
        self.output = self.events = self.ending_s = None
        report = self.report
        if report is None:  # the keeper was killed; what it kept has become the init process's
            if self.group:
                with suppress(OSError):
                    os.killpg(self.group, signal.SIGKILL)
            report = {"status": int(signal.SIGKILL), "time": time.time(), "left": []}
        self.group = 0
        self.send(b"x", report)

    def end(self):
        """The runner is gone: the keeper sees the end of its orders, and ends everything."""
        for fd in (self.orders, self.output, self.events):
            if fd is not None:
                os.close(fd)
        prune(os.path.join(self.root, "runs") if self.root else "")
        os._exit(0)


def _fill(word, known):
    """``{slicewise:RUN}``, ``{slicewise:PLACE}`` and ``{slicewise:ROOT}`` are known to the worker alone."""
    for name, value in known.items():
        word = word.replace("{slicewise:" + name + "}", value)
    return word


def prune(folder):
    """Removes all but the newest folders of runs."""
    with suppress(OSError):
        names = sorted(os.listdir(folder))
        for name in names[:-KEPT_RUNS]:
            remove_folder(os.path.join(folder, name))


def main():
    umask = os.umask(0o077)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.setsid()
    agent = Agent(umask)
    with suppress(AttributeError):  # where the C library is another one
        agent.libc.malloc_trim(0)  # what compiling this file took
    agent.serve()


if __name__ == "slicewise_agent":
    main()
