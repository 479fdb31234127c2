"""A server that speaks the HTTP protocol of the Hugging Face Hub, as far as the tests need it.

It holds repositories with branches, commits and files. Weights are files of Git LFS, which lie at
an address of their own; other files are Git's. What clients send and expect is described at
https://huggingface.co/docs/hub/api and https://github.com/git-lfs/git-lfs/blob/main/docs/api.
"""

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

LFS = (".safetensors", ".parquet", ".bin")
TOKEN = "hf_of_a_test"


@dataclasses.dataclass
class Repository:
    """Commits with their files, and the branches and other names of commits."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    refs: dict[str, str] = dataclasses.field(default_factory=dict)

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Adds files to a branch; returns the name of the commit."""
        files = self.commits.get(self.refs.get(ref, ""), {}) | files
        text = repr((ref, self.refs.get(ref), sorted(files.items())))
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name], self.refs[ref] = files, name
        return name


def etag(path: str, content: bytes) -> str:
    """Returns the SHA-256 of a file of Git LFS, or the hash of Git."""
    if path.endswith(LFS):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub:
    """The state of a server: tests set what it holds, and how it fails."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}  # names of data sets begin with datasets/
        self.uploads: dict[str, bytes] = {}  # by SHA-256
        self.requests: list[str] = []  # METHOD PATH [RANGE]
        self.change: Callable[[str, bytes], bytes] = lambda path, content: content
        self.cuts = 0  # downloads of weights that end in the middle
        self.status = 0  # of all answers, if it is not 0

    def add(self, name: str, files: dict[str, bytes], **fields: bool) -> Repository:
        """Makes a repository whose main branch has these files."""
        self.repositories[name] = Repository(**fields)
        self.repositories[name].commit(files)
        return self.repositories[name]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, content: bytes | dict | list, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cuts and "/lfs/" in self.path and self.command == "GET":
            self.hub.cuts -= 1
            self.wfile.write(body[: len(body) // 2])
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.wfile.write(body)

    def _fail(self, status: int, code: str) -> None:
        self._answer({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def _handle(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        path, _, _ = urllib.parse.unquote(self.path).partition("?")
        span = self.headers.get("Range", "")
        self.hub.requests.append(f"{self.command} {path} {span}".strip())
        if self.hub.status:
            return self._fail(self.hub.status, "ServerError")
        for pattern, function in _ROUTES.items():
            if match := re.fullmatch(pattern, path):
                return function(self, *match.groups(), *([body] if self.command == "POST" else []))
        return self._fail(404, "EntryNotFound")

    do_GET = do_HEAD = do_POST = _handle

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.uploads[hashlib.sha256(content).hexdigest()] = content
        self._answer(b"")

    def _find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Returns a commit and its files; answers with an error and returns None if it cannot."""
        name, repository = name.removeprefix("models/"), None
        repository = self.hub.repositories.get(name)
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not allowed):
            return self._fail(401 if not allowed else 404, "RepoNotFound")
        if repository.gated and not allowed:
            return self._fail(401, "GatedRepo")
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return self._fail(404, "RevisionNotFound")
        return commit, repository.commits[commit]

    # --- reading ---

    def _info(self, name: str, revision: str = "main") -> None:
        if found := self._find(name, revision):
            files = [{"rfilename": path} for path in found[1]]
            self._answer({"id": name.removeprefix("models/"), "sha": found[0], "siblings": files})

    def _tree(self, name: str, revision: str, folder: str = "") -> None:
        if found := self._find(name, revision):
            entries, folders = [], set()
            for path, content in found[1].items():
                if not path.startswith(folder.removeprefix("/")):
                    continue
                folders.add(path.rpartition("/")[0])
                oid = etag(path, content)
                entry = {"type": "file", "path": path, "size": len(content), "oid": oid[:40]}
                if path.endswith(LFS):
                    entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 100}
                entries.append(entry)
            entries += [{"type": "directory", "path": f, "oid": "0" * 40} for f in folders - {""}]
            self._answer(entries)

    def _paths(self, name: str, revision: str, body: bytes) -> None:
        wanted = json.loads(body)["paths"] if body.startswith(b"{") else []
        wanted = wanted or urllib.parse.parse_qs(body.decode())["paths"]
        if found := self._find(name, revision):
            commit, files = found
            entries = []
            for path in wanted:
                if path in files:
                    oid, size = etag(path, files[path]), len(files[path])
                    entries.append({"type": "file", "path": path, "size": size, "oid": oid[:40]})
                elif any(name.startswith(f"{path}/") for name in files):
                    entries.append({"type": "directory", "path": path, "oid": commit})
            self._answer(entries)

    def _resolve(self, name: str, revision: str, path: str) -> None:
        found = self._find(name, revision)
        if not found:
            return None
        commit, files = found
        if path not in files:
            return self._fail(404, "EntryNotFound")
        stated = {"X_Repo_Commit": commit, "ETag": f'"{etag(path, files[path])}"'}
        if not path.endswith(LFS):
            return self._answer(self.hub.change(path, files[path]), **stated)
        stated["X_Linked_ETag"], stated["X_Linked_Size"] = stated["ETag"], str(len(files[path]))
        # Another host, as the real one has: clients follow such an address only to download.
        host = self.headers["Host"].replace("127.0.0.1", "localhost")
        location = f"http://{host}/lfs/{name}/{commit}/{path}"
        return self._answer(b"", 302, Location=location, **stated)

    def _lfs(self, name: str, commit: str, path: str) -> None:
        content = self.hub.change(path, self.hub.repositories[name].commits[commit][path])
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return self._answer(content)
        first, last = int(span[1]), int(span[2] or len(content) - 1)
        stated = f"bytes {first}-{last}/{len(content)}"
        return self._answer(content[first : last + 1], 206, Content_Range=stated)

    # --- writing ---

    def _whoami(self) -> None:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            self._answer({"name": "me", "type": "user", "auth": {}, "orgs": []})
        else:
            self._fail(401, "Unauthorized")

    def _create(self, body: bytes) -> None:
        wanted = json.loads(body)
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.repositories:
            return self._answer({"url": f"/{name}"}, 409)
        private = wanted.get("private") or wanted.get("visibility") == "private"
        self.hub.add(name, {".gitattributes": b""}, private=bool(private))
        return self._answer({"url": f"http://{self.headers['Host']}/{name}", "id": name})

    def _branch(self, name: str, branch: str, body: bytes) -> None:
        del body
        refs = self.hub.repositories[name].refs
        if branch in refs:
            return self._fail(409, "Conflict")
        refs[branch] = refs["main"]
        return self._answer(b"")

    def _preupload(self, name: str, revision: str, body: bytes) -> None:
        del name, revision
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self._answer({"files": modes})

    def _batch(self, name: str, body: bytes) -> None:
        objects = json.loads(body)["objects"]
        for item in objects:
            href = f"http://{self.headers['Host']}/upload/{name}/{item['oid']}"
            item["actions"] = {"upload": {"href": href, "header": {}}}
        self._answer({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, branch: str, body: bytes) -> None:
        files = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
        commit = self.hub.repositories[name].commit(files, branch)
        url = f"http://{self.headers['Host']}/{name}/commit/{commit}"
        self._answer({"commitUrl": url, "commitOid": commit, "success": True})

    def _valid(self, body: bytes) -> None:
        is_valid = json.loads(body)["content"].startswith("---\nlibrary_name: ")
        self._answer({"errors": [], "warnings": []}, 200 if is_valid else 400)


_ANY, _REPO = r"([\w.-]+/[\w.-]+)", r"((?:models|datasets)/[\w.-]+/[\w.-]+)"
_ROUTES: dict[str, Callable[..., None]] = {
    r"/api/whoami-v2": _Handler._whoami,
    r"/api/repos/create": _Handler._create,
    r"/api/validate-yaml": _Handler._valid,
    rf"/api/{_REPO}": _Handler._info,
    rf"/api/{_REPO}/revision/(.+)": _Handler._info,
    rf"/api/{_REPO}/tree/([^/]+)((?:/.+)?)": _Handler._tree,
    rf"/api/{_REPO}/paths-info/([^/]+)": _Handler._paths,
    rf"/api/models/{_ANY}/branch/(.+)": _Handler._branch,
    rf"/api/models/{_ANY}/preupload/(.+)": _Handler._preupload,
    rf"/api/models/{_ANY}/commit/(.+)": _Handler._commit,
    rf"/{_ANY}\.git/info/lfs/objects/batch": _Handler._batch,
    r"/((?:datasets/)?[\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)": _Handler._resolve,
    r"/lfs/((?:datasets/)?[\w.-]+/[\w.-]+)/([0-9a-f]+)/(.+)": _Handler._lfs,
}


@contextlib.contextmanager
def serve() -> Iterator[tuple[Hub, str]]:
    """Runs a server in a thread; yields its state and its address."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
