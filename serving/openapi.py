"""`/openapi.json`, from the same structs that decode requests, and `/docs`, a page for it that needs no network."""

from __future__ import annotations

from html import escape
from typing import Any

import msgspec
from aiohttp import web

from paellapy.instrument.env import versions
from paellapy.serving.access import open_to_all
from paellapy.serving.errors import json_response
from paellapy.serving.openai import ChatBody, CompletionBody, GenerateBody
from paellapy.serving.protocol import DEFAULT_LEVEL, RequestBody, ResponseBody

_JSON = "application/json"
_ERROR = {"$ref": "#/components/schemas/Error"}
_TEXT = {"type": "string"}
_MODEL = {"name": "model", "in": "path", "required": True, "schema": _TEXT, "description": "Name of the model"}
_VERSION = {"name": "version", "in": "path", "required": True, "schema": _TEXT, "description": "Always 1"}
_HEADERS = {
    "Inference-Header-Content-Length": "Length of the JSON in bytes, if binary tensors follow it",
    "X-Client-Id": "Name of the client, for policies that are fair between clients; an API key's name takes precedence",
    "X-Request-Id": "Id of the request, returned in the answer and written to the logs",
    "traceparent": "W3C trace context; returned with a span of the server's own",
}
_INFER = (
    "`parameters.priority`: 1 goes first, then 2 and so on, under policies that read priorities; 0 or "
    f"no priority counts as {DEFAULT_LEVEL}. `parameters.timeout`: deadline in microseconds from now; a request that "
    "cannot meet it is refused at once. `parameters.binary_data_output`: all outputs as binary. Inputs and "
    "outputs follow the binary tensor extension. Bodies may be compressed with gzip or deflate. An output's parameter "
    "`classification` asks for its n best classes as text."
)
_GENERATE = "For language models; options of sampling stand in `parameters` or beside `text_input`."
_TEXT_STREAM = "With `stream`, server-sent events: one token each, then `[DONE]`."
_BODIES: dict[str, type] = {
    "/infer": RequestBody, "/generate": GenerateBody, "/generate_stream": GenerateBody,
    "/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody,
}  # fmt: skip
# path, method, summary, description, whether it has a body
_PATHS: tuple[tuple[str, str, str, str, bool], ...] = (
    ("/v2", "get", "The server", "Name, version, extensions.", False),
    ("/v2/health/live", "get", "Is the server alive", "200 while the process answers.", False),
    (
        "/v2/health/ready",
        "get",
        "Is the server ready",
        "200 once every model is loaded; 503 before, while the server stops, and while the engine is unresponsive.",
        False,
    ),
    ("/v2/models/{model}", "get", "A model's tensors", "Shapes have -1 for the batch.", False),
    ("/v2/models/{model}/ready", "get", "Is the model ready", "200 or 503.", False),
    ("/v2/models/{model}/config", "get", "A model's configuration", "In Triton's format.", False),
    ("/v2/models/{model}/stats", "get", "A model's statistics", "In Triton's format.", False),
    ("/v2/models/{model}/infer", "post", "Run the model", _INFER, True),
    ("/v2/models/{model}/generate", "post", "Continue a text", _GENERATE, True),
    ("/v2/models/{model}/generate_stream", "post", "Continue a text, piece by piece", _GENERATE, True),
    ("/v2/models/stats", "get", "Statistics of all models", "", False),
    ("/v2/repository/index", "post", "Configured models", 'Body: {} or {"ready": true}.', True),
    ("/v2/repository/models/{model}/load", "post", "Load a model", "Only configured models can be loaded.", True),
    ("/v2/repository/models/{model}/unload", "post", "Unload a model", "Requests in flight finish first.", True),
    ("/v1/embeddings", "post", "Vectors of texts", "As OpenAI's API: model, input, encoding_format, dimensions.", True),
    ("/v1/rerank", "post", "Scores of documents", "model, query, documents, top_n, return_documents.", True),
    ("/v2/outlook", "get", "Queue and predictions", "For routers; ?every_ms=5 streams a line every 5 ms.", False),
    ("/v1/models", "get", "Language models", "As OpenAI's clients expect; /openai/v1 has the same addresses.", False),
    ("/v1/models/{model}", "get", "A language model", "", False),
    ("/v1/completions", "post", "Continue texts", _TEXT_STREAM, True),
    ("/v1/chat/completions", "post", "Answer a chat", _TEXT_STREAM, True),
    ("/health", "get", "Is the server ready", "As /v2/health/ready.", False),
    ("/metrics", "get", "Prometheus metrics", "", False),
    ("/", "get", "The dashboard", "A page for browsers.", False),
    ("/dashboard/events", "get", "The dashboard's data", "Server-sent events; each is one snapshot.", False),
    ("/dashboard/policy", "post", "Switch the policy", 'Body: {"policy": "…"}. Needs the header X-Paellapy: 1.', True),
)
_TEXTS = {"/metrics": "text/plain", "/": "text/html", "/dashboard/events": "text/event-stream"}

