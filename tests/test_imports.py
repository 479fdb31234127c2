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
    *("private_apis", "errors", "hardware", "system", "process", "config", "storage", "text"),
    *("data", "model", "training"),
    *("distributed", "checkpoints", "running", "embeddings", "pretraining", "tasks", "interop"),
    *("api", "serve", "tools.plan", "tools.doctor", "tools.layer_scores", "tools.report"),
    "tools.babylm",
    *("tools.conformance", "tools.compare", "tools.benchmark", "tools.auto", "tools.verify"),
    *("launch", "cli"),
    "tools.verify.child",
)
# Packages whose subpackages are layers of their own; modules that run the command line.
GROUPS = ("tools",)
PROGRAMS = ("tools.verify.child",)


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
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            found |= {name.value for name in node.args if isinstance(name, ast.Constant)}
    return found


def layer_of(module: str) -> str:
    parts = module.split(".")[1:] or [module]
    if ".".join(parts) in PROGRAMS:
        return ".".join(parts)
    return ".".join(parts[: 2 if parts[0] in GROUPS else 1])


def test_imports_follow_the_layers():
    for module in MODULES.keys() - {"bert_jax", *(f"bert_jax.{name}" for name in GROUPS)}:
        here = LAYERS.index(layer_of(module))
        used = {layer_of(name) for name in imports(MODULES[module]) if name.startswith("bert_jax.")}
        assert used - {"__version__"} <= set(LAYERS[: here + 1]), module


# What reads and scores a task; what learns it stands beside.
TASKS = [f"bert_jax.tasks.{name}" for name in ("examples", "formats", "scores")]


def test_what_is_never_imported():
    for module, path in MODULES.items():
        tops = {name.split(".")[0] for name in imports(path)}
        strange = {"experiments", "launch", "benchmarks", "tests", "torch", "tensorflow"}
        if layer_of(module) in ("text", "data") or module in TASKS:
            strange |= {"jax", "flax", "optax", "orbax"}
        assert not tops & strange, module


def test_only_checkpoints_import_orbax():
    users = {m for m, path in MODULES.items() if any("orbax" in name for name in imports(path))}
    checkpoints = {f"bert_jax.checkpoints.{name}" for name in ("layout", "load", "save")}
    assert users == checkpoints | {"bert_jax.private_apis"}


def test_no_import_cycles():
    # The package's own file is a door into it, and asked for the version alone.
    graph = {m: imports(MODULES[m]) & MODULES.keys() - {m, "bert_jax"} for m in MODULES}
    done: set[str] = set()

    def visit(module, above):
        assert module not in above, " -> ".join([*above, module])
        if module not in done:
            for other in graph[module]:
                visit(other, [*above, module])
            done.add(module)

    for module in graph:
        visit(module, [])


@pytest.mark.long
def test_no_tensorflow_or_torch_at_run_time():
    code = (
        "import sys, bert_jax.cli, bert_jax.interop.importing,"
        "bert_jax.pretraining.loaded_model, bert_jax.embeddings.embed, bert_jax.running.session;"
        "sys.exit(bool({'tensorflow', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
