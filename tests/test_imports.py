"""Who may import whom, parsed from the source; and what never loads."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "bert_jax").rglob("*.py"))
}
# Each imports from those before it alone.
LAYERS = (
    *("errors", "hardware", "system", "config", "storage", "text", "data", "model"),
    *("base", "training", "predict", "vectors", "tasks", "interop", "plan"),
    *(
        "doctor",
        "report",
        "embed",
        "library",
        "serve",
        "conformance",
        "compare",
        "pod",
        "verify",
        "launch",
        "cli",
    ),
)


def imports(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # Whoever takes modules out of a package takes nothing of the package's own.
            found |= names if names <= MODULES.keys() else names | {node.module}
    return found


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "bert_jax"


@pytest.mark.parametrize("module", [m for m in MODULES if m != "bert_jax"])
def test_imports_follow_the_layers(module):
    here = LAYERS.index(room(module))
    ours = {room(name) for name in imports(MODULES[module]) if name.startswith("bert_jax.")}
    ours.discard("__version__")
    assert ours <= set(LAYERS[: here + 1])


@pytest.mark.parametrize("module", MODULES)
def test_the_library_imports_no_experiment_launcher_or_benchmark(module):
    tops = {name.split(".")[0] for name in imports(MODULES[module])}
    assert not tops & {"experiments", "launch", "benchmarks", "tests", "torch", "tensorflow"}


# What reads and scores a task; what learns it stands beside.
TASKS = [f"bert_jax.tasks.{name}" for name in ("examples", "formats", "scores")]


@pytest.mark.parametrize("module", [*(m for m in MODULES if room(m) in ("text", "data")), *TASKS])
def test_text_data_and_examples_never_import_jax(module):
    tops = {name.split(".")[0] for name in imports(MODULES[module])}
    assert not tops & {"jax", "flax", "optax", "orbax"}


def test_only_checkpoint_imports_orbax():
    users = {m for m, path in MODULES.items() if any("orbax" in name for name in imports(path))}
    assert users == {"bert_jax.training.checkpoint"}


def test_no_import_cycles():
    graph = {m: imports(path) & MODULES.keys() - {m} for m, path in MODULES.items()}
    done: set[str] = set()

    def visit(module, above):
        assert module not in above, " -> ".join([*above, module])
        if module not in done:
            for other in graph[module]:
                visit(other, [*above, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def test_no_tensorflow_or_torch_at_run_time():
    code = (
        "import sys, bert_jax.cli, bert_jax.interop.importing,"
        "bert_jax.predict, bert_jax.embed, bert_jax.training.session;"
        "sys.exit(bool({'tensorflow', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_data_examples_and_the_doctor_of_text_load_without_jax():
    code = (
        "import sys, bert_jax.data.batches, bert_jax.data.stream, bert_jax.doctor,"
        "bert_jax.tasks.examples, bert_jax.tasks.scores;"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
