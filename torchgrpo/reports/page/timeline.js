// Who was at work when: a lane for each side of the run, over the wall clock.

const LANE = { height: 22, gap: 8, left: 132, right: 10, foot: 26 };
const LANE_COLOURS = {
  generate: "var(--line-1)", score: "var(--line-5)", collect: "var(--ink-3)", optimize: "var(--line-2)",
  push: "var(--line-4)", evaluate: "var(--line-3)", checkpoint: "var(--ink-2)",
};

function timelineChart({ seconds, lanes }) {
  const plot = element("div", { class: "plot" });
  const state = { from: 0, to: seconds };
  const told = element("p", { class: "pointed" });
  const redraw = whenSeen(plot, () => plot.replaceChildren(timelinePicture(lanes, state, plot.clientWidth, show, told)));
  const buttons = [
    ["Whole run", () => [0, seconds]],
    ["−", () => around(2)],
    ["+", () => around(0.5)],
    ["◀", () => moved(-0.5)],
    ["▶", () => moved(0.5)],
  ].map(([text, range]) => element("button", { type: "button", text, "aria-label": TIMELINE_LABELS[text] ?? text, on: { click: () => show(...range()) } }));
  function around(times) {
    const [middle, half] = [(state.from + state.to) / 2, ((state.to - state.from) / 2) * times];
    return [middle - half, middle + half];
  }
  function moved(share) {
    const by = (state.to - state.from) * share;
    return [state.from + by, state.to + by];
  }
  function show(from, to) {
    const length = Math.min(Math.max(to - from, seconds / 1e5), seconds);
    state.from = Math.min(Math.max(0, from), seconds - length);
    state.to = state.from + length;
    redraw();
  }
  return element("figure", { class: "timeline" }, element("div", { class: "controls" }, buttons), plot, told);
}

const TIMELINE_LABELS = { "−": "Zoom out", "+": "Zoom in", "◀": "Earlier", "▶": "Later" };

function timelinePicture(lanes, state, width, show, told) {
  const narrow = width < 560;
  const left = narrow ? 8 : Math.max(LANE.left, 24 + 6.6 * Math.max(...lanes.map((lane) => lane.title.length)));
  const pitch = LANE.height + LANE.gap + (narrow ? 14 : 0);
  const height = lanes.length * pitch + LANE.foot;
  const x = linear(state.from, state.to, left, width - LANE.right);
  const picture = drawn("svg", { width, height, role: "img", "aria-label": "Who was at work when; a drag shows a range" });
  for (const tick of ticksBetween(state.from, state.to, width / 110)) {
    picture.append(
      drawn("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 0, y2: height - LANE.foot }),
      tickText(Math.max(x(tick), left + 8), height - 8, duration(tick), width),
    );
  }
  lanes.forEach((lane, index) => {
    const top = index * pitch + (narrow ? 14 : 0);
    picture.append(drawn("text", {
      class: "lane-text", x: narrow ? left : left - 10, y: narrow ? top - 3 : top + 15, "text-anchor": narrow ? "start" : "end", text: lane.title,
    }));
    picture.append(drawn("rect", { class: "lane", x: left, y: top, width: width - LANE.right - left, height: LANE.height }));
    const busy = drawn("path", { d: lanePath(lane.segments, x, state, top) });
    busy.style.fill = LANE_COLOURS[lane.key];
    picture.append(busy);
  });
  listenToTimeline(picture, x, height, left, width, show, told);
  return picture;
}

/** The segments of a lane in the range as one path: themselves, or where there are too many, how busy each pixel is. */
function lanePath(segments, x, state, top) {
  const shown = [];
  for (let i = 0; i < segments.length; i += 2) {
    const [from, to] = [segments[i], segments[i] + segments[i + 1]];
    if (to >= state.from && from <= state.to) shown.push([x(Math.max(from, state.from)), x(Math.min(to, state.to))]);
  }
  const [left, right] = [x(state.from), x(state.to)];
  if (shown.length * 3 > right - left) return busyPath(shown, left, right, top + LANE.height);
  return shown.map(([from, to]) => {
    const length = Math.max(0.35, to - from);
    return `M${from.toFixed(2)} ${top}h${length.toFixed(2)}v${LANE.height}h${(-length).toFixed(2)}z`;
  }).join("");
}

/** Columns of a pixel, as high as the share of it that is work. */
function busyPath(shown, left, right, foot) {
  const busy = new Float64Array(Math.ceil(right - left) + 1);
  for (const [from, to] of shown) {
    for (let column = Math.floor(from - left); column <= to - left; column++) {
      busy[column] += Math.max(0, Math.min(to - left, column + 1) - Math.max(from - left, column));
    }
  }
  let path = `M${left} ${foot}`;
  busy.forEach((share, column) => { path += `V${(foot - LANE.height * Math.min(1, share)).toFixed(1)}H${Math.min(right, left + column + 1).toFixed(1)}`; });
  return `${path}V${foot}Z`;
}

function listenToTimeline(picture, x, height, left, width, show, told) {
  const brush = drawn("rect", { class: "brush", y: 0, height: height - LANE.foot, visibility: "hidden" });
  picture.append(brush);
  let pressed = null;
  const place = (event) => Math.min(Math.max(event.offsetX, left), width - LANE.right);
  picture.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse") return;
    pressed = place(event);
    picture.setPointerCapture(event.pointerId);
  });
  picture.addEventListener("pointermove", (event) => {
    const here = place(event);
    told.textContent = `${duration(x.invert(here))} after the start`;
    if (pressed === null) return;
    brush.setAttribute("x", Math.min(pressed, here));
    brush.setAttribute("width", Math.abs(here - pressed));
    brush.setAttribute("visibility", "visible");
  });
  picture.addEventListener("pointerup", (event) => {
    if (pressed === null) return;
    const ends = [pressed, place(event)].sort((a, b) => a - b);
    pressed = null;
    brush.setAttribute("visibility", "hidden");
    if (ends[1] - ends[0] > 6) show(x.invert(ends[0]), x.invert(ends[1]));
  });
  picture.addEventListener("pointerleave", () => { told.textContent = ""; });
}

function shareTable({ seconds, lanes }) {
  return table([
    { title: "Phase", value: (lane) => lane.title },
    { title: "At work while", value: (lane) => lane.meaning },
    { title: "Time", numeric: true, value: (lane) => lane.seconds, show: (lane) => duration(lane.seconds) },
    { title: "Share of the run", numeric: true, value: (lane) => lane.seconds / seconds, show: (lane) => shareBar(lane.seconds / seconds) },
    { title: "Times", numeric: true, value: (lane) => lane.count, show: (lane) => grouped(lane.count) },
  ], lanes, { caption: `Time of each phase in ${duration(seconds)}; phases overlap, so the shares need not sum to 100 %` });
}

function shareBar(share) {
  const bar = element("i", { class: "bar" });
  bar.style.width = `${Math.max(1, 60 * Math.min(1, share))}px`;
  return element("span", { class: "with-bar" }, bar, percent(share));
}
