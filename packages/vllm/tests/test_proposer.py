"""The proposer in a model runner that behaves like vLLM's; and, where vLLM is installed, in vLLM itself."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import draftheads
import draftheads_vllm
from cli_world import write_model
from draftheads.errors import CheckpointMismatch, InvalidSettings, InvalidTree, MissingDependency, UnsupportedModel
from draftheads.heads.base import DraftHead
from draftheads.models.gguf_models import source_of
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import Context
from draftheads.speculation.tree import Tree
from draftheads_vllm import HeadProposer
from draftheads_vllm import proposer as plug_in
from draftheads_vllm.proposer import served_model
from families import tiny_head

K = 3
MOST_TOKENS = 60  # of a text
PADDED = 8  # rows behind the vocabulary


class Embedding(nn.Module):
    """vLLM's ``VocabParallelEmbedding``, as far as it is read."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([weight, torch.full((PADDED, weight.shape[1]), 9.0)]), requires_grad=False)


class LmHead(Embedding):
    """vLLM's ``ParallelLMHead``."""


class VllmModel(nn.Module):
    """vLLM's model: a row of tokens of all requests, and one buffer for all passes' hidden states."""

    def __init__(self, base: TargetModel) -> None:
        super().__init__()
        self.base = base
        self.embed_tokens, self.lm_head = Embedding(base.weights.embedding), LmHead(base.weights.lm_head)
        self.buffer = torch.zeros(256, base.hidden_size)

    def forward(self, texts: list[list[int]], positions: list[int]) -> Tensor:
        """States of each text from its position on."""
        parts = [
            self.base.hidden_states(torch.tensor([ids]))[0, start:] for ids, start in zip(texts, positions, strict=True)
        ]
        states = torch.cat(parts)
        self.buffer[: len(states)] = states
        return self.buffer[: len(states)]


@dataclass
class Scheduled:
    """A request, as vLLM's scheduler and its runner know it."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    num_read: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.output]


class Runner:
    """vLLM's V1 model runner with a scheduler, greedy; its names are vLLM's."""

    use_async_scheduling = False

    def __init__(self, drafter: HeadProposer, base: TargetModel) -> None:
        self.drafter, self.base, self.model = drafter, base, VllmModel(base)
        self.requests: dict[str, Scheduled] = {}
        self.input_batch = SimpleNamespace(req_ids=[], num_reqs=0, num_computed_tokens_cpu=np.zeros(8, dtype=np.int32))
        self.query_start_loc = SimpleNamespace(np=np.zeros(9, dtype=np.int32))
        self.num_drafted, self.num_accepted = 0, 0

    def load_model(self) -> None:
        self.drafter.load_model(self.model)
        self.model([[1, 2, 3]], [0])  # vLLM warms up

    def step(self, counts: dict[str, int], *, drafts_follow: bool = True) -> None:
        """Some requests read so many tokens; behind the end of the text these are draft tokens."""
        names, batch = list(counts), self.input_batch
        scheduled = [self.requests[name] for name in names]
        batch.req_ids, batch.num_reqs = names, len(names)
        batch.num_computed_tokens_cpu[: len(names)] = [one.num_read for one in scheduled]
        self.query_start_loc.np[1 : len(names) + 1] = np.cumsum(list(counts.values()))
        inputs = [
            [*one.text, *one.drafts][: one.num_read + counts[name]] for name, one in zip(names, scheduled, strict=True)
        ]
        states = self.model(inputs, [one.num_read for one in scheduled])
        best = self.base.logits(states).argmax(-1).tolist()
        sampled = []
        for name, one, place in zip(names, scheduled, self.query_start_loc.np.tolist(), strict=False):
            count, new = counts[name], []
            known = one.num_tokens - one.num_read  # tokens of the text among them
            if count >= known:
                new = best[place + known - 1 : place + known]
                for draft, following in zip(one.drafts[: count - known], best[place + known :], strict=False):
                    if draft != new[-1]:
                        break
                    new.append(following)
                self.num_drafted += count - known
                self.num_accepted += len(new) - 1
            one.num_read += min(count, known) + max(0, len(new) - 1)
            one.output += new
            one.drafts = []
            sampled.append(new)
        if drafts_follow:
            self.propose(sampled)

    def propose(self, sampled: list[list[int]]) -> None:
        names = self.input_batch.req_ids
        tokens = np.full((8, MOST_TOKENS + 8), -1, dtype=np.int32)
        for row, name in enumerate(names):
            tokens[row, : self.requests[name].num_tokens] = self.requests[name].text
        lengths = np.array([*(self.requests[name].num_tokens for name in names), 5, 5], dtype=np.int32)
        found = self.drafter.propose(sampled, lengths, tokens, slot_mappings=None)
        assert self.drafter.chains._texts.keys() <= self.requests.keys()  # nothing is kept of requests that ended
        for name, new, drafts in zip(names, sampled, found, strict=True):
            assert len(drafts) == (K if new else 0)
            self.requests[name].drafts = drafts


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of letters, and heads for it."""
    folder = write_model(tmp_path_factory.mktemp("vllm"))
    base = TargetModel.load(str(folder / "model"), dtype=torch.float32)
    for method in ("hydra++", "amphista"):
        draftheads.save_head(tiny_head(method, base), folder / method, base=base, dtype=torch.float32)
    return folder


