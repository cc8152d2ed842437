"""What a worker says of itself before a run starts. It is sent to workers as text, so it imports nothing of
slicewise, and JAX only after everything that needs none has been said.

    python preflight.py '{"checkpoint": PATH or null, "run": ID, "wait_s": 30}'

Prints lines that begin with MARK, each a JSON object. Its place comes from the environment of the run.
"""

import contextlib
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

MARK = "slicewise-preflight "
PACKAGES = ("jax", "jaxlib", "libtpu", "slicewise")
DEVICE_FILES = ("/dev/accel", "/dev/vfio/")
TIMED_S = 1.0  # of all-reduces, an axis
TPU_BYTES, CPU_BYTES = 64 << 20, 1 << 20  # that each device adds


def main(order: dict[str, Any]) -> None:
    rank, ranks = int(os.environ["SLICEWISE_PROCESS_ID"]), int(os.environ["SLICEWISE_NUM_PROCESSES"])
    tell({"host": facts(order["checkpoint"])})
    network = meet(rank, ranks, order)
    tell({"network": network})
    if not network["coordinator"]:
        tell({"devices": devices(rank, ranks)})


def tell(what: dict[str, Any]) -> None:
    print(MARK + json.dumps(what), flush=True)


def facts(checkpoint: str | None) -> dict[str, Any]:
    """What needs no other worker: versions, free disk (bytes), who holds the accelerators (pids)."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    free = {os.getcwd(): shutil.disk_usage(".").free}
    if checkpoint and "://" not in checkpoint:
        with contextlib.suppress(OSError):
            os.makedirs(checkpoint, exist_ok=True)
            free[checkpoint] = shutil.disk_usage(checkpoint).free
    return {"versions": versions, "free_bytes": free, "holders": holders()}


def holders() -> list[int]:
    """Processes that have an accelerator open, as far as this user may see."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                folder = f"/proc/{name}/fd"
                opened = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]
                if any(path.startswith(DEVICE_FILES) for path in opened):
                    found.append(int(name))
    return found


# ---------------------------------------------------------------- the coordinator and the checkpoint path


def meet(rank: int, ranks: int, order: dict[str, Any]) -> dict[str, str]:
    """Everybody reaches the first worker where JAX's coordinator will listen, and sees the file that it wrote.

    Reasons in words, "" where all is well: {"coordinator": ..., "checkpoint": ...}.
    """
    address, _, port = os.environ["SLICEWISE_COORDINATOR"].rpartition(":")
    place = (address.strip("[]"), int(port))
    token = (
        f"{order['checkpoint'].rstrip('/')}/.slicewise-preflight-{order['run']}"
        if order["checkpoint"]
        else ""
    )
    deadline_s = time.monotonic() + order["wait_s"]
    if rank == 0:
        problem = storage(lambda: write(token, order["run"])) if token else ""
        missing = gather(place, ranks - 1, deadline_s)
        if token and not problem:
            problem = storage(lambda: delete(token))
        return {"coordinator": missing, "checkpoint": problem}
    try:
        link = reach(place, deadline_s)
    except OSError as error:
        return {"coordinator": f"cannot reach {address}:{port}: {error.strerror or error}", "checkpoint": ""}
    with link:
        link.settimeout(max(1.0, deadline_s + 5 - time.monotonic()))
        answer = b""
        with contextlib.suppress(OSError):
            answer = link.recv(1)
        problem = ""
        if token and answer:
            problem = storage(lambda: read(token, order["run"]))
        return {
            "coordinator": "" if answer == b"1" else "others did not reach the coordinator",
            "checkpoint": problem,
        }


def gather(place: tuple[str, int], others: int, deadline_s: float) -> str:
    """Serves ``others`` workers: holds them until all are there, then until each has looked for the file."""
    if not others:
        return ""
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    links: list[socket.socket] = []
    try:
        with socket.create_server(("", place[1]), family=family, backlog=min(others, 4096)) as server:
            while len(links) < others and time.monotonic() < deadline_s:
                server.settimeout(max(0.01, deadline_s - time.monotonic()))
                with contextlib.suppress(TimeoutError):
                    links.append(server.accept()[0])
    except OSError as error:
        return f"cannot listen on port {place[1]}: {error.strerror}"
    everybody = len(links) == others
    for link in links:
        with link, contextlib.suppress(OSError):
            link.sendall(b"1" if everybody else b"0")
            link.settimeout(10)
            link.recv(1)
    return (
        "" if everybody else f"{others - len(links)} of {others} other workers did not reach port {place[1]}"
    )


