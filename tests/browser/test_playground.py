"""The playground in a browser, against `skipstone serve` with the bundled model: what a person sees, points at and presses.

It needs a Chromium that is there, and playwright (`pip install "skipstone[browser]"`), which brings none. With
SKIPSTONE_PICTURES set to a folder, the pictures of docs/serving.md are written into it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skipstone.lab.bench.report import aggregate as report
from tests.helpers.results import row
from tests.helpers.served import Process, serving, with_template

pytestmark = pytest.mark.browser
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROMPT = 'def fibonacci(n):\n    """The n-th number of Fibonacci."""\n'
METHOD = "layerskip exit_layer=6 confidence_threshold=0.3"
CLIPPED = """() => [...document.querySelectorAll("input[placeholder]")].filter((one) => {
  const style = getComputedStyle(one);
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = style.font;
  const spinner = one.type === "number" ? 18 : 0;
  const room = one.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - spinner;
  return pen.measureText(one.placeholder).width > room;
}).map((one) => one.id)"""
"""Inputs whose placeholder is wider than they are."""
LONG = 60_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    program = next((result for name in NAMES if (result := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"there is no Chromium here: none of {', '.join(NAMES)} is a program")
    api = pytest.importorskip("playwright.sync_api", reason='playwright is missing: pip install "skipstone[browser]"')
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(chromium: Any) -> Iterator[Process]:
    """chromium: without one no server is started."""
    with serving() as process:
        yield process


def expect(one: Any) -> Any:
    from playwright.sync_api import expect as wait

    return wait(one)


class Watched:
    def __init__(self, chromium: Any, url: str, **more: Any) -> None:
        self.context = chromium.new_context(viewport={"width": 1000, "height": 900}, **more)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)


@pytest.fixture
def watched(chromium: Any, server: Process) -> Iterator[Watched]:
    """Of a server that is ready. Nothing may be asked of anybody else, and nothing be forbidden by the page's policy."""
    one = Watched(chromium, server.url, color_scheme="light")
    expect(one.page.locator("#status")).to_have_text("Ready.", timeout=LONG)
    yield one
    one.context.close()
    assert [url for url in one.asked if not url.startswith(server.url) and not url.startswith("data:")] == []
    assert one.complaints == []


@pytest.fixture
def page(watched: Watched) -> Any:
    return watched.page


def ask(page: Any, method: str = METHOD, max_tokens: int = 60, **fields: str) -> None:
    values = {"prompt": PROMPT, "method": method, "max_tokens": str(max_tokens), "temperature": "0", **fields}
    for name, value in values.items():
        page.fill(f"#{name}", value)
    page.click("#send")


def endless(page: Any) -> None:
    def longer(route: Any) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

    page.route("**/v1/completions", longer)


def written(page: Any) -> None:
    expect(page.locator("#status")).to_have_text(re.compile(r"^Done: \d+ tokens"), timeout=LONG)


def text_of(page: Any, selector: str) -> str:
    return page.locator(selector).inner_text()


def test_a_prompt_is_written_with_tokens_coloured_by_origin(page: Any) -> None:
    ask(page)
    written(page)
    origins = page.eval_on_selector_all("#right_text .token:not(.refused)", "all => all.map(one => one.className)")
    kinds = {kind for name in origins for kind in name.split()} & {"prefill", "draft", "recovered", "bonus"}
    assert kinds >= {"prefill", "draft", "recovered"}
    style = "one => getComputedStyle(one).textDecorationStyle"
    looks = {kind: page.eval_on_selector(f"#right_text .token.{kind}", style) for kind in kinds}
    assert len(set(looks.values())) == len(kinds), "they differ by more than their colour"
    assert "fibonacci" in text_of(page, "#right_text").lower()
    assert int(text_of(page, "#all")) > 0
    assert float(text_of(page, "#mean_length")) > 1
    assert re.fullmatch(r"\d+ %", text_of(page, "#accepted"))
    assert text_of(page, "#choice").startswith(f"Method: {METHOD}. Step ")
    rows = page.locator(".step")
    assert rows.count() > 5, "every step has a row with its times"
    label = rows.nth(3).get_attribute("aria-label")
    result = re.fullmatch(r"Step 3: (\d) of (\d) drafts accepted, [\d.]+ ms of drafting, [\d.]+ ms of verifying", label)
    assert result
    assert rows.nth(3).locator(".cell:not(.own)").count() == int(result[2])
    assert rows.nth(3).locator(".cell.yes").count() == int(result[1])
    rows.nth(3).click()
    assert "step 3," in text_of(page, "#detail")


