// The timeline: a row per device, filled as far as the device was busy, by client. It keeps an hour of points.
// dashboard.js gives it points; wheel, drag, buttons and keys choose the time that is shown.

const MOST_POINTS = 3600, LABEL = 74, AXIS = 22, LEAST_SPAN = 10, MOST_SPAN = 3600, COLOURS = 10;

export class Timeline {
  constructor(canvas, tip, onChange) {
    this.canvas = canvas;
    this.tip = tip;
    this.onChange = onChange;
    this.points = [];
    this.rows = [];
    this.down = new Set(); // rows of which a device is not there
    this.names = new Map();
    this.colours = new Map();
    this.span = 60;
    this.end = null; // seconds; null: it follows the time
    this.asked = false;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", () => { this.dragged = null; });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  add(points) {
    for (const point of points) {
      if (this.points.length && point.t <= this.last) continue; // sent again after a connection had broken
      this.points.push(point);
      for (const [client, name] of Object.entries(point.names)) this.names.set(Number(client), name);
      for (const client of Object.keys(point.names).map(Number)) this.colourOf(client);
      delete point.names;
    }
    if (this.points.length > MOST_POINTS) {
      this.points.splice(0, this.points.length - MOST_POINTS);
      this.forget();
    }
    this.draw();
  }

  get last() { return this.points.length ? this.points[this.points.length - 1].t : Date.now() / 1000; }
  get first() { return this.points.length ? this.points[0].t : this.last; }

  // Names and colours of clients that no point has any more.
  forget() {
    const there = new Set(this.points.flatMap((point) => point.use.flatMap((row) => row.map(([client]) => client))));
    for (const known of [this.names, this.colours]) {
      for (const client of known.keys()) if (!there.has(client)) known.delete(client);
    }
  }

  // A client keeps its colour. A new one gets the one that is used least.
  colourOf(client) {
    if (client === 0) return "--other";
    if (!this.colours.has(client)) {
      const uses = new Array(COLOURS).fill(0);
      for (const colour of this.colours.values()) uses[colour] += 1;
      this.colours.set(client, uses.indexOf(Math.min(...uses)));
    }
    return `--client-${this.colours.get(client)}`;
  }

  nameOf(client) { return client === 0 ? "other clients" : this.names.get(client) ?? `client ${client}`; }

  // -- the time that is shown ----------------------------------------------------------------------------------------

  get shownEnd() { return this.end ?? this.last; }

  show(span, end) {
    this.span = Math.min(MOST_SPAN, Math.max(LEAST_SPAN, span));
    const first = Math.min(this.last, this.first + this.span);
    this.end = end === null || end >= this.last ? null : Math.max(first, end);
    this.draw();
    this.onChange();
  }

  zoom(factor, at = 1) {
    const fixed = this.shownEnd - this.span * (1 - at); // the time under the pointer stays there
    const span = Math.min(MOST_SPAN, Math.max(LEAST_SPAN, this.span * factor));
    this.show(span, this.end === null && at >= 1 ? null : fixed + span * (1 - at));
  }

