"""Experiments from and to text: experiment files, `--set` strings, JSON, lists of differences."""

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
from bert_jax.config.corpus import Corpus, named
from bert_jax.config.explain import TYPES, suggestion
from bert_jax.config.fields import RequiresValue, Section, fields_of
from bert_jax.config.finetuning import SOURCES, Finetuning
from bert_jax.config.pretraining import Experiment
from bert_jax.errors import InputError, json_object, prefix_errors

# 2: the section `parallelism` was `mesh`, and a task's `kind` its `shape`.
FORMAT_VERSION = 2

# Experiment files that come with the package, which a bare name finds.
SHIPPED = pathlib.Path(__file__).parents[1] / "experiments"

T = typing.TypeVar("T", bound=Section)


def load(path: str, kind: type[T] = Experiment) -> T:
    """Reads EXPERIMENT: a .py file that defines `experiment()`, or a resolved config as JSON.

    A bare name is that of a file that comes with the package. In a .py file sources that begin with
    `./` or `../` lie where the file does, others in the current folder. It may `import` others in
    its folder, to vary what their `experiment()` gives.
    """
    return _load(path, kind)[0]


def load_table(path: str) -> Table:
    """Reads TABLE: a .py file that defines `table()`."""
    file = pathlib.Path(path)
    if not file.is_file() or file.suffix != ".py":
        raise InputError(f"{path}: no such table; name a .py file that defines table()")
    return run_file(file, "table", Table)[0]


def load_with_origin(
    path: str, settings: Sequence[str], kind: type[T] = Experiment
) -> tuple[T, dict[str, Any]]:
    """Reads EXPERIMENT, applies `--set` strings, and describes where the result comes from.

    The description is a JSON object: the file, the experiment file that it varies ("" if none), the
    strings, and what differs from that parent, or from the defaults of the sections.
    """
    loaded, parent = _load(path, kind)
    experiment = override(loaded, settings)
    return experiment, origin_of(path, settings, experiment, parent)


def finetuning_of(
    task: Mapping[str, Any], workdir: str | None, settings: Sequence[str]
) -> tuple[Finetuning, dict[str, Any]]:
    """Makes a fine-tuning of fields of its task, as `load_with_origin` does of a file.

    Sources are given as files. The last part of `workdir` names it, or the first file to learn from
    does. Fields and settings are checked together: some kinds need fields that only settings name.
    """
    if task.get("kind") == "minimal_pairs":
        raise InputError(
            "--kind minimal_pairs: nothing is learned from them; score with `bert-jax evaluate "
            "--task FILE`"
        )
    for name in ("kind", "train", "validation"):
        if name not in task:
            raise InputError(f"--{name}: name a TASKFILE, or all of --kind, --train, --validation")
    kind, name = task["kind"], name_of(workdir or task["train"][0].rpartition(":")[2])
    fields: dict[str, object] = {"max_sequence_length": 384} if kind == "span" else {}  # as usual
    for part in ("train", "validation"):
        fields[part] = tuple(source_of(f"--{part}", kind, file) for file in task[part])
    sections = {f.name: f.default_factory for f in dataclasses.fields(Finetuning)}
    usual = {n: dataclasses.asdict(f()) for n, f in sections.items() if callable(f)}
    tree = json.loads(json.dumps(usual | {"name": name or "task", "task": {**task, **fields}}))
    _apply(tree, settings, _hints(Finetuning))
    experiment = _build(Finetuning, tree, "")
    return experiment, origin_of("the command line", settings, experiment)


def name_of(place: str) -> str:
    """Returns a name for a run by the last part of a place; "" where that has no letters."""
    return re.sub(r"[^\w.-]+", "-", pathlib.PurePath(place).name.partition(".")[0]).strip("-.")


# Endings of compressed files.
_PACKED = re.compile(r"\.(gz|zst|bz2|xz)$", re.IGNORECASE)


def source_of(flag: str, kind: str, file: str) -> str:
    """Returns a source as `task.train` has it, by the end of the file's name."""
    if file.partition(":")[0] in SOURCES[kind]:
        return file
    ending = pathlib.PurePath(_PACKED.sub("", file)).suffix.lower()
    word = "squad" if ending == ".json" else ending.removeprefix(".")
    if word not in SOURCES[kind]:
        known = ", ".join(f"{word}:" for word in SOURCES[kind])
        raise InputError(
            f"{flag} {file}: the name does not say which format it is; --kind {kind} reads {known} "
            f"so write {SOURCES[kind][0]}:{file}, for example"
        )
    return f"{word}:{file}"


def origin_of(
    path: str,
    settings: Sequence[str],
    experiment: Section,
    parent: tuple[str, Section] | None = None,
) -> dict[str, Any]:
    """Describes where an experiment comes from, as `load_with_origin` does."""
    if parent is None:
        name, changed = "", _differences_from_defaults(experiment)
    else:
        name, changed = parent[0], differences(parent[1], experiment, "all")
    return {
        "format_version": FORMAT_VERSION,
        "experiment": path,
        "parent": name,
        "settings": list(settings),
        "differences": changed,
    }


