"""The pages in a browser: they draw, ask nothing of the network, sort, filter; what a model wrote is text to them."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.reports.browser import browser, needs_browser
from tests.reports.made_run import HOSTILE, Made, make_run
from torchgrpo.reports.report import write_comparison, write_report
from torchgrpo.reports.sweep import write_sweep

pytestmark = needs_browser
PAGES = ("run", "hostile", "comparison", "sweep")
BODIES = (
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
    made = tmp_path_factory.mktemp("pages")
    plain = make_run(made / "sweep" / "0", Made())
    other = make_run(made / "sweep" / "1", Made(seed=1, skill=0.4), ("optimizer.lr=1e-2",))
    hostile = make_run(made / "hostile", Made(hostile=True))
    found = {"run": write_report(plain), "hostile": write_report(hostile)}
    found["comparison"] = write_comparison([plain, other], made / "comparison.html")
    write_sweep(made / "sweep")
    return found | {"sweep": made / "sweep" / "report.html"}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@dataclass
class Opened:
    """A page with all that it complained of, asked for, and popped up."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def all(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_inner_texts())


@pytest.fixture
def show(chromium: Any, pages: dict[str, Path]) -> Iterator[Any]:
    contexts = []

    def opened(name: str, width: int = 1280, scheme: str = "light") -> Opened:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        found = Opened(context.new_page())
        found.page.on("console", lambda message: found.complaints.append(message.text))
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("dialog", lambda dialog: (found.dialogs.append(dialog.message), dialog.dismiss()))
        found.page.goto(pages[name].as_uri())
        found.page.wait_for_selector("html[data-ready]", state="attached")
        scrolled(found)  # what is drawn when it is seen moves what comes after it
        return found

    yield opened
    for context in contexts:
        context.close()


def scrolled(opened: Opened) -> None:
    """Down to the end, so that everything is drawn."""
    height = opened.page.evaluate("document.documentElement.scrollHeight")
    for top in range(0, height, 600):
        opened.page.evaluate(f"window.scrollTo({{ top: {top}, behavior: 'instant' }})")
        opened.page.wait_for_timeout(20)


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [1280, pytest.param(400, marks=pytest.mark.long)])
def test_a_page_draws_itself_and_asks_for_nothing(
    show: Any, pages: dict[str, Path], name: str, width: int
) -> None:
    opened = show(name, width)
    scrolled(opened)
    assert opened.complaints == [] and opened.dialogs == []
    assert opened.requests == [pages[name].as_uri()]
    drawn = opened.page.locator("section .chart svg path.curve")
    assert drawn.count() > 10
    assert "NaN" not in opened.page.locator(
        "main"
    ).inner_html() and "undefined" not in opened.page.inner_text("main")
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.long
def test_nothing_may_be_asked_for_even_if_it_were_tried(show: Any) -> None:
    opened = show("run")
    told = opened.page.evaluate(
        "fetch('https://example.org/').then(() => 'answered', (error) => `refused: ${error.message}`)"
    )
    assert told.startswith("refused")
    assert any("Content Security Policy" in complaint for complaint in opened.complaints)


