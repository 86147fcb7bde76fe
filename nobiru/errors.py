"""Everything that can be refused or go wrong, and the one table of HTTP status codes.

Owns the error types callers see. Knows nothing of HTTP beyond the status number of each type. A caller's mistake is an
`InvalidRequestError` that names the field, the limit and the value; `assert` is kept for bugs of our own.
"""

from __future__ import annotations


class NobiruError(Exception):
    """Base of all errors that have a meaning for the caller.

    `status` is the HTTP status, `type` and `code` the fields of the OpenAI error body, `param` the request field at
    fault, `retry_after_s` the value of a `Retry-After` header.
    """

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


class InvalidRequestError(NobiruError, ValueError):
    """The request itself is wrong: a mistyped field, a value out of range, a text too long."""

    status = 400
    type = "invalid_request_error"


class AuthenticationError(NobiruError):
    """No API key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(NobiruError):
    """An unknown model or route."""

    status = 404
    type = "not_found_error"


class MethodNotAllowedError(NobiruError):
    """The route exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeoutError(NobiruError):
    """The client did not send its request in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class ConflictError(NobiruError):
    """Another operation is running, or it is too late for this one."""

    status = 409
    type = "conflict_error"
    code = "conflict"


class BodyTooLargeError(NobiruError):
    """The body exceeds `max_body_bytes`."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedMediaTypeError(NobiruError):
    """The body is not plain JSON."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class OverloadedError(NobiruError):
    """The queue is full; come back after `retry_after_s`."""

    status = 429
    type = "overloaded_error"
    code = "queue_full"


class InferenceError(NobiruError):
    """The model failed on this input, and on no other."""

    status = 500
    type = "server_error"
    code = "inference_failed"


class GroupError(NobiruError):
    """A group of ranks could not be formed, or an exchange in it failed: some member is gone, or too late."""

    status = 500
    type = "server_error"
    code = "group_failed"


class RequestKilledRankError(NobiruError):
    """The rank died three times with this request, the last time with this request alone."""

    status = 500
    type = "server_error"
    code = "request_killed_rank"


class UnavailableError(NobiruError):
    """The server shuts down, or no rank can work."""

    status = 503
    type = "unavailable_error"
    code = "unavailable"


class ConfigError(NobiruError, ValueError):
    """An option is unknown, of the wrong type, or out of range. Raised at start, never by a request."""

    code = "bad_configuration"


class ModelFolderError(NobiruError, ValueError):
    """A model folder is missing, damaged, or asks for something that cannot be honoured; names file and field."""

    code = "bad_model_folder"
