// The playground: it sends prompts to this server's v1/completions, or v1/chat/completions, and shows what drafted every token.
// Text of the model becomes part of the page through textContent only.

import { listenToBench } from "./bench.js";
import { $, number } from "./dom.js";
import { nameOf, showFigures, wholeRate } from "./figures.js";
import { showMap } from "./map.js";
import { draw, listenToView, newView, showRefused } from "./view.js";

const REPLAY = 3000; // Milliseconds that a replay takes at least, if 16 times slower is slow enough.
const BROKEN = "\ufffd"; // What a token shows that is a part of a character.

const state = { ready: false, model: "", busy: null, race: null, sampled: false, frame: 0 };

function say(kind, text) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").className = kind;
}

// ---------------------------------------------------------------------------------------------------- the server

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

const isChat = () => $("chat").checked;
const routeOf = (body) => (body.messages ? "v1/chat/completions" : "v1/completions");

// The settings of the form. What is left empty is left out, so that it is the model's own.
function settings() {
  const prompt = $("prompt").value;
  const found = isChat() ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  for (const name of ["max_tokens", "temperature", "top_p", "seed"]) {
    if ($(name).value !== "") found[name] = Number($(name).value);
  }
  const stops = $("stops").value.split("\n").filter(Boolean);
  if (stops.length) found.stop = stops.map((one) => one.replaceAll("\\n", "\n"));
  const method = $("method").value.trim();
  if (method) found.speculative = method;
  return found;
}

// speculative: "full" with probabilities, layers and refused drafts, true with what needs no computing.
const streamed = (body, speculative) => ({ ...body, stream: true, return_metrics: true, stream_speculative: speculative });
const wanted = () => ($("details").checked ? "full" : true);

async function failure(response) {
  const told = await response.json().catch(() => null);
  return `${response.status}: ${told?.error?.message ?? (response.statusText || "the server gave no reason")}`;
}

// The JSON objects of a stream of server-sent events. It throws where the stream breaks off before its end.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new TypeError("the stream broke off");
    const blocks = (rest + value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (data[0] === "[DONE]") return;
      if (data.length) yield JSON.parse(data.join("\n"));
    }
  }
}

// Asks for the server's health: every second while it is not well, else now and then.
async function watch() {
  const before = state.ready;
  try {
    const response = await fetch("health");
    state.ready = response.ok;
    if (!response.ok) {
      const { status } = await response.json().catch(() => ({}));
      const failed = status === "failed";
      say(failed ? "bad" : "", failed ? "The model could not be loaded: see the server's log." : `The model is ${status}.`);
    } else if (!before) await models();
  } catch {
    state.ready = false;
    say("bad", "Disconnected: the server does not answer. It is asked again every second.");
  }
  buttons();
  setTimeout(watch, state.ready ? 10000 : 1000);
}

async function models() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.status === 401) {
    const wrong = $("key").value ? "This API key is wrong." : "This server asks for an API key.";
    say("bad", `${wrong} Enter it in the field “API key”.`);
  } else if (!response.ok) {
    say("bad", await failure(response));
  } else {
    state.model = (await response.json()).data[0].id;
    $("model").textContent = state.model;
    await offerChat();
    if (!state.busy) say("good", "Ready.");
  }
}

// A model with a chat template is asked in it, unless somebody switches that off.
async function offerChat() {
  if (!$("chat_switch").hidden) return;
  const response = await fetch("server_info", { headers: headers() });
  if (!response.ok || !(await response.json()).has_chat_template) return;
  $("chat_switch").hidden = false;
  $("chat").checked = true;
}

function buttons() {
  $("send").disabled = $("race").disabled = !state.ready || Boolean(state.busy);
  $("stop").disabled = !state.busy;
}

// ------------------------------------------------------------------------------------------------------- a text

// All that is known of one text. Times are in milliseconds; that of a step is when it arrived.
// plainRate: tokens a second of plain decoding in a race; null without one. layers: which of them draft.
function newRun(method) {
  const run = { method, steps: [], tokens: [], open: [], text: "", sent: performance.now(), figures: null, reason: "" };
  return { ...run, plainRate: null, layers: null };
}

async function write(run, body, signal, arrived = () => {}) {
  const request = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const response = await fetch(routeOf(body), request);
  if (!response.ok) throw new Error(await failure(response));
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(`${chunk.error.code}: ${chunk.error.message}`);
    take(run, chunk);
    arrived();
  }
}

