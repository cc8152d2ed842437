"""What processes make of something that each of them tried by itself: all learn all outcomes.

Through the key-value store of the coordination service, so that it works in any thread, and a process that failed
still answers: nobody is left waiting in a collective for one that will not come.
"""

import itertools
import threading

import jax

from slicewise.parallel import cluster

TIMEOUT_S = 600  # how far apart processes may be, such as when they load; a dead one is noticed long before
_serials: dict[str, "itertools.count[int]"] = {}
_lock = threading.Lock()


class Outcomes:
    """The outcomes of one attempt, a text of each process. Every process makes one, in the same order of ``name``."""

    def __init__(self, name: str):
        with _lock:
            serial = next(_serials.setdefault(name, itertools.count()))
        self._place = f"slicewise/{name}/{serial}"
        self._client = cluster.coordination_client()
        self._own: list[str] = []
        if serial >= 2 and jax.process_count() > 1 and jax.process_index() == 0:
            self._client.key_value_delete(f"slicewise/{name}/{serial - 2}/")  # which all have read by now

    def post(self, outcome: str) -> None:
        """Ours, at once: others may be waiting for us."""
        self._own = [outcome]
        if jax.process_count() > 1:
            self._client.key_value_set(f"{self._place}/{jax.process_index()}", outcome)

    def posted(self) -> list[str]:
        """Those that are there already."""
        if jax.process_count() == 1:
            return self._own
        return [outcome for _, outcome in self._client.key_value_dir_get(f"{self._place}/")]

    def all(self) -> list[str]:
        """Of every process, by its number, once all have posted."""
        if jax.process_count() == 1:
            return self._own
        self._client.wait_at_barrier(f"{self._place}/posted", 1000 * TIMEOUT_S)
        entries = self._client.key_value_dir_get(f"{self._place}/")
        found = {int(key.rpartition("/")[2]): outcome for key, outcome in entries}
        return [found[process] for process in range(jax.process_count())]


def gather(name: str, outcome: str) -> list[str]:
    """``outcome`` of every process, by its number."""
    outcomes = Outcomes(name)
    outcomes.post(outcome)
    return outcomes.all()
