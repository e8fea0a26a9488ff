// Timeline of busy intervals: a row for each engine and phase of the run, over wall-clock time.

const TIMELINE = { height: 22, gap: 8, left: 132, right: 10, foot: 26 };
const ROW_COLOURS = {
  generate: "var(--line-1)", score: "var(--line-5)", collect: "var(--ink-3)", optimize: "var(--line-2)",
  push: "var(--line-4)", evaluate: "var(--line-3)", checkpoint: "var(--ink-2)",
};

function timelineChart({ seconds, rows }) {
  const plot = element("div", { class: "plot" });
  const state = { from: 0, to: seconds };
  const caption = element("p", { class: "pointer-text" });
  const redraw = drawWhenVisible(plot, () => plot.replaceChildren(timelinePicture(rows, state, plot.clientWidth, show, caption)));
  const buttons = [
    ["Whole run", () => [0, seconds]],
    ["−", () => around(2)],
    ["+", () => around(0.5)],
    ["◀", () => shifted(-0.5)],
    ["▶", () => shifted(0.5)],
  ].map(([text, range]) => element("button", { type: "button", text, "aria-label": TIMELINE_LABELS[text] ?? text, on: { click: () => show(...range()) } }));
  function around(times) {
    const [middle, half] = [(state.from + state.to) / 2, ((state.to - state.from) / 2) * times];
    return [middle - half, middle + half];
  }
  function shifted(share) {
    const by = (state.to - state.from) * share;
    return [state.from + by, state.to + by];
  }
  function show(from, to) {
    const length = Math.min(Math.max(to - from, seconds / 1e5), seconds);
    state.from = Math.min(Math.max(0, from), seconds - length);
    state.to = state.from + length;
    redraw();
  }
  return element("figure", { class: "timeline" }, element("div", { class: "controls" }, buttons), plot, caption);
}

const TIMELINE_LABELS = { "−": "Zoom out", "+": "Zoom in", "◀": "Earlier", "▶": "Later" };

function timelinePicture(rows, state, width, show, caption) {
  const narrow = width < 560;
  const left = narrow ? 8 : Math.max(TIMELINE.left, 24 + 6.6 * Math.max(...rows.map((row) => row.title.length)));
  const pitch = TIMELINE.height + TIMELINE.gap + (narrow ? 14 : 0);
  const height = rows.length * pitch + TIMELINE.foot;
  const x = linear(state.from, state.to, left, width - TIMELINE.right);
  const picture = svgElement("svg", { width, height, role: "img", "aria-label": "Busy intervals over time; a drag selects a range" });
  for (const tick of ticksBetween(state.from, state.to, width / 110)) {
    picture.append(
      svgElement("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 0, y2: height - TIMELINE.foot }),
      tickText(Math.max(x(tick), left + 8), height - 8, duration(tick), width),
    );
  }
  rows.forEach((row, index) => {
    const top = index * pitch + (narrow ? 14 : 0);
    picture.append(svgElement("text", {
      class: "row-title", x: narrow ? left : left - 10, y: narrow ? top - 3 : top + 15, "text-anchor": narrow ? "start" : "end", text: row.title,
    }));
    picture.append(svgElement("rect", { class: "row-track", x: left, y: top, width: width - TIMELINE.right - left, height: TIMELINE.height }));
    const busy = svgElement("path", { d: rowPath(row.segments, x, state, top) });
    busy.style.fill = ROW_COLOURS[row.key];
    picture.append(busy);
  });
  listenToTimeline(picture, x, height, left, width, show, caption);
  return picture;
}

/** Returns the path of a row's segments in the range; with too many segments, a column per pixel shows its busy share. */
function rowPath(segments, x, state, top) {
  const shown = [];
  for (let i = 0; i < segments.length; i += 2) {
    const [from, to] = [segments[i], segments[i] + segments[i + 1]];
    if (to >= state.from && from <= state.to) shown.push([x(Math.max(from, state.from)), x(Math.min(to, state.to))]);
  }
  const [left, right] = [x(state.from), x(state.to)];
  if (shown.length * 3 > right - left) return busyPath(shown, left, right, top + TIMELINE.height);
  return shown.map(([from, to]) => {
    const length = Math.max(0.35, to - from);
    return `M${from.toFixed(2)} ${top}h${length.toFixed(2)}v${TIMELINE.height}h${(-length).toFixed(2)}z`;
  }).join("");
}

/** Returns a path with one column per pixel, as high as the busy share of the pixel. */
function busyPath(shown, left, right, foot) {
  const busy = new Float64Array(Math.ceil(right - left) + 1);
  for (const [from, to] of shown) {
    for (let column = Math.floor(from - left); column <= to - left; column++) {
      busy[column] += Math.max(0, Math.min(to - left, column + 1) - Math.max(from - left, column));
    }
  }
  let path = `M${left} ${foot}`;
  busy.forEach((share, column) => { path += `V${(foot - TIMELINE.height * Math.min(1, share)).toFixed(1)}H${Math.min(right, left + column + 1).toFixed(1)}`; });
  return `${path}V${foot}Z`;
}

function listenToTimeline(picture, x, height, left, width, show, caption) {
  const brush = svgElement("rect", { class: "brush", y: 0, height: height - TIMELINE.foot, visibility: "hidden" });
  picture.append(brush);
  let dragStart = null;
  const place = (event) => Math.min(Math.max(event.offsetX, left), width - TIMELINE.right);
  picture.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse") return;
    dragStart = place(event);
    picture.setPointerCapture(event.pointerId);
  });
  picture.addEventListener("pointermove", (event) => {
    const here = place(event);
    caption.textContent = `${duration(x.invert(here))} after the start`;
    if (dragStart === null) return;
    brush.setAttribute("x", Math.min(dragStart, here));
    brush.setAttribute("width", Math.abs(here - dragStart));
    brush.setAttribute("visibility", "visible");
  });
  picture.addEventListener("pointerup", (event) => {
    if (dragStart === null) return;
    const ends = [dragStart, place(event)].sort((a, b) => a - b);
    dragStart = null;
    brush.setAttribute("visibility", "hidden");
    if (ends[1] - ends[0] > 6) show(x.invert(ends[0]), x.invert(ends[1]));
  });
  picture.addEventListener("pointerleave", () => { caption.textContent = ""; });
}

function shareTable({ seconds, rows }) {
  return table([
    { title: "Phase", value: (row) => row.title },
    { title: "Busy while", value: (row) => row.meaning },
    { title: "Time", numeric: true, value: (row) => row.seconds, show: (row) => duration(row.seconds) },
    { title: "Share of the run", numeric: true, value: (row) => row.seconds / seconds, show: (row) => shareBar(row.seconds / seconds) },
    { title: "Intervals", numeric: true, value: (row) => row.count, show: (row) => groupDigits(row.count) },
  ], rows, { caption: `Busy time of each phase in ${duration(seconds)}; phases overlap, so the shares may not sum to 100 %` });
}

function shareBar(share) {
  const bar = element("i", { class: "bar" });
  bar.style.width = `${Math.max(1, 60 * Math.min(1, share))}px`;
  return element("span", { class: "with-bar" }, bar, percent(share));
}
