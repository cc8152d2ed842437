"""The working tree as the workers get it: what git would not ignore, by content."""

import hashlib
import json
import os
import subprocess
import tempfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from slicewise.errors import ExitCode, UserError
from slicewise.launch.runner.agent_tree import pack

MAX_TREE_BYTES = 1 << 30  # more is data that was forgotten in .gitignore
BATCH_BYTES = 4 << 20  # of files in one frame
_LIST = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")

Entry = tuple[str, str, str, int]  # path, "file" | "exec" | "link", SHA-256, size in bytes


@dataclass(frozen=True)
class Tree:
    """The files of a folder at one moment. ``digest`` names them all."""

    folder: Path
    entries: tuple[Entry, ...]
    digest: str

    @property
    def size_bytes(self) -> int:
        return sum(entry[3] for entry in self.entries)

    def batches(self, paths: Collection[str]) -> Iterator[bytes]:
        """The files of ``paths``, packed and compressed, a few megabytes each.

        Raises UserError when a file has changed since the tree was read: workers must not differ.
        """
        wanted, entries, contents = set(paths), [], []
        for entry in self.entries:
            if entry[0] in wanted:
                content = _content(self.folder / entry[0])
                if hashlib.sha256(content).hexdigest() != entry[2]:
                    raise UserError(f"{self.folder / entry[0]} changed while it was shipped. Start again.")
                entries.append(entry)
                contents.append(content)
            if sum(map(len, contents)) >= BATCH_BYTES:
                yield zlib.compress(pack(entries, contents), 1)
                entries, contents = [], []
        if entries:
            yield zlib.compress(pack(entries, contents), 1)


def read_tree(folder: Path) -> Tree:
    """What git lists as tracked or not ignored below ``folder``, whether or not that is a repository.

    Raises UserError without git, for an unreadable file, or for more than MAX_TREE_BYTES.
    """
    folder = folder.resolve()
    paths = sorted(set(_listed(folder, "")))
    sizes = {path: (folder / path).lstat().st_size for path in paths}
    if sum(sizes.values()) > MAX_TREE_BYTES:
        largest = ", ".join(sorted(sizes, key=lambda p: -sizes[p])[:3])
        raise UserError(
            f"{folder} has {sum(sizes.values()) / 2**30:.1f} GiB of files to ship, at most "
            f"{MAX_TREE_BYTES >> 30} GiB were expected. Add data to .gitignore; the largest: {largest}."
        )
    try:
        entries = tuple(_entry(folder, path) for path in paths)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}. Only readable files can be shipped.") from error
    digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    return Tree(folder, entries, digest)


def _listed(folder: Path, prefix: str) -> Iterator[str]:
    """Paths relative to the top; a repository inside (or a submodule) is listed by its own rules."""
    for name in _git(folder, *_LIST):
        place = folder / name
        if place.is_dir() and not place.is_symlink():
            yield from _listed(place, prefix + name.rstrip("/") + "/")
        elif os.path.lexists(place):  # a tracked file may have been deleted
            yield prefix + name


def _git(folder: Path, *arguments: str) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, env=environment, check=False
        )
        if done.returncode:  # no repository: one elsewhere gives the same rules to this folder
            with tempfile.TemporaryDirectory() as empty:
                subprocess.run(["git", "init", "-q", "--bare", empty], env=environment, check=True)
                command = ["git", f"--git-dir={empty}", f"--work-tree={folder}", *arguments]
                done = subprocess.run(command, cwd=folder, capture_output=True, env=environment, check=True)
    except FileNotFoundError:
        raise UserError(
            "git is needed to tell which files to ship. Install it, or run with --no-ship.",
            code=ExitCode.INTERNAL,
        ) from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or b"").decode("utf-8", "replace").strip().split("\n")[0]
        raise UserError(f"git cannot list the files of {folder}: {reason}", code=ExitCode.INTERNAL) from error
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _entry(folder: Path, path: str) -> Entry:
    place = folder / path
    content = _content(place)
    mode = "link" if place.is_symlink() else "exec" if os.access(place, os.X_OK) else "file"
    return path, mode, hashlib.sha256(content).hexdigest(), len(content)


def _content(place: Path) -> bytes:
    return os.fsencode(os.readlink(place)) if place.is_symlink() else place.read_bytes()
