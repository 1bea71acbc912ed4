"use strict";
const TOKEN = "slipstream.token"; // in sessionStorage
const PARTS = ["open", "send", "stage", "verify", "drain", "commit"];
const SHOWN_S = 300, KEPT = 4000, AROUND_S = 15, ROUNDS = 60, ROWS = 12;
const FAST_MS = 250, SLOW_MS = 1000, FLEET_MS = 2000, SILENT_MS = 30000, DEADLINE_MS = 10000, LONG_MS = 900000;
// Which figures of a step each chart of the run has; those of the trainer and of the job have one list.
const RUN_CHARTS = [
  ["Reward", /^(evaluation\/)?reward$|^reward(_std|\/[^/]+)$|^evaluation\/pass@1$/], ["Loss", /^loss$/], ["KL", /^(kl|reference_kl|rollout_kl)$/], ["Entropy", /^entropy$/],
  ["Answer length, tokens", /^answer_tokens_(mean|max)$/], ["Share cut, share left out", /^(cut|left_out)_fraction$/], ["Staleness, versions", /^staleness_(mean|max)$/],
  ["Drift of log-probabilities", /^logprob_difference_mean$/], ["Effective sample", /^effective_sample_fraction$/], ["Seconds", /^(step|wait|train|publish|evaluation)_s$/],
];

const $ = (id) => document.getElementById(id);
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const seconds = (s) => (s == null ? "" : s < 0.9995 ? `${(s * 1000).toFixed(s < 0.0095 ? 1 : 0)} ms` : s < 100 ? `${s.toFixed(2)} s` : `${s.toFixed(0)} s`);
const size = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(2)} GB` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e3).toFixed(1)} kB`);
const number = (x) => (x == null ? "–" : Math.abs(x) >= 100 ? Math.round(x).toLocaleString("en") : x && Math.abs(x) < 0.001 ? (+x.toPrecision(3)).toExponential() : String(+x.toPrecision(3)));
const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
const most = (round, key) => Math.max(0, ...Object.values(round.replicas).map((each) => each[key]));
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const partsOf = (round) => (Object.keys(round.parts).length ? round.parts : { open: round.duration_s }); // of an older version: not known

let fleet = null, rounds = [], stored = [], storedAt = "", steps = [], rates = [], lastLoad = null, lastEvent = 0, update = null, trainer = null, hasTrainer = true, silentSince = null, fastUntil = 0, following = null;

// -- asking the fleet -------------------------------------------------------------------------------

