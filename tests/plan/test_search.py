"""The search for the best layout, over compilations that a stand-in makes up."""

import dataclasses
import json

import pytest
from stand_in import TOO_LARGE, compiled, program

from bert_jax import cli, config
from bert_jax.plan import estimate, search, topology
from bert_jax.plan.compile import Job, Outcome
from bert_jax.plan.variants import Variant, variant_of

POD = "experiments/bert_large_pod.py"
UNROLLED = ["parallelism.layer_loop=unroll"]
# The replicated float32 step at 8 sequences a chip, which is too large.
REPLICATED = [
    "phases.0.batch_size=128",
    "phases.1.batch_size=128",
    "model.compute_dtype=float32",
    "optimizer.gradient_reduction=float32",
    "parallelism.state=replicated",
    "parallelism.remat=none",
]
SLICE = topology.parse("v5e:8x8")
SMALL_SLICE = topology.parse("v5e:4x4")
FULL = 0.98 * SLICE.device_memory  # the compiler keeps a little for itself


def searched(settings=(), slice_=SLICE):
    experiment = config.override(config.load(POD), settings)
    return search.search(experiment, slice_, lambda line: None)


def layout(job: Job) -> Variant:
    return variant_of(job.experiment, job.phase)


def layers(job: Job) -> int:
    return job.experiment.model.num_hidden_layers


def bytes_of(job: Job) -> float:
    """About what the compiler wants for LARGE in float32 on 16 chips, of 8 rows each."""
    variant, phase = layout(job), job.experiment.phases[job.phase]
    tokens = 8 * phase.sequence_length / variant.accumulation
    kept = {"none": 160e3, "dots": 45e3, "full": 5e3}[variant.remat]
    state = {"replicated": 320e6, "zero1": 120e6, "zero3": 10e6}[variant.state]
    return 5e8 + layers(job) * (state + tokens * kept)


def realistic(job: Job) -> Outcome:
    """What keeps more is faster here, and does not always fit."""
    if bytes_of(job) > FULL:
        return TOO_LARGE
    slower = {"none": 1.0, "dots": 1.1, "full": 1.3}[layout(job).remat]
    slower *= {"replicated": 1.0, "zero1": 1.02, "zero3": 1.1}[layout(job).state]
    slower *= 1 + 0.05 * layout(job).accumulation
    tokens = job.experiment.phases[job.phase].sequence_length
    outcome = compiled(job.topology, int(1e4 * tokens * layers(job) * slower))
    return dataclasses.replace(outcome, memory=outcome.memory | {"peak": int(bytes_of(job))})


