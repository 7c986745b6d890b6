// Drawing: small SVG charts without any library. Every text comes in by textContent, never as markup.

const SVG_NS = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 4", "2 3", "10 3 2 3", "14 4", "5 2 1 2", "1 4", "8 2 2 2 2 2"];
const COLOURS = 8;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const make = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) => fill(document.createElementNS(SVG_NS, tag), attributes, children);

// ---- words and numbers ----

const digits = (step) => (String(Number(step.toPrecision(6))).split(".")[1] || "").length; // that tell two steps apart
const level = (x, step) => percent(x, digits(100 * step));
const percent = (x, digits = 1) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(digits)}%`);
function human(n, units, base) {
  let i = 0;
  while (Math.abs(n) >= base * 0.9995 && i < units.length - 1) { n /= base; i += 1; }
  return `${Math.abs(n) >= 99.95 || i === 0 ? n.toFixed(0) : n.toFixed(1)} ${units[i]}`;
}
const bytes = (n) => human(n, ["B", "kB", "MB", "GB", "TB"], 1000);
function seconds(s) {
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 59.5) return `${s.toFixed(0)} s`;
  const whole = Math.round(s);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}
function moment(s) { // as `seconds`, for what may take less than a tenth of one
  if (s >= 0.9995) return seconds(s);
  return `${(1000 * s).toFixed(s === 0 || s >= 0.09995 ? 0 : s >= 0.009995 ? 1 : 2)} ms`;
}
const plus = (pair, format) => (pair === null ? "–" : format(pair[0]) + (pair.length > 1 ? ` ± ${format(pair[1])}` : ""));

function ticks(low, high, count, whole = false) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).find((m) => m * power >= raw * 0.999);
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Number(v.toPrecision(12)));
  return found;
}
const scale = (low, high, from, to) => (v) => (high > low ? from + ((v - low) / (high - low)) * (to - from) : (from + to) / 2);

const extent = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);

// ---- colours ----

const isDark = () => document.documentElement.dataset.theme === "dark";
const dashOf = (i) => DASHES[(i + Math.floor(i / COLOURS)) % DASHES.length]; // with the colour, 64 that differ
const colour = (i) => `var(--c${i % COLOURS})`;
function rgb(name) {
  const value = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => parseInt(value.slice(at, at + 2), 16));
}
const RAMPS = {
  light: [[247, 249, 252], [190, 216, 238], [94, 158, 208], [24, 96, 160], [6, 40, 92]],
  dark: [[25, 30, 40], [28, 66, 104], [38, 112, 168], [96, 178, 230], [226, 244, 255]],
};
const APART = { light: [[179, 78, 0], [232, 235, 240], [0, 92, 150]], dark: [[255, 150, 80], [66, 72, 86], [100, 190, 240]] };
function along(stops, t) {
  const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  return stops[i].map((v, k) => v + (at - i) * (stops[i + 1][k] - v));
}
const ramp = (t) => along(RAMPS[isDark() ? "dark" : "light"], t);
const apart = (t) => along(APART[isDark() ? "dark" : "light"], t);
const inkOn = ([r, g, b]) => (0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10141c" : "#ffffff");
const css = ([r, g, b]) => `rgb(${r | 0},${g | 0},${b | 0})`;

// ---- the tip beside the pointer ----

const tip = make("div", { class: "tip", hidden: true, role: "status", "aria-live": "polite" });
function showTip(x, y, head, rows) {
  tip.replaceChildren(make("div", { text: head }));
  for (const [name, value] of rows) tip.append(make("div", { class: "row" }, make("span", { text: name }), make("b", { text: value })));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 6))}px`;
  tip.style.top = `${y + box.height + 24 > innerHeight ? Math.max(4, y - box.height - 14) : y + 16}px`;
}
const hideTip = () => { tip.hidden = true; };

// ---- pieces ----

const widthOf = (host, least = 240) => Math.max(least, Math.floor(host.clientWidth || 480));

