// Settings of the run, findings of the diagnostics, and the head of the page.

function settingsSection({ settings, command }) {
  return section(
    "settings", "Settings", "Settings that differ from the defaults, from presets, config files and the command line.",
    command ? element("pre", { class: "command", text: command }) : null,
    table([
      { title: "Key", value: ([key]) => key, show: ([key]) => element("code", { text: key }) },
      { title: "Value", value: ([, value]) => setting(value), show: ([, value]) => setting(value) },
      { title: "Default", value: ([, , fallback]) => setting(fallback), show: ([, , fallback]) => (fallback === "???" ? "required" : setting(fallback)) },
    ], settings, { caption: `${plural(settings.length, "setting")} that differ from the defaults` }),
  );
}

function findingsSection({ findings, error }) {
  const content = findings.length
    ? element("ul", { class: "findings" }, findings.map(findingEntry))
    : element("p", { class: "empty", text: error ? `The diagnostics could not run: ${error}` : "The diagnostics found no problem." });
  return section("findings", "Findings", "Findings of the diagnostic rules in the metrics, with likely causes and settings that help.", content);
}

function findingEntry({ rule, severity, first_step: first, last_step: last, text, cause, setting }) {
  const steps = first === last ? `step ${groupDigits(first)}` : `steps ${groupDigits(first)} to ${groupDigits(last)}`;
  return element(
    "li", { class: `finding ${severity}` },
    element("p", {}, element("span", { class: "severity", text: severity }), element("strong", { text: rule }), element("span", { class: "aside", text: ` ${steps}` })),
    element("p", { text }),
    element("p", { class: "aside", text: `Likely cause: ${cause}. Remedy: ${setting}.` }),
  );
}

function tile(label, value, aside) {
  return element("div", { class: "tile" }, element("dt", { text: label }), element("dd", { text: value }), aside ? element("dd", { class: "aside", text: aside }) : null);
}

function fromTo(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? `${shortNumber(known[0])} → ${shortNumber(known[known.length - 1])}` : NOTHING;
}

/** Returns the head of a run's page: name, model, outcome and key numbers. */
function runHead(data) {
  const { run, evaluations, paired, rollouts } = data;
  const tiles = [tile("Reward", fromTo(run.curves.series["reward/mean"] || []), "first and last step")];
  for (const { set, rows } of evaluations.slice(0, 2)) {
    const test = paired.find((each) => each.set === set);
    const aside = test ? test.summary.split(/[:[]/)[0].trim() : plural(rows.length, "evaluation");
    tiles.push(tile(`${set}, pass@1`, fromTo(rows.map((row) => row.values["pass@1"]?.[0] ?? null)), aside));
  }
  const planned = run.planned_steps ? ` of ${groupDigits(run.planned_steps)}` : "";
  tiles.push(
    tile("Optimizer steps", groupDigits(run.steps) + planned, run.outcome ?? "not finished"),
    tile("Completions", groupDigits(rollouts.totals.completions), `in ${plural(rollouts.totals.groups, "group")} of the ledger`),
    tile("Time", duration(run.seconds), run.tokens ? `${groupDigits(run.tokens)} tokens trained on` : null),
  );
  return element(
    "header", { class: "head" },
    element("p", { class: "kicker", text: "GRPO run" }),
    element("h1", { text: run.name }),
    element("p", { class: "lead", text: [run.model, run.dataset, run.outcome ?? "still running, or killed"].filter(Boolean).join(" · ") }),
    element("dl", { class: "tiles" }, tiles),
  );
}

/** Returns the navigation bar: sections of the page, and theme. */
function navigation(sections) {
  return element(
    "nav", { class: "bar-top", "aria-label": "Sections of this report" },
    element("div", { class: "links" }, sections.map(([id, title]) => element("a", { href: `#${id}`, text: title }))),
    themeButton(),
  );
}
