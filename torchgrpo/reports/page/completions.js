// Details of one completion with prompt, reward and tokens; success of one prompt over time.

/** Returns the columns of completions as row objects with the values of their groups. */
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
    finish: rollouts.finish_reasons[columns.finish[index]],
    outcome: rollouts.outcomes[columns.outcome[index]],
    chosen: Boolean(columns.flags[index] & 1),
    inLoss: Boolean(columns.flags[index] & 2),
    chat: rollouts.chats[index],
    text: rollouts.chats[index] ? chatText(rollouts.chats[index]) : columns.text[index],
    numCutCharacters: columns.num_cut_characters[index],
    components: columns.components[index],
    tokens: rollouts.tokens[index],
  }));
}

function isRight(row) {
  return row.success >= 0.5;
}

/** Returns the details of one completion. `state.by`: value that colours the tokens. `open` shows another completion. */
function completionDetails(row, rollouts, rows, state, open) {
  const prompt = rollouts.prompts[row.prompt];
  const where = row.set ? `evaluation ${rollouts.sets[row.set]}` : "training";
  const body = element("div", { class: "body" });
  const fill = () => body.replaceChildren(...completionBody(row, rollouts, state, fill));
  fill();
  return element(
    "article", { class: "details", "aria-label": "Selected completion" },
    element("p", { class: "where", text: `Step ${groupDigits(row.step)}, ${where}, sample ${row.sample + 1} · data row ${prompt.row ?? NOTHING}` }),
    element("dl", { class: "facts" }, factsOf(row).map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: value })))),
    ...prompt.messages.map(([role, text]) => element("div", { class: "message" },
      element("h4", { text: role }), element("pre", { dir: "auto", text: visible(rollouts.texts[text]) }))),
    element("div", { class: "message" }, element("h4", { text: "reference answer" }), element("pre", { dir: "auto", text: visible(prompt.answer) })),
    body,
    siblingsOf(row, rows, open),
    element("button", { type: "button", text: "This prompt over time", on: { click: () => open(row, "prompt") } }),
  );
}

function factsOf(row) {
  const components = Object.entries(row.components).map(([name, value]) => [name, number(value)]);
  const use = row.fate === "trained" ? (row.inLoss ? "in the loss" : row.chosen ? "not in the loss" : "unselected candidate") : row.fate;
  const turns = row.chat ? [["turns", groupDigits(row.chat.turns.length)], ["sequences", groupDigits(row.chat.sequences)]] : [];
  return [
    ["reward", row.outcome === "error" ? "error" : number(row.score)], ...components,
    ["length", `${groupDigits(row.length)} tokens`], ...turns, ["ended by", row.finish], ["outcome", row.outcome],
    ["advantage", number(row.advantage)], ["age", number(row.age)], ["use", use],
  ];
}

function completionBody(row, rollouts, state, fill) {
  const heading = element("h4", { text: row.chat ? "episode" : "completion" });
  const cut = row.numCutCharacters ? element("p", { class: "aside", text: `${groupDigits(row.numCutCharacters)} more characters are not in this report.` }) : null;
  const text = () => (row.chat ? chatTurns(row.chat) : element("pre", { class: "completion", dir: "auto", text: visible(row.text) }));
  if (!row.tokens) {
    const reason = rollouts.missing_tokens_reason ? `No tokens: ${rollouts.missing_tokens_reason}.` : "The report has token values for some completions only, not for this one.";
    return [heading, text(), element("p", { class: "aside", text: reason }), cut].filter(Boolean);
  }
  const keys = Object.entries(TOKEN_VALUES).map(([key, { title }]) => [key, title]);
  const chooser = choice("Colour tokens by", [...keys, ["none", "nothing"]], state.by, (by) => { state.by = by; fill(); });
  if (state.by === "none") return [heading, chooser, text(), cut].filter(Boolean);
  const maximum = largestTokenValue(row.tokens, state.by);
  const colour = (from, to) => colouredTokens(row.tokens, state.by, maximum, from, to);
  return [heading, chooser, tokenScale(state.by, maximum, row.tokens), row.chat ? chatTurns(row.chat, colour) : colour(), cut].filter(Boolean);
}

/** Returns buttons for the completions of the same group in the report. */
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

/** Returns the chart of the mean reward of a prompt's groups, in training and in evaluations. */
function promptCurve(prompt, rollouts, view) {
  const { groups } = rollouts;
  const lines = rollouts.sets.map((set, number) => {
    const indices = groups.prompt.flatMap((each, index) => (each === prompt && groups.set[index] === number && groups.score[index] !== null ? [index] : []));
    const steps = indices.map((index) => groups.step[index]);
    const line = { name: set || "training", x: { step: steps }, y: indices.map((index) => groups.score[index]), dots: true };
    return indices.length ? line : null;
  }).filter(Boolean);
  return curveChart({ title: "This prompt over time", unit: "mean reward of each group", lines, view, height: 130 });
}
