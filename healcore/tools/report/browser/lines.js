// Converts the curves of a run to traces of the chart.

// Returns the points of a curve as a line, either of the current or of the undone steps.
// Skips values that were not logged. Non-finite values make a gap.
function line(run, values, undone, recorded) {
  const x = [], y = [];
  const place = recorded ? run.index : run.step;
  const bad = run.badRows;
  const gaps = new Map(run.gaps.map((gap) => [gap.row, gap]));
  let last = -1; // the previous row of either line
  let own = -1, gap = null; // the previous row of this line, and a gap after it
  for (let row = 0; row < values.length; row++) {
    gap = gaps.get(row) || gap;
    if (values[row] === null && !bad.has(row)) continue;
    const mine = run.undone[row] === undone;
    const broken = last >= 0 && run.attempt && run.attempt[last] !== run.attempt[row];
    if (mine) {
      const apart = gap && own >= 0 && (recorded || (run.step[own] <= gap.low && run.step[row] >= gap.high));
      if (apart) { x.push(null); y.push(null); }
      else if (broken && (undone || recorded)) { x.push(null); y.push(null); }
      else if (undone && last >= 0 && run.undone[last] !== undone && !broken) {
        x.push(null, place[last]); y.push(null, values[last]);
      }
      x.push(place[row]); y.push(values[row]);
      own = row; gap = null;
    }
    last = row;
  }
  return { x, y };
}

function curve(run, name, label, panel, key, state, more) {
  const values = run[name];
  if (!values) return [];
  const recorded = state.recorded;
  const mode = run.isolated ? "markers" : "lines";
  const base = { mode, yaxis: panel };
  // The label names the step of the nearest point, which may differ from the pointer's step.
  const hover = (what) => (x, y) => `${what} ${short(y)} at ${wholeNumber(x)}`;
  const current = {
    ...base, ...line(run, values, 0, recorded), name: label, legendgroup: name, hover: hover(label),
    line: { color: colour(key), width: 1.6, ...more }, marker: { color: colour(key), size: 5 },
  };
  const traces = [current];
  if (name !== "threshold" && run.undone.includes(1)) {
    traces.unshift({
      ...base, ...line(run, values, 1, recorded), name: "undone", hover: hover(label + ", undone,"),
      legendgroup: "undone", showlegend: name === "loss" || !run.loss, opacity: 0.75,
      line: { color: colour("undone"), width: 1.2, ...more },
      marker: { color: colour("undone"), size: 5, symbol: "circle-open" },
    });
  }
  return traces;
}
