"""Each term of five steps' times, next to what the compiler wrote of them (make_modules.py)."""

import functools
import json
import lzma
import re

import pytest
from make_modules import FOLDER, STEPS
from stand_in import compiled

from bert_jax.tools.plan import estimate, hlo, schedule, topology, work

# Milliseconds of a step, as docs/results/performance.md has them.
MS = {
    "large_512_v5e": 46.88,
    "large_128_v5e": 27.44,
    "base_512_v5e": 48.80,
    "large_512_v6e": 20.73,
    "large_512_v5p": 28.04,
}
SLICES = {name: topology.parse(step[1]) for name, step in STEPS.items()}


@functools.cache
def stored(name: str) -> tuple[str, dict[str, int]]:
    """The text of a step, and the cycles of what the compiler wrote bundles of."""
    text = lzma.decompress((FOLDER / f"{name}.txt.xz").read_bytes()).decode()
    known, text = text.split("\n", 1)
    return text, json.loads(known)


@functools.cache
def read(name: str) -> tuple[schedule.Program, estimate.StepTime]:
    text, known = stored(name)
    program = schedule.read_program(hlo.parse(text), known.get)
    return program, estimate.estimate(program, SLICES[name], compiled(SLICES[name]).places)


@functools.cache
def listed(name: str) -> list[tuple[int, str, str, str]]:
    """How often a line runs, its name, itself, and the text of what a fusion calls.

    By another way than the package's: the condition of every loop of these steps holds its rounds.
    """
    text = stored(name)[0]
    texts = dict(re.findall(r"^(?:ENTRY )?%(\S+) .*\{\n((?:  .*\n)+)\}", text, re.MULTILINE))
    lines = []

    def walk(computation: str, times: int) -> None:
        for line in texts[computation].splitlines():
            called = re.search(r"(?:calls|to_apply|body)=%([\w.\-]+)", line)
            if " while(" in line:
                condition = texts[re.search(r"condition=%([\w.\-]+)", line)[1]]
                walk(called[1], times * max(map(int, re.findall(r"constant\((\d+)\)", condition))))
            else:
                inside = texts[called[1]] if called and " fusion(" in line else ""
                lines.append((times, re.search(r"%([\w.\-]+)", line)[1], line, inside))

    walk(re.search(r"^ENTRY %(\S+)", text, re.MULTILINE)[1], 1)
    return lines


def estimated(line: str) -> int:
    found = re.search(r'estimated_cycles":"?(\d+)', line)
    return int(found[1]) if found and "tpu_custom_call" not in line else 0


@pytest.mark.parametrize("name", STEPS)
def test_the_sum_of_the_terms_is_the_step(name):
    program, seconds = read(name)
    timeline = estimate._Timeline(program, SLICES[name], compiled(SLICES[name]).places)
    timeline.simulate(program.schedule, 1)
    assert seconds.total == pytest.approx(sum(seconds.terms.values())) == timeline.now
    assert round(1e3 * seconds.total, 2) == MS[name]


@pytest.mark.parametrize("name", STEPS)
def test_work_takes_what_the_compiler_schedules_or_estimates(name):
    known, (program, seconds) = stored(name)[1], read(name)
    hz, bandwidth = SLICES[name].tpu.clock_hz, SLICES[name].device_bandwidth
    # Of equal operations one is written, under its own name.
    products = [(*one, one[3].count("\n")) for one in listed(name) if " convolution(" in one[3]]
    twins = {
        (estimated(line), size): known.get(n) for _, n, line, _, size in products if n in known
    }
    cycles = sum(
        times * max(estimated(line), known.get(n) or twins[estimated(line), size])
        for times, n, line, _, size in products
    )
    assert (program.sums[work.PRODUCTS], program.unscheduled) == (cycles, 0)
    assert seconds.terms["products"] == pytest.approx(cycles / hz)
    rest = sum(one[0] * estimated(one[2]) for one in listed(name) if " convolution(" not in one[3])
    assert program.sums[work.COPIES] + program.sums[work.OTHER] == rest
    assert seconds.terms["other"] == pytest.approx(program.sums[work.OTHER] / hz)
    copies = seconds.terms["copies"]
    assert program.sums["copied"] / bandwidth < copies < program.sums[work.COPIES] / hz
    kernels = [(times, n) for times, n, line, _ in listed(name) if "tpu_custom_call" in line]
    assert sum(kernel.count for kernel in program.kernels) == sum(times for times, _ in kernels)
    for kernel in program.kernels:
        assert kernel.cycles in {known.get(n) for _, n in kernels if n.startswith(kernel.name)}


