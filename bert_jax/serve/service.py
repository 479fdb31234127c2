"""Text vectors, or a fine-tuned run's answers, over HTTP: `bert-jax serve`.

    POST /v1/embeddings   in OpenAI's format, for a run or a base
    POST /predict         for a fine-tuned run
    POST /embed, /rerank, ...   as Text Embeddings Inference does, see `tei`
    GET  /v1/models       the name of the model
    GET  /health          200; 503 while a batch takes longer than --timeout. The server listens
                          once all programs are compiled.
    GET  /metrics         Prometheus text

An event loop receives requests, and one thread computes their items (texts or examples) in batches,
called turns. A turn takes one item of each waiting request in rotation until it has enough rows, so
that a large request does not block others. Items of clients that have disconnected are dropped, and
responses are written as fast as clients read them.
"""

import asyncio
import bisect
import collections
import contextlib
import itertools
import json
import math
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from bert_jax.errors import InputError, message_and_code
from bert_jax.serve import tei
from bert_jax.serve.endpoints import EmbedEndpoint, Item, Limits, PredictEndpoint, RequestError

# Maximum rows of all requests in progress, and bytes of their bodies beyond one of --max-bytes.
_MAX_ROWS, _MAX_BYTES = 2**16, 2**27
_BACKLOG = 2048
# Upper bounds of the histogram of response times, in seconds.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# An item of a request, its cost in rows, and the future of its result.
_Pending = tuple[Any, int, asyncio.Future]
_Usage = collections.Counter[str]  # the amounts of resources that are reserved


