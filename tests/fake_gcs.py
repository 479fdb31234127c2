"""A Google Cloud Storage server in memory: what its JSON interface promises, and no more.

An object is whole or not there, is replaced or renamed in one step, and cannot be appended to;
there are no folders; a write may ask for a generation, 0 meaning that nothing is there; lists are
consistent. gcsfs, TensorStore and google-cloud-storage all speak to it.

`Bucket.role` is that of the account which asks: what it does not give is refused, as the real
service does. `Bucket.fault` makes requests fail as those of a real bucket do, by kind and object.
"""

import base64
import contextlib
import dataclasses
import http.server
import itertools
import json
import socket
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Literal

import google_crc32c

_PAGE = 5  # entries of a list that are given at a time: real pages are longer, and as real


Kind = Literal["list", "read", "write", "copy", "delete", "bucket"]

# Of https://cloud.google.com/storage/docs/access-control/iam-roles, as far as it is used here.
_OBJECT_USER = {f"objects.{verb}" for verb in ("list", "get", "create", "delete", "move")}
ROLES = {
    "objectViewer": {"objects.list", "objects.get"},
    "objectCreator": {"objects.create"},
    "legacyBucketWriter": {*_OBJECT_USER, "buckets.get"} - {"objects.get"},
    "objectUser": _OBJECT_USER,
    "objectAdmin": _OBJECT_USER,
    "admin": {*_OBJECT_USER, "buckets.get"},
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """What a request meets instead of an answer.

    Attributes:
      status: of HTTP, with an error as the real service words it; 0: the connection is reset; 200:
        an answer that ends in the middle.
      seconds: that pass before.
      is_done: whether what was asked for is done all the same, and its answer alone is lost.
      change: changes the body of the answer, which stays whole as HTTP.
      breaks_off: the request is answered, but the connection closes after half of the body.
    """

    status: int = 0
    seconds: float = 0.0
    is_done: bool = False
    change: Callable[[bytes], bytes] | None = None
    breaks_off: bool = False


def emptied(body: bytes) -> bytes:
    """Returns nothing: a `Fault.change` of an answer without a body."""
    del body
    return b""


def halved(body: bytes) -> bytes:
    """Returns the first half of a body: a `Fault.change` of an answer that is cut short."""
    return body[: len(body) // 2]


def flipped(body: bytes) -> bytes:
    """Returns a body with one bit flipped in its middle: a `Fault.change` of damaged content."""
    middle = len(body) // 2
    return (
        body[:middle] + bytes([byte ^ 1 for byte in body[middle : middle + 1]]) + body[middle + 1 :]
    )


@dataclasses.dataclass(frozen=True)
class Object:
    """What lies under a name."""

    data: bytes
    generation: int


class Bucket:
    """The objects of the server, by name; every bucket that is asked for holds the same ones."""

    def __init__(self):
        self.lock = threading.Lock()
        self.numbers = itertools.count(1)
        self.reset()

    def reset(self) -> None:
        """Empties it, and takes its faults away."""
        self.objects: dict[str, Object] = {}
        self.encoding = ""  # Content-Encoding of all
        self.sessions: dict[str, tuple[str, dict[str, str], bytearray]] = {}
        self.exists = True
        self.role = "objectUser"  # which docs/howto/use-a-bucket.md names
        self.writes: list[tuple[str, int]] = []  # names and bytes
        self.reset_faults()

    def reset_faults(self) -> None:
        """Answers again, and forgets what was asked."""
        # (HTTP method, name of the object or prefix of the list, kind) to what goes wrong, if so.
        self.fault: Callable[[str, str, Kind], Fault | None] = lambda method, name, kind: None
        self.requests: list[tuple[str, Kind]] = []  # names or prefixes, and kinds

    def files(self, prefix: str = "") -> dict[str, bytes]:
        """Names and contents."""
        with self.lock:
            return {n: o.data for n, o in self.objects.items() if n.startswith(prefix)}

    def put(self, name: str, data: bytes, query: dict[str, str]) -> Object | None:
        """Replaces an object; None if it is not of the generation that is asked for."""
        with self.lock:
            if not self._is_as_asked(name, query):
                return None
            self.objects[name] = Object(bytes(data), next(self.numbers))
            self.writes.append((name, len(data)))
            return self.objects[name]

    def delete(self, name: str, query: dict[str, str]) -> int:
        """Removes an object; returns the answer's status."""
        with self.lock:
            if name not in self.objects:
                return 404
            if not self._is_as_asked(name, query):
                return 412
            del self.objects[name]
            return 204

    def refused(self, kind: Kind, name: str, is_move: bool) -> str:
        """The first right that a request needs and the role does not give; "" for none."""
        needed = {
            "list": ["objects.list"],
            "read": ["objects.get"],
            "write": ["objects.create"],
            "copy": ["objects.move" if is_move else "objects.get", "objects.create"],
            "delete": ["objects.delete"],
            "bucket": ["buckets.get"],
        }[kind]
        if kind in ("write", "copy") and name in self.objects:
            needed.append("objects.delete")
        given = set().union(*(ROLES[role] for role in self.role.split(",")))
        return next((right for right in needed if right not in given), "")

    def _is_as_asked(self, name: str, query: dict[str, str]) -> bool:
        there = self.objects.get(name)
        wanted = query.get("ifGenerationMatch")
        return wanted is None or int(wanted) == (there.generation if there else 0)


_MESSAGES = {
    401: "Invalid Credentials",
    403: "user@example.org does not have storage.objects access",
    429: "rate limit exceeded",
}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def do_GET(self) -> None:
        """Answers any request."""
        self._answer(getattr(self, f"_{self.command.lower()}"))

    do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, *args: object) -> None:
        """Says nothing."""

    def _answer(self, act: Callable[[], None]) -> None:
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        self.url = url.path
        _, _, name = url.path.partition("/o/")
        self.name = urllib.parse.unquote(name)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(self._chunks())
        self.is_answered = True
        self.fault = None
        kind, named = self._kind()
        self.bucket.requests.append((named, kind))
        fault = self.bucket.fault(self.command, named, kind)
        if fault is None and not self.bucket.exists:
            return self._send(404, b'{"error": {"code": 404, "message": "no such bucket"}}')
        if fault is None and (right := self.bucket.refused(kind, named, "/moveTo/" in self.url)):
            message = f"user@example.org does not have storage.{right} access"
            error = {"error": {"code": 403, "message": message}}
            return self._send(403, json.dumps(error).encode())
        if fault is None:
            return act()
        time.sleep(fault.seconds)
        if fault.change or fault.breaks_off:
            self.fault = fault
            return act()
        if fault.is_done:
            self.is_answered = False
            act()
            self.is_answered = True
        if fault.status == 200:
            return self._send(200, b'{"kind": "storage#obj')
        if fault.status:
            error = {"code": fault.status, "message": _MESSAGES.get(fault.status, "try later")}
            return self._send(fault.status, json.dumps({"error": error}).encode())
        # Closed with what was not read: the client is sent a reset.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _kind(self) -> tuple[Kind, str]:
        """What is asked for, and the object, or the prefix of a list."""
        if self.command == "DELETE":
            return "delete", self.name
        if self.command == "GET":
            if not self.name and not self.url.rstrip("/").endswith("/o"):
                return "bucket", ""
            return ("read", self.name) if self.name else ("list", self.query.get("prefix", ""))
        if self.url.startswith("/session/"):
            session = self.bucket.sessions.get(self.url.rsplit("/", 1)[1])
            return "write", session[0] if session else ""
        for word in ("/rewriteTo/", "/moveTo/"):
            if word in self.url:
                return "copy", urllib.parse.unquote(self.url.rpartition("/o/")[2])
        if self.query.get("uploadType") == "multipart":
            return "write", json.loads(self._parts()[0])["name"]
        return "write", self.query.get("name") or json.loads(self.body)["name"]

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _get(self) -> None:
        if not self.name:
            return self._list() if self._kind()[0] == "list" else self._about_bucket()
        there = self.bucket.objects.get(self.name)
        if there is None:
            return self._send(404, b"No such object")
        if self.query.get("ifGenerationNotMatch") == str(there.generation):
            return self._send(304, b"")
        if "ifGenerationMatch" in self.query and not self.bucket._is_as_asked(
            self.name, self.query
        ):
            return self._send(412, b"")
        if self.query.get("alt") != "media":
            return self._json(self._resource(self.name, there))
        about = self._resource(self.name, there)
        headers = {
            "x-goog-generation": about["generation"],
            "x-goog-hash": f"crc32c={about['crc32c']}",
            "x-goog-stored-content-length": about["size"],
            "x-goog-stored-content-encoding": self.bucket.encoding or "identity",
        }
        span = self.headers.get("Range")
        if span is None:
            return self._send(200, there.data, headers)
        start, end = span.removeprefix("bytes=").split("-")
        if start and int(start) >= len(there.data):
            return self._send(416, b"")
        first = int(start) if start else max(len(there.data) - int(end), 0)
        last = min(int(end), len(there.data) - 1) if start and end else len(there.data) - 1
        headers["Content-Range"] = f"bytes {first}-{last}/{len(there.data)}"
        return self._send(206, there.data[first : last + 1], headers)

    def _list(self) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        found: dict[str, Object | None] = {}
        with self.bucket.lock:
            for name in sorted(self.bucket.objects):
                if not name.startswith(prefix):
                    continue
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    found[prefix + rest.split(delimiter)[0] + delimiter] = None
                else:
                    found[name] = self.bucket.objects[name]
        names = [
            name
            for name in sorted(found)
            if name > self.query.get("pageToken", "")
            and name >= self.query.get("startOffset", "")
            and name < self.query.get("endOffset", "\U0010ffff")
        ]
        page = names[: min(_PAGE, int(self.query.get("maxResults", _PAGE)))]
        answer = {
            "kind": "storage#objects",
            "items": [self._resource(n, o) for n in page if (o := found[n]) is not None],
            "prefixes": [n for n in page if found[n] is None],
        }
        if len(page) < len(names):
            answer["nextPageToken"] = page[-1]
        self._json(answer)

    def _about_bucket(self) -> None:
        self._json({"kind": "storage#bucket", "name": self.url.rstrip("/").split("/")[-1]})

    def _post(self) -> None:
        if "/rewriteTo/" in self.url:
            return self._rewrite()
        if "/moveTo/" in self.url:
            return self._move()
        if self.url.startswith("/session/"):
            return self._put()
        kind = self.query.get("uploadType")
        if kind == "resumable":
            name = self.query.get("name") or json.loads(self.body)["name"]
            key = str(next(self.bucket.numbers))
            self.bucket.sessions[key] = (name, self.query, bytearray())
            place = f"http://{self.headers['Host']}/session/{key}"
            return self._send(200, b"", {"Location": place})
        if kind == "multipart":
            about, data = self._parts()
            return self._store(json.loads(about)["name"], data, self.query)
        return self._store(self.query["name"], self.body, self.query)

    def _parts(self) -> list[bytes]:
        """What the body holds, without the headers of its parts."""
        boundary = self.headers["Content-Type"].split("boundary=")[1].strip("'\"")
        _, *parts, _ = self.body.split(b"--" + boundary.encode())
        end = b"\r\n" if parts[0].startswith(b"\r") else b"\n"
        return [part.split(2 * end, 1)[1].removesuffix(end) for part in parts]

    def _put(self) -> None:
        key = self.url.rsplit("/", 1)[1]
        name, query, data = self.bucket.sessions[key]
        data += self.body
        total = self.headers.get("Content-Range", "").rpartition("/")[2]
        if total == "*":
            return self._send(308, b"", {"Range": f"bytes=0-{len(data) - 1}"})
        del self.bucket.sessions[key]
        return self._store(name, bytes(data), query)

    def _store(self, name: str, data: bytes, query: dict[str, str]) -> None:
        stored = self.bucket.put(name, data, query)
        if stored is None:
            return self._send(412, b'{"error": {"code": 412, "message": "conditionNotMet"}}')
        return self._json(self._resource(name, stored))

    def _rewrite(self) -> None:
        source, _, target = self.url.partition("/rewriteTo/")
        source = urllib.parse.unquote(source.partition("/o/")[2])
        target = urllib.parse.unquote(target.partition("/o/")[2])
        there = self.bucket.objects.get(source)
        if there is None:
            return self._send(404, b"No such object")
        stored = self.bucket.put(target, there.data, self.query)
        return self._json({"done": True, "resource": self._resource(target, stored)})

    def _move(self) -> None:
        source, _, target = self.name.partition("/moveTo/o/")
        there = self.bucket.objects.get(source)
        if there is None:
            return self._send(404, b"No such object")
        stored = self.bucket.put(target, there.data, self.query)
        self.bucket.delete(source, {})
        return self._json(self._resource(target, stored))

    def _delete(self) -> None:
        self._send(self.bucket.delete(self.name, self.query), b"")

    def _resource(self, name: str, there: Object) -> dict[str, str]:
        return {
            "kind": "storage#object",
            "bucket": "bucket",
            "name": name,
            "size": str(len(there.data)),
            "crc32c": base64.b64encode(google_crc32c.Checksum(there.data).digest()).decode(),
            "generation": str(there.generation),
            "metageneration": "1",
            "updated": "2026-01-01T00:00:00Z",
            "timeCreated": "2026-01-01T00:00:00Z",
            "contentEncoding": self.bucket.encoding,
        }

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        if not self.is_answered:
            return
        fault, size = self.fault or Fault(), len(data)
        if fault.change:
            data = fault.change(data)
            size = len(data)
        if fault.breaks_off:
            data = halved(data)
            self.close_connection = True
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(size))
        with contextlib.suppress(ConnectionError):  # a client that was killed, or has enough
            self.end_headers()
            self.wfile.write(data)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing of clients that leave."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serve() -> Iterator[tuple[Bucket, dict[str, str]]]:
    """A server, and the environment in which clients find it."""
    bucket = Bucket()
    handler = type("Handler", (_Handler,), {"bucket": bucket})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield (
            bucket,
            {
                "STORAGE_EMULATOR_HOST": url,
                "TENSORSTORE_GCS_HTTP_URL": url,
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
                "FSSPEC_GS_TOKEN": "anon",
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            },
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    with serve() as (_, variables), contextlib.suppress(KeyboardInterrupt):
        print(
            *(f"export {name}={value}" for name, value in variables.items()), sep="\n", flush=True
        )
        threading.Event().wait()
