"""The audit: asks the servers, compares their answers, and reports."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from draftheads.data.records import TextPrompt
from draftheads.errors import InvalidSettings
from draftheads.interop.audit.answer import Answer, Failure, Outcome
from draftheads.interop.audit.client import Server
from draftheads.interop.audit.compare import Comparison, Score, Scorer, compare, gap_by_logprobs
from draftheads.interop.audit.drafting import drafting_between, drafting_in
from draftheads.interop.audit.json_check import json_problem
from draftheads.interop.audit.model_reference import ModelReference, text_of
from draftheads.interop.audit.model_scorer import ModelScorer
from draftheads.interop.audit.report import GreedyRow, Pass, Report, SampledSide, SeededRow
from draftheads.interop.audit.settings import AuditSettings, CheckName, is_json, is_parallel, is_seeded
from draftheads.utils.counts import counted
from draftheads.utils.progress import Progress, counted_stage

_OURS = "draftheads"  # the owner of a model that draftheads serves
_MOST_OFF = 0.02  # share of a baseline's tokens that may be off the model's greedy ones; 0.002 was measured, 0.12 with
# a repetition penalty


@dataclass(frozen=True)
class _Answers:
    """What one server answered to all prompts in one check."""

    outcomes: list[Outcome]
    run: Pass


class Audit:
    """One audit: of a server with drafting, by a baseline without it, by the model, or by both.

    Raises:
        InvalidSettings: neither a baseline nor a model, or no prompt.
    """

    def __init__(
        self,
        server: Server,
        baseline: Server | None,
        load: Callable[[AuditSettings], ModelReference] | None,
        prompts: Sequence[TextPrompt],
        *,
        settings: AuditSettings,
        schema: Mapping[str, Any],
        progress: Progress,
    ) -> None:
        if baseline is None and load is None:
            raise InvalidSettings("nothing to compare with: give --baseline URL, --model MODEL, or both")
        if not prompts:
            raise InvalidSettings("no prompt to ask: give a file with one")
        self._server, self._baseline, self._load = server, baseline, load
        self._prompts, self._settings, self._schema, self._progress = prompts, settings, schema, progress
        self._model: ModelReference | None = None
        self._references: dict[bool, list[Outcome]] = {}  # with a JSON schema, and without
        self._off = {"server": _Off(), "baseline": _Off()}

    def run(self) -> Report:
        """Asks and compares."""
        servers = [server for server in (self._server, self._baseline) if server is not None]
        self._progress.stage("connecting")
        for server in servers:
            server.connect()
        self._warm_up(servers)
        if self._load is not None:
            self._progress.stage("loading the model")
            self._model = self._load(self._settings)
        rows: list[GreedyRow] = []
        sampled: list[SeededRow] = []
        for check in self._settings.chosen:
            if is_seeded(check):
                sampled.append(self._sampled(check))
            elif is_parallel(check):
                rows += self._together(check)
            else:
                rows.append(self._one_by_one(check))
        return Report(tuple(rows), tuple(sampled), self._settings.tolerance, tuple(self._notes(rows)), self._named())

    def _warm_up(self, servers: Sequence[Server]) -> None:
        """The first answer of a server is slower. If a model has no chat template, texts are continued."""
        first = [server.ask(self._prompts[0], 0, "greedy") for server in servers]
        if self._settings.route == "chat" and any(
            isinstance(each, Failure) and "chat template" in each.problem for each in first
        ):
            self._settings = replace(self._settings, route="completions")
            self._prompts = [text_of(prompt) for prompt in self._prompts]
            for server in servers:
                server.use(self._settings)
            self._warm_up(servers)

    # --- greedy answers ---

    def _one_by_one(self, check: CheckName) -> GreedyRow:
        """Server and baseline take turns, prompt by prompt, so that changes of the machine's speed affect both."""
        baseline = self._baseline
        if baseline is None or is_json(check) in self._references:
            (own,) = self._in_turns(check, [self._server])
            return self._row(check, own, self._reference(check))
        own, other = self._in_turns(check, [self._server, baseline])
        self._set_reference(check, other.outcomes)
        return self._row(check, own, other.outcomes, baseline=other.run)

    def _together(self, check: CheckName) -> list[GreedyRow]:
        """Several requests at the same time; the references are answered one by one."""
        reference = self._reference(check)
        own = self._at_once(check, self._server)
        if self._baseline is None:
            return [self._row(check, own, reference)]
        other = self._at_once(check, self._baseline)
        rows = [self._row(check, own, reference, baseline=other.run)]
        return [*rows, self._row(check, other, reference, is_baseline=True)]

    def _reference(self, check: CheckName) -> list[Outcome] | None:
        """Plain greedy answers; None where the texts of the server cannot be compared with the model's."""
        key = is_json(check)
        if key not in self._references:
            if self._baseline is not None:
                alone: CheckName = "json" if key else "greedy"
                (other,) = self._in_turns(alone, [self._baseline])
                self._set_reference(alone, other.outcomes)
            elif self._model is not None and (not key or self._server.owner == _OURS):
                self._progress.stage("answering with the model" + " in JSON" * key)
                self._references[key] = [*self._model.answers(check, self._schema, self._progress)]
            else:  # engines differ in where JSON may have spaces
                return None
        return self._references[key]

    def _row(
        self,
        check: CheckName,
        own: _Answers,
        reference: list[Outcome] | None,
        *,
        baseline: Pass | None = None,
        is_baseline: bool = False,
    ) -> GreedyRow:
        if not is_json(check) and not is_baseline:
            self._count_off("server", own.outcomes)
        comparisons = () if reference is None else self._compared(check, own.outcomes, reference)
        problems = [outcome.problem for outcome in own.outcomes if isinstance(outcome, Failure)]
        row = partial(
            GreedyRow,
            check,
            is_baseline,
            comparisons,
            len(own.outcomes) - len(problems),
            len(problems),
            own.run,
            baseline,
            failure=problems[0] if problems else "",
        )
        if not is_json(check):
            return row()
        finished = {i: one for i, one in enumerate(own.outcomes) if isinstance(one, Answer) and not one.is_cut}
        wrong = {i: problem for i, one in finished.items() if (problem := json_problem(one.text, self._schema))}
        broken = [i for i in wrong if reference is not None and self._is_valid(reference[i])]
        return row(num_finished=len(finished), json_problems=tuple(wrong.items()), num_broken_json=len(broken))

    def _is_valid(self, outcome: Outcome) -> bool:
        return isinstance(outcome, Answer) and json_problem(outcome.text, self._schema) is None

    def _compared(
        self, check: CheckName, outcomes: Sequence[Outcome], reference: Sequence[Outcome]
    ) -> tuple[Comparison, ...]:
        scorer, settings = self._scorer(check), self._settings
        return tuple(
            compare(index, one, other, scorer, tolerance=settings.tolerance, max_tokens=settings.max_new_tokens)
            for index, (one, other) in enumerate(zip(outcomes, reference, strict=True))
        )

    def _set_reference(self, check: CheckName, outcomes: list[Outcome]) -> None:
        self._references[is_json(check)] = outcomes
        if not is_json(check):
            self._count_off("baseline", outcomes)

    def _scorer(self, check: CheckName) -> Scorer | None:
        """What scores differences. The model can do so only if the baseline decodes greedily, and the same model."""
        model = None if self._model is None else ModelScorer(self._model, by_text=not is_json(check))
        if self._baseline is None:
            return model
        baseline = _ByLogprobs(self._baseline, self._prompts, check)
        if model is None:
            return baseline
        self._reference("greedy")
        off = self._off["baseline"]
        if off.num_off > _MOST_OFF * off.num_tokens:
            return _Unusable(off.words)
        return _Smallest(model, baseline, self._settings.tolerance)

    def _count_off(self, name: str, outcomes: Sequence[Outcome]) -> None:
        """Counts greedy tokens that are not the model's."""
        if self._model is not None and self._baseline is not None:
            answers = [(index, one) for index, one in enumerate(outcomes) if isinstance(one, Answer)]
            margins = [margin for index, one in answers for margin in self._model.margins(index, one)]
            num_off = sum(margin > self._settings.tolerance for margin in margins)
            self._off[name] = self._off[name].plus(num_off, len(margins))

    # --- sampled answers ---

    def _sampled(self, check: CheckName) -> SeededRow:
        sides = [self._sampled_side(check, self._server)]
        if self._baseline is not None:
            sides.append(self._sampled_side(check, self._baseline))
        return SeededRow(check, *sides)

    def _sampled_side(self, check: CheckName, server: Server) -> SampledSide:
        if is_parallel(check):
            both = [self._at_once(check, server), self._at_once(check, server)]
        else:
            both = self._in_turns(check, [server, server])
        first, second = (answers.outcomes for answers in both)
        pairs = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, Answer) and isinstance(b, Answer)]
        failures = [outcome.problem for outcome in (*first, *second) if isinstance(outcome, Failure)]
        tokens, excess, variance = self._surprise(first)
        return SampledSide(
            len(pairs),
            sum(a.text == b.text for a, b in pairs),
            len(failures),
            both[0].run,
            tokens,
            excess,
            variance,
            failures[0] if failures else "",
        )

    def _surprise(self, outcomes: Sequence[Outcome]) -> tuple[int, float, float]:
        """Tokens, excess and variance of all answers; zeros without a model."""
        model = self._model
        answers = [(i, one) for i, one in enumerate(outcomes) if isinstance(one, Answer)]
        found = [model.surprise(i, one) for i, one in answers] if model is not None else []
        known = [one for one in found if one is not None]
        return (
            sum(one.num_tokens for one in known),
            sum(one.excess for one in known),
            sum(one.variance for one in known),
        )

    # --- asking ---

    def _in_turns(self, check: CheckName, servers: Sequence[Server]) -> list[_Answers]:
        """Each prompt goes to all servers before the next one; one request at a time."""
        before = [server.metrics() for server in servers]
        advance = counted_stage(self._progress, f"{check}, one by one", len(self._prompts) * len(servers))
        outcomes: list[list[Outcome]] = [[] for _ in servers]
        for index, prompt in enumerate(self._prompts):
            for server, found in zip(servers, outcomes, strict=True):
                found.append(server.ask(prompt, index, check))
                advance()
        return [
            _Answers(found, _pass(found, sum(_seconds(found)), drafted, server.metrics()))
            for server, found, drafted in zip(servers, outcomes, before, strict=True)
        ]

    def _at_once(self, check: CheckName, server: Server) -> _Answers:
        """Several requests at the same time."""
        before = server.metrics()
        most, number = self._settings.parallel, len(self._prompts)
        advance = counted_stage(self._progress, f"{check}, {counted(most, 'request')} at a time", number)
        begin = time.perf_counter()
        pool = ThreadPoolExecutor(most)
        try:
            tasks = [pool.submit(server.ask, prompt, index, check) for index, prompt in enumerate(self._prompts)]
            outcomes = []
            for task in tasks:
                outcomes.append(task.result())
                advance()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return _Answers(outcomes, _pass(outcomes, time.perf_counter() - begin, before, server.metrics()))

    # --- what else is reported ---

    def _named(self) -> dict[str, Any]:
        named: dict[str, Any] = {"server": {"url": self._server.base, "model": self._server.model}}
        if self._baseline is not None:
            named["baseline"] = {"url": self._baseline.base, "model": self._baseline.model}
        if self._model is not None:
            target = self._model.engine.model
            named["model"] = {"name": target.model_id, "precision": target.precision}
        return named

    def _notes(self, rows: Sequence[GreedyRow]) -> list[str]:
        notes = []
        if self._settings.route == "completions":
            notes.append("Texts were continued by /v1/completions, without a chat template.")
        for server in (self._server, self._baseline):
            if server is not None and server.others:
                others = ", ".join(server.others[:4])
                notes.append(f"{server.base} has several models; asked was {server.model}, not {others}.")
        if self._off["baseline"].num_tokens:
            sides = [
                f"{off.num_off} of {counted(off.num_tokens, 'token')} of the {name}" for name, off in self._off.items()
            ]
            notes.append(
                f"Less likely than the model's best token by more than {self._settings.tolerance:g} nats: "
                f"{', '.join(sides)}."
            )
        rates = [row.baseline.drafting for row in rows if row.baseline is not None]
        if any(rate is not None and (rate.tokens_per_step or 1.0) > 1.0 for rate in rates):
            notes.append("The baseline drafts, too: start it without drafting, or its answers are no reference.")
        if self._model is not None and (settings := self._model.defaults_of_servers()):
            values = ", ".join(f'"{name}": {value}' for name, value in settings.items())
            notes.append(
                f"The model's generation configuration sets {', '.join(settings)}, which servers may apply and --model "
                f"does not: give --fields '{{{values}}}' to a server that does."
            )
        if any(row.num_finished is not None and not row.comparisons for row in rows):
            notes.append(
                "JSON texts were checked, but not compared: engines write spaces differently. Give --baseline."
            )
        return notes


