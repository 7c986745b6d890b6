// The figures. Each says when it can be drawn (has), how it is read (how), which controls it has, how it is drawn from
// the data, and which rows stand behind it. `s` is the figure's own state: it outlives redrawing.

const KINDS = { ensemble: "ensemble ", average: "average ", server: "server's " };
const MODELS = ["model", "server", "part"]; // single models, judged on the whole test set
const nameOf = (line) => `${KINDS[line.kind] || ""}${line.name}`;
const toggler = (s, redraw) => (id) => { if (!s.hidden.delete(id)) s.hidden.add(id); redraw(); };
const PHASES = [["clients", "waiting for clients"], ["server", "server works"], ["evaluate", "evaluating"], ["commit", "saving"]];
const several = (data) => data.groups.length > 1;
const isMain = (g, line) => g.main && line.kind === g.main[0] && line.name === g.main[1];
const coefficient = (c, byte) => c.low + ((c.top - c.low) * byte) / 255;
const alike = (line) => (line.kind === "server" ? "server" : `${line.kind}/${line.name}`); // lines with the same one may be ranked together
const decode = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

function chosenLines(data, s) {
  const many = several(data), found = [];
  data.groups.forEach((g, number) => g.lines.forEach((line, at) => {
    const wanted = s.what === "main" ? isMain(g, line) : s.what === "all" ? [...MODELS, "own", "ensemble"].includes(line.kind) : nameOf(line) === s.what;
    if (!wanted) return;
    const tone = many ? number : found.length;
    const style = many && s.what === "all" ? at : tone;
    const unlike = s.what === "all" || (s.what === "main" && !data.main_shared); // then a line says what it is of
    const name = many ? (unlike ? `${g.label}: ${nameOf(line)}` : g.label) : nameOf(line);
    found.push({ id: `${number}/${line.kind}/${line.name}`, name, colour: colour(tone), dash: dashOf(style), shape: style, line, group: g });
  }));
  return found;
}

// The main result of a comparison as its cases call it.
function sharedName(data) {
  const line = data.groups.find((g) => g.main)?.main;
  return line[0] === "server" ? "the server's own model" : nameOf({ kind: line[0], name: line[1] });
}

const whatControl = {
  type: "select", key: "what", label: "shown",
  initial: (data) => (several(data) ? "main" : "all"),
  options: (data) => {
    const names = [...new Set(data.groups.flatMap((g) => g.lines.filter((l) => l.kind !== "average").map(nameOf)))];
    const main = several(data) ? [["main", data.main_shared ? `main result: ${sharedName(data)}` : "main result of each: not alike"]] : [];
    return [...main, ["all", "everything"], ...names.map((n) => [n, n])];
  },
};

function accuracyFigure(id, title, nav, xKey, xLabel, xText, tipHead, how) {
  return {
    id, title, nav, how,
    has: (data) => data.groups.some((g) => g.lines.some((l) => l[xKey])),
    controls: [whatControl],
    draw(body, data, g, s, redraw) {
      const lines = chosenLines(data, s).filter((l) => l.line[xKey]).map((l) => ({ ...l, x: l.line[xKey], y: l.line.mean, low: l.line.low, high: l.line.high }));
      lineChart(body, { lines, label: title, xLabel, xText, yText: level, tipText: percent, tipHead, hidden: s.hidden, toggled: toggler(s, redraw), xWhole: xKey === "round", xFrom: xKey === "round" ? undefined : 0, most: 1, exact: xKey === "round" });
    },
    rows: (data) => {
      const clock = data.groups.some((g) => g.lines.some((l) => l.hours)); // without one there is no column for it
      const hours = (l, i) => (clock ? [l.hours ? l.hours[i] : ""] : []);
      return {
        head: ["case", "line", "round", "bytes", ...(clock ? ["simulated hours"] : []), "mean accuracy", "lowest", "highest", "runs"],
        rows: data.groups.flatMap((g) => g.lines.flatMap((l) => l.round.map((t, i) => [g.label, nameOf(l), t, l.bytes[i], ...hours(l, i), l.mean[i], l.low[i], l.high[i], l.runs[i]]))),
      };
    },
  };
}

const bandWords = (data) => (data.groups.some((g) => g.runs > 1) ? " A line is the mean over seeds, its band reaches from the worst seed to the best." : "");