def reach(place: tuple[str, int], deadline_s: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(place, timeout=5)
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def storage(act: Any) -> str:
    try:
        act()
    except ImportError:
        return "cannot be checked without fsspec; install it on the workers"
    except Exception as error:  # object stores have exceptions of their own
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    return ""


def opened(path: str, mode: str) -> Any:
    if "://" not in path:
        return open(path, mode)
    import fsspec

    return fsspec.open(path, mode).open()


def write(path: str, text: str) -> None:
    if "://" not in path:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    with opened(path, "w") as file:
        file.write(text)


def read(path: str, text: str) -> None:
    with opened(path, "r") as file:
        if file.read() != text:
            raise ValueError("holds something else than what the first worker wrote")


def delete(path: str) -> None:
    if "://" not in path:
        os.unlink(path)
        return
    import fsspec

    filesystem, inside = fsspec.core.url_to_fs(path)
    filesystem.rm(inside)


# ---------------------------------------------------------------- devices


def devices(rank: int, ranks: int) -> dict[str, Any]:
    """Count and kind of the local devices, their slices, and timed all-reduces; {"problem": ...} when JAX cannot."""
    try:
        import jax
    except ImportError as error:
        return {"problem": f"JAX cannot be imported by {sys.executable}: {error}"}
    try:
        if ranks > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.config.update("jax_enable_preemption_service", False)
            jax.distributed.initialize(
                os.environ["SLICEWISE_COORDINATOR"],
                num_processes=ranks,
                process_id=rank,
                initialization_timeout=60,
                heartbeat_timeout_seconds=20,
                shutdown_timeout_seconds=20,
            )
        local = jax.local_devices()
        return {
            "count": len(local),
            "kind": local[0].device_kind,
            "platform": local[0].platform,
            "slices": sorted({getattr(d, "slice_index", None) or 0 for d in local}),
            "all_reduce": list(all_reduces()),
        }
    except Exception as error:  # what a broken runtime raises is anybody's guess
        return {"problem": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}


def all_reduces() -> Iterator[dict[str, Any]]:
    """About a second of all-reduces over each network: members, bytes that each adds, seconds for one."""
    import jax
    import numpy as np

    found = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    slices = int(os.environ["SLICEWISE_NUM_SLICES"])
    if found[0].platform != "cpu":  # which does not know its slice: there they are equal ranges of processes
        found.sort(key=lambda d: (getattr(d, "slice_index", None) or 0, d.process_index, d.id))
    if len(found) % slices:
        return
    grid = np.array(found).reshape(slices, -1)
    size_bytes = CPU_BYTES if found[0].platform == "cpu" else TPU_BYTES
    for network, axis in (("ICI", 1), ("DCN", 0)):
        if grid.shape[axis] > 1:
            seconds = timed(grid, ("dcn", "ici")[axis], size_bytes)
            yield {"network": network, "members": grid.shape[axis], "bytes": size_bytes, "seconds": seconds}


def timed(grid: Any, axis: str, size_bytes: int) -> float:
    """Seconds for one all-reduce over ``axis`` of the mesh ("dcn", "ici")."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(grid, ("dcn", "ici"))
    spec = PartitionSpec(("dcn", "ici"))
    whole = (grid.size, size_bytes // 4)
    ones = jax.make_array_from_callback(
        whole, NamedSharding(mesh, spec), lambda index: np.zeros((1, whole[1]), np.float32)
    )
    reduce = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, axis), mesh=mesh, in_specs=spec, out_specs=spec))
    reduce(ones).block_until_ready()  # compiles, and opens connections
    start = time.perf_counter()
    reduce(ones).block_until_ready()
    wished = max(1, min(1000, int(TIMED_S / (time.perf_counter() - start))))
    rounds = int(multihost_utils.broadcast_one_to_all(np.int32(wished)))
    start = time.perf_counter()
    for _ in range(rounds):
        ones = reduce(ones)
        ones.block_until_ready()
    return (time.perf_counter() - start) / rounds


def run(arguments: Sequence[str]) -> None:
    main(json.loads(arguments[0]))


if __name__ == "__main__":
    run(sys.argv[1:])
