// Bytes, seconds and counts as people read them.
const BYTE_STEPS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

export function bytesText(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, size] of BYTE_STEPS) if (Math.abs(value) >= size) return `${(value / size).toFixed(2)} ${unit}`;
  return `${Math.round(value)} B`;
}

export function secondsText(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    const scaled = value / size;
    if (Math.abs(scaled) >= 1) return `${scaled.toFixed(scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2)} ${unit}`;
  }
  return `${value.toExponential(2)} s`;
}

// The unit that suits a whole axis, so that its ticks are short numbers.
export function byteAxis(largest) {
  for (const [unit, size] of BYTE_STEPS) if (largest >= size) return { unit, size };
  return { unit: "B", size: 1 };
}

export function secondAxis(largest) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3]]) if (largest >= size) return { unit, size };
  return { unit: "µs", size: 1e-6 };
}

export const words = (name) => String(name).replaceAll("_", " ");
