"""Which model answers a request. Called by the dialects and native methods; for one task ``engine.resolve`` does it."""

from __future__ import annotations

from infinity_bento.api.probes import current_status, not_ready
from infinity_bento.api.protocol import EngineLike
from infinity_bento.core import ModelInfo, Task
from infinity_bento.errors import InvalidInput, UnknownModel, UnsupportedTask


def is_late_interaction(info: ModelInfo) -> bool:
    """Whether token matrices are what the model is for, rather than a by-product of pooled or sparse vectors."""
    return Task.EMBED_ALL in info.tasks and not {Task.EMBED, Task.EMBED_SPARSE} & set(info.tasks)


def resolve_any(engine: EngineLike, name: str | None, *tasks: Task) -> tuple[ModelInfo, Task]:
    """The model that answers with the first of ``tasks`` that it, or any model, can do.

    Raises:
        InfinityError: As ``EngineLike.resolve`` for the first task, if none can be done.
    """
    refusal: UnsupportedTask | None = None
    for task in tasks:
        try:
            return engine.resolve(name, task), task
        except UnsupportedTask as error:
            refusal = refusal or error
    assert refusal is not None, "at least one task is given"
    raise refusal


def resolve_or_late_interaction(engine: EngineLike, name: str | None, task: Task) -> ModelInfo:
    """The model that can do ``task``; where there is none, the late-interaction model of that name.

    Raises:
        InfinityError: As ``EngineLike.resolve``.
    """
    try:
        return engine.resolve(name, task)
    except UnsupportedTask:
        able = [info for info in engine.infos() if is_late_interaction(info) and name in (None, "", info.name)]
        if len(able) != 1:
            raise
        return able[0]


def any_model(engine: EngineLike, name: str | None, *, or_default: bool = False) -> ModelInfo:
    """The model of this name, whatever it can do; without a name, the only one, or the default one.

    Raises:
        NotReady: The models are still loading.
        UnknownModel: No model has this name.
        InvalidInput: Several models are served and none is named.
    """
    status, models = current_status(engine), engine.infos()
    if not status.ready or not models:
        raise not_ready(status)
    names = ", ".join(repr(info.name) for info in models)
    if not name:
        if len(models) > 1 and not or_default:
            raise InvalidInput(f"`model` is missing and several are served; name one of {names}.", param="model")
        return models[0]
    for info in models:
        if info.name == name:
            return info
    raise UnknownModel(f"`model` is {name!r}, which is not served here; name one of {names}.", param="model")
