"""Users' code: runs experiment files and tables, and loads their custom objectives and encoders.

A config names a custom objective or encoder as FILE:FUNCTION:SHA256, where SHA256 is the hash of
the file. A file is run only if the user names it: as EXPERIMENT, or by `--code` if its hash is the
one in the config. Neither the copies in workdirs nor other files of a folder are ever run.
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

# The environment variable that passes allowed paths to child processes, separated as in PATH.
_PATHS_VARIABLE = "BERT_JAX_CODE"
# The paths that `--code` and experiment files allow in this process.
_named_paths: list[str] = []
# Name of the file's copy in a workdir.
COPY = "experiment_code.py"
# {hash of a file that was run: (namespace of its module, its text)}.
_loaded: dict[str, tuple[dict[str, Any], str]] = {}


def own(function: Callable[..., Any]) -> str:
    """Returns the value of `data.code` or `model.code` for a function of a module.

    An experiment file calls it with its custom objective or encoder.
    """
    namespace, name = getattr(function, "__globals__", {}), getattr(function, "__name__", "")
    path = pathlib.Path(namespace.get("__file__", ""))
    if path.suffix != ".py" or namespace.get(name) is not function:
        raise InputError(
            f"own({name or function!r}): give it a function of a .py file, not a nested one"
        )
    content, sha256 = _read(path)
    if not content.endswith(b"\n"):  # a launch script, which embeds the file, would add it
        raise InputError(f"{path}: must end with a newline; add one")
    reference = f"{path.name}:{name}:{sha256}"
    if not CODE.fullmatch(reference):
        raise InputError(f"{path}: rename it; only letters, digits, _ . and - may be in its name")
    _loaded[sha256] = namespace, content.decode()
    allow_code_file(str(path))
    return reference


def allow_code_file(path: str) -> None:
    """Allows a file to be run if a config names its hash: what `--code` does."""
    _read(pathlib.Path(path))
    _named_paths.append(os.path.abspath(path))


def environment() -> dict[str, str]:
    """Returns the environment variable that allows the same files in a child process."""
    return {_PATHS_VARIABLE: os.pathsep.join(_allowed_paths())}


def was_used(path: str) -> bool:
    """Returns whether a config named this file by its current hash."""
    return _read(pathlib.Path(path))[1] in _loaded


def _allowed_paths() -> list[str]:
    inherited = os.environ.get(_PATHS_VARIABLE, "").split(os.pathsep)
    return [*dict.fromkeys(path for path in (*inherited, *_named_paths) if path)]


def _read(path: pathlib.Path) -> tuple[bytes, str]:
    """Returns a file's content and its hash."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read as code ({error.strerror})") from error
    return content, hashlib.sha256(content).hexdigest()


def load_function(reference: str) -> Callable[..., Any]:
    """Returns the function of a reference; runs its file if the user named it."""
    file, name, _ = reference.split(":")
    namespace, _ = _load(reference)
    if not callable(namespace.get(name)):
        raise InputError(f"{file}: defines no function {name}")
    return namespace[name]


def path_of(reference: str) -> pathlib.Path:
    """Returns the path of a reference's file."""
    return pathlib.Path(_load(reference)[0]["__file__"])


def code_copy(section: Section) -> dict[str, str]:
    """Returns the file with an experiment's custom code as {`COPY`: its text}, {} without code."""
    references = [reference for _, reference in code_references(section) if reference]
    if len({reference.rpartition(":")[2] for reference in references}) > 1:
        names = " and ".join(reference.partition(":")[0] for reference in references)
        raise InputError(f"data.code: code of two files, {names}; write both into one")
    return {COPY: _load(references[0])[1]} if references else {}


def code_references(section: Any) -> list[tuple[str, str]]:
    """Returns the fields of an experiment that name custom code, with their values."""
    inner = ((name, getattr(section, name, None)) for name in ("model", "data"))
    return [(f"{name}.code", value.code) for name, value in inner if hasattr(value, "code")]


