"""One table for all routes: what is wrong is refused before anything is computed, in the route's own error shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgpack
import orjson
import pytest

from infinity_bento.api.envelopes import COHERE, OPENAI, TEI, Dialect
from infinity_bento.api.table import route_table
from infinity_bento.errors import (
    BatchTooLarge,
    EmptyInput,
    InfinityError,
    InputTooLong,
    InvalidInput,
    MalformedBody,
    PayloadTooLarge,
    UnknownModel,
    UnsupportedMedia,
    UnsupportedTask,
)
from tests.api.fakes import client_for, every_task

ErrorClass = type[InfinityError]


@dataclass(frozen=True)
class Spec:
    """What one route takes."""

    path: str
    dialect: Dialect
    good: dict[str, Any]
    main: str  # the field that holds the inputs
    single: bool = True  # a bare string will do
    ids: bool = False  # token ids will do
    may_be_empty: bool = False  # an empty string is an input
    wrong_model: str | None = None  # a model that cannot do it
    enums: dict[str, str] = field(default_factory=dict)  # field -> a part of what is allowed
    booleans: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()  # whole numbers from 1
    elements: tuple[Any, ...] = (None, 1.5, True, {})  # that no list of inputs may hold


TRUNCATION = {"truncation_direction": '"right" or "left"'}
TEXT_OPTIONS = {**TRUNCATION, "input_type": '"query" or "document"'}
FORMATS = {"encoding_format": '"base64" or "tensor"', "output_dtype": '"ubinary"'}

SPECS = [
    Spec(
        "/v1/embeddings",
        OPENAI,
        {"model": "m", "input": ["a", "b"]},
        "input",
        ids=True,
        wrong_model="r",
        enums={**TEXT_OPTIONS, **FORMATS, "modality": '"text"'},
        booleans=("truncate",),
        counts=("dimensions",),
    ),
    Spec(
        "/embed",
        TEI,
        {"model": "m", "inputs": ["a", "b"]},
        "inputs",
        ids=True,
        wrong_model="r",
        enums={**TEXT_OPTIONS, **FORMATS},
        booleans=("truncate", "normalize"),
        counts=("dimensions",),
    ),
    Spec(
        "/embed_all",
        TEI,
        {"model": "m", "inputs": ["a", "b"]},
        "inputs",
        ids=True,
        wrong_model="c",
        enums={**TEXT_OPTIONS, **FORMATS},
        booleans=("truncate",),
    ),
    Spec(
        "/embed_sparse",
        TEI,
        {"inputs": ["a", "b"]},
        "inputs",
        ids=True,
        wrong_model="m",
        enums={**TEXT_OPTIONS, "encoding_format": '"float" or "tensor"'},
        booleans=("truncate",),
    ),
    Spec(
        "/v2/embed",
        COHERE,
        {"model": "m", "texts": ["a", "b"]},
        "texts",
        single=False,
        wrong_model="c",
        enums={"input_type": '"search_query" or "search_document"', "truncate": '"NONE" or "START" or "END"'},
        counts=("output_dimension",),
    ),
    Spec(
        "/rerank",
        TEI,
        {"query": "q", "texts": ["a", "b"], "model": "r"},
        "texts",
        single=False,
        may_be_empty=True,
        wrong_model="m",
        enums=TRUNCATION,
        booleans=("truncate", "raw_scores", "return_text", "return_documents"),
        counts=("top_n",),
        elements=(None, 1.5, True, {}, {"text": "a"}),
    ),
    *(
        Spec(
            path,
            COHERE,
            {"query": "q", "documents": ["a", {"text": "b"}], "model": "r"},
            "documents",
            single=False,
            may_be_empty=True,
            wrong_model="m",
            enums=TRUNCATION,
            booleans=("truncate", "raw_scores", "return_documents"),
            counts=("top_n",),
            elements=(None, 1.5, True, {}, {"text": None}),
        )
        for path in ("/v1/rerank", "/v2/rerank")
    ),
    Spec(
        "/predict",
        TEI,
        {"inputs": [["a"], ["b", "c"]], "model": "c"},
        "inputs",
        wrong_model="m",
        enums=TRUNCATION,
        booleans=("truncate", "raw_scores"),
        elements=(None, 1.5, True, {}, [1], [], ["a", "b", "c"], [None]),
    ),
    *(
        Spec(
            path,
            OPENAI,
            {"input": ["a", "b"], "model": "c"},
            "input",
            wrong_model="m",
            enums={**TRUNCATION, "aggregation_strategy": '"simple"'},
            booleans=("truncate", "raw_scores"),
            counts=("top_k",),
        )
        for path in ("/v1/classify", "/classify")
    ),
    Spec(
        "/tokenize",
        TEI,
        {"inputs": ["a", "b"], "model": "m"},
        "inputs",
        booleans=("add_special_tokens",),
    ),
    Spec(
        "/decode",
        TEI,
        {"ids": [[65], [66]], "model": "m"},
        "ids",
        single=False,
        ids=True,
        booleans=("skip_special_tokens",),
        elements=("a", None, 1.5, True, {}, -1, 2**31),
    ),
]
BY_PATH = {spec.path: spec for spec in SPECS}


def cases(spec: Spec) -> Iterator[tuple[str, dict[str, Any], ErrorClass, str]]:
    """Name, body, error class and a part of its text."""
    good, main = spec.good, spec.main
    yield "missing", {key: value for key, value in good.items() if key != main}, InvalidInput, f"`{main}`"
    yield "null", {**good, main: None}, InvalidInput, f"`{main}`"
    for value in (5, True, {"a": 1}, *(() if spec.single else ("a",))):
        yield f"wrong type {value!r}", {**good, main: value}, InvalidInput, f"`{main}` is"
    for value in spec.elements:
        yield f"wrong element {value!r}", {**good, main: [good[main][0], value]}, InvalidInput, f"`{main}[1]"
    empty = InvalidInput if spec.path == "/predict" else EmptyInput
    yield (
        "empty list",
        {**good, main: []},
        empty,
        f"`{main}` is an empty array" if empty is EmptyInput else "array of 0",
    )
    if spec.path != "/decode" and not spec.may_be_empty:
        value = [["a"], [""]] if spec.path == "/predict" else ["a", ""]
        yield "empty text", {**good, main: value}, EmptyInput, f"`{main}[1]"
    if spec.single:
        yield "empty string", {**good, main: ""}, EmptyInput, f"`{main}` is an empty string"
    if spec.ids:
        yield "empty ids", {**good, main: [[1], []]}, EmptyInput, f"`{main}[1]` is an empty array"
    yield "too many", {**good, main: [good[main][0]] * 5}, BatchTooLarge, "has 5 inputs; the limit of model"
    yield "unknown model", {**good, "model": "nope"}, UnknownModel, "nope"
    yield "model of wrong type", {**good, "model": 7}, InvalidInput, "`model` is the number 7"
    if spec.wrong_model is not None:
        yield "wrong task", {**good, "model": spec.wrong_model}, UnsupportedTask, repr(spec.wrong_model)
    for name, allowed in spec.enums.items():
        yield f"unknown {name}", {**good, name: "unheard of"}, InvalidInput, allowed
        yield f"number as {name}", {**good, name: 3}, InvalidInput, f"`{name}` is the number 3"
    for name in spec.booleans:
        yield f"number as {name}", {**good, name: 1}, InvalidInput, f"`{name}` is the number 1"
    for name in spec.counts:
        for value in (0, -1, 1.0, True, "1"):
            yield f"{value!r} as {name}", {**good, name: value}, InvalidInput, f"`{name}` is"
    if "query" in good:
        yield "query missing", {key: value for key, value in good.items() if key != "query"}, InvalidInput, "`query`"
        yield "query null", {**good, "query": None}, InvalidInput, "`query` is null"
        yield "query empty", {**good, "query": ""}, EmptyInput, "`query` is an empty string"
        yield "query of wrong type", {**good, "query": ["q"]}, InvalidInput, "`query` is an array of 1"
        yield "both", {**good, "texts": ["a"], "documents": ["a"]}, InvalidInput, "`texts` and `documents` are both"


TABLE = [pytest.param(spec, *case[1:], id=f"{spec.path} {case[0]}") for spec in SPECS for case in cases(spec)]


def message_of(dialect: Dialect, answer: httpx.Response) -> str:
    """The text of an error, after a check of its shape."""
    body = answer.json()
    assert set(body) == set(dialect.schema["required"])
    if dialect is OPENAI:
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return str(body["error"]["message"])
    return str(body["error" if dialect is TEI else "message"])


@pytest.mark.parametrize(("spec", "body", "error", "text"), TABLE)
async def test_is_refused_before_anything_is_computed(
    spec: Spec, body: dict[str, Any], error: ErrorClass, text: str
) -> None:
    engine = every_task()
    async with client_for(engine) as client:
        answer = await client.post(spec.path, json=body)
    assert answer.status_code == spec.dialect.status_of(error), answer.text
    assert text in message_of(spec.dialect, answer)
    assert engine.submitted == []


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.path)
async def test_good_bodies_are_answered(spec: Spec) -> None:
    optional = (*spec.enums, *spec.booleans, *spec.counts)
    async with client_for(every_task()) as client:
        plain = await client.post(spec.path, json=spec.good)
        nulls = await client.post(spec.path, json={**spec.good, **dict.fromkeys(optional), "unheard_of": 1})
    assert plain.status_code == 200, plain.text
    skip = ("id", "created")
    same = [
        {key: value for key, value in body.items() if key not in skip} if isinstance(body, dict) else body
        for body in (plain.json(), nulls.json())
    ]
    assert same[0] == same[1]


COMPUTED = [spec for spec in SPECS if spec.path not in ("/tokenize", "/decode")]


@pytest.mark.parametrize("spec", COMPUTED, ids=lambda spec: spec.path)
async def test_an_item_that_is_too_long_is_named(spec: Spec) -> None:
    long = "too long b"
    bad = [["a"], [long]] if spec.path == "/predict" else ["a", long]
    async with client_for(every_task()) as client:
        answer = await client.post(spec.path, json={**spec.good, spec.main: bad})
    assert answer.status_code == spec.dialect.status_of(InputTooLong)
    assert message_of(spec.dialect, answer).startswith(f"`{spec.main}[1]`: The input has 99 tokens; the limit is 16")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.path)
async def test_nan_and_broken_bodies(spec: Spec) -> None:
    good = orjson.dumps(spec.good)
    async with client_for(every_task(), payload_limit=10_000) as client:
        nan = await client.post(spec.path, content=good[:-1] + b', "x": NaN}')
        packed = msgpack.packb({**spec.good, spec.main: [math.nan]})
        binary = await client.post(spec.path, content=packed, headers={"content-type": "application/msgpack"})
        cut = await client.post(spec.path, content=good[:-2])
        media = await client.post(spec.path, content=good, headers={"content-type": "text/plain"})
        large = await client.post(spec.path, content=good + b" " * 10_000)
        array = await client.post(spec.path, content=b"[1]")
    for answer, error, text in (
        (nan, MalformedBody, "line 1"),
        (binary, InvalidInput, "nan"),
        (cut, MalformedBody, "line 1"),
        (media, UnsupportedMedia, "text/plain"),
        (large, PayloadTooLarge, "the limit is 10000"),
        (array, InvalidInput, "The body is an array"),
    ):
        assert answer.status_code == spec.dialect.status_of(error), answer.text
        assert text in message_of(spec.dialect, answer)


SIMILARITY = {"source_sentence": "a", "sentences": ["b"]}
NESTED: list[tuple[str, Any, ErrorClass, str]] = [
    ("/similarity", {}, InvalidInput, "`inputs` is null; it must be an object"),
    ("/similarity", {"inputs": ["a"]}, InvalidInput, "`inputs` is an array of 1"),
    ("/similarity", {"inputs": {"sentences": ["b"]}}, InvalidInput, "`inputs.source_sentence` is missing"),
    ("/similarity", {"inputs": {**SIMILARITY, "source_sentence": ""}}, EmptyInput, "`inputs.source_sentence`"),
    ("/similarity", {"inputs": {"source_sentence": "a"}}, InvalidInput, "`inputs.sentences` is missing"),
    ("/similarity", {"inputs": {**SIMILARITY, "sentences": "b"}}, InvalidInput, "`inputs.sentences` is the string"),
    ("/similarity", {"inputs": {**SIMILARITY, "sentences": []}}, EmptyInput, "`inputs.sentences` is an empty array"),
    ("/similarity", {"inputs": {**SIMILARITY, "sentences": ["b", ""]}}, EmptyInput, "`inputs.sentences[1]`"),
    ("/similarity", {"inputs": {**SIMILARITY, "sentences": ["b"] * 4}}, BatchTooLarge, "`inputs.sentences` has 5"),
    ("/similarity", {"inputs": SIMILARITY, "parameters": 1}, InvalidInput, "`parameters` is the number 1"),
    (
        "/similarity",
        {"inputs": SIMILARITY, "parameters": {"truncate": "yes"}},
        InvalidInput,
        "`parameters.truncate` is the string",
    ),
    (
        "/similarity",
        {"inputs": SIMILARITY, "parameters": {"prompt_name": "nope"}},
        InvalidInput,
        "`parameters.prompt_name` is the string",
    ),
    ("/similarity", {"inputs": SIMILARITY, "model": "late"}, UnsupportedTask, "'late'"),
    (
        "/similarity",
        {"inputs": {**SIMILARITY, "sentences": ["b", "too long"]}},
        InputTooLong,
        "`inputs.sentences[1]`: The input",
    ),
    ("/predict", {"inputs": ["a", "b", "c"], "model": "c"}, InvalidInput, "`inputs` is an array of 3"),
    ("/predict", {"inputs": ["", ""], "model": "c"}, EmptyInput, "`inputs` is an empty string"),
    ("/predict", {"inputs": ["a", "b"], "model": "t"}, InvalidInput, "`inputs` has a pair"),
    (
        "/predict",
        {"inputs": "a", "model": "c", "parameters": {"top_k": 0}},
        InvalidInput,
        "`parameters.top_k` is the number 0",
    ),
    (
        "/predict",
        {"inputs": "a", "model": "c", "parameters": {"function_to_apply": "tanh"}},
        InvalidInput,
        '"sigmoid" or "softmax" or "none"',
    ),
    ("/vertex", {}, InvalidInput, "`instances` is null"),
    ("/vertex", {"instances": ["a"]}, InvalidInput, "`instances[0]` is the string"),
    ("/vertex", {"instances": [{"inputs": "a"}] * 5}, BatchTooLarge, "`instances` has 5 inputs"),
    ("/vertex", {"instances": [{"inputs": "a"}, {"inputs": ["a", 1.5]}]}, InvalidInput, "`instances[1].inputs[1]`"),
    ("/vertex", {"instances": [{"inputs": "a"}, {"inputs": "too long"}]}, InputTooLong, "`instances[1].inputs`"),
    ("/", {"inputs": "a", "model": "nope"}, UnknownModel, "'nope'"),
    ("/", {"inputs": []}, EmptyInput, "`inputs` is an empty array"),
    ("/invocations", {}, InvalidInput, "`inputs` is missing"),
    ("/rerank", {"query": "q", "model": "r"}, InvalidInput, "are both missing"),
    ("/tokenize", {"inputs": "a", "model": "m", "prompt_name": "nope"}, InvalidInput, "`prompt_name` is"),
    ("/tokenize", {"inputs": "a"}, InvalidInput, "`model` is missing"),
    ("/tokenize", {"inputs": ["a", "b" * 4001], "model": "m"}, InputTooLong, "`inputs[1]` has 4001 characters"),
    ("/tokenize", {"inputs": ["a", "too long"], "model": "m"}, InvalidInput, "`inputs[1]`: The tokenizer"),
    ("/decode", {"ids": [[65], [1000]], "model": "m"}, InvalidInput, "`ids[1]`: Token id beyond"),
    ("/embed", {"inputs": "a", "normalize": False, "output_dtype": "int8"}, InvalidInput, "not normalized"),
    ("/embed_all", {"inputs": "a", "model": "m", "output_dtype": "uint8"}, InvalidInput, "not normalized"),
    ("/embed", {"inputs": "a", "model": "m", "dimensions": 9}, InvalidInput, "from 1 to 8"),
    ("/v1/embeddings", {"input": "a", "model": "late", "dimensions": 4}, InvalidInput, "cannot be cut"),
    ("/v2/embed", {"texts": ["a"], "embedding_types": []}, InvalidInput, "`embedding_types` is an array of 0"),
    ("/v2/embed", {"texts": ["a"], "embedding_types": ["float", "int4"]}, InvalidInput, "`embedding_types[1]`"),
    ("/v2/embed", {"images": ["data:"]}, InvalidInput, "`images` are not served"),
    ("/v2/embed", {"texts": ["a"], "inputs": []}, InvalidInput, "are both given"),
    ("/v2/embed", {"inputs": []}, EmptyInput, "`inputs` is an empty array"),
    ("/v2/embed", {"inputs": [{"content": []}]}, InvalidInput, "`inputs[0]` is an object"),
    (
        "/v2/embed",
        {"inputs": [{"content": [{"type": "image_url"}]}]},
        InvalidInput,
        "`inputs[0].content[0].type` is the string",
    ),
    (
        "/v2/embed",
        {"inputs": [{"content": [{"type": "text", "text": ""}]}]},
        EmptyInput,
        "`inputs[0].content[0].text` is an empty string",
    ),
]


@pytest.mark.parametrize(("path", "body", "error", "text"), NESTED)
async def test_fields_inside_objects_are_named_with_their_path(
    path: str, body: Any, error: ErrorClass, text: str
) -> None:
    dialect = BY_PATH[path].dialect if path in BY_PATH else TEI
    async with client_for(every_task()) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == dialect.status_of(error), answer.text
    assert text in message_of(dialect, answer)


def test_the_table_covers_every_route() -> None:
    covered = set(BY_PATH) | {case[0] for case in NESTED}
    inference = {path for route in route_table() if route.request is not None for path in route.paths}
    # The first is the same row as /v1/embeddings; decisions have a table of their own, in test_systemone.
    assert inference - covered == {"/embeddings", "/v1/systemone", "/v1/decisions"}


async def test_a_fault_in_the_engine_is_the_same_everywhere() -> None:
    for spec in COMPUTED:
        async with client_for(every_task(raises=RuntimeError("secret"))) as client:
            answer = await client.post(spec.path, json=spec.good)
        assert answer.status_code == 500 and "secret" not in message_of(spec.dialect, answer)
