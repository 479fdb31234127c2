"""Modules that the real compiler made, read, against what their programs do (make_modules.py)."""

import gzip
import pathlib

import pytest

from bert_jax import config
from bert_jax.plan import hlo
from bert_jax.plan.hlo import Collective, Kernel, Program

MODULES = pathlib.Path(__file__).parent / "modules"
# As make_modules.py has them.
LAYERS, WIDTH, INNER, MICRO_BATCHES, ROWS, AXIS = 3, 1024, 4096, 2, 64, 4


def text(name: str) -> str:
    return gzip.decompress((MODULES / f"{name}.txt.gz").read_bytes()).decode()


def read(module: str) -> Program:
    return hlo.read(hlo.parse(module))


@pytest.fixture(scope="module")
def layers():
    return read(text("sharded_layers"))


def test_cycles_are_summed_over_all_rounds_of_loops_in_loops(layers):
    assert layers.cycles == 1_265_532  # as another reader of the same text finds
    assert layers.endless == 0


def test_random_bits_are_counted_in_both_passes(layers):
    a_layer = 2 * ROWS // MICRO_BATCHES * INNER
    assert layers.random_bytes == 2 * LAYERS * MICRO_BATCHES * a_layer


def test_collectives_count_as_often_as_they_run_and_an_asynchronous_one_once(layers):
    whole = 2 * WIDTH * INNER
    line, column = (0, 1, 2, 3), (0, 4, 8, 12)
    gathers = 2 * 2 * LAYERS * MICRO_BATCHES  # two weights, two passes
    found = {(c.kind, c.payload, c.group, c.cover is not None): c.count for c in layers.collectives}
    half_way = found["all-gather", whole // AXIS, line, False]
    beside = found["all-gather", whole, column, True]
    assert half_way == gathers
    assert beside == LAYERS * MICRO_BATCHES
    assert found["all-gather", whole, column, False] == gathers - beside
    assert found["reduce-scatter", whole, column, False] == 2 * LAYERS * MICRO_BATCHES
    assert found["all-reduce", 4, tuple(range(16)), False] == 1


def test_an_asynchronous_collective_is_covered_by_what_runs_meanwhile(layers):
    (one,) = (c for c in layers.collectives if c.cover is not None)
    # Two products of 32 x 4096 x 1024 on the chip's four units of 128 x 128.
    assert one.cover > 2 * 32 * INNER * WIDTH / (4 * 128 * 128)
    assert one.cover < layers.cycles / (LAYERS * MICRO_BATCHES)


def test_only_the_last_sum_stands_outside_the_loops(layers):
    assert [(c.kind, c.count) for c in layers.collectives if c.where == "entry"] == [
        ("all-reduce", 1)
    ]


def test_kernels_give_the_work_they_state_and_else_their_arrays():
    array = 4 * 128 * 128
    assert read(text("kernels")).kernels == (
        Kernel(name="stated", count=5, flops=1000, bytes=100_000),
        Kernel(name="silent", count=1, flops=None, bytes=2 * array),
    )


@pytest.mark.parametrize(
    ("written", "group"),
    [
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups=[4,2]<=[8]", (0, 1)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("replica_groups=[4,4]<=[2,4,2]T(1,0,2)", (0, 1, 8, 9)),
        ("source_target_pairs={{3,1},{1,3}}", (3, 1)),
    ],
)
def test_groups_are_read_in_every_way_of_writing_them(written, group):
    lines = f"""HloModule small
ENTRY %main (p: f32[6]) -> f32[6] {{
  %p = f32[6]{{0}} parameter(0)
  ROOT %sum = f32[6]{{0}} all-reduce(%p), channel_id=1, {written}, to_apply=%add
}}
"""
    assert read(lines).collectives == (
        Collective(kind="all-reduce", count=1, payload=24, group=group, where="entry", cover=None),
    )


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
    assert (loop.cycles, loop.endless) == (70, 0)


def test_a_loop_of_unknown_rounds_is_counted_once_and_named():
    loop = read(LOOP.replace("LIMIT", "negate(%j)"))
    assert (loop.cycles, loop.endless) == (7, 1)


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


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("HloModule empty\n")


@pytest.mark.parametrize(
    ("type_", "size"),
    [
        ("f32[2,3]{1,0:T(8,128)}", 24),
        ("(bf16[4]{0}, /*index=1*/s4[6]{0}, (pred[], u64[1]))", 8 + 3 + 1 + 8),
        ("f8e4m3fn[5]", 5),
        ("token[]", 0),
    ],
)
def test_bytes_of_types(type_, size):
    assert hlo.type_bytes(type_) == size


def experiment(batch_size: int, heads: int = 4) -> config.Experiment:
    phase = config.Phase(
        steps=10, sequence_length=128, max_predictions_per_seq=20, batch_size=batch_size
    )
    return config.Experiment(
        name="small",
        model=config.Model(hidden_size=256, num_attention_heads=heads, num_hidden_layers=2),
        corpus=config.Corpus(sources=("text:none",)),
        phases=(phase,),
        optimizer=config.Optimizer(warmup_steps=1),
    )


def test_bits_drawn_for_the_whole_batch_on_each_device_are_found():
    module = hlo.parse(text("replicated_bits"))
    assert hlo.whole_batch_arrays(module, experiment(48), 0, 4) == ["u16[48,128,256]"]
    assert hlo.whole_batch_arrays(module, experiment(96), 0, 4) == []


def test_a_batch_as_large_as_another_dimension_cannot_be_recognised():
    module = hlo.parse(text("replicated_bits"))
    assert hlo.whole_batch_arrays(module, experiment(256), 0, 4) is None
    assert hlo.whole_batch_arrays(module, experiment(48), 0, 1) is None


@pytest.mark.parametrize(
    ("array", "found"),
    [
        ("u16[48,4,128,128]", True),  # rows, heads, queries, keys
        ("f32[2,48,128,256]", True),  # stacked layers
        ("bf16[6144,256]", True),  # rows and positions flattened
        ("s32[48,128]", False),  # ids alone: small
        ("f32[12,128,256]", False),  # this device's own
    ],
)
def test_what_counts_as_the_whole_batch(array, found):
    lines = f"HloModule small\nENTRY %main () -> f32[] {{\n  ROOT %c = {array} iota()\n}}\n"
    got = hlo.whole_batch_arrays(hlo.parse(lines), experiment(48), 0, 4)
    assert got == ([array] if found else [])
