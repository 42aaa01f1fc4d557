"""The chat page in a real browser, on a real server whose tiny model writes HTML that a page must not run."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cli_world import LETTERS, SPECIAL, conversation, letters_tokenizer
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.models.model import TargetModel
from draftheads.serve.guard import Access
from draftheads.serve.state import Service
from families import TREES, tiny_head, tiny_model
from serve_process import wait_until
from serve_world import NAME, PLAIN, Running, listening, metrics_of, open_with, running, tiny_engines

playwright = pytest.importorskip("playwright.sync_api", reason="drives the browser: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [pytest.mark.page, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")]

PAGE = Path(__file__).parents[2] / "src" / "draftheads" / "serve" / "page"
HTML = ("<img src=x onerror=window.hacked=1>", "<script>window.hacked=1</script>", "&amp;", "<b>")
HYDRA = f"{NAME}:hydra"
KV_BYTES = 1 << 28
MAX_TOKENS = 40  # of an answer, unless a test says otherwise
EVENT_SECONDS = 300  # in which what a test waits for must come


@cache
def engines() -> dict[str, Engine]:
    """A model of letters and HTML, with two heads and plain."""
    tiny = tiny_model("llama", seed=22, max_position_embeddings=8192)
    tiny.weights.lm_head.data[: len(SPECIAL)] = 0  # text only, and no end
    target = TargetModel(tiny.model, letters_tokenizer([*HTML, *LETTERS[len(HTML) :]]), "tiny")
    return {
        NAME: Engine(target, tiny_head("medusa", target), shape=TREES["ragged"]),
        HYDRA: Engine(target, tiny_head("hydra", target), shape=TREES["chain"]),
        PLAIN: Engine(target),
    }


def offline(*turns: str, model: str = PLAIN, system: str = "", max_new_tokens: int = MAX_TOKENS) -> GenerationResult:
    """The answer to the last of a user's turns."""
    return conversation(engines()[model], *turns, system=system, max_new_tokens=max_new_tokens)[-1]