_OPEN = ("/v2/health/live", "/v2/health/ready", "/health", "/")  # need no key, whatever the configuration says


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    structs = [*set(_BODIES.values()), ResponseBody]
    _, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    schemas["Error"] = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    fields = {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")}
    inner = {"type": "object", "required": [*fields], "properties": fields}
    schemas["ApiError"] = {"type": "object", "required": ["error"], "properties": {"error": inner}}
    # The decoder keeps a tensor's data undecoded until its datatype is known.
    schemas["RequestTensor"]["properties"]["data"] = {
        "type": "array",
        "description": "Numbers, flat in row-major order or nested like the shape",
    }
    paths: dict[str, Any] = {}
    for path, method, summary, text, body in _PATHS:
        paths[path] = {method: _operation(path, summary, text, body)}
        if path.startswith("/v2/models/{model}"):
            versioned = path.replace("{model}", "{model}/versions/{version}")
            paths[versioned] = {method: _operation(versioned, summary, text, body)}
    for path in _OPEN:
        paths[path]["get"]["security"] = []
    return {
        "openapi": "3.1.0",
        "info": {"title": "paellapy", "version": versions()["paellapy"], "description": "Open Inference Protocol v2"},
        "paths": paths,
        # One of the two keys, or none: a server may have no keys.
        "security": [{"bearer": []}, {"key": []}, {}],
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _operation(path: str, summary: str, text: str, has_body: bool) -> dict[str, Any]:
    infers = path.endswith("/infer")
    parameters: list[dict[str, Any]] = []
    if "{model}" in path:
        parameters.append(_MODEL)
    if "{version}" in path:
        parameters.append(_VERSION)
    if infers:
        parameters += [
            {"name": name, "in": "header", "required": False, "schema": {"type": "string"}, "description": said}
            for name, said in _HEADERS.items()
        ]
    answer: dict[str, Any] = {"type": "object"}
    if infers:
        answer = {"$ref": "#/components/schemas/ResponseBody"}
    elif path.endswith("/index"):
        answer = {"type": "array", "items": {"type": "object"}}
    kind = _JSON
    if path in _TEXTS:
        kind, answer = _TEXTS[path], {"type": "string"}
    found: dict[str, Any] = {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_").replace("{", "").replace("}", "") or "dashboard",
        "responses": {"200": _response("OK", kind, answer), **_errors(path, answer)},
    }
    if text:
        found["description"] = text
    if parameters:
        found["parameters"] = parameters
    if has_body:
        struct = next((each for end, each in _BODIES.items() if path.endswith(end)), None)
        schema = {"type": "object"} if struct is None else {"$ref": f"#/components/schemas/{struct.__name__}"}
        found["requestBody"] = {"required": struct is not None, "content": {"application/json": {"schema": schema}}}
    return found


def _errors(path: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Error responses of an address. All answer a wrong method with 405 and list the right ones in `Allow`."""
    error = {"$ref": "#/components/schemas/ApiError"} if path.startswith("/v1") else _ERROR
    found = {"default": _response("Another error; the body describes it", _JSON, error)}
    if path.endswith("/ready"):
        found["503"] = _response("Not ready; the body has the form of the 200 answer", _JSON, answer)
    if path.endswith("/infer"):
        found |= {
            "400": _response("The request is invalid; the error says why", _JSON, error),
            "413": _response("The body is larger than any valid request of the model", _JSON, error),
            "415": _response("The Content-Encoding is neither gzip nor deflate", _JSON, error),
            "429": _response("The client already has its part of the requests that may wait or run", _JSON, error),
            "503": _response("Refused (it would be late, or the queue is full), or late", _JSON, error),
        }
        whole = {"type": "integer", "minimum": 1}
        for refused in ("429", "503"):
            found[refused]["headers"] = {
                "Retry-After": {"description": "Seconds after which to try again", "schema": whole}
            }
    if "{model}" in path:
        found["404"] = _response("There is no such model", _JSON, error)
    if path.endswith(("/load", "/unload", "/policy")):
        found["403"] = _response("The key, the origin or the host name does not permit it", _JSON, error)
    found["405"] = _response("The address does not take this method", _JSON, _ERROR)
    found["405"]["headers"] = {"Allow": {"description": "Methods that the address takes", "schema": {"type": "string"}}}
    return found


def _response(text: str, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {kind: {"schema": schema}}}


_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;overflow-wrap:anywhere;"
    "background:light-dark(#fff,#0e1116);color:light-dark(#222,#e8ebef)}"
    "code,pre{font:13px ui-monospace,monospace}pre{overflow:auto}a{color:light-dark(#0072b2,#56b4e9)}"
    "b{display:inline-block;width:3.5rem;color:light-dark(#0072b2,#56b4e9)}"
    "details{border-top:1px solid light-dark(#ddd,#2b323c);padding:.5rem 0}summary{cursor:pointer}"
    "td{padding-right:1rem;vertical-align:top}"
)


def page() -> str:
    """The document as an HTML page without scripts or files from other hosts."""
    spec = document()
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>paellapy</title>'
        f'<link rel="icon" href="dashboard/icon.svg"><style>{_STYLE}</style><h1>paellapy</h1>'
        '<p>Open Inference Protocol v2 · <a href="./">dashboard</a> · <a href="openapi.json">openapi.json</a></p>'
    ]
    for path, methods in spec["paths"].items():
        for method, each in methods.items():
            parameters = "".join(
                f"<tr><td><code>{escape(p['name'])}</code><td>{p['in']}<td>{escape(p.get('description', ''))}"
                for p in each.get("parameters", ())
            )
            parts.append(
                f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> {escape(each['summary'])}"
                f"</summary><p>{escape(each.get('description', ''))}</p><table>{parameters}</table></details>"
            )
    for name in (
        "RequestBody", "RequestTensor", "RequestedOutput", "ResponseBody", "ResponseTensor", "GenerateBody",
        "CompletionBody", "ChatBody",
    ):  # fmt: skip
        schema = msgspec.json.format(msgspec.json.encode(spec["components"]["schemas"][name]), indent=2).decode()
        parts.append(f"<details><summary><code>{name}</code></summary><pre>{escape(schema)}</pre></details>")
    return "".join(parts)


def add_docs(app: web.Application) -> None:
    spec, html = document(), page()

    @open_to_all  # the same on every server, so it needs no key
    async def openapi(request: web.Request) -> web.Response:
        return json_response(spec)

    @open_to_all
    async def docs(request: web.Request) -> web.Response:
        return web.Response(text=html, content_type="text/html")

    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/docs", docs)
