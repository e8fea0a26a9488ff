// Charts of curves in SVG. All charts of a page share a view, so the pointer shows the values of all charts.

const EDGE = { left: 46, right: 10, top: 8, bottom: 30 };
const PLOT_HEIGHT = 150;
const MAX_LEGEND_LINES = 6; // charts with more lines have no legend; the table of a sweep names its runs

/**
 * Creates a chart. lines: [{ name, about, x: { step, seconds, tokens }, y, run, metric, dots, low, high }]; a line with `dots`
 * has points with intervals from low to high. marks: events of the run, by step.
 */
function curveChart({ title, unit, lines, marks = [], view, height = PLOT_HEIGHT }) {
  const plot = element("div", { class: "plot" });
  const values = lines.map(() => element("b"));
  const legend = element("ul", { class: "legend" }, lines.map((line, index) => legendEntry(line, index, values[index])));
  const caption = element("p", { class: "pointer-text", "aria-live": "off" });
  const figure = element(
    "figure", { class: "chart" },
    element("figcaption", {}, element("strong", { text: title }), unit ? element("span", { text: unit }) : null),
    lines.length > MAX_LEGEND_LINES ? null : legend, plot, caption,
  );
  const chart = { title, lines, marks, view, height, plot, values, caption, scale: null };
  const redraw = drawWhenVisible(plot, () => drawChart(chart));
  view.on("change", redraw);
  view.on("point", () => { if (chart.scale) showPointerValues(chart); });
  return figure;
}

function legendEntry(line, index, value) {
  return element("li", {}, lineSign(line.colour ?? index), element("span", { title: line.about }, breakable(line.name)), value);
}

/** Creates a sample of a line for the legend. */
function lineSign(index) {
  const sample = svgElement("line", { x1: 0, x2: 18, y1: 4, y2: 4, class: "curve", "stroke-dasharray": lineDash(index) });
  sample.style.stroke = lineColour(index);
  return svgElement("svg", { width: 18, height: 8, "aria-hidden": "true" }, sample);
}

function drawChart(chart) {
  const { view, plot, height } = chart;
  const width = plot.clientWidth;
  const shown = chart.lines.map((line) => pointsOf(line, view));
  const scale = scaleOf(shown, view, width, height);
  chart.scale = scale;
  chart.shown = shown;
  const picture = svgElement("svg", {
    width, height, role: "img", tabindex: "0",
    "aria-label": `${chart.title}; arrow keys move along the curve, a drag selects a range`,
  });
  picture.append(...gridOf(scale, view), ...marksOf(chart, scale), ...shown.flatMap((points, index) => curveOf(chart, points, index)));
  chart.cross = svgElement("line", { class: "cross", y1: EDGE.top, y2: height - EDGE.bottom, visibility: "hidden" });
  chart.brush = svgElement("rect", { class: "brush", y: EDGE.top, height: height - EDGE.top - EDGE.bottom, visibility: "hidden" });
  picture.append(chart.cross, chart.brush);
  listenToPointer(chart, picture);
  plot.replaceChildren(picture);
  showPointerValues(chart);
}

/** Returns the points [{ x, y, low, high }] of a line in the visible range, without gaps. */
function pointsOf(line, view) {
  const xs = line.x[view.axis] || [];
  const [from, to] = view.range || [-Infinity, Infinity];
  const points = [];
  for (let i = 0; i < line.y.length; i++) {
    if (line.y[i] === null || xs[i] === null || xs[i] === undefined || xs[i] < from || xs[i] > to) continue;
    points.push({ x: xs[i], y: line.y[i], low: line.low ? line.low[i] : null, high: line.high ? line.high[i] : null });
  }
  return points;
}

function scaleOf(shown, view, width, height) {
  const all = shown.flat();
  const ys = all.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y]);
  let [low, high] = extent(ys, [0, 1]);
  if (low === high) [low, high] = [Math.min(0, 1.2 * low), Math.max(0, 1.2 * high) || (low === 0 ? 1 : 0)];
  if (low > 0 && low < 0.6 * high) low = 0;
  const room = 0.05 * (high - low);
  const bottom = low === 0 ? 0 : low - room;
  const [left, right] = extent(all.map((point) => point.x), [0, 1]);
  return {
    width, height,
    x: linear(left, right === left ? left + 1 : right, EDGE.left, width - EDGE.right),
    y: linear(bottom, high + room, height - EDGE.bottom, EDGE.top),
  };
}

