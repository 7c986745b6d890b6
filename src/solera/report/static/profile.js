// The profile of runs made with `solera run --profile`: where the time of one round went.

const PHASES = [ // id, name, what it includes
  ["clients", "waiting for clients", "the server has nothing to do until a reply comes: the clients' own work and the way of the messages. What the server does while clients are at work is the server's"],
  ["server", "server works", "everything else of the round: choosing clients, packing messages, checking replies, aggregating, distilling"],
  ["evaluate", "evaluating", "the models on the test set and, where the method has them, clients' own models; after the last round also the files for this report"],
  ["commit", "saving", "writing to disk after the round before: this round is saved after its line is written, so a first round has none"],
];
const costliest = (rows) => (rows.length ? `: the ${rows.length} that took most time themselves` : "");

const profileRun = (data, p) => `${data.groups[data.runs[p.run].group].label}, seed ${data.runs[p.run].seed}`;
const profileOf = (data, s) => data.profiles.shown.find((p) => String(p.run) === s.run) || data.profiles.shown[0];
const taskOf = (p, s) => p.tasks[Number(s.task)] || p.tasks[0];
const profiledRounds = (p) => [...(p.before ? [["before", `round ${p.round - 1}, not profiled`, p.before]] : []), ["profiled", `round ${p.round}, profiled`, p.seconds]]; // short name, name, seconds

// A column of times in one unit, so that they can be compared: [unit, seconds -> text].
function inOneUnit(times) {
  const top = Math.max(0, ...times.filter((t) => t !== null));
  const [unit, factor, places] = top >= 1 ? ["s", 1, 2] : ["ms", 1000, top >= 0.1 ? 1 : 2];
  return [unit, (t) => (t === null ? "–" : (factor * t).toFixed(places))];
}

// rows [name, where, calls, own, total]; operators have no total
function costTable(rows, what) {
  const whole = rows.some((r) => r[4] !== null), [ownUnit, ownText] = inOneUnit(rows.map((r) => r[3])), [unit, text] = inOneUnit(rows.map((r) => r[4])), top = Math.max(1e-9, rows[0][3]);
  const cells = rows.map(([name, where, calls, own, total]) => {
    const bar = draw("svg", { viewBox: "0 0 100 6", "aria-hidden": "true", preserveAspectRatio: "none" });
    bar.style.height = "6px";
    bar.append(draw("rect", { class: "cost", width: Math.max(0.5, (100 * own) / top), height: 6, rx: 1, fill: colour(0), opacity: 0.85 }));
    const named = make("div", {}, make("span", { text: name }), where ? make("span", { class: "where", text: ` ${where}` }) : null, bar);
    return [named, ownText(own), ...(whole ? [text(total)] : []), calls];
  });
  return table([what, `itself, ${ownUnit}`, ...(whole ? [`in all, ${unit}`] : []), "calls"], cells, ["free", "n", ...(whole ? ["n"] : []), "n"]);
}

function traceWords(host, run, task) {
  if (task.trace === null) return;
  if (task.trace_bytes === null) {
    host.append(make("p", { class: "of", text: `Its trace, ${task.trace}, is no longer in the run directory.` }));
    return;
  }
  host.append(make("h3", { text: `every operator of this call, one after another (${bytes(task.trace_bytes)})` }), make("pre", { class: "trace", text: `${run.path}/${task.trace}` }),
    make("p", { class: "of", text: "Open this file, as it is, in Chrome or Chromium at chrome://tracing (“Load”), or in any browser at ui.perfetto.dev (“Open trace file”; it is read in the browser and not sent anywhere)." }));
}