function take(run, chunk) {
  if (chunk.usage) run.figures = { ...chunk.metrics, count: chunk.usage.completion_tokens };
  const choice = chunk.choices[0];
  if (!choice) return;
  run.reason = choice.finish_reason ?? run.reason;
  const text = choice.text ?? choice.delta?.content ?? ""; // Of a text, or of a chat.
  run.text += text;
  const told = chunk.speculative;
  if (told) {
    const accepted = told.tokens.filter((one) => one.origin === "draft").length;
    const step = { ...told, step: run.steps.length, at: performance.now(), accepted };
    run.steps.push(step);
    run.tokens.push(...told.tokens);
    run.layers = told.layers ?? run.layers;
  }
  if (told || run.open.length) run.open = spread([...run.open, ...(told?.tokens ?? [])], text);
  else if (run.tokens.length) run.tokens.at(-1).shown += text;
}

// Gives every token its part of the text, which is more than its own text where that lacks a space or is a part of a
// character. Returns the tokens whose text is still to come.
function spread(tokens, text) {
  let open = [];
  for (const token of tokens) {
    token.shown = "";
    const at = token.text && !token.text.includes(BROKEN) ? text.indexOf(token.text) : -1;
    if (at < 0 || (!open.length && at > 1)) {
      open.push(token);
      continue;
    }
    const end = at + token.text.length;
    if (open.length) open[0].shown = text.slice(0, at);
    token.shown = text.slice(open.length ? at : 0, end);
    text = text.slice(end);
    open = [];
  }
  if (text && open.length) {
    open[0].shown = text;
    return [];
  }
  if (text && tokens.length) tokens.at(-1).shown += text;
  return open;
}

// --------------------------------------------------------------------------------------------------- what is asked

// Runs what asks the server, and tells how it went.
async function busy(work) {
  if (state.busy || !$("ask").reportValidity()) return;
  cancelAnimationFrame(state.frame);
  state.busy = new AbortController();
  buttons();
  try {
    await work(state.busy.signal);
  } catch (error) {
    if (error.name === "AbortError") say("good", "Stopped.");
    else say("bad", error instanceof TypeError ? "Disconnected: the connection to the server was lost." : error.message);
  }
  state.busy = null;
  buttons();
}

async function send(signal) {
  const body = settings();
  const run = newRun(body.speculative ?? "");
  const view = newView(run, "right", true);
  $("left").hidden = $("verdict").hidden = true;
  view.title.textContent = "";
  showFigures(run);
  showMap(run);
  say("writing", "Writing.");
  let waiting = false;
  const drawNow = () => {
    waiting = false;
    draw(view);
    showFigures(run);
    showMap(run);
  };
  const arrived = () => {
    if (!waiting) waiting = Boolean(requestAnimationFrame(drawNow));
  };
  try {
    await write(run, streamed(body, wanted()), signal, arrived);
  } finally {
    drawNow();
  }
  const why = run.reason === "length" ? "max_tokens are written" : "the text has ended";
  say("good", `Done: ${run.figures.count} tokens, ${why}.`);
}

// The same prompt twice, one after the other so that neither slows the other down. Nothing is drawn while they run, and no
// details are asked for.
async function race(signal) {
  const body = settings();
  if (body.temperature !== 0) body.seed ??= Math.floor(Math.random() * 2 ** 31);
  const runs = [];
  for (const method of ["off", body.speculative]) {
    const run = newRun(method ?? "");
    say("writing", `Race: ${nameOf(run)} writes.`);
    await write(run, streamed({ ...body, speculative: method }, true), signal);
    runs.push(run);
  }
  state.race = runs;
  runs[1].plainRate = wholeRate(runs[0]);
  showMap(runs[1]);
  state.sampled = body.temperature !== 0;
  const long = Math.max(...runs.map((run) => run.steps.at(-1).at - run.sent));
  $("slower").value = [1, 2, 4, 8].find((factor) => factor * long >= REPLAY) ?? 16;
  verdict(...runs);
  replay();
}

function verdict(off, chosen) {
  const rates = [off, chosen].map(wholeRate), same = off.text === chosen.text;
  $("ratio").textContent = `${number(rates[1] / rates[0], 2)} x, ${same ? "identical" : "different"}`;
  const speeds = `${number(rates[0], 0)} and ${number(rates[1], 0)} tokens/s from the request to the last token, one run each.`;
  $("difference").textContent = same ? speeds : `${difference(off, chosen)} ${speeds}`;
  $("verdict").hidden = $("left").hidden = false;
  say("good", `Race done: ${$("ratio").textContent}.`);
}

