// Draws every run, when it comes near, on paper, and in other colours.

const plots = all.runs.map(attach).filter(Boolean);
function first(each) {
  if (each.drawn) return;
  each.drawn = true;
  each.draw();
}

// A page of sixty plots would take its time: each is drawn when it comes near.
const near = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) first(plots.find((each) => each.plot === entry.target));
  }
}, { rootMargin: "800px" });
plots.forEach((each, place) => (place < 2 ? first(each) : near.observe(each.plot)));

const again = () => plots.filter((each) => each.drawn).forEach((each) => each.draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
matchMedia("(max-width: 760px)").addEventListener("change", again);

// On paper: the whole width of an A4 page, and everything that is folded up.
addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((each) => { each.dataset.was = each.open; each.open = true; });
  plots.forEach((each) => { first(each); each.state.printing = true; each.draw(700); });
});
addEventListener("afterprint", () => {
  document.querySelectorAll("details").forEach((each) => { each.open = each.dataset.was === "true"; });
  plots.forEach((each) => { each.state.printing = false; each.draw(); });
});
