"""Random damage to files, and how many damaged ones were tried.

`make test` tries two dozen of each kind; `make fuzz` thousands, and says how many.
"""

import collections
import contextlib
import copy
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from bert_jax.errors import InputError

EXAMPLES = os.environ.get("FUZZ_EXAMPLES")
# What a test finds must not depend on how busy the machine is.
settings.register_profile(
    "patient",
    deadline=None,
    database=None,
    max_examples=int(EXAMPLES or 25),
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
settings.load_profile("patient")

# Inputs tried of each kind of file, for conftest to tell.
TRIED: collections.Counter[str] = collections.Counter()
# What a load gives that was refused as it should be.
REFUSED = object()

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.integers(2**31, 2**80), st.just(10**4000),
    st.sampled_from(["", "nan", "-1", "1e999", "\0", "\udc80", "\ud800", "[]", '[{"steps": 1}]']),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)


def few(share: float = 0.25) -> settings:
    """Of a property whose examples are slow or many: so many of the profile's examples."""
    return settings(max_examples=max(int(settings.default.max_examples * share), 1))


def changed(tree: object, data: st.DataObject) -> object:
    """JSON with one of its nodes replaced, left out, added, or put where another was."""
    tree = copy.deepcopy(tree)
    node, key = _place(tree, data)
    how = data.draw(st.sampled_from(["replace", "near", "remove", "add", "move"]))
    if how == "remove":
        del node[key]
    elif how == "move":
        other, there = _place(tree, data)
        node[key] = copy.deepcopy(other[there])
    elif how == "near" and type(node[key]) in (int, float):
        node[key] += data.draw(st.integers(-3, 3))
    elif how == "add" and isinstance(node, dict):
        node[data.draw(st.text(max_size=5))] = data.draw(values)
    else:
        node[key] = data.draw(values)
    return tree


def _place(tree: Any, data: st.DataObject) -> tuple[Any, Any]:
    """A node somewhere in the tree, and a key of it."""
    node, child, key = None, tree, None
    while isinstance(child, dict | list) and child and (node is None or data.draw(st.booleans())):
        node = child
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        child = node[key]
    return node, key


def broken_bytes(text: bytes, data: st.DataObject) -> bytes:
    """A file cut short, with bytes put in or left out, or with a few that are others."""
    at = data.draw(st.integers(0, len(text) - 1))
    how = data.draw(st.sampled_from(["cut", "insert", "remove", "other", "bit", "zeros"]))
    few = data.draw(st.binary(min_size=1, max_size=4))
    if how == "cut":
        return text[:at] + data.draw(st.sampled_from([b"", few]))
    if how == "insert":
        return text[:at] + few + text[at:]
    if how == "remove":
        return text[:at] + text[at + len(few) :]
    if how == "bit":
        return text[:at] + bytes([text[at] ^ 1 << few[0] % 8]) + text[at + 1 :]
    if how == "zeros":
        return text[:at] + b"\0" * len(text[at : at + 64]) + text[at + 64 :]
    return text[:at] + few + text[at + len(few) :]


def damaged(whole: bytes, name: str, data: st.DataObject) -> bytes:
    """Other content for the file of this name, damaged as JSON or JSON lines if it holds such."""
    if name.endswith((".json", "_METADATA", "_sharding")) and data.draw(st.booleans()):
        return json.dumps(changed(json.loads(whole), data)).encode()
    if name.endswith(".jsonl") and data.draw(st.booleans()):
        lines = whole.splitlines()
        at = data.draw(st.integers(0, len(lines) - 1))
        how = data.draw(st.sampled_from(["change", "change", "remove", "repeat", "move"]))
        if how == "change":
            lines[at] = json.dumps(changed(json.loads(lines[at]), data)).encode()
        elif how == "remove":
            del lines[at]
        elif how == "repeat":
            lines.insert(at, lines[at])
        else:
            lines.append(lines.pop(at))
        return b"".join(line + b"\n" for line in lines)
    return broken_bytes(whole, data)


@contextlib.contextmanager
def damage(file: pathlib.Path, data: st.DataObject, kind: str = "") -> Iterator[bytes]:
    """Gives the file other content, and its own back; counts it as `kind`, or by its name."""
    whole = file.read_bytes()
    content = damaged(whole, file.name, data)
    TRIED[kind or file.name] += 1
    _exchange(file, content)
    try:
        yield content
    finally:
        _exchange(file, whole)


def _exchange(file: pathlib.Path, content: bytes) -> None:
    """Another file in its place: the one that was there may still be mapped into memory."""
    beside = file.parent / f".{file.name}.beside"
    beside.write_bytes(content)
    beside.replace(file)


def result(load: Callable[[], Any], *named: object) -> Any:
    """What the load gives, or REFUSED by a line that names one of `named`."""
    try:
        return load()
    except InputError as error:
        said = str(error)
        assert any(str(name) in said for name in named), said
        assert said.isprintable()
        return REFUSED
