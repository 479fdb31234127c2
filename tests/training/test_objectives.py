"""Pre-training with each objective, from text to its lines and what looks at them."""

import json
import math

import pytest
from broken import call
from small_run import OBJECTIVES, pretrain, write_text

# What names in its lines begin with.
LEARNED = {
    "mlm": {"masked_lm"},
    "mlm_sop": {"masked_lm", "sentence_order"},
    "causal": {"next_piece"},
    "phases": {"next_piece", "masked_lm", "next_sentence"},
}
WORDS = {
    "masked_lm": "masked LM",
    "sentence_order": "sentence order",
    "next_piece": "next piece",
    "next_sentence": "next sentence",
}


pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=OBJECTIVES)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    file = write_text(folder)
    outcome, shown = pretrain(file, folder / "run", *OBJECTIVES[request.param])
    assert outcome == "finished"
    return request.param, folder, file, shown


def test_lines_speak_of_what_is_learned_alone(run):
    objective, folder, _, shown = run
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    assert {line["kind"] for line in lines} == {"train", "evaluation"}
    losses = {name for line in lines for name in line if name.endswith("_loss")}
    losses -= {"unigram_loss", "worst_step_loss"}
    assert losses == {f"{task}_loss" for task in LEARNED[objective]}
    last = [line for line in lines if line["kind"] == "evaluation"][-1]
    scored = losses - {"next_piece_loss"} if objective == "phases" else losses
    assert last["loss"] == pytest.approx(sum(last[name] for name in scored))
    assert not any(scored & line.keys() and losses - scored & line.keys() for line in lines)
    assert last["unigram_loss"] < math.log(45)
    for task in WORDS:
        assert (WORDS[task] in shown) == (task in LEARNED[objective]), task
    if scored == {"next_piece_loss"}:
        assert last["perplexity"] == pytest.approx(math.exp(last["next_piece_loss"]))


def test_what_looks_at_a_run_speaks_of_that_too(run):
    objective, folder, file, _ = run
    place, sets = folder / "run", " ".join(f"--set {s}" for s in OBJECTIVES[objective])
    for command in (
        f"show {file} --workdir {place} --step 3 {sets}",
        f"report {place}",
        f"evaluate --workdir {place}",
    ):
        assert call(command) == (0, ""), command
    page = (place / "report.html").read_text().split("<table>")[0].lower()
    for task, words in WORDS.items():
        words = words.lower().replace(" ", "-") if "sentence" in words else words.lower()
        assert (f"{words} accuracy" in page) == (task in LEARNED[objective]), task
    assert call(f"doctor {place}")[0] in (0, 1)


def test_a_run_is_exported_as_what_it_learned_alone(run):
    objective, folder, _, _ = run
    for form in ("causal_lm", "masked_lm"):
        code, line = call(f"export --workdir {folder / 'run'} --as {form} --out {folder / form}")
        wanted = {"causal": "causal_lm"}.get(objective, "masked_lm")
        assert (code == 0) == (form == wanted), line
        assert (folder / form / "config.json").exists() == (code == 0)


def test_what_reads_from_one_side_fills_no_mask(run):
    objective, folder, _, _ = run
    code, line = call(f"predict --workdir {folder / 'run'} w[MASK]")
    assert code == (2 if objective == "causal" else 0), line
    if code:
        assert line.count("\n") == 1 and "cannot fill a [MASK]" in line


def test_pairs_are_judged_by_what_has_learned_pairs_alone(run):
    objective, folder, _, _ = run
    assert call(f"import {folder / 'run'} --workdir {folder / 'base'}") == (0, "")
    for place in ("run", "base"):
        code, line = call(f"predict --workdir {folder / place} wa --next wb")
        assert code == (0 if objective in ("mlm_sop", "phases") else 2), line
        assert code == line.count("its next_sentence head is untrained; ") * 2
