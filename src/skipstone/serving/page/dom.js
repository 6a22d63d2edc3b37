// What every part of the page uses. Text of the model, and of files, becomes part of the page through textContent only.

export const $ = (id) => document.getElementById(id);

export const number = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

export function element(tag, kind, text = "") {
  const made = document.createElement(tag);
  made.className = kind;
  made.textContent = text;
  return made;
}
