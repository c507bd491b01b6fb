"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const steps = data.steps;
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

const NODE_HEIGHT = 26;
const ROW = 31;
const COLUMN_GAP = 46;
const MARGIN = 22;
const MAX_LABEL = 18;
const TALL_ROWS = 18;
// Fitted trees stay readable: those that are larger than the stage are scrolled.
const FITTED = { least: 0.8, most: 1.35 };
const ZOOM = { least: 0.2, most: 4, step: 1.25 };
const PLAY_MILLISECONDS = 1600;

let current = 0;
let playing = null;
let size = { width: 1, height: 1 };
let scale = 1;
let zoomed = false;

function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function html(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

const chance = (p) => (p < 0.001 ? "<.001" : p.toFixed(p < 0.01 ? 3 : 2));
const shortened = (text) => (text.length > MAX_LABEL ? text.slice(0, MAX_LABEL - 1) + "…" : text);

function drawTree(step) {
  const svg = $("tree");
  const title = element("title", { id: "tree-title" }, describe(step));
  const edges = element("g");
  const nodes = element("g");
  svg.replaceChildren(title, edges, nodes);

  const drawn = new Map([[-1, makeNode(nodes, step.root, "root", step)]]);
  step.nodes.forEach((node, at) => drawn.set(at, makeNode(nodes, node, "candidate", step)));
  const bonus = makeNode(nodes, step.bonus, "bonus", step);
  size = place([...drawn.values(), bonus]);

  step.nodes.forEach((node, at) => connect(edges, drawn.get(node.parent), drawn.get(at)));
  // Accepted edges lie above the others.
  edges.append(...edges.querySelectorAll(".accepted"));
  connect(edges, drawn.get(step.bonus.parent), bonus);
  const stage = $("stage");
  resize(zoomed ? scale : fittedScale());
  const middle = ((drawn.get(-1).y + bonus.y) / 2) * scale;
  stage.scrollTo(0, middle - stage.clientHeight / 2);
}

function makeNode(layer, node, kind, step) {
  const group = element("g", { class: `node ${kind}` });
  if (node.accepted) group.classList.add("accepted");
  if (node.source) group.classList.add(node.source);
  group.dataset.token = node.token;
  const box = element("rect", { height: NODE_HEIGHT, rx: 8 });
  const label = element("text", { x: 10, y: 17.5 }, shortened(node.text));
  group.append(box, label);
  layer.append(group);
  let width = label.getComputedTextLength() + 20;
  if (kind === "candidate") {
    const numbers = `${chance(node.probability)} · ${chance(node.value)}`;
    const told = element("text", { class: "numbers", x: width, y: 17 }, numbers);
    group.append(told);
    width += told.getComputedTextLength() + 10;
    group.style.setProperty("--strength", `${(75 * Math.sqrt(node.value)).toFixed(1)}%`);
  }
  box.setAttribute("width", width);
  group.classList.add("late");
  group.style.setProperty("--delay", `${node.depth * 90}ms`);
  group.addEventListener("pointermove", (event) => showTip(event, node, kind, step));
  group.addEventListener("pointerleave", hideTip);
  return { group, node, kind, width };
}

function place(drawn) {
  const widths = [];
  for (const { node, width } of drawn) {
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, width);
  }
  const columns = [MARGIN];
  widths.forEach((width, depth) => columns.push(columns[depth] + width + COLUMN_GAP));
  let bottom = 0;
  for (const each of drawn) {
    each.x = columns[each.node.depth];
    each.y = MARGIN + each.node.row * ROW;
    bottom = Math.max(bottom, each.y + NODE_HEIGHT);
    each.group.setAttribute("transform", `translate(${each.x} ${each.y})`);
  }
  return { width: columns[widths.length] - COLUMN_GAP + MARGIN, height: bottom + MARGIN };
}

