"""How good heads are on held-out text: losses, ranks of the true tokens, tokens per step; and what is written of it.

The ranks of a grounded head along the true text are those of drafting while all earlier draft tokens were accepted, so
any tree can be evaluated from ranks.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, Self

import torch
from torch import Tensor

from draftheads.data.batches import Batch, bucket_by_length, collate
from draftheads.data.features import Documents
from draftheads.errors import DataError
from draftheads.models.model_names import shown_name
from draftheads.search.tree_search import best_tree, expected_tokens
from draftheads.speculation.tree import Tree
from draftheads.train.learner import Learner
from draftheads.train.losses import CHUNK_SIZE, ROW_LOSSES, find_predictions
from draftheads.utils.counts import counted, shares

BEST = "best"  # a run's folder of the head with the lowest held-out loss, and the name of its checkpoint
NUM_RANKS = 10  # ranks 0 … 9 are recorded; this number means a miss
REPORTED_NODES = 16  # of the tree that is reported, root included

# of tokens per step: below the first, a step saves less time than verifying a small tree costs; the weakest bundled
# head has 1.91 with a tree of 10 nodes
LITTLE, GOOD = 1.15, 1.8
_RISE = 1.01  # of the held-out loss at the end to the lowest one: below, both heads are as good
_MANY_STEPS = 1000  # after so many steps without success, more of the same will not help
_FEW_TEXTS, _FEW_TOKENS = 16, 1000  # of held-out texts; below them, other texts may give quite another number


@dataclass(frozen=True)
class Measurement:
    """Losses and ranks on held-out text: S positions from which at least one head predicts a token."""

    losses: Tensor  # (K,) mean training loss
    ranks: Tensor  # (S, K) int64: rank of the true token, NUM_RANKS for a miss
    counts: Tensor  # (S, K) bool: whether the head had a token to predict

    @property
    def joint_ranks(self) -> Tensor:
        """(S', K) ranks where all heads had a token to predict; all (S, K) if texts are too short for that."""
        complete = self.counts.all(1)
        return self.ranks[complete] if complete.any() else self.ranks

    def accuracy(self, num_best: int) -> list[float]:
        """Per head: how often the true token is among its ``num_best`` most probable tokens."""
        hits = ((self.ranks < num_best) & self.counts).sum(0)
        return [float(share) for share in hits / self.counts.sum(0).clamp_min(1)]

    def tokens_per_step(self, tree: Tree) -> float:
        """Expected tokens per step with this tree."""
        return expected_tokens(self.joint_ranks, tree)

    def tree(self, num_nodes: int = REPORTED_NODES) -> Tree:
        """The tree with most expected tokens per step, root included."""
        return best_tree(self.joint_ranks, num_nodes)

    def tokens_per_step_of_best(self, num_nodes: int) -> float:
        """Expected tokens per step with the best tree of that size, root included.

        The tree is chosen on one half of the positions and measured on the other, and the other way round. Measured on
        the text that it was chosen on, a tree looks better than it is, the more so if there is little text.
        """
        ranks = self.joint_ranks
        first, second = ranks.tensor_split(2)
        if len(second) == 0:
            return 1.0
        halves = ((first, second), (second, first))
        gains = [len(on) * expected_tokens(on, best_tree(by, num_nodes)) for on, by in halves]
        return sum(gains) / len(ranks)

    def summary(self) -> dict[str, Any]:
        """Plain numbers, for a line of ``validation.jsonl`` and for the report."""
        return {
            "losses": self.losses.tolist(),
            "top1": self.accuracy(1),
            "top3": self.accuracy(3),
            "top10": self.accuracy(10),
            "tokens_per_step_chain": self.tokens_per_step(Tree.chain(self.ranks.shape[1])),
            "tokens_per_step_tree": self.tokens_per_step_of_best(REPORTED_NODES),
        }


@dataclass(frozen=True)
class Movement:
    """How far a tuned model is from the original: means over the assistant's tokens of held-out text."""

    num_tokens: int
    kl: float  # KL(original || tuned), nats per token
    original_perplexity: float
    tuned_perplexity: float
    agreement: float  # how often both have the same most probable token


@dataclass(frozen=True)
class Report:
    """The heads as measured on held-out text, and the run that made them; the values of ``metrics.json`` by name."""

    method: str
    model_id: str
    num_training_texts: int  # of all hosts, as are their tokens
    num_held_out_texts: int
    num_steps: int
    reading_seconds: float  # for hidden states before the first step; this and the next are of this process alone
    training_seconds: float  # of a resumed run only the last part
    tokens_per_second: float  # of text, in those seconds
    losses: list[float]  # per head
    accuracy_by_rank: list[list[float]]  # per head: share of true tokens among its 1, 2, … most probable tokens
    top1: list[float]  # per head: share of true tokens that were its most probable token
    top3: list[float]
    top10: list[float]
    tokens_per_step_chain: float  # expected, with a chain as deep as there are heads
    tokens_per_step_tree: float  # expected, with the best tree of as many nodes as the one below
    tree: list[list[int]]  # rank paths without the root; chosen on all held-out texts
    num_training_tokens: int  # of all training texts, prompts included
    num_answer_tokens: int  # those among them that heads learn to predict
    num_held_out_tokens: int  # of held-out answers
    left_out: list[str]  # why chats were left out, a sentence for each reason
    scripts: Mapping[str, int] | None = None  # letters of each script in a sample of the texts; None: not counted
    movement: Movement | None = None  # of joint training
    best_step: int | None = None  # with the lowest held-out loss during training, if it is not the last one
    best_loss: float | None = None  # of the head of that step, the mean over the heads

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> Self:
        """The report in the content of a ``metrics.json``."""
        values = {name: metrics[name] for known in fields(cls) if (name := known.name) in metrics}
        if values.get("movement"):
            values["movement"] = Movement(**values["movement"])
        return cls(**values)


@torch.no_grad()
def measure(learner: Learner, store: Documents, documents: Sequence[int], *, batch_tokens: int) -> Measurement:
    """Losses and ranks on the given documents."""
    was_training = learner.training
    learner.eval()  # no dropout, no noise
    parts = []
    for group in bucket_by_length([store.lengths[i] for i in documents], batch_tokens):
        texts = [store[documents[i]] for i in group]
        parts.append(_measure_batch(learner, collate(texts, skip_prompts=not learner.head.needs_history)))
    learner.train(was_training)
    sums, numbers, ranks, counts = zip(*parts, strict=True)
    losses = torch.stack(sums).sum(0) / torch.stack(numbers).sum(0).clamp_min(1)
    if not any(map(len, counts)):
        given = counted(len(documents), "held-out text")
        raise DataError(f"no two assistant tokens in a row in {given}: give more data")
    return Measurement(losses, torch.cat(ranks), torch.cat(counts))


def _measure_batch(learner: Learner, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss sums (K,), numbers of losses (K,), ranks (S, K) and counts (S, K), on the CPU."""
    device, dtype = learner.teacher.device, learner.teacher.dtype
    token_ids, loss_mask = batch.token_ids.to(device), batch.loss_mask.to(device)
    read, hidden = learner.head.split(batch.hidden.to(device, dtype))
    features = learner.head(read, token_ids).flatten(1, 2)  # (K, B·T, D)
    labels = learner.labels(hidden, token_ids)
    flat_ids = token_ids.flatten()
    ranks = flat_ids.new_full((len(features), len(flat_ids)), NUM_RANKS)
    counts = torch.zeros_like(ranks, dtype=torch.bool)
    sums, numbers = torch.zeros(2, len(features), device=device)
    for chunk in find_predictions(loss_mask, len(features)).chunks(CHUNK_SIZE):
        truth = flat_ids[chunk.positions + 1]
        chunk_labels = labels(chunk.positions)
        known, index = learner.in_vocab[truth], learner.draft_index[truth]
        for i in range(len(features)):
            rows = chunk.counts[i].nonzero()[:, 0]
            source = chunk.sources(i)[rows]
            logits = learner.head.logits(features[i, source], i).float()
            better = (logits > logits.gather(1, index[rows, None])).sum(1).clamp_max(NUM_RANKS)
            ranks[i, source] = torch.where(known[rows], better, NUM_RANKS)
            counts[i, source] = True
            has_label = known[rows] | learner.reads_teacher
            sums[i] += ROW_LOSSES[learner.loss](logits, chunk_labels.rows(rows))[0][has_label].sum()
            numbers[i] += has_label.sum()
    used = counts.any(0)
    return sums.cpu(), numbers.cpu(), ranks[:, used].T.cpu(), counts[:, used].T.cpu()


_FOLDERS = re.compile(r"(?<![\w./~-])/(?:[^\s/\"']+/)+")  # of absolute paths: a card names none of this machine


def model_card(report: Report, options: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    """The text of a head's ``README.md``, Markdown; the settings of its run and where it was made are JSON values."""
    rows = zip(report.losses, report.top1, report.top3, report.top10, strict=True)
    table = "\n".join(
        f"| {i + 1} | {loss:.3f} | {top1:.1%} | {top3:.1%} | {top10:.1%} |"
        for i, (loss, top1, top3, top10) in enumerate(rows)
    )
    seconds = report.reading_seconds + report.training_seconds
    drafted, steps = counted(len(report.losses), "token"), counted(report.num_steps, "step")
    made = _FOLDERS.sub("", json.dumps({"options": dict(options), "provenance": dict(provenance)}, indent=2))
    model = shown_name(report.model_id)
    texts, held_out = counted(report.num_training_texts, "text"), counted(report.num_held_out_texts, "held-out text")
    scripts = f" Scripts of the text: {shares(report.scripts)}." if report.scripts else ""
    # by these two fields `--head auto` finds a head on the Hub
    fields = f"---\nbase_model: {model}\ntags:\n- draftheads\n---\n\n" if "/" in model else ""
    return f"""{fields}# {report.method} head for {model}

Drafts {drafted} beyond the next one. With `draftheads`, {model} checks them itself.

Trained on {texts} ({counted(report.num_training_tokens, "token")}, {report.num_answer_tokens:,} of them in answers)
in {steps}, {seconds:,.0f} seconds with the hidden states.{scripts} On {held_out}, how often the true
token is among a head's most probable tokens:

| head | loss | top-1 | top-3 | top-10 |
| --- | --- | --- | --- | --- |
{table}

Expected tokens per step: {report.tokens_per_step_chain:.2f} with a chain of the most probable tokens,
{report.tokens_per_step_tree:.2f} with the best tree of {counted(len(report.tree) + 1, "node")}.

## How it was made

```json
{made}
```
"""


def verdict_of(metrics: Mapping[str, Any]) -> str:
    """One sentence on what a run's tokens per step mean, and what to do next, from the values of ``metrics.json``.

    Plain decoding makes 1 token per step.
    """
    tokens_per_step = round(metrics["tokens_per_step_tree"], 2)  # the class is of the number that is shown
    measured = f"{tokens_per_step:.2f} tokens per step on held-out text (plain decoding: 1)"
    num_texts, num_tokens = metrics["num_held_out_texts"], metrics["num_held_out_tokens"]
    lowest = metrics.get("best_loss")
    if lowest is not None and (last := fmean(metrics["losses"])) > _RISE * lowest:
        return (
            f"{measured}; the heads became worse after step {metrics['best_step']}, the best one: the held-out loss "
            f"rose from {lowest:.3f} to {last:.3f}. Use the head in the folder {BEST}, and train on more and "
            "more varied text or with a lower --learning-rate"
        )
    if tokens_per_step < LITTLE:
        if metrics["num_steps"] >= _MANY_STEPS:
            steps = counted(metrics["num_steps"], "step")
            fix = "look at the learned tokens with `draftheads show-batch`, and try another --learning-rate"
            return f"{measured}: the heads have learned almost nothing in {steps}; {fix}"
        fix = "train on more text (`draftheads distill` makes it from prompts) or with more --epochs"
        return f"{measured}: the heads have learned almost nothing; {fix}"
    if num_texts < _FEW_TEXTS or num_tokens < _FEW_TOKENS:
        held_out = f"{counted(num_texts, 'held-out text')} with {counted(num_tokens, 'answer token')}"
        fix = "train on more and more varied text, and measure with `draftheads bench` on your own prompts"
        return f"{measured}, but of only {held_out}, so other texts may give far less: {fix}"
    if tokens_per_step >= GOOD:
        return f"{measured}: good; `draftheads bench` measures the speed"
    return f"{measured}: a start; more text may add to it (`draftheads distill` makes it from prompts)"
