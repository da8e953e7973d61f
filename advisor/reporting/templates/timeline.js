// Draws the timeline of one step: rows of events on a canvas, with zoom, search and details. Format: reporting/timeline.py.
(async () => {
  const source = document.getElementById("timeline-data");
  if (!source) return;
  const box = document.getElementById("tl"), canvas = box.firstElementChild, info = document.getElementById("tl-info");
  if (typeof DecompressionStream === "undefined") {
    info.textContent = "This browser is too old to draw the timeline; advisor report RUN --format perfetto writes it as a trace.";
    return;
  }
  const packed = Uint8Array.from(atob(source.textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = await new Response(stream).arrayBuffer();
  const size = new DataView(raw).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(raw, 4, size)));
  let at = 4 + size + ((4 - ((4 + size) % 4)) % 4);
  const count = head.rows.reduce((sum, row) => sum + row.count, 0);
  const column = (kind, width) => { const c = new kind(raw, at, count); at += count * width; return c; };
  const starts = column(Uint32Array, 4), ends = column(Uint32Array, 4), names = column(Uint32Array, 4), details = column(Uint32Array, 4);
  const keys = column(Uint8Array, 1), depths = column(Uint8Array, 1);
  const length = head.length / head.unit, LEVEL = 15, GAP = 12, LABEL = 132, RULER = 20, MOST_LEVELS = 8;

  // Lanes: the events of one row and depth, which do not overlap, in the order of their start.
  const lanes = [];
  let first = 0, y = RULER;
  for (const row of head.rows) {
    const levels = Math.min(row.levels, MOST_LEVELS);
    const inside = Array.from({ length: levels }, () => []);
    for (let i = first; i < first + row.count; i++) if (depths[i] < levels) inside[depths[i]].push(i);
    first += row.count;
    inside.forEach((events, level) => lanes.push({ events: Uint32Array.from(events), y: y + level * LEVEL, row: level ? "" : row.name }));
    y += levels * LEVEL + GAP;
  }
  const height = y;
  let from = 0, to = length, width = 0, ratio = 1, image = null, buffer = null, paints = [], fades = [], paper = 0, rule = 0, spent = 0, queued = false, matches = null, chosen = -1, listed = [], next = -1;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const probe = document.createElement("span");
  box.append(probe);
  let ink = "", soft = "", line = "", back = "";
  const theme = () => {
    [ink, soft, line, back] = ["--ink", "--soft", "--line", "--bg"].map(colour);
    [paper, rule] = [number(back), number(line)];
    paints = head.keys.map((key) => { probe.className = "k-" + key; return number(getComputedStyle(probe).getPropertyValue("--k").trim() || soft); });
    fades = paints.map((colour) => faded(colour, paper));
  };
  const time = (units) => {
    const us = units * head.unit / 1000;
    if (!us) return "0";
    return us >= 1000 ? (us / 1000).toFixed(us >= 1e5 ? 0 : 2) + " ms" : us.toFixed(us >= 100 ? 0 : us >= 1 ? 1 : 3) + " µs";
  };
  const scale = () => (width - LABEL) / (to - from);
  const x = (t) => LABEL + (t - from) * scale();

  // Events are painted into one buffer of pixels, a row of pixels a lane, copied down its height: a hundred thousand of them take a few
  // milliseconds, where a call of the canvas for each takes a tenth of a second. Texts and outlines are drawn above.
  const number = (text) => { // of a colour `#rrggbb`, as the buffer holds it
    const v = parseInt(text.slice(1), 16);
    return ((255 << 24) | ((v & 255) << 16) | (v & 0xff00) | (v >> 16)) >>> 0;
  };
  const faded = (colour, under) => { // a fifth of it above what is under it
    let mixed = 0xff000000;
    for (const shift of [0, 8, 16]) mixed |= Math.round(((colour >> shift) & 255) * .22 + ((under >> shift) & 255) * .78) << shift;
    return mixed >>> 0;
  };
  function draw() {
    queued = false;
    if (!image) return;
    const began = performance.now(), g = canvas.getContext("2d"), shown = [], ticks = marks();
    buffer.fill(paper);
    for (const t of ticks) {
      const column = Math.round(x(t) * ratio);
      for (let row = Math.round((RULER - 4) * ratio); row < image.height; row++) buffer[row * image.width + column] = rule;
    }
    for (const lane of lanes) paint(lane, shown);
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.putImageData(image, 0, 0);
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.font = "11px system-ui, sans-serif";
    g.fillStyle = soft;
    for (const t of ticks) g.fillText(time(t), x(t) + 3, 12);
    label(g, shown);
    g.font = "12px system-ui, sans-serif";
    g.fillStyle = soft;
    for (const lane of lanes) if (lane.row) g.fillText(lane.row, 4, lane.y + 11, LABEL - 8);
    spent = performance.now() - began;
  }
  function marks() {
    const wanted = (to - from) / Math.max(2, (width - LABEL) / 110), power = 10 ** Math.floor(Math.log10(wanted));
    const every = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= wanted), found = [];
    for (let t = Math.ceil(from / every) * every; t <= to; t += every) found.push(t);
    return found;
  }
  const isHit = (i) => matches !== null && (matches[names[i]] | matches[head.names.length + details[i]]);
  function paint(lane, shown) {
    const list = lane.events, k = scale() * ratio, edge = LABEL * ratio, last = image.width;
    let low = 0, high = list.length;
    while (low < high) { const mid = (low + high) >> 1; if (ends[list[mid]] < from) low = mid + 1; else high = mid; }
    const top = Math.round(lane.y * ratio), base = top * last;
    let drawn = -1; // no two events are painted on one pixel
    for (let n = low; n < list.length; n++) {
      const i = list[n], begin = starts[i];
      if (begin > to) break;
      const left = edge + (begin - from) * k, right = edge + (ends[i] - from) * k, hit = matches !== null && isHit(i);
      if (right < drawn && !hit) continue;
      const a = Math.max(edge, Math.floor(left)), wide = right - left;
      const b = Math.min(last, Math.max(a + 1, Math.round(wide > 3 * ratio ? right - .7 * ratio : right)));
      const colour = matches === null || hit ? paints[keys[i]] : fades[keys[i]];
      if (b === a + 1) buffer[base + a] = colour; else if (b > a) buffer.fill(colour, base + a, base + b);
      drawn = Math.floor(left) + 1;
      if (wide > 46 * ratio || i === chosen) shown.push([i, lane.y]);
    }
    const bottom = Math.min(image.height, Math.round((lane.y + LEVEL - 2) * ratio));
    for (let row = top + 1; row < bottom; row++) buffer.copyWithin(row * last, base, base + last);
  }
  function label(g, shown) {
    for (const [i, y] of shown) {
      const left = x(starts[i]), right = Math.max(x(ends[i]), left + 1), inside = Math.max(left, LABEL);
      if (i === chosen && right > LABEL) { g.strokeStyle = ink; g.lineWidth = 2; g.strokeRect(inside + 1, y + 1, Math.max(right - inside - 2, 1), LEVEL - 4); }
      if (right - inside < 24) continue;
      g.fillStyle = "#fff";
      g.globalAlpha = matches === null || isHit(i) ? 1 : .5;
      g.save(); g.beginPath(); g.rect(inside, y, right - inside - 3, LEVEL); g.clip();
      g.fillText(head.names[names[i]], inside + 4, y + 10);
      g.restore();
    }
    g.globalAlpha = 1;
  }
  const redraw = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };
  const resize = () => {
    width = box.clientWidth; ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    image = canvas.width > LABEL && canvas.height ? new ImageData(canvas.width, canvas.height) : null;
    buffer = image && new Uint32Array(image.data.buffer);
    canvas.style.width = width + "px"; canvas.style.height = height + "px";
    redraw();
  };
  function view(a, b) {
    const span = Math.min(Math.max(b - a, 20), length);
    from = Math.min(Math.max(a, 0), length - span); to = from + span;
    redraw();
  }
  const zoom = (factor, centre) => view(centre - (centre - from) * factor, centre + (to - centre) * factor);
  const timeAt = (px) => from + (px - LABEL) / scale();
  function eventAt(px, py) {
    const t = timeAt(px), slack = 2 / scale();
    for (const lane of lanes) {
      if (py < lane.y || py >= lane.y + LEVEL) continue;
      const list = lane.events;
      let low = 0, high = list.length;
      while (low < high) { const mid = (low + high) >> 1; if (ends[list[mid]] < t - slack) low = mid + 1; else high = mid; }
      return low < list.length && starts[list[low]] <= t + slack ? list[low] : -1;
    }
    return -1;
  }
  function tell(i) {
    if (i < 0) return;
    const more = head.details[details[i]];
    info.textContent = `${head.names[names[i]]} · ${time(ends[i] - starts[i])} at ${time(starts[i])} · ${head.labels[keys[i]]}${more ? " · " + more.replaceAll("\n", " · ") : ""}`;
  }
  function show(i) {
    chosen = i;
    tell(i);
    const span = Math.max((ends[i] - starts[i]) * 8, (to - from) * .2), middle = (starts[i] + ends[i]) / 2;
    view(middle - span / 2, middle + span / 2);
  }

  let held = null, pinch = 0;
  const fingers = new Map();
  const place = (e) => { const r = canvas.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };
  box.addEventListener("wheel", (e) => {
    if (!e.ctrlKey && Math.abs(e.deltaX) > Math.abs(e.deltaY)) { const d = e.deltaX / scale(); view(from + d, to + d); }
    else if (document.activeElement === box || e.ctrlKey) zoom(Math.exp(e.deltaY * .002), timeAt(place(e)[0]));
    else return; // the page scrolls on until the timeline was clicked
    e.preventDefault();
  }, { passive: false });
  box.addEventListener("pointerdown", (e) => { fingers.set(e.pointerId, e.clientX); held = { at: e.clientX, from, to, moved: 0 }; pinch = 0; });
  box.addEventListener("pointermove", (e) => {
    if (fingers.has(e.pointerId)) fingers.set(e.pointerId, e.clientX);
    if (fingers.size === 2) {
      const [a, b] = [...fingers.values()], apart = Math.max(Math.abs(a - b), 8);
      if (pinch) zoom(pinch / apart, (from + to) / 2);
      pinch = apart;
    } else if (held && fingers.size === 1) {
      const d = (held.at - e.clientX) / scale();
      held.moved = Math.max(held.moved, Math.abs(held.at - e.clientX));
      if (held.moved > 3) view(held.from + d, held.to + d);
    } else if (!fingers.size) tell(eventAt(...place(e)));
  });
  const release = (e) => {
    fingers.delete(e.pointerId);
    if (held && held.moved <= 3 && e.type === "pointerup") { box.focus({ preventScroll: true }); chosen = eventAt(...place(e)); tell(chosen); redraw(); }
    if (!fingers.size) held = null;
  };
  for (const name of ["pointerup", "pointercancel", "pointerleave"]) box.addEventListener(name, release);
  box.addEventListener("keydown", (e) => {
    const span = to - from, act = {
      ArrowLeft: () => view(from - span / 5, to - span / 5), ArrowRight: () => view(from + span / 5, to + span / 5),
      "+": () => zoom(.6, (from + to) / 2), "=": () => zoom(.6, (from + to) / 2), "-": () => zoom(1.7, (from + to) / 2),
      "0": () => view(0, length), Enter: nextMatch,
    }[e.key];
    if (act) { act(); e.preventDefault(); }
  });
  document.getElementById("tl-in").addEventListener("click", () => zoom(.5, (from + to) / 2));
  document.getElementById("tl-out").addEventListener("click", () => zoom(2, (from + to) / 2));
  document.getElementById("tl-all").addEventListener("click", () => view(0, length));
  const search = document.getElementById("tl-search"), found = document.getElementById("tl-found");
  function nextMatch() { if (listed.length) { next = (next + 1) % listed.length; show(listed[next]); found.textContent = `${next + 1} of ${listed.length}`; } }
  search.addEventListener("input", () => {
    const word = search.value.trim().toLowerCase();
    matches = word ? Uint8Array.from([...head.names, ...head.details], (text) => text.toLowerCase().includes(word)) : null;
    listed = []; next = -1;
    if (matches) for (let i = 0; i < count; i++) if (matches[names[i]] | matches[head.names.length + details[i]]) listed.push(i);
    listed.sort((a, b) => starts[a] - starts[b]);
    found.textContent = word ? `${listed.length.toLocaleString("en")} found` + (listed.length ? ", Enter for the next" : "") : "";
    redraw();
  });
  search.addEventListener("keydown", (e) => { if (e.key === "Enter") { nextMatch(); e.preventDefault(); } });
  for (const query of ["(prefers-color-scheme: dark)", "print"])
    window.matchMedia(query).addEventListener("change", () => { theme(); draw(); }); // at once: paper does not wait for a frame
  new ResizeObserver(resize).observe(box);
  theme();
  resize();
  box.dataset.ready = String(count);
  box.advisor = { view, length, took: () => spent, find: (i) => [starts[i], ends[i]] };
})();
