"""Modules that the real compiler made, read, against what their programs do (make_modules.py)."""

import pytest
from stand_in import text

from bert_jax.tools.plan import bundles, hlo, schedule
from bert_jax.tools.plan.schedule import Collective, Kernel, Program
from bert_jax.tools.plan.work import KINDS

# As make_modules.py has them.
LAYERS, WIDTH, INNER, MICRO_BATCHES, ROWS, AXIS = 3, 1024, 4096, 2, 64, 4


def read(module: str) -> Program:
    return schedule.read_program(hlo.parse(module))


@pytest.fixture(scope="module")
def layers():
    return read(text("sharded_layers"))


def test_cycles_are_summed_over_all_rounds_of_loops_in_loops(layers):
    # As another reader of the same text finds.
    assert sum(layers.sums[kind] for kind in KINDS) == 1_265_532
    assert layers.endless == 0


def test_random_bits_are_counted_in_both_passes(layers):
    a_layer = 2 * ROWS // MICRO_BATCHES * INNER
    assert layers.sums["drawn"] == 2 * LAYERS * MICRO_BATCHES * a_layer


def test_collectives_count_as_often_as_they_run_and_an_asynchronous_one_once(layers):
    whole = 2 * WIDTH * INNER
    line, column = (0, 1, 2, 3), (0, 4, 8, 12)
    gathers = 2 * 2 * LAYERS * MICRO_BATCHES  # two weights, two passes
    counts = {(c.kind, c.payload, c.group, c.asynchronous): c.count for c in layers.collectives}
    half_way = counts["all-gather", whole // AXIS, line, False]
    during_work = counts["all-gather", whole, column, True]
    assert half_way == gathers
    assert during_work == LAYERS * MICRO_BATCHES
    assert counts["all-gather", whole, column, False] == gathers - during_work
    assert counts["reduce-scatter", whole, column, False] == 2 * LAYERS * MICRO_BATCHES
    assert counts["all-reduce", 4, tuple(range(16)), False] == 1


def test_work_stands_between_the_start_of_an_asynchronous_collective_and_its_end(layers):
    (number,) = (n for n, one in enumerate(layers.collectives) if one.asynchronous)

    def bodies(steps):
        yield steps
        for step in steps:
            if step[0] == "loop":
                yield from bodies(step[2])

    (body,) = (
        steps
        for steps in bodies(layers.schedule)
        if any(step[:2] == ("start", number) for step in steps)
    )
    (start,) = (n for n, step in enumerate(body) if step[:2] == ("start", number))
    end = body.index(("done", body[start][2]))
    between = sum(step[2] for step in body[start:end] if step[0] == "work")
    # Two products of 32 x 4096 x 1024 on the chip's four units of 128 x 128.
    assert between > 2 * 32 * INNER * WIDTH / (4 * 128 * 128)
    assert between < layers.sums["products"] / (LAYERS * MICRO_BATCHES)


def test_only_the_last_sum_stands_outside_the_loops(layers):
    assert [(c.kind, c.count) for c in layers.collectives if c.where == "entry"] == [
        ("all-reduce", 1)
    ]


def test_kernels_take_what_the_compiler_schedules_for_them():
    """Only the last one's result does not lie in the memory of the chip."""
    array = 4 * 128 * 128
    module = hlo.parse(text("kernels"))
    cycles = {"stated.1": 140}
    assert schedule.read_program(module, cycles.get).kernels == (
        Kernel(name="stated", count=5, cycles=140, bytes=0),
        Kernel(name="silent", count=1, cycles=None, bytes=array),
    )


def test_a_kernel_may_read_a_part_of_an_array():
    lines = """HloModule small
ENTRY %main (p: f32[64]) -> f32[6] {
  %p = f32[64]{0} parameter(0)
  ROOT %k = f32[6]{0} custom-call(%p), custom_call_target="tpu_custom_call"STATED
}
"""
    stated = ', backend_config={"custom_call_config":{"cost_estimate":{"bytes_accessed":"48"}}}'
    assert read(lines.replace("STATED", "")).kernels[0].bytes == 4 * 70
    assert read(lines.replace("STATED", stated)).kernels[0].bytes == 48


def test_equal_kernels_are_scheduled_once():
    lines = """HloModule small
ENTRY %main (p: f32[6]) -> f32[6] {
  %p = f32[6]{0} parameter(0)
  %one.1 = f32[6]{0} custom-call(%p), custom_call_target="tpu_custom_call"BODY
  ROOT %one.2 = f32[6]{0} custom-call(%one.1), custom_call_target="tpu_custom_call"BODY
}
""".replace("BODY", ', backend_config={"custom_call_config":{"body":"TUzvUg=="}}')
    kernels = schedule.read_program(hlo.parse(lines), {"one.1": 7}.get).kernels
    assert kernels == (Kernel(name="one", count=2, cycles=7, bytes=48),)


@pytest.mark.parametrize(
    ("name", "cycles"),
    [
        # By hand: 80 bundles, 13 run once, 48 in a grid of 4 x 2, 19 in a loop of 16 within it.
        ("looped_v5e", 13 + 8 * (48 + 16 * 19)),
        # 114 bundles, 23 run once, 72 in the grid, 19 in the loop: 8 of them were moved there.
        ("looped_v5p", 23 + 8 * (72 + 16 * 19)),
    ],
)
def test_bundles_of_a_kernel_count_as_often_as_its_loops_run(name, cycles):
    assert bundles.scheduled_cycles(text(name)) == cycles


BUNDLES = """     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 }
   0x2   :  {}
   0x3   : > { %p1 = scmp.ge.s32.totalorder %s2, LIMIT /* loop exit test */ }
   0x4   : > { %9 = sbr.rel (!%p1) target = $region3 }
   0x5 LB: > { %s3 = sadd.s32 1, %s3 }
   0x6   : > { %p2 = scmp.ge.s32.totalorder %s3, 2 /* loop exit test */ }
   0x7   :  {}
"""


def test_loops_of_a_kernel_that_follow_on_each_other():
    assert bundles.scheduled_cycles(BUNDLES.replace("LIMIT", "10")) == 1 + 10 * 4 + 2 * 2 + 1


NESTED = """     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s2 }
   0x2 LB: >> { %s3 = sadd.s32 1, %s3 }
   0x3   : >> { %p1 = scmp.ge.s32.totalorder %s3, 8 /* loop exit test */ }
   0x4   : > { %p2 = scmp.ge.s32.totalorder (%p1), %s2, 32 /* loop exit test */ }
   0x5   : >> { %9 = sbr.rel (!%p1) target = $region2 }
   0x6   : > { %7 = sbr.rel (!%p2) target = $region1 }
   0x7   :  {}
"""


@pytest.mark.parametrize("mark", [">", ">>"])
def test_the_end_of_a_loop_may_be_found_out_within_one_inside_it(mark):
    text = NESTED.replace("0x4   : >", f"0x4   : {mark}")
    assert bundles.scheduled_cycles(text) == 2 + 32 * (2 + 8 * 4)


def test_a_kernel_whose_loops_end_by_what_it_reads_has_no_known_cycles():
    assert bundles.scheduled_cycles(BUNDLES.replace("LIMIT", "%s9")) is None


@pytest.mark.parametrize(
    ("written", "group"),
    [
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups=[4,2]<=[8]", (0, 1)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("replica_groups=[4,4]<=[2,4,2]T(1,0,2)", (0, 1, 8, 9)),
        ("replica_groups=mesh['a'=4,'b'=2] {'b'}", (0, 1)),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", (0, 2, 4, 6)),
        ("replica_groups=mesh[a=2,b=2,c=2] {c,a}", (0, 4, 1, 5)),
        ("replica_groups=mesh['a'=8,'b'=2] {'a':(1)2}", (0, 8)),
        ("replica_groups=mesh['a'=8,'b'=2] {'a':(4)2,'b'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([8]) {'a'}", (0, 4)),
    ],
)
def test_groups_are_read_in_every_way_of_writing_them(written, group):
    assert small("all-reduce", f"{written}, to_apply=%add") == Collective(
        kind="all-reduce", count=1, payload=24, group=group, where="entry"
    )


def test_groups_that_cannot_be_read_are_named():
    with pytest.raises(ValueError, match="all-reduce sum: no groups in"):
        small("all-reduce", "replica_groups=mesh['a'=2], device_ids=([1,0]) {'a'}")


def test_a_permutation_has_pairs():
    assert small("collective-permute", "source_target_pairs={{3,1},{1,3},{0,2}}") == Collective(
        kind="collective-permute",
        count=1,
        payload=24,
        group=(),
        pairs=((3, 1), (1, 3), (0, 2)),
        where="entry",
    )


def small(opcode: str, attributes: str) -> Collective:
    (one,) = read(f"""HloModule small
ENTRY %main (p: f32[6]) -> f32[6] {{
  %p = f32[6]{{0}} parameter(0)
  ROOT %sum = f32[6]{{0}} {opcode}(%p), channel_id=1, {attributes}
}}
""").collectives
    return one


LOOP = """HloModule small
%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %y = f32[8]{0} negate(%x), backend_config={"estimated_cycles":"7"}
  ROOT %next = (s32[], f32[8]{0}) tuple(%i, %y)
}
%condition (t: (s32[], f32[8])) -> pred[] {
  %t = (s32[], f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %last = s32[] LIMIT
  ROOT %less = pred[] compare(%j, %last), direction=LT
}
ENTRY %main (p: f32[8]) -> (s32[], f32[8]) {
  %p = f32[8]{0} parameter(0)
  %first = s32[] constant(2)
  %begin = (s32[], f32[8]{0}) tuple(%first, %p)
  ROOT %loop = (s32[], f32[8]{0}) while(%begin), condition=%condition, body=%body
}
"""


def test_a_loop_counts_from_its_own_start():
    loop = read(LOOP.replace("LIMIT", "constant(12)"))
    assert (loop.sums["other"], loop.endless) == (70, 0)


def test_a_loop_of_unknown_rounds_is_counted_once_and_named():
    loop = read(LOOP.replace("LIMIT", "negate(%j)"))
    assert (loop.sums["other"], loop.endless) == (7, 1)


SCATTER = """HloModule small
%fused (q: bf16[16,8]) -> bf16[4,8] {
  %q = bf16[16,8]{1,0} parameter(0)
  %place = s32[] constant(4)
  %zero = s32[] constant(0)
  %sum = bf16[16,8]{1,0} all-reduce(%q), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %mine = bf16[4,8]{1,0} dynamic-slice(%sum, %place, %zero), dynamic_slice_sizes={4,8}
}
ENTRY %main (p: bf16[16,8]) -> bf16[4,8] {
  %p = bf16[16,8]{1,0} parameter(0)
  ROOT %fusion = bf16[4,8]{1,0} fusion(%p), kind=kCustom, calls=%fused
}
"""


def test_a_sum_of_which_a_slice_alone_is_made_is_a_scatter():
    (one,) = read(SCATTER).collectives
    assert (one.kind, one.payload) == ("reduce-scatter", 2 * 16 * 8)


OFFLOADED = """HloModule small
%called (q: bf16[4,8]) -> bf16[16,8] {
  %q = bf16[4,8]{1,0} parameter(0)
  ROOT %all = bf16[16,8]{1,0} all-gather(%q), replica_groups={{0,1,2,3}}, dimensions={0}
}
ENTRY %main (p: bf16[4,8]) -> bf16[16,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %begun = ((bf16[4,8]{1,0}), bf16[16,8]{1,0}) call-start(%p), to_apply=%called
  %other = bf16[4,8]{1,0} negate(%p), backend_config={"estimated_cycles":"7"}
  ROOT %done = bf16[16,8]{1,0} call-done(%begun)
}
"""


def test_what_a_sparse_core_gathers_is_under_way_until_it_is_waited_for():
    program = read(OFFLOADED)
    (one,) = program.collectives
    assert (one.kind, one.payload, one.count, one.asynchronous) == ("all-gather", 256, 1, True)
    assert [step[0] for step in program.schedule] == ["start", "work", "done"]


CONDITIONAL = """HloModule step, is_scheduled=true

%near (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %b = f32[8]{0} negate(%a), backend_config={"estimated_cycles":"100"}
}

%whole (c: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  ROOT %d = f32[8]{0} negate(%c), backend_config={"estimated_cycles":"700"}
}

ENTRY %main (e: f32[8], f: s32[]) -> f32[8] {
  %e = f32[8]{0} parameter(0)
  %f = s32[] parameter(1)
  ROOT %g = f32[8]{0} conditional(%f, %e, %e), branch_computations={%near, %whole}METADATA
}
"""


@pytest.mark.parametrize(
    ("metadata", "cycles"),
    [
        (', metadata={op_name="jit(f)/held_1_of_3/cond"}', 300),  # 100 and 100, and 700 once
        (', metadata={op_name="jit(f)/cond"}', 700),
    ],
)
def test_a_condition_counts_as_often_as_the_program_says_or_as_the_longest(metadata, cycles):
    assert read(CONDITIONAL.replace("METADATA", metadata)).sums["other"] == cycles
