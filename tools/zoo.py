"""Makes the heads that come with the package: trains them alike, and writes their folders and model cards.

1. ``python tools/zoo.py train WORK --data chats.jsonl.gz``: every head, one after the other; goes on where it was.
2. ``draftheads bench --heads WORK/medusa WORK/hydra … --prompts … --out WORK/bench``
3. ``python tools/zoo.py bundle WORK --bench WORK/bench/bench.json``

Training options behind ``--`` are for all heads: ``-- --max-tokens 1000000 --epochs 1``.
"""

import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import jinja2
import tyro

from draftheads.checkpoint import CARD_FILE, CONFIG_FILE, HEAD_FILES, read_head
from draftheads.cli.main import main as draftheads
from draftheads.files import write_atomic
from draftheads.train.options import TrainOptions
from draftheads.zoo import registry

BASE = "smollm2-135m"
COMMON = "--recipe small --max-length 512 --tree-nodes 10 --epochs 2"
# what each is trained with; a head that starts from another one stands behind it
HEADS: Mapping[str, str] = {
    "medusa": "--num-heads 4 --num-layers 2",
    "hydra": "--num-heads 3 --num-layers 3",
    "markov-medusa": "--num-heads 4 --num-layers 2 --start-from medusa",
    "hydra++": "--num-heads 3 --num-layers 4 --start-from hydra",
    "amphista": "--num-heads 4 --num-layers 2 --start-from medusa",
    "mlp-speculator": "--num-heads 3 --head-options inner_size=1024",
    "eagle": "--num-heads 3 --feature-weight 10",
    "small-llama": "--num-heads 4 --num-layers 2",
}
MOST_BYTES, MOST_BYTES_IN_ALL = 30e6, 120e6
_NOT_SAID = frozenset(  # where things lie here, and what makes no other head
    {
        *("method", "model", "data", "out", "start_from", "recipe"),
        *("features", "features_budget", "keep_features", "resume", "tensorboard"),
        *("save_steps", "log_steps", "eval_steps", "eval_texts"),
    }
)


@dataclass(frozen=True)
class Train:
    """Train the heads."""

    work: tyro.conf.Positional[Path]
    """Folder for all of it."""
    data: tuple[Path, ...]
    """Chats, as for `draftheads train`."""
    only: tuple[str, ...] = tuple(HEADS)
    """These heads."""

    def run(self, more: Sequence[str]) -> int:
        """One after the other, on the same hidden states."""
        for name in self.only:
            settings = shlex.split(f"{COMMON} {HEADS[name]}")
            if "--start-from" in settings and (trained := self.work / settings[-1]).is_dir():
                settings[-1] = str(trained)
            files = ["--data", *map(str, self.data), "--features", str(self.work / "features")]
            arguments = ["train", "--method", name, *settings, *files, *more]
            if code := draftheads([*arguments, "--out", str(self.work / name), "--resume"]):
                return code
        return 0


@dataclass(frozen=True)
class Bundle:
    """Put trained heads into the package, with a model card each."""

    work: tyro.conf.Positional[Path]
    """Folder that `train` filled."""
    bench: Path | None = None
    """bench.json of `draftheads bench`, for the cards."""
    only: tuple[str, ...] = tuple(HEADS)
    """These heads."""

    def run(self, more: Sequence[str]) -> int:
        """Looks at the sizes before anything is written."""
        if more:
            sys.exit(f"nothing is trained here: leave out {shlex.join(more)}")
        found = json.loads(self.bench.read_text(encoding="utf-8")) if self.bench else None
        zoo = registry.weights_folder() / BASE
        sizes = {head.method: read_head(head.folder).num_bytes for head in registry.zoo_heads()}
        sizes |= {name: read_head(self.work / name).num_bytes for name in self.only}
        if max(sizes.values()) > MOST_BYTES or sum(sizes.values()) > MOST_BYTES_IN_ALL:
            sys.exit(
                f"a head may have {MOST_BYTES:,.0f} bytes, all of them {MOST_BYTES_IN_ALL:,.0f}; these have {sizes}"
            )
        for name in self.only:
            metrics = json.loads((self.work / name / "metrics.json").read_text(encoding="utf-8"))
            (zoo / name).mkdir(parents=True, exist_ok=True)
            for file in HEAD_FILES:
                shutil.copyfile(self.work / name / file, zoo / name / file)
            config = json.loads((zoo / name / CONFIG_FILE).read_text(encoding="utf-8"))
            config["provenance"]["command"] = command(metrics["options"])
            write_atomic(zoo / name / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
            write_atomic(zoo / name / CARD_FILE, card(self.work / name, metrics, found, sizes[name]).encode())
        return 0


def command(options: Mapping[str, Any]) -> str:
    """The command line that makes such a head; names of files, but no folders of this machine."""
    words = ["draftheads", "train", "--method", options["method"], "--model", options["model"]]
    words += ["--data", *(Path(path).name for path in options["data"]), "--out", options["method"]]
    if options["start_from"]:
        words += ["--start-from", Path(options["start_from"]).name]
    for field in fields(TrainOptions):
        if field.name in _NOT_SAID or field.default is MISSING:
            continue
        value = options[field.name]
        if value != json.loads(json.dumps(field.default)):
            words += [f"--{field.name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def card(folder: Path, metrics: Mapping[str, Any], found: Mapping[str, Any] | None, num_bytes: int) -> str:
    """The model card of the head in the folder, which is named as the head is."""
    options = metrics["options"]
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    last = log[-max(1, len(log) // 20) :]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - Markdown
    )
    return environment.get_template("card.md.j2").render(
        name=folder.name,
        base=BASE,
        options=options,
        metrics=metrics,
        command=command(options),
        start=options["start_from"] and Path(options["start_from"]).name,
        heads=list(zip(metrics["losses"], metrics["top1"], metrics["top3"], metrics["top10"], strict=True)),
        learned=sum(line["head_losses"][0] for line in last) / len(last),
        found=found,
        row=next((row for row in found["rows"] if row["name"] == folder.name), None) if found else None,
        num_bytes=num_bytes,
    )


def main(arguments: Sequence[str]) -> int:
    """What stands behind ``--`` is for `draftheads train`."""
    own, more = list(arguments), []
    if "--" in own:
        own, more = own[: own.index("--")], own[own.index("--") + 1 :]
    train = Annotated[Train, tyro.conf.subcommand("train")]
    bundle = Annotated[Bundle, tyro.conf.subcommand("bundle")]
    code: int = tyro.cli(train | bundle, args=own, description=__doc__).run(more)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
