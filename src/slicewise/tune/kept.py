"""What a search found out about single settings, in a file: an interrupted one goes on where it was."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from slicewise.errors import write_whole
from slicewise.kernels import tuned
from slicewise.tune.problems import Problem

FORMAT = 2
Known = tuple[float | None, str]  # seconds, or why there are none


class Kept:
    """JSON by digest of what a time depends on, one file a judge; a damaged file counts as none.

    Only what is true the next time too belongs here: no accident of a compiler or a machine.
    """

    def __init__(self, judge: str):
        self.judge = judge
        self.path = tuned.own_path().with_name(f"tried-{judge}.json")
        self.known = self._read()

    def _read(self) -> dict[str, list]:
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def get(self, problem: Problem, values: Mapping[str, int]) -> Known | None:
        return self._get(_of_kernel(problem, values))

    def get_step(self, parts: Sequence[Any]) -> Known | None:
        """Of a step that ``parts``, as JSON, decide."""
        return self._get(_digest(parts))

    def _get(self, digest: str) -> Known | None:
        match self.known.get(digest):
            case [float(seconds), ""]:
                return seconds, ""
            case [None, str(why)]:
                return None, why
        return None

    def put(self, problem: Problem, values: Mapping[str, int], seconds: float | None, why: str) -> Known:
        """Raises UserError where the file cannot be written."""
        return self._put(_of_kernel(problem, values), seconds, why)

    def put_step(self, parts: Sequence[Any], seconds: float | None, why: str) -> Known:
        """Raises UserError as put does."""
        return self._put(_digest(parts), seconds, why)

    def _put(self, digest: str, seconds: float | None, why: str) -> Known:
        with tuned.alone(self.path):
            self.known |= self._read() | {digest: [seconds, why]}
            write_whole(self.path, json.dumps(self.known).encode(), str(self.path))
        return seconds, why


def _of_kernel(problem: Problem, values: Mapping[str, int]) -> str:
    varying = {name: values[name] for name in problem.varying}
    return _digest([problem.key.model_dump(), problem.part, varying, dict(tuned.versions())])


def _digest(parts: Sequence[Any]) -> str:
    said = json.dumps([FORMAT, *parts], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()[:24]
