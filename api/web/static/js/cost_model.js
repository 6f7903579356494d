// A cost model: parity of predictions and measurements, and the errors on held-out rows.
import { call, showProblem } from "./api.js";
import { axis, draw, empty, figures, legend, tooltip } from "./charts.js";
import { secondsText, words } from "./units.js";

const root = document.getElementById("cost-model");
const address = `/v1/cost-models/${root.dataset.id}`;

function drawParity(points) {
  const panel = document.getElementById("parity");
  const target = panel.querySelector(".chart");
  const rows = points.map((point) => ({ ...point, config: Object.entries(point.config).map(([name, value]) => `${words(name)} ${value}`).join(", ") }));
  figures(panel, `${root.dataset.id}-parity`, [
    ["operator", "Operator"], ["pass", "Pass"], ["measured_s", "Measured", secondsText], ["predicted_s", "Predicted", secondsText],
    ["low_s", "Low", secondsText], ["high_s", "High", secondsText], ["provenance", "Provenance"], ["config", "Configuration"],
  ], rows);
  if (!rows.length) { empty(target, "No samples of this hardware are in the database."); return; }
  const ends = rows.flatMap((row) => [row.measured_s, row.predicted_s]).filter((value) => value > 0);
  const low = Math.min(...ends) * 1e3 / 1.3;
  const high = Math.max(...ends) * 1e3 * 1.3;
  const groups = [...new Set(rows.map((row) => `${row.operator}, ${row.pass}`))];
  const log = { type: "log", min: low, max: high };
  const short = (value) => Number(value.toPrecision(2)).toString();
  draw(target, (colour) => ({
    legend: legend(colour, { data: groups.map(words) }), grid: { left: 62, right: 20, top: 44, bottom: 48 },
    tooltip: tooltip(colour, { formatter: ({ data, seriesName }) => (data?.row ? `${seriesName}\nmeasured ${secondsText(data.row.measured_s)}\npredicted ${secondsText(data.row.predicted_s)} (${secondsText(data.row.low_s)} to ${secondsText(data.row.high_s)})\n${data.row.provenance}` : "") }),
    xAxis: axis("measured (ms)", colour, { ...log, axisLabel: { color: colour.muted, fontSize: 11, formatter: short, hideOverlap: true } }),
    yAxis: axis("predicted (ms)", colour, { ...log, nameGap: 44, axisLabel: { color: colour.muted, fontSize: 11, formatter: short, hideOverlap: true } }),
    series: [
      { name: "right", type: "line", silent: true, symbol: "none", data: [[low, low], [high, high]], lineStyle: { color: colour.strong, width: 1.2, type: "dashed" } },
      ...groups.map((group, index) => ({
        name: words(group), type: "scatter", symbolSize: 8, itemStyle: { color: colour.series[index % 12], opacity: 0.7 },
        data: rows.filter((row) => `${row.operator}, ${row.pass}` === group).map((row) => ({ value: [row.measured_s * 1e3, row.predicted_s * 1e3], row })),
      })),
    ],
  }));
}

// Ranks, how they stand, and whether their peers were there: what a transfer has to cross.
function topology({ ranks, nodes, loopback }) {
  if (loopback) return `1 of ${ranks}, loopback`;
  return `${ranks ?? 1} rank${(ranks ?? 1) === 1 ? "" : "s"}${nodes > 1 ? ` on ${nodes} nodes` : ""}`;
}

