// Numbers as text, with their units.

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return value === null || value === undefined ? "–" : plain.format(value);
}

export function number(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 10 ** -digits || size >= 1e6) return value.toExponential(1);
  return value.toFixed(digits);
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const sign = value < 0 ? "−" : "";
  const size = Math.abs(value);
  if (size < 0.001) return "0 s";
  if (size < 0.9995) return `${sign}${Math.round(1000 * size)} ms`;
  if (size < 59.95) return `${sign}${size.toFixed(1)} s`;
  const whole = Math.round(size);
  const two = (part) => String(part).padStart(2, "0");
  if (whole < 3600) return `${sign}${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${sign}${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${sign}${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

// A time on an axis: short, and exact to the second.
export function clock(value) {
  const sign = value < 0 ? "−" : "";
  const whole = Math.round(Math.abs(value));
  const two = (part) => String(part).padStart(2, "0");
  if (whole < 3600) return `${sign}${Math.floor(whole / 60)}:${two(whole % 60)}`;
  return `${sign}${Math.floor(whole / 3600)}:${two(Math.floor((whole % 3600) / 60))}:${two(whole % 60)}`;
}

export function bytes(value) {
  if (!value) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  const scaled = value / 1024 ** power;
  return `${scaled.toFixed(power && scaled < 100 ? 1 : 0)} ${units[power]}`;
}

export function ago(epochSeconds) {
  return `${seconds(Math.max(0, Date.now() / 1000 - epochSeconds))} ago`;
}

export function when(epochSeconds) {
  return new Date(1000 * epochSeconds).toLocaleString([], { dateStyle: "short", timeStyle: "medium" });
}

export function saving(value) {
  if (!value) return "–";
  const known = value.low !== null && value.high !== null;
  return known
    ? `${seconds(value.seconds)} (95 %: ${seconds(value.low)} to ${seconds(value.high)})`
    : `${seconds(value.seconds)} (no interval yet)`;
}

// A phase or a duty as people read it.
export function words(name) {
  return name.replaceAll("_", " ");
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}
