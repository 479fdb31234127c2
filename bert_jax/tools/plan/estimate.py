"""Estimates the time of a step from its program, term by term.

Nothing here was measured on a TPU. The estimate simulates the schedule of a step. A transfer begins
when its links are free; the links of an axis serve one transfer at a time. An operation waits for
the transfers that bring its data. So a transfer costs only the wait that remains after the work and
kernels in between, and work hides on each link at most as much transfer time as it takes itself.

    products      matrix products: cycles / clock; the scheduled cycles, or the compiler's estimate,
                  which omits much of what is fused into a product, whichever is more
    copies        bytes of the device's memory (HBM) read and written / its bandwidth, and
                  COPY_SECONDS to begin; at most what the compiler estimates
    other         the compiler's estimate / clock: too high by up to a factor of three
    kernels       scheduled cycles / clock, or bytes / memory bandwidth, whichever is more; a kernel
                  of unknown cycles takes the latter, and the report names it
    random bits   bytes drawn / (RANDOM_BYTES_PER_CYCLE x cores x clock)
    prefetch      waits for transfers from or to memory during other work
    issue         ISSUE_SECONDS, an assumption, for each permutation
    collectives   waits, less latency. Each of N devices sends (N-1)/N of the array of a gather or
                  scatter, twice as much for an all-reduce, over the links of the axes that the
                  group spans: in both directions if the axis is a ring, else in one; a permutation
                  takes as long as its slowest pair
    network       waits for sums over slices, one sum at a time: bytes as for an all-reduce, over a
                  chip's share of the data centre's network, and 2 x NETWORK_SECONDS (assumed) for a
                  round trip
    latency       the last part of each wait: HOP_SECONDS, an assumption, for each chip on the way;
                  a gather over several axes at once is one ring through all chips, in both
                  directions
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from bert_jax.tools.plan import work
from bert_jax.tools.plan.schedule import SEND, Action, Collective, Program
from bert_jax.tools.plan.topology import Topology

# TPUs draw random bits by a special instruction, which fills a register of 4,096 bytes. As
# scheduled, it runs about every second cycle: 1,940 bytes a cycle on v5e, 1,990 on v3.
RANDOM_BYTES_PER_CYCLE = 1950
# Time from a chip to the next, as in "How to Scale Your Model".
HOP_SECONDS = 1e-6
# A copy begins with a round trip to memory. The compiler charges 1.2 us for the smallest copy.
COPY_SECONDS = 1e-6
# Time in which a core starts the transfer of a permutation and checks its end. Not published.
ISSUE_SECONDS = 0.25e-6
# Time from a chip over its host to a chip of another slice. Not published.
NETWORK_SECONDS = 50e-6
ASSUMPTIONS = {
    "random_bytes_per_cycle": RANDOM_BYTES_PER_CYCLE,
    "hop_seconds": HOP_SECONDS,
    "copy_seconds": COPY_SECONDS,
    "issue_seconds": ISSUE_SECONDS,
    "network_seconds": NETWORK_SECONDS,
}
# Keys in place of an axis of the torus: the links between the cores of a chip, the link between a
# device and its memory, the network between slices.
WITHIN_CHIPS, _MEMORY, NETWORK = -1, -2, -3

# The location of a device: chip coordinates, then its number on the chip.
Location = Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a step, split into TERMS, with waits and transfer times."""

    terms: dict[str, float]  # {name: seconds}, all of TERMS
    # For each of the program's collectives, the waits for all its runs.
    waits: tuple[float, ...]
    busy: dict[int, float]  # {axis or WITHIN_CHIPS: transfer time of its links}

    @property
    def total(self) -> float:
        """The sum of all terms."""
        return sum(self.terms.values())


TERMS = (
    *("products", "copies", "other", "kernels", "random_bits"),
    *("prefetch", "issue", "collectives", "latency", "network"),
)


class Cost(NamedTuple):
    """The seconds of one run of a collective, and the links that it occupies."""

    transfer: float
    latency: float
    axes: frozenset[int]  # includes WITHIN_CHIPS if several cores of a chip take part


def estimate(program: Program, topology: Topology, locations: Sequence[Location]) -> StepTime:
    """Returns the time of a step, term by term; `locations` are in the order of the mesh."""
    timeline = _Timeline(program, topology, locations)
    timeline.simulate(program.schedule, 1)
    return StepTime(
        terms={name: timeline.terms[name] for name in TERMS},
        waits=tuple(timeline.waits),
        busy={axis: busy for axis, busy in sorted(timeline.busy.items()) if axis != NETWORK},
    )


