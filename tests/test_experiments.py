"""Every experiment file runs, shrunk, and its resolved form is reviewed text."""

import functools
import pathlib

import jax
import numpy as np
import pytest
import samples

from bert_jax import config
from bert_jax.data import batches
from bert_jax.pretraining.pretraining_job import require_runnable
from bert_jax.training import feed, sharding, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective as objective_lib
from bert_jax.training.objective import Pretraining

EXPERIMENTS = sorted((pathlib.Path(__file__).parents[1] / "experiments").glob("*.py"))
GOLDEN = pathlib.Path(__file__).parent / "golden"


def describe(experiment) -> str:
    """The resolved config, and every parameter with its shape, type and place."""
    lines = [f"{path} = {value!r}" for path, value in config.flatten(experiment)]
    objective = objective_lib.pretraining_objective(experiment.model, experiment.data)
    shapes = jax.eval_shape(lambda: step.init_state(objective, experiment.optimizer, 0)["params"])
    mesh = mesh_lib.make_mesh(experiment.parallelism, jax.devices()[:1])
    cuts = sharding.partitions(shapes, experiment.parallelism, mesh, objective.rules)
    lines += ["", "parameters"]
    total = 0
    for path, leaf in jax.tree.leaves_with_path(shapes):
        total += leaf.size
        name = "/".join(key.key for key in path)
        cut = functools.reduce(lambda tree, key: tree[key.key], path, cuts)
        place = "whole" if cut.data is None else f"dimension {cut.data} over devices"
        lines.append(f"{name} {list(leaf.shape)} {leaf.dtype} {place}")
    return "\n".join([*lines, f"in all {total:,}", ""])


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_resolved_experiment_is_as_reviewed(file):
    """After a change that is meant: write describe() to the golden file and read the diff."""
    experiment = config.load(str(file))
    assert experiment.name == file.stem
    assert describe(experiment) == (GOLDEN / f"{file.stem}.txt").read_text()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "modern_17m" else pytest.mark.long)
        for name in ("bert_base", "bert_large_pod", "modern_17m", "modern_base_pod")
    ],
)
def test_experiments_run_a_shrunk_step_a_phase(name):
    experiment = config.load(str(EXPERIMENTS[0].with_name(f"{name}.py")))
    settings = [
        "model.vocab_size=100",
        "model.hidden_size=16",
        "model.num_hidden_layers=" + ("4" if name.startswith("modern") else "2"),
        "model.num_attention_heads=2",
        "model.intermediate_size=32",
        "model.max_position_embeddings=32",
        "data.eval_sequence_length=16",
        "phases.0.sequence_length=16",
        "phases.0.max_predictions_per_seq=5",
    ]
    if len(experiment.phases) > 1:
        settings += ["phases.1.sequence_length=32", "phases.1.max_predictions_per_seq=10"]
    if name.startswith("modern"):
        settings += ["model.local_window=4"]
        settings += [f"phases.{i}.batch_size=36" for i in range(len(experiment.phases))]
    experiment = config.override(experiment, settings)
    mesh = mesh_lib.make_mesh(experiment.parallelism)
    require_runnable(experiment, mesh)
    state = step.init_state(Pretraining(experiment.model), experiment.optimizer, experiment.seed)
    for number, phase in enumerate(experiment.phases):
        objective = objective_lib.pretraining_objective(
            experiment.model_of(number), experiment.data
        )
        shape = batches.BatchShape(
            phase.sequence_length, phase.max_predictions_per_seq, phase.batch_size
        )
        train = samples.train_batches(shape, number)
        parts = experiment.parallelism.accumulation_of(number)
        layout = experiment.optimizer, experiment.parallelism, parts, mesh
        train_step = step.make_train_step(step.StepSpec(objective, *layout), experiment.total_steps)
        key = step.phase_key(experiment.model, experiment.seed, number)
        rows = np.arange(phase.batch_size)
        places = mesh_lib.batch_sharding(mesh)
        batch = feed.place(train.batch(0, rows), rows, phase.batch_size, places)
        state, window = train_step(state, step.empty_window(objective.metrics), batch, key)
        assert np.isfinite(window["masked_lm_loss"]).all() and window["bad_steps"][0] == 0
    assert int(state["step"]) == len(experiment.phases)


@pytest.mark.parametrize(
    ("name", "width", "pieces", "parameters"),
    [
        ("bert_base", 768, 30_522, 110_106_428),
        ("bert_large", 1_024, 30_522, 336_226_108),
        # 149M and 395M (Warner et al. 2024), a head for the next sentence that learns nothing, and
        # the scale of the norm that the first layer lacks.
        ("modern_base_pod", 768, 50_368, 149_655_232 + 770 * 769 + 768),
        ("modern_large_pod", 1_024, 50_368, 395_881_664 + 1_026 * 1_025 + 1_024),
    ],
)
def test_the_sizes_are_the_papers(name, width, pieces, parameters):
    """110M and 340M (Devlin et al. 2018), less the padding of the vocabulary."""
    text = (GOLDEN / f"{name}.txt").read_text()
    found = int(text.split("in all ")[1].replace(",", ""))
    assert found - -pieces % 1_024 * (width + 1) == parameters