@pytest.mark.long
def test_what_a_model_wrote_is_text(show: Any) -> None:
    opened = show("hostile")
    page = opened.page
    assert page.locator("script").count() == 2 and page.locator("img").count() == 0
    for text, shown in [
        (HOSTILE[0], HOSTILE[0]),
        (HOSTILE[1], HOSTILE[1]),
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
    assert opened.complaints == [] and opened.dialogs == []


@pytest.mark.long
def test_filters_keep_what_they_say(show: Any) -> None:
    opened = show("run")
    page = opened.page
    everything = page.locator(".count").inner_text()
    assert everything.startswith("640 ")
    page.get_by_label("Reward from").fill("0.5")
    right = int(page.locator(".count").inner_text().split()[0])
    assert 0 < right < 640 and set(opened.all(".list .row .chip")) == {"1"}
    page.get_by_label("Step from").fill("39")
    assert set(opened.all(".list .row-head span:nth-child(2)")) == {"step 39", "step 40"}
    page.get_by_label("Text or prompt contains").fill("step 40 says")
    assert set(opened.all(".list .row-head span:nth-child(2)")) == {"step 40"}
    page.get_by_label("Ended by").select_option("abort")
    assert page.locator(".count").inner_text() == "No completion is like this."
    page.get_by_label("Ended by").select_option("")
    for name in ("Reward from", "Step from", "Text or prompt contains"):
        page.get_by_label(name).fill("")
    page.get_by_label("Of", exact=True).select_option("")
    assert int(page.locator(".count").inner_text().split()[0]) == 640 + 3 * 12 * 4
    page.get_by_label("Order by").select_option("length")
    page.get_by_label("First").select_option("down")
    lengths = [int(text.split(" tokens")[0].split()[-1]) for text in opened.all(".list .row-head .aside")]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.long
def test_what_flipped_and_one_prompt_over_time(show: Any) -> None:
    opened = show("run")
    page = opened.page
    page.get_by_label("Of", exact=True).select_option("")
    page.get_by_role("button", name="Wrong → right").click()
    chips = opened.all(".list .row .chip")
    assert len(chips) >= 4 and chips[:4] == ["0", "1", "0", "1"]
    page.get_by_role("button", name="Best of each step").click()
    best = [float(text) for text in opened.all(".list .row .chip")]
    page.get_by_role("button", name="Worst of each step").click()
    worst = [float(text) for text in opened.all(".list .row .chip")]
    assert len(best) == len(worst) == 40 and sum(best) > sum(worst)
    page.get_by_role("button", name="This prompt over time").click()
    assert len(set(opened.all(".list .row .asked"))) == 1
    page.wait_for_selector("text=mean reward of each group")
    assert opened.complaints == []


@pytest.mark.long
def test_tokens_have_the_colour_of_their_values(show: Any) -> None:
    opened = show("run")
    page = opened.page
    colours = (
        "[...document.querySelectorAll('.token')].map((token) => getComputedStyle(token).backgroundColor)"
    )
    page.locator(".list .row").first.click()
    assert len(set(page.evaluate(colours))) == 1  # one advantage for all tokens
    page.get_by_label("Colour tokens by").select_option("log_ratio")
    ratios = page.evaluate(colours)
    page.get_by_label("Colour tokens by").select_option("entropy")
    assert len(set(ratios)) > 3 and page.evaluate(colours) != ratios
    assert "entropy" in page.locator(".token").first.get_attribute("title")


@pytest.mark.long
def test_a_heading_sorts_its_table(show: Any) -> None:
    opened = show("run")
    heading = opened.page.locator("#time th button", has_text="Share of the run")
    shares = []
    for _ in range(2):
        heading.focus()  # pictures that are drawn when they are seen move what a mouse points at
        opened.page.keyboard.press("Enter")
        shares.append([float(text.split()[0]) for text in opened.all("#time tbody td:nth-child(4)")])
    assert len(shares[0]) >= 5
    assert shares[0] == sorted(shares[0], reverse=True) and shares[1] == sorted(shares[0])


@pytest.mark.long
def test_pointing_at_a_curve_shows_the_values_of_all(show: Any) -> None:
    opened = show("run")
    page = opened.page
    picture = page.locator("#curves .chart svg[role=img]").first
    picture.scroll_into_view_if_needed()
    picture.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    told = opened.all("#curves .chart .pointed")
    assert told[0].startswith("step 2") and told[2].startswith("step 2")
    assert "weights pushed, version 2" in told[0]
    box = picture.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 140, box["y"] + 40, steps=4)
    page.mouse.up()
    low, high = (float(page.locator("#curves fieldset input").nth(place).input_value()) for place in (0, 1))
    assert 1 <= low < high < 40
    page.get_by_role("button", name="Whole run").first.click()
    assert page.locator("#curves fieldset input").first.input_value() == ""
    page.get_by_label("Along", exact=True).select_option("seconds")
    assert any("min" in text for text in page.locator("#curves .chart .tick-text").all_text_contents())


