// Results of `skipstone bench run`, compared in the browser: a table of tasks and methods. No line of a file goes anywhere.
// The figures are those of `skipstone bench report`: totals over totals, of prompts on which no method repeats itself.

import { $, element, number } from "./dom.js";

const VERSION = 1; // Of the files that this page reads.
const LOOPING = 0.2; // The share of repeated text from which on a prompt is left out.
const PLAIN = ["autoregressive", "hf-generate"]; // What ratios are over where nobody chooses, the first one that took part.
const CELL = ["model", "number", "task", "temperature", "question"]; // What lines of one row of the table have in common.

let shown = []; // The groups of the files that are open.

// The lines of a file. The last one is left out where a killed run has not ended it.
function linesOf(text, name) {
  const lines = text.split("\n");
  const cut = lines.pop(); // Nothing, or what was being written.
  const found = lines.filter(Boolean).map((line, index) => {
    try {
      return JSON.parse(line);
    } catch {
      throw new Error(`${name}, line ${index + 1} is no JSON.`);
    }
  });
  try {
    if (cut) found.push(JSON.parse(cut));
  } catch {
    // It was being written.
  }
  if (found[0]?.kind !== "run") throw new Error(`${name} is no result of skipstone bench run.`);
  if (found[0].version !== VERSION) throw new Error(`${name} is of version ${found[0].version}; this page reads ${VERSION}.`);
  return found;
}

// A group for every task on a model: its title, methods and prompts.
export function groupsOf(text, name) {
  const about = new Map(), found = new Map();
  for (const line of linesOf(text, name)) {
    if (line.kind === "model") about.set(line.model, line);
    if (line.kind !== "prompt") continue;
    const key = JSON.stringify(CELL.map((part) => line[part]));
    if (!about.has(line.model)) throw new Error(`${name} says nothing about the model ${line.model}.`);
    if (!found.has(key)) found.set(key, { ...line, file: name, about: about.get(line.model), lines: [] });
    found.get(key).lines.push(line.rows);
  }
  if (!found.size) throw new Error(`${name} holds no measured prompt yet.`);
  return [...found.values()].map(prepared);
}

function prepared(group) {
  const calm = group.lines.filter((rows) => Object.values(rows).every((row) => row.repeated_share < LOOPING));
  const model = group.about.synthetic ? `SYNTHETIC MODEL: ${group.model}` : group.model;
  const drawn = group.temperature ? `T = ${group.temperature}` : "greedy";
  const looping = calm.length ? "" : ", all prompts: every one loops somewhere";
  const labels = [...new Set(group.lines.flatMap((rows) => Object.keys(rows)))];
  return { ...group, title: `${model}, ${group.task}, ${drawn}${looping}`, labels, lines: calm.length ? calm : group.lines };
}

// Tokens a second of a method, over the prompts on which it took part; not a number where there are none.
function rateOf(lines, label) {
  const rows = lines.filter((line) => label in line).map((line) => line[label]);
  const sum = (name) => rows.reduce((total, row) => total + row[name], 0);
  return sum("tokens") / sum("seconds");
}

// A method beside another, on the same prompts; not a number where the other lacks one of them.
export function ratioOf(group, label, base) {
  const lines = group.lines.filter((line) => label in line);
  return lines.every((line) => base in line) ? rateOf(lines, label) / rateOf(lines, base) : NaN;
}

function plainOf(groups) {
  const methods = groups.flatMap((group) => Object.entries(group.about.methods));
  for (const plain of PLAIN) {
    const found = methods.find(([, about]) => about.method === plain);
    if (found) return found[0];
  }
  return groups[0].labels[0];
}

function table(groups, base, severalFiles) {
  const labels = [...new Set(groups.flatMap((group) => group.labels))];
  const made = element("table", "");
  const head = made.createTHead().insertRow();
  for (const text of ["task", "prompts", ...labels]) {
    const cell = element("th", "", text);
    cell.scope = "col";
    head.append(cell);
  }
  const body = made.createTBody();
  for (const group of groups) {
    const row = body.insertRow();
    const name = element("th", "", severalFiles ? `${group.file}: ${group.title}` : group.title);
    name.scope = "row";
    row.append(name, element("td", "", group.lines.length));
    const ratios = labels.map((label) => ratioOf(group, label, base));
    const best = Math.max(...ratios.filter(Number.isFinite));
    for (const [index, label] of labels.entries()) row.append(cellOf(group, label, ratios[index], ratios[index] === best));
  }
  return made;
}

function cellOf(group, label, ratio, best) {
  const cell = element("td", best ? "best" : "");
  if (!group.labels.includes(label)) return element("td", "", "–");
  cell.append(element("span", "ratio", Number.isFinite(ratio) ? `${number(ratio, 2)} x${best ? " ★" : ""}` : "–"));
  const lossy = group.about.methods[label]?.lossless === false ? ", lossy" : "";
  cell.append(element("small", "", `${number(rateOf(group.lines, label), 0)} tokens/s${lossy}`));
  return cell;
}

function redraw() {
  $("compared").replaceChildren(table(shown, $("base").value, new Set(shown.map((group) => group.file)).size > 1));
}

async function open() {
  const files = [...$("results").files];
  $("bench_tools").hidden = true;
  $("compared").replaceChildren();
  say(files.length ? "Reading." : "No file is open.");
  if (!files.length) return;
  try {
    shown = (await Promise.all(files.map(async (file) => groupsOf(await file.text(), file.name)))).flat();
    const labels = [...new Set(shown.flatMap((group) => group.labels))];
    $("base").replaceChildren(...labels.map((label) => new Option(label, label)));
    $("base").value = plainOf(shown);
    $("bench_tools").hidden = false;
    redraw();
    say(`${shown.length} ${shown.length === 1 ? "task" : "tasks"}. ★ is the fastest method of a task.`);
  } catch (error) {
    say(error instanceof TypeError ? "A file is damaged: its lines lack what such a file has." : error.message, "bad");
  }
}

function say(text, kind = "") {
  $("bench_status").textContent = text;
  $("bench_status").className = kind;
}

export function listenToBench() {
  $("results").addEventListener("change", open);
  $("results").addEventListener("click", () => {
    $("results").value = ""; // So that a file that has grown may be opened again.
  });
  $("base").addEventListener("change", redraw);
}
