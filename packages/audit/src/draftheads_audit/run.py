"""The audit: asks the servers, compares their answers, and reports."""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

import jsonschema_rs

from draftheads.data.records import TextPrompt
from draftheads.utils.counts import counted
from draftheads_audit.compare import Score, Scorer, compare, gap_by_logprobs
from draftheads_audit.model import ModelReference, text_of
from draftheads_audit.options import NUM_PARALLEL, SCHEMA, AuditOptions, CheckName, is_json, is_parallel, is_seeded
from draftheads_audit.report import GreedyRow, Pass, Report, SampledSide, SeededRow
from draftheads_audit.server import Answer, Outcome, Server, drafting_between, drafting_in

Stage = Callable[[str, int], Callable[[], object]]  # begins one of so many units; what it returns is called after each
_OURS = "draftheads"  # the owner of a model that draftheads serves
# share of a baseline's tokens that may be off the model's greedy ones; measured: 0.002, or 0.12 with a penalty
_MOST_OFF = 0.02


class Audit:
    """An audit of a server that drafts: a baseline without drafts, the model, or both give the references.

    Args:
        servers: the one with drafting, and perhaps the baseline without.
        load: loads the model; the argument says whether prompts are chats.
        prompts: to answer.
        options: of the audit.
        stage: what shows the progress.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        load: Callable[..., ModelReference] | None,
        prompts: Sequence[TextPrompt],
        options: AuditOptions,
        stage: Stage,
    ) -> None:
        self.servers, self.prompts, self.options, self._load, self._stage = servers, prompts, options, load, stage
        self._baseline = servers[1] if len(servers) > 1 else None
        self._model: ModelReference | None = None
        self._references: dict[bool, list[Outcome]] = {}  # with a JSON schema, and without
        # how much less likely than the model's best one each greedy token is
        self._margins: dict[str, list[float]] = {"server": [], "baseline": []}

    def run(self) -> Report:
        """Asks and compares."""
        for server in self.servers:
            server.connect()
        self._warm_up()
        if self._load is not None:
            self._model = self._load(self.prompts, is_chat=self.servers[0].is_chat)
        rows, sampled = list[GreedyRow](), list[SeededRow]()
        for check in self.options.chosen:
            if is_seeded(check):
                sampled.append(SeededRow(check, *(self._sampled(check, server) for server in self.servers)))
            else:
                rows += self._greedy(check)
        pairs = zip(("server", "baseline"), self.servers, strict=False)
        named: dict[str, Any] = {name: {"url": one.base, "model": one.model} for name, one in pairs}
        if self._model is not None:
            target = self._model.engine.model
            named["model"] = {"name": target.model_id, "precision": target.precision}
        return Report(tuple(rows), tuple(sampled), self.options.tolerance, tuple(self._notes(rows)), named)

    def _warm_up(self) -> None:
        """The first answer of a server is slower. If a model has no chat template, texts are continued."""
        first = [server.ask(self.prompts[0], 0, "greedy") for server in self.servers]
        has_none = any(isinstance(outcome, str) and "chat template" in outcome for outcome in first)
        if has_none and self.servers[0].is_chat:
            self.prompts = [text_of(prompt) for prompt in self.prompts]
            for server in self.servers:
                server.is_chat = False
            self._warm_up()

    # --- greedy answers ---

    def _greedy(self, check: CheckName) -> list[GreedyRow]:
        """The server's row; in parallel checks also the baseline's beside itself one by one."""
        (own, run), *others = self._answers(check, *self.servers)
        if others and not is_parallel(check):
            self._keep_reference(is_json(check), others[0][0])
        if not is_json(check):
            self._add_margins("server", own)
        rows = [self._row(check, own, run, baseline=others[0][1] if others else None)]
        if is_parallel(check):
            rows += [self._row(check, outcomes, run, is_baseline=True) for outcomes, run in others]
        return rows

    def _row(self, check: CheckName, own: list[Outcome], run: Pass, **more: Any) -> GreedyRow:
        reference, failures = self._reference(is_json(check)), [one for one in own if isinstance(one, str)]
        if reference is not None:
            limits: Any = {"tolerance": self.options.tolerance, "max_tokens": self.options.max_new_tokens}
            scorer, pairs = self._scorer(check), enumerate(zip(own, reference, strict=True))
            more["comparisons"] = tuple(compare(i, *pair, scorer, **limits) for i, pair in pairs)
        if is_json(check):
            finished = [(i, one) for i, one in _answered(own) if not one.is_cut]
            wrong = [(i, problem) for i, one in finished if (problem := json_problem(one.text))]
            valid = {i for i, one in _answered(reference or ()) if json_problem(one.text) is None}
            broken = sum(i in valid for i, _ in wrong)
            more |= {"num_finished": len(finished), "json_problems": tuple(wrong), "num_broken_json": broken}
        failure = next(iter(failures), "")
        return GreedyRow(check, len(own) - len(failures), len(failures), run, failure=failure, **more)

    def _reference(self, in_json: bool) -> list[Outcome] | None:  # noqa: FBT001 - a key of references
        """Plain greedy answers; None where the texts of the server cannot be compared with the model's."""
        if in_json not in self._references:
            if self._baseline is not None:
                [(outcomes, _)] = self._answers("json" if in_json else "greedy", self._baseline)
                self._keep_reference(in_json, outcomes)
            # other engines differ in where JSON may have spaces
            elif self._model is not None and (not in_json or self.servers[0].owner == _OURS):
                advance = self._stage("answering with the model" + " in JSON" * in_json, len(self.prompts))
                answers = self._model.answers(SCHEMA if in_json else None, advance)
                self._references[in_json] = [*answers]
        return self._references.get(in_json)

    def _keep_reference(self, in_json: bool, outcomes: list[Outcome]) -> None:  # noqa: FBT001 - as above
        self._references[in_json] = outcomes
        if not in_json:
            self._add_margins("baseline", outcomes)

    def _add_margins(self, name: str, outcomes: Sequence[Outcome]) -> None:
        if self._model is not None and self._baseline is not None:
            for index, answer in _answered(outcomes):
                self._margins[name] += self._model.margins(index, answer)

    def _num_off(self, name: str) -> int:
        return sum(margin > self.options.tolerance for margin in self._margins[name])

    def _scorer(self, check: CheckName) -> Scorer:
        """What scores differences. The model can do so only if the baseline decodes greedily, and the same model."""
        by_baseline = partial(self._by_logprobs, check)
        if self._model is None:
            return by_baseline
        by_model = partial(self._model.score, by_text=not is_json(check))
        if self._baseline is None:
            return by_model
        self._reference(in_json=False)
        num_off, num_tokens = self._num_off("baseline"), len(self._margins["baseline"])
        if num_off > _MOST_OFF * num_tokens:
            share = 100 * num_off / num_tokens
            reason = (
                f"{share:.0f} % of the baseline's own tokens are not --model's greedy ones, so the "
                "model cannot score: are the weights others, or is a penalty the default (llama-cpp-python: --fields "
                "'{\"repeat_penalty\": 1}')"
            )
            return lambda *_: Score(None, reason=reason)
        return partial(smaller_gap, by_model, by_baseline, self.options.tolerance)

    def _by_logprobs(self, check: CheckName, index: int, answer: Answer, reference: Answer) -> Score:
        """By the log-probabilities of the baseline, which is asked again: its text is not drafted."""
        assert self._baseline is not None
        places = self._baseline.places(self.prompts[index], index, check)
        if not places:
            return Score(None, reason="the baseline gives no log-probabilities, and there is no --model to score with")
        return gap_by_logprobs(places, answer.text, reference.text, is_greedy=not is_json(check))

    # --- sampled answers ---

    def _sampled(self, check: CheckName, server: Server) -> SampledSide:
        (first, run), (second, _) = self._answers(check, server, server)
        pairs = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, Answer) and isinstance(b, Answer)]
        failures = [outcome for outcome in (*first, *second) if isinstance(outcome, str)]
        found = [] if self._model is None else [self._model.surprise(i, one) for i, one in _answered(first)]
        known = [one for one in found if one is not None]
        return SampledSide(
            num_repeated=len(pairs),
            num_equal=sum(a.text == b.text for a, b in pairs),
            num_failed=len(failures),
            run=run,
            num_tokens=sum(one.num_tokens for one in known),
            excess=sum(one.excess for one in known),
            variance=sum(one.variance for one in known),
            failure=failures[0] if failures else "",
        )

    # --- asking ---

    def _answers(self, check: CheckName, *servers: Server) -> list[tuple[list[Outcome], Pass]]:
        """The answers of each server to all prompts.

        One by one, servers take turns, prompt by prompt, so that changes of the machine's speed affect all. In parallel
        checks the next server is asked when the last one has answered everything.
        """
        together, number = is_parallel(check), len(self.prompts) * len(servers)
        if together and len(servers) > 1:
            return [self._answers(check, server)[0] for server in servers]
        most = NUM_PARALLEL if together else 1
        how = f"{counted(most, 'request')} at a time" if together else "one by one"
        advance = self._stage(f"{check}, {how}", number)
        before = [server.metrics() for server in servers]
        tasks = [(server, index) for index in range(len(self.prompts)) for server in servers]

        def ask(task: tuple[Server, int]) -> Outcome:
            server, index = task
            outcome = server.ask(self.prompts[index], index, check)
            advance()
            return outcome

        begin = time.perf_counter()
        with ThreadPool(most) as pool:  # its threads are daemons: nobody waits for them after an error
            outcomes = list(pool.imap(ask, tasks))
        seconds, found = time.perf_counter() - begin, []
        for place, server in enumerate(servers):
            own = outcomes[place :: len(servers)]
            answers = [answer for _, answer in _answered(own)]
            if not together:
                seconds = sum(answer.seconds for answer in answers)
            counts = [answer.num_tokens for answer in answers if answer.num_tokens is not None]
            speed = sum(counts) / seconds if counts and len(counts) == len(answers) and seconds > 0 else None
            drafting = drafting_in(answer.draft for answer in answers)
            drafting = drafting or drafting_between(before[place], server.metrics())
            found.append((own, Pass(speed, drafting)))
        return found

    # --- what else is reported ---

    def _notes(self, rows: Sequence[GreedyRow]) -> list[str]:
        notes = []
        if not self.servers[0].is_chat:
            notes.append("Texts were continued by /v1/completions, without a chat template.")
        for server in self.servers:
            if server.others:
                others = ", ".join(server.others[:4])
                notes.append(f"{server.base} has several models; asked was {server.model}, not {others}.")
        if self._margins["baseline"]:
            sides = [
                f"{self._num_off(name)} of {counted(len(margins), 'token')} of the {name}"
                for name, margins in self._margins.items()
            ]
            limit = f"{self.options.tolerance:g} nats"
            notes.append(f"Less likely than the model's best token by more than {limit}: {', '.join(sides)}.")
        rates = [row.baseline.drafting for row in rows if row.baseline is not None]
        if any(rate is not None and (rate.tokens_per_step or 1.0) > 1.0 for rate in rates):
            notes.append("The baseline drafts, too: start it without drafting, or its answers are no reference.")
        if self._model is not None and (settings := self._model.defaults_of_servers()):
            notes.append(
                f"The model's generation configuration sets {', '.join(settings)}, which servers may apply and --model "
                f"does not: give --fields '{json.dumps(settings)}' to a server that does."
            )
        if any(row.num_finished is not None and not row.comparisons for row in rows):
            notes.append(
                "JSON texts were checked, but not compared: engines write spaces differently. Give --baseline."
            )
        return notes


def smaller_gap(by_model: Scorer, by_baseline: Scorer, tolerance: float, *asked: Any) -> Score:
    """By the model, and if it finds no near-tie also by the baseline, which has the server's own rounding."""
    first = by_model(*asked)
    if first.gap is not None and abs(first.gap) <= tolerance:
        return first
    second = by_baseline(*asked)
    if first.gap is None or second.gap is None:
        return first if second.gap is None else second
    return min(first, second, key=lambda score: abs(score.gap or 0.0))


def json_problem(text: str) -> str | None:
    """Why a text is not JSON of the schema; None if it is.

    >>> json_problem('{"topic": 1}')
    'the text: "words" is a required property'
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    problem = next(jsonschema_rs.validator_for(SCHEMA).iter_errors(value), None)
    return None if problem is None else f"{'.'.join(map(str, problem.instance_path)) or 'the text'}: {problem.message}"


def _answered(outcomes: Sequence[Outcome]) -> list[tuple[int, Answer]]:
    """The answers with the numbers of their prompts."""
    return [(index, outcome) for index, outcome in enumerate(outcomes) if isinstance(outcome, Answer)]
