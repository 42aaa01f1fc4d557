"""Workers in this process, with the settings that the scripts give: ours are real, other programs have stand-ins.

A stand-in has the names and arguments of the real interface, and its model counts upwards until END.
"""

import ctypes
import json
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import draftheads
from draftheads.checkpoints.registry import find_head
from draftheads.models.gguf_models import SMOLLM2_135M

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "workers")]

import heads_in_engines  # noqa: E402 - the scripts are found by the line above
import peers  # noqa: E402
from harness import Ids, ProgramFailed, Reply  # noqa: E402

END, VOCABULARY = 2, 24


def counted(ids: Iterable[int], count: int) -> Ids:
    """What follows the last token: each is one more, and 0 follows the largest."""
    answer = [(int(list(ids)[-1]) + 1) % VOCABULARY]
    while len(answer) < count and answer[-1] != END:
        answer.append((answer[-1] + 1) % VOCABULARY)
    return answer


# --- llama-cpp-python ---


class Llama:
    def __init__(
        self, path: str, *, n_ctx: int, n_threads: int, n_threads_batch: int, draft_model: Any, verbose: bool
    ) -> None:
        assert Path(path).exists()
        self.model = path

    def reset(self) -> None:
        pass

    def token_eos(self) -> int:
        return END

    def n_vocab(self) -> int:
        return VOCABULARY

    def generate(self, ids: Ids, *, temp: float) -> Iterator[int]:
        yield from (*counted(ids, VOCABULARY), 0, 0)  # it goes on behind the end


def batch_of(tokens: int, embedding: int, sequences: int) -> SimpleNamespace:
    places = {name: [0] * tokens for name in ("token", "pos", "n_seq_id", "logits")}
    return SimpleNamespace(**places, seq_id=[[0] * sequences for _ in range(tokens)], n_tokens=0)


def decode(context: Any, batch: Any) -> int:
    context.batch = batch
    return 0


def logits_of(context: Any, place: int) -> Any:
    assert context.batch.logits[place]
    (next_token,) = counted([context.batch.token[place]], 1)
    return (ctypes.c_float * VOCABULARY)(*(float(token == next_token) for token in range(VOCABULARY)))


LLAMA_CPP = SimpleNamespace(
    Llama=Llama,
    llama_context_default_params=SimpleNamespace,
    llama_init_from_model=lambda model, parameters: parameters,
    llama_batch_init=batch_of,
    llama_get_memory=lambda context: context,
    llama_memory_clear=lambda memory, data: None,
    llama_decode=decode,
    llama_get_logits_ith=logits_of,
)

# --- vLLM and OpenVINO ---


class Vllm:
    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        max_model_len: int,
        max_num_seqs: int,
        enable_prefix_caching: bool,
        disable_log_stats: bool,
        speculative_config: dict[str, Any] | None,
        additional_config: dict[str, Any],
    ) -> None:
        assert Path(model).is_dir()
        self.drafts, self.num_steps = speculative_config, 0

    def generate(self, rows: list[Any], sampling: Any, *, use_tqdm: bool) -> list[Any]:
        self.num_steps += len(rows)
        answers = [counted(row["prompt_token_ids"], sampling.max_tokens) for row in rows]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]) for ids in answers]

    def get_metrics(self) -> list[Any]:
        if self.drafts is None:
            return []
        steps = SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.num_steps)
        return [steps, SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[self.num_steps])]


class Pipeline:
    """Both pipelines of OpenVINO GenAI."""

    def __init__(self, model: str, *places: Any, scheduler_config: Any = None, draft_model: Any = None) -> None:
        self.get_config = self.get_generation_config = SimpleNamespace

    def generate(self, rows: Any, config: Any) -> Any:
        if isinstance(rows, list):
            answers = [counted(row[0], one.max_new_tokens) for row, one in zip(rows, config, strict=True)]
            return [SimpleNamespace(m_generation_ids=[ids]) for ids in answers]
        metrics = SimpleNamespace(get_num_accepted_tokens=lambda: 1)
        return SimpleNamespace(tokens=[counted(rows[0], config.max_new_tokens)], extended_perf_metrics=metrics)


