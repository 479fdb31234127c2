"""Vectors of texts, or a fine-tuned run's answers, over HTTP: `bert-jax serve`.

    POST /v1/embeddings   as OpenAI's clients ask; of a run or a base
    POST /predict         of a fine-tuned run
    GET  /v1/models       the name of what is served
    GET  /health          200 once it listens, which it does when every program is compiled; 503
                          while a turn takes longer than an answer may
    GET  /metrics         Prometheus text

A loop of events takes requests, one thread computes. Whenever that thread is free it takes a turn:
texts of all requests that wait, one of each after the other until there are enough rows to do, so
that a large request holds nobody up. `embed.Embedder` or `tasks.predict.TaskModel` sorts them by
length and computes them, as it does in bulk. What nobody waits for any more is not begun, and
answers are written as they are read.
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
from bert_jax.serve.served import EmbedEndpoint, Item, Limits, PredictEndpoint, Refused

# Rows and bytes of all requests under way.
_ROWS, _BYTES = 2**16, 2**27
_BACKLOG = 2048
# Upper ends of the histogram of answers' seconds.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# What is asked, how many rows it is as much work as, and who waits for its result.
_Waiting = tuple[Any, int, asyncio.Future]


class Service:
    """The application that asks `served`."""

    def __init__(self, served: EmbedEndpoint | PredictEndpoint, limits: Limits):
        self._served, self.limits = served, limits
        # Of each request the items that were not yet begun.
        self._waiting: collections.deque[collections.deque[_Waiting]] = collections.deque()
        # What all requests under way hold, and may hold.
        self._held = collections.Counter[str]()
        self._most = {"requests": limits.requests, "rows": _ROWS, "bytes": limits.bytes + _BYTES}
        self.answered = collections.Counter[int]()  # requests, by HTTP's status
        self._counts = dict.fromkeys(("left", "refused", "turns", "texts"), 0)
        self._in_bucket, self._seconds = [0] * (len(_SECONDS) + 1), 0.0
        self._turn_began = math.inf  # by the monotonic clock; infinite while no turn is computed
        self._created = int(time.time())
        # To be run by an ASGI server.
        routes = {"/health": self._health, "/metrics": self._metrics, "/v1/models": self._models}
        self.app = Starlette(
            # A redirect to the path without the slash would lose the body of some clients.
            routes=[
                route
                for slash in ("", "/")
                for route in (
                    Route(served.path + slash, self, methods=["POST"]),
                    *(Route(path + slash, answer) for path, answer in routes.items()),
                )
            ],
            exception_handlers=dict.fromkeys((HTTPException, Exception), self._misplaced),
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        self._work = asyncio.Event()
        with ThreadPoolExecutor(1) as thread:
            turns = asyncio.create_task(self._turns(thread))
            yield
            turns.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, which is under way until all but a few kB of the answer are read."""
        mine = collections.Counter[str]()
        try:
            response = await self._response(Request(scope, receive), mine)
            self.answered[response.status_code] += 1
            await response(scope, receive, send)
        except ClientDisconnect:
            self._counts["left"] += 1
        finally:
            self._held.subtract(mine)

    def _hold(self, mine: collections.Counter[str], what: str, count: int) -> None:
        """Adds to what a request holds, unless all together would hold too much."""
        most = self._most[what]
        if self._held[what] + count > most:
            message = f"{self._held[what]} {what} are under way, of {most} at most; ask again later"
            raise Refused(503 if count <= most else 413, message)
        self._held[what] += count
        mine[what] += count

    async def _response(self, request: Request, mine: collections.Counter[str]) -> Response:
        """Answers a request, or says why not; raises for clients that have left alone."""
        began, body = time.monotonic(), None
        try:
            self._hold(mine, "requests", 1)
            async with asyncio.timeout(self.limits.seconds):
                body = await self._fields(request, mine)
                items = await asyncio.to_thread(self._served.items, body, self.limits)
                self._hold(mine, "rows", sum(rows for _, rows in items))
                results = await self._results(request, items)
            seconds = time.monotonic() - began
            self._seconds += seconds
            self._in_bucket[bisect.bisect_left(_SECONDS, seconds)] += 1
            answer = self._served.answer(body, results)
            return StreamingResponse(answer, media_type="application/json")
        except InputError as error:  # the model gives no numbers, or has too much to do at once
            refused = Refused(500, str(error))
        except TimeoutError:
            refused = Refused(408, "the body did not arrive in time")
            if body is not None:
                again = "ask again later"
                refused = Refused(503, f"no answer within {self.limits.seconds:g} s; {again}")
        except Refused as error:
            refused = error
        self._counts["refused"] += refused.status == 503
        return refused.response()

    async def _fields(self, request: Request, mine: collections.Counter[str]) -> dict[str, Any]:
        """Returns what a request says, with a `model`."""
        body = bytearray()
        async for chunk in request.stream():  # uvicorn drops what comes after a refusal
            body += chunk
            if len(body) > self.limits.bytes:
                raise Refused(413, f"the body is longer than {self.limits.bytes} bytes")
            self._hold(mine, "bytes", len(chunk))
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise Refused(400, "the body must be a JSON object")
        if not isinstance(fields.setdefault("model", self._served.name), str):
            raise Refused(400, "model: must be a text", "model")
        return fields

    async def _results(self, request: Request, items: list[Item]) -> list[Any]:
        """Returns what the model makes of each item.

        Raises:
          ClientDisconnect: the client has left.
        """
        loop = asyncio.get_running_loop()
        waiting = [(asked, size, loop.create_future()) for asked, size in items]
        self._waiting.append(collections.deque(waiting))
        self._work.set()
        results = asyncio.gather(*(future for *_, future in waiting))
        left = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({results, left}, return_when=asyncio.FIRST_COMPLETED)
            if not results.done():
                raise ClientDisconnect
            return results.result()
        finally:
            left.cancel()
            for *_, future in waiting:
                future.cancel()

    async def _turns(self, thread: ThreadPoolExecutor) -> None:
        """Computes what waits, turn by turn; where it cannot go on, the process ends."""
        loop = asyncio.get_running_loop()
        try:
            while await self._work.wait():
                turn = self._turn()
                if not turn:
                    self._work.clear()
                    continue
                asked = [item for item, _ in turn]
                self._turn_began = time.monotonic()
                results = await loop.run_in_executor(thread, self._computed, asked)
                if all(_is_fault(result) for result in results):
                    await loop.run_in_executor(thread, self._served.warm)
                self._turn_began = math.inf
                self._counts["turns"] += 1
                self._counts["texts"] += len(turn)
                for (_, future), result in zip(turn, results, strict=True):
                    if not future.done():  # its client is there, and no other item of it failed
                        failed = isinstance(result, Exception)
                        (future.set_exception if failed else future.set_result)(result)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            raise SystemExit(message_and_code(error)[0]) from error

    def _computed(self, items: list[Any]) -> list[Any]:
        """Returns the result of each item, of one at fault, found by halves, its error."""
        try:
            return self._served.compute(items)
        except BaseException as error:  # a panic of a library is no Exception
            if half := len(items) // 2:
                return self._computed(items[:half]) + self._computed(items[half:])
            return [error if isinstance(error, Exception) else RuntimeError(repr(error))]

    def _turn(self) -> list[tuple[Any, asyncio.Future]]:
        """Returns what is to be computed next, an item of each request after the other."""
        turn, rows = list[tuple[Any, asyncio.Future]](), 0
        while self._waiting and rows < self.limits.rows:
            items = self._waiting.popleft()
            asked, size, future = items.popleft()
            if not future.done():
                turn.append((asked, future))
                rows += size
                if items:
                    self._waiting.append(items)
        return turn

    async def _health(self, _: Request) -> Response:
        """Answers 200, or 503 if the current turn exceeds the time limit."""
        seconds = time.monotonic() - self._turn_began
        if seconds > self.limits.seconds:
            stuck = {"status": f"computing for {seconds:.0f} s", "model": self._served.name}
            return JSONResponse(stuck, 503)
        return JSONResponse({"status": "ready", "model": self._served.name})

    async def _models(self, _: Request) -> Response:
        model = {"id": self._served.name, "object": "model", "created": self._created}
        data = [model | {"owned_by": "bert_jax"}]
        return JSONResponse({"object": "list", "data": data})

    async def _metrics(self, _: Request) -> Response:
        of_codes = {f'{{code="{status}"}}': n for status, n in sorted(self.answered.items())}
        values = {"requests_total": ("counter", of_codes)}
        values |= {f"{name}_total": ("counter", {"": n}) for name, n in self._counts.items()}
        for what, most in self._most.items():
            values[f"{what}_under_way"] = "gauge", {"": self._held[what]}
            values[f"{what}_limit"] = "gauge", {"": most}
        ends, sums = (*map(str, _SECONDS), "+Inf"), itertools.accumulate(self._in_bucket)
        answers = {f'_bucket{{le="{end}"}}': n for end, n in zip(ends, sums, strict=True)}
        answers |= {"_sum": round(self._seconds, 6), "_count": sum(self._in_bucket)}
        lines = []
        for name, (kind, numbers) in (values | {"answer_seconds": ("histogram", answers)}).items():
            lines.append(f"# TYPE bert_jax_{name} {kind}")
            lines += [f"bert_jax_{name}{which} {number}" for which, number in numbers.items()]
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def _misplaced(self, _: Request, error: Exception) -> Response:
        """Answers what is asked elsewhere, or by another method, or meets a bug of ours."""
        refused, headers = Refused(500, f"internal error: {type(error).__name__}"), {}
        if isinstance(error, HTTPException):
            known = f"there are POST {self._served.path}, GET /v1/models, /health and /metrics"
            refused = Refused(error.status_code, f"{error.detail}: {known}")
            headers = error.headers or {}
        self.answered[refused.status] += 1
        response = refused.response()
        response.headers.update(headers)
        return response


