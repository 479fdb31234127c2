"""`bert-jax plan`: what a user types and reads. All compilations but one are a stand-in's."""

import dataclasses
import importlib.util
import json
import os
import time

import jax
import numpy as np
import pytest
import samples
import stand_in
from broken import fails, said
from stand_in import TOO_LARGE, VERSIONS, compiled, text

from bert_jax import config
from bert_jax.data import batches, plans
from bert_jax.errors import InputError
from bert_jax.tools.plan import bundles, estimate, hlo, report, schedule, topology
from bert_jax.tools.plan import compile as compile_lib
from bert_jax.tools.plan.compile import CompileJob, Outcome
from bert_jax.tools.plan.schedule import Kernel
from bert_jax.training import collectives, objective, step
from bert_jax.training.objective import Pretraining, abstract_batch

POD = "experiments/bert_large_pod.py"


def test_a_plan_shows_each_term_and_the_whole_recipe(answers, tmp_path):
    file = tmp_path / "plan.json"
    out = said(f"plan {POD} --topology v5e:8x8 --out {file} --price-per-chip-hour 1.5")
    plan = json.loads(file.read_text())
    (entry,) = plan["slices"]
    phase = entry["phases"][1]
    links = 2 * 7 / 8 * 90e6 / 45e9
    assert phase["seconds"]["other"] == pytest.approx(10e-3)
    assert phase["seconds"]["collectives"] == pytest.approx(links)
    assert phase["seconds"]["latency"] == pytest.approx(2 * 7e-6)
    assert phase["links"]["busy"] == {"axis 1": pytest.approx(links)}
    assert phase["links"]["waits"] == {"all-gather": pytest.approx(links + 14e-6)}
    at_50 = 10e-3 + links * 45 / 50 + 14e-6
    assert phase["links"]["published_total"] == pytest.approx(at_50)
    total = 10e-3 + links + 14e-6
    assert phase["seconds"]["total"] == pytest.approx(total)
    # LARGE at length 512 takes 1,020 GFLOP a row (findings of the compiler study), 256 rows.
    assert phase["model_flops"] == pytest.approx(256 * 1020e9, rel=1e-3)
    assert phase["utilisation"] == pytest.approx(256 * 1020e9 / (total * 64 * 197e12), rel=1e-3)
    assert phase["places_per_second"] == pytest.approx(256 * 512 / total)
    assert entry["hours"] == pytest.approx(1e6 * total / 3600)
    assert entry["cost"] == pytest.approx(entry["hours"] * 64 * 1.5)
    assert "64 chips, 64 devices" in out and "step: 13.5 ms" in out
    method = collectives.METHODS["TPU v5 lite"]
    assert entry["exchange"]["scatter"] == method.scatter
    assert entry["exchange"]["compiler_options"] == dict(method.compiler_options) != {}
    for name, value in method.compiler_options:
        assert f"compiler option: {name}={value}" in out
    assert plan["versions"] == VERSIONS
    assert plan["config_sha256"] == report.config_sha256(config.load(POD))


def test_what_slices_wait_for_each_other_is_a_term(answers, tmp_path):
    """Of a program for two slices of v5e:2x2 that add up a MiB a chip, and for as many others."""
    program = schedule.read_program(hlo.parse(text("summed_slices")))
    answers[0] = lambda job: dataclasses.replace(compiled(job.topology), program=program)
    file, names = tmp_path / "plan.json", "2*v5e:2x2,16*v5e:2x2"
    out = said(f"plan {POD} --topology {names} --out {file}")
    assert out.count("MB a chip") == 4
    for entry, slices in zip(json.loads(file.read_text())["slices"], (2, 16), strict=True):
        phase = entry["phases"][1]
        assert entry["chips"] == 4 * slices and phase["rows_per_device"] == 64 / slices
        assert phase["network"]["bytes"] == 2 * (slices - 1) / slices * 2**20
        busy = phase["network"]["bytes"] / 3.125e9
        assert phase["network"]["busy"] == pytest.approx(busy)
        # The product begins with the sum, and is waited for with it.
        work = sum(phase["seconds"][name] for name in ("products", "copies", "other"))
        most = busy + 2 * estimate.NETWORK_SECONDS
        assert most - work <= phase["seconds"]["network"] < most


