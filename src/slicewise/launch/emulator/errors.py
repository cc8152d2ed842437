"""A refused request as both transports report it: google.rpc.Status and HTTP codes."""

from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from slicewise.launch.emulator.records import Code, Refused

# google/rpc/code.proto
HTTP_STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.ABORTED: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.INTERNAL: 500,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}


def status(refused: Refused) -> status_pb2.Status:
    """With RetryInfo where the caller is to try again, and QuotaFailure where a quota is used up."""
    message = status_pb2.Status(code=int(refused.code), message=refused.message)
    if refused.retry_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(refused.retry_s * 1000))
        message.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if refused.quota:
        violation = error_details_pb2.QuotaFailure.Violation(
            subject=refused.quota, description=refused.message
        )
        message.details.add().Pack(error_details_pb2.QuotaFailure(violations=[violation]))
    return message