function difference(off, chosen) {
  const [first, second] = [off, chosen].map((run) => run.tokens.slice(0, run.figures.count));
  const at = first.findIndex((token, index) => token.id !== second[index]?.id);
  const place = at < 0 ? first.length : at;
  const [one, other] = [first, second].map((tokens) => (tokens[place] ? JSON.stringify(tokens[place].text) : "the end"));
  const why = state.sampled ? " Sampled texts may differ: what methods share is the distribution." : "";
  return `Token ${place + 1} is ${one} with plain decoding, ${other} with ${nameOf(chosen)}.${why}`;
}

// Both texts side by side, every step when it came after the request.
function replay() {
  cancelAnimationFrame(state.frame);
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const [factor, start] = [Number($("slower").value), performance.now()];
  const views = [newView(state.race[0], "left", false), newView(state.race[1], "right", true)];
  const tick = () => {
    const time = still ? Infinity : (performance.now() - start) / factor;
    for (const view of views) replayed(view, time);
    showFigures(views[1].run, views[1].drawn);
    if (views.some((view) => view.drawn < view.run.steps.length)) state.frame = requestAnimationFrame(tick);
  };
  tick();
}

function replayed(view, time) {
  const { steps } = view.run;
  const came = steps.findIndex((step) => step.at - view.run.sent > time);
  draw(view, came < 0 ? steps.length : came);
  const now = Math.min(time, steps.at(-1).at - view.run.sent);
  view.title.textContent = `${nameOf(view.run)}: ${number(now / 1000, 2)} s`;
}

// ---------------------------------------------------------------------------------------------------------- code

function asCurl() {
  const key = $("key").value ? ` \\\n  -H "Authorization: Bearer $SKIPSTONE_API_KEY"` : "";
  const asked = streamed(settings(), wanted());
  const body = JSON.stringify(asked).replaceAll("'", `'\\''`);
  const url = new URL(routeOf(asked), document.baseURI);
  return `curl -N ${url} -H "Content-Type: application/json"${key} \\\n  -d '${body}'`;
}

function asPython() {
  const { speculative, ...known } = settings();
  const given = Object.entries({ model: state.model, ...known });
  const options = given.map(([name, value]) => `    ${name}=${JSON.stringify(value)},`);
  const extra = `{${speculative ? `"speculative": ${JSON.stringify(speculative)}, ` : ""}"return_metrics": True}`;
  const [before, key] = $("key").value ? ["import os\n\n", 'os.environ["SKIPSTONE_API_KEY"]'] : ["", '"none"'];
  return `${before}from openai import OpenAI

client = OpenAI(base_url="${new URL("v1", document.baseURI)}", api_key=${key})
answer = client.${isChat() ? "chat." : ""}completions.create(
${options.join("\n")}
    extra_body=${extra},
)
print(answer.choices[0].${isChat() ? "message.content" : "text"})
print(answer.metrics["speculative_decoding"])
`;
}

// Copies some code, and shows it too: browsers allow copying on secure pages only.
async function copy(text) {
  $("code").hidden = false;
  $("code").value = text;
  try {
    await navigator.clipboard.writeText(text);
    say("good", "Copied.");
  } catch {
    $("code").select();
    say("", "Copy the code that is selected.");
  }
}

// --------------------------------------------------------------------------------------------------------- begin

function theme(wanted) {
  document.documentElement.dataset.theme = wanted;
  $("theme").textContent = wanted === "dark" ? "Light" : "Dark";
}

function listen() {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (state.ready) busy(send);
  });
  $("ask").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  });
  $("race").addEventListener("click", () => busy(race));
  $("stop").addEventListener("click", () => state.busy?.abort());
  $("again").addEventListener("click", replay);
  $("slower").addEventListener("change", replay);
  $("key").addEventListener("change", () => models().catch(() => {}));
  $("curl").addEventListener("click", () => copy(asCurl()));
  $("python").addEventListener("click", () => copy(asPython()));
  $("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  $("details").addEventListener("change", () => refused($("details").checked && $("refused").checked));
  $("refused").addEventListener("change", () => refused($("refused").checked));
  listenToView();
  listenToBench();
}

// Whether refused drafts are shown, which have to be asked for.
function refused(shown) {
  $("refused").checked = shown;
  if (shown) $("details").checked = true;
  showRefused(shown);
}

theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
listen();
watch();
