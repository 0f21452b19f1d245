// The dashboard: one stream of server-sent events, read with `fetch`, because an EventSource cannot send the secret.
//
// The secret is behind "#" in the address, which browsers send to nobody. It moves to the session of this tab, and the
// address loses it. What clients, hosts and logs say is shown as text only (`textContent`).

import { Timeline, clock } from "./timeline.js";

const KEY = "pathways-secret", SILENT_MS = 20000, LONGEST_WAIT_MS = 10000;
const byId = (id) => document.getElementById(id);

if (location.hash.length > 1) {
  sessionStorage.setItem(KEY, decodeURIComponent(location.hash.slice(1)));
  history.replaceState(null, "", location.pathname);
}

// -- texts -----------------------------------------------------------------------------------------------------------

function bytes(count) {
  if (count === null || count === undefined) return "";
  for (const unit of ["B", "KiB", "MiB"]) {
    if (count < 1024) return `${Math.round(count)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} GiB`;
}

function duration(seconds) {
  const two = (value) => String(Math.floor(value)).padStart(2, "0");
  const days = Math.floor(seconds / 86400), hours = Math.floor(seconds / 3600) % 24;
  if (days) return `${days} d ${hours} h`;
  const rest = `${two(seconds / 60 % 60)}:${two(seconds % 60)}`;
  return hours ? `${hours}:${rest}` : rest;
}

const percent = (part) => `${Math.round(part * 100)} %`;
const count = (value) => value.toLocaleString("en");

// -- tables ----------------------------------------------------------------------------------------------------------

// A cell is a text, or {text, kind, title, part, colour}: kind is a class, part fills a bar, colour is of a client.
// Cells are changed only where they differ, so that a text stays selected.
function fill(node, cell) {
  const { text = "", kind = "", title = "", part = null, colour = "" } = typeof cell === "object" ? cell : { text: cell };
  const shape = `${part === null ? "" : "bar"} ${colour ? "swatch" : ""}`;
  if (node.dataset.shape !== shape) {
    node.dataset.shape = shape;
    node.replaceChildren();
    if (colour) node.append(Object.assign(document.createElement("span"), { className: "swatch" }));
    if (part !== null) {
      const bar = Object.assign(document.createElement("span"), { className: "bar" });
      bar.append(document.createElement("i"));
      node.append(bar, " ");
    }
    node.append(document.createTextNode(""));
  }
  if (colour) node.firstChild.style.background = `var(${colour})`;
  if (part !== null) node.querySelector("i").style.width = `${Math.min(100, Math.max(0, part * 100))}%`;
  if (node.lastChild.data !== String(text)) node.lastChild.data = String(text);
  if (node.className !== kind) node.className = kind;
  if (node.title !== title) node.title = title;
}

// Columns: [title, class, the cell of an item].
function table(id, items, columns, empty, more = 0) {
  const box = byId(id);
  let body = box.querySelector("tbody");
  if (!items.length) {
    if (box.textContent !== empty) box.replaceChildren(Object.assign(document.createElement("p"), { className: "empty", textContent: empty }));
    return;
  }
  if (box.dataset.columns !== columns.map(([title]) => title).join()  || !body) {
    box.dataset.columns = columns.map(([title]) => title).join();
    const whole = document.createElement("table"), head = whole.createTHead().insertRow();
    for (const [title, kind] of columns) {
      head.append(Object.assign(document.createElement("th"), { textContent: title, className: kind, scope: "col" }));
    }
    body = whole.createTBody();
    box.replaceChildren(whole, Object.assign(document.createElement("p"), { className: "empty" }));
  }
  while (body.rows.length > items.length) body.deleteRow(-1);
  items.forEach((item, index) => {
    const row = body.rows[index] ?? body.insertRow();
    columns.forEach(([, kind, cell], place) => {
      const made = cell(item), whole = typeof made === "object" ? made : { text: made };
      fill(row.cells[place] ?? row.insertCell(), { ...whole, kind: `${kind} ${whole.kind ?? ""}`.trim() });
    });
  });
  box.lastChild.textContent = more ? `and ${count(more)} more` : "";
}

// -- the page --------------------------------------------------------------------------------------------------------

const timeline = new Timeline(byId("timeline"), byId("tip"), showSpan);

function showSpan() {
  for (const button of document.querySelectorAll("[data-span]")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.span) === timeline.span));
  }
  byId("live").setAttribute("aria-pressed", String(timeline.end === null));
}

for (const button of document.querySelectorAll("[data-span]")) {
  button.addEventListener("click", () => timeline.show(Number(button.dataset.span), timeline.end));
}
byId("zoom-in").addEventListener("click", () => timeline.zoom(0.5));
byId("zoom-out").addEventListener("click", () => timeline.zoom(2));
byId("live").addEventListener("click", () => timeline.show(timeline.span, null));
showSpan();