def test_kernels_of_unknown_cycles_are_named(answers):
    kernels = tuple(
        Kernel(name=name, count=2, cycles=cycles, bytes=1)
        for name, cycles in [("attention", None), ("norm", 1_500_000)]
    )
    slice_ = topology.parse("v5e:8x8")
    outcome = compiled(slice_)
    schedule = (*outcome.program.schedule, ("loop", 2, (("kernel", 0), ("kernel", 1))))
    program = dataclasses.replace(outcome.program, kernels=kernels, schedule=schedule)
    answers[0] = lambda job: dataclasses.replace(outcome, program=program)
    plan = report.make_plan(config.load(POD), [slice_], "plan", None)
    assert plan["slices"][0]["phases"][0]["seconds"]["kernels"] == pytest.approx(2e-3)
    assert plan["slices"][0]["phases"][0]["kernels"][0]["cycles"] is None
    (line,) = {line for line in report.lines(plan) if "estimated by their bytes alone" in line}
    assert line.endswith("2 x attention")


def test_what_does_not_fit_says_by_how_much_and_what_helps(answers):
    """Here recomputation and micro-batches help, and other shardings do not."""
    answers[0] = lambda job: (
        compiled(job.topology)
        if job.experiment.parallelism.remat == "full"
        or job.experiment.parallelism.accumulation_of(1) > 1
        else TOO_LARGE
    )
    out = said(f"plan {POD} --topology v5e:8x8")
    assert "needs 20.00 GiB, 4.00 more than the 16.00" in out
    assert "fits with parallelism.remat=full: 1.00 GiB" in out
    assert "fits with parallelism.accumulation=1,2: 1.00 GiB" in out, "of this phase alone"
    assert "recipe: unknown" in out


def test_a_single_row_on_a_device_is_not_cut_into_micro_batches(answers):
    answers[0] = lambda job: TOO_LARGE
    assert "take more chips" in said(f"plan {POD} --topology v5e:16x16")
    assert {job.experiment.parallelism.accumulation for job in answers[1:]} == {(1,), (1, 1)}


def test_a_crash_of_the_compiler_is_named_and_the_rest_planned(answers):
    crashed = Outcome(kind="crashed", message="the compiler crashed (SIGSEGV)")
    answers[0] = lambda job: crashed if job.phase else compiled(job.topology)
    out = said(f"plan {POD} --topology v6e:8x8")
    assert "crashed: the compiler crashed (SIGSEGV)" in out and "fits:" in out


def test_a_plan_goes_into_the_workdir_and_a_run_may_start_there(answers, tmp_path):
    workdir = tmp_path / "run"
    said(f"plan {POD} --topology v5e:8x8 --workdir {workdir}")
    assert (workdir / "plan.json").exists()
    from bert_jax.storage.workdir import Workdir

    Workdir(workdir).require_run_or_empty()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("v9:4x4", ["v9:4x4", "v5e:8x8", "v3: 2x2, 4x4, 8x8"]),
        ("v5e:3x5", ["v5e:3x5", "v5e:16x16"]),
        ("tpu7x:3x3x3", ["tpu7x:3x3x3", "tpu7x:2x2x1", "tpu7x:8x8x16"]),
        ("2*v3:8x8", ["2*v3:8x8", "v5e"]),
        ("1*v5e:8x8", ["1*v5e:8x8", "2*v5e:8x8"]),
        ("v5e:8x8 --price-per-chip-hour -1", ["--price-per-chip-hour"]),
        ("v5e:8x8 --price-per-chip-hour nan", ["--price-per-chip-hour"]),
        ("v5e:8x8 --workdir w --out o", ["--out", "--workdir"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(args, words, answers, tmp_path, monkeypatch):
    here = os.path.abspath(POD)
    monkeypatch.chdir(tmp_path)
    fails(f"plan {here} --topology {args}", *words)
    assert not list(tmp_path.iterdir())


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fails(f"plan {POD} --topology v5e:8x8", "[tpu]")


# --- how a worker's end is read -----------------------------------------------------------------


@pytest.fixture
def job(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_lib, "versions", lambda: VERSIONS)
    return CompileJob(config.load(POD), 0, topology.parse("v5e:8x8"))


def test_a_worker_killed_by_a_signal_is_a_crash_of_the_compiler(job, monkeypatch):
    monkeypatch.setattr(compile_lib, "compile_job", stand_in.crash)
    (outcome,) = compile_lib.compile_all([job], print)
    assert (outcome.kind, outcome.message) == ("crashed", "the compiler crashed (SIGSEGV)")


@pytest.mark.long
def test_what_was_compiled_is_kept_and_not_compiled_again(job, monkeypatch, tmp_path):
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "here"))
    monkeypatch.setattr(compile_lib, "compile_job", stand_in.exceed)
    lines = []
    first = compile_lib.compile_all([job], lines.append)
    (kept,) = (tmp_path / "here").rglob("*.json")
    assert first == [Outcome.from_json(kept.read_text())] == [TOO_LARGE]
    os.utime(kept, (time.time() - 9 * 24 * 3600,) * 2)
    plans._prune(str(tmp_path / "here" / "plans"))  # as a run does, after each plan of an epoch
    monkeypatch.setattr(compile_lib, "compile_job", stand_in.leave)
    assert compile_lib.compile_all([job], lines.append) == first and len(lines) == 1
    other = dataclasses.replace(job, phase=1)
    with pytest.raises(RuntimeError, match="v5e:8x8: last line"):
        compile_lib.compile_all([other], lines.append)


