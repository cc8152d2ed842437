"""Who leads an elastic job when the leader is lost: host 0 of another slice, once the leader has been silent too long.

The leader changes a beat in the job's folder. Clocks of machines are not compared: a deputy watches the beat change. An
attempt has one leader, the one who created its claim; so two who both think that they lead do no harm.
"""

import time
from collections.abc import Mapping
from typing import Any

from slicewise.launch.gang import Agent, Leader, Look, Overtaken
from slicewise.launch.job_folder import Claim, Superseded
from slicewise.launch.leader import Ended
from slicewise.launch.trainer import Trainer
from slicewise.launch.worker import say

SILENT_POLLS = (
    30  # looks into the folder in which the beat does not change: 15 s on a disk, a minute in a bucket
)
STAGGER_POLLS = 4  # more for each slice, so that one deputy comes first


class Deputy(Leader):
    """An ordinary worker while somebody leads."""

    leading = False
    seen: tuple[Any, float] = (None, 0.0)  # the last beat, and when it came

    def is_silent(self) -> bool:
        """Whether the leader has shown no sign of life for too long."""
        beat = self.patiently(self.job.beat)
        now_s = time.monotonic()
        if beat != self.seen[0] or not self.seen[1]:
            self.seen = beat, now_s
        patience_s = self.poll_s * (SILENT_POLLS + STAGGER_POLLS * self.place.slice_id)
        return now_s - self.seen[1] > patience_s

    def pause(self) -> None:
        (Leader if self.leading else Agent).pause(self)

    @property
    def predecessor(self) -> str:
        return "the leader"

    def next_claim(self, previous: Claim | None) -> Claim:
        if previous is None:  # begun, or overtaken by somebody who leads
            self.leading = False
        if not self.leading:
            if claim := self._followed(previous):
                return claim
            say(f"nobody leads: {self.name} does from now on")
            self.leading = True
        try:
            return super().next_claim(previous)
        except Overtaken:
            return self.next_claim(None)

    def _followed(self, previous: Claim | None) -> Claim | None:
        """The newest attempt; None when nobody leads."""
        self.over_by_s = None
        while not self.is_silent():
            if claim := self.newer_claim(previous):
                return claim
            self.pause()
        return None

    def _claim_after(self, current: Claim | None) -> Claim:
        try:
            return super()._claim_after(current)
        except Superseded as newer:
            raise Overtaken from newer

    def wait_for_go(self, claim: Claim) -> dict[str, Any] | None:
        self.leading = claim.holder == self.token
        if self.leading:
            return super().wait_for_go(claim)
        return Agent.wait_for_go(self, claim)

    def gives_up(self) -> bool:
        return self.is_silent()

    def attempt(self, claim: Claim, go: Mapping[str, Any]) -> Ended:
        return (Leader if self.leading else Agent).attempt(self, claim, go)

    def look(self, claim: Claim, go: Mapping[str, Any], trainer: Trainer, state: Look) -> None:
        (Leader if self.leading else Agent).look(self, claim, go, trainer, state)
