"""Rules for names and sentences of the code and of the documents."""

import ast
import collections
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]

# A function is a verb with its object, or the noun that it computes. Its name does not begin with
# one of these words, and is none of the pronouns. (`with_...`, `without_...` return a changed copy,
# and `on_...` handles an event, as elsewhere.)
_PREPOSITIONS = "about above across after against among as at before below between beyond by for"
_PREPOSITIONS += " from in into of off out over since through to under until up within"
_PARTICIPLES = "asked begun called chosen cut done drawn forgotten found given going gone held"
_PARTICIPLES += " hidden kept known laid learned left listed lost made met moved named opened"
_PARTICIPLES += " packed placed said seen sent shown taken told tried used wanted written"
_PRONOUNS = "all any both each every it one other others ours some that theirs these this what"
FIRST_WORDS = frozenset(f"{_PREPOSITIONS} {_PARTICIPLES}".split())
PRONOUNS = frozenset(_PRONOUNS.split())
# Ordinary names that begin so: constructors, conversions, held-out rows, and indexing as in jnp.
USUAL = re.compile(r"of|at|held_out\w*|(to|from)_(json|bytes|dict)")
WIDTH = 100


def python_files() -> list[pathlib.Path]:
    folders = ("bert_jax", "launch", "experiments")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    symlinks = {ROOT / "bert_jax" / "experiments", ROOT / "bert_jax" / "launch"}
    return sorted(path for path in files if not symlinks & set(path.parents))


def unclear_functions(nodes: list[ast.AST]) -> Iterator[str]:
    """Yields the names of functions that break the rule above."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name.strip("_")
            is_unclear = name.partition("_")[0] in FIRST_WORDS or name in PRONOUNS
            if is_unclear and not USUAL.fullmatch(name):
                yield node.name


def sentences_with_of(source: str, nodes: list[ast.AST]) -> Iterator[str]:
    """Yields the sentences of comments and docstrings that begin with "Of"."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    texts += re.findall(r"(?:^|  )#(.*(?:\n *#.*)*)", source, re.MULTILINE)
    for text in texts:
        plain = re.sub(r"\n *#", "", text).strip()
        yield from re.findall(r"(?:^|[.;:]\s|\n\n)(Of [^.\n]{0,40})", plain)


def duplicates(names: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Returns the names that stand in several places, with the places."""
    places = collections.defaultdict(list)
    for name, place in names:
        places[name].append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def prose(page: str) -> list[str]:
    """Returns the lines of a page of Markdown outside of code, tables and pictures."""
    text = re.sub(r"^ *```.*?^ *```", "", page, flags=re.MULTILINE | re.DOTALL)
    return [line for line in text.splitlines() if not line.lstrip().startswith(("|", "!["))]


def violations() -> list[str]:
    """Returns a line for each violation in the code and in the documents."""
    lines, classes, modules = [], [], []
    for path in python_files():
        name, source = path.relative_to(ROOT).as_posix(), path.read_text()
        nodes = list(ast.walk(ast.parse(source)))
        lines += [f"function {name} {function}" for function in unclear_functions(nodes)]
        if count := len(list(sentences_with_of(source, nodes))):
            lines.append(f"of {name} {count}")
        if name.startswith("bert_jax/"):
            names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
            classes += [(one, name) for one in names if not one.startswith("_")]
            if not path.stem.startswith("__"):
                modules.append((path.stem, name))
    for kind, places in (("class", classes), ("module", modules)):
        lines += [f"{kind} {name} {' '.join(found)}" for name, found in duplicates(places).items()]
    for path in [ROOT / "README.md", ROOT / "WORKSPACE.md", *(ROOT / "docs").rglob("*.md")]:
        if wide := [line for line in prose(path.read_text()) if len(line) > WIDTH]:
            lines.append(f"wide {path.relative_to(ROOT).as_posix()} {len(wide)}")
    return sorted(lines)


def test_no_violation_exists():
    assert violations() == []