def _is_fault(result: Any) -> bool:
    """Returns whether a result is an internal error rather than an error of the item."""
    return isinstance(result, Exception) and not isinstance(result, InputError)


async def _left(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- the server -----------------------------------------------------------------------------------


class _Connection(H11Protocol):
    """A connection that is cut off when nothing moves, which uvicorn alone would keep for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to look at it from time to time."""
        super().connection_made(transport)
        self._before, self._unread, self._read = None, 0, False
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends that."""
        self._timer.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """Notes that of what was written some was read."""
        self._read = True
        super().resume_writing()

    def _look(self) -> None:
        """Ends it if since the last look no request has begun or ended, and none is under way, or
        what it was answered is not read.
        """
        unread = self.transport.get_write_buffer_size()
        idle = not unread and (self.cycle is None or self.cycle.response_complete)
        stuck = 0 < self._unread <= unread and not self._read
        if self.cycle is self._before and (idle or stuck):
            self.transport.abort()  # to close it would wait for the client to read
            return
        self._before, self._unread, self._read = self.cycle, unread, False
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._look)


def listening(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound, and does not listen yet."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        family, kind, protocol, _, address = info
        # Of a socket that is not known to be TCP's asyncio leaves Nagle's algorithm on: 40 ms.
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:  # a name that is none fails as text
        why = getattr(error, "strerror", None) or error
        raise InputError(f"--host {host} --port {port}: {why}") from error
    return bound


def server_of(service: Service, seconds: float) -> uvicorn.Server:
    """Returns what runs it; asked to stop, it takes no more and answers what is under way.

    A connection may be silent for so many seconds, and the end may take as long.
    """
    settings = uvicorn.Config(
        service.app,
        loop="asyncio",
        http=_Connection,
        limit_concurrency=2 * service.limits.requests + 1,  # it counts the one that comes
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
    served: EmbedEndpoint | PredictEndpoint,
    bound: socket.socket,
    limits: Limits,
    say: Callable[[str], None],
) -> None:
    """Answers until SIGTERM or Ctrl-C, then ends what is under way."""
    bound.listen(_BACKLOG)
    host, port = bound.getsockname()[:2]
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    say(f"serve: {where}{served.path}, {served.name}, {served.about}")
    service = Service(served, limits)
    server = server_of(service, limits.seconds)

    def end(number: int, frame: Any) -> None:
        """Takes what uvicorn raises again when it has ended, and what comes before it begins."""
        server.should_exit = True

    before = signal.signal(signal.SIGTERM, end)
    try:
        server.run(sockets=[bound])
    finally:
        signal.signal(signal.SIGTERM, before)
        counts = sorted(service.answered.items())
        answered = ", ".join(f"{count} with {status}" for status, count in counts)
        say(f"serve: ended; requests answered: {answered or 'none'}")
