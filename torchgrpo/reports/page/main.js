// Entry point: builds the page of one run, of a comparison, or of a sweep.

function runPage(data) {
  const { run, layout, histograms, timeline, findings, rollouts } = data;
  const view = sharedView(smoothingFor(run.curves.x.step.length));
  const sections = [
    ["findings", "Findings"], ["curves", "Curves"], ["evaluations", "Evaluations"], ["distributions", "Distributions"],
    ["time", "Time"], ["rollouts", "Rollouts"], ["settings", "Settings"],
  ];
  const stride = run.curves.stride > 1 ? ` Each point is the mean of ${run.curves.stride} steps.` : "";
  return [
    navigation(sections),
    runHead(data),
    findingsSection(findings),
    section("curves", "Curves", `Move the pointer over a chart to read the values of all charts there; drag to select a range; ticks below are events.${stride}`,
      viewControls(view, run.marks), curveSections(layout, [run], view, run.marks)),
    evaluationSection(data, view),
    section("distributions", "Distributions", "Training completions in the first, middle and last third of the run.",
      histograms.length ? element("div", { class: "charts" }, histograms.map(histogramChart)) : element("p", { class: "empty", text: "The ledger holds no completions." })),
    section("time", "Where the time went", "Coloured intervals are busy; where intervals are too short to draw, the height is their share of the time. Drag to zoom.",
      timeline ? [timelineChart(timeline), shareTable(timeline)] : element("p", { class: "empty", text: "The run's folder has no times (events.jsonl)." })),
    rolloutSection(rollouts),
    settingsSection(run),
    element("footer", {}, `Written ${new Date(1000 * run.written_at).toISOString().slice(0, 16).replace("T", " ")} UTC from the files of the run. This page is a single file without network access.`),
  ];
}

function showPage() {
  const data = JSON.parse(document.getElementById("data").textContent);
  applyTheme(rememberedTheme());
  const content = { run: runPage, comparison: comparisonPage, sweep: sweepPage }[data.kind](data);
  document.getElementById("page").append(...content);
  document.documentElement.dataset.ready = "true";
}
