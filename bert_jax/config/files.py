"""Reads and writes experiments: experiment files, `--set` strings, JSON, lists of differences."""

import dataclasses
import difflib
import json
import pathlib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from bert_jax.config.code import run_file
from bert_jax.config.comparison import Table
from bert_jax.config.explain import TYPES, suggestion
from bert_jax.config.fields import RequiresValue, Section, fields_of
from bert_jax.config.finetuning import Finetuning
from bert_jax.config.pretraining import Experiment
from bert_jax.config.suite import Suite
from bert_jax.config.task_kinds import KINDS
from bert_jax.config.text_corpus import COMPRESSED, Corpus, source_name
from bert_jax.errors import InputError, json_object, prefix_errors

# In version 1 the section `parallelism` was called `mesh`, and a task's `kind` was `shape`.
FORMAT_VERSION = 2

# Experiment files that come with the package and can be given by their bare names.
SHIPPED = pathlib.Path(__file__).parents[1] / "experiments"

# Fields that hold sources.
_SOURCE_FIELDS = ("sources", "train", "validation")

T = typing.TypeVar("T", bound=Section)


def load(path: str, kind: type[T] = Experiment) -> T:
    """Reads EXPERIMENT: a .py file that defines `experiment()`, or a resolved config as JSON.

    A bare name means a file that comes with the package. In a .py file sources that begin with `./`
    or `../` are relative to the folder of the file, others to the current folder. The file may
    `import` others of its folder and change what their `experiment()` returns.
    """
    return _load(path, kind)[0]


def load_table(path: str) -> Table:
    """Reads TABLE: a .py file that defines `table()`, the experiments that `compare` trains."""
    file = pathlib.Path(path)
    if not file.is_file() or file.suffix != ".py":
        raise InputError(f"{path}: no such table; name a .py file that defines table()")
    return run_file(file, "table", Table)[0]


def load_suite(path: str) -> Suite:
    """Reads SUITE: a .py file that defines `suite()`, or the bare name of a shipped one."""
    shipped = {file.stem: file for file in sorted((SHIPPED / "suites").glob("*.py"))}
    file = pathlib.Path(path) if path not in shipped else shipped[path]
    if not file.is_file() or file.suffix != ".py":
        names = ", ".join(shipped)
        raise InputError(f"{path}: no such suite; name a .py file that defines suite(), or {names}")
    return run_file(file, "suite", Suite)[0]


def load_with_origin(
    path: str, settings: Sequence[str], kind: type[T] = Experiment
) -> tuple[T, dict[str, Any]]:
    """Reads EXPERIMENT, applies `--set` strings, and describes the origin of the result.

    The description is a JSON object: the file, its parent (the experiment file that it imports and
    changes in memory; "" if none), the strings, and the differences from the parent or, without
    one, from the defaults.
    """
    loaded, parent = _load(path, kind)
    experiment = override(loaded, settings)
    return experiment, origin_of(path, settings, experiment, parent)


def finetuning_of(
    task: Mapping[str, Any], workdir: str | None, settings: Sequence[str]
) -> tuple[Finetuning, dict[str, Any]]:
    """Builds a fine-tuning from fields of its task; also returns its origin (`load_with_origin`).

    `train` and `validation` are names of files, which become sources. The fine-tuning is named
    after the last part of `workdir` or of the first training file. The fields of `task` and the
    `--set` strings are checked together: some kinds need a field that only `--set` can give.
    """
    if task.get("kind") == "minimal_pairs":
        raise InputError(
            "--kind minimal_pairs: no model trains on them; score one with `bert-jax evaluate "
            "--task FILE`"
        )
    for name in ("kind", "train", "validation"):
        if name not in task:
            raise InputError(f"--{name}: name a TASKFILE, or all of --kind, --train, --validation")
    kind, name = task["kind"], name_of(workdir or task["train"][0].rpartition(":")[2])
    fields: dict[str, object] = {"max_sequence_length": 384} if kind == "span" else {}  # SQuAD's
    for split in ("train", "validation"):
        fields[split] = tuple(source_of(f"--{split}", kind, file) for file in task[split])
    defaults = {n: dataclasses.asdict(s) for n, s in _default_sections(Finetuning).items()}
    tree = json.loads(json.dumps(defaults | {"name": name or "task", "task": {**task, **fields}}))
    _apply(tree, settings, _hints(Finetuning))
    experiment = _build(Finetuning, tree, "")
    return experiment, origin_of("the command line", settings, experiment)


