"""Who is there, before anything is computed; and whose fault an error is."""

import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import threading
import time
from unittest import mock

import jax
import pytest

from bert_jax.distributed import peers, rendezvous
from bert_jax.distributed.rendezvous import ProcessInfo
from bert_jax.errors import InputError, Unavailable
from bert_jax.running import session, start
from bert_jax.storage.locks import lock
from bert_jax.storage.mirror import Mirror
from bert_jax.storage.workdir import (
    Workdir,
)
from bert_jax.training.recompute_check import SilentCorruption


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


# Of errors that processes ended with.
kinds: set[type[Exception]] = set()


@pytest.fixture(autouse=True)
def no_kinds():
    kinds.clear()


def rendezvous_all(*infos: ProcessInfo, limit: float = 20.0) -> list[str]:
    """The error of each process when all of them have tried to meet; "" to go on."""

    def one(info: ProcessInfo) -> str:
        try:
            rendezvous.wait_for_all(info, limit)
        except (InputError, Unavailable) as error:
            kinds.add(type(error))
            return str(error)
        return ""

    with concurrent.futures.ThreadPoolExecutor(len(infos)) as pool:
        return list(pool.map(one, infos))


def test_all_go_on_once_all_have_come(address):
    assert rendezvous_all(*(ProcessInfo(address, number, 5) for number in range(5))) == [""] * 5


def test_the_missing_are_named_to_all_the_others(address):
    """One that came and left again is missing, too."""
    me = json.dumps([1, 6, "gone"]).encode()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        left = pool.submit(knock, address, len(me).to_bytes(4) + me)
        told = rendezvous_all(*(ProcessInfo(address, number, 6) for number in (0, 2, 5)), limit=2.0)
        left.result()
    assert len(set(told)) == 1 and told[0].startswith("process 1, 3, 4 of 6 did not arrive within")
    assert kinds == {Unavailable}


@pytest.mark.parametrize("places", [((0, 4), (1, 4), (1, 4)), ((0, 3), (1, 2))])
def test_a_number_given_twice_and_another_count_are_named_to_all(places, address):
    told = rendezvous_all(*(ProcessInfo(address, *place) for place in places))
    variable = "JAX_PROCESS_ID=1 on " if places[1][1] == 4 else "JAX_NUM_PROCESSES=2 on process 1 ("
    assert len(set(told)) == 1 and told[0].startswith(variable) and kinds == {InputError}


def test_a_process_alone_says_where_it_looked(address):
    told = rendezvous_all(ProcessInfo(address, 1, 2), limit=0.5)
    assert f"JAX_COORDINATOR_ADDRESS={address}: process 0 did not answer there" in told[0]
    assert kinds == {Unavailable}


def knock(address: str, said: bytes) -> None:
    """Says something to process 0, once it listens, and leaves."""
    host, port = address.split(":")
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=1) as line:
                line.sendall(said)
            return
        except ConnectionRefusedError:
            time.sleep(0.02)


def test_strangers_who_knock_are_sent_away_and_silent_ones_keep_nobody_waiting(address):
    host, port = address.split(":")
    with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        primary = pool.submit(rendezvous_all, ProcessInfo(address, 0, 2), limit=20.0)
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0\0\0\x0b[[1], 2, 3]"):
            knock(address, said)
        for _ in range(3):
            line = stack.enter_context(socket.create_connection((host, int(port)), timeout=1))
            line.sendall(b"{")
        assert rendezvous_all(ProcessInfo(address, 1, 2)) == [""] == primary.result()


# --- what processes tell each other -------------------------------------------------------------


class Store:
    """The coordinator's key-value store: a key is set once, and waited for."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self._changed:
            if key in self._values:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self._values[key]

    def key_value_try_get(self, key):
        return self.blocking_key_value_get(key, 0)


def together(work, count: int = 3, limit: float = 10.0) -> list:
    """What `work(peers)` returns or raises in each of so many processes."""
    store = Store()

    def one(number: int):
        try:
            return work(peers.Peers(number, count, store, limit))
        except (InputError, Unavailable) as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_no_thread_is_left_in_the_store_when_all_are_done():
    """Python's end would find it there: `terminate called`, exit 134."""

    class Late(Store):
        def blocking_key_value_get(self, key, milliseconds):
            value = super().blocking_key_value_get(key, milliseconds)
            time.sleep(0.2 * key.endswith("failure"))  # the key that a thread of `Peers` awaits
            return value

    store = Late()
    before = set(threading.enumerate())
    pair = [peers.Peers(number, 2, store, 10.0) for number in range(2)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.close(), pair))
    assert set(threading.enumerate()) <= before


