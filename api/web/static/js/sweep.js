// One sweep, live: every sample against each knob, latency against peak, trials; one set of filters for all.
import { all, call, showProblem } from "./api.js";
import { axis, draw, empty, figures, legend, tooltip } from "./charts.js";
import { byteAxis, bytesText, secondAxis, secondsText, words } from "./units.js";

const root = document.getElementById("sweep");
const address = `/v1/sweeps/${root.dataset.id}`;
const form = document.getElementById("filters");
const data = { sweep: null, trials: [], samples: [] };

function filters() {
  const chosen = new FormData(form);
  const knobs = {};
  for (const [name, value] of chosen) if (name.startsWith("knob.") && value !== "") knobs[name.slice(5)] = value;
  return { states: new Set(chosen.getAll("state")), knobs, pass: chosen.get("pass") || "" };
}

function visible(trial, { states, knobs }) {
  if (states.size && !states.has(trial.state)) return false;
  return Object.entries(knobs).every(([name, value]) => String(trial.config[name]) === value);
}

const configText = (config) => Object.entries(config).map(([name, value]) => `${words(name)} ${value}`).join(", ");

function front(points) {
  const best = [];
  for (const point of [...points].sort((a, b) => a.peak_bytes - b.peak_bytes || a.latency_s - b.latency_s)) {
    if (!best.length || point.latency_s < best[best.length - 1].latency_s) best.push(point);
  }
  return best;
}

function drawPareto(trials) {
  const panel = document.getElementById("pareto");
  const target = panel.querySelector(".chart");
  const done = trials.filter((trial) => trial.latency_s !== null && trial.peak_bytes !== null && trial.state === "succeeded");
  const over = trials.filter((trial) => trial.state === "infeasible" && (trial.bound_bytes ?? trial.peak_bytes) !== null);
  figures(panel, `${root.dataset.id}-pareto`, [
    ["number", "Trial"], ["state", "State"], ["config", "Configuration"],
    ["latency_s", "Latency", secondsText], ["peak_bytes", "Measured peak", bytesText],
    ["bound_bytes", "Bound", bytesText], ["reason", "Reason"],
  ], [...done, ...over].map((trial) => ({ ...trial, config: configText(trial.config) })));
  if (!done.length && !over.length) { empty(target, "No finished trial matches the filters yet."); return; }
  const limit = data.sweep.memory_limit_bytes;
  const peaks = [...done.map((trial) => trial.peak_bytes), ...over.map((trial) => trial.bound_bytes ?? trial.peak_bytes), limit || 0];
  const bytes = byteAxis(Math.max(...peaks));
  const seconds = secondAxis(Math.max(1e-6, ...done.map((trial) => trial.latency_s)));
  const best = front(done);
  const onFront = new Set(best.map((trial) => trial.id));
  const point = (trial) => ({ value: [trial.peak_bytes / bytes.size, trial.latency_s / seconds.size], trial });
  const ceiling = done.length ? Math.max(...done.map((trial) => trial.latency_s)) / seconds.size : 1;
  draw(target, (colour) => ({
    aria: { enabled: true }, legend: legend(colour), grid: { left: 58, right: 40, top: 58, bottom: 48 },
    tooltip: tooltip(colour, {
      formatter: ({ data: { trial } = {} }) => trial
        ? `Trial ${trial.number} · ${trial.state}\n${Object.entries(trial.config).map(([name, value]) => `${words(name)}: ${value}`).join("\n")}\nlatency ${secondsText(trial.latency_s)}\npeak ${bytesText(trial.peak_bytes)}\nbound ${bytesText(trial.bound_bytes)}${trial.reason ? `\n${String(trial.reason).slice(0, 90)}` : ""}` : "",
    }),
    xAxis: axis(`peak per rank (${bytes.unit})`, colour, { type: "value", scale: true }),
    yAxis: axis(`latency (${seconds.unit})`, colour, { type: "value", nameGap: 40, min: 0 }),
    series: [
      { name: "on the front", type: "scatter", symbolSize: 11, data: done.filter((trial) => onFront.has(trial.id)).map(point), itemStyle: { color: colour.series[0], borderColor: colour.panel, borderWidth: 1 }, z: 4,
        markLine: limit ? { silent: true, symbol: "none", lineStyle: { color: colour.bad, type: "dashed", width: 1.5 }, label: { formatter: `limit ${bytesText(limit)}`, color: colour.bad, position: "end", rotate: 0 }, data: [{ xAxis: limit / bytes.size }] } : undefined },
      { name: "measured", type: "scatter", symbolSize: 8, data: done.filter((trial) => !onFront.has(trial.id)).map(point), itemStyle: { color: colour.series[8], opacity: 0.75 } },
      { name: "infeasible (at its bound)", type: "scatter", symbol: "path://M1 3 3 1 6 4 9 1 11 3 8 6 11 9 9 11 6 8 3 11 1 9 4 6z", symbolSize: 10, data: over.map((trial) => ({ value: [(trial.bound_bytes ?? trial.peak_bytes) / bytes.size, ceiling * 1.06], trial })), itemStyle: { color: colour.bad } },
      { name: "Pareto front", type: "line", step: "end", showSymbol: false, silent: true, data: best.map((trial) => [trial.peak_bytes / bytes.size, trial.latency_s / seconds.size]), lineStyle: { color: colour.series[0], width: 1.5, opacity: 0.6 }, itemStyle: { color: colour.series[0] } },
    ],
  }));
  target.setAttribute("aria-label", `Latency against peak: ${done.length} measured trials, ${best.length} on the front, ${over.length} infeasible`);
}

