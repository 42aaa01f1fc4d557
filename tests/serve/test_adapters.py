"""Adapters of one base in one scheduler: each answer is that of its merged model, whatever is decoded beside it."""

from pathlib import Path

from adapter_world import merged, saved_adapter
from draftheads.decode.engine import Engine
from draftheads.decode.request import StreamEvent
from draftheads.serve.scheduler import Job, Lane, Limits, Scheduler
from draftheads.settings import SamplingSettings
from families import GROWING, PROMPTS, tiny_head, tiny_model
from scheduler_world import Inbox

KV_BYTES = 1 << 24
ON = {"max_new_tokens": 20, "ignore_eos": True, "seed": 5}
# a prefix of the same tokens, of which each adapter has keys and values of its own
LONG = [[5 + n % 17 for n in range(40)] + [tail, 7] for tail in (3, 4, 5)]


def test_each_adapter_answers_as_its_merged_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folders = {name: saved_adapter(model, tmp_path / name, seed=n) for n, name in enumerate(("a", "b"), start=1)}
    plain = {name: Engine(merged(model, folder)) for name, folder in folders.items()}
    plain["m"] = Engine(tiny_model("llama"))
    model = model.sped_up()
    base = Engine(model, tiny_head("hydra", model), shape=GROWING["best first"])
    engines = {"m": base, **{name: base.with_adapter(folder) for name, folder in folders.items()}}
    scheduler = Scheduler(engines, Limits(kv_bytes=KV_BYTES, max_rows=5, chunk_tokens=16))
    scheduler.start()
    inboxes, expected = [], []
    for temperature in (0.0, 0.8):
        settings = SamplingSettings(temperature=temperature, **ON)
        for prompt in [*PROMPTS, *LONG]:
            for name in ("m", "a", "b"):
                for nodes in (None, 0):
                    inbox = Inbox()
                    request = engines[name].request(prompt, settings)
                    scheduler.submit(Job(request, Lane(name, nodes), "someone", inbox))
                    inboxes.append(inbox)
                    expected.append(plain[name].generate([prompt], settings)[0].token_ids)
    assert all(isinstance(inbox.end.get(timeout=600), StreamEvent) for inbox in inboxes)
    scheduler.close(drain_seconds=0)
    assert [inbox.token_ids for inbox in inboxes] == expected
    assert len(set(expected)) > len(expected) // 3  # the adapters differ
