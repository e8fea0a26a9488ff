"""Tests of the report pages in a browser."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.reports.browser import needs_browser, start_browser
from tests.reports.synthetic_run import HOSTILE_TEXTS, RunSpec, write_run_folder
from torchgrpo.reports.report import write_comparison, write_report
from torchgrpo.reports.sweep_report import write_sweep

pytestmark = needs_browser
PAGES = ("run", "hostile", "episodes", "comparison", "sweep")
TEXT_SELECTORS = (
    ".lead",
    ".how",
    ".aside",
    ".tile dt",
    ".chart figcaption span",
    ".legend span",
    "td",
    "th button",
    ".tick-text",
    ".chip",
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    plain = write_run_folder(folder / "sweep" / "0", RunSpec())
    other = write_run_folder(folder / "sweep" / "1", RunSpec(seed=1, skill=0.4), ("optimizer.lr=1e-2",))
    hostile = write_run_folder(folder / "hostile", RunSpec(hostile=True))
    paths = {"run": write_report(plain), "hostile": write_report(hostile)}
    paths["episodes"] = write_report(write_run_folder(folder / "episodes", RunSpec(episodes=True)))
    paths["comparison"] = write_comparison([plain, other], folder / "comparison.html")
    write_sweep(folder / "sweep")
    return paths | {"sweep": folder / "sweep" / "report.html"}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with start_browser() as chromium:
        yield chromium


@dataclass
class OpenPage:
    """Open page with its console messages, requests and dialogs."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def all_texts(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_inner_texts())


@pytest.fixture
def show(chromium: Any, pages: dict[str, Path]) -> Iterator[Any]:
    contexts = []

    def open_page(name: str, width: int = 1280, scheme: str = "light") -> OpenPage:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        browser_page = OpenPage(context.new_page())
        browser_page.page.on("console", lambda message: browser_page.messages.append(message.text))
        browser_page.page.on("pageerror", lambda error: browser_page.messages.append(str(error)))
        browser_page.page.on("request", lambda request: browser_page.requests.append(request.url))
        browser_page.page.on("dialog", lambda dialog: (browser_page.dialogs.append(dialog.message), dialog.dismiss()))
        browser_page.page.goto(pages[name].as_uri())
        browser_page.page.wait_for_selector("html[data-ready]", state="attached")
        scroll_down(browser_page)  # charts rendered when visible move the content below
        return browser_page

    yield open_page
    for context in contexts:
        context.close()


NEXT_FRAME = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
"""JavaScript that waits until a frame is rendered, whose observers have run."""


def scroll_down(browser_page: OpenPage) -> None:
    """Scrolls to the end, so that all charts are rendered."""
    height = browser_page.page.evaluate("document.documentElement.scrollHeight")
    for top in range(0, height, 600):
        browser_page.page.evaluate(f"window.scrollTo({{ top: {top}, behavior: 'instant' }})")
        browser_page.page.evaluate(NEXT_FRAME)


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [1280, pytest.param(400, marks=pytest.mark.long)])
def test_page_renders_without_network_requests(show: Any, pages: dict[str, Path], name: str, width: int) -> None:
    browser_page = show(name, width)
    scroll_down(browser_page)
    assert browser_page.messages == [] and browser_page.dialogs == []
    assert browser_page.requests == [pages[name].as_uri()]
    curves = browser_page.page.locator("section .chart svg path.curve")
    assert curves.count() > 10
    assert "NaN" not in browser_page.page.locator(
        "main"
    ).inner_html() and "undefined" not in browser_page.page.inner_text("main")
    assert browser_page.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.long
def test_security_policy_refuses_requests(show: Any) -> None:
    browser_page = show("run")
    result = browser_page.page.evaluate(
        "fetch('https://example.org/').then(() => 'answered', (error) => `refused: ${error.message}`)"
    )
    assert result.startswith("refused")
    assert any("Content Security Policy" in message for message in browser_page.messages)


