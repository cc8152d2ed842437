"""What the API answers with, as errors of slicewise: its message, what to do, and an exit code for each kind.

A call is repeated only where the API says so: when the service is unavailable (google.rpc.Code UNAVAILABLE, the one
code that asks for it, see AIP-194), or the error carries RetryInfo.
"""

import random
import time
from collections.abc import Callable
from typing import Any

from slicewise.errors import ExitCode, UserError

FIRST_DELAY_S, LARGEST_DELAY_S = 0.5, 15.0
RETRY_FOR_S = 60.0

_CONSOLE = "Google Cloud console, IAM & Admin, Quotas"


def call[T](act: Callable[[], T], say: Callable[[str], None], retry_for_s: float = RETRY_FOR_S) -> T:
    """``act()``, again while the API asks for that and ``retry_for_s`` is not over. Raises UserError."""
    from google.api_core import exceptions
    from google.auth import exceptions as auth

    deadline_s, delay_s = time.monotonic() + retry_for_s, FIRST_DELAY_S
    while True:
        try:
            return act()
        except exceptions.GoogleAPICallError as error:
            asked_s = retry_delay_s(error)
            if asked_s is None and not isinstance(error, exceptions.ServiceUnavailable):
                raise as_user_error(error) from error
            # a fleet of callers must not come back all at once
            wait_s = asked_s if asked_s is not None else delay_s * random.uniform(0.5, 1.0)
            if time.monotonic() + wait_s > deadline_s:
                raise as_user_error(error) from error
            say(f"{_text(error)}; trying again in {wait_s:.1f} s")
            time.sleep(wait_s)
            delay_s = min(2 * delay_s, LARGEST_DELAY_S)
        except auth.GoogleAuthError as error:
            raise UserError(
                f"no access to Google Cloud: {str(error).splitlines()[0]}\n"
                "Log in with 'gcloud auth application-default login'.",
                code=ExitCode.DENIED,
            ) from error


def retry_delay_s(error: Any) -> float | None:
    """What the RetryInfo of an error asks for, in seconds; None without one."""
    from google.rpc import error_details_pb2

    for detail in error.details:
        if isinstance(detail, error_details_pb2.RetryInfo):
            return detail.retry_delay.ToTimedelta().total_seconds()
    return None


def as_user_error(error: Any) -> UserError:
    """The API's own message, what to do, and the exit code of its kind."""
    from google.api_core import exceptions

    text = _text(error)
    match error:
        case exceptions.Unauthorized():
            todo, code = "Log in with 'gcloud auth application-default login'.", ExitCode.DENIED
        case exceptions.Forbidden():
            todo = (
                "Ask the owner of the project for the role TPU Admin (roles/tpu.admin), and check --project."
            )
            code = ExitCode.DENIED
        case exceptions.NotFound():
            todo, code = (
                "'slicewise qr list' shows what there is; check --project and --zone.",
                ExitCode.NOT_FOUND,
            )
        case exceptions.Conflict():  # and Aborted, AlreadyExists
            todo = "Choose another name, or delete the old one first with 'slicewise qr delete NAME --force'."
            code = ExitCode.CONFLICT
        case exceptions.TooManyRequests():  # and ResourceExhausted
            if _is_rate(error):
                todo, code = "Too many requests: wait, then try again.", ExitCode.RATE_LIMITED
            else:
                todo = f"'slicewise qr gc' frees what dead ones hold; more quota: {_CONSOLE}."
                code = ExitCode.QUOTA
        case exceptions.FailedPrecondition():
            todo = "'slicewise qr describe NAME' shows its state; --force deletes one that has slices."
            code = ExitCode.USER
        case exceptions.ServerError():
            todo = "The service failed: try again later; https://status.cloud.google.com shows known trouble."
            code = ExitCode.UNAVAILABLE
        case _:
            todo, code = "Change the request: the same one fails again.", ExitCode.USER
    return UserError(f"{text}\n{todo}", code=code)


def _is_rate(error: Any) -> bool:
    """Whether requests came too fast, rather than resources being used up."""
    from google.rpc import error_details_pb2

    reasons = [d.reason for d in error.details if isinstance(d, error_details_pb2.ErrorInfo)]
    return retry_delay_s(error) is not None or "RATE_LIMIT_EXCEEDED" in reasons


def _text(error: Any) -> str:
    name = error.grpc_status_code.name if error.grpc_status_code else error.code
    return f"the TPU API answered {name}: {' '.join(str(error.message).split())}"
