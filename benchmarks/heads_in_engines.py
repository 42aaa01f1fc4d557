"""Our heads in other engines, beside the engine without them and beside ours with the same chains of draft tokens.

`vllm` has the plug-in of packages/vllm; `openvino` and `llama-server` get exported heads. Texts are compared with those
of the same program without drafts: in fp32 they are equal, with other weights near-ties may differ, and our model in
fp32 scores the first difference.
"""

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from harness import DTYPES, Ids, encoded, python_of, real_model, shown
from peers import Comparison, DecodingMethod, Measured, Row

import draftheads
from draftheads.bench.timing import spread
from draftheads.checkpoints.checkpoint import read_head
from draftheads.checkpoints.registry import find_head
from draftheads.data.records import prompts_in
from draftheads.loading import load_target
from draftheads.models.gguf_models import SMOLLM2_135M
from draftheads.models.model import TargetModel
from draftheads.runners import runner_for

# others do not go together with transformers of optimum-intel 2.2
_NEEDED = ("diffusers==0.38.0", "einops", "huggingface-hub<1.22")
DEFAULT_HEADS = {"vllm": ("medusa", "hydra"), "openvino": ("eagle3",), "llama-server": ("dspark",)}
_TREE = {"tree_depth": 4, "branching_factor": 4, "num_assistant_tokens": 10}  # OpenVINO's


@dataclass(frozen=True)
class Options(Measured):
    """What is compared, and on how much."""

    engine: Literal["vllm", "openvino", "llama-server"] = "vllm"
    """The other engine. llama-server is a program of llama.cpp that you built."""
    heads: tuple[str, ...] = ()
    """Heads for smollm2-135m. By default medusa and hydra for vllm, eagle3 for openvino, dspark for llama-server."""
    chain: int | None = None
    """Draft tokens of a step; by default as many as the head can."""
    precision: str = "fp32"
    """Of vLLM, llama.cpp and ours: fp32 or bf16. OpenVINO's model is int8, and then so is ours."""
    limit: int = 8
    """How many of the prompts, spread evenly over the file."""
    rounds: int = 3
    """How often everything is measured."""
    batch_sizes: tuple[int, ...] = (1,)
    """How many prompts are answered together; OpenVINO and llama-server take one."""
    gguf: Path | None = None
    """The model for llama-server, in fp32 or bf16 as its own converter writes it: other weights give other texts."""
    server: Path | None = None
    """The program llama-server."""
    near_tie: float = 0.5
    """Gap of log-probabilities up to which a first difference is a near-tie; int8 changes them so much."""


def for_openvino(options: Options, head: str) -> Path:
    """A head as OpenVINO reads it, made once."""
    models = options.environments / "models"
    place, exported = models / f"openvino-draft-{head}", models / f"exported-{head}"
    if (place / "openvino_model.xml").exists():
        return place
    python = python_of("openvino", options.environments)
    if not exported.exists():
        draftheads.export_head(head, exported)
    export = [python.with_name("optimum-cli"), "export", "openvino", "--model", exported, "--trust-remote-code"]
    export += ["--task", "text-generation-with-past", place]
    for command in ([python, "-m", "pip", "install", "--quiet", *_NEEDED], export):
        subprocess.run(list(map(str, command)), check=True)  # noqa: S603 - programs of the environment
    return place


def for_llama_server(options: Options, head: str) -> list[str]:
    """The arguments that `draftheads export` prints for a head, written once."""
    done = draftheads.export_head(head, options.environments / "models" / f"llama-cpp-{head}", to="llama.cpp")
    return shlex.split(done.commands["llama.cpp"].replace("MODEL.gguf", shlex.quote(str(options.gguf))))[1:]