@pytest.mark.long
def test_completions_are_shown_as_text(show: Any) -> None:
    browser_page = show("hostile")
    page = browser_page.page
    assert page.locator("script").count() == 2 and page.locator("img").count() == 0
    for text, shown in [
        (HOSTILE_TEXTS[0], HOSTILE_TEXTS[0]),
        (HOSTILE_TEXTS[1], HOSTILE_TEXTS[1]),
        ("red", "⟨U+0000⟩⟨U+0007⟩⟨U+001B⟩[31m red ⟨U+007F⟩"),
        ("right to left", "⟨U+202E⟩right to left⟨U+202C⟩ שלום مرحبا"),
        ("👨", "😀 👨‍👩‍👧"),
    ]:
        page.get_by_label("Text or prompt contains").fill(text)
        page.locator(".list .row").first.click()
        page.get_by_label("Colour tokens by").select_option("none")
        assert page.locator(".details .completion").inner_text().startswith(shown)
        page.get_by_label("Colour tokens by").select_option("advantage")
    page.get_by_label("Text or prompt contains").fill("long long")
    page.locator(".list .row").first.click()
    assert "9 000 more characters" in page.locator(".details").inner_text().replace("\u202f", " ")
    assert browser_page.messages == [] and browser_page.dialogs == []


@pytest.mark.long
def test_filters_of_rollouts(show: Any) -> None:
    browser_page = show("run")
    page = browser_page.page
    count = page.locator(".count").inner_text()
    assert count.startswith("640 ")
    page.get_by_label("Reward from").fill("0.5")
    right = int(page.locator(".count").inner_text().split()[0])
    assert 0 < right < 640 and set(browser_page.all_texts(".list .row .chip")) == {"1"}
    page.get_by_label("Step from").fill("39")
    assert set(browser_page.all_texts(".list .row-head span:nth-child(2)")) == {"step 39", "step 40"}
    page.get_by_label("Text or prompt contains").fill("step 40 says")
    assert set(browser_page.all_texts(".list .row-head span:nth-child(2)")) == {"step 40"}
    page.get_by_label("Ended by").select_option("abort")
    assert page.locator(".count").inner_text() == "No completion matches."
    page.get_by_label("Ended by").select_option("")
    for name in ("Reward from", "Step from", "Text or prompt contains"):
        page.get_by_label(name).fill("")
    page.get_by_label("Of", exact=True).select_option("")
    assert int(page.locator(".count").inner_text().split()[0]) == 640 + 3 * 12 * 4
    page.get_by_label("Order by").select_option("length")
    page.get_by_label("First").select_option("down")
    lengths = [int(text.split(" tokens")[0].split()[-1]) for text in browser_page.all_texts(".list .row-head .aside")]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.long
def test_flips_and_one_prompt_over_time(show: Any) -> None:
    browser_page = show("run")
    page = browser_page.page
    page.get_by_label("Of", exact=True).select_option("")
    page.get_by_role("button", name="Wrong → right").click()
    chips = browser_page.all_texts(".list .row .chip")
    assert len(chips) >= 4 and chips[:4] == ["0", "1", "0", "1"]
    page.get_by_role("button", name="Best of each step").click()
    best = [float(text) for text in browser_page.all_texts(".list .row .chip")]
    page.get_by_role("button", name="Worst of each step").click()
    worst = [float(text) for text in browser_page.all_texts(".list .row .chip")]
    assert len(best) == len(worst) == 40 and sum(best) > sum(worst)
    page.get_by_role("button", name="This prompt over time").click()
    assert len(set(browser_page.all_texts(".list .row .prompt"))) == 1
    page.wait_for_selector("text=mean reward of each group")
    assert browser_page.messages == []


@pytest.mark.long
def test_tokens_are_coloured_by_their_values(show: Any) -> None:
    browser_page = show("run")
    page = browser_page.page
    colours = "[...document.querySelectorAll('.token')].map((token) => getComputedStyle(token).backgroundColor)"
    page.locator(".list .row").first.click()
    assert len(set(page.evaluate(colours))) == 1  # one advantage for all tokens
    page.get_by_label("Colour tokens by").select_option("log_ratio")
    ratios = page.evaluate(colours)
    page.get_by_label("Colour tokens by").select_option("entropy")
    assert len(set(ratios)) > 3 and page.evaluate(colours) != ratios
    assert "entropy" in page.locator(".token").first.get_attribute("title")