def name_of(path: str) -> str:
    """Returns a run's name from the last part of a path; "" if the part has no letters."""
    return re.sub(r"[^\w.-]+", "-", pathlib.PurePath(path).name.partition(".")[0]).strip("-.")


def source_of(flag: str, kind: str, file: str) -> str:
    """Returns FORMAT:FILE for `task.train`; the format follows from the ending of the name."""
    formats = KINDS[kind].formats
    if file.partition(":")[0] in formats:
        return file
    ending = pathlib.PurePath(COMPRESSED.sub("", file)).suffix.lower()
    file_format = "squad" if ending == ".json" else ending.removeprefix(".")
    if file_format not in formats:
        known = ", ".join(f"{name}:" for name in formats)
        raise InputError(
            f"{flag} {file}: the name does not say which format it is; --kind {kind} reads "
            f"{known}; write {formats[0]}:{file}, for example"
        )
    return f"{file_format}:{file}"


def origin_of(
    path: str,
    settings: Sequence[str],
    experiment: Section,
    parent: tuple[str, Section] | None = None,
) -> dict[str, Any]:
    """Describes the origin of an experiment, as `load_with_origin` does."""
    if parent is None:
        parent_name, changes = "", _differences_from_defaults(experiment)
    else:
        parent_name, changes = parent[0], differences(parent[1], experiment, "all")
    return {
        "format_version": FORMAT_VERSION,
        "experiment": path,
        "parent": parent_name,
        "settings": list(settings),
        "differences": changes,
    }


def _load(path: str, kind: type[T]) -> tuple[T, tuple[str, Section] | None]:
    """Reads EXPERIMENT, and the name and experiment of its parent, or None."""
    file = _find_file(path)
    if file.suffix == ".py":
        experiment, parent = run_file(file, "experiment", Experiment, Finetuning)
        _require_kind(type(experiment), kind, path)
        return typing.cast(T, _resolve_sources(experiment, file.parent.resolve())), parent
    if file.suffix == ".json":
        return from_json(file.read_bytes(), path, kind), None
    raise InputError(f"{path}: an experiment is a .py file or a resolved config as .json")


