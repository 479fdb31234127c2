"""Pre-training without next sentences, from text to its lines."""

import json

import pytest
from broken import call
from small_run import pretrain, write_text

MLM = ("data.objective=mlm",)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlm")
    file = write_text(folder)
    assert pretrain(file, folder / "run", *MLM)[0] == "finished"
    return folder, file


def test_no_line_speaks_of_next_sentences(run):
    folder, _ = run
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    assert {line["kind"] for line in lines} == {"train", "evaluation"}
    assert not [name for line in lines for name in line if "next_sentence" in name]
    last = [line for line in lines if line["kind"] == "evaluation"][-1]
    assert last["loss"] == last["masked_lm_loss"]


def test_what_looks_at_a_run_asks_for_no_pairs(run):
    folder, file = run
    place = folder / "run"
    for command in (
        f"show {file} --workdir {place} --step 3 --set data.objective=mlm",
        f"report {place}",
        f"evaluate --workdir {place}",
    ):
        assert call(command) == (0, ""), command
    assert "next sentence" not in (place / "report.html").read_text().split("<table>")[0]
    assert call(f"doctor {place}")[0] in (0, 1)