def test_episode_reads_as_a_chat(show: Any) -> None:
    browser_page = show("episodes")
    page = browser_page.page
    page.locator(".list .row").first.click()
    assert browser_page.all_texts(".turn-head") == [
        "Turn 1\nreward 0.25 · 4 tokens · engine 0.5 s · environment 0.125 s · 1 malformed call",
        "Turn 2\nreward 0.75 · 2 tokens · engine 0.25 s · environment 0 s",
    ]
    assert page.locator(".turn").nth(0).locator(".token").count() == 4
    page.get_by_label("Colour tokens by").select_option("none")
    assert browser_page.all_texts(".chat .completion") == ["I multiply.", "84"]
    calls = page.locator(".chat .call")
    assert calls.nth(0).inner_text() == "mul(a=12, b=7) → 84"
    assert calls.nth(1).inner_text() == 'lookup(query="84", deep={"limit": null}) → nothing found (error)'
    calls.nth(1).locator("summary").click()
    assert calls.nth(1).locator("pre").all_inner_texts()[1] == "nothing\nfound"
    assert page.locator(".chat .message").all_inner_texts() == ["tool\nno JSON"]
    page.get_by_label("Text or prompt contains").fill("KeyError: 'board'")
    page.locator(".list .row").first.click()
    assert "KeyError: 'board'" in page.locator(".chat .error").inner_text()
    page.get_by_label("Text or prompt contains").fill("")
    page.get_by_label("Ended by").select_option("deadline")
    page.locator(".list .row").first.click()
    assert browser_page.all_texts(".fork") == ["New sequence: earlier messages were rewritten."]
    assert page.locator(".turn").nth(2).locator(".fork").count() == 1
    page.get_by_label("Ended by").select_option("error")
    page.get_by_label("Text or prompt contains").fill("<script>")
    page.locator(".list .row").first.click()
    assert page.locator("script").count() == 2 and "</script><script>" in page.locator(".chat").inner_text()
    assert browser_page.messages == [] and browser_page.dialogs == []


@pytest.mark.long
def test_heading_sorts_its_table(show: Any) -> None:
    browser_page = show("run")
    heading = browser_page.page.locator("#time th button", has_text="Share of the run")
    shares = []
    for _ in range(2):
        heading.focus()  # charts rendered when visible move the heading away from a mouse
        browser_page.page.keyboard.press("Enter")
        shares.append([float(text.split()[0]) for text in browser_page.all_texts("#time tbody td:nth-child(4)")])
    assert len(shares[0]) >= 5
    assert shares[0] == sorted(shares[0], reverse=True) and shares[1] == sorted(shares[0])


@pytest.mark.long
def test_pointer_shows_the_values_of_all_curves(show: Any) -> None:
    browser_page = show("run")
    page = browser_page.page
    picture = page.locator("#curves .chart svg[role=img]").first
    picture.scroll_into_view_if_needed()
    picture.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    captions = browser_page.all_texts("#curves .chart .pointer-text")
    assert captions[0].startswith("step 2") and captions[2].startswith("step 2")
    assert "weights pushed, version 2" in captions[0]
    box = picture.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 140, box["y"] + 40, steps=4)
    page.mouse.up()
    low, high = (float(page.locator("#curves fieldset input").nth(index).input_value()) for index in (0, 1))
    assert 1 <= low < high < 40
    page.get_by_role("button", name="Whole run").first.click()
    assert page.locator("#curves fieldset input").first.input_value() == ""
    page.get_by_label("Along", exact=True).select_option("seconds")
    assert any("min" in text for text in page.locator("#curves .chart .tick-text").all_text_contents())


