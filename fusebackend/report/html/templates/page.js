"use strict";
// Filters the page by pattern and by words, goes from drawing to drawing by keys, unfolds what contains the target of a link, and highlights the edges of the node under the pointer.
// Without this script the page shows everything.
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const off = new Set();
  const search = document.getElementById("search");
  const texts = new Map(); // lower case, with tooltips: full module paths stand there
  const text = (element) => {
    if (!texts.has(element)) {
      const titles = [element, ...all("[title]", element)].map((e) => e.title || "");
      texts.set(element, [element.textContent, ...titles].join(" ").toLowerCase());
    }
    return texts.get(element);
  };

  function filter() {
    const words = search ? search.value.toLowerCase().split(/\s+/).filter(Boolean) : [];
    const lacks = (element) => words.some((word) => !text(element).includes(word));
    for (const element of all("[data-p]"))
      element.hidden = element.dataset.p.split(" ").every((p) => off.has(p)) || lacks(element);
    for (const row of all("#verdicts tbody tr, #breaks tbody tr, #changes tbody tr")) row.hidden = lacks(row);
    const found = all("[data-p]:not([hidden]), #verdicts tbody tr:not([hidden]), #breaks tbody tr:not([hidden])").length;
    if (search) document.getElementById("matching").textContent = words.length ? `${found} found` : "";
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

  if (search) search.addEventListener("input", filter);
  addEventListener("keydown", (event) => {
    if (!search || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && search.value) {
      search.value = "";
      filter();
    } else if (event.target === search) {
      return;
    } else if (event.key === "/") {
      event.preventDefault();
      search.focus();
    } else if (event.key === "n" || event.key === "p") {
      const shown = all("section.scene:not([hidden])");
      const top = (e) => e.getBoundingClientRect().top - 80; // below what sticks to the top
      const next = event.key === "n" ? shown.find((e) => top(e) > 1) : shown.reverse().find((e) => top(e) < -1);
      if (next) next.scrollIntoView({ block: "start" });
    }
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
    for (const [event, lit] of [["mouseenter", true], ["mouseleave", false]])
      node.addEventListener(event, () => edges().forEach((e) => e.classList.toggle("lit", lit)));
    for (const [event, lit] of [["focus", true], ["blur", false]])
      node.parentElement.addEventListener(event, () => edges().forEach((e) => e.classList.toggle("lit", lit)));
  }
  filter();
  reveal();
  document.documentElement.dataset.ready = String(all("svg .n").length);
})();
