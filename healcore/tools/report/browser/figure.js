// Lays out the figure of a run: its panels, their heights and the ranges of their axes.

const AXES = ["yaxis", "yaxis2", "yaxis3"];

function panels(run) {
  const found = [];
  if (run.loss) found.push({ axis: 0, share: 5, title: "loss", log: "logLoss", of: ["loss"] });
  if (run.norm) found.push({ axis: 1, share: 3, title: "gradient norm", log: "logNorm", of: ["norm", "threshold"] });
  if (run.lr) found.push({ axis: 2, share: 1.6, title: "LR ×", log: null, of: ["lr"] });
  const lane = run.incidents.length || run.marks.length ? 0.12 : 0, gap = 0.035;
  const whole = found.reduce((sum, panel) => sum + panel.share, 0);
  const free = 1 - lane - gap * Math.max(found.length - 1, 0);
  let top = 1 - lane;
  for (const panel of found) {
    const height = (free * panel.share) / whole;
    panel.domain = [Math.max(top - height, 0), top];
    top -= height + gap;
  }
  return { found, top: 1 - lane };
}

function extent(run, panel, state, range) {
  const place = state.recorded ? run.index : run.step;
  let low = Infinity, high = -Infinity;
  for (const name of panel.of) {
    const values = run[name];
    if (!values) continue;
    for (let row = 0; row < values.length; row++) {
      const value = values[row];
      if (value === null || (range && (place[row] < range[0] || place[row] > range[1]))) continue;
      if (panel.log && state[panel.log] && value <= 0) continue;
      low = Math.min(low, value); high = Math.max(high, value);
    }
  }
  if (low > high) return null;
  if (!panel.log) return [Math.min(0, low), Math.max(1, high) * 1.08];
  if (state[panel.log]) { low = Math.log10(low); high = Math.log10(high); }
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.1;
  return [low - room, high + room * 1.8];
}

function whole(run, state) {
  const place = (state.recorded ? run.index : run.step).filter((x) => x !== null);
  const marked = state.recorded ? [] : [...run.incidents.flatMap((i) => i.x), ...run.marks.map((m) => m.x)];
  let low = Infinity, high = -Infinity;
  for (const x of [...place, ...marked]) { low = Math.min(low, x); high = Math.max(high, x); }
  if (low > high) return [0, 1];
  const room = (high - low) * 0.02 || 1; // more on the right, for the number of the last incident
  return [low - room, high + room * (run.labelled ? (narrow() ? 6 : 2.5) : 1)];
}

// Ticks of a logarithmic axis: small integers times powers of ten, without prefixes such as k.
function ticks(range) {
  const [low, high] = range, decades = high - low;
  const steps = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : decades > 0.5 ? [1, 2, 3, 5, 7] : null;
  if (!steps) return {};
  const stride = Math.max(1, Math.ceil(decades / 7)), values = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
    if (power % stride) continue;
    for (const step of steps) values.push(Number((step * 10 ** power).toPrecision(3)));
  }
  const text = (value) => (value >= 1e5 || value < 1e-4 ? value.toExponential(0) : String(value));
  return { tickvals: values, ticktext: values.map(text) };
}

function layout(run, state) {
  const { found, top } = panels(run);
  const hidden = { visible: false };
  const figure = {
    height: state.printing || narrow() ? 560 : 640, font: { color: colour("text") },
    dragmode: matchMedia("(pointer: coarse)").matches || narrow() ? false : "zoom",
    xaxis: { range: state.range || whole(run, state), title: { text: state.recorded ? "row, as recorded" : "step" } },
    shapes: bands(run, state, top),
    yaxis5: { ...hidden, domain: [top, 1], range: [-1.4, 3.8] },
  };
  for (const panel of found) {
    const log = panel.log && state[panel.log];
    figure[AXES[panel.axis]] = {
      domain: panel.domain, type: log ? "log" : "linear", title: { text: panel.title }, range: extent(run, panel, state, state.range) || undefined,
      nticks: panel.axis === 2 ? 4 : undefined,
    };
    const range = figure[AXES[panel.axis]].range;
    if (log && range) Object.assign(figure[AXES[panel.axis]], ticks(range));
  }
  const first = found[0];
  if (first) figure.yaxis6 = { ...hidden, domain: first.domain, range: [0, 1] };
  return figure;
}

function traces(run, state) {
  return [
    ...curve(run, "loss", "loss", "y", "loss", state),
    ...curve(run, "norm", "gradient norm", "y2", "norm", state),
    ...curve(run, "threshold", "threshold", "y2", "threshold", state, { dash: "dash", width: 1.2 }),
    ...curve(run, "lr", "LR multiplier", "y3", "lr", state, { shape: "hv" }),
    ...otherTraces(run, state), ...incidentTraces(run, state), ...stopTraces(run, state),
  ];
}