STAND_INS = {
    "llama_cpp": LLAMA_CPP,
    "llama_cpp.llama_speculative": SimpleNamespace(LlamaPromptLookupDecoding=SimpleNamespace),
    "vllm": SimpleNamespace(LLM=Vllm, SamplingParams=SimpleNamespace),
    "vllm.inputs": SimpleNamespace(TokensPrompt=dict),
    "openvino": SimpleNamespace(Tensor=lambda ids: ids),
    "openvino_genai": SimpleNamespace(
        SchedulerConfig=SimpleNamespace,
        ContinuousBatchingPipeline=Pipeline,
        LLMPipeline=Pipeline,
        draft_model=lambda folder, device: folder,
    ),
}
LLAMA_SERVER = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({{"data": []}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/completion" and asked["temperature"] == 0
        ids = [(asked["prompt"][-1] + place) % {VOCABULARY} for place in range(1, asked["n_predict"] + 1)]
        ids = ids[: ids.index({END}) + 1] if {END} in ids else ids
        self.reply({{"tokens": ids, "timings": {{"draft_n_accepted": 1}}}})
    def reply(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
place = dict(zip(sys.argv, sys.argv[1:]))
HTTPServer((place["--host"], int(place["--port"])), Handler).serve_forever()
"""


class Here:
    """A worker in this process: settings and answers are JSON, and what cannot be loaded fails the test."""

    def __init__(self, python: Path, script: str, settings: dict[str, Any], **limits: Any) -> None:
        worker = runpy.run_path(str(BENCHMARKS / "workers" / script), run_name=script)
        self.generate = worker["load"](json.loads(json.dumps(settings)))

    def versions(self) -> dict[str, str]:
        return {}

    def ask(self, prompts: list[Ids], max_new_tokens: int) -> Reply:
        try:
            found = json.loads(json.dumps(vars(self.generate(prompts, max_new_tokens))))
        except (NotImplementedError, ValueError) as error:
            raise ProgramFailed(str(error)) from None
        return Reply(1.0, tuple(map(tuple, found.pop("token_ids"))), **found)

    def stop(self) -> None:
        pass


@pytest.fixture
def asked(world: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of the smallest comparison, with workers in this process."""
    model = world / "model"
    for name, module in STAND_INS.items():
        monkeypatch.setitem(sys.modules, name, module)
    for script in (peers, heads_in_engines):
        monkeypatch.setattr(script, "real_model", lambda: model)
        monkeypatch.setattr(script, "SMOLLM2_135M", str(model))
    monkeypatch.setattr(peers, "find_gguf", lambda: model / "config.json")
    monkeypatch.setattr(peers, "_PAUSE_SECONDS", 0)
    monkeypatch.setattr(peers, "WorkerProcess", Here)
    few = {"limit": 2, "rounds": 1, "max_new_tokens": 12, "threads": 1, "precision": "fp32"}
    return {"prompts": world / "prompts.jsonl", "environments": tmp_path, "json": tmp_path / "out.json", **few}


def rows_of(asked: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(asked["json"].read_text(encoding="utf-8"))["rows"]
    return rows


# such a head is worse than is assumed, which is said where it drafts often: that depends on the machine's speed
@pytest.mark.filterwarnings("ignore::draftheads.errors.BaseModelWarning")
def test_peers_gives_every_worker_its_settings(asked: dict[str, Any], world: Path, capsys: pytest.CaptureFixture[str]):
    """Every row of the table, one prompt at a time and two together."""
    peers.main(peers.Options(head=str(world / "hydra"), batch_sizes=(1, 2), **asked))
    rows = rows_of(asked)
    failed = {(row["name"], row["batch_size"]): row["error"] for row in rows if "error" in row}
    assert failed == {
        ("transformers fp32 lookup", 2): "assisted generate is only supported for batch_size = 1",
        ("llama-cpp Q4_1 lookup", 2): "llama-cpp-python has no prompt lookup for batches",
    }
    assert len(rows) == 2 * 14
    tokens = {(row["name"], row["batch_size"]): row["num_tokens"] for row in rows if "error" not in row}
    assert {tokens[f"{name} fp32{head}", 1] for name, head in (("draftheads", ""), ("transformers", " lookup"))} == {24}
    assert tokens["llama-cpp Q4_1", 1] == tokens["llama-cpp Q4_1", 2] == tokens["vllm fp32", 2]
    steps = {row["name"]: row["tokens_per_step"] for row in rows if "error" not in row}
    assert min(steps[name] for name in steps if name.startswith("draftheads")) >= 1.0
    assert steps["transformers fp32"] is None, "it does not count them"
    assert "first token, ms" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::draftheads.errors.BaseModelWarning")
@pytest.mark.parametrize("engine", ["vllm", "openvino", "llama-server"])
def test_heads_in_other_engines_are_beside_ours(
    engine: Any, asked: dict[str, Any], world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    server, head = asked["environments"] / "llama-server", str(world / "hydra")
    server.write_text(LLAMA_SERVER, encoding="utf-8")
    server.chmod(0o755)
    monkeypatch.setattr(heads_in_engines, "for_openvino", lambda options, name: Path(name))  # needs their exporter
    monkeypatch.setattr(heads_in_engines, "for_llama_server", lambda options, name: ["--model-draft", name])
    given = {"engine": engine, "heads": (head,), "chain": 2, "server": server, "gguf": world / "model" / "config.json"}
    heads_in_engines.main(heads_in_engines.Options(**given, **asked))
    rows = {row["name"]: row for row in rows_of(asked)}
    assert not any("error" in row for row in rows.values())
    assert len(rows) == (5 if engine == "openvino" else 4), "OpenVINO also drafts a tree"
    assert rows["draftheads plain"]["tokens_per_step"] == 1.0
    assert rows[f"draftheads {head}"]["num_tokens"] == rows["draftheads plain"]["num_tokens"]
    assert rows[f"{engine} {head}"]["tokens_per_step"] >= 1.0
    assert "2 of 2" in capsys.readouterr().out, "texts as plain"


@pytest.mark.parametrize("engine", ["vllm", "openvino", "llama-server"])
def test_other_engines_take_the_heads_that_are_the_default(engine: Any, tmp_path: Path):
    for head in heads_in_engines.DEFAULT_HEADS[engine]:
        find_head(head, SMOLLM2_135M)
        if engine != "vllm":  # the plug-in reads our folders
            draftheads.export_head(head, tmp_path / head, to="llama.cpp" if engine == "llama-server" else None)
