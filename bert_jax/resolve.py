"""Experiments from and to text: `--set` strings, JSON, and lists of differences."""

import dataclasses
import difflib
import json
import pathlib
import typing
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bert_jax.config import Corpus, Experiment, Finetuning, InputError, load_file
from bert_jax.section import Section
from bert_jax.storage.workdir import Workdir, sealed

FORMAT_VERSION = 1

T = typing.TypeVar("T", bound=Section)
Claim = typing.TypeVar("Claim", bound=Section)  # an Experiment or a Finetuning


def load(path: str, kind: type[Claim] = Experiment) -> Claim:
    """Reads EXPERIMENT: a .py file that defines `experiment()`, or a resolved config as JSON.

    Raises:
      InputError: there is none, or it is of another kind.
    """
    return _load(path, kind)[0]


def load_with_origin(
    path: str, settings: Sequence[str], kind: type[Claim] = Experiment
) -> tuple[Claim, dict[str, Any]]:
    """EXPERIMENT with `--set` strings applied, and a JSON object that says where it comes from.

    The object names the file, the experiment file that it varies ("" if none), the strings, and
    lists what differs from that parent, or from the defaults of the sections.
    """
    loaded, parent = _load(path, kind)
    experiment = override(loaded, settings)
    if parent is None:
        name, changed = "", _differences_from_defaults(experiment)
    else:
        name, changed = parent[0], differences(parent[1], experiment, "all")
    origin = {
        "format_version": FORMAT_VERSION,
        "experiment": path,
        "parent": name,
        "settings": list(settings),
        "differences": changed,
    }
    return experiment, sealed(origin)


def _load(path: str, kind: type[Claim]) -> tuple[Claim, tuple[str, Claim] | None]:
    file = pathlib.Path(path)
    if not file.is_file():
        raise InputError(f"{path}: no such experiment file")
    if file.suffix == ".py":
        loaded = load_file(file)
        _require_kind(type(loaded.experiment), kind, path)
        return loaded.experiment, loaded.parent
    if file.suffix == ".json":
        return from_json(_text(file.read_bytes(), path), path, kind), None
    raise InputError(f"{path}: an experiment is a .py file or a resolved config as .json")


def _require_kind(found: type, wanted: type, where: str) -> None:
    if found is not wanted:
        what, commands = {
            Experiment: ("a pre-training", "`bert-jax pretrain` takes it"),
            Finetuning: (
                "a fine-tuning",
                "`bert-jax finetune` takes it, `predict` (with --score for scores) and "
                "`checkpoints` take its run",
            ),
        }[found]
        raise InputError(f"{where}: {what}; {commands}, and it cannot stand here")


def _differences_from_defaults(claim: Section) -> list[str]:
    """As `differences`, section by section: phases, sources and tasks have no defaults."""
    lines = []
    for f in dataclasses.fields(claim):
        if f.default_factory is not dataclasses.MISSING:
            section = getattr(claim, f.name)
            changed = differences(f.default_factory(), section, "all")
            lines += [f"{f.name}.{line}" for line in changed]
    if isinstance(claim, Experiment):
        plain = Corpus(sources=claim.corpus.sources)
        lines += [f"corpus.{line}" for line in differences(plain, claim.corpus, "all")]
    return lines


def holds_finetuning(workdir: Workdir) -> bool:
    """Whether a fine-tuned run lies here; neither a pre-training, nor a base, nor nothing is one.

    Raises:
      InputError: what lies here cannot be read.
    """
    if not workdir.experiment.exists():
        return False
    where = str(workdir.named / workdir.experiment.name)
    return "task" in _object(_text(workdir.experiment.read_bytes(), where), where)


def load_saved(workdir: Workdir, kind: type[Claim] = Experiment) -> Claim:
    """The experiment that a run was started with.

    Raises:
      InputError: no run here, or one of another kind.
    """
    if (workdir.root / "base.json").exists():
        raise InputError(
            f"{workdir.named}: a base, which has no held-out text; name an EXPERIMENT, whose "
            "corpus lies in run.corpus_dir"
        )
    if not workdir.experiment.exists():
        raise InputError(f"{workdir.named}: no run here (no experiment.json)")
    where = str(workdir.named / workdir.experiment.name)
    return from_json(_text(workdir.experiment.read_bytes(), where), where, kind)


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: byte {error.start} is not UTF-8; put the whole file back"
        ) from error


def override(experiment: Claim, settings: Sequence[str]) -> Claim:
    """Applies `--set` strings like `model.hidden_size=128` or `phases.0.steps=10`, all at once.

    Raises:
      InputError: a string without "=", an unknown field (the nearest is suggested), a value of
        another type, or a combination that validation refuses.
    """
    tree = _plain(experiment)
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise InputError(
                f"--set {setting}: write it as FIELD=VALUE, e.g. model.hidden_size=128"
            )
        _assign(type(experiment), tree, path.strip(), text, setting)
    return _build(type(experiment), tree, "")


