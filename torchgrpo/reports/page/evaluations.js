// Evaluations as numbers with intervals, and what the paired test says.

function intervalText([value, low, high]) {
  return low === null ? brief(value) : `${brief(value)} [${brief(low)}, ${brief(high)}]`;
}

function evaluationTable({ set, names, rows }) {
  return table([
    { title: "Iteration", numeric: true, value: (row) => row.iteration },
    { title: "Step", numeric: true, value: (row) => row.step },
    ...names.map((name) => ({
      title: name, numeric: true, value: (row) => row.values[name]?.[0] ?? null,
      show: (row) => (row.values[name] ? intervalText(row.values[name]) : NOTHING),
    })),
  ], rows, { caption: `${set}: every evaluation, with 95 % intervals over problems` });
}

/** "held_out: improved by 71.2 points [..], p < 0.001, over 200 problems". */
function pairedText(paired, names = null) {
  const between = names ? `${names[paired.run]} against ${names[0]}` : `iteration ${paired.from} to ${paired.to}`;
  const sure = !paired.words.startsWith("not significant") && !paired.words.startsWith("no ");
  return element(
    "p", { class: `paired ${sure ? (paired.difference > 0 ? "better" : "worse") : "unsure"}` },
    element("strong", { text: paired.set }), ` ${between}: ${paired.words}`,
    element("span", { class: "aside", text: ` (paired t-test over ${plural(paired.problems, "problem")})` }),
  );
}

function evaluationSection(data, view) {
  const { evaluations, paired, run } = data;
  if (!evaluations.length) {
    return section("evaluations", "Evaluations", null, element("p", { class: "empty", text: "No evaluation in this run: eval.sets names held-out problems." }));
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
    "Held-out problems, with 95 % intervals. Two evaluations differ for sure only where the paired test says so.",
    ...content.flat(),
  );
}
