// Draws the plot of one run, adds its buttons, and links the plot to the table of incidents.

function attach(run, number) {
  const section = document.getElementById("s" + number);
  const plot = section.querySelector(".plot");
  if (!plot) return null;
  run.badRows = new Set(run.bad);
  const state = { range: null, recorded: false, logLoss: run.logLoss, logNorm: run.logNorm, printing: false };
  const paint = chart(plot, { zoom: show, reset: () => show(null), choose: (place) => choose(place, true) });

  function draw(width) {
    const figure = layout(run, state);
    if (width) figure.width = width;
    paint(traces(run, state), figure);
  }

  function show(range) {
    state.range = range;
    draw();
  }

  function choose(place, scroll) {
    for (const row of section.querySelectorAll("tr.chosen")) row.classList.remove("chosen");
    const row = document.getElementById("s" + number + "-i" + place);
    if (row) {
      row.classList.add("chosen");
      if (scroll) row.scrollIntoView({ block: "center", behavior: "smooth" });
    }
  }

  function zoomTo(place) {
    const at = span(run.incidents[place], state.recorded);
    if (!at) return;
    const [low, high] = whole(run, state);
    const room = Math.max((at[1] - at[0]) * 2, (high - low) * 0.03, 5);
    choose(place, false);
    show([at[0] - room, at[1] + room]);
    plot.scrollIntoView({ block: "center", behavior: "smooth" });
  }

  function move(by, factor) {
    const [low, high] = state.range || whole(run, state);
    const middle = (low + high) / 2 + by * (high - low), half = ((high - low) / 2) * factor;
    show([middle - half, middle + half]);
  }

  const bar = section.querySelector(".tools");
  function button(label, title, press, pressed) {
    const node = box(bar, "button", "", label);
    node.type = "button"; node.title = title;
    const update = () => { if (pressed) node.setAttribute("aria-pressed", String(pressed())); };
    node.addEventListener("click", () => { press(); update(); });
    update();
  }

  if (run.loss) button("log loss", "Logarithmic axis of the loss", () => { state.logLoss = !state.logLoss; draw(); }, () => state.logLoss);
  if (run.norm) button("log norm", "Logarithmic axis of the gradient norm", () => { state.logNorm = !state.logNorm; draw(); }, () => state.logNorm);
  if (run.undone.includes(1) && run.index && !run.isolated) {
    button("as recorded", "All steps in recorded order, including undone steps",
      () => { state.recorded = !state.recorded; show(null); }, () => state.recorded);
  }
  box(bar, "span", "gap");
  button("◀", "Earlier", () => move(-0.4, 1));
  button("▶", "Later", () => move(0.4, 1));
  button("+", "Zoom in", () => move(0, 0.5));
  button("−", "Zoom out", () => move(0, 2));
  button("whole run", "Reset the zoom", () => { choose(-1, false); show(null); });

  section.querySelector(".incidents")?.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-incident]");
    if (row) zoomTo(Number(row.dataset.incident));
  });
  return { draw, state, plot, drawn: false };
}
