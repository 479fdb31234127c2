"""Terms of a step's time, against arithmetic by hand."""

import dataclasses

import pytest

from bert_jax import hardware
from bert_jax.tools.plan import estimate, topology
from bert_jax.tools.plan.schedule import SEND, Collective, Kernel, Program

MB = 1_000_000
MS = 1_500_000  # cycles of a v5e in a millisecond
ROW, COLUMN = range(8), range(0, 64, 8)  # of v5e:8x8, whose axes are no rings


def places(name: str) -> list[tuple[int, ...]]:
    """Of the devices of a slice, last axis and cores fastest, as the mesh has them."""
    shape = [int(n) for n in name.partition(":")[2].split("x")]
    shape += [1] * (3 - len(shape))
    cores = range(topology.parse(name).tpu.devices_per_chip)
    return [
        (x, y, z, core)
        for x in range(shape[0])
        for y in range(shape[1])
        for z in range(shape[2])
        for core in cores
    ]


def collective(kind: str, group, payload: int = 90 * MB) -> Collective:
    return Collective(kind=kind, count=1, payload=payload, group=tuple(group), where="entry")


def seconds(name: str, one: Collective) -> tuple[float, float]:
    return estimate.cost(one, topology.parse(name), places(name))[:2]


def step(*schedule, collectives=(), kernels=(), name: str = "v5e:8x8") -> estimate.StepTime:
    program = Program(
        schedule=schedule, kernels=kernels, collectives=collectives, operations={}, endless=0
    )
    return estimate.estimate(program, topology.parse(name), places(name))


def work(cycles: int) -> tuple:
    return "work", "other", cycles, 0


# --- one after the other ---


def test_cycles_over_the_clock():
    result = step(work(3_000_000))
    assert result.terms["other"] == result.total == pytest.approx(2e-3)


def test_random_bits_cost_cycles_of_every_core_of_a_device():
    result = step(("bits", 1950 * 1_050_000), name="v4:2x2x4")
    assert result.terms["random_bits"] == result.total == pytest.approx(0.5e-3)  # 1.05 GHz, 2 cores


@pytest.mark.parametrize(
    ("cycles", "bytes_", "expected"),
    [
        (MS, 1, 1e-3),
        (1, 819 * MB, 1e-3),  # of 819 GB/s
        (None, 819 * MB, 1e-3),  # and is named in the plan
    ],
)
def test_a_kernel_takes_the_longer_of_its_schedule_and_its_traffic(cycles, bytes_, expected):
    kernel = Kernel(name="k", count=3, cycles=cycles, bytes=bytes_)
    result = step(("loop", 3, (("kernel", 0),)), kernels=(kernel,))
    assert result.terms["kernels"] == result.total == pytest.approx(3 * expected)