async function ask(path, { body, signal, limit = DEADLINE_MS, whole = true } = {}) {
  const headers = { "x-requested-with": "Slipstream" }, token = sessionStorage.getItem(TOKEN);
  if (token) headers.authorization = `Bearer ${token}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { method: body === undefined ? "GET" : "POST", headers, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store" };
  const answer = await fetch(path, { ...options, signal: signal ?? AbortSignal.timeout(limit) });
  if (answer.ok) return whole ? answer.json() : answer;
  let message = `${path} was answered with status ${answer.status}`;
  try { message = (await answer.json()).error.message; } catch { /* a proxy's page */ }
  throw Object.assign(new Error(message), { status: answer.status });
}

/** Events of a stream of server-sent events. Throws if nothing comes for a while. */
async function* eventsOf(path, options, silentMs) {
  const control = new AbortController();
  options.signal?.addEventListener("abort", () => control.abort());
  let timer = setTimeout(() => control.abort(), silentMs), rest = "";
  try {
    const answer = await ask(path, { ...options, whole: false, signal: control.signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => control.abort(), silentMs);
      const pieces = (rest + value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        const data = piece.split("\n").find((line) => line.startsWith("data: {"));
        if (data) yield JSON.parse(data.slice(6));
      }
    }
  } finally {
    clearTimeout(timer);
    control.abort();
  }
}

/** Do it again and again, sooner after `hurry`, whatever happens. */
function forever(work, pauseMs) {
  let wake = () => {};
  (async () => {
    for (;;) {
      const woken = new Promise((done) => { wake = done; });
      let pause = pauseMs();
      try { await work(); } catch (error) { failed(error, work === refreshFleet); pause = isRefused(error) ? SILENT_MS : Math.max(pause, SLOW_MS); }
      await Promise.race([sleep(document.hidden ? Math.max(pause, SLOW_MS) : pause), woken]);
    }
  })();
  return () => wake();
}

const isRefused = (error) => error.status === 401 || error.status === 403; // until there is another token

function failed(error, loudly) {
  if (isRefused(error)) {
    if ($("locked").hidden) say("The fleet asks for the operator's token.");
    $("locked_why").textContent = sessionStorage.getItem(TOKEN) ? `This token was refused: ${error.message}` : "Operator's token";
    $("locked").hidden = false;
    pill("locked", "wait");
  } else if (loudly && silentSince === null) {
    silentSince = Date.now() / 1000;
    say("The fleet does not answer.");
    pill(`no answer since ${clock(silentSince)}`, "bad");
  }
}

function answered() {
  if (silentSince !== null) say("The fleet answers again.");
  silentSince = null;
  $("locked").hidden = true;
  $("forget").hidden = !sessionStorage.getItem(TOKEN);
}

// -- what the fleet says ----------------------------------------------------------------------------

async function refreshFleet() {
  const now = await ask("fleet");
  if (fleet && fleet.fleet_id !== now.fleet_id) reset();
  const ended = now.round ? now.round.round_id - 1 : now.rounds_ended.committed + now.rounds_ended.aborted, known = rounds.at(-1)?.round_id ?? Math.max(0, ended - ROUNDS);
  const newer = ended > known ? (await ask(`fleet/rounds?after=${known}`)).rounds.filter((each) => each.round_id > known) : [];
  const storeNow = `${ended} ${now.stored_version}`;
  if (storedAt !== storeNow) stored = (await ask("fleet/versions")).versions;
  // Not before: what is drawn meanwhile has all of it, or nothing.
  fleet = now;
  storedAt = storeNow;
  rounds = [...rounds, ...newer].slice(-200);
  answered();
  if (newer.length) drawRounds();
  if (fleet.round) fastUntil = Date.now() + 4000;
  drawFleet();
  if (!$("model").textContent && fleet.members.some((it) => it.admitted)) $("model").textContent = (await ask("v1/models")).data[0].id;
}

/** Another fleet is behind this address. */
function reset() {
  fleet = null; rounds = []; stored = []; storedAt = ""; steps = []; rates = []; lastLoad = null; lastEvent = 0; update = null; hasTrainer = true;
  $("events").replaceChildren();
  following?.abort(); // ids of events begin anew
  clearCharts();
}

async function refreshLoad() {
  const load = await ask("fleet/load");
  const each = {};
  for (const [name, now] of Object.entries(load.replicas)) {
    const before = lastLoad?.replicas[name], elapsed = load.at - (lastLoad?.at ?? 0);
    if (before && elapsed > 0.05 && now.generated_tokens >= before.generated_tokens) each[name] = (now.generated_tokens - before.generated_tokens) / elapsed;
  }
  lastLoad = load;
  const known = Object.values(each);
  if (known.length) rates.push({ at: load.at, total: known.reduce((sum, rate) => sum + rate, 0), each });
  rates = rates.slice(-KEPT);
  for (const [id, path] of [["dashboard", ""], ["logs", "/#/logs"]]) {
    $(id).hidden = !load.dashboard;
    $(id).href = `http://${load.dashboard}${path}`;
    $(id).title = `Ray's dashboard, on the head node: ${load.dashboard}`;
  }
  drawTokens();
  drawFleet();
}

async function refreshRun() {
  if (!hasTrainer) return;
  try {
    trainer = await ask("train/status");
    const newer = (await ask(`train/steps?after=${steps.at(-1)?.at ?? 0}`)).steps;
    steps = [...steps, ...newer].slice(-KEPT);
    drawRun(newer.length > 0);
  } catch (error) {
    if (error.status !== 400) throw error;
    hasTrainer = false; // an external trainer publishes
  }
}

