"use strict";
// Pictures of runs: a slider over decoded mixes, transport plans, localization, confusions.
// Text from the data is only ever set as textContent, images only as data URIs (the page's policy).
(() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") element.textContent = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  };
  const image = (source, alt) => make("img", { src: source, alt, class: "pixels" });
  const labeled = (content, text) =>
    make("figure", { class: "tile" }, content, make("figcaption", { text }));
  const heading = (made) => make("summary", { text: made.caption ? `${made.run}: ${made.caption}` : made.run });

  function interpolations(made) {
    const last = made.shares.length - 1;
    const output = make("output", {});
    const slider = make("input", {
      type: "range", min: 0, max: last, step: 1, value: Math.round(last / 2), "aria-label": "share of the first image",
    });
    const strips = [];
    const rows = made.pairs.map((pair) => {
      const mixes = Object.entries(pair.rows).map(([name, strip]) => {
        const tile = make("div", { class: "strip pixels", role: "img", "aria-label": `${name} mix` });
        tile.style.backgroundImage = `url("${strip.replace(/["\\\n]/g, "")}")`;
        tile.style.backgroundSize = `${(last + 1) * 100}% 100%`;
        strips.push(tile);
        return labeled(tile, name);
      });
      return make("div", { class: "mixes" }, labeled(image(pair.first, pair.names[0]), pair.names[0]),
        ...mixes, labeled(image(pair.second, pair.names[1]), pair.names[1]));
    });
    const show = () => {
      const at = Number(slider.value);
      output.textContent = `\u03bb = ${made.shares[at].toFixed(2)}`;
      for (const strip of strips) strip.style.backgroundPosition = `${last ? (100 * at) / last : 0}% 0`;
    };
    slider.addEventListener("input", show);
    show();
    return [make("label", { class: "slider" }, slider, output), make("div", { class: "pairs" }, ...rows)];
  }

  function overlay(stack, [rows, columns]) {
    const layer = make("div", { class: "cells" });
    layer.style.gridTemplate = `repeat(${rows}, 1fr) / repeat(${columns}, 1fr)`;
    const cells = Array.from({ length: rows * columns }, () => make("div"));
    layer.append(...cells);
    stack.append(layer);
    return cells;
  }

  function transport(made) {
    const [rows, columns] = made.grid;
    const pairs = made.pairs.map((pair) => {
      const from = make("div", { class: "stack", tabindex: "0", role: "application",
        "aria-label": `positions of ${pair.names[0]}; move with the arrow keys` }, image(pair.first, pair.names[0]));
      const to = make("div", { class: "stack" }, image(pair.second, pair.names[1]));
      const sources = overlay(from, made.grid), targets = overlay(to, made.grid);
      const words = make("p", { class: "note", "aria-live": "polite" });
      let at = Math.floor(rows / 2) * columns + Math.floor(columns / 2);
      const show = () => {
        const mass = pair.plan[at], most = Math.max(...mass, 1);
        sources.forEach((cell, i) => cell.classList.toggle("chosen", i === at));
        targets.forEach((cell, j) => { cell.style.opacity = (0.85 * mass[j]) / most; });
        const best = mass.indexOf(Math.max(...mass));
        words.textContent = `Row ${Math.floor(at / columns) + 1}, column ${(at % columns) + 1}: ` +
          `${(mass[best] / 10).toFixed(0)} % of its mass goes to row ${Math.floor(best / columns) + 1}, column ${(best % columns) + 1}.`;
      };
      from.addEventListener("pointermove", (event) => {
        const box = from.getBoundingClientRect();
        const pick = (value, size, count) => Math.min(count - 1, Math.max(0, Math.floor((value / size) * count)));
        at = pick(event.clientY - box.top, box.height, rows) * columns + pick(event.clientX - box.left, box.width, columns);
        show();
      });
      from.addEventListener("keydown", (event) => {
        const [row, column] = [Math.floor(at / columns), at % columns];
        const moves = { ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1] };
        const next = moves[event.key];
        if (!next) return;
        event.preventDefault();
        at = Math.min(rows - 1, Math.max(0, next[0])) * columns + Math.min(columns - 1, Math.max(0, next[1]));
        show();
      });
      show();
      return make("div", { class: "pair" }, make("div", { class: "mixes two" },
        labeled(from, pair.names[0]), labeled(to, pair.names[1])), words);
    });
    return [make("div", { class: "pairs" }, ...pairs)];
  }

  function localization(made) {
    const tiles = made.examples.map((example) => {
      const [height, width] = example.size;
      const stack = make("div", { class: "stack" }, image(example.image, example.caption));
      const heat = image(example.heat, "class activation map");
      heat.classList.add("heat");
      stack.append(heat);
      const boxes = example.true_boxes.map((box) => ["true", box]);
      if (example.box) boxes.push(["found", example.box]);
      for (const [kind, [x0, y0, x1, y1]] of boxes) {
        const frame = make("div", { class: `box ${kind}` });
        Object.assign(frame.style, {
          left: `${(100 * x0) / width}%`, top: `${(100 * y0) / height}%`,
          width: `${(100 * (x1 - x0)) / width}%`, height: `${(100 * (y1 - y0)) / height}%`,
        });
        stack.append(frame);
      }
      return labeled(stack, `${example.caption}, IoU ${example.iou.toFixed(2)}`);
    });
    return [make("div", { class: "tiles" }, ...tiles)];
  }

  function confusion(made) {
    const count = made.classes.length;
    const most = Math.max(1, ...made.counts.flatMap((row, i) => row.filter((_, j) => i !== j)));
    const parts = [];
    if (count <= 20) {
      const cell = (value, i, j) => {
        const made = make("td", { class: i === j ? "right" : "", text: value || "" });
        if (i !== j && value) made.style.setProperty("--share", (0.1 + (0.6 * value) / most).toFixed(2));
        return made;
      };
      const head = make("tr", {}, make("td"), ...made.classes.map((name) => make("th", { scope: "col" }, make("span", { text: name }))));
      const rows = made.counts.map((row, i) =>
        make("tr", {}, make("th", { scope: "row", text: made.classes[i] }), ...row.map((value, j) => cell(value, i, j))));
      parts.push(make("div", { class: "scroll", tabindex: "0" },
        make("table", { class: "confusion" }, make("thead", {}, head), make("tbody", {}, ...rows))));
    }
    const pairs = made.counts.flatMap((row, i) => row.map((value, j) => [value, i, j])).filter(([value, i, j]) => value && i !== j);
    pairs.sort(([a], [b]) => b - a);
    if (count > 20) {
      const items = pairs.slice(0, 10).map(([value, i, j]) => make("li", { text: `${made.classes[i]} taken for ${made.classes[j]}: ${value}` }));
      parts.push(make("ol", {}, ...items));
    }
    const tiles = made.mistakes.map((one) =>
      labeled(image(one.image, one.true), `${one.predicted} (${one.confidence.toFixed(0)} %), is ${one.true}`));
    parts.push(make("div", { class: "tiles" }, ...tiles));
    return parts;
  }

  const painters = { interpolations, transport, localization, confusion };
  for (const place of document.querySelectorAll(".pictures")) {
    const made = data[place.dataset.kind][place.dataset.index];
    const details = make("details", {}, heading(made), ...painters[place.dataset.kind](made));
    details.open = place.dataset.index === "0"; // of several runs, the first
    place.append(details);
  }
})();
