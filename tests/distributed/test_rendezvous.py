"""A run that is configured for several slices starts with those that have arrived."""

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import socket
import time

import pytest

from benchmarks.month import Month as FailureSimulation
from bert_jax import config
from bert_jax.distributed import rendezvous, slices
from bert_jax.distributed.rendezvous import ProcessInfo
from bert_jax.distributed.slices import Arrivals, SlicePolicy
from bert_jax.errors import Unavailable
from bert_jax.pretraining.pretraining_job import PretrainingJob
from bert_jax.storage.workdir import Workdir

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"
# Four slices of two hosts, of which 1, 2 or 4 are usable; seconds to wait and to decide.
POLICY = SlicePolicy(4, 2, 60.0, 300.0, lambda n: n in (1, 2, 4))


# --- what is decided, by table -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "now", "chosen"),
    [
        ("01234567", 1.0, "0123"),  # all, at once
        ("0123456", 59.0, ""),  # one host is missing, and its slice is waited for
        ("0123456", 60.0, "01"),  # three complete slices, of which two divide the batch
        ("23456", 60.0, "12"),  # slice 0 may be missing like any other
        ("4567", 61.0, "23"),
        ("67", 61.0, "3"),
        ("0246", 1000.0, ""),  # none is complete
    ],
)
def test_a_start_chooses_complete_slices_that_divide_the_batch(here, now, chosen):
    verdicts = {}
    for me in range(4):
        arrivals = Arrivals(POLICY, me)
        for host in map(int, here):
            arrivals.add(host, 0.0)
        verdicts[me] = "".join(map(str, arrivals.choose_slices(now)))
    # One alone decides: the first of the complete slices.
    assert sorted(verdicts.values()) == sorted([chosen, "", "", ""])
    assert not chosen or verdicts[int(chosen[0])] == chosen


def test_a_slice_that_knows_of_a_run_decides_nothing():
    arrivals = Arrivals(POLICY, 0)
    for host in range(8):
        arrivals.add(host, 0.0)
    assert arrivals.choose_slices(1.0) == (0, 1, 2, 3)
    arrivals.is_decided = True
    assert arrivals.choose_slices(1.0) == ()


def test_the_wait_starts_at_the_first_complete_slice_and_hosts_that_leave_are_missing():
    arrivals = Arrivals(POLICY, 0)
    for host, since in ((0, 0.0), (1, 100.0), (2, 90.0), (3, 95.0)):
        arrivals.add(host, since)
    assert arrivals.choose_slices(154.0) == () and arrivals.choose_slices(155.0) == (0, 1)
    arrivals.remove(2)
    assert arrivals.choose_slices(155.0) == () and arrivals.choose_slices(160.0) == (0,)


@pytest.mark.parametrize(
    ("active", "waiting", "seconds_to_stop", "cost", "pays_off"),
    [
        (15, 1, 4801.0, 300.0, True),  # 16 * 4501 > 15 * 4801
        (15, 1, 4799.0, 300.0, False),
        (2, 1, 1e9, 1.0, False),  # 3 is not usable, so nothing is gained
        (2, 2, 601.0, 300.0, True),
        (2, 2, 599.0, 300.0, False),
    ],
)
def test_a_run_stops_for_slices_that_wait_if_and_only_if_it_gains_steps(
    active, waiting, seconds_to_stop, cost, pays_off
):
    policy = dataclasses.replace(
        POLICY, slice_count=16, is_usable=lambda n: n >= 15 or n in (1, 2, 4, 8)
    )
    assert slices.restart_pays_off(policy, active, waiting, seconds_to_stop, cost) is pays_off


def test_how_long_a_run_goes_on_is_learned_from_its_stops():
    """Restarts for returned slices do not count as stops; a start costs what the last one did."""

    def is_due(now: float, steps_left: int, *more: dict) -> bool:
        start = {"kind": "start", "time": 0.0, "seconds": 60.0}
        train = {"kind": "train", "steps": 10, "seconds": 150.0, "compilation_seconds": 50.0}
        return slices.should_restart(POLICY, 2, 2, [start, *more, start, train], now, steps_left)

    # A restart costs 90 s of launch + 60 + 50 s, and doubles the slices: it pays off if the next
    # stop is over 400 s away. Stops are expected at intervals of now / (natural stops + 1).
    natural, asked = {"kind": "end"}, {"kind": "end", "for_slices": [2, 3]}
    assert is_due(801.0, 1000, natural) and not is_due(799.0, 1000, natural)
    assert is_due(401.0, 1000, asked)
    assert is_due(801.0, 41, natural) and not is_due(801.0, 40, natural)  # 10 s a step


def test_a_slice_is_missing_since_the_first_start_without_it():
    def start(moment, *taken):
        return {"kind": "start", "time": moment, "slices": {"taken": taken}}

    starts = [start(1.0, 0), start(2.0, 0, 1, 2), start(3.0, 0, 2), start(4.0, 0, 2)]
    assert slices.missing_since(starts, [0], 3, 5.0) == {"1": 3.0, "2": 5.0}
    assert slices.missing_since(starts, [0, 1, 2], 3, 5.0) == {}


