"""Code of users: experiment files and tables are run here, and what objectives and encoders of
their own they hold is found here.

A config names such a function as FILE:FUNCTION:SHA256, the hash being that of the file. A file runs
if it is named, as EXPERIMENT or by `--code`, the latter only if its hash is the one that a config
asks for; the copies that runs keep of it, and everything else that lies in a folder, never do.
"""

import contextlib
import hashlib
import importlib
import os
import pathlib
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from bert_jax.config.fields import CODE, Section
from bert_jax.errors import InputError

# Files that `--code` named: those of the process that started this one, parted as in PATH, and its
# own.
_NAMED = "BERT_JAX_CODE"
_named_files: list[str] = []
# The copy that a run keeps of the file.
COPY = "experiment_code.py"
# The names of files that were run, and their texts, by their hashes.
_loaded: dict[str, tuple[dict[str, Any], str]] = {}


def own(function: Callable[..., Any]) -> str:
    """Returns what `data.code` or `model.code` is, for a function at the top of its file.

    An experiment file calls it with an objective or an encoder of its own.
    """
    names, name = getattr(function, "__globals__", {}), getattr(function, "__name__", "")
    path = pathlib.Path(names.get("__file__", ""))
    if path.suffix != ".py" or names.get(name) is not function:
        raise InputError(f"own({name or function!r}): give it a function at the top of a .py file")
    content, sha256 = _read(path)
    if not content.endswith(b"\n"):  # scripts that write the file elsewhere would add it
        raise InputError(f"{path}: must end with a newline")
    reference = f"{path.name}:{name}:{sha256}"
    if not CODE.fullmatch(reference):
        raise InputError(f"{path}: rename it; only letters, digits, _ . and - may be in its name")
    _loaded[sha256] = names, content.decode()
    name_file(str(path))
    return reference


def name_file(path: str) -> None:
    """Notes that a file may be run if a config asks for it by its hash: `--code`."""
    _read(pathlib.Path(path))
    _named_files.append(os.path.abspath(path))


def environment() -> dict[str, str]:
    """Returns the variable that names the same files to a process that this one starts."""
    return {_NAMED: os.pathsep.join(_named())}


def was_used(path: str) -> bool:
    """Tells whether a config has asked for this file, as it is now."""
    return _read(pathlib.Path(path))[1] in _loaded


def _named() -> list[str]:
    inherited = os.environ.get(_NAMED, "").split(os.pathsep)
    return [*dict.fromkeys(path for path in (*inherited, *_named_files) if path)]


