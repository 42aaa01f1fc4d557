"""Makes the heads that come with the package: trains them on the same text, and writes their folders and model cards.

1. ``python tools/zoo_text.py …`` makes the text: the model's own answers.
   ``python tools/zoo.py train WORK --data chats.jsonl.gz``: every head, one after the other; resumes if it was stopped.
2. ``draftheads tune smollm2-135m WORK/medusa`` …: the acceptance profile of each, on the model's own answers.
3. ``draftheads bench --heads WORK/medusa WORK/hydra … --prompts … --out WORK/bench``
4. ``python tools/zoo.py bundle WORK --bench WORK/bench/bench.json``; ``data.md`` beside this file goes into the cards.
5. ``python tools/zoo.py cards bench.json …`` writes later comparisons into the cards of the bundled heads.

A head that starts from another one makes two passes over the text, the others four. The heads in the package but
``amphista``, ``dspark`` and ``eagle`` were trained on less text. The command in a head's card shows its own settings.
``data.md`` tells of research/text: write another one before you bundle a head of other text.

Training options behind ``--`` are for all heads: ``-- --max-tokens 1000000 --epochs 1``.
"""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jinja2
import tyro

from draftheads.checkpoints import registry
from draftheads.checkpoints.checkpoint import read_head
from draftheads.checkpoints.head_files import CARD_FILE, CONFIG_FILE, HEAD_FILES
from draftheads.cli.main import main as draftheads
from draftheads.errors import DraftHeadsError
from draftheads.heads import head_classes
from draftheads.heads.attention import SeveralLayersConfig
from draftheads.train.options import TrainOptions
from draftheads.utils.files import atomic_directory, write_atomic

BASE = "smollm2-135m"
COMMON = "--recipe small --max-length 512"
# the options of each head; a head comes after the one that it starts from
HEADS: Mapping[str, str] = {
    "medusa": "--num-heads 4 --num-layers 2",
    "hydra": "--num-heads 3 --num-layers 3",
    "markov-medusa": "--num-heads 4 --num-layers 2 --head-options markov_rank=64 --epochs 2 --start-from medusa",
    "hydra++": "--num-heads 3 --num-layers 4",  # not from hydra, whose training loss is already low
    "amphista": "--num-heads 4 --num-layers 2 --epochs 2 --start-from medusa",
    "mlp-speculator": "--num-heads 3 --head-options inner_size=1024",
    # not tried from scratch; its card tells how the bundled one learned
    "eagle": "--num-heads 3 --optimizer muon --batch-tokens 2048 --draft-vocab-size 12288",
    "eagle3": "--num-heads 4 --draft-vocab-size 8192",
    "small-llama": "--num-heads 4 --num-layers 2 --head-options intermediate_size=1024",
    "dspark": "--num-heads 4 --num-layers 2 --optimizer muon --batch-tokens 2048 "
    "--head-options gated=false markov_rank=64",  # llama.cpp knows no gate
}
_SECTION = "## Side by side with others"
MOST_BYTES, MOST_BYTES_IN_ALL = 30e6, 165e6
_NOT_SHOWN = frozenset(  # paths on this machine, and options that do not change the head
    {
        *("method", "model", "data", "text", "out", "start_from", "recipe"),
        *("features", "resume", "save_steps"),
    }
)


@dataclass(frozen=True)
class Train:
    """Train the heads."""

    work: tyro.conf.Positional[Path]
    """Folder for the heads and their hidden states."""
    data: tuple[Path, ...]
    """Chats, as for `draftheads train`."""
    only: tuple[str, ...] = tuple(HEADS)
    """Names of the heads; all by default."""

    def run(self, more: Sequence[str]) -> int:
        """One after the other, on the same hidden states."""
        _check_names(self.only)
        for name in self.only:
            settings = shlex.split(f"{COMMON} {HEADS[name]}")
            if "--start-from" in settings:
                start = settings[-1]
                folder = (self.work / start).resolve()
                if not folder.is_dir():
                    sys.exit(f"{name} starts from {start}, which is not in {self.work}: train {start} first")
                settings[-1] = str(folder)
            reads_layers = issubclass(head_classes(name)[0], SeveralLayersConfig)
            features = self.work / ("features-layers" if reads_layers else "features")
            files = ["--data", *map(str, self.data), "--features", str(features)]
            arguments = ["train", "--method", name, *settings, *files, *more]
            if code := draftheads([*arguments, "--out", str(self.work / name), "--resume"]):
                return code
        return 0


@dataclass(frozen=True)
class Bundle:
    """Put trained heads into the package, with a model card each."""

    work: tyro.conf.Positional[Path]
    """Folder that `train` filled."""
    bench: tuple[Path, ...] = ()
    """bench.json of one or more runs of `draftheads bench`, for the cards."""
    only: tuple[str, ...] = tuple(HEADS)
    """Names of the heads; all by default."""

    def run(self, more: Sequence[str]) -> int:
        """Checks the sizes, then writes all heads."""
        _check_names(self.only)
        if more:
            sys.exit(f"this command does not train: leave out {shlex.join(more)}")
        found = _comparisons(self.bench)
        zoo = registry.weights_folder() / BASE
        sizes = {head.method: read_head(head.folder).num_bytes for head in registry.zoo_heads()}
        sizes |= {name: read_head(self.work / name).num_bytes for name in self.only}
        if max(sizes.values()) > MOST_BYTES or sum(sizes.values()) > MOST_BYTES_IN_ALL:
            sys.exit(
                f"a head may have {MOST_BYTES:,.0f} bytes, all of them {MOST_BYTES_IN_ALL:,.0f}; these have {sizes}"
            )
        made = {name: files_of(self.work / name, found) for name in self.only}
        for name, files in made.items():
            with atomic_directory(zoo / name, replace=True) as folder:
                for file, content in files.items():
                    (folder / file).write_bytes(content)
        return 0


