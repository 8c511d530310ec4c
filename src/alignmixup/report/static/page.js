"use strict";
// Behavior of the report page: sorting, filtering, CSV, charts, settings of two runs, pictures.
// Text from the data is only ever set as textContent.
(() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") element.textContent = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  };

  // Tables

  const valueOf = (cell) => (cell.dataset.value === undefined ? cell.textContent.trim() : cell.dataset.value);

  function sortBy(header) {
    const table = header.closest("table");
    const column = [...header.parentNode.children].indexOf(header);
    const down = header.getAttribute("aria-sort") === "ascending";
    for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const isNumber = header.classList.contains("number");
    const rows = all("tbody tr", table).map((row) => [valueOf(row.children[column]), row]);
    rows.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === ""); // what is missing stays last
      const order = isNumber ? Number(a) - Number(b) : a.localeCompare(b);
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }

  function csvOf(table) {
    const lines = all("tr", table).filter((row) => !row.hidden).map((row) =>
      [...row.children].map((cell) => {
        const chips = all(".chip", cell).map((chip) => chip.textContent);
        const text = chips.length ? chips.join("; ") : cell.textContent.trim();
        return `"${text.replaceAll('"', '""')}"`;
      }).join(","));
    return lines.join("\r\n") + "\r\n";
  }

  function download(name, text) {
    const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    const link = make("a", { href: address, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  document.addEventListener("click", (event) => {
    const sort = event.target.closest("button.sort");
    if (sort) sortBy(sort.closest("th"));
    const csv = event.target.closest("button.csv");
    if (csv) {
      const figure = csv.closest("figure");
      download(`${figure.dataset.name.replace(/[^\w.-]+/g, "_")}.csv`, csvOf(figure.querySelector("table")));
    }
  });

  // Filters

  const controls = { text: "filter", place: "place", smoke: "smoke", published: "published" };
  for (const [name, id] of Object.entries(controls)) controls[name] = document.getElementById(id);

  // A filter that would change nothing is not shown.
  controls.published.parentNode.hidden = !document.querySelector("tr.paper");
  controls.place.hidden = controls.place.options.length < 3;

  function applyFilters() {
    const words = controls.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const place = controls.place.value;
    const isHidden = (element) =>
      (place && element.dataset.place && element.dataset.place !== place) ||
      (element.hasAttribute("data-smoke") && !(controls.smoke && controls.smoke.checked));
    const filtered = (element) => !element.closest(".pictures, #difference");
    for (const row of all("main tbody tr").filter(filtered)) {
      const text = row.textContent.toLowerCase();
      row.hidden = isHidden(row) || words.some((word) => !text.includes(word)) ||
        (row.classList.contains("paper") && !controls.published.checked);
    }
    for (const chart of all("figure.chart")) chart.hidden = isHidden(chart);
    for (const group of all(".group")) group.hidden = all("figure.chart", group).every((chart) => chart.hidden);
    for (const figure of all("figure.table").filter(filtered)) {
      const rows = all("tbody tr", figure).filter((row) => !row.classList.contains("paper"));
      figure.hidden = rows.length > 0 && rows.every((row) => row.hidden);
      const hasVariants = rows.some((row) => !row.hidden && row.querySelector(".chip"));
      for (const cell of all(".variant", figure)) cell.hidden = !hasVariants;
    }
    // A section in which everything is hidden says so.
    for (const section of all("main section")) {
      const parts = all("figure.table, figure.chart", section).filter(filtered);
      const isEmpty = parts.length > 0 && parts.every((part) => part.hidden);
      let note = section.querySelector(".nothing");
      if (isEmpty && !note) {
        const text = "Nothing here with these filters; smoke tests are hidden unless ticked above.";
        section.append(note = make("p", { class: "note nothing", text }));
      }
      if (note) note.hidden = !isEmpty;
    }
    idle(drawNext);
  }
  const idle = window.requestIdleCallback || ((task) => setTimeout(task, 50));
  for (const control of Object.values(controls)) if (control) control.addEventListener("input", applyFilters);
  document.querySelector("form.controls").addEventListener("submit", (event) => event.preventDefault());

  // Charts: drawn when they come near the window, and the others when the browser is idle.

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function chartConfig(width) {
    const text = color("--text"), faint = color("--line"), muted = color("--muted");
    return {
      background: "transparent", font: "system-ui, sans-serif",
      axis: { labelFlush: false, tickCount: width < 500 ? 5 : 8, labelOverlap: true, labelColor: muted, titleColor: text, gridColor: faint, domainColor: faint, tickColor: faint,
              titleFontWeight: 500, labelFontSize: 11, titleFontSize: 12 },
      legend: { labelColor: text, titleColor: text, labelFontSize: 12, labelLimit: Math.min(420, width - 80), symbolStrokeWidth: 2, symbolBaseStrokeColor: muted,
                layout: { bottom: { anchor: "start", direction: width < 760 ? "vertical" : "horizontal", margin: 6 } },
                columns: Math.max(1, Math.min(6, Math.floor(width / 150))), padding: 4, rowPadding: 3, columnPadding: 14 },
      view: { stroke: null }, text: { color: text },
    };
  }

  const drawn = new Map();
  function draw(element) {
    if (drawn.has(element) || element.closest("[hidden]")) return;
    drawn.set(element, null);
    const isSmall = element.parentNode.classList.contains("small");
    const options = {
      ast: true, renderer: "svg", config: chartConfig(element.clientWidth),
      actions: isSmall ? false : { export: true, source: false, compiled: false, editor: false },
    };
    window.vegaEmbed(element, data.charts[element.dataset.chart], options)
      .then((view) => drawn.set(element, view));
  }

  const charts = all("[data-chart]");
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  }, { rootMargin: "400px" });
  charts.forEach((chart) => near.observe(chart));
  function drawNext() {
    const next = charts.find((chart) => !drawn.has(chart) && !chart.closest("[hidden]"));
    if (next) { draw(next); idle(drawNext); }
  }
  window.addEventListener("beforeprint", () => charts.forEach(draw));
  function redraw() {
    for (const [element, view] of drawn) { if (view) view.finalize(); element.replaceChildren(); }
    drawn.clear();
    charts.forEach(draw);
  }
  dark.addEventListener("change", redraw);
  // Legends have as many columns as fit: another width needs others.
  let width = window.innerWidth, waiting;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if (window.innerWidth !== width) { width = window.innerWidth; redraw(); } }, 200);
  });

  // Settings of two runs

  function showDifference() {
    const [first, second] = pickers.map((picker) => data.runs[picker.value]);
    const names = [...new Set([...Object.keys(first.settings), ...Object.keys(second.settings)])];
    const rows = names
      .map((name) => [name, first.settings[name] ?? "default", second.settings[name] ?? "default"])
      .filter(([, a, b]) => a !== b);
    const target = document.getElementById("difference");
    if (!rows.length) {
      target.replaceChildren(make("p", { text: "No recorded setting differs." }));
      return;
    }
    const head = make("tr", {}, ...["Setting", first.title, second.title].map((text) => make("th", { scope: "col", text })));
    const body = rows.map(([name, a, b]) =>
      make("tr", {}, make("th", { scope: "row", text: name }), make("td", { text: a }), make("td", { text: b })));
    const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
    const csv = make("button", { type: "button", class: "csv", text: "CSV" });
    target.replaceChildren(make("figure", { class: "table", "data-name": "settings" },
      make("div", { class: "scroll", tabindex: "0" }, table), make("div", { class: "below" }, csv)));
  }
  const pickers = all(".pickers select");
  if (pickers.length) {
    if (data.runs.length > 1) pickers[1].value = "1";
    pickers.forEach((picker) => picker.addEventListener("input", showDifference));
    showDifference();
  }

  applyFilters();
})();
