// Histograms of the first, the middle and the last third of a run, as outlines over one axis.

const THIRD_COLOURS = ["var(--early)", "var(--middle)", "var(--late)"];

function histogramChart({ title, unit, edges, thirds }) {
  const plot = element("div", { class: "plot" });
  const entries = thirds.map((third, index) => {
    const sign = element("i", { class: "swatch" });
    sign.style.background = THIRD_COLOURS[index];
    return element("li", { title: plural(third.count, "completion") }, sign, element("span", { text: third.name }),
      element("b", { text: `mean ${number(third.mean)}` }));
  });
  drawWhenVisible(plot, () => plot.replaceChildren(histogramPicture(title, edges, thirds, plot.clientWidth)));
  return element(
    "figure", { class: "chart" },
    element("figcaption", {}, element("strong", { text: title }), element("span", { text: unit })),
    element("ul", { class: "legend" }, entries), plot,
  );
}

function histogramPicture(title, edges, thirds, width) {
  const maximum = Math.max(...thirds.flatMap((third) => third.shares));
  const scale = {
    width, height: PLOT_HEIGHT,
    x: linear(edges[0], edges[edges.length - 1], EDGE.left, width - EDGE.right),
    y: linear(0, maximum * 1.08, PLOT_HEIGHT - EDGE.bottom, EDGE.top),
  };
  const picture = svgElement("svg", { width, height: PLOT_HEIGHT, role: "img", "aria-label": `${title}: shares of completions` });
  for (const tick of ticksBetween(0, scale.y.to, 3)) {
    const y = scale.y(tick);
    picture.append(
      svgElement("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y, y2: y }),
      svgElement("text", { class: "tick-text", x: EDGE.left - 6, y: y + 3.5, "text-anchor": "end", text: percent(tick, maximum < 0.1 ? 1 : 0) }),
    );
  }
  for (const tick of ticksBetween(edges[0], edges[edges.length - 1], width / 90)) {
    picture.append(tickText(scale.x(tick), PLOT_HEIGHT - 8, axisNumber(tick), width));
  }
  thirds.forEach((third, index) => {
    const foot = scale.y(0);
    let d = `M${scale.x(edges[0])} ${foot}`;
    third.shares.forEach((share, bin) => {
      d += `V${scale.y(share).toFixed(1)}H${scale.x(edges[bin + 1]).toFixed(1)}`;
    });
    const outline = svgElement("path", { class: "outline", d: `${d}V${foot}Z` });
    outline.style.stroke = THIRD_COLOURS[index];
    outline.style.fill = THIRD_COLOURS[index];
    picture.append(outline);
  });
  return picture;
}
