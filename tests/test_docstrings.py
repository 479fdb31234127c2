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


def undocumented_methods(sources):
    """Yields public methods without a docstring that override no documented method.

    A method that overrides another inherits its docstring, as `help` and Sphinx show it.
    """
    trees = [ast.parse(source) for source in sources]
    classes = {n.name: n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}

    def methods(node):
        functions = [child for child in node.body if isinstance(child, ast.FunctionDef)]
        return [
            f for f in functions if not any("overload" in ast.unparse(d) for d in f.decorator_list)
        ]

    def ancestors(node):
        for base in node.bases:
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            if name in classes:
                yield classes[name]
                yield from ancestors(classes[name])

    for node in classes.values():
        inherited = {m.name for base in ancestors(node) for m in methods(base) if documents(m)}
        for method in methods(node):
            is_public = not (node.name.startswith("_") or method.name.startswith("_"))
            if is_public and not documents(method) and method.name not in inherited:
                yield f"{node.name}.{method.name}"


def documents(node):
    return ast.get_docstring(node) is not None


def test_a_method_has_a_docstring_or_inherits_one():
    assert list(undocumented_methods(path.read_text() for path in FILES)) == []
    base = 'class A:\n  def run(self):\n    "Runs."\n'
    assert not list(undocumented_methods([base, "class B(A[int]):\n  def run(self): ..."]))
    assert list(undocumented_methods([base, "class B(A):\n  def stop(self): ..."])) == ["B.stop"]
    assert list(undocumented_methods([base, "class B:\n  def run(self): ..."])) == ["B.run"]
