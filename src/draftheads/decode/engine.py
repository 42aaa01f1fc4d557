"""The engine: prompts in, answers out; plain or with a drafter, one prompt or many."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from threading import Lock
from typing import Any

from draftheads.decode.batch import Batch
from draftheads.decode.core import CoreLimits, EngineCore
from draftheads.decode.grammar import GrammarCompiler, compiler_for
from draftheads.decode.planner import AcceptanceCheck, Planner
from draftheads.decode.prompts import Prompt, described, prompt_ids, prompt_list
from draftheads.decode.request import GenerationResult, Request, StreamEvent
from draftheads.decode.step_costs import StepCosts
from draftheads.errors import InvalidPrompt, InvalidSettings, PromptTooLong, no_such, require_at_least
from draftheads.models.model import TargetModel
from draftheads.models.model_layers import with_lora
from draftheads.models.model_names import shown_name
from draftheads.runners import bytes_of_states, bytes_per_slot, num_slots
from draftheads.settings import SamplingSettings
from draftheads.speculation.acceptance_profile import MAX_NODES, AcceptanceProfile
from draftheads.speculation.drafter import Drafter, NoDraft
from draftheads.speculation.shapes import BestFirst, ByProfile, Shape, as_shape, calibrated, in_words
from draftheads.utils.counts import counted
from draftheads.utils.progress import Progress, counted_stage, shown

_CHUNK_TOKENS = 8192  # of prompts that are read between two steps: all of them, where they are not many or long


class Engine:
    """Decodes prompts with a model and, if there is one, a drafter.

    The drafter changes the speed, not the text: greedy answers are plain decoding's, sampled ones have the model's
    distribution, except for ``acceptance="typical"``.
    """

    def __init__(
        self,
        model: TargetModel,
        drafter: Drafter | None = None,
        *,
        max_batch_size: int = 16,
        shape: Shape | Sequence[Sequence[int]] | str | None = None,
        profile: AcceptanceProfile | None = None,
        costs: StepCosts | None = None,
        check: AcceptanceCheck | None = None,
    ) -> None:
        """Puts the parts together.

        Args:
            model: the target.
            drafter: what drafts; None decodes plainly.
            max_batch_size: requests that are decoded together.
            shape: what is drafted at each step; the drafter's default where left out. A static tree may be given as a
                list of rank paths, or as the JSON text of one.
            profile: what the drafter's trees gain. With ``costs`` it decides how much is drafted at each step.
            costs: of steps on this machine.
            check: warns if draft tokens are accepted far less often than the profile expects, or never.
        """
        if not isinstance(model, TargetModel):
            raise InvalidSettings(
                f"model is of type {type(model).__name__}; an Engine takes a TargetModel: use draftheads.load(…)"
            )
        if not (drafter is None or isinstance(drafter, Drafter)):
            raise InvalidSettings(
                f"drafter is of type {type(drafter).__name__}; give a Drafter, such as the result of load_head"
            )
        require_at_least(1, max_batch_size=max_batch_size)
        if (profile is None) != (costs is None):
            raise InvalidSettings("an acceptance profile and costs go together: give both or none")
        if profile is not None and shape is not None:
            raise InvalidSettings("give a shape, or a profile that decides on one")
        for what, given in (("profile", profile), ("shape", shape)):
            if given is not None and (drafter is None or not drafter.fills_shapes):
                raise InvalidSettings(f"a {what} is for a drafter that fills trees, such as a draft head")
        self.model = model
        self.generation = model.generation  # warns now, not with the first request
        self.drafter: Drafter = NoDraft() if drafter is None else drafter
        self.max_batch_size = max_batch_size
        chosen = None if shape is None else as_shape(shape)
        if isinstance(chosen, ByProfile):
            raise InvalidSettings(f"shape is {shape!r}, which is for draftheads.load: give a profile and costs")
        self.shape = chosen
        if chosen is not None:
            self.drafter.check_shape(chosen)
        self.profile = profile
        self.costs = costs
        self.check = check
        self.planner: Planner | None = None  # what it learns of the machine serves all batches
        if profile is not None and costs is not None:
            # then no text depends on what is drafted
            follows = model.native is not None
            self.planner = Planner(profile, costs, check, budget=self.drafter.budget, follows=follows)
        self._lock = Lock()  # threads take turns, step by step: two at once would only share the cores

    def generate(
        self,
        prompts: Sequence[Prompt],
        settings: SamplingSettings | Sequence[SamplingSettings] | None = None,
        *,
        progress: Progress | bool = False,
        **overrides: Any,
    ) -> list[GenerationResult]:
        """Answers to all prompts, in their order.

        Args:
            prompts: texts (put to the model as a user's turn), message lists, or token id lists.
            settings: for all prompts, or one per prompt; greedy when left out.
            progress: True shows a bar of the answers in a notebook or on a terminal.
            **overrides: single fields of :class:`SamplingSettings`, such as ``max_new_tokens=128``.

        Raises:
            InvalidPrompt: an empty prompt, or one longer than the model allows.
            InvalidSettings: an unknown or impossible setting.
        """
        requests = self.requests(prompts, settings, **overrides)
        advance = counted_stage(shown(progress), f"answering {counted(len(requests), 'prompt')}", len(requests))
        for event in self.run(requests):
            if event.finish_reason is not None:
                advance()
        return [request.result() for request in requests]

    def stream(
        self, prompt: Prompt, settings: SamplingSettings | None = None, **overrides: Any
    ) -> Iterator[StreamEvent]:
        """One answer, an event a step, as it comes. Arguments and errors as for :meth:`generate`, raised at once."""
        return self.run(self.requests([prompt], settings, **overrides))

    def requests(
        self,
        prompts: Sequence[Prompt],
        settings: SamplingSettings | Sequence[SamplingSettings] | None = None,
        **overrides: Any,
    ) -> list[Request]:
        """Checked requests, ready for :meth:`run`. Arguments and errors as for :meth:`generate`."""
        prompts = prompt_list(prompts)
        if isinstance(settings, Sequence) and not isinstance(settings, str):
            rows = list(settings)
        else:
            rows = [SamplingSettings() if settings is None else settings] * len(prompts)
        if len(rows) != len(prompts):
            raise InvalidSettings(
                f"{len(rows)} settings for {counted(len(prompts), 'prompt')}: give one for all, or one for each"
            )
        return [
            self.request(prompt, _overridden(row, overrides), index=index)
            for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
        ]

    def request(
        self, prompt: Prompt, settings: SamplingSettings, *, index: int = 0, variables: Mapping[str, Any] | None = None
    ) -> Request:
        """One checked request; its events carry ``index``. ``variables`` are further ones of the chat template."""
        prompt_ids, vocab_size = self.encode(prompt, variables), self.model.vocab_size
        if unknown := [token for token, _ in settings.logit_bias if token >= vocab_size]:
            raise InvalidSettings(f"logit_bias has token {unknown[0]}; the model has {vocab_size:,} tokens")
        grammar_state = None
        if settings.grammar is not None:
            grammar_state = self.grammars.start(settings.grammar, settings.stop_token_ids)
        return Request(
            prompt_ids,
            settings,
            tokenizer=self.model.tokenizer,
            eos_ids=self.model.eos_ids,
            max_length=self.model.max_positions,
            index=index,
            grammar_state=grammar_state,
            generation=self.generation,
        )

    @property
    def grammars(self) -> GrammarCompiler:
        """The compiler of the model's tokenizer. Errors as for the class."""
        model = self.model
        return compiler_for(model.tokenizer, vocab_size=model.vocab_size, eos_ids=model.eos_ids)

    def run(self, requests: Sequence[Request], *, on_phase: Callable[[str], object] = str) -> Iterator[StreamEvent]:
        """Decodes requests together; as soon as one is finished the next in line takes its place."""
        core = self.core(on_phase=on_phase)
        for request in requests:
            core.add(request)
        return self.events(core)

    def core(self, *, on_phase: Callable[[str], object] = str) -> EngineCore:
        """A core without requests, for this engine alone. ``on_phase`` is called as by :class:`Batch`."""
        limits = CoreLimits(max_rows=self.max_batch_size, chunk_tokens=_CHUNK_TOKENS)
        return EngineCore({"": self}, limits, on_phase=on_phase)

    def events(self, core: EngineCore) -> Iterator[StreamEvent]:
        """What a core decodes, until it has no work. The caller may add requests between events.

        Raises:
            Exception: what ended a request without an answer.
        """
        while core.has_work:
            with self._lock:
                events = core.step()
            for _, event in events:
                if isinstance(event, Exception):
                    raise event
                yield event
        if self.check is not None:
            self.check.warn()

    def with_adapter(self, folder: str | PathLike[str]) -> "Engine":
        """An engine of the same model with a LoRA adapter (peft) on top, and of the same drafter.

        The weights are shared, and this engine does not change: one base model can have many adapters at once. The
        result equals ``load(folder)``, where the adapter is merged, up to rounding.

        Args:
            folder: of the adapter. Its own tokenizer and chat template are used, if it has them.

        Raises:
            DraftHeadsError: as :func:`draftheads.models.model_layers.with_lora`.
        """
        model = with_lora(self.model, folder)
        adapted = Engine(
            model,
            self.drafter,
            max_batch_size=self.max_batch_size,
            shape=self.shape,
            profile=self.profile,
            costs=self.costs,
            check=None if self.check is None else replace(self.check, model=model.model_id),
        )
        adapted._lock = self._lock
        return adapted

    def batch(self, *, draft_nodes: int | None = None, on_phase: Callable[[str], object] = str) -> Batch:
        """A batch without rows; with a profile, a planner decides how much is drafted at each step.

        Args:
            draft_nodes: 0 decodes plainly, and n drafts on growing trees of n nodes, whatever the engine's own rule.
            on_phase: as for :class:`Batch`.

        Raises:
            InvalidSettings: as for :meth:`check_draft_nodes`.
        """
        self.check_draft_nodes(draft_nodes)
        if draft_nodes == 0:
            return Batch(self.model, NoDraft(), on_phase=on_phase)
        if draft_nodes is not None:
            temperatures = () if self.profile is None else self.profile.temperatures
            shape = calibrated(BestFirst(draft_nodes), temperatures or getattr(self.shape, "temperatures", ()))
            return Batch(self.model, self.drafter, shape=shape, check=self.check, on_phase=on_phase)
        return Batch(
            self.model, self.drafter, shape=self.shape, planner=self.planner, check=self.check, on_phase=on_phase
        )

    def check_draft_nodes(self, draft_nodes: int | None) -> None:
        """Can trees have so many nodes? None and 0 are always possible.

        Raises:
            InvalidSettings: no integer from 0 to 128, or above 0 without a drafter that fills trees.
        """
        require_at_least(0, draft_nodes=draft_nodes)
        if draft_nodes is not None and draft_nodes > MAX_NODES:
            raise InvalidSettings(f"draft_nodes is {draft_nodes}; it must be at most {MAX_NODES}")
        if draft_nodes and not self.drafter.fills_shapes:
            raise InvalidSettings(
                f"draft_nodes is {draft_nodes}, which is for drafters that fill trees, such as draft heads; "
                f"{self.drafter.name} does not: leave draft_nodes out"
            )

    def most_nodes(self, draft_nodes: int | None = None) -> int:
        """The most nodes that a step of :meth:`batch` verifies for a row, root included."""
        if draft_nodes is not None:
            return max(1, draft_nodes)
        if self.profile is not None:
            return self.profile.most_nodes + self.drafter.budget
        return (self.shape or self.drafter.default_shape).num_nodes

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token: keys, values and hidden states, and what the drafter keeps of it."""
        model = self.model
        states = max(1, len(self.drafter.hidden_layers)) * model.hidden_size * model.dtype.itemsize
        return bytes_per_slot(model) + states + self.drafter.bytes_per_slot

    def num_bytes(self, lengths: Sequence[int], *, draft_nodes: int | None = None) -> int:
        """Memory of the requests of a :meth:`batch`, whose texts have so many tokens."""
        nodes = self.most_nodes(draft_nodes)
        slots = num_slots(self.model, lengths, nodes)
        states = bytes_of_states(self.model, len(lengths), nodes) + self.drafter.bytes_of_rows(len(lengths))
        return slots * self.bytes_per_token + states

    def encode(self, prompt: Prompt, variables: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a prompt, with the model's chat template where it has one.

        Raises:
            InvalidPrompt: empty, or refused by the chat template.
            PromptTooLong: more tokens than the model takes.
        """
        ids = prompt_ids(self.model, prompt, variables)
        if not ids:
            raise InvalidPrompt("the prompt is empty: there is nothing to go on from")
        if (limit := self.model.max_positions) is not None and len(ids) >= limit:
            name = shown_name(self.model.model_id)
            raise PromptTooLong(f"the prompt has {counted(len(ids), 'token')}; {name} takes at most {limit - 1}")
        vocab_size = self.model.vocab_size
        if outside := [token for token in ids if not 0 <= token < vocab_size]:
            raise InvalidPrompt(f"the prompt has token id {outside[0]}; token ids must lie in 0 … {vocab_size - 1}")
        return ids

    def __repr__(self) -> str:
        parts = [self.model.model_id, self.model.precision, str(self.model.device), self.drafter.name]
        if self.profile is not None:
            parts.append("trees by profile")
        elif self.drafter.fills_shapes:
            parts.append(f"tree: {in_words(self.shape or self.drafter.default_shape)}")
        elif not isinstance(self.drafter, NoDraft):
            parts.append("trees of its own")
        return f"Engine({', '.join(parts)})"


def _overridden(settings: SamplingSettings, overrides: dict[str, Any]) -> SamplingSettings:
    if not isinstance(settings, SamplingSettings):
        raise InvalidSettings(f"settings are SamplingSettings, not {described(settings)}")
    known = {field.name for field in fields(SamplingSettings)}
    for name in overrides:
        if name not in known:
            raise no_such("setting", name, known)
    return replace(settings, **overrides) if overrides else settings