class _Timeline:
    def __init__(self, program: Program, topology: Topology, locations: Sequence[Location]):
        tpu = topology.tpu
        self.clock_hz = tpu.clock_hz
        self.bandwidth = topology.device_bandwidth
        self.random_bandwidth = RANDOM_BYTES_PER_CYCLE * tpu.cores_per_device * tpu.clock_hz
        self.kernels = program.kernels
        self.is_permutation = [bool(collective.pairs) for collective in program.collectives]
        self.costs = [cost(collective, topology, locations) for collective in program.collectives]
        self.now = 0.0  # seconds since the step began
        self.free_at: dict[int, float] = {}  # {axis: time from which its links are free}
        # {name of the instruction that started a transfer: (index of the collective, or None for a
        # fetch; time of arrival)}.
        self.under_way: dict[str, tuple[int | None, float]] = {}
        # As in `StepTime`, over all executions.
        self.terms: dict[str, float] = collections.defaultdict(int)
        self.waits = [0.0] * len(program.collectives)
        self.busy: dict[int, float] = collections.defaultdict(int)

    def simulate(self, actions: Sequence[Action], count: float) -> None:
        """Simulates one execution of actions, and adds `count` executions to the sums."""
        for action in actions:
            match action:
                case "work", work.COPIES, cycles, size:
                    begin = self._queue_transfer(size) - size / self.bandwidth
                    self._spend("prefetch", begin - self.now, count)
                    seconds = COPY_SECONDS + size / self.bandwidth
                    self._spend("copies", min(cycles / self.clock_hz, seconds), count)
                case "work", kind, cycles, _:
                    self._spend(kind, cycles / self.clock_hz, count)
                case "bits", size:
                    self._spend("random_bits", size / self.random_bandwidth, count)
                case "kernel", number:
                    kernel = self.kernels[number]
                    self._queue_transfer(kernel.bytes)  # delays others; taken not to wait itself
                    scheduled = (kernel.cycles or 0) / self.clock_hz
                    self._spend("kernels", max(scheduled, kernel.bytes / self.bandwidth), count)
                case "start", number, name:
                    self._spend("issue", ISSUE_SECONDS * self.is_permutation[number], count)
                    self._start(number, name, count)
                case "fetch", size, name:
                    self.under_way[name] = None, self._queue_transfer(size)
                case "done", name:
                    number, arrival = self.under_way.pop(name)
                    wait = max(0.0, arrival - self.now)
                    if number is None:
                        self._spend("prefetch", wait, count)
                        continue
                    latency = min(wait, self.costs[number].latency)
                    self.waits[number] += count * wait
                    if NETWORK in self.costs[number].axes:
                        self._spend("network", wait, count)
                        continue
                    self._spend("collectives", wait - latency, count)
                    self._spend("latency", latency, count)
                case "loop", iterations, body:
                    self._loop(iterations, body, count)
                case "either", share, first, second:
                    # Both branches begin at the same time, and their ends are averaged.
                    began, free_at = self.now, dict(self.free_at)
                    self.simulate(first, count * share)
                    first_end, first_free_at = self.now, self.free_at
                    self.now, self.free_at = began, free_at
                    self.simulate(second, count * (1 - share))
                    self.now = share * first_end + (1 - share) * self.now
                    second_free_at = self.free_at  # another dict if the second branch has branches
                    for axis in first_free_at.keys() | second_free_at.keys():
                        times = first_free_at.get(axis, began), second_free_at.get(axis, began)
                        second_free_at[axis] = share * times[0] + (1 - share) * times[1]

    def _spend(self, term: str, seconds: float, count: float) -> None:
        self.now += seconds
        self.terms[term] += count * seconds

    def _queue_transfer(self, size: int) -> float:
        """Queues a transfer from or to memory; returns its time of arrival."""
        begin = max(self.now, self.free_at.get(_MEMORY, 0.0))
        self.free_at[_MEMORY] = begin + size / self.bandwidth
        return self.free_at[_MEMORY]

    def _start(self, number: int, name: str, count: float) -> None:
        transfer, latency, axes = self.costs[number]
        begin = max([self.now, *(self.free_at.get(axis, 0.0) for axis in axes)])
        for axis in axes:
            self.free_at[axis] = begin + transfer
            self.busy[axis] += count * transfer
        self.under_way[name] = number, begin + transfer + latency

    def _loop(self, iterations: int, body: Sequence[Action], count: float) -> None:
        """Simulates iterations until one starts with free links and stands for all later ones."""
        while iterations > 0:
            repeats = 1 if max(self.free_at.values(), default=0.0) > self.now else iterations
            start = self.now
            self.simulate(body, count * repeats)
            self.now += (repeats - 1) * (self.now - start)
            iterations -= repeats


