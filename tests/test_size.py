"""Limits on the lines of Python in each folder, and on the number and length of modules.

`AIMS` says how large each folder should become. `ABOVE` lists the folders that are larger, with the
most lines that each may have. A number in `ABOVE` only falls; a folder that reaches its aim leaves
the list. `PYTHONPATH=tests python -m test_size` prints what is measured.
"""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Packages of bert_jax ("." is its top-level modules), then the folders beside the package.
AIMS = {
    ".": 600,
    "config": 1_900,
    "storage": 1_350,
    "text": 2_700,
    "data": 3_250,
    "model": 2_900,
    "training": 2_150,
    "checkpoints": 650,
    "distributed": 850,
    "running": 2_400,
    "pretraining": 850,
    "tasks": 3_500,
    "embeddings": 1_200,
    "interop": 2_100,
    "serve": 500,
    "tools": 6_000,
    "cli": 1_000,
    "launch": 1_700,
    "benchmarks": 3_024,
    "experiments": 1_425,
    "tables": 554,
    "tests": 23_000,
}
ABOVE = {
    ".": 1_186,
    "checkpoints": 1_243,
    "cli": 2_551,
    "config": 2_848,
    "data": 4_090,
    "distributed": 1_202,
    "embeddings": 2_119,
    "interop": 3_388,
    "model": 3_801,
    "pretraining": 1_239,
    "serve": 766,
    "storage": 2_127,
    "tasks": 5_554,
    "text": 3_323,
    "tools": 9_250,
    "training": 2_465,
    "benchmarks": 4_035,
    "experiments": 1_841,
    "tables": 622,
    "tests": 42_566,
}
# How far a folder may fall below its number in ABOVE before the number must follow.
SLACK = 30

# A module has 60 to 450 lines. Longer ones, and the most lines that each may have; shorter ones.
SHORTEST, LONGEST = 60, 450
TOO_LONG = {
    "tests/data/test_corpus.py": 476,
}
TOO_SHORT = {
    "bert_jax/cli/__main__.py",
    "bert_jax/model/flops.py",
    "bert_jax/process.py",
    "bert_jax/system.py",
}
# A package has at most 18 modules, bert_jax at most 16 packages.
MODULES, PACKAGES = 18, 16


def count_lines(path: pathlib.Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def find_files(folder: str) -> list[pathlib.Path]:
    """Returns the code in a package of bert_jax or in a folder beside it; skips linked packages."""
    if folder == ".":
        return sorted((ROOT / "bert_jax").glob("*.py"))
    package = ROOT / "bert_jax" / folder
    root = package if package.is_dir() and not package.is_symlink() else ROOT / folder
    found = [*root.rglob("*.py"), *root.glob("*.sh")]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def find_packages() -> list[str]:
    """Returns the paths of all packages below bert_jax, such as tools/plan."""
    inner = [path.parent for path in (ROOT / "bert_jax").rglob("*/__init__.py")]
    unlinked = [path for path in inner if not (ROOT / "bert_jax" / path.name).is_symlink()]
    return sorted(path.relative_to(ROOT / "bert_jax").as_posix() for path in unlinked)


def measure() -> dict[str, int]:
    packages = [name for name in find_packages() if "/" not in name]
    folders = [".", *packages, "launch", "benchmarks", "experiments", "tables", "tests"]
    return {folder: sum(map(count_lines, find_files(folder))) for folder in folders}


def measure_files() -> dict[str, int]:
    found = [path for folder in AIMS for path in find_files(folder) if path.name != "__init__.py"]
    return {str(path.relative_to(ROOT)): count_lines(path) for path in found}


def count_modules() -> dict[str, int]:
    packages = {name: ROOT / "bert_jax" / name for name in find_packages()}
    return {name: len(list(path.glob("*.py"))) - 1 for name, path in packages.items()}


@pytest.mark.parametrize("folder", AIMS)
def test_a_folder_keeps_its_budget(folder):
    assert measure()[folder] <= ABOVE.get(folder, AIMS[folder])


@pytest.mark.parametrize("folder", ABOVE)
def test_a_budget_follows_its_folder_down(folder):
    lowest = max(AIMS[folder] + 1, ABOVE[folder] - SLACK)
    assert measure()[folder] >= lowest, "lower its number in ABOVE, or remove it at the aim"


def test_each_folder_has_an_aim():
    assert measure().keys() == AIMS.keys()


def test_files_are_neither_too_long_nor_too_short():
    found = measure_files()
    assert {name for name, count in found.items() if count > TOO_LONG.get(name, LONGEST)} == set()
    assert {name for name, bound in TOO_LONG.items() if found.get(name, 0) < bound - SLACK} == set()
    short = {name for name, count in found.items() if count < SHORTEST}
    assert {name for name in short if name.startswith("bert_jax/")} <= TOO_SHORT


def test_packages_are_few_and_have_few_modules():
    assert {name: count for name, count in count_modules().items() if count > MODULES} == {}
    assert len([name for name in find_packages() if "/" not in name]) <= PACKAGES


if __name__ == "__main__":
    print({name: count for name, count in measure().items() if count > AIMS[name]})
    print({name: count for name, count in measure_files().items() if count > LONGEST})
    print(count_modules())