def _assign(hint: Any, tree: dict, path: str, text: str, setting: str) -> None:
    node: Any = tree
    keys = path.split(".")
    for depth, key in enumerate(keys):
        where = ".".join(keys[:depth])
        if get_origin(hint) is tuple:
            if not (key.isdecimal() and key.isascii() and int(key) < len(node)):
                raise InputError(
                    f"--set {setting}: {where or 'experiment'} has entries 0 to {len(node) - 1}"
                )
            key, hint = int(key), get_args(hint)[0]
        elif dataclasses.is_dataclass(hint):
            hints = _field_types(hint)
            if key not in hints:
                raise InputError(f"--set {setting}: {_unknown(key, where, hints)}")
            hint = hints[key]
        else:
            raise InputError(f"--set {setting}: {where} is a single value, it has no field {key!r}")
        if depth == len(keys) - 1:
            node[key] = _parse(text, hint, setting)
        else:
            node = node[key]


# What a value has to be, in words.
_KINDS = {
    int: "a whole number",
    float: "a number",
    tuple[int, ...]: "a whole number, or several as 1,4",
}


def _parse(text: str, hint: Any, setting: str) -> object:
    if dataclasses.is_dataclass(hint):
        raise InputError(f"--set {setting}: names a whole section; set one of its fields")
    if hint is str or get_origin(hint) is Literal:
        return text
    if get_origin(hint) is tuple and get_args(hint)[0] is str and not text.startswith("["):
        return [part for part in text.split(",") if part]
    try:
        if hint == tuple[int, ...] and not text.startswith("["):
            return [int(part) for part in text.split(",")] if text else []
        if hint is int:
            return int(text)
        if hint is float:
            return float(text)
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        kind = _KINDS.get(hint, "JSON")
        raise InputError(f"--set {setting}: {text!r} is not {kind}") from error


def to_json(experiment: Section) -> str:
    """The resolved experiment as readable JSON, with its format version."""
    return json.dumps({"format_version": FORMAT_VERSION, **_plain(experiment)}, indent=2) + "\n"


def from_json(text: str, where: str, kind: type[Claim] = Experiment) -> Claim:
    """Reads what `to_json` wrote. `where` names the file in errors.

    Raises:
      InputError: not JSON, another format version, a claim of another kind, an unknown, missing or
        impossible field.
    """
    tree = _object(text, where)
    version = tree.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise InputError(
            f"{where}: format_version {version!r}, this version reads {FORMAT_VERSION}"
        )
    _require_kind(Finetuning if "task" in tree else Experiment, kind, where)
    try:
        return _build(kind, tree, "")
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error})") from error
    if not isinstance(tree, dict):
        raise InputError(f"{where}: expected a JSON object, a resolved experiment")
    return tree


def differences(old: Section, new: Section, kind: str) -> list[str]:
    """Fields of sections of `kind` ("all": any) whose values differ, as `path: old -> new`."""
    lines = []
    olds, news = dict(flatten(old, kind)), dict(flatten(new, kind))
    for path in sorted(olds.keys() | news.keys()):
        a, b = olds.get(path, "absent"), news.get(path, "absent")
        if a != b:
            lines.append(f"{path}: {a!r} -> {b!r}")
    return lines


def flatten(section: Any, kind: str = "all", path: str = "") -> list[tuple[str, object]]:
    """(path, value) of every field, in order; `kind` keeps identity or placement fields only."""
    rows: list[tuple[str, object]] = []
    for f in dataclasses.fields(section):
        value, where = getattr(section, f.name), f"{path}{f.name}"
        if isinstance(value, Section):
            rows += flatten(value, kind, where + ".")
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            for i, item in enumerate(value):
                rows += flatten(item, kind, f"{where}.{i}.")
        elif kind in ("all", section.kind):
            rows.append((where, value))
    return rows


def section(kind: type[T], value: Any, where: str) -> T:
    """A section from the object that JSON gives for it; `where` begins its complaints.

    Raises:
      InputError: an unknown field, or a value that the section refuses.
    """
    try:
        return _build(kind, value, "")
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists: what JSON holds."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _build(hint: Any, value: Any, where: str) -> Any:
    """The inverse of `_plain`, checking as it goes."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise InputError(f"{where or 'experiment'}: expected an object")
        hints = _field_types(hint)
        prefix = f"{where}." if where else ""
        for key in value:
            if key not in hints:
                raise InputError(_unknown(key, where, hints))
        for f in dataclasses.fields(hint):
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and f.name not in value:
                raise InputError(f"{prefix}{f.name}: missing")
        return hint(**{k: _build(hints[k], v, prefix + k) for k, v in value.items()})
    if get_origin(hint) is tuple and not (hint == tuple[int, ...] and type(value) is int):
        if not isinstance(value, list):
            raise InputError(f"{where}: expected a list")
        item = get_args(hint)[0]
        return tuple(_build(item, v, f"{where}.{i}") for i, v in enumerate(value))
    return value


def _field_types(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(typing.cast(Any, cls))}


def _unknown(key: str, where: str, known: Sequence[str] | dict) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
    return f"{where or 'experiment'} has no field {key!r}; {hint}"