@dataclass(frozen=True)
class _Off:
    """Tokens of greedy answers that are less likely than the model's best ones, beyond the tolerance."""

    num_off: int = 0
    num_tokens: int = 0

    def plus(self, num_off: int, num_tokens: int) -> "_Off":
        return _Off(self.num_off + num_off, self.num_tokens + num_tokens)

    @property
    def words(self) -> str:
        """What follows, if they are many."""
        share = 100 * self.num_off / self.num_tokens
        return (
            f"{share:.0f} % of the baseline's own tokens are not --model's greedy ones, so the model cannot score: are "
            "the weights others, or is a penalty the default (llama-cpp-python: --fields '{\"repeat_penalty\": 1}')"
        )


class _Unusable:
    """Scores nothing."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def score(self, index: int, answer: Answer, reference: Answer) -> Score:
        return Score(None, reason=self._reason)


class _ByLogprobs:
    """Scores by the log-probabilities of the baseline, whose text is not drafted."""

    def __init__(self, baseline: Server, prompts: Sequence[TextPrompt], check: CheckName) -> None:
        self._baseline, self._prompts, self._check = baseline, prompts, check

    def score(self, index: int, answer: Answer, reference: Answer) -> Score:
        """Asks the baseline again, with log-probabilities."""
        places = self._baseline.places(self._prompts[index], index, self._check)
        if not places:
            return Score(None, reason="the baseline gives no log-probabilities, and there is no --model to score with")
        return gap_by_logprobs(places, answer.text, reference.text, is_greedy=not is_json(self._check))


class _Smallest:
    """Scores by the model, and if it finds no near-tie also by the baseline, which has the server's own rounding."""

    def __init__(self, model: Scorer, baseline: Scorer, tolerance: float) -> None:
        self._model, self._baseline, self._tolerance = model, baseline, tolerance

    def score(self, index: int, answer: Answer, reference: Answer) -> Score:
        """The smaller gap of the two."""
        first = self._model.score(index, answer, reference)
        if first.gap is not None and abs(first.gap) <= self._tolerance:
            return first
        second = self._baseline.score(index, answer, reference)
        if first.gap is None or second.gap is None:
            return first if second.gap is None else second
        return min(first, second, key=lambda score: abs(score.gap or 0.0))


def _pass(outcomes: Sequence[Outcome], seconds: float, before: Mapping[str, float], after: Mapping[str, float]) -> Pass:
    answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
    counts = [answer.num_tokens for answer in answers]
    speed = None
    if counts and seconds > 0 and all(count is not None for count in counts):
        speed = sum(count or 0 for count in counts) / seconds
    drafting = drafting_in(answer.draft for answer in answers) or drafting_between(before, after)
    return Pass(speed, drafting)


def _seconds(outcomes: Sequence[Outcome]) -> list[float]:
    return [outcome.seconds for outcome in outcomes if isinstance(outcome, Answer)]