@pytest.fixture
def proposer(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., HeadProposer]:
    """Makes a proposer where the modules of vLLM that it imports are there."""
    runner, embedding = (ModuleType(name) for name in ("runner", "embedding"))
    runner.CPUModelRunner = Runner
    embedding.VocabParallelEmbedding, embedding.ParallelLMHead = Embedding, LmHead
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.cpu_model_runner", runner)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.vocab_parallel_embedding", embedding)
    monkeypatch.setattr(plug_in, "version", lambda _: "0.32.0")
    # in 8 bits the last digit of a state can change a draft token
    monkeypatch.setattr(DraftHead, "speed_up", lambda _: None)

    def make(head: str = "hydra", *, k: int = K, caching: bool = False, **parallel: int) -> HeadProposer:
        base = TargetModel.load(str(place / "model"), dtype=torch.float32)
        model = SimpleNamespace(model=str(place / "model"), tokenizer=str(place / "model"), hf_config=base.model.config)
        config = SimpleNamespace(
            additional_config={"draftheads_head": str(place / head)} if head else {},
            parallel_config=SimpleNamespace(**{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **parallel}),
            speculative_config=SimpleNamespace(num_speculative_tokens=k),
            cache_config=SimpleNamespace(enable_prefix_caching=caching),
            model_config=model,
        )
        return HeadProposer(config)

    return make


def base_of(place: Path) -> TargetModel:
    return TargetModel.load(str(place / "model"), dtype=torch.float32)


PROMPTS = [[7, 9, 4, 8, 8, 5], [6, 5, 4, 10, 11, 12, 13, 14, 15, 9, 4, 7], [12, 5], [7, 9, 4, 8, 8, 5], [9] * 9]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("head", ["medusa", "hydra", "hydra++", "amphista"])
@pytest.mark.few(4)
def test_drafts_are_those_of_our_engine_whatever_vllm_schedules(
    head: str, seed: int, place: Path, proposer: Callable[..., HeadProposer]
) -> None:
    base, numbers = base_of(place), random.Random(seed)  # noqa: S311 - no secrets
    runner = Runner(proposer(head), base)
    runner.load_model()
    waiting = {f"{number}": prompt for number, prompt in enumerate(PROMPTS)}
    texts, num_checked = {}, 0
    for step in range(200):
        if waiting and (not runner.requests or numbers.random() < 0.3):
            name = next(iter(waiting))
            runner.requests[name] = Scheduled(waiting.pop(name))
        counts = random_schedule(runner.requests, numbers)
        if not counts:
            continue
        runner.step(counts, drafts_follow=step % 10 != 3)
        for name in counts:
            one = runner.requests[name]
            if one.drafts:
                states = base.hidden_states(torch.tensor([one.text]))[:, :-1]
                assert one.drafts == chain_after(runner.drafter.chains.head, states, one.text)
                num_checked += 1
            if one.num_tokens > MOST_TOKENS - K:
                texts[name] = runner.requests.pop(name).text
    assert num_checked > 60
    assert runner.num_drafted > 100
    for number, prompt in enumerate(PROMPTS):
        assert texts[str(number)] == greedy_text(base, prompt, len(texts[str(number)]))


def random_schedule(requests: dict[str, Scheduled], numbers: random.Random) -> dict[str, int]:
    """How many tokens some requests read, in any order; prompts in chunks. Some other requests are preempted."""
    counts = {}
    for name, one in requests.items():
        if numbers.random() < 0.05:
            one.num_read, one.drafts = 0, []
        elif numbers.random() < 0.85:
            unread = one.num_tokens - one.num_read
            counts[name] = numbers.randint(1, unread) if unread > K else unread + len(one.drafts)
    order = list(counts)
    numbers.shuffle(order)
    return {name: counts[name] for name in order}


def chain_after(head: Any, states: Tensor, text: list[int]) -> list[int]:
    context = Context(states, torch.tensor([text[:-1]]), torch.tensor([len(text) - 1]), torch.tensor([text[-1]]))
    return head.start().propose(context, Tree.chain(K)).token_ids[0, 1:].tolist()


def greedy_text(base: TargetModel, prompt: list[int], length: int) -> list[int]:
    """Greedy text, token by token."""
    text = list(prompt)
    while len(text) < length:
        text.append(int(base.logits(base.hidden_states(torch.tensor([text]))[0, -1]).argmax()))
    return text