  wheel(event) {
    if (event.ctrlKey || (!event.deltaY && !event.deltaX)) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.show(this.span, this.shownEnd + event.deltaX / this.width * this.span);
    } else {
      this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), this.part(event));
    }
  }

  down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.dragged = { x: event.offsetX, end: this.shownEnd };
  }

  move(event) {
    if (this.dragged) {
      const by = (this.dragged.x - event.offsetX) / this.width * this.span;
      if (Math.abs(by) > 0) this.show(this.span, this.dragged.end + by);
    }
    this.tell(event);
  }

  key(event) {
    const step = this.span / 10;
    const acts = {
      ArrowLeft: () => this.show(this.span, this.shownEnd - step),
      ArrowRight: () => this.show(this.span, this.shownEnd + step),
      End: () => this.show(this.span, null),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
    };
    if (acts[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      acts[event.key]();
    }
  }

  get width() { return Math.max(1, this.canvas.clientWidth - LABEL); }
  part(event) { return Math.min(1, Math.max(0, (event.offsetX - LABEL) / this.width)); }

  // -- pictures ------------------------------------------------------------------------------------------------------

  get rowHeight() { return this.rows.length <= 8 ? 34 : this.rows.length <= 24 ? 22 : 14; }

  // Once per frame at most.
  draw() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.paint(); });
  }

  // The points in time, from an index on.
  shown() {
    const from = this.shownEnd - this.span;
    let low = 0, high = this.points.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.points[middle].t < from) low = middle + 1; else high = middle;
    }
    return this.points.slice(low).filter((point) => point.t - point.s <= this.shownEnd);
  }

  // The clients that used a device in the time that is shown, those that used most first.
  clientsShown() {
    const sums = new Map();
    for (const point of this.shown()) {
      for (const row of point.use) for (const [client, part] of row) sums.set(client, (sums.get(client) ?? 0) + part);
    }
    return [...sums].sort((one, other) => other[1] - one[1]).map(([client]) => client);
  }

  paint() {
    const height = this.rows.length * this.rowHeight + AXIS, scale = devicePixelRatio || 1;
    const wide = this.canvas.parentElement.clientWidth;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(wide * scale);
    this.canvas.height = Math.round(height * scale);
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const from = this.shownEnd - this.span, width = wide - LABEL, row = this.rowHeight, bar = row - 4;
    const x = (time) => LABEL + (time - from) / this.span * width;
    this.rows.forEach((name, index) => {
      pen.fillStyle = colour("--track");
      pen.fillRect(LABEL, index * row + 2, width, bar);
      pen.fillStyle = colour(this.down.has(index) ? "--bad" : "--dim");
      pen.fillText(name, 0, index * row + row / 2, LABEL - 6);
    });
    const inks = new Map();
    for (const column of this.columns(width)) {
      const left = Math.max(LABEL, x(column.begin)), right = Math.min(wide, x(column.end));
      column.use.forEach((parts, index) => {
        let bottom = index * row + 2 + bar;
        for (const [client, part] of parts) {
          if (!inks.has(client)) inks.set(client, colour(this.colourOf(client)));
          const high = Math.min(bottom - index * row - 2, part * bar);
          pen.fillStyle = inks.get(client);
          pen.fillRect(left, bottom - high, Math.max(0.5, right - left), high);
          bottom -= high;
        }
      });
    }
    this.axis(pen, x, colour("--dim"), colour("--line"), height, from, wide);
  }

  // The points that are shown; where there are more of them than pixels, several become one.
  columns(width) {
    const points = this.shown().filter((point) => point.use.length === this.rows.length);
    const several = Math.max(1, Math.ceil(points.length / width));
    const columns = [];
    for (let index = 0; index < points.length; index += several) {
      const group = points.slice(index, index + several);
      const whole = { begin: group[0].t - group[0].s, end: group[group.length - 1].t, use: group[0].use };
      if (several > 1) {
        whole.use = this.rows.map((_, row) => {
          const sums = new Map();
          for (const point of group) {
            for (const [client, part] of point.use[row]) sums.set(client, (sums.get(client) ?? 0) + part / group.length);
          }
          return [...sums].sort((one, other) => one[0] - other[0]);
        });
      }
      columns.push(whole);
    }
    return columns;
  }

  axis(pen, x, ink, line, height, from, wide) {
    const most = Math.max(2, Math.floor((wide - LABEL) / 90));
    const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800].find((each) => this.span / each <= most) ?? 3600;
    pen.textAlign = "center";
    for (let time = Math.ceil(from / step) * step; time <= this.shownEnd; time += step) {
      pen.fillStyle = line;
      pen.fillRect(x(time), 0, 1, height - AXIS + 3);
      pen.fillStyle = ink;
      const text = clock(time);
      const half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(wide - half, Math.max(LABEL + half, x(time))), height - AXIS / 2 + 2);
    }
    pen.textAlign = "left";
  }

  tell(event) {
    const row = Math.floor(event.offsetY / this.rowHeight);
    const time = this.shownEnd - this.span * (1 - this.part(event));
    const point = this.shown().find((each) => each.t - each.s <= time && time <= each.t);
    this.tip.hidden = !point || row < 0 || row >= this.rows.length || event.offsetX < LABEL;
    if (this.tip.hidden) return;
    const parts = (point.use[row] ?? []).map(([client, part]) => `${this.nameOf(client)}  ${Math.round(part * 100)} %`);
    this.tip.textContent = [`${this.rows[row]}, ${clock(point.t)}`, ...(parts.length ? parts : ["idle"])].join("\n");
    const room = this.canvas.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, event.offsetX + 12))}px`;
    this.tip.style.top = `${event.offsetY + 14}px`;
  }
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}
