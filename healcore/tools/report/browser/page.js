// Draws each run when the reader scrolls near it, for printing, and after a change of colours.

const plots = all.runs.map(attach).filter(Boolean);
function drawOnce(run) {
  if (run.drawn) return;
  run.drawn = true;
  run.draw();
}

// A plot is drawn when the reader scrolls near it, because drawing sixty plots takes long.
const near = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) drawOnce(plots.find((run) => run.plot === entry.target));
  }
}, { rootMargin: "800px" });
plots.forEach((run, number) => (number < 2 ? drawOnce(run) : near.observe(run.plot)));

const redraw = () => plots.filter((run) => run.drawn).forEach((run) => run.draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
matchMedia("(max-width: 760px)").addEventListener("change", redraw);

// Printed plots have the width of an A4 page, and folded sections are open.
addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((each) => { each.dataset.was = each.open; each.open = true; });
  plots.forEach((run) => { drawOnce(run); run.state.printing = true; run.draw(700); });
});
addEventListener("afterprint", () => {
  document.querySelectorAll("details").forEach((each) => { each.open = each.dataset.was === "true"; });
  plots.forEach((run) => { run.state.printing = false; run.draw(); });
});
