// A text on the page, token by token, and the timeline of its steps.

import { $, element, number } from "./dom.js";
import { nameOf } from "./figures.js";

const CELLS = 12; // Most cells that a step has in the timeline; further drafted tokens are counted.
const LATE = 32; // The newest tokens, whose texts may still change.
const HELP = $("detail").textContent;
const places = new WeakMap(); // The view, the step and the token of every element that stands for one.

// A text on the page. side: "left" or "right". timed: whether the timeline shows its steps. spans: of the text's tokens. marks:
// these and the refused drafts between them.
export function newView(run, side, timed) {
  const view = { run, output: $(`${side}_text`), title: $(`${side}_title`), timed, drawn: 0, slowest: 0 };
  Object.assign(view, { spans: [], marks: [], rows: [] });
  view.output.replaceChildren();
  if (timed) $("steps").replaceChildren();
  $("detail").textContent = HELP;
  return view;
}

// Draws the steps that the page does not show yet, up to one.
export function draw(view, upto = view.run.steps.length) {
  for (; view.drawn < upto; view.drawn += 1) {
    const step = view.run.steps[view.drawn];
    for (const [place, token] of step.tokens.entries()) {
      drawRefused(view, step, place);
      const span = element("span", `token ${token.origin}`);
      span.classList.toggle("overruled", Boolean(token.overruled));
      shade(span, view, token);
      remember(span, view, step, token, view.marks);
      view.spans.push(span);
      view.output.append(span);
    }
    if (view.timed) drawRow(view, step);
  }
  const late = view.run.figures ? 0 : Math.max(0, view.spans.length - LATE); // Texts may come after their tokens.
  for (const span of view.spans.slice(late)) {
    const { shown } = places.get(span).token;
    if (span.textContent !== shown) span.textContent = shown;
    span.classList.toggle("line", shown.startsWith("\n"));
  }
}

// The drafts that were refused at a place of a step's tokens.
function drawRefused(view, step, place) {
  for (const branch of step.refused ?? []) {
    if (branch.at !== place) continue;
    for (const [index, token] of branch.tokens.entries()) {
      const lost = element("del", "token refused", token.text.replaceAll("\n", "↵").replace(/ {3,}/g, "⋯"));
      lost.classList.toggle("branch", index === 0);
      shade(lost, view, token);
      remember(lost, view, step, { ...token, refused: true }, view.marks);
      view.output.append(lost);
    }
  }
}

// The earlier the layer that a token was drafted at, the stronger its colour.
function shade(made, view, token) {
  if (!token.layer || !view.run.layers) return;
  made.classList.add("exit");
  made.style.setProperty("--early", 1 - token.layer / view.run.layers.count);
}

function remember(made, view, step, token, all) {
  places.set(made, { view, step, token, index: all.length, all });
  made.tabIndex = all.length ? -1 : 0;
  all.push(made);
}

function drawRow(view, step) {
  const row = element("button", "step");
  row.type = "button";
  row.append(element("span", "", step.step));
  const cells = element("span", "cells");
  for (let cell = 0; cell < Math.min(step.drafted, CELLS); cell += 1) {
    cells.append(element("i", cell < step.accepted ? "cell yes" : "cell"));
  }
  if (step.drafted > CELLS) cells.append(element("span", "", `+${step.drafted - CELLS}`));
  for (const token of step.tokens) if (token.origin !== "draft") cells.append(element("i", `cell own ${token.origin}`));
  const ms = step.draft_ms + step.verify_ms;
  row.append(cells, element("span", "drafter", step.drafter), timeBar(step), element("span", "ms", `${number(ms)} ms`));
  const times = `${number(step.draft_ms)} ms of drafting, ${number(step.verify_ms)} ms of verifying`;
  row.setAttribute("aria-label", `Step ${step.step}: ${step.accepted} of ${step.drafted} drafts accepted, ${times}`);
  remember(row, view, step, step.tokens[0], view.rows);
  if (step.step) view.slowest = Math.max(view.slowest, ms);
  $("steps").style.setProperty("--slowest", view.slowest || ms || 1);
  const below = $("steps").scrollHeight - $("steps").scrollTop - $("steps").clientHeight < 40;
  $("steps").append(row);
  if (below) $("steps").scrollTop = $("steps").scrollHeight;
}