CONTRAST_SCRIPT = """
(selectors) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const channels = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const paper = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = channels(getComputedStyle(at).backgroundColor);
      if (found[3] === 255) return found;
    }
    throw new Error("no background");
  };
  return selectors.map((selector) => {
    const node = document.querySelector(selector);
    const style = getComputedStyle(node);
    const ink = channels(node instanceof SVGElement ? style.fill : style.color);
    const [light, dark] = [luminance(ink), luminance(paper(node))].sort((a, b) => b - a);
    return [selector, (light + 0.05) / (dark + 0.05)];
  });
}
"""


@pytest.mark.long
def test_light_and_dark_theme_are_readable(show: Any) -> None:
    papers = set()
    for scheme in ("light", "dark"):
        browser_page = show("run", scheme=scheme)
        scroll_down(browser_page)
        papers.add(browser_page.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for selector, contrast in browser_page.page.evaluate(CONTRAST_SCRIPT, list(TEXT_SELECTORS)):
            assert contrast >= 4.5, f"{selector} in {scheme}: {contrast:.2f}"
    assert len(papers) == 2


@pytest.mark.long
def test_reader_chooses_the_theme(show: Any) -> None:
    page = show("run").page

    def paper() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = paper()
    for _ in range(2):
        page.locator("#theme").click()
    assert paper() != light
    deadline, dark = time.monotonic() + 600, False
    while not dark:  # Chromium stores the choice in another process, with a delay
        assert time.monotonic() < deadline, "the choice was forgotten for 600 s"
        page.reload()
        page.wait_for_selector("html[data-ready]", state="attached")
        dark = paper() != light


@pytest.mark.long
def test_comparison_of_runs(show: Any) -> None:
    browser_page = show("comparison")
    assert len(browser_page.all_texts("#runs tbody tr")) == 2
    legend = browser_page.page.locator("#curves .chart").first.locator(".legend li")
    assert [text.split()[0] for text in legend.all_inner_texts()] == ["sweep/0", "sweep/1"]
    assert [row.split("\t")[0] for row in browser_page.all_texts("#settings tbody tr")] == ["optimizer.lr"]
    assert "sweep/1 against sweep/0: worsened by" in browser_page.page.locator(".paired").inner_text()
    browser_page.page.locator("#runs tbody tr").nth(1).hover()
    faded = "path.curve[style*='opacity: 0.15']"
    assert browser_page.page.locator(faded).count() > 0


@pytest.mark.long
def test_sweep_has_a_sortable_table(show: Any) -> None:
    browser_page = show("sweep")
    page = browser_page.page
    headings = [text.split()[0] for text in browser_page.all_texts("#runs th")]
    assert headings[:2] == ["Run", "optimizer.lr"]
    page.locator("#runs th button", has_text="last reward").click()
    assert [text.strip() for text in browser_page.all_texts("#runs tbody td:first-child")] == ["0", "1"]
    page.locator("#runs th button", has_text="last reward").click()
    assert [text.strip() for text in browser_page.all_texts("#runs tbody td:first-child")] == ["1", "0"]
    assert page.locator("#runs tbody a").all_inner_texts() == ["0"]  # the other has no report
    page.locator("#runs tbody a").click()
    page.wait_for_selector("text=GRPO run")


@pytest.mark.long
def test_run_with_an_evaluation_only(show: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    pages["evaluation"] = write_report(write_run_folder(tmp_path / "run", RunSpec(steps=0, evaluate=1)))
    browser_page = show("evaluation")
    scroll_down(browser_page)
    assert browser_page.messages == []
    assert len(browser_page.all_texts("#evaluations tbody tr")) == 1 and len(browser_page.all_texts(".list .row")) == 40


@pytest.mark.long
def test_run_with_missing_files(show: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    bare = write_run_folder(tmp_path / "bare", replace(RunSpec(), steps=1, evaluate=0))
    for name in ("events.jsonl", "summary.json", "rollouts/train_000001.jsonl.zst", ".hydra/config.yaml"):
        (bare / name).unlink()
    pages["bare"] = write_report(bare)
    browser_page = show("bare", 400)
    scroll_down(browser_page)
    assert browser_page.messages == []
    assert "The diagnostics could not run" in browser_page.page.locator("#findings").inner_text()
    assert "has no rollouts" in browser_page.page.locator("#rollouts").inner_text()