def test_a_model_without_a_chat_template_offers_no_chat(page: Any) -> None:
    """Nor are details asked for without the box. Refused drafts have to be asked for: they are details."""
    expect(page.locator("#chat_switch")).to_be_hidden()
    page.uncheck("#details")
    with page.expect_request("**/v1/completions") as request:
        ask(page)
    assert request.value.post_data_json["prompt"] == PROMPT
    assert request.value.post_data_json["stream_speculative"] is True
    written(page)
    page.hover("#right_text .token.draft >> nth=1")
    assert "probability" not in text_of(page, "#detail")
    expect(page.locator("#map")).to_be_hidden()
    page.check("#refused")
    assert page.is_checked("#details")


def test_a_token_tells_its_probabilities_and_refused_drafts_are_shown_on_request(page: Any) -> None:
    ask(page)
    written(page)
    page.hover("#right_text .token.draft >> nth=2")
    info = text_of(page, "#detail")
    assert re.search(r"drafted by layerskip", info)
    assert re.search(r"step \d+, \d of \d accepted", info)
    assert re.search(r"probability [01]\.\d{3} by the model · [01]\.\d{3} by the drafter · after layer 6 of 24", info)
    assert page.locator(".step.here").count() == 1
    page.focus("#right_text .token[tabindex='0']")
    first = text_of(page, "#detail")
    assert "prefill · step 0" in first
    page.keyboard.press("ArrowRight")
    assert text_of(page, "#detail") != first
    assert page.evaluate("document.activeElement.classList.contains('token')")
    page.keyboard.press("ArrowLeft")
    assert text_of(page, "#detail") == first
    plain, lost = text_of(page, "#right_text"), page.locator("#right_text del.refused")
    assert lost.count() > 0
    expect(lost.first).to_be_hidden()
    page.check("#refused")
    expect(lost.first).to_be_visible()
    assert "line-through" in lost.first.evaluate("one => getComputedStyle(one).textDecorationLine")
    lost.first.hover()
    assert re.search(r"refused · step \d+, .* · drafted by layerskip", text_of(page, "#detail"))
    page.uncheck("#refused")
    assert text_of(page, "#right_text") == plain


def test_a_race_says_how_much_faster_and_that_the_texts_are_the_same(page: Any) -> None:
    for name, value in (("prompt", PROMPT), ("method", METHOD), ("max_tokens", "40")):
        page.fill(f"#{name}", value)
    page.click("#race")
    expect(page.locator("#status")).to_have_text(re.compile(r"^Race done"), timeout=LONG)
    assert re.fullmatch(r"\d+\.\d\d x, identical", text_of(page, "#ratio"))
    expect(page.locator("#left_title")).to_contain_text("plain decoding:")
    expect(page.locator("#against_by")).to_have_text("by this race")
    ratio = text_of(page, "#ratio").partition(",")[0]
    speeds = re.search(r"(\d+) and (\d+) tokens/s", text_of(page, "#difference"))
    assert speeds
    assert float(ratio.removesuffix(" x")) == pytest.approx(int(speeds[2]) / int(speeds[1]), rel=0.02)
    expect(page.locator("#right_text .token")).to_have_count(40, timeout=LONG)
    expect(page.locator("#left_text")).to_have_text(page.locator("#right_text").text_content(), timeout=LONG)
    assert text_of(page, "#left_text") == text_of(page, "#right_text") != ""
    assert text_of(page, "#against") == ratio, "there is one speed-up"
    assert abs(int(text_of(page, "#all")) - int(speeds[2])) <= 1


