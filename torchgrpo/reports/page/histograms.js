// Distributions in the first, the middle and the last third of a run, as outlines over one axis.

const THIRDS = ["var(--early)", "var(--middle)", "var(--late)"];

function histogramChart({ title, unit, edges, parts }) {
  const plot = element("div", { class: "plot" });
  const entries = parts.map((part, index) => {
    const sign = element("i", { class: "swatch" });
    sign.style.background = THIRDS[index];
    return element("li", { title: plural(part.count, "completion") }, sign, element("span", { text: part.name }),
      element("b", { text: `mean ${number(part.mean)}` }));
  });
  whenSeen(plot, () => plot.replaceChildren(histogramPicture(title, edges, parts, plot.clientWidth)));
  return element(
    "figure", { class: "chart" },
    element("figcaption", {}, element("strong", { text: title }), element("span", { text: unit })),
    element("ul", { class: "legend" }, entries), plot,
  );
}

function histogramPicture(title, edges, parts, width) {
  const most = Math.max(...parts.flatMap((part) => part.shares));
  const scale = {
    width, height: PLOT_HEIGHT,
    x: linear(edges[0], edges[edges.length - 1], EDGE.left, width - EDGE.right),
    y: linear(0, most * 1.08, PLOT_HEIGHT - EDGE.bottom, EDGE.top),
  };
  const picture = drawn("svg", { width, height: PLOT_HEIGHT, role: "img", "aria-label": `${title}: shares of completions` });
  for (const tick of ticksBetween(0, scale.y.to, 3)) {
    const y = scale.y(tick);
    picture.append(
      drawn("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y, y2: y }),
      drawn("text", { class: "tick-text", x: EDGE.left - 6, y: y + 3.5, "text-anchor": "end", text: percent(tick, most < 0.1 ? 1 : 0) }),
    );
  }
  for (const tick of ticksBetween(edges[0], edges[edges.length - 1], width / 90)) {
    picture.append(tickText(scale.x(tick), PLOT_HEIGHT - 8, axisNumber(tick), width));
  }
  parts.forEach((part, index) => {
    const foot = scale.y(0);
    let d = `M${scale.x(edges[0])} ${foot}`;
    part.shares.forEach((share, bin) => {
      d += `V${scale.y(share).toFixed(1)}H${scale.x(edges[bin + 1]).toFixed(1)}`;
    });
    const outline = drawn("path", { class: "outline", d: `${d}V${foot}Z` });
    outline.style.stroke = THIRDS[index];
    outline.style.fill = THIRDS[index];
    picture.append(outline);
  });
  return picture;
}
