// Formats numbers and texts for readers.

const NOTHING = "–";

/** Formats a number with four significant digits, without an exponent if that is short. */
function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NOTHING;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("e+", "e").replace("-", "−").replace("e-", "e−");
  if (Number.isInteger(value)) return groupDigits(value);
  return withMinusSign(Number(value.toPrecision(size >= 1000 ? 5 : 4)));
}

/** Formats a share or reward with three decimals. */
function shortNumber(value) {
  return Math.abs(value) < 100 ? withMinusSign(Number(value.toFixed(3))) : number(value);
}

/** Formats a count with thin spaces between thousands. */
function groupDigits(value) {
  return withMinusSign(Math.round(value)).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
}

function withMinusSign(value) {
  return String(value).replace("-", "−");
}

function percent(share, digits = 1) {
  return share === null || !Number.isFinite(share) ? NOTHING : `${(100 * share).toFixed(digits).replace("-", "−")} %`;
}

/** Formats seconds as "0.42 s", "1 min 20 s", "3 h 05 min" or "2 d 4 h". */
function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NOTHING;
  if (seconds < 60) return `${number(Number(seconds.toPrecision(3)))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Formats a value of the configuration. */
function setting(value) {
  if (value === "") return NOTHING;
  if (value === null || value === undefined) return "null";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Replaces control characters and direction marks in a text with visible codes. */
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g,
    (sign) => `⟨U+${sign.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

function plural(count, one, many = `${one}s`) {
  return `${groupDigits(count)} ${count === 1 ? one : many}`;
}