def test_a_text_is_stopped_and_its_row_is_free(page: Any, server: Process) -> None:
    endless(page)
    ask(page, "off", 900)
    page.click("#stop", timeout=LONG)
    expect(page.locator("#status")).to_have_text("Stopped.")
    server.until_idle(30)
    assert page.locator("#right_text .token").count() < 900
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#stop")).to_be_disabled()


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("adadecode verification=false confidence_threshold=0.2", r"adadecode predicts after layers? [\d, ]+ of 24.*"),
        ("swift", r"swift drafts without \d+ attentions and \d+ MLPs of 24 layers"),
        ("early_exit exit_layer=12", r"early_exit predicts after layer 12 of 24 \(lossy\)"),
    ],
)
def test_the_map_shows_which_layers_draft(page: Any, method: str, told: str) -> None:
    ask(page, method, 120)
    written(page)
    stack = page.locator("#maps [role=img]")
    label = stack.get_attribute("aria-label")
    assert re.fullmatch(told, label)
    assert stack.locator(".layer").count() == 24
    if method == "swift":
        assert stack.locator(".skipped").count() == sum(map(int, re.findall(r"without (\d+).* (\d+) MLPs", label)[0]))
        return
    assert stack.locator(".layer.exit").count() >= 1
    assert re.match(r"This text's tokens by layer: \d+: \d+ kept", text_of(page, "#maps .counts"))
    if method.startswith("early_exit"):
        assert stack.locator(".beyond").count() == 12


def test_tokens_that_a_lossy_method_keeps_against_the_model_are_marked(page: Any) -> None:
    ask(page, "adasd variant=C", 120)
    written(page)
    marked = page.locator("#right_text .overruled")
    assert marked.count() > 0
    assert "≠" in marked.first.evaluate("one => getComputedStyle(one, '::before').content")
    marked.first.hover()
    assert "kept against the model's own choice" in text_of(page, "#detail")


def test_auto_tells_what_it_chose_and_why(page: Any) -> None:
    ask(page, "auto", 120)
    written(page)
    assert re.match(r"Method: auto\. Step \d+: \S.* \(.+\)\.", text_of(page, "#choice"))
    assert not re.search(r"\d", text_of(page, "#against")), "only a race knows"