def same_error(ended: list, kind: type[Exception]) -> str:
    assert {type(error) for error in ended} == {kind} and len(set(map(str, ended))) == 1
    return str(ended[0])


def test_all_end_with_the_same_line_if_one_has_other_facts():
    def work(us):
        us.require_same("corpus", {"manifest": f"{us.number // 2}"}, remedy="give all the same")

    line = same_error(together(work), InputError)
    assert line.startswith("process 2 (") and "manifest=1 instead of 0; give all the same" in line


@pytest.fixture
def no_pauses(monkeypatch):
    assert sum(peers._PAUSES) > 60
    monkeypatch.setattr(peers, "_PAUSES", (0.0,) * 7)


def test_a_folder_that_is_not_shared_is_named(tmp_path, no_pauses):
    """Each host has a folder of its own at the same path."""

    def work(us):
        workdir = Workdir(tmp_path / str(us.number % 2))
        one = Mirror(workdir, us.number)
        with contextlib.ExitStack() as stack:
            if us.is_primary:
                one.acquire(stack.enter_context(lock(workdir.root)))
            session._require_shared(workdir, one, us)

    line = same_error(together(work, 2), InputError)
    assert line.startswith("process 1 (") and "holder of " in line and "share" in line


def test_all_who_share_a_folder_know_who_holds_it(tmp_path, no_pauses):
    mirrors = [Mirror(Workdir(tmp_path), number) for number in range(2)]
    with lock(tmp_path) as me:
        mirrors[0].acquire(me)
        together(lambda us: session._require_shared(Workdir(tmp_path), mirrors[us.number], us), 2)
    assert [mirror.token for mirror in mirrors] == [me.token, me.token]


def test_of_two_starts_at_once_one_does_not_take_the_other_s_name(tmp_path, no_pauses):
    """The second has written who holds the workdir before the first one's others look."""
    mirrors = [Mirror(Workdir(tmp_path), number) for number in range(2)]
    with lock(tmp_path) as me:
        mirrors[0].acquire(dataclasses.replace(me, token="first"))
        line = same_error(
            together(
                lambda us: session._require_shared(Workdir(tmp_path), mirrors[us.number], us), 2
            ),
            InputError,
        )
    assert "holder of " in line and mirrors[0].token == "first"


def test_what_a_shared_disk_shows_late_is_waited_for(no_pauses):
    views = [iter("bbbbbb"), iter("aaabbb")]

    def work(us):
        us.await_same("files", lambda: next(views[us.number]), "run again", Unavailable)

    together(work, 2)
    assert [[*view] for view in views] == [["b", "b"], ["b", "b"]]


def test_nothing_is_removed_while_another_process_lists_it(monkeypatch):
    """Process 0 goes back first, and process 1 is still reading."""
    done, mirror = [], mock.Mock()

    def read(context, at_most):
        time.sleep(0.5 * context.peers.number)
        done.append(f"read by {context.peers.number}")
        return mock.Mock(step=4)

    monkeypatch.setattr(start, "_restore_or_initialize", read)

    def work(us):
        saved = mock.MagicMock(steps=[8, 4])
        saved.delete_after.side_effect = lambda *given: done.append(given)
        job = mock.Mock(**{"experiment.run.checkpoint_every": 4, "workdir.checkpoints": "c"})
        context = mock.Mock(job=job, peers=us, saver=saved, mirror=mirror)
        error = SilentCorruption([], is_sure=True, is_repeated=False)
        start._restore_at_or_before(5, mock.Mock(start_step=0), error, context)

    together(work, 2)
    assert done == ["read by 0", "read by 1", (5, mirror.flush)]


def test_one_that_does_not_come_is_named():
    def work(us):
        if us.number != 1:
            us.wait_at_barrier("save", is_timed=True)

    zero, one, two = together(work, limit=0.3)
    assert one is None
    assert {type(zero), type(two)} == {Unavailable}
    assert "process 1 did not reach the barrier 'save'" in str(zero)