def test_a_long_compilation_says_what_it_does_and_how_much_time_it_took(job, monkeypatch):
    monkeypatch.setattr(compile_lib, "compile_job", stand_in.exceed_slowly)
    monkeypatch.setattr(compile_lib, "_REPORT_SECONDS", 0.05)
    lines = []
    compile_lib.compile_all([job], lines.append)
    begin, *waits, end = lines
    assert "zero3" in begin and "v5e:8x8" in begin
    assert waits and all(line.startswith("still compiling, for 0 minutes: ") for line in waits)
    assert end.endswith(": 1.5 CPU minutes") and end.removesuffix(": 1.5 CPU minutes") in waits[-1]


def test_bundles_of_a_kernel_are_found_by_its_instruction(tmp_path):
    (tmp_path / "17-looped.1-00-schedule-analysis_final_bundles.txt").write_text("Schedule")
    (tmp_path / "17-looped.1-01-final_bundles.txt").write_text(text("looped_v5e"))
    cycles = bundles.make_cycle_lookup(str(tmp_path))
    assert (cycles("looped.1"), cycles("looped.2"), cycles("ooped.1")) == (2829, None, None)


def test_a_slice_that_is_named_twice_is_planned_once():
    found = topology.parse_list("v5e:8x8, v5e:8x8,v5e:4x4")
    assert [one.name for one in found] == ["v5e:8x8", "v5e:4x4"]


def test_another_program_is_another_compilation(job):
    plain = config.override(job.experiment, ["model.dropout_rng=threefry8"])

    def key(settings):
        experiment = config.override(plain, settings.split())
        return compile_lib.cache_key(dataclasses.replace(job, experiment=experiment, phase=1))

    others = "run.check_every=100", "run.replay_every=100", "data.objective=mlm"
    before = "phases.0.objective=causal phases.0.max_predictions_per_seq=127"
    keys = {*map(key, (*others, before, "run.log_every=7"))}
    assert len(keys) == 5 and key("run.log_every=9") in keys


@pytest.mark.long
def test_the_optimizer_s_moments_lie_beside_a_replay(job):
    small = ("hidden_size=64", "num_hidden_layers=2", "intermediate_size=128", "vocab_size=512")
    settings = [*(f"model.{field}" for field in small), "model.dropout_rng=threefry8"]
    experiment = config.override(job.experiment, [*settings, "run.replay_every=5"])
    mesh = samples.mesh_of(2, experiment.parallelism)
    parts = (objective.make_objective(experiment, 0), experiment.optimizer)
    state = step.abstract_state(*parts, experiment.parallelism, mesh)
    ((replay, held),) = compile_lib._other_programs(experiment, 0, mesh, state)
    real = jax.device_put(step.init_state(*parts, 0), jax.tree.map(lambda x: x.sharding, state))
    beside = jax.tree.leaves({name: real[name] for name in real if name != "params"})
    assert held == sum(leaf.addressable_shards[0].data.nbytes for leaf in beside)
    assert replay.out_info.shape == (2, 2, 4)