function state(is, text, problem = "") {
  byId("state").dataset.is = is;
  byId("state").textContent = text;
  byId("problem").hidden = !problem;
  byId("problem").textContent = problem;
  document.title = is === "live" ? "Pathways" : `Pathways: ${text}`;
}

function tiles(now) {
  const up = now.hosts.filter((host) => host.state === "up" || host.state === "drained").length;
  const waiting = now.queues.order + now.queues.memory;
  const lost = now.losses.hosts + now.losses.machines;
  const shown = [
    [percent(now.busy), "devices busy"],
    [count(now.clients.length + (now.more.clients ?? 0)), now.clients.length === 1 ? "client" : "clients"],
    [count(Math.round(now.runs)), "runs per second"],
    [count(waiting), waiting && now.queues.memory ? `wait, ${count(now.queues.memory)} for memory` : "wait in the order"],
    [count(now.queues.hosts), "runs on hosts"],
    [now.more.hosts ? count(up) : `${up} of ${now.hosts.length}`, "hosts up", !now.more.hosts && up < now.hosts.length ? "bad" : ""],
    [count(lost), lost === 1 ? "loss so far" : "losses so far", lost ? "warn" : ""],
    [duration(now.cluster.uptime), "since the start"],
  ];
  const box = byId("tiles");
  shown.forEach(([value, meaning, kind = ""], index) => {
    const tile = box.children[index] ?? box.appendChild(document.createElement("div"));
    if (!tile.children.length) tile.append(document.createElement("b"), document.createElement("span"));
    tile.className = `tile ${kind}`;
    tile.firstChild.textContent = value;
    tile.lastChild.textContent = meaning;
  });
}

function legend(now) {
  const shares = new Map(now.clients.map((each) => [each.client, each.share]));
  const shown = timeline.clientsShown().slice(0, 16);
  const box = byId("legend");
  while (box.children.length > Math.max(1, shown.length)) box.lastChild.remove();
  shown.forEach((each, index) => {
    const item = box.children[index] ?? box.appendChild(document.createElement("li"));
    const share = each === 0 ? "" : shares.has(each) ? ` ${percent(shares.get(each))}` : " (has left)";
    fill(item, { text: timeline.nameOf(each) + share, colour: timeline.colourOf(each) });
  });
  if (!shown.length) fill(box.children[0] ?? box.appendChild(document.createElement("li")), { text: "no client has used a device", kind: "empty" });
}

const stateCell = (value) => ({ text: value, kind: value === "lost" ? "bad" : value === "up" ? "" : "warn" });

function show(now) {
  timeline.rows = now.rows;
  timeline.down = new Set(now.down);
  byId("cluster").textContent = `${now.cluster.is}, ${now.cluster.port || now.cluster.address}`;
  const names = new Map(now.clients.map((each) => [each.client, each.name]));
  tiles(now);
  legend(now);
  table("clients", now.clients, [
    ["client", "name", (each) => ({ text: each.name, title: `client ${each.client}: ${each.name}`, colour: timeline.colourOf(each.client) })],
    ["devices' time", "", (each) => ({ text: percent(each.share), part: each.share })],
    ["memory", "number", (each) => bytes(each.memory)],
    ["quota per device", "number wide", (each) => each.quota ? bytes(each.quota) : "none"],
    ["runs under way", "number", (each) => count(each.runs)],
    ["state", "", (each) => ({ text: each.state, kind: "warn" })],
    ["slices", "number wide", (each) => each.slices],
    ["programs", "number wide", (each) => each.programs],
    ["weight", "number wide", (each) => each.weight],
    ["priority", "number wide", (each) => each.priority],
    ["pid", "number wide", (each) => each.pid || "elsewhere"],
  ], "no clients", now.more.clients);
  table("devices", now.devices, [
    ["device", "", (each) => each.device],
    ["host", "wide", (each) => each.host],
    ["state", "", (each) => stateCell(each.state)],
    ["busy", "", (each) => ({ text: percent(each.busy), part: each.busy })],
    ["memory in use", "", (each) => each.bytes === null ? "" :
      { text: bytes(each.bytes), part: each.limit ? each.bytes / each.limit : null }],
    ["budget", "number wide", (each) => each.limit ? bytes(each.limit) : each.bytes === null ? "" : "none"],
    ["high water", "number wide", (each) => bytes(each.high)],
    ["slices", "number wide", (each) => each.slices],
  ], "no devices", now.more.devices);
  table("slices", now.slices, [
    ["slice", "", (each) => each.slice],
    ["client", "name", (each) => ({ text: names.get(each.client) ?? `client ${each.client}`, colour: timeline.colourOf(each.client) })],
    ["shape", "", (each) => each.shape],
    ["island", "wide", (each) => each.island],
    ["devices", "", (each) => each.devices],
    ["in use there", "number", (each) => ({ text: bytes(each.bytes), title: "memory of all clients on the devices of this slice" })],
  ], "no slices", now.more.slices);
  table("hosts", now.hosts, [
    ["host", "", (each) => each.host],
    ["state", "", (each) => stateCell(each.state)],
    ["island", "", (each) => each.island],
    ...(now.several ? [["machine", "", (each) => each.machine]] : []),
    ["runs", "number", (each) => count(each.runs)],
    ["restarts", "number", (each) => ({ text: each.restarts, kind: each.restarts ? "warn" : "" })],
    ["resident", "number wide", (each) => bytes(each.resident)],
    ["shared buffers", "number wide", (each) => bytes(each.shared)],
    ["compiled", "number wide", (each) => count(each.compiles)],
    ["compile time", "number wide", (each) => `${each.compile_seconds.toFixed(2)} s`],
    ["compiles now", "wide", (each) => each.compiling],
    ["pid", "number wide", (each) => each.pid || ""],
  ], now.cluster.port ? "no machine has joined" : "no hosts", now.more.hosts);
  byId("machines-box").hidden = !now.cluster.port;
  table("machines", now.machines, [
    ["machine", "name", (each) => each.machine],
    ["island", "", (each) => each.island],
    ["link", "", (each) => each.encrypted ? "TLS 1.3" : { text: "not encrypted", kind: "bad" }],
    ["sent", "number", (each) => `${bytes(each.out)}/s`],
    ["received", "number", (each) => `${bytes(each.in)}/s`],
    ["waits here", "number wide", (each) => `${bytes(each.waiting)} of ${bytes(each.most)}`],
    ["round trip", "number", (each) => each.round_trip ? `${(each.round_trip * 1e3).toFixed(1)} ms` : "-"],
    ["via", "wide", (each) => each.via || "-"],
    ["collectives", "wide", (each) => each.fabric || "on the machine"],
    ["for", "number wide", (each) => duration(each.connected)],
    ["address", "wide", (each) => each.address],
  ], "no machine has joined", now.more.machines);
  table("losses", now.losses.last, [
    ["when", "", (each) => clock(each.at)],
    ["lost", "", (each) => ({ text: each.what, kind: "bad" })],
    ["why", "text", (each) => each.why || "(shown to operators)"],
  ], "none since the cluster's start");
  logs(now);
}

