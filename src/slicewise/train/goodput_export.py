"""The accounting of a run in Google's terms: ml-goodput-measurement writes it to Cloud Logging and computes from it."""

from datetime import UTC, datetime
from typing import Any

from slicewise.config import RunConfig
from slicewise.errors import ExitCode, UserError

LEAST_WAIT_US = 10_000  # for data, that is worth two entries of a log
_PREPARATION = ("restore", "compile", "prepare")
_EVENTS = {"save": "checkpoint_save", "evaluate": "evaluation"}  # what it calls custom badput


class Exporter:
    """A sink of a Ledger. Entries are sent in the background, by the package."""

    def __init__(self, recorder: Any):
        """``recorder``: an ml_goodput_measurement GoodputRecorder."""
        self._recorder = recorder
        self._state = ""

    def now(self, state: str, at_us: int) -> None:
        at, before = _time(at_us), self._state
        self._state = state
        if state == before:
            return
        if before in _PREPARATION and state not in _PREPARATION:
            self._recorder.record_training_preparation_end_time(at)
        elif before == "join":
            self._recorder.record_tpu_init_end_time(at)
        elif before in _EVENTS:
            self._recorder.record_custom_badput_event_end_time(at, _EVENTS[before])
        match state:
            case "imports":
                self._recorder.record_job_start_time(at)
            case "join":
                self._recorder.record_tpu_init_start_time(at)
            case "save" | "evaluate":
                self._recorder.record_custom_badput_event_start_time(at, _EVENTS[state])
            case "done" | "wait":
                self._recorder.record_job_end_time(at)
        if state in _PREPARATION and before not in _PREPARATION:
            self._recorder.record_training_preparation_start_time(at)

    def begins(self, step: int, at_us: int) -> None:
        self._recorder.record_step_start_time(step, _time(at_us))

    def waited(self, begin_us: int, end_us: int) -> None:
        if end_us - begin_us >= LEAST_WAIT_US:
            self._recorder.record_data_loading_start_time(_time(begin_us))
            self._recorder.record_data_loading_end_time(_time(end_us))

    def close(self) -> None:
        self._recorder.flush()


def _time(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us / 1e6, UTC)


def exporter(config: RunConfig) -> Exporter:
    """To the log of Cloud Logging that the config names. Raises UserError when it cannot be reached."""
    name = config.metrics.goodput_logger
    try:
        from ml_goodput_measurement import goodput
    except ImportError:
        raise UserError(
            "goodput_logger needs ml-goodput-measurement: pip install 'slicewise[goodput]'"
        ) from None
    try:
        recorder = goodput.GoodputRecorder(config.run.run_name, name, logging_enabled=True)
    except Exception as error:  # of credentials, of the network: whatever its client raises
        raise UserError(
            f"goodput_logger = {name}: Cloud Logging cannot be reached ({str(error).splitlines()[0]});"
            " log in with 'gcloud auth application-default login', or leave the key out.",
            code=ExitCode.INTERNAL,
        ) from error
    return Exporter(recorder)
