// The page: header, figures and their controls, the theme, and the live view. State outlives every redrawing.

const POLL_MS = 2000;
const live = document.documentElement.dataset.live === "true";
let data = JSON.parse(document.getElementById("data").textContent);
let version = "";
const state = { focus: null, figures: {} };
const cards = new Map();
const $ = (id) => document.getElementById(id);
const focused = () => data.groups.find((g) => g.label === state.focus) || data.groups[0];

// ---- cards ----

function card(figure) {
  const s = (state.figures[figure.id] = { hidden: new Set() });
  const parts = { of: make("span", { class: "of" }), controls: make("div", { class: "controls" }), body: make("div", { class: "body" }), caption: make("figcaption", {}), widgets: [] };
  for (const c of figure.controls || []) parts.widgets.push(widget(figure, c, s, parts));
  const details = make("details", { class: "data" }, make("summary", { text: "data" }));
  details.addEventListener("toggle", () => fillDetails(figure, s, details));
  const root = make("figure", { class: figure.wide ? "card wide" : "card", id: `figure-${figure.id}`, "aria-labelledby": `title-${figure.id}` },
    make("header", {}, make("h2", { id: `title-${figure.id}`, text: figure.title }), parts.of), parts.controls, parts.body, parts.caption, details);
  return { figure, s, root, details, ...parts };
}

function widget(figure, c, s, parts) {
  const redraw = () => drawCard(cards.get(figure.id));
  if (c.type === "select") {
    const select = make("select", { onchange: () => { s[c.key] = select.value; redraw(); } });
    parts.controls.append(make("label", {}, make("span", { text: c.label }), select));
    return () => {
      const options = c.options(data, focused(), s), key = JSON.stringify(options);
      if (select.dataset.options !== key) {
        select.replaceChildren(...options.map(([value, text]) => make("option", { value, text })));
        select.dataset.options = key;
      }
      if (!options.some(([value]) => value === s[c.key])) s[c.key] = c.initial ? c.initial(data, focused()) : options[0][0];
      select.value = s[c.key];
      select.parentElement.hidden = options.length < 2;
    };
  }
  const slider = make("input", { type: "range", "data-key": c.key, "aria-label": c.label }), shown = make("output", {});
  slider.addEventListener("input", () => {
    s[c.key] = Number(slider.value);
    s[`${c.key} follows`] = c.follow && slider.value === slider.max;
    shown.textContent = c.text(data, s[c.key], focused());
    if (s.live) s.live(); else redraw();
  });
  parts.controls.append(make("label", {}, make("span", { text: c.label }), slider, shown));
  return () => {
    const [low, high] = c.range(data, focused());
    slider.min = low; slider.max = high;
    if (s[c.key] === undefined) { s[c.key] = c.initial ? c.initial(data, focused()) : high; s[`${c.key} follows`] = c.follow && !c.initial; }
    if (s[`${c.key} follows`]) s[c.key] = high;
    s[c.key] = Math.min(high, Math.max(low, s[c.key]));
    slider.value = s[c.key];
    shown.textContent = c.text(data, s[c.key], focused());
    slider.parentElement.hidden = high <= low;
  };
}

function drawCard(c) {
  const g = focused(), { figure, s, body } = c;
  if (c.root.hidden) return;
  for (const update of c.widgets) update();
  const key = body.contains(document.activeElement) && document.activeElement.dataset.key;
  s.live = null;
  const height = body.offsetHeight;
  body.style.minHeight = `${height}px`; // no jump while it is empty
  body.replaceChildren();
  figure.draw(body, data, g, s, () => drawCard(c));
  body.style.minHeight = "";
  if (key) [...body.querySelectorAll("[data-key]")].find((b) => b.dataset.key === key)?.focus();
  c.of.textContent = figure.per && several(data) ? g.label : "";
  c.caption.textContent = figure.how(data, g);
  if (c.details.open) fillDetails(figure, s, c.details);
}