def _find_file(path: str) -> pathlib.Path:
    """Returns the file of an experiment, given by its path or by the bare name of a shipped one."""
    file, shipped = pathlib.Path(path), _shipped()
    if not file.is_file() and path not in shipped:
        near = difflib.get_close_matches(file.stem, shipped, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else f"by name there are {', '.join(shipped)}"
        raise InputError(f"{path}: no such experiment file; {hint}")
    return file if file.is_file() else shipped[path]


def is_shipped(name: str) -> bool:
    """Returns whether an experiment of this name comes with the package."""
    return name in _shipped()


def _shipped() -> dict[str, pathlib.Path]:
    files = sorted((*SHIPPED.glob("*.py"), *SHIPPED.glob("tasks/*.py")))
    return {file.stem: file for file in files}


def _resolve_sources(experiment: Section, folder: pathlib.Path) -> Section:
    """Makes the relative sources `./...` of an experiment absolute, as FOLDER/./...

    The part before `/./` differs between machines and does not belong to a source's name.
    """

    def resolve(source: str) -> str:
        kind, colon, path = source.partition(":")
        is_relative = path.startswith(("./", "../"))
        return f"{kind}{colon}{folder}/./{path.removeprefix('./')}" if is_relative else source

    section_name = "corpus" if isinstance(experiment, Experiment) else "task"
    section = getattr(experiment, section_name)
    names = [name for name in _SOURCE_FIELDS if hasattr(section, name)]
    sources = {name: tuple(map(resolve, getattr(section, name))) for name in names}
    section = dataclasses.replace(section, **sources)
    return dataclasses.replace(experiment, **{section_name: section})


def _require_kind(kind: type, expected: type, where: str) -> None:
    if kind is not expected:
        description, commands = {
            Experiment: ("a pre-training, not a fine-tuning", "`bert-jax pretrain` takes it"),
            Finetuning: (
                "a fine-tuning, not a pre-training",
                "use it with `bert-jax finetune`, and its run with `predict` (--score for scores), "
                "`embed` and `checkpoints`; to start another run from its weights, `export` it and "
                "`import` the folder",
            ),
        }[kind]
        raise InputError(f"{where}: is {description}; {commands}")


def _default_sections(kind: type[Section]) -> dict[str, Any]:
    """Returns the sections of an experiment that have only fields with defaults."""
    factories = {f.name: f.default_factory for f in dataclasses.fields(kind)}
    return {name: make() for name, make in factories.items() if callable(make)}


def _differences_from_defaults(experiment: Section) -> list[str]:
    """Lists differences by section: no whole experiment has defaults, as sources are required."""
    defaults = _default_sections(type(experiment))
    if isinstance(experiment, Experiment):
        defaults["corpus"] = Corpus(sources=experiment.corpus.sources)
    return [
        f"{name}.{line}"
        for name, section in defaults.items()
        for line in differences(section, getattr(experiment, name), "all")
    ]


def override(experiment: T, settings: Sequence[str]) -> T:
    """Applies `--set` strings like `model.hidden_size=128` or `phases.0.steps=10`, all at once."""
    tree = json.loads(to_json(experiment))
    del tree["format_version"]
    leaves = _leaves(experiment, "")
    hints = {path: fields_of(type(section))[name][0] for path, section, name in leaves}
    _apply(tree, settings, hints)
    return _build(type(experiment), tree, "")


def _hints(kind: type[Section], path: str = "") -> dict[str, Any]:
    """Returns the types of fields by their paths; `kind` must have no lists of sections."""
    hints = {}
    for name, (hint, _) in fields_of(kind).items():
        if dataclasses.is_dataclass(hint):
            hints |= _hints(hint, f"{path}{name}.")
        else:
            hints[f"{path}{name}"] = hint
    return hints


def _apply(tree: dict[str, Any], settings: Sequence[str], hints: Mapping[str, Any]) -> None:
    """Applies `--set` strings to the JSON of an experiment; `hints` has the types by path."""
    for setting in settings:
        path, equals, text = setting.partition("=")
        path = _RENAMED.get(path.strip(), path.strip())
        if not equals:
            raise InputError(
                f"--set {setting}: write it as FIELD=VALUE, e.g. model.hidden_size=128; "
                "`bert-jax config --explain` lists the fields"
            )
        if path not in hints:
            inner = next((known for known in hints if known.startswith(f"{path}.")), "")
            hint = f"set one of its fields, e.g. {inner}" if inner else suggestion(path, hints)
            raise InputError(f"--set {setting}: there is no field {path}; {hint}")
        node: Any = tree
        *parents, key = path.split(".")
        for parent in parents:
            node = node[int(parent)] if isinstance(node, list) else node.setdefault(parent, {})
        node[key] = _parse(text, hints[path], setting)


def _parse(text: str, hint: Any, setting: str) -> object:
    try:
        if get_origin(hint) is not tuple:
            return _number(text, hint) if hint in (int, float) else text
        if re.match(r'\[\s*["\]\d-]', text):  # a list, not a text such as [MASK]
            return json.loads(text)
        kind, items = get_args(hint)[0], text.split(",") if text else []
        return [item for item in items if item] if kind is str else [kind(item) for item in items]
    except (ValueError, RecursionError) as error:
        raise InputError(f"--set {setting}: {text!r}: write {TYPES[hint]}") from error


def _number(text: str, kind: type[int] | type[float]) -> int | float:
    """Parses a number; whole numbers may be written as 1e3."""
    is_whole = kind is int and "e" in text.lower() and float(text).is_integer()
    return int(float(text)) if is_whole else kind(text)


def to_json(experiment: Section) -> str:
    """Returns the resolved experiment as readable JSON, with its format version."""
    return (
        json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(experiment)}, indent=2)
        + "\n"
    )


def from_json(text: str | bytes, where: str, kind: type[T] = Experiment) -> T:
    """Reads the JSON that `to_json` wrote; `where` names the file in errors."""
    tree = json_object(text, where)
    version = tree.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise InputError(
            f"{where}: format_version {version!r}, this version reads {FORMAT_VERSION}; use the "
            "bert-jax that wrote it"
        )
    _require_kind(kind_of(tree), kind, where)
    built = build_section(kind, tree, where)
    if isinstance(built, Experiment) and "eval_seed" not in tree.get("data", {}):
        # Before this field existed, the seed of the run drew the held-out rows.
        data = dataclasses.replace(built.data, eval_seed=built.seed)
        return dataclasses.replace(built, data=data)
    return built


def kind_of(tree: dict[str, Any]) -> type[Section]:
    """Returns the class of the experiment that a JSON object describes."""
    return Finetuning if "task" in tree else Experiment


