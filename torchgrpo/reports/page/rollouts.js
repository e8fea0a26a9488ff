// Browser of rollouts: views, filters, order, list, and details of the selected completion.

const PAGE_ROWS = 40;
const VIEWS = [
  ["all", "All"], ["best", "Best of each step"], ["worst", "Worst of each step"], ["to_right", "Wrong → right"],
  ["to_wrong", "Right → wrong"], ["prompt", "One prompt"],
];
const ORDERS = [
  ["step", "step"], ["score", "reward"], ["length", "length"], ["advantage", "advantage"], ["age", "age"],
];
const NO_FILTER = { text: "", low: "", high: "", from: "", to: "", set: "", source: "", outcome: "", finish: "", tokens: "" };

function rolloutSection(rollouts) {
  const { totals, files: [numRead, numFiles] } = rollouts;
  const rows = completionRows(rollouts);
  const how = "Read some completions at random, then the worst ones, then prompts that changed from right to wrong.";
  if (!rows.length) return section("rollouts", "Rollouts", how, element("p", { class: "empty", text: "The ledger has no rollouts (logging.rollouts_gb)." }));
  const summary = `${plural(rows.length, "completion")} of ${groupDigits(totals.completions)} with text, `
    + `${groupDigits(Object.keys(rollouts.tokens).length)} with tokens; ${plural(rollouts.flips.length, "prompt")} of ${groupDigits(totals.flips)} that flipped.`
    + (numRead < numFiles ? ` From ${groupDigits(numRead)} of the ledger's ${groupDigits(numFiles)} files, evenly over the run.` : "");
  const browser = { rollouts, rows, state: { view: "all", order: "step", descending: false, shown: PAGE_ROWS, by: "advantage", prompt: null, filter: { ...NO_FILTER } } };
  if (rows.some((row) => !row.set)) browser.state.filter.set = "0"; // training first
  browser.views = new Map(VIEWS.map(([key]) => [key, rowsOfView(browser, key)]));
  browser.list = element("ol", { class: "list" });
  browser.count = element("p", { class: "count", role: "status" });
  browser.curve = element("div", {});
  browser.details = element("div", { class: "selected" });
  browser.tabs = element("div", { class: "tabs", role: "group", "aria-label": "Views" });
  browser.filters = rolloutFilters(browser);
  browser.selected = null;
  showList(browser);
  openRow(browser, browser.matching[0] ?? rows[0]);
  return section(
    "rollouts", "Rollouts", how,
    element("p", { class: "aside", text: summary }),
    browser.tabs, browser.filters, browser.curve,
    element("div", { class: "browser" }, element("div", { class: "column" }, browser.count, browser.list), browser.details),
  );
}

/** Returns all rows of a view, before the filters. */
function rowsOfView({ rollouts, rows }, view) {
  if (view === "all") return rows;
  if (view === "to_right" || view === "to_wrong") {
    return rollouts.flips.filter((flip) => flip.to_right === (view === "to_right"))
      .flatMap((flip) => [rows[flip.first], rows[flip.last]].map((row) => ({ ...row, flip })));
  }
  const extremes = new Map();
  const better = view === "best" ? (a, b) => a > b : (a, b) => a < b;
  for (const row of rows) {
    if (row.set || row.outcome === "error" || view === "prompt") continue;
    const known = extremes.get(row.step);
    if (!known || better(row.score, known.score)) extremes.set(row.step, row);
  }
  return [...extremes.values()];
}

function rolloutFilters(browser) {
  const { rollouts, state } = browser;
  const filtered = (name) => (value) => { state.filter[name] = value; state.shown = PAGE_ROWS; showList(browser); };
  const any = (names, label = (name) => name) => [["", "any"], ...names.map((name, index) => [String(index), label(name)])];
  const nameOptions = (names) => [["", "any"], ...names.map((name) => [name, name])];
  const numeric = { step: "any", class: "short" };
  return element(
    "div", { class: "controls filters" },
    entry("Text or prompt contains", "search", "", filtered("text")),
    entry("Reward from", "number", "", filtered("low"), numeric), entry("to", "number", "", filtered("high"), { ...numeric, "aria-label": "Reward to" }),
    entry("Step from", "number", "", filtered("from"), numeric), entry("to", "number", "", filtered("to"), { ...numeric, "aria-label": "Step to" }),
    rollouts.sets.length > 1 ? choice("Of", any(rollouts.sets, (name) => name || "training"), state.filter.set, filtered("set")) : null,
    rollouts.sources.length > 1 ? choice("Data set", any(rollouts.sources), "", filtered("source")) : null,
    choice("Outcome", nameOptions(rollouts.outcomes), "", filtered("outcome")),
    choice("Ended by", nameOptions(rollouts.finish_reasons), "", filtered("finish")),
    choice("Tokens", [["", "any"], ["yes", "with values"]], "", filtered("tokens")),
    choice("Order by", ORDERS, state.order, (order) => { state.order = order; showList(browser); }),
    choice("First", [["up", "smallest"], ["down", "largest"]], "up", (way) => { state.descending = way === "down"; showList(browser); }),
  );
}

