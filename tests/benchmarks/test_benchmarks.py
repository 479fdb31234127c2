"""Each benchmark runs at its smallest and keeps what it prints. How fast is no test's business."""

import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import small_run

from benchmarks import embed, gpu, measure, ours, serve, torch_step
from bert_jax.config import Parallelism
from bert_jax.model import cudnn_attention
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step
from bert_jax.training.objective import Pretraining


def figures(name, folder, *arguments):
    settings = small_run.settings(devices=1)
    settings["XLA_FLAGS"] += " --xla_backend_optimization_level=0"  # compiled quickly
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments), "--out", str(folder)],
        env=os.environ | settings,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    kept = json.loads((folder / f"{name}.json").read_text())
    last = done.stdout.decode().splitlines()[-1]
    assert last == " ".join([f"{name}:", *(f"{k}={v}" for k, v in kept["figures"].items())])
    assert {"date", "python", "versions", "cpu", "commit"} <= kept["made_on"].keys()
    assert str(pathlib.Path.home()) not in json.dumps(kept)
    return kept["figures"]


# Of a command, figures that are above 0.
SMALLEST = {
    "step --shapes micro --rounds 1": "micro_float32_utilisation micro_bfloat16_utilisation",
    "loop --rounds 1 --laps 1 --state micro": "save_blocking_share bare_step_wall_us",
    "start {experiment} --rounds 1": "cold_wall_seconds warm_cpu_seconds",
    "scale_checkpoint --experiment tiny": "save_cpu_s restore_cpu_s checksums_cpu_s",
    "scale_text --sizes 1,2 --folder {folder}": "two_workers_same_bytes most_anonymous_mb",
    "gpu --cases micro,micro_packed,micro_bert --rounds 1 --steps 1 --python none": (
        "micro_auto_tokens_per_second micro_packed_xla_utilisation micro_bert_xla_utilisation"
    ),
    "serve --sentences 20 --seconds 1 --rounds 1 --clients 1,3 --max-length 16": "p99_ms_3 ratio_1",
}


@pytest.mark.nightly
@pytest.mark.parametrize("command", SMALLEST)
def test_a_benchmark_prints_its_figures(command, tmp_path):
    experiment = small_run.write_text(tmp_path / "small")
    words = command.format(experiment=experiment, folder=tmp_path / "made").split()
    found = figures(words[0], tmp_path, *words[1:])
    assert all(found[name] > 0 for name in SMALLEST[command].split())
    assert not (tmp_path / "made").exists()


@pytest.mark.long
def test_data_prints_its_figures(tmp_path):
    assert figures("data", tmp_path, "--documents", 8, "--rounds", 1)["tokenizers"] > 0
    assert json.loads((tmp_path / "data.json").read_text())["details"]["text_to_ids"]["equal"] == 1


@pytest.mark.nightly
def test_long_rows_prints_its_figures(tmp_path):
    settings = """phases.0.steps=8 phases.1.steps=8 phases.1.batch_size=2 data.eval_rows=16
        phases.1.sequence_length=128 phases.1.max_predictions_per_seq=38 optimizer.warmup_steps=1
        data.eval_sequence_length=128 data.eval_max_predictions_per_seq=20"""
    sets = [word for setting in settings.split() for word in ("--set", setting)]
    found = figures("long_rows", tmp_path, *sets)
    assert {"loss_64", "loss_128", "unigram_loss"} == found.keys()
    assert 0 < found["loss_128"] < 2 * found["unigram_loss"]


@pytest.mark.nightly
def test_scale_run_prints_its_figures_goes_on_and_cleans_up(tmp_path):
    folder = tmp_path / "scale"
    folder.mkdir()
    (folder / "measured.json").write_text('{"plan_128": {"cpu_seconds": 7.0}}')
    found = figures("scale_run", tmp_path, "--size", 1 / 80, "--folder", folder)
    assert found["plan_128_cpu_seconds"] == 7.0, "what was measured is not measured again"
    assert found["plan_512_bytes_a_row"] < 24
    assert found["start_warm_held_gb"] > 0 and found["batches_planning_a_second"] > 0
    assert not folder.exists()