def test_the_served_model_has_the_fingerprints_of_the_model(place: Path) -> None:
    base, folder = base_of(place), str(place / "model")
    served = served_model(
        Embedding(base.weights.embedding),
        LmHead(base.weights.lm_head),
        config=base.model.config,
        name=folder,
        tokenizer_name=folder,
    )
    assert (served.vocab_size, served.hidden_size, served.dtype) == (base.vocab_size, base.hidden_size, base.dtype)
    prints = base.fingerprints
    assert served.fingerprints == type(prints)(prints.embedding, prints.lm_head, prints.tokenizer, None)
    assert torch.equal(served.weights.lm_head, base.weights.lm_head)
    other = TargetModel.load(folder, dtype=torch.float32)
    with torch.no_grad():
        other.lm_head.weight.neg_()
    wrong = served_model(
        Embedding(base.weights.embedding),
        LmHead(other.weights.lm_head),
        config=base.model.config,
        name=folder,
        tokenizer_name=folder,
    )
    with pytest.raises(CheckpointMismatch, match="lm_head"):
        draftheads.load_head(place / "hydra", wrong)


def test_quantised_weights_are_refused(place: Path) -> None:
    base, folder = base_of(place), str(place / "model")
    table = SimpleNamespace(weight=base.weights.embedding.to(torch.int8))
    with pytest.raises(UnsupportedModel, match="int8"):
        served_model(table, table, config=base.model.config, name=folder, tokenizer_name=folder)


def test_settings_that_cannot_work_are_refused(place: Path, proposer: Callable[..., HeadProposer]) -> None:
    base = base_of(place)
    with pytest.raises(InvalidSettings, match="must name the head"):
        proposer("")
    with pytest.raises(InvalidSettings, match="tensor_parallel_size is 2"):
        proposer(tensor_parallel_size=2)
    with pytest.raises(InvalidTree, match="4 deep but the head has 3 heads"):
        Runner(proposer(k=4), base).load_model()
    with pytest.raises(InvalidSettings, match="enable_prefix_caching=False"):
        Runner(proposer("hydra++", caching=True), base).load_model()
    Runner(proposer("hydra", caching=True), base).load_model()  # it reads the last state only
    asynchronous = Runner(proposer(), base)
    asynchronous.use_async_scheduling = True
    with pytest.raises(InvalidSettings, match="async_scheduling"):
        asynchronous.load_model()


def test_another_runner_or_version_is_refused(
    place: Path, proposer: Callable[..., HeadProposer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedModel, match="V1 model runner"):
        proposer().load_model(VllmModel(base_of(place)))  # the caller is no method of the runner
    monkeypatch.setattr(plug_in, "version", lambda _: "0.33.0")
    with pytest.raises(MissingDependency, match=r"0\.32\.x, and it is 0\.33\.0"):
        proposer()


# --- vLLM itself ---

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
settings = json.loads(sys.argv[1])
llm = LLM(
    settings["model"], dtype="float32", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=48,
    enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False, **settings["options"],
)
prompts = [{"prompt_token_ids": ids} for ids in settings["prompts"]]
sampling = SamplingParams(temperature=0.0, max_tokens=settings["max_tokens"], ignore_eos=True, detokenize=False)
results = llm.generate(prompts, sampling, use_tqdm=False)
counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
answer = {"texts": [list(result.outputs[0].token_ids) for result in results], "counts": counts}
print("ANSWER" + json.dumps(answer))
"""


def python_with_vllm() -> str:
    """A Python that has vLLM; skips where there is none, or the CPU cannot run it."""
    own = Path(os.environ.get("PEERS", Path(__file__).parents[3] / "benchmarks" / ".peers")) / "vllm" / "bin" / "python"
    if "avx512f" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("vLLM's build for CPUs needs AVX-512, which this CPU does not have")
    if find_spec("vllm") is not None:
        return sys.executable
    if not own.exists():
        pytest.skip("vLLM is not installed: pip install ./packages/vllm, or benchmarks/environments.sh vllm")
    return str(own)


def answers_of_vllm(prompts: list[list[int]], head: str | None, k: int) -> dict[str, Any]:
    method = {"method": "custom_class", "model": "draftheads_vllm.HeadProposer", "num_speculative_tokens": k}
    options = {"speculative_config": method, "additional_config": {"draftheads_head": head}} if head else {}
    settings = {"model": str(source_of(None)), "options": options, "prompts": prompts, "max_tokens": 24}
    done = subprocess.run(
        [python_with_vllm(), "-c", SCRIPT, json.dumps(settings)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                str(Path(module.__file__).parents[1]) for module in (draftheads, draftheads_vllm)
            ),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        },
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("ANSWER")), None)
    assert line is not None, done.stderr[-3000:]
    return json.loads(line.removeprefix("ANSWER"))


@pytest.mark.real
def test_vllm_writes_its_own_text_with_our_heads() -> None:
    python_with_vllm()
    tokenizer = TargetModel.load("smollm2-135m").tokenizer
    texts = ["The capital of France is", "Once upon a time, " * 12, "def fibonacci(n):\n", "1, 2, 3, 4, 5, 6, 7,"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]  # one is longer than a pass: it is read in chunks
    plain = answers_of_vllm(prompts, None, 0)
    for head in ("hydra", "hydra++"):
        drafted = answers_of_vllm(prompts, head, K)
        assert drafted["texts"] == plain["texts"]
        counts = drafted["counts"]
        steps, accepted = counts["vllm:spec_decode_num_drafts"], counts["vllm:spec_decode_num_accepted_tokens"]
        assert accepted > 0.4 * steps  # wrong hidden states give a tenth of that
