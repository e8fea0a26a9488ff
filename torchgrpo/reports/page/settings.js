// What the run was told to do, what the doctor finds, and the head of the page.

function settingsSection({ settings, command }) {
  return section(
    "settings", "Settings", "Only what differs from the defaults; presets and config files count as much as the command line.",
    command ? element("pre", { class: "command", text: command }) : null,
    table([
      { title: "Key", value: ([key]) => key, show: ([key]) => element("code", { text: key }) },
      { title: "Here", value: ([, value]) => setting(value), show: ([, value]) => setting(value) },
      { title: "Default", value: ([, , given]) => setting(given), show: ([, , given]) => (given === "???" ? "must be given" : setting(given)) },
    ], settings, { caption: `${plural(settings.length, "setting")} that differ from the defaults` }),
  );
}

function findingsSection({ found, unknown }) {
  const content = found.length
    ? element("ul", { class: "findings" }, found.map(findingEntry))
    : element("p", { class: "empty", text: unknown ? `The doctor could not look: ${unknown}` : "The doctor finds nothing to worry about." });
  return section("findings", "Findings", "What the doctor's rules saw in metrics and rollouts, with a likely cause and the setting that helps.", content);
}

function findingEntry({ rule, severity, first_step: first, last_step: last, text, cause, setting }) {
  const steps = first === last ? `step ${grouped(first)}` : `steps ${grouped(first)} to ${grouped(last)}`;
  return element(
    "li", { class: `finding ${severity}` },
    element("p", {}, element("span", { class: "severity", text: severity }), element("strong", { text: rule }), element("span", { class: "aside", text: ` ${steps}` })),
    element("p", { text }),
    element("p", { class: "aside", text: `Likely cause: ${cause}. What helps: ${setting}.` }),
  );
}

function tile(label, value, aside) {
  return element("div", { class: "tile" }, element("dt", { text: label }), element("dd", { text: value }), aside ? element("dd", { class: "aside", text: aside }) : null);
}

function fromTo(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? `${brief(known[0])} → ${brief(known[known.length - 1])}` : NOTHING;
}

/** The head of one run's page: what it is, how it went. */
function runHead(data) {
  const { run, evaluations, paired, rollouts } = data;
  const tiles = [tile("Reward", fromTo(run.curves.series["reward/mean"] || []), "first and last step")];
  for (const { set, rows } of evaluations.slice(0, 2)) {
    const test = paired.find((each) => each.set === set);
    const told = test ? test.words.split(/[:[]/)[0].trim() : plural(rows.length, "evaluation");
    tiles.push(tile(`${set}, pass@1`, fromTo(rows.map((row) => row.values["pass@1"]?.[0] ?? null)), told));
  }
  const planned = run.planned_steps ? ` of ${grouped(run.planned_steps)}` : "";
  tiles.push(
    tile("Optimizer steps", grouped(run.steps) + planned, run.outcome ?? "no end yet"),
    tile("Completions", grouped(rollouts.of.completions), `in ${plural(rollouts.of.groups, "group")} of the ledger`),
    tile("Time", duration(run.seconds), run.tokens ? `${grouped(run.tokens)} tokens trained on` : null),
  );
  return element(
    "header", { class: "head" },
    element("p", { class: "kicker", text: "GRPO run" }),
    element("h1", { text: run.name }),
    element("p", { class: "lead", text: [run.model, run.dataset, run.outcome ?? "still running, or killed"].filter(Boolean).join(" · ") }),
    element("dl", { class: "tiles" }, tiles),
  );
}

/** The bar that stays: the parts of the page, and the theme. */
function navigation(parts) {
  return element(
    "nav", { class: "bar-top", "aria-label": "Parts of this report" },
    element("div", { class: "links" }, parts.map(([id, title]) => element("a", { href: `#${id}`, text: title }))),
    themeButton(),
  );
}