@pytest.fixture
def clock(monkeypatch, answers):
    """Time that passes while something is compiled: seconds a compilation, two side by side."""
    now = {"seconds": 0.0, "each": 60.0}

    def compile_all(jobs, say, refusals="raise", seconds=None):
        asked = [job for job in jobs if job not in answers]
        needed = now["each"] * ((len(asked) + 1) // 2)
        if seconds is not None and needed > seconds:
            now["seconds"] += seconds
            raise TimeoutError
        now["seconds"] += needed
        answers.extend(asked)
        return [answers[0](job) for job in jobs]

    monkeypatch.setattr(search, "compile_all", compile_all)
    monkeypatch.setattr("bert_jax.plan.remedies.compile_all", compile_all)
    monkeypatch.setattr(search.time, "monotonic", lambda: now["seconds"])
    return now


def best_of_all(settings, slice_):
    """Hours and settings of the best recipe, by trying every one."""
    whole = search._Search(  # the space that is searched, all of it
        config.override(config.load(POD), settings), slice_, lambda line: None
    )
    whole._try(whole.recipes, float("inf"))
    for recipe in whole.recipes:
        whole.given_up.clear()
        whole._try([recipe], float("inf"))
    found = whole._ranking()[0]
    return found.hours, found.recipe.settings()


def test_layouts_are_ranked_by_the_hours_of_the_recipe(answers):
    """The stand-in likes zero1, no recomputation, and two micro-batches in the second phase."""

    def cycles(job: Job) -> int:
        parallelism = job.experiment.parallelism
        liked = (
            (parallelism.state == "zero1")
            + (parallelism.remat == "none")
            + (parallelism.accumulation_of(job.phase) == 1 + job.phase)
        )
        return 1_000_000 * (40 - liked) * layers(job)

    answers[0] = lambda job: compiled(job.topology, cycles(job))
    found = searched()
    assert found["ranked"][0]["settings"] == [
        "parallelism.state=zero1",
        "parallelism.remat=none",
        "parallelism.accumulation=1,2",
    ]
    assert len(found["ranked"]) == 3 and not found["cut_short"]
    hours = [one["hours"] for one in found["ranked"]]
    assert hours == sorted(hours)
    places = compiled(SLICE).places
    step = estimate.estimate(program(37_000_000 * 24), SLICE, places, "bfloat16")
    assert hours[0] == pytest.approx(1e6 * step.total / 3600)


def test_layers_in_a_loop_are_compiled_whole_at_once(answers):
    found = searched()
    assert {layers(job) for job in answers[1:]} == {24}
    assert all(one["whole"] and one["layers"] == 24 for one in found["ranked"])


def test_unrolled_layers_are_compiled_few_first_then_the_best_whole(answers):
    answers[0] = lambda job: compiled(job.topology, 1_000_000 * layers(job))
    found = searched(UNROLLED)
    counts = [layers(job) for job in answers[1:]]
    assert counts == sorted(counts) and set(counts) == {search.SHORT, 24}
    assert counts.count(24) == 2 * 3
    assert all(one["whole"] for one in found["ranked"])


def test_unrolled_what_does_not_fit_whole_is_passed_over(answers):
    answers[0] = lambda job: (
        TOO_LARGE
        if job.experiment.parallelism.state != "zero3" and layers(job) > search.SHORT
        else compiled(job.topology)
    )
    found = searched(UNROLLED)
    assert found["ranked"]
    assert all("parallelism.state=zero3" in one["settings"] for one in found["ranked"])


def test_unrolled_what_few_layers_show_not_to_fit_is_not_compiled_whole(answers):
    """Nearly all memory with few layers: what the others keep at least is too much."""

    def outcome(job: Job) -> Outcome:
        memory = SLICE.device_memory - 2**20 if layout(job).remat != "full" else 2**30
        one = compiled(job.topology)
        return dataclasses.replace(one, memory=one.memory | {"peak": int(memory)})

    answers[0] = outcome
    found = searched(UNROLLED)
    assert {layout(job).remat for job in answers[1:] if layers(job) == 24} == {"full"}
    assert all("parallelism.remat=full" in one["settings"] for one in found["ranked"])


def test_what_is_named_fits_and_is_the_best_of_all(answers):
    """The own layout of this experiment is too large."""
    answers[0] = realistic
    found = searched(REPLICATED, SMALL_SLICE)
    assert found["unfit"] > 0 and not found["cut_short"]
    assert found["compiled"] < found["possible"]
    for one in found["ranked"]:
        assert one["whole"] and one["peak"] < FULL
    assert (found["ranked"][0]["hours"], found["ranked"][0]["settings"]) == best_of_all(
        REPLICATED, SMALL_SLICE
    )


@pytest.mark.parametrize("settings", [REPLICATED, REPLICATED + UNROLLED])
@pytest.mark.parametrize("each", [20.0, 60.0, 150.0])
def test_a_search_ends_in_its_time_with_something_that_fits(each, settings, answers, clock):
    clock["each"] = each
    answers[0] = realistic
    found = searched(settings, SMALL_SLICE)
    assert clock["seconds"] <= 15 * 60
    assert found["ranked"][0]["whole"]
    assert all(one["peak"] < FULL for one in found["ranked"])
    if each != 60:
        assert found["cut_short"] == (each > 60)


def test_without_time_for_a_whole_one_those_of_few_layers_are_told_as_such(answers, clock):
    clock["each"] = 290.0
    answers[0] = realistic
    found = searched(REPLICATED + UNROLLED, SMALL_SLICE)
    assert found["cut_short"] and found["ranked"]
    assert {(one["layers"], one["whole"]) for one in found["ranked"]} == {(search.SHORT, False)}
    refused = [job for job in answers[1:] if layers(job) == 24 and bytes_of(job) > FULL]
    assert refused
    for job in refused:
        own = (
            f"parallelism.state={layout(job).state}",
            f"parallelism.remat={layout(job).remat}",
        )
        assert all(tuple(one["settings"][:2]) != own for one in found["ranked"])


def test_without_time_nothing_is_begun(answers, monkeypatch):
    monkeypatch.setattr(search, "SECONDS", -1.0)
    found = searched()
    assert found["cut_short"] and not found["ranked"] and len(answers) == 1


def test_what_is_far_behind_in_one_phase_is_not_compiled_in_the_others(answers):
    answers[0] = lambda job: compiled(
        job.topology, 1_000_000_000 if layout(job).state == "replicated" else 10_000_000
    )
    searched()
    tried = [job.phase for job in answers[1:] if layout(job).state == "replicated"]
    assert tried and set(tried) == {1}


def test_what_does_not_fit_in_one_phase_is_not_compiled_in_the_others(answers):
    answers[0] = lambda job: (
        TOO_LARGE if job.phase and layout(job).remat == "none" else compiled(job.topology)
    )
    found = searched()
    tried = [job.phase for job in answers[1:] if layout(job).remat == "none"]
    assert tried and set(tried) == {1}
    assert found["unfit"] == len(tried)


def test_where_little_fits_what_keeps_least_is_tried_soon(answers):
    least = Variant("zero3", "full", 4)
    answers[0] = lambda job: (
        compiled(job.topology) if job.phase == 0 or layout(job) == least else TOO_LARGE
    )
    found = searched()
    assert found["ranked"][0]["settings"] == [
        "parallelism.state=zero3",
        "parallelism.remat=full",
        "parallelism.accumulation=1,4",
    ]
    asked = [layout(job) for job in answers[1:] if job.phase]
    assert asked.index(least) < 5


def test_where_nothing_fits_nothing_is_named(answers, capsys):
    answers[0] = lambda job: TOO_LARGE
    assert not searched()["ranked"]
    assert cli.main(["plan", POD, "--topology", SLICE.name, "--search"]) == 0
    assert "none that fits was found" in capsys.readouterr().out


def test_a_search_is_told_and_looks_for_no_other_remedies(answers, capsys, tmp_path):
    answers[0] = realistic
    settings = [word for setting in REPLICATED for word in ("--set", setting)]
    file = tmp_path / "plan.json"
    arguments = ["plan", POD, "--topology", SMALL_SLICE.name, "--search", "--out", str(file)]
    assert cli.main([*arguments, *settings]) == 0
    out = capsys.readouterr().out
    (entry,) = json.loads(file.read_text())["slices"]
    first = entry["search"]["ranked"][0]
    assert f"GiB: --set {' --set '.join(first['settings'])}" in out
    assert "does not fit" in out and "fits with" not in out


def test_settings_of_a_search_are_settings(answers):
    for one in searched()["ranked"]:
        config.override(config.load(POD), one["settings"])


def test_the_experiment_s_own_micro_batches_are_tried(answers):
    """Though 3 is no power of two."""
    answers[0] = lambda job: compiled(job.topology, 10_000_000 + (layout(job).accumulation != 3))
    found = searched(["phases.1.batch_size=768", "parallelism.accumulation=1,3"])
    assert found["ranked"][0]["settings"][-1] == "parallelism.accumulation=1,3"


def test_the_memory_bound_is_arithmetic():
    model = dataclasses.replace(
        config.load(POD).model,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=256,
        num_attention_heads=1,
        vocab_size=1000,
    )
    parameters = 2 * (4 * 64 * 64 + 2 * 64 * 256) + 64_000
    for parallelism, state in (
        ("replicated", 12 * parameters),
        ("zero1", 3 * parameters + 2 * parameters),
        ("zero3", 3 * parameters),
    ):
        for remat, kept in (("full", 64), ("none", 64 + 256)):
            variant = Variant(parallelism, remat, 1)
            least = search.least_bytes(model, variant, 4, 1000)
            assert least == state + 2 * 2 * 1000 * kept


def test_what_cannot_fit_by_arithmetic_is_not_compiled(answers):
    settings = ["phases.1.batch_size=65536", "phases.1.steps=1000"]
    experiment = config.override(config.load(POD), settings)
    assert searched(settings)["excluded"] > 0
    shards = 64
    for job in answers[1:]:
        phase = job.experiment.phases[job.phase]
        rows = phase.batch_size // shards // layout(job).accumulation
        least = search.least_bytes(
            experiment.model, layout(job), shards, rows * phase.sequence_length
        )
        assert least <= SLICE.device_memory