@pytest.mark.parametrize("name", STEPS)
def test_what_goes_over_links_and_from_memory_is_all_that_is_begun(name):
    (program, seconds), chips = read(name), SLICES[name].chips
    count, fetched, named = 0, 0, 0
    for times, _, line, _ in listed(name):
        count += times * (" collective-permute-start(" in line)
        if '"1DAllGather' in line and f"group_size = {chips}" in line:
            named += times
        if begun := re.search(r" = (.*) (?:copy|slice)-start\(", line):
            arrays = re.findall(r"\w+\[[\d,]*\]", begun[1])
            fetched += times * min(hlo.type_bytes(array) for array in arrays[:2])
    assert seconds.terms["issue"] == pytest.approx(count * estimate.ISSUE_SECONDS)
    assert program.sums["fetched"] == fetched
    wholes = [c for c in program.collectives if c.kind == "all-gather" and len(c.group) == chips]
    assert sum(one.count for one in wholes if one.emitter.startswith("1D")) == named
    for one in wholes:  # one ring, both ways round
        cost = estimate.cost(one, SLICES[name], compiled(SLICES[name]).places)
        assert cost.latency == pytest.approx(chips / 2 * estimate.HOP_SECONDS)


ROWS, WIDTH = 4 * 512, 1024


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("constant_dynamic-slice_fusion.69", 2 * ROWS * WIDTH),  # of a stack, to the chip
        ("bitcast_dynamic-update-slice_fusion.44", 2 * ROWS * WIDTH),  # from the chip, into a stack
        ("convert_element_type.596", 4 * 30720 * WIDTH),  # of float32, to the chip
        ("dynamic-slice_bitcast_fusion.70", 0),  # within the chip
    ],
)
def test_a_copy_moves_the_part_that_lies_in_memory(name, moved):
    module = hlo.parse(stored("large_512_v5e")[0])
    of = next(c for c in module.computations.values() if name in c.lookup)
    one = of.lookup[name]
    assert work.is_copy(module, one)
    assert work.copy_bytes(one, module.computations.get(one.callee("calls"), of)) == moved


def test_a_stack_whose_tiles_change_in_place_is_not_read():
    """As the compiler writes it for TPU7x, shortened."""
    stack, part = "bf16[24,8,512,1024]{3,2,1,0:T(16,128)(2,1)}", "bf16[1,8,512,1024]{3,2,1,0}"
    module = hlo.parse(f"""HloModule step

%retile (input: {stack}) -> {stack} {{
  %input = {stack} parameter(0)
  ROOT %copy = {stack} copy(%input)
}}

%write (stack: {stack}, index: s32[], part: {part}) -> {stack} {{
  %stack = {stack} parameter(0)
  %index = s32[] parameter(1)
  %part = {part} parameter(2)
  %tiles = {stack} fusion(%stack), kind=kLoop, output_to_operand_aliasing={{{{}}: (0, {{}})}}, \
calls=%retile
  ROOT %into = {stack} dynamic-update-slice(%tiles, %part, %index, %index, %index, %index)
}}

ENTRY %main (stack: {stack}, index: s32[], part: {part}) -> {stack} {{
  %stack = {stack} parameter(0)
  %index = s32[] parameter(1)
  %part = {part} parameter(2)
  ROOT %one = {stack} fusion(%stack, %index, %part), kind=kLoop, calls=%write
}}
""")
    moved = work.copy_bytes(
        module.computations[module.entry].lookup["one"], module.computations["write"]
    )
    assert moved == 2 * 8 * 512 * 1024 * 2 + 4  # the part, read and written, and the index