def theirs(options: Options, head: str | None, chain: int, longest: int) -> list[DecodingMethod]:
    """The other engine with a head, or without."""
    name, engine = f"{options.engine} {head or 'plain'}", options.engine
    common: dict[str, Any] = {"threads": options.threads, "lookup": False, "max_batch_size": max(options.batch_sizes)}
    if engine == "vllm":
        room = longest + options.max_new_tokens + 16
        own = {"model": str(real_model()), "dtype": DTYPES[options.precision], "max_length": room}
        return [DecodingMethod(name, engine, {**common, **own, "head": head, "chain": chain})]
    if engine == "llama-server":
        if options.gguf is None or options.server is None:
            sys.exit("error: llama-server needs --gguf and --server")
        arguments = for_llama_server(options, head) if head else ["-m", str(options.gguf)]
        own = {"server": str(options.server), "arguments": arguments, "precision": options.precision}
        own["log"] = str(options.environments / "logs" / f"llama-server-{head or 'plain'}.log")
        return [DecodingMethod(name, "draftheads", {**common, **own}, worker=engine)]
    common["model"] = str((options.environments / "models" / "openvino-int8").absolute())
    if head is None:
        return [DecodingMethod(name, engine, common)]
    common["draft"] = str(for_openvino(options, head).absolute())
    ways = {name: {"num_assistant_tokens": chain}, f"{name}, tree of 10": _TREE}
    return [DecodingMethod(way, engine, {**common, "config": config}) for way, config in ways.items()]


def first_gap(target: TargetModel, prompt: Ids, given: tuple[int, ...], expected: tuple[int, ...]) -> float | None:
    """Log-probability of the expected token less that of the given one, where two answers part; None if they do not."""
    same = next((i for i, pair in enumerate(zip(given, expected, strict=False)) if pair[0] != pair[1]), None)
    if same is None:
        return None
    _, logits, _ = runner_for(target).prefill([[*prompt, *expected[:same]]])
    scores = logits[0].float().log_softmax(-1)
    return abs(float(scores[expected[same]] - scores[given[same]]))


def main(options: Options) -> None:
    """Measure, and print the table."""
    named = options.heads or DEFAULT_HEADS[options.engine]
    prompts = encoded(spread(prompts_in(options.prompts), options.limit), real_model())
    precision = "int8" if options.engine == "openvino" else options.precision
    ours = {"name": SMOLLM2_135M, "precision": precision, "max_batch_size": max(options.batch_sizes)}
    ways: list[DecodingMethod] = []
    for head in (None, *named):
        most = read_head(find_head(head, SMOLLM2_135M)).config.num_heads if head else 0
        chain = min(options.chain or most, most)
        ways += theirs(options, head, chain, max(map(len, prompts)))
        own = {**ours, "head": head, "chain": chain}
        ways.append(DecodingMethod(f"draftheads {head or 'plain'}", "draftheads", own))
    comparison = Comparison(options, ways, prompts)
    comparison.run()
    scorer = load_target(SMOLLM2_135M, precision="fp32")

    def cells(row: Row) -> list[str]:
        plain = comparison.rows[f"{row.name.split()[0]} plain", row.batch_size]
        depths = zip(*(reply.accepted_by_depth for each in row.rounds for reply in each), strict=False)
        accepted = [sum(counts) / row.num_steps for counts in depths] if row.num_steps else []
        gaps = [first_gap(scorer, *given) for given in zip(prompts, row.texts(), plain.texts(), strict=True)]
        near = sum(gap is not None and gap <= options.near_tie for gap in gaps)
        return [
            shown(row.speeds),
            shown(row.ratios(plain), 2),
            "" if row.tokens_per_step is None else f"{row.tokens_per_step:.3f}",
            " ".join(f"{share:.3f}" for share in accepted),
            f"{gaps.count(None)} of {len(gaps)}",
            f"{near} of {len(gaps) - gaps.count(None)}",
        ]

    headings = ("tokens/s", "× plain", "tokens/step", "accepted per step, by depth", "texts as plain", "near-ties")
    comparison.show(headings, cells)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
