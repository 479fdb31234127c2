"""Each fault that a bucket can have, in each request of what a run does there.

The requests are those that the work makes where nothing fails. Whatever goes wrong, the work ends
with the same result, asks to be run again (exit code 74), or is refused with an InputError. It
never ends with an internal error, with another result, or not at all.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from broken import call
from etils import epath
from fake_gcs import Fault, emptied, flipped, halved
from orbax.checkpoint._src.serialization import tensorstore_utils

from bert_jax.checkpoints.load import Checkpoints
from bert_jax.checkpoints.save import Saver
from bert_jax.config import Run
from bert_jax.distributed.peers import Peers
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import buckets, mirror, retry
from bert_jax.storage.locks import Holder
from bert_jax.storage.storage import storage_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="needs the [gcs] extra"
)

RUN = epath.Path("gs://bucket/run")
LAGS = "list lags"
# One array that OCDBT stores next to its checksums, and one that it stores apart, without any.
STATE = {"bias": np.arange(4.0), "kernel": np.arange(4096.0).reshape(64, 64)}


def is_new(name: str) -> bool:
    """Returns whether an object was written last."""
    return bool(re.match("run/checkpoints/[23]/", name))


def lagging(body: bytes) -> bytes:
    """Returns a list without what was written last: a `Fault.change`."""
    page = json.loads(body)
    page["items"] = [item for item in page["items"] if not is_new(item["name"])]
    page["prefixes"] = [prefix for prefix in page["prefixes"] if not is_new(prefix)]
    return json.dumps(page).encode()


FAULTS = {
    "empty": Fault(change=emptied),
    "cut": Fault(change=halved),
    "flipped": Fault(change=flipped),
    "other JSON": Fault(change=lambda body: b"[]"),
    "breaks off": Fault(breaks_off=True),
    "dropped": Fault(),
    "slow": Fault(seconds=0.1, change=lambda body: body),
    LAGS: Fault(change=lagging),
    **{str(status): Fault(status) for status in (401, 403, 404, 408, 412, 429, 500, 501, 503)},
}
# Faults that no retry mends: the work may end with an InputError at once.
FINAL = {"404", "412", "501"}
SECONDS = 60  # within which the work must end; it takes about one


class Hang(BaseException):
    """The work has not ended in time."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for, without the parts of names that differ between runs."""

    kind: str
    name: str

    @classmethod
    def of(cls, name: str, kind: str) -> "Request":
        """Returns a request to the fake bucket."""
        return cls(kind, re.sub(r"[0-9a-f]{16,}", "*", name))


# --- What a run does in its bucket --------------------------------------------------------------


def device_state() -> dict[str, jax.Array]:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), STATE)


def open_saves() -> Saver:
    workdir = mirror.open_workdir(RUN, to_write=True)
    workdir.root.mkdir(parents=True, exist_ok=True)
    return Saver(workdir, Run(keep_checkpoints=2), Peers(0, 1, None, 1.0), lambda line: None)


def save(step: int) -> None:
    """Saves a step, unless it is saved: a run that starts again resumes from the step it finds."""
    with open_saves() as run:
        if step in run.checkpoints.steps:
            return
        state = device_state()
        run.save(step, state, {"note": "x" * 40})
        run.finish(step, lambda: run.save(step, state, {"note": "x" * 40}))


def restore(step: int) -> Any:
    """Returns what a checkpoint holds."""
    state = device_state()
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    restored = Checkpoints(RUN / "checkpoints").restore(step, abstract)
    same = jax.tree.map(lambda saved, leaf: bool((saved == leaf).all()), STATE, restored.state)
    return same, restored.metadata["note"]


def list_all() -> Any:
    checkpoints = Checkpoints(RUN / "checkpoints")
    return checkpoints.steps, checkpoints.find_step("newest"), sorted(storage_of(RUN).names(RUN))


def push() -> None:
    workdir = mirror.open_workdir(RUN, to_write=True)
    workdir.root.mkdir(parents=True, exist_ok=True)
    run = mirror.Mirror(workdir)
    run.acquire(Holder.this_process())
    workdir.metrics.write_text("1\n")
    run.flush()


def set_aside_and_remove() -> None:
    with open_saves() as run:
        run.checkpoints.folder.rename_damaged(2)
        run.delete_after(0, lambda: None)


def prepare() -> None:
    """Makes a corpus in the bucket of a text in the bucket."""
    sources = "--set corpus.sources=text:gs://bucket/text"
    shutil.rmtree(os.environ["BERT_JAX_CACHE_DIR"], ignore_errors=True)
    code, err = call(f"prepare small.py {sources} --set run.corpus_dir=gs://bucket/corpus")
    if code == 74:
        raise Unavailable(err)
    if code == 2:
        raise InputError(err)
    assert code == 0, err


def corpus_objects() -> dict[str, str]:
    listed = buckets.list_objects(epath.Path("gs://bucket/corpus"))
    return {name: about.crc32c for name, about in listed.items() if name.startswith("stream/")}


@dataclasses.dataclass(frozen=True)
class Work:
    """Something that a run does, and a function that reads the result back."""

    do: Callable[[], Any]
    inspect: Callable[[], Any] = lambda: None


WORKS = {
    "save": Work(lambda: save(3), lambda: restore(3)),
    "restore": Work(lambda: restore(2)),
    "list": Work(list_all),
    "push": Work(push, lambda: storage_of(RUN).read(RUN / "metrics.jsonl")),
    "set aside": Work(
        set_aside_and_remove,
        # What is moved in two attempts lies in two folders.
        lambda: {name.removesuffix("-1") for name in storage_of(RUN).names(RUN / "checkpoints")},
    ),
    "prepare": Work(prepare, corpus_objects),
}

