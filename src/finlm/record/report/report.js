"use strict";
// Line charts as SVG. All share one range of steps: dragging zooms every chart, a double click shows everything again.
// Points come as [[steps], [values]], already reduced; a page of ten charts draws in a few milliseconds.
(() => {
  const host = document.getElementById("charts");
  let charts = JSON.parse(document.getElementById("run-data").textContent).charts;
  if (!host || !charts.length) return;
  const HEIGHT = 210, TOP = 8, BOTTOM = 24;
  const DASHES = ["", "5 3", "1.5 2.5", "8 3 1.5 3", "3 2", "10 4"];
  const extent = () => {
    const ends = charts.flatMap((c) => c.series.flatMap((s) => [s.points[0][0], s.points[0].at(-1)]));
    const found = [Math.min(...ends), Math.max(...ends)];
    return found[0] === found[1] ? [found[0], found[0] + 1] : found;
  };
  let whole = extent(), range = whole;

  const node = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const html = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // Ticks at 1, 2 or 5 times a power of ten.
  const ticks = (low, high, wanted) => {
    const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((times) => times * power >= raw * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return [found, step];
  };
  // One unit for all ticks of an axis: the one its largest needs.
  const labels_of = (values, step) => {
    const most = Math.max(...values.map(Math.abs));
    if (most > 0 && most < 1e-3) return values.map((value) => (value === 0 ? "0" : scientific(value, exponent(Math.abs(value)) - exponent(step))));
    const [unit, name] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([size]) => most >= size * (size === 1e3 ? 10 : 1)) || [1, ""];
    return values.map((value) => (value === 0 ? "0" : (value / unit).toFixed(places(step / unit)) + name));
  };
  const scientific = (value, digits) => value.toExponential(Math.max(0, Math.min(3, digits))).replace("e-", "e−");
  const exponent = (value) => Math.floor(Math.log10(value) + 1e-9);
  const places = (step) => Math.max(0, Math.min(6, -exponent(step)));
  const exact = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-3) return scientific(value, 3);
    return value.toLocaleString("en", { maximumFractionDigits: size < 1 ? 5 : size < 100 ? 4 : size < 1e4 ? 1 : 0 });
  };

  const pen = document.createElement("canvas").getContext("2d");
  const wide = (text) => {
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    return pen.measureText(text).width;
  };

  // Index of the first step that is not below the wanted one.
  const find = (steps, wanted) => {
    let low = 0, high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low;
  };
  const nearest = (steps, wanted) => {
    const at = find(steps, wanted);
    if (at === 0) return 0;
    return at === steps.length || wanted - steps[at - 1] <= steps[at] - wanted ? at - 1 : at;
  };
  // One point more on either side, so that lines reach the edges.
  const inside = (steps) => [Math.max(0, find(steps, range[0]) - 1), Math.min(steps.length, find(steps, range[1]) + 2)];

  const limits = (chart) => {
    let low = Infinity, high = -Infinity;
    for (const series of chart.series) {
      const [steps, values] = series.points;
      for (let i = find(steps, range[0]); i < steps.length && steps[i] <= range[1]; i++) {
        if (values[i] < low) low = values[i];
        if (values[i] > high) high = values[i];
      }
    }
    if (low === Infinity) return [0, 1];
    if (chart.zero) low = Math.min(0, low);
    const margin = (high - low || Math.abs(high) || 1) * 0.05;
    return [chart.zero && low === 0 ? 0 : low - margin, high + margin];
  };

  const make = (chart, number) => {
    const box = html("div", number < 2 || charts.length < 3 ? "chart wide" : "chart");
    const svg = node("svg", { height: HEIGHT, role: "img", tabindex: 0, "aria-label": `${chart.title} ${host.dataset.over}` });
    const reading = html("div", "reading");
    reading.hidden = true;
    reading.setAttribute("role", "status");
    box.append(html("h3", "", chart.title), svg, reading);
    host.append(box);
    const view = { chart, box, svg, reading, left: 44, right: 8, width: 0, low: 0, high: 1 };
    watch(view);
    return view;
  };
  let views = charts.map(make);

  function draw(view) {
    const { chart, svg } = view, width = svg.clientWidth || 300;
    const labelled = chart.series.filter((s) => s.style !== "faint").length > 1;
    const direct = labelled && chart.series.some((s) => s.style !== "main" && s.style !== "faint");
    [view.low, view.high] = limits(chart);
    const [rows, step] = ticks(view.low, view.high, 4);
    const texts = labels_of(rows, step);
    view.left = 10 + Math.ceil(Math.max(...texts.map(wide)));
    view.right = direct ? Math.min(width * 0.36, 10 + Math.ceil(Math.max(...chart.series.map((s) => wide(s.name))))) : 10;
    view.width = width;
    view.x = (value) => view.left + ((value - range[0]) / (range[1] - range[0])) * (width - view.left - view.right);
    view.y = (value) => TOP + (1 - (value - view.low) / (view.high - view.low)) * (HEIGHT - TOP - BOTTOM);
    svg.replaceChildren();
    rows.forEach((value, i) => {
      const y = Math.round(view.y(value)) + 0.5;
      svg.append(node("line", { class: "grid", x1: view.left, x2: width - view.right, y1: y, y2: y }));
      svg.append(node("text", { x: view.left - 7, y: y + 3.5, "text-anchor": "end" }, texts[i]));
    });
    const [columns, apart] = ticks(range[0], range[1], Math.max(2, Math.floor((width - view.left - view.right) / 80)));
    labels_of(columns, apart).forEach((text, i) => {
      if (Number.isInteger(columns[i])) svg.append(node("text", { x: view.x(columns[i]), y: HEIGHT - 6, "text-anchor": "middle" }, text));
    });
    const clip = `clip-${views.indexOf(view)}`;
    const shape = { x: view.left, y: 0, width: Math.max(1, width - view.left - view.right), height: HEIGHT - BOTTOM + 2 };
    const path = node("clipPath", { id: clip });
    path.append(node("rect", shape));
    svg.append(path);
    let other = 0;
    const labels = [];
    for (const series of chart.series) {
      const dash = series.style === "other" ? DASHES[other++ % DASHES.length] : "";
      const [steps, values] = series.points, [from, to] = inside(steps);
      let line = "";
      for (let i = from; i < to; i++) line += `${i === from ? "M" : "L"}${view.x(steps[i]).toFixed(1)} ${view.y(values[i]).toFixed(1)}`;
      svg.append(node("path", { class: series.style, d: line, "stroke-dasharray": dash, "clip-path": `url(#${clip})` }));
      const shown = to - from;
      if ((chart.marks && shown <= 24) || steps.length === 1)
        for (let i = from; i < to; i++)
          if (steps[i] >= range[0] && steps[i] <= range[1])
            svg.append(node("circle", { class: series.style, r: 2.2, cx: view.x(steps[i]), cy: view.y(values[i]) }));
      const last = Math.min(steps.length - 1, Math.max(0, find(steps, range[1] + 1e-9) - 1));
      labels.push({ name: series.name, style: series.style, y: view.y(values[last]) });
    }
    if (direct) write(view, labels);
    view.hair = node("line", { class: "hair", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    view.band = node("rect", { class: "band", y: TOP, height: HEIGHT - TOP - BOTTOM, width: 0 });
    svg.append(view.band, view.hair);
  }

  // Names at the right end of their lines, pushed apart where they would overlap.
  function write(view, labels) {
    const apart = 13, bottom = HEIGHT - BOTTOM;
    labels.sort((a, b) => a.y - b.y);
    labels.forEach((label, i) => { label.y = Math.max(label.y, i ? labels[i - 1].y + apart : TOP + 4); });
    for (let i = labels.length - 1; i >= 0; i--)
      labels[i].y = Math.min(labels[i].y, i === labels.length - 1 ? bottom : labels[i + 1].y - apart);
    for (const { name, style, y } of labels) {
      let text = name;
      while (text.length > 2 && wide(text) > view.right - 8) text = text.slice(0, -2) + "…";
      const made = node("text", { x: view.width - view.right + 8, y: y + 3.5, class: style === "main" ? "label" : style === "other" ? "" : style }, text);
      made.append(node("title", {}, name));
      view.svg.append(made);
    }
  }

  function read(view, step) {
    const { chart, reading } = view;
    const found = chart.series.map((series) => ({ series, at: nearest(series.points[0], step) }));
    const main = found.find(({ series }) => series.style === "main") || found[0];
    const shown = main.series.points[0][main.at];
    reading.replaceChildren(html("b", "", `${host.dataset.step} ${shown.toLocaleString("en")}`));
    for (const { series, at } of found) {
      const row = html("span", "", series.name);
      row.append(html("i", "", exact(series.points[1][at])));
      reading.append(row);
    }
    view.shown = shown;
    const x = view.x(shown);
    reading.hidden = false;
    const fits = x + 14 + reading.offsetWidth < view.width;
    reading.style.left = `${fits ? x + 12 : Math.max(0, x - 12 - reading.offsetWidth)}px`;
    reading.style.top = `${view.svg.getBoundingClientRect().top - view.box.getBoundingClientRect().top + TOP}px`;
    for (const each of views) {
      each.hair.setAttribute("x1", x_in(each, shown));
      each.hair.setAttribute("x2", x_in(each, shown));
      each.hair.setAttribute("visibility", "visible");
    }
  }
  const x_in = (view, step) => Math.round(view.x(step)) + 0.5;

  function quiet() {
    for (const view of views) {
      view.reading.hidden = true;
      view.hair.setAttribute("visibility", "hidden");
    }
  }

  function watch(view) {
    let begun = null;
    const svg = view.svg;
    const step = (event) => {
      const x = event.clientX - svg.getBoundingClientRect().left;
      const share = (x - view.left) / (view.width - view.left - view.right);
      return range[0] + Math.min(1, Math.max(0, share)) * (range[1] - range[0]);
    };
    const frame = (from, to) => {
      view.band.setAttribute("x", Math.min(view.x(from), view.x(to)));
      view.band.setAttribute("width", Math.abs(view.x(to) - view.x(from)));
    };
    svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      begun = step(event);
      if (event.pointerType === "mouse") svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const now = step(event);
      if (begun !== null) frame(begun, now);
      read(view, now);
    });
    svg.addEventListener("pointerup", (event) => {
      if (begun === null) return;
      const pair = [begun, step(event)].sort((a, b) => a - b);
      begun = null;
      frame(pair[0], pair[0]);
      if (view.x(pair[1]) - view.x(pair[0]) > 6 && pair[1] - pair[0] >= 1) show(pair);
    });
    svg.addEventListener("pointercancel", () => { begun = null; quiet(); });
    svg.addEventListener("pointerleave", quiet);
    svg.addEventListener("dblclick", () => show(whole));
    // The arrows go from point to point, Home and End to the first and the last.
    svg.addEventListener("keydown", (event) => {
      const [steps] = (view.chart.series.find((s) => s.style === "main") || view.chart.series[0]).points;
      const at = nearest(steps, view.shown ?? range[0]), part = Math.max(1, Math.round(steps.length / 50));
      const wanted = { ArrowLeft: at - part, ArrowRight: at + part, Home: 0, End: steps.length }[event.key];
      if (wanted === undefined) return;
      event.preventDefault();
      read(view, Math.min(range[1], Math.max(range[0], steps[Math.min(steps.length - 1, Math.max(0, wanted))])));
    });
    svg.addEventListener("blur", quiet);
  }

  function show(next) {
    range = next;
    views.forEach(draw);
    quiet();
  }
  // A page that follows a run hands over what it has now; a zoomed view stays where it is.
  host.addEventListener("charts", (event) => {
    const same = event.detail.map((c) => c.title).join() === charts.map((c) => c.title).join();
    charts = event.detail;
    if (!charts.length) return;
    const isWhole = range === whole;
    whole = extent();
    if (isWhole || !same) range = whole;
    if (same) views.forEach((view, number) => { view.chart = charts[number]; });
    else { host.replaceChildren(); views = charts.map(make); }
    views.forEach(draw);
  });
  new ResizeObserver(() => views.forEach(draw)).observe(host);
  views.forEach(draw);
})();