function connect(layer, from, to) {
  const [x1, y1] = [from.x + from.width, from.y + NODE_HEIGHT / 2];
  const [x2, y2] = [to.x, to.y + NODE_HEIGHT / 2];
  const bend = Math.max((x2 - x1) / 2, 14);
  const path = `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
  const line = element("path", { class: "edge late", d: path });
  line.style.setProperty("--delay", `${to.node.depth * 90}ms`);
  if (to.kind === "bonus") line.classList.add("bonus");
  else line.setAttribute("stroke-width", to.node.accepted ? 3.4 : 1 + 3 * to.node.probability);
  if (to.node.accepted) line.classList.add("accepted");
  layer.append(line);
}

const within = (value, { least, most }) => Math.min(Math.max(value, least), most);

function fittedScale() {
  const { clientWidth, clientHeight } = $("stage");
  return within(Math.min((clientWidth - 2) / size.width, (clientHeight - 2) / size.height), FITTED);
}

function resize(to) {
  scale = to;
  const svg = $("tree");
  svg.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
  svg.setAttribute("width", size.width * scale);
  svg.setAttribute("height", size.height * scale);
  $("fitted").textContent = `${Math.round(100 * scale)}%`;
}

// Keeps the point of the tree that is at (x, y) of the window where it is.
function zoom(factor, x, y) {
  const [stage, svg] = [$("stage"), $("tree")];
  const before = svg.getBoundingClientRect();
  const to = within(scale * factor, ZOOM);
  const [right, down] = [((x - before.left) * to) / scale, ((y - before.top) * to) / scale];
  zoomed = true;
  hideTip();
  resize(to);
  const after = svg.getBoundingClientRect();
  stage.scrollBy(after.left + right - x, after.top + down - y);
}

function zoomMiddle(factor) {
  const { left, top, width, height } = $("stage").getBoundingClientRect();
  zoom(factor, left + width / 2, top + height / 2);
}

function zoomBack() {
  zoomed = false;
  drawTree(steps[current]);
}

function makeMovable(stage) {
  stage.addEventListener("pointerdown", (event) => {
    if (event.button || event.pointerType === "touch") return; // A finger scrolls.
    stage.setPointerCapture(event.pointerId);
    stage.classList.add("moving");
  });
  stage.addEventListener("pointermove", (event) => {
    if (!stage.hasPointerCapture(event.pointerId)) return;
    hideTip();
    stage.scrollBy(-event.movementX, -event.movementY);
  });
  stage.addEventListener("lostpointercapture", () => stage.classList.remove("moving"));
  // A pinch on a touchpad is a turn of the wheel with Ctrl.
  stage.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 300), event.clientX, event.clientY);
  }, { passive: false });
}

function describe(step) {
  const path = step.nodes.filter((node) => node.accepted).map((node) => node.text);
  return `A tree of ${step.nodes.length} nodes below ${step.root.text}; accepted: ` +
    `${path.join(", ") || "none"}; bonus token ${step.bonus.text}`;
}

const several = Object.keys(data.sources).length > 1;
const estimate = data.chances === "draft" ? `${data.drafter} probability` : "estimated chance";

function showTip(event, node, kind, step) {
  const tip = $("tip");
  const rows = [["token", node.token]];
  if (kind === "candidate") {
    rows.push(["depth", node.depth], [estimate, node.probability], ["of the whole path", node.value]);
    if (several) rows.push(["source", data.sources[node.source]]);
  }
  const table = html("table", "", ...rows.map(([name, value]) =>
    html("tr", "", html("td", "", name), html("td", "", String(value)))));
  tip.replaceChildren(html("code", "", node.text), table, html("p", "", fate(node, kind, step)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 16, innerWidth - width - 8);
  const below = event.clientY + 18;
  tip.style.left = `${Math.max(x, 8)}px`;
  tip.style.top = `${below + height > innerHeight ? event.clientY - height - 12 : below}px`;
}

function fate(node, kind, step) {
  if (kind === "root") return "The root: the last token of the text so far.";
  if (kind === "bonus") return "The bonus token: the target's own, where the walk ends.";
  if (node.accepted) return "Accepted: the target took this token.";
  const above = step.nodes[node.parent];
  if (above && !above.accepted) return "Not reached: a node above it was not accepted.";
  const drawn = step.nodes.find((other) => other.accepted && other.parent === node.parent);
  return `Not accepted: here the target took ${(drawn ?? step.bonus).text}`;
}

function hideTip() {
  $("tip").hidden = true;
}

function drawText(step) {
  const text = $("text");
  const end = step.context + step.emitted;
  const parts = [
    html("span", "prompt", data.pieces.slice(0, Math.min(data.prompt, step.context)).join("")),
    html("span", "before", data.pieces.slice(data.prompt, step.context).join("")),
  ];
  for (let at = step.context; at < Math.min(end, data.pieces.length); at++) {
    const kind = at === end - 1 ? "bonus" : "accepted";
    parts.push(html("mark", kind, data.pieces[at].replaceAll("\n", "↵\n")));
  }
  const beyond = end - data.pieces.length;
  if (beyond > 0) parts.push(html("span", "note", `  end; ${beyond} more drawn and dropped`));
  text.replaceChildren(...parts);
  const first = text.querySelector("mark");
  if (first) text.scrollTop = first.offsetTop - text.offsetTop - text.clientHeight / 2;
}

function drawBars() {
  const svg = $("bars");
  const most = Math.max(...steps.map((step) => step.emitted), 1);
  svg.setAttribute("viewBox", `0 0 ${steps.length} ${most}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const gap = 0.18;
  steps.forEach((step, at) => {
    const box = { x: at + gap / 2, width: 1 - gap };
    const group = element("g", {},
      element("rect", { class: "reach", x: at, y: 0, width: 1, height: most }),
      element("rect", { class: "accepted", ...box, y: most - step.emitted, height: step.emitted - 1 }),
      element("rect", { class: "bonus", ...box, y: most - 1, height: 1 }));
    group.addEventListener("click", () => choose(at));
    svg.append(group);
  });
}