def test_no_placeholder_is_clipped(chromium: Any, server: Process, page: Any) -> None:
    """Nor does a narrow page scroll sideways. It is light and dark, and the system's wish comes first."""
    ask(page, max_tokens=20)
    written(page)
    for width in (380, 1000, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate(CLIPPED) == [], width
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
    colour = "getComputedStyle(document.body).backgroundColor"
    colours = [page.evaluate(colour)]
    for _ in range(2):
        page.click("#theme")
        colours.append(page.evaluate(colour))
    assert colours[0] == colours[2] != colours[1]
    other = Watched(chromium, server.url, color_scheme="dark")
    assert other.page.evaluate(colour) == colours[1]
    other.context.close()


@pytest.fixture(scope="module")
def instructed(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with serving(str(with_template(tmp_path_factory.mktemp("instructed")))) as process:
        yield process


def test_a_model_with_a_chat_template_is_asked_in_it_unless_that_is_switched_off(chromium: Any, instructed: Process) -> None:
    page = Watched(chromium, instructed.url).page
    expect(page.locator("#chat")).to_be_checked(timeout=LONG)
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, max_tokens=20)
    assert request.value.post_data_json["messages"] == [{"role": "user", "content": PROMPT}]
    written(page)
    assert page.locator("#right_text .token:not(.refused)").count() == 20
    run_python(page)
    page.uncheck("#chat")
    with page.expect_request("**/v1/completions") as plain:
        ask(page, max_tokens=20)
    assert plain.value.post_data_json["prompt"] == PROMPT
    written(page)
    assert page.locator("#right_text .token:not(.refused)").count() == 20
    page.check("#chat")
    page.click("#race")
    expect(page.locator("#status")).to_have_text(re.compile(r"^Race done: .*identical"), timeout=LONG)
    page.context.close()


def run_python(page: Any) -> str:
    page.click("#python")
    result = subprocess.run([sys.executable, "-c", page.input_value("#code")], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_code_that_is_copied_runs(page: Any) -> None:
    ask(page, max_tokens=12)
    written(page)
    assert "mean_acceptance_length" in run_python(page)
    page.click("#curl")
    if (curl := shutil.which("curl")) is not None:
        command = page.input_value("#code")
        assert command.startswith("curl ")
        answer = subprocess.run(["sh", "-c", curl + command[4:]], capture_output=True, text=True, timeout=120)
        assert answer.stdout.rstrip().endswith("data: [DONE]")


def results(path: Path) -> list[dict[str, Any]]:
    """A file as `skipstone bench run` writes it: two tasks, three methods, one prompt on which one of them repeats itself."""
    methods = {
        "autoregressive": {"method": "autoregressive", "settings": {}, "lossless": True},
        "<b>layerskip, 6</b>": {"method": "layerskip", "settings": {}, "lossless": True},
        "early": {"method": "early_exit", "settings": {}, "lossless": False},
    }
    about = {"dtype": "float32", "device": "cpu", "synthetic": None, "refused": {}, "ceiling": {"tokens_per_second": 900.0}}
    lines: list[dict[str, Any]] = [
        {"kind": "run", "version": 1, "plan": {"seed": 0}, "provenance": {}},
        {"kind": "model", "model": "nano", "methods": methods, **about},
    ]
    times = [(1.0, 0.5, 0.25), (2.0, 0.8, 0.9), (4.0, 1.0, 1.0)]
    for number, task in enumerate(("code", "commands")):
        for index, seconds in enumerate(times):
            rows = {
                label: row(100, one * (1 + number), "a", repeated_share=0.5 * (index == 2))
                for label, one in zip(methods, seconds, strict=True)
                if number == 0 or label != "early"
            }
            cell = {"model": "nano", "number": number, "task": task, "temperature": 0.0, "question": "q"}
            lines.append({"kind": "prompt", **cell, "index": index, "digest": str(index), "rows": rows})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "pro')
    return lines


def test_results_are_compared_as_the_report_does_it_and_go_nowhere(watched: Watched, tmp_path: Path) -> None:
    page, path = watched.page, tmp_path / "results.jsonl"
    lines = results(path)
    before = list(watched.asked)
    page.set_input_files("#results", str(path))
    expect(page.locator("#bench_status")).to_have_text("2 tasks. ★ is the fastest method of a task.")
    cells = page.eval_on_selector_all("#compared tr", "rows => rows.map(row => [...row.cells].map(one => one.innerText))")
    assert cells[0] == ["task", "prompts", "autoregressive", "<b>layerskip, 6</b>", "early"]
    assert [one[0] for one in cells[1:]] == ["nano, code, greedy", "nano, commands, greedy"]
    for cell, group in zip(cells[1:], report.groups(lines), strict=True):
        assert int(cell[1]) == len(group.headline()) == 2
        for label, shown in zip(cells[0][2:], cell[2:], strict=True):
            figures = group.figures(label, group.headline())
            if figures is None:
                assert shown == "\N{EN DASH}"
                continue
            ratio, speed = re.match(r"([\d.]+) x.*\n(\d+) tokens/s", shown).groups()  # type: ignore[union-attr]
            assert float(ratio) == pytest.approx(figures["speedups"]["autoregressive"]["value"], abs=0.006)
            assert float(speed) == pytest.approx(figures["tokens_per_second"], abs=0.6)
    assert "lossy" in cells[1][4]
    assert "★" in cells[1][4]
    page.select_option("#base", "<b>layerskip, 6</b>")
    assert page.locator("#compared td.best").first.inner_text().startswith("1.13 x")
    assert [url for url in watched.asked if url not in before and not url.endswith("/health")] == []


def test_what_is_no_result_is_refused_in_a_sentence(page: Any, tmp_path: Path) -> None:
    expect(page.locator("#bench_status")).to_have_text("No file is open.")
    run = '{"kind": "run", "version": 1}\n'
    cases = [
        ('{"prompt": "x"}\n', "is no result of skipstone bench run."),
        ('{"kind": "run", "version": 9}\n', "is of version 9; this page reads 1."),
        (run, "holds no measured prompt yet."),
        (run + "x\n{}\n", "line 2 is no JSON."),
        (run + '{"kind": "model", "model": "m"}\n{"kind": "prompt", "model": "m"}\n', "A file is damaged"),
    ]
    for number, (text, info) in enumerate(cases):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(text)
        page.set_input_files("#results", str(path))
        expect(page.locator("#bench_status")).to_contain_text(info)
        expect(page.locator("#bench_tools")).to_be_hidden()


def test_a_key_is_asked_for_and_a_server_that_goes_is_noticed(chromium: Any) -> None:
    with serving("--api-key", "sk-1") as server:
        one = Watched(chromium, server.url)
        status = one.page.locator("#status")
        expect(status).to_contain_text("This server asks for an API key.", timeout=LONG)
        one.page.fill("#key", "wrong")
        ask(one.page)
        expect(status).to_contain_text("the API key is missing or wrong", timeout=LONG)
        one.page.fill("#key", "sk-1")
        ask(one.page)
        written(one.page)
        endless(one.page)
        ask(one.page, "off", 900)
        expect(status).to_have_text("Writing.")
        server.kill()
        expect(status).to_contain_text("Disconnected", timeout=LONG)
        expect(one.page.locator("#stop")).to_be_disabled()
        expect(one.page.locator("#send")).to_be_disabled(timeout=LONG)
        one.context.close()


def test_while_there_is_no_model_yet_the_page_says_so_and_waits(chromium: Any, server: Process) -> None:
    one, said = Watched(chromium, "about:blank"), {"status": "loading"}
    one.page.route("**/health", lambda route: route.fulfill(status=503, json=said))
    one.page.goto(server.url)
    status, send = one.page.locator("#status"), one.page.locator("#send")
    expect(status).to_have_text("The model is loading.", timeout=LONG)
    expect(send).to_be_disabled()
    said["status"] = "failed"
    expect(status).to_have_text("The model could not be loaded: see the server's log.", timeout=LONG)
    one.page.unroute("**/health")
    expect(status).to_have_text("Ready.", timeout=LONG)
    expect(send).to_be_enabled()
    one.context.close()


@pytest.mark.skipif("SKIPSTONE_PICTURES" not in os.environ, reason="SKIPSTONE_PICTURES names no folder")
@pytest.mark.parametrize(
    ("name", "scheme", "method"), [("playground", "light", "adadecode"), ("playground-dark", "dark", "layerskip exit_layer=6")]
)
def test_pictures_of_the_page(chromium: Any, server: Process, name: str, scheme: str, method: str) -> None:
    one = Watched(chromium, server.url, color_scheme=scheme)
    ask(one.page, method)
    written(one.page)
    one.page.check("#refused")
    one.page.hover("#right_text .token.draft >> nth=4")
    path = Path(os.environ["SKIPSTONE_PICTURES"]) / f"{name}.png"
    height = one.page.evaluate("document.querySelector('#map').getBoundingClientRect().bottom + scrollY + 14")
    one.page.screenshot(path=str(path), full_page=True, clip={"x": 0, "y": 0, "width": 1000, "height": height})
    one.context.close()
    from PIL import Image

    Image.open(path).quantize(192).save(path, optimize=True)
    assert path.stat().st_size <= 150_000