@pytest.fixture(scope="module")
def world() -> Iterator[Running]:
    with running(engines(), kv_bytes=KV_BYTES) as world:
        yield world


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM)
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server. The test fails if the browser reports an error, such as one of its content policy."""
    contexts, problems = [], []

    def opened(url: str, *, ready: bool = True, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": 1100, "height": 800}, **options)
        contexts.append(context)
        context.set_default_timeout(1000 * EVENT_SECONDS)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(url)
        if ready:
            page.wait_for_selector("#send:enabled")
            setting(page, "max-tokens", MAX_TOKENS)
        return page

    yield opened
    for context in contexts:
        context.close()
    # a failed request is an error on the console, too; tests of failures look at what the page says
    assert [problem for problem in problems if not problem.startswith("Failed to load resource")] == []


@pytest.fixture
def page(world: Running, visit: Callable[..., Any]) -> Any:
    return visit(world.url)


def metric(world: Running, name: str) -> float:
    return metrics_of(world.url)[f"draftheads_{name}"]


def ended(world: Running) -> float:
    return metric(world, "answers_cancelled_total") + metric(world, "answers_finished_total")


def setting(page: Any, name: str, value: object) -> None:
    page.evaluate("document.getElementById('settings').open = true")
    page.fill(f"#{name}", str(value))
    page.evaluate("document.getElementById('settings').open = false")


def ask(page: Any, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")


def wait_for_end(page: Any) -> Any:
    """The section of the last turn, once nothing is answered any more."""
    page.wait_for_selector(".turn .tools", state="attached")
    page.wait_for_selector("#log[aria-busy=false]")
    return page.locator(".turn").last


def answered(page: Any, question: str) -> Any:
    """Asks; the section of the turn, once it is answered."""
    ask(page, question)
    return wait_for_end(page)


def texts(turn: Any) -> list[str]:
    return turn.locator(".text").all_text_contents()


def drafted(answer: Any) -> str:
    return "".join(answer.locator(".text .drafted").all_text_contents())


def figures(turn: Any) -> dict[str, float]:
    """The figures of the last answer of a turn."""
    shown = turn.locator(".figures").last
    names, values = shown.locator("dt").all_text_contents(), shown.locator("dd").all_text_contents()
    return dict(zip(names, map(float, values), strict=True))


def drafted_text(result: GenerationResult) -> str:
    return "".join(piece for piece, flag in zip(result.pieces, result.drafted, strict=True) if flag)


def sent_by(page: Any) -> list[dict[str, Any]]:
    """The bodies of the chat requests that the page sends from now on."""
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: bodies.append(json.loads(request.post_data)) if request.post_data else None)
    return bodies


def test_the_answer_is_the_offline_one_with_its_draft_tokens_in_colour(page: Any):
    turn = answered(page, "dead cab")
    result = offline("dead cab", model=NAME)
    assert texts(turn) == [result.text] == [offline("dead cab").text]
    assert drafted(turn) == drafted_text(result)
    assert any(result.drafted), "nothing was drafted"
    found = figures(turn)
    assert found["tokens/step"] == round(result.tokens_per_step, 2)
    assert found["tokens"] == MAX_TOKENS
    assert found["tokens/s"] > 0
    assert found["s to the first token"] >= 0
    assert "limit of tokens" in turn.locator(".note").text_content()
    assert page.input_value("#question") == ""


def test_text_of_the_model_is_never_run(page: Any):
    turn = answered(page, HTML[0])
    shown = turn.text_content()
    assert HTML[0] in turn.locator(".question").text_content()
    assert sum(piece in shown for piece in HTML) >= 2, "the model must write HTML here"
    assert turn.locator("img, script, b").count() == 0
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize(("head", "tree"), [(NAME, ""), (NAME, "16"), (HYDRA, "8"), (PLAIN, None)])
def test_head_and_tree_are_chosen(head: str, tree: str | None, page: Any):
    bodies = sent_by(page)
    page.select_option("#head", head)
    if tree is None:  # without a head there is no tree to choose
        assert not any(page.is_visible(name) for name in ("#tree", "#plain", "#compare", ".legend .drafted"))
    else:
        page.select_option("#tree", tree)
    turn = answered(page, "dead cab")
    assert texts(turn) == [offline("dead cab").text]
    [body] = bodies
    assert body["model"] == head
    assert body.get("draft_nodes") == (int(tree) if tree else None)
    assert bool(drafted(turn)) == (head != PLAIN)


def test_the_conversation_goes_on_and_is_kept_in_the_page_only(page: Any):
    setting(page, "system", "kilo")
    for question in ("dead cab", "hello"):
        answered(page, question)
    assert page.locator(".text").all_text_contents() == [
        offline("dead cab", system="kilo").text,
        offline("dead cab", "hello", system="kilo").text,
    ]
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    page.reload()
    assert page.is_visible("#welcome")
    assert page.locator(".turn").count() == 0


@pytest.mark.parametrize("way", ["key", "button"])
def test_stop_frees_the_row_and_keeps_the_text(way: str, world: Running, page: Any):
    setting(page, "max-tokens", 8000)
    cancelled = metric(world, "answers_cancelled_total")
    for _ in range(3):  # a busy browser may be slower than the whole answer: then it asks again
        before = ended(world)
        ask(page, "dead cab")
        page.wait_for_selector(".text span", state="attached")
        page.keyboard.press("Escape") if way == "key" else page.dispatch_event("#stop", "click")
        turn = wait_for_end(page)
        wait_until(lambda before=before: not metric(world, "requests_running") and ended(world) > before)
        if metric(world, "answers_cancelled_total") > cancelled:
            break
        page.click("#clear")
    assert metric(world, "answers_cancelled_total") == cancelled + 1
    [text] = texts(turn)
    assert text
    assert offline("dead cab", max_new_tokens=int(figures(turn)["tokens"])).text.startswith(text)
    assert "Stopped." in turn.text_content()
    setting(page, "max-tokens", 4)
    page.click("text=Regenerate")
    page.wait_for_selector("text=reached the limit")
    assert texts(wait_for_end(page)) == [offline("dead cab", max_new_tokens=4).text]


def test_comparison_shows_both_answers_one_after_the_other(page: Any):
    order: list[tuple[str, Any]] = []
    for event in ("request", "requestfinished"):
        page.on(event, lambda request, name=event: order.append((name, json.loads(request.post_data)["draft_nodes"])))
    page.select_option("#tree", "16")
    page.check("#compare")
    turn = answered(page, "dead cab")
    expected = offline("dead cab").text
    assert texts(turn) == [expected, expected]
    assert [bool(drafted(answer)) for answer in turn.locator(".answer").all()] == [False, True]
    assert turn.locator("h3").all_text_contents() == ["Without drafting", "With medusa"]
    verdict = turn.locator(".verdict").text_content()
    assert re.fullmatch(
        r"The texts are equal\. Drafting is (slower here|[\d.]+ times as fast): .* instead of .* tokens/s\.", verdict
    )
    assert order == [("request", 0), ("requestfinished", 0), ("request", 16), ("requestfinished", 16)]
    page.uncheck("#compare")
    assert texts(answered(page, "hello")) == [offline("dead cab", "hello").text]


def test_comparison_of_drawn_texts_uses_one_seed(page: Any):
    setting(page, "temperature", 1.5)
    page.check("#compare")
    one, other = texts(answered(page, "dead cab"))
    assert one == other
    assert one != offline("dead cab").text
    page.select_option("#head", PLAIN)  # there is nothing to compare with
    assert len(texts(answered(page, "hello"))) == 1


def test_texts_that_differ_are_reported(page: Any):
    words = page.evaluate(
        """import('/answer.js').then(({ verdictOn }) => verdictOn(
            { text: 'abcd', meter: { perSecond: 10 } }, { text: 'abxd', meter: { perSecond: 25 } }))"""
    )
    assert words.startswith("The texts differ after 2 characters")
    assert words.endswith("Drafting is 2.50 times as fast: 25.0 instead of 10.0 tokens/s.")


def test_the_keyboard_is_enough(world: Running, visit: Callable[..., Any]):
    page = visit(world.url, ready=False)
    page.wait_for_selector("#send:enabled")
    page.keyboard.type("dead")  # the field has the focus from the start
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("cab")
    assert page.locator(".turn").count() == 0
    page.keyboard.press("Enter")
    turn = wait_for_end(page)
    assert turn.locator(".question").text_content() == "dead\ncab"
    assert page.evaluate("document.activeElement.id") == "question"
    focused = []
    for _ in range(3):
        page.keyboard.press("Shift+Tab")
        focused.append(page.evaluate("document.activeElement.textContent || document.activeElement.id"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", "the focus must be visible"
    assert focused[0] == "Regenerate"
    page.focus("#question")
    for name in ("clear", "send"):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == name
    page.focus("#plain")
    page.keyboard.press("Space")
    assert page.is_checked("#plain")


def test_every_control_has_a_name(page: Any):
    page.click("#settings summary")
    for field in page.locator("input:visible, select:visible, textarea:visible").all():
        assert field.evaluate("element => element.labels.length") == 1, field
    tree = page.locator("body").aria_snapshot()
    for line in ('switch "Without drafting"', 'combobox "Head"', 'log "Conversation"', 'textbox "Your message"'):
        assert line in tree


def test_copy_regenerate_and_clear(world: Running, visit: Callable[..., Any]):
    page = visit(world.url, permissions=["clipboard-read", "clipboard-write"])
    ask(page, "dead cab")
    expected = offline("dead cab").text
    wait_for_end(page)
    page.click("text=Copy")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == expected
    page.check("#plain")
    page.click("text=Regenerate")
    page.wait_for_selector("text=1.00")
    assert texts(wait_for_end(page)) == [expected]
    assert page.locator(".turn").count() == 1
    page.click("#clear")
    assert page.locator(".turn").count() == 0
    assert page.is_visible("#welcome")
    assert texts(answered(page, "hello")) == [offline("hello").text]


def test_clear_while_the_model_answers(page: Any):
    setting(page, "max-tokens", 8000)
    ask(page, "dead cab")
    page.wait_for_selector(".text span", state="attached")
    page.dispatch_event("#clear", "click")  # a click by the mouse waits until nothing moves
    page.wait_for_selector("#send:visible")
    assert page.is_visible("#welcome")
    setting(page, "max-tokens", MAX_TOKENS)
    assert texts(answered(page, "hello")) == [offline("hello").text]


@pytest.mark.few(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 420, 1100])
def test_nothing_is_wider_than_the_screen(width: int, scheme: str, world: Running, visit: Callable[..., Any]):
    page = visit(world.url, color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    page.check("#compare")
    answered(page, "abc" * 60)
    page.click("#settings summary")
    sizes = page.evaluate(
        "[document.documentElement, document.getElementById('log')].map((e) => e.scrollWidth <= e.clientWidth)"
    )
    assert sizes == [True, True]
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight"), "the field must be visible"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = sum(map(int, re.findall(r"\d+", background)[:3])) < 3 * 128
    assert is_dark == (scheme == "dark")


def test_a_server_with_keys(visit: Callable[..., Any]):
    with running(engines(), access=Access(api_keys=("secret",))) as world:
        page = visit(world.url, ready=False)
        page.wait_for_selector("text=This server needs an API key")
        assert page.evaluate("document.activeElement.id") == "key"
        for key, then in (
            ("wrong", "text=The API key is wrong"),
            ("ключ", "text=characters that a key cannot have"),
            ("secret", "#send:enabled"),
        ):
            page.fill("#key", key)
            page.keyboard.press("Enter")
            page.wait_for_selector(then)
        assert not page.is_visible("#alert")
        page.fill("#max-tokens", str(MAX_TOKENS))
        assert texts(answered(page, "dead cab")) == [offline("dead cab").text]
        assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0]


def test_a_model_without_a_chat_template_continues_the_text(visit: Callable[..., Any]):
    with running(tiny_engines(None)) as server:
        page = visit(server.url)
        setting(page, "max-tokens", MAX_TOKENS)
        turn = answered(page, "the cat")
        expected = server.plain_answer(
            server.engines["tiny"].model.tokenizer("the cat")["input_ids"], max_new_tokens=MAX_TOKENS
        )
        assert texts(turn) == [expected.text]
        assert not page.is_visible("#thinking")


def test_thoughts_are_above_the_answer(page: Any):
    chunks = [{"reasoning_content": "Hm"}, {"reasoning_content": "."}, {"content": "Yes."}]
    shown = page.evaluate(
        """(deltas) => import('/answer.js').then(({ Answer }) => {
            const answer = new Answer();
            answer.begin();
            for (const delta of deltas) {
                answer.push({ choices: [{ delta, pieces: [[Object.values(delta)[0], true]] }] });
            }
            const texts = [...answer.node.querySelectorAll('.text')].map((node) => node.textContent);
            return [texts, answer.text, answer.thought];
        })""",
        chunks,
    )
    assert shown == [["Hm.", "Yes."], "Yes.", "Hm."]


def test_a_server_that_loads_and_then_goes(visit: Callable[..., Any]):
    service = Service()
    with listening(service) as (url, _):
        page = visit(url, ready=False)
        page.wait_for_selector("text=The server is loading its model")
        assert page.is_disabled("#send")
        open_with(service, engines(), kv_bytes=KV_BYTES)
        page.wait_for_selector("#send:enabled")
        assert not page.is_visible("#alert")
        setting(page, "max-tokens", 8000)
        ask(page, "dead cab")
        wait_until(lambda: service.scheduler.snapshot().steps > 9)  # the browser may be slower than the whole answer
        service.close()
        turn = wait_for_end(page)
        assert "The server shut down" in turn.locator(".problem").text_content()
        assert turn.locator(".tools button:visible").all_text_contents() == ["Copy", "Regenerate"]
    turn = answered(page, "hello")
    assert "The server does not answer." in turn.locator(".problem").text_content()
    assert turn.locator(".tools button:visible").all_text_contents() == ["Try again"]


def test_errors_are_sentences_that_say_what_to_do(page: Any):
    problem = answered(page, "a" * 9000).locator(".problem").text_content()
    assert "9,001 tokens" in problem
    assert "Clear the conversation" in problem
    setting(page, "temperature", -1)
    ask(page, "hello")
    assert page.is_visible("#temperature"), "the settings open"
    assert page.input_value("#question") == "hello", "the message is not lost"
    assert page.locator(".turn").count() == 1
    setting(page, "temperature", 0)
    page.press("#question", "Enter")
    assert texts(wait_for_end(page)) == [offline("hello").text], "what failed is not part of the conversation"


def test_the_page_is_plain_and_needs_no_other_server():
    files = sorted(PAGE.iterdir())
    assert {file.suffix for file in files} == {".css", ".html", ".js", ".svg"}
    whole = "".join(file.read_text(encoding="utf-8") for file in files)
    assert re.findall(r"(?<!xmlns=\")https?://\S*", whole) == []
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|<script(?![^>]* src=)|\son\w+=|\sstyle=", html), "the content policy forbids it"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", whole)