def test_of_two_ways_each_takes_its_share():
    kernel = Kernel(name="k", count=1, cycles=900 * MS // 1_000, bytes=0)
    body = (("either", 1 / 3, (("kernel", 0),), (work(MS),)),)
    result = step(("loop", 6, body), kernels=(kernel,))
    assert (result.terms["kernels"], result.terms["other"]) == pytest.approx((2 * 0.9e-3, 4 * 1e-3))


def test_what_one_way_sends_keeps_nobody_waiting_in_the_other():
    """The first copies at its late end, and the second at its beginning."""
    copy = ("work", "copies", 10 * MS, 819 * MB // 1000)
    result = step(("either", 1 / 2, (work(4 * MS), copy), (copy,)))
    assert result.terms["prefetch"] == 0
    assert result.total == pytest.approx(2.002e-3)


def test_the_way_to_memory_is_a_queue():
    """Of 819 MB in a millisecond, here one."""
    fetch, copy = ("fetch", 819 * MB, "f"), ("work", "copies", 10 * MS, 819 * MB)
    assert step(fetch, work(MS // 4), ("done", "f")).terms["prefetch"] == pytest.approx(0.75e-3)
    assert step(copy).terms == step().terms | {"copies": pytest.approx(1.001e-3)}
    assert step(fetch, copy, ("done", "f")).total == pytest.approx(2.001e-3)
    small = step(("work", "copies", MS // 1000, 819 * MB // 1000))
    assert small.terms["copies"] == pytest.approx(1e-6), "no more than the compiler estimates"


# --- links as queues ---

# Of 45 GB/s a transfer of 7/8 of this takes 2 ms along either axis, and it is 7 us to the far end.
TWO_MS, FAR = round(90 * MB * 8 / 7), 7e-6
ALONG_ROW = collective("all-gather", ROW, TWO_MS)
ALONG_COLUMN = collective("all-gather", COLUMN, TWO_MS)


def times(*schedule, collectives=(ALONG_ROW, ALONG_COLUMN), kernels=()) -> tuple[float, ...]:
    """Milliseconds waited, without latency, and hops waited for; of the whole step."""
    result = step(*schedule, collectives=collectives, kernels=kernels)
    assert result.total == pytest.approx(sum(result.terms.values()))
    return (
        pytest.approx(1e3 * result.terms["collectives"], abs=1e-6),
        pytest.approx(1e6 * result.terms["latency"], abs=1e-3),
        pytest.approx(1e3 * result.total, abs=1e-6),
    )


def test_work_covers_a_transfer():
    start, done = ("start", 0, "a"), ("done", "a")
    assert times(start, done) == (2, 7, 2.007)
    assert times(start, work(MS), done) == (1, 7, 2.007)
    assert times(start, work(2 * MS), done) == (0, 7, 2.007)
    assert times(start, work(3 * MS), done) == (0, 0, 3)
    assert times(work(3 * MS), start, done) == (2, 7, 5.007), "which came before"


def test_kernels_and_random_bits_cover_a_transfer():
    kernel = Kernel(name="k", count=1, cycles=MS, bytes=0)
    bits = ("bits", 1950 * MS // 2)
    result = times(("start", 0, "a"), ("kernel", 0), bits, ("done", "a"), kernels=(kernel,))
    assert result == (0.5, 7, 2.007)


def test_transfers_on_one_axis_queue_and_work_covers_them_once():
    begin, end = [("start", 0, "a"), ("start", 0, "b")], [("done", "a"), ("done", "b")]
    assert times(*begin, *end) == (4 - 0.007, 14, 4.007), "the second is under way meanwhile"
    assert times(*begin, work(3 * MS), *end) == (1, 7, 4.007)


def test_links_are_averaged_also_over_a_branch_that_branches_itself():
    sends, neither = (("start", 0, "a"),), (("either", 1 / 2, (), ()),)
    later = [("start", 0, "b"), ("done", "b")]
    waits = times(("either", 1 / 2, sends, neither), *later)[0]
    assert waits == 3  # half of the first transfer, and the second


def test_transfers_on_two_axes_go_at_the_same_time():
    begin, end = [("start", 0, "a"), ("start", 1, "b")], [("done", "a"), ("done", "b")]
    assert times(*begin, *end) == (2, 7, 2.007)
    assert times(*begin, work(MS), *end) == (1, 7, 2.007)


def test_a_transfer_over_both_axes_waits_for_both():
    both = collective("all-gather", range(64), round(90 * MB * 64 / 63))  # 1 ms at 90 GB/s
    result = times(
        ("start", 0, "a"),
        *(("start", 1, "b"), ("done", "b")),
        ("done", "a"),
        collectives=(ALONG_ROW, both),
    )
    assert result == (3, 14, 3.014)


def test_a_chain_of_transfers_waits_for_each():
    chain = [("start", 0, "a"), ("done", "a"), ("start", 1, "b"), work(MS), ("done", "b")]
    assert times(*chain) == (3, 14, 4.014)


def test_a_synchronous_transfer_waits_for_the_links():
    """They are busy with one that work could have covered."""
    synchronous = [("start", 0, "b"), ("done", "b")]
    result = times(("start", 0, "a"), *synchronous, work(5 * MS), ("done", "a"))
    assert result == (4, 7, 9.007)


def test_rounds_of_a_loop_are_alike():
    body = (("start", 0, "a"), work(MS), ("done", "a"))
    assert times(("loop", 10, body)) == (10, 70, 20.07)
    assert times(("loop", 5, (("loop", 2, body),))) == (10, 70, 20.07)


def test_a_loop_covers_a_transfer_that_began_before_it():
    """Its own wait in the first round, for the links; those of the other rounds do not."""
    body = (work(MS // 2), ("start", 0, "b"), ("done", "b"))
    result = times(("start", 0, "a"), ("loop", 3, body), ("done", "a"))
    # 0.5 of work, 1.5 until the links are free; then 2 of each round's own.
    assert result == (1.5 + 6, 21, 1.5 + 1.5 + 6 + 0.021)
    short = (work(MS // 2),)
    assert times(("start", 0, "a"), ("loop", 3, short), ("done", "a")) == (0.5, 7, 2.007)


def test_waits_are_not_the_time_that_links_are_busy():
    body = (("start", 0, "a"), ("start", 1, "b"), work(MS), ("done", "a"), ("done", "b"))
    result = step(("loop", 4, body), collectives=(ALONG_ROW, ALONG_COLUMN))
    assert result.waits == (pytest.approx(4 * 1.007e-3), pytest.approx(0, abs=1e-9))
    assert result.busy == {0: pytest.approx(8e-3), 1: pytest.approx(8e-3)}


# --- how long a transfer takes ---


@pytest.mark.parametrize(
    ("name", "kind", "group", "rate", "hops"),
    [
        # A line: one direction of it. Back over the whole line, as an all-reduce goes twice.
        ("v5e:8x8", "reduce-scatter", range(8), 45e9, 7),
        ("v5e:8x8", "all-reduce", range(64), 2 * 45e9, 14),  # of both axes
        ("v5e:16x16", "all-gather", range(0, 256, 16), 2 * 45e9, 8),  # a ring: both directions
        ("v5p:4x4x4", "all-reduce", range(64), 6 * 90e9, 6),  # cubes have three rings
        # Both cores of eight chips; one core of each, whose other group has the links, too.
        ("v3:8x8", "all-gather", range(16), 82e9, 7),
        ("v3:8x8", "all-gather", range(0, 128, 16), 82e9 / 2, 7),
        # Of two axes at once, to each its way.
        ("v5e:16x16", "all-gather", range(256), 4 * 45e9, 16),
    ],
)
def test_a_collective_goes_over_the_links_of_its_axes(name, kind, group, rate, hops):
    transfer, latency = seconds(name, collective(kind, group))
    rounds, share = 1 + (kind == "all-reduce"), (len(group) - 1) / len(group)
    assert transfer == pytest.approx(rounds * share * 90e6 / rate)
    assert latency == pytest.approx(rounds * hops * 1e-6)


def test_a_ring_through_all_chips_uses_two_directions_whatever_the_axes():
    gather = dataclasses.replace(collective("all-gather", range(256)), emitter="1DAllGather")
    assert seconds("v5e:16x16", gather) == pytest.approx((255 / 256 * 1e-3, 128e-6))


def test_a_group_of_one_moves_nothing():
    assert seconds("v5e:8x8", collective("all-reduce", [5])) == (0, 0)


FOLDED = (0, 2, 4, 6, 7, 5, 3, 1)  # a ring laid along a line: no way is longer than two chips


@pytest.mark.parametrize(
    ("name", "order", "rate", "hops"),
    [
        ("v5e:8x8", range(8), 45e9, 7),  # back over the whole line
        ("v5e:8x8", FOLDED, 45e9, 2),
        ("v5e:8x8", (0, 1, 8, 9), 45e9, 2),  # the way back is over both axes
        ("v5e:8x8", (0, 4, 1, 5), 45e9 / 2, 5),  # two pairs go through the links in between
        ("v5p:4x4x4", range(4), 90e9, 1),  # closed
        ("v3:8x8", (0, 1), 4 * 82e9, 0),  # cores of a chip
        ("v3:8x8", range(4), 82e9, 1),  # the slowest pair is of two chips
        ("tpu7x:2x2x1", (0, 1), 6 * 90e9, 0),  # published: six times a link
    ],
)
def test_a_permutation_takes_as_long_as_its_slowest_pair(name, order, rate, hops):
    pairs = tuple(zip(order, [*order[1:], order[0]], strict=True))
    one = Collective(
        kind="collective-permute", count=1, payload=90 * MB, group=(), pairs=pairs, where="entry"
    )
    transfer, latency = seconds(name, one)
    assert transfer == pytest.approx(90e6 / rate)
    assert latency == pytest.approx(hops * 1e-6)


@pytest.mark.parametrize(("name", "devices_per_chip"), [("2*v6e:2x2", 1), ("2*tpu7x:2x2x1", 2)])
def test_all_devices_of_a_chip_share_its_rate_to_other_slices(name, devices_per_chip):
    slices = topology.parse(name)
    one = collective(SEND, ())
    seconds_busy = estimate.cost(one, slices, []).transfer
    rate = slices.tpu.network_bandwidth
    # A sum over two slices: a device sends half of the array, and half of the sum.
    assert seconds_busy == pytest.approx(devices_per_chip * 90 * MB / rate)


def test_both_cores_of_a_chip_send_over_the_same_link():
    one = dataclasses.replace(collective("collective-permute", ()), pairs=((0, 2), (1, 3)))
    assert seconds("v3:8x8", one)[0] == pytest.approx(2 * 90e6 / 82e9)


# --- hardware ---


@pytest.mark.parametrize(
    ("name", "chips", "devices", "peak"),
    [
        ("v2:4x4", 16, 32, 16 * 46e12),
        ("v3:8x8", 64, 128, 64 * 123e12),
        ("v4:2x2x4", 16, 16, 16 * 275e12),
        ("v5e:8x8", 64, 64, 64 * 197e12),
        ("v5p:4x4x4", 64, 64, 64 * 459e12),
        ("v6e:16x16", 256, 256, 256 * 918e12),
        ("tpu7x:4x4x4", 64, 128, 64 * 2307e12),
    ],
)
def test_chips_are_not_devices(name, chips, devices, peak):
    result = topology.parse(name)
    assert (result.chips, result.devices) == (chips, devices)
    assert result.peak_flops("bfloat16") == pytest.approx(peak)
    assert result.device_memory * devices == result.tpu.memory_bytes * chips


@pytest.mark.parametrize("name", sorted(hardware.TPUS))
def test_peaks_are_whole_matrix_units_at_the_clock(name):
    tpu = hardware.TPUS[name]
    multipliers = hardware.PEAK_FLOPS[tpu.kind]["bfloat16"] / (2 * tpu.clock_hz)
    units = multipliers / (128 * 128)
    assert round(units) in (1, 2, 4, 8, 16)
    assert units == pytest.approx(round(units), rel=0.01)