def test_barriers_and_exchanges_may_use_a_name_again():
    done = []

    def work(us):
        for _ in range(3):
            us.run_on_primary("work", lambda: done.append(us.number))
            us.wait_at_barrier("here")
            assert us.exchange_errors("look", "bad" if us.number == 1 else "") == "bad"
        return len(done)

    assert together(work) == [3, 3, 3] and done == [0, 0, 0]


# --- whose fault an error is --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_transient"),
    [
        (RuntimeError("INTERNAL: Core halted unexpectedly: scheck failed"), True),
        (jax.errors.JaxRuntimeError("DATA_LOSS: HBM ECC"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: SDC checker: compiled program differs"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile TPU kernel"), False),
        (jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Executable expected parameter"), False),
        (ValueError("INTERNAL: no device said this"), False),
    ],
)
def test_a_broken_device_is_tried_again_and_a_program_that_is_refused_is_not(error, is_transient):
    assert (type(peers.translate_device_error(error)) is Unavailable) == is_transient
    assert is_transient or peers.translate_device_error(error) is error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            jax.errors.JaxRuntimeError("x: Gloo AllGather failed:\nat y"),
            "lost another process (Gloo",
        ),
        (jax.errors.JaxRuntimeError("INTERNAL: Core halted unexpectedly"), ""),
        (ValueError("Gloo is the name of a file"), ""),
    ],
)
def test_the_loss_of_another_process_is_described(error, words):
    told = peers.describe_lost_process(error)
    assert words in told and "\n" not in told and bool(words) == bool(told)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ADDRESS": "h:1"}, "JAX_COORDINATOR_ADDRESS=h:1, JAX_PROCESS_ID=, JAX_NUM_PROCESSES=:"),
        ({"ADDRESS": "h:1", "JAX_PROCESS_ID": "x", "JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID=x"),
        ({"ADDRESS": "h:1", "JAX_PROCESS_ID": "2", "JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID=2"),
        ({"ADDRESS": "h", "JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"}, "as host:port"),
        ({"ADDRESS": "a..b:1", "JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"}, "as host:port"),
        ({"BERT_JAX_ARRIVE_WITHIN": "soon"}, "BERT_JAX_ARRIVE_WITHIN=soon"),
    ],
)
def test_variables_that_do_not_fit_are_named(variables, message, monkeypatch):
    for name, value in variables.items():
        name = "JAX_COORDINATOR_ADDRESS" if name == "ADDRESS" else name
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message), peers.connect_processes():
        pass


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (ConnectionError("no metadata server"), "this TPU \\(no metadata server\\); set JAX_COORD"),
        (ValueError("coordinator_address should be defined."), None),
    ],
)
def test_a_tpu_host_without_others_is_alone_and_one_that_cannot_ask_says_so(
    refusal, message, monkeypatch
):
    def initialize(**_):
        raise refusal

    monkeypatch.delenv("JAX_NUM_PROCESSES", raising=False)
    monkeypatch.setattr(peers, "_is_tpu_host", lambda: True)
    monkeypatch.setattr(peers.jax.distributed, "initialize", initialize)
    if message is None:
        with peers.connect_processes() as alone:
            assert alone.count == 1
    else:
        with pytest.raises(InputError, match=message), peers.connect_processes():
            pass


def test_without_variables_a_run_is_one_process(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"):
        monkeypatch.delenv(name, raising=False)
    with peers.connect_processes() as alone:
        assert (alone.number, alone.count, alone.is_primary) == (0, 1, True)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    with peers.connect_processes() as alone:
        assert alone.count == 1


def test_a_task_that_srun_started_has_its_place_unless_a_variable_says_otherwise(monkeypatch):
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "gpu[03-04,9]", "NTASKS": "2", "PROCID": "1"}
    for name, value in {**slurm, "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "4321")
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"):
        monkeypatch.delenv(name, raising=False)
    assert rendezvous.read_process_info() == ("gpu03:4321", 1, 2)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    assert rendezvous.read_process_info() is None
    monkeypatch.delenv("JAX_NUM_PROCESSES")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert rendezvous.read_process_info() is None
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.delenv("SLURM_STEP_NODELIST")  # the script itself, outside of srun
    assert rendezvous.read_process_info() is None
