"""Terms of a step's time, against arithmetic by hand."""

import dataclasses

import pytest

from bert_jax import hardware
from bert_jax.plan import estimate, topology
from bert_jax.plan.hlo import Collective, Kernel, Program

EMPTY = Program(cycles=0, random_bytes=0, kernels=(), collectives=(), operations={}, endless=0)
MB = 1_000_000


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


def collective(kind: str, group, cover: int | None = None, count: int = 1) -> Collective:
    return Collective(
        kind=kind, count=count, payload=90 * MB, group=tuple(group), where="entry", cover=cover
    )


def seconds(name: str, one: Collective) -> tuple[float, float]:
    return estimate.collective_seconds(one, topology.parse(name), places(name))


def test_cycles_over_the_clock():
    slice_ = topology.parse("v5e:4x4")
    program = dataclasses.replace(EMPTY, cycles=3_000_000)
    found = estimate.estimate(program, slice_, places("v5e:4x4"), "bfloat16")
    assert found.compute == found.total == pytest.approx(2e-3)


def test_random_bits_cost_cycles_of_every_core_of_a_device():
    program = dataclasses.replace(EMPTY, random_bytes=256 * 1_050_000)
    one = estimate.estimate(program, topology.parse("v4:2x2x4"), places("v4:2x2x4"), "bfloat16")
    assert one.random_bits == pytest.approx(0.5e-3)  # 1.05 GHz, two cores


@pytest.mark.parametrize(
    ("flops", "bytes_", "expected"),
    [
        (197e9, 1, 1e-3),  # of 197 TFLOP/s
        (1, 819e6, 1e-3),  # of 819 GB/s
        (None, 819e6, 1e-3),
    ],
)
def test_a_kernel_takes_the_longer_of_work_and_traffic(flops, bytes_, expected):
    kernel = Kernel(name="k", count=3, flops=flops and int(flops), bytes=int(bytes_))
    program = dataclasses.replace(EMPTY, kernels=(kernel,))
    found = estimate.estimate(program, topology.parse("v5e:4x4"), places("v5e:4x4"), "bfloat16")
    assert found.kernels == pytest.approx(3 * expected)


def test_an_all_reduce_of_a_mesh_without_rings_uses_one_link_of_each_axis():
    transfer, latency = seconds("v5e:8x8", collective("all-reduce", range(64)))
    assert transfer == pytest.approx(2 * 63 / 64 * 90e6 / (2 * 45e9))
    assert latency == pytest.approx(2 * 14 * 1e-6)


def test_a_gather_along_a_ring_uses_both_directions_of_one_axis():
    column = range(0, 256, 16)
    transfer, latency = seconds("v5e:16x16", collective("all-gather", column))
    assert transfer == pytest.approx(15 / 16 * 90e6 / (2 * 45e9))
    assert latency == pytest.approx(8 * 1e-6)


def test_a_scatter_along_a_line_uses_one_direction():
    transfer, _ = seconds("v5e:8x8", collective("reduce-scatter", range(8)))
    assert transfer == pytest.approx(7 / 8 * 90e6 / 45e9)


def test_cubes_have_rings_on_all_three_axes():
    transfer, latency = seconds("v5p:4x4x4", collective("all-reduce", range(64)))
    assert transfer == pytest.approx(2 * 63 / 64 * 90e6 / (6 * 90e9))
    assert latency == pytest.approx(2 * 6 * 1e-6)


def test_groups_of_one_core_of_each_chip_share_the_links():
    both = range(16)  # a line of eight chips of v3:8x8, both cores
    transfer, _ = seconds("v3:8x8", collective("all-gather", both))
    assert transfer == pytest.approx(15 / 16 * 90e6 / 82e9)
    one_core = range(0, 128, 16)  # the other axis: the same core of eight chips
    transfer, _ = seconds("v3:8x8", collective("all-gather", one_core))
    assert transfer == pytest.approx(7 / 8 * 90e6 / (82e9 / 2))


def test_what_other_work_covers_costs_nothing():
    alone, latency = seconds("v5e:8x8", collective("all-gather", range(8)))
    half = int((alone + latency) / 2 * 1.5e9)
    left, more = seconds("v5e:8x8", collective("all-gather", range(8), cover=half))
    assert left == pytest.approx((alone + latency) / 2, rel=1e-6)
    assert more == 0
    assert seconds("v5e:8x8", collective("all-gather", range(8), cover=10**9)) == (0, 0)


def test_a_group_of_one_moves_nothing():
    assert seconds("v5e:8x8", collective("all-reduce", [5])) == (0, 0)


def test_collectives_count_as_often_as_they_run():
    program = dataclasses.replace(
        EMPTY, collectives=(collective("all-gather", range(8), count=10),)
    )
    found = estimate.estimate(program, topology.parse("v5e:8x8"), places("v5e:8x8"), "bfloat16")
    assert found.collectives == pytest.approx(10 * 7 / 8 * 90e6 / 45e9)


@pytest.mark.parametrize(
    ("name", "chips", "devices", "peak"),
    [
        ("v2:4x4", 16, 32, 16 * 46e12),
        ("v3:8x8", 64, 128, 64 * 123e12),
        ("v4:2x2x4", 16, 16, 16 * 275e12),
        ("v5e:8x8", 64, 64, 64 * 197e12),
        ("v5p:4x4x4", 64, 64, 64 * 459e12),
        ("v6e:16x16", 256, 256, 256 * 918e12),
    ],
)
def test_chips_are_not_devices(name, chips, devices, peak):
    found = topology.parse(name)
    assert (found.chips, found.devices) == (chips, devices)
    assert found.peak_flops("bfloat16") == pytest.approx(peak)
    assert found.device_memory * devices == found.tpu.memory_bytes * chips


@pytest.mark.parametrize("name", sorted(hardware.TPUS))
def test_peaks_are_whole_matrix_units_at_the_clock(name):
    tpu = hardware.TPUS[name]
    multipliers = hardware.PEAK_FLOPS[tpu.kind]["bfloat16"] / (2 * tpu.clock_hz)
    units = multipliers / (128 * 128)
    assert round(units) in (1, 2, 4, 8, 16)
    assert units == pytest.approx(round(units), rel=0.01)