function go(to) {
  current = Math.min(Math.max(to, 0), steps.length - 1);
  const step = steps[current];
  hideTip();
  drawTree(step);
  drawText(step);
  const emitted = steps.slice(0, current + 1).reduce((sum, each) => sum + each.emitted, 0);
  const told = {
    "step-number": current + 1,
    "node-count": step.nodes.length,
    depth: Math.max(0, ...step.nodes.map((node) => node.depth)),
    "accepted-count": step.emitted - 1,
    mean: (emitted / (current + 1)).toFixed(2),
  };
  for (const [id, value] of Object.entries(told)) $(id).textContent = value;
  $("budget-used").style.width = `${(100 * step.nodes.length) / data.budget}%`;
  $("slider").value = current + 1;
  [...$("bars").children].forEach((bar, at) => bar.classList.toggle("now", at === current));
  history.replaceState(null, "", `#step=${current + 1}`);
}

function choose(to) {
  play(false);
  go(to);
}

function play(wanted) {
  clearInterval(playing);
  playing = null;
  document.body.classList.toggle("playing", wanted);
  $("play").textContent = wanted ? "❚❚" : "▶";
  if (!wanted) return;
  go(current === steps.length - 1 ? 0 : current + 1);
  playing = setInterval(() => {
    if (current === steps.length - 1) play(false);
    else go(current + 1);
  }, PLAY_MILLISECONDS);
}

function turnTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const root = document.documentElement.style;
  root.colorScheme = (root.colorScheme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
}

function chosen() {
  return Number(/^#step=(\d+)$/.exec(location.hash)?.[1] ?? 1) - 1;
}

function introduce() {
  const name = (model) => model.replace(/\/+$/, "").split("/").slice(-2).join("/");
  const drawing = data.temperature
    ? `temperature ${data.temperature}, top-p ${data.topP}, seed ${data.seed ?? "none"}`
    : "greedy";
  const options = Object.entries(data.options).map(([key, value]) => `${key} ${value}`);
  const models = [`target ${name(data.target)}`, `${data.drafter} ${name(data.draft)}`];
  const parts = [...models, drawing, data.dtype, ...options, `dyntree ${data.version}`];
  $("about").textContent = parts.join(", ");
  $("about").title = `target ${data.target}\n${data.drafter} ${data.draft}`;
  document.title = `dyntree: ${name(data.target)}`;
  $("step-count").textContent = steps.length;
  $("budget").textContent = data.budget;
  $("numbers").textContent = `numbers: ${estimate} · that of the whole path`;
  if (several) introduceSources();
  $("slider").max = steps.length;
  $("slider").style.setProperty("--steps", steps.length);
}

function introduceSources() {
  document.body.classList.add("several-sources");
  $("sources").hidden = false;
  $("sources").append(...Object.entries(data.sources).map(([source, meaning]) =>
    html("span", source, html("i", "swatch other"), meaning)));
}

const KEYS = {
  ArrowRight: () => choose(current + 1),
  ArrowLeft: () => choose(current - 1),
  Home: () => choose(0),
  End: () => choose(steps.length - 1),
  " ": () => play(playing === null),
  t: turnTheme,
  "+": () => zoomMiddle(ZOOM.step),
  "=": () => zoomMiddle(ZOOM.step),
  "-": () => zoomMiddle(1 / ZOOM.step),
  0: zoomBack,
};

function start() {
  introduce();
  if (!steps.length) {
    $("stage").append(html("p", "", "No step of this generation had a tree."));
    return;
  }
  const rows = steps.flatMap((step) => step.nodes.map((node) => node.row));
  // High trees take the height of the page, and the text stands beside them.
  document.body.classList.toggle("tall", Math.max(...rows) >= TALL_ROWS);
  drawBars();
  $("slider").addEventListener("input", (event) => choose(event.target.value - 1));
  $("back").addEventListener("click", () => choose(current - 1));
  $("forward").addEventListener("click", () => choose(current + 1));
  $("play").addEventListener("click", () => play(playing === null));
  $("theme").addEventListener("click", turnTheme);
  $("larger").addEventListener("click", () => zoomMiddle(ZOOM.step));
  $("smaller").addEventListener("click", () => zoomMiddle(1 / ZOOM.step));
  $("fitted").addEventListener("click", zoomBack);
  makeMovable($("stage"));
  addEventListener("hashchange", () => choose(chosen()));
  addEventListener("resize", () => drawTree(steps[current]));
  addEventListener("keydown", (event) => {
    const action = KEYS[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    // The slider and a focused button would act on the key as well.
    event.preventDefault();
    action();
  });
  choose(chosen());
}

start();