function frame(host, label, width, height) {
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  host.append(svg);
  return svg;
}

function axes(svg, area, x, y, spec) {
  const wide = area.right - area.left;
  const levels = ticks(...y.domain, Math.max(2, (area.bottom - area.top) / 46)), step = levels.length > 1 ? levels[1] - levels[0] : 1;
  for (const v of levels) {
    svg.append(draw("line", { class: "grid-line", x1: area.left, x2: area.right, y1: y(v), y2: y(v) }),
      draw("text", { x: area.left - 7, y: y(v) + 4, "text-anchor": "end", text: spec.yText(v, step) }));
  }
  const marks = ticks(...x.domain, Math.max(2, wide / 80), spec.xWhole).filter((v) => !spec.xWhole || Number.isInteger(v));
  for (const v of marks) {
    svg.append(draw("line", { class: "axis-line", x1: x(v), x2: x(v), y1: area.bottom, y2: area.bottom + 4 }),
      draw("text", { x: x(v), y: area.bottom + 17, "text-anchor": "middle", text: spec.xText(v) }));
  }
  svg.append(draw("line", { class: "axis-line", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }),
    draw("text", { x: (area.left + area.right) / 2, y: area.bottom + 33, "text-anchor": "middle", text: spec.xLabel }));
}

function marker(shape, x, y, r, attributes) {
  if (shape % 4 === 1) return draw("rect", { x: x - r * 0.85, y: y - r * 0.85, width: r * 1.7, height: r * 1.7, ...attributes });
  if (shape % 4 === 2) return draw("path", { d: `M${x} ${y - r * 1.15}L${x + r * 1.1} ${y + r * 0.85}H${x - r * 1.1}Z`, ...attributes });
  if (shape % 4 === 3) return draw("path", { d: `M${x} ${y - r * 1.25}L${x + r * 1.25} ${y}L${x} ${y + r * 1.25}L${x - r * 1.25} ${y}Z`, ...attributes });
  return draw("circle", { cx: x, cy: y, r, ...attributes });
}

