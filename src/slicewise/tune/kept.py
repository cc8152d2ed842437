"""What a search found out about single settings of kernels, in a file: an interrupted one goes on where it was."""

import hashlib
import json
from collections.abc import Mapping

from slicewise.errors import write_whole
from slicewise.kernels import tuned
from slicewise.tune.problems import Problem

Known = tuple[float | None, str]  # seconds, or why there are none


class Kept:
    """JSON by digest of kernel, shape, settings, judge and versions; a damaged file counts as none."""

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
        match self.known.get(self._digest(problem, values)):
            case [float(seconds), ""]:
                return seconds, ""
            case [None, str(why)]:
                return None, why
        return None

    def put(self, problem: Problem, values: Mapping[str, int], seconds: float | None, why: str) -> Known:
        """Raises UserError where the file cannot be written."""
        with tuned.alone(self.path):
            self.known |= self._read() | {self._digest(problem, values): [seconds, why]}
            write_whole(self.path, json.dumps(self.known).encode(), str(self.path))
        return seconds, why

    def _digest(self, problem: Problem, values: Mapping[str, int]) -> str:
        varying = {name: values[name] for name in problem.varying}
        said = [problem.key.model_dump(), problem.part, varying, dict(tuned.versions())]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:24]