const FIGURES = [
  accuracyFigure("accuracy", "Accuracy by round", "accuracy", "round", "round", String, (v) => `round ${v}`,
    (data) => `Share of the test set that is classified right after each round; clients' own models are judged on their own test splits.${bandWords(data)} The axis need not begin at zero.`),
  accuracyFigure("bytes", "Accuracy by traffic", "traffic", "bytes", "sent so far, down and up", bytes, (v) => `${bytes(v)} sent`,
    (data) => `The same accuracies over everything that was sent until then, in both directions, as exact message sizes: further left is cheaper.${bandWords(data)}`),
  accuracyFigure("hours", "Accuracy by simulated hours", "hours", "hours", "hours by the simulated clock", (v) => `${v} h`, (v) => `${v.toFixed(2)} h`,
    (data) => `The same accuracies over the hours that the run would have taken with clients as fast and as often available as federation.availability says. Cases without a clock are left out.${bandWords(data)}`),
  {
    id: "target", title: "Rounds and bytes to a target accuracy", nav: "target", wide: true,
    has: (data) => data.targets.rows.length > 0,
    how: () => "When each line first reached the target, and what had been sent by then: the mean over the seeds that reached it, ± standard deviation. “–”: none did. Evaluations between rounds are not there, so a target is reached at an evaluated round.",
    controls: [
      { type: "slider", key: "at", label: "target", range: (data) => [0, data.targets.values.length - 1], initial: (data) => data.targets.shown, text: (data, i) => level(data.targets.values[i], data.targets.values[i]) },
      whatControl,
    ],
    body(data, s) {
      const rows = data.targets.rows.filter((r) => {
        const g = data.groups[r.group];
        return s.what === "main" ? isMain(g, r) : s.what === "all" ? true : nameOf(r) === s.what;
      });
      return rows.map((r) => ({ r, found: r.at[s.at] }));
    },
    draw(body, data, g, s) {
      const found = this.body(data, s);
      const least = (kind) => { // of those that are alike and sent anything; nobody's if two share it
        const [first, second] = found.filter(({ r, found: [n, of, , sent] }) => alike(r) === kind && n === of && sent[0] > 0).map((f) => f.found[3][0]).sort((a, b) => a - b);
        return second === undefined || first === second ? null : first;
      };
      const fewest = Object.fromEntries([...new Set(found.map(({ r }) => alike(r)))].map((kind) => [kind, least(kind)]));
      const widest = Math.max(1, ...found.map((f) => (f.found[3] ? f.found[3][0] : 0)));
      const rows = found.map(({ r, found: [reached, of, rounds, sent] }) => {
        const bar = draw("svg", { viewBox: "0 0 100 8", "aria-hidden": "true", preserveAspectRatio: "none" });
        bar.style.width = "100px"; bar.style.height = "8px";
        if (sent) bar.append(draw("rect", { width: Math.max(1, (100 * sent[0]) / widest), height: 8, rx: 2, fill: colour(several(data) ? r.group : 0), opacity: 0.85 }));
        const cheapest = sent && sent[0] === fewest[alike(r)] && reached === of ? " ◂ fewest bytes" : "";
        return [...(several(data) ? [data.groups[r.group].label] : []), nameOf(r), `${reached} of ${of}`, plus(rounds, (v) => String(Math.round(v * 10) / 10)), plus(sent, bytes) + cheapest, bar];
      });
      const many = several(data) ? 0 : 1;
      body.append(table(["case", "line", "runs that did", "rounds", "sent", ""].slice(many), rows, ["", "", "n", "n", "n", ""].slice(many)));
    },
    rows(data, g, s) {
      return { head: ["target", "case", "line", "reached", "runs", "rounds", "rounds std", "bytes", "bytes std"], rows: data.targets.rows.flatMap((r) => r.at.map(([n, of, rounds, sent], i) => [data.targets.values[i], data.groups[r.group].label, nameOf(r), n, of, ...(rounds ? [rounds[0], rounds[1] ?? ""] : ["", ""]), ...(sent ? [sent[0], sent[1] ?? ""] : ["", ""])])) };
    },
  },
  {
    id: "fusion", title: "Student, ensemble and average", nav: "fusion", per: true,
    has: (data, g) => g.lines.some((l) => l.kind === "ensemble" || l.kind === "average") && g.lines.some((l) => MODELS.includes(l.kind)),
    how: () => "What distillation adds: solid, the models after the round (the students); dashed, the clients' models answering together (the teachers); dotted, the average of the clients' models before it was distilled. A student above its average has learned from the ensemble.",
    draw(body, data, g, s, redraw) {
      const models = g.lines.filter((l) => MODELS.includes(l.kind)).map((l) => l.name);
      const style = { model: ["", 2.2, 0], server: ["", 2.2, 0], part: ["", 2.2, 0], ensemble: ["8 4", 2.2, 3], average: ["2 3", 1.8, 1] };
      const lines = g.lines.filter((l) => style[l.kind]).map((l) => {
        const tone = l.kind === "ensemble" ? 6 : Math.max(0, models.indexOf(l.name)) % 6;
        const [dash, width, shape] = style[l.kind];
        return { id: `${l.kind}/${l.name}`, name: MODELS.includes(l.kind) ? `student ${nameOf(l)}` : nameOf(l), colour: colour(tone), dash, width, shape, x: l.round, y: l.mean, low: l.low, high: l.high };
      });
      lineChart(body, { lines, label: this.title, xLabel: "round", xText: String, yText: level, tipText: percent, tipHead: (v) => `round ${v}`, hidden: s.hidden, toggled: toggler(s, redraw), xWhole: true, most: 1, exact: true });
    },
    rows: (data, g) => ({ head: ["line", "round", "accuracy"], rows: g.lines.flatMap((l) => l.round.map((t, i) => [nameOf(l), t, l.mean[i]])) }),
  },
  {
    id: "classes", title: "Classes held by each client", nav: "classes", per: true,
    has: (data, g) => g.partition !== null,
    how(data, g) {
      const p = data.partitions[g.partition], hidden = p.clients - p.shown.length;
      return `The area of a bubble is the number of a client's training samples of one class: columns with few bubbles are clients that know little of the world. ${p.clients} clients hold ${p.samples} samples, from ${p.sizes.min} to ${p.sizes.max} each (median ${p.sizes.median}${p.sizes.empty ? `, ${p.sizes.empty} empty` : ""}).${hidden ? ` ${hidden} clients are not shown.` : ""}`;
    },
    draw(body, data, g, s, redraw) {
      const p = data.partitions[g.partition], models = [...new Set(p.shown.map((c) => c.model))];
      if (models.length > 1) legend(body, models.map((m, i) => ({ id: m, name: m, colour: colour(i), shape: i, line: false })), s.hidden, toggler(s, redraw));
      const holder = make("div", { class: "scroll" });
      body.append(holder);
      const room = widthOf(body), step = Math.max(13, Math.min(80, (room - 50) / p.shown.length)), tall = Math.max(13, Math.min(60, 290 / p.classes));
      const width = Math.max(room, 50 + step * p.shown.length), height = tall * p.classes + 48;
      const svg = frame(holder, this.title, width, height);
      svg.style.width = `${width}px`; svg.style.maxWidth = "none";
      const top = p.shown.reduce((m, c) => Math.max(m, ...c.counts), 1), most = 0.5 * Math.min(step, tall) * 1.1;
      const everyC = Math.ceil(13 / tall), everyK = Math.ceil(34 / step);
      for (let c = 0; c < p.classes; c += 1) {
        const y = 10 + tall * (p.classes - c - 0.5);
        svg.append(draw("line", { class: "grid-line", x1: 40, x2: 40 + step * p.shown.length, y1: y, y2: y }));
        if (c % everyC === 0) svg.append(draw("text", { x: 34, y: y + 4, "text-anchor": "end", text: String(c) }));
      }
      p.shown.forEach((client, k) => {
        const x = 40 + step * (k + 0.5), tone = models.indexOf(client.model);
        if (k % everyK === 0) svg.append(draw("text", { x, y: height - 22, "text-anchor": "middle", text: client.client.slice(0, 8) }));
        if (s.hidden.has(client.model)) return;
        client.counts.forEach((n, c) => {
          if (n) svg.append(marker(models.length > 1 ? tone : 0, x, 10 + tall * (p.classes - c - 0.5), Math.max(1, most * Math.sqrt(n / top)), { class: "bubble", fill: colour(tone), opacity: 0.82 }));
        });
      });
      svg.append(draw("text", { x: 40 + (step * p.shown.length) / 2, y: height - 5, "text-anchor": "middle", text: "client" }), draw("text", { x: 9, y: (height - 40) / 2, transform: `rotate(-90 9 ${(height - 40) / 2})`, "text-anchor": "middle", text: "class" }));
      holder.addEventListener("pointermove", (e) => {
        const box = svg.getBoundingClientRect(), k = Math.floor(((e.clientX - box.left) * (width / box.width) - 40) / step), c = p.classes - 1 - Math.floor(((e.clientY - box.top) * (width / box.width) - 10) / tall);
        const client = p.shown[k];
        if (!client || c < 0 || c >= p.classes) hideTip();
        else showTip(e.clientX, e.clientY, `${client.client} · ${client.model}`, [[`class ${c}`, String(client.counts[c])], ["all classes", String(client.counts.reduce((a, b) => a + b, 0))]]);
      });
      holder.addEventListener("pointerleave", hideTip);
    },
    rows(data, g) {
      const p = data.partitions[g.partition];
      return { head: ["client", "model", ...Array.from({ length: p.classes }, (_, c) => `class ${c}`)], rows: p.shown.map((c) => [c.client, c.model, ...c.counts]) };
    },
  },
  {
    id: "regions", title: "Decision regions", nav: "regions", per: true, wide: true,
    has: (data, g) => g.regions !== null,
    how: (data, g) => `The plane coloured by what each model takes its points for after round ${g.regions.round}, mixed by probability as in FedDF's Figure 1: blurred colours are doubt. Marks are training samples, their shape and colour the true class; a client's picture has its own samples, the joint ones everybody's; small crosses are the public samples.`,
    draw(body, data, g) {
      const panels = make("div", { class: "panels" });
      body.append(panels);
      const joint = g.lines.some((l) => l.kind === "ensemble");
      const words = { client: "client", average: "average", ensemble: "ensemble", model: joint ? "student" : "model" };
      const tones = Array.from({ length: g.regions.classes }, (_, c) => rgb(`--c${c % COLOURS}`));
      for (const p of g.regions.panels) {
        const line = g.lines.find((l) => (MODELS.includes(l.kind) ? "model" : l.kind) === p.kind && l.name === p.name);
        const holder = make("div", {}, make("h3", { text: `${words[p.kind] || p.kind} ${p.name}${line ? `: ${percent(line.mean.at(-1))}` : ""}` }));
        panels.append(holder);
        regionPanel(holder, g.regions, p, tones);
      }
    },
    rows: (data, g) => ({ head: ["client", "x", "y", "class"], rows: Object.entries(g.regions.points).flatMap(([k, points]) => points.map((p) => [k, ...p])) }),
  },
  {
    id: "personal", title: "Accuracy of clients' own models", nav: "clients", per: true, wide: true,
    has: (data, g) => g.personal !== null,
    how: (data, g) => `Each client's model on its own test split.${g.personal.clients.length ? " Left: how many clients reach which accuracy after the last evaluation, and below every single one as a mark; the worst tenth is drawn as diamonds." : " Of single clients nothing is known (a method that needs means only gets no more), so only means are shown."} In the mean each client counts the same; weighted, each test sample does.${g.personal.worst.some((v) => v !== null) ? " The worst tenth is what a mean hides: a method should lift it too." : ""}`,
    draw(body, data, g, s, redraw) {
      const [left, right] = sideBySide(body, g.personal.clients.length ? 2 : 1);
      if (right) spread(left, g.personal.clients, this.title);
      const line = (id, name, y, at) => ({ id, name, colour: colour(at), dash: DASHES[at], shape: at ? 3 : 0, x: g.personal.round, y });
      const lines = [line("mean", "mean of the clients", g.personal.mean, 0)];
      if (g.personal.worst.some((v) => v !== null)) lines.push(line("worst", "mean of the worst tenth", g.personal.worst, 1));
      if (g.personal.weighted.some((v) => v !== null)) lines.push(line("weighted", "mean weighted by test samples", g.personal.weighted, 2));
      lineChart(right || left, { lines, label: "means and worst tenth by round", xLabel: "round", xText: String, yText: level, tipText: percent, tipHead: (v) => `round ${v}`, hidden: s.hidden, toggled: toggler(s, redraw), xWhole: true, most: 1, exact: true, height: 280 });
    },
    rows: (data, g) => (g.personal.clients.length ? { head: ["client", "accuracy"], rows: g.personal.clients } : { head: ["round", "mean", "mean weighted by samples", "worst tenth"], rows: g.personal.round.map((t, i) => [t, g.personal.mean[i], g.personal.weighted[i], g.personal.worst[i]]) }),
  },
  {
    id: "coefficients", title: "Knowledge coefficients between clients", nav: "coefficients", per: true, wide: true,
    has: (data, g) => g.coefficients !== null,
    how: (data, g) => `How much the client of a row gives to the client of a column. Clients are in the order of their similarity after the last round, so that groups show as blocks along the diagonal; the slider goes through the rounds. Right: by how many givers a client is taught in effect (the exponential of the entropy of its column): the number of clients if all count the same, 1 if a single one does.${g.coefficients.left_out ? ` ${g.coefficients.left_out} clients are not shown.` : ""}`,
    controls: [{ type: "slider", key: "frame", label: "round", follow: true, range: (data, g) => [0, g.coefficients.round.length - 1], text: (data, i, g) => String(g.coefficients.round[i]) }],
    draw(body, data, g, s, redraw) {
      const [left, right] = sideBySide(body, 2);
      const c = g.coefficients, n = c.clients.length, frame = c.frames[Math.min(s.frame, c.frames.length - 1)];
      let cells = decode(frame);
      const value = (r, k) => Math.sqrt(cells[r * n + k] / 255), true_ = (r, k) => coefficient(c, cells[r * n + k]);
      const update = heatMap(left, { rows: c.clients, columns: c.clients, value, text: n <= 12 ? (r, k) => true_(r, k).toFixed(2) : null, tip: (r, k) => [`round ${c.round[s.frame]}`, [["giver", c.clients[r]], ["receiver", c.clients[k]], ["coefficient", true_(r, k).toFixed(3)]]], xLabel: "receiver", yLabel: "giver", label: this.title, most: Math.max(42, Math.min(80, 420 / n)) });
      scaleBar(left, ramp, c.low.toFixed(3), `${c.top.toFixed(3)} (square-root scale)`);
      const line = { id: "givers", name: "mean of the clients, and from the lowest to the highest", colour: colour(0), dash: "", shape: 0, x: c.round, y: c.givers.map((v) => v[1]), low: c.givers.map((v) => v[0]), high: c.givers.map((v) => v[2]) };
      lineChart(right, { lines: [line], always: true, label: "givers that count, by round", xLabel: "round", xText: String, yText: (v, step) => v.toFixed(digits(step)), tipText: (v) => v.toFixed(2), tipHead: (v) => `round ${v}`, hidden: s.hidden, toggled: toggler(s, redraw), xWhole: true, exact: true, height: 300 });
      s.live = () => { cells = decode(c.frames[Math.min(s.frame, c.frames.length - 1)]); update(); };
    },
    rows(data, g, s) {
      const c = g.coefficients, cells = decode(c.frames[Math.min(s.frame ?? 0, c.frames.length - 1)]), n = c.clients.length;
      return { head: ["giver", ...c.clients], rows: c.clients.map((k, r) => [k, ...c.clients.map((_, i) => coefficient(c, cells[r * n + i]).toFixed(3))]) };
    },
  },
  {
    id: "timeline", title: "Timeline of clients and server", nav: "timeline", per: true, wide: true,
    has: (data, g) => g.timeline !== null,
    how: () => "When clients trained and when the server distilled, as measured; a group of clients is at work until the server has collected its replies. Bars above each other ran at the same time: with a pipeline the clients of other groups train while the server still distils. Broken lines separate rounds.",
    controls: [{ type: "slider", key: "from", label: "rounds from", follow: true, range: (data, g) => [Math.min(...g.timeline.map((v) => v[0])), Math.max(...g.timeline.map((v) => v[0]))], initial: (data, g) => Math.min(...g.timeline.map((v) => v[0])), text: (data, i) => String(i) }],
    draw(body, data, g, s) {
      const spans = g.timeline.filter(([t]) => t >= s.from && t < s.from + 6);
      const lanes = [...new Set(g.timeline.map((v) => v[1]))].sort((a, b) => Number(b.startsWith("train")) - Number(a.startsWith("train")) || (a < b ? -1 : 1));
      const kinds = [...new Set(lanes.map((l) => l.split(" ")[0]))];
      const width = widthOf(body), left = Math.min(150, width * 0.3), lane = 30, height = 16 + lane * lanes.length + 40;
      const [begin, end] = [Math.min(...spans.map((v) => v[2])), Math.max(...spans.map((v) => v[3]))];
      const holder = make("div", { class: "chart" });
      body.append(holder);
      const svg = frame(holder, this.title, width, height), x = scale(begin, end, left, width - 12), bottom = 12 + lane * lanes.length;
      for (const v of ticks(begin, end, (width - left) / 90)) svg.append(draw("line", { class: "grid-line", x1: x(v), x2: x(v), y1: 10, y2: bottom }), draw("text", { x: x(v), y: bottom + 17, "text-anchor": "middle", text: `${v} s` }));
      lanes.forEach((name, i) => svg.append(draw("text", { x: left - 8, y: 12 + lane * (i + 0.5) + 4, "text-anchor": "end", text: name.length > 22 ? `${name.slice(0, 21)}…` : name })));
      let before = null;
      for (const [t, what, start, stop] of spans) {
        if (t !== before) { svg.append(draw("line", { x1: x(start), x2: x(start), y1: 6, y2: bottom, stroke: "var(--faint)", "stroke-dasharray": "3 3" }), draw("text", { x: x(start) + 3, y: 9, text: width > 700 ? `round ${t}` : String(t) })); before = t; }
        const y = 12 + lane * lanes.indexOf(what);
        svg.append(draw("rect", { class: "span", x: x(start), y: y + 5, width: Math.max(1.5, x(stop) - x(start)), height: lane - 10, rx: 3, fill: colour(kinds.indexOf(what.split(" ")[0])), opacity: 0.9, onpointermove: (e) => showTip(e.clientX, e.clientY, `${what}, round ${t}`, [["from", `${start.toFixed(2)} s`], ["to", `${stop.toFixed(2)} s`], ["took", seconds(stop - start)]]), onpointerleave: hideTip }));
      }
      svg.append(draw("text", { x: (left + width) / 2, y: bottom + 34, "text-anchor": "middle", text: "seconds since the run began" }));
    },
    rows: (data, g) => ({ head: ["round", "what", "start s", "end s"], rows: g.timeline }),
  },
  {
    id: "timetable", title: "Simulated timetable", nav: "timetable", per: true, wide: true,
    has: (data, g) => g.timetable !== null,
    how: () => "When each client worked and when the server trained, by the simulated clock: from the moment a client is there until its reply has arrived. With a pipeline, clients of other groups work while the server distils. At most 64 pieces of work of a round are kept.",
    controls: [{ type: "slider", key: "from", label: "rounds from", follow: true, range: (data, g) => [g.timetable[0][0], g.timetable[g.timetable.length - 1][0]], initial: (data, g) => g.timetable[0][0], text: (data, i) => String(i) }],
    draw(body, data, g, s) {
      const spans = g.timetable.filter(([t]) => t >= s.from && t < s.from + 3);
      const lanes = ["server", ...[...new Set(spans.map((v) => v[1]))].filter((k) => k !== "server").sort()];
      const width = widthOf(body), left = Math.min(110, width * 0.25), lane = Math.max(9, Math.min(26, 420 / lanes.length)), bottom = 12 + lane * lanes.length;
      const [begin, end] = [Math.min(...spans.map((v) => v[2])), Math.max(...spans.map((v) => v[3]))];
      const holder = make("div", { class: "chart" });
      body.append(holder);
      const svg = frame(holder, this.title, width, bottom + 40), x = scale(begin, end, left, width - 12);
      for (const v of ticks(begin, end, (width - left) / 90)) svg.append(draw("line", { class: "grid-line", x1: x(v), x2: x(v), y1: 10, y2: bottom }), draw("text", { x: x(v), y: bottom + 17, "text-anchor": "middle", text: `${v} h` }));
      lanes.forEach((name, i) => { if (lane > 11 || i % 2 === 0) svg.append(draw("text", { x: left - 8, y: 12 + lane * (i + 0.5) + 4, "text-anchor": "end", text: name.length > 14 ? `${name.slice(0, 13)}…` : name })); });
      for (const [t, who, start, stop] of spans) svg.append(draw("rect", { class: "span", x: x(start), y: 12 + lane * lanes.indexOf(who) + 1, width: Math.max(1.5, x(stop) - x(start)), height: lane - 2, rx: 2, fill: colour(who === "server" ? 1 : 0), opacity: t % 2 ? 0.9 : 0.55, onpointermove: (e) => showTip(e.clientX, e.clientY, `${who}, round ${t}`, [["from", `${start.toFixed(3)} h`], ["to", `${stop.toFixed(3)} h`]]), onpointerleave: hideTip }));
      svg.append(draw("text", { x: (left + width) / 2, y: bottom + 34, "text-anchor": "middle", text: "simulated hours since the run began" }));
    },
    rows: (data, g) => ({ head: ["round", "who", "start h", "end h"], rows: g.timetable }),
  },
  {
    id: "diversity", title: "Diversity of the ensemble", nav: "diversity", per: true, wide: true,
    has: (data, g) => g.diversity !== null,
    how: () => "How different the members are, on a sample of the test set, over all pairs. Left: the share of samples on which the first choices of two members differ. Right: their KL divergence in nats, mean of both directions. “models”: the global models of the round; “checkpoints”: one model's checkpoints of several rounds. An ensemble whose members become alike has nothing left to teach.",
    draw(body, data, g, s, redraw) {
      const [left, right] = sideBySide(body, 2);
      const lines = (metric) => g.diversity.map((d, i) => ({ id: d.name, name: d.name, colour: colour(i), dash: DASHES[i % DASHES.length], shape: i, x: d.round, y: d[metric] }));
      const how = { xLabel: "round", xText: String, tipHead: (v) => `round ${v}`, hidden: s.hidden, toggled: toggler(s, redraw), xWhole: true, exact: true, height: 280 };
      lineChart(left, { ...how, lines: lines("disagreement"), label: "pairs that disagree", yText: level, tipText: percent, most: 1 });
      lineChart(right, { ...how, lines: lines("kl"), label: "KL divergence", yText: (v) => String(Math.round(v * 1000) / 1000), tipText: (v) => v.toFixed(4) });
    },
    rows: (data, g) => ({ head: ["ensemble", "round", "disagreement", "KL"], rows: g.diversity.flatMap((d) => d.round.map((t, i) => [d.name, t, d.disagreement[i], d.kl[i]])) }),
  },
  {
    id: "teachers", title: "Agreement and confidence of the teachers", nav: "teachers", per: true, wide: true,
    has: (data, g) => g.teachers !== null,
    how: (data, g) => `On a sample of the public data. Left: the share of teachers whose first choice is not the consensus (the dissenting set), the share of samples on which nobody dissents, and, for Fed-ET, the weight of the dissenters. Right: each teacher's mean weight when teachers count by their confidence (Fed-ET's rule, whatever the method itself uses): blue counts for more than an equal share, orange for less, empty did not teach that round.${g.teachers.left_out ? ` ${g.teachers.left_out} teachers are not shown.` : ""}`,
    draw(body, data, g, s, redraw) {
      const t = g.teachers, [left, right] = sideBySide(body, 2);
      const line = (id, name, y, i) => ({ id, name, colour: colour(i), dash: DASHES[i], shape: i, x: t.round, y });
      const lines = [line("dissenting", "teachers that dissent", t.dissenting, 0), line("unanimous", "samples without dissent", t.unanimous, 1)];
      if (t.dissent.some((v) => v !== null)) lines.push(line("weight", "weight of dissenters", t.dissent, 2));
      lineChart(left, { lines, label: this.title, xLabel: "round", xText: String, yText: level, tipText: percent, tipHead: (v) => `round ${v}`, hidden: s.hidden, toggled: toggler(s, redraw), xWhole: true, range: [0, 1], exact: true, height: 280 });
      heatMap(right, { rows: t.clients, columns: t.round.map(String), value: (r, c) => (t.weights[c][r] === null ? null : Math.min(1, t.weights[c][r] / 2)), paint: apart, tip: (r, c) => [`${t.clients[r]}, round ${t.round[c]}`, [["weight", t.weights[c][r] === null ? "did not teach" : `${t.weights[c][r].toFixed(2)} of an equal share`]]], xLabel: "round", yLabel: "teacher", label: "weight of each teacher by its confidence", square: false, most: 40 });
      scaleBar(right, apart, "nothing", "twice an equal share");
    },
    rows: (data, g) => ({ head: ["round", "dissenting", "unanimous", "weight of dissenters", ...g.teachers.clients], rows: g.teachers.round.map((t, i) => [t, g.teachers.dissenting[i], g.teachers.unanimous[i], g.teachers.dissent[i], ...g.teachers.weights[i]]) }),
  },
  {
    id: "confusion", title: "Confusion matrix and accuracy by class", nav: "confusion", per: true, wide: true,
    has: (data, g) => g.confusion !== null,
    how: (data, g) => `Of the test samples of each true class (row), how many percent were taken for which class (column), at round ${g.confusion.round}${g.runs > 1 ? ", all seeds together" : ""}. A strong diagonal is good; a strong cell beside it is a mistake that is made often. The bars are the diagonal: how much of each class is recognised.`,
    controls: [{ type: "select", key: "model", label: "model", initial: (data, g) => `${g.confusion.items[0].kind}/${g.confusion.items[0].name}`, options: (data, g) => g.confusion.items.map((i) => [`${i.kind}/${i.name}`, nameOf(i)]) }],
    item: (g, s) => g.confusion.items.find((i) => `${i.kind}/${i.name}` === s.model) || g.confusion.items[0],
    draw(body, data, g, s) {
      const item = this.item(g, s), n = item.right.length, names = item.right.map((_, c) => String(c));
      if (!item.matrix) body.append(make("p", { class: "of", text: "With so many classes the matrix was not recorded." }));
      const [left, right] = sideBySide(body, item.matrix ? 2 : 1);
      if (item.matrix) {
        const share = (r, c) => (item.total[r] ? item.matrix[r][c] / item.total[r] : 0);
        heatMap(left, { rows: names, columns: names, value: share, text: (r, c) => (item.matrix[r][c] ? String(Math.round(100 * share(r, c))) : ""), tip: (r, c) => [`true class ${r}`, [[`taken for ${c}`, `${item.matrix[r][c]} of ${item.total[r]}`], ["share", percent(share(r, c))]]], xLabel: "taken for class", yLabel: "true class", label: this.title, most: Math.max(44, Math.min(90, 400 / n)) });
        scaleBar(left, ramp, "0%", "100%");
      }
      classBars(right || left, item);
    },
    rows(data, g, s) {
      const item = this.item(g, s);
      return item.matrix ? { head: ["true class", ...item.matrix.map((_, c) => `taken for ${c}`)], rows: item.matrix.map((r, c) => [c, ...r]) } : { head: ["class", "right", "of"], rows: item.right.map((r, c) => [c, r, item.total[c]]) };
    },
  },
  {
    id: "content", title: "Traffic by content", nav: "content", wide: true,
    has: (data) => data.groups.some((g) => g.content),
    how: () => "What a run sent in both directions, mean over seeds: public samples (only where clients do not hold them), parameters of models, predictions. Indices and headers are left out.",
    draw(body, data, g, s, redraw) {
      const bars = data.groups.filter((v) => v.content).map((v) => ({ name: v.label, of: v.content }));
      stackedBars(body, { parts: [["data", "data"], ["parameters", "parameters"], ["predictions", "predictions"]], bars, text: bytes, hidden: s.hidden, toggled: toggler(s, redraw), label: this.title });
      for (const v of data.groups.filter((v) => v.adapters)) {
        const each = v.adapters.rows.map(([name, sent, whole]) => `${name} ${bytes(sent)} instead of ${bytes(whole)}`);
        body.append(make("p", { class: "of", text: `${v.label}: with LoRA a model is sent as ${each.join(", ")}; whole models would have added about ${bytes(v.adapters.saved)}.` }));
      }
    },
    rows: (data) => ({ head: ["case", "data bytes", "parameters bytes", "predictions bytes"], rows: data.groups.filter((g) => g.content).map((g) => [g.label, g.content.data || 0, g.content.parameters || 0, g.content.predictions || 0]) }),
  },
  {
    id: "seconds", title: "Seconds by phase", nav: "time", wide: true,
    has: (data) => data.groups.some((g) => g.seconds),
    how: () => "Where a run's time went, mean over seeds: waiting for clients, the server's own work (aggregating, distilling), evaluating, and writing to disk. A measurement of this machine, not of the method alone.",
    draw(body, data, g, s, redraw) {
      const bars = data.groups.filter((v) => v.seconds).map((v) => ({ name: v.label, of: v.seconds }));
      stackedBars(body, { parts: PHASES, bars, text: seconds, hidden: s.hidden, toggled: toggler(s, redraw), label: this.title });
    },
    rows: (data) => ({ head: ["case", "clients s", "server s", "evaluate s", "commit s"], rows: data.groups.filter((g) => g.seconds).map((g) => [g.label, g.seconds.clients, g.seconds.server, g.seconds.evaluate, g.seconds.commit]) }),
  },
  {
    id: "failures", title: "Lost replies and rejected clients", nav: "failures", wide: true,
    has: (data) => data.runs.length > 0,
    how: () => "Replies that never came or were not valid, by client and reason, and what the server noted: rejected models, clipped updates, empty rounds. A lost reply costs a client its place in that round, nothing else.",
    draw(body, data) {
      const lost = data.runs.flatMap((r) => r.failures.map((f) => [r, ...f])), noted = data.runs.flatMap((r) => r.events.map((e) => [r, ...e]));
      const totals = (key) => data.runs.reduce((a, r) => a + r[key], 0);
      if (!lost.length) body.append(make("p", { class: "of", text: noted.length ? "No reply was lost." : "None: every reply came and was used." }));
      const where = (r) => (data.runs.length > 1 ? [`${data.groups[r.group].label}, seed ${r.seed}`] : []);
      const head = data.runs.length > 1 ? ["run"] : [];
      const part = (title, count, columns, rows) => {
        if (!rows.length) return;
        body.append(make("h3", { text: `${title}: ${count}${count > rows.length ? `, the first ${rows.length} are shown` : ""}` }));
        const list = table([...head, ...columns], rows.slice(0, 300).map(([r, ...cells]) => [...where(r), ...cells]));
        body.append(rows.length > 12 ? make("details", { open: true }, make("summary", { text: "rows" }), list) : list);
      };
      part("lost replies", totals("failures_total"), ["round", "client", "task", "reason"], lost);
      part("noted by the server", totals("events_total"), ["round", "what", "facts"], noted);
    },
    rows: (data) => ({ head: ["run", "round", "kind", "client or facts", "reason"], rows: data.runs.flatMap((r) => [...r.failures.map(([t, k, task, why]) => [r.path, t, task, k, why]), ...r.events.map(([t, kind, facts]) => [r.path, t, kind, facts, ""])]) }),
  },
  {
    id: "setup", title: "Configuration and command", nav: "configuration", wide: true,
    has: (data) => data.runs.length > 0,
    how: () => "What made each run: the command, everything that was set (defaults included), and where it was computed. Runs with the same settings, seed and environment end with the same digest.",
    controls: [{ type: "select", key: "run", label: "run", initial: () => "0", options: (data) => data.runs.map((r, i) => [String(i), `${data.groups[r.group].label}, seed ${r.seed}`]) }],
    draw(body, data, g, s) {
      const r = data.runs[Number(s.run)] || data.runs[0];
      body.append(make("h3", { text: "command" }), make("pre", { class: "command", text: r.command || r.again || "started from Python, with objects" }));
      if (r.command && r.again) body.append(make("p", { class: "of" }, "or, from the settings below: ", make("code", { text: r.again })));
      const facts = [["run directory", r.path], ["status", r.status], ["rounds", r.wanted ? `${r.done} of ${r.wanted}` : r.done], ["digest", r.digest || "not finished"], ...r.environment];
      const pair = make("div", { class: "pair" }), left = make("div", {}, make("h3", { text: "run" }), table(["", ""], facts, ["key", "free"])), right = make("div", {}, make("h3", { text: "settings" }));
      body.append(pair);
      const settings = table(["setting", "value"], r.settings, ["key", "free"]);
      settings.style.maxHeight = "420px";
      right.append(settings);
      pair.append(left, right);
    },
    rows: (data) => ({ head: ["run", "setting", "value"], rows: data.runs.flatMap((r) => r.settings.map(([k, v]) => [r.path, k, v])) }),
  },
];