function legend(host, entries, hidden, toggled) {
  const list = make("ul", { class: "legend", "aria-label": "legend: press to hide or show" });
  for (const e of entries) {
    const key = draw("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" });
    if (e.line !== false) key.append(draw("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: e.colour, "stroke-width": e.width || 2, "stroke-dasharray": e.dash }));
    if (e.shape !== undefined) key.append(marker(e.shape, 13, 5, 3.6, { fill: e.colour }));
    const button = make("button", { type: "button", "data-key": e.id, "aria-pressed": String(!hidden.has(e.id)), onclick: () => toggled(e.id) }, key, make("span", { text: e.name }));
    list.append(make("li", {}, button));
  }
  host.append(list);
}

// ---- lines with bands ----

// spec: lines [{id, name, colour, dash, shape, x, y, low, high}], xLabel, xText, yText, hidden, toggled, label
function lineChart(host, spec) {
  const { hidden } = spec;
  if (spec.lines.length > 1 || spec.always) legend(host, spec.lines, hidden, spec.toggled);
  const shown = spec.lines.filter((l) => !hidden.has(l.id) && l.x.length);
  const holder = make("div", { class: "chart", tabindex: "0", role: "group", "aria-label": `${spec.label}; left and right arrows read values` });
  host.append(holder);
  const width = widthOf(host), height = spec.height || Math.round(Math.min(340, Math.max(230, width * 0.52)));
  const svg = frame(holder, spec.label, width, height);
  const area = { left: 46, right: width - 14, top: 10, bottom: height - 40 };
  const known = spec.lines.filter((l) => l.x.length);
  const all = (shown.length ? shown : known).flatMap((l) => [...(l.low || l.y), ...(l.high || l.y)]).filter((v) => v !== null);
  const xs = known.flatMap((l) => l.x);
  if (!xs.length || !all.length) { holder.append(make("p", { class: "empty", text: "nothing to draw yet" })); svg.remove(); return; }
  let [low, high] = extent(all);
  const room = Math.max((high - low) * 0.06, 0.01);
  [low, high] = spec.range || [Math.max(0, low - room), Math.min(spec.most ?? Infinity, high + room)];
  const [first, last] = extent(xs), xDomain = [spec.xFrom ?? first, last];
  const x = scale(...xDomain, area.left, area.right), y = scale(low, high, area.bottom, area.top);
  x.domain = xDomain; y.domain = [low, high];
  axes(svg, area, x, y, spec);
  for (const l of shown) {
    const at = l.x.map((v, i) => [x(v), l.y[i]]).filter(([, v]) => v !== null).map(([a, v]) => [a, y(v)]);
    if (l.low && l.low.some((v, i) => v !== l.high[i])) {
      const edge = [...l.x.map((v, i) => `${x(v).toFixed(1)} ${y(l.high[i]).toFixed(1)}`), ...l.x.map((v, i) => `${x(v).toFixed(1)} ${y(l.low[i]).toFixed(1)}`).reverse()];
      svg.append(draw("path", { class: "band", d: `M${edge.join("L")}Z`, fill: l.colour, opacity: 0.16 }));
    }
    if (at.length > 1) svg.append(draw("path", { class: "line", "data-line": l.id, d: `M${at.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L")}`, fill: "none", stroke: l.colour, "stroke-width": l.width || 2, "stroke-dasharray": l.dash, "stroke-linejoin": "round" }));
    const every = Math.max(1, Math.ceil(at.length / 12));
    at.forEach(([a, b], i) => { if (at.length === 1 || (l.shape !== undefined && (at.length - 1 - i) % every === 0)) svg.append(marker(l.shape || 0, a, b, 3.2, { class: "mark", "data-line": l.id, fill: l.colour })); });
  }
  const guide = draw("line", { class: "axis-line", y1: area.top, y2: area.bottom, visibility: "hidden" });
  svg.append(guide);
  const stops = [...new Set(shown.flatMap((l) => l.x))].sort((a, b) => a - b);
  let place = stops.length - 1;
  const point = (i) => {
    place = Math.min(Math.max(i, 0), stops.length - 1);
    const v = stops[place];
    if (v === undefined) return;
    guide.setAttribute("x1", x(v)); guide.setAttribute("x2", x(v)); guide.setAttribute("visibility", "visible");
    const reach = spec.exact ? 0 : (xDomain[1] - xDomain[0]) * 0.03;
    const rows = shown.map((l) => { const near = nearest(l.x, v); return [l.name, Math.abs(l.x[near] - v) <= reach ? l.y[near] : null]; })
      .filter(([, value]) => value !== null && value !== undefined).sort((a, b) => b[1] - a[1]).slice(0, 14).map(([n, value]) => [n, (spec.tipText || spec.yText)(value)]);
    const box = svg.getBoundingClientRect();
    showTip(box.left + (x(v) / width) * box.width, box.top + box.height * 0.2, spec.tipHead(v), rows);
  };
  const leave = () => { guide.setAttribute("visibility", "hidden"); hideTip(); };
  holder.addEventListener("pointermove", (e) => {
    const box = svg.getBoundingClientRect();
    const at = ((e.clientX - box.left) / box.width) * width;
    point(nearest(stops.map(x), at));
  });
  holder.addEventListener("pointerleave", leave);
  holder.addEventListener("blur", leave);
  holder.addEventListener("keydown", (e) => {
    if (e.key === "ArrowLeft" || e.key === "ArrowRight") { e.preventDefault(); point(place + (e.key === "ArrowLeft" ? -1 : 1)); }
    if (e.key === "Escape") leave();
  });
}
function nearest(values, v) {
  let best = 0;
  for (let i = 1; i < values.length; i += 1) if (Math.abs(values[i] - v) < Math.abs(values[best] - v)) best = i;
  return best;
}

// ---- bars made of parts ----

// spec: parts [[id, name]], bars [{name, of: {id: value}}], text(value), hidden, toggled, label
function stackedBars(host, spec) {
  const { parts, bars, text, hidden } = spec, lane = 46;
  legend(host, parts.map(([id, name], i) => ({ id, name, colour: colour(i), shape: 1, line: false })), hidden, spec.toggled);
  const shown = parts.map(([id, name], i) => ({ id, name, tone: colour(i) })).filter(({ id }) => !hidden.has(id));
  const rowsOf = (bar) => shown.map(({ id, name }) => [name, text(bar.of[id] || 0)]);
  const sumOf = (bar) => shown.reduce((a, { id }) => a + (bar.of[id] || 0), 0);
  const words = bars.length > 4 ? `${bars.length} bars, their numbers are under “data”` : bars.map((bar) => `${bar.name}: ${rowsOf(bar).map((r) => r.join(" ")).join(", ")}`).join("; ");
  const holder = make("div", { class: "chart", tabindex: "0", role: "group", "aria-label": `${spec.label}; arrow keys read the bars` });
  host.append(holder);
  const width = widthOf(host), svg = frame(holder, `${spec.label}: ${words}`, width, 12 + lane * bars.length);
  const x = scale(0, Math.max(1e-9, ...bars.map(sumOf)), 0, width - 90);
  bars.forEach((bar, at) => {
    let sum = 0;
    svg.append(draw("text", { x: 0, y: lane * at + 14, text: bar.name.slice(0, Math.floor(width / 6.5)) }));
    for (const { id, name, tone } of shown) {
      const value = bar.of[id] || 0, wide = x(value), from = x(sum);
      sum += value;
      svg.append(draw("rect", { class: "phase", x: from, y: lane * at + 19, width: Math.max(0, wide - 0.8), height: 20, rx: 2, fill: tone, onpointermove: (e) => showTip(e.clientX, e.clientY, bar.name, [[name, text(value)]]), onpointerleave: hideTip }));
      const inside = [`${name} ${text(value)}`, text(value)].find((t) => wide > 6.2 * t.length + 10);
      if (inside) { const label = draw("text", { class: "inside", x: from + 6, y: lane * at + 33, text: inside }); label.style.fill = isDark() ? "#0d1118" : "#fff"; svg.append(label); }
    }
    svg.append(draw("text", { x: x(sum) + 6, y: lane * at + 33, text: text(sum) }));
  });
  let place = -1;
  holder.addEventListener("blur", hideTip);
  holder.addEventListener("keydown", (e) => {
    const step = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1 }[e.key];
    if (e.key === "Escape") hideTip();
    if (!step) return;
    e.preventDefault();
    place = Math.min(Math.max(place + step, 0), bars.length - 1);
    const box = svg.getBoundingClientRect();
    showTip(box.left + 20, box.top + ((lane * place + 40) / (12 + lane * bars.length)) * box.height, bars[place].name, [...rowsOf(bars[place]), ["together", text(sumOf(bars[place]))]]);
  });
}

