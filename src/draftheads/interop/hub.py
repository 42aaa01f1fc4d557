"""A head as a repository of the Hugging Face Hub: its files, its card, and code that ``generate`` runs from there."""

import re
import shutil
import tempfile
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import LocalTokenNotFoundError

from draftheads.checkpoints.checkpoint import SavedHead, read_head
from draftheads.checkpoints.head_files import CARD_FILE, HEAD_FILES
from draftheads.checkpoints.registry import find_head, head_name
from draftheads.errors import CheckpointCorrupt, EndpointError, InvalidSettings, first_line
from draftheads.utils.file_set import current, read_set
from draftheads.utils.files import atomic_directory, user_path

CODE_FILE, REQUIREMENTS_FILE = "custom_generate/generate.py", "custom_generate/requirements.txt"
TAG = "custom_generate"  # by which the Hub and transformers know such repositories
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_NOT_LOGGED_IN, _NOT_ALLOWED, _NOT_FOUND = 401, 403, 404

_CODE = '''"""Decodes with the draft head of this repository.

model.generate(**inputs, custom_generate="{repository}", trust_remote_code=True)
"""

from draftheads.interop.transformers import generate_from_repository

HEAD = "{repository}"


def generate(model, **arguments):
    """The text of ``model.generate`` in fewer steps; the arguments are those of ``generate``."""
    return generate_from_repository(model, HEAD, **arguments)
'''

_USAGE = """
## With transformers

```python
model.generate(**inputs, custom_generate="{repository}", trust_remote_code=True)
```

The text is that of `generate` without it, in fewer steps. It needs `pip install draftheads`. The same without code from
here: `custom_generate=draftheads.custom_generate("{repository}")`.
"""


def write_repository(
    head: str | PathLike[str], folder: str | PathLike[str], *, repository: str, model: str = "smollm2-135m"
) -> Path:
    """Writes what :func:`push_head` uploads: the head's files, and ``custom_generate/`` for transformers.

    Args:
        head: a trained head: a name, a folder or a Hub id.
        folder: to make.
        repository: its place on the Hub, ``owner/name``; the card and the code name it.
        model: the model of a head that is given by name.

    Returns:
        The folder. It can be loaded from where it is, as ``custom_generate=FOLDER``.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise InvalidSettings(f"repository is {repository!r}; it must be an id on the Hugging Face Hub: owner/name")
    source, target = find_head(head_name(head), model), user_path(folder)

    def copy() -> SavedHead:
        saved = read_head(source)
        for name in HEAD_FILES:
            if (file := current(source, name)).is_file():
                shutil.copyfile(file, staged / name)
        return saved

    with atomic_directory(target) as staged:
        saved = read_set(source, HEAD_FILES, copy)
        (staged / CARD_FILE).write_text(_card(saved, repository), encoding="utf-8")
        (staged / CODE_FILE).parent.mkdir()
        (staged / CODE_FILE).write_text(_CODE.format(repository=repository), encoding="utf-8")
        (staged / REQUIREMENTS_FILE).write_text(f"draftheads>={version('draftheads')}\n", encoding="utf-8")
    return target


def push_head(head: str | PathLike[str], repository: str, *, model: str = "smollm2-135m", private: bool = False) -> str:
    """Uploads a head to the Hugging Face Hub, with its card, its profile and ``custom_generate/``.

    Args:
        head: as for :func:`write_repository`.
        repository: made if it is not there, ``owner/name``. Other files in it stay.
        model: as for :func:`write_repository`.
        private: whether only you and your organisation may see it.

    Returns:
        Its address.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = write_repository(head, Path(place) / "head", repository=repository, model=model)
        api = HfApi()
        try:
            address = str(api.create_repo(repository, private=private, exist_ok=True))
            is_public = private and not api.model_info(repository).private
            if not is_public:
                api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Upload a {TAG} head")
        except Exception as error:  # the errors of its network client are not documented
            raise EndpointError(_problem(error, repository)) from error
    if is_public:
        raise InvalidSettings(
            f"{repository} is there and public, and private was asked for: nothing was uploaded; make it private on "
            "the Hub, or choose another name"
        )
    return address


def _problem(error: Exception, repository: str) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError) or status == _NOT_LOGGED_IN:
        why = "there is no valid login for the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN"
    elif status in (_NOT_ALLOWED, _NOT_FOUND):
        why = "the login for the Hugging Face Hub may not write there: choose your own name, or another token"
    else:
        why = f"the Hugging Face Hub cannot be reached or refused it ({first_line(error)}): try again"
    return f"{repository} was not uploaded: {why}"


def _card(saved: SavedHead, repository: str) -> str:
    """The head's card with the metadata that the Hub reads, and how it is used."""
    text = saved.card.lstrip("\ufeff")
    known: dict[str, Any] = {}
    if text.startswith("---\n"):
        try:
            card = ModelCard(text)
        except Exception as error:  # whatever its YAML makes a parser raise
            raise CheckpointCorrupt(f"{saved.folder / CARD_FILE}: {first_line(error)}") from error
        known, text = dict(vars(card.data)), card.text
    tags = dict.fromkeys([*(known.get("tags") or ()), TAG, "draftheads", "speculative-decoding", saved.method])
    facts = {"library_name": "draftheads", "pipeline_tag": "text-generation", **known, "tags": list(tags)}
    if _REPOSITORY.fullmatch(saved.model_id):  # else it is the whole path of a folder on this machine
        facts.setdefault("base_model", saved.model_id)
    usage = "" if repository in text else _USAGE.format(repository=repository)
    return f"---\n{ModelCardData(**facts).to_yaml()}\n---\n\n{text.strip()}\n{usage}"
