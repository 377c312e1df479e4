// The curves as traces of the chart.

// Points of one curve as a line: what is not logged is skipped, what is not finite is a gap,
// and where a rollback has undone steps, they are a line of their own.
function line(run, values, undone, recorded) {
  const x = [], y = [];
  const place = recorded ? run.index : run.step;
  const bad = run.badRows;
  const gaps = new Map(run.gaps.map((gap) => [gap.row, gap]));
  let last = -1; // the row before, whichever line it is on
  let own = -1, gap = null; // the row before on this line, and a gap since then
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
  // With its own step: where the curve has no value there, the nearest one is shown.
  const hover = (what) => (x, y) => `${what} ${short(y)} at ${wholeNumber(x)}`;
  const kept = {
    ...base, ...line(run, values, 0, recorded), name: label, legendgroup: name, hover: hover(label),
    line: { color: colour(key), width: 1.6, ...more }, marker: { color: colour(key), size: 5 },
  };
  const traces = [kept];
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
