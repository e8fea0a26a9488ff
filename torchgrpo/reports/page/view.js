// What all curves of a page have in common: the horizontal axis, the range that is shown, smoothing, the pointer.

const AXES = [["step", "optimizer step"], ["seconds", "time"], ["tokens", "tokens trained on"]];

function sharedView(smoothing) {
  const heard = { change: new Set(), point: new Set() };
  const view = {
    axis: "step",
    range: null, // [from, to] on the axis; null: all
    smoothing, // points on either side of a mean; 0: none
    pointed: null, // where on the axis the pointer is
    lit: null, // the run that is looked at, of several
    on: (event, call) => heard[event].add(call),
    set: (changes) => { Object.assign(view, changes); heard.change.forEach((call) => call()); },
    point: (value) => { view.pointed = value; heard.point.forEach((call) => call()); },
  };
  return view;
}

/** Points on either side of a mean, for a curve of so many. */
function smoothingFor(points) {
  return points > 1000 ? 25 : points > 200 ? 7 : points > 60 ? 2 : 0;
}

/** A value of the axis for a person. */
function placed(view, value) {
  if (view.axis === "seconds") return duration(value);
  return `${view.axis === "tokens" ? "token" : "step"} ${grouped(value)}`;
}

/** The row of controls over the curves. */
function viewControls(view, marks) {
  const from = element("input", { type: "number", step: "any", placeholder: "first" });
  const to = element("input", { type: "number", step: "any", placeholder: "last" });
  const reset = element("button", { type: "button", text: "Whole run", disabled: true });
  const typed = () => {
    const low = from.value === "" ? -Infinity : Number(from.value);
    const high = to.value === "" ? Infinity : Number(to.value);
    if (low < high) view.set({ range: Number.isFinite(low) || Number.isFinite(high) ? [low, high] : null });
  };
  from.addEventListener("change", typed);
  to.addEventListener("change", typed);
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

/** What the ticks beneath a curve stand for, and the lines through it: kinds of events, in order of weight. */
const MARKS = {
  evaluated: { title: "evaluation", colour: "var(--line-1)" },
  checkpoint: { title: "checkpoint", colour: "var(--line-3)" },
  pushed: { title: "weights pushed", colour: "var(--ink-3)" },
  resumed: { title: "resumed", colour: "var(--line-4)", line: true },
  restarted: { title: "restart", colour: "var(--line-4)", line: true },
  dropped: { title: "groups dropped", colour: "var(--line-5)", line: true },
  skipped: { title: "step skipped", colour: "var(--bad)", line: true },
  alarm: { title: "the doctor's findings", colour: "var(--bad)", line: true },
};
const MOST_LINES = 30; // events of a kind that get a line through the curve; more are ticks alone

function markLegend(marks) {
  const counts = new Map();
  for (const mark of marks) if (MARKS[mark.kind]) counts.set(mark.kind, (counts.get(mark.kind) || 0) + 1);
  const entries = Object.keys(MARKS).filter((kind) => counts.has(kind)).map((kind) => {
    const sign = element("i", { class: MARKS[kind].line ? "tick through" : "tick" });
    sign.style.background = MARKS[kind].colour;
    const crowded = counts.get(kind) > 60 ? ", seen in a shorter range" : "";
    return element("span", {}, sign, `${MARKS[kind].title} (${grouped(counts.get(kind))}${crowded})`);
  });
  return element("p", { class: "marks" }, entries);
}