// ---- heat maps ----

// One pixel a cell, scaled up: thousands of cells cost one image.
function picture(columns, rows, paint) {
  const canvas = document.createElement("canvas");
  canvas.width = columns; canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  for (let r = 0; r < rows; r += 1) for (let c = 0; c < columns; c += 1) {
    const found = paint(r, c), at = 4 * (r * columns + c);
    if (found === null) continue;
    image.data[at] = found[0]; image.data[at + 1] = found[1]; image.data[at + 2] = found[2]; image.data[at + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

// spec: rows, columns (names), value(r, c) -> [0, 1] or null, text(r, c), tip(r, c) -> [head, rows], xLabel, yLabel, label
function heatMap(host, spec) {
  const nr = spec.rows.length, nc = spec.columns.length;
  const width = widthOf(host, 260);
  const longest = Math.max(...spec.rows.map((n) => n.length)), left = Math.min(110, 22 + 6.4 * Math.min(longest, 14));
  const side = Math.min((width - left - 10) / nc, spec.most || 46), tall = spec.square === false ? Math.min(Math.max(240 / nr, 9), 22) : side;
  const area = { left, top: 8, right: left + side * nc, bottom: 8 + tall * nr };
  const holder = make("div", { class: "chart" });
  host.append(holder);
  const svg = frame(holder, spec.label, width, area.bottom + 42);
  const paint = spec.paint || ramp;
  const image = draw("image", { class: "cells", x: area.left, y: area.top, width: side * nc, height: tall * nr, preserveAspectRatio: "none" });
  image.style.imageRendering = "pixelated";
  svg.append(image, draw("rect", { x: area.left, y: area.top, width: side * nc, height: tall * nr, fill: "none", class: "axis-line" }));
  const texts = draw("g", {});
  svg.append(texts);
  const everyR = Math.ceil(12 / tall), everyC = Math.ceil(26 / side);
  spec.rows.forEach((n, i) => { if (i % everyR === 0) svg.append(draw("text", { x: area.left - 6, y: area.top + tall * (i + 0.5) + 4, "text-anchor": "end", text: n.length > 15 ? `${n.slice(0, 14)}…` : n })); });
  spec.columns.forEach((n, i) => { if (i % everyC === 0) svg.append(draw("text", { x: area.left + side * (i + 0.5), y: area.bottom + 14, "text-anchor": "middle", text: n.length > 6 && side < 46 ? n.slice(0, 6) : n })); });
  svg.append(draw("text", { x: (area.left + area.right) / 2, y: area.bottom + 31, "text-anchor": "middle", text: spec.xLabel }),
    draw("text", { x: 10, y: (area.top + area.bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 10 ${(area.top + area.bottom) / 2})`, text: spec.yLabel }));
  const update = () => {
    image.setAttribute("href", picture(nc, nr, (r, c) => { const v = spec.value(r, c); return v === null ? null : paint(v); }));
    texts.replaceChildren();
    if (spec.text && side >= 25 && tall >= 16) for (let r = 0; r < nr; r += 1) for (let c = 0; c < nc; c += 1) {
      const v = spec.value(r, c), t = spec.text(r, c);
      if (v !== null && t) texts.append(draw("text", { class: "cell-text", x: area.left + side * (c + 0.5), y: area.top + tall * (r + 0.5) + 4, "text-anchor": "middle", fill: inkOn(paint(v)), text: t }));
    }
    for (const t of texts.children) t.style.fill = t.getAttribute("fill");
  };
  update();
  holder.addEventListener("pointermove", (e) => {
    const box = svg.getBoundingClientRect(), k = width / box.width;
    const c = Math.floor(((e.clientX - box.left) * k - area.left) / side), r = Math.floor(((e.clientY - box.top) * k - area.top) / tall);
    if (c < 0 || r < 0 || c >= nc || r >= nr) hideTip();
    else showTip(e.clientX, e.clientY, ...spec.tip(r, c));
  });
  holder.addEventListener("pointerleave", hideTip);
  return update;
}

function scaleBar(host, paint, from, to) {
  const holder = make("div", { class: "controls" }, make("span", { text: from }));
  const svg = draw("svg", { viewBox: "0 0 120 8", "aria-hidden": "true" });
  svg.style.width = "120px";
  for (let i = 0; i < 40; i += 1) svg.append(draw("rect", { x: i * 3, y: 0, width: 3.2, height: 8, fill: css(paint(i / 39)) }));
  holder.append(svg, make("span", { text: to }));
  host.append(holder);
}

// ---- tables ----

function table(head, rows, classes = []) {
  const row = (cells, tag) => make("tr", {}, ...cells.map((c, i) => (c instanceof Node ? fill(make(tag, { class: classes[i] }), {}, [c]) : make(tag, { class: classes[i], text: c === null ? "–" : String(c) }))));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" }, make("table", {}, make("thead", {}, row(head, "th")), make("tbody", {}, ...rows.map((r) => row(r, "td")))));
}