class Service:
    """The ASGI application of an endpoint."""

    def __init__(self, endpoint: EmbedEndpoint | PredictEndpoint, limits: Limits):
        self._endpoint, self.limits = endpoint, limits
        self.formats: dict[str, Any] = {endpoint.path: endpoint} | tei.formats_of(endpoint)
        # For each request, the items that are not yet computed.
        self._pending: collections.deque[collections.deque[_Pending]] = collections.deque()
        # The resources that all requests in progress have reserved, and the maximum amounts.
        self._reserved = _Usage()
        max_bytes = limits.bytes + _MAX_BYTES
        self._capacity = {"requests": limits.requests, "rows": _MAX_ROWS, "bytes": max_bytes}
        self.answered = collections.Counter[int]()  # requests by HTTP status
        self._counts = dict.fromkeys(("left", "refused", "turns", "texts"), 0)  # left: clients
        self._bucket_counts, self._total_seconds = [0] * (len(_BUCKETS) + 1), 0.0
        self._turn_began = math.inf  # on the monotonic clock; infinite between turns
        self._created = int(time.time())
        routes = {"/health": self._health, "/metrics": self._metrics, "/v1/models": self._models}
        self.app = Starlette(
            # Both forms of each path, since some clients lose the body in a redirect.
            routes=[
                route
                for slash in ("", "/")
                for route in (
                    *(Route(path + slash, self, methods=["POST"]) for path in self.formats),
                    *(Route(path + slash, answer) for path, answer in routes.items()),
                )
            ],
            exception_handlers=dict.fromkeys((HTTPException, Exception), self._handle_error),
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._has_items = asyncio.Event()
        with ThreadPoolExecutor(1) as thread:
            turns = asyncio.create_task(self._compute_turns(thread))
            yield
            turns.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; it is in progress until the client has read all but a few kB."""
        reserved = _Usage()
        try:
            body_format = self.formats[scope["path"].rstrip("/")]
            response = await self._response(Request(scope, receive), body_format, reserved)
            self.answered[response.status_code] += 1
            await response(scope, receive, send)
        except ClientDisconnect:
            self._counts["left"] += 1
        finally:
            self._reserved.subtract(reserved)

    def _reserve(self, reserved: _Usage, resource: str, count: int) -> None:
        """Reserves a resource for the request of `reserved`; raises if too little is left."""
        used, capacity = self._reserved[resource], self._capacity[resource]
        if used + count > capacity:
            message = f"{used} of at most {capacity} {resource} are in progress; try again later"
            raise RequestError(503 if count <= capacity else 413, message)
        self._reserved[resource] += count
        reserved[resource] += count

    async def _response(self, request: Request, body_format: Any, reserved: _Usage) -> Response:
        """Returns the answer to a request, or an error; raises only if the client has left."""
        began, body = time.monotonic(), None
        try:
            self._reserve(reserved, "requests", 1)
            async with asyncio.timeout(self.limits.seconds):
                body = await self._read_fields(request, reserved)
                items = await asyncio.to_thread(body_format.items, body, self.limits)
                self._reserve(reserved, "rows", sum(cost for _, cost in items))
                results = await self._compute_items(request, items)
            seconds = time.monotonic() - began
            self._total_seconds += seconds
            self._bucket_counts[bisect.bisect_left(_BUCKETS, seconds)] += 1
            answer = body_format.answer(body, results)
            return StreamingResponse(answer, media_type="application/json")
        except InputError as error:  # from `compute`: not finite, or out of memory
            problem = RequestError(500, str(error))
        except TimeoutError:
            problem = RequestError(408, "the body did not arrive in time")
            if body is not None:
                message = f"no answer within {self.limits.seconds:g} s; try again later"
                problem = RequestError(503, message)
        except RequestError as error:
            problem = error
        self._counts["refused"] += problem.status == 503
        return problem.response()

    async def _read_fields(self, request: Request, reserved: _Usage) -> dict[str, Any]:
        """Returns the JSON fields of a request; `model` has a default."""
        body = bytearray()
        async for chunk in request.stream():  # after an error, uvicorn drops the rest
            body += chunk
            if len(body) > self.limits.bytes:
                raise RequestError(413, f"the body is longer than {self.limits.bytes} bytes")
            self._reserve(reserved, "bytes", len(chunk))
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"the body is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise RequestError(400, "the body must be a JSON object")
        if not isinstance(fields.setdefault("model", self._endpoint.name), str):
            raise RequestError(400, "model: must be a text", "model")
        return fields

    async def _compute_items(self, request: Request, items: list[Item]) -> list[Any]:
        """Queues the items of a request, and returns their results.

        Raises:
          ClientDisconnect: the client has left.
        """
        loop = asyncio.get_running_loop()
        pending = [(item, cost, loop.create_future()) for item, cost in items]
        self._pending.append(collections.deque(pending))
        self._has_items.set()
        results = asyncio.gather(*(future for *_, future in pending))
        disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            await asyncio.wait({results, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not results.done():
                raise ClientDisconnect
            return results.result()
        finally:
            disconnect.cancel()
            for *_, future in pending:
                future.cancel()

    async def _compute_turns(self, thread: ThreadPoolExecutor) -> None:
        """Computes pending items turn by turn; ends the process if the model cannot compute."""
        loop = asyncio.get_running_loop()
        try:
            while await self._has_items.wait():
                turn = self._next_turn()
                if not turn:
                    self._has_items.clear()
                    continue
                items = [item for item, _ in turn]
                self._turn_began = time.monotonic()
                results = await loop.run_in_executor(thread, self._compute, items)
                if all(_is_fault(result) for result in results):
                    # Raises, and so ends the process, if the model is at fault.
                    await loop.run_in_executor(thread, self._endpoint.warm)
                self._turn_began = math.inf
                self._counts["turns"] += 1
                self._counts["texts"] += len(turn)
                for (_, future), result in zip(turn, results, strict=True):
                    if not future.done():  # the request has not ended
                        failed = isinstance(result, Exception)
                        (future.set_exception if failed else future.set_result)(result)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            raise SystemExit(message_and_code(error)[0]) from error

    def _compute(self, items: list[Any]) -> list[Any]:
        """Returns the result or the error of each item; bisects to find items with errors."""
        try:
            return self._endpoint.compute(items)
        except BaseException as error:  # a Rust panic is not an Exception
            if half := len(items) // 2:
                return self._compute(items[:half]) + self._compute(items[half:])
            return [error if isinstance(error, Exception) else RuntimeError(repr(error))]

    def _next_turn(self) -> list[tuple[Any, asyncio.Future]]:
        """Returns the next items to compute, taken from the requests in rotation."""
        turn, rows = list[tuple[Any, asyncio.Future]](), 0
        while self._pending and rows < self.limits.rows:
            items = self._pending.popleft()
            item, cost, future = items.popleft()
            if not future.done():  # else the request has ended: its other items are dropped too
                turn.append((item, future))
                rows += cost
                if items:
                    self._pending.append(items)
        return turn

    async def _health(self, _: Request) -> Response:
        """Answers 200, or 503 if the current turn exceeds the time limit."""
        seconds = time.monotonic() - self._turn_began
        if seconds > self.limits.seconds:
            stuck = {"status": f"computing for {seconds:.0f} s", "model": self._endpoint.name}
            return JSONResponse(stuck, 503)
        return JSONResponse({"status": "ready", "model": self._endpoint.name})

    async def _models(self, _: Request) -> Response:
        model = {"id": self._endpoint.name, "object": "model", "created": self._created}
        return JSONResponse({"object": "list", "data": [model | {"owned_by": "bert_jax"}]})

    async def _metrics(self, _: Request) -> Response:
        by_status = {f'{{code="{status}"}}': n for status, n in sorted(self.answered.items())}
        values = {"requests_total": ("counter", by_status)}
        values |= {f"{name}_total": ("counter", {"": n}) for name, n in self._counts.items()}
        for resource, capacity in self._capacity.items():
            values[f"{resource}_under_way"] = "gauge", {"": self._reserved[resource]}
            values[f"{resource}_limit"] = "gauge", {"": capacity}
        ends, sums = (*map(str, _BUCKETS), "+Inf"), itertools.accumulate(self._bucket_counts)
        buckets = {f'_bucket{{le="{end}"}}': n for end, n in zip(ends, sums, strict=True)}
        buckets |= {"_sum": round(self._total_seconds, 6), "_count": sum(self._bucket_counts)}
        lines = []
        for name, (kind, numbers) in (values | {"answer_seconds": ("histogram", buckets)}).items():
            lines.append(f"# TYPE bert_jax_{name} {kind}")
            lines += [f"bert_jax_{name}{label} {number}" for label, number in numbers.items()]
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def _handle_error(self, _: Request, error: Exception) -> Response:
        """Answers requests with another path or method, and those that raise an internal error."""
        problem, headers = RequestError(500, f"internal error: {type(error).__name__}"), {}
        if isinstance(error, HTTPException):
            posted = ", ".join(self.formats)
            paths = f"there are POST {posted}, GET /v1/models, /health and /metrics"
            problem = RequestError(error.status_code, f"{error.detail}: {paths}")
            headers = error.headers or {}
        self.answered[problem.status] += 1
        response = problem.response()
        response.headers.update(headers)
        return response


def _is_fault(result: Any) -> bool:
    """Returns whether a result is an internal error, not an InputError about the item."""
    return isinstance(result, Exception) and not isinstance(result, InputError)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Connection(H11Protocol):
    """A connection that closes when it is idle; uvicorn would keep it open forever."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Starts the periodic check."""
        super().connection_made(transport)
        self._last_cycle, self._unread_bytes, self._client_has_read = None, 0, False
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the periodic check."""
        self._timer.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """Records that the client has read some of the response."""
        self._client_has_read = True
        super().resume_writing()

    def _check(self) -> None:
        """Closes the connection if it has been idle or stuck since the last check."""
        unread = self.transport.get_write_buffer_size()
        idle = not unread and (self.cycle is None or self.cycle.response_complete)
        stuck = 0 < self._unread_bytes <= unread and not self._client_has_read
        if self.cycle is self._last_cycle and (idle or stuck):
            self.transport.abort()  # close() would wait for the client to read
            return
        self._last_cycle, self._unread_bytes, self._client_has_read = self.cycle, unread, False
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._check)


def bind_socket(host: str, port: int) -> socket.socket:
    """Returns a bound socket, which does not listen yet."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        family, kind, protocol, _, address = info
        # asyncio disables Nagle's algorithm, which costs 40 ms, only if `protocol` is TCP.
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:  # an invalid host name is a UnicodeError
        why = getattr(error, "strerror", None) or error
        raise InputError(f"--host {host} --port {port}: {why}") from error
    return bound


def make_server(service: Service, seconds: float) -> uvicorn.Server:
    """Returns the HTTP server; when stopped, it still answers the requests in progress.

    `seconds` is the time that a connection may be silent, and that stopping may take.
    """
    settings = uvicorn.Config(
        service.app,
        loop="asyncio",
        http=_Connection,
        limit_concurrency=2 * service.limits.requests + 1,  # counts idle ones and the new one
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(seconds),
        timeout_graceful_shutdown=int(seconds) + 1,
    )
    return uvicorn.Server(settings)


def serve(
    endpoint: EmbedEndpoint | PredictEndpoint,
    bound: socket.socket,
    limits: Limits,
    report: Callable[[str], None],
) -> None:
    """Answers requests until SIGTERM or Ctrl-C, then completes those in progress."""
    bound.listen(_BACKLOG)
    host, port = bound.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    service = Service(endpoint, limits)
    paths = " and ".join(service.formats)
    report(f"serve: {url}{paths}, {endpoint.name}, {endpoint.description}")
    server = make_server(service, limits.seconds)

    def stop(number: int, frame: Any) -> None:
        """Handles the signal before uvicorn starts, and when uvicorn raises it again at its end."""
        server.should_exit = True

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        server.run(sockets=[bound])
    finally:
        signal.signal(signal.SIGTERM, previous)
        counts = sorted(service.answered.items())
        answered = ", ".join(f"{count} with {status}" for status, count in counts)
        report(f"serve: ended; requests answered: {answered or 'none'}")
