// Latency against peak: fronts, what could not run, the memory limit, and another sweep to compare with.
import { axis, draw, empty, figures, legend, tooltip } from "./charts.js";
import { byteAxis, bytesText, secondAxis, secondsText, words } from "./units.js";

const CROSS = "path://M1 3 3 1 6 4 9 1 11 3 8 6 11 9 9 11 6 8 3 11 1 9 4 6z";
const configText = (config) => Object.entries(config).map(([name, value]) => `${words(name)} ${value}`).join(", ");
const timed = (trial, state) => trial.state === state && trial.latency_s !== null && trial.peak_bytes !== null;
const standing = (trial) => trial.bound_bytes ?? trial.peak_bytes;

export function front(points) {
  const best = [];
  for (const point of [...points].sort((a, b) => a.peak_bytes - b.peak_bytes || a.latency_s - b.latency_s)) {
    if (!best.length || point.latency_s < best[best.length - 1].latency_s) best.push(point);
  }
  return best;
}

const tip = ({ data: { trial, sweep } = {} }) => {
  if (!trial) return "";
  const knobs = Object.entries(trial.config).map(([name, value]) => `${words(name)}: ${value}`);
  return [
    `${sweep ? `${sweep}\n` : ""}Trial ${trial.number} · ${trial.state}`, ...knobs, `latency ${secondsText(trial.latency_s)}`,
    `peak ${bytesText(trial.peak_bytes)}`, `bound ${bytesText(trial.bound_bytes)}`, ...(trial.reason ? [String(trial.reason).slice(0, 90)] : []),
  ].join("\n");
};

// `other` is null, or the name and the trials of a sweep to compare with.
export function drawPareto(id, trials, limit, other) {
  const panel = document.getElementById("pareto");
  const target = panel.querySelector(".chart");
  const done = trials.filter((trial) => timed(trial, "succeeded"));
  const stopped = trials.filter((trial) => timed(trial, "pruned"));
  const over = trials.filter((trial) => trial.state === "infeasible" && standing(trial) !== null);
  const beside = other ? other.trials.filter((trial) => timed(trial, "succeeded")) : [];
  const rows = [...done, ...stopped, ...over].map((trial) => ({ ...trial, config: configText(trial.config), sweep: "this" }));
  rows.push(...beside.map((trial) => ({ ...trial, config: configText(trial.config), sweep: other.name })));
  figures(panel, `${id}-pareto`, [
    ["number", "Trial"], ["state", "State"], ["config", "Configuration"],
    ["latency_s", "Latency", secondsText], ["peak_bytes", "Measured peak", bytesText],
    ["bound_bytes", "Bound", bytesText], ["reason", "Reason"], ...(other ? [["sweep", "Sweep"]] : []),
  ], rows);
  if (!rows.length) { empty(target, "No finished trial matches the filters yet."); return; }
  const timedAll = [...done, ...stopped, ...beside];
  const most = Math.max(...timedAll.map((trial) => trial.peak_bytes), ...over.map(standing));
  // A limit far beyond the points is named in the cards; near them it is drawn.
  const near = limit && limit < 3 * most;
  const bytes = byteAxis(Math.max(most, near ? limit : 0));
  const whole = [...done, ...beside].map((trial) => trial.latency_s);
  // Pruned points may be slow without end: those above the measured ones stand at their edge.
  const edge = 1.06 * Math.max(1e-6, ...(whole.length ? whole : timedAll.map((trial) => trial.latency_s)));
  const seconds = secondAxis(edge);
  const best = front(done);
  const onFront = new Set(best.map((trial) => trial.id));
  const point = (at, trial = at) => ({ value: [at.peak_bytes / bytes.size, at.latency_s / seconds.size], trial });
  const line = (points) => points.map((trial) => [trial.peak_bytes / bytes.size, trial.latency_s / seconds.size]);
  draw(target, (colour) => ({
    legend: legend(colour), grid: { left: 58, right: 40, top: 58, bottom: 48 },
    tooltip: tooltip(colour, { formatter: tip }),
    xAxis: axis(`peak per rank (${bytes.unit})`, colour, { type: "value", scale: true, ...(near ? { max: ({ max }) => 1.01 * Math.max(max, limit / bytes.size), axisLabel: { color: colour.muted, fontSize: 11, hideOverlap: true, showMaxLabel: false } } : {}) }),
    yAxis: axis(`latency (${seconds.unit})`, colour, { type: "value", nameGap: 40, min: 0 }),
    series: [
      { name: "on the front", type: "scatter", symbolSize: 11, data: done.filter((trial) => onFront.has(trial.id)).map((trial) => point(trial)), itemStyle: { color: colour.series[0], borderColor: colour.panel, borderWidth: 1 }, z: 4,
        markLine: near ? { silent: true, symbol: "none", lineStyle: { color: colour.bad, type: "dashed", width: 1.5 }, label: { formatter: `limit ${bytesText(limit)}`, color: colour.bad, position: "end", rotate: 0 }, data: [{ xAxis: limit / bytes.size }] } : undefined },
      { name: "measured", type: "scatter", symbolSize: 8, data: done.filter((trial) => !onFront.has(trial.id)).map((trial) => point(trial)), itemStyle: { color: colour.series[8], opacity: 0.75 } },
      ...(stopped.length ? [{ name: "pruned (first repeat)", type: "scatter", symbol: "emptyCircle", symbolSize: 8, data: stopped.map((trial) => point({ ...trial, latency_s: Math.min(trial.latency_s, edge) }, trial)), itemStyle: { color: colour.warn } }] : []),
      { name: "infeasible (at its bound)", type: "scatter", symbol: CROSS, symbolSize: 10, data: over.map((trial) => ({ value: [standing(trial) / bytes.size, edge / seconds.size], trial })), itemStyle: { color: colour.bad } },
      { name: "Pareto front", type: "line", step: "end", showSymbol: false, silent: true, data: line(best), lineStyle: { color: colour.series[0], width: 1.5, opacity: 0.6 }, itemStyle: { color: colour.series[0] } },
      ...(other ? [
        { name: `${other.name}`, type: "scatter", symbol: "diamond", symbolSize: 8, data: beside.map((trial) => ({ ...point(trial), sweep: other.name })), itemStyle: { color: colour.series[3], opacity: 0.75 } },
        { name: `front of ${other.name}`, type: "line", step: "end", showSymbol: false, silent: true, data: line(front(beside)), lineStyle: { color: colour.series[3], width: 1.5, type: "dashed" }, itemStyle: { color: colour.series[3] } },
      ] : []),
    ],
  }));
  target.setAttribute("aria-label", `Latency against peak: ${done.length} measured trials, ${best.length} on the front, ${stopped.length} pruned, ${over.length} infeasible${other ? `, beside ${beside.length} of ${other.name}` : ""}`);
}
