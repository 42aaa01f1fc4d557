"""What ``draftheads serve`` does once it has its port: loads, serves, and prints what is served."""

import asyncio
import ipaddress
import json
import logging
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from draftheads.cli.show import quiet_transformers
from draftheads.errors import DeviceLost, MissingDependency
from draftheads.models.chat_template import template_of
from draftheads.models.model import TargetModel
from draftheads.serve.options import ServeOptions, read_keys
from draftheads.utils.counts import counted
from draftheads.utils.files import user_path
from draftheads.utils.machine import NAMES, Environment

try:
    from draftheads.serve.app import serve
    from draftheads.serve.guard import LOCAL_NAMES, Access, HttpLimits
    from draftheads.serve.load_models import default_kv_bytes, exchange_head, load_served
    from draftheads.serve.recorder import Recorder
    from draftheads.serve.scheduler import Limits, Scheduler
    from draftheads.serve.state import ServedModel, Service
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn", "h11", "prometheus_client"):
        raise
    raise MissingDependency("draftheads serve needs a web server", extra="serve") from None

_KEY_VARIABLE = NAMES["api_key"]


def run(options: ServeOptions, listening: socket.socket) -> None:
    """Serves until a signal comes. If the accelerator fails, the process ends with status 1."""
    quiet_transformers()
    _log_to_stderr()
    keys = read_keys(options.api_key_file, Environment().api_key)
    is_local = _is_local(options.host)
    hosts = frozenset(options.allow_host) | (LOCAL_NAMES | {options.host} if is_local else frozenset())
    access = Access(keys, hosts or None, read_keys(None, Environment().admin_key))
    # a request may have as many answers as one client may have in the queue
    limits = HttpLimits(
        choices=Limits.max_waiting // 2,
        max_tokens=options.max_tokens,
        request_seconds=options.request_seconds,
        schema_seconds=options.schema_seconds,
        allow_typical=options.allow_typical,
    )
    service = Service(limits, access, recorder=_recorder(options))
    host, port = listening.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if not is_local and not keys:
        fix = f"give --api-key-file or {_KEY_VARIABLE}"
        print(f"warning: {address} is open to other machines and needs no key: {fix}", file=sys.stderr)
    print(f"loading {options.model}; {address}/ready tells when it is served", file=sys.stderr, flush=True)
    welcome: list[str] = []

    def load() -> tuple[Iterable[ServedModel], Scheduler]:
        models, engines = load_served(options)
        target, budget = engines[models[0].name].model, options.kv_gib
        kv_bytes = default_kv_bytes(target, options.max_rows) if budget is None else round(budget * 2**30)
        core_limits = Limits(max_rows=options.max_rows, kv_bytes=kv_bytes)
        welcome.append(_welcome(address, target, models, core_limits, has_keys=bool(keys)))
        scheduler = Scheduler(engines, core_limits)
        service.exchange = partial(exchange_head, scheduler, options)
        return models, scheduler

    serving = serve(service, listening, load, on_ready=lambda: print(*welcome, flush=True))
    code = 0
    try:
        is_idle = asyncio.run(serving)
    except DeviceLost as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        is_idle, code = False, 1
    finally:
        if service.recorder is not None:
            service.recorder.close()
    if not is_idle:
        sys.stdout.flush()
        # Python would end under a thread that is inside of PyTorch, or free memory of an accelerator that has failed:
        # both abort the process
        os._exit(code)


def _welcome(address: str, target: TargetModel, models: list[ServedModel], limits: Limits, *, has_keys: bool) -> str:
    chats = template_of(target) is not None  # else the model continues texts
    heads = {
        model.name: (model.head or "plain decoding") + ", with an adapter" * bool(model.adapter) for model in models
    }
    question, route = "Why is the sky blue?", "chat/completions" if chats else "completions"
    prompt = {"messages": [{"role": "user", "content": question}]} if chats else {"prompt": question}
    body = json.dumps({"model": models[0].name, **prompt})
    key = f' -H "Authorization: Bearer ${_KEY_VARIABLE}"' if has_keys else ""
    return "\n".join(
        [
            f"serving {target.model_id} ({target.precision}, {target.device}) at {address}",
            *(f"  {name:<24} {head}" for name, head in heads.items()),
            f"{counted(limits.max_rows, 'row')}, {limits.kv_bytes / 2**30:.1f} GiB for keys and values",
            f"try: curl {address}/v1/{route}{key} -H 'Content-Type: application/json' -d '{body}'",
        ]
    )


def _recorder(options: ServeOptions) -> Recorder | None:
    if options.record is None:
        return None
    recorder = Recorder(user_path(options.record), max_bytes=round(options.record_gib * 2**30))
    kept = f"recording prompts and answers in {recorder.folder}, at most {options.record_gib:g} GiB"
    print(f'{kept}; clients opt out with "store": false', file=sys.stderr)
    return recorder


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def _log_to_stderr() -> None:
    """Our own lines, and uvicorn's errors; an invalid request of a stranger is no error of the server."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for name, level in (("draftheads", logging.INFO), ("uvicorn", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers[:] = [handler]
        logger.propagate = False