// ---- pieces of single figures ----

function sideBySide(host, count) {
  const parts = Array.from({ length: count }, () => make("div", {}));
  host.append(make("div", { class: "pair" }, ...parts)); // all of them before anything is drawn: widths depend on it
  return parts;
}

function spread(host, clients, label) {
  const width = widthOf(host), height = 280, bins = 20, worst = Math.max(1, Math.floor(clients.length / 10));
  const values = clients.map((c) => c[1]), counts = Array(bins).fill(0);
  for (const v of values) counts[Math.min(bins - 1, Math.floor(v * bins))] += 1;
  const holder = make("div", { class: "chart" });
  host.append(holder);
  const svg = frame(holder, label, width, height), area = { left: 40, right: width - 12, top: 36, bottom: height - 92 };
  const x = scale(0, 1, area.left, area.right), y = scale(0, Math.max(...counts), area.bottom, area.top);
  x.domain = [0, 1]; y.domain = [0, Math.max(...counts)];
  for (const v of ticks(0, Math.max(...counts), 4).filter(Number.isInteger)) svg.append(draw("line", { class: "grid-line", x1: area.left, x2: area.right, y1: y(v), y2: y(v) }), draw("text", { x: area.left - 6, y: y(v) + 4, "text-anchor": "end", text: String(v) }));
  counts.forEach((n, b) => { if (n) svg.append(draw("rect", { class: "bin", x: x(b / bins) + 1, y: y(n), width: x(1 / bins) - x(0) - 2, height: area.bottom - y(n), rx: 2, fill: colour(0), opacity: 0.85 })); });
  svg.append(draw("line", { class: "axis-line", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }));
  const mean = values.reduce((a, b) => a + b, 0) / values.length, tail = values.slice(0, worst).reduce((a, b) => a + b, 0) / worst;
  for (const [v, name, high] of [[mean, "mean", 10], [tail, "worst tenth", 24]]) {
    const left = v > 0.72;
    svg.append(draw("line", { x1: x(v), x2: x(v), y1: high - 8, y2: height - 44, stroke: "var(--ink)", "stroke-dasharray": name === "mean" ? "" : "4 3" }), draw("text", { x: x(v) + (left ? -5 : 5), y: high, "text-anchor": left ? "end" : "start", text: `${name} ${percent(v)}` }));
  }
  values.forEach((v, i) => svg.append(marker(i < worst ? 3 : 0, x(v), area.bottom + 14 + ((i * 7) % 26), 2.9, { class: "client", fill: colour(i < worst ? 1 : 0), opacity: 0.75, onpointermove: (e) => showTip(e.clientX, e.clientY, clients[i][0], [["accuracy", percent(v)]]), onpointerleave: hideTip })));
  for (const v of [0, 0.2, 0.4, 0.6, 0.8, 1]) svg.append(draw("text", { x: x(v), y: height - 28, "text-anchor": "middle", text: percent(v, 0) }));
  svg.append(draw("text", { x: (area.left + area.right) / 2, y: height - 10, "text-anchor": "middle", text: "accuracy on the client's own test split" }), draw("text", { x: 9, y: (area.top + area.bottom) / 2, transform: `rotate(-90 9 ${(area.top + area.bottom) / 2})`, "text-anchor": "middle", text: "clients" }));
}