function knobNames() {
  const values = new Map();
  for (const trial of data.trials) for (const [name, value] of Object.entries(trial.config)) {
    if (!values.has(name)) values.set(name, new Map());
    values.get(name).set(String(value), value);
  }
  return [...values].filter(([, seen]) => seen.size > 1).map(([name, seen]) => [name, [...seen.values()].sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b))))]);
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

function drawKnobs(trials, pass) {
  const shown = new Map(trials.map((trial) => [trial.id, trial]));
  const passes = [...new Set(data.samples.map((sample) => sample.pass))];
  const wanted = pass || passes[0];
  const samples = data.samples.filter((sample) => sample.pass === wanted && shown.has(sample.trial_id));
  const knobs = knobNames();
  const holder = document.getElementById("knobs");
  for (const panel of [...holder.querySelectorAll("[data-knob]")]) if (!knobs.some(([name]) => name === panel.dataset.knob)) panel.remove();
  for (const [name, values] of knobs) {
    const panel = knobPanel(name);
    const rows = samples.map((sample) => ({ ...sample, number: shown.get(sample.trial_id).number, knob: shown.get(sample.trial_id).config[name] }));
    figures(panel, `${root.dataset.id}-${name}`, [["number", "Trial"], ["knob", words(name)], ["pass", "Pass"], ["rank", "Rank"], ["repeat", "Repeat"], ["seconds", "Latency", secondsText]], rows);
    const target = panel.querySelector(".chart");
    if (!rows.length) { empty(target, "No sample matches the filters yet."); continue; }
    const seconds = secondAxis(Math.max(...rows.map((row) => row.seconds)));
    const labels = values.map(String);
    const medians = labels.map((label) => median(rows.filter((row) => String(row.knob) === label).map((row) => row.seconds / seconds.size)));
    draw(target, (colour) => ({
      aria: { enabled: true }, legend: legend(colour), grid: { left: 58, right: 18, top: 40, bottom: 46 },
      tooltip: tooltip(colour, { formatter: ({ data: point, seriesName }) => point?.row ? `Trial ${point.row.number} · rank ${point.row.rank} · repeat ${point.row.repeat}\n${words(name)}: ${point.row.knob}\n${secondsText(point.row.seconds)}` : `${seriesName}` }),
      xAxis: axis(words(name), colour, { type: "category", data: labels, splitLine: { show: false } }),
      yAxis: axis(`${words(wanted)} (${seconds.unit})`, colour, { type: "value", nameGap: 40, min: 0 }),
      series: [
        { name: "every sample", type: "scatter", symbolSize: 7, data: rows.map((row) => ({ value: [String(row.knob), row.seconds / seconds.size], row })), itemStyle: { color: colour.series[0], opacity: 0.45 } },
        { name: "median", type: "line", connectNulls: true, symbol: "diamond", symbolSize: 8, data: medians, lineStyle: { color: colour.series[1], width: 1.5 }, itemStyle: { color: colour.series[1] } },
      ],
    }));
  }
  const none = document.getElementById("knobs-empty");
  none.hidden = knobs.length > 0;
}

function render() {
  const chosen = filters();
  const trials = data.trials.filter((trial) => visible(trial, chosen));
  drawPareto(trials);
  drawKnobs(trials, chosen.pass);
  document.getElementById("samples-csv").href = `${address}/samples.csv`;
}

async function load() {
  try {
    [data.sweep, data.trials, data.samples] = await Promise.all([call(address), all(`${address}/trials?limit=500`), all(`${address}/samples?limit=5000`)]);
    render();
  } catch (error) {
    showProblem(document.getElementById("problem"), error);
  }
}

function follow() {
  const live = document.getElementById("live");
  if (root.dataset.final === "true") { live.hidden = true; return; }
  const source = new EventSource(`${address}/events`);
  let timer = null;
  const soon = () => {
    // Events come in bursts: one reload serves them all.
    if (timer !== null) return;
    timer = setTimeout(async () => {
      timer = null;
      await load();
      window.htmx.trigger("#trials", "flatpeak:refresh");
      window.htmx.trigger("#summary", "flatpeak:refresh");
    }, 700);
  };
  source.onopen = () => { live.dataset.state = "open"; live.textContent = "Live"; };
  source.onerror = () => { live.dataset.state = "lost"; live.textContent = "Reconnecting"; };
  source.onmessage = soon;
  source.addEventListener("end", () => { source.close(); live.hidden = true; soon(); });
  window.addEventListener("pagehide", () => source.close());
}

form.addEventListener("change", render);
form.addEventListener("reset", () => setTimeout(() => form.dispatchEvent(new Event("change", { bubbles: true }))));
document.addEventListener("click", async (event) => {
  const button = event.target.closest("#cancel");
  if (!button) return;
  button.disabled = true;
  try {
    await call(`${address}/cancel`, { method: "POST" });
    window.htmx.trigger("#summary", "flatpeak:refresh");
  } catch (error) {
    button.disabled = false;
    showProblem(document.getElementById("problem"), error);
  }
});
await load();
follow();
