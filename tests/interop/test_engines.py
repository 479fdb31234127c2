"""Exported folders have what each engine reads, as tests/golden/engines.json lists it.

The list was made from the engines' documentation and source code.
"""

import itertools
import json
import pathlib

import exports
import pytest

LISTED = json.loads((pathlib.Path(__file__).parents[1] / "golden/engines.json").read_text())
ENGINES = LISTED["engines"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("exports")
    for family, form in itertools.product(exports.FAMILIES, exports.FORMS):
        exports.write(family, form, root / family / form)
    return root


def refusal(engine, family, form):
    """Returns why an engine does not serve a form of a family; None if it does."""
    refused = engine["refused"]
    return refused.get(form) or refused.get(family) or refused.get(f"{family} {form}")


SERVED = [
    (name, family, form)
    for name, family, form in itertools.product(ENGINES, exports.FAMILIES, exports.FORMS)
    if not refusal(ENGINES[name], family, form)
]


@pytest.mark.parametrize(("name", "family", "form"), SERVED)
def test_a_folder_has_what_the_engine_reads(name, family, form, folders):
    engine, folder = ENGINES[name], folders / family / form
    for file in engine["files"]:
        assert (folder / file).exists(), file
    read = [engine["keys"], engine["families"].get(family, {}), engine["forms"].get(form, {})]
    for file, keys in itertools.chain.from_iterable(part.items() for part in read):
        assert (folder / file).exists(), file
        written = json.loads((folder / file).read_text()) if keys else {}
        missing = [key for key in keys if written.get(key) is None]
        assert not missing, file
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    assert architecture in engine.get("classes", [architecture])


def test_the_list_names_only_forms_and_families_that_are_exported():
    for name, engine in ENGINES.items():
        assert set(engine["refused"]) <= {
            *exports.FORMS,
            *exports.FAMILIES,
            *(f"{family} {form}" for family in exports.FAMILIES for form in exports.FORMS),
        }, name
        assert set(engine["forms"]) <= set(exports.FORMS)
        assert set(engine["families"]) <= set(exports.FAMILIES)


@pytest.mark.parametrize("family", exports.FAMILIES)
def test_a_card_shows_the_class_that_computes_the_vectors(family, folders):
    cards = {form: (folders / family / form / "README.md").read_text() for form in exports.FORMS}
    assert "model = SparseEncoder(" in cards["sparse"] and "fill-mask" not in cards["sparse"]
    assert "model = MultiVectorEncoder(" in cards["multi_vector"]
    for form, card in cards.items():
        assert (form in ("sparse", "multi_vector")) == ("Encoder(" in card and "Cross" not in card)
