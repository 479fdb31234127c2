"""Each benchmark runs at its smallest and keeps what it prints. How fast is no test's business."""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
import small_run

from benchmarks import embed, measure, serve, torch_step, worker


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


@pytest.mark.nightly
def test_step_prints_its_figures(tmp_path):
    found = figures("step", tmp_path, "--shapes", "micro", "--rounds", 1)
    assert 0 < found["micro_float32_utilisation"] < 1
    assert found["micro_bfloat16_tokens_per_second"] > 0


def test_data_prints_its_figures(tmp_path):
    found = figures("data", tmp_path, "--megabytes", 0.1, "--rounds", 1)
    assert found["tokenizers"] > 0
    assert json.loads((tmp_path / "data.json").read_text())["details"]["text_to_ids"]["equal"] == 1


@pytest.mark.nightly
def test_long_rows_prints_its_figures(tmp_path):
    arguments = ("--short-steps", 8, "--steps", 8, "--length", 128, "--rows", 2)
    arguments += ("--set", "data.eval_rows=16")
    found = figures("long_rows", tmp_path, *arguments)
    assert {"loss_64", "loss_128", "unigram_loss"} == found.keys()
    assert 0 < found["loss_128"] < 2 * found["unigram_loss"]


@pytest.mark.nightly
def test_loop_prints_its_figures(tmp_path):
    arguments = ("--rounds", 1, "--laps", 1, "--state", "micro")
    assert 0 < figures("loop", tmp_path, *arguments)["save_blocking_share"] < 1


@pytest.mark.nightly
def test_scale_run_prints_its_figures_goes_on_and_cleans_up(tmp_path):
    sizes = ("--documents", 80_000, "--ids", 5e7, "--source-gigabytes", 0.01)
    folder = ("--folder", tmp_path / "scale")
    settings = os.environ | small_run.settings(devices=1)
    command = [sys.executable, "-m", "benchmarks.scale_run", *map(str, (*sizes, *folder))]
    subprocess.run([*command, "--only", "plan_128"], env=settings, check=True, capture_output=True)
    (planned,) = json.loads((tmp_path / "scale" / "measured.json").read_text()).values()
    found = figures("scale_run", tmp_path, *sizes, *folder)
    assert found["plan_128_cpu_seconds"] == pytest.approx(planned["cpu_seconds"], rel=1e-3)
    assert found["plan_128_bytes_a_row"] < 24
    assert found["start_warm_held_gb"] > 0
    assert found["batches_planning_a_second"] > 0
    assert not (tmp_path / "scale").exists()


@pytest.mark.nightly
def test_start_prints_its_figures(tmp_path):
    experiment = small_run.write_text(tmp_path / "small")
    assert figures("start", tmp_path, experiment, "--rounds", 1)["warm_cpu_seconds"] > 0


@pytest.mark.skipif(
    not (measure.ROOT / ".venv-torch" / "installed").exists(), reason="`make bench-torch` first"
)
def test_torch_step_prints_its_figures(tmp_path):
    arguments = ("--shapes", "micro", "--rounds", 1, "--compiled", "")
    assert figures("torch_step", tmp_path, *arguments)["micro_float32_stock"] > 0


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
        "ours": [(2.0, 4.0), (1.0, 2.0), (4.0, 8.0)],
        "peer 32": [(3.0, 3.0), (6.0, 6.0), (8.0, 8.0)],
        "peer 64": [(4.0, 9.0), (5.0, 9.0), (5.0, 9.0)],
    }
    first = {"ours": (4.0, 5.0), "peer 32": (3.0, 4.0), "peer 64": (2.0, 3.0)}
    found = embed.figures(seconds, first, 10, 1e-6)
    assert (found["sentences_per_second"], found["peer_sentences_per_second"]) == (5.0, 2.0)
    assert (found["ratio"], found["ratio_median"]) == (3.0, 2.5)
    assert (found["cpu_ratio"], found["cpu_ratio_median"]) == (1.5, 1.5)
    assert (found["first_ratio"], found["largest_difference"]) == (0.5, 1e-6)


@pytest.mark.nightly
def test_serve_prints_its_figures(tmp_path):
    flags = {"--sentences": 20, "--seconds": 1, "--rounds": 1, "--clients": "1,3"}
    found = figures("serve", tmp_path, *itertools.chain(*flags.items()), "--max-length", 16)
    assert found["requests_per_second_1"] > 0 and found["p99_ms_3"] >= found["p50_ms_3"]
    assert found["refused_3"] == 0


def test_serve_is_compared_in_sentences_a_second_and_cpu_time():
    turn = {"wall": 10.0, "cpu": 4.0, "answered": 100, "refused": 1, "p50": 0.1, "p99": 0.4}
    found = serve.summary([(5.0, 8.0), (4.0, 6.0), (6.0, 9.0)], {8: [turn] * 3}, 400)
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


def test_an_error_of_a_worker_is_raised_where_it_was_asked():
    with (
        worker.Worker(sys.executable, "benchmarks.ours", 1) as ours,
        pytest.raises(RuntimeError, match=r"(?s)benchmarks\.ours.*nothing"),
    ):
        ours.ask("step", entry="nothing")
