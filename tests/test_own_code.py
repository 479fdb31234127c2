"""Objectives and encoders of an experiment's own: learned, resumed, refused, and never run unasked.

Those of experiments/ stand for all: ELECTRA and ALiBi here, ELMo in test_elmo.py.
"""

import hashlib
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
from broken import call, fails

import bert_jax
from bert_jax import config
from bert_jax.config import code as code_lib
from bert_jax.errors import InputError
from bert_jax.model import encoder, layers
from bert_jax.pretraining import loaded_model
from bert_jax.training import custom_code, step
from bert_jax.training import mesh as mesh_lib

ROOT = pathlib.Path(__file__).parents[1]
STEPS = ["--set", "phases.0.steps=30", "--set", "phases.1.steps=20", "--set", "run.eval_every=25"]
STEPS += ["--set", "run.checkpoint_every=25"]
# How the small experiment takes each.
USES = {"electra": "data=replace(e.data, code=own(electra), mask_share=1.0, random_share=0.0)"}
USES["alibi"] = "model=replace(e.model, code=own(alibi))"


@pytest.fixture(autouse=True)
def nothing_is_named(monkeypatch):
    """As in a process that has just begun."""
    monkeypatch.setenv("BERT_JAX_CODE", "")
    monkeypatch.setattr(code_lib, "_named_paths", [])
    monkeypatch.setattr(code_lib, "_loaded", {})
    for kept in (encoder._trace, step.abstract_state, step.make_eval_step, loaded_model.logits_fn):
        kept.cache_clear()


def write(folder: pathlib.Path, name: str, changed: tuple[str, str] = ("", "")) -> pathlib.Path:
    """The file of experiments/, whose experiment is the small one; returns it."""
    source = (ROOT / "experiments" / f"{name}.py").read_text()
    assert changed[0] in source
    body = source[: source.index("def experiment()")].replace(*changed)
    varied = f"""
def experiment():
    import small
    from dataclasses import replace
    from bert_jax.config import own
    e = small.experiment()
    return replace(e, {USES[name]})
"""
    file = folder / f"{name}.py"
    file.write_text(body + varied.lstrip())
    return file


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.long) for n in USES])
def run(request, tmp_path_factory):
    """A run of 50 steps with code of its own: (name, file, workdir)."""
    folder = tmp_path_factory.mktemp(request.param)
    small_run.write_text(folder)
    file = write(folder, request.param)
    assert call(["pretrain", str(file), "--workdir", str(folder / "run"), *STEPS]) == (0, "")
    return request.param, file, folder / "run"


def sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_they_learn_and_resume_bit_for_bit_from_the_run_s_own_copy(run, tmp_path):
    _, file, workdir = run
    copy = workdir / "experiment_code.py"
    assert copy.read_bytes() == file.read_bytes()
    again = tmp_path / "again"
    shutil.copytree(workdir, again)
    shutil.rmtree(again / "checkpoints" / "50")
    assert call(["pretrain", "--workdir", str(again), "--code", str(copy)]) == (0, "")
    metrics = (workdir / "metrics.jsonl").read_bytes()
    assert (again / "metrics.jsonl").read_bytes() == metrics
    kept = [w / "checkpoints" / "50" / "_CHECKPOINT_METADATA" for w in (workdir, again)]
    sums = [json.loads(path.read_text())["custom_metadata"]["checksums"] for path in kept]
    assert sums[0] == sums[1]
    lines = [json.loads(line) for line in metrics.splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.1


def test_code_runs_only_if_it_is_named_and_its_hash_is_the_run_s(run, tmp_path):
    name, file, workdir = run
    for command in ("evaluate --workdir {}", "pretrain --workdir {}", "predict --workdir {} wa"):
        fails(command.format(workdir), f"bert-jax: {name}.py: needs {name}()", "--code FILE")
    for command in ("config --workdir {}", "show --workdir {}", "report {}", "checkpoints {}"):
        assert call(command.format(workdir)) == (0, ""), command
    assert not code_lib._loaded
    planted = tmp_path / "planted.py"
    planted.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    fails(f"evaluate --workdir {workdir} --code {planted}", sha256(planted), sha256(file))
    assert not (tmp_path / "ran").exists()
    assert call(f"evaluate --workdir {workdir} --code {file}") == (0, "")
    before, source = sha256(file), file.read_text()
    try:
        file.write_text(source + "# changed\n")
        changed = f"{name}.py:{name}:{before}' -> '{name}.py:{name}:{sha256(file)}"
        fails(["pretrain", str(file), "--workdir", str(workdir), *STEPS], changed)
    finally:
        file.write_text(source)


def test_the_encoder_goes_on_without_the_rest(run):
    """What an objective leaves out is fresh, and predictions of an untrained head are refused."""
    name, file, workdir = run
    model = bert_jax.load(workdir, code=file)
    assert model.embed(["wa wb", "xc"]).shape == (2, 16)
    (hidden,), (_, maps) = model.layer_outputs("wa wb"), model.attention("wa wb")
    assert hidden.shape == (1, 4, 16) and maps.shape == (1, 2, 4, 4)
    code, err = call(["predict", "--workdir", str(workdir), "--code", str(file), "wa [MASK]"])
    assert (code, "masked_lm head" in err) == ((2, True), (0, False))[name == "alibi"]
    out = ["--as", "encoder", "--out", str(workdir / "hf")]
    code, err = call(["export", "--workdir", str(workdir), "--code", str(file), *out])
    assert (code == 2 and "no class for model.code=" in err) == (name == "alibi")


# What breaks a protocol, and what is named.
WRONG = [
    (
        "electra",
        ('"replaced_accuracy": sum_and_count(is_right, is_token),', ""),
        "forward: must return",
    ),
    (
        "electra",
        ("sum_and_count(is_right, is_token * is_replaced)", "is_right"),
        "[2], not float32 [8, 16]",
    ),
    ("electra", ('Rule("generator/.*"), ', ""), "ValueError: generator/"),
    ("electra", ("sums[0] / ", "sums[2] / "), ":114: IndexError"),
    ("electra", ('batch["masked_lm_weights"].sum(), batch', "batch"), "a tuple of 2 scalars"),
    ("electra", ("frozen=True", "frozen=False"), "TypeError: unhashable type"),
    ("electra", ("return Electra(model)", "return model"), "has no attribute"),
    ("electra", ('"encoder": encoder, "gen', '"enc": encoder, "gen'), "['encoder']"),
    ("alibi", ("context.astype(value.dtype)", "context[:, :1]"), "TypeError"),
    (
        "alibi",
        ("softmax(attention_scores(query, key), axis=-1)", "silu(x)"),
        "attention_probabilities",
    ),
    ("alibi", ("    return OwnEncoder(", "    return ("), "must return an OwnEncoder"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "changed", "words"), WRONG)
def test_what_breaks_a_protocol_is_one_line_with_the_file(name, changed, words, tmp_path):
    small_run.write_text(tmp_path)
    file = write(tmp_path, name, changed)
    experiment = config.load(str(file))
    with pytest.raises(InputError) as error:
        custom_code.require_valid(experiment, mesh_lib.make_mesh(experiment.parallelism))
    line = str(error.value)
    assert words in line and line.startswith(str(file)) and "\n" not in line


def test_code_is_one_file_that_names_a_function_at_its_top(tmp_path, monkeypatch):
    small_run.write_text(tmp_path)
    file = write(tmp_path, "electra", ("import jax\n", "import jax\nimport small\n"))
    with pytest.raises(InputError, match=r"not of small\.py"):
        config.load(str(file))
    with pytest.raises(InputError, match="give it a function of a"):
        config.own(lambda: None)
    with pytest.raises(InputError, match=r"model\.code='x'"):
        config.Model(code="x")
    # Dataclasses look in `sys.modules` for what annotations that are text mean.
    future = ('"""ELECTRA', 'from __future__ import annotations\n"""ELECTRA')
    file = write(tmp_path, "electra", future)
    reference = config.load(str(file)).data.code
    monkeypatch.setattr(code_lib, "_loaded", {})
    assert code_lib.load_function(reference).__name__ == "electra"
    # A file that was named runs only if it is the one.
    file.write_text(file.read_text() + "raise SystemExit\n")
    monkeypatch.setattr(code_lib, "_loaded", {})
    with pytest.raises(InputError, match=rf"{reference[-64:]}.*has {sha256(file)}"):
        code_lib.load_function(reference)


def test_electra_takes_no_rows_of_several_documents_and_no_probes(tmp_path):
    small_run.write_text(tmp_path)
    experiment = config.load(str(write(tmp_path, "electra")))
    several = config.override(experiment, ["data.objective=mlm", "data.attention=per_document"])
    with pytest.raises(InputError, match=r"data\.attention: electra"):
        custom_code.require_valid(several, mesh_lib.make_mesh(several.parallelism))
    with pytest.raises(InputError, match=r"run\.probes.*data\.code"):
        config.override(experiment, ["run.probes=a.py"])


@pytest.mark.parametrize(
    ("name", "value"), [("optimizer.clip", "per_replica"), ("run.replay_every", "10")]
)
def test_rows_that_are_compared_are_neither_clipped_in_parts_nor_moved(name, value, tmp_path):
    small_run.write_text(tmp_path)
    file = write(tmp_path, "electra", ("    metrics:", "    compare = None\n    metrics:"))
    experiment = config.load(str(file))
    mesh = mesh_lib.make_mesh(experiment.parallelism)
    custom_code.require_valid(experiment, mesh)
    changed = config.override(experiment, [f"{name}={value}"])
    with pytest.raises(InputError, match=rf"electra\.py: compare: .*{re.escape(name)}"):
        custom_code.require_valid(changed, mesh)


def test_the_page_s_own_example_keeps_to_the_protocol(tmp_path):
    page = (ROOT / "docs" / "howto" / "write-an-objective.md").read_text()
    block = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "my_objective.py").write_text(block)
    shutil.copy(ROOT / "experiments" / "tiny.py", tmp_path)
    experiment = config.load(str(tmp_path / "my_objective.py"))
    custom_code.require_valid(experiment, mesh_lib.make_mesh(experiment.parallelism))
    assert experiment.data.code.startswith("my_objective.py:doubled:")


