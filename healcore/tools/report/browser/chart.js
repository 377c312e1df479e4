// Draws a figure as SVG: stacked panels with a common x axis, a legend, hover labels and zoom.

// The parser supplies the SVG namespace, so that the page contains no URL.
const svgNamespace = new DOMParser().parseFromString("<svg></svg>", "text/html").body.firstChild.namespaceURI;

function element(parent, name, attributes, text) {
  const node = document.createElementNS(svgNamespace, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function box(parent, name, kind, text) {
  const node = document.createElement(name);
  node.className = kind;
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

// Outline of a mark around (0, 0). A symbol that ends in "-open" or "-thin" is not filled.
function outline(symbol, size) {
  const r = size / 2, q = r * 0.87;
  return {
    square: `M${-q} ${-q}H${q}V${q}H${-q}Z`, diamond: `M0 ${-r}L${r} 0 0 ${r} ${-r} 0Z`,
    "triangle-left": `M${-r} 0L${q} ${-r}V${r}Z`, "triangle-down": `M0 ${r}L${-r} ${-q}H${r}Z`,
    x: `M${-q} ${-q}L${q} ${q}M${q} ${-q}L${-q} ${q}`, "line-ns": `M0 ${-r}V${r}`,
    hexagon: `M0 ${-r}L${q} ${-r / 2}V${r / 2}L0 ${r} ${-q} ${r / 2}V${-r / 2}Z`,
  }[symbol.replace(/-open$|-thin$/, "")] || `M${r} 0A${r} ${r} 0 1 1 ${-r} 0A${r} ${r} 0 1 1 ${r} 0Z`;
}

function mark(parent, symbol, size, ink, at) {
  const hollow = /-open$|-thin$/.test(symbol);
  return element(parent, "path", {
    d: outline(symbol, size), transform: `translate(${at[0].toFixed(1)} ${at[1].toFixed(1)})`,
    fill: hollow ? "none" : ink, stroke: hollow ? ink : "none", "stroke-width": 1.3,
  });
}

function short(value) {
  const size = Math.abs(value);
  if (size && (size >= 1e6 || size < 1e-4)) return Number(value.toPrecision(5)).toExponential();
  return String(Number(value.toPrecision(5)));
}

const wholeNumber = (value) => Number(value.toPrecision(15)).toLocaleString("en-US");

// Returns about `count` round numbers from `low` to `high`.
function roundNumbers(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power, numbers = [];
  if (!(step > 0) || !isFinite(step)) return numbers;
  for (let k = Math.ceil(low / step); k * step <= high; k++) numbers.push(Number((k * step).toPrecision(12)));
  return numbers;
}

function ticksOf(axis, count) {
  if (axis.tickvals) return axis.tickvals.map((value, at) => [value, axis.ticktext[at]]);
  const [low, high] = axis.type === "log" ? axis.range.map((exponent) => 10 ** exponent) : axis.range;
  return roundNumbers(low, high, count).map((value) => [value, short(value)]);
}

// Splits a label into lines of plain text: <br> ends a line, <b> is dropped.
function linesIn(label) {
  const plain = (text) => text.replace(/<\/?b>/g, "").replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  return label.split("<br>").map(plain);
}

function chart(plot, events) {
  const hidden = new Set(); // legend groups that the user has switched off
  let scene = null, drag = null;

  function draw(candidates, figure) {
    const traces = candidates.filter((trace) => figure[trace.yaxis.replace("y", "yaxis")]); // with a panel
    plot.data = traces; plot.layout = figure;
    plot.replaceChildren();
    const width = figure.width || plot.clientWidth || 700, height = figure.height;
    const axes = {};
    for (const [name, axis] of Object.entries(figure)) {
      if (!name.startsWith("yaxis")) continue;
      const range = axis.range || [0, 1], ticks = axis.visible === false ? [] : ticksOf({ ...axis, range }, axis.nticks || 5);
      axes[name.replace("yaxis", "y")] = { ...axis, range, ticks };
    }
    const longest = Math.max(0, ...Object.values(axes).flatMap((axis) => axis.ticks.map((tick) => tick[1].length)));
    const left = 30 + 6.5 * longest, right = width - 16, top = 6, bottom = height - 44;
    const [first, last] = figure.xaxis.range;
    const x = (value) => left + ((value - first) / (last - first)) * (right - left);
    const at = (share) => bottom - share * (bottom - top);
    for (const axis of Object.values(axes)) {
      const [low, high] = axis.range, [from, to] = axis.domain;
      axis.place = (value) => {
        const placed = axis.type === "log" ? Math.log10(value) : value;
        return at(from + ((placed - low) / (high - low || 1)) * (to - from));
      };
    }
    const svg = element(plot, "svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}` });
    const clip = "clip" + plot.closest("section").id;
    element(element(svg, "clipPath", { id: clip }), "rect", { x: left, y: 0, width: Math.max(right - left, 0), height });
    grid(svg, axes, figure, { x, at, left, right, bottom, width });
    const inside = element(svg, "g", { "clip-path": `url(#${clip})` });
    for (const layer of ["below", "above"]) {
      if (layer === "above") for (const trace of traces) if (!hidden.has(trace.legendgroup)) paint(inside, trace, axes[trace.yaxis], x);
      for (const shape of figure.shapes) if (shape.layer === layer) region(inside, shape, x, at);
    }
    legend(traces, figure);
    scene = { svg, axes, x, traces, left, right, top, bottom, invert: (place) => first + ((place - left) / (right - left)) * (last - first), zooms: figure.dragmode === "zoom" };
  }

  function grid(svg, axes, figure, { x, at, left, right, bottom, width }) {
    const text = { "font-size": 11, fill: figure.font.color }, line = colour("grid");
    const [first, last] = figure.xaxis.range;
    for (const value of roundNumbers(first, last, Math.max(2, Math.floor((right - left) / 90)))) {
      for (const axis of Object.values(axes)) {
        if (axis.visible !== false) element(svg, "path", { d: `M${x(value)} ${at(axis.domain[0])}V${at(axis.domain[1])}`, stroke: line });
      }
      element(svg, "text", { ...text, x: x(value), y: bottom + 15, "text-anchor": "middle" }, wholeNumber(value));
    }
    element(svg, "text", { ...text, "font-size": 12, x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, figure.xaxis.title.text);
    for (const axis of Object.values(axes)) {
      if (axis.visible === false) continue;
      for (const [value, label] of axis.ticks) {
        const y = axis.place(value);
        if (!(y >= at(axis.domain[1]) - 1 && y <= at(axis.domain[0]) + 1)) continue;
        element(svg, "path", { d: `M${left} ${y}H${right}`, stroke: line });
        element(svg, "text", { ...text, x: left - 5, y: y + 4, "text-anchor": "end" }, label);
      }
      const middle = at((axis.domain[0] + axis.domain[1]) / 2);
      element(svg, "text", { ...text, "font-size": 12, transform: `translate(13 ${middle}) rotate(-90)`, "text-anchor": "middle" }, axis.title.text);
    }
  }

  function region(parent, shape, x, at) {
    const y = at(shape.y1), height = at(shape.y0) - y;
    if (shape.type === "rect") {
      element(parent, "rect", { x: x(shape.x0), y, width: x(shape.x1) - x(shape.x0), height, fill: shape.fillcolor, opacity: shape.opacity });
    } else {
      element(parent, "path", { d: `M${x(shape.x0)} ${y}v${height}`, stroke: shape.line.color, opacity: shape.opacity, "stroke-dasharray": shape.line.dash === "dot" ? "2 3" : undefined });
    }
  }

  function paint(parent, trace, axis, x) {
    const group = element(parent, "g", { class: "trace", opacity: trace.opacity });
    const points = trace.x.map((value, at) => (value === null || trace.y[at] === null ? null : [x(value), axis.place(trace.y[at])]));
    if (trace.mode === "lines") {
      let path = "", before = null;
      for (const point of points) {
        const drawn = point && isFinite(point[0]) && isFinite(point[1]) ? point.map((each) => Math.round(each * 10) / 10) : null;
        if (drawn) path += before ? (trace.line.shape === "hv" ? `H${drawn[0]}V${drawn[1]}` : `L${drawn[0]} ${drawn[1]}`) : `M${drawn[0]} ${drawn[1]}h.01`;
        before = drawn;
      }
      const dashes = { dash: "6 4", dot: "2 3" }[trace.line.dash];
      element(group, "path", { d: path, fill: "none", stroke: trace.line.color, "stroke-width": trace.line.width, "stroke-linejoin": "round", "stroke-dasharray": dashes });
      return;
    }
    points.forEach((point, at) => {
      if (!point || !isFinite(point[1])) return;
      const { symbol = "circle", size, color } = trace.marker;
      mark(group, Array.isArray(symbol) ? symbol[at] : symbol, size, color, point);
      const label = trace.text && trace.text[at];
      if (label) element(group, "text", { x: point[0] + 8, y: point[1] + 4, "font-size": 11, fill: trace.textfont.color }, label);
    });
  }

  function legend(traces, figure) {
    const bar = box(plot, "div", "legend");
    for (const trace of traces) {
      if (!trace.name || trace.showlegend === false) continue;
      const group = trace.legendgroup, item = box(bar, "button", hidden.has(group) ? "off" : "");
      item.type = "button";
      const sample = element(item, "svg", { width: 22, height: 12 });
      if (trace.mode === "lines") {
        element(sample, "path", { d: "M1 6H21", stroke: trace.line.color, "stroke-width": 2, "stroke-dasharray": trace.line.dash === "dash" ? "6 4" : undefined });
      } else {
        const { symbol = "circle", color } = trace.marker;
        mark(sample, Array.isArray(symbol) ? symbol[0] : symbol, 10, color, [11, 6]);
      }
      box(item, "span", "", trace.name);
      if (group) item.addEventListener("click", () => { hidden[hidden.has(group) ? "delete" : "add"](group); draw(traces, figure); });
    }
  }

  // Returns the nearest point of each visible trace, if its x distance is at most 12 pixels.
  function near(place) {
    const points = [];
    for (const trace of scene.traces) {
      if (!trace.hover || hidden.has(trace.legendgroup)) continue;
      let best = null;
      trace.x.forEach((value, at) => {
        if (value === null || trace.y[at] === null) return;
        const point = [scene.x(value), scene.axes[trace.yaxis].place(trace.y[at])];
        const apart = Math.abs(point[0] - place[0]);
        if (apart <= 12 && (!best || apart < best.apart)) best = { apart, trace, at, point };
      });
      if (best) points.push(best);
    }
    return points;
  }

  function placeOf(event) {
    const { left, top } = scene.svg.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  }

  const overlay = (name, kind) => plot.querySelector("." + kind) || box(plot, name, kind);

  plot.addEventListener("pointermove", (event) => {
    if (!scene || plot.layout.width) return;
    const [px, py] = placeOf(event);
    if (drag) {
      const band = overlay("div", "band");
      Object.assign(band.style, { left: Math.min(px, drag) + "px", width: Math.abs(px - drag) + "px", height: scene.bottom + "px" });
      return;
    }
    const over = px >= scene.left && px <= scene.right && py <= scene.bottom, found = over ? near([px, py]) : [];
    const note = overlay("div", "hover");
    note.replaceChildren();
    for (const { trace, at } of found) {
      const label = typeof trace.hover === "function" ? trace.hover(trace.x[at], trace.y[at]) : trace.hover[at];
      for (const text of linesIn(label)) box(note, "div", "", text);
    }
    note.hidden = !found.length;
    if (!found.length) return;
    const room = plot.clientWidth - note.offsetWidth - 8;
    Object.assign(note.style, { left: Math.max(0, px + 16 > room ? px - note.offsetWidth - 16 : px + 16) + "px", top: Math.max(0, py - 20) + "px" });
  });
  plot.addEventListener("pointerleave", () => { drag = null; plot.querySelector(".hover")?.remove(); plot.querySelector(".band")?.remove(); });
  plot.addEventListener("pointerdown", (event) => {
    if (!scene || !scene.zooms || event.button || event.target.closest(".legend")) return;
    const [px, py] = placeOf(event);
    if (py <= scene.bottom && px >= scene.left) drag = px;
  });
  plot.addEventListener("pointerup", (event) => {
    if (!scene || event.target.closest(".legend")) return;
    const [px, py] = placeOf(event), began = drag;
    drag = null;
    plot.querySelector(".band")?.remove();
    if (began !== null && Math.abs(px - began) > 8) {
      events.zoom([Math.min(px, began), Math.max(px, began)].map((each) => scene.invert(Math.min(each, scene.right))));
      return;
    }
    const close = near([px, py]).filter((each) => each.trace.customdata && Math.abs(each.point[1] - py) <= 12);
    if (close.length) events.choose(close[0].trace.customdata[close[0].at]);
  });
  plot.addEventListener("dblclick", (event) => { if (!event.target.closest(".legend")) events.reset(); });
  new ResizeObserver(() => {
    if (scene && !plot.layout.width && Number(scene.svg.getAttribute("width")) !== plot.clientWidth) draw(plot.data, plot.layout);
  }).observe(plot);
  return draw;
}