function drawResiduals(points) {
  const panel = document.getElementById("residuals");
  const target = panel.querySelector(".chart");
  const rows = points.map((point) => ({ where: topology(point.config), what: words(`${point.operator}, ${point.pass}`), error: Math.log(point.predicted_s / point.measured_s), measured_s: point.measured_s, predicted_s: point.predicted_s }));
  const groups = new Map();
  for (const row of rows) {
    const key = `${row.what}|${row.where}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  const middle = (numbers) => [...numbers].sort((a, b) => a - b)[numbers.length >> 1];
  const percent = (value) => `${value >= 0 ? "+" : "−"}${(100 * Math.abs(Math.exp(value) - 1)).toFixed(1)} %`;
  figures(panel, `${root.dataset.id}-residuals`, [["what", "Operator, pass"], ["where", "Topology"], ["count", "Configurations", String], ["middle", "Median", percent], ["low", "Lowest", percent], ["high", "Highest", percent]],
    [...groups.values()].map((own) => {
      const errors = own.map((row) => row.error);
      return { what: own[0].what, where: own[0].where, count: own.length, middle: middle(errors), low: errors.reduce((a, b) => Math.min(a, b)), high: errors.reduce((a, b) => Math.max(a, b)) };
    }));
  if (!rows.length) { empty(target, "No samples of this hardware are in the database."); return; }
  const names = [...new Set(rows.map((row) => row.what))].sort().reverse();
  const places = [...new Set(rows.map((row) => row.where))].sort();
  const reach = Math.max(0.1, ...rows.map((row) => Math.abs(row.error))) / Math.LN2;
  draw(target, (colour) => ({
    legend: legend(colour, { data: places }), grid: { left: 170, right: 24, top: 44, bottom: 48 },
    tooltip: tooltip(colour, { formatter: ({ data }) => (data?.row ? `${data.row.what} · ${data.row.where}\n${percent(data.row.error)}\nmeasured ${secondsText(data.row.measured_s)}, predicted ${secondsText(data.row.predicted_s)}` : "") }),
    xAxis: axis("predicted over measured", colour, { type: "value", min: -Math.ceil(reach * 10) / 10, max: Math.ceil(reach * 10) / 10, axisLabel: { color: colour.muted, fontSize: 11, hideOverlap: true, formatter: (value) => `${Number((2 ** value).toPrecision(2))}×` } }),
    yAxis: axis("", colour, { type: "category", data: names, axisLabel: { color: colour.text, fontSize: 12 } }),
    series: places.map((where, index) => ({
      name: where, type: "scatter", symbolSize: 8, symbolOffset: [0, `${(index - (places.length - 1) / 2) * 110}%`], itemStyle: { color: colour.series[index % 12], opacity: 0.6 },
      data: rows.filter((row) => row.where === where).map((row) => ({ value: [row.error / Math.LN2, row.what], row })),
      markLine: index === 0 ? { silent: true, symbol: "none", label: { show: false }, lineStyle: { color: colour.strong, type: "dashed", width: 1.2 }, data: [{ xAxis: 0 }] } : undefined,
    })),
  }));
}

function drawErrors(report) {
  const panel = document.getElementById("errors");
  const target = panel.querySelector(".chart");
  const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * (Math.exp(value) - 1)).toFixed(1)} %`);
  const rows = (report?.operators || []).filter((row) => row.median_error !== null);
  figures(panel, `${root.dataset.id}-errors`, [["operator", "Operator"], ["rows", "Rows"], ["held_out", "Held out"], ["median_error", "Error", percent], ["prior_error", "Before", percent], ["promoted", "Promoted"], ["message", "Message"]], report?.operators || []);
  if (!rows.length) { empty(target, "This version has no held-out rows."); return; }
  draw(target, (colour) => ({
    legend: legend(colour), grid: { left: 62, right: 20, top: 44, bottom: 48 },
    tooltip: tooltip(colour, { formatter: ({ seriesName, name, value }) => `${name}\n${seriesName}: ${percent(value)}` }),
    xAxis: axis("", colour, { type: "category", data: rows.map((row) => words(row.operator)), splitLine: { show: false } }),
    yAxis: axis("median |log error|", colour, { type: "value", min: 0, nameGap: 44 }),
    series: [
      { name: "before", type: "bar", barMaxWidth: 34, itemStyle: { color: colour.series[8] }, data: rows.map((row) => row.prior_error) },
      { name: "this version", type: "bar", barMaxWidth: 34, itemStyle: { color: colour.series[0] }, data: rows.map((row) => row.median_error) },
    ],
  }));
}

for (const target of root.querySelectorAll(".chart")) empty(target, "Predicting every measured configuration…");
try {
  const [detail, points] = await Promise.all([call(address), call(`${address}/parity`)]);
  drawParity(points.items);
  drawResiduals(points.items);
  drawErrors(detail.report);
} catch (error) {
  showProblem(document.getElementById("problem"), error);
}
