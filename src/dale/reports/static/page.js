// The page: which run is in focus, what each chart shows, the gallery's slider, the table of runs.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs;
  const find = (id) => document.getElementById(id);
  const charts = {};
  let focus = 0;
  let kept = runs.map(() => true);

  const chart = (id) => (charts[id] = charts[id] || new Chart(find(id)));
  const section = (id, visible) => { // a panel that would be empty is not shown
    find(id).hidden = !visible;
    const panel = find(id).closest(".charts");
    if (panel) panel.hidden = [...panel.querySelectorAll(".chart")].every((host) => host.hidden);
  };
  const line = (name, colour, points, more) => ({ name, colour, points: points || [], line: true, ...more });
  const some = (series) => series.filter((s) => s.points.length);
  const DASHES = [null, "6 3", "2 3", "9 3 2 3"];
  const style = (k) => ({ dash: DASHES[Math.floor(k / 8) % 4] });

  function draw(id, spec) {
    spec.series = some(spec.series);
    section(id, spec.series.length > 0);
    if (spec.series.length) chart(id).show(spec);
  }

  function training(run) {
    const { curves } = run, losses = run.constraints.filter((c) => c.name === "loss");
    const rules = losses.slice(0, 1).flatMap((c) => c.rules.map((y) => ({ y, name: `ρ = ${y}` })));
    const series = [line("nominal loss", 0, curves.nominal_loss), line("robust loss", 1, curves.robust_loss),
      line("nominal loss, held out", 2, curves.held_out_loss, { dash: "6 3" })];
    const plural = losses.length && losses[0].measure.length > 1;
    if (plural) losses[0].measure.slice(0, 40).forEach((p, g) => series.push(line(`${losses[0].by} ${g}`, g + 3, p, { hidden: true })));
    draw("losses", { label: "Losses over the epochs, with the limit rho", x: "epoch", y: "loss", xWhole: true, yZero: true, series, rules });
    const duals = run.constraints.flatMap((c, k) => c.multiplier.map((p, g) => {
      const whom = c.multiplier.length > 1 ? `, ${c.by} ${g}` : "";
      return line(`ν, ${c.name}${whom}`, g + k + 3, p, style(g));
    }));
    draw("duals", { label: "The multiplier nu over the epochs", x: "epoch", y: "multiplier ν", xWhole: true, yZero: true, series: duals, legend: true });
    draw("heldout", { label: "Held-out accuracy over the epochs", x: "epoch", y: "held-out accuracy", xWhole: true, yFormat: "percent",
      series: [line("clean", 0, curves.clean_accuracy), line("under PGD", 1, curves.robust_accuracy)] });
  }

  const MEASURES = {
    robust_accuracy: ["held-out robust accuracy", "percent"], clean_accuracy: ["held-out clean accuracy", "percent"],
    held_out_loss: ["held-out nominal loss", "number"], nominal_loss: ["nominal loss", "number"],
    robust_loss: ["robust loss", "number"], multiplier: ["multiplier ν", "number"], seconds: ["seconds per epoch", "number"],
  };

  function overlay() {
    if (!find("overlay")) return;
    const measure = find("measure").value, [name, yFormat] = MEASURES[measure];
    const points = (run) => (measure === "multiplier" ? run.constraints[0] && run.constraints[0].multiplier[0] : run.curves[measure]);
    draw("overlay", { label: `${name} of all runs`, x: "epoch", y: name, yFormat, xWhole: true, legend: true, tall: true,
      series: runs.map((run, k) => line(run.name, k, points(run), style(k))).filter((_, k) => kept[k]) });
  }

  function radius() {
    draw("radius", { label: "Accuracy against epsilon", x: "ε", y: "accuracy", yFormat: "percent", yRange: [0, 1.02], legend: true,
      // two radii alone say nothing about those between: no line
      series: runs.map((run, k) => line(run.name, k, run.radius.length > 1 ? run.radius : [], { marks: true, line: run.radius.length > 2, ...style(k) }))
        .filter((_, k) => kept[k]) });
  }

  function tradeOff() {
    const groups = new Map();
    runs.forEach((run, k) => {
      if (!run.trade.clean || !kept[k]) return;
      const name = `${run.algorithm} on ${run.dataset}`;
      if (!groups.has(name)) groups.set(name, []);
      const [x, low, high] = run.trade.clean, [y, ...interval] = run.trade.robust;
      groups.get(name).push([x, y, ...interval, `${run.name} (${run.trade.attack})`, low == null ? null : [low, high]]);
    });
    const here = new Set(runs.map((run) => run.dataset));
    const series = [...groups].map(([name, points], k) => ({ name, colour: k, link: points.length > 2, points: points.sort((p, q) => p[0] - q[0]) }));
    data.paper.forEach((curve, k) => series.push({ name: curve.name, colour: 7 - k, hollow: true, link: curve.line, hidden: !here.has(curve.dataset),
      points: curve.points.map((p) => [p.values[0] / 100, p.values[2] / 100, null, null, `${p.label} (${curve.attack})`]) }));
    section("tradeoff", groups.size > 0);
    if (groups.size) chart("tradeoff").show({ label: "Clean against robust accuracy", x: "clean accuracy", y: "robust accuracy",
      xFormat: "percent", yFormat: "percent", tall: true, legend: true, series });
  }

  function classes(run) {
    const found = run.classes.series || {};
    const series = Object.keys(found).map((name, k) => ({ name, colour: k, hidden: k > 1,
      points: found[name].map((v, i) => v && [i, ...v]).filter(Boolean) }));
    draw("classes", { label: "Accuracy of every class", x: "class", y: "accuracy", yFormat: "percent", yRange: [0, 1.02], series,
      categories: run.classes.names || [] });
  }

  function projection(run) {
    const found = run.projection.series || {}, shares = run.projection.explained || [];
    const axis = (k) => `component ${k + 1}` + (shares[k] != null ? ` (${(100 * shares[k]).toFixed(0)}% of variance)` : "");
    draw("projection", { label: "Perturbations along two principal components", x: axis(0), y: axis(1), tall: true,
      series: Object.keys(found).map((name, k) => ({ name, colour: k, points: found[name], small: true })) });
  }

  function gallery(run) {
    const shown = run.gallery, host = find("gallery");
    section("gallery", Boolean(shown.examples));
    if (!shown.examples) return;
    const slider = find("epsilon"), names = (k) => (shown.names[k] != null ? shown.names[k] : String(k));
    slider.max = shown.radii.length - 1;
    slider.value = Math.max(0, shown.radii.findIndex((r) => Math.abs(r - shown.trained) < 1e-9));
    host.replaceChildren();
    const cards = shown.examples.map((example) => {
      const card = element("figure", { class: "card" }, host);
      const row = element("div", { class: "trio" }, card);
      const image = (title, text) => {
        const cell = element("div", {}, row), made = element("img", { alt: "", title }, cell);
        element("small", {}, cell, text);
        return made;
      };
      const [clean, delta, moved] = [image("The clean image", "clean"), image("The perturbation, enlarged to full contrast at the largest radius", "perturbation"), image("The perturbed image", "perturbed")];
      clean.src = "data:image/png;base64," + example.clean;
      clean.alt = `Test image ${example.index} of class ${names(example.label)}`;
      const caption = element("figcaption", {}, card);
      return { example, delta, moved, caption };
    });
    const update = () => {
      const level = Number(slider.value), r = Number(shown.radii[level].toPrecision(4));
      const steps = shown.radii[level] * 255, whole = Math.abs(steps - Math.round(steps)) < 1e-6 && steps > 0 && steps < 64;
      const notes = [whole ? `${Math.round(steps)}/255` : "", Math.abs(shown.radii[level] - shown.trained) < 1e-9 ? "as trained" : ""].filter(Boolean);
      const own = notes.length ? ` (${notes.join(", ")})` : "";
      const text = `${shown.unit === "epsilon" ? "ε" : shown.unit} = ${r}${own}`;
      let standing = 0;
      for (const { example, delta, moved, caption } of cards) {
        const { perturbed, delta: picture, top } = example.levels[level];
        const right = top[0][0] === example.label;
        standing += right;
        delta.src = "data:image/png;base64," + picture;
        moved.src = "data:image/png;base64," + perturbed;
        delta.alt = `Its perturbation at ${text}`;
        moved.alt = `The perturbed image, taken for ${names(top[0][0])}`;
        caption.replaceChildren();
        element("span", {}, caption, `true ${names(example.label)}`);
        element("span", { class: right ? "right" : "wrong", title: top.map(([k, p]) => `${names(k)} ${(100 * p).toFixed(1)}%`).join(", ") },
          caption, `${right ? "✓" : "✗"} ${names(top[0][0])} (${(100 * top[0][1]).toFixed(0)}%)`);
      }
      find("epsilon-value").textContent = text;
      find("standing").textContent = `${standing} of ${cards.length} right`;
      slider.setAttribute("aria-valuetext", text);
    };
    slider.oninput = update;
    update();
  }

  function timings(run) {
    draw("pace", { label: "Seconds per epoch", x: "epoch", y: "seconds", xWhole: true, yZero: true,
      series: [line("whole epoch", 0, run.curves.seconds), line("training alone", 1, run.curves.seconds_train, { dash: "6 3" })] });
  }

  function show(k) {
    focus = k;
    for (const part of document.querySelectorAll("[data-run]")) part.hidden = Number(part.dataset.run) !== k;
    for (const row of document.querySelectorAll("[data-row]")) row.classList.toggle("focus", Number(row.dataset.row) === k);
    if (find("focus")) find("focus").value = String(k);
    const run = runs[k];
    training(run); classes(run); projection(run); gallery(run); timings(run);
  }

  function table() {
    const body = find("runs-body"), rows = () => [...body.rows];
    const value = (row, column) => row.cells[column].dataset.value;
    find("runs-head").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const head = button.parentElement, column = head.cellIndex, down = head.getAttribute("aria-sort") !== "descending";
      const numeric = head.dataset.kind === "number";
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const blank = (v) => v === "" || v == null;
      const order = (a, b) => {
        const p = value(a, column), q = value(b, column);
        if (blank(p) || blank(q)) return blank(p) - blank(q);
        const by = numeric ? p - q : p.localeCompare(q, undefined, { numeric: true });
        return down ? -by : by;
      };
      body.append(...rows().sort(order));
    });
    find("filter").addEventListener("input", () => {
      const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows()) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        kept[Number(row.dataset.row)] = !row.hidden;
      }
      find("count").textContent = `${kept.filter(Boolean).length} of ${runs.length} runs`;
      overlay(); radius(); tradeOff();
    });
    body.addEventListener("click", (event) => {
      const row = event.target.closest("[data-row]");
      if (row) show(Number(row.dataset.row));
    });
    find("focus").addEventListener("change", () => show(Number(find("focus").value)));
    find("measure").addEventListener("change", overlay);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const text = find(button.dataset.copy).textContent;
    const done = () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, () => {});
  });

  if (runs.length > 1) table();
  show(focus); overlay(); radius(); tradeOff();
  document.documentElement.dataset.ready = "yes";
})();
