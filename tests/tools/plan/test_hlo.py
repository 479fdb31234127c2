"""The text of modules, parsed."""

import pytest
from stand_in import text

from bert_jax import config
from bert_jax.tools.plan import hlo


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


def test_biases_of_all_layers_are_not_taken_for_the_tokens_of_the_batch():
    lines = "HloModule small\nENTRY %main () -> f32[] {\n  ROOT %c = f32[98304] iota()\n}\n"
    large_run = experiment(768)  # 768 x 128 tokens are as many as 24 x 4,096 biases
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096}
    large_run = config.override(large_run, [f"model.{k}={v}" for k, v in sizes.items()])
    assert hlo.whole_batch_arrays(hlo.parse(lines), large_run, 0, 256) == []
