"""Liveness, readiness and health. Rows of ``table`` point here, and the BentoML service delegates its own
``/livez`` and ``/readyz`` to ``livez_reply`` and ``readyz_reply``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from infinity_bento.api.envelopes import TEI
from infinity_bento.api.exchange import Call, Reply
from infinity_bento.api.protocol import EngineLike
from infinity_bento.core import EngineStatus
from infinity_bento.errors import NotReady


async def livez_reply(engine: EngineLike) -> Reply:
    """200 while the process is of use, loading included; 503 once only a restart helps."""
    return Reply.of_json({"alive": engine.alive}, 200 if engine.alive else 503)


async def readyz_reply(engine: EngineLike) -> Reply:
    """200 when every model answers, else 503; the body says how far loading is, or why it failed."""
    status = current_status(engine)
    body = {
        "ready": status.ready,
        "stage": status.stage,
        "stage_number": status.stage_number,
        "stage_count": status.stage_count,
        "elapsed_seconds": round(status.elapsed_seconds, 3),
        "error": status.error,
    }
    if status.ready:
        return Reply.of_json(body)
    return Reply.of_json(body, 503, [(b"retry-after", b"1")])


async def health_reply(engine: EngineLike) -> Reply:
    """TEI's health: 200 with an empty object, or 503 in its error shape."""
    status = current_status(engine)
    return Reply.of_json({}) if status.ready else TEI.reply(not_ready(status))


async def livez(call: Call) -> Reply:
    """GET /livez and /healthz."""
    return await livez_reply(call.engine)


async def readyz(call: Call) -> Reply:
    """GET /readyz."""
    return await readyz_reply(call.engine)


async def health(call: Call) -> Reply:
    """GET /health and /ping."""
    return await health_reply(call.engine)


def current_status(engine: EngineLike) -> EngineStatus:
    """The engine's status, but never ready once a device thread has died."""
    status = engine.status()
    if status.ready and not engine.alive:
        return replace(status, ready=False, error="A device thread has died; its cause is in the server's log.")
    return status


def not_ready(status: EngineStatus) -> NotReady:
    """Why no model answers yet, or ever."""
    if status.error is not None:
        return NotReady(
            f"No model can answer; stage {status.stage_number} of {status.stage_count} ({status.stage}) ended with: "
            f"{status.error.rstrip('.')}. Correct that and restart the server."
        )
    return NotReady(
        f"The models are still loading: stage {status.stage_number} of {status.stage_count} ({status.stage}), "
        f"{status.elapsed_seconds:.1f} s so far. Retry when GET /readyz answers 200."
    )


SCHEMAS: dict[str, dict[str, Any]] = {
    "Liveness": {"type": "object", "required": ["alive"], "properties": {"alive": {"type": "boolean"}}},
    "Readiness": {
        "type": "object",
        "required": ["ready", "stage", "stage_number", "stage_count", "elapsed_seconds", "error"],
        "properties": {
            "ready": {"type": "boolean"},
            "stage": {"type": "string", "description": "Name of the current or last stage of loading."},
            "stage_number": {"type": "integer", "minimum": 1},
            "stage_count": {"type": "integer", "minimum": 1},
            "elapsed_seconds": {"type": "number", "description": "Since loading began."},
            "error": {"type": ["string", "null"], "description": "Why loading failed."},
        },
    },
    "Health": {"type": "object", "maxProperties": 0},
}
