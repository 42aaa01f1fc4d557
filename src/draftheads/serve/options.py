"""Options of ``draftheads serve`` and its socket. A taken port is found before the model's libraries are imported."""

import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from draftheads.errors import InvalidSettings
from draftheads.settings import ABOVE_0, FROM_1, LoadSettings, OptionGroup, Range
from draftheads.utils.files import user_path

_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_PORT = Range("must be from 0 to 65535", lambda value: 0 <= value < 65536)
_FINITE = Range("must be above 0", lambda value: 0 < value < float("inf"))


@dataclass(frozen=True)
class ServeOptions(OptionGroup):
    """Serve a model to many users, with OpenAI's HTTP interface.

    A chat page is at the server's address. The routes are /v1/chat/completions, /v1/responses, /v1/completions,
    /v1/models, /health, /ready, /metrics and /openapi.json.
    """

    model: str = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    head: tuple[str, ...] = ()
    """Draft heads, the default one first. Names, folders or Hugging Face ids. Requests choose a further one by the
    model name NAME:HEAD. Plain decoding when left out."""
    corpus: str | None = None
    """Also draft copies from this text file: documents or code that answers quote, or earlier answers."""
    adapter: tuple[str, ...] = ()
    """LoRA adapters of the model (peft folders), as NAME=FOLDER. Requests choose them by the model name NAME."""
    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 is reachable from other machines: use API keys then."""
    port: Annotated[int, _PORT] = 8000
    """Port to listen on. 0 takes a free one."""
    name: str | None = None
    """Name of the model in requests. Default: its own name."""
    api_key_file: Path | None = None
    """A file of API keys, one in each line. DRAFTHEADS_API_KEY can have one, too. Without keys everyone may ask."""
    allow_host: tuple[str, ...] = ()
    """Further names of this server in the Host header. On 127.0.0.1 only local names are allowed; a proxy may send
    others."""
    max_rows: Annotated[int, FROM_1] = 16
    """Answers that are decoded together."""
    kv_gib: Annotated[float | None, _FINITE] = None
    """Memory for keys and values in GiB. Default: half of the free memory, and no more than the rows can use."""
    max_tokens: Annotated[int | None, FROM_1] = None
    """Longest answer that a request may ask for. As long as the model's texts when left out."""
    request_seconds: Annotated[float, ABOVE_0] = 600.0
    """Time for a request. Then it ends with an error."""
    schema_seconds: Annotated[float, _FINITE] = 2.0
    """Time to compile a new schema or grammar, and for the chat template. Then the request ends with an error."""
    record: Path | None = None
    """Record prompts and answers in this folder, to train heads on them. Clients opt out with "store": false. Nothing
    is recorded when left out."""
    record_gib: Annotated[float, _FINITE] = 2.0
    """Disk for --record in GiB. The oldest records are deleted."""
    head_folder: Path | None = None
    """Folder of draft heads that POST /admin/head may load. It may load the installed ones, too. DRAFTHEADS_ADMIN_KEY
    must have its key."""
    allow_typical: bool = False
    """Requests may ask for typical acceptance. It is faster and not lossless: answers are not those of the model."""
    load: tyro.conf.OmitArgPrefixes[LoadSettings] = field(default_factory=LoadSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_folder is not None and not self.head_folder.is_dir():
            raise InvalidSettings(f"--head-folder {self.head_folder} is no folder; give the folder that heads are in")
        _ = self.adapters

    @property
    def adapters(self) -> dict[str, Path]:
        """The folders of ``adapter`` by name."""
        folders: dict[str, Path] = {}
        for given in self.adapter:
            name, _, folder = given.partition("=")
            if not _NAME.fullmatch(name) or not folder:
                form = "NAME=FOLDER, with a name of ASCII letters, digits, dots and dashes"
                raise InvalidSettings(f"--adapter {given}: write {form}")
            if name in folders:
                raise InvalidSettings(f"--adapter {given}: {name} is {folders[name]} already; give another name")
            folders[name] = user_path(folder)
        return folders


def listen(host: str, port: int) -> socket.socket:
    """A listening socket."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)  # with SO_REUSEADDR
    except (OSError, OverflowError) as error:
        raise InvalidSettings(f"--host {host} --port {port}: cannot listen there ({error}); give another one") from None
    # for its connections: without it the body of an answer waits up to 40 ms until the client acknowledges the head
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def read_keys(file: Path | None, variable: str | None) -> tuple[str, ...]:
    """API keys: those of a file, one in each line, and that of an environment variable; # begins a comment."""
    lines: list[str] = []
    if file is not None:
        try:
            lines = [line.strip() for line in user_path(file).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSettings(f"--api-key-file {file} cannot be read: {error}") from None
        if not (lines := [line for line in lines if line and not line.startswith("#")]):
            raise InvalidSettings(f"--api-key-file {file} has no key; write one in each line")
    keys = dict.fromkeys([*lines, *([variable] if variable else ())])
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise InvalidSettings("an API key must have printable ASCII characters and no space")
    return tuple(keys)