# --- what a run becomes on fewer slices ----------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "micro_batches", "active", "accumulation"),
    [
        (3840, 1, 16, 1),
        (3840, 1, 15, 2),  # 16 rows per device instead of 15: 2 x 8
        (3840, 1, 8, 2),  # 30: 2 x 15
        (3840, 3, 12, 4),  # 20, at most 5 at once: 4 x 5
        (3840, 1, 14, None),
        (4096, 1, 15, None),
        (4096, 2, 8, 4),
    ],
)
def test_micro_batches_have_no_more_rows_on_fewer_slices(rows, micro_batches, active, accumulation):
    given = config.override(
        config.load(str(EXPERIMENTS / "bert_large_pod.py")),
        [f"phases.{i}.batch_size={rows}" for i in (0, 1)]
        + [f"parallelism.accumulation={micro_batches}", "parallelism.slices=16"],
    )
    found = slices.adapt_experiment(given, active, slice_count=16, shards_per_slice=16)
    if accumulation is None:
        assert found is None
        return
    assert {*found.parallelism.accumulation} == {accumulation}
    assert found.parallelism.slices == active
    assert not config.differences(given, found, "identity")


@pytest.mark.parametrize(("replicas", "fits"), [(256, False), (480, True)])
def test_each_device_computes_whole_groups_of_rows_that_are_clipped(replicas, fits):
    """15 slices have 240 devices; a group is not cut into micro-batches."""
    settings = ["optimizer.clip=per_replica", f"optimizer.reference_replicas={replicas}"]
    settings += ["parallelism.state=zero1", "parallelism.slices=16"]
    settings += [f"phases.{i}.batch_size=3840" for i in (0, 1)]
    given = config.override(config.load(str(EXPERIMENTS / "bert_large_pod.py")), settings)
    found = slices.adapt_experiment(given, 15, slice_count=16, shards_per_slice=16)
    assert (found is not None) == fits
    assert not fits or {*found.parallelism.accumulation} == {1}


def test_a_tensor_axis_longer_than_a_slice_is_left_to_make_mesh_to_reject(tmp_path):
    given = config.load(str(EXPERIMENTS / "tiny.py"))
    settings = ["model.num_attention_heads=8", "parallelism.tensor=8"]
    experiment = config.override(given, settings)
    job = PretrainingJob(experiment, Workdir(tmp_path), print)
    assert job.fit_to_slices(2, 2, processes_per_slice=1) == experiment


# --- who is there --------------------------------------------------------------------------------


@pytest.fixture
def addresses(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "127.0.0.1:")
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(3)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return ",".join(f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes)


def meet(addresses: str, number: int) -> rendezvous.Membership | str:
    try:
        info = ProcessInfo(addresses, number, 6)
        return rendezvous.join_rendezvous(info, 2.0, 20.0, fit_to_slices=lambda *_: True)
    except Unavailable as error:
        return str(error)


@pytest.mark.long
def test_a_run_begins_without_slice_0_which_waits_until_the_run_has_ended(addresses, monkeypatch):
    for name, value in (("COORDINATOR_ADDRESS", "a"), ("NUM_SLICES", "3"), ("SLICE_ID", "1")):
        monkeypatch.setenv(f"MEGASCALE_{name}", value)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        met = [*pool.map(meet, [addresses] * 4, (2, 3, 4, 5))]
        names = {member.info.address for member in met}
        assert len(names) == 1 and not names & {*addresses.split(",")}
        assert [member.info[1:] for member in met] == [(0, 4), (1, 4), (2, 4), (3, 4)]
        assert {member.slices for member in met} == {(1, 2)}
        assert [member.server is not None for member in met] == [True, False, False, False]
        late = [pool.submit(meet, addresses, number) for number in (1, 0)]
        deadline = time.monotonic() + 20
        while met[0].server.waiting_slices() != [0] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert met[0].server.waiting_slices() == [0] and not any(call.done() for call in late)
        time.sleep(2.5)  # longer than a slice waits for others if no run is active
        assert not any(call.done() for call in late)
        met[0].server.close()
        assert ["slice 0 has ended" in call.result() for call in late] == [True, True]


def test_two_simultaneous_decisions_start_at_most_one_run(addresses, monkeypatch):
    """Each process accepts only one of them."""

    def verdict(arrivals: Arrivals, now: float) -> tuple[int, ...]:
        """Slices 0 and 1 each decide for themselves and for slice 2."""
        here = tuple(n for n in arrivals.complete_slices() if n in (arrivals.own_slice, 2))
        return here if len(here) == 2 and not arrivals.is_decided else ()

    monkeypatch.setattr(Arrivals, "choose_slices", verdict)
    monkeypatch.setattr(rendezvous, "_ACCEPT_TIMEOUT", 1.0)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(meet, addresses, number) for number in range(6)]
        concurrent.futures.wait(calls, 4)  # a slice that is left over waits forever
        met = [call.result() for call in calls if call.done()]
        begun = [member for member in met if not isinstance(member, str)]
        assert len({member.slices for member in begun}) <= 1 and len(begun) in (0, 4)
        for member in begun:
            if member.server is not None:
                member.server.close()


def test_too_few_slices_end_with_what_is_missing(addresses):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        met = pool.submit(
            rendezvous.join_rendezvous, ProcessInfo(addresses, 2, 6), 0.2, 0.4, lambda *_: True
        )
        with pytest.raises(Unavailable, match=r"process 3 did not arrive"):
            met.result()


# --- a week ---------------------------------------------------------------------------------------


def test_a_week_of_64_hosts_that_fail_ten_times_as_often_as_reported_keeps_its_goodput():
    """All that is lost is accounted for; an absent slice costs little more than its own speed."""
    week = FailureSimulation(chips=4, rows=3_840, factor=10, days=7.0)
    assert week.share > 0.95
    assert week.share + sum(week.lost.values()) / week.end == pytest.approx(1.0, abs=1e-3)
    assert week.count["stops for slices that are back"] > 2
    by_halves = FailureSimulation(chips=4, rows=4_096, factor=10, days=7.0)
    assert by_halves.share < week.share, "8 of 16 slices train where 15 do not divide the batch"
