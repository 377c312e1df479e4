// The data in the page, and the colours in its style sheet.

const all = JSON.parse(document.getElementById("data").textContent);

const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const narrow = () => matchMedia("(max-width: 760px)").matches;