async function refreshAdapters() {
  const { adapters } = await ask("fleet/adapters");
  $("with_adapters").hidden = !adapters.length;
  fill("adapters", adapters.slice(-ROWS).reverse().map((it) => [[it.name], [it.version, "n"], [it.state, colourOf(it.state)], [size(it.size_bytes), "n"], [it.replicas.length, "n"]]));
}

async function follow() {
  following = new AbortController();
  for await (const event of eventsOf(`fleet/events?since=${lastEvent}`, { signal: following.signal }, SILENT_MS)) {
    const { id, event: name, at, ...rest } = event;
    lastEvent = id;
    if (name === "round") {
      fastUntil = Date.now() + 4000;
      if (rest.phase === "committed") say(`Round ${rest.round_id} is committed: the fleet serves version ${rest.version}.`);
      else if (rest.phase === "open" || rest.phase === "aborted") say(`Round ${rest.round_id}: ${rest.phase}.`);
    }
    const line = document.createElement("li"), time = document.createElement("time");
    time.textContent = clock(at);
    const told = Object.entries(rest).filter(([key, value]) => value !== "" && value !== null && key !== "incarnation").map(([key, value]) => `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`);
    line.append(time, ` ${name} ${told.join(" ")}`);
    $("events").prepend(line);
    while ($("events").childElementCount > 200) $("events").lastChild.remove();
    hurryFleet();
    hurryLoad();
    if (name === "adapter") hurryAdapters();
  }
}

// -- showing it -------------------------------------------------------------------------------------

function say(text) { $("announce").textContent = text; }

function pill(text, kind) {
  $("state").textContent = text;
  $("state").className = `pill ${kind}`;
}

const colourOf = (state) => ({ serving: "ok", committed: "ok", live: "ok", fenced: "bad", lost: "bad", aborted: "bad", retired: "" })[state] ?? "wait";

/** Rows of cells [text or element, class] into a table's body, if they differ from what it shows. */
function fill(id, rows) {
  const body = $(id), made = document.createElement("tbody");
  for (const cells of rows) {
    const row = made.insertRow();
    for (const [content, kind] of cells) {
      const cell = row.insertCell();
      cell.append(content ?? "");
      if (kind) cell.className = kind;
    }
    if (rows.live?.has(cells)) row.className = "live";
  }
  if (body.innerHTML !== made.innerHTML) body.replaceChildren(...made.childNodes);
}

function meter(share) {
  const cell = document.createDocumentFragment(), all = document.createElement("span"), used = document.createElement("i");
  all.className = "meter";
  used.style.width = `${Math.min(100, share * 100).toFixed(0)}%`;
  all.append(used);
  cell.append(all, `${(share * 100).toFixed(0)} %`);
  return cell;
}

/** A stacked bar: [share, colour] one after the other; `words` for who does not see it. */
function bar(pieces, width, words) {
  const cell = document.createDocumentFragment(), all = document.createElement("div"), told = document.createElement("span");
  all.className = "bar";
  all.style.width = `${width.toFixed(1)}%`;
  for (const [share, colour] of pieces.filter(([share]) => share > 0)) {
    const piece = document.createElement("i");
    piece.style.flex = `${share.toFixed(5)} 0 0`;
    piece.style.background = `var(--${colour})`;
    all.append(piece);
  }
  told.className = "unseen";
  told.textContent = words;
  all.title = words;
  cell.append(all, told);
  return cell;
}

const doing = () => (fleet.condition.includes("sleep") ? "asleep" : fleet.condition.includes("pause") ? "paused" : null);