/** Returns the smallest and the largest value; does not spread the values as arguments. */
function extent(values, otherwise) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : otherwise;
}

function linear(from, to, start, end) {
  const place = (value) => start + ((value - from) / (to - from)) * (end - start);
  return Object.assign(place, { from, to, invert: (pixel) => from + ((pixel - start) / (end - start)) * (to - from) });
}

/** Returns about `about` round numbers between two ends. */
function ticksBetween(from, to, about) {
  const raw = (to - from) / Math.max(1, about);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= raw * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(from / step - 1e-9) * step; tick <= to + step * 1e-9; tick += step) {
    ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return ticks;
}

function gridOf(scale, view) {
  const nodes = [];
  for (const tick of ticksBetween(scale.y.from, scale.y.to, 4)) {
    const y = scale.y(tick);
    nodes.push(svgElement("line", { class: "grid", x1: EDGE.left, x2: scale.width - EDGE.right, y1: y, y2: y }));
    nodes.push(svgElement("text", { class: "tick-text", x: EDGE.left - 6, y: y + 3.5, "text-anchor": "end", text: axisNumber(tick) }));
  }
  const whole = view.axis !== "seconds";
  for (const tick of ticksBetween(scale.x.from, scale.x.to, scale.width / (whole ? 60 : 100))) {
    if (whole && !Number.isInteger(tick)) continue;
    const text = whole ? axisNumber(tick) : duration(tick);
    nodes.push(tickText(scale.x(tick), scale.height - 8, text, scale.width));
  }
  return nodes;
}

/** Creates a label below an axis, centred at x but inside the chart. */
function tickText(x, y, text, width) {
  const anchor = x > width - 24 ? "end" : "middle";
  return svgElement("text", { class: "tick-text", x: anchor === "end" ? width - 2 : x, y, "text-anchor": anchor, text });
}

function axisNumber(value) {
  const size = Math.abs(value);
  for (const [unit, sign] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${withMinusSign(Number((value / (unit === 1e4 ? 1e3 : unit)).toPrecision(3)))}${sign}`;
  }
  return size && size < 1e-3 ? number(value).replace(/\.?0+e/, "e") : withMinusSign(Number(value.toPrecision(4)));
}

/** Returns the nodes of a line: smoothed curve above the raw curve, or points with intervals. */
function curveOf(chart, points, index) {
  const { view, scale } = chart;
  const line = chart.lines[index];
  const colour = lineColour(line.colour ?? index);
  const faded = view.highlighted !== null && line.run !== undefined && line.run !== view.highlighted;
  const style = (node) => {
    node.style.stroke = colour;
    if (faded) node.style.opacity = 0.15;
    return node;
  };
  if (line.dots) return dotsOf(points, scale, style, colour);
  const dash = lineDash(line.colour ?? index);
  const nodes = [];
  if (view.smoothing && points.length > 2) {
    if (!faded) nodes.push(style(svgElement("path", { class: "curve raw", d: pathOf(points, scale) })));
    points = smooth(points, view.smoothing);
  }
  nodes.push(style(svgElement("path", { class: "curve", "stroke-dasharray": dash, d: pathOf(points, scale) })));
  if (points.length === 1) nodes.push(...dotsOf(points, scale, style, colour));
  return nodes;
}

function dotsOf(points, scale, style, colour) {
  return [
    style(svgElement("path", { class: "curve", d: pathOf(points, scale) })),
    ...points.flatMap(({ x, y, low, high }) => {
      const dot = svgElement("circle", { cx: scale.x(x), cy: scale.y(y), r: 3 });
      dot.style.fill = colour;
      const bar = low === null ? null
        : style(svgElement("line", { class: "interval", x1: scale.x(x), x2: scale.x(x), y1: scale.y(low), y2: scale.y(high) }));
      return bar ? [bar, dot] : [dot];
    }),
  ];
}

function pathOf(points, scale) {
  return points.map(({ x, y }, index) => `${index ? "L" : "M"}${scale.x(x).toFixed(1)} ${scale.y(y).toFixed(1)}`).join("");
}

/** Returns centred moving means; means at the ends have fewer points. */
function smooth(points, reach) {
  const sums = [0];
  for (const point of points) sums.push(sums[sums.length - 1] + point.y);
  return points.map((point, index) => {
    const from = Math.max(0, index - reach);
    const to = Math.min(points.length, index + reach + 1);
    return { ...point, y: (sums[to] - sums[from]) / (to - from) };
  });
}
