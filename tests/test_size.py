"""How large the house may be: budgets in lines of Python, which turn one way only.

A folder that falls below its number lowers it. One that must grow raises it in the commit that
makes it grow, whose message says what for. `PYTHONPATH=tests python -m test_size` prints what is.
"""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Folders of the package, "." for the modules at its top; then what lies beside the package.
LINES = {
    ".": 1_138,
    "cli": 1_662,
    "compare": 1_198,
    "config": 2_288,
    "conformance": 1_065,
    "data": 3_664,
    "doctor": 852,
    "interop": 2_683,
    "model": 3_047,
    "plan": 2_081,
    "report": 1_525,
    "storage": 1_823,
    "tasks": 4_345,
    "text": 3_206,
    "training": 2_295,
    "running": 4_793,
    "serve": 570,
    "vectors": 1_328,
    "verify": 987,
    "launch": 1_318,
    "benchmarks": 3_024,
    "experiments": 1_425,
    "tables": 554,
    "tests": 36_005,
}
# How far a folder may fall below its number before the number follows.
SLACK = 30

# A file is 60 to 450 lines; what is longer, and by how much at most, until it is cut.
SHORTEST, LONGEST = 60, 450
TOO_LONG = {
    "tests/data/test_corpus.py": 476,
}
TOO_SHORT = {
    "bert_jax/cli/__main__.py",
    "bert_jax/model/flops.py",
    "bert_jax/system.py",
}
# A folder holds 17 modules, the package 22 names; where there are more, how many at most.
MODULES, NAMES = 17, 22
TOO_MANY = {
    ".": 25,
}


def lines(path: pathlib.Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def files(folder: str) -> list[pathlib.Path]:
    """The code of a folder: of one of the package, or beside it; links are not followed."""
    if folder == ".":
        return sorted((ROOT / "bert_jax").glob("*.py"))
    inside = ROOT / "bert_jax" / folder
    whole = inside if inside.is_dir() and not inside.is_symlink() else ROOT / folder
    found = [*whole.rglob("*.py"), *whole.glob("*.sh")]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def measured() -> dict[str, int]:
    inner = sorted(p.parent.name for p in (ROOT / "bert_jax").glob("*/__init__.py"))
    rooms = [name for name in inner if not (ROOT / "bert_jax" / name).is_symlink()]
    folders = [".", *rooms, "launch", "benchmarks", "experiments", "tables", "tests"]
    return {folder: sum(map(lines, files(folder))) for folder in folders}


def modules() -> dict[str, int]:
    """How many modules each folder of the package has, and how many names its top."""
    package = ROOT / "bert_jax"
    names = [p for p in package.iterdir() if not p.is_symlink() and p.name != "__pycache__"]
    inner = {p.name: len(files(p.name)) - 1 for p in names if p.is_dir()}
    return {".": len(names)} | inner


def every_file() -> dict[str, int]:
    found = [path for folder in LINES for path in files(folder) if path.name != "__init__.py"]
    return {str(path.relative_to(ROOT)): lines(path) for path in found}


@pytest.mark.parametrize("folder", LINES)
def test_a_folder_keeps_its_budget(folder):
    assert measured()[folder] <= LINES[folder]


@pytest.mark.parametrize("folder", LINES)
def test_a_budget_follows_its_folder_down(folder):
    assert measured()[folder] >= LINES[folder] - SLACK, "lower its number in LINES"


def test_each_folder_has_a_budget():
    assert measured().keys() == LINES.keys()


def test_files_are_neither_too_long_nor_too_short():
    found = every_file()
    assert {name for name, count in found.items() if count > TOO_LONG.get(name, LONGEST)} == set()
    assert {name for name, bound in TOO_LONG.items() if found.get(name, 0) < bound - SLACK} == set()
    short = {name for name, count in found.items() if count < SHORTEST}
    assert {name for name in short if name.startswith("bert_jax/")} <= TOO_SHORT


def test_folders_have_few_modules():
    found = {name: count for name, count in modules().items() if count > bound_of(name)}
    assert found == {}
    assert {name for name, bound in TOO_MANY.items() if modules()[name] < bound} == set()


def bound_of(folder: str) -> int:
    return TOO_MANY.get(folder, NAMES if folder == "." else MODULES)


if __name__ == "__main__":
    print(measured(), sum(measured()[f] for f in LINES if (ROOT / "bert_jax" / f).is_dir()))
    print({name: count for name, count in every_file().items() if count > LONGEST})
    print({name: c for name, c in every_file().items() if c < SHORTEST and "bert_jax/" in name})
    print({name: count for name, count in modules().items() if count > bound_of(name)})
