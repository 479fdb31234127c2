"""The Hugging Face Hub: downloads models, and uploads exports.

CACHE/bases/OWNER--NAME@COMMIT/     the base that was made from a downloaded model

The library huggingface_hub (the [hub] extra) transfers the files, with its own cache (HF_HOME),
token (HF_TOKEN), server (HF_ENDPOINT) and offline mode (HF_HUB_OFFLINE). It verifies only the size
of a file; this module verifies the hash.
"""

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import filelock
from etils import epath

from bert_jax.data.workers import Worker
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import retry
from bert_jax.storage.workdir import cache_folder, is_complete, translate_os_errors

# The name of a model, with a branch, tag or commit after the @.
_NAME = re.compile(r"(hf://)?(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_SHARDED = "model.safetensors.index.json"
# The files that `huggingface.read_folder` reads; a pattern matches the whole path.
_FILES = (
    *("config.json", "model.safetensors", _SHARDED, "model-*-of-*.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "modules.json", "1_Pooling/config.json"),
    *("2_Dense*/config.json", "2_Dense*/model.safetensors"),
    *("sentence_bert_config.json", "config_sentence_transformers.json"),
)


class HubModel(NamedTuple):
    """A model of the hub."""

    name: str  # OWNER/NAME
    revision: str  # a branch, tag or commit

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}"


def find_model(path: str) -> HubModel | None:
    """Returns the model that OWNER/NAME, OWNER/NAME@REVISION or hf://... names.

    Returns None for other paths. Without hf:// an existing file or folder of this name wins, and so
    does an existing folder OWNER, so that a misspelt local path is not sent to a server.
    """
    match = _NAME.fullmatch(path)
    if match is None:
        return None
    scheme, name, revision = match.groups()
    if not scheme and (os.path.exists(path) or os.path.isdir(name.partition("/")[0])):
        return None
    return HubModel(name, revision or "main")


# --- download -------------------------------------------------------------------------------------


def fetch_base(path: str) -> str:
    """Makes a base from a model of the hub, and returns its path; returns other paths unchanged.

    The base is made once for each commit of a model.
    """
    if (model := find_model(path)) is None:
        return path
    # In another process, as this one must not start JAX before jax.distributed. The output of the
    # other process goes to standard error.
    worker = Worker({**os.environ, "JAX_PLATFORMS": "cpu"})
    try:
        worker.start(_make_base, model)
        return worker.result()
    finally:
        worker.close()


def _make_base(model: HubModel) -> str:
    """Makes the base of a model unless it exists; returns its path."""
    snapshot = download(model)
    folder = cache_folder() / "bases" / f"{model.name.replace('/', '--')}@{snapshot.name}"
    with translate_os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{folder}.lock"):
            if not is_complete(folder):
                from bert_jax.interop import importing

                importing.import_weights(snapshot, folder, None, print)
    return os.fspath(folder)


def fetch_files(path: str) -> epath.Path:
    """Downloads the files of a model, and returns their folder; returns other paths unchanged."""
    model = find_model(path)
    return epath.Path(path) if model is None else download(model)


def download(model: HubModel) -> epath.Path:
    """Downloads the files of a model that an import reads; returns their folder, named by commit.

    Raises InputError for a file whose hash is not the one that the server states, and deletes it.
    """
    from bert_jax.interop import configs

    with _translate_errors(model):
        folder = _download(model, ("config.json",))
        _require_hashes(model, folder)
        if (folder / "config.json").exists():
            # Refuses other architectures before their weights are downloaded.
            configs.read(folder / "config.json")
        folder = _download(HubModel(model.name, folder.name), _FILES)
        _require_hashes(model, folder)
    if not any((folder / name).exists() for name in ("model.safetensors", _SHARDED)):
        raise InputError(
            f"{model}: has no model.safetensors, and weights of other kinds are not read; look for "
            f"a pull request that adds it, and name it as {model.name}@refs/pr/NUMBER"
        )
    return folder


def _download(model: HubModel, patterns: Sequence[str]) -> epath.Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(model.name, revision=model.revision, allow_patterns=[*patterns])
    return epath.Path(folder)


def _require_hashes(model: HubModel, folder: epath.Path) -> None:
    """Compares each file with the hash that the server stated; deletes a file that differs.

    The library's cache names the content of a file by this hash, and the file is a link to it. It
    is the SHA-256 if the file is in Git LFS, and otherwise Git's hash of a blob (SHA-1).
    """
    for link in itertools.chain.from_iterable(map(folder.glob, _FILES)):
        stated = os.path.basename(os.readlink(link)) if os.path.islink(link) else ""
        if len(stated) == 64:
            with open(link, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        else:
            content = link.read_bytes()
            digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if digest != stated:
            for path in {os.path.realpath(link), os.fspath(link)}:
                os.unlink(path)
            raise InputError(
                f"{model}: {link.name}: has the hash {digest}, not {stated} as stated; the "
                "file was deleted, so repeat the command; if this recurs, do not use the model"
            )


# --- upload ---------------------------------------------------------------------------------------


def require_login(name: str) -> None:
    """Raises InputError unless a name is OWNER/NAME and the user is logged in."""
    match = _NAME.fullmatch(name)
    if match is None or match[1] or match[3]:
        raise InputError(f"--push {name}: write it as OWNER/NAME")
    with _translate_errors(HubModel(name, "main")):
        from huggingface_hub import HfApi

        HfApi().whoami()


def push(folder: epath.Path, name: str, revision: str = "main") -> str:
    """Uploads a folder as one commit of a branch, and returns its address.

    A missing repository is created as a private one. Files that are on the branch already, and not
    in the folder, are kept.
    """
    with _translate_errors(HubModel(name, revision)):
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        if revision != "main":
            api.create_branch(name, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=os.fspath(folder),
            revision=revision,
            commit_message=f"Upload {folder.name}",
        )
        return f"{api.endpoint}/{name}/tree/{revision}"


@contextlib.contextmanager
def _translate_errors(model: HubModel) -> Iterator[None]:
    """Turns errors of the library into InputError or Unavailable."""
    try:
        from huggingface_hub import constants, errors
    except ImportError:
        raise InputError(
            f"{model.name}: no folder of this name; to reach the Hugging Face Hub, install "
            "huggingface_hub: pip install 'bert-jax[hub]'"
        ) from None
    login = "log in with `hf auth login`, or set HF_TOKEN"
    try:
        yield
    except errors.GatedRepoError as error:
        raise InputError(
            f"{model.name}: its owner must grant access; ask for it at {constants.ENDPOINT}/"
            f"{model.name}, then {login}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{model}: {model.name} has no such revision on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"{model.name}: no such folder here, and no such model at {constants.ENDPOINT}; if it "
            f"is private, {login}"
        ) from error
    except errors.LocalTokenNotFoundError as error:
        raise InputError(f"{model.name}: {login}, with a token that may write") from error
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        is_missing = isinstance(error, errors.LocalEntryNotFoundError)
        if is_missing and not isinstance(error.__cause__, errors.HfHubHTTPError):
            raise InputError(
                f"{model}: no such folder here, and not in the cache of huggingface_hub, and "
                f"{constants.ENDPOINT} cannot be reached (or HF_HUB_OFFLINE is set); give a folder"
            ) from error
        if retry.is_transient(error):
            raise Unavailable(
                f"{model}: {constants.ENDPOINT} failed ({reason}); run again"
            ) from error
        if isinstance(error, errors.HfHubHTTPError):
            raise InputError(f"{model}: refused by the hub ({reason}); {login}") from error
        raise
