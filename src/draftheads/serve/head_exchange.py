"""Exchanges the draft head of a served model. Requests that run keep the old one; no text depends on it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from draftheads.checkpoints.checkpoint import resolve_head
from draftheads.checkpoints.registry import base_in_zoo, zoo_heads
from draftheads.errors import DraftHeadsError, ModelNotFound
from draftheads.loading import engine_on
from draftheads.models.model_names import shown_name
from draftheads.serve.fields import Fields
from draftheads.serve.scheduler import Scheduler
from draftheads.speculation.drafting import Drafting
from draftheads.utils.file_set import current

_NAME = re.compile(r"\w[\w.+-]{0,99}(/\w[\w.+-]{0,99}){0,4}", re.ASCII)  # a head's own, or folders and names


class HeadFields(Fields):
    """The fields of a request to exchange a head."""

    model: Annotated[str, Field(min_length=1)]
    head: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class HeadExchange:
    """Finds heads and exchanges them."""

    scheduler: Scheduler  # whose engines are exchanged
    model: str  # by which the base model was loaded
    head_folder: Path | None = None  # heads in it may be used, besides those that are installed with a package
    copy: bool = True  # drafts hold copies, too
    fast: bool = True  # the head gets fast kernels

    def exchange(self, served: str, head: str) -> None:
        """Loads and checks a head, and uses it for all later requests of a served model. Takes seconds."""
        old, folder = self.scheduler.engines[served], self.find(head)
        try:
            drafts = resolve_head(folder, self.model)
            options: dict[str, Any] = {"max_batch_size": old.max_batch_size, "fast": self.fast, "keep_cost": False}
            new = engine_on(old.model, drafts, Drafting(head, copy=self.copy), **options)
        except DraftHeadsError as error:  # no path of this machine is shown to clients
            own = old.model.model_id
            error.args = (str(error).replace(str(folder), head).replace(own, shown_name(own)), *error.args[1:])
            raise

        def change() -> None:
            # a new dictionary: other threads may be looking at the old one
            self.scheduler.core.engines = {**self.scheduler.engines, served: new}

        self.scheduler.call(change).result()  # between two steps

    def find(self, head: str) -> Path:
        """The folder of a head that is installed with a package, or lies below the folder of heads."""
        base = base_in_zoo(self.model)
        installed = {in_zoo.method: in_zoo.folder for in_zoo in zoo_heads() if in_zoo.base_name == base}
        if head in installed:
            return installed[head]
        if self.head_folder is not None and _NAME.fullmatch(head):
            root = self.head_folder.resolve()
            folder = (root / head).resolve()  # a link may lead elsewhere
            if folder.is_relative_to(root) and current(folder, "config.json").is_file():
                return folder
        where = "start the server with --head-folder" if self.head_folder is None else "it is not in --head-folder"
        names = ", ".join(installed) or "none"
        raise ModelNotFound(f"there is no head {head[:80]!r}: {where}; installed for this model: {names}")
