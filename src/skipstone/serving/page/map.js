// The map of the model's layers: what of them drafts, and at which exits the drafts of a text were made.

import { $, element } from "./dom.js";

// Draws what is not drawn yet of a run's layers, and its counts.
export function showMap(run, steps = run.steps) {
  const { layers } = run;
  $("map").hidden = !layers?.drafters.length;
  if ($("map").hidden) return;
  if (run.mapped !== layers) {
    run.mapped = layers;
    $("maps").replaceChildren(...layers.drafters.map((drafter) => mapOf(layers, drafter)));
  }
  const counts = countsOf(run, steps);
  for (const figure of $("maps").children) showCounts(figure, counts);
}

function mapOf(layers, drafter) {
  const figure = element("figure", "layers");
  figure.dataset.drafter = drafter.name;
  const told = `${drafter.name} ${described(layers, drafter)}${layers.lossless ? "" : " (lossy)"}`;
  const stack = element("div", "stack");
  stack.setAttribute("role", "img");
  stack.setAttribute("aria-label", told);
  stack.classList.toggle("flat", !drafter.exits.length);
  const last = Math.max(...drafter.exits, 0) || layers.count;
  for (let layer = 0; layer < layers.count; layer += 1) stack.append(columnOf(layers, drafter, layer, layer >= last));
  figure.append(element("figcaption", "", told), stack, element("p", "counts"));
  return figure;
}

function columnOf(layers, drafter, layer, beyond) {
  const column = element("span", "layer");
  column.classList.toggle("beyond", beyond);
  const bar = element("span", "histogram");
  if (drafter.exits.includes(layer + 1)) {
    column.classList.add("exit");
    column.dataset.exit = layer + 1;
    bar.append(element("i", "no"), element("i", "yes"));
  }
  column.append(bar);
  for (const [kind, skipped] of [["attention", drafter.skip_attention], ["mlp", drafter.skip_mlp]]) {
    column.append(element("i", skipped.includes(layer) ? `${kind} skipped` : kind, skipped.includes(layer) ? "×" : ""));
  }
  const named = layer + 1 === layers.count || layer === 0 || drafter.exits.includes(layer + 1);
  column.append(element("small", "", named ? layer + 1 : ""));
  return column;
}

function described(layers, { exits, skip_attention: attention, skip_mlp: mlp, quantize }) {
  const bits = quantize ? ` in ${quantize}` : "";
  if (exits.length > 1) return `predicts after layers ${exits.join(", ")} of ${layers.count}${bits}`;
  if (exits.length) return `predicts after layer ${exits[0]} of ${layers.count}${bits}`;
  if (!attention.length && !mlp.length) return `drafts with all ${layers.count} layers${bits}`;
  return `drafts without ${attention.length} attentions and ${mlp.length} MLPs of ${layers.count} layers${bits}`;
}

// Drafter and exit -> how many of its drafts were accepted, and how many not.
function countsOf(run, steps) {
  const counts = new Map();
  for (const step of steps) {
    const name = step.drafter || run.layers.drafters[0].name;
    const refused = (step.refused ?? []).flatMap((branch) => branch.tokens);
    for (const [kind, tokens] of [["yes", step.tokens], ["no", refused]]) {
      for (const { layer } of tokens) {
        if (!layer) continue;
        const key = `${name} ${layer}`;
        if (!counts.has(key)) counts.set(key, { yes: 0, no: 0 });
        counts.get(key)[kind] += 1;
      }
    }
  }
  return counts;
}

function showCounts(figure, counts) {
  const told = [], exits = [...figure.querySelectorAll("[data-exit]")];
  const found = exits.map((column) => counts.get(`${figure.dataset.drafter} ${column.dataset.exit}`) ?? { yes: 0, no: 0 });
  const most = Math.max(1, ...found.map(({ yes, no }) => yes + no));
  for (const [index, column] of exits.entries()) {
    const { yes, no } = found[index];
    for (const kind of ["yes", "no"]) column.querySelector(`.${kind}`).style.height = `${(100 * found[index][kind]) / most}%`;
    if (yes + no) told.push(`${column.dataset.exit}: ${yes} kept, ${no} refused`);
  }
  figure.querySelector(".counts").textContent = told.length ? `This text's tokens by layer: ${told.join("; ")}.` : "";
}