function drawFleet() {
  if (!fleet || silentSince !== null || !$("locked").hidden) return;
  const here = fleet.members.filter((it) => !["fenced", "lost"].includes(it.state)), serving = here.filter((it) => it.state === "serving");
  const loads = lastLoad?.replicas ?? {}, now = rates.at(-1), sum = (key) => here.reduce((total, it) => total + (loads[it.replica_id]?.[key] ?? 0), 0);
  const problems = [fleet.store_problem && `Version ${fleet.committed_version} will not get into the store: ${fleet.store_problem}`, fleet.size.problem, trainer?.missed, trainer?.store_problem].filter(Boolean);
  $("problems").hidden = !problems.length;
  if ($("problems").dataset.shown !== problems.join()) {
    $("problems").dataset.shown = problems.join();
    $("problems").replaceChildren(...problems.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
  }
  const state = doing();
  if (!serving.length) pill("no replica serves", "wait");
  else if (state) pill(state, "wait");
  else if (fleet.round) pill(`updating: ${fleet.round.phase}`, "ok");
  else pill("serving", "ok");

  const last = rounds.findLast((it) => it.phase === "committed");
  const tiles = {
    version: fleet.committed_version, label: fleet.label ?? (fleet.stored_version === null ? "" : `stored: ${fleet.stored_version}`), serving: `${serving.length} / ${here.length}`, workers: `${fleet.workers} ${fleet.workers === 1 ? "worker" : "workers"}, epoch ${fleet.epoch}`,
    tokens: number(now?.total ?? null), each: now ? `${number(now.total / Math.max(1, Object.keys(now.each).length))} each` : "", running: lastLoad ? sum("running") : "–", waiting: lastLoad ? `${sum("waiting")} waiting` : "",
    kv: lastLoad ? `${(100 * Math.max(0, ...Object.values(loads).map((it) => it.kv_cache_use))).toFixed(0)} %` : "–", gap: last ? seconds(most(last, "gap_s")) : "–", gap_of: last ? `version ${last.version}, ${clock(last.committed_at)}` : "",
    round: fleet.round ? fleet.round.phase : "idle", lease: fleet.lease ? `lease: ${fleet.lease.publisher}, ${fleet.lease.remaining_s.toFixed(0)} s` : "no publisher",
  };
  for (const [id, text] of Object.entries(tiles)) if ($(`t_${id}`).textContent !== String(text)) $(`t_${id}`).textContent = text;

  fill("members", fleet.members.map((it) => {
    const load = loads[it.replica_id], states = [it.state, it.admitted && state, it.draining && "draining"].filter(Boolean).join(", ");
    return [[it.replica_id], [states, states === "serving" ? "ok" : colourOf(it.state) === "ok" ? "wait" : colourOf(it.state)], [it.version, "n"], [number(now?.each[it.replica_id] ?? null), "n"], [load?.running ?? "–", "n"], [load?.waiting ?? "–", "n"],
      [load ? meter(load.kv_cache_use) : "–"], [load?.drafted_tokens ? `${(100 * load.accepted_tokens / load.drafted_tokens).toFixed(0)} %${load.drafting_off ? ", off" : ""}` : "–", "n"], [it.world_size, "n"], [it.silent_s < 2 ? "now" : `${it.silent_s.toFixed(0)} s ago`, "n"], [it.reason || it.pending.join(", "), "note"]];
  }));
  drawRoundRows();
  const labels = new Map(rounds.map((it) => [it.version, it.label])), versions = stored.filter((it) => it !== fleet.committed_version).map((it) => [it, labels.get(it)]).reverse();
  const key = JSON.stringify(versions);
  if ($("back_to").dataset.shown !== key) {
    const chosen = document.activeElement === $("back_to") ? $("back_to").value : null;
    $("back_to").dataset.shown = key;
    const choices = versions.map(([version, label]) => new Option(label ? `version ${version} (${label})` : `version ${version}`, version));
    $("back_to").replaceChildren(...(choices.length ? choices : [new Option("no other version in the store", "")]));
    if (versions.some(([version]) => String(version) === chosen)) $("back_to").value = chosen;
  }
  $("rollback").querySelector("button").disabled = !versions.length;
}

function drawRoundRows() {
  const shown = rounds.slice(-ROWS).reverse(), longest = Math.max(0.001, fleet.round?.age_s ?? 0, ...shown.map((it) => it.duration_s));
  const rows = shown.map((it) => [
    [it.round_id, "n"], [it.version, "n"], [it.opened_at ? clock(it.opened_at) : ""], [it.phase, colourOf(it.phase)],
    [bar(PARTS.map((part) => [partsOf(it)[part] ?? 0, part]), (100 * it.duration_s) / longest, PARTS.filter((part) => partsOf(it)[part] > 0).map((part) => `${part} ${seconds(partsOf(it)[part])}`).join(", "))],
    [seconds(it.duration_s), "n"], [it.phase === "committed" ? seconds(most(it, "gap_s")) : "", "n"], [most(it, "bytes") ? size(most(it, "bytes")) : "", "n"], [it.publisher], [it.reason || it.label || "", "note"],
  ]);
  rows.live = new Set();
  const open = fleet.round;
  if (open) {
    const row = [[open.round_id, "n"], [open.version, "n"], [clock(Date.now() / 1000 - open.age_s)], [open.phase, "wait"], [bar([], (100 * open.age_s) / longest, "in progress")], [seconds(open.age_s), "n"], [""], [open.file_bytes ? `${size(open.sent_bytes)} of ${size(open.file_bytes)}` : "", "n"], [fleet.lease?.publisher ?? ""], [open.label ?? "", "note"]];
    rows.unshift(row);
    rows.live.add(row);
  }
  fill("rounds", rows);
  $("no_rounds").hidden = rows.length > 0;
}

// -- charts -----------------------------------------------------------------------------------------

const charts = new Map(); // id -> { plot, key }

/** Draw data in an element: a chart is kept while its series stay the same. */
function chart(id, key, data, options) {
  const place = typeof id === "string" ? $(id) : id, known = charts.get(place), width = Math.floor(place.clientWidth);
  if (!width) return;
  if (known && known.key === key) {
    if (known.plot.width !== width) known.plot.setSize({ width, height: known.plot.height });
    known.plot.setData(data);
    return;
  }
  known?.plot.destroy();
  const axis = (more) => ({ stroke: css("quiet"), grid: { stroke: css("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", size: 44, ...more });
  const made = options(axis);
  made.hooks = { ...made.hooks, setCursor: [legend], setData: [legend] };
  const plot = new uPlot({ width, cursor: { drag: { x: false, y: false }, points: { size: 5 } }, padding: [8, 22, 0, 0], legend: { show: false }, ...made }, data, place);
  charts.set(place, { plot, key });
  legend(plot);
}

/** The series with their newest values, or those under the mouse, above the chart. */
function legend(plot) {
  const place = plot.root.parentNode, [x, ...series] = plot.series, at = plot.cursor.idx;
  if (!place || !series[0].colour) return;
  const all = place.previousElementSibling.className === "legend" ? place.previousElementSibling : document.createElement("div");
  all.className = "legend";
  const shown = series.map((it, i) => swatch(it.colour, `${it.label} ${number(at == null ? plot.data[i + 1].findLast((v) => v != null) : plot.data[i + 1][at])}`));
  all.replaceChildren(...shown, at == null ? "" : `at ${x.told(plot.data[0][at])}`);
  place.before(all);
}

const line = (label, colour, more = {}) => ({ label, colour, stroke: css(colour), width: 1.5, points: { show: false }, ...more });

/** Lines where versions were committed, with their numbers. */
function commits(at) {
  return { draw: [(u) => {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = css("text");
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    let free = -Infinity;
    for (const [x, name] of at()) {
      const left = u.valToPos(x, "x", true);
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.beginPath(); ctx.moveTo(left, bbox.top); ctx.lineTo(left, bbox.top + bbox.height); ctx.stroke();
      if (left < free) continue;
      const right = left + ctx.measureText(name).width + 8 * devicePixelRatio;
      if (right <= bbox.left + bbox.width + 10 * devicePixelRatio) { ctx.fillText(name, left + 4 * devicePixelRatio, bbox.top + 10 * devicePixelRatio); free = right; }
    }
    ctx.restore();
  }] };
}

function drawTokens() {
  const names = [...new Set(rates.slice(-50).flatMap((it) => Object.keys(it.each)))].sort(), few = names.length > 1 && names.length <= 6 ? names : [];
  const series = () => [{ told: clock }, line("all", "s0", { fill: css("band") }), ...few.map((name, i) => line(name, `s${1 + (i % 7)}`, { width: 1 }))];
  const columns = (from, x) => [from.map(x), from.map((it) => it.total), ...few.map((name) => from.map((it) => it.each[name] ?? null))];
  const positive = { range: (u, low, high) => [0, Math.max(1, high * 1.1)] };
  const end = rates.at(-1)?.at ?? Date.now() / 1000, recent = rates.filter((it) => it.at > end - SHOWN_S);
  if (recent.length > 1) chart("c_tokens", few.join(), columns(recent, (it) => it.at), (axis) => ({
    height: 190, series: series(), axes: [axis({ space: 80, size: 26, values: (u, all) => all.map((at) => clock(at)) }), axis({ values: (u, all) => all.map(number) })],
    scales: { x: { range: () => { const to = rates.at(-1).at; return [Math.max(to - SHOWN_S, Math.min(rates[0].at, to - 60)), to]; } }, y: positive },
    hooks: commits(() => rounds.filter((it) => it.committed_at).map((it) => [it.committed_at, `v${it.version}`])),
  }));
  const last = rounds.findLast((it) => it.phase === "committed" && it.committed_at);
  if (last && end - last.committed_at < AROUND_S + 2) {
    const near = rates.filter((it) => Math.abs(it.at - last.committed_at) <= AROUND_S);
    if (near.length > 2) update = { round: last, near };
  }
  $("no_update").hidden = update !== null;
  if (!update) return;
  const { round, near } = update;
  $("update_of").textContent = `version ${round.version} at ${clock(round.committed_at)}; gap ${seconds(most(round, "gap_s"))}`;
  chart("c_update", few.join(), columns(near, (it) => it.at - round.committed_at), (axis) => ({
    height: 190, series: [{ told: (s) => `${s.toFixed(1)} s` }, ...series().slice(1)],
    axes: [axis({ size: 26, values: (u, all) => all.map((s) => `${s > 0 ? "+" : ""}${s} s`) }), axis({ values: (u, all) => all.map(number) })],
    scales: { x: { time: false, range: [-AROUND_S, AROUND_S] }, y: positive }, hooks: commits(() => [[0, `v${update.round.version}`]]),
  }));
}

function drawRounds() {
  const shown = rounds.filter((it) => it.opened_at > 0).slice(-ROUNDS);
  $("c_rounds").hidden = !shown.length;
  if (!shown.length) return;
  // Stacked: the longest bar is drawn first, and shorter ones over it.
  const sums = PARTS.map((_, i) => shown.map((it) => PARTS.slice(0, i + 1).reduce((sum, part) => sum + (partsOf(it)[part] ?? 0), 0)));
  const order = PARTS.map((_, i) => PARTS.length - 1 - i);
  chart("c_rounds", "rounds", [shown.map((it) => it.opened_at), ...order.map((i) => sums[i]), shown.map((it) => (it.phase === "committed" ? most(it, "gap_s") * 1000 : null))], (axis) => ({
    height: 190,
    series: [{}, ...order.map((i) => ({ fill: css(PARTS[i]), stroke: css(PARTS[i]), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.7, 22, 4], align: 1 }) })),
      { scale: "ms", fill: css("gap"), stroke: css("gap"), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.2, 6, 2], align: -1 }) }],
    axes: [axis({ space: 80, size: 26, values: (u, all) => all.map((at) => clock(at)) }), axis({ values: (u, all) => all.map((s) => `${number(s)} s`) }), axis({ scale: "ms", side: 1, grid: { show: false }, size: 56, values: (u, all) => all.map((ms) => `${number(ms)} ms`) })],
    scales: { x: { range: (u) => { const low = u.data[0][0], high = u.data[0].at(-1), spare = Math.max(5, (high - low) * 0.04); return [low - spare, high + spare]; } }, y: { range: (u, low, high) => [0, Math.max(0.001, high * 1.1)] }, ms: { range: (u, low, high) => [0, Math.max(1, (high || 1) * 2)] } },
  }));
}