function classBars(host, item) {
  const n = item.right.length, width = widthOf(host), tall = Math.max(4, Math.min(24, 420 / n)), height = tall * n + 44;
  const holder = make("div", { class: "chart" });
  host.append(holder);
  const svg = frame(holder, "accuracy by class", width, height), x = scale(0, 1, 44, width - 52), every = Math.ceil(13 / tall);
  for (const v of [0, 0.25, 0.5, 0.75, 1]) svg.append(draw("line", { class: "grid-line", x1: x(v), x2: x(v), y1: 6, y2: 8 + tall * n }), draw("text", { x: x(v), y: tall * n + 23, "text-anchor": "middle", text: percent(v, 0) }));
  item.right.forEach((right, c) => {
    const share = item.total[c] ? right / item.total[c] : null, y = 8 + tall * c;
    if (c % every === 0) svg.append(draw("text", { x: 36, y: y + tall / 2 + 4, "text-anchor": "end", text: String(c) }));
    if (share === null) return;
    svg.append(draw("rect", { class: "class-bar", x: 44, y: y + tall * 0.14, width: Math.max(1, x(share) - 44), height: tall * 0.72, rx: 2, fill: colour(0), opacity: 0.88, onpointermove: (e) => showTip(e.clientX, e.clientY, `class ${c}`, [["recognised", `${right} of ${item.total[c]}`]]), onpointerleave: hideTip }));
    if (c % every === 0) svg.append(draw("text", { x: x(share) + 5, y: y + tall / 2 + 4, text: percent(share, 0) }));
  });
  svg.append(draw("text", { x: (44 + width - 52) / 2, y: height - 4, "text-anchor": "middle", text: "share of the class that is recognised" }), draw("text", { x: 9, y: (height - 40) / 2, transform: `rotate(-90 9 ${(height - 40) / 2})`, "text-anchor": "middle", text: "class" }));
}

