// The page: of one run, of several, or of a sweep.

function runPage(data) {
  const { run, layout, histograms, timeline, findings, rollouts } = data;
  const view = sharedView(smoothingFor(run.curves.x.step.length));
  const parts = [
    ["findings", "Findings"], ["curves", "Curves"], ["evaluations", "Evaluations"], ["distributions", "Distributions"],
    ["time", "Time"], ["rollouts", "Rollouts"], ["settings", "Settings"],
  ];
  const stride = run.curves.stride > 1 ? ` Each point is the mean of ${run.curves.stride} steps.` : "";
  return [
    navigation(parts),
    runHead(data),
    findingsSection(findings),
    section("curves", "Curves", `Point at a picture to read all of them at that place; drag to see a range; ticks beneath are events.${stride}`,
      viewControls(view, run.marks), curveSections(layout, [run], view, run.marks)),
    evaluationSection(data, view),
    section("distributions", "Distributions", "Completions of training in the first, middle and last third: what moved, and whether all of it did.",
      histograms.length ? element("div", { class: "charts" }, histograms.map(histogramChart)) : element("p", { class: "empty", text: "The ledger holds no completions." })),
    section("time", "Where the time went", "A coloured stretch is work; where stretches are too short to draw, the height is their share of the time. Drag to zoom.",
      timeline ? [timelineChart(timeline), shareTable(timeline)] : element("p", { class: "empty", text: "The run's folder tells no times (events.jsonl)." })),
    rolloutSection(rollouts),
    settingsSection(run),
    element("footer", {}, `Made ${new Date(1000 * run.written).toISOString().slice(0, 16).replace("T", " ")} UTC from the files of the run. This page is one file and asks nothing of the network.`),
  ];
}

function showPage() {
  const data = JSON.parse(document.getElementById("data").textContent);
  applyTheme(rememberedTheme());
  const content = { run: runPage, comparison: comparisonPage, sweep: sweepPage }[data.kind](data);
  document.getElementById("page").append(...content);
  document.documentElement.dataset.ready = "true";
}
