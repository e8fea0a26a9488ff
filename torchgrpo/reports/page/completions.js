// One completion with its prompt, its verdict and its tokens; and one prompt over time.

/** The rows of the columns, each as an object that knows its group and prompt. */
function completionRows(rollouts) {
  const { groups, completions: columns } = rollouts;
  return columns.group.map((group, index) => ({
    index,
    group,
    prompt: groups.prompt[group],
    step: groups.step[group],
    iteration: groups.iteration[group],
    set: groups.set[group],
    source: groups.source[group],
    fate: rollouts.fates[groups.fate[group]],
    sample: columns.sample[index],
    score: columns.score[index],
    success: columns.success[index],
    length: columns.length[index],
    age: columns.age[index],
    advantage: columns.advantage[index],
    finish: rollouts.finishes[columns.finish[index]],
    outcome: rollouts.outcomes[columns.outcome[index]],
    chosen: Boolean(columns.flags[index] & 1),
    inLoss: Boolean(columns.flags[index] & 2),
    text: columns.text[index],
    cut: columns.cut[index],
    parts: columns.parts[index],
    tokens: rollouts.tokens[index],
  }));
}

function isRight(row) {
  return row.success >= 0.5;
}

/** Everything about one completion. `state.by` is what its tokens are coloured by; `open` shows another one. */
function completionDetails(row, rollouts, rows, state, open) {
  const prompt = rollouts.prompts[row.prompt];
  const where = row.set ? `evaluation ${rollouts.sets[row.set]}` : "training";
  const body = element("div", { class: "body" });
  const fill = () => body.replaceChildren(...completionBody(row, rollouts, state, fill));
  fill();
  return element(
    "article", { class: "details", "aria-label": "The chosen completion" },
    element("p", { class: "where", text: `Step ${grouped(row.step)}, ${where}, sample ${row.sample + 1} · data row ${prompt.row ?? NOTHING}` }),
    element("dl", { class: "facts" }, factsOf(row).map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: value })))),
    ...prompt.messages.map(([role, text]) => element("div", { class: "message" },
      element("h4", { text: role }), element("pre", { dir: "auto", text: visible(rollouts.texts[text]) }))),
    element("div", { class: "message" }, element("h4", { text: "gold answer" }), element("pre", { dir: "auto", text: visible(prompt.answer) })),
    body,
    siblingsOf(row, rows, open),
    element("button", { type: "button", text: "This prompt over time", on: { click: () => open(row, "prompt") } }),
  );
}

function factsOf(row) {
  const parts = Object.entries(row.parts).map(([name, value]) => [name, number(value)]);
  const use = row.fate === "trained" ? (row.inLoss ? "in the loss" : row.chosen ? "not in the loss" : "left out") : row.fate;
  return [
    ["reward", row.outcome === "error" ? "error" : number(row.score)], ...parts,
    ["length", `${grouped(row.length)} tokens`], ["ended by", row.finish], ["outcome", row.outcome],
    ["advantage", number(row.advantage)], ["age", number(row.age)], ["use", use],
  ];
}

function completionBody(row, rollouts, state, fill) {
  const heading = element("h4", { text: "completion" });
  const cut = row.cut ? element("p", { class: "aside", text: `${grouped(row.cut)} more characters are not in this report.` }) : null;
  if (!row.tokens) {
    const why = rollouts.no_tokens ? `No tokens: ${rollouts.no_tokens}.` : "Values of each token are kept for some completions only: this is none of them.";
    return [heading, element("pre", { class: "completion", dir: "auto", text: visible(row.text) }), element("p", { class: "aside", text: why }), cut].filter(Boolean);
  }
  const keys = Object.entries(TOKEN_VALUES).map(([key, { title }]) => [key, title]);
  const chooser = choice("Colour tokens by", [...keys, ["none", "nothing"]], state.by, (by) => { state.by = by; fill(); });
  const shown = state.by === "none"
    ? [element("pre", { class: "completion", dir: "auto", text: visible(row.text) })] : colouredTokens(row.tokens, state.by);
  return [heading, chooser, ...shown, cut].filter(Boolean);
}

/** The other completions of the group that are in the report. */
function siblingsOf(row, rows, open) {
  const others = rows.filter((other) => other.group === row.group);
  if (others.length < 2) return null;
  return element(
    "p", { class: "siblings" }, "Same group: ",
    others.map((other) => element("button", {
      type: "button", class: other === row ? "chip current" : "chip", "aria-pressed": String(other === row),
      text: `${other.sample + 1}: ${number(other.score)}`, on: { click: () => open(other) },
    })),
  );
}

/** The success of every group of a prompt, in training and in evaluations. */
function promptCurve(prompt, rollouts, view) {
  const { groups } = rollouts;
  const lines = rollouts.sets.map((set, number) => {
    const mine = groups.prompt.flatMap((each, index) => (each === prompt && groups.set[index] === number && groups.score[index] !== null ? [index] : []));
    const steps = mine.map((index) => groups.step[index]);
    const line = { name: set || "training", x: { step: steps }, y: mine.map((index) => groups.score[index]), dots: true };
    return mine.length ? line : null;
  }).filter(Boolean);
  return curveChart({ title: "This prompt over time", unit: "mean reward of each group", lines, view, height: 130 });
}