function regionPanel(host, regions, panel, tones) {
  const cells = decode(panel.percent), n = regions.size, classes = regions.classes, side = 220;
  const light = isDark() ? [25, 30, 40] : [255, 255, 255];
  const svg = frame(host, `decision regions of ${panel.name}`, side, side);
  const href = picture(n, n, (r, c) => {
    const at = classes * ((n - 1 - r) * n + c), mixed = [0, 0, 0];
    for (let k = 0; k < classes; k += 1) for (let i = 0; i < 3; i += 1) mixed[i] += (cells[at + k] / 100) * tones[k][i];
    return mixed.map((v, i) => 0.62 * v + 0.38 * light[i]);
  });
  svg.append(draw("image", { class: "cells", href, width: side, height: side, preserveAspectRatio: "none" }));
  const x = scale(...regions.x, 0, side), y = scale(...regions.y, side, 0);
  const own = panel.kind === "client" ? (regions.points[panel.name] || []) : Object.values(regions.points).flat();
  for (const [a, b] of panel.kind === "client" ? [] : regions.public) svg.append(draw("path", { d: `M${x(a) - 2} ${y(b)}h4M${x(a)} ${y(b) - 2}v4`, stroke: "var(--ink)", opacity: 0.5 }));
  for (const [a, b, c] of own) svg.append(marker(c, x(a), y(b), 2.6, { class: "sample", fill: colour(c), stroke: "var(--card)", "stroke-width": 0.7 }));
}