def differences(old: Section, new: Section, role: str) -> list[str]:
    """Returns the fields with this role ("all": any) that differ, as `path: old -> new`."""
    old_values, new_values = dict(flatten(old, role)), dict(flatten(new, role))
    paths = sorted(old_values.keys() | new_values.keys())
    pairs = [(p, old_values.get(p, "absent"), new_values.get(p, "absent")) for p in paths]
    return [f"{path}: {a!r} -> {b!r}" for path, a, b in pairs if a != b]


# Removed settings, each with the one value that is accepted in configs of older runs. None: any
# value, since the setting had no effect without another removed one.
_REMOVED = {
    "data.packing": "none",
    "phases.N.examples_per_row": None,
    "phases.N.predictions_per_row": None,
}
# From former names of settings, in saved runs and scripts, to their current names.
_RENAMED = {"task.blank_cells": "task.broken_rows"}


def notes_on_settings(experiment: Section) -> list[str]:
    """Returns a line for each setting that has no effect."""
    values, lines = dict(flatten(experiment)), []
    for path, section, name in _leaves(experiment, ""):
        for rule in fields_of(type(section))[name][1]:
            # Rules on a field of the same section, without a dot, are errors (`fields.Section`).
            is_noted = isinstance(rule, RequiresValue) and "." in rule.field
            if is_noted and values[rule.field] not in rule.values and not section.is_default(name):
                required = f"{rule.field}={' or '.join(rule.values)}"
                lines.append(f"note: {path}={values[path]} has an effect only with {required}")
    return lines


def flatten(section: Section, role: str = "all") -> list[tuple[str, object]]:
    """Returns (path, value) of every field with this role ("all": any), in order.

    Sources are given by their `source_name`.
    """
    rows = []
    for path, owner, name in _leaves(section, ""):
        value = getattr(owner, name)
        if role in ("all", owner.role):
            rows.append((path, tuple(map(source_name, value)) if name in _SOURCE_FIELDS else value))
    return rows


def _leaves(section: Section, prefix: str) -> Iterator[tuple[str, Section, str]]:
    """Yields the path, section and name of each field that is not a section, in order."""
    for name in fields_of(type(section)):
        value, path = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, Section):
            yield from _leaves(value, f"{path}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            for number, item in enumerate(value):
                yield from _leaves(item, f"{path}.{number}.")
        else:
            yield path, section, name


def build_section(kind: type[T], value: Any, where: str) -> T:
    """Builds a section from its JSON object; error messages begin with `where`."""
    with prefix_errors(where):
        return _build(kind, value, "")


def _build(hint: Any, value: Any, where: str) -> Any:
    """Converts the JSON value of a field to its type `hint`, and checks it."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise InputError(f"{where or 'experiment'}: expected an object")
        known = {f.name: f for f in dataclasses.fields(hint)}
        prefix = f"{where}." if where else ""
        value = {key: v for key, v in value.items() if not _is_removed(f"{prefix}{key}", v)}
        renamed = {key: _RENAMED.get(f"{prefix}{key}", key).removeprefix(prefix) for key in value}
        value = {renamed[key]: v for key, v in value.items()}
        for key in value:
            if key not in known:
                near = suggestion(key, known)
                raise InputError(f"{where or 'experiment'} has no field {key!r}; {near}")
        for name, f in known.items():
            required = f.default is f.default_factory is dataclasses.MISSING
            if required and name not in value:
                raise InputError(f"{prefix}{name}: missing")
        try:
            hints = {key: fields_of(hint)[key][0] for key in value}
            return hint(**{key: _build(hints[key], v, prefix + key) for key, v in value.items()})
        except InputError as error:
            # The label of a phase is `phases`, without its index.
            name, dot, rest = str(error).partition(".")
            if not (dot and where.startswith(f"{name}.")):
                raise
            raise InputError(f"{where}.{rest}") from error
    if get_origin(hint) is tuple and isinstance(value, list):
        item = get_args(hint)[0]
        return tuple(_build(item, v, f"{where}.{i}") for i, v in enumerate(value))
    return value


def _is_removed(path: str, value: object) -> bool:
    """Returns whether a setting was removed; raises InputError if its value had an effect."""
    field = re.sub(r"\.\d+\.", ".N.", path)
    if field in _REMOVED and _REMOVED[field] not in (None, value):
        raise InputError(f"{path}={value!r}: was removed; use the bert-jax that wrote this config")
    return field in _REMOVED
