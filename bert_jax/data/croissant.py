"""A prepared corpus as Croissant describes data sets (MLCommons, version 1.0): croissant.json.

It says what catalogues and loaders of data sets ask: the files with their hashes, and what a record
holds. Nothing here reads it.
"""

import json
import posixpath
from typing import Any

_VERSION = "http://mlcommons.org/croissant/1.0"
_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "column": "cr:column",
    "containedIn": "cr:containedIn",
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "includes": "cr:includes",
    "recordSet": "cr:recordSet",
    "repeated": "cr:repeated",
    "source": "cr:source",
}
# By the ending of a file's name.
_FORMATS = {".json": "application/json", ".txt": "text/plain"}
_FIELDS = {
    "ids": "Ids of the document's pieces, of all its sentences one after the other.",
    "sentence_lengths": "How many of the ids each sentence has.",
}


def describe(manifest: dict[str, Any]) -> str:
    """Returns the description of the corpus that a manifest is of, as text of JSON-LD.

    Paths are relative to the corpus folder, in which it is to lie.
    """
    splits, settings = manifest["splits"], manifest["settings"]
    counts = ", ".join(
        f"{of['documents']} documents and {of['tokens']} tokens in {split}"
        for split, of in splits.items()
    )
    kind, case = manifest["tokenizer"]["kind"], manifest["tokenizer"]["case"]
    files = [_file(name, *entry) for name, entry in manifest["files"].items() if entry[0]]
    (folder,) = {
        posixpath.dirname(name) for name in manifest["files"] if name.endswith("features.json")
    }
    records = {
        "@type": "cr:FileSet",
        "@id": "records",
        "name": "records",
        "description": "Documents as TFDS examples in ArrayRecord files.",
        "encodingFormat": "application/x-arrayrecord",
        "includes": f"{folder}/*.array_record-*",
    }
    described = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": _VERSION,
        "name": "bert_corpus",
        "description": (
            f"Text of {', '.join(settings['sources'])} as ids of a {case} {kind} vocabulary of "
            f"{settings['vocab_size']} pieces: {counts}."
        ),
        "version": "1.0.0",
        "distribution": [*files, records],
        "recordSet": [
            {
                "@type": "cr:RecordSet",
                "@id": "documents",
                "name": "documents",
                "field": [_field(name, meaning) for name, meaning in _FIELDS.items()],
            }
        ],
    }
    return json.dumps(described, indent=2) + "\n"


def _file(name: str, size: int, sha256: str) -> dict[str, Any]:
    kind = _FORMATS.get(posixpath.splitext(name)[1], "application/octet-stream")
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": name,
        "contentUrl": name,
        "contentSize": f"{size} B",
        "encodingFormat": kind,
        "sha256": sha256,
    }


def _field(name: str, meaning: str) -> dict[str, Any]:
    return {
        "@type": "cr:Field",
        "@id": f"documents/{name}",
        "name": name,
        "description": meaning,
        "dataType": "sc:Integer",
        "repeated": True,
        "source": {"fileSet": {"@id": "records"}, "extract": {"column": name}},
    }
