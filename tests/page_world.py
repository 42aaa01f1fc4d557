"""A reader of the manual: blocks of pages, a tiny model under the names that pages use, and a shell in a folder."""

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import draftheads
from adapter_world import saved_adapter
from draftheads.checkpoints.checkpoint import save_head
from draftheads.cli.help import options_of as options_in
from draftheads.cli.main import main, options_of
from draftheads.data.texts import load_texts
from draftheads.models.chat_template import read_template
from draftheads.models.gguf_models import SMOLLM2_HUB_ID, place_in_cache
from draftheads.models.model import TargetModel
from draftheads.models.pretrained import load_tokenizer
from families import TREES, saved_model, tiny_head, tiny_model, tiny_profile
from mtp_files import random_layer
from published_heads import medusa
from serve_process import ServerProcess
from structured_world import EOS, VOCAB, json_tokenizer
from training_world import counting_chats, write_chats
from vllm_files import extract_as_vllm

ROOT = Path(__file__).parents[1]
HEADS = ("hydra", "hydra++", "medusa")  # that are installed for the default model
SMALL_RUN = {"max-new-tokens": "=8", "limit": "=1", "num-prompts": "=2", "epochs": "=1", "quick": ""}
PORTS = re.compile(r"http://127\.0\.0\.1:800[01]\b")
SERVER = """
import sys
from pathlib import Path
from draftheads.checkpoints import registry
from draftheads.cli.main import main
registry.weights_folder = lambda: Path({!r})
sys.exit(main())
"""
_FENCE = re.compile(r"^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
_DOCSTRING = re.compile(r"(?P<text>(?:^(?:draftheads|python) .*\n)+)", re.MULTILINE)
_NEEDS = re.compile(r"<!-- needs: ([^>]+) -->\s*\Z")


class Block(NamedTuple):
    """A block of a page, or the commands in the docstring of an example."""

    page: str
    number: int
    language: str
    text: str
    line: int  # of its first line in the page
    needs: str | None  # what it cannot run without

    def __str__(self) -> str:
        return f"{self.page}-{self.number}-{self.language or 'text'}"

    @property
    def commands(self) -> Iterator[tuple[str, str]]:
        """Each command without the breaks of its lines, and its place; not what programs print."""
        begun, place = "", ""
        for number, line in enumerate(self.text.splitlines(), self.line):
            if begun or self.language != "console" or line.startswith("$ "):
                place = place if begun else f"{self.page}:{number}, block {self.number}"
                begun += (line if begun else line.removeprefix("$ ")) + "\n"
                if not begun.endswith("\\\n") and _is_complete(begun):
                    yield place, begun.replace("\\\n", " ").strip()
                    begun = ""
        assert not begun, f"{place}: the command has no end"


def _is_complete(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def blocks_of(path: Path) -> list[Block]:
    """Of a page; of an example the commands in its docstring."""
    text, page = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
    blocks = []
    for number, match in enumerate((_DOCSTRING if path.suffix == ".py" else _FENCE).finditer(text), 1):
        language, needs = match.groupdict().get("language", "bash"), _NEEDS.search(text[: match.start()])
        line = text[: match.start("text")].count("\n") + 1
        blocks.append(Block(page, number, language, match["text"], line, needs and needs[1]))
    return blocks


def write_world(folder: Path) -> Path:
    """The default model and its heads, as installed; and files of readers, by the names that pages give them.

    DRAFTHEADS_CACHE has to be set.
    """
    tokenizer = copy.deepcopy(json_tokenizer())
    tokenizer.chat_template = read_template("chatml")
    tokenizer.bos_token = tokenizer.pad_token = tokenizer.eos_token
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 2048}
    ends = {"eos_token_id": EOS, "bos_token_id": EOS, "pad_token_id": EOS}
    reader = folder / "reader"
    for name, place in {"": place_in_cache(), "my-model": reader / "my-model"}.items():
        layers = {"num_hidden_layers": 8 if name else 2}  # EAGLE-3 reads three of eight
        saved_model(TargetModel(tiny_model("llama", **layers, **sizes, **ends).model, tokenizer, name), place)
    for name in ("my-base-model", "lmsys/vicuna-7b-v1.3"):
        shutil.copytree(reader / "my-model", reader / name)
    target = TargetModel.load("smollm2-135m", dtype=torch.float32)
    own = TargetModel.load(str(reader / "my-model"), dtype=torch.float32)
    for method in HEADS:
        save_head(
            tiny_head(method, target),
            folder / "weights" / "smollm2-135m" / method,
            base=target,
            profile=tiny_profile(TREES["ragged"]),
        )
    save_head(tiny_head("eagle3", own, layers=[2, 4, 5]), reader / "my-head", base=own)

    qwen = TargetModel(tiny_model("qwen3_5_text", **sizes, **ends).model, tokenizer, "")
    stored = load_file(file := saved_model(qwen, reader / "Qwen3.5-0.8B") / "model.safetensors")
    save_file({**stored, **random_layer("qwen3.5")}, file, metadata={"format": "pt"})
    vicuna = medusa(own)
    (place := reader / "FasterDecoding" / "medusa-vicuna-7b-v1.3").mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(vicuna.config))
    torch.save(vicuna.tensors, place / vicuna.file)
    for name in ("support", "sql"):
        saved_adapter(target, reader / "adapters" / name)

    shutil.copytree(ROOT / "examples" / "costs", reader / "examples" / "costs")
    questions = [f"What is {number} + {number}?" for number in range(24)]
    (reader / "questions.txt").write_text("\n".join(questions[:4]))
    for name in ("questions.jsonl", "my-questions.jsonl"):
        write_chats(reader / name, [{"prompt": each, "category": f"c{i % 4}"} for i, each in enumerate(questions)])
    for name in ("chats.jsonl", "answers.jsonl"):
        write_chats(reader / name, counting_chats(10))
    (reader / "spec_bench").mkdir()
    kinds = ("writing", "qa", "rag")
    rows = [{"question_id": i, "category": kind, "turns": [questions[i]]} for i, kind in enumerate(kinds)]
    write_chats(reader / "spec_bench" / "question.jsonl", rows)
    write_chats(reader / "books.jsonl", [{"text": " ".join(questions[i:])} for i in range(8)])
    (reader / "person.json").write_text(json.dumps({"type": "object", "properties": {"age": {"type": "integer"}}}))
    texts = load_texts(load_tokenizer(own.model_id), [reader / "chats.jsonl"], max_length=2048)
    extract_as_vllm(own, texts, reader / "states", [8])
    return folder