function logs(now) {
  const select = byId("log-of");
  const wanted = [
    ["", "nobody"], ["controller", "the controller"],
    ...now.hosts.map((host) => [`host:${host.host}`, `host ${host.host}`]),
    ...now.machines.map((machine) => [`machine:${machine.machine}`, `machine ${machine.machine}`]),
  ];
  if (select.dataset.wanted === JSON.stringify(wanted)) return;
  select.dataset.wanted = JSON.stringify(wanted);
  const chosen = select.value;
  select.replaceChildren(...wanted.map(([value, text]) => new Option(text, value, false, value === chosen)));
}

byId("log-of").addEventListener("change", () => {
  byId("log").textContent = "";
  byId("log").hidden = !byId("log-of").value;
  again?.abort();
});

function log(text) {
  const box = byId("log"), isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
  box.textContent = text || "(empty)";
  if (isAtEnd || !box.dataset.seen) box.scrollTop = box.scrollHeight;
  box.dataset.seen = "yes";
}

function take(event) {
  if (event.points.length) timeline.add(event.points);
  if (event.now.error) {
    state("bad", "no cluster", event.now.error);
  } else if (event.now.rows) {
    state("live", "live");
    show(event.now);
  }
  if (event.log !== undefined) log(event.log);
}

// -- the stream ------------------------------------------------------------------------------------------------------

let again = null; // ends the present stream, and another one begins

async function read() {
  again = new AbortController();
  let watchdog;
  const alive = () => { clearTimeout(watchdog); watchdog = setTimeout(() => again.abort(), SILENT_MS); };
  try {
    alive();
    const of = byId("log-of").value;
    const answer = await fetch(`/stream${of ? `?log=${encodeURIComponent(of)}` : ""}`, {
      headers: { Authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}` }, signal: again.signal, cache: "no-store",
    });
    if (answer.status === 401) {
      state("bad", "not let in", "Open the address that `pathways dashboard` printed: it ends with # and a secret, which " +
        "is new with each start.");
      return "ends";
    }
    if (!answer.ok) throw new Error(await answer.text());
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return "over";
      alive();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) if (event.startsWith("data: ")) take(JSON.parse(event.slice(6)));
    }
  } finally {
    clearTimeout(watchdog);
  }
}

async function readForEver() {
  for (let failures = 0; ;) {
    const began = Date.now(), mine = byId("log-of").value;
    let why = "the connection is over";
    try {
      if (await read() === "ends") return;
    } catch (error) {
      if (byId("log-of").value !== mine) continue; // another log was chosen
      why = error.name === "AbortError" ? "nothing was heard" : error.message;
    }
    failures = Date.now() - began > 5000 ? 0 : failures + 1;
    state("bad", "disconnected", `${why}; trying again`);
    await new Promise((done) => setTimeout(done, Math.min(LONGEST_WAIT_MS, 1000 * 2 ** failures)));
  }
}

readForEver();