// Drafting and verifying, as long as they took beside the slowest step. The first step reads the prompt: it may be cut.
function timeBar(step) {
  const bar = element("span", "took");
  for (const [kind, ms] of [["drafting", step.draft_ms], ["verifying", step.verify_ms]]) {
    const part = element("i", kind);
    part.style.setProperty("--ms", ms);
    bar.append(part);
  }
  return bar;
}

// ---------------------------------------------------------------------------------------------- what is pointed at

// Tells of a token, and marks all that its step brought.
function showToken(made) {
  const { view, step, token } = places.get(made);
  const of = `step ${step.step}, ${step.drafted ? `${step.accepted} of ${step.drafted} accepted` : "nothing drafted"}`;
  const times = `draft ${number(step.draft_ms)} ms, verify ${number(step.verify_ms)} ms`;
  const what = token.refused ? "refused" : token.origin;
  const told = [JSON.stringify(token.text), `id ${token.id}`, what, of, source(view, step, token), ...chances(token)];
  told.push(...more(view, step, token), step.reason, times);
  $("detail").textContent = told.filter(Boolean).join(" · ");
  for (const one of document.querySelectorAll(".here")) one.classList.remove("here");
  for (const one of [...view.marks, ...view.rows]) one.classList.toggle("here", places.get(one).step === step);
}

function source(view, step, token) {
  const drafted = token.refused || token.origin === "draft";
  return drafted ? `drafted by ${step.drafter || nameOf(view.run)}` : "the model's own token";
}

function chances(token) {
  const found = [];
  const alone = token.layer && !token.refused && token.origin !== "draft"; // Of early_exit nothing beyond it is asked.
  if (token.p !== undefined) found.push(`probability ${number(token.p, 3)} by ${alone ? "its layers" : "the model"}`);
  else if (token.refused) found.push("behind a refused draft, so the model did not look at it");
  if (token.draft_p !== undefined) found.push(`${number(token.draft_p, 3)} by the drafter`);
  if (token.confidence !== undefined) found.push(`the drafter's best token had ${number(token.confidence, 3)}`);
  return found;
}

function more(view, step, token) {
  const found = [];
  if (token.layer && view.run.layers) found.push(`after layer ${token.layer} of ${view.run.layers.count}`);
  if (token.overruled) found.push("kept against the model's own choice");
  if (token.refused && step.left_out) found.push(`${step.left_out} more branches were refused`);
  return found;
}

// The arrow keys go from token to token, and from step to step: only one of each is a stop of the Tab key.
function move(event) {
  const place = places.get(event.target);
  const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!way || !place) return;
  let to = place.index + way;
  while (place.all[to] && !place.all[to].getClientRects().length) to += way; // Refused drafts may be hidden.
  const next = place.all[to];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function pointed(event) {
  if (places.has(event.target) && event.target.classList.contains("token")) showToken(event.target);
}

function jump(row) {
  const { view, step } = places.get(row);
  showToken(row);
  view.spans.find((one) => places.get(one).step === step).scrollIntoView({ block: "nearest" });
}

// Shows the refused drafts, or hides them: then none of them is a stop of the Tab key.
export function showRefused(wanted) {
  $("texts").classList.toggle("with_refused", wanted);
  if (wanted) return;
  for (const lost of document.querySelectorAll(".refused[tabindex='0']")) {
    lost.tabIndex = -1;
    places.get(lost).view.spans[0].tabIndex = 0;
  }
}

export function listenToView() {
  for (const name of ["left_text", "right_text"]) {
    $(name).addEventListener("pointerover", pointed);
    $(name).addEventListener("focusin", pointed);
    $(name).addEventListener("keydown", move);
  }
  $("steps").addEventListener("keydown", move);
  $("steps").addEventListener("click", (event) => {
    const row = event.target.closest(".step");
    if (row) jump(row);
  });
}