@pytest.mark.long
def test_a_layout_that_is_refused_is_bad_input(job, monkeypatch):
    monkeypatch.setattr(compile_lib, "compile_job", stand_in.refuse)
    with pytest.raises(InputError, match=r"v5e:8x8: phases\.0\.batch_size=3"):
        compile_lib.compile_all([job], print)
    assert compile_lib.compile_all([job], print, "return")[0].kind == "refused"


@pytest.mark.long
def test_a_refusal_ends_what_is_under_way(job, monkeypatch):
    monkeypatch.setattr(compile_lib, "compile_job", stand_in.refuse_the_second)
    monkeypatch.setattr(compile_lib.system, "cores", lambda: 2)  # with one, the second waits
    began = time.monotonic()
    with pytest.raises(InputError, match="v5e:8x8: phases"):
        compile_lib.compile_all([job, dataclasses.replace(job, phase=1)], print)
    assert time.monotonic() - began < 300


def test_an_outcome_is_the_same_when_read_back():
    outcome = compiled(topology.parse("v5e:2x4"))
    assert Outcome.from_json(json.dumps(dataclasses.asdict(outcome))) == outcome


@pytest.mark.parametrize(
    ("message", "kind", "wanted"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (34.12G) exceeds available HBM (15.75G).",
            "too large",
            34.12 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 20.36G of 15.75G hbm. Exceeded hbm capacity by 4.61G.",
            "too large",
            20.36 * 2**30,
        ),
        ("RESOURCE_EXHAUSTED: no room", "too large", None),
        ("INTERNAL: Mosaic failed\nmore", "failed", None),
    ],
)
def test_what_the_compiler_says_when_it_refuses(message, kind, wanted):
    outcome = compile_lib.parse_failure(message)
    assert outcome.kind == kind and "\n" not in outcome.message
    assert outcome.wanted == (wanted and pytest.approx(wanted))


def test_the_abstract_batch_is_what_training_is_fed():
    experiment = config.load("experiments/tiny.py")
    phase = experiment.phases[0]
    shape = batches.BatchShape(
        phase.sequence_length, phase.max_predictions_per_seq, phase.batch_size
    )
    real = samples.train_batches(shape).batch(0, np.arange(phase.batch_size))
    assert {k: (v.shape, v.dtype) for k, v in real.items()} == {
        k: (v.shape, v.dtype) for k, v in abstract_batch(phase, experiment.data).items()
    }


def test_hostile_names_are_shown_as_escapes(answers):
    experiment = config.load(POD)
    plan = report.make_plan(experiment, [], "plan", None) | {"experiment": "a\x1b[31m"}
    assert "\x1b" not in "\n".join(report.lines(plan))


# --- the real compiler --------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the real compiler, is not installed"
)
@pytest.mark.parametrize("name", ["v5e:2x2", "2*v5e:2x2", "4*v5e:2x2"])
def test_the_real_compiler_plans_a_small_step(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    experiment = config.override(
        config.load("experiments/bert_base_pod.py"),
        [
            "model.num_hidden_layers=2",
            "model.hidden_size=256",
            "model.num_attention_heads=4",
            "model.intermediate_size=1024",
            "model.vocab_size=2000",
            "phases.0.batch_size=16",
            "parallelism.accumulation=1",
        ],
    )
    slice_ = topology.parse(name)
    (outcome,) = compile_lib.compile_all([CompileJob(experiment, 0, slice_)], print)
    assert outcome.kind == "compiled"
    assert outcome.whole_batch == () and outcome.program.endless == 0
    shapes = jax.eval_shape(
        lambda: step.init_state(Pretraining(experiment.model), experiment.optimizer, 0)
    )
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    assert state / 4 < outcome.memory["donated"] < state / 2
    kernel = "encoder/layers/query/kernel [2, 256, 256] float32, on a device [2, 64, 256]"
    assert kernel in outcome.parameters
    assert {c.kind for c in outcome.program.collectives} >= {"all-gather", "collective-permute"}
    seconds = estimate.estimate(outcome.program, slice_, outcome.places)
    terms = seconds.terms
    assert all(terms[name] > 0 for name in ("products", "copies", "random_bits", "collectives"))
    assert (terms["network"] > 0) == (slice_.slices > 1)
    assert all(len(one.group) <= 4 for one in outcome.program.collectives), "within a slice"
