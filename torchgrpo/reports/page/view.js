// View that all curves of a page share: horizontal axis, visible range, smoothing, pointer position.

const AXES = [["step", "optimizer step"], ["seconds", "time"], ["tokens", "tokens trained on"]];

function sharedView(smoothing) {
  const listeners = { change: new Set(), point: new Set() };
  const view = {
    axis: "step",
    range: null, // [from, to] on the axis; null: the whole run
    smoothing, // points on each side of a moving mean; 0: no smoothing
    pointer: null, // position of the pointer on the axis
    highlighted: null, // index of the highlighted run, of several
    on: (event, call) => listeners[event].add(call),
    set: (changes) => { Object.assign(view, changes); listeners.change.forEach((call) => call()); },
    point: (value) => { view.pointer = value; listeners.point.forEach((call) => call()); },
  };
  return view;
}

/** Returns the points on each side of a moving mean, for the number of points of a curve. */
function smoothingFor(points) {
  return points > 1000 ? 25 : points > 200 ? 7 : points > 60 ? 2 : 0;
}

/** Returns a value of the axis as text. */
function axisText(view, value) {
  if (view.axis === "seconds") return duration(value);
  return `${view.axis === "tokens" ? "token" : "step"} ${groupDigits(value)}`;
}

/** Returns the controls above the curves. */
function viewControls(view, marks) {
  const from = element("input", { type: "number", step: "any", placeholder: "first" });
  const to = element("input", { type: "number", step: "any", placeholder: "last" });
  const reset = element("button", { type: "button", text: "Whole run", disabled: true });
  const applyRange = () => {
    const low = from.value === "" ? -Infinity : Number(from.value);
    const high = to.value === "" ? Infinity : Number(to.value);
    if (low < high) view.set({ range: Number.isFinite(low) || Number.isFinite(high) ? [low, high] : null });
  };
  from.addEventListener("change", applyRange);
  to.addEventListener("change", applyRange);
  reset.addEventListener("click", () => view.set({ range: null }));
  view.on("change", () => {
    reset.disabled = view.range === null;
    [from.value, to.value] = (view.range || []).concat(["", ""]).map((end) => (Number.isFinite(end) && end !== "" ? Number(end.toPrecision(6)) : ""));
  });
  return element(
    "div", { class: "controls" },
    choice("Along", AXES, view.axis, (axis) => view.set({ axis, range: null })),
    choice("Smoothing", [["0", "none"], ["2", "5 points"], ["7", "15 points"], ["25", "51 points"]], String(view.smoothing),
      (points) => view.set({ smoothing: Number(points) })),
    element("fieldset", { class: "field" }, element("legend", { text: "From, to" }), from, to),
    reset,
    marks.length ? markLegend(marks) : null,
  );
}

/** Kinds of events that the curves mark, in drawing order: ticks below the curve, for some kinds a line through it. */
const MARKS = {
  evaluation: { title: "evaluation", colour: "var(--line-1)" },
  checkpoint: { title: "checkpoint", colour: "var(--line-3)" },
  weight_push: { title: "weights pushed", colour: "var(--ink-3)" },
  resume: { title: "resumed", colour: "var(--line-4)", line: true },
  restart: { title: "restart", colour: "var(--line-4)", line: true },
  stale_groups: { title: "stale groups dropped", colour: "var(--line-5)", line: true },
  skipped_step: { title: "step skipped", colour: "var(--bad)", line: true },
  alarm: { title: "findings of the diagnostics", colour: "var(--bad)", line: true },
};
const MAX_LINES = 30; // maximum events of a kind with a line through the curve; more events have ticks only

function markLegend(marks) {
  const counts = new Map();
  for (const mark of marks) if (MARKS[mark.kind]) counts.set(mark.kind, (counts.get(mark.kind) || 0) + 1);
  const entries = Object.keys(MARKS).filter((kind) => counts.has(kind)).map((kind) => {
    const sign = element("i", { class: MARKS[kind].line ? "tick through" : "tick" });
    sign.style.background = MARKS[kind].colour;
    const hint = counts.get(kind) > 60 ? ", visible in a shorter range" : "";
    return element("span", {}, sign, `${MARKS[kind].title} (${groupDigits(counts.get(kind))}${hint})`);
  });
  return element("p", { class: "marks" }, entries);
}
