// What the page's other element holds, and how it looks.

const all = JSON.parse(document.getElementById("data").textContent);

const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const narrow = () => matchMedia("(max-width: 760px)").matches;
