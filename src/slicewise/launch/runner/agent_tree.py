"""The shipped tree on a worker. Sent with the agent: nothing but the standard library."""

import errno
import os

from slicewise.launch.runner.agent_wire import dumps, loads, suppress


def remove_folder(folder):
    import shutil  # here: it takes a tenth of the agent's start

    shutil.rmtree(folder, ignore_errors=True)


def pack(entries, contents):
    """Files as bytes: a line of JSON for each of ``entries`` ([path, mode, digest, size]), then its content."""
    return b"".join(
        dumps(entry).encode() + b"\n" + content
        for entry, content in zip(entries, contents)  # noqa: B905  no strict before 3.10
    )


class Tree:
    """A folder that mirrors the runner's: holds a list of what was shipped, in TREE.json beside it."""

    def __init__(self, folder):
        self.folder, self.index_path = folder, folder + ".json"
        self.known = {}

    def lacks(self, digest, entries):
        """Paths whose content is not here, or None when the whole tree is, as ``digest`` names it."""
        stored = self.load()
        if entries is None:
            return None if stored.get("digest") == digest and all(map(self.intact, self.known)) else True
        return [path for path, mode, content, _ in entries if not self.has(path, mode, content)]

    def load(self):
        try:
            with open(self.index_path) as file:
                stored = loads(file.read())
        except (OSError, ValueError):
            stored = {}
        self.known = stored.get("files", {})
        return stored

    def has(self, path, mode, content):
        return self.known.get(path, ["", ""])[:2] == [mode, content] and self.intact(path)

    def intact(self, path):
        """Whether the file is as it was shipped, by size and time: a command may have written to it."""
        try:
            found = os.lstat(os.path.join(self.folder, path))
        except OSError:
            return False
        return [found.st_size, found.st_mtime_ns] == self.known[path][2:]

    def unpack(self, packed):
        """Writes packed files."""
        os.makedirs(self.folder, exist_ok=True)
        at = 0
        while at < len(packed):
            end = packed.index(b"\n", at)
            path, mode, content, size = loads(packed[at:end].decode())
            self.write(path, mode, content, packed[end + 1 : end + 1 + size])
            at = end + 1 + size

    def finish(self, digest, entries):
        """Removes files that were shipped once and are no longer listed; what a command wrote stays."""
        for path in set(self.known) - {entry[0] for entry in entries}:
            self.remove(path)
            del self.known[path]
        temporary = f"{self.index_path}.{os.getpid()}"
        with open(temporary, "w") as file:
            file.write(dumps({"digest": digest, "files": self.known}))
        os.replace(temporary, self.index_path)

    def remove(self, path):
        """A file, and the folders that it leaves empty; not through a link, which may lead out of the tree."""
        folder = os.path.dirname(path)
        if os.path.realpath(os.path.join(self.folder, folder)) != os.path.join(
            os.path.realpath(self.folder), folder
        ).rstrip("/"):
            return
        with suppress(OSError):
            os.unlink(os.path.join(self.folder, path))
            while folder:
                os.rmdir(os.path.join(self.folder, folder))
                folder = os.path.dirname(folder)

    def inside(self, path):
        """The place of a relative path; what stands in the way of its folders is removed."""
        parts = path.split("/")
        if path.startswith("/") or not all(parts) or {".", ".."} & set(parts):
            raise OSError(errno.EINVAL, "not a path inside the tree", path)
        place = self.folder
        for part in parts[:-1]:
            place = os.path.join(place, part)
            if os.path.islink(place) or (os.path.exists(place) and not os.path.isdir(place)):
                os.unlink(place)
            with suppress(FileExistsError):
                os.mkdir(place)
        return os.path.join(place, parts[-1])

    def write(self, path, mode, content, data):
        place = self.inside(path)
        temporary = os.path.join(os.path.dirname(place), f".slicewise-{os.getpid()}")
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        if mode == "link":
            os.symlink(data.decode("utf-8", "surrogateescape"), temporary)
        else:
            with open(temporary, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o700 if mode == "exec" else 0o600)
        if os.path.isdir(place) and not os.path.islink(place):
            remove_folder(place)
        os.replace(temporary, place)
        found = os.lstat(place)
        self.known[path] = [mode, content, found.st_size, found.st_mtime_ns]
