"""The bucket of `fake_gcs` over a network that fails: one door a host, faults drawn or ordered."""

import contextlib
import dataclasses
import json
import pathlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import fake_gcs

# What an answer may be instead: statuses that clients try again by themselves, two that they take
# for an account without rights, and a connection that breaks or stays silent.
RETRIED = ("429", "500", "503", "408", "reset", "silence")
DENIED = ("401", "403")
# Requests of a door that are not denied, since at the first use of a right missing ones are bad
# input: the first of a start, and all that write until its owner has replaced an object.
_FIRST, _WRITING, _REPLACED = 25, ("begin", "write", "copy", "delete"), "/OWNER"
_SILENCE = 3.0  # seconds


@dataclasses.dataclass(frozen=True)
class Call:
    """A request.

    Attributes:
      door: the host's number.
      kind: list, stat, read, begin, write, copy, delete or bucket.
      name: of the object, or the prefix of a list.
      client: gcsfs, or TensorStore, with which Orbax writes arrays.
    """

    door: int
    kind: str
    name: str
    client: str


@dataclasses.dataclass
class Fault:
    """One that was injected: `times` answers in a row to one host's calls of one kind."""

    at: float
    call: Call
    what: str
    times: int


class Weather:
    """Decides what becomes of each request, and notes it down.

    Attributes:
      calls: answered as they should be, by kind.
      faults: injected ones.
    """

    def __init__(self, seed: int, notes: pathlib.Path):
        self._notes = notes
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._requests: Counter[int] = Counter()
        self._replaced: set[int] = set()
        self._going_on: dict[tuple[int, str], tuple[Fault, int]] = {}
        self._shares: dict[str, float] = {}
        self._denied = 0.0
        self._away_until = 0.0
        self._blind: list[tuple[int, str, float]] = []
        self.calls: Counter[str] = Counter()
        self.faults: list[Fault] = []
        self.outages: list[float] = []

    def storm(self, shares: dict[str, float], denied: float) -> None:
        """Fails this share of the calls of each kind, `denied` of these with 401 or 403."""
        with self._lock:
            self._shares, self._denied = dict(shares), denied

    def calm(self) -> None:
        """Nothing fails any more."""
        with self._lock:
            self._shares, self._going_on, self._blind, self._away_until = {}, {}, [], 0.0

    def begin_outage(self, seconds: float) -> None:
        """The bucket is away, for all."""
        with self._lock:
            self._away_until = time.monotonic() + seconds
            self.outages.append(seconds)

    def blind(self, door: int, prefix: str, seconds: float) -> None:
        """One host cannot read what lies below a prefix."""
        with self._lock:
            self._blind.append((door, prefix, time.monotonic() + seconds))

    def new_start(self) -> None:
        """Another start of the run: what is asked first must not be refused."""
        with self._lock:
            self._requests.clear()
            self._replaced.clear()

    def of(self, call: Call) -> str:
        """What to answer instead; "" for the truth."""
        with self._lock:
            now = time.monotonic()
            self._requests[call.door] += 1
            if now < self._away_until:
                return self._random.choice(("reset", "503"))
            for door, prefix, until in self._blind:
                if call.door == door and now < until and prefix in call.name:
                    self._note(Fault(now, call, "blind", 1))
                    return "503"
            key = (call.door, call.kind)
            if key in self._going_on:
                fault, left = self._going_on.pop(key)
                if left > 1:
                    self._going_on[key] = (fault, left - 1)
                return fault.what
            if self._random.random() >= self._shares.get(call.kind, 0.0):
                self.calls[call.kind] += 1
                if call.kind == "write" and call.name.endswith(_REPLACED):
                    self._replaced.add(call.door)
                return ""
            # TensorStore renews its tokens itself, and gives up a write that is refused.
            may_deny = self._requests[call.door] > _FIRST and call.client == "gcsfs"
            may_deny &= call.kind not in _WRITING or call.door in self._replaced
            denies = may_deny and self._random.random() < self._denied
            what = self._random.choice(DENIED if denies else RETRIED)
            times = self._random.randint(1, 2)
            self._note(Fault(now, call, what, times))
            if times > 1:
                self._going_on[key] = (self.faults[-1], times - 1)
            return what

    def _note(self, fault: Fault) -> None:
        self.faults.append(fault)
        with self._notes.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(fault)) + "\n")


class _Handler(fake_gcs._Handler):
    door: int
    weather: Weather

    def _fault(self, kind: str, name: str) -> fake_gcs.Fault | None:
        agent = self.headers.get("User-Agent") or ""
        client = "TensorStore" if "tensorstore" in agent.lower() else "gcsfs"
        what = self.weather.of(Call(self.door, kind, name, client))
        if not what:
            return None
        status = int(what) if what.isdecimal() else 0
        return fake_gcs.Fault(status, seconds=_SILENCE if what == "silence" else 0.0)

    def _kind(self) -> tuple[str, str]:
        kind, name = super()._kind()
        if kind == "read" and self.query.get("alt") != "media":
            kind = "stat"
        if kind == "write" and self.query.get("uploadType") == "resumable":
            kind = "begin"
        return kind, name


@contextlib.contextmanager
def serve(doors: int, weather: Weather) -> Iterator[tuple[fake_gcs.Bucket, list[dict[str, str]]]]:
    """A bucket with several doors; the environment of each, in which clients find it."""
    with contextlib.ExitStack() as stack:
        bucket, environment = stack.enter_context(fake_gcs.serve())
        environments = []
        for door in range(doors):
            more = {"bucket": bucket, "door": door, "weather": weather}
            server = fake_gcs._Server(("127.0.0.1", 0), type("Handler", (_Handler,), more))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            url = f"http://127.0.0.1:{server.server_port}"
            names = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")
            environments.append(environment | dict.fromkeys(names, url))
        yield bucket, environments
