// What the knobs do: every sample against each of them, how much each explains, and all of them at once.
import { axis, draw, empty, figures, legend, tooltip } from "./charts.js";
import { bytesText, secondAxis, secondsText, words } from "./units.js";

const GROUPS = 8;
const byValue = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
const mean = (numbers) => numbers.reduce((total, value) => total + value, 0) / numbers.length;
const squares = (numbers, around) => numbers.reduce((total, value) => total + (value - around) ** 2, 0);

// Knobs that take more than one value in the sweep: [name, values in order].
export function knobsOf(trials) {
  const values = new Map();
  for (const trial of trials) for (const [name, value] of Object.entries(trial.config)) {
    if (!values.has(name)) values.set(name, new Map());
    values.get(name).set(String(value), value);
  }
  return [...values].filter(([, seen]) => seen.size > 1).map(([name, seen]) => [name, [...seen.values()].sort(byValue)]);
}

const median = (numbers) => {
  const sorted = [...numbers].sort((a, b) => a - b);
  return sorted.length ? (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2 : null;
};

function knobPanel(name) {
  const holder = document.getElementById("knobs");
  let panel = holder.querySelector(`[data-knob="${CSS.escape(name)}"]`);
  if (!panel) {
    panel = document.getElementById("knob-panel").content.firstElementChild.cloneNode(true);
    panel.dataset.knob = name;
    panel.querySelector("h2").textContent = `Latency against ${words(name)}`;
    panel.querySelector(".chart").setAttribute("aria-label", `Latency of every sample against ${words(name)}`);
    holder.append(panel);
  }
  return panel;
}

export function drawKnobs(id, knobs, trials, samples, pass) {
  const shown = new Map(trials.map((trial) => [trial.id, trial]));
  const wanted = pass || samples[0]?.pass;
  const kept = samples.filter((sample) => sample.pass === wanted && shown.has(sample.trial_id));
  const holder = document.getElementById("knobs");
  for (const panel of [...holder.querySelectorAll("[data-knob]")]) if (!knobs.some(([name]) => name === panel.dataset.knob)) panel.remove();
  for (const [name, values] of knobs) {
    const panel = knobPanel(name);
    const rows = kept.map((sample) => ({ ...sample, number: shown.get(sample.trial_id).number, knob: shown.get(sample.trial_id).config[name] })).filter((row) => row.knob !== undefined);
    figures(panel, `${id}-${name}`, [["number", "Trial"], ["knob", words(name)], ["pass", "Pass"], ["rank", "Rank"], ["repeat", "Repeat"], ["seconds", "Latency", secondsText]], rows);
    const target = panel.querySelector(".chart");
    if (!rows.length) { empty(target, "No sample matches the filters yet."); continue; }
    const seconds = secondAxis(rows.reduce((most, row) => Math.max(most, row.seconds), 0));
    const groups = new Map(values.map((value) => [String(value), []]));
    for (const row of rows) groups.get(String(row.knob)).push(row.seconds / seconds.size);
    draw(target, (colour) => ({
      legend: legend(colour), grid: { left: 58, right: 18, top: 40, bottom: 46 },
      tooltip: tooltip(colour, { formatter: ({ data: point, seriesName }) => point?.row ? `Trial ${point.row.number} · rank ${point.row.rank} · repeat ${point.row.repeat}\n${words(name)}: ${point.row.knob}\n${secondsText(point.row.seconds)}` : `${seriesName}` }),
      xAxis: axis(words(name), colour, { type: "category", data: [...groups.keys()], splitLine: { show: false } }),
      yAxis: axis(`${words(wanted)} (${seconds.unit})`, colour, { type: "value", nameGap: 40, min: 0 }),
      series: [
        { name: "every sample", type: "scatter", symbolSize: rows.length > 3000 ? 4 : 7, large: rows.length > 8000, data: rows.map((row) => ({ value: [String(row.knob), row.seconds / seconds.size], row })), itemStyle: { color: colour.series[0], opacity: 0.45 } },
        { name: "median", type: "line", connectNulls: true, symbol: "diamond", symbolSize: 8, data: [...groups.values()].map(median), lineStyle: { color: colour.series[1], width: 1.5 }, itemStyle: { color: colour.series[1] } },
      ],
    }));
  }
  document.getElementById("knobs-empty").hidden = knobs.length > 0;
}

// Share of the variance that lies between the values of a knob, less what chance puts there (epsilon squared).
// Many ordered values count as a few stretches of neighbours. Null where too few trials are left to tell.
export function explained(trials, name, values, figure) {
  const group = new Map(values.map((value, index) => [String(value), values.length > GROUPS && typeof value === "number" ? Math.floor((index * GROUPS) / values.length) : index]));
  const groups = new Map();
  for (const trial of trials) {
    if (!(name in trial.config)) continue;
    const key = group.get(String(trial.config[name]));
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(Math.log(figure(trial)));
  }
  const all = [...groups.values()].flat();
  const inside = all.length - groups.size;
  if (groups.size < 2 || inside < 1) return null;
  const total = squares(all, mean(all));
  if (total <= 0) return 0;
  const within = [...groups.values()].reduce((sum, numbers) => sum + squares(numbers, mean(numbers)), 0);
  return Math.max(0, 1 - (within / inside) * ((all.length - 1) / total));
}

export function drawImportance(id, knobs, trials) {
  const panel = document.getElementById("importance");
  const target = panel.querySelector(".chart");
  const done = trials.filter((trial) => trial.state === "succeeded" && trial.latency_s > 0 && trial.peak_bytes > 0);
  const rows = knobs.map(([name, values]) => ({
    knob: words(name), latency: explained(done, name, values, (trial) => trial.latency_s), peak: explained(done, name, values, (trial) => trial.peak_bytes),
  })).sort((a, b) => (a.latency ?? -1) - (b.latency ?? -1));
  const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(0)} %`);
  figures(panel, `${id}-importance`, [["knob", "Knob"], ["latency", "Of latency", percent], ["peak", "Of peak", percent]], [...rows].reverse());
  if (!rows.some((row) => row.latency !== null)) { empty(target, "Too few measured trials match the filters."); return; }
  const bar = (name, key, color) => ({ name, type: "bar", barMaxWidth: 16, itemStyle: { color }, data: rows.map((row) => (row[key] === null ? null : 100 * row[key])) });
  draw(target, (colour) => ({
    legend: legend(colour), grid: { left: 130, right: 24, top: 40, bottom: 46 },
    tooltip: tooltip(colour, { formatter: ({ name, seriesName, value }) => `${name}\n${seriesName}: ${value.toFixed(0)} %` }),
    xAxis: axis("share of the variance (%)", colour, { type: "value", min: 0, max: 100 }),
    yAxis: axis("", colour, { type: "category", data: rows.map((row) => row.knob), splitLine: { show: false }, axisLabel: { color: colour.text, fontSize: 12 } }),
    series: [bar("latency", "latency", colour.series[0]), bar("peak", "peak", colour.series[1])],
  }));
}

// Parallel coordinates: a line a trial through its knobs, its peak (its bound, where it could not run) and its latency.
export function drawLines(id, knobs, trials) {
  const panel = document.getElementById("lines");
  const target = panel.querySelector(".chart");
  const peak = (trial) => (trial.state === "infeasible" ? trial.bound_bytes ?? trial.peak_bytes : trial.peak_bytes);
  const shown = trials.filter((trial) => ["succeeded", "pruned", "infeasible"].includes(trial.state) && peak(trial) !== null);
  figures(panel, `${id}-lines`, [
    ["number", "Trial"], ["state", "State"], ...knobs.map(([name]) => [name, words(name)]), ["peak", "Peak or bound", bytesText], ["latency_s", "Latency", secondsText],
  ], shown.map((trial) => ({ ...trial, ...trial.config, peak: peak(trial) })));
  if (!shown.length || !knobs.length) { empty(target, "No finished trial matches the filters yet."); return; }
  const done = shown.filter((trial) => trial.state !== "infeasible" && trial.latency_s !== null);
  const span = (numbers) => {
    const low = numbers.reduce((least, value) => Math.min(least, value), Infinity);
    const high = numbers.reduce((most, value) => Math.max(most, value), -Infinity);
    return { low, high, at: (value) => (high > low ? (value - low) / (high - low) : 0.5) };
  };
  const peaks = span(shown.map(peak));
  const times = span(done.map((trial) => trial.latency_s));
  const places = knobs.map(([name, values]) => [name, new Map(values.map((value, index) => [String(value), index / (values.length - 1)]))]);
  const names = [...knobs.map(([name]) => words(name)), "peak", "latency"];
  const path = (trial) => {
    const points = places.map(([name, place], index) => [index, place.get(String(trial.config[name])) ?? "-"]);
    points.push([knobs.length, peaks.at(peak(trial))]);
    if (trial.state !== "infeasible") points.push([knobs.length + 1, times.at(trial.latency_s)]);
    return [...points, [knobs.length + 1, "-"]]; // the gap between one trial's line and the next one's
  };
  const timesOf = done.filter((trial) => trial.state === "succeeded").map((trial) => trial.latency_s).sort((a, b) => a - b);
  const quick = timesOf[Math.floor((timesOf.length - 1) / 4)] ?? 0;
  const fast = (trial) => trial.state === "succeeded" && trial.latency_s <= quick;
  const few = (entries) => (entries.length <= 9 ? entries : entries.filter((_, index) => index % Math.ceil((entries.length - 1) / 8) === 0 || index === entries.length - 1));
  const marks = [
    ...places.flatMap(([, place], index) => few([...place]).map(([text, at]) => ({ value: [index, at], text }))),
    ...[0, 0.5, 1].map((at) => ({ value: [knobs.length, at], text: bytesText(peaks.low + at * (peaks.high - peaks.low)) })),
    ...(done.length ? [0, 0.5, 1].map((at) => ({ value: [knobs.length + 1, at], text: secondsText(times.low + at * (times.high - times.low)) })) : []),
  ];
  const series = (name, kept, style, z) => ({ name, type: "line", silent: true, symbol: "none", connectNulls: false, z, data: kept.flatMap(path), lineStyle: style, itemStyle: { color: style.color } });
  draw(target, (colour) => ({
    legend: legend(colour, { data: ["fastest quarter", "other measured", "pruned", "infeasible"] }), grid: { left: 50, right: 90, top: 48, bottom: 40 },
    xAxis: axis("", colour, { type: "category", boundaryGap: false, data: names, splitLine: { show: true, lineStyle: { color: colour.strong } }, axisLine: { show: false }, axisLabel: { color: colour.text, fontSize: 12, interval: 0, margin: 16 } }),
    yAxis: { type: "value", min: 0, max: 1, show: false },
    series: [
      series("fastest quarter", done.filter(fast), { color: colour.series[0], width: 1.6, opacity: 0.75 }, 3),
      series("other measured", done.filter((trial) => trial.state === "succeeded" && !fast(trial)), { color: colour.series[8], width: 1, opacity: 0.4 }, 2),
      series("pruned", done.filter((trial) => trial.state === "pruned"), { color: colour.warn, width: 1, opacity: 0.6, type: "dashed" }, 2),
      series("infeasible", shown.filter((trial) => trial.state === "infeasible"), { color: colour.bad, width: 1.2, opacity: 0.8, type: "dotted" }, 2),
      { name: "values", type: "scatter", silent: true, symbolSize: 4, z: 5, itemStyle: { color: colour.strong }, data: marks, label: { show: true, position: "right", color: colour.text, fontSize: 11, textBorderColor: colour.panel, textBorderWidth: 3, formatter: ({ data }) => data.text } },
    ],
  }));
}
