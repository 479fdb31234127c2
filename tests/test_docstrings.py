"""Docstrings begin with what a function does, and each word has one sense."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(path for room in ("bert_jax", "launch") for path in (ROOT / room).rglob("*.py"))
# Where docstrings are a command's help: "Train ...".
COMMANDS = ("bert_jax/tools/conformance/checklist.py",)
# End as verbs do.
NO_VERBS = {
    *("As", "Bytes", "Documents", "Examples", "Features", "Files", "Hosts", "Ids", "Is", "Its"),
    *("Lines", "Names", "Numbers", "Operations", "Pairs", "Parameters", "Pieces", "Positions"),
    *("Rows", "Seconds", "Sentences", "Settings", "Shards", "Steps", "Texts", "This", "Tokens"),
    *("Values", "Was", "Weights", "Words"),
}
QUESTIONS = {"As", "How", "Of", "See", "What", "Where", "Whether", "Which", "Who", "Why"}
WORDS = re.compile(r"\b(anew|beside|but for|claim(s|ed)?|said|told|whoever)\b", re.IGNORECASE)


def documented(node):
    """Yields public functions, methods and classes that have a docstring."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name.startswith("_"):
                continue
            if ast.get_docstring(child):
                yield child
            if isinstance(child, ast.ClassDef):
                yield from documented(child)
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from documented(child)


def is_well_begun(node):
    first = re.split(r"[\s.,:;]", ast.get_docstring(node), maxsplit=1)[0]
    if isinstance(node, ast.ClassDef) or any(
        "property" in ast.unparse(decorator) for decorator in node.decorator_list
    ):
        return first[:1].isupper() and first not in QUESTIONS
    return bool(re.fullmatch(r"[A-Z][a-z-]*s", first)) and first not in NO_VERBS


def badly_begun(source):
    return [node.name for node in documented(ast.parse(source)) if not is_well_begun(node)]


def words(source):
    """Words that have another one here, and `found` for what a function gives."""
    for number, line in enumerate(source.split("\n"), 1):
        if word := WORDS.search(line):
            yield f"{number}: {word[0]}"
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "id", None) or getattr(node, "arg", None)
        if name == "found":
            yield f"{node.lineno}: found"


def repeats(source):
    """What a docstring says a second time: fields, which are explained where they stand, and that
    bad input is an InputError."""
    for number, line in enumerate(source.split("\n"), 1):
        if re.match(r"\s*(Attributes:|InputError: .*)$", line):
            yield f"{number}: {line.strip()}"


def test_what_a_docstring_says_first():
    for path in FILES:
        source = path.read_text()
        if path.relative_to(ROOT).as_posix() not in COMMANDS:
            assert not badly_begun(source), path
        assert not list(words(source)), path
        assert not list(repeats(source)), path
