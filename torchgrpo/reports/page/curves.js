// Event marks and pointer of the curves, and the sections of charts.

/** Returns the position of an optimizer step on the axis, from the rows of the line's run. */
function placeOfStep(line, view, step) {
  if (view.axis === "step") return step;
  const steps = line.x.step;
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return steps.length ? line.x[view.axis][low] : null;
}

/** Returns the marks of events: ticks below the plot, lines through it for rare and serious events. */
function marksOf(chart, scale) {
  const { marks, view, height } = chart;
  const curve = chart.lines.find((line) => !line.dots) || chart.lines[0];
  chart.places = [];
  const paths = {};
  const foot = height - EDGE.bottom;
  for (const [kind, look] of Object.entries(MARKS)) {
    const matching = marks.filter((mark) => mark.kind === kind)
      .map((mark) => ({ text: mark.text, place: placeOfStep(curve, view, mark.step) }))
      .filter(({ place }) => place !== null && place >= scale.x.from && place <= scale.x.to);
    if (matching.length * 5 > scale.width) continue; // too dense to read; a shorter range shows these marks
    const through = look.line && matching.length <= MAX_LINES;
    for (const mark of matching) {
      const x = scale.x(mark.place).toFixed(1);
      paths[kind] = (paths[kind] || "") + (through ? `M${x} ${EDGE.top}V${foot + 7}` : `M${x} ${foot + 1}v6`);
      chart.places.push({ x: Number(x), text: mark.text });
    }
  }
  return Object.entries(paths).map(([kind, d]) => {
    const path = svgElement("path", { class: "mark", d });
    path.style.stroke = MARKS[kind].colour;
    return path;
  });
}

function nearest(points, value) {
  let best = null;
  for (const point of points) if (best === null || Math.abs(point.x - value) < Math.abs(best.x - value)) best = point;
  return best;
}

/** Shows the values at the pointer, or the last values without a pointer. */
function showPointerValues(chart) {
  const { view, scale, shown, values, cross, caption } = chart;
  const at = view.pointer;
  const over = at !== null && at >= scale.x.from && at <= scale.x.to;
  shown.forEach((points, index) => {
    const point = over ? nearest(points, at) : points[points.length - 1];
    const interval = point && point.low !== null ? ` [${shortNumber(point.low)}, ${shortNumber(point.high)}]` : "";
    values[index].textContent = point ? number(point.y) + interval : NOTHING;
  });
  cross.setAttribute("visibility", over ? "visible" : "hidden");
  if (!over) {
    caption.textContent = "";
    return;
  }
  const x = scale.x(at);
  cross.setAttribute("x1", x);
  cross.setAttribute("x2", x);
  const near = chart.places.filter((place) => Math.abs(place.x - x) < 4).map((place) => place.text);
  caption.textContent = [axisText(view, at), ...new Set(near)].slice(0, 4).join(" · ");
}

/** Handles the pointer, a drag over a range, and arrow keys. */
function listenToPointer(chart, picture) {
  const { view } = chart;
  let dragStart = null;
  const place = (event) => Math.min(Math.max(event.offsetX, EDGE.left), chart.scale.width - EDGE.right);
  const snapped = (value) => {
    const near = nearest(chart.shown.flat(), value);
    return near ? near.x : value;
  };
  picture.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse") return;
    dragStart = place(event);
    picture.setPointerCapture(event.pointerId);
  });
  picture.addEventListener("pointermove", (event) => {
    view.point(snapped(chart.scale.x.invert(place(event))));
    if (dragStart === null) return;
    const here = place(event);
    chart.brush.setAttribute("x", Math.min(dragStart, here));
    chart.brush.setAttribute("width", Math.abs(here - dragStart));
    chart.brush.setAttribute("visibility", "visible");
  });
  picture.addEventListener("pointerup", (event) => {
    if (dragStart === null) return;
    const ends = [dragStart, place(event)].sort((a, b) => a - b);
    dragStart = null;
    chart.brush.setAttribute("visibility", "hidden");
    if (ends[1] - ends[0] > 6) view.set({ range: ends.map((end) => chart.scale.x.invert(end)) });
  });
  picture.addEventListener("pointerleave", () => { if (dragStart === null) view.point(null); });
  picture.addEventListener("dblclick", () => view.set({ range: null }));
  picture.addEventListener("blur", () => view.point(null));
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") view.point(null);
    if (!move) return;
    event.preventDefault();
    const points = chart.shown.reduce((most, each) => (each.length > most.length ? each : most), []);
    const now = view.pointer === null ? (move > 0 ? -1 : points.length) : points.indexOf(nearest(points, view.pointer));
    const next = points[Math.min(Math.max(now + move, 0), points.length - 1)];
    if (next) view.point(next.x);
  });
}

/** Returns the line of one metric of one run; evaluations are points with intervals. */
function metricLine(run, name, more) {
  const { curves } = run;
  if (curves.series[name]) return { name, x: curves.x, y: curves.series[name], ...more };
  const points = curves.eval[name];
  if (!points) return null;
  const steps = points.map((point) => point[0]);
  const at = (axis) => steps.map((step) => (step === 0 ? 0 : placeOfStep({ x: curves.x }, { axis }, step)));
  const end = (suffix) => {
    const known = new Map(curves.eval[name + suffix] || []);
    return known.size ? steps.map((step) => known.get(step) ?? null) : null;
  };
  const x = { step: steps, seconds: at("seconds"), tokens: at("tokens") };
  return { name, x, y: points.map((point) => point[1]), low: end("_low"), high: end("_high"), dots: true, ...more };
}

/** Splits a chart so that each chart has one metric, for several runs in one chart. */
function oneMetricEach(chart) {
  return chart.metrics.length === 1 ? [chart] : chart.metrics.map((name) => ({ ...chart, title: name, metrics: [name] }));
}

/** Returns the sections of charts in `layout`, for one or several runs. */
function curveSections(layout, runs, view, marks) {
  return layout.map((part) => {
    const charts = (runs.length > 1 ? part.charts.flatMap(oneMetricEach) : part.charts).map((chart) => {
      const lines = runs.flatMap((run, index) => chart.metrics.map((name) => metricLine(
        run, name, runs.length > 1 ? { run: index, colour: index, name: run.name, about: chart.about[name] } : { name, about: chart.about[name] },
      ))).filter(Boolean);
      return lines.length ? curveChart({ title: chart.title, unit: chart.unit, lines, marks, view }) : null;
    });
    const grid = element("div", { class: "charts" }, charts);
    const how = element("p", { class: "how", text: part.how });
    if (!part.folded) return element("div", { class: "part" }, element("h3", { text: part.title }), how, grid);
    return element("details", { class: "part" }, element("summary", { text: `${part.title} (${part.charts.length})` }), how, grid);
  });
}
