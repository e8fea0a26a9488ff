// The tokens of a completion, coloured by what the learner knew of each.

const TOKEN_VALUES = {
  advantage: { title: "Advantage", scale: "diverging", how: "how much each token is encouraged (blue) or discouraged (orange)" },
  log_ratio: { title: "Log-ratio", scale: "diverging", how: "trainer's log-probability less the engine's: 0 where both agree" },
  entropy: { title: "Entropy", scale: "sequential", how: "nats: how open the choice was" },
};

/** The tokens with colours, and the scale; `by` is a key of TOKEN_VALUES. */
function colouredTokens(tokens, by, limit) {
  const values = tokens.pieces.map((piece, index) => (Array.isArray(tokens[by]) ? tokens[by][index] : tokens[by] ?? null));
  const known = values.filter((value) => value !== null && value !== undefined).map(Math.abs);
  const most = limit ?? (Math.max(...known, 0) || 1);
  const block = element("pre", { class: "completion tokens", dir: "auto" });
  tokens.pieces.forEach((piece, index) => {
    const own = !tokens.sampled || tokens.sampled[index];
    const token = element("span", { class: own ? "token" : "token given", title: tokenTitle(tokens, index), text: visible(piece) });
    if (own && values[index] !== null && values[index] !== undefined) token.style.backgroundColor = tokenColour(by, values[index] / most);
    block.append(token);
  });
  return [tokenScale(by, most, tokens), block];
}

function tokenTitle(tokens, index) {
  const parts = Object.entries(TOKEN_VALUES).map(([name, { title }]) => {
    const value = Array.isArray(tokens[name]) ? tokens[name][index] : tokens[name];
    return value === undefined || value === null ? null : `${title.toLowerCase()} ${number(value)}`;
  });
  const own = tokens.sampled && !tokens.sampled[index] ? "written by the environment" : null;
  return [`token ${index + 1}`, own, ...parts].filter(Boolean).join(", ");
}

/** A colour for a share of the largest value, -1 to 1. Text stays readable on it in both themes. */
function tokenColour(by, share) {
  const strength = Math.round(Math.min(1, Math.abs(share)) * 100);
  const name = TOKEN_VALUES[by].scale === "sequential" ? "--token-high" : share < 0 ? "--token-low" : "--token-high";
  return `color-mix(in srgb, var(${name}) ${strength}%, transparent)`;
}

function tokenScale(by, most, tokens) {
  const { title, scale, how } = TOKEN_VALUES[by];
  const ends = scale === "sequential" ? [0, 0.25, 0.5, 0.75, 1] : [-1, -0.5, 0, 0.5, 1];
  const steps = ends.map((share) => {
    const step = element("i", { title: number(share * most) });
    step.style.backgroundColor = tokenColour(by, share);
    return step;
  });
  if (tokens[by] === undefined) return element("p", { class: "aside", text: `${title} is not known of this completion: no step trained on it.` });
  return element(
    "p", { class: "scale" }, element("span", { text: number(ends[0] * most) }), element("span", { class: "steps" }, steps),
    element("span", { text: number(most) }), element("span", { class: "aside", text: `${title}: ${how}.` }),
  );
}