def cost(collective: Collective, topology: Topology, locations: Sequence[Location]) -> Cost:
    """Returns the cost of one run of a collective.

    All groups of a collective work at the same time. Groups of different cores of the same chips
    share the chips' links. The link between cores of one chip is assumed to be as fast as all links
    of the chip together; for TPU7x this rate is published.
    """
    if collective.kind == SEND:
        rate = topology.tpu.network_bandwidth
        assert rate is not None  # a topology of several slices has one
        seconds = _network_bytes(collective, topology) / rate
        return Cost(seconds, 2 * NETWORK_SECONDS, frozenset({NETWORK}))
    link = topology.tpu.link_bandwidth
    if collective.pairs:
        bandwidth, hops, axes = _permutation(collective.pairs, topology, locations)
        return Cost(collective.payload / bandwidth, hops * HOP_SECONDS, axes)
    members = [locations[device] for device in collective.group]
    if len(members) <= 1:
        return Cost(0.0, 0.0, frozenset())
    link_directions = hops = 0  # link_directions is a fraction if groups share links
    axes = set()
    for axis, length in enumerate(topology.shape):
        spanned = len({location[axis] for location in members})
        if spanned <= 1:
            continue
        ring = spanned == length and topology.is_ring(axis)
        # Groups whose members are not neighbours share the links between these members.
        coordinates = [location[axis] for location in members]
        stride = (max(coordinates) - min(coordinates)) // (spanned - 1)
        link_directions += (2 if ring else 1) / stride
        hops += math.ceil(spanned / 2) if ring else stride * (spanned - 1)
        axes.add(axis)
    # One ring through all chips, in both directions. An asynchronous gather, whose algorithm the
    # compiler does not name, is assumed to be such a ring.
    is_single_ring = collective.emitter.startswith("1D") or collective.asynchronous
    if collective.kind == "all-gather" and len(axes) > 1 and is_single_ring:
        link_directions, hops = 2, len(members) // 2
    devices_on_chip = len({location[-1] for location in members})
    if devices_on_chip > 1:
        axes.add(WITHIN_CHIPS)
    bandwidth = link_directions * link * devices_on_chip / topology.tpu.devices_per_chip
    if link_directions == 0:  # within a chip
        bandwidth = 2 * len(topology.shape) * link
    passes = 2 if collective.kind == "all-reduce" else 1  # a scatter, then a gather
    share = (len(members) - 1) / len(members)
    transfer = passes * share * collective.payload / bandwidth
    return Cost(transfer, passes * hops * HOP_SECONDS, frozenset(axes))


def _network_bytes(collective: Collective, topology: Topology) -> float:
    """Returns the bytes that a chip sends to the network in one sum over slices.

    Each slice sums up one part of the array, and sends it to all slices. All devices of a chip do.
    """
    device_bytes = 2 * (topology.slices - 1) / topology.slices * collective.payload
    return topology.tpu.devices_per_chip * device_bytes


def network_traffic(program: Program, topology: Topology) -> dict[str, float | None]:
    """Returns the bytes that a chip sends to the network in a step, the rate and the seconds."""
    rate = topology.tpu.network_bandwidth
    sends = [c for c in program.collectives if c.kind == SEND]
    size = sum(send.count * _network_bytes(send, topology) for send in sends)
    return {"bytes": size, "bandwidth": rate, "busy": size / rate if rate else 0.0}


def _permutation(
    pairs: Sequence[tuple[int, int]], topology: Topology, locations: Sequence[Location]
) -> tuple[float, int, frozenset[int]]:
    """Returns the bandwidth and the hops of the slowest pair, and the axes that any pair uses.

    The data of a pair move along one axis after the other, the shorter way round a ring. All pairs
    send at the same time; those on the same direction of a link share it.
    """
    load: collections.Counter[tuple] = collections.Counter()
    hops = 0
    for source, target in pairs:
        chip, distance_sum = list(locations[source][:-1]), 0
        for axis, length in enumerate(topology.shape):
            distance = locations[target][axis] - chip[axis]
            if topology.is_ring(axis) and 2 * abs(distance) > length:
                distance -= length if distance > 0 else -length
            sign = 1 if distance > 0 else -1
            for _ in range(abs(distance)):
                load[axis, sign, *chip] += 1
                chip[axis] = (chip[axis] + sign) % length
            distance_sum += abs(distance)
        hops = max(hops, distance_sum)
    link = topology.tpu.link_bandwidth
    bandwidth = link / max(load.values()) if load else 2 * len(topology.shape) * link
    return bandwidth, hops, frozenset(key[0] for key in load) or frozenset({WITHIN_CHIPS})
