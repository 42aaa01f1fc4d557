"""Makes the text that the bundled heads learn: SmolLM2's own answers, in chunks that another machine goes on from.

    python tools/zoo_text.py PROMPTS.jsonl.gz TEXTS.jsonl.gz

PROMPTS has lines with ``prompt`` and ``source``; TEXTS has public-domain texts as ``text``. A seed shuffles both, so
chunk N has the same questions on each machine. Two of five questions get a follow-up. Passages of TEXTS are to be
summarised, translated, continued and answered from. In some conversations of a chunk the model asks itself.
Answers are in int8 (``--precision``): half of them greedy, the others at temperatures 0.3, 0.7 and 1.0.
A chunk that is there is kept; one that was interrupted goes on where it stopped. research/text has those made so far.
Questions keep the licences of their sources, which ``source`` names in each line. gsm8k_train: MIT. gpteacher_codegen
and gpteacher_roleplay: MIT, written by GPT-4. arena_prompts and mbpp_train: CC-BY-4.0. awesome_prompts: CC0-1.0.
self_instruct_seed: Apache-2.0. t0: the licence of each of its data sets. passage: public domain.
"""

import gzip
import json
import random
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import tyro

from draftheads.cli.main import main as draftheads
from draftheads.utils.files import write_atomic

PASSAGES = 0.2  # share of the questions that are about a passage
FOLLOW_UPS = (
    "Rewrite your answer so that a child of ten understands it.",
    "Now say the same in three sentences.",
    "Can you give a concrete example?",
    "What are the weak points of your answer?",
    "Translate your answer into {language}.",
    "Turn your answer into a numbered list.",
    "Why?",
    "Explain the second step in more detail.",
    "Give me two alternatives.",
    "How would you check that this is right?",
    "Make it more formal.",
    "Make it funny.",
    "Summarise our conversation so far.",
    "What would an expert object to?",
    "Write it again as a poem of four lines.",
    "Which assumptions did you make?",
    "What happens if the first number is doubled?",
    "Are you sure? Go through it once more.",
    "Put the main points into a table.",
    "What should I read next about this?",
)
ABOUT_PASSAGES = (
    "Summarise the following text in {number} sentences.\n\n{passage}",
    "{passage}\n\nTL;DR",
    "What is the main point of this passage?\n\n{passage}",
    "Translate into {language}:\n\n{sentence}",
    "Translate the following sentence from English to {language}.\n{sentence}",
    "Rewrite this in simple, modern English.\n\n{passage}",
    "Continue the text below.\n\n{passage}",
    "Read the text and list the people and places in it.\n\n{passage}",
    "Use only the text below to answer the question.\n\nText: {passage}\n\nQuestion: What does the speaker want?",
    "Document: {passage}\n\nWrite three questions about the document and answer them from it.",
    "Correct the grammar and the spelling where needed:\n\n{sentence}",
    "Give the text a title and five keywords.\n\n{passage}",
)
LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch", "Danish", "Polish")


def passages(path: Path, chance: random.Random) -> Iterator[str]:
    """Questions about passages of 60 to 200 words, without an end."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [re.sub(r"\s+", " ", json.loads(line)["text"]) for line in file]
    sentences = [[part for part in re.split(r"(?<=[.!?]) ", text) if part.count(" ") > 3] for text in texts]
    sentences = [text for text in sentences if len(text) > 20]
    while True:
        text = chance.choice(sentences)
        start, size = chance.randrange(len(text) - 10), chance.randint(60, 200)
        words = " ".join(text[start : start + 12]).split(" ")[:size]
        yield chance.choice(ABOUT_PASSAGES).format(
            passage=" ".join(words),
            sentence=text[start],
            number=chance.randint(2, 5),
            language=chance.choice(LANGUAGES),
        )


def questions(prompts: Path, texts: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where a question is from, and its line, in an order that the seed decides."""
    chance = random.Random(2026)  # noqa: S311 - nothing secret
    with gzip.open(prompts, "rt", encoding="utf-8") as file:
        given = [json.loads(line) for line in file]
    chance.shuffle(given)
    about = passages(texts, chance)
    for line in given:
        while chance.random() < PASSAGES:
            yield "passage", {"prompt": next(about)}
        turns = [line["prompt"]]
        if chance.random() < 0.4:
            turns.append(chance.choice(FOLLOW_UPS).format(language=chance.choice(LANGUAGES)))
        yield line["source"], {"turns": turns}


def main(
    prompts: Annotated[Path, tyro.conf.Positional],
    texts: Annotated[Path, tyro.conf.Positional],
    *,
    out: Path = Path("research/text"),
    first: int = 0,
    last: int = 25,
    chunk_size: int = 1500,
    self_talk: int = 100,
    max_new_tokens: int = 320,
    model: str = "smollm2-135m",
    precision: str = "int8",
    batch_size: int = 64,
) -> None:
    """Writes OUT/answers-NN.jsonl.gz for the chunks FIRST to LAST (not included).

    A chunk has ``chunk_size`` questions and ``self_talk`` conversations of the model with itself.
    """
    chunks: list[list[tuple[str, dict[str, Any]]]] = [[]]
    for question in questions(prompts, texts):
        if len(chunks[-1]) == chunk_size:
            chunks.append([])
        chunks[-1].append(question)
    for number, chunk in list(enumerate(chunks))[first:last]:
        name = f"answers-{number:02}"
        if (zipped := out / f"{name}.jsonl.gz").exists():
            continue
        work = out / f"work-{number:02}"
        work.mkdir(parents=True, exist_ok=True)
        files = defaultdict(list)
        for source, line in chunk:
            files[work / f"{source}.jsonl"].append(json.dumps(line))
        for path, lines in files.items():
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        answers = work / f"{name}.jsonl"
        options = (
            f"--num-self-talk {self_talk} --temperature 0 0 0 0.3 0.7 1.0 --max-new-tokens {max_new_tokens} "
            f"--seed {number} --model {model} --precision {precision} --batch-size {batch_size}"
        )
        asked = ["--prompts", *map(str, sorted(files)), "--out", str(answers)]
        if not answers.exists() and draftheads(["distill", *asked, *shlex.split(options)]):
            raise SystemExit(f"{name} was not finished: the same command goes on with it")
        write_atomic(zipped, gzip.compress(answers.read_bytes(), 9, mtime=0))


if __name__ == "__main__":
    tyro.cli(main)