function drawRun(changed) {
  const runs = steps.filter((it) => it.run), name = runs.at(-1)?.run ?? "", own = steps.filter((it) => it.run === name), last = own.at(-1);
  $("run").hidden = !own.length;
  if (!own.length) return;
  const does = trainer.doing ? `the trainer does: ${trainer.doing}, ${seconds(trainer.doing_s)}` : "the trainer waits";
  $("run_of").textContent = `${name || "steps of the trainer"}, step ${last.step} at ${clock(last.at)}; ${does}`;
  if (!changed) return;
  const trainers = /^trainer\//; // its figures give way to the job's of the same name
  const figures = (values) => Object.fromEntries(Object.entries(values).sort(([a], [b]) => trainers.test(b) - trainers.test(a)).map(([key, value]) => [key.replace(trainers, ""), value]));
  const bySteps = [...new Map(own.map((it) => [it.step, figures(it.values)])).entries()].sort(([a], [b]) => a - b);
  const all = [...new Set(bySteps.flatMap(([, values]) => Object.keys(values)))].sort((a, b) => a.length - b.length);
  const keys = all.filter((key) => !key.startsWith("reward/") || all.filter((it) => it.startsWith("reward/")).length > 1); // the only source is the reward
  for (const [title, wanted] of RUN_CHARTS) {
    const found = keys.filter((key) => wanted.test(key) && bySteps.some(([, values]) => typeof values[key] === "number"));
    const id = `run_${title.replace(/\W+/g, "_")}`;
    if (!$(id)) {
      const figure = document.createElement("div"), head = document.createElement("h3"), place = document.createElement("div");
      head.textContent = title;
      Object.assign(place, { id, className: "chart", role: "img", ariaLabel: `${title} by step` });
      figure.append(head, place);
      $("run_charts").append(figure);
    }
    $(id).parentNode.hidden = !found.length;
    if (!found.length) continue;
    const dots = bySteps.length < 40, label = (key) => key.replace("logprob_difference", "difference").replace("evaluation/", "eval ").replaceAll("_", " ");
    chart(id, `${found.join()} ${dots}`, [bySteps.map(([step]) => step), ...found.map((key) => bySteps.map(([, values]) => values[key] ?? null))], (axis) => ({
      height: 120, series: [{ told: (step) => `step ${step}` }, ...found.map((key, i) => line(label(key), `s${i}`, { spanGaps: true, points: { show: dots || key.startsWith("evaluation"), size: 4 } }))],
      axes: [axis({ size: 24, space: 40, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000] }), axis({ space: 24, values: (u, all) => all.map(number) })], scales: { x: { time: false } },
    }));
  }
  const samples = own.flatMap((it) => it.rollouts.map((rollout) => ({ ...rollout, step: it.step }))).slice(-6).reverse();
  $("with_rollouts").hidden = !samples.length;
  $("rollouts").replaceChildren(...samples.map((it) => {
    const item = document.createElement("li"), text = document.createElement("p"), head = document.createElement("div");
    const tokens = it.versions.reduce((sum, [, count]) => sum + count, 0);
    head.className = "legend";
    head.append(`step ${it.step}, reward ${number(it.reward)}, ${tokens} tokens: `, ...it.versions.map(([version, count]) => swatch(`s${version % 8}`, `v${version} (${count})`)));
    text.textContent = it.text;
    item.append(head, bar(it.versions.map(([version, count]) => [count, `s${version % 8}`]), 100, ""), text);
    return item;
  }));
}

