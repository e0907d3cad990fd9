// Charts as inline SVG: lines, points and bars with intervals; hover, zoom, series that switch on and off.
// All text reaches the page through textContent, so that no name can become markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function node(kind, attributes, parent, text) {
  const made = document.createElementNS(SVG, kind);
  for (const key in attributes) if (attributes[key] != null) made.setAttribute(key, attributes[key]);
  if (text != null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function element(kind, attributes, parent, text) {
  const made = document.createElement(kind);
  for (const key in attributes) if (attributes[key] != null) made.setAttribute(key, attributes[key]);
  if (text != null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

const FORMATS = {
  percent: (value) => (100 * value).toFixed(Math.abs(value) < 0.1 && value !== 0 ? 1 : 0) + "%",
  number: (value) => String(Number(value.toPrecision(4))),
};

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

// shares end at 0 and 1, even where the axis leaves a little room beyond
const drawn = (format, v) => format !== "percent" || (v > -1e-9 && v < 1 + 1e-9);

function extent(values, pad, share) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (Number.isFinite(v)) { low = Math.min(low, v); high = Math.max(high, v); }
  if (low > high) return [0, 1];
  const least = share ? 0.1 : (Math.abs(low) || 1) * 0.02; // no axis is so short that noise looks like a landslide
  const more = Math.max((high - low) * pad, (least - (high - low)) / 2);
  return share ? [Math.max(-0.02, low - more), Math.min(1.02, high + more)] : [low - more, high + more];
}

let charts = 0;

class Chart {
  // spec: {label, x, y, xFormat, yFormat, yRange, categories, series: [{name, colour, dash, points: [[x, y, low, high,
  // label, [left, right]]], line, link, marks, small, hollow, hidden}], rules: [{y, name}]}. A point is [x, y], with its interval and label if any.
  constructor(host) {
    this.host = host;
    this.id = "clip" + charts++;
    this.switched = new Map();
    this.view = null;
    this.figure = element("div", { class: "plot", tabindex: "0" }, host);
    this.tip = element("div", { class: "tip", role: "status", hidden: "" }, this.figure);
    const below = element("div", { class: "below" }, host);
    this.legend = element("div", { class: "legend" }, below);
    const tools = element("div", { class: "tools" }, below);
    for (const [text, title, act] of [["+", "Zoom in", () => this.zoom(0.5)], ["−", "Zoom out", () => this.zoom(2)],
      ["Reset", "Show everything", () => { this.view = null; this.draw(); }]]) {
      element("button", { type: "button", title, "aria-label": title }, tools, text).addEventListener("click", act);
    }
    this.listen();
    new ResizeObserver(() => { if (this.spec && this.host.clientWidth !== this.width) this.draw(); }).observe(host);
  }

  show(spec, keep) {
    this.spec = spec;
    if (!keep) this.view = null;
    this.draw();
  }

  shown() {
    return this.spec.series.filter((s) => !(this.switched.has(s.name) ? this.switched.get(s.name) : s.hidden));
  }

  bounds() {
    const { spec } = this, seen = this.shown(), points = seen.flatMap((s) => s.points);
    const rules = spec.rules || [];
    const values = points.flatMap((p) => [p[1], p[2], p[3]]).filter((v) => v != null).concat(rules.map((r) => r.y));
    const across = points.flatMap((p) => [p[0], ...(p[5] || [])]);
    const x = spec.categories ? [-0.5, spec.categories.length - 0.5] : extent(across, 0.03, spec.xFormat === "percent");
    const y = spec.yRange || extent(values, 0.06, spec.yFormat === "percent");
    if (spec.yZero) y[0] = Math.min(0, y[0]);
    return { x, y };
  }

  draw() {
    const { spec } = this, width = (this.width = this.host.clientWidth);
    if (width < 40) return;
    const height = Math.round(Math.max(230, Math.min(spec.tall ? 420 : 290, width * (spec.tall ? 0.75 : 0.55))));
    const left = 54, right = (spec.rules || []).length ? 62 : 14, top = 12, slanted = spec.categories && spec.categories.some((c) => c.length > 3);
    const bottom = slanted ? 76 : 44;
    const view = this.view || this.bounds();
    const box = (this.box = { left, top, width: width - left - right, height: height - top - bottom, view });
    const X = (this.X = (v) => left + ((v - view.x[0]) / (view.x[1] - view.x[0])) * box.width);
    const Y = (this.Y = (v) => top + (1 - (v - view.y[0]) / (view.y[1] - view.y[0])) * box.height);
    const old = this.figure.querySelector("svg");
    const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.label });
    if (old) old.replaceWith(svg); else this.figure.prepend(svg);
    node("rect", { x: left, y: top, width: box.width, height: box.height },
      node("clipPath", { id: this.id }, node("defs", {}, svg)));
    this.axes(svg, box, X, Y, spec, slanted);
    const inside = node("g", { "clip-path": `url(#${this.id})` }, svg);
    const named = [];
    for (const rule of spec.rules || []) {
      node("line", { x1: left, x2: left + box.width, y1: Y(rule.y), y2: Y(rule.y), class: "rule" }, inside);
      if (Y(rule.y) < top - 1 || Y(rule.y) > top + box.height + 1) continue;
      if (named.some((y) => Math.abs(y - Y(rule.y)) < 12)) continue; // names on top of each other say nothing; zooming parts them
      named.push(Y(rule.y));
      node("text", { x: left + box.width + 6, y: Y(rule.y) + 4, class: "rule-name" }, svg, rule.name);
    }
    const seen = this.shown();
    let count = 0;
    seen.forEach((series, place) => {
      count += series.points.length;
      const group = node("g", { class: `series c${series.colour % 8}` }, inside);
      if (spec.categories) this.bars(group, series, place, seen.length, X, Y);
      else this.line(group, series, X, Y);
    });
    this.cross = node("line", { y1: top, y2: top + box.height, class: "cross", visibility: "hidden" }, svg);
    this.rubber = node("rect", { class: "rubber", visibility: "hidden" }, svg);
    this.host.dataset.points = count;
    this.host.dataset.zoomed = this.view ? "yes" : "no";
    this.names();
  }

  axes(svg, box, X, Y, spec, slanted) {
    const { view } = box, yFormat = FORMATS[spec.yFormat || "number"], xFormat = FORMATS[spec.xFormat || "number"];
    for (const v of ticks(view.y[0], view.y[1], box.height / 55)) {
      if (!drawn(spec.yFormat, v)) continue;
      node("line", { x1: box.left, x2: box.left + box.width, y1: Y(v), y2: Y(v), class: "grid" }, svg);
      node("text", { x: box.left - 7, y: Y(v) + 4, class: "tick", "text-anchor": "end" }, svg, yFormat(v));
    }
    const base = box.top + box.height;
    if (spec.categories) {
      const room = Math.ceil((view.x[1] - view.x[0]) / (box.width / (slanted ? 16 : 22)));
      spec.categories.forEach((name, k) => {
        if (k % Math.max(1, room) || k < view.x[0] || k > view.x[1]) return;
        const cut = name.length > 12 ? name.slice(0, 11) + "…" : name;
        const turn = slanted ? `rotate(-40 ${X(k)} ${base + 14})` : null;
        node("text", { x: X(k), y: base + 16, class: "tick", "text-anchor": slanted ? "end" : "middle", transform: turn }, svg, cut);
      });
    } else {
      for (const v of ticks(view.x[0], view.x[1], box.width / 80)) {
        if ((spec.xWhole && v !== Math.round(v)) || !drawn(spec.xFormat, v)) continue;
        node("line", { x1: X(v), x2: X(v), y1: base, y2: base + 4, class: "axis" }, svg);
        node("text", { x: X(v), y: base + 17, class: "tick", "text-anchor": "middle" }, svg, xFormat(v));
      }
    }
    node("line", { x1: box.left, x2: box.left + box.width, y1: base, y2: base, class: "axis" }, svg);
    node("text", { x: box.left + box.width / 2, y: base + (slanted ? 70 : 36), class: "name", "text-anchor": "middle" }, svg, spec.x);
    const middle = box.top + box.height / 2;
    node("text", { x: 13, y: middle, class: "name", "text-anchor": "middle", transform: `rotate(-90 13 ${middle})` }, svg, spec.y);
  }

  line(group, series, X, Y) {
    const points = series.points.filter((p) => p[0] != null && p[1] != null);
    const path = (items, k) => items.map((p, i) => (i ? "L" : "M") + X(p[0]).toFixed(1) + " " + Y(p[k]).toFixed(1)).join("");
    const banded = points.filter((p) => p[2] != null && p[3] != null);
    if (series.line && banded.length > 1) {
      node("path", { d: path(banded, 2) + path([...banded].reverse(), 3).replace("M", "L") + "Z", class: "band" }, group);
    }
    if (series.line && points.length > 1) {
      node("path", { d: path(points, 1), class: "line", "stroke-dasharray": series.dash }, group);
    }
    if (series.link) node("path", { d: path(points, 1), class: "link" }, group);
    if (!series.line) {
      for (const p of points) {
        if (p[2] != null) node("line", { x1: X(p[0]), x2: X(p[0]), y1: Y(p[2]), y2: Y(p[3]), class: "whisker" }, group);
        if (p[5]) node("line", { x1: X(p[5][0]), x2: X(p[5][1]), y1: Y(p[1]), y2: Y(p[1]), class: "whisker" }, group);
      }
    }
    if (series.marks || !series.line || points.length < 25) {
      const radius = series.small ? 2.4 : series.line ? 3 : 4.2;
      for (const p of points) {
        node("circle", { cx: X(p[0]), cy: Y(p[1]), r: radius, class: series.hollow ? "mark hollow" : "mark" }, group);
      }
    }
  }

  bars(group, series, place, count, X, Y) {
    const slot = X(1) - X(0), wide = Math.max(1, (slot * 0.78) / count);
    for (const p of series.points) {
      const x = X(p[0]) - slot * 0.39 + place * wide;
      node("rect", { x, y: Y(Math.max(p[1], 0)), width: Math.max(0.7, wide - 1), height: Math.max(0, Y(0) - Y(p[1])), class: "bar" }, group);
      if (p[2] != null && wide > 4) {
        node("line", { x1: x + wide / 2, x2: x + wide / 2, y1: Y(p[2]), y2: Y(p[3]), class: "whisker dark" }, group);
      }
    }
  }

  names() {
    const seen = new Set(this.shown());
    this.legend.replaceChildren();
    if (this.spec.series.length < 2 && !this.spec.legend) return;
    for (const series of this.spec.series) {
      const button = element("button", { type: "button", "aria-pressed": seen.has(series), class: `c${series.colour % 8}` }, this.legend);
      button.title = "Switch on or off (shift: only this one)";
      element("span", { class: series.hollow ? "swatch hollow" : series.dash ? "swatch dashed" : "swatch" }, button);
      element("span", {}, button, series.name);
      button.addEventListener("click", (event) => {
        if (event.shiftKey) for (const s of this.spec.series) this.switched.set(s.name, s !== series);
        else this.switched.set(series.name, seen.has(series));
        this.view = null;
        this.draw();
      });
    }
  }

  listen() {
    const area = this.figure;
    const place = (event) => {
      const r = area.getBoundingClientRect();
      return [event.clientX - r.left, event.clientY - r.top];
    };
    const value = ([px, py]) => {
      const { left, top, width, height, view } = this.box;
      const x = view.x[0] + ((px - left) / width) * (view.x[1] - view.x[0]);
      return [x, view.y[0] + (1 - (py - top) / height) * (view.y[1] - view.y[0])];
    };
    let start = null;
    area.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.button) return;
      start = place(event);
      area.setPointerCapture(event.pointerId);
    });
    area.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (!start) return this.hover(x, y);
      const box = { x: Math.min(x, start[0]), y: Math.min(y, start[1]), width: Math.abs(x - start[0]), height: Math.abs(y - start[1]) };
      for (const key in box) this.rubber.setAttribute(key, box[key]);
      this.rubber.setAttribute("visibility", "visible");
      return undefined;
    });
    area.addEventListener("pointerup", (event) => {
      if (!start) return;
      const end = place(event), wide = Math.abs(end[0] - start[0]), high = Math.abs(end[1] - start[1]);
      this.rubber.setAttribute("visibility", "hidden");
      if (wide > 8 || high > 8) {
        const a = value(start), b = value(end), sort = (p, q) => (p < q ? [p, q] : [q, p]);
        const { view } = this.box;
        this.view = { x: wide > 8 ? sort(a[0], b[0]) : view.x, y: high > 8 ? sort(a[1], b[1]) : view.y };
        this.draw();
      }
      start = null;
    });
    area.addEventListener("pointercancel", () => { start = null; this.leave(); });
    area.addEventListener("pointerleave", () => this.leave());
    area.addEventListener("dblclick", () => { this.view = null; this.draw(); });
    area.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== area) return; // plain wheel scrolls the page
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 0.8 : 1.25, value(place(event)));
    }, { passive: false });
  }

  zoom(factor, centre) {
    const view = this.view || this.bounds();
    const around = ([a, b], c) => [c - (c - a) * factor, c + (b - c) * factor];
    const [cx, cy] = centre || [(view.x[0] + view.x[1]) / 2, (view.y[0] + view.y[1]) / 2];
    this.view = { x: around(view.x, cx), y: this.spec.categories ? view.y : around(view.y, cy) };
    this.draw();
  }

  leave() {
    this.tip.hidden = true;
    if (this.cross) this.cross.setAttribute("visibility", "hidden");
  }

  hover(px, py) {
    const { spec } = this;
    if (!spec || !this.box) return;
    const along = spec.categories || spec.series.every((s) => s.line);
    let best = null, nearest = 40;
    for (const series of this.shown()) {
      for (const p of series.points) {
        const dx = this.X(p[0]) - px, gap = along ? Math.abs(dx) : Math.hypot(dx, this.Y(p[1]) - py);
        if (gap < nearest) { nearest = gap; best = [series, p]; }
      }
    }
    if (!best) { this.leave(); return; }
    const yFormat = FORMATS[spec.yFormat || "number"], xFormat = FORMATS[spec.xFormat || "number"], x = best[1][0];
    const exact = (v) => (spec.yFormat === "percent" ? (100 * v).toFixed(1) + "%" : yFormat(v));
    const range = (p) => (p[2] != null ? `  [${exact(p[2])}, ${exact(p[3])}]` : "");
    this.tip.replaceChildren();
    const head = spec.categories ? spec.categories[x] : `${spec.x} ${spec.xFormat === "percent" ? (100 * x).toFixed(1) + "%" : xFormat(x)}`;
    element("b", {}, this.tip, along ? head : best[1][4] || best[0].name);
    if (!along) element("div", {}, this.tip, head);
    const entries = along ? this.shown().map((s) => [s, s.points.find((p) => p[0] === x)]).filter((e) => e[1]) : [best];
    for (const [series, p] of entries.slice(0, 12)) {
      const row = element("div", { class: `c${series.colour % 8}` }, this.tip);
      element("span", { class: "swatch" }, row);
      element("span", {}, row, `${along ? series.name : spec.y} ${exact(p[1])}${range(p)}`);
    }
    this.tip.hidden = false;
    const room = this.width - this.tip.offsetWidth - 8;
    this.tip.style.left = Math.max(4, Math.min(room, this.X(x) + 12)) + "px";
    this.tip.style.top = Math.max(0, py - this.tip.offsetHeight - 14) + "px";
    this.cross.setAttribute("x1", this.X(x));
    this.cross.setAttribute("x2", this.X(x));
    this.cross.setAttribute("visibility", along ? "visible" : "hidden");
  }
}
