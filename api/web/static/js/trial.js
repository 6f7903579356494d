// One trial: the bound's terms stacked against what was measured, and every sample.
import { call, showProblem } from "./api.js";
import { axis, draw, empty, figures, legend, tooltip } from "./charts.js";
import { byteAxis, bytesText, secondAxis, secondsText, words } from "./units.js";

const id = document.getElementById("trial").dataset.id;

function drawTerms(trial) {
  const panel = document.getElementById("terms");
  const target = panel.querySelector(".chart");
  const terms = Object.entries(trial.bound_terms || {}).filter(([, bytes]) => bytes > 0);
  const reserved = Math.max(0, ...trial.samples.map((sample) => sample.reserved_bytes || 0));
  const rows = [
    ...terms.map(([name, bytes]) => ({ what: `bound: ${words(name)}`, bytes })),
    { what: "bound, sum", bytes: trial.bound_bytes }, { what: "measured peak", bytes: trial.peak_bytes },
    ...(reserved ? [{ what: "reserved", bytes: reserved }] : []),
  ].filter((row) => row.bytes !== null);
  figures(panel, `${id}-terms`, [["what", "What"], ["bytes", "Bytes", bytesText]], rows);
  if (!terms.length && trial.peak_bytes === null) { empty(target, "This trial has neither a bound nor a measured peak."); return; }
  const limit = trial.memory_limit_bytes;
  const { unit, size } = byteAxis(Math.max(trial.bound_bytes || 0, trial.peak_bytes || 0, reserved, limit || 0));
  // A limit far beyond the bars is named in the cards; near them it is drawn.
  const near = limit && limit >= (trial.bound_bytes || 0) && limit < 3 * (trial.bound_bytes || limit);
  const bars = ["measured peak", ...(reserved ? ["reserved"] : []), "Eq. 6 bound"];
  draw(target, (colour) => ({
    legend: legend(colour, { data: terms.map(([name]) => words(name)) }),
    grid: { left: 110, right: 44, top: 58, bottom: 46 },
    tooltip: tooltip(colour, { formatter: ({ seriesName, data, name }) => (data?.bytes ? `${seriesName === "measured" ? name : seriesName}\n${bytesText(data.bytes)}` : "") }),
    xAxis: axis(`bytes per rank (${unit})`, colour, { type: "value", min: 0, ...(near ? { max: (limit * 1.04) / size } : {}) }),
    yAxis: axis("", colour, { type: "category", data: bars, splitLine: { show: false } }),
    series: [
      ...terms.map(([name, bytes], index) => ({
        name: words(name), type: "bar", stack: "all", barMaxWidth: 34, itemStyle: { color: colour.series[index % 12] },
        data: bars.map((bar) => (bar === "Eq. 6 bound" ? { value: bytes / size, bytes } : 0)),
      })),
      {
        name: "measured", type: "bar", stack: "all", barMaxWidth: 34, itemStyle: { color: colour.series[8] },
        data: bars.map((bar) => {
          const bytes = bar === "measured peak" ? trial.peak_bytes : bar === "reserved" ? reserved : 0;
          return bytes ? { value: bytes / size, bytes } : 0;
        }),
        markLine: limit ? { silent: true, symbol: "none", lineStyle: { color: colour.bad, type: "dashed", width: 1.5 }, label: { formatter: `limit ${bytesText(limit)}`, color: colour.bad, position: "end", rotate: 0 }, data: [{ xAxis: limit / size }] } : undefined,
      },
    ],
  }));
}

function drawSamples(trial) {
  const panel = document.getElementById("samples");
  const target = panel.querySelector(".chart");
  figures(panel, `${id}-samples`, [
    ["pass", "Pass"], ["repeat", "Repeat"], ["rank", "Rank"], ["seconds", "Seconds", secondsText],
    ["allocated_bytes", "Allocated", bytesText], ["reserved_bytes", "Reserved", bytesText], ["peak_source", "Peak from"],
  ], trial.samples);
  if (!trial.samples.length) { empty(target, "No samples: this trial was not measured."); return; }
  const { unit, size } = secondAxis(Math.max(...trial.samples.map((sample) => sample.seconds)));
  const groups = [...new Set(trial.samples.map((sample) => sample.pass))];
  const repeats = [...new Set(trial.samples.map((sample) => sample.repeat))].sort((a, b) => a - b).map(String);
  draw(target, (colour) => ({
    legend: legend(colour), grid: { left: 58, right: 20, top: 44, bottom: 46 },
    tooltip: tooltip(colour, { formatter: ({ data, seriesName }) => `${seriesName}\nrank ${data.sample.rank}, repeat ${data.sample.repeat}\n${secondsText(data.sample.seconds)}` }),
    xAxis: axis("repeat", colour, { type: "category", data: repeats, splitLine: { show: false } }),
    yAxis: axis(`seconds of a rank (${unit})`, colour, { type: "value", min: 0, nameGap: 40 }),
    series: groups.map((pass, index) => ({
      name: words(pass), type: "scatter", symbolSize: 8, itemStyle: { color: colour.series[index], opacity: 0.65 },
      data: trial.samples.filter((sample) => sample.pass === pass).map((sample) => ({ value: [String(sample.repeat), sample.seconds / size], sample })),
    })),
  }));
}

// Latencies can have two modes; they are never averaged, and the slow one is named where it was seen.
function tellModes(trial) {
  const result = trial.result || {};
  if (!result.slow_s || !result.slow_share) return;
  const note = document.createElement("p");
  note.className = "panel-note";
  note.textContent = `Two modes: the latency is the fast one's; ${(100 * result.slow_share).toFixed(0)} % of the repeats stand in a slow mode at ${secondsText(result.slow_s)}.`;
  document.querySelector("#samples .panel-head").after(note);
}

try {
  const trial = await call(`/v1/trials/${id}`);
  drawTerms(trial);
  drawSamples(trial);
  tellModes(trial);
} catch (error) {
  showProblem(document.getElementById("problem"), error);
}
