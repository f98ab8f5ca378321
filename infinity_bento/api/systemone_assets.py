"""Images of a System One request: checked, then refused, as no vision tower is served. Called by ``systemone``."""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from infinity_bento.api.systemone_request import Path, check_count, refuse
from infinity_bento.core import ModelInfo
from infinity_bento.decisions import DecisionRequest, DecisionRules, FieldPath, Json
from infinity_bento.errors import InvalidInput

FORMATS = ("png", "jpg", "jpeg")
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")


def refuse_assets(
    assets: Any, parts: Mapping[str, bytes], request: DecisionRequest, info: ModelInfo, rules: DecisionRules
) -> None:
    """Do nothing for a request without images; name what is wrong with the first bad one, or that none can be seen.

    Args:
        assets: Of the body: image by placeholder.
        parts: Of the form, by name.
        request: Whose texts hold the placeholders.
        info: The model that would have to see them.
        rules: Limits.

    Raises:
        InvalidInput: There are images; ``param`` is the path.
    """
    if assets is None and not parts:
        return
    if type(assets) is not dict or not assets:
        refuse(("assets",), assets, "absent, or an object with at least one image")
    check_count(("assets",), len(assets), rules.images, "images (decision_max_images)")
    texts = list(_texts(request))
    unclaimed = dict(parts)
    for name, asset in assets.items():
        path = ("assets", name)
        if type(asset) is not dict or asset.get("type", "image") != "image":
            refuse(path, asset, 'an object with `type` "image"')
        if not name or not any(name in text for text in texts):
            refuse(path, name, "a placeholder that occurs in the state or in a question")
        if not _content(path, asset, unclaimed).startswith(_SIGNATURES):
            refuse(path, name, "a PNG or JPEG image")
    if unclaimed:
        refuse(("assets",), next(iter(unclaimed)), "complete: no asset claims this part of the form")
    raise InvalidInput(
        f"`assets`: model {info.name!r} is served without its vision tower, so it cannot see images yet; leave the "
        "assets out.",
        param=FieldPath("assets"),
    )


def _content(path: Path, asset: Mapping[str, Any], unclaimed: dict[str, bytes]) -> bytes:
    """The bytes of an image; its part, if it is one, is claimed."""
    part = asset.get("part")
    if part is not None:
        if type(part) is not str or part not in unclaimed:
            refuse((*path, "part"), part, "the name of a part of this form that no other asset claims")
        return unclaimed.pop(part)
    if asset.get("format") not in FORMATS:
        refuse((*path, "format"), asset.get("format"), "png, jpg or jpeg")
    data = asset.get("data_base64")
    try:
        if type(data) is str and data:
            return binascii.a2b_base64(data, strict_mode=True)
    except ValueError:  # binascii.Error is one; so is what characters beyond ASCII raise
        pass
    refuse((*path, "data_base64"), data, "the image in base64")


def _texts(request: DecisionRequest) -> Iterator[str]:
    """Every string of state, instructions and criteria, keys aside."""
    waiting: list[Json] = [request.state]
    for question in request.questions:
        waiting += [question.instructions, *(option.description for option in question.options)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