CONTRAST = """
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
def test_light_and_dark_differ_and_can_be_read(show: Any) -> None:
    papers = set()
    for scheme in ("light", "dark"):
        opened = show("run", scheme=scheme)
        scrolled(opened)
        papers.add(opened.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for selector, contrast in opened.page.evaluate(CONTRAST, list(BODIES)):
            assert contrast >= 4.5, f"{selector} in {scheme}: {contrast:.2f}"
    assert len(papers) == 2


@pytest.mark.long
def test_the_reader_chooses_the_theme(show: Any) -> None:
    page = show("run").page

    def paper() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = paper()
    for _ in range(2):
        page.locator("#theme").click()
    assert paper() != light
    deadline, dark = time.monotonic() + 600, False
    while not dark:  # what a page stores, Chromium hands to another process in its own time
        assert time.monotonic() < deadline, "the choice was forgotten for 600 s"
        page.reload()
        page.wait_for_selector("html[data-ready]", state="attached")
        dark = paper() != light


@pytest.mark.long
def test_runs_over_each_other(show: Any) -> None:
    opened = show("comparison")
    assert len(opened.all("#runs tbody tr")) == 2
    legend = opened.page.locator("#curves .chart").first.locator(".legend li")
    assert [text.split()[0] for text in legend.all_inner_texts()] == ["sweep/0", "sweep/1"]
    assert [row.split("\t")[0] for row in opened.all("#settings tbody tr")] == ["optimizer.lr"]
    assert "sweep/1 against sweep/0: worsened by" in opened.page.locator(".paired").inner_text()
    opened.page.locator("#runs tbody tr").nth(1).hover()
    faded = "path.curve[style*='opacity: 0.15']"
    assert opened.page.locator(faded).count() > 0


@pytest.mark.long
def test_a_sweep_is_a_table_that_sorts(show: Any) -> None:
    opened = show("sweep")
    page = opened.page
    headings = [text.split()[0] for text in opened.all("#runs th")]
    assert headings[:2] == ["Run", "optimizer.lr"]
    page.locator("#runs th button", has_text="last reward").click()
    assert [text.strip() for text in opened.all("#runs tbody td:first-child")] == ["0", "1"]
    page.locator("#runs th button", has_text="last reward").click()
    assert [text.strip() for text in opened.all("#runs tbody td:first-child")] == ["1", "0"]
    assert page.locator("#runs tbody a").all_inner_texts() == ["0"]  # the other has no report
    page.locator("#runs tbody a").click()
    page.wait_for_selector("text=GRPO run")


@pytest.mark.long
def test_an_evaluation_alone(show: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    pages["evaluation"] = write_report(make_run(tmp_path / "run", Made(steps=0, evaluate=1)))
    opened = show("evaluation")
    scrolled(opened)
    assert opened.complaints == []
    assert len(opened.all("#evaluations tbody tr")) == 1 and len(opened.all(".list .row")) == 40


@pytest.mark.long
def test_a_run_of_which_little_is_known(show: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    bare = make_run(tmp_path / "bare", replace(Made(), steps=1, evaluate=0))
    for name in ("events.jsonl", "summary.json", "rollouts/train_000001.jsonl.zst", ".hydra/config.yaml"):
        (bare / name).unlink()
    pages["bare"] = write_report(bare)
    opened = show("bare", 400)
    scrolled(opened)
    assert opened.complaints == []
    assert "The doctor could not look" in opened.page.locator("#findings").inner_text()
    assert "holds no rollouts" in opened.page.locator("#rollouts").inner_text()