def _load(path: str, kind: type[T]) -> tuple[T, tuple[str, Section] | None]:
    """Reads EXPERIMENT, and the name and experiment of the file it varies, if it does."""
    file = _found(path)
    if file.suffix == ".py":
        experiment, parent = run_file(file, "experiment", Experiment, Finetuning)
        _require_kind(type(experiment), kind, path)
        return typing.cast(T, _placed(experiment, file.parent.resolve())), parent
    if file.suffix == ".json":
        return from_json(file.read_bytes(), path, kind), None
    raise InputError(f"{path}: an experiment is a .py file or a resolved config as .json")


def _found(path: str) -> pathlib.Path:
    """Returns the file of an experiment, which a bare name finds among those that are shipped."""
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
    files = sorted((*SHIPPED.glob("*.py"), *SHIPPED.glob("*/*.py")))
    return {file.stem: file for file in files}


def _placed(experiment: Section, folder: pathlib.Path) -> Section:
    """Returns an experiment whose sources that begin with `./` lie in a folder.

    What lies before `/./` is where this machine has it, and no part of what a source is called.
    """

    def place(source: str) -> str:
        word, colon, path = source.partition(":")
        here = path.startswith(("./", "../"))
        return f"{word}{colon}{folder}/./{path.removeprefix('./')}" if here else source

    part = "corpus" if isinstance(experiment, Experiment) else "task"
    section = getattr(experiment, part)
    names = [name for name in _SOURCES if hasattr(section, name)]
    sources = {name: tuple(map(place, getattr(section, name))) for name in names}
    section = dataclasses.replace(section, **sources)
    return dataclasses.replace(experiment, **{part: section})


# Fields that hold sources.
_SOURCES = ("sources", "train", "validation")


def _require_kind(kind: type, wanted: type, where: str) -> None:
    if kind is not wanted:
        what, commands = {
            Experiment: ("a pre-training, not a fine-tuning", "`bert-jax pretrain` takes it"),
            Finetuning: (
                "a fine-tuning, not a pre-training",
                "`bert-jax finetune` takes it, `predict` (with --score for scores), `embed` and "
                "`checkpoints` take its run; to begin with it, `export` it and `import` the folder",
            ),
        }[kind]
        raise InputError(f"{where}: is {what}; {commands}")


def _differences_from_defaults(experiment: Section) -> list[str]:
    """Lists differences section by section: phases, sources and tasks have no defaults."""
    factories = {f.name: f.default_factory for f in dataclasses.fields(experiment)}
    plain = {name: make() for name, make in factories.items() if make is not dataclasses.MISSING}
    if isinstance(experiment, Experiment):
        plain["corpus"] = Corpus(sources=experiment.corpus.sources)
    return [
        f"{name}.{line}"
        for name, section in plain.items()
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
    """Returns the type of each field of a section without lists of sections, by its path."""
    hints = {}
    for name, (hint, _) in fields_of(kind).items():
        if dataclasses.is_dataclass(hint):
            hints |= _hints(hint, f"{path}{name}.")
        else:
            hints[f"{path}{name}"] = hint
    return hints


def _apply(tree: dict[str, Any], settings: Sequence[str], hints: Mapping[str, Any]) -> None:
    """Writes `--set` strings into the JSON of an experiment, whose fields have these types."""
    for setting in settings:
        path, equals, text = setting.partition("=")
        path = _RENAMED.get(path.strip(), path.strip())
        if not equals:
            raise InputError(
                f"--set {setting}: write it as FIELD=VALUE, e.g. model.hidden_size=128; "
                "`bert-jax config --explain` says what fields there are"
            )
        if path not in hints:
            below = next((other for other in hints if other.startswith(f"{path}.")), "")
            near = f"set one of its fields, as {below}" if below else suggestion(path, hints)
            raise InputError(f"--set {setting}: {path} is no field; {near}")
        node: Any = tree
        *parents, key = path.split(".")
        for parent in parents:
            node = node[int(parent)] if isinstance(node, list) else node.setdefault(parent, {})
        node[key] = _parse(text, hints[path], setting)


def _parse(text: str, hint: Any, setting: str) -> object:
    try:
        if get_origin(hint) is not tuple:
            return _number(text, hint) if hint in (int, float) else text
        if re.match(r'\[\s*["\]\d-]', text):  # and not [MASK]
            return json.loads(text)
        item, parts = get_args(hint)[0], text.split(",") if text else []
        return [part for part in parts if part] if item is str else [item(part) for part in parts]
    except (ValueError, RecursionError) as error:
        raise InputError(f"--set {setting}: {text!r}: write {TYPES[hint]}") from error


def _number(text: str, kind: type[int] | type[float]) -> int | float:
    """Parses a number; 1e3 is a whole one, as are any that a float holds exactly."""
    whole = kind is int and "e" in text.lower() and float(text).is_integer()
    return int(float(text)) if whole else kind(text)


def to_json(experiment: Section) -> str:
    """Returns the resolved experiment as readable JSON, with its format version."""
    return (
        json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(experiment)}, indent=2)
        + "\n"
    )


