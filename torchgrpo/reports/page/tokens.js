// Tokens of a completion, coloured by advantage, log-ratio or entropy.

const TOKEN_VALUES = {
  advantage: { title: "Advantage", scale: "diverging", how: "blue tokens become more likely, orange tokens less likely" },
  log_ratio: { title: "Log-ratio", scale: "diverging", how: "trainer log-prob minus engine log-prob; 0 if both agree" },
  entropy: { title: "Entropy", scale: "sequential", how: "entropy of the next-token distribution, in nats" },
};

/** Returns the colour scale and the coloured tokens; `by` is a key of TOKEN_VALUES. */
function colouredTokens(tokens, by, limit) {
  const values = tokens.strings.map((string, index) => (Array.isArray(tokens[by]) ? tokens[by][index] : tokens[by] ?? null));
  const known = values.filter((value) => value !== null && value !== undefined).map(Math.abs);
  const maximum = limit ?? (Math.max(...known, 0) || 1);
  const block = element("pre", { class: "completion tokens", dir: "auto" });
  tokens.strings.forEach((string, index) => {
    const isSampled = !tokens.sampled || tokens.sampled[index];
    const token = element("span", { class: isSampled ? "token" : "token environment", title: tokenTitle(tokens, index), text: visible(string) });
    if (isSampled && values[index] !== null && values[index] !== undefined) token.style.backgroundColor = tokenColour(by, values[index] / maximum);
    block.append(token);
  });
  return [tokenScale(by, maximum, tokens), block];
}

function tokenTitle(tokens, index) {
  const values = Object.entries(TOKEN_VALUES).map(([name, { title }]) => {
    const value = Array.isArray(tokens[name]) ? tokens[name][index] : tokens[name];
    return value === undefined || value === null ? null : `${title.toLowerCase()} ${number(value)}`;
  });
  const source = tokens.sampled && !tokens.sampled[index] ? "written by the environment" : null;
  return [`token ${index + 1}`, source, ...values].filter(Boolean).join(", ");
}

/** Returns the colour for a share of the largest value, -1 to 1; text stays readable in both themes. */
function tokenColour(by, share) {
  const strength = Math.round(Math.min(1, Math.abs(share)) * 100);
  const name = TOKEN_VALUES[by].scale === "sequential" ? "--token-high" : share < 0 ? "--token-low" : "--token-high";
  return `color-mix(in srgb, var(${name}) ${strength}%, transparent)`;
}

function tokenScale(by, maximum, tokens) {
  const { title, scale, how } = TOKEN_VALUES[by];
  const ends = scale === "sequential" ? [0, 0.25, 0.5, 0.75, 1] : [-1, -0.5, 0, 0.5, 1];
  const steps = ends.map((share) => {
    const step = element("i", { title: number(share * maximum) });
    step.style.backgroundColor = tokenColour(by, share);
    return step;
  });
  if (tokens[by] === undefined) return element("p", { class: "aside", text: `${title} is unknown, because no optimizer step trained on this completion.` });
  return element(
    "p", { class: "scale" }, element("span", { text: number(ends[0] * maximum) }), element("span", { class: "steps" }, steps),
    element("span", { text: number(maximum) }), element("span", { class: "aside", text: `${title}: ${how}.` }),
  );
}
