"use strict";
// Sorts tables by a click on a column's head, filters them by what is typed, and names the cells of wide ones for a phone.
for (const table of document.querySelectorAll(".scroll table")) {
  const heads = Array.from(table.tHead ? table.tHead.rows[0].cells : [], (cell) => cell.textContent.trim());
  if (heads.length < 4) continue;
  table.classList.add("cards");
  for (const row of table.tBodies[0].rows) {
    Array.from(row.cells).forEach((cell, i) => { if (cell.tagName === "TD" && heads[i]) cell.dataset.label = heads[i]; });
  }
}
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0];
  const original = Array.from(body.rows);
  const key = (row, i) => {
    const cell = row.cells[i];
    const v = cell.dataset.v;
    return v === undefined ? cell.textContent.trim().toLowerCase() : Number(v);
  };
  table.querySelectorAll("th.sort button").forEach((button) => {
    const head = button.parentElement;
    button.addEventListener("click", () => {
      const was = head.getAttribute("aria-sort");
      const numeric = head.classList.contains("num");
      const next = was === "none" ? (numeric ? "descending" : "ascending")
        : was === (numeric ? "descending" : "ascending") ? (numeric ? "ascending" : "descending") : "none";
      table.querySelectorAll("th.sort").forEach((h) => h.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", next);
      const sign = next === "ascending" ? 1 : -1;
      const i = head.cellIndex;
      const rows = next === "none" ? original : Array.from(original).sort((a, b) => {
        const x = key(a, i), y = key(b, i);
        return x < y ? -sign : x > y ? sign : 0;
      });
      body.append(...rows);
    });
  });
}
for (const input of document.querySelectorAll("input[data-filter]")) {
  const table = document.getElementById(input.dataset.filter);
  const shown = document.getElementById(input.dataset.filter + "-shown");
  const rows = Array.from(table.tBodies[0].rows).map((row) => [row, row.textContent.toLowerCase()]);
  const all = shown.textContent;
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const [row, text] of rows) {
      const fits = words.every((word) => text.includes(word));
      row.hidden = !fits;
      count += fits;
    }
    shown.textContent = words.length ? count + " of " + rows.length + " rows" : all;
  });
}
