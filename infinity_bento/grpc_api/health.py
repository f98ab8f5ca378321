"""grpc.health.v1 from the engine itself: what it says now, per service. Made by ``server``."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from infinity_bento.api.choosing import is_late_interaction
from infinity_bento.api.probes import current_status
from infinity_bento.api.protocol import GetEngine
from infinity_bento.errors import NotReady
from infinity_bento.grpc_api.methods import SERVICES, Row

PACKAGE = "tei.v1"
POLL_SECONDS = 0.25  # how soon who watches learns of a change

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health service. The empty name is the server as a whole, as GET /readyz.

    Args:
        get_engine: Gives the engine whose readiness counts.
    """

    def __init__(self, get_engine: GetEngine) -> None:
        self._get_engine = get_engine
        self._rows = {f"{PACKAGE}.{name}": row for name, row in SERVICES.items()}
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Say NOT_SERVING from now on, and end the watching."""
        self._stopping.set()

    def status(self, service: str) -> int:
        """The state of a service now, as a number of the contract."""
        row = self._rows.get(service)
        if service and row is None:
            return int(_UNKNOWN)
        return int(_SERVING if self._ready() and (row is None or self._able(row)) else _NOT_SERVING)

    def _ready(self) -> bool:
        try:
            return not self._stopping.is_set() and current_status(self._get_engine()).ready
        except NotReady:
            return False

    def _able(self, row: Row) -> bool:
        """Whether a served model can do what the service is for."""
        return not row.tasks or any(
            row.tasks & set(info.tasks) or (row.late_interaction and is_late_interaction(info))
            for info in self._get_engine().infos()
        )

    async def Check(self, request: Any, context: Any) -> Any:
        """The state now."""
        status = self.status(request.service)
        if status == _UNKNOWN:
            known = ", ".join(self._rows)
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"No service {request.service[:80]!r}; known: {known}, or an empty name."
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> None:
        """The state now and whenever it changes, until the server stops."""
        last: int | None = None
        while True:
            status = self.status(request.service)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            if self._stopping.is_set():
                return
            try:
                await asyncio.wait_for(self._stopping.wait(), POLL_SECONDS)
            except TimeoutError:
                continue
