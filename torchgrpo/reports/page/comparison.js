// Pages of several runs: a comparison of chosen runs, or a sweep.

function comparisonHead(kicker, title, lead) {
  return element("header", { class: "head" }, element("p", { class: "kicker", text: kicker }), element("h1", { text: title }), element("p", { class: "lead", text: lead }));
}

function runSign(index, name) {
  return element("span", { class: "run-name" }, lineSign(index), name);
}

function comparisonPage(data) {
  const { runs, layout, settings, evaluations, paired } = data;
  const names = runs.map((run) => run.name);
  const view = sharedView(smoothingFor(Math.max(...runs.map((run) => run.curves.x.step.length), 0)));
  const indices = runs.map((run, index) => index);
  const overview = table([
    { title: "Run", value: (index) => names[index], show: (index) => runSign(index, names[index]) },
    { title: "Outcome", value: (index) => runs[index].outcome ?? "not finished" },
    { title: "Steps", numeric: true, value: (index) => runs[index].steps },
    { title: "Reward, first → last", value: (index) => fromTo(runs[index].curves.series["reward/mean"] || []), numeric: true },
    { title: "Time", numeric: true, value: (index) => runs[index].seconds, show: (index) => duration(runs[index].seconds) },
  ], indices, { caption: `${plural(runs.length, "run")}; point at a row to highlight its curves`, onHover: (index) => view.set({ highlighted: index }) });
  return [
    navigation([["runs", "Runs"], ["curves", "Curves"], ["evaluations", "Evaluations"], ["settings", "Settings"]]),
    comparisonHead("GRPO comparison", plural(runs.length, "run"), names.join(" · ")),
    section("runs", "Runs", null, overview),
    section("curves", "Curves", "Each chart shows one metric of all runs; a drag over a chart selects a range in all charts.",
      viewControls(view, []), curveSections(layout, runs, view, [])),
    comparedEvaluations(names, evaluations, paired),
    section("settings", "Settings", "Settings that differ between the runs.", comparedSettings(names, settings)),
  ];
}

function comparedSettings(names, settings) {
  return table([
    { title: "Key", value: ([key]) => key, show: ([key]) => element("code", { text: key }) },
    ...names.map((name, index) => ({ title: name, value: (row) => setting(row[index + 1]) })),
  ], settings, { caption: settings.length ? `${plural(settings.length, "setting")} that differ` : "The runs have the same settings" });
}

/** Returns the last evaluation of each run side by side, for each set. */
function comparedEvaluations(names, evaluations, paired) {
  const sets = [...new Set(evaluations.flat().map((each) => each.set))];
  if (!sets.length) return section("evaluations", "Evaluations", null, element("p", { class: "empty", text: "None of the runs was evaluated." }));
  const tables = sets.map((set) => {
    const last = evaluations.map((tables) => tables.find((each) => each.set === set)?.rows.slice(-1)[0] ?? null);
    const metrics = [...new Set(evaluations.flat().filter((each) => each.set === set).flatMap((each) => each.names))];
    return table([
      { title: "Metric", value: (name) => name },
      ...names.map((name, index) => ({
        title: name, numeric: true, value: (metric) => last[index]?.values[metric]?.[0] ?? null,
        show: (metric) => (last[index]?.values[metric] ? intervalText(last[index].values[metric]) : NOTHING),
      })),
    ], metrics, { caption: `${set}: the last evaluation of each run, with 95 % intervals over problems` });
  });
  return section("evaluations", "Evaluations", "Paired tests use the problems that both runs have. Overlapping intervals are inconclusive; the paired test decides.",
    paired.map((test) => pairedText(test, names)), tables);
}

function sweepPage(data) {
  const { columns, results, rows, runs, layout } = data;
  const place = new Map(runs.map((run, index) => [run.name, index]));
  const view = sharedView(smoothingFor(Math.max(...runs.map((run) => run.curves.x.step.length), 0)));
  const seconds = (name, value) => (name === "seconds" ? duration(value) : typeof value === "number" ? number(value) : value ?? NOTHING);
  const summary = table([
    { title: "Run", value: (row) => row.run, show: (row) => sweptName(row, place) },
    ...columns.map((name) => ({ title: name, value: (row) => asNumber(row.overrides[name]), show: (row) => row.overrides[name] ?? NOTHING })),
    ...results.map((name) => ({ title: name.replace("_", " "), numeric: name !== "outcome", value: (row) => row.results[name] ?? null, show: (row) => seconds(name, row.results[name] ?? null) })),
  ], rows, { caption: `${plural(rows.length, "run")} of this sweep; as in summary.csv. Point at a row to highlight its curves`, onHover: (row) => view.set({ highlighted: row ? place.get(row.run) ?? null : null }) });
  const common = data.common.length ? element("p", { class: "aside" }, "Same in all runs: ", element("code", { text: data.common.join(" ") })) : null;
  return [
    navigation([["runs", "Runs"], ["curves", "Curves"]]),
    comparisonHead("GRPO sweep", data.name, plural(rows.length, "run")),
    section("runs", "Runs", "Each row is a run; click a heading to sort.", summary, common),
    section("curves", "Curves", "Each chart shows one metric of all runs; a drag over a chart selects a range in all charts.",
      viewControls(view, []), curveSections(layout, runs, view, [])),
  ];
}

function sweptName(row, place) {
  const name = row.report ? element("a", { href: `${row.run}/report.html`, text: row.run }) : row.run;
  return place.has(row.run) ? runSign(place.get(row.run), name) : name;
}

/** Converts numeric text to a number, for sorting. */
function asNumber(text) {
  return text !== undefined && text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}
