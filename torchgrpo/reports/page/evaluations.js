// Tables of evaluations with intervals, and results of paired tests.

function intervalText([value, low, high]) {
  return low === null ? shortNumber(value) : `${shortNumber(value)} [${shortNumber(low)}, ${shortNumber(high)}]`;
}

function evaluationTable({ set, names, rows }) {
  return table([
    { title: "Iteration", numeric: true, value: (row) => row.iteration },
    { title: "Step", numeric: true, value: (row) => row.step },
    ...names.map((name) => ({
      title: name, numeric: true, value: (row) => row.values[name]?.[0] ?? null,
      show: (row) => (row.values[name] ? intervalText(row.values[name]) : NOTHING),
    })),
  ], rows, { caption: `${set}: all evaluations, with 95 % intervals over problems` });
}

/** Returns a test result such as "held_out: improved by 71.2 points [..], p < 0.001, over 200 problems". */
function pairedText(paired, names = null) {
  const between = names ? `${names[paired.run]} against ${names[0]}` : `iteration ${paired.from} to ${paired.to}`;
  const isSignificant = !paired.summary.startsWith("not significant") && !paired.summary.startsWith("no ");
  return element(
    "p", { class: `paired ${isSignificant ? (paired.difference > 0 ? "better" : "worse") : "unsure"}` },
    element("strong", { text: paired.set }), ` ${between}: ${paired.summary}`,
    element("span", { class: "aside", text: ` (paired t-test over ${plural(paired.problems, "problem")})` }),
  );
}

function evaluationSection(data, view) {
  const { evaluations, paired, run } = data;
  if (!evaluations.length) {
    return section("evaluations", "Evaluations", null, element("p", { class: "empty", text: "This run has no evaluation; set eval.sets to evaluate held-out problems." }));
  }
  const content = evaluations.flatMap((each) => {
    const shown = each.names.filter((name) => /^(pass@|score)/.test(name));
    const lines = shown.map((name) => metricLine(run, `eval/${each.set}/${name}`, { name })).filter(Boolean);
    const tests = paired.filter((test) => test.set === each.set);
    return [
      tests.map((test) => pairedText(test)),
      lines.length ? element("div", { class: "charts wide" }, curveChart({ title: each.set, unit: "share of problems; score: mean reward", lines, view, height: 190 })) : null,
      evaluationTable(each),
    ];
  });
  return section(
    "evaluations", "Evaluations",
    "Held-out problems, with 95 % intervals. Two evaluations differ significantly only if the paired test is significant.",
    ...content.flat(),
  );
}
