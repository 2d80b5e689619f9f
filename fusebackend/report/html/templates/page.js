"use strict";
// Filters the page by pattern, unfolds what contains the target of a link, and highlights the edges of the node under the pointer.
// Without this script the page shows everything.
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const off = new Set();

  function filter() {
    for (const element of all("[data-p]")) element.hidden = element.dataset.p.split(" ").every((p) => off.has(p));
    for (const shown of all("[data-count]")) {
      const rows = all("tbody tr", document.getElementById(shown.dataset.count));
      const visible = rows.filter((row) => !row.hidden);
      const sum = (list) => list.reduce((total, row) => total + Number(row.dataset.n), 0);
      shown.textContent = visible.length < rows.length ? `${sum(visible)} of ${sum(rows)}` : `${sum(rows)}`;
    }
  }
  for (const button of all("nav button"))
    button.addEventListener("click", () => {
      const p = button.dataset.filter;
      off.has(p) ? off.delete(p) : off.add(p);
      button.setAttribute("aria-pressed", String(!off.has(p)));
      filter();
    });

  function reveal() {
    const target = document.getElementById(location.hash.slice(1));
    if (!target) return;
    for (let e = target; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
    target.scrollIntoView({ block: "center", inline: "nearest" });
    const panel = target.closest(".code");
    if (panel) panel.scrollLeft = 0; // show the line of code from its beginning
  }
  addEventListener("hashchange", reveal);

  for (const node of all("svg .n")) {
    const picture = node.closest("svg");
    const edges = () => all(`.e[data-a="${node.dataset.n}"], .e[data-b="${node.dataset.n}"]`, picture);
    node.addEventListener("mouseenter", () => edges().forEach((e) => e.classList.add("lit")));
    node.addEventListener("mouseleave", () => edges().forEach((e) => e.classList.remove("lit")));
  }
  filter();
  reveal();
  document.documentElement.dataset.ready = String(all("svg .n").length);
})();