# Pairs (work, fault) that are left out, with the reason. Remove the pairs that pass.
LEFT_OUT = {
    ("save", LAGS): "Orbax leaves out parts of a state that its list does not show",
    ("save", "404"): "Orbax writes metadata anew, without ours, where it does not find them",
    ("list", LAGS): "what no list shows cannot be listed",
    ("set aside", LAGS): "what no list shows cannot be moved",
    ("set aside", "404"): "what is not there cannot be moved",
}
# Pairs that every test run takes: those of a quick work, and one for the slow works.
QUICK = {("push", fault) for fault in FAULTS} | {("restore", "cut")}
# A save takes half a minute for each fault, so that most of its pairs are nightly.
NIGHTLY = {("save", fault) for fault in FAULTS} - {("save", "503")}


def marks_of(pair: tuple[str, str]) -> Any:
    """Returns the pytest marks that say which test runs take a pair."""
    if pair in QUICK:
        return ()
    return pytest.mark.nightly if pair in NIGHTLY else pytest.mark.long


def cells(marks: Callable[[tuple[str, str]], Any]) -> list[Any]:
    """Returns the pairs of a work and a fault as pytest's parameters."""
    pairs = [(work, fault) for work in WORKS for fault in FAULTS]
    kept = [pair for pair in pairs if pair not in LEFT_OUT]
    return [pytest.param(*pair, marks=marks(pair), id=" ".join(pair)) for pair in kept]


@pytest.fixture(scope="module")
def saved():
    """The objects of a run with checkpoints 1 and 2, and of a text."""
    return {}


@pytest.fixture
def bucket(objects, saved, copy_of_run, monkeypatch):
    """A bucket with the objects of `saved`; retries wait briefly."""
    context = tensorstore_utils.get_ts_context

    def hasty(*args, **kwargs):
        retries = {"max_retries": 3, "initial_delay": "1ms", "max_delay": "1ms"}
        spec = tensorstore_utils.ts.Context.Spec({"gcs_request_retries": retries})
        return tensorstore_utils.ts.Context(spec, context(*args, **kwargs))

    monkeypatch.setattr(tensorstore_utils, "get_ts_context", hasty)
    monkeypatch.setattr(retry, "GIVE_UP", 0.5)
    if not saved:
        for file in pathlib.Path("text").iterdir():
            objects.put(f"text/{file.name}", file.read_bytes(), {})
        push()
        save(1)
        save(2)
        saved |= objects.objects
    objects.objects = dict(saved)
    objects.reset_faults()
    return objects


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises Hang where the work within takes longer."""

    def end(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def can_happen(fault: str, request: Request) -> bool:
    """Returns whether a bucket can have a fault in such a request."""
    if fault == LAGS:
        return request.kind == "list"
    if fault == "412":  # for a precondition, which TensorStore alone sends
        return request.kind == "write" and bool(re.search(r"/d/|\.ocdbt$|_sharding$", request.name))
    return fault != "other JSON" or request.kind != "delete"  # a delete's answer has no body


def outcome(work: Work) -> Any:
    """Returns the result of the work, or the error of this project that ends it."""
    try:
        with time_limit(SECONDS):
            return work.do()
    except (Unavailable, InputError) as error:
        return error


def run_without_faults(bucket, saved, work: Work) -> tuple[list[Request], Any]:
    """Returns the requests of the work where nothing fails, and its result."""
    bucket.objects = dict(saved)
    bucket.requests.clear()
    done = work.do()
    requests = list(dict.fromkeys(Request.of(*request) for request in bucket.requests))
    return requests, (done, work.inspect())


@pytest.mark.parametrize(("name", "fault"), cells(marks_of))
def test_work_outlasts_a_fault_of_each_request(name, fault, bucket, saved):
    """Each request has it once, in the first attempt that comes to it."""
    work = WORKS[name]
    requests, expected = run_without_faults(bucket, saved, work)
    left = set(requests)

    def once(method, name, kind):
        request = Request.of(name, kind)
        if request not in left or not can_happen(fault, request):
            return None
        left.remove(request)
        return FAULTS[fault]

    bucket.objects = dict(saved)
    bucket.fault = once
    found: Any = None
    for _ in requests:
        found = outcome(work)
        print(len(left), repr(found)[:300])
        if not isinstance(found, Exception):
            break
        assert fault in FINAL or isinstance(found, Unavailable)
    bucket.reset_faults()
    assert (found, work.inspect()) == expected


@pytest.mark.parametrize(("name", "fault"), cells(lambda pair: pytest.mark.nightly))
def test_work_ends_by_name_where_all_requests_of_a_kind_have_a_fault(name, fault, bucket, saved):
    """Once the bucket is well again, the work does what it always does."""
    work = WORKS[name]
    requests, expected = run_without_faults(bucket, saved, work)
    for kind in dict.fromkeys(request.kind for request in requests):

        def always(method, name, asked, kind=kind):
            faulty = asked == kind and can_happen(fault, Request.of(name, asked))
            return FAULTS[fault] if faulty else None

        bucket.objects = dict(saved)
        bucket.fault = always
        found = outcome(work)
        bucket.reset_faults()
        print(kind, repr(found)[:300])
        if isinstance(found, Exception):
            found = work.do()
        assert (found, work.inspect()) == expected
