"""The files of a corpus as `prepare` left them: their sizes and hashes, and whether they still are.

Large files are looked at twice: at every opening for their size, and in full once they are made,
copied, or asked for (`prepare --verify`), at about a gigabyte a second. All that is smaller is read
in full at every opening.
"""

import hashlib
import os
import pathlib
from collections.abc import Iterable
from typing import Any, Literal

from etils import epath

from bert_jax.errors import InputError

# {path in the corpus folder: [bytes, SHA-256]}
Files = dict[str, list[Any]]

# Up to this many bytes a file is read in full at every opening: a few hundredths of a second.
_SMALL = 1 << 25


def listed(folder: epath.Path, below: Iterable[str]) -> Files:
    """Sizes and hashes of all files below folders of the corpus folder, in order of their names."""
    root = pathlib.Path(folder)
    paths = sorted(p for name in below for p in (root / name).rglob("*") if p.is_file())
    return {p.relative_to(root).as_posix(): [p.stat().st_size, _sha256(p)] for p in paths}


def are_described(found: Any) -> bool:
    """Whether a manifest's table is one that `listed` made; its paths lie in the folder."""
    return isinstance(found, dict) and all(
        isinstance(entry, list)
        and [type(part) for part in entry] == [int, str]
        and not os.path.isabs(name)
        and ".." not in name.split("/")
        for name, entry in found.items()
    )


def damage(path: epath.PathLike, entry: list[Any], depth: Literal["cheap", "full"]) -> str:
    """What is wrong with a file, in words; "" if nothing is.

    Args:
      path: a local file.
      entry: of the manifest.
      depth: `full` reads files of any size, `cheap` small ones alone.
    """
    size, sha256 = entry
    if not os.path.isfile(path):
        return "is missing"
    if os.path.getsize(path) != size:
        return f"has {os.path.getsize(path)} bytes, not {size}"
    if (depth == "full" or size <= _SMALL) and _sha256(path) != sha256:
        return "was changed since it was made"
    return ""


def require(
    folder: epath.Path, files: Files, below: str, depth: Literal["cheap", "full"], mend: str
) -> None:
    """Raises InputError for a file of the manifest that is not as it was made.

    Args:
      folder: the corpus folder, a local one.
      files: of its manifest.
      below: how the paths that are looked at begin.
      depth: as in `damage`.
      mend: what to do, in words.
    """
    for name, entry in files.items():
        wrong = damage(folder / name, entry, depth) if name.startswith(below) else ""
        if wrong:
            raise InputError(f"{folder / name}: missing or damaged ({wrong}); {mend}")


def _sha256(path: epath.PathLike) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
