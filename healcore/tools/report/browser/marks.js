// Converts incidents and other events to traces and shapes of the chart.

const MAX_SHAPES = 600; // lines and bands, above which browsers draw slowly

const span = (incident, recorded) => (recorded ? incident.i : incident.x);

const tag = (incident) => (incident.n ? "#" + incident.n : ""); // 0: a rollback without an incident

const outcome = (sign, run) => (run.would ? sign.would : sign.done);

// Stops after a rollback in the same incident.
function stopTraces(run, state) {
  const place = state.recorded ? 1 : 0;
  const of = run.incidents.map((incident, number) => ({ ...incident, number }))
    .filter((incident) => incident.stop && incident.stop[place] !== null);
  if (!of.length) return [];
  const alone = !run.incidents.some((incident) => incident.kind === "stop");
  return [{
    mode: "markers", yaxis: "y5", name: outcome(all.signs.stop, run), legendgroup: "stop",
    showlegend: alone, x: of.map((incident) => incident.stop[place]), y: of.map((incident) => incident.row - 0.45),
    customdata: of.map((incident) => incident.number),
    marker: { symbol: all.signs.stop.symbol, size: 10, color: colour("stop") },
    hover: of.map((incident) => outcome(all.signs.stop, run) + ", " + tag(incident)),
  }];
}

function incidentTraces(run, state) {
  const traces = [];
  for (const [kind, sign] of Object.entries(all.signs)) {
    const of = run.incidents.map((incident, place) => ({ ...incident, place }))
      .filter((incident) => incident.kind === kind && span(incident, state.recorded));
    if (!of.length) continue;
    const back = { x: [], y: [] };
    for (const incident of of) {
      if (kind !== "rollback" || incident.to === null || state.recorded) continue;
      back.x.push(incident.x[0], incident.to, null); back.y.push(incident.row, incident.row, null);
    }
    const quiet = { mode: "lines", showlegend: false, legendgroup: kind };
    const ink = colour(kind);
    if (back.x.length) traces.push({ ...quiet, ...back, yaxis: "y5", line: { color: ink, width: 1.2, dash: "dot" } });
    traces.push({
      mode: run.labelled ? "markers+text" : "markers", yaxis: "y5",
      x: of.map((incident) => span(incident, state.recorded)[0]), y: of.map((incident) => incident.row),
      customdata: of.map((incident) => incident.place), name: outcome(sign, run), legendgroup: kind,
      text: of.map((incident) => (run.labelled && incident.label ? tag(incident) : "")),
      textfont: { color: ink }, marker: { symbol: sign.symbol, size: 10, color: ink },
      hover: of.map((incident) => incident.text),
    });
  }
  return traces;
}

// Returns a line at each onset and a band to the last alarm, through all panels. `all.signs` is
// sorted by severity, so the limit drops the least severe incidents.
function bands(run, state, top) {
  const shapes = [], drawn = new Set(); // equal bands would add up to a darker band
  for (const kind of Object.keys(all.signs)) {
    const ink = colour(kind);
    for (const incident of run.incidents) {
      const at = span(incident, state.recorded);
      if (incident.kind !== kind || !at || shapes.length >= MAX_SHAPES || drawn.has(String(at))) continue;
      drawn.add(String(at));
      const shape = { y0: 0, y1: top, x0: at[0], x1: at[1], layer: "below" };
      if (at[1] > at[0]) shapes.push({ ...shape, type: "rect", fillcolor: ink, opacity: 0.13 });
      // Above the curves, because a grid line at the same step would hide a line below them.
      shapes.push({ ...shape, layer: "above", type: "line", x1: at[0], opacity: 0.55, line: { color: ink, dash: kind === "alert" ? "dot" : "solid" } });
    }
  }
  return shapes;
}

function otherTraces(run, state) {
  const traces = [];
  const x = state.recorded ? run.index : run.step;
  if (run.bad.length) {
    traces.push({
      mode: "markers", yaxis: "y6", name: "NaN or Inf",
      x: run.bad.map((row) => x[row]), y: run.bad.map(() => 0.97),
      marker: { symbol: "x-thin", size: 7, color: colour("bad") },
      hover: () => "loss or norm not finite",
    });
  }
  if (run.marks.length && !state.recorded) {
    const names = { alarm: "line-ns-open", order: "line-ns-open", resume: "diamond-open", hook: "hexagon-open" };
    traces.push({
      mode: "markers", yaxis: "y5", name: "other events",
      x: run.marks.map((mark) => mark.x), y: run.marks.map(() => -0.8),
      hover: run.marks.map((mark) => mark.text),
      marker: {
        symbol: run.marks.map((mark) => names[mark.kind] || "square-open"), size: 8,
        color: colour("quiet"),
      },
    });
  }
  return traces;
}