def test_a_launch_ships_the_code_next_to_the_config(tmp_path):
    from launch import spec

    small_run.write_text(tmp_path)
    file = write(tmp_path, "electra")
    given = spec.make_spec(str(file), [], workdir="w", topology=None, hosts=1)
    assert given.code == {"experiment_code.py": file.read_text()}
    assert given.command("a/experiment.json")[-2:] == ("--code", "a/experiment_code.py")


# --- what the two compute ---


def names_of(name: str, folder: pathlib.Path) -> dict:
    small_run.write_text(folder)
    given = dict(code_lib.code_references(config.load(str(write(folder, name)))))
    return code_lib.load_function(given["data.code"] or given["model.code"]).__globals__


def test_electra_draws_pieces_as_often_as_the_generator_says(tmp_path):
    names = names_of("electra", tmp_path)
    logits = jnp.log(jnp.array([0.5, 0.25, 0.05, 0.2]))
    noise = layers.RowNoise.of(jax.random.key(1), jnp.arange(4_000, dtype=jnp.uint32))
    drawn = names["_sample_tokens"](jnp.broadcast_to(logits, (4_000, 2, 4)), noise)
    shares = np.bincount(np.asarray(drawn).ravel(), minlength=4) / 8_000
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.05, 0.2], atol=0.02)  # four deviations
    assert names["_sample_tokens"](logits[None, None], None).tolist() == [[0]]


@pytest.mark.long
def test_alibi_is_softmax_of_scores_less_slopes_times_distances(tmp_path):
    """In NumPy's float64, from section 3 of the paper; texts that share a row are as if alone."""
    names = names_of("alibi", tmp_path)
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 2, 6, 4, 8)).astype(np.float32)
    mask = np.array([[1] * 6, [1] * 4 + [0] * 2])
    got = names["attend"](query, key, value, jnp.asarray(mask), None, 0.0)
    for b, h in np.ndindex(2, 4):
        n = mask[b].sum()
        q, k, v = (x[b, :n, h].astype(np.float64) for x in (query, key, value))
        distance = np.abs(np.arange(n)[:, None] - np.arange(n))
        scores = q @ k.T / 8**0.5 - 2.0 ** (-2 * (h + 1)) * distance
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        wanted = weights / weights.sum(axis=1, keepdims=True) @ v
        np.testing.assert_allclose(got[b, :n, h], wanted, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [pytest.param("alibi", marks=pytest.mark.nightly), "electra"])
def test_they_compute_the_same_on_a_mesh_that_cuts_the_state(name, tmp_path):
    small_run.write_text(tmp_path)
    file = write(tmp_path, name)
    lines = []
    for chosen in ("replicated", "zero3"):
        words = f"pretrain {file} --workdir {tmp_path / chosen} --set parallelism.state={chosen}"
        assert call(f"{words} --set phases.0.steps=6 --set phases.1.steps=2") == (0, "")
        text = (tmp_path / chosen / "metrics.jsonl").read_text()
        lines.append([json.loads(line) for line in text.splitlines()])
    for ours, theirs in zip(*lines, strict=True):
        assert ours.keys() == theirs.keys()
        numbers = [[line[n] for n in ours if isinstance(ours[n], float)] for line in (ours, theirs)]
        np.testing.assert_allclose(*numbers, rtol=2e-4, atol=1e-5)