def _check_names(names: Sequence[str]) -> None:
    if unknown := sorted(set(names) - set(HEADS)):
        sys.exit(f"no head {', '.join(unknown)} in the zoo; choose among {', '.join(HEADS)}")


@dataclass(frozen=True)
class Cards:
    """Put comparisons into the cards of the bundled heads."""

    bench: tyro.conf.Positional[tuple[Path, ...]]
    """bench.json of one or more runs of `draftheads bench`, in which each head has its own name."""

    def run(self, more: Sequence[str]) -> int:
        """Writes all cards or none. New comparisons replace the older ones."""
        if more:
            sys.exit(f"this command does not train: leave out {shlex.join(more)}")
        if not self.bench:
            sys.exit("name one or more bench.json of `draftheads bench`")
        found = _comparisons(self.bench)
        made: dict[Path, str] = {}
        for head in registry.zoo_heads():
            saved = read_head(head.folder)
            if compared := _compared(head.method, saved.digest, found):
                before = saved.card.split(f"\n{_SECTION}\n")[0].rstrip("\n")
                section = _environment().get_template("side_by_side.md.j2").render(compared=compared)
                made[head.folder / CARD_FILE] = f"{before}\n\n{section.rstrip()}\n"
        if not made:
            sys.exit(f"{', '.join(map(str, self.bench))}: no bundled head was compared")
        for path, text in made.items():
            write_atomic(path, text.encode())
        return 0


Found = Mapping[str, Any]  # what `draftheads bench` wrote
Row = Mapping[str, Any]  # of it


def _comparisons(files: Sequence[Path]) -> list[Found]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _compared(name: str, digest: str, comparisons: Sequence[Found]) -> list[tuple[Found, Row, list[Row]]]:
    """Of each comparison the head's greedy row for each size of tree, and its rows with such trees at temperatures."""
    compared = []
    for found in comparisons:
        own = [row for row in found["rows"] if row["name"] == name and row["part"] == "all"]
        own = [row for row in own if row["settings"]["tree"] != "defaults" and row["settings"]["batch_size"] == 1]
        if own and digest not in found["drafters"][name]:
            sys.exit(f"the comparison is of other weights of {name}: run draftheads bench --heads {name} … again")
        for row in own:
            if not row["settings"]["temperature"]:
                size = row["settings"]["num_nodes"]
                others = [one for one in own if one["settings"]["temperature"] and one["settings"]["num_nodes"] == size]
                compared.append((found, row, others))
    return compared


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - Markdown
    )


def files_of(folder: Path, comparisons: Sequence[Found]) -> dict[str, bytes]:
    """The files of a bundled head by name; the trained head is in a folder of its name."""
    saved = read_head(folder)
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    config["provenance"]["command"] = command(metrics["options"])
    compared = _compared(folder.name, saved.digest, comparisons)
    text = card(folder, metrics, compared, num_bytes=saved.num_bytes, depth=saved.profile.depth)
    return {
        **{file: (folder / file).read_bytes() for file in HEAD_FILES},
        CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode(),
        CARD_FILE: text.encode(),
    }


def command(options: Mapping[str, Any]) -> str:
    """The command line that trains this head. It has the names of files without their folders."""
    words = ["draftheads", "train", "--method", options["method"], "--model", options["model"]]
    for files in ("data", "text"):
        words += as_arguments(files, [Path(path).name for path in options[files]]) if options[files] else []
    words += ["--out", options["method"]]
    if options["start_from"]:
        words += ["--start-from", Path(options["start_from"]).name]
    for name, default in TrainOptions.defaults().items():
        if name not in _NOT_SHOWN and options[name] != default:
            words += as_arguments(name, options[name])
    return shlex.join(words)


def as_arguments(name: str, value: Any) -> list[str]:
    """A setting as it is given on the command line.

    >>> as_arguments("num_heads", 4), as_arguments("betas", [0.9, 0.95])
    (['--num-heads', '4'], ['--betas', '0.9', '0.95'])
    """
    return [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]


def card(
    folder: Path,
    metrics: Mapping[str, Any],
    compared: Sequence[tuple[Found, Row, list[Row]]],
    *,
    num_bytes: int,
    depth: int,
) -> str:
    """The model card of the head in the folder, which is named as the head is. ``depth`` is that of its profile."""
    options = metrics["options"]
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    last = log[-max(1, len(log) // 20) :]
    template = _environment().get_template("card.md.j2")
    text: str = template.render(
        name=folder.name,
        base=BASE,
        options=options,
        metrics=metrics,
        command=command(options),
        start=options["start_from"] and Path(options["start_from"]).name,
        heads=list(zip(metrics["losses"], metrics["top1"], metrics["top3"], metrics["top10"], strict=True)),
        learned=sum(line["head_losses"][0] for line in last) / len(last),
        compared=compared,
        data=(Path(__file__).parent / "data.md").read_text(encoding="utf-8").rstrip(),
        num_bytes=num_bytes,
        depth=depth,
    )
    return text.rstrip("\n") + "\n"


def main(arguments: Sequence[str]) -> int:
    """Options after ``--`` are passed to `draftheads train`."""
    own, more = list(arguments), []
    if "--" in own:
        own, more = own[: own.index("--")], own[own.index("--") + 1 :]
    train = Annotated[Train, tyro.conf.subcommand("train")]
    bundle = Annotated[Bundle, tyro.conf.subcommand("bundle")]
    cards = Annotated[Cards, tyro.conf.subcommand("cards")]
    try:
        code: int = tyro.cli(train | bundle | cards, args=own, description=__doc__).run(more)
    except DraftHeadsError as error:
        sys.exit(f"error: {error}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