const profileFigure = {
  id: "profile", title: "Where the time went", nav: "profile", wide: true,
  has: (data) => data.profiles.shown.length > 0,
  how(data) {
    const more = data.profiles.left_out;
    return `One round of a run with --profile. The profiled round is slower than it would be without: every Python call costs more, many small ones most, and the server does one after another what it else does side by side. The round before it is the first since the run was begun or resumed: it warms up. Neither is a measurement of the method; they tell where to look.${more ? ` ${more} more profiled runs are not shown.` : ""}`;
  },
  controls: [
    { type: "select", key: "run", label: "details of the run", options: (data) => data.profiles.shown.map((p) => [String(p.run), profileRun(data, p)]) },
    { type: "select", key: "task", label: "task", options: (data, g, s) => { const { tasks } = profileOf(data, s); return tasks.length ? tasks.map((t, i) => [String(i), t.task]) : [["0", ""]]; } },
  ],
  draw(body, data, g, s, redraw) {
    const many = data.profiles.shown.length > 1, p = profileOf(data, s), task = taskOf(p, s);
    const bars = data.profiles.shown.flatMap((one) => profiledRounds(one).map(([, name, of]) => ({ name: many ? `${profileRun(data, one)} · ${name}` : name, of: Object.fromEntries(of) })));
    const known = PHASES.map(([id]) => id), others = [...new Set(bars.flatMap((bar) => Object.keys(bar.of)))].filter((id) => !known.includes(id));
    const phases = [...PHASES, ...others.map((id) => [id, id, "not known to this version"])];
    stackedBars(body, { parts: phases.map(([id, name]) => [id, name]), bars, text: moment, hidden: s.hidden, toggled: toggler(s, redraw), label: this.title });

    const rounds = profiledRounds(p), [unit, text] = inOneUnit(rounds.flatMap(([, , of]) => of.map(([, t]) => t)));
    if (many) body.append(make("h3", { text: profileRun(data, p) }));
    const found = (of, id) => of.find(([name]) => name === id)?.[1] ?? null;
    const included = ([, name, what]) => make("div", {}, make("div", { text: name }), make("div", { class: "where", text: what }));
    body.append(table(["phase, and what it includes", ...rounds.map(([name]) => `${name}, ${unit}`)], phases.map((phase) => [included(phase), ...rounds.map(([, , of]) => text(found(of, phase[0])))]), ["free", ...rounds.map(() => "n")]));

    const [left, right] = sideBySide(body, task ? 2 : 1);
    left.append(make("h3", { text: `functions of the server's process in round ${p.round}${costliest(p.functions)}` }));
    if (p.functions.length) left.append(costTable(p.functions, "function"));
    left.append(make("p", { class: "of", text: p.functions.length ? "By cProfile, of one thread; “in all” has what a function called. Waiting for clients is among them, as the function that waits; with the engine inprocess it is their work itself." : "None were recorded." }));
    if (!task) return;
    const costs = task.operators.length ? task.operators : task.functions;
    right.append(make("h3", { text: `${task.operators.length ? "operators" : "functions"} of the task ${task.task}${costliest(costs)}` }));
    if (costs.length) right.append(costTable(costs, task.operators.length ? "operator" : "function"));
    const by = task.operators.length ? " The operators are by torch's profiler, in another call of it." : costs.length ? " The functions are by cProfile, in another call of it." : "";
    right.append(make("p", { class: "of", text: `The call of client ${task.client}, made once more by the server's process on one thread: ${moment(task.seconds)} undisturbed.${by}${task.error ? ` It failed: ${task.error}.` : ""}${task.untraced ? ` It was not traced: ${task.untraced}.` : ""}${p.tasks_left_out ? ` ${p.tasks_left_out} more tasks are not shown.` : ""}` }));
    traceWords(right, data.runs[p.run], task);
  },
  rows: (data) => ({
    head: ["run", "round", "kind", "of", "name", "where", "calls", "seconds", "with what it called"],
    rows: data.profiles.shown.flatMap((p) => {
      const { path } = data.runs[p.run], costs = (kind, of, rows) => rows.map(([name, where, calls, own, total]) => [path, p.round, kind, of, name, where, calls, own, total ?? ""]);
      const phases = (round, of) => of.map(([name, t]) => [path, round, "phase", "", name, "", "", t, ""]);
      return [...(p.before ? phases(p.round - 1, p.before) : []), ...phases(p.round, p.seconds), ...costs("function", "server", p.functions), ...p.tasks.flatMap((t) => [...costs("operator", t.task, t.operators), ...costs("function", t.task, t.functions)])];
    }),
  }),
};