function swatch(colour, text) {
  const all = document.createElement("span"), mark = document.createElement("i");
  mark.style.background = `var(--${colour})`;
  all.append(mark, text);
  return all;
}

function clearCharts() {
  for (const { plot } of charts.values()) plot.destroy();
  charts.clear();
}

function drawAgain() {
  clearCharts();
  drawTokens();
  drawRounds();
  if (trainer) drawRun(true);
}

// -- what the operator does -------------------------------------------------------------------------

async function act(text, path, body, button) {
  button.disabled = true;
  $("done").className = "";
  $("done").textContent = `${text}…`;
  try {
    const made = await ask(path, { body, limit: LONG_MS });
    $("done").textContent = made.version ? `${text}: the fleet serves it as version ${made.version}, after ${seconds(made.duration_s)}.` : `${text}: done.`;
  } catch (error) {
    $("done").className = "bad";
    $("done").textContent = `${text}: ${error.message}`;
  }
  button.disabled = false;
  hurryFleet();
}

$("pause").addEventListener("click", (event) => act("Pause", "pause", {}, event.target));
$("resume").addEventListener("click", (event) => act("Resume", "resume", {}, event.target));
$("rollback").addEventListener("submit", (event) => {
  event.preventDefault();
  const version = Number($("back_to").value);
  $("sure_text").textContent = `Publish version ${version} again, as version ${fleet.committed_version + 1}? The trainer continues from it.`;
  $("sure").returnValue = "no";
  $("sure").onclose = () => { if ($("sure").returnValue === "yes") act(`Roll back to version ${version}`, "fleet/rollback", { version }, event.target.querySelector("button")); };
  $("sure").showModal();
});
$("locked").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, $("token").value.trim());
  $("token").value = "";
  for (const hurry of [hurryFleet, hurryLoad, hurryRun, hurryAdapters, hurryEvents]) hurry();
});
$("forget").addEventListener("click", () => { sessionStorage.removeItem(TOKEN); location.reload(); });