function matches(row, filter, rollouts) {
  const within = (value, low, high) => (low === "" || value >= Number(low)) && (high === "" || value <= Number(high));
  if (!within(row.score, filter.low, filter.high) || !within(row.step, filter.from, filter.to)) return false;
  if (filter.set !== "" && row.set !== Number(filter.set)) return false;
  if (filter.source !== "" && row.source !== Number(filter.source)) return false;
  if (filter.tokens && !row.tokens) return false;
  if (filter.outcome && row.outcome !== filter.outcome) return false;
  if (filter.finish && row.finish !== filter.finish) return false;
  if (!filter.text) return true;
  const query = filter.text.toLowerCase();
  if (row.text.toLowerCase().includes(query)) return true;
  return rollouts.prompts[row.prompt].messages.some(([, text]) => rollouts.texts[text].toLowerCase().includes(query));
}

/** Returns the rows that match the filters, in order; the rows of a flip stay together. */
function matchingRows({ rollouts, rows, views, state }) {
  if (state.view === "prompt") {
    return sortRows(rows.filter((row) => row.prompt === state.prompt), { value: (row) => row.step }, false);
  }
  const found = views.get(state.view).filter((row) => matches(row, state.filter, rollouts));
  const isFlipView = state.view.startsWith("to_");
  return isFlipView ? found : sortRows(found, { value: (row) => row[state.order] }, state.descending);
}

function showList(browser) {
  const { state, rollouts } = browser;
  browser.matching = matchingRows(browser);
  browser.filters.hidden = state.view === "prompt"; // this view shows all completions of a prompt
  browser.tabs.replaceChildren(...VIEWS.filter(([key]) => key !== "prompt" || state.view === "prompt").map(([key, title]) => element("button", {
    type: "button", class: "tab", "aria-pressed": String(key === state.view), text: key === "all" || key === "prompt" ? title : `${title} (${groupDigits(viewSize(browser, key))})`,
    on: { click: () => { state.view = key; state.shown = PAGE_ROWS; showList(browser); } },
  })));
  browser.curve.replaceChildren(...(state.view === "prompt" ? [promptCurve(state.prompt, rollouts, sharedView(0))] : []));
  browser.count.textContent = browser.matching.length ? plural(browser.matching.length, "completion") : "No completion matches.";
  browser.list.replaceChildren(...browser.matching.slice(0, state.shown).map((row) => listEntry(browser, row)));
  if (browser.matching.length > state.shown) {
    browser.list.append(element("li", {}, element("button", {
      type: "button", class: "more", text: `Show more of ${groupDigits(browser.matching.length)}`, on: { click: () => { state.shown *= 3; showList(browser); } },
    })));
  }
}

function viewSize(browser, key) {
  const size = browser.views.get(key).length;
  return key.startsWith("to_") ? size / 2 : size;
}

function listEntry(browser, row) {
  const { rollouts } = browser;
  const prompt = rollouts.prompts[row.prompt].messages.slice(-1).map(([, text]) => rollouts.texts[text])[0] ?? "";
  const current = browser.selected && browser.selected.index === row.index;
  return element("li", {}, element(
    "button", { type: "button", class: "row", "aria-current": current ? "true" : null, on: { click: () => openRow(browser, row) } },
    element("span", { class: "row-head" },
      element("b", { class: row.outcome === "error" ? "chip" : isRight(row) ? "chip right" : "chip wrong", text: row.outcome === "error" ? "error" : number(row.score) }),
      element("span", { text: `step ${groupDigits(row.step)}` }),
      element("span", { class: "aside", text: [row.set ? rollouts.sets[row.set] : null, `${groupDigits(row.length)} tokens`, row.chat ? plural(row.chat.turns.length, "turn") : null, row.finish === "stop" ? null : row.finish].filter(Boolean).join(" · ") })),
    element("span", { class: "prompt", dir: "auto", text: snippet(prompt, 90) }),
    element("span", { class: "snippet", dir: "auto", text: snippet(row.text, 160) || "(empty)" }),
  ));
}

function snippet(text, length) {
  const line = visible(text.replace(/\s+/g, " ").trim());
  return line.length > length ? `${[...line].slice(0, length).join("")}…` : line;
}

function openRow(browser, row, view = null) {
  browser.selected = row;
  if (view === "prompt") {
    browser.state.view = "prompt";
    browser.state.prompt = row.prompt;
  }
  showList(browser);
  browser.details.replaceChildren(completionDetails(row, browser.rollouts, browser.rows, browser.state, (other, way) => openRow(browser, other, way)));
}