def _read(path: pathlib.Path) -> tuple[bytes, str]:
    """Returns a file's content and the hash of it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read as code ({error.strerror})") from error
    return content, hashlib.sha256(content).hexdigest()


def function(reference: str) -> Callable[..., Any]:
    """Returns the function of a reference, whose file is run if it was named and is the one."""
    file, name, _ = reference.split(":")
    names, _ = _load(reference)
    if not callable(names.get(name)):
        raise InputError(f"{file}: defines no function {name}")
    return names[name]


def path_of(reference: str) -> pathlib.Path:
    """Returns where the file of a reference lies."""
    return pathlib.Path(_load(reference)[0]["__file__"])


def files(section: Section) -> dict[str, str]:
    """Returns the file that an experiment has code of, {`COPY`: its text}; of one without, {}."""
    references = [text for _, text in codes(section) if text]
    if len({text.rpartition(":")[2] for text in references}) > 1:
        names = " and ".join(text.partition(":")[0] for text in references)
        raise InputError(f"data.code: code of two files, {names}; write both into one")
    return {COPY: _load(references[0])[1]} if references else {}


def codes(section: Any) -> list[tuple[str, str]]:
    """Lists the fields of an experiment that name code, and what they say."""
    parts = ((name, getattr(section, name, None)) for name in ("model", "data"))
    return [(f"{name}.code", part.code) for name, part in parts if hasattr(part, "code")]


def _load(reference: str) -> tuple[dict[str, Any], str]:
    file, name, wanted = reference.split(":")
    if wanted not in _loaded:
        there = {path: _read(path) for path in map(pathlib.Path, _named()) if path.exists()}
        path = next((path for path, (_, sha256) in there.items() if sha256 == wanted), None)
        if path is None:
            others = "".join(f"; {path} has {sha256}" for path, (_, sha256) in there.items())
            raise InputError(
                f"{file}: {name}() is needed, of the file with sha256 {wanted}; name it with "
                f"--code FILE (a run keeps a copy, {COPY}){others}"
            )
        content = there[path][0]
        module = types.ModuleType(f"{path.stem}_{wanted[:8]}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module  # where dataclasses look for what annotations mean
        with failures(path):  # runs the bytes that were compared, not the file, which may change
            exec(compile(content, path, "exec", dont_inherit=True), module.__dict__)
        _loaded[wanted] = module.__dict__, content.decode()
    return _loaded[wanted]


# --- running ---


def run_file(
    path: pathlib.Path, function: str, *kinds: type[Section]
) -> tuple[Any, tuple[str, Section] | None]:
    """Runs a file, and the function `experiment` or `table` that it is to define.

    Returns:
      What the function gives; and the name and experiment of the file that it varies, if it does.
    """
    with failures(path), _importing_from(path.parent.resolve()) as imported:
        names = runpy.run_path(str(path), run_name=path.stem)
        if function not in names:
            raise InputError(f"{path}: defines no {function}() -> {function.capitalize()}")
        at_its_top = imported()
        value = names[function]()
        if not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise InputError(f"{path}: {function}() returned {type(value).__name__}, not {wanted}")
        if at_its_top and any(text.startswith(f"{path.name}:") for _, text in codes(value)):
            raise InputError(
                f"{path}: a run keeps a copy of this file for its code, but not of "
                f"{at_its_top[0].__name__}.py; import that within {function}()"
            )
        # Other modules help an experiment file in ways of their own, and fail where it uses them.
        for module in imported():
            with contextlib.suppress(Exception):
                parent = module.experiment()
                if type(parent) is type(value):
                    return value, (f"{module.__name__}.py", parent)
        return value, None


@contextlib.contextmanager
def failures(path: pathlib.Path) -> Iterator[None]:
    """Has everything that code of a user raises be one line, which names its file and line."""
    folder = path.parent.resolve()
    try:
        yield
    except InputError as error:
        text = str(error)
        raise InputError(text if text.startswith(str(path)) else f"{path}: {text}") from error
    except (Exception, SystemExit) as error:
        places = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError) and error.filename:
            places.append((error.filename, error.lineno))
        ours = [p for p in places if pathlib.Path(p[0]).resolve().parent == folder]
        name, line = ours[-1] if ours else (str(path), None)
        where = str(path.parent / pathlib.Path(name).name) + (f":{line}" if line else "")
        why = (str(error).splitlines() or [""])[0]
        raise InputError(f"{where}: {type(error).__name__}: {why}") from error


@contextlib.contextmanager
def _importing_from(folder: pathlib.Path) -> Iterator[Callable[[], list[Any]]]:
    """Lets `import` find the files of a folder first, afresh; yields what lists those imported.

    `sys.path`, and `sys.modules` as far as it names files of the folder, are left as they
    were: another folder may have a file of the same name.
    """
    names = {file.stem for file in folder.glob("*.py")} - sys.stdlib_module_names
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    path, quiet = list(sys.path), sys.dont_write_bytecode
    # Compiled files are believed by time and size: too coarse for a file that was just edited.
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        # In the order in which their imports began: the first is what the file itself names first.
        yield lambda: [module for name, module in sys.modules.items() if name in names]
    finally:
        sys.path[:], sys.dont_write_bytecode = path, quiet
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
