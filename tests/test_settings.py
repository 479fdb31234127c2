"""The fields of an experiment as help and errors show them, and the generated pages of docs/."""

import dataclasses
import pathlib
import re
import runpy
from typing import get_args, get_origin, get_type_hints

import pytest
from broken import fails, said

from bert_jax import cli, config
from bert_jax.config import explain

ROOT = pathlib.Path(__file__).parents[1]
KINDS = (config.Experiment, config.Finetuning)


def leaves(section, path=""):
    """Paths of all fields, by another way than that of `explain`."""
    for name, hint in get_type_hints(section).items():
        if name not in {field.name for field in dataclasses.fields(section)}:
            continue
        if dataclasses.is_dataclass(hint):
            yield from leaves(hint, f"{path}{name}.")
        elif get_origin(hint) is tuple and dataclasses.is_dataclass(get_args(hint)[0]):
            yield from leaves(get_args(hint)[0], f"{path}{name}.N.")
        else:
            yield path + name


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_type_a_default_and_a_meaning(kind):
    settings = explain.settings(kind)
    assert [s.path for s in settings] == list(leaves(kind))
    assert not [s.path for s in settings if not (s.comment and s.type)]
    given = {"name", "corpus.sources", "task.kind", "task.validation"}
    given |= {
        f"phases.N.{name}" for name in ("steps", "sequence_length", "max_predictions_per_seq")
    }
    assert {s.path for s in settings if s.default is None} <= given


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_is_at_most_60_lines_and_shows_own_flags_first(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert text.count("\n") <= 60
    titles = ["\noptions:", "\nshared options:"]
    places = [text.find(title) for title in titles if title in text]
    assert places == sorted(places) and places[0] > 0


def test_the_generated_pages_are_current():
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]()
    folder = ROOT / "docs" / "reference"
    changed = [name for name, page in pages.items() if (folder / name).read_text() != page]
    assert not changed, "run `make reference`"


def test_settings_on_the_pages_name_fields_that_exist():
    known = {path for kind in KINDS for path in leaves(kind)}
    sections = "|".join({path.partition(".")[0] for path in known if "." in path})
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    setting = re.compile(rf"`((?:{sections})\.[\w.]+)=")
    fields = {(page.name, field) for page in pages for field in setting.findall(page.read_text())}
    wrong = [item for item in fields if re.sub(r"\.\d+\.", ".N.", item[1]) not in known]
    assert fields and not wrong


def test_a_field_a_section_or_all_are_explained():
    eps = said("config --explain optimizer.eps")
    assert eps.startswith("optimizer.eps: a number; default 1e-06\n    ")
    line, _ = said("config --explain optimizer.schedule").split("\n", 1)
    assert all(default in line.partition("default")[2] for default in ("paper", "linear"))
    assert said("config --explain phases.0").count("phases.N.") == 10
    text = said("config --explain")
    assert not [path for kind in KINDS for path in leaves(kind) if f"{path}: " not in text]
    fails("config --explain optimizer.epsilon", "did you mean optimizer.eps")
