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
from typing import Any, NamedTuple

from bert_jax.config.fields import CODE, Section
from bert_jax.errors import InputError

# Files that `--code` named, parted as in PATH: of this process and of those that it starts.
_NAMED = "BERT_JAX_CODE"
# The copy that a run keeps of the file.
COPY = "experiment_code.py"


class Reference(NamedTuple):
    """A function of a file: what a config's `code` says."""

    file: str
    function: str
    sha256: str

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Reads FILE:FUNCTION:SHA256.

        Raises:
          ValueError: it is not written so.
        """
        match = CODE.fullmatch(text)
        if match is None:
            raise ValueError(text)
        return cls(*match.groups())

    def __str__(self) -> str:
        return ":".join(self)


class _Loaded(NamedTuple):
    """The names of a file that was run, and its text."""

    names: dict[str, Any]
    source: str


# By the hash of the file.
_loaded: dict[str, _Loaded] = {}


def own(function: Callable[..., Any]) -> str:
    """Returns what `data.code` or `model.code` is, for a function at the top of its file.

    An experiment file calls it with an objective or an encoder of its own.
    """
    path = pathlib.Path(getattr(getattr(function, "__code__", None), "co_filename", ""))
    names = getattr(function, "__globals__", {})
    name = getattr(function, "__name__", "")
    if path.suffix != ".py" or names.get(name) is not function:
        raise InputError(f"own({name or function!r}): give it a function at the top of a .py file")
    content = _content(path)
    if not content.endswith(b"\n"):  # scripts that write the file elsewhere would add it
        raise InputError(f"{path}: must end with a newline")
    sha256 = hashlib.sha256(content).hexdigest()
    _loaded[sha256] = _Loaded(names, content.decode())
    name_file(str(path))
    reference = f"{path.name}:{name}:{sha256}"
    try:
        return str(Reference.parse(reference))
    except ValueError as error:
        raise InputError(
            f"{path}: rename it; only letters, digits, _ . and - may be in its name"
        ) from error


def name_file(path: str) -> None:
    """Notes that a file may be run if a config asks for it by its hash: `--code`."""
    _content(pathlib.Path(path))
    named = _named()
    if os.path.abspath(path) not in named:
        os.environ[_NAMED] = os.pathsep.join([*named, os.path.abspath(path)])


def was_used(path: str) -> bool:
    """Tells whether a config has asked for this file, as it is now."""
    return hashlib.sha256(_content(pathlib.Path(path))).hexdigest() in _loaded


def _named() -> list[str]:
    return [path for path in os.environ.get(_NAMED, "").split(os.pathsep) if path]


def _content(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read as code ({error.strerror})") from error


def function(reference: str) -> Callable[..., Any]:
    """Returns the function of a reference, whose file is run if it was named and is the one."""
    wanted = Reference.parse(reference)
    names = _load(wanted).names
    if not callable(names.get(wanted.function)):
        raise InputError(f"{wanted.file}: defines no function {wanted.function}")
    return names[wanted.function]


def files(section: Section) -> dict[str, str]:
    """Returns the file that an experiment has code of, {`COPY`: its text}; of one without, {}."""
    references = [Reference.parse(text) for _, text in codes(section) if text]
    if len({reference.sha256 for reference in references}) > 1:
        names = " and ".join(reference.file for reference in references)
        raise InputError(f"data.code: code of two files, {names}; write both into one")
    return {COPY: _load(references[0]).source} if references else {}


def codes(section: Any) -> list[tuple[str, str]]:
    """Lists the fields of an experiment that name code, and what they say."""
    parts = ((name, getattr(section, name, None)) for name in ("model", "data"))
    return [(f"{name}.code", part.code) for name, part in parts if hasattr(part, "code")]


def _load(wanted: Reference) -> _Loaded:
    if wanted.sha256 not in _loaded:
        there = (path for path in _named() if os.path.exists(path))
        named = {path: _content(pathlib.Path(path)) for path in there}
        hashes = {path: hashlib.sha256(content).hexdigest() for path, content in named.items()}
        path = next((path for path, sha256 in hashes.items() if sha256 == wanted.sha256), None)
        if path is None:
            others = "".join(f"; {path} has {sha256}" for path, sha256 in hashes.items())
            raise InputError(
                f"{wanted.file}: {wanted.function}() is needed, of the file with sha256 "
                f"{wanted.sha256}; name it with --code FILE (a run keeps a copy, {COPY}){others}"
            )
        module = types.ModuleType(pathlib.Path(path).stem)
        module.__file__ = path
        # The bytes that were compared, not the file, which may change.
        with failures(pathlib.Path(path)), _found_as_module(module):
            exec(compile(named[path], path, "exec", dont_inherit=True), module.__dict__)
        _loaded[wanted.sha256] = _Loaded(module.__dict__, named[path].decode())
    return _loaded[wanted.sha256]


@contextlib.contextmanager
def _found_as_module(module: types.ModuleType) -> Iterator[None]:
    """Has `sys.modules` hold it meanwhile: dataclasses look there for what annotations mean."""
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[module.__name__]
        else:
            sys.modules[module.__name__] = before


# --- running ---


def run_file(path: pathlib.Path, function: str) -> tuple[Any, tuple[str, Section] | None]:
    """Runs a file, and the function that it is to define.

    Args:
      path: of an experiment file or a table.
      function: `experiment` or `table`.

    Returns:
      What the function gives; and the name and experiment of the file that it varies, if it does.
    """
    with failures(path), _importing_from(path.parent.resolve()) as imported:
        names = runpy.run_path(str(path), run_name=path.stem)
        if function not in names:
            raise InputError(f"{path}: defines no {function}() -> {function.capitalize()}")
        at_its_top = imported()
        value = names[function]()
        if at_its_top and any(text.startswith(f"{path.name}:") for _, text in codes(value)):
            raise InputError(
                f"{path}: a run keeps a copy of this file for its code, but not of "
                f"{at_its_top[0].__name__}.py; import that within {function}()"
            )
        return value, _varied(imported(), type(value))


@contextlib.contextmanager
def failures(path: pathlib.Path) -> Iterator[None]:
    """Has everything that code of a user raises be one line, which names its file and line."""
    folder = path.parent.resolve()
    try:
        yield
    except InputError as error:
        text = str(error)
        named = text.startswith(str(path))
        raise InputError(text if named else f"{path}: {text}") from error
    except (Exception, SystemExit) as error:
        places = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError) and error.filename:
            places.append((error.filename, error.lineno))
        ours = [p for p in places if pathlib.Path(p[0]).resolve().parent == folder]
        name, line = ours[-1] if ours else (str(path), None)
        where = str(path.parent / pathlib.Path(name).name) + (f":{line}" if line else "")
        raise InputError(f"{where}: {type(error).__name__}: {error}") from error


def _varied(modules: list[Any], kind: type) -> tuple[str, Section] | None:
    """Returns the file and the experiment of the first module that gives one of this kind.

    Other modules help an experiment file in ways of their own, and fail where it uses them.
    """
    for module in modules:
        with contextlib.suppress(Exception):
            experiment = module.experiment()
            if type(experiment) is kind:
                return f"{module.__name__}.py", experiment
    return None


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
