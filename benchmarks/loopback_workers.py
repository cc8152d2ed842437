"""Workers on this machine: SSH servers in one process, each with a port and a home of its own.

    python benchmarks/loopback_workers.py FOLDER SLICES WORKERS_PER_SLICE

Writes FOLDER/hosts.toml, prints "ready", and serves until its standard input ends. A command runs as a child
process whose standard streams are those of the channel; when the channel ends, so do they.
"""

import asyncio
import os
import resource
import sys
from functools import partial
from pathlib import Path

import asyncssh


async def serve(home: Path, process: asyncssh.SSHServerProcess[bytes]) -> None:
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home)}  # as a login gives it
    child = await asyncio.create_subprocess_shell(
        process.command or "true",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=home,
        env=environment,
    )
    await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
    process.exit(await child.wait())


async def main(folder: Path, slices: int, per_slice: int) -> None:
    host_key, user_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    identity = folder / "key"
    user_key.write_private_key(str(identity))
    identity.chmod(0o600)
    (folder / "authorized").write_bytes(user_key.export_public_key())
    lines = [f'user = "worker"\nidentity_file = "{identity}"']
    listeners = []
    for s in range(slices):
        hosts = []
        for w in range(per_slice):
            home = folder / f"home-{s}-{w}"
            home.mkdir()
            listener = await asyncssh.listen(
                "127.0.0.1",
                0,
                server_host_keys=[host_key],
                authorized_client_keys=str(folder / "authorized"),
                process_factory=partial(serve, home),
                encoding=None,
                backlog=8,
            )
            listeners.append(listener)
            hosts.append(f'"127.0.0.1:{listener.get_port()}"')
        lines.append(f"[[slices]]\nhosts = [{', '.join(hosts)}]")
    (folder / "hosts.toml").write_text("\n".join(lines) + "\n")
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # the kernel closes what is open, and agents end what they keep


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run(main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3])))