@pytest.mark.skipif(
    not (measure.ROOT / ".venv-torch" / "installed").exists(), reason="`make bench-torch` first"
)
@pytest.mark.parametrize("case", ["micro", "micro_bert"])
def test_gpu_measures_transformers_too(tmp_path, case):
    found = figures("gpu", tmp_path, "--cases", case, "--rounds", 1, "--steps", 1)
    assert found[f"{case}_torch_eager_tokens_per_second"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", gpu.NAMES)
def test_each_case_of_gpu_has_attention_by_cudnn(monkeypatch, name):
    """Its step is lowered for CUDA, with two of its rows."""
    monkeypatch.setattr(cudnn_attention, "refusal", lambda *_: None)
    case = gpu.case_of(name)
    batch = gpu.make_batch(case, 2, packed=name.endswith("_packed"))
    assert ("example_numbers" in batch) == name.endswith("_packed")
    model, parallelism, mesh = case.model, Parallelism(remat="dots"), mesh_lib.one_device()
    spec = step.StepSpec(Pretraining(model), ours.OPTIMIZER, parallelism, 1, mesh)
    state = step.abstract_state(spec.objective, spec.optimizer, parallelism, mesh)
    window = jax.eval_shape(lambda: step.empty_window(spec.objective.metrics))
    key = jax.eval_shape(lambda: step.phase_key(model, 0, 0))
    traced = step.make_train_step.__wrapped__(spec, 10).trace(state, window, batch, key)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$") == (4 if model.kind == "modern" else 2)


def test_packed_rows_of_gpu_are_several_documents():
    batch = gpu.make_batch(gpu.case_of("modern_17m"), 3, packed=True)
    numbers, positions = batch["example_numbers"], batch["positions"]
    assert numbers.min() == 1 and (numbers.max(axis=1) > 1).all()
    begins = np.diff(numbers, axis=1, prepend=0)
    assert set(np.unique(begins)) == {0, 1} and ((positions == 0) == (begins == 1)).all()
    assert set(np.unique(np.diff(positions, axis=1)[begins[:, 1:] == 0])) == {1}


@pytest.mark.skipif(
    not (measure.ROOT / ".venv-torch" / "installed").exists(), reason="`make bench-torch` first"
)
def test_torch_step_prints_its_figures(tmp_path):
    arguments = ("--shapes", "micro", "--rounds", 1, "--compiled", "")
    assert figures("torch_step", tmp_path, *arguments)["micro_float32_stock"] > 0


@pytest.mark.skipif(
    not (measure.ROOT / ".venv-torch" / "curves").exists(), reason="`make bench-curves` first"
)
def test_curves_has_a_point_of_each_trainer_and_a_picture(tmp_path):
    picture = tmp_path / "curves.png"
    arguments = ("--sizes", "tiny", "--cpu-seconds", 5, "--folder", tmp_path / "runs")
    assert len(figures("curves", tmp_path, *arguments, "--picture", picture)) == 3
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(
    not (measure.ROOT / ".venv-torch" / "embed").exists(), reason="`make bench-embed` first"
)
def test_embed_prints_its_figures_and_both_sides_agree(tmp_path):
    arguments = ("--sentences", 9, "--rounds", 1, "--batches", "2,4", "--threads", 1)
    found = figures("embed", tmp_path, *arguments)
    assert found["sentences_per_second"] > 0 and found["first_ratio"] > 0
    assert found["largest_difference"] < 1e-5


def test_embed_is_compared_with_the_peer_s_best_batch():
    seconds = {
        "ours": [(4.0, 2.0), (2.0, 1.0), (8.0, 4.0)],
        "peer 32": [(3.0, 3.0), (6.0, 6.0), (8.0, 8.0)],
        "peer 64": [(9.0, 4.0), (9.0, 5.0), (9.0, 5.0)],
    }
    first = {"ours": (5.0, 4.0), "peer 32": (4.0, 3.0), "peer 64": (3.0, 2.0)}
    found = embed.figures(seconds, first, 10, 1e-6)
    assert (found["sentences_per_second"], found["peer_sentences_per_second"]) == (5.0, 2.0)
    assert (found["ratio"], found["ratio_median"]) == (3.0, 2.5)
    assert (found["cpu_ratio"], found["cpu_ratio_median"]) == (1.5, 1.5)
    assert (found["first_ratio"], found["largest_difference"]) == (0.5, 1e-6)


def test_serve_is_compared_in_sentences_a_second_and_cpu_time():
    turn = {"wall": 10.0, "cpu": 4.0, "answered": 100, "refused": 1, "p50": 0.1, "p99": 0.4}
    found = serve.summary([(8.0, 5.0), (6.0, 4.0), (9.0, 6.0)], {8: [turn] * 3}, 400)
    assert (found["embed_sentences_per_second"], found["requests_per_second_8"]) == (80.0, 10.0)
    assert (found["ratio_8"], found["cpu_ratio_8"]) == (0.125, 0.5)
    assert (found["p50_ms_8"], found["p99_ms_8"], found["refused_8"]) == (100.0, 400.0, 3)


def test_a_clock_gives_cpu_time_first():
    cpu, wall = measure.clocked(lambda: time.sleep(0.1))
    assert cpu < 0.1 <= wall


def test_the_faster_peer_is_the_one_we_are_compared_with():
    seconds = {
        "ours float32": [2.0, 1.0, 4.0],
        "stock float32 eager": [9.0, 8.0, 9.0],
        "stock float32 compiled": [3.0, 6.0, 8.0],
        "patched float32 eager": [1.0, 1.0, 1.0],
    }
    assert torch_step.ratios(seconds, "float32", "stock") == (3.0, 3.0)


def test_every_other_round_goes_backwards():
    order = []
    turns = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert measure.in_turns(turns, 2) == {"a": [1, 4], "b": [2, 3]}
    assert order == ["a", "b", "b", "a"]


def test_an_error_of_a_peer_is_raised_where_it_was_asked(tmp_path):
    python, code = tmp_path / "python", "from benchmarks import measure; measure.answer({})"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}'\n")
    python.chmod(0o755)
    with measure.peer(str(python), "it", 1) as peer:
        peer("update", said="yes")
        assert peer("copy") == {"said": "yes"}
        with pytest.raises(RuntimeError, match="it: ended with 1 when asked to nothing"):
            peer("nothing")
