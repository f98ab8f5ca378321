"""GET /metrics, /openapi.json and /docs, which cover BentoML's own page and document. Rows of ``table`` point here."""

from __future__ import annotations

import html
import re
import shlex
import string
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from infinity_bento.api.exchange import Call, Reply, header
from infinity_bento.api.openapi import NATIVE_TAG, Schemas, build_document
from infinity_bento.telemetry.metrics import CONTENT_TYPE

Row = tuple[str, str, Mapping[str, Any]]  # method, path, operation of the document

HTML_TYPE = "text/html; charset=utf-8"
# No scripts, and nothing that is not on the page itself.
_PAGE_POLICY = b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SAFE_HOST = re.compile(r"[A-Za-z0-9.\-:\[\]_]{1,255}")

_PAGE = string.Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>infinity-bento: routes</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { margin-top: 2rem; font-size: 1.05rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .9rem; }
pre { background: #f4f4f2; border: 1px solid #ddd; border-radius: 4px; padding: .75rem; overflow-x: auto; }
b.method { display: inline-block; min-width: 3.5rem; }
p.status { color: #555; font-size: .9rem; }
@media (prefers-color-scheme: dark) {
  body { background: #1b1b1b; color: #ddd; } pre { background: #262626; border-color: #444; } p.status { color: #aaa; }
}
</style>
</head>
<body>
<h1>infinity-bento $version</h1>
<p>$models The same list as data: <a href="openapi.json">openapi.json</a>.</p>
$routes
$native
$others
</body>
</html>
""")


async def metrics(call: Call) -> Reply:
    """The Prometheus text."""
    return Reply(call.context.metrics.render(), content_type=CONTENT_TYPE.encode())


class DocumentPages:
    """The OpenAPI document and the page made from it.

    Args:
        schemas: Schema name -> JSON schema, of all dialects.
    """

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas

    async def openapi(self, call: Call) -> Reply:
        """The document, its examples naming a loaded model."""
        return Reply.of_json(self._document(call))

    async def docs(self, call: Call) -> Reply:
        """One HTML page without outside resources: every route, with a curl line that runs as it is."""
        document = self._document(call)
        with_key = call.context.settings.api_key is not None
        names = [f"<code>{html.escape(model.name)}</code>" for model in call.models()]
        rows = [
            (method, path, operation)
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        ]
        native = [row for row in rows if NATIVE_TAG in row[2]["tags"]]
        base_url = _base_url(call)
        page = _PAGE.substitute(
            version=html.escape(call.context.settings.version),
            models=f"Loaded: {', '.join(names)}." if names else "No model is loaded yet: reload this page later.",
            routes="\n".join(
                _route_section(*row, base_url, with_key=with_key)
                for row in rows
                if row not in native and "x-needs" not in row[2]
            ),
            native=_native_section([row for row in native if "x-needs" not in row[2]], base_url, with_key=with_key),
            others=_others_section([row for row in rows if "x-needs" in row[2]]),
        )
        return Reply(
            page.encode(), content_type=HTML_TYPE.encode(), headers=[(b"content-security-policy", _PAGE_POLICY)]
        )

    def _document(self, call: Call) -> dict[str, Any]:
        settings = call.context.settings
        return build_document(
            call.context.routes,
            self._schemas,
            call.models(),
            version=settings.version,
            with_key=settings.api_key is not None,
            native=call.context.native,
        )


def _native_section(rows: Sequence[Row], base_url: str, *, with_key: bool) -> str:
    """BentoML's methods: a snippet for its client, and what takes the place of ``embed`` in it."""
    if not rows:
        return ""
    token = ', token=os.environ["INFINITY_API_KEY"]' if with_key else ""
    lines = [f"{'import os' + chr(10) if with_key else ''}import bentoml", ""]
    lines.append(f'with bentoml.SyncHTTPClient("{base_url}"{token}) as client:')
    for _, path, operation in rows:
        example = operation["requestBody"]["content"]["application/json"]["example"]["items"]
        lines.append(f"    print(client.{path.rpartition('/')[2]}(items={example!r}))")
    names = ", ".join(f"<code>{html.escape(path)}</code>" for _, path, _ in rows)
    return (
        "<h2>BentoML client</h2>\n"
        "<p>Lists of items in, a result or an error for each of them out.</p>\n"
        f'<pre class="python">{html.escape(chr(10).join(lines))}</pre>\n'
        f'<p class="status">Over HTTP: POST {names}, with the body {{"items": [...]}}</p>'
    )


def _others_section(rows: Sequence[Row]) -> str:
    """The routes that no loaded model can answer, and what they would take."""
    if not rows:
        return ""
    entries = "\n".join(
        f"<li><code>{method.upper()} {html.escape(path)}</code>: {html.escape(operation['summary'])}</li>"
        for method, path, operation in rows
    )
    return f"<h2>Not with the loaded models</h2>\n<ul>\n{entries}\n</ul>"


def _route_section(method: str, path: str, operation: Mapping[str, Any], base_url: str, *, with_key: bool) -> str:
    words = ["curl", "-sS", base_url + path]
    if with_key and "security" in operation:
        words.append("-H 'Authorization: Bearer '\"$INFINITY_API_KEY\"")
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
    if body is not None:
        words += ["-H 'content-type: application/json'", "-d " + shlex.quote(orjson.dumps(body).decode())]
    statuses = ", ".join(operation["responses"])
    return (
        f'<h2><b class="method">{method.upper()}</b> <code>{html.escape(path)}</code></h2>\n'
        f"<p>{html.escape(operation['summary'])}</p>\n"
        f"<pre>{html.escape(' '.join(words))}</pre>\n"
        f'<p class="status">Statuses: {statuses}</p>'
    )


def _base_url(call: Call) -> str:
    """How the reader reached this page; a strange Host header is not repeated."""
    host = (header(call.scope, b"host") or b"").decode("latin-1")
    if not _SAFE_HOST.fullmatch(host):
        host = "127.0.0.1:3000"
    return f"{call.scope.get('scheme', 'http')}://{host}"