def _load(reference: str) -> tuple[dict[str, Any], str]:
    file, name, wanted = reference.split(":")
    if wanted not in _loaded:
        paths = filter(pathlib.Path.exists, map(pathlib.Path, _allowed_paths()))
        files_read = {path: _read(path) for path in paths}
        path = next((path for path, (_, sha256) in files_read.items() if sha256 == wanted), None)
        if path is None:
            others = "".join(f"; {path} has {sha256}" for path, (_, sha256) in files_read.items())
            raise InputError(
                f"{file}: needs {name}() of the file with sha256 {wanted}; name that file with "
                f"--code FILE (a run keeps a copy, {COPY}){others}"
            )
        content = files_read[path][0]
        module = types.ModuleType(f"{path.stem}_{wanted[:8]}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module  # dataclasses resolve annotations there
        with report_failures(path):  # runs the bytes that were hashed: the file may change
            exec(compile(content, path, "exec", dont_inherit=True), module.__dict__)
        _loaded[wanted] = module.__dict__, content.decode()
    return _loaded[wanted]


# --- running ---


def run_file(
    path: pathlib.Path, function: str, *kinds: type[Section]
) -> tuple[Any, tuple[str, Section] | None]:
    """Runs a file and its function `experiment`, `table` or `suite`.

    Returns:
      The function's value; the file name and experiment of the parent that it changes, or None.
    """
    with report_failures(path), _importing_from(path.parent.resolve()) as imported:
        namespace = runpy.run_path(str(path), run_name=path.stem)
        if function not in namespace:
            raise InputError(f"{path}: defines no {function}() -> {function.capitalize()}")
        top_imports = imported()  # which the copy in a workdir could not import
        value = namespace[function]()
        if not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise InputError(f"{path}: {function}() returned {type(value).__name__}, not {wanted}")
        if top_imports and any(
            code.startswith(f"{path.name}:") for _, code in code_references(value)
        ):
            raise InputError(
                f"{path}: a run keeps a copy of this file for its code, but not of "
                f"{top_imports[0].__name__}.py; import that within {function}()"
            )
        # An imported module need not be an experiment file.
        for module in imported():
            with contextlib.suppress(Exception):
                parent = module.experiment()
                if type(parent) is type(value):
                    return value, (f"{module.__name__}.py", parent)
        return value, None


@contextlib.contextmanager
def report_failures(path: pathlib.Path) -> Iterator[None]:
    """Turns every exception of users' code into an InputError that names the file and line."""
    folder = path.parent.resolve()
    try:
        yield
    except InputError as error:
        text = str(error)
        raise InputError(text if text.startswith(str(path)) else f"{path}: {text}") from error
    except (Exception, SystemExit) as error:
        frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError) and error.filename:
            frames.append((error.filename, error.lineno))
        in_folder = [f for f in frames if pathlib.Path(f[0]).resolve().parent == folder]
        name, line = in_folder[-1] if in_folder else (str(path), None)
        where = str(path.parent / pathlib.Path(name).name) + (f":{line}" if line else "")
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(f"{where}: {type(error).__name__}: {reason}") from error


@contextlib.contextmanager
def _importing_from(folder: pathlib.Path) -> Iterator[Callable[[], list[Any]]]:
    """Puts a folder first on the import path; yields a function that lists modules of its files.

    `sys.path` and the files' entries in `sys.modules` are restored at the end, since another folder
    may have a file of the same name.
    """
    names = {file.stem for file in folder.glob("*.py")} - sys.stdlib_module_names
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    path, no_bytecode = list(sys.path), sys.dont_write_bytecode
    # Python checks bytecode by time and size: too coarse for a file that was just edited.
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        # In the order in which their imports began: a module precedes those that it imports.
        yield lambda: [module for name, module in sys.modules.items() if name in names]
    finally:
        sys.path[:], sys.dont_write_bytecode = path, no_bytecode
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