let asking = null;
$("stop").addEventListener("click", () => asking?.abort());
$("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("ask").requestSubmit(); } });
$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  asking?.abort();
  const mine = (asking = new AbortController()), answer = $("answer");
  answer.textContent = $("spans").textContent = "";
  answer.ariaBusy = "true"; // read out when it is complete
  $("stop").hidden = false;
  try {
    const model = (await ask("v1/models")).data[0].id;
    const body = { model, stream: true, temperature: 0, max_tokens: 256, messages: [{ role: "user", content: $("prompt").value }] };
    for await (const data of eventsOf("v1/chat/completions", { body, signal: mine.signal }, LONG_MS)) {
      if (data.error) throw new Error(data.error.message);
      for (const choice of data.choices) {
        answer.textContent += choice.delta?.content ?? "";
        if (choice.weight_versions) $("spans").replaceChildren("tokens ", ...choice.weight_versions.map((it) => swatch(`s${it.version % 8}`, `${it.start}–${it.end}: version ${it.version} `)));
      }
    }
  } catch (error) {
    if (!mine.signal.aborted) answer.textContent += `${answer.textContent && "\n"}${error.message}`;
  }
  if (asking === mine) { answer.ariaBusy = "false"; $("stop").hidden = true; }
});

$("parts").append(...PARTS.map((part) => swatch(part, part)), swatch("gap", "gap, beside it and on the right axis"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
new ResizeObserver(() => { for (const [place, { plot }] of charts) if (place.clientWidth) plot.setSize({ width: Math.floor(place.clientWidth), height: plot.height }); }).observe(document.querySelector("main"));
const hurryFleet = forever(refreshFleet, () => FLEET_MS);
const hurryLoad = forever(refreshLoad, () => (Date.now() < fastUntil ? FAST_MS : SLOW_MS));
const hurryRun = forever(refreshRun, () => FLEET_MS);
const hurryAdapters = forever(refreshAdapters, () => 5 * FLEET_MS);
const hurryEvents = forever(follow, () => SLOW_MS);