function fillDetails(figure, s, details) {
  if (!details.open) return;
  const { head, rows } = figure.rows(data, focused(), s), most = 200;
  const quote = (v) => (/[",\n]/.test(String(v)) ? `"${String(v).replaceAll('"', '""')}"` : String(v ?? ""));
  const save = make("button", { type: "button", text: `save all ${rows.length} rows as CSV`, onclick: () => {
    const text = [head, ...rows].map((r) => r.map(quote).join(",")).join("\n");
    const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    const link = make("a", { href: url, download: `${figure.id}.csv` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  } });
  details.replaceChildren(details.firstChild, save, table(head, rows.slice(0, most)), rows.length > most ? make("p", { class: "of", text: `${rows.length - most} more rows in the CSV` }) : "");
}

// ---- top of the page ----

function tile(what, value, more) {
  return make("div", { class: "tile" }, make("div", { class: "what", text: what }), make("div", { class: "value", text: value }), make("div", { class: "more", text: more || "" }));
}

function overview() {
  const host = $("overview");
  host.replaceChildren();
  if (!data.groups.length) { host.append(make("p", { class: "empty", text: live ? "Waiting for the run to begin." : "There is nothing to show." })); return; }
  const main = (g) => g.lines.find((l) => isMain(g, l));
  if (!several(data)) {
    const g = data.groups[0], line = main(g), runs = data.runs, done = runs.map((r) => r.done), box = make("div", { class: "tiles" });
    if (line) {
      box.append(tile("accuracy", plus(line.last, (v) => percent(v)), `${nameOf(line)}, last round`), tile("best", plus(line.best, (v) => percent(v)), "best round: for orientation"));
    }
    if (g.personal) {
      const [mean, weighted] = [g.personal.mean.at(-1), g.personal.weighted.at(-1)];
      if (line?.kind !== "own") box.append(tile("own models", percent(mean), "mean of the clients, on their own test splits"));
      if (weighted !== null) box.append(tile("weighted by samples", percent(weighted), "clients' own models, each test sample counts the same"));
      box.append(tile("worst tenth", percent(g.personal.worst.at(-1)), "of the clients' own models"));
    }
    const wanted = runs[0].wanted;
    box.append(tile("rounds", wanted ? `${Math.max(...done)} of ${wanted}` : String(Math.max(...done)), [...new Set(runs.map((r) => r.status))].join(", ")));
    if (g.traffic.down) box.append(tile("sent", bytes(g.traffic.down[0] + g.traffic.up[0]), `${bytes(g.traffic.down[0])} down, ${bytes(g.traffic.up[0])} up`));
    if (g.time) box.append(tile("time", seconds(g.time[0]), runs.length > 1 ? "mean of the runs" : ""));
    host.append(box);
    return;
  }
  host.append(make("div", { class: "card wide" }, ...sections().flatMap(({ title, lines }) => [make("h3", { text: title }), ranking(lines)]),
    make("p", { class: "of", text: "Accuracy after the last round, ± standard deviation over seeds; ★ marks the highest of results that are alike. “Best” is the best round on the test set: for orientation, not for selection." })));
}

// What may be ranked together: the main result (without one that all share, everybody's), and servers' own models.
function sections() {
  const main = (g) => g.lines.find((l) => isMain(g, l));
  const keys = new Set(data.groups.map(main).filter(Boolean).map(alike));
  if (data.groups.some((g) => g.lines.some((l) => l.kind === "server"))) keys.add("server");
  const words = ({ kind, name }) => (kind === "server" ? "The server's own model, on the whole test set" : kind === "own" ? "Clients' own models, on their own test splits" : `${nameOf({ kind, name })}, on the whole test set`);
  const found = [...keys].map((key) => {
    const lines = data.groups.flatMap((g) => g.lines.filter((l) => alike(l) === key).map((l) => [g, l]));
    const shared = data.main_shared && alike(main(lines[0][0]) ?? {}) === key;
    return { title: `${shared ? "Main result, which all cases have: " : ""}${words(lines[0][1])}`, lines };
  });
  const waiting = data.groups.filter((g) => !main(g)).map((g) => [g, null]);
  return waiting.length ? [...found, { title: "No main result yet", lines: waiting }] : found;
}

function ranking(lines) {
  const top = lines.length > 1 ? Math.max(...lines.map(([, line]) => line?.last[0] ?? -1)) : null;
  const own = lines.some(([, line]) => line?.kind === "own");
  const rows = lines.map(([g, line]) => {
    const number = data.groups.indexOf(g), runs = data.runs.filter((r) => r.group === number);
    const name = make("span", {}, make("span", { class: `swatch c${number % COLOURS}` }), g.label);
    const status = runs.every((r) => r.status === "finished") ? "" : runs.map((r) => `${r.done}${r.wanted ? `/${r.wanted}` : ""} ${r.status}`).join(", ");
    const accuracy = line ? plus(line.last, (v) => percent(v)) : "–";
    const tenth = own ? [g.personal ? percent(g.personal.weighted.at(-1)) : "–", g.personal ? percent(g.personal.worst.at(-1)) : "–"] : [];
    return [name, line ? nameOf(line) : "–", line && line.last[0] === top ? make("b", { text: `${accuracy} ★` }) : accuracy, ...tenth, line ? plus(line.best, (v) => percent(v)) : "–", g.traffic.down ? bytes(g.traffic.down[0] + g.traffic.up[0]) : "–", g.time ? seconds(g.time[0]) : "–", g.runs, status];
  });
  const head = ["case", "measured", own ? "mean of the clients" : "accuracy", ...(own ? ["weighted by samples", "worst tenth"] : []), "best", "sent", "time", "runs", ""];
  const kept = head.map((_, i) => i).filter((i) => head[i] || rows.some((r) => r[i])), pick = (cells) => kept.map((i) => cells[i]);
  return table(pick(head), rows.map(pick), pick(head.map((_, i) => (i < 2 || i === head.length - 1 ? "" : "n"))));
}

function header() {
  document.title = `${data.title} · Solera`;
  $("title").textContent = data.title;
  $("subtitle").textContent = data.subtitle;
  const notes = $("notes");
  notes.hidden = !data.notes.length;
  notes.replaceChildren(make("b", { text: "To know before reading" }), make("ul", {}, ...data.notes.map((n) => make("li", { text: n }))));
  const select = $("focus"), labels = data.groups.map((g) => g.label);
  if (!labels.includes(state.focus)) state.focus = (data.groups.find((g) => g.regions || g.coefficients || g.teachers || g.timeline) || data.groups[0])?.label ?? null;
  if (select.dataset.labels !== JSON.stringify(labels)) { select.replaceChildren(...labels.map((l) => make("option", { value: l, text: l }))); select.dataset.labels = JSON.stringify(labels); }
  if (state.focus !== null) select.value = state.focus;
  select.parentElement.hidden = labels.length < 2;
}

function layout() {
  // A narrow card without a neighbour takes the whole row.
  let alone = null;
  for (const { root, figure } of cards.values()) {
    if (root.hidden) continue;
    root.classList.toggle("wide", Boolean(figure.wide));
    if (figure.wide) { if (alone) alone.classList.add("wide"); alone = null; } else alone = alone ? null : root;
  }
  if (alone) alone.classList.add("wide");
}

function links() {
  const shown = FIGURES.filter((f) => !cards.get(f.id).root.hidden);
  const key = shown.map((f) => f.id).join();
  if ($("links").dataset.key === key) return;
  $("links").dataset.key = key;
  $("links").replaceChildren(...shown.map((f) => make("a", { href: `#figure-${f.id}`, text: f.nav })));
}

function drawAll() {
  header();
  overview();
  for (const c of cards.values()) c.root.hidden = !focused() || !c.figure.has(data, focused());
  layout(); // before drawing: a chart is as wide as its card
  for (const c of cards.values()) drawCard(c);
  links();
}

// ---- theme ----

const preferred = matchMedia("(prefers-color-scheme: dark)");
let chosen = null; // by the button; else the system's
function theme(now = chosen ?? (preferred.matches ? "dark" : "light")) {
  document.documentElement.dataset.theme = now;
  $("theme").textContent = now === "dark" ? "light" : "dark";
  $("theme").setAttribute("aria-label", `switch to the ${now === "dark" ? "light" : "dark"} theme`);
}
preferred.addEventListener("change", () => { theme(); drawAll(); });
$("theme").addEventListener("click", () => { chosen = isDark() ? "light" : "dark"; theme(); drawAll(); });
addEventListener("beforeprint", () => { theme("light"); drawAll(); });
addEventListener("afterprint", () => { theme(); drawAll(); });

// ---- live ----

async function poll() {
  const badge = $("live");
  try {
    const answer = await fetch("data.json", { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
    if (answer.status === 200) {
      version = answer.headers.get("ETag") || "";
      data = await answer.json();
      drawAll();
    } else if (answer.status !== 304) throw new Error(String(answer.status));
    const running = data.runs.some((r) => r.status === "running");
    badge.dataset.state = running ? "on" : "done";
    badge.textContent = running ? "live" : data.runs.length ? data.runs.map((r) => r.status).filter((v, i, all) => all.indexOf(v) === i).join(", ") : "waiting";
  } catch {
    badge.dataset.state = "lost";
    badge.textContent = "the view has ended; what it showed last stays";
  }
  setTimeout(poll, POLL_MS);
}

// ---- start ----

document.body.append(tip);
for (const figure of FIGURES) {
  const c = card(figure);
  cards.set(figure.id, c);
  $("figures").append(c.root);
}
$("focus").addEventListener("change", () => { state.focus = $("focus").value; drawAll(); });
let width = innerWidth, waiting = 0;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(drawAll, 120);
});
theme();
drawAll();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
if (live) { $("live").hidden = false; poll(); }
