// Tokens of a completion, coloured by advantage, log-ratio or entropy.

const TOKEN_VALUES = {
  advantage: { title: "Advantage", scale: "diverging", how: "blue tokens become more likely, orange tokens less likely" },
  log_ratio: { title: "Log-ratio", scale: "diverging", how: "trainer log-prob minus engine log-prob; 0 if both agree" },
  entropy: { title: "Entropy", scale: "sequential", how: "entropy of the next-token distribution, in nats" },
};

/** Returns the value of a token; `by` is a key of TOKEN_VALUES. */
function tokenValue(tokens, by, index) {
  return (Array.isArray(tokens[by]) ? tokens[by][index] : tokens[by]) ?? null;
}

/** Returns the largest absolute value of the tokens, or 1. */
function largestTokenValue(tokens, by) {
  const known = tokens.strings.map((string, index) => tokenValue(tokens, by, index)).filter((value) => value !== null);
  return Math.max(...known.map(Math.abs), 0) || 1;
}

/** Returns the coloured tokens from one index to another. `maximum`: value of the strongest colour. */
function colouredTokens(tokens, by, maximum, from = 0, to = tokens.strings.length) {
  const block = element("pre", { class: "completion tokens", dir: "auto" });
  for (let index = from; index < to; index += 1) {
    const isSampled = !tokens.sampled || tokens.sampled[index];
    const token = element("span", { class: isSampled ? "token" : "token environment", title: tokenTitle(tokens, index), text: visible(tokens.strings[index]) });
    const value = tokenValue(tokens, by, index);
    if (isSampled && value !== null) token.style.backgroundColor = tokenColour(by, value / maximum);
    block.append(token);
  }
  return block;
}

function tokenTitle(tokens, index) {
  const values = Object.entries(TOKEN_VALUES).map(([name, { title }]) => {
    const value = tokenValue(tokens, name, index);
    return value === null ? null : `${title.toLowerCase()} ${number(value)}`;
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