def from_json(text: str | bytes, where: str, kind: type[T] = Experiment) -> T:
    """Reads what `to_json` wrote. `where` names the file in errors."""
    tree = json_object(text, where)
    version = tree.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise InputError(
            f"{where}: format_version {version!r}, this version reads {FORMAT_VERSION}; use the "
            "bert-jax that wrote it"
        )
    _require_kind(kind_of(tree), kind, where)
    built = section(kind, tree, where)
    if isinstance(built, Experiment) and "eval_seed" not in tree.get("data", {}):
        # Before there was this field, the run's own seed drew held-out rows.
        data = dataclasses.replace(built.data, eval_seed=built.seed)
        return dataclasses.replace(built, data=data)
    return built


def kind_of(tree: dict[str, Any]) -> type[Section]:
    """Returns which experiment a JSON object describes."""
    return Finetuning if "task" in tree else Experiment


def differences(old: Section, new: Section, role: str) -> list[str]:
    """Lists fields of sections of this role ("all": any) that differ, as `path: old -> new`."""
    olds, news = dict(flatten(old, role)), dict(flatten(new, role))
    paths = sorted(olds.keys() | news.keys())
    pairs = [(path, olds.get(path, "absent"), news.get(path, "absent")) for path in paths]
    return [f"{path}: {a!r} -> {b!r}" for path, a, b in pairs if a != b]


# Settings that are no more, each with the value that runs of before have which did without; None:
# with any, since it changed nothing without another of them.
_GONE = {
    "data.packing": "none",
    "phases.N.examples_per_row": None,
    "phases.N.predictions_per_row": None,
}
# Former names of settings, which saved runs and scripts have.
_RENAMED = {"task.blank_cells": "task.broken_rows"}


def notes(experiment: Section) -> list[str]:
    """Returns a line for each setting that was given and changes nothing."""
    given, lines = dict(flatten(experiment)), []
    for path, section, name in _leaves(experiment, ""):
        for rule in fields_of(type(section))[name][1]:
            is_noted = isinstance(rule, RequiresValue) and "." in rule.field
            if is_noted and given[rule.field] not in rule.values and not section.is_default(name):
                wanted = f"{rule.field}={' or '.join(rule.values)}"
                lines.append(f"note: {path}={given[path]} has a meaning with {wanted} only")
    return lines


def flatten(section: Section, role: str = "all") -> list[tuple[str, object]]:
    """Lists (path, value) of every field, in order; `role` keeps identity or placement alone.

    Sources are as `named` has them.
    """
    rows = []
    for path, of, name in _leaves(section, ""):
        value = getattr(of, name)
        if role in ("all", of.role):
            rows.append((path, tuple(map(named, value)) if name in _SOURCES else value))
    return rows


def _leaves(section: Section, path: str) -> Iterator[tuple[str, Section, str]]:
    """Yields path, section and name of each field that is no section itself, in order."""
    for name in fields_of(type(section)):
        value, where = getattr(section, name), f"{path}{name}"
        if isinstance(value, Section):
            yield from _leaves(value, f"{where}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            for number, item in enumerate(value):
                yield from _leaves(item, f"{where}.{number}.")
        else:
            yield where, section, name


def section(kind: type[T], value: Any, where: str) -> T:
    """Builds a section from the object that JSON gives for it; `where` begins its errors."""
    with prefix_errors(where):
        return _build(kind, value, "")


def _build(hint: Any, value: Any, where: str) -> Any:
    """Returns what JSON holds as the value of a field, checking as it goes."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise InputError(f"{where or 'experiment'}: expected an object")
        known = {f.name: f for f in dataclasses.fields(hint)}
        prefix = f"{where}." if where else ""
        value = {key: v for key, v in value.items() if not _is_gone(f"{prefix}{key}", v)}
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
            # One of several sections, a phase, does not know its number.
            name, dot, rest = str(error).partition(".")
            if not (dot and where.startswith(f"{name}.")):
                raise
            raise InputError(f"{where}.{rest}") from error
    if get_origin(hint) is tuple and isinstance(value, list):
        item = get_args(hint)[0]
        return tuple(_build(item, v, f"{where}.{i}") for i, v in enumerate(value))
    return value


def _is_gone(path: str, value: object) -> bool:
    """Returns whether a setting is one that is no more; refuses it if it changed something."""
    field = re.sub(r"\.\d+\.", ".N.", path)
    if field in _GONE and _GONE[field] not in (None, value):
        raise InputError(f"{path}={value!r}: is no more; use the bert-jax that wrote it")
    return field in _GONE
