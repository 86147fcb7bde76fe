"""The routes that tell of the ranks and change their number.

Owns the shape of these requests. What may be asked, and what becomes of it, is the controller's to say.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nobiru.errors import AuthenticationError, ConflictError, InvalidRequestError, NobiruError, RequestTimeoutError
from nobiru.serving.body import read_object
from nobiru.serving.disconnect import DisconnectWatch
from nobiru.serving.fields import Fields, wrong
from nobiru.serving.responses import JsonResponse
from nobiru.serving.services import Services

POLL_S = 0.02
DRAIN_TIMEOUT_S = 120.0
MAX_SECONDS = 86_400
MAX_SIZE = 100_000
_ENDED = ("done", "rolled_back", "failed")
_OPERATION_FIELDS = (
    "data_parallel_size",
    "remove_ranks",
    "replace_ranks",
    "drain",
    "drain_timeout_s",
    "drain_timeout_action",
    "deadline_s",
    "dry_run",
    "idempotency_key",
)


class ElasticRoutes:
    """Endpoints about the group of ranks. Those that change it need the admin key, where one is set."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def status(self, request: Request) -> Response:
        """The epoch, the ranks with process and state, the operation that is running, and what the autoscaler sees."""
        document = dict(self._services.client.status())
        if self._services.autoscaler is not None:
            document["autoscaler"] = self._services.autoscaler.status()
        return JsonResponse(document)

    async def scale(self, request: Request) -> Response:
        """Change the number of ranks, and answer when that is done."""
        self._check_admin(request)
        fields = Fields(await self._body(request), ("new_data_parallel_size", "drain_timeout"))
        size = fields.integer("new_data_parallel_size", 1, MAX_SIZE)
        if size is None:
            raise InvalidRequestError("new_data_parallel_size is missing", param="new_data_parallel_size")
        timeout = fields.integer("drain_timeout", 0, MAX_SECONDS)
        drain_s: float | None = None if timeout is None else float(timeout)
        if drain_s is None and self._services.config.drain_by_default:
            drain_s = DRAIN_TIMEOUT_S
        control = self._services.client.operations
        document = control.request(size=size, drain_timeout_s=drain_s, drain_may_replay=False)
        operation_id = document["operation_id"]
        with DisconnectWatch(request.receive):
            while (document := control.document(operation_id))["phase"] not in _ENDED:
                await asyncio.sleep(POLL_S)
        if document["phase"] == "done":
            message = f"Scaled to {size} data parallel engines"
            return JsonResponse({"message": message, "operation_id": operation_id})
        raise _not_scaled(document)

    async def is_scaling(self, request: Request) -> Response:
        """Whether the number of ranks is changing."""
        return JsonResponse({"is_scaling_elastic_ep": self._services.client.operations.is_busy})

    async def create_operation(self, request: Request) -> Response:
        """Begin a change of the ranks; answered at once."""
        self._check_admin(request)
        fields = Fields(await self._body(request), _OPERATION_FIELDS)
        asked = _parse_operation(fields, drain_by_default=self._services.config.drain_by_default)
        return JsonResponse(self._services.client.operations.request(**asked), 202)

    async def list_operations(self, request: Request) -> Response:
        """All operations, oldest first, also those the server began by itself."""
        return JsonResponse({"operations": self._services.client.operations.documents()})

    async def get_operation(self, request: Request) -> Response:
        return JsonResponse(self._services.client.operations.document(request.path_params["operation_id"]))

    async def cancel_operation(self, request: Request) -> Response:
        """Undo an operation that is not committed yet."""
        self._check_admin(request)
        return JsonResponse(self._services.client.operations.cancel(request.path_params["operation_id"]))

    async def _body(self, request: Request) -> dict[str, Any]:
        config = self._services.config
        if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
            return {}  # which lacks what is needed, whatever its content type
        return await read_object(request, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)

    def _check_admin(self, request: Request) -> None:
        keys = self._services.config.admin_keys
        if not keys:
            return
        _, _, given = request.headers.get("authorization", "").partition(" ")
        if not any(hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys):
            raise AuthenticationError("this route needs the admin key; send it as 'Authorization: Bearer KEY'")


def _parse_operation(fields: Fields, *, drain_by_default: bool) -> dict[str, Any]:
    size = fields.integer("data_parallel_size", 1, MAX_SIZE)
    remove, replace = _rank_ids(fields, "remove_ranks"), _rank_ids(fields, "replace_ranks")
    given = [name for name in ("data_parallel_size", "remove_ranks", "replace_ranks") if fields.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"{' and '.join(given) or 'nothing'} is given; give one of data_parallel_size, remove_ranks, replace_ranks",
            param=given[0] if given else "data_parallel_size",
        )
    drains = fields.boolean("drain")
    drains = drain_by_default if drains is None else drains
    timeout_s = fields.integer("drain_timeout_s", 0, MAX_SECONDS)
    action = fields.string("drain_timeout_action", ("replay", "rollback"))
    deadline_s = fields.integer("deadline_s", 1, MAX_SECONDS)
    return {
        "size": size,
        "remove": remove,
        "replace": replace,
        "drain_timeout_s": (DRAIN_TIMEOUT_S if timeout_s is None else float(timeout_s)) if drains else None,
        "drain_may_replay": action != "rollback",
        "deadline_s": 600.0 if deadline_s is None else float(deadline_s),
        "dry_run": fields.boolean("dry_run") or False,
        "idempotency_key": fields.string("idempotency_key"),
    }


def _rank_ids(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise wrong(name, value, "a list of rank ids")
    if len(set(value)) < len(value):
        raise wrong(name, value, "a list of different rank ids")
    return tuple(value)


def _not_scaled(document: Mapping[str, Any]) -> NobiruError:
    error = document["error"] or "the operation was undone"
    if "in time" in error and "requests" in error:
        return RequestTimeoutError(f"{error}; nothing has changed", code="drain_timeout")
    if error == "cancelled":
        return ConflictError("the operation was cancelled; nothing has changed")
    return NobiruError(f"{error}; nothing has changed", code="operation_rolled_back")