@dataclass
class Reader:
    """Does what the blocks of a page say, one after the other, in a folder that is empty at first."""

    folder: Path
    world: Path
    page: list[Block]
    patch: pytest.MonkeyPatch
    servers: dict[str, ServerProcess]  # of all pages, by their options
    names: dict[str, Any] = field(default_factory=lambda: {"draftheads": draftheads, "__name__": "__main__"})
    server: ServerProcess | None = None  # the last one that the page started with options of its own
    done: int = 0

    def read_up_to(self, block: Block) -> None:
        for each in self.page[self.done : block.number]:
            self.done = each.number
            if each.needs is None:
                self._follow(each)

    def _follow(self, block: Block) -> None:
        if included := re.fullmatch(r'--8<-- "(.+)"\n', block.text):
            text = (ROOT / included[1]).read_text(encoding="utf-8")
            assert block.language != "toml" or tomllib.loads(text)
            assert block.language != "python" or compile(text, included[1], "exec")
        elif block.language == "python":
            self._run_python("\n" * (block.line - 1) + block.text, block.page)
        elif block.language in ("console", "bash"):
            for place, command in block.commands:
                for part in re.sub(r"\s#.*", "", command).split(" && "):
                    try:
                        self._run(part)
                    except (Exception, SystemExit) as error:
                        raise AssertionError(f"{place}: {part}\n{error!r}") from error
        else:
            raise AssertionError(f"{block}: nothing runs such blocks; say before it <!-- needs: … -->")

    def _run(self, command: str) -> None:
        command = self.given(command)
        match shlex.split(command):
            case ["draftheads", "serve", *words]:
                self._serve(words)
            case ["draftheads", *words]:
                known = {option.name.replace("_", "-") for option in options_in(*options_of(words[0]))}
                words = [re.sub(r"=\d{4,}$", "=1000", word) for word in words]
                assert main([*words, *_smaller(words, known)]) == 0
            case ["python", script, *words]:
                text = (ROOT / script).read_text(encoding="utf-8")
                known = {name for name in SMALL_RUN if f"{name.replace('-', '_')}: int" in text}
                self.patch.setattr(sys, "argv", [script, *words, *_smaller(words, known)])
                with redirect_stdout(StringIO()) as printed:
                    self._run_python(text, script)
                print(printed.getvalue())  # noqa: T201 - for a failure
                assert not re.search("another text|: False", printed.getvalue())
            case ["pip", "install", *words]:
                self._install([word for word in words if word.startswith(".")])
            case ["make", target]:
                assert f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
            case _:
                self._run_shell(command)

    def given(self, text: str) -> str:
        """The text with the address of a server that runs; files of the reader that it names are there."""
        made = "".join(block.text for block in self.page)
        for path in sorted((self.world / "reader").rglob("*")):
            name = str(path.relative_to(self.world / "reader"))
            is_made = re.search(rf"--out {name}\b", made) or (name == "my-head" and "draftheads train" in made)
            if re.search(rf"(?<![\w-])(?<!\w/){re.escape(name)}(?![\w-])", text) and not is_made:
                if path.is_dir():
                    shutil.copytree(path, self.folder / name, dirs_exist_ok=True)
                elif not (self.folder / name).exists():
                    shutil.copy(path, self.folder / name)
        text = text.replace(SMOLLM2_HUB_ID, str(place_in_cache()))
        return PORTS.sub(lambda _: self.url(), text) if PORTS.search(text) else text

    def url(self) -> str:
        """Of the server that the page started last, or of one as the page `Serve` starts it."""
        server = self.server or self._start(["smollm2-135m", "--head", "hydra"])
        return str(server.client.base_url).rstrip("/")

    def _serve(self, words: list[str]) -> None:
        self.server = self._start(words)
        for question in ("Hi!", "Who is it?", "Bye.") if "--record" in words else ():
            self.server.chat(question, model="smollm2-135m", max_tokens=8)

    def _start(self, words: list[str]) -> ServerProcess:
        program = ("-c", SERVER.format(str(self.world / "weights")))
        if (key := shlex.join(words)) not in self.servers:
            self.servers[key] = ServerProcess(self.folder, *words, program=program)
        return self.servers[key]

    def _run_python(self, text: str, file: str) -> None:
        if "**inputs" in text:  # a reader has them
            model = AutoModelForCausalLM.from_pretrained(place_in_cache())
            self.names |= {"model": model, "inputs": {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 8}}
        known = set(self.names)
        exec(compile(self.given(text), file, "exec"), self.names)  # noqa: S102 - our own pages
        for name in self.names.keys() - known:
            if name.startswith("test_"):
                self.names[name]()

    def _install(self, places: list[str]) -> None:
        """Checks what is installed; a package of the examples is installed."""
        for place in places:
            path, _, extras = place.rstrip("]").partition("[")
            project = tomllib.loads((ROOT / path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            assert set(filter(None, extras.split(","))) <= set(project.get("optional-dependencies", {})), place
            if path.startswith("./examples"):
                site = self.folder / "site"
                options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
                pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options]
                subprocess.run([*pip, str(ROOT / path)], check=True, capture_output=True)
                self.patch.syspath_prepend(site)
                draftheads.heads._load_entry_points.cache_clear()

    def _run_shell(self, command: str) -> None:
        """By bash; what it exports is kept."""
        curl = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }'
        done = subprocess.run(
            ["bash", "-ec", f"{curl}\n{command}\nenv -0 > .env"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout)  # noqa: T201 - the same
        for pair in (self.folder / ".env").read_text().split("\0"):
            name, _, value = pair.partition("=")
            if name and name != "_" and not name.startswith("BASH_FUNC") and os.environ.get(name) != value:
                self.patch.setenv(name, value)


def _smaller(words: list[str], known: set[str]) -> list[str]:
    """Options that make a command short, where the words leave them out."""
    return [f"--{name}{value}" for name, value in SMALL_RUN.items() if name in known and f"--{name}" not in words]
