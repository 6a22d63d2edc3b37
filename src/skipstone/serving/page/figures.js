// The strip of figures above a text.

import { $, number } from "./dom.js";

const RECENT = 16; // The steps that "tokens/s now" looks back on.

export const nameOf = (run) => (run.method === "off" ? "plain decoding" : run.method || "the model's own method");

// Tokens a second from one step, which is not counted, to another.
function rate(steps, from, to) {
  const count = steps.slice(from + 1, to + 1).reduce((sum, step) => sum + step.tokens.length, 0);
  return count && (1000 * count) / (steps[to].at - steps[from].at);
}

// The same of a whole text: its tokens over the time from the request to the last token, by the server's own clock.
export const wholeRate = (run) => run.figures.tokens_per_second;

export function showFigures(run, upto = run.steps.length) {
  const steps = run.steps.slice(0, upto);
  const last = steps.length - 1;
  const sum = (value) => steps.reduce((total, step) => total + value(step), 0);
  const decoding = steps.filter((step) => step.step > 0).length;
  const drafted = sum((step) => step.drafted), accepted = sum((step) => step.accepted);
  const draft = sum((step) => step.draft_ms), verify = sum((step) => step.verify_ms);
  const whole = run.figures && upto === run.steps.length;
  const count = sum((step) => step.tokens.length);
  const all = whole ? wholeRate(run) : last >= 0 ? (1000 * count) / (steps[last].at - run.sent) : NaN;
  $("now").textContent = last > 0 ? number(rate(steps, Math.max(0, last - RECENT), last), 0) : "–";
  $("all").textContent = number(all, 0);
  $("against").textContent = run.plainRate ? `${number(wholeRate(run) / run.plainRate, 2)} x` : "–";
  $("against_by").textContent = run.plainRate ? "by this race" : "a race tells";
  $("mean_length").textContent = number(1 + accepted / decoding, 2);
  $("accepted").textContent = drafted ? `${number((100 * accepted) / drafted, 0)} %` : "–";
  $("drafted").textContent = drafted ? `${accepted} of ${drafted}` : "";
  $("first").textContent = last >= 0 ? `${number(steps[0].at - run.sent, 0)} ms` : "–";
  $("setup").textContent = whole && run.figures.setup_time_ms >= 5 ? `set-up ${number(run.figures.setup_time_ms, 0)} ms` : "";
  for (const [name, value] of [["draft", draft], ["verify", verify]]) {
    $(`${name}_bar`).style.width = `${(100 * value) / (Math.max(draft, verify) || 1)}%`;
    $(`${name}_ms`).textContent = `${number(value, 0)} ms`;
  }
  $("choice").textContent = choiceOf(run, steps.at(-1));
}

// Only some methods, as auto, choose what drafts and tell why.
function choiceOf(run, step) {
  if (!step) return `Method: ${nameOf(run)}.`;
  const chosen = step.drafter || (step.drafted ? `${step.drafted} drafted` : "nothing drafted");
  return `Method: ${nameOf(run)}. Step ${step.step}: ${chosen}${step.reason && ` (${step.reason})`}.`;
}
